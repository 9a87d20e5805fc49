"""Policies in the order of a metric: where their token time goes, and what they lose for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from perfmodel.answers.dominance import nondominated
from perfmodel.plots.drawing import handles, name_rows, stack
from perfmodel.plots.style import BLACK, BLUE, PAGE, PART_LOOKS, RED
from perfmodel.plots.sweep.labels import log_axis, metric_words
from perfmodel.plots.sweep.page import legend_above, page
from perfmodel.plots.words import folded, model_name, number, plain, routing

if TYPE_CHECKING:
    from perfmodel.answers.ranking import Ranked, Ranking

#: More policies than this make no readable figure; the best ones are drawn.
MOST_POLICIES = 40
_TIME, _FLOOR = "time per output token", "bandwidth floor"
#: Relative difference below which two losses or times are equal: that of sums in another order.
_SAME = 1e-9
#: Heights of a line of text, and of a label beside the front [inch].
_LINE, _LABEL = 0.125, 0.14


def rank_figures(ranking: Ranking) -> dict[str, Figure]:
    """Figures of a ranking, by name.

    ``rank_times``: mean time per output token with its bandwidth floor and hit rates, and the parts of its critical
    path. ``rank_pareto``: that time against the quantisation loss, with the policies that no other beats in both; it is
    left out where no two losses are known and differ. Of more than `MOST_POLICIES` policies the best are drawn.
    """
    rows = ranking.rows[:MOST_POLICIES]
    found = {"rank_times": _times_figure(ranking, rows)}
    known = [one for one in rows if one.evaluation.quant_loss is not None]
    if len(np.unique(alike([_loss(one) for one in known]))) > 1:
        found["rank_pareto"] = _pareto_figure(ranking, rows, known)
    return found


def _times_figure(ranking: Ranking, rows: Sequence[Ranked]) -> Figure:
    names = ["\n".join(folded(plain(one.label, 80), 26).split("\n")) for one in rows]
    lines = max(2.1, *(name.count("\n") + 1.3 for name in names)) * len(names)
    shares = {
        part: [100 * one.evaluation.breakdown_s[part] / one.evaluation.tpot_mean_s for one in rows]
        for part in PART_LOOKS
    }
    entries = [_TIME, _FLOOR, *(PART_LOOKS[part].label for part, values in shares.items() if any(values))]
    sentences = [
        "Left: mean time per output token, with the hit rate (mean over sequences) and that of Belady's rule in a cache"
        " of the same slots.",
        f"Right: its critical path. Sorted by {metric_words(ranking.metric)}.",
        *_about(ranking, rows),
    ]
    with page(1, 2, (PAGE, 0.75 + _LINE * lines), sentences, entries, sharey=True) as (figure, grid):
        times, parts = grid.flat
        _draw_times(times, rows)
        stack(parts, shares, PART_LOOKS)
        parts.set_xlim(0, 100)
        parts.set_xlabel("share of the critical path (%)")
        for axes in grid.flat:
            name_rows(axes, names)
        drawn = handles(parts, times)
        legend_above(figure, {label: drawn[label] for label in entries})
    return figure


def _draw_times(axes: Axes, rows: Sequence[Ranked]) -> None:
    """Points on a logarithmic axis, as the slowest policy may take a hundred times as long as the fastest.

    No bars: a logarithmic axis has no zero that they could begin at.
    """
    times = np.array([one.evaluation.tpot_mean_s for one in rows]) * 1e3
    floors = np.array([one.evaluation.bandwidth_floor_s for one in rows]) * 1e3
    place = np.arange(len(rows))
    low, high = float(floors.min()), float(times.max())
    axes.hlines(place, floors, times, color=BLACK, linewidth=0.6, zorder=2)
    axes.plot(floors, place, "|", color=RED, ms=9, mew=1.6, label=_FLOOR, zorder=3)
    axes.plot(times, place, "o", color=BLUE, ms=5, mec=BLACK, mew=0.5, label=_TIME, zorder=4)
    for y, (one, time) in enumerate(zip(rows, times.tolist(), strict=True)):
        bound = "" if one.belady_hit_rate is None else f"\nBelady {one.belady_hit_rate:.2f}"
        words = f"{number(time)}; hit {one.evaluation.hit_rate.own:.2f}{bound}"
        # In the gap between the panels, which grows with them.
        axes.annotate(words, (1.02, y), xycoords=("axes fraction", "data"), ha="left", va="center")
    room = max(high / low, 1.2) ** 0.05
    log_axis(axes, "x", low / room, high * room, 5)
    axes.set_xlabel("mean time per output token (ms, log)")


def _pareto_figure(ranking: Ranking, rows: Sequence[Ranked], known: Sequence[Ranked]) -> Figure:
    noise = all(one.evaluation.quant_noise is not None for one in known)
    losses = alike([(100 * (one.evaluation.quant_noise or 0.0) if noise else _loss(one)) for one in known])
    times = alike([1e3 * one.evaluation.tpot_mean_s for one in known])
    front = nondominated(np.column_stack([losses, times]))
    places = {id(one): place for place, one in enumerate(ranking.rows, 1)}
    unknown = [plain(one.label, 40) for one in rows if one.evaluation.quant_loss is None]
    sentences = [
        f"Better: lower time, lower loss. {len(front)} of {len(known)} policies {_is(front)} on the front.",
        f"Not drawn, as no loss is known: {', '.join(unknown)}." if unknown else "",
        "Losses are errors of single experts; no accuracy follows from them.",
        f"Loss table: {plain(ranking.losses[0])} ({plain(ranking.losses[1])}).",
        f"Numbers: place by {metric_words(ranking.metric)}.",
        *_about(ranking, rows),
    ]
    height = max(2.5, 0.5 + _LABEL * len(known))
    with page(1, 1, (PAGE, height), sentences) as (figure, grid):
        axes = grid[0, 0]
        _draw_front(axes, losses, times, front)
        axes.set_xlabel("noise: quantisation loss over output variance (%)" if noise else "quantisation loss (MSE)")
        labels = [f"{places[id(one)]} {plain(one.label, 48)}" for one in known]
        _name_points(axes, losses, times, labels, _LABEL / (height - 0.5))
    return figure


def _loss(one: Ranked) -> float:
    return one.evaluation.quant_loss or 0.0


def _is(front: NDArray[np.int64]) -> str:
    return "is" if len(front) == 1 else "are"


def _draw_front(axes: Axes, losses: NDArray[np.float64], times: NDArray[np.float64], front: NDArray[np.int64]) -> None:
    behind = np.setdiff1d(np.arange(len(losses)), front)
    marks: dict[str, Any] = {
        "linestyle": "none",
        "marker": "o",
        "markersize": 5.0,
        "markeredgecolor": BLACK,
        "markeredgewidth": 0.6,
    }
    axes.plot(losses[behind], times[behind], markerfacecolor="white", zorder=3, **marks)
    axes.step(losses[front], times[front], where="post", color=BLACK, linewidth=0.9, zorder=2)
    axes.plot(losses[front], times[front], markerfacecolor=BLUE, zorder=4, **marks)
    low, high = float(losses.min()), float(losses.max())
    axes.set_xlim(low - 0.06 * (high - low), high + 0.06 * (high - low))
    room = (float(times.max()) / float(times.min())) ** 0.06
    log_axis(axes, "y", float(times.min()) / max(room, 1.1), float(times.max()) * max(room, 1.1), 7)
    axes.set_ylabel("mean time per output token (ms, log)")
    axes.grid()


def _name_points(axes: Axes, x: NDArray[np.float64], y: NDArray[np.float64], labels: Sequence[str], gap: float) -> None:
    """Labels in a column right of the panel, in the order of the points from top to bottom, with a line to each.

    gap : least distance of two labels, as a share of the panel's height.
    """
    low, high = np.log(axes.get_ylim())
    height = (np.log(y) - low) / (high - low)
    order = np.lexsort((x, -height))
    places = spread(height[order], gap)
    for at, i in zip(places.tolist(), order.tolist(), strict=True):
        axes.annotate(
            labels[i], (x[i], y[i]), (1.05, at), textcoords="axes fraction", ha="left", va="center",
            arrowprops={"arrowstyle": "-", "linewidth": 0.4, "color": "#808080", "shrinkB": 3, "shrinkA": 1,
                        "relpos": (0.0, 0.5)},
            zorder=1,
        )  # fmt: skip


def alike(values: Sequence[float]) -> NDArray[np.float64]:
    """Numbers of which those that differ by rounding alone are the same, the least of them."""
    found = np.array(values, np.float64)
    order = np.argsort(found, kind="stable")
    rising = found[order]
    if len(rising):
        first = np.concatenate(([True], np.diff(rising) > _SAME * np.abs(rising[1:])))
        found[order] = rising[first][np.cumsum(first) - 1]
    return found


def spread(places: NDArray[np.float64], gap: float) -> NDArray[np.float64]:
    """Falling places in [0, 1] moved as little as keeps them ``gap`` apart, and inside where there is room."""
    found = np.minimum(places, 1.0)
    for i in range(1, len(found)):
        found[i] = min(found[i], found[i - 1] - gap)
    found[-1] = max(found[-1], 0.0)
    for i in range(len(found) - 2, -1, -1):
        found[i] = max(found[i], found[i + 1] + gap)
    return found


def _about(ranking: Ranking, rows: Sequence[Ranked]) -> list[str]:
    """What was ranked, for the captions."""
    first = rows[0].evaluation
    left = len(ranking.rows) - len(rows)
    return [
        f"{left} more policies are not drawn." if left else "",
        f"Model: {model_name(ranking.model.name)}.",
        f"System: {plain(ranking.system.name)}, every policy with {number(ranking.memory_gb)} GB of GPU memory.",
        f"Routing: {routing(first.trace, first.trace_source)}.",
        f"Prompt + output: {number(first.prompt_tokens)} + {number(first.output_tokens)} tokens, mean over sequences.",
        f"Weakest source among the hardware constants: {plain(first.weakest_source)}.",
    ]
