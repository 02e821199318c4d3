"""Plots as inline SVG: matplotlib draws, and what it writes becomes theme-aware and gets tooltips.

A figure is drawn in stand-in colours, which become CSS variables, so that one plot serves light and dark. One unit
of a plot is one CSS pixel at its natural width.
"""

from __future__ import annotations

import io
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.figure import Figure

WIDTH = 410
"""Natural width of a plot: a phone's, and a third of a wide page."""

ROW, MARGIN = 17, 62
"""Height of a row of bars or cells, and of axes and labels around them."""

POINTS = 72  # matplotlib's points per inch: at this resolution a point is a unit of the SVG

HEAT_CLASSES = 9
THEME = ("ink", "muted", "line", "panel", "a", "b", "c", "d", "bad", "good")
HEAT = tuple(f"heat-{index}" for index in range(HEAT_CLASSES))
COLOURS = {name: f"#fe{index:02x}01" for index, name in enumerate((*THEME, *HEAT, "heat-ink"))}
"""Stand-ins, by the name of the CSS variable that replaces them."""

_VARIABLES = {value: f"var(--{name})" for name, value in COLOURS.items()}
_STAND_IN = re.compile("|".join(_VARIABLES))
_SVG = "{http://www.w3.org/2000/svg}"
_LINK = "{http://www.w3.org/1999/xlink}href"
_REFERENCE = re.compile(r"#([\w-]+)")
_DRAWING = threading.Lock()  # matplotlib's settings belong to the process

SETTINGS: dict[str, Any] = {
    "svg.fonttype": "none",
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "axes.titlesize": 10,
    "axes.labelsize": 10,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "legend.fontsize": 9,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.facecolor": "none",
    "axes.edgecolor": COLOURS["line"],
    "axes.labelcolor": COLOURS["ink"],
    "axes.titlecolor": COLOURS["ink"],
    "text.color": COLOURS["ink"],
    "xtick.color": COLOURS["line"],
    "ytick.color": COLOURS["line"],
    "xtick.labelcolor": COLOURS["ink"],
    "ytick.labelcolor": COLOURS["ink"],
    "grid.color": COLOURS["line"],
    "grid.linewidth": 0.5,
    "axes.grid": True,
    "axes.axisbelow": True,
    "lines.linewidth": 1.6,
    "lines.markersize": 3.5,
}


class Plot:
    """A figure in the making.

    Attributes:
        figure: matplotlib's.
        label: what it shows, for those who do not see it.
    """

    def __init__(self, figure: Figure, label: str):
        self.figure = figure
        self.label = label
        self._tips: dict[str, list[str]] = {}
        self._classes: dict[str, str] = {}

    def tip(self, artist: Artist, *texts: str, name: str = "") -> None:
        """Give an artist a tooltip; several texts go to the shapes or markers that it is made of, in order.

        Args:
            name: value of the attribute `data-name`, for scripts.
        """
        key = f"tip{len(self._tips)}"
        artist.set_gid(key)
        self._tips[key], self._classes[key] = list(texts), name

    def svg(self) -> str:
        """The finished element."""
        buffer = io.StringIO()
        self.figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
        root = ElementTree.fromstring(buffer.getvalue())
        for node in root.findall(f"{_SVG}metadata"):
            root.remove(node)
        for node in root.iter(f"{_SVG}defs"):
            for style in node.findall(f"{_SVG}style"):
                node.remove(style)
        self._put_tips(root)
        _drop_ids(root)
        for node in root.iter():
            if _LINK in node.attrib:
                node.set("href", node.attrib.pop(_LINK))
            node.tag = node.tag.removeprefix(_SVG)  # HTML needs no namespace
        for name in ("width", "height", "version"):
            root.attrib.pop(name, None)
        root.set("role", "img")
        root.set("aria-label", self.label)
        root.set("class", "plot")
        text = ElementTree.tostring(root, encoding="unicode")
        return _STAND_IN.sub(lambda found: _VARIABLES[found[0]], text)

    def _put_tips(self, root: ElementTree.Element) -> None:
        for node in root.iter(f"{_SVG}g"):
            texts = self._tips.get(node.get("id", ""))
            if texts is None:
                continue
            name = self._classes[node.get("id", "")]
            if name:
                node.set("data-name", name)
            targets = [node] if len(texts) == 1 else _shapes(node, len(texts))
            for target, text in zip(targets, texts, strict=True):
                title = ElementTree.Element(f"{_SVG}title")
                title.text = text
                target.insert(0, title)


def _shapes(node: ElementTree.Element, count: int) -> list[ElementTree.Element]:
    """The shapes that an artist was drawn as: uses of a marker, or paths."""
    uses = list(node.iter(f"{_SVG}use"))
    defined = {child for defs in node.iter(f"{_SVG}defs") for child in defs.iter()}
    shapes = uses or [path for path in node.iter(f"{_SVG}path") if path not in defined]
    assert len(shapes) == count, f"{len(shapes)} shapes for {count} tooltips"
    return shapes


def _drop_ids(root: ElementTree.Element) -> None:
    """Remove ids that nothing refers to: several plots stand in one page."""
    used = {
        name
        for node in root.iter()
        for value in (node.get(_LINK, ""), node.get("clip-path", ""))
        for name in _REFERENCE.findall(value)
    }
    for node in root.iter():
        if node.get("id") not in used:
            node.attrib.pop("id", None)


@contextmanager
def drawing(salt: str) -> Iterator[None]:
    """Draw with this module's settings, whatever the process has.

    Args:
        salt: of the ids in the SVG, which must differ between the plots of a page.
    """
    import matplotlib

    settings: Any = {**SETTINGS, "svg.hashsalt": salt}
    with _DRAWING, matplotlib.rc_context(settings):
        yield


def new_plot(height: float, label: str, *, rows: int = 1, **options: Any) -> tuple[Plot, Sequence[Any]]:
    """An empty plot of `WIDTH` and its axes, one above the other."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH / POINTS, height / POINTS), dpi=POINTS, layout="constrained")
    axes = figure.subplots(rows, 1, squeeze=False, **options)[:, 0]
    return Plot(figure, label), list(axes)
