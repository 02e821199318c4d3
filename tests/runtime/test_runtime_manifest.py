"""The manifest as checked values."""

import json
import re

import pytest
from tiny_pair import manifest_of

from pdconvert.errors import InputError
from pdconvert.runtime.manifest import read_manifest
from pdconvert.schema import SCHEMA


@pytest.fixture
def content(w8):
    return manifest_of(w8, tokens=(32, 128))


def write(folder, content):
    (folder / "manifest.json").write_text(json.dumps(content))
    return folder


def test_reads_what_a_runtime_needs(tmp_path, content):
    manifest = read_manifest(write(tmp_path, content | {"something_newer": 1}))
    assert [path for path, _, _ in manifest.packages] == [tmp_path / "prefill.mlpackage"]
    assert manifest.decode == tmp_path / "decode"
    assert (manifest.layers, manifest.kv_heads, manifest.head_dim) == (2, 2, 16)
    assert manifest.key_form == "rotated"
    assert manifest.eos_ids == {257}
    assert len(manifest.rope.inv_freq) == 8
    assert manifest.functions["prefill_32"].inputs[0].shape == (1, 64, 1, 32)


def test_a_failed_build_is_read(tmp_path, content):
    assert read_manifest(write(tmp_path, content | {"verdict": "fail"})).verdict == "fail"


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("schema", "2.0", f"schema 2.0 is newer than {SCHEMA}; use a newer pdconvert"),
        ("verdict", None, "verdict is 'None', expected a text; build again"),
        ("kv.layers", True, "kv.layers is 'True', expected an integer; build again"),
        ("kv.rope", "turned", "kv.rope is 'turned', expected rotated or raw"),
        ("rope.inv_freq", [1, "2"], "rope.inv_freq is \"[1, '2']\", expected a list of numbers; build again"),
        ("embedding", 1, "embedding is '1', expected an object; build again"),
        (
            "prefill.functions.prefill_32.inputs",
            [1],
            "prefill.functions.prefill_32.inputs is '[1]', expected a list of objects; build again",
        ),
        (
            "prefill.package",
            "../other.mlpackage",
            "path '../other.mlpackage' leads out of the build folder; build again",
        ),
        ("prefill.package", "/etc", "path '/etc' leads out of the build folder; build again"),
    ],
)
def test_refuses(tmp_path, content, path, value, message):
    *parents, last = path.split(".")
    target = content
    for parent in parents:
        target = target[parent]
    target[last] = value
    with pytest.raises(InputError, match=f"manifest.json: {re.escape(message)}$"):
        read_manifest(write(tmp_path, content))


@pytest.mark.parametrize("key", ["rope", "kv", "embedding", "eos_token_ids", "vocab_size"])
def test_refuses_what_is_missing(tmp_path, content, key):
    del content[key]
    with pytest.raises(InputError, match=f"manifest.json: {key} is missing; build again$"):
        read_manifest(write(tmp_path, content))


def test_a_link_out_of_the_build_is_refused(tmp_path, content):
    build = tmp_path / "build"
    build.mkdir()
    (build / "prefill.mlpackage").symlink_to(tmp_path)
    with pytest.raises(InputError, match="leads out of the build folder"):
        read_manifest(write(build, content))
