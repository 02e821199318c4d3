"""`pdconvert eval`: scores against numbers worked out by hand, and a build against itself and its source."""

import json
import math
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from refusals import W4, base, checkpoint

from pdconvert.cli.app import main
from pdconvert.errors import InputError
from pdconvert.evaluate import Row, evaluate, score, windows_of
from pdconvert.pipeline import build
from pdconvert.recipe import load_recipe

__all__ = ["base", "checkpoint"]

TEXT = (
    "The keeper wrote the weather down every evening, and nobody asked him why the birds came so low. " * 40
)


def test_scores_by_hand() -> None:
    """Two positions: in the first both agree, in the second the source is sure of one of two tokens and errs."""
    expected = torch.log(
        torch.tensor([[0.5, 0.5, 1e-30, 1e-31, 1e-32, 1e-33], [0.8, 0.2, 1e-30, 1e-31, 1e-32, 1e-33]])
    )
    got = torch.log(
        torch.tensor([[0.5, 0.5, 1e-30, 1e-31, 1e-32, 1e-33], [0.4, 0.6, 1e-30, 1e-31, 1e-32, 1e-33]])
    )
    found = score([Row.of(expected, got, torch.tensor([0, 1]))])
    kld = 0.8 * math.log(2) + 0.2 * math.log(1 / 3)
    assert found.tokens == 2
    assert found.kld_mean == pytest.approx(kld / 2) and found.kld_max == pytest.approx(kld)
    assert found.kld_error == pytest.approx(kld / 2)  # of two values, 0 and kld
    assert found.top1 == 0.5 and found.top5 == 1
    assert found.perplexity == pytest.approx(1 / math.sqrt(0.5 * 0.6))
    assert found.perplexity_ratio == pytest.approx(math.sqrt(0.2 / 0.6))
    alike = score(
        [
            Row.of(rows[:1].repeat(5, 1), got[i : i + 1].repeat(5, 1), torch.zeros(5).long())
            for i, rows in enumerate((expected[:1], expected[1:]))
        ]
    )
    assert alike.kld_error == pytest.approx(kld / 2), "ten positions of two windows tell no more than two"


def test_windows_are_spread_over_the_text() -> None:
    assert windows_of(range(100), 3, 20) == [list(range(a, a + 20)) for a in (0, 40, 80)]
    assert windows_of(range(20), 1, 20) == [list(range(20))]
    with pytest.raises(InputError, match="the text has 59 tokens, and 3 windows of 20 need 60"):
        windows_of(range(59), 3, 20)


@pytest.fixture
def built(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A W4 build of a tiny checkpoint with a tokenizer, and a text beside it."""
    monkeypatch.setenv("PDCONVERT_CACHE", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_text(TEXT)
    overrides = (*W4, "probe.eval_windows=1")
    build(load_recipe("tiny", source=str(checkpoint), overrides=overrides), tmp_path / "build")
    return tmp_path / "build"


def test_a_build_against_its_source(built: Path, tmp_path: Path) -> None:
    found = evaluate(built, text_file=tmp_path / "text.txt", windows=2)
    assert found["windows"] == 2 and found["width"] == 2 * found["prefilled"] and found["fit"] is None
    for name in ("pair", "mlx"):
        row = found[name]
        assert row["tokens"] == 2 * found["prefilled"]
        assert 0 < row["kld_mean"] < row["kld_max"] < 1 and 0 < row["top1"] <= 1
        ratio = row["perplexity"] / found["source"]["perplexity"]
        assert row["perplexity_ratio"] == pytest.approx(ratio, rel=1e-6)
    hand_off = found["hand_off"]
    assert hand_off["kld"] == pytest.approx(found["pair"]["kld_mean"] - found["mlx"]["kld_mean"], abs=1e-9)
    for side in "kv":
        assert 40 < hand_off[f"{side}_worst_db"] <= hand_off[f"{side}_db"] < 90, "fp16 in the package alone"


def test_windows_of_another_width(built: Path, tmp_path: Path) -> None:
    found = evaluate(built, text_file=tmp_path / "text.txt", windows=1, width=64)
    assert (found["width"], found["prefilled"], found["pair"]["tokens"]) == (64, 32, 32)
    with pytest.raises(InputError, match="--width 300: .* hold windows of 254 tokens"):
        evaluate(built, text_file=tmp_path / "text.txt", windows=1, width=300)


def test_the_command(built: Path, tmp_path: Path) -> None:
    args = ["eval", str(built), "--text", str(tmp_path / "text.txt"), "--windows", "2"]
    shown = CliRunner().invoke(main, args)
    assert (
        shown.exit_code == 0
        and "package, then MLX" in shown.stdout
        and "4.22 bits per weight" in shown.stdout
    )
    as_json = CliRunner().invoke(main, [*args, "--json"])
    assert json.loads(as_json.stdout)["pair"]["tokens"] > 0


def test_another_checkpoint_is_refused(built: Path, base: Path, checkpoint: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-6}))
    with pytest.raises(InputError, match="is not the checkpoint that .* was made from"):
        evaluate(built, text_file=None, windows=1)
