"""Lines of equal value on a heat map: every one carries its value, or it is not drawn."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from contourpy import contour_generator
from matplotlib.axes import Axes
from matplotlib.patheffects import withStroke
from matplotlib.transforms import Bbox
from numpy.typing import NDArray

from perfmodel.plots.style import BLACK
from perfmodel.plots.sweep.axes import log_spaced
from perfmodel.plots.sweep.labels import nice_ticks

#: Lines bend this often between two points of the sweep.
_FINER = 12
#: Shorter pieces, in shares of the panel's diagonal, are crumbs and not lines.
_CRUMB = 0.08
#: Places along a line where its label is tried.
_TRIES = 60
#: Widths of the break-even line and of the others.
_WIDTHS = (2.0, 0.7)
_LABEL_BOX = {"boxstyle": "square,pad=0.1", "facecolor": "white", "edgecolor": "none", "alpha": 0.85}


class _Piece(NamedTuple):
    """A connected piece of a line of equal value: its points in the data [points, 2] and on the page [pixel]."""

    level: float
    width: float
    data: NDArray[np.float64]
    pixels: NDArray[np.float64]


def draw_isolines(
    axes: Axes, x: NDArray[np.float64], y: NDArray[np.float64], table: NDArray[np.float64], *, ratio: bool
) -> None:
    """Draw labelled lines of equal value, so that colour is not needed to read one; of a ratio, 1 is thick.

    Pieces that are short, or have no room for a label, are left out, except for the thick line.

    Parameters
    ----------
    axes : a panel that is in its place, with its limits set. table : values [y, x], NaN where there is none.
    """
    finite = table[np.isfinite(table)]
    low, high = float(finite.min()), float(finite.max())
    if not high > low or (low > 0 and high < 1.02 * low):
        return
    pieces = _pieces(axes, *_refined(x, y, table), _levels(low, high, ratio=ratio))
    taken: list[Bbox] = []
    for i, piece in enumerate(pieces):
        others = [one.pixels for j, one in enumerate(pieces) if j != i and one.level != piece.level]
        place = _label(axes, piece, others, taken, f"{piece.level:.3g}{'×' if ratio else ''}")
        if place is None and piece.width < max(_WIDTHS):
            continue
        (line,) = axes.plot(*piece.data.T, color=BLACK, linewidth=piece.width, zorder=2.5)
        line.set_gid("isoline")
        line.set_in_layout(False)
        line.set_path_effects([withStroke(linewidth=piece.width + 1.2, foreground="white")])


def _levels(low: float, high: float, *, ratio: bool) -> list[tuple[float, float]]:
    """Values that get a line, with its width; 1 first."""
    levels = [level for level in (nice_ticks(low, high, 6) if low > 0 else []) if low < level < high]
    if len(levels) < 2:
        levels = np.linspace(low, high, 5)[1:-1].tolist()
    crossed = ratio and low < 1 < high
    if crossed:
        levels = [level for level in levels if abs(np.log(level)) > 0.2]
    return [*([(1.0, _WIDTHS[0])] if crossed else []), *((level, _WIDTHS[1]) for level in levels)]


def _refined(
    x: NDArray[np.float64], y: NDArray[np.float64], table: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64], Callable[[Any], Any]]:
    """A table on more points, straight between its own on the axes as they are drawn; of ratios in their logarithm.

    Returns places of the columns and rows, the (logarithmic) values, and what turns a level into such a value.
    """
    log = bool((table[np.isfinite(table)] > 0).all())
    values = np.log(table) if log else table
    axes = []
    for d, one in enumerate((y, x)):
        place = np.log(one) if log_spaced(one) else one
        steps = max(1, min(_FINER, 400 // len(one)))
        finer = np.interp(np.arange((len(one) - 1) * steps + 1) / steps, np.arange(len(one)), place)
        if steps > 1:
            values = np.apply_along_axis(lambda row, to=finer, at=place: np.interp(to, at, row), d, values)
        axes.append(np.exp(finer) if log_spaced(one) else finer)
    return axes[1], axes[0], values, np.log if log else (lambda value: value)


def _pieces(
    axes: Axes,
    x: NDArray[np.float64],
    y: NDArray[np.float64],
    values: NDArray[np.float64],
    scaled: Callable[[Any], Any],
    levels: Sequence[tuple[float, float]],
) -> list[_Piece]:
    """Pieces that are long enough to be seen as lines: the thick ones first, then the longest."""
    generator = contour_generator(x, y, np.ma.masked_invalid(values))
    shortest = _CRUMB * float(np.hypot(*axes.get_window_extent().size))
    found = []
    for level, width in levels:
        for line in generator.lines(float(scaled(level))):
            data = np.asarray(line, dtype=np.float64)
            pixels = np.asarray(axes.transData.transform(data))
            if _along(pixels)[-1] >= shortest:
                found.append(_Piece(level, width, data, pixels))
    return sorted(found, key=lambda one: (-one.width, -_along(one.pixels)[-1]))


def _along(pixels: NDArray[np.float64]) -> NDArray[np.float64]:
    """Way from the start of a line to each of its points."""
    return np.concatenate([[0.0], np.cumsum(np.hypot(*np.diff(pixels, axis=0).T))])


def _label(
    axes: Axes, piece: _Piece, others: Sequence[NDArray[np.float64]], taken: list[Bbox], words: str
) -> Bbox | None:
    """Write a value on its line: inside of the panel, on no other label, and if possible on no other line.

    The place is added to ``taken``; None where there is no room.
    """
    text = axes.text(0, 0, words, fontsize=7, ha="center", va="center", clip_on=True, bbox=_LABEL_BOX, zorder=5)
    text.set_in_layout(False)
    panel, way = axes.get_window_extent(), _along(piece.pixels)
    half = np.array(text.get_window_extent().size) / 2 + 3
    shares = sorted(np.linspace(0.03, 0.97, _TRIES).tolist(), key=lambda share: abs(share - 0.5))
    ways = [np.array([np.interp(share * way[-1], way, column) for column in piece.pixels.T]) for share in shares]
    for strict in (True, False):
        for middle in ways:
            box = Bbox([middle - half, middle + half])
            inside = panel.x0 <= box.x0 and box.x1 <= panel.x1 and panel.y0 <= box.y0 and box.y1 <= panel.y1
            if not inside or any(box.overlaps(other) for other in taken):
                continue
            if strict and any(_passes(line, box) for line in others):
                continue
            text.set_position(tuple(axes.transData.inverted().transform(middle)))
            taken.append(box)
            return box
    text.remove()
    return None


def _passes(line: NDArray[np.float64], box: Bbox) -> bool:
    """Whether a line has a point in a box; its points lie close together."""
    x, y = line.T
    return bool(((box.x0 <= x) & (x <= box.x1) & (box.y0 <= y) & (y <= box.y1)).any())
