"""Figures of a sweep on the page: tall enough for their panels, legend and caption, whatever the caption has to say."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from matplotlib.figure import Figure
from numpy.typing import NDArray

from perfmodel.plots.canvas import canvas
from perfmodel.plots.words import caption, caption_lines, folded

#: Height of a line of text and of a row of the legend [inch]; characters of the legend in an inch of width.
_LINE, _ROW, _CHARACTERS = 0.122, 0.15, 17.0
#: Letters of a title across the whole page.
_TITLE = 92


def legend_columns(width: float, names: Sequence[str]) -> int:
    """Columns of a legend above a figure of this width [inch]."""
    widest = max((len(name) for name in names), default=1)
    return max(1, min(len(names), int(width * _CHARACTERS / (widest + 6))))


def panel_titles(names: Sequence[str], columns: int) -> tuple[list[str], float]:
    """Names in lines that fit above panels of a page of so many columns, and the height of a row's further lines."""
    titles = [
        "\n".join(line.strip() for line in folded(name, _TITLE // columns).split("\n")) if columns > 1 else name
        for name in names
    ]
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
    legend = math.ceil(len(names) / legend_columns(width, names)) if names else 0
    total = height + _ROW * legend + _LINE * len(caption_lines(width, *sentences)) + 0.1
    with canvas(rows, columns, (width, total), sharey=sharey) as (figure, grid):
        caption(figure, *sentences)  # first, so that drawing code that lays the figure out finds it in its place
        yield figure, grid


def legend_above(figure: Figure, entries: dict[str, Any]) -> None:
    """The legend above the panels, by label."""
    names = list(entries)
    columns = legend_columns(figure.get_figwidth(), names)
    figure.legend([entries[name] for name in names], names, loc="outside upper center", ncols=columns)
