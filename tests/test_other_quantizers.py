"""`benchmarks/other_quantizers.py`: weights of other tools' quantizers, and builds measured a second way."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from refusals import W4, base, checkpoint
from safetensors.torch import load_file

from pdconvert.errors import InputError
from pdconvert.evaluate import evaluate, reference_hidden, windows_of
from pdconvert.families import get
from pdconvert.measure import sqnr_db
from pdconvert.pipeline import build
from pdconvert.recipe import load_recipe
from pdconvert.reference import Reference
from pdconvert.runtime.tokenizer import Tokenizer
from pdconvert.sources.hf_dir import HfDirSource

__all__ = ["base", "checkpoint"]

TEXT = "The keeper wrote the weather down every evening, and nobody asked why the birds came so low. " * 40
LAYERS = "model.layers."
TABLES = ("model.embed_tokens.weight", "lm_head.weight")


@pytest.fixture(scope="module")
def bench() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
        import other_quantizers

        yield other_quantizers


def make(bench: ModuleType, name: str, folder: Path, sequences: list[list[int]] | None = None):
    (method,) = (method for method in bench.METHODS if method.name == name)
    return method.make(bench.Given(folder, sequences or []))


def values_per(weight: torch.Tensor, count: int) -> int:
    """The most distinct values among `count` consecutive ones."""
    return max(len(row.unique()) for row in weight.reshape(-1, count))


def test_mlx_rounding_is_mlx_rounding(bench, base):
    import mlx.core as mx

    made, own = make(bench, "mlx_lm-rtn4", base), load_file(base / "model.safetensors")
    assert made.bits_per_weight == 4.5
    assert set(made.tensors) == {name for name in own if name not in TABLES}
    for name, found in made.tensors.items():
        value = mx.array(own[name].numpy()).astype(mx.float16)
        if value.ndim == 2:
            codes, scales, biases = mx.quantize(value, 64, 4)
            value = mx.dequantize(codes, scales.astype(mx.float32), biases.astype(mx.float32), 64, 4)
        assert np.array_equal(found.numpy(), np.array(value.astype(mx.float32))), name


@pytest.mark.parametrize("name", ["gptq4", "awq4", "dwq4", "dwq4-fast"])
def test_mlx_quantizers_run_on_a_cpu(bench, base, name):
    """Every matrix is on its grid, and with the norms that come with it the model still says the same."""
    draw = torch.Generator().manual_seed(0)
    windows = torch.randint(320, (17, 32), generator=draw).tolist()
    made = make(bench, f"mlx_lm-{name}", base, windows[1:])
    assert made.bits_per_weight == 4.5
    own = load_file(base / "model.safetensors")
    assert set(made.tensors) == {key for key in own if key not in TABLES}
    matrices = [value for value in made.tensors.values() if value.ndim == 2]
    assert len(matrices) == 14 and all(values_per(value, 64) <= 16 for value in matrices)
    norm = f"{LAYERS}0.input_layernorm.weight"
    assert torch.equal(made.tensors[norm], own[norm]) == (name == "gptq4")
    scorer = bench.Scorer(base, windows[:1])
    expected = scorer.expected[0]
    scorer.load(made.tensors)
    assert sqnr_db(expected, next(scorer.logits())) > 15


@pytest.mark.parametrize("name", ["gptq4", "awq4", "dwq4"])
def test_mlx_quantizers_that_need_text_say_so(bench, base, name):
    with pytest.raises(InputError, match="give --calibration FILE"):
        make(bench, f"mlx_lm-{name}", base)


@pytest.mark.parametrize(("rows", "tables"), [(0, 1), (8, 2), (4, 4)])
def test_coremltools_tables(bench, rows, tables):
    """16 values per table; large enough that coremltools clusters with its own k-means, not scikit-learn's."""
    weight = torch.randn(16, 2560, generator=torch.Generator().manual_seed(0))
    found, bits = bench.compressed({"w": weight}, bench.palettize(rows))
    assert values_per(found["w"], weight.numel() // tables) == 16
    assert bits == 4 * weight.numel() + 16 * 16 * tables
    assert sqnr_db(weight, found["w"]) > 19


@pytest.mark.parametrize(("bits", "block", "floor"), [(4, 0, 17), (4, 64, 19), (8, 0, 40)])
def test_coremltools_integers(bench, bits, block, floor):
    draw = torch.Generator().manual_seed(0)
    weights = {"one": torch.randn(32, 128, generator=draw), "two": torch.randn(16, 256, generator=draw)}
    found, stored = bench.compressed(weights, bench.linear(bits, block))
    scales = sum(value.numel() // (block or value.shape[1]) for value in weights.values())
    assert stored == sum(bits * value.numel() for value in weights.values()) + 16 * scales
    for name, value in weights.items():
        grouped = found[name].view(-1, block or value.shape[1])
        steps = grouped / grouped.abs().amax(1, keepdim=True) * (2 ** (bits - 1) - 1)
        assert values_per(found[name], grouped.shape[1]) <= 2**bits
        assert sqnr_db(value, found[name]) > floor, steps


def test_coremltools_on_a_checkpoint(bench, base):
    made = make(bench, "coremltools-int8-channel", base)
    own = load_file(base / "model.safetensors")
    assert set(made.tensors) == {
        name for name, value in own.items() if name.startswith(LAYERS) and value.ndim == 2
    }
    assert all(sqnr_db(own[name], value) > 38 for name, value in made.tensors.items())


def test_the_scorer_says_what_the_reference_says(bench, base):
    windows = torch.randint(320, (2, 24), generator=torch.Generator().manual_seed(0)).tolist()
    scorer, source = bench.Scorer(base, windows), HfDirSource(base)
    family = get(source.config)
    reference = Reference(source, family, family.read_config(source.config))
    hidden = reference_hidden(reference, windows)
    for found, states in zip(scorer.expected, hidden, strict=True):
        assert sqnr_db(reference.logits(states[11:-1], reference.head_tensors()), found) > 100
    same = scorer.score({})
    assert same.tokens == 24 and same.kld_max < 1e-12 and same.top1 == 1 and same.perplexity_ratio == 1
    with pytest.raises(InputError, match="has no x of shape"):
        scorer.score({"x": torch.zeros(2)})


def test_a_build_measured_a_second_way(bench, checkpoint, tmp_path, monkeypatch):
    """`eval` of the decode weights through MLX and this one agree."""
    monkeypatch.setenv("PDCONVERT_CACHE", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_text(TEXT)
    out = tmp_path / "build"
    build(load_recipe("tiny", source=str(checkpoint), overrides=(*W4, "probe.eval_windows=1")), out)
    first = evaluate(out, text_file=tmp_path / "text.txt", windows=2)
    windows = windows_of(Tokenizer(checkpoint).encode(TEXT), 2, first["width"])
    made = bench.of_build(out, bench.Given(checkpoint))
    second = bench.Scorer(checkpoint, windows).score(made.tensors)
    for measure in ("kld_mean", "kld_p99", "perplexity", "perplexity_ratio"):
        assert getattr(second, measure) == pytest.approx(first["mlx"][measure], rel=1e-3), measure
    assert made.bits_per_weight == pytest.approx(4.22, abs=0.01)


def test_rows_are_kept_and_failures_listed(bench, base, tmp_path, capsys):
    calls = []

    def fine(given):
        calls.append("fine")
        return bench.Quantized({}, 4.5)

    def broken(given):
        calls.append("broken")
        raise NotImplementedError("not on\na CPU")

    methods = [bench.Method("a", "a tool", fine), bench.Method("b", "another", broken)]
    windows = torch.randint(320, (1, 24), generator=torch.Generator().manual_seed(0)).tolist()
    file = tmp_path / "rows.json"
    for _ in range(2):
        results = bench.Results(file, {"text": "x"})
        bench.run(methods, bench.Given(base), lambda: bench.Scorer(base, windows), results)
    assert calls == ["fine", "broken", "broken"]
    shown = bench.table(json.loads(file.read_text())["rows"]).splitlines()
    assert shown[2].startswith(
        "| a tool | 4.50 | 0.0000 ± 0.0000 | 0.00 | 100.0 % | 100.0 % | × 1.000 ± 0.000 |"
    )
    assert shown[3].startswith("| another | did not run: NotImplementedError: not on a CPU |")
    with pytest.raises(InputError, match="rows of another checkpoint, text, windows or version"):
        bench.Results(file, {"text": "y"})


def test_the_command_reads_as_many_sequences_as_it_is_asked_for(
    bench, checkpoint, tmp_path, monkeypatch, capsys
):
    (tmp_path / "text.txt").write_text(TEXT)
    seen = []

    def look(given):
        seen.extend(map(len, given.sequences))
        raise NotImplementedError("looked")

    monkeypatch.setattr(bench, "METHODS", (bench.Method("look", "a look", look, reads=True),))
    text = str(tmp_path / "text.txt")
    given = ["--calibration", text, "--sequences", "3", "--length", "16"]
    monkeypatch.setattr(
        "sys.argv", ["x", str(checkpoint), "--text", text, "--windows", "1", "--width", "24", *given]
    )
    bench.main()
    assert seen == [16, 16, 16]
    assert "| a look, 48 tokens | did not run: NotImplementedError: looked |" in capsys.readouterr().out
