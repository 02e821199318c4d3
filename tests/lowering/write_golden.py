"""Write the golden op lists anew, after a change of the lowering or of a pass that is meant:

    python tests/lowering/write_golden.py

`git diff tests/lowering/golden` then shows what the change does to the shipped program.
"""

import sys
import tempfile
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from checkpoints import random_source, reference_of  # noqa: E402
from lowered import Form, package  # noqa: E402
from op_text import op_text  # noqa: E402

from passes import EagerGqaAttention, LinearToConv2d, RopeAsInput, SafeRmsNorm  # noqa: E402
from pdconvert.families import llama  # noqa: E402
from pdconvert.lowering.contract import FunctionShape  # noqa: E402

GOLDEN = Path(__file__).parent / "golden"
TWO_LAYERS = {**llama.TINY, "hidden_size": 32, "intermediate_size": 48}
ONE_LAYER = {**TWO_LAYERS, "num_hidden_layers": 1, "attention_bias": True}
LOGITS = Form(outputs="logits", scheme="w8a16")
OTHER = (LinearToConv2d(), EagerGqaAttention(heads="single"), SafeRmsNorm(method="layer_norm"), RopeAsInput())

CASES = {
    "full": (TWO_LAYERS, Form(scheme="w8a16")),
    "full_ios16": (ONE_LAYER, Form(scheme="w8a16", target="iOS16")),
    "logits_from_tokens": (ONE_LAYER, replace(LOGITS, embedding="graph")),
    "extend": (ONE_LAYER, replace(LOGITS, shapes=[FunctionShape(8, 24)])),
    "other_forms": (ONE_LAYER, replace(LOGITS, passes=OTHER)),
    "plain": (ONE_LAYER, replace(LOGITS, passes=[RopeAsInput()])),
}
"""Golden file: the checkpoint's config, and the form of its package."""


def text_of(name: str, folder: Path) -> str:
    """The op list of a case; a package is written into `folder`."""
    config, form = CASES[name]
    opened = package(folder / f"{name}.mlpackage", reference_of(random_source(config)), form)
    return op_text(opened, form.shapes[0].name)


def main() -> None:
    GOLDEN.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for name in CASES:
            (GOLDEN / f"{name}.txt").write_text(text_of(name, Path(folder)), encoding="utf-8")


if __name__ == "__main__":
    main()
