"""GGUF files of families other than llama: their config is one that the family reads, their tensors all it needs."""

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import random_source
from gguf_files import GGUF_NAMES, TWO_LAYERS, opened, write_gguf

from pdconvert import families
from pdconvert.errors import InputError
from pdconvert.families import gemma3_text
from pdconvert.inventory import check_inventory

NAMES = GGUF_NAMES | {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}
OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def stored_name(name: str) -> str:
    module, _, kind = name.rpartition(".")
    if module in OUTER:
        return f"{OUTER[module]}.{kind}"
    _, _, layer, rest = module.split(".", 3)
    return f"blk.{layer}.{NAMES[rest]}.{kind}"


def gemma3(folder: Path, layers: int = 6, **metadata: Any) -> tuple[Path, dict[str, torch.Tensor]]:
    """A GGUF file as llama.cpp writes Gemma 3, norms with 1 added, and the tensors of Hugging Face in it."""
    config = {
        **gemma3_text.TINY,
        "num_hidden_layers": layers,
        "layer_types": None,
        "sliding_window_pattern": 6,
    }
    weights = random_source(config).values
    own = {key.replace("llama.", "gemma3."): value for key, value in TWO_LAYERS.items()}
    del own["gemma3.rope.dimension_count"]
    own |= {"gemma3.block_count": layers, "gemma3.attention.sliding_window": 9}
    own |= {f"gemma3.attention.{kind}_length": 32 for kind in ("key", "value")}
    four = {
        "post_attention_layernorm": "post_attention_norm",
        "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
    }
    tensors = {}
    for name, value in weights.items():
        stored = next(
            (
                stored_name(name.replace(part, "input_layernorm")).replace("attn_norm", four[part])
                for part in four
                if part in name
            ),
            None,
        ) or stored_name(name)
        tensors[stored] = value + 1 if name.endswith("norm.weight") else value
    return write_gguf(folder / "m.gguf", tensors, own | metadata, arch="gemma3"), weights


def test_gemma3_has_its_gains_windows_and_bases(tmp_path: Path) -> None:
    path, weights = gemma3(tmp_path)
    source = opened(path)
    spec = gemma3_text.read_config(source.config)
    assert check_inventory(source, gemma3_text, spec) == []
    assert [layer.window for layer in spec.layers] == [9, 9, 9, 9, 9, None]
    assert spec.local_rope is not None
    assert spec.rope.inv_freq[1] == pytest.approx(5e5 ** (-2 / 32))
    assert spec.local_rope.inv_freq[1] == pytest.approx(1e4 ** (-2 / 32))
    assert spec.layers[0].attention_scale == 32**-0.5
    assert gemma3_text.decode_config(source.config, spec)["sliding_window_pattern"] == 6
    for name, value in weights.items():
        torch.testing.assert_close(source.read(name), value, rtol=0, atol=3e-7)


def test_gemma3_with_a_scaled_rope_and_another_base_in_windows(tmp_path: Path) -> None:
    scaling = {"gemma3.rope.scaling.type": "linear", "gemma3.rope.scaling.factor": 8.0}
    source = opened(gemma3(tmp_path, **scaling, **{"gemma3.rope.freq_base_swa": 2e4})[0])
    spec = gemma3_text.read_config(source.config)
    assert spec.local_rope is not None
    assert spec.rope.inv_freq[0] == 1 / 8 and spec.local_rope.inv_freq[0] == 1
    assert spec.local_rope.inv_freq[1] == pytest.approx(2e4 ** (-2 / 32))


def test_the_largest_gemma3_scales_scores_by_its_width(tmp_path: Path) -> None:
    source = opened(gemma3(tmp_path, layers=62)[0])
    assert source.config["query_pre_attn_scalar"] == 64 // 4


def test_gemma3_without_its_window_is_refused(tmp_path: Path) -> None:
    path, _ = gemma3(tmp_path, **{"gemma3.attention.sliding_window": 0})
    with pytest.raises(
        InputError, match="gemma3.attention.sliding_window: 0; expected one number for all layers"
    ):
        opened(path)


@pytest.mark.parametrize(("name", "head_dim"), [("qwen2", 16), ("qwen3", 32)])
def test_a_gguf_file_is_the_checkpoint_that_it_was_made_of(tmp_path: Path, name: str, head_dim: int) -> None:
    family = families.get({"model_type": name})
    weights = random_source(family.TINY).values
    metadata = {key.replace("llama.", f"{name}."): value for key, value in TWO_LAYERS.items()}
    del metadata[f"{name}.rope.dimension_count"]
    metadata |= {f"{name}.attention.{kind}_length": head_dim for kind in ("key", "value")}
    tensors = {stored_name(key): value for key, value in weights.items()}
    source = opened(write_gguf(tmp_path / "m.gguf", tensors, metadata, arch=name))
    spec = family.read_config(source.config)
    wanted = family.read_config({**family.TINY, "rope_theta": 5e5, "max_position_embeddings": 256})
    assert spec == wanted
    assert check_inventory(source, family, spec) == []
    assert all(torch.equal(source.read(key), value) for key, value in weights.items())
