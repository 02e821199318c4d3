"""The residual stream in another orthonormal basis, in which no channel stands out."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from passes.fold_norm_gain import fold_gains
from pdconvert.basis import Basis, into
from pdconvert.blocks import RMSNorm
from pdconvert.errors import InputError
from pdconvert.model import LayerSpec
from pdconvert.program import Block
from pdconvert.rewriting import rewrite, set_parameter


@dataclass(frozen=True)
class RotateResidual:
    """Turn the residual stream by an orthogonal matrix Q, in both halves of the pair.

    Before: h ← h + o_proj(…); q = W · (g ⊙ norm(h)).
    After:  Qᵀh ← Qᵀh + (Qᵀ · o_proj)(…); q = (W · diag(g) · Q) · norm(Qᵀh), gain 1: the same q, k, v and logits.

    Rows of the embedding are multiplied by Q, and those of the head after the final norm's gain, so that a head that
    was tied to the embedding becomes a matrix of its own in both halves. Q is a randomised Hadamard matrix where the
    width allows it, else the orthogonal factor of a Gaussian one. The norms keep a gain, of ones, which learning may
    move; fold_norm_gain after this pass takes it out of the graph. It comes before quantize_weights, and pays with
    `rounding: gptq`: rounding to nearest loses more in the turned stream than before.

    Source: Ashkboos et al., "QuaRot" (arXiv:2404.00456), of which this is the offline part.

    Attributes:
        seed: of what Q is drawn from.
    """

    name: ClassVar[str] = "rotate_residual"
    floor_db: ClassVar[float] = 80.0
    seed: int = 0

    def check_layer(self, spec: LayerSpec) -> None:
        """Whether a layer's norms let the stream turn.

        Raises:
            InputError: they do not.
        """
        if spec.norms != "before":
            raise InputError(
                "rotate_residual: the model has norms behind attention and MLP, whose gains act on single channels "
                "of the residual stream; leave the pass out"
            )

    def requires(self, block: Block) -> None:
        self.check_layer(block.spec)
        if block.records:
            raise InputError("rotate_residual must come before quantize_weights; move it up in the recipe")
        if block.layout.basis is not None:
            raise InputError("rotate_residual is listed twice in the recipe")
        for path in block.module.residual_readers:
            if not isinstance(block.module.get_submodule(path), RMSNorm):
                raise InputError(f"rotate_residual: {block.name}.{path} is no RMSNorm; leave the pass out")

    def run(self, block: Block) -> Block:
        basis = Basis(block.spec.hidden_size, self.seed)
        module = rewrite(block.module, lambda part: None)
        fold_gains(module)
        for _, consumers in module.norm_consumers:
            for path in consumers:
                part = module.get_submodule(path)
                turned = into(part.weight.detach().flatten(1), basis)
                set_parameter(part, "weight", turned.view(part.weight.shape))
        for path in module.residual_writers:
            part = module.get_submodule(path)
            turned = into(part.weight.detach().flatten(1).T, basis).T.contiguous()
            set_parameter(part, "weight", turned.view(part.weight.shape))
            if part.bias is not None:
                set_parameter(part, "bias", into(part.bias.detach(), basis))
        return block.with_layout(module, basis=basis)

    def ensures(self, before: Block, after: Block) -> None:
        assert after.layout == replace(before.layout, basis=Basis(before.spec.hidden_size, self.seed))
        for path, _ in after.module.norm_consumers:
            gain = after.module.get_submodule(path).weight
            assert bool((gain == 1).all()), f"{path} keeps its gain"
