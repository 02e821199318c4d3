"""`rnn` and `lstm` over a whole sequence. Each is one op, so its inside is fp32 in both modes."""

from collections.abc import Callable

import torch

from pdconvert.executors.mil.ops.row import OpRow, row

Tensor = torch.Tensor

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "relu": torch.relu,
    "linear": lambda x: x,
}


def _activation(name: str) -> Callable[[Tensor], Tensor]:
    if name not in _ACTIVATIONS:
        raise ValueError(f"activation {name!r} inside a recurrent op: MIL does not give its parameters")
    return _ACTIVATIONS[name]


def _gathered(steps: list[Tensor], whole: bool) -> Tensor:
    """Join the hidden states (b, H) of all steps, or keep the last: (s, b, H) or (1, b, H)."""
    return torch.stack(steps if whole else steps[-1:])


def rnn(
    x: Tensor,
    initial_h: Tensor,
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias: Tensor | None = None,
    *,
    direction: str = "forward",
    output_sequence: bool = False,
    activation: str = "tanh",
) -> tuple[Tensor, Tensor]:
    """h_t = activation(W_ih x_t + W_hh h_(t-1) + b).

    Args:
        x: (s, b, I).
        initial_h: (b, H).
        weight_ih: (H, I).
        weight_hh: (H, H).
        bias: (H,).
        direction: `forward` or `reverse`.
        output_sequence: whether the first output holds all steps.
        activation: name of the activation.

    Returns:
        Hidden states (s or 1, b, H) and the last one (b, H).
    """
    act = _activation(activation)
    hidden, states = initial_h, []
    order = range(x.shape[0]) if direction == "forward" else range(x.shape[0] - 1, -1, -1)
    projected = x @ weight_ih.t()
    if bias is not None:
        projected = projected + bias
    for step in order:
        hidden = act(projected[step] + hidden @ weight_hh.t())
        states.append(hidden)
    if direction != "forward" and output_sequence:
        states.reverse()
    return _gathered(states, output_sequence), hidden


def lstm(
    x: Tensor,
    initial_h: Tensor,
    initial_c: Tensor,
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias: Tensor | None = None,
    peephole: Tensor | None = None,
    weight_ih_back: Tensor | None = None,
    weight_hh_back: Tensor | None = None,
    bias_back: Tensor | None = None,
    peephole_back: Tensor | None = None,
    *,
    direction: str = "forward",
    output_sequence: bool = False,
    recurrent_activation: str = "sigmoid",
    cell_activation: str = "tanh",
    activation: str = "tanh",
    clip: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Long short-term memory; gates lie in the order input, forget, output, cell.

    Args:
        x: (s, b, I).
        initial_h: (b, directions * H).
        initial_c: (b, directions * H).
        weight_ih: (4 H, I); weight_hh: (4 H, H); bias: (4 H,); the same with `_back` for the reverse
            direction of a bidirectional one.
        direction: `forward`, `reverse` or `bidirectional`.
        output_sequence: whether the first output holds all steps.

    Returns:
        Hidden states (s or 1, b, directions * H), the last one and the last cell state.
    """
    if peephole is not None or peephole_back is not None or clip is not None:
        raise ValueError(
            "lstm with peephole weights or clipping cannot be run: MIL does not give their formula"
        )
    acts = (_activation(recurrent_activation), _activation(cell_activation), _activation(activation))
    if direction != "bidirectional":
        return _lstm_pass(
            x, initial_h, initial_c, weight_ih, weight_hh, bias, acts, direction == "reverse", output_sequence
        )
    assert weight_ih_back is not None and weight_hh_back is not None
    size = weight_hh.shape[1]
    forth = _lstm_pass(
        x, initial_h[:, :size], initial_c[:, :size], weight_ih, weight_hh, bias, acts, False, output_sequence
    )
    h_back, c_back = initial_h[:, size:], initial_c[:, size:]
    back = _lstm_pass(
        x, h_back, c_back, weight_ih_back, weight_hh_back, bias_back, acts, True, output_sequence
    )
    sequence, hidden, cell = (torch.cat(pair, -1) for pair in zip(forth, back, strict=True))
    return sequence, hidden, cell


def _lstm_pass(
    x: Tensor,
    hidden: Tensor,
    cell: Tensor,
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias: Tensor | None,
    acts: tuple[Callable[[Tensor], Tensor], ...],
    backwards: bool,
    whole: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """One direction; shapes as in `lstm` with one direction."""
    gate_act, cell_act, out_act = acts
    projected = x @ weight_ih.t()
    if bias is not None:
        projected = projected + bias
    states = []
    for step in range(x.shape[0] - 1, -1, -1) if backwards else range(x.shape[0]):
        gates = projected[step] + hidden @ weight_hh.t()
        entry, forget, out, new = gates.chunk(4, -1)
        cell = gate_act(forget) * cell + gate_act(entry) * cell_act(new)
        hidden = gate_act(out) * out_act(cell)
        states.append(hidden)
    if backwards and whole:
        states.reverse()
    return _gathered(states, whole), hidden, cell


ROWS: dict[str, OpRow] = {"rnn": row(rnn), "lstm": row(lstm)}
