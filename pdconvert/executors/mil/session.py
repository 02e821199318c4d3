"""Run one function of a package."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pdconvert.errors import InputError
from pdconvert.executors.mil import dtypes
from pdconvert.executors.mil.graph import PlanBuilder
from pdconvert.executors.mil.interface import Feature, read_features
from pdconvert.executors.mil.package import FunctionInfo, Package
from pdconvert.executors.mil.plan import OpInfo, Plan, Step
from pdconvert.executors.mil.program import Entry, Program
from pdconvert.executors.mil.values import OP_ERRORS, RUN_TIME, ValueInfo, first_line, round_fp16
from pdconvert.executors.mil.weights import WeightCache, default_cache_bytes

MODES = ("fp32", "fp16")

State = dict[str, torch.Tensor]
"""Buffers of a function's states by name; a call updates them in place."""

Watch = Callable[[OpInfo, tuple[torch.Tensor, ...]], None]
"""Sees each op's outputs while a session runs; it must neither change nor keep them."""


class MilSession:
    """One function of a package, ready to run on the CPU.

    Attributes:
        package: the package.
        function: inputs, outputs and states.
        mode: `fp32`, or `fp16` (results that the program types as fp16 are rounded to it).
        kind: `mil`; which executor this is.
        reason: why it was chosen.
        watch: sees every op while `run` runs; None for none.
    """

    kind = "mil"

    def __init__(
        self,
        package: Package | str | Path,
        function: str | None = None,
        *,
        mode: str = "fp32",
        weight_cache_bytes: int | None = None,
        cache: WeightCache | None = None,
        reason: str = "asked for",
    ) -> None:
        """Read the program; weights are read when they are first needed.

        Args:
            package: an open package or the path of one.
            function: name of the function; the package's default one where None.
            mode: `fp32` or `fp16`.
            weight_cache_bytes: how many bytes of materialised weights to keep (2 GB by default, or a
                quarter of the memory if less); the rest is materialised at each use.
            cache: a cache to share with other sessions on the same package, so that functions hold their
                common weights once.
            reason: for the report.

        Raises:
            InputError: no such function, or an op that cannot be run.
        """
        if mode not in MODES:
            raise InputError(f"mode {mode!r} is not one of {', '.join(MODES)}")
        self.package = package if isinstance(package, Package) else Package.open(package)
        self.function: FunctionInfo = self.package.function(function)
        self.mode = mode
        self._features = read_features(self.package.spec.description, self.function.name)
        self.reason = reason
        limit = default_cache_bytes() if weight_cache_bytes is None else weight_cache_bytes
        self.cache = cache if cache is not None else WeightCache(limit)
        self.watch: Watch | None = None

    @cached_property
    def _builder(self) -> PlanBuilder:
        return PlanBuilder(self.package, self.function.name, self.mode == "fp16")

    @cached_property
    def plan(self) -> Plan:
        """The steps, op by op."""
        return self._builder.build()

    @cached_property
    def _by_op(self) -> Program:
        return Program(self.plan, self.cache)

    @cached_property
    def _fused(self) -> Program:
        """The program of fp32 runs that nothing watches: a step may stand for several ops."""
        return Program(self._builder.build(fused=True), self.cache)

    @cached_property
    def _fits(self) -> bool:
        """Whether the cache may keep all weights, materialised: packing some and not others pays little.

        A cache that keeps nothing is for a single run, for which packing does not pay at all. And as all of them
        or none are packed, the same weights give the same bits in packages of one part and of several.
        """
        return self._builder.weight_bytes <= self.cache.limit_bytes

    def make_state(self) -> State:
        """Return the function's states, all zero.

        Raises:
            InputError: a state that is no tensor of a known and possible size.
        """
        found: State = {}
        for name, info in self.function.states.items():
            try:
                found[name] = _zeros(info)
            except OP_ERRORS as error:
                raise InputError(
                    f"{self.package.path}: state {name!r} of type {info.dtype} and shape {list(info.shape)} cannot be"
                    f" held ({first_line(error)})"
                ) from error
        return found

    @property
    def rounds_states(self) -> bool:
        """Whether states of type fp16 hold nothing finer."""
        return self.mode == "fp16"

    def read_state(self, state: State, name: str) -> np.ndarray:
        """Return what a state holds; the array may share its memory."""
        return state[name].numpy()

    def write_state(self, state: State, name: str, value: np.ndarray) -> None:
        """Put an array of the state's shape into it."""
        with torch.inference_mode():
            given = torch.from_numpy(value)
            if given.data_ptr() != state[name].data_ptr():
                state[name].copy_(given)

    def run(
        self, inputs: Mapping[str, np.ndarray | torch.Tensor], state: State | None = None
    ) -> dict[str, torch.Tensor]:
        """Run the function once.

        Args:
            inputs: every input by name, apart from those for which the package has a default. Floats of any width
                are taken for float inputs.
            state: buffers from `make_state`, updated in place; needed where the function has states.
                After an error their content is undefined.

        Returns:
            Outputs by name: floats as float32 (with fp16 values in fp16 mode), integers in their type.
            They belong to the caller.

        Raises:
            InputError: an input that is missing, left over or of the wrong shape or type, or an op that
                fails on these inputs; the message names it.
        """
        fused = self.mode == "fp32" and self.watch is None and self._fits
        program = self._fused if fused else self._by_op
        with torch.inference_mode():
            registers = self._registers(program, inputs)
            self._run(program, program.entries, registers, self._check_state(state))
        return self._outputs(program, registers)

    def steps(
        self,
        inputs: Mapping[str, np.ndarray | torch.Tensor],
        state: State | None = None,
        *,
        outputs: dict[str, torch.Tensor] | None = None,
    ) -> Iterator[tuple[OpInfo, tuple[torch.Tensor, ...]]]:
        """Run the function op by op; `run` computes the same, in fp32 mode up to rounding.

        Args:
            inputs: as in `run`.
            state: as in `run`.
            outputs: filled with what `run` returns when the last op has run.

        Yields:
            Each op with its outputs, which must neither be changed nor kept.

        Raises:
            InputError: as in `run`.
        """
        buffers, program = self._check_state(state), self._by_op
        with torch.inference_mode():
            registers = self._registers(program, inputs)
        for entry in program.entries:
            with torch.inference_mode():
                self._run(program, [entry], registers, buffers, free=False)
            yield entry[0].info, tuple(registers[slot] for slot in entry[0].outs)
            for slot in entry[3]:
                registers[slot] = None
        if outputs is not None:
            outputs.update(self._outputs(program, registers))

    def _run(
        self, program: Program, entries: list[Entry], registers: list[Any], buffers: State, free: bool = True
    ) -> None:
        """Run entries of the program on registers."""
        step = None
        try:
            for step, call, loads, frees in entries:
                if loads:
                    program.load(loads, registers)
                call(registers) if call is not None else self._touch_state(step, registers, buffers)
                if self.watch is not None:
                    self.watch(step.info, tuple(registers[slot] for slot in step.outs))
                if loads:
                    program.drop(loads, registers)
                if free:
                    for slot in frees:
                        registers[slot] = None
        except OP_ERRORS as error:
            raise InputError(
                f"{self.package.path}: {step and step.info} failed: {first_line(error)}"
            ) from error

    def _registers(self, program: Program, inputs: Mapping[str, Any]) -> list[Any]:
        """Return fresh registers that hold the inputs and the constants that the cache keeps."""
        registers = program.registers()
        self._bind(program.plan, inputs, registers)
        return registers

    def _outputs(self, program: Program, registers: list[Any]) -> dict[str, torch.Tensor]:
        """Copy the outputs out; the registers may hold views of inputs, constants or states."""
        outputs = program.plan.outputs
        program.load([slot for slot in outputs.values() if registers[slot] is None], registers)
        return {
            name: registers[slot].clone(memory_format=torch.contiguous_format)
            for name, slot in outputs.items()
        }

    def _touch_state(self, step: Step, registers: list[Any], buffers: State) -> None:
        """Read a state, or give it a new buffer: the written tensor itself where nothing else holds it."""
        if step.kind == "read":
            registers[step.outs[0]] = buffers[step.state]
            return
        data, old = registers[step.args[0]], buffers[step.state]
        if data is old:
            return
        whole = data.is_contiguous() and data.untyped_storage().nbytes() == data.numel() * data.element_size()
        buffers[step.state] = data if whole and not step.copies_data else data.clone()

    def _check_state(self, state: State | None) -> State:
        if not self.function.states:
            return {}
        if state is None:
            raise InputError(
                f"{self.package.path}: function {self.function.name} has states"
                f" ({', '.join(self.function.states)}); pass state=session.make_state()"
            )
        if set(state) != set(self.function.states):
            raise InputError(
                f"{self.package.path}: function {self.function.name} has states {list(self.function.states)}"
            )
        return state

    def _bind(self, plan: Plan, inputs: Mapping[str, Any], registers: list[Any]) -> None:
        wanted = self.function.inputs
        missing = [name for name in wanted if name not in inputs]
        if missing:
            inputs = {**inputs, **self._defaults(missing)}
            missing = [name for name in missing if name not in inputs]
        extra = [name for name in inputs if name not in wanted]
        if missing or extra:
            problem = f"input {missing[0]!r} is missing" if missing else f"there is no input {extra[0]!r}"
            raise InputError(
                f"{self.package.path}: function {self.function.name}: {problem}; its inputs are {', '.join(wanted)}"
            )
        for name, info in wanted.items():
            registers[plan.inputs[name]] = self._input(name, info, inputs[name])

    def _defaults(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """What stands in for inputs that are left out, of those for which the package has a default of known size."""
        found = {}
        for name in names:
            info, default = self.function.inputs[name], self._features.get(name, Feature()).default
            if default is not None and info.is_static:
                fill = default if dtypes.BY_NAME[info.dtype].is_float else int(default)
                found[name] = torch.full(info.shape, fill)
        return found

    def _input(self, name: str, info: ValueInfo, given: Any) -> torch.Tensor:
        value = torch.as_tensor(given)
        where = f"{self.package.path}: function {self.function.name}: input {name!r}"
        fits = len(value.shape) == len(info.shape) and all(
            want in (RUN_TIME, size) for size, want in zip(value.shape, info.shape, strict=True)
        )
        if not fits:
            raise InputError(f"{where} has shape {list(value.shape)}, expected {list(info.shape)}")
        feature = self._features.get(name, Feature())
        if not feature.allows(value.shape):
            raise InputError(
                f"{where} has shape {list(value.shape)}; the package takes {feature.shapes_text}"
            )
        mil = dtypes.BY_NAME[info.dtype]
        if value.is_complex() or (value.is_floating_point() and not mil.is_float):
            raise InputError(f"{where} has type {value.dtype}, expected {info.dtype}")
        target = getattr(torch, mil.torch)
        if not target.is_floating_point and target is not torch.bool and value.numel():
            numbers, limits = np.asarray(given), torch.iinfo(target)
            least, most = int(numbers.min()), int(numbers.max())
            if least < limits.min or most > limits.max:
                raise InputError(f"{where} holds {least} to {most}, more than {info.dtype} does")
        value = value.to(target)
        return round_fp16(value) if self.mode == "fp16" and info.dtype == "fp16" else value


def _zeros(info: ValueInfo) -> torch.Tensor:
    return torch.zeros(info.shape, dtype=getattr(torch, dtypes.BY_NAME[info.dtype].torch))
