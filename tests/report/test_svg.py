"""Inline SVG from matplotlib: colours of the theme, tooltips on the right shapes, nothing left behind."""

import re

import matplotlib
import pytest

from pdconvert.report.svg import COLOURS, WIDTH, drawing, new_plot


def test_colours_become_variables_and_tooltips_titles() -> None:
    with drawing("a"):
        plot, (axis,) = new_plot(100, "a plot")
        plot.tip(axis.scatter([1, 2, 3], [1, 4, 9], color=COLOURS["a"]), "one", "two", "<three>")
        plot.tip(axis.barh(0, 5, color=COLOURS["bad"])[0], "a bar", name="bars-0")
        text = plot.svg()
    start = text.partition(">")[0]
    assert f'viewBox="0 0 {WIDTH} 100"' in start and 'aria-label="a plot"' in start
    assert 'class="plot"' in start and 'role="img"' in start and "width=" not in start
    titles = re.findall(r"<title>(.*?)</title>", text)
    assert sorted(titles) == ["&lt;three&gt;", "a bar", "one", "two"]
    assert titles.index("one") < titles.index("two") < titles.index("&lt;three&gt;")
    assert 'data-name="bars-0"' in text
    assert "var(--a)" in text and "var(--bad)" in text and not re.search(r"#fe..01", text)
    assert "<metadata" not in text and "<style" not in text


def test_a_cell_of_a_mesh_has_its_own_tooltip() -> None:
    with drawing("b"):
        plot, (axis,) = new_plot(100, "a mesh")
        plot.tip(axis.pcolormesh([[1, 2], [3, 4]]), "a", "b", "c", "d")
        assert re.findall(r"<title>(.)</title>", plot.svg()) == ["a", "b", "c", "d"]


def test_too_few_tooltips_are_an_error() -> None:
    with drawing("c"):
        plot, (axis,) = new_plot(100, "x")
        plot.tip(axis.scatter([1, 2, 3], [1, 2, 3]), "one", "two")
        with pytest.raises(AssertionError, match="3 shapes for 2 tooltips"):
            plot.svg()


def test_ids_of_two_plots_do_not_meet() -> None:
    texts = []
    for salt in ("d", "e"):
        with drawing(salt):
            plot, (axis,) = new_plot(100, "x")
            axis.plot([1, 2], [1, 2])
            axis.scatter([1, 2], [1, 2])
            texts.append(plot.svg())
    first, second = (set(re.findall(r' id="([^"]+)"', text)) for text in texts)
    assert first and first.isdisjoint(second)
    for text, ids in zip(texts, (first, second), strict=True):
        assert set(re.findall(r'(?:url\(|href=")#([\w-]+)', text)) <= ids


def test_the_same_plot_is_the_same_text() -> None:
    def draw() -> str:
        with drawing("f"):
            plot, (axis,) = new_plot(100, "x")
            axis.plot([1, 2], [1, 2])
            return plot.svg()

    assert draw() == draw()


def test_the_settings_of_the_process_are_left_alone() -> None:
    before = dict(matplotlib.rcParams)
    with pytest.raises(ZeroDivisionError), drawing("g"):
        raise ZeroDivisionError
    assert dict(matplotlib.rcParams) == before
