"""Numbers beside marks that may lie close together."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.transforms import Bbox
from numpy.typing import NDArray

from perfmodel.plots.style import BLACK

#: Distances of a number from its mark that are tried, the nearest first, and from where on a thin line joins them;
#: half the size of a mark [1/72 inch].
_AWAY, _JOINED, _HALF = (8.0, 12.0, 17.0, 23.0, 30.0, 38.0, 48.0, 60.0), 12.0, 2.6
#: Directions that are tried, in the order of preference [degree].
_WAYS = (135.0, 45.0, 90.0, -45.0, -135.0, -90.0, 180.0, 0.0, 112.0, 68.0, -112.0, -68.0, 157.0, 23.0)


def number_marks(
    axes: Axes, places: Sequence[tuple[float, float]], numbers: Sequence[int], curves: Sequence[NDArray[np.float64]]
) -> None:
    """Write a number beside every mark of a panel that is laid out: inside of it, on no other number, mark or curve.

    Parameters
    ----------
    places : the marks in the data. curves : points [n, 2] of lines in the data, close enough together to be avoided.
    """
    dot = axes.get_figure(root=True).dpi / 72  # type: ignore[union-attr]
    panel = axes.get_window_extent()
    marks = np.asarray(axes.transData.transform(np.array(places, dtype=np.float64)))
    half = _HALF * dot
    around = [Bbox([mark - half, mark + half]) for mark in marks]
    lines = np.concatenate([np.asarray(axes.transData.transform(curve)) for curve in curves])
    taken: list[Bbox] = []
    for mark, place, number in zip(marks, places, numbers, strict=True):
        note: Any = axes.annotate(
            f"{number}", place, (0, 0), textcoords="offset points", ha="center", va="center", zorder=5,
            bbox={"boxstyle": "square,pad=0", "facecolor": "none", "edgecolor": "none"},
        )  # fmt: skip
        note.set_in_layout(False)
        size = np.array(note.get_window_extent().size) / 2 + 0.6 * dot
        best: tuple[int, float, float] | None = None
        for away in _AWAY:
            for way in _WAYS:
                turn = np.array([np.cos(np.radians(way)), np.sin(np.radians(way))])
                middle = mark + away * dot * turn
                box = Bbox([middle - size, middle + size])
                if not (panel.x0 <= box.x0 and box.x1 <= panel.x1 and panel.y0 <= box.y0 and box.y1 <= panel.y1):
                    continue
                hits = sum(box.overlaps(other) for other in (*taken, *around)) + _inside(lines, box)
                if best is None or hits < best[0]:
                    best = (hits, away, way)
            if best is not None and not best[0]:
                break
        assert best is not None  # a panel is larger than a number
        _, away, way = best
        offset = away * np.array([np.cos(np.radians(way)), np.sin(np.radians(way))])
        note.xyann = tuple(offset)
        taken.append(Bbox([mark + offset * dot - size, mark + offset * dot + size]))
        if away >= _JOINED:
            line = axes.annotate(
                "", place, tuple(offset * (1 - 4.5 / away)), textcoords="offset points", zorder=3,
                arrowprops={"arrowstyle": "-", "linewidth": 0.4, "color": BLACK, "shrinkA": 0, "shrinkB": 2.2},
            )  # fmt: skip
            line.set_in_layout(False)


def _inside(points: NDArray[np.float64], box: Bbox) -> bool:
    """Whether any of the points lies in a box."""
    x, y = points.T
    return bool(((box.x0 <= x) & (x <= box.x1) & (box.y0 <= y) & (y <= box.y1)).any())
