"""What fp16 costs in the shipped package: K, V and logits over 20 prompts against Hugging Face in fp32.

    python benchmarks/fp16_quality.py BUILD [--prompts 20]

BUILD is a build with `prefill.outputs=logits` and `prefill.logits=all`. Both sides compute with the same weights: the
package in the fp16 mode of the MIL executor, Hugging Face with the weights of decode/, de-quantized, in fp32.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch

from pdconvert import text
from pdconvert.reference import Capture
from pdconvert.runtime.manifest import read_manifest
from pdconvert.runtime.tokenizer import Tokenizer
from pdconvert.runtime.weights import DecodeWeights


def hugging_face(decode: Path) -> torch.nn.Module:
    """The model of a decode folder in Hugging Face's class, weights de-quantized in fp32."""
    from pdconvert.families import llama

    config = json.loads((decode / "config.json").read_text())
    known = {key: value for key, value in config.items() if key not in ("quantization", "rope_traditional")}
    from transformers import LlamaForCausalLM

    with torch.device("meta"):
        model = LlamaForCausalLM(llama.hf_config(known))
    weights = DecodeWeights(decode)
    state = {}
    for name, parameter in model.named_parameters():
        if len(parameter.shape) == 2:
            rows = weights.rows(name.removesuffix(".weight"), range(parameter.shape[0]))
            state[name] = torch.from_numpy(np.ascontiguousarray(rows, np.float32))
        else:
            state[name] = torch.from_numpy(np.asarray(weights.array(name), np.float32))
    model.load_state_dict(state, strict=False, assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    model.tie_weights()
    return model.eval()


@torch.no_grad()
def measure(build: Path, prompts: int = 20) -> dict[str, float]:
    """SQNR in dB of K, V and logits, pooled over all prompts, and the share of equal top-1 choices."""
    from pdconvert.runtime.embedding import HostEmbedding
    from pdconvert.runtime.mask import causal_mask
    from pdconvert.runtime.rope import rope_tables
    from pdconvert.runtime.sessions import open_function

    manifest = read_manifest(build)
    function = next(item for item in manifest.functions.values() if not item.past)
    size = function.tokens
    session = open_function(manifest, function.name, kind="mil", mode="fp16")
    embedding = HostEmbedding(DecodeWeights(manifest.decode), manifest.embedding_scale)
    cos, sin = rope_tables(manifest.rope.inv_freq, manifest.rope.attention_factor, 0, size)
    model = hugging_face(manifest.decode)
    ids = Tokenizer(manifest.decode).encode(text.held_out()[0])
    stride = (len(ids) - size) // prompts
    sums: dict[str, list[torch.Tensor]] = {name: [] for name in ("k", "v", "logits")}
    found: dict[str, list[torch.Tensor]] = {name: [] for name in ("k", "v", "logits")}
    equal = 0
    for start in range(0, stride * prompts, stride):
        window = ids[start : start + size]
        inputs = {
            "hidden": embedding.hidden(window, size),
            "rope_cos": cos,
            "rope_sin": sin,
            "mask": causal_mask(0, 0, size, size),
        }
        got = session.run(inputs)
        got["logits"] = torch.from_numpy(function.logits(got))
        hidden = model.model.embed_tokens(torch.tensor([window]))
        rope = model.model.rotary_emb(hidden, torch.arange(size)[None])
        mask = torch.full((size, size), torch.finfo(torch.float32).min).triu(1)[None, None]
        caches = []
        for layer in model.model.layers:
            caches.append(Capture())
            hidden = layer(hidden, attention_mask=mask, position_embeddings=rope, cache=caches[-1])
        logits = model.lm_head(model.model.norm(hidden))[0].T
        expected = {
            "k": torch.cat([cache.keys[0].transpose(1, 2) for cache in caches]),
            "v": torch.cat([cache.values[0].transpose(1, 2) for cache in caches]),
            "logits": logits,
        }
        for name, value in expected.items():
            result = torch.as_tensor(got[name]).reshape(value.shape)
            sums[name].append(value.double().square().sum())
            found[name].append((value.double() - result.double()).square().sum())
        equal += int((torch.as_tensor(got["logits"])[0, :, 0].argmax(0) == logits.argmax(0)).sum())
    pooled = {
        f"{name}_db": float(10 * torch.log10(torch.stack(sums[name]).sum() / torch.stack(found[name]).sum()))
        for name in sums
    }
    return {**pooled, "top1": equal / (prompts * size), "positions": prompts * size}


def main() -> None:
    """Print the figures of one build as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("build", type=Path)
    parser.add_argument("--prompts", type=int, default=20)
    arguments = parser.parse_args()
    print(json.dumps(measure(arguments.build, arguments.prompts), indent=1))


if __name__ == "__main__":
    main()
