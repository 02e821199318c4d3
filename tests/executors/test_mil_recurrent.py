"""Recurrent layers against torch's."""

from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from mil_programs import Case, check_op
from test_mil_products import normal


def rnn() -> Iterator[Case]:
    for direction, whole, activation in product(("forward", "reverse"), (False, True), ("tanh", "relu")):
        tensors = {
            "x": normal(0, (5, 2, 3)), "initial_h": normal(1, (2, 4)), "weight_ih": normal(2, (4, 3)),
            "weight_hh": normal(3, (4, 4)), "bias": normal(4, (4,)),
        }  # fmt: skip

        def reference(
            x: torch.Tensor, initial_h: torch.Tensor, weight_ih: torch.Tensor, weight_hh: torch.Tensor,
            bias: torch.Tensor, d: str = direction, w: bool = whole, a: str = activation,
        ) -> list[torch.Tensor]:  # fmt: skip
            layer = torch.nn.RNN(3, 4, nonlinearity=a)
            layer.load_state_dict(
                {
                    "weight_ih_l0": weight_ih,
                    "weight_hh_l0": weight_hh,
                    "bias_ih_l0": bias,
                    "bias_hh_l0": 0 * bias,
                }
            )
            out, last = layer(x.flip(0) if d == "reverse" else x, initial_h[None])
            steps = out if w else out[-1:]
            return [steps.flip(0) if d == "reverse" else steps, last[0]]

        params = {"direction": direction, "output_sequence": whole, "activation": activation}
        yield Case(tensors, params, _several(reference))


def lstm() -> Iterator[Case]:
    for direction, whole in product(("forward", "reverse", "bidirectional"), (False, True)):
        both = direction == "bidirectional"
        width = 8 if both else 4
        tensors = {
            "x": normal(0, (5, 2, 3)), "initial_h": normal(1, (2, width)), "initial_c": normal(2, (2, width)),
            "weight_ih": normal(3, (16, 3)), "weight_hh": normal(4, (16, 4)), "bias": normal(5, (16,)),
        }  # fmt: skip
        if both:
            tensors |= {
                "weight_ih_back": normal(6, (16, 3)),
                "weight_hh_back": normal(7, (16, 4)),
                "bias_back": normal(8, (16,)),
            }

        def reference(
            x: torch.Tensor, initial_h: torch.Tensor, initial_c: torch.Tensor, d: str = direction, w: bool = whole,
            **weights: torch.Tensor,
        ) -> list[torch.Tensor]:  # fmt: skip
            layer = torch.nn.LSTM(3, 4, bidirectional=d == "bidirectional")
            state = {}
            for name, value in weights.items():  # MIL: input, forget, output, cell; torch: output last
                i, f, o, g = value.chunk(4)
                suffix = "_reverse" if name.endswith("_back") else ""
                kind = name.removesuffix("_back")
                state[f"{'bias_ih' if kind == 'bias' else kind}_l0{suffix}"] = torch.cat([i, f, g, o])
                if kind == "bias":
                    state[f"bias_hh_l0{suffix}"] = 0 * value
            layer.load_state_dict(state)
            split = [t.reshape(2, -1, 4).transpose(0, 1).contiguous() for t in (initial_h, initial_c)]
            out, (h, c) = layer(x.flip(0) if d == "reverse" else x, tuple(split))
            if d == "reverse":
                out = out.flip(0) if w else out[-1:]
            elif not w:
                out = torch.cat([out[-1:, :, :4], out[:1, :, 4:]], -1) if d == "bidirectional" else out[-1:]
            return [out, *(t.transpose(0, 1).reshape(2, -1) for t in (h, c))]

        yield Case(tensors, {"direction": direction, "output_sequence": whole}, _several(reference))


def _several(function: Callable[..., list[torch.Tensor]]) -> Callable[..., list[np.ndarray]]:
    def call(**arrays: np.ndarray) -> list[np.ndarray]:
        with torch.no_grad():
            return [t.numpy() for t in function(**{k: torch.from_numpy(v) for k, v in arrays.items()})]

    return call


CASES = {"rnn": rnn, "lstm": lstm}


@pytest.mark.parametrize("op", CASES)
def test_op(op: str, tmp_path: Path) -> None:
    check_op(op, CASES[op](), tmp_path)
