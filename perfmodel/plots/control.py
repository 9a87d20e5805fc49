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
from perfmodel.plots.style import BLACK, BLUE, COLUMN, GREY, ORANGE, PAGE, RED
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
_WORDS = {"loss": "quantisation loss (MSE)", "noise": "noise: quantisation loss over output variance"}
#: Sequences that are numbered beside their choices at most; more would hide each other.
_NUMBERED = 8


def control_figure(found: Sequence[Tuning], scenario: Scenario) -> Figure:
    """Time per output token [ms] against quantisation loss, one panel a policy.

    Thin lines go through every mean of one sequence, the thick one through every mean of all sequences together; rings
    mark what the sequences get (crosses where none keeps the limit), numbered where they are few, and a star what all
    of them come to.

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
    entries = ["one sequence", "all, one mean for all", "chosen", *missed, "all, each at its own", "limit"]
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


def _draw(axes: Axes, one: Tuning, what: str) -> None:
    front, limit = one.front, one.limit
    losses: NDArray[np.float64] = getattr(front, what)
    for s in range(len(losses)):
        label = "one sequence" if s == 0 else None
        axes.plot(losses[s], 1e3 * front.latency_s[s], color=GREY, linewidth=0.5, alpha=0.7, zorder=2, label=label)
    pooled = front.pooled_noise if what == "noise" else front.pooled_loss
    dots = "o" if len(pooled) <= 40 else ""
    axes.plot(
        pooled, 1e3 * front.pooled_latency_s, color=BLACK, linewidth=1.3, marker=dots, markersize=2.2, zorder=3,
        label="all, one mean for all",
    )  # fmt: skip
    own = one.compared[0]
    chosen = one.noise if what == "noise" else one.loss
    for label, marker, colour, which in (("chosen", "o", BLUE, one.met), (_MISSED, "x", RED, ~one.met)):
        if which.any():
            axes.plot(
                chosen[which], 1e3 * one.latency_s[which], linestyle="none", marker=marker, markersize=4.0,
                markerfacecolor="none", markeredgecolor=colour, markeredgewidth=1.0, zorder=4, label=label,
            )  # fmt: skip
    axes.plot(
        [getattr(own, what)], [1e3 * own.latency_s], linestyle="none", marker="*", markersize=8.0, color=ORANGE,
        markeredgecolor=BLACK, markeredgewidth=0.5, zorder=5, label="all, each at its own",
    )  # fmt: skip
    line, at = (axes.axhline, 1e3 * limit.value) if limit.what == "latency" else (axes.axvline, limit.value)
    line(at, color=RED, linewidth=1.0, linestyle="--", zorder=1, label="limit")
    _place(axes, one, what, losses)
    if len(losses) <= _NUMBERED:
        _number(axes, chosen, 1e3 * one.latency_s)


def _number(axes: Axes, x: NDArray[np.float64], y: NDArray[np.float64]) -> None:
    """Number of every sequence below its choice, moved down where something is in the way."""
    points = axes.transData.transform(np.column_stack([x, y])) * 72.0 / axes.figure.dpi
    taken = [(across, up) for across, up in points.tolist() if np.isfinite((across, up)).all()]
    for s in np.argsort(-points[:, 1], kind="stable").tolist():
        across, up = points[s].tolist()
        if not np.isfinite((across, up)).all():
            continue
        centre, below = across - 6.0, up - 4.0
        while any(abs(centre - other[0]) < 6.0 and abs(below - other[1]) < 6.5 for other in taken):
            below -= 1.0
        taken.append((centre, below))
        place, offset = (float(x[s]), float(y[s])), (centre - across, below - up)
        note = axes.annotate(
            str(s), place, offset, textcoords="offset points", ha="center", va="center", fontsize=6, zorder=6
        )
        note.set_in_layout(False)


def _place(axes: Axes, one: Tuning, what: str, losses: NDArray[np.float64]) -> None:
    """Scales and labels."""
    x, y = (values[np.isfinite(values)] for values in (losses, 1e3 * one.front.latency_s))
    log = float(x.min()) > 0 and float(x.max()) > _LOG * float(x.min())
    limited = one.limit.what == "latency"
    low, high = _ends(np.log(x) if log else x, None if limited else one.limit.value, log)
    if log:
        log_axis(axes, "x", float(np.exp(low)), float(np.exp(high)), 5)
    else:
        axes.set_xlim(low, high)
        axes.locator_params(axis="x", nbins=5)
    axes.set_ylim(*_ends(y, 1e3 * one.limit.value if limited else None))
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
        f"Numbers name the sequences: {', '.join(plain(name, 24) for name in one.labels)}."
        if len(one.labels) <= _NUMBERED and any(" " in name for name in one.labels)
        else "",
        f"Model: {model_name(scenario.model.name)}. System: {plain(scenario.system.name)}.",
        f"Routing: {routing(metadata.get('model'), metadata.get('source'))}.",
        "Losses are errors of single experts; no accuracy follows from them.",
    ]
