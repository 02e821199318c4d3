"""The run loop: what is called in which order, what is measured, and how errors come out."""

import math
from dataclasses import dataclass, field, replace
from typing import ClassVar

import pytest
import torch
from checkpoints import head_block, layer_block, one_thread, probe_of, random_source, reference_of
from torch import Tensor

from passes import LinearToConv2d, TruncateLastLayer
from pdconvert.errors import InputError
from pdconvert.families import llama
from pdconvert.program import FAMILY_FLOOR_DB, MASKED, Block, Probe, Step, check_family, run_passes, worst_db
from pdconvert.reference import Reference
from pdconvert.rewriting import rewrite, set_parameter

__all__ = ["one_thread"]


@pytest.fixture(scope="module")
def reference() -> Reference:
    return reference_of(random_source({**llama.TINY, "hidden_size": 32, "intermediate_size": 48}))


@pytest.fixture
def probe(reference: Reference) -> Probe:
    return probe_of(reference, tokens=6)


@pytest.fixture
def layer(reference: Reference) -> Block:
    return layer_block(reference)


@dataclass(frozen=True)
class Recorded:
    """A pass that writes down when it is called, and may add an error to a parameter or raise."""

    name: ClassVar[str] = "recorded"
    floor_db: ClassVar[float] = 40.0
    label: str = "a"
    add: float = 0.0
    raises: tuple[str, BaseException] | None = None
    calls: list[str] = field(default_factory=list, compare=False)

    def note(self, what: str) -> None:
        self.calls.append(f"{self.label}.{what}")
        if self.raises and self.raises[0] == what:
            raise self.raises[1]

    def requires(self, block: Block) -> None:
        self.note("requires")

    def run(self, block: Block) -> Block:
        self.note("run")
        module = rewrite(block.module, lambda part: None)
        gain = module.input_layernorm.weight + self.add
        set_parameter(module.input_layernorm, "weight", gain)
        return replace(block, module=module)

    def ensures(self, before: Block, after: Block) -> None:
        assert after is not before
        self.note("ensures")


def go(layer: Block, probe: Probe, *passes: object) -> list[Step]:
    outputs = layer.run(probe)
    return run_passes(layer, passes, probe, outputs, outputs)[2]  # type: ignore[arg-type]


def test_each_pass_is_required_run_and_ensured_before_the_next(layer: Block, probe: Probe) -> None:
    calls: list[str] = []
    steps = go(layer, probe, Recorded("a", calls=calls), Recorded("b", calls=calls))
    assert calls == ["a.requires", "a.run", "a.ensures", "b.requires", "b.run", "b.ensures"]
    assert [(step.block, step.step, step.floor_db) for step in steps] == [("layers.0", "recorded", 40.0)] * 2


def test_every_step_is_measured_against_the_one_before_and_the_original(layer: Block, probe: Probe) -> None:
    first, second, third = go(layer, probe, Recorded(add=0.01), Recorded(add=0.0), Recorded(add=-0.01))
    assert first.previous_db == first.original_db and 20 < first.original_db < 60
    assert second.previous_db == math.inf and second.original_db == first.original_db
    assert third.previous_db < 60 and third.original_db > 100


def test_the_new_block_and_its_outputs_come_back(layer: Block, probe: Probe) -> None:
    outputs = layer.run(probe)
    block, got, _ = run_passes(layer, [LinearToConv2d(), TruncateLastLayer()], probe, outputs, outputs)
    assert set(got) == {"k", "v"} and block.layout.channels_first
    assert worst_db(block.run(probe), got) == math.inf


def test_no_pass_changes_nothing(layer: Block, probe: Probe) -> None:
    outputs = layer.run(probe)
    block, got, steps = run_passes(layer, [], probe, outputs, outputs)
    assert block is layer and got is outputs and steps == []


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_fails(value: float, layer: Block, probe: Probe) -> None:
    good, bad = go(layer, probe, Recorded(), Recorded(add=value))
    assert good.passed and not bad.passed
    assert math.isnan(bad.previous_db) and math.isnan(bad.original_db)


def test_a_broken_reference_fails_however_well_a_pass_did(layer: Block, probe: Probe) -> None:
    outputs = layer.run(probe)
    original = {name: value * math.nan for name, value in outputs.items()}
    _, _, (step,) = run_passes(layer, [Recorded()], probe, original, outputs)
    assert step.previous_db == math.inf and not step.passed
    assert not check_family(layer, probe, original)[1].passed


