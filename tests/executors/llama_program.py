"""A llama written as an ML program by hand, with the weights of a Hugging Face model."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from pdconvert.quiet import quiet_coremltools


def random_llama(seed: int = 0, **config: Any) -> LlamaForCausalLM:
    """Return an eager fp32 llama with random weights that are multiples of an fp16 scale (8 bits)."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(attn_implementation="eager", rms_norm_eps=1e-12, **config)).eval()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, torch.nn.Linear):
                codes, scale = quantize(module.weight)
                module.weight.copy_(torch.from_numpy(codes.astype(np.float32) * scale.astype(np.float32)))
    return model


def quantize(weight: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Return int8 codes and fp16 scales, one a row."""
    values = weight.detach().numpy()
    scale = (np.abs(values).max(1, keepdims=True) / 127).astype(np.float16)
    return np.clip(np.round(values / scale.astype(np.float32)), -127, 127).astype(np.int8), scale


def write_llama(path: Path, model: LlamaForCausalLM, tokens: int) -> None:
    """Write the model's body as a package: `hidden`, rope and mask in; `out` and each layer's K and V out."""
    ct = quiet_coremltools()
    from coremltools.converters.mil import Builder as mb
    from coremltools.converters.mil.mil import types

    config = model.config
    heads, kv, width = config.num_attention_heads, config.num_key_value_heads, config.hidden_size
    dim = width // heads

    def conv(x: Any, linear: torch.nn.Linear) -> Any:
        codes, scale = quantize(linear.weight)
        weight = mb.constexpr_blockwise_shift_scale(
            data=codes[:, :, None, None], scale=scale[:, :, None, None]
        )
        return mb.conv(x=x, weight=weight)

    def norm(x: Any, module: Any) -> Any:
        largest = mb.maximum(x=mb.reduce_max(x=mb.abs(x=x), axes=[1], keep_dims=True), y=np.float16(1e-3))
        scaled = mb.real_div(x=x, y=largest)
        mean = mb.reduce_mean(x=mb.mul(x=scaled, y=scaled), axes=[1], keep_dims=True)
        gain = module.weight.detach().numpy().astype(np.float16).reshape(1, -1, 1, 1)
        return mb.mul(x=mb.mul(x=scaled, y=mb.rsqrt(x=mean, epsilon=np.float16(0))), y=gain)

    def rotate(x: Any, count: int, cos: Any, sin: Any) -> Any:
        x = mb.reshape(x=x, shape=(1, count, dim, tokens))
        half = dim // 2
        first = mb.slice_by_index(x=x, begin=[0, 0, 0, 0], end=[1, count, half, tokens])
        second = mb.slice_by_index(x=x, begin=[0, 0, half, 0], end=[1, count, dim, tokens])
        turned = mb.concat(values=[mb.mul(x=second, y=np.float16(-1)), first], axis=2)
        return mb.add(x=mb.mul(x=x, y=cos), y=mb.mul(x=turned, y=sin))

    def attention(x: Any, layer: Any, cos: Any, sin: Any, mask: Any) -> tuple[Any, Any, Any]:
        q = rotate(conv(x, layer.q_proj), heads, cos, sin)
        k = rotate(conv(x, layer.k_proj), kv, cos, sin)
        v = mb.reshape(x=conv(x, layer.v_proj), shape=(1, kv, dim, tokens))
        q = mb.mul(x=q, y=np.float16(dim**-0.5))
        grouped = mb.reshape(x=q, shape=(kv, heads // kv, dim, tokens))
        keys = mb.reshape(x=k, shape=(kv, 1, dim, tokens))
        values = mb.reshape(x=v, shape=(kv, 1, dim, tokens))
        scores = mb.add(x=mb.matmul(x=keys, y=grouped, transpose_x=True), y=mask)
        mixed = mb.matmul(x=values, y=mb.softmax(x=scores, axis=2))
        return conv(mb.reshape(x=mixed, shape=(1, width, 1, tokens)), layer.o_proj), k, v

    half = types.fp16
    specs = [
        mb.TensorSpec((1, width, 1, tokens), half),
        mb.TensorSpec((1, 1, dim, tokens), half),
        mb.TensorSpec((1, 1, dim, tokens), half),
        mb.TensorSpec((1, 1, tokens, tokens), half),
    ]

    @mb.program(input_specs=specs, opset_version=ct.target.iOS18)
    def program(hidden: Any, rope_cos: Any, rope_sin: Any, mask: Any) -> Any:
        keys, values, x = [], [], hidden
        for layer in model.model.layers:
            mixed, k, v = attention(norm(x, layer.input_layernorm), layer.self_attn, rope_cos, rope_sin, mask)
            keys.append(k)
            values.append(v)
            x = mb.add(x=x, y=mixed)
            y = norm(x, layer.post_attention_layernorm)
            gate = mb.silu(x=conv(y, layer.mlp.gate_proj))
            x = mb.add(x=x, y=conv(mb.mul(x=gate, y=conv(y, layer.mlp.up_proj)), layer.mlp.down_proj))
        out = mb.identity(x=norm(x, model.model.norm), name="out")
        return out, mb.concat(values=keys, axis=1, name="k"), mb.concat(values=values, axis=1, name="v")

    made = ct.convert(
        program,
        convert_to="mlprogram",
        minimum_deployment_target=ct.target.iOS18,
        pass_pipeline=ct.PassPipeline.EMPTY,
        skip_model_load=True,
    )
    made.save(str(path))


def llama_inputs(model: LlamaForCausalLM, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the package's inputs for token ids (S,)."""
    length = ids.numel()
    with torch.no_grad():
        hidden = model.model.embed_tokens(ids).t().reshape(1, -1, 1, length)
        cos, sin = model.model.rotary_emb(hidden, torch.arange(length)[None])
    mask = torch.where(torch.arange(length)[:, None] > torch.arange(length), -4e4, 0.0)
    return {
        "hidden": hidden,
        "rope_cos": cos.transpose(1, 2).unsqueeze(1),
        "rope_sin": sin.transpose(1, 2).unsqueeze(1),
        "mask": mask.reshape(1, 1, length, length),
    }
