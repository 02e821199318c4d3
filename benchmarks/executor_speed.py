"""The MIL executor against Hugging Face eager: keys and values of 128 tokens, on the same weights.

    python benchmarks/executor_speed.py BUILD [--runs 20]

Hugging Face has the weights that the build ships (read from its decode folder, de-quantized to fp32), eager
attention, and computes just what the package computes: keys and values of every layer, without the last
layer's attention and MLP, without the head. The runs alternate, so that both meet the same machine. Prints
one JSON object: median milliseconds, and the SQNR between the two, which shows that they did the same work.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch

from pdconvert.emit.vectors import read_vectors
from pdconvert.executors.mil import MilSession
from pdconvert.measure import sqnr_db
from pdconvert.runtime.manifest import read_manifest
from pdconvert.runtime.weights import DecodeWeights

KeysValues = tuple[torch.Tensor, torch.Tensor]


def hugging_face(decode: Path, hidden: torch.Tensor) -> Callable[[], KeysValues]:
    """A function that gives K (rotated) and V of all layers, each (1, L·H_kv, D, S), from hidden: (1, S, H)."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    weights = DecodeWeights(decode)
    options = {key: value for key, value in weights.config.items() if not key.startswith("quantization")}
    model = LlamaForCausalLM(LlamaConfig(**options, attn_implementation="eager")).float().eval()
    model.load_state_dict({name: shipped(weights, name) for name in model.state_dict()})
    body = model.model
    last, body.layers, body.norm = body.layers[-1], body.layers[:-1], torch.nn.Identity()
    tokens = hidden.shape[1]
    positions = torch.arange(tokens)[None]

    def run() -> KeysValues:
        output = body(inputs_embeds=hidden, position_ids=positions, use_cache=True)
        normed = last.input_layernorm(output.last_hidden_state)
        heads = (1, tokens, -1, last.self_attn.head_dim)
        key = last.self_attn.k_proj(normed).view(heads).transpose(1, 2)
        value = last.self_attn.v_proj(normed).view(heads).transpose(1, 2)
        key, _ = apply_rotary_pos_emb(key, key, *body.rotary_emb(normed, positions))
        layers = output.cache.layers[: len(body.layers)]
        keys = torch.cat([*(layer.keys for layer in layers), key], 1)
        values = torch.cat([*(layer.values for layer in layers), value], 1)
        return keys.transpose(2, 3), values.transpose(2, 3)

    return run


def shipped(weights: DecodeWeights, name: str) -> torch.Tensor:
    """A tensor of the decode folder in fp32; a tied head is the embedding."""
    module = name.removesuffix(".weight")
    if module == "lm_head" and weights.config.get("tie_word_embeddings"):
        module = "model.embed_tokens"
    if module in weights.grids:
        rows = weights.array(f"{module}.weight").shape[0]
        return torch.from_numpy(weights.rows(module, range(rows)))
    return torch.from_numpy(weights.array(f"{module}.weight").astype("float32"))


def keys_values(session: MilSession, inputs: Mapping[str, np.ndarray]) -> KeysValues:
    """K and V of one run of the package."""
    outputs = session.run(inputs)
    return outputs["k"], outputs["v"]


def compare(build: Path, runs: int) -> dict[str, float]:
    """Time both on the inputs of the build's first full test vector."""
    manifest = read_manifest(build)
    case = next(
        case for case in read_vectors(build / "test_vectors")[0] if not manifest.functions[case.function].past
    )
    hidden = torch.from_numpy(case.inputs["hidden"]).float()[0, :, 0].T[None]
    eager = hugging_face(manifest.decode, hidden)
    package = manifest.parts_of(case.function)[0].package
    sessions = {mode: MilSession(package, case.function, mode=mode) for mode in ("fp32", "fp16")}
    contenders: dict[str, Callable[[], KeysValues]] = {
        "hugging_face_eager_ms": eager,
        "mil_fp32_ms": lambda: keys_values(sessions["fp32"], case.inputs),
        "mil_fp16_ms": lambda: keys_values(sessions["fp16"], case.inputs),
    }
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    with torch.inference_mode():
        results = {name: run() for name, run in contenders.items()}
        for _ in range(runs):
            for name, run in contenders.items():
                start = time.perf_counter()
                run()
                seconds[name].append(time.perf_counter() - start)
    found = {name: 1e3 * statistics.median(values) for name, values in seconds.items()}
    for index, side in enumerate(("k", "v")):
        want, got = (
            results[name][index][..., : case.tokens] for name in ("hugging_face_eager_ms", "mil_fp32_ms")
        )
        found[f"{side}_sqnr_db"] = sqnr_db(want, got)
    return found


def main() -> None:
    """Compare and print."""
    parser = argparse.ArgumentParser(description="The MIL executor against Hugging Face eager.")
    parser.add_argument("build", type=Path)
    parser.add_argument("--runs", type=int, default=20)
    args = parser.parse_args()
    print(json.dumps(compare(args.build, args.runs), indent=2))


if __name__ == "__main__":
    main()
