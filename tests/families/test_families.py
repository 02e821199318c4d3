"""What every family file owes; a new file is found through its TINY config."""

import json
from types import ModuleType
from typing import Any

import pytest
import torch
from checkpoints import (
    expected_outputs,
    head_block,
    layer_block,
    mlx_logits,
    probe_of,
    random_source,
    reference_of,
)
from transformers import CONFIG_MAPPING

import passes
from pdconvert import families
from pdconvert.errors import InputError
from pdconvert.families.config import reference_class
from pdconvert.inventory import check_inventory
from pdconvert.program import FAMILY_FLOOR_DB, Block, Probe, check_family, run_passes, worst_db
from pdconvert.sources.random import RandomSource

ADAPTING = (
    passes.LinearToConv2d(),
    passes.EagerGqaAttention(),
    passes.SafeRmsNorm(),
    passes.RopeAsInput(),
    passes.FixShapes(tokens=16),
)


@pytest.fixture(params=families.names())
def family(request: pytest.FixtureRequest) -> ModuleType:
    return families.get({"model_type": request.param})


def test_the_file_name_is_the_model_type(family: ModuleType) -> None:
    assert family.TINY["model_type"] == family.__name__.rpartition(".")[2]
    assert family.read_config(family.TINY).model_type == family.TINY["model_type"]


def test_reading_a_config_leaves_it_alone(family: ModuleType) -> None:
    before = json.dumps(family.TINY)
    family.decode_config(family.TINY, family.read_config(family.TINY))
    assert json.dumps(family.TINY) == before


def test_missing_values_take_hugging_faces_defaults(family: ModuleType) -> None:
    name = family.TINY["model_type"]
    missing = {"model_type": name, "max_position_embeddings": 4096}
    spec, config = family.read_config(missing), CONFIG_MAPPING[name](max_position_embeddings=4096)
    layer = spec.layers[0]
    assert (spec.vocab_size, spec.hidden_size, spec.tied) == (
        config.vocab_size,
        config.hidden_size,
        config.tie_word_embeddings,
    )
    assert (len(spec.layers), layer.intermediate_size) == (config.num_hidden_layers, config.intermediate_size)
    assert (layer.heads, layer.kv_heads) == (config.num_attention_heads, config.num_key_value_heads)
    assert layer.head_dim == (getattr(config, "head_dim", None) or config.hidden_size // layer.heads)
    assert layer.norm_eps == spec.norm_eps == config.rms_norm_eps
    rotary = reference_class(family.ROTARY)(config)
    frequencies = getattr(rotary, "inv_freq", getattr(rotary, "full_attention_inv_freq", None))
    assert spec.rope.inv_freq == tuple(frequencies.double().tolist())
    default = CONFIG_MAPPING[name]().max_position_embeddings
    assert family.DEFAULTS["max_position_embeddings"] == default


def test_the_tiny_checkpoint_holds_exactly_what_is_expected(family: ModuleType) -> None:
    source = RandomSource(family.TINY, seed=0)
    assert check_inventory(source, family, family.read_config(family.TINY)) == []


def test_a_key_that_the_family_does_not_know_is_refused(family: ModuleType) -> None:
    name = family.TINY["model_type"]
    with pytest.raises(InputError) as error:
        family.read_config({**family.TINY, "zz_new": 3, "an_option": "x"})
    assert str(error.value) == (
        f"config.json: the {name} family does not know an_option='x', zz_new=3; "
        "it may change the result, so remove it if it does not, or add it to the family file"
    )


def blocks_of(family: ModuleType) -> list[tuple[Block, Probe, dict[str, torch.Tensor]]]:
    """One layer of each kind, and the head, with what they run on and what Hugging Face computes."""
    reference = reference_of(random_source(family.TINY))
    layers = reference.spec.layers
    blocks = [layer_block(reference, layers.index(spec)) for spec in dict.fromkeys(layers)]
    probes = [probe_of(reference, 12, layer=layers.index(spec)) for spec in dict.fromkeys(layers)]
    return [
        (block, probe, expected_outputs(reference, block, probe))
        for block, probe in zip((*blocks, head_block(reference)), (*probes, probes[0]), strict=True)
    ]


def test_blocks_equal_hugging_face_plain_and_adapted(family: ModuleType) -> None:
    for block, probe, expected in blocks_of(family):
        outputs, first = check_family(block, probe, expected)
        assert first.passed and first.previous_db >= FAMILY_FLOOR_DB
        adapted, outputs, steps = run_passes(block, ADAPTING, probe, expected, outputs)
        assert adapted.layout.channels_first
        assert worst_db(expected, outputs) > 60 and all(step.passed for step in steps), steps


def whole_model(family: ModuleType) -> tuple[dict[str, Any], dict[str, torch.Tensor], torch.Tensor]:
    """The tiny config, its tensors, and Hugging Face's logits (S, V) of forty tokens."""
    from transformers import AutoModelForCausalLM

    source = random_source(family.TINY)
    model = AutoModelForCausalLM.from_config(family.hf_config(source.config))
    model.load_state_dict(source.values, strict=not source.config.get("tie_word_embeddings"))
    with torch.no_grad():
        return source.config, source.values, model.eval()(tokens()[None]).logits[0]


def tokens() -> torch.Tensor:
    return torch.arange(40) * 7 % 256


def test_layer_after_layer_equals_the_whole_model(family: ModuleType) -> None:
    _, _, expected = whole_model(family)
    reference = reference_of(random_source(family.TINY))
    hidden = reference.embed(tokens().tolist())[None]
    for index in range(len(reference.spec.layers)):
        hidden, _ = reference.run(reference.layer(index), hidden)
    logits = reference.logits(hidden[0], reference.head_tensors())
    assert worst_db({"logits": expected}, {"logits": logits}) > 110


def test_the_decode_config_makes_mlx_compute_the_same(family: ModuleType) -> None:
    config, tensors, expected = whole_model(family)
    logits = mlx_logits(family.decode_config(config, family.read_config(config)), tensors, tokens().tolist())
    assert worst_db({"logits": expected}, {"logits": logits}) > 100


UNKNOWN = {
    "no model_type": (
        {},
        "config.json has no model_type, so its family is unknown; add it to the checkpoint's config",
    ),
    "not a text": (
        {"model_type": 3},
        "config.json has no model_type, so its family is unknown; add it to the checkpoint's config",
    ),
    "a near miss": (
        {"model_type": "lama"},
        f"model_type 'lama' is not supported (did you mean llama?); supported: {', '.join(families.names())}",
    ),
    "another family": (
        {"model_type": "mamba_9"},
        f"model_type 'mamba_9' is not supported; supported: {', '.join(families.names())}",
    ),
    "a helper file": (
        {"model_type": "config"},
        f"model_type 'config' is not supported; supported: {', '.join(families.names())}",
    ),
}


@pytest.mark.parametrize("case", list(UNKNOWN))
def test_a_model_type_without_a_family_is_refused(case: str) -> None:
    config, message = UNKNOWN[case]
    with pytest.raises(InputError) as error:
        families.get(config)
    assert str(error.value) == message
