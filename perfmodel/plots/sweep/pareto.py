"""Points of a sweep by two of its numbers, and the front that no point beats in both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from perfmodel.answers.dominance import nondominated
from perfmodel.errors import PerfModelError
from perfmodel.plots.drawing import handles
from perfmodel.plots.style import BLACK, COLUMN, LINES
from perfmodel.plots.sweep.axes import TABLES, Fixed
from perfmodel.plots.sweep.kinds import not_among
from perfmodel.plots.sweep.labels import (
    Which,
    axis_label,
    axis_words,
    held_words,
    log_axis,
    metric_label,
    metric_scale,
    metric_words,
    names_of,
    with_log,
)
from perfmodel.plots.sweep.origin import origin_words
from perfmodel.plots.sweep.page import legend_above, page
from perfmodel.plots.sweep.selection import POLICY, Sweep

if TYPE_CHECKING:
    import xarray

#: Points of the front that get a letter and an entry in the caption.
_LETTERS = "abcde"
#: Share of a panel's width or height that a letter takes.
_ROOM = 0.09
#: Points that are drawn behind the front; of more a random part stands for all.
_MOST_BEHIND = 3000
#: Points of the policies are drawn in turns of so many, so that those of one do not cover those of another.
_TURN = 25


class _Objective(NamedTuple):
    """One side of the figure: values by policy, whether fewer is better, and its label."""

    values: dict[str, NDArray[np.float64]]
    lower: bool
    words: str
    label: str


def pareto_figure(
    dataset: xarray.Dataset,
    *,
    x: str | None = None,
    y: str | None = None,
    policy: str | Sequence[str] | None = None,
    at: Mapping[str, Any] | None = None,
) -> Figure:
    """Every point of a sweep by two numbers, by policy, and a step line along those that no point beats in both.

    Parameters
    ----------
    dataset : any sweep: a grid, a table of cases, or samples.
    x, y : metrics, or numeric axes (of which less is better, as of a cost); by default GPU memory, else another
        metric or axis, against the mean time per output token.
    policy : policies to draw; by default all.
    at : values of axes, to draw only the points that have them; by default all points count.

    Of many points a random part is drawn behind the front, the same share of every policy; all of them decide it.

    Raises
    ------
    PerfModelError : unknown names (with close matches), or nothing to draw.
    """
    whole = Sweep(dataset)
    up = y or whole.first_metric()
    across = x or _other(whole, up)
    if across == up:
        raise PerfModelError(f"plot --x: found {across} on both sides, allowed two different numbers")
    shown = whole.chosen(policy, len(LINES))
    sweep, fixed = whole.fix(at, _free(whole, at))
    dims = [str(dim) for dim in sweep.dataset.dims if dim != POLICY]
    sides = tuple(_objective(sweep, name, shown, dims, what) for name, what in ((across, "x"), (up, "y")))
    points = np.array([np.concatenate([side.values[one] for one in shown]) for side in sides])
    finite = np.flatnonzero(np.isfinite(points).all(axis=0))
    if not len(finite):
        raise PerfModelError(f"plot: no point of the sweep has both {across} and {up}")
    signs = np.array([[1.0 if side.lower else -1.0] for side in sides])
    front = finite[nondominated((points[:, finite] * signs).T)]
    front = front[np.argsort(points[0, front], kind="stable")]
    behind = finite
    if len(finite) > _MOST_BEHIND:
        behind = np.sort(np.random.default_rng(0).choice(finite, _MOST_BEHIND, replace=False))
    names = names_of(whole)
    lettered = front[_apart(points[:, finite], points[:, front])]
    better = ", ".join(f"{'lower' if side.lower else 'higher'} {side.words}" for side in sides)
    sentences = [
        f"Better: {better}. {len(front)} of {len(finite)} points {'is' if len(front) == 1 else 'are'} on the front.",
        f"Behind it, {len(behind)} points drawn at random stand for all." if len(behind) < len(finite) else "",
        _letters_words([_point(sweep, dims, int(one), shown, names) for one in lettered]),
        _at_words(fixed),
        origin_words(whole, fixed),
    ]
    entries = [*(names[one] for one in shown), *(["front"] if len(front) > 1 else [])]
    with page(1, 1, (COLUMN, 2.4), sentences, entries) as (figure, grid):
        axes = grid[0, 0]
        _draw(axes, whole, shown, sides, names, points, front, behind)
        legend_above(figure, handles(axes))
        for letter, place in zip(_LETTERS, points[:, lettered].T, strict=False):
            _letter(axes, letter, place, (-7 if sides[0].lower else 7, -7 if sides[1].lower else 7))
    return figure


def _other(sweep: Sweep, used: str) -> str:
    """What to put against the given number where the reader says nothing."""
    others = [name for name in sweep.metrics if name != used]
    others += [
        one.name for one in sweep.axes.values() if one.numeric and one.name not in TABLES and one.values.size > 1
    ]
    if not others:
        raise PerfModelError(f"plot --x: the sweep has no number beside {used}; allowed: a metric or numeric axis")
    return "gpu_memory_bytes" if "gpu_memory_bytes" in others else others[0]


def _free(sweep: Sweep, at: Mapping[str, Any] | None) -> list[str]:
    """Dimensions of which all points are drawn."""
    held = {sweep.axis(name, "at").dim for name in at or {}}
    return [str(dim) for dim in sweep.dataset.dims if dim not in held]


def _objective(sweep: Sweep, name: str, policies: Sequence[str], dims: Sequence[str], what: str) -> _Objective:
    if name in sweep.metrics:
        kind = sweep.metric(name)
        values = {one: sweep.values(name, one, dims).reshape(-1) for one in policies}
        scale = metric_scale(kind, values.values())
        shown = {one: found / scale.size for one, found in values.items()}
        return _Objective(shown, kind.better == "lower", metric_words(kind), metric_label(kind, scale.unit))
    known = [one.name for one in sweep.axes.values() if one.numeric and one.name not in TABLES]
    if name not in known and [one.rpartition(".")[2] for one in known].count(name) != 1:
        raise not_among(f"plot --{what}", name, [*sweep.metrics, *known], " (metrics and axes of this sweep)")
    axis = sweep.axis(name, what, numeric=True)
    sizes = [sweep.dataset.sizes[dim] for dim in dims]
    shape = [size if dim == axis.dim else 1 for dim, size in zip(dims, sizes, strict=True)]
    table = np.broadcast_to(axis.values.astype(np.float64).reshape(shape), sizes).reshape(-1)
    return _Objective(dict.fromkeys(policies, table), True, axis_words(axis.name), axis_label(axis))


def _point(
    sweep: Sweep, dims: Sequence[str], point: int, policies: Sequence[str], names: Mapping[str, str]
) -> dict[str, str]:
    """Policy and axis values of a point, by its number among all points of the policies drawn."""
    sizes = [sweep.dataset.sizes[dim] for dim in dims]
    count = int(np.prod(sizes))
    places = dict(zip(dims, np.unravel_index(point % count, sizes), strict=True)) if dims else {}
    values = {
        axis.name: held_words(axis, axis.values[places[axis.dim]])
        for axis in sweep.axes.values()
        if axis.dim in places and axis.name not in TABLES and sweep.dataset.sizes[axis.dim] > 1
    }
    return {POLICY: names[policies[point // count]], **values}


def _letters_words(points: Sequence[Mapping[str, str]]) -> str:
    """What the lettered points are; what they have in common is said once."""
    if len(points) == 1:
        return f"(a)\u00a0{', '.join(points[0].values())}."
    common = {key: text for key, text in points[0].items() if all(point[key] == text for point in points)}
    own = [", ".join(text for key, text in point.items() if key not in common) for point in points]
    parts = [f"({letter})\u00a0{text}" for letter, text in zip(_LETTERS, own, strict=False)]
    after = f"; all: {', '.join(common.values())}" if common else ""
    return f"{'; '.join(parts)}{after}."


def _logarithmic(values: NDArray[np.float64]) -> bool:
    return bool(values.min() > 0 and values.max() > 5 * values.min())


def _apart(points: NDArray[np.float64], front: NDArray[np.float64]) -> NDArray[np.intp]:
    """Numbers of points of the front that have room for a letter each: both ends, then others that are far enough."""
    drawn = []
    for values, best in zip(points, front, strict=True):
        every, some = (np.log(values), np.log(best)) if _logarithmic(values) else (values, best)
        drawn.append((some - every.min()) / (float(np.ptp(every)) or 1.0))
    places = np.array(drawn).T
    chosen: list[int] = []
    for i in [0, len(places) - 1, *range(1, len(places) - 1)]:
        if all(np.hypot(*(places[i] - places[j])) > _ROOM for j in chosen):
            chosen.append(i)
    chosen.sort()
    kept = np.linspace(0, len(chosen) - 1, min(len(_LETTERS), len(chosen))).round().astype(int)
    return np.array([chosen[i] for i in np.unique(kept)], dtype=np.intp)


def _at_words(fixed: Sequence[Fixed]) -> str:
    parts = [held_words(one.axis, one.value) for one in fixed]
    return f"Only points at: {', '.join(parts)}." if parts else ""


def _draw(
    axes: Axes,
    sweep: Sweep,
    policies: Sequence[str],
    sides: Sequence[_Objective],
    names: Mapping[str, str],
    points: NDArray[np.float64],
    front: NDArray[np.intp],
    behind: NDArray[np.intp],
) -> None:
    count = points.shape[1] // len(policies)
    looks = [LINES[sweep.policies.index(one) % len(LINES)]._replace(dashes="none") for one in policies]
    for turn in np.array_split(np.random.default_rng(0).permutation(behind), -(-len(behind) // _TURN)):
        for i, look in enumerate(looks):
            own = turn[turn // count == i]
            if len(own):
                axes.plot(*points[:, own], **{**look.options(2.2), "markeredgewidth": 0.0}, alpha=0.45, zorder=2)
    for i, (one, look) in enumerate(zip(policies, looks, strict=True)):
        axes.plot(*points[:, front[front // count == i]], **look.options(4.6), zorder=4)
        axes.plot([], [], **look.options(4.6), label=names[one])
    if len(front) > 1:
        steps: Any = "steps-post" if sides[0].lower else "steps-pre"
        axes.plot(*points[:, front], color=BLACK, linewidth=1.0, drawstyle=steps, zorder=3, label="front")
    ways: tuple[Which, Which] = ("x", "y")
    for which, side, values in zip(ways, sides, points, strict=True):
        finite = values[np.isfinite(values)]
        low, high = float(finite.min()), float(finite.max())
        log = _logarithmic(finite)
        label = side.label
        margins = (0.14, 0.05) if side.lower else (0.05, 0.14)  # the better side also holds the letters
        if log:
            room = high / low
            log_axis(axes, which, low / room ** margins[0], high * room ** margins[1], 6)
            label = with_log(label)
        else:
            room = (high - low) or abs(high) or 1.0
            axes.set(**{f"{which}lim": (low - margins[0] * room, high + margins[1] * room)})
            axes.locator_params(axis=which, nbins=6)
        axes.set(**{f"{which}label": label})
    axes.grid()


def _letter(axes: Axes, letter: str, place: NDArray[np.float64], offset: tuple[int, int]) -> None:
    """A letter on the better side of a point of the front, where no other point can be."""
    axes.annotate(
        letter, (place[0], place[1]), offset, textcoords="offset points", ha="center", va="center", zorder=6,
        bbox={"boxstyle": "circle,pad=0.1", "facecolor": "white", "edgecolor": BLACK, "linewidth": 0.5},
    ).set_in_layout(False)  # fmt: skip
