"""Distribution of the time per output token, one curve a policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from perfmodel.plots.drawing import handles
from perfmodel.plots.style import BLACK, COLUMN, GREY, LINES, PAGE, Line
from perfmodel.plots.sweep.labels import fixed_words, log_axis, names_of, with_log
from perfmodel.plots.sweep.origin import origin_words
from perfmodel.plots.sweep.page import legend_above, page, panel_titles
from perfmodel.plots.sweep.selection import Sweep, settings_of
from perfmodel.plots.words import number
from perfmodel.point import hardware_point
from perfmodel.sweeps.dataset import scenario_of

if TYPE_CHECKING:
    import xarray

#: Policies that are drawn at once.
_MOST = 8
#: Medians that differ by more than the first factor share a logarithmic axis; by more than the second, none.
_LOG, _FAR_APART = 3.0, 100.0
_BOX = {"boxstyle": "square,pad=0.15", "facecolor": "white", "edgecolor": "none"}
_MARKS = ((50, "o", "white"), (99, "s", BLACK))


def cdf_figure(
    dataset: xarray.Dataset,
    *,
    policy: str | Sequence[str] | None = None,
    at: Mapping[str, Any] | None = None,
) -> Figure:
    """Share of the output tokens that take at most a time [%], with the median and the 99th percentile marked.

    The exact times of all decode steps are computed again from the provenance of the sweep.

    Parameters
    ----------
    dataset : a sweep whose inputs have names or paths.
    policy : policies to draw, at most eight; by default all.
    at : values of the axes; by default those nearest the scenario's own, as the caption says.

    Raises
    ------
    PerfModelError : unknown names (with close matches), a plan that is not feasible there, or inputs that are gone.
    """
    whole = Sweep(dataset)
    shown = whole.chosen(policy, _MOST)
    _, fixed = whole.fix(at)
    scenario = scenario_of(dataset)
    settings = settings_of(scenario, fixed)
    times: dict[str, NDArray[np.float64]] = {}
    for one in shown:
        run = scenario.run(one, settings)
        times[one] = 1e3 * run.token_times(hardware_point(run.system))
    names = names_of(whole)
    medians = [float(np.median(values)) for values in times.values()]
    apart = max(medians) > _FAR_APART * min(medians)
    log = not apart and max(medians) > _LOG * min(medians)
    count = len(shown) if apart else 1
    columns = min(count, 4)
    rows = -(-count // columns)
    counts = {len(values) for values in times.values()}
    sentences = [
        f"All {'/'.join(str(n) for n in sorted(counts))} decode steps.",
        "Every panel has its own time axis." if apart else "",
        fixed_words(fixed),
        origin_words(whole, fixed),
    ]
    titles, more = panel_titles([names[one] for one in shown], columns)
    marks = ["median (P50)", "P99"]
    labels = {one: f"{names[one]} ({_quantiles(values, ', ')})" for one, values in times.items()}
    entries = marks if apart else [*labels.values(), *marks]
    with page(
        rows, columns, (PAGE if apart else COLUMN, (1.75 + more) * rows + 0.1), sentences, entries, sharey=True
    ) as (
        figure,
        grid,
    ):
        for i, axes in enumerate(grid.flat):
            axes.set_visible(i < count)
            for one in [] if i >= count else [shown[i]] if apart else shown:
                look = LINES[whole.policies.index(one) % len(LINES)]
                _curve(axes, times[one], look._replace(dashes="-") if apart else look, labels[one])
            if apart and i < count:
                axes.set_title(titles[i], loc="left")
                words = _quantiles(times[shown[i]], "\n")
                axes.text(0.97, 0.05, words, transform=axes.transAxes, ha="right", va="bottom", bbox=_BOX)
            if i < count:
                _finish(axes, first=i % columns == 0, log=log)
        found = handles(*grid.flat)
        legend_above(figure, {label: found[label] for label in entries})
    return figure


def _quantiles(times: NDArray[np.float64], between: str) -> str:
    return between.join(f"P{percent} {number(float(np.percentile(times, percent)))} ms" for percent, _, _ in _MARKS)


def _curve(axes: Axes, times: NDArray[np.float64], look: Line, label: str) -> None:
    """Steps of one policy, one a distinct time, with the marked percentiles on them."""
    values, counts = np.unique(times, return_counts=True)
    shares = 100 * np.cumsum(counts) / len(times)
    axes.step(
        np.concatenate([values[:1], values]), np.concatenate([[0.0], shares]), where="post",
        color=look.colour, linestyle=look.dashes, linewidth=1.4, label=label,
    )  # fmt: skip
    for percent, marker, fill in _MARKS:
        axes.plot(
            float(np.percentile(times, percent)), percent, marker, color=BLACK, markerfacecolor=fill, markersize=4.5,
            markeredgewidth=0.8, linestyle="none", label="median (P50)" if percent == 50 else f"P{percent}", zorder=4,
        )  # fmt: skip


def _finish(axes: Axes, *, first: bool, log: bool) -> None:
    low, high = axes.dataLim.intervalx
    label = "time per output token (ms)"
    if log:
        log_axis(axes, "x", low / 1.15, high * 1.15, 6)
        label = with_log(label)
    else:
        room = max(0.08 * (high - low), 0.02 * high)  # a spread of next to nothing must not fill the panel
        axes.set_xlim(low - room, high + room)
        axes.locator_params(axis="x", nbins=4 if axes.get_title(loc="left") else 7)
        axes.ticklabel_format(axis="x", useOffset=False)
    axes.set_ylim(0, 103)
    axes.grid()
    for percent in (50, 99):
        axes.axhline(percent, color=GREY, linewidth=0.6, linestyle=":", zorder=1)
    axes.set_xlabel(label)
    if first:
        axes.set_ylabel("output tokens (%)")
