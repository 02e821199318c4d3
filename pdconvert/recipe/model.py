"""The recipe: everything that decides a build, as one frozen value."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, field_serializer, field_validator, model_validator

from pdconvert.recipe.passes import calibrated, dump_passes, fewest_bits, parse_passes, quantizes
from pdconvert.recipe.source import SourceSpec
from pdconvert.recipe.strict import Strict, fail

LARGEST_AXIS = 65536
"""No Neural Engine takes a longer axis (the newest ones; older ones end at 16384)."""


def _as_tuple(value: Any) -> Any:
    """A YAML list as the tuple that a frozen value holds."""
    return tuple(value) if isinstance(value, list) else value


def _as_tuple_or_one(value: Any) -> Any:
    """The same, or the tuple of one number."""
    return (value,) if isinstance(value, int) else _as_tuple(value)


class KvForm(Strict):
    """How the package gives its keys and values.

    Attributes:
        rope: `rotated` (keys after RoPE) or `raw` (before it).
        storage: of those before a call: `io` (the host's, an input) or `state` (Core ML states; iOS 18 and later).
    """

    rope: Literal["rotated", "raw"] = "rotated"
    storage: Literal["io", "state"] = "io"


class FunctionSpec(Strict):
    """One static-shape entry point of the package.

    Attributes:
        tokens: new tokens that one call takes.
        past: earlier tokens whose keys and values it takes as input.
    """

    tokens: int = Field(ge=1, le=LARGEST_AXIS)
    past: int = Field(default=0, ge=0, le=LARGEST_AXIS)

    @property
    def name(self) -> str:
        """The function's name in the package, such as `prefill_128` or `extend_128_ctx512`."""
        if not self.past:
            return f"prefill_{self.tokens}"
        return f"{'decode' if self.tokens == 1 else 'extend'}_{self.tokens}_ctx{self.past}"


class SplitModel(Strict):
    """How the package is cut into parts, each a run of decoder layers.

    Attributes:
        limit_mb: most megabytes of weights in a part.
        parts: or the number of parts.
    """

    limit_mb: int | None = Field(default=None, ge=1)
    parts: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _one_of_two(self) -> Self:
        if (self.limit_mb is None) == (self.parts is None):
            fail("expected one of limit_mb and parts")
        return self


class Prefill(Strict):
    """The Core ML half.

    Attributes:
        target: the oldest OS that loads the package.
        outputs: `kv` ends at the last layer's keys and values; `logits` keeps the head.
        logits: with those, of one `row` that an input chooses, or of `all` rows.
        head_limit: most token ids of one output of logits; more are cut into several (pass split_head). 16384 fits
            the Neural Engine of every chip, 65536 those from A16 and M2 on.
        embedding: where token ids become vectors: on the `host` or in the `graph`.
        kv: the form of keys and values.
        split_model: cuts the package into parts under a size; left out, it is one.
        functions: the entry points, which share one copy of the weights.
    """

    target: Literal["iOS16", "iOS17", "iOS18"] = "iOS18"
    outputs: Literal["kv", "logits"] = "kv"
    logits: Literal["row", "all"] = "row"
    head_limit: int = Field(default=16384, ge=1, le=LARGEST_AXIS)
    embedding: Literal["host", "graph"] = "host"
    kv: KvForm = KvForm()
    split_model: SplitModel | None = None
    functions: Annotated[tuple[FunctionSpec, ...], BeforeValidator(_as_tuple)] = (FunctionSpec(tokens=128),)

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if not self.functions:
            fail("expected at least one function, such as {tokens: 128}", path=["functions"])
        names = [function.name for function in self.functions]
        for index, name in enumerate(names):
            if name in names[:index]:
                fail(f"{name} is listed twice", path=["functions", index])
            if name.startswith("decode_") and self.outputs != "logits":
                fail(f"{name} decodes, which needs prefill.outputs: logits", path=["functions", index])
        if self.kv.storage == "state":
            if self.kv.rope == "raw":
                fail("state holds rotated keys, which raw keys are not; use io", path=["kv", "storage"])
            if self.split_model is not None:
                fail("state is of one package, which split_model cuts; use io", path=["kv", "storage"])
        if self.target in ("iOS16", "iOS17"):
            if self.kv.storage == "state":
                fail(f"state needs prefill.target iOS18 or later, not {self.target}", path=["kv", "storage"])
            if len(names) > 1:
                fail(
                    f"more than one function needs prefill.target iOS18 or later, not {self.target}",
                    path=["functions"],
                )
        return self


class Decode(Strict):
    """The MLX half.

    Attributes:
        grid: `shared`: the linears hold the same quantized values as the package; `own`: integers in groups of
            input channels, which MLX holds best, with a quantization of their own; `source`: the grid that a GGUF
            file of Q4_0, Q4_1 or Q8_0 has already, code by code; that of embedding and head too, where the package
            holds neither.
        bits: of the linears' own grid.
        group_size: input channels that share a scale there.
        embedding_bits: of the token embedding; left out, 8 where weights are quantized, else 16.
        head_bits: of the output head, by the same rule.
    """

    grid: Literal["shared", "own", "source"] = "shared"
    bits: Literal[4, 8] | None = None
    group_size: Literal[32, 64, 128] | None = None
    embedding_bits: Literal[8, 16] | None = None
    head_bits: Literal[8, 16] | None = None

    @model_validator(mode="after")
    def _sizes_need_own_grid(self) -> Self:
        for name in ("bits", "group_size"):
            if self.grid != "own" and getattr(self, name) is not None:
                fail(f"has no meaning with decode.grid {self.grid}; set decode.grid to own", path=[name])
        return self


class Gates(Strict):
    """What a build must reach.

    Attributes:
        adapted_db: SQNR of the rewritten blocks in torch against the reference.
        graph_db: SQNR of the package in fp32 arithmetic.
        fp16_db: SQNR of the package in fp16 arithmetic against its own weights in fp32.
        kv_db: SQNR of keys and values of a quantized build against the fp32 reference.
        kld: largest mean KL divergence of the next-token distributions, nats.
        top1: least share of positions with the reference's most likely token.
        reason: why a gate is weaker than its default; required exactly then.
    """

    adapted_db: float = 60.0
    graph_db: float = 55.0
    fp16_db: float = 40.0
    kv_db: float = 28.0
    kld: float = Field(default=0.01, ge=0)
    top1: float = Field(default=0.93, ge=0, le=1)
    reason: str | None = None

    _LOWER_IS_STRICTER: ClassVar[frozenset[str]] = frozenset({"kld"})

    @model_validator(mode="after")
    def _weaker_needs_reason(self) -> Self:
        weaker = self.weakened()
        if weaker and not (self.reason or "").strip():
            name = weaker[0]
            default = type(self).model_fields[name].default
            fail(
                f"weaker than the default {default:g}, which needs a gates.reason",
                path=[name],
                shown=getattr(self, name),
            )
        if self.reason is not None and not weaker:
            fail("given, but no gate is weaker than its default; leave it out", path=["reason"])
        return self

    def weakened(self) -> tuple[str, ...]:
        """The gates that are weaker than their default."""
        names = []
        for name, field in type(self).model_fields.items():
            if name == "reason":
                continue
            value, default = getattr(self, name), field.default
            if value > default if name in self._LOWER_IS_STRICTER else value < default:
                names.append(name)
        return tuple(names)


class LowBitGates(Gates):
    """The defaults where weights have fewer than 8 bits: what a good 4-bit build reaches."""

    kv_db: float = 10.0
    kld: float = Field(default=0.3, ge=0)
    top1: float = Field(default=0.7, ge=0, le=1)


class Probe(Strict):
    """What the checks run on.

    Attributes:
        text: the text whose tokens go through every block; left out, the project's own.
        eval_windows: windows of held-out text over which KLD and top-1 are taken: of each, one call is prefilled, or
            two where a function has a past, and as many tokens as one call takes are scored.
    """

    text: str | None = Field(default=None, min_length=1)
    eval_windows: int = Field(default=4, ge=1)


Lengths = Annotated[
    tuple[Annotated[int, Field(ge=8, le=8192)], ...], BeforeValidator(_as_tuple_or_one), Field(min_length=1)
]


class CalibrationText(Strict):
    """What calibrated passes look at: by default text that the model writes itself.

    Attributes:
        file: a text file, or a JSONL file whose lines have a `text`; left out, the model writes.
        tokens: of all sequences together, about.
        length: tokens of a sequence: a number, or a list of lengths, each with the same share of the tokens. None is
            longer than the model's positions.
        seed: of what is drawn.
    """

    file: str | None = Field(default=None, min_length=1)
    tokens: int = Field(default=49152, ge=8)
    length: Lengths = (256, 512, 1024, 2048)
    seed: int = Field(default=0, ge=0)


class Recipe(Strict):
    """A build, complete: source, both halves, passes in order, gates.

    Attributes:
        version: of the recipe format.
        name: of the build; its default folder is `build/<name>`.
        source: where the checkpoint comes from.
        prefill: the Core ML half.
        passes: pass values in the order in which they run.
        decode: the MLX half.
        gates: what the build must reach.
        probe: what the checks run on.
        calibration: what calibrated passes look at.
    """

    version: Literal[1]
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    source: SourceSpec
    prefill: Prefill = Prefill()
    passes: tuple[Any, ...]
    decode: Decode = Field(default=Decode(), validate_default=True)
    gates: Gates = Field(default_factory=dict, validate_default=True)
    probe: Probe = Probe()
    calibration: CalibrationText = CalibrationText()

    @field_validator("passes", mode="before")
    @classmethod
    def _parse_passes(cls, data: Any) -> tuple[Any, ...]:
        return parse_passes(data)

    @field_validator("decode", mode="after")
    @classmethod
    def _fill_bits(cls, decode: Decode, info: Any) -> Decode:
        """Decide the bits that the recipe leaves open; `passes` is validated before."""
        if "passes" not in info.data:
            return decode
        bits: Literal[8, 16] = 8 if quantizes(info.data["passes"]) else 16
        own = decode.grid == "own"
        return Decode(
            grid=decode.grid,
            bits=(decode.bits or 4) if own else None,
            group_size=(decode.group_size or 64) if own else None,
            embedding_bits=decode.embedding_bits or bits,
            head_bits=decode.head_bits or bits,
        )

    @field_validator("gates", mode="before")
    @classmethod
    def _choose_gates(cls, data: Any, info: Any) -> Any:
        """The gates of the recipe's weights; `passes` is validated before."""
        low = fewest_bits(info.data.get("passes", ())) < 8
        return LowBitGates.model_validate(data) if low and isinstance(data, dict) else data

    @field_serializer("passes")
    def _dump_passes(self, passes: tuple[Any, ...]) -> list[Any]:
        return dump_passes(passes)

    def resolved(self) -> dict[str, Any]:
        """Plain data with every default written out, which loads to an equal recipe."""
        data = self.model_dump(mode="json")
        data["source"] = {key: value for key, value in data["source"].items() if value is not None}
        split = data["prefill"]["split_model"]
        if split is None:
            del data["prefill"]["split_model"]
        else:
            data["prefill"]["split_model"] = {key: value for key, value in split.items() if value is not None}
        data["decode"] = {key: value for key, value in data["decode"].items() if value is not None}
        if data["gates"]["reason"] is None:
            del data["gates"]["reason"]
        if data["probe"]["text"] is None:
            del data["probe"]["text"]
        if not calibrated(self.passes):
            del data["calibration"]
        elif data["calibration"]["file"] is None:
            del data["calibration"]["file"]
        return data
