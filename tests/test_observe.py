"""What a build notes of a layer: SQNR of projections, histograms of weights and codes, peaks by part."""

import math

import pytest
import torch
from torch import nn

from passes.linear_to_conv2d import to_conv2d
from pdconvert.executors.mil.plan import OpInfo
from pdconvert.executors.mil.values import ValueInfo
from pdconvert.headroom import Peaks
from pdconvert.measure import sqnr_db
from pdconvert.observe import WEIGHT_BINS, Calls, histograms, projections, watch_linears
from pdconvert.quant.grid import LutLinear, quantize_symmetric


class Fused(nn.Module):
    """A norm's gain and a linear that holds two, as a family may have it."""

    def __init__(self, weight: torch.Tensor, gain: torch.Tensor):
        super().__init__()
        self.gain = gain
        self.qk_proj = nn.Linear(4, 6, bias=False)
        self.qk_proj.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.qk_proj(x * self.gain)


NAMES = {"qk_proj.weight": ["q_proj.weight", "k_proj.weight"]}
ROWS = {"q_proj.weight": 4, "k_proj.weight": 2}


def calls(module: nn.Module, x: torch.Tensor) -> Calls:
    with watch_linears(module) as found:
        module(x)
    return found.split(NAMES, ROWS)


def state(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"q_proj.weight": weight[:4], "k_proj.weight": weight[4:]}


PATHS = ("q_proj", "k_proj")


def outputs(weight: torch.Tensor, x: torch.Tensor) -> zip:
    return zip(PATHS, (x @ weight.T).split([4, 2], -1), strict=True)


def test_each_projection_is_measured_alone_and_in_the_chain() -> None:
    torch.manual_seed(0)
    weight, gain, x = torch.randn(6, 4), torch.rand(4) + 0.5, torch.randn(3, 4)
    stored, drifted = weight + 0.01 * torch.randn(6, 4), x + 0.1 * torch.randn(3, 4)
    exact = Calls(dict.fromkeys(PATHS, x * gain), dict(outputs(weight, x * gain)))
    rows = projections(exact, calls(Fused(stored, gain), drifted), state(stored))
    assert [row["name"] for row in rows] == ["q_proj", "k_proj"]
    wanted = (x * gain) @ weight[4:].T
    assert rows[1]["isolated_db"] == pytest.approx(sqnr_db(wanted, (x * gain) @ stored[4:].T), abs=1e-4)
    assert rows[1]["cumulative_db"] == pytest.approx(
        sqnr_db(wanted, (drifted * gain) @ stored[4:].T), abs=1e-4
    )
    assert rows[1]["cumulative_db"] < rows[1]["isolated_db"]


def test_linears_and_convolutions_are_seen_alike() -> None:
    linear, x = nn.Linear(4, 6), torch.randn(1, 3, 4)
    with watch_linears(nn.Sequential(linear)) as plain:
        linear(x)
    conv = to_conv2d(linear)
    with watch_linears(nn.Sequential(conv)) as turned:
        conv(x.transpose(1, 2)[:, :, None])
    for one, other in ((plain.inputs, turned.inputs), (plain.outputs, turned.outputs)):
        assert one["0"].shape == other["0"].shape and torch.allclose(one["0"], other["0"], atol=1e-6)


def test_watching_leaves_no_hooks() -> None:
    module = Fused(torch.randn(6, 4), torch.ones(4))
    with pytest.raises(ZeroDivisionError), watch_linears(module):
        raise ZeroDivisionError
    assert not module.qk_proj._forward_hooks


