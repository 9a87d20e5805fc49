"""Figures of a sweep on the page: tall enough for panels, legend and caption, and no label longer than its panel."""

import math
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from perfmodel.plots.canvas import canvas, lay_out
from perfmodel.plots.words import caption, caption_lines, folded

#: Height of a line of text and of a row of the legend [inch]; characters of the legend in an inch of width.
_LINE, _ROW, _CHARACTERS = 0.122, 0.15, 17.0
#: Letters of a title across the whole page.
_TITLE = 92
#: How often labels are folded anew, as each change moves the panels a little.
_ROUNDS = 4


def _entry(name: str, width: float) -> str:
    """An entry of a legend in lines that fit in a figure of this width [inch]."""
    most = int(width * _CHARACTERS) - 7
    return name if len(name) <= most else _folded_name(name, most)


def _folded_name(name: str, most: int) -> str:
    """A name in lines of at most so many characters, none of which begins with a space."""
    return "\n".join(line.strip() for line in folded(name, most).split("\n"))


def legend_columns(width: float, names: Sequence[str]) -> int:
    """Columns of a legend above a figure of this width [inch]."""
    widest = max((len(line) for name in names for line in _entry(name, width).split("\n")), default=1)
    return max(1, min(len(names), int(width * _CHARACTERS / (widest + 6))))


def panel_titles(names: Sequence[str], columns: int) -> tuple[list[str], float]:
    """Names in lines that fit above panels of a page of so many columns, and the height of a row's further lines."""
    titles = [_folded_name(name, _TITLE // columns) if columns > 1 else name for name in names]
    return titles, _LINE * max(title.count("\n") for title in titles)


@contextmanager
def page(
    rows: int,
    columns: int,
    size: tuple[float, float],
    sentences: Sequence[str],
    names: Sequence[str] = (),
    *,
    sharey: bool = False,
) -> Iterator[tuple[Figure, NDArray[Any]]]:
    """A figure whose panels take ``size`` [inch] together, with a caption of the sentences and room for a legend.

    names : entries of the legend that is drawn with `legend_columns` columns above the panels.
    """
    width, height = size
    legend = 0
    if names:
        deepest = max(_entry(name, width).count("\n") + 1 for name in names)
        legend = deepest * math.ceil(len(names) / legend_columns(width, names))
    total = height + _ROW * legend + _LINE * len(caption_lines(width, *sentences)) + 0.1
    with canvas(rows, columns, (width, total), sharey=sharey) as (figure, grid):
        caption(figure, *sentences)  # first, so that drawing code that lays the figure out finds it in its place
        yield figure, grid
        settle(figure)


def legend_above(figure: Figure, entries: dict[str, Any]) -> None:
    """The legend above the panels, by label."""
    width = figure.get_figwidth()
    names = [_entry(name, width) for name in entries]
    figure.legend(list(entries.values()), names, loc="outside upper center", ncols=legend_columns(width, names))


def settle(figure: Figure) -> None:
    """Lay the figure out, with labels and titles in as many lines as they need to stay beside their panels."""
    for _ in range(_ROUNDS):
        lay_out(figure)
        if not sum(_fold_labels(figure, axes) for axes in figure.axes if axes.get_visible()):
            return


def _fold_labels(figure: Figure, axes: Axes) -> bool:
    """Fold what is too long beside one panel; whether anything was."""
    panel, page_width = axes.get_window_extent(), figure.bbox.width
    middle = (panel.x0 + panel.x1) / 2
    alone = len([one for one in figure.axes if one.get_visible() and one.bbox.width > page_width / 5]) == 1
    across = 2 * min(middle, page_width - middle) if alone else 0.97 * panel.width
    title = axes.set_title(axes.get_title(loc="left"), loc="left")  # gives the text that is there
    above = page_width - panel.x0 if alone else panel.width * 1.06
    changed = False
    for text, room, upright in (
        (axes.xaxis.label, across, False),
        (axes.yaxis.label, 1.08 * panel.height, True),
        (title, above, False),
    ):
        words = text.get_text()
        if not words:
            continue
        box = text.get_window_extent()
        length = box.height if upright else box.width
        if length <= room:
            continue
        longest = max(map(len, words.split("\n")))
        most = max(8, int(longest * room / length))
        shorter = _folded_name(words.replace("\n", " "), most) if text is title else _folded_label(words, most)
        if shorter != words:
            text.set_text(shorter)
            changed = True
    return changed


def _folded_label(words: str, most: int) -> str:
    """A label in lines of about ``most`` characters; its unit stays in one piece."""
    name, bracket, unit = words.replace("\n", " ").rpartition(" (")
    whole = name + bracket + unit.replace(" ", "\u00a0")
    lines = textwrap.wrap(whole, most, break_long_words=False)
    for width in range(8, most):  # the narrowest that takes no more lines, so that these are alike
        narrower = textwrap.wrap(whole, width, break_long_words=False)
        if len(narrower) == len(lines) and max(map(len, narrower)) <= most:
            lines = narrower
            break
    return "\n".join(lines).replace("\u00a0", " ")
