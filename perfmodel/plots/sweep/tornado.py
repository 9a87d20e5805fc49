"""Effect of one number at a time, the others staying as they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from perfmodel import answers
from perfmodel.errors import PerfModelError
from perfmodel.evaluation import metric as find_metric
from perfmodel.hardware.base import shown as quoted
from perfmodel.plots.drawing import handles, name_rows
from perfmodel.plots.style import BLACK, COLUMN, ORANGE, PAGE, SKY, Look
from perfmodel.plots.sweep.axes import TABLES, Fixed
from perfmodel.plots.sweep.kinds import not_among
from perfmodel.plots.sweep.labels import (
    fixed_words,
    metric_label,
    metric_scale,
    metric_words,
    names_of,
    unit_words,
)
from perfmodel.plots.sweep.origin import origin_words
from perfmodel.plots.sweep.page import legend_above, page, panel_titles
from perfmodel.plots.sweep.selection import Sweep, computable, settings_of
from perfmodel.plots.words import plain
from perfmodel.scenario import Scenario
from perfmodel.scenario.axis import FILES, with_options
from perfmodel.sweeps.dataset import scenario_of

if TYPE_CHECKING:
    import xarray

_MOST_ROWS, _MOST_PANELS = 14, 4
#: A share of the metric that is too small to be seen.
_SMALL = 0.001
_SIDES = {"low": Look("low end of the range", SKY), "high": Look("high end of the range", ORANGE, "////")}


def tornado_figure(
    dataset: xarray.Dataset,
    *,
    metric: str | None = None,
    policy: str | Sequence[str] | None = None,
    at: Mapping[str, Any] | None = None,
) -> Figure:
    """How far a metric moves when one hardware number moves, one panel a policy; the largest swing on top.

    Parameters
    ----------
    dataset : from ``answers.tornado``; or a sweep, whose hardware axes are moved to the ends of their ranges, one by
        one, from the values of its system.
    metric : for a sweep; by default the mean time per output token.
    policy : policies to draw, at most four; by default all.
    at : for a sweep, values of axes that the numbers start from; by default system, policies and workload as they
        stand, whatever values the sweep has.

    Raises
    ------
    PerfModelError : unknown names (with close matches), a sweep without hardware axes, or inputs that are gone.
    """
    fixed: tuple[Fixed, ...] = ()
    origin = dataset
    if dataset.attrs.get("kind") != "tornado":
        dataset, fixed = _from_sweep(dataset, metric, at)
    elif at:
        raise not_among("plot --at", next(iter(at)), [], ": a tornado has no axes to hold fixed")
    elif metric not in (None, dataset.attrs.get("metric")):
        raise not_among("plot --metric", metric, [str(dataset.attrs.get("metric"))], " (metric of this tornado)")
    whole = Sweep(dataset)
    shown = whole.chosen(policy, _MOST_PANELS)
    kind = find_metric(str(dataset.attrs["metric"]))
    values = np.array([whole.values("value", one, ["key", "side"]) for one in shown])
    base = np.array([float(whole.values("base", one, [])) for one in shown])
    moved = np.nan_to_num(np.abs(values / base[:, None, None] - 1).max(axis=2), nan=np.inf).max(axis=0)
    rows = [int(row) for row in np.argsort(-moved, kind="stable")[:_MOST_ROWS] if moved[row] >= _SMALL]
    if not rows:
        raise PerfModelError(f"plot: no number moves {kind.name} by {100 * _SMALL:g} % or more")
    small = [plain(str(key)) for row, key in enumerate(dataset["key"].values) if row not in rows]
    names = names_of(whole)
    sentences = [
        f"Every row moves one number, the others stay: {metric_words(kind)}.",
        f"The line: {_base_words(fixed)}.",
        "Every panel has its own axis, all in one unit." if len(shown) > 1 else "",
        f"Smaller effects, not shown: {_listed(small)}." if small else "",
        fixed_words(fixed),
        origin_words(Sweep(origin), fixed),
    ]
    scale = metric_scale(kind, [values[:, rows], base])
    titles, more = panel_titles([names[one] for one in shown], len(shown))
    entries = [*(look.label for look in _SIDES.values()), "as it stands"]
    size = (PAGE if len(shown) > 1 else COLUMN, (0.9 if len(shown) > 1 else 0.75) + 0.28 * len(rows) + more)
    with page(1, len(shown), size, sentences, entries, sharey=True) as (figure, grid):
        for i, axes in enumerate(grid[0]):
            _draw(axes, values[i, rows] / scale.size, base[i] / scale.size)
            axes.set_title(titles[i], loc="left")
            axes.set_xlabel(metric_label(kind, scale.unit))
            name_rows(axes, [_row_name(dataset, row) for row in rows])
        legend_above(figure, handles(grid[0, 0]))
    return figure


def _base_words(fixed: Sequence[Fixed]) -> str:
    """What the line in the middle stands for."""
    changed = any(one.axis.name not in TABLES for one in fixed)
    return f"system, policies and workload as they stand{', but for what is held' if changed else ''}"


def _listed(names: Sequence[str], most: int = 6) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _draw(axes: Axes, values: Any, base: float) -> None:
    """Two bars a row, from where the metric stands to either end; they never cover each other."""
    for i, (look, shift) in enumerate(zip(_SIDES.values(), (-0.19, 0.19), strict=True)):
        ends = np.nan_to_num(values[:, i], nan=base)
        axes.barh(np.arange(len(ends)) + shift, ends - base, 0.36, left=base, **look.options())
        for y, value in enumerate(values[:, i]):
            if np.isnan(value):
                axes.annotate("no plan", (base, y + shift), (2, 0), textcoords="offset points", va="center")
    axes.axvline(base, color=BLACK, linewidth=0.9, label="as it stands")
    low, high = min(float(np.nanmin(values)), base), max(float(np.nanmax(values)), base)
    room = max(0.08 * (high - low), 1e-3 * abs(base))
    axes.set_xlim(low - room, high + room)
    axes.locator_params(axis="x", nbins=4)
    axes.ticklabel_format(axis="x", useOffset=False)


def _row_name(dataset: xarray.Dataset, row: int) -> str:
    key, unit = str(dataset["key"].values[row]), str(dataset["unit"].values[row])
    low, high = (f"{float(value):.4g}" for value in dataset["setting"].values[row])
    ends = f"{low} to {high}" + (f" {unit_words(unit)}" if unit not in ("", "1") else "")
    return f"{plain(key)}\n{ends}"


def _from_sweep(
    dataset: xarray.Dataset, metric: str | None, at: Mapping[str, Any] | None
) -> tuple[xarray.Dataset, tuple[Fixed, ...]]:
    """A tornado over the hardware axes of a sweep, around its own scenario."""
    sweep = Sweep(dataset)
    kind = sweep.metric(metric or sweep.first_metric())
    again = [one for one in sweep.metrics if computable(one)]
    if kind.name not in again:
        raise not_among("plot --metric", kind.name, again, " (metrics of this sweep that perfmodel computes)")
    scenario = scenario_of(dataset)
    hardware = {
        name: axis for name, axis in sweep.axes.items() if name not in TABLES and scenario.axis(name).kind == "hardware"
    }
    ranges = {name: (float(axis.values.min()), float(axis.values.max())) for name, axis in hardware.items()}
    ranges = {name: ends for name, ends in ranges.items() if ends[0] < ends[1]}
    if not ranges:
        raise PerfModelError(
            "plot: the sweep has no hardware axis of two or more values; allowed: one with such an axis, or what"
            " perfmodel sensitivity -o writes"
        )
    _, every = sweep.fix(at)
    # Other axes stay as the scenario has them, unless the reader says so, or it names inputs by these values only.
    fixed = tuple(one for one in every if one.reason == "chosen" or one.axis.name in FILES)
    standing = _standing(scenario, fixed)
    # What counts only beside another axis moves nothing alone.
    ranges = {name: ends for name, ends in ranges.items() if standing.system.idle(name) is None} or ranges
    return answers.tornado(standing, list(ranges), kind.name, ranges), fixed


def _standing(scenario: Scenario, fixed: Sequence[Fixed]) -> Scenario:
    """The scenario with axis values as its own."""
    values = settings_of(scenario, fixed)
    kinds = {name: scenario.axis(name).kind for name in values}
    hardware = {name: value for name, value in values.items() if kinds[name] == "hardware"}
    options = {name.removeprefix("policy."): value for name, value in values.items() if kinds[name] == "option"}
    system: Any = values.get("system", scenario.system)
    if hardware:
        system = (scenario.file("system", system) if isinstance(system, str) else system).with_values(hardware)
    wrong = [name for name, kind in kinds.items() if kind == "policy"]
    if wrong:
        raise PerfModelError(f"plot: policies that vary along {quoted(wrong[0])} are not drawn as a tornado")
    policies: Any = scenario.labels
    if options:
        policies = [with_options(rule, options) for rule in scenario.policies]
    return Scenario.of(
        values.get("model", scenario.model), system, values.get("trace", scenario.trace), policies,
        prompt=values.get("workload.prompt", scenario.prompt), output=values.get("workload.output", scenario.output),
        losses=values.get("loss", scenario.losses), layers=scenario.layers,
        batch=values.get("workload.batch", scenario.batch), batch_of=scenario.batch_of,
        micro_batch=values.get("workload.micro_batch", scenario.micro_batch),
    )  # fmt: skip
