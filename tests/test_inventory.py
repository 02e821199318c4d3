import pytest
import torch
from checkpoints import MemorySource, random_source

from pdconvert.errors import InputError
from pdconvert.families import llama
from pdconvert.inventory import check_inventory, expected_tensors
from pdconvert.sources.random import RandomSource

TIED = {**llama.TINY, "tie_word_embeddings": True}
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def check(source: MemorySource) -> list[str]:
    return check_inventory(source, llama, llama.read_config(source.config))


def refusal(source: MemorySource) -> str:
    with pytest.raises(InputError) as error:
        check(source)
    return str(error.value)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": True},
        {"attention_bias": True},
        {"mlp_bias": True},
        {"head_dim": 24, "num_key_value_heads": 1},
        {"num_hidden_layers": 1, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    ],
    ids=str,
)
def test_what_is_expected_is_what_hugging_face_saves(changes: dict) -> None:
    config = {**llama.TINY, **changes}
    saved = {name: info.shape for name, info in RandomSource(config, seed=0).tensors().items()}
    assert expected_tensors(llama, llama.read_config(config)) == saved
    assert check(random_source(config)) == []


def test_a_missing_tensor_is_named() -> None:
    source = random_source(llama.TINY)
    del source.values["model.layers.1.mlp.up_proj.weight"]
    assert refusal(source) == (
        "memory: tensor model.layers.1.mlp.up_proj.weight is missing, as config.json describes the model"
    )


def test_many_missing_tensors_are_counted() -> None:
    source = random_source({**llama.TINY, "num_hidden_layers": 1})
    source.config["num_hidden_layers"] = 2
    message = refusal(source)
    assert message.startswith("memory: 9 tensors (model.layers.1.input_layernorm.weight, ")
    assert message.endswith(", …) are missing, as config.json describes the model")


def test_a_tensor_under_another_name_is_hinted_at() -> None:
    source = random_source(llama.TINY)
    source.values["norm.weight"] = source.values.pop("model.norm.weight")
    assert refusal(source) == (
        "memory: tensor model.norm.weight is missing, as config.json describes the model; "
        "norm.weight is there under another name"
    )


@pytest.mark.parametrize(
    "name", ["model.layers.2.input_layernorm.weight", "model.layers.0.self_attn.q_proj.bias", "score.weight"]
)
def test_a_tensor_left_over_is_refused(name: str) -> None:
    source = random_source(llama.TINY)
    source.values[name] = torch.zeros(64)
    assert refusal(source) == (
        f"memory: tensor {name} is left over; config.json does not account for it, so the result would "
        "differ from what the checkpoint computes"
    )


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("model.layers.0.self_attn.k_proj.weight", (64, 64)),
        (EMBEDDING, (321, 64)),
        ("model.norm.weight", (64, 1)),
    ],
)
def test_another_shape_is_refused(name: str, shape: tuple[int, ...]) -> None:
    source = random_source(llama.TINY)
    expected = tuple(source.values[name].shape)
    source.values[name] = torch.zeros(shape)
    assert refusal(source) == f"memory: {name} has shape {shape}, config.json asks for {expected}"


def test_a_tied_head_that_equals_the_embedding_is_left_out() -> None:
    source = random_source(TIED)
    source.values[HEAD] = source.values[EMBEDDING].clone()
    assert check(source) == ["lm_head.weight equals the embedding it is tied to and was left out"]
    assert HEAD in source.values, "the source itself was changed"


@pytest.mark.parametrize("change", ["value", "shape"])
def test_a_tied_head_that_differs_is_a_contradiction(change: str) -> None:
    source = random_source(TIED)
    head = source.values[EMBEDDING].clone()
    head[3, 5] += 1e-3
    source.values[HEAD] = head if change == "value" else head[:-1]
    assert refusal(source) == (
        "memory: config.json says tie_word_embeddings, but lm_head.weight differs from model.embed_tokens.weight; "
        "set tie_word_embeddings to false to keep both"
    )


def test_an_untied_head_that_is_not_there_is_missing() -> None:
    source = random_source(TIED)
    source.config = {**llama.TINY}
    assert refusal(source) == "memory: tensor lm_head.weight is missing, as config.json describes the model"


def test_a_tokenizer_larger_than_the_embedding_is_refused() -> None:
    source = random_source(llama.TINY)
    source.ids = 321
    assert refusal(source) == (
        "memory: the tokenizer has 321 ids, the embedding 320 rows; resize the embedding or use the tokenizer "
        "that belongs to the checkpoint"
    )


@pytest.mark.parametrize("ids", [None, 1, 320])
def test_a_tokenizer_that_fits_or_is_not_there_is_fine(ids: int | None) -> None:
    source = random_source(llama.TINY)
    source.ids = ids
    assert check(source) == []


def test_nothing_is_read_but_a_head_beside_its_tied_embedding(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    original = MemorySource.read

    def watch(self: MemorySource, name: str) -> torch.Tensor:
        read.append(name)
        return original(self, name)

    monkeypatch.setattr(MemorySource, "read", watch)
    check(random_source(llama.TINY))
    assert read == []
    source = random_source(TIED)
    source.values[HEAD] = source.values[EMBEDDING].clone()
    check(source)
    assert sorted(read) == [HEAD, EMBEDDING]