def test_histograms_count_every_sampled_weight_once() -> None:
    torch.manual_seed(2)
    weight = torch.randn(32, 64)
    weight[0, 0] = 40.0  # far beyond six standard deviations
    record = quantize_symmetric(weight, 8, "w")
    (row,) = histograms(
        {"mlp.up_proj.weight": weight, "norm.weight": torch.ones(4)}, {"mlp.up_proj.weight": record}
    )
    assert (row["name"], row["shape"], row["bits"], row["sampled_rows"]) == ("up_proj", [32, 64], 8, 32)
    assert len(row["weights"]) == WEIGHT_BINS and sum(row["weights"]) == weight.numel()
    assert row["weights"][-1] == 1 and row["peak"] == 40.0
    assert len(row["codes"]) == 51 and sum(row["codes"]) == weight.numel()
    codes = record.codes.int()
    assert row["codes"][25] == int(((codes >= -2) & (codes <= 2)).sum())
    assert row["codes"][-1] == int((codes >= 123).sum())


@pytest.mark.parametrize(("bits", "first", "bins"), [(4, -8, 16), (8, -127, 51)])
def test_grids_have_their_own_bins(bits: int, first: int, bins: int) -> None:
    weight = torch.randn(8, 16)
    (row,) = histograms({"a.weight": weight}, {"a.weight": quantize_symmetric(weight, bits, "a")})
    assert (row["bits"], row["codes_first"], len(row["codes"]), sum(row["codes"])) == (bits, first, bins, 128)


@pytest.mark.parametrize(("bits", "bins", "per_bin"), [(4, 16, 1), (8, 51, 5)])
def test_entries_of_tables_are_counted_from_0(bits: int, bins: int, per_bin: int) -> None:
    codes = torch.randint(0, 2**bits, (8, 64), dtype=torch.uint8)
    record = LutLinear(codes, torch.arange(2**bits).half()[None], bits, 8)
    (row,) = histograms({"a.weight": record.dequantize()}, {"a.weight": record})
    assert (row["codes_first"], len(row["codes"]), row["codes_per_bin"]) == (0, bins, per_bin)
    assert sum(row["codes"]) == codes.numel() and row["codes"][0] == int((codes < per_bin).sum())


def test_large_matrices_are_sampled_in_whole_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdconvert.observe.SAMPLE", 100)
    weight = torch.randn(50, 10)
    (row,) = histograms({"a.weight": weight}, {"a.weight": weight.half()})
    assert row["sampled_rows"] == 10 and sum(row["weights"]) == 100
    assert row["bits"] == 16 and "codes" not in row


def test_a_matrix_of_zeros_has_a_histogram() -> None:
    (row,) = histograms({"a.weight": torch.zeros(4, 4)}, {"a.weight": torch.zeros(4, 4)})
    assert row["weights"][WEIGHT_BINS // 2] == 16


def op(kind: str, name: str, *inputs: str, dtype: str = "fp16") -> OpInfo:
    return OpInfo("main", 0, kind, (name,), (ValueInfo((2,), dtype),), inputs)


def test_peaks_are_kept_by_block_and_part_and_masked_scores_left_out() -> None:
    peaks = Peaks()
    for info, value in (
        (op("mul", "layers_0_input_layernorm_mul", "hidden"), -300.0),
        (op("add", "layers_0_self_attn_add", "scores", "mask"), -4e4),
        (op("add", "layers_0_self_attn_add_1", "scores", "mask_window"), -4e4),
        (op("conv", "layers_0_self_attn_q_proj_conv2d", "x"), 7.0),
        (op("add", "layers_0_add", "x"), 9e5),
        (op("add", "layers_0_add_1", "x"), 2.0),
        (op("cast", "layers_0_mlp_cast", "x", dtype="fp32"), 1e30),
        (op("concat", "k", "x"), 1e4),
    ):
        peaks.see(info, (torch.tensor([0.0, value]),))
    assert [(row["block"], row["part"], row["peak"], row["op_type"]) for row in peaks.rows()] == [
        ("layers.0", "norm", 300.0, "mul"),
        ("layers.0", "attention", 7.0, "conv"),
        ("layers.0", "residual stream", 9e5, "add"),
    ]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_peak_that_is_not_finite_stays(bad: float) -> None:
    peaks = Peaks()
    for value in (1.0, bad, 2.0):
        peaks.see(op("add", "layers_0_add", "x"), (torch.tensor([value]),))
    assert not math.isfinite(peaks.rows()[0]["peak"])
