"""What is folded into the weights of the graph alone, run by the MIL executor against Hugging Face."""

from pathlib import Path

import pytest
from checkpoints import MemorySource, reference_of
from lowered import CONFIG, FULL, PREFILL, Call, Form, assert_close, call, inputs, package, run

from passes import (
    FoldAttentionScale,
    FoldNormGain,
    ScaleResidual,
)
from pdconvert.measure import sqnr_db
from pdconvert.reference import Reference


def loud(reference: Reference, factor: float) -> Reference:
    """The model with a residual stream `factor` times as loud, which the norms undo."""
    writers = (
        "embed_tokens.weight",
        *(f"{name}_proj.{part}" for name in ("o", "down") for part in ("weight", "bias")),
    )
    values = {
        name: value * factor if name.endswith(writers) else value
        for name, value in reference.source.values.items()
    }
    return reference_of(MemorySource(CONFIG, values))


FOLDING = {
    "gains": (FoldNormGain(),),
    "attention scale": (FoldAttentionScale(),),
    "residual": (ScaleResidual(0.125),),
    "all": (FoldNormGain(), FoldAttentionScale(), ScaleResidual(0.125)),
}


@pytest.mark.parametrize("embedding", ["host", "graph"])
@pytest.mark.parametrize("scheme", ["none", "w8a16"])
@pytest.mark.parametrize("case", list(FOLDING))
def test_what_is_folded_into_the_weights_gives_the_same_numbers(
    case: str, scheme: str, embedding: str, reference: Reference, prompt: Call, tmp_path: Path
) -> None:
    form = Form((*FULL, *FOLDING[case]), scheme, outputs="logits", embedding=embedding)
    opened = package(tmp_path / "x.mlpackage", reference, form)
    got = run(opened, PREFILL.name, inputs(reference, form, PREFILL, prompt), 12)
    assert_close(prompt, got, 30 if scheme == "w8a16" else 55)


def test_a_scaled_residual_stream_survives_what_exceeds_fp16_itself(
    reference: Reference, tmp_path: Path
) -> None:
    model = loud(reference, 60000.0)
    prompt = call(model, list(range(10)))
    found = []
    for passes in (FULL, (*FULL, ScaleResidual(2.0**-8))):
        form = Form(passes, outputs="logits")
        opened = package(tmp_path / f"{len(passes)}.mlpackage", model, form)
        got = run(opened, PREFILL.name, inputs(model, form, PREFILL, prompt), 10, "fp16")
        found.append(sqnr_db(prompt.logits[-1], got["logits"][0, :, 0, 0]))
    assert not found[0] > 10 and found[1] > 40, found
