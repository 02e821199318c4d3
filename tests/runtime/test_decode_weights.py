"""Reading a decode folder without MLX: rows of the embedding, damaged files."""

import re
import shutil

import numpy as np
import pytest
from tiny_pair import make_tiny

from pdconvert.errors import InputError
from pdconvert.runtime.embedding import HostEmbedding
from pdconvert.runtime.weights import DecodeWeights

IDS = [0, 319, 7, 7, 255]


def exact(tiny, name="model.embed_tokens.weight"):
    value = tiny.tensors[name]
    return (value.dequantize() if hasattr(value, "codes") else value.float()).numpy()


@pytest.mark.parametrize("folder", ["w8", "fp16"])
def test_rows_equal_the_store(folder, request):
    tiny = request.getfixturevalue(folder)
    rows = DecodeWeights(tiny.decode).rows("model.embed_tokens", IDS)
    assert rows.dtype == np.float32
    np.testing.assert_array_equal(rows, exact(tiny)[IDS])


@pytest.mark.parametrize(
    "changes", [{"bits": 4, "group": 32}, {"bits": 8, "hidden_size": 96, "head_dim": 24}]
)
def test_rows_of_other_grids_equal_the_store(tmp_path, changes):
    tiny = make_tiny(tmp_path / "decode", **changes)
    np.testing.assert_array_equal(
        DecodeWeights(tiny.decode).rows("model.embed_tokens", IDS), exact(tiny)[IDS]
    )


def test_hidden_is_scaled_rounded_once_and_padded_with_the_last_token(w8):
    hidden = HostEmbedding(DecodeWeights(w8.decode), scale=3.7).hidden(IDS, 8)
    assert hidden.shape == (1, 64, 1, 8)
    assert hidden.dtype == np.float16
    assert hidden.flags["C_CONTIGUOUS"]
    expected = (exact(w8)[IDS] * np.float32(3.7)).astype(np.float16)
    np.testing.assert_array_equal(hidden[0, :, 0, :5].T, expected)
    np.testing.assert_array_equal(hidden[0, :, 0, 5:].T, expected[[4, 4, 4]])


@pytest.mark.parametrize("token", [-1, 320])
def test_an_id_outside_the_table_is_refused(w8, token):
    with pytest.raises(
        InputError, match=f"^token id {token} is outside model.embed_tokens, which has 320 rows$"
    ):
        DecodeWeights(w8.decode).rows("model.embed_tokens", [0, token])


def test_an_absent_tensor_is_refused(w8):
    with pytest.raises(InputError, match="has no tensor model.nothing.weight"):
        DecodeWeights(w8.decode).array("model.nothing.weight")


def replaced(change):
    """Changes model.safetensors with a function from its bytes to bytes."""

    def apply(folder):
        path = folder / "model.safetensors"
        path.write_bytes(change(path.read_bytes()))

    return apply


def written(name, text):
    return lambda folder: (folder / name).write_text(text)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (replaced(lambda data: data[:-64]), r"model.safetensors is cut off: \S+ ends at byte \d+ of \d+"),
        (replaced(lambda data: data[:1000]), "model.safetensors is cut off or is no safetensors file"),
        (replaced(lambda data: b""), "model.safetensors is cut off or is no safetensors file"),
        (
            replaced(lambda data: b"version https://git-lfs.github.com/spec/v1\n"),
            "cut off or is no safetensors",
        ),
        (replaced(lambda data: data[:8] + b"x" + data[9:]), "model.safetensors has an unreadable header"),
        (
            replaced(lambda data: data.replace(b'"F16"', b'"F8X"', 1)),
            "has dtype F8X, expected one of F16, F32, U32",
        ),
        (lambda folder: (folder / "model.safetensors").unlink(), "holds no model\\*.safetensors"),
        (lambda folder: (folder / "config.json").unlink(), "config.json is missing"),
        (written("config.json", "{"), "config.json is not valid JSON"),
        (written("config.json", "[]"), "config.json holds no JSON object"),
    ],
)
def test_damaged_folders_are_refused(w8, tmp_path, damage, message):
    folder = tmp_path / "decode"
    shutil.copytree(w8.decode, folder)
    damage(folder)
    with pytest.raises(InputError, match=message) as caught:
        DecodeWeights(folder)
    assert re.escape(str(folder)) in re.escape(str(caught.value))
    assert "\n" not in str(caught.value)
