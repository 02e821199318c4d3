"""Chips and systems that rules apply to, each fact with its source.

Chips of one year are not alike, so each has its own profile. The facts on silicon come from reverse
engineering by a private route (not Core ML), measured on M1, M2 and M5 only. It sorts chips into compiler
families named after phone chips and says which Mac chip is in which family: M1 in A13, M2 in A14, M3 in A15,
M4 and M5 in A16. For Mac chips the profile follows that table. For phone chips it takes the family's name for
the chip's name, as those who quote the source do; a compiler target is numbered by device (`h18p` is
iPhone18,x), which would put each phone chip one family lower (A14 with M1). Facts that then change are marked.

iOS 16, 17 and 18 stand for macOS 13, 14 and 15 and their siblings too.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Generic, Literal, TypeVar

from pdconvert.errors import InputError

SILICON = "`ane-silicon-reference.md` (reverse-engineered)"
ANEFORGE = "ANEForge (reverse-engineered)"
FAMILY = "; it would differ if the source names a family here and not a chip"

GB = 1_000_000_000

T = TypeVar("T")


@dataclass(frozen=True)
class Fact(Generic[T]):
    """A value and where it is from."""

    value: T
    source: str


@dataclass(frozen=True)
class Chip:
    """What is known of one chip's Neural Engine.

    Attributes:
        name: as on the command line.
        device: `phone` or `mac`.
        axis_limit: largest size of an axis that is not the channel axis.
        channel_limit: largest size of the channel axis, axis 1 of a tensor of rank 4.
        int8: whether int8 weights with a scale per tensor or channel cross memory as int8, or are
            expanded to fp16 first.
        slice_saturates: whether a slice of the last axis that does not begin at 0 turns values beyond
            4094 into infinity.
        package_bytes: weight file beyond which a package is reported to leave the Neural Engine.
        equal_states: whether states of unlike shapes are reported to fail.
    """

    name: str
    device: Literal["phone", "mac"]
    axis_limit: Fact[int]
    channel_limit: Fact[int]
    int8: Fact[Literal["streams", "folds"]]
    slice_saturates: Fact[bool]
    package_bytes: Fact[int]
    equal_states: Fact[bool]


SLICES = f"{SILICON}: measured on M1 and M2"
STATES = "Anemll: states of unlike shapes fail on M1 and A14 (documentation)"
INT8_FOLDS = f"{SILICON}: int8 is expanded to fp16 on M1"
PHONE_SIZE = "Apple: 1 GB a model on iOS (documentation); CoreML-LLM saw the GPU take over near 1.0 to 1.4 GB"
MAC_SIZE = "0seba/coremlmodels: about 2 GB a model on a Mac (documentation)"

_TO_A15 = f"{SILICON}: 16384 an axis through A15"
_FROM_A16 = f"{SILICON}: 65536 from A16"
_SIZE_PHONE = Fact(
    GB, "Apple: 1 GB a model on iOS (documentation); CoreML-LLM saw the GPU take over near 1.0 to 1.4 GB"
)
_SIZE_MAC = Fact(2 * GB, "0seba/coremlmodels: about 2 GB a model on a Mac (documentation)")
_CHANNELS_TO_A15 = Fact(16384, f"{_TO_A15}; {ANEFORGE} measured 65536 channels from M1 on by its own route")
_STREAMS = f"{SILICON}: int8 streams from A14 and M2"
_CLEAN = f"{SILICON}: A15 and later take another route"


def _phone(name: str, *, limit: int, saturates: bool = False, family: bool = False) -> Chip:
    doubt = FAMILY if family else ""
    axis = Fact(limit, (_TO_A15 if limit == 16384 else _FROM_A16) + doubt)
    return Chip(
        name=name,
        device="phone",
        axis_limit=axis,
        channel_limit=_CHANNELS_TO_A15 if limit == 16384 else axis,
        int8=Fact("streams", _STREAMS + (FAMILY if name == "a14" else "")),
        slice_saturates=Fact(
            saturates,
            f"{SILICON}: A13 and A14 generation" if saturates else _CLEAN + (FAMILY if name == "a15" else ""),
        ),
        package_bytes=Fact(GB, PHONE_SIZE),
        equal_states=Fact(
            name == "a14", "Anemll: states of unlike shapes fail on M1 and A14 (documentation)"
        ),
    )


def _mac(
    name: str, *, limits: tuple[Fact[int], Fact[int]], folds: bool = False, saturates: Fact[bool]
) -> Chip:
    axis, channel = limits
    return Chip(
        name=name,
        device="mac",
        axis_limit=axis,
        channel_limit=channel,
        int8=Fact("folds", f"{SILICON}: int8 is expanded to fp16 on M1")
        if folds
        else Fact("streams", _STREAMS),
        slice_saturates=saturates,
        package_bytes=Fact(2 * GB, MAC_SIZE),
        equal_states=Fact(name == "m1", STATES),
    )


_WIDE = Fact(65536, f"{ANEFORGE}: M4 and M5 are in the family with 65536")
_NARROW = Fact(16384, f"{ANEFORGE}: 16384 in the families of M2 and M3")
_CHANNELS = Fact(65536, f"{SILICON}: the channel axis reaches 65536 on M2; {ANEFORGE}: and later")
_SATURATES = Fact(True, SLICES)
_EXACT = Fact(False, f"{ANEFORGE}: exact on M5; M3 and M4 are not reported")

CHIPS: tuple[Chip, ...] = (
    _phone("a14", limit=16384, saturates=True),
    _phone("a15", limit=16384),
    _phone("a16", limit=65536, family=True),
    _phone("a17", limit=65536),
    _phone("a18", limit=65536),
    _mac("m1", limits=(Fact(16384, _TO_A15), _CHANNELS_TO_A15), folds=True, saturates=_SATURATES),
    _mac("m2", limits=(_NARROW, _CHANNELS), saturates=_SATURATES),
    _mac("m3", limits=(_NARROW, _CHANNELS), saturates=_EXACT),
    _mac("m4", limits=(_WIDE, _WIDE), saturates=_EXACT),
    _mac("m5", limits=(_WIDE, _WIDE), saturates=_EXACT),
)
"""Every chip that can be named, phones first."""

CHIP_NAMES: tuple[str, ...] = tuple(chip.name for chip in CHIPS)
SYSTEM_NAMES: tuple[str, ...] = ("iOS16", "iOS17", "iOS18")


@dataclass(frozen=True)
class Targets:
    """What a package is checked for.

    Attributes:
        chips: names of chips.
        systems: names of systems.
    """

    chips: tuple[str, ...]
    systems: tuple[str, ...]


def read_targets(names: Sequence[str], oldest: str) -> Targets:
    """Sort target names into chips and systems.

    Args:
        names: names of chips and systems, in any case; where none of a kind is named, all are meant.
        oldest: oldest system that opens the package; without a named system all from it on are meant.

    Raises:
        InputError: a name is neither.
    """
    known = {name.lower(): name for name in (*CHIP_NAMES, *SYSTEM_NAMES)}
    chosen = set()
    for name in names:
        if name.lower() not in known:
            near = get_close_matches(name.lower(), known, n=1)
            hint = f"; did you mean {known[near[0]]}?" if near else ""
            raise InputError(f"no target {name!r}{hint} (known: {', '.join(known.values())})")
        chosen.add(known[name.lower()])
    chips = tuple(name for name in CHIP_NAMES if name in chosen) or CHIP_NAMES
    systems = tuple(name for name in SYSTEM_NAMES if name in chosen)
    return Targets(chips, systems or tuple(name for name in SYSTEM_NAMES if name >= oldest))
