"""Packages that `ct.convert` makes of torch modules, against torch, in every opset and precision."""

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from llama_program import llama_inputs, random_llama, write_llama
from mil_programs import TARGETS, ct
from torch import nn

from pdconvert.executors.mil import MilSession, Package
from pdconvert.executors.mil.trace import Tracer


class Layer(nn.Module):
    """A decoder layer with embedding, grouped attention, RoPE by halves, RMS and layer norm, gated MLP, top-k."""

    def __init__(self, width: int = 64, heads: int = 4, length: int = 8) -> None:
        super().__init__()
        self.heads, self.length, self.width = heads, length, width
        self.embed = nn.Embedding(50, width)
        self.q, self.o = nn.Linear(width, width), nn.Linear(width, width, bias=False)
        self.k, self.v = nn.Linear(width, width // 2, bias=False), nn.Linear(width, width // 2)
        self.first, self.second = nn.RMSNorm(width, eps=1e-5), nn.LayerNorm(width)
        self.up, self.gate, self.down = nn.Linear(width, 96), nn.Linear(width, 96), nn.Linear(96, width)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple:
        x = self.embed(ids)
        dim = self.width // self.heads
        y = self.first(x)
        q = self.q(y).view(1, self.length, self.heads, dim).transpose(1, 2)
        k = self.k(y).view(1, self.length, self.heads // 2, dim).transpose(1, 2)
        v = self.v(y).view(1, self.length, self.heads // 2, dim).transpose(1, 2)
        q, k = (t * cos + torch.cat([-t[..., dim // 2 :], t[..., : dim // 2]], -1) * sin for t in (q, k))
        k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        scores = torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(dim) + mask, -1)
        x = x + self.o((scores @ v).transpose(1, 2).reshape(1, self.length, self.width))
        y = self.second(x)
        x = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return x, torch.topk(x, 3, dim=-1).values, x.abs().mean(-1), torch.clamp(x, -1, 1).pow(2)


class Vision(nn.Module):
    """Convolutions with stride, groups, dilation and padding, norms, pools, activations, upsampling."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(3, 2, 1),
            nn.Conv2d(8, 8, 3, padding=2, dilation=2, groups=4), nn.GroupNorm(2, 8), nn.Hardswish(),
            nn.ConvTranspose2d(8, 6, 3, stride=2, padding=1, output_padding=1), nn.InstanceNorm2d(6), nn.LeakyReLU(0.1),
            nn.Upsample(scale_factor=2, mode="nearest"), nn.Conv2d(6, 4, 1), nn.PixelShuffle(2), nn.PReLU(),
            nn.AvgPool2d(2), nn.Upsample(scale_factor=2, mode="bilinear"), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


def _layer() -> tuple[nn.Module, tuple[torch.Tensor, ...], list]:
    length = 8
    given = (
        torch.arange(length)[None] * 5 % 50,
        torch.triu(torch.full((length, length), -1e4), 1),
        torch.randn(length, 16).cos(),
        torch.randn(length, 16).sin(),
    )
    kinds = [ct.TensorType("ids", given[0].shape, dtype=int)]
    kinds += [ct.TensorType(n, t.shape) for n, t in zip(("mask", "cos", "sin"), given[1:], strict=True)]
    return Layer(), given, kinds


def _vision() -> tuple[nn.Module, tuple[torch.Tensor, ...], list]:
    return Vision(), (torch.randn(1, 3, 24, 24),), [ct.TensorType("x", (1, 3, 24, 24))]


@pytest.mark.parametrize("make", [_layer, _vision])
@pytest.mark.parametrize("version", TARGETS)
def test_converted_module(make, version: int, tmp_path: Path) -> None:  # noqa: ANN001
    torch.manual_seed(0)
    module, given, kinds = make()
    module.eval()
    traced = torch.jit.trace(module, given)
    wanted = module(*given)
    wanted = wanted if isinstance(wanted, tuple) else (wanted,)
    both = version in (15, 18)
    for precision in (ct.precision.FLOAT16, ct.precision.FLOAT32) if both else (ct.precision.FLOAT16,):
        model = ct.convert(
            traced,
            inputs=kinds,
            minimum_deployment_target=TARGETS[version],
            compute_precision=precision,
            skip_model_load=True,
        )
        path = tmp_path / f"{precision.name}.mlpackage"
        model.save(str(path))
        package = Package.open(path)
        names = [kind.name for kind in kinds]
        inputs = dict(zip(names, given, strict=True))
        # Not a claim of exactness at fp32: coremltools folds norms and puts its own eps into some of them.
        slack = {"FLOAT32": {"fp32": 3e-4, "fp16": 3e-4}, "FLOAT16": {"fp32": 5e-3, "fp16": 2e-2}}[
            precision.name
        ]
        for mode, tolerance in slack.items():
            out = list(MilSession(package, mode=mode).run(inputs).values())
            for got, want in zip(out, wanted, strict=True):
                torch.testing.assert_close(got, want.float(), rtol=tolerance, atol=tolerance)


TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 97,
}


@pytest.fixture(scope="module")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> tuple:
    model = random_llama(**TINY)
    path = tmp_path_factory.mktemp("llama") / "llama.mlpackage"
    write_llama(path, model, 16)
    return model, Package.open(path), torch.arange(16) * 7 % 97


def sqnr_db(signal: torch.Tensor, result: torch.Tensor) -> float:
    return float(10 * (signal.square().sum() / (signal - result).square().sum()).log10())


def test_a_quantized_llama_equals_hugging_face(tiny_llama: tuple) -> None:
    model, package, ids = tiny_llama
    with torch.no_grad():
        found = model.model(ids[None], use_cache=True)
    keys = torch.cat([layer.keys for layer in found.past_key_values.layers], 1)
    for mode, floor in (("fp32", 110.0), ("fp16", 50.0)):
        out = MilSession(package, mode=mode).run(llama_inputs(model, ids))
        assert sqnr_db(found.last_hidden_state[0].t(), out["out"][0, :, 0]) > floor
        assert sqnr_db(keys.transpose(2, 3), out["k"]) > floor


def test_a_trace_gives_the_ranges_and_losses_of_every_op(tiny_llama: tuple) -> None:
    model, package, ids = tiny_llama
    inputs = llama_inputs(model, ids)
    trace = Tracer(package).run(inputs)
    for mode, outputs in (("fp32", trace.reference), ("fp16", trace.outputs)):
        session = MilSession(package, mode=mode)
        session.watch = lambda *_: None  # as the trace does: op by op
        assert all(value.equal(outputs[name]) for name, value in session.run(inputs).items())
    assert [row.op.position for row in trace.rows] == sorted(row.op.position for row in trace.rows)
    rows = {row.name: row for row in trace.rows}
    final = rows["out"]
    assert final.sqnr_db == pytest.approx(sqnr_db(trace.reference["out"], trace.outputs["out"]), abs=0.01)
    assert final.high == trace.reference["out"].max() and final.low == trace.reference["out"].min()
    assert all(row.nonfinite == 0 and row.sqnr_db > 40 for row in trace.rows)
    assert all(row.lost_db < 30 for row in trace.rows if row.op.op_type != "softmax")
    scores = next(row for row in trace.rows if row.op.op_type == "add" and row.shape == (2, 2, 16, 16))
    assert scores.fp16_share == pytest.approx(4e4 / 65504, rel=0.01) and "mask" in scores.op.inputs


class Remembering(nn.Module):
    """Shifts a cache by one row, puts the new row last, and attends over all rows."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.zeros(1, 6, 4, dtype=torch.float16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.rows[:, :5] = self.rows[:, 1:].clone()
        self.rows[:, 5:] = x
        return torch.softmax(x @ self.rows.transpose(1, 2), -1) @ self.rows


def test_a_converted_module_with_a_state(tmp_path: Path) -> None:
    module = Remembering().eval()
    x = torch.randn(1, 1, 4)
    traced = torch.jit.trace(module.float(), x)
    model = ct.convert(
        traced,
        inputs=[ct.TensorType("x", x.shape)],
        states=[ct.StateType(ct.TensorType(shape=(1, 6, 4)), name="rows")],
        minimum_deployment_target=ct.target.iOS18,
        skip_model_load=True,
    )
    model.save(str(tmp_path / "p.mlpackage"))
    session = MilSession(tmp_path / "p.mlpackage", mode="fp16")
    state = session.make_state()
    module.rows.zero_()
    for step in range(8):
        x = torch.randn(1, 1, 4, generator=torch.Generator().manual_seed(step)).half().float()
        (got,) = session.run({"x": x}, state).values()
        torch.testing.assert_close(got, module(x), rtol=5e-3, atol=5e-3)
        torch.testing.assert_close(state["rows"], module.rows)
