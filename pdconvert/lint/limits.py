"""Rules on sizes: axes, layers, and the system that a package needs."""

from collections.abc import Iterator

from pdconvert.executors.mil.view import FunctionView, Op, PackageView, Value
from pdconvert.lint.rule import Found, function_rule, package_rule
from pdconvert.lint.targets import ANEFORGE, CHIPS, SILICON, SYSTEM_NAMES, Chip

MANY_LAYERS = 15
_ACTIVATIONS = ("silu", "gelu", "relu", "swish")


@function_rule(
    "axis-limit",
    "fatal",
    title="No axis of a tensor may exceed the limit of the chip",
    source=f"{SILICON}: 16384 through A15 and M1, 65536 for the channel axis on M2, 65536 from A16; {ANEFORGE} for M3"
    " to M5; more-ane-transformers: `Output blob dimensions exceed ANE limit` for a linear of 50257 (documentation)",
    mend="split the op along the axis (a head into several projections: prefill.head_limit), or leave logits out"
    " (prefill.outputs: kv)",
)
def axis_limit(function: FunctionView) -> Iterator[Found]:
    """An input, state or computed tensor with an axis beyond the limit; axis 1 of rank 4 is the channel axis."""
    for name, value in (function.inputs | function.states).items():
        yield from _beyond(value, None, name)
    for op in function.computed_ops:
        for value in op.outputs:
            yield from _beyond(value, op, value.name)


def _beyond(value: Value, op: Op | None, name: str) -> Iterator[Found]:
    for axis, size in enumerate(value.shape):
        channel = len(value.shape) == 4 and axis == 1
        chips = tuple(chip.name for chip in CHIPS if size > _limit(chip, channel))
        if chips:
            yield Found(
                f"{'channel axis' if channel else 'axis'} {axis} of {size}", op, name, value, chips=chips
            )


def _limit(chip: Chip, channel: bool) -> int:
    return (chip.channel_limit if channel else chip.axis_limit).value


@function_rule(
    "many-layers",
    "info",
    title="Programs with many layers reached limits of the compiler",
    source="ANEForge#254: about 31 layers, by a private route (issue); CoreML-LLM: the compiler hung from about 15"
    " (documentation)",
    mend="split the model into several packages if it does not load",
)
def many_layers(function: FunctionView) -> Iterator[Found]:
    """More than 15 layers, counted by attention softmaxes or by activations, whichever are fewer."""
    attention = len(function.of_type("softmax", "scaled_dot_product_attention"))
    activations = len(function.of_type(*_ACTIVATIONS))
    layers = min(attention, activations or attention)
    if layers > MANY_LAYERS:
        yield Found(f"about {layers} layers, {len(function.computed_ops)} ops", name=function.name)


@package_rule(
    "newer-system",
    "fatal",
    title="A package does not load on a system older than its specification version",
    source="coremltools, minimum_deployment_target (documentation)",
    mend="convert for the older system; 4-bit weights and states need iOS 18",
)
def newer_system(package: PackageView) -> Iterator[Found]:
    """A specification version that the system does not open."""
    older = tuple(name for name in SYSTEM_NAMES if name < package.system)
    if older:
        yield Found(f"needs {package.system}", name=package.package.path.name, systems=older)
