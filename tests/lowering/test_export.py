"""Exported graphs: what is refused, what is exported once, what tells two blocks apart."""

import numpy as np
import pytest
import torch
from checkpoints import layer_block, random_source, reference_of
from lowered import CONFIG, FULL, PREFILL, Form, lowering
from torch import Tensor, nn

from passes import (
    FoldAttentionScale,
    FoldNormGain,
    QuantizeWeights,
    ScaleResidual,
)
from pdconvert.errors import InputError
from pdconvert.lowering.contract import FunctionShape
from pdconvert.lowering.export import export_block, signature
from pdconvert.reference import Reference


class Strange(nn.Module):
    """Stands where a norm should, and uses an op that the table lacks."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.erfinv(x.tanh())


def test_an_op_without_a_row_is_an_error_that_names_it_and_its_line(reference: Reference) -> None:
    lowered, _ = lowering(reference, Form())
    lowered.skeletons[0].module.input_layernorm = Strange()
    with pytest.raises(InputError) as error:
        lowered.program([PREFILL])
    message = str(error.value)
    assert message.startswith(
        "layers.0: aten.erfinv.default has no row in the lowering table (pdconvert/lowering/aten.py); it comes from "
    )
    assert "test_export.py" in message and "return torch.erfinv(x.tanh())" in message
    assert message.endswith("Add a row, or rewrite the block without it")


def test_a_block_that_takes_positions_is_refused(reference: Reference) -> None:
    lowered, _ = lowering(reference, Form(FULL[:3]))
    with pytest.raises(InputError) as error:
        lowered.program([PREFILL])
    assert str(error.value) == "block layers.0 takes positions, the graph gives rope_cos; list rope_as_input"


def test_an_unknown_target_is_refused(reference: Reference) -> None:
    lowered, _ = lowering(reference, Form(target="iOS15"))
    with pytest.raises(InputError) as error:
        lowered.program([PREFILL])
    assert str(error.value) == "target iOS15 is not supported; use one of iOS16, iOS17, iOS18"


def test_weights_in_groups_need_ios18(reference: Reference) -> None:
    lowered, store = lowering(reference, Form(target="iOS17"))
    record = (
        QuantizeWeights(granularity="per_group").run(layer_block(reference)).records["mlp.up_proj.weight"]
    )
    store["layers.0"] = {**store["layers.0"], "mlp.up_proj.weight": record}
    with pytest.raises(InputError) as error:
        lowered.program([PREFILL])
    assert (
        str(error.value) == "layers_0_mlp_up_proj_weight: weights in groups need the target iOS18, not iOS17"
    )


def test_layers_that_are_alike_are_exported_once(
    reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pdconvert.lowering import assemble

    source = random_source({**CONFIG, "num_hidden_layers": 5})
    lowered, _ = lowering(reference_of(source), Form(shapes=[PREFILL, FunctionShape(8)]))
    exported = []

    def count(block, rope_dims, shape):
        exported.append((block.name, shape.name))
        return export_block(block, rope_dims, shape)

    monkeypatch.setattr(assemble, "export_block", count)
    lowered.program([PREFILL, FunctionShape(8)])
    assert exported == [
        (name, shape) for shape in ("prefill_16", "prefill_8") for name in ("layers.0", "layers.4")
    ]


def test_a_signature_tells_forms_apart(reference: Reference) -> None:
    block = layer_block(reference)
    forms = [block]
    for rewrite in (*FULL, FoldNormGain(), FoldAttentionScale(), ScaleResidual(0.5)):
        forms.append(rewrite.run(forms[-1]))
    found = {signature(form, PREFILL) for form in forms}
    assert len(found) == len(forms)
    assert signature(block, PREFILL) == signature(layer_block(reference, 1), PREFILL)
    assert signature(block, PREFILL) != signature(block, FunctionShape(8))


def test_a_signature_sees_what_becomes_a_literal(reference: Reference) -> None:
    """Norms of another eps, scales and folded gains are the same modules, and other graphs."""
    block = layer_block(reference)
    for path, name, value in (
        ("input_layernorm", "eps", 1e-3),
        ("self_attn", "scale", 1.0),
        ("input_layernorm", "gain_is_one", True),
    ):
        other = layer_block(reference)
        setattr(other.module.get_submodule(path), name, value)
        assert signature(other, PREFILL) != signature(block, PREFILL), name


def test_exporting_reads_no_weights(reference: Reference) -> None:
    block = layer_block(reference)
    before = {name: (id(value), value.clone()) for name, value in block.module.named_parameters()}
    for rewrite in FULL:
        block = rewrite.run(block)
    graph = export_block(block, reference.spec.rope.dims, PREFILL)
    assert graph.inputs == ("hidden", "rest_0", "rest_1", "rest_2")
    assert set(graph.parameters.values()) == set(before)
    assert all(
        node.meta["val"].device.type == "meta" for node in graph.graph.nodes if node.op == "call_function"
    )
    for name, (_, value) in before.items():
        assert np.array_equal(block.module.get_parameter(name).numpy().reshape(value.shape), value.numpy())
