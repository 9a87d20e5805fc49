"""Names beside marks that may lie close together."""

from collections.abc import Sequence
from typing import Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.text import Annotation
from numpy.typing import NDArray

from perfmodel.plots.style import BLACK

#: Marks nearer than this share a name; distance of a name from its mark; height of a line of names [1/72 inch].
_NEAR, _AWAY, _LINE = 5.0, 8.0, 8.2


def _pixels(axes: Axes, places: Sequence[tuple[float, float]]) -> NDArray[np.float64]:
    return np.asarray(axes.transData.transform(np.array(places, dtype=np.float64)))


def together(axes: Axes, places: Sequence[tuple[float, float]]) -> list[list[int]]:
    """Numbers of the marks in groups that lie on each other, in a panel that is laid out already."""
    near = _NEAR * axes.get_figure(root=True).dpi / 72  # type: ignore[union-attr]
    groups: list[list[int]] = []
    pixels = _pixels(axes, places) if places else np.empty((0, 2))
    for i, place in enumerate(pixels):
        close = [group for group in groups if np.hypot(*(pixels[group[0]] - place)) < near]
        if close:
            close[0].append(i)
        else:
            groups.append([i])
    return groups


Side = Literal["above", "below"]
SIDES: tuple[Side, Side] = ("above", "below")


def _stacked(axes: Axes, places: Sequence[tuple[float, float]], texts: Sequence[str], side: Side) -> dict[int, float]:
    """How far the middle of every name is from its mark [1/72 inch], upwards; in the order of the marks."""
    dot = axes.get_figure(root=True).dpi / 72  # type: ignore[union-attr]
    sign = 1.0 if side == "above" else -1.0
    heights = sign * _pixels(axes, places)[:, 1] / dot
    found, taken = {}, -np.inf
    for i in np.argsort(heights, kind="stable").tolist():
        size = _LINE * (texts[i].count("\n") + 1)
        start = max(heights[i] + 3.0, taken + 1.5)
        taken = start + size
        found[i] = sign * (start + size / 2 - heights[i])
    return found


def fits(axes: Axes, places: Sequence[tuple[float, float]], texts: Sequence[str], side: Side) -> bool:
    """Whether all names would be inside of the panel."""
    if not places:
        return True
    dot = axes.get_figure(root=True).dpi / 72  # type: ignore[union-attr]
    panel, heights = axes.get_window_extent(), _pixels(axes, places)[:, 1]
    for i, offset in _stacked(axes, places, texts, side).items():
        half = _LINE * (texts[i].count("\n") + 1) / 2
        middle = heights[i] + offset * dot
        if not panel.y0 <= middle - half * dot <= middle + half * dot <= panel.y1:
            return False
    return True


def name_marks(axes: Axes, places: Sequence[tuple[float, float]], texts: Sequence[str], side: Side) -> None:
    """Write names up and left of marks on a rising line, or down and right of them, one over the other.

    Names keep the order of their marks, so that the thin lines between them do not cross.
    """
    above = side == "above"
    for i, offset in (_stacked(axes, places, texts, side) if places else {}).items():
        note = axes.annotate(
            texts[i], places[i], (-_AWAY if above else _AWAY, offset), textcoords="offset points",
            ha="right" if above else "left", va="center", linespacing=1.05, zorder=5,
            bbox={"boxstyle": "square,pad=0.08", "facecolor": "white", "edgecolor": "none"},
            multialignment="right" if above else "left",
            arrowprops={
                "arrowstyle": "-", "linewidth": 0.5, "color": BLACK, "shrinkA": 0.5, "shrinkB": 2.0,
                "relpos": (1, 0) if above else (0, 1),
            },
        )  # fmt: skip
        note.set_in_layout(False)


def spread_out(notes: Sequence[Annotation]) -> None:
    """Move names at the edge of a panel apart, given from the lowest to the highest."""
    below = -np.inf
    for note in notes:
        dot = note.get_figure(root=True).dpi / 72  # type: ignore[union-attr]
        here = note.axes.transData.transform((1.0, note.xy[1]))[1] / dot  # type: ignore[union-attr]
        offset = max(0.0, below + _LINE - here)
        note.xyann = (note.xyann[0], note.xyann[1] + offset)
        below = here + offset
