"""Lowered programs of small random configs of every family, run op by op, against Hugging Face."""

import random
from pathlib import Path

import pytest
import torch
from checkpoints import random_source, reference_of
from drawing import draw_config, refusal
from lowered import FULL, Form, assert_close, call, inputs, package, run

from pdconvert import families
from pdconvert.lowering.contract import FunctionShape
from pdconvert.model import is_gain

SHAPES = (FunctionShape(16), FunctionShape(8, 24))
CASES = 2


@torch.no_grad()
@pytest.mark.parametrize("name", families.names())
def test_programs_of_drawn_configs_equal_hugging_face(name: str, tmp_path: Path) -> None:
    family, draw = families.get({"model_type": name}), random.Random(f"programs/{name}")
    for case in range(CASES):
        config = draw_config(family, draw.choice)
        while refusal(family, config) is not None:
            config = draw_config(family, draw.choice)
        source = random_source(config, case)
        offset = family.read_config(config).gain_offset
        for key, value in source.values.items():  # what fp16 weights cost is no matter here
            plus = offset if is_gain(key) else 0
            source.values[key] = (value + plus).half().float() - plus
        reference = reference_of(source)
        raw = bool(case % 2)
        form = Form(FULL, shapes=SHAPES, outputs="logits", raw_keys=raw)
        opened = package(tmp_path / f"{case}.mlpackage", reference, form)
        first = call(reference, [7 * i % 256 for i in range(14)], raw_keys=raw)
        got = run(opened, "prefill_16", inputs(reference, form, SHAPES[0], first), 14)
        assert_close(first, got, 55)
        second = call(reference, [(7 * i + 5) % 256 for i in range(6)], first, raw_keys=raw)
        got = run(opened, "extend_8_ctx24", inputs(reference, form, SHAPES[1], second, first), 6)
        assert_close(second, got, 55)