@pytest.mark.parametrize(
    ("db", "passed"), [(39.9, False), (40.0, True), (math.inf, True), (math.nan, False), (-math.inf, False)]
)
def test_a_step_passes_from_its_floor_on(db: float, passed: bool) -> None:
    assert Step("layers.0", "x", 50.0, db, 40.0, 0.0).passed is passed


ERRORS = [InputError("no"), AssertionError("broken"), ValueError("odd"), RuntimeError("shape")]


@pytest.mark.parametrize("where", ["requires", "run", "ensures"])
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_keeps_its_type_and_says_where_it_arose(
    where: str, error: Exception, layer: Block, probe: Probe
) -> None:
    error = type(error)(*error.args)
    with pytest.raises(type(error)) as caught:
        go(layer, probe, LinearToConv2d(), Recorded(raises=(where, error)))
    assert caught.value is error
    assert caught.value.__notes__ == ["in pass recorded on layers.0, after linear_to_conv2d"]


def test_the_first_pass_comes_after_none(layer: Block, probe: Probe) -> None:
    with pytest.raises(InputError) as caught:
        go(layer, probe, Recorded(raises=("run", InputError("no"))))
    assert caught.value.__notes__ == ["in pass recorded on layers.0, after no pass"]


def test_a_block_that_cannot_run_any_more_says_which_pass_left_it_so(layer: Block, probe: Probe) -> None:
    @dataclass(frozen=True)
    class Breaking(Recorded):
        name: ClassVar[str] = "breaking"

        def run(self, block: Block) -> Block:
            module = rewrite(block.module, lambda part: None)
            del module.mlp._modules["up_proj"]
            return replace(block, module=module)

    with pytest.raises(AttributeError) as caught:
        go(layer, probe, Breaking())
    assert caught.value.__notes__ == ["in pass breaking on layers.0, after no pass"]


def test_an_interrupt_gets_no_note(layer: Block, probe: Probe) -> None:
    with pytest.raises(KeyboardInterrupt) as caught:
        go(layer, probe, Recorded(raises=("run", KeyboardInterrupt())))
    assert not hasattr(caught.value, "__notes__")


def test_the_family_step_compares_with_hugging_face(layer: Block, probe: Probe) -> None:
    outputs = layer.run(probe)
    got, step = check_family(layer, probe, {name: value * 1.001 for name, value in outputs.items()})
    assert (step.block, step.step, step.floor_db) == ("layers.0", "family", FAMILY_FLOOR_DB)
    assert step.previous_db == step.original_db == pytest.approx(60, abs=0.1) and not step.passed
    assert worst_db(outputs, got) == math.inf


def test_the_worst_output_counts_and_nan_is_worst() -> None:
    one = torch.ones(3)
    assert worst_db({"a": one, "b": one}, {"a": one, "b": one * 1.1}) == pytest.approx(20, abs=1e-4)
    for broken in ({"a": one * math.nan, "b": one}, {"a": one, "b": one * math.nan}):
        assert math.isnan(worst_db({"a": one, "b": one}, broken))
    assert worst_db({"a": one, "b": one * 2}, {"a": one}) == math.inf


def test_a_block_hides_the_future_from_every_token(layer: Block, probe: Probe) -> None:
    changed = probe.hidden.clone()
    changed[:, 3:] += 1
    before, after = layer.run(probe), layer.run(replace(probe, hidden=changed))
    for name, value in before.items():
        assert torch.equal(value[..., :3, :], after[name][..., :3, :])
        assert not torch.equal(value, after[name])


def test_a_block_names_its_outputs(layer: Block, reference: Reference, probe: Probe) -> None:
    shapes = {
        "hidden": (1, 6, 32),
        "k": (1, 2, 6, 8),
        "v": (1, 2, 6, 8),
    }
    assert {name: tuple(value.shape) for name, value in layer.run(probe).items()} == shapes
    assert TruncateLastLayer().run(layer).outputs == ("k", "v")
    assert head_block(reference).outputs == ("logits",)


def test_running_needs_no_gradients_and_leaves_the_probe_alone(layer: Block, probe: Probe) -> None:
    before: list[Tensor] = [
        probe.hidden.clone(),
        probe.positions.clone(),
        probe.cos.clone(),
        probe.sin.clone(),
    ]
    outputs = layer.run(probe)
    assert not any(value.requires_grad for value in outputs.values())
    after = (probe.hidden, probe.positions, probe.cos, probe.sin)
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


def test_masked_values_are_finite_in_fp16_with_room_below() -> None:
    assert torch.tensor(MASKED).half().item() == MASKED
    assert torch.isfinite(torch.tensor(MASKED - 25000.0).half())
