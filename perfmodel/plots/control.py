"""Time against loss of every sequence at every mean width, and what was chosen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from perfmodel.errors import PerfModelError
from perfmodel.evaluation import metric as find_metric
from perfmodel.plots.drawing import handles
from perfmodel.plots.style import BLACK, COLUMN, GREY, LINES, PAGE, RED, YELLOW, Line
from perfmodel.plots.sweep.labels import log_axis, metric_words, with_log
from perfmodel.plots.sweep.page import legend_above, page, panel_titles
from perfmodel.plots.words import model_name, plain, routing

if TYPE_CHECKING:
    from perfmodel.answers import Tuning
    from perfmodel.scenario import Scenario

#: Policies that are drawn at once, one panel each.
MOST_PANELS = 4
#: Wider ranges of the loss than this factor are drawn on a logarithmic axis.
_LOG = 4.0
_MISSED = "limit missed"
_WORDS = {"loss": "quantisation loss (MSE)", "noise": "noise: quantisation loss over output variance (%)"}
#: Noise is drawn in percent, as tables print it.
_TIMES = {"loss": 1.0, "noise": 100.0}
#: Colours and markers of sequences; black is what all of them have, and more than these are grey.
_LOOKS = (*LINES[:6], Line(YELLOW, "X", "-"), Line(GREY, "p", "-"))
_MANY = Line(GREY, "o", "-")
_POOLED, _OWN = "all, one mean for all", "all, each at its own"


def control_figure(found: Sequence[Tuning], scenario: Scenario) -> Figure:
    """Time per output token [ms] against quantisation loss, one panel a policy.

    Thin lines go through every mean of one sequence, the black one through every mean of all sequences together;
    filled markers are what the sequences get (crossed out where no mean keeps the limit), in a colour for each
    sequence where they are few, and a hollow star is what all of them come to.

    Parameters
    ----------
    found : answers of `answers.tune` to one question, at most four. scenario : what they are about, for the caption.

    Raises
    ------
    PerfModelError : no answer or too many to read, or losses that are unknown.
    """
    if not 1 <= len(found) <= MOST_PANELS:
        raise PerfModelError(f"a figure of chosen bits shows 1 to {MOST_PANELS} policies, and {len(found)} were given")
    what = "noise" if found[0].limit.what == "noise" else "loss"
    for one in found:
        if np.isnan(getattr(one.front, what)).all():
            raise PerfModelError(f"plot: the {what} of {one.policy} is unknown, so there is nothing to draw it against")
    columns = min(len(found), 2)
    rows = -(-len(found) // columns)
    names = [plain(one.policy, 120) for one in found]
    titles, more = panel_titles(names, columns)
    missed = [_MISSED] if any(not one.met.all() for one in found) else []
    entries = [*dict.fromkeys(name for one in found for name in _names(one)), _POOLED, _OWN, *missed, "limit"]
    width = COLUMN if len(found) == 1 else PAGE
    with page(rows, columns, (width, (2.3 + more) * rows), _sentences(found, scenario, names), entries) as (
        figure,
        grid,
    ):
        for i, axes in enumerate(grid.flat):
            axes.set_visible(i < len(found))
            if i < len(found):
                _draw(axes, found[i], what)
                if len(found) > 1:
                    axes.set_title(titles[i], loc="left")
        drawn = handles(*grid.flat)
        legend_above(figure, {label: drawn[label] for label in entries})
    return figure


def _names(one: Tuning) -> list[str]:
    """What the legend calls every sequence."""
    few = len(one.labels) <= len(_LOOKS)
    return [plain(name, 24) for name in one.labels] if few else ["one sequence"] * len(one.labels)


def _draw(axes: Axes, one: Tuning, what: str) -> None:
    front, limit, times = one.front, one.limit, _TIMES[what]
    losses: NDArray[np.float64] = times * getattr(front, what)
    chosen: NDArray[np.float64] = times * getattr(one, what)
    latency = 1e3 * one.latency_s
    names = _names(one)
    looks = _LOOKS if len(names) <= len(_LOOKS) else (_MANY,) * len(names)
    for s, (name, look) in enumerate(zip(names, looks, strict=False)):
        axes.plot(losses[s], 1e3 * front.latency_s[s], color=look.colour, linewidth=0.7, zorder=2)
        options = look.options(3.4) | {"linestyle": "-", "linewidth": 0.7}  # of one point the legend shows the line
        label = name if s == 0 or name != names[0] else None
        axes.plot(chosen[s : s + 1], latency[s : s + 1], zorder=4, label=label, **options)
    if not one.met.all():
        axes.plot(
            chosen[~one.met], latency[~one.met], linestyle="none", marker="x", markersize=8.0, markeredgewidth=1.0,
            color=RED, zorder=3.5, label=_MISSED,
        )  # fmt: skip
    pooled = times * getattr(front, f"pooled_{what}")
    axes.plot(pooled, 1e3 * front.pooled_latency_s, color=BLACK, linewidth=1.3, zorder=3, label=_POOLED)
    own = one.compared[0]
    axes.plot(
        [times * getattr(own, what)], [1e3 * own.latency_s], linestyle="none", marker="*", markersize=11.0,
        markerfacecolor="none", markeredgecolor=BLACK, markeredgewidth=0.8, zorder=1.5, label=_OWN,
    )  # fmt: skip
    at = 1e3 * limit.value if limit.what == "latency" else times * limit.value
    line = axes.axhline if limit.what == "latency" else axes.axvline
    line(at, color=BLACK, linewidth=0.8, linestyle="--", zorder=1, label="limit")
    _place(axes, one, what, losses, at)


def _place(axes: Axes, one: Tuning, what: str, losses: NDArray[np.float64], limit: float) -> None:
    """Scales and labels; losses and limit as they are drawn."""
    x, y = (values[np.isfinite(values)] for values in (losses, 1e3 * one.front.latency_s))
    log = float(x.min()) > 0 and float(x.max()) > _LOG * float(x.min())
    limited = one.limit.what == "latency"
    low, high = _ends(np.log(x) if log else x, None if limited else limit, log)
    if log:
        log_axis(axes, "x", float(np.exp(low)), float(np.exp(high)), 5)
    else:
        axes.set_xlim(low, high)
        axes.locator_params(axis="x", nbins=5)
    axes.set_ylim(*_ends(y, limit if limited else None))
    axes.locator_params(axis="y", nbins=6)
    axes.ticklabel_format(axis="y", useOffset=False)
    axes.set_xlabel(with_log(_WORDS[what]) if log else _WORDS[what])
    axes.set_ylabel(f"{metric_words(find_metric(one.metric))} (ms)")
    axes.grid()


def _ends(values: NDArray[np.float64], limit: float | None, log: bool = False) -> tuple[float, float]:
    """Ends of an axis, with a limit that is near; one far away must not squeeze the lines."""
    low, high = float(values.min()), float(values.max())
    span = (high - low) or abs(high) or 1.0
    if limit is not None and (limit > 0 or not log):
        place = float(np.log(limit)) if log else limit
        if low - span / 2 <= place <= high + span / 2:
            low, high = min(low, place), max(high, place)
    return low - 0.06 * span, high + 0.06 * span


def _sentences(found: Sequence[Tuning], scenario: Scenario, names: Sequence[str]) -> list[str]:
    """What is drawn, and what it rests on."""
    one = found[0]
    missed = [int((~tuning.met).sum()) for tuning in found]
    metadata = scenario.trace.metadata
    ends = [f"{tuning.front.mean_bits[0]:.4g} to {tuning.front.mean_bits[-1]:.4g}" for tuning in found]
    return [
        f"Every line goes through means of {' / '.join(dict.fromkeys(ends))} bits.",
        f"Limit: {one.asked}.",
        f"Policy: {names[0]}." if len(found) == 1 else "",
        f"{len(one.labels)} sequences;" + f" the limit is kept at no mean by {' / '.join(map(str, missed))} of them."
        if any(missed)
        else f"{len(one.labels)} sequences, which all keep the limit.",
        "A filled marker is the mean that a sequence gets.",
        f"Model: {model_name(scenario.model.name)}. System: {plain(scenario.system.name)}.",
        f"Routing: {routing(metadata.get('model'), metadata.get('source'))}.",
        "Losses are errors of single experts; no accuracy follows from them.",
    ]
