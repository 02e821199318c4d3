"""`pdconvert init`: the recipe that it writes is one that `build` takes."""

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

import pdconvert
from pdconvert import families
from pdconvert.cli import main
from pdconvert.errors import InputError
from pdconvert.recipe import load_recipe
from pdconvert.starter import function_lines, starter
from scripts.tiny_checkpoint import write_checkpoint


def invoke(*args: str):
    return CliRunner().invoke(main, ["init", *args])


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("family", families.names())
def test_every_family_builds_with_it(family, place):
    config = dict(families.get({"model_type": family}).TINY)
    if "logits_scaling" in config:  # else random logits are so close that no token counts
        config["logits_scaling"] = 0.25
    write_checkpoint(place / "Tiny Model", config)
    result = invoke("Tiny Model")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith(f"{place}/Tiny Model: {family}, ")
    assert "wrote tiny-model.yaml; next: pdconvert plan tiny-model.yaml" in result.stdout
    recipe = load_recipe("tiny-model.yaml", overrides=["probe.eval_windows=1"])
    assert [function.name for function in recipe.prefill.functions] == ["prefill_128", "extend_128_ctx384"]
    built = pdconvert.build(recipe, "out", use_cache=False)
    checks = json.loads((place / "out/report/report.json").read_text())["checks"]
    assert built.verdict == "pass", [check for check in checks if not check["passed"]]


def test_what_is_refused_is_refused_in_one_line(place):
    folder = write_checkpoint(place / "m", families.get({"model_type": "llama"}).TINY)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "mixtral"}))
    result = invoke("m")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "model_type 'mixtral' is not supported: it is a mixture of experts" in result.stderr
    assert not list(place.glob("*.yaml"))


def test_a_tensor_that_is_missing_is_named(place):
    folder = write_checkpoint(place / "m", families.get({"model_type": "llama"}).TINY)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    assert "tensors (model.layers.2." in invoke("m").stderr


def test_an_older_file_stays(place):
    write_checkpoint(place / "m", families.get({"model_type": "llama"}).TINY)
    (place / "m.yaml").write_text("mine")
    result = invoke("m")
    assert (result.exit_code, result.stderr) == (
        2,
        "error: m.yaml is there already; give another --out, or --force\n",
    )
    assert invoke("m", "--force").exit_code == 0
    assert load_recipe("m.yaml").name == "m"
    assert invoke("m", "--out", "-").stdout == (place / "m.yaml").read_text()


def test_a_checkpoint_in_a_package(place, monkeypatch):
    root = place / "site" / "carries_model"
    root.mkdir(parents=True)
    (root / "__init__.py").write_text("raise SystemExit('the package was run')\n")
    shutil.move(write_checkpoint(place / "m", families.get({"model_type": "qwen3"}).TINY), root / "weights")
    monkeypatch.syspath_prepend(str(place / "site"))
    result = invoke("package:carries_model", "--json")
    answer = json.loads(result.stdout)
    assert (answer["path"], answer["checked"]) == ("weights.yaml", True)
    assert load_recipe("weights.yaml").source.package == "carries_model"


def test_a_hub_model_whose_config_alone_is_cached(place, monkeypatch):
    from huggingface_hub import constants

    commit = "0123456789abcdef0123456789abcdef01234567"
    snapshot = place / "hub/models--org--Tiny-1B/snapshots" / commit
    snapshot.mkdir(parents=True)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs/main").write_text(commit)
    config = families.get({"model_type": "llama"}).TINY
    (snapshot / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(place / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    result = invoke("org/Tiny-1B")
    assert result.exit_code == 0, result.output
    assert "its weights are not in the cache" in result.stdout
    assert load_recipe("tiny-1b.yaml").source.hub == "org/Tiny-1B"
    assert pdconvert.plan("tiny-1b.yaml").sizes.package > 0


def test_functions_follow_the_context():
    assert function_lines(2048) == [
        "{tokens: 128}",
        "{tokens: 128, past: 512}",
        "{tokens: 128, past: 1024}",
    ]
    assert function_lines(256) == ["{tokens: 128}"]
    assert function_lines(40) == ["{tokens: 16}"]
    assert len(function_lines(10**6)) == 4


@pytest.mark.parametrize(
    ("layers", "width", "wanted", "unwanted"),
    [
        (2, 64, ["# - quantize_weights"], ["\n  - quantize_weights", "split_model"]),
        (24, 2048, ["\n  - quantize_weights:", "limit_mb: 950"], []),
    ],
)
def test_scheme_and_parts_follow_the_size(place, layers, width, wanted, unwanted):
    config = {**families.get({"model_type": "llama"}).TINY}
    config |= {"num_hidden_layers": layers, "hidden_size": width, "intermediate_size": 4 * width}
    config.pop("head_dim", None)
    found = starter_of_config(place, config)
    assert all(text in found.text for text in wanted)
    assert not any(text in found.text for text in unwanted)


def starter_of_config(place: Path, config: dict):
    """A starter for a config whose weights are not there, as the hub's cache may have it."""
    from pdconvert import starter as module
    from pdconvert.sources.hf_dir import HfDirSource

    folder = place / "config-only"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_open", lambda spec: (HfDirSource(folder, weights=False), False))
        return starter(str(folder), place)


def test_nothing_there(place):
    with pytest.raises(InputError, match="^SRC no/such/place: no such folder or file"):
        starter("no/such/place", place)
    with pytest.raises(InputError, match="^SRC: empty"):
        starter("", place)
