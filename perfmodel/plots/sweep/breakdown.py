"""Where the time of a mean output token goes, by policy or along an axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.figure import Figure

from perfmodel.errors import PerfModelError
from perfmodel.evaluation import PARTS
from perfmodel.plots.drawing import beside, handles, leave_room, name_rows, stack
from perfmodel.plots.style import PAGE, PART_LOOKS
from perfmodel.plots.sweep.axes import Axis, Fixed
from perfmodel.plots.sweep.labels import axis_words, fixed_words, names_of, together_words, value_words
from perfmodel.plots.sweep.origin import origin_words
from perfmodel.plots.sweep.page import legend_above, page
from perfmodel.plots.sweep.selection import Sweep, settings_of
from perfmodel.plots.words import folded, number
from perfmodel.sweeps.dataset import scenario_of

if TYPE_CHECKING:
    import xarray

#: Rows that a reader can tell apart.
_MOST_ROWS = 16
#: A part with a smaller share of every row is too small to see.
_SMALL = 0.004


def breakdown_figure(
    dataset: xarray.Dataset,
    *,
    x: str | None = None,
    policy: str | Sequence[str] | None = None,
    at: Mapping[str, Any] | None = None,
) -> Figure:
    """Parts of the critical path of a mean output token: in milliseconds, and as shares.

    Parameters
    ----------
    dataset : a sweep. Where it does not hold the times of all parts, they are computed again from its provenance.
    x : an axis whose values are the rows, for one policy; by default the policies are the rows.
    policy : policies to draw; by default all.
    at : values of the other axes; by default those nearest the scenario's own, as the caption says.

    Raises
    ------
    PerfModelError : unknown names (with close matches), several policies along an axis, or a point without a plan.
    """
    whole = Sweep(dataset)
    shown = whole.chosen(policy, _MOST_ROWS)
    names = names_of(whole)
    along = whole.axis(x, "x") if x is not None else None
    if along is None:
        sweep, fixed = whole.fix(at)
        rows: list[tuple[str, str, int | None]] = [(folded(names[one], 24), one, None) for one in shown]
        places: list[int] = []
    else:
        if len(shown) != 1:
            raise PerfModelError(
                f"plot: found {len(shown)} policies along the axis {along.name}, allowed one; choose with --policy"
            )
        sweep, fixed = whole.fix(at, [along.dim])
        places = _evenly(along)
        rows = [(value_words(along, along.values[place]), shown[0], place) for place in places]
    parts = [_parts(sweep, policy_text, fixed, along, place) for _, policy_text, place in rows]
    totals = np.array([sum(one.values()) for one in parts])
    if np.isnan(totals).any():
        missing = ", ".join(rows[int(i)][0] for i in np.flatnonzero(np.isnan(totals)))
        raise PerfModelError(f"plot: no feasible plan at this point for {missing}; hold other values (--at)")
    series = {part: np.array([one[part] for one in parts]) for part in PARTS}
    seen = {part: values for part, values in series.items() if (values / totals > _SMALL).any()}
    small = [PART_LOOKS[p].label for p in PARTS if p not in seen and series[p].any()]
    lines = sum(max(1.4, label.count("\n") + 1.4) for label, _, _ in rows)
    sentences = [
        f"Policy: {names[shown[0]]}." if along else "",
        "Work hidden behind other work is not on the critical path.",
        f"Too small to see: {', '.join(small)}." if small else "",
        f"Rows: {len(places)} of {len(along.values)} values." if along and len(places) < len(along.values) else "",
        together_words(whole, along) if along else "",
        fixed_words(fixed),
        origin_words(whole, fixed),
    ]
    entries = [PART_LOOKS[part].label for part in seen]
    with page(1, 2, (PAGE, 0.75 + 0.15 * lines), sentences, entries, sharey=True) as (figure, grid):
        time, share = grid[0]
        stack(time, {part: (1e3 * values).tolist() for part, values in series.items()}, PART_LOOKS)
        for y, total in enumerate(totals):
            beside(time, 1e3 * total, y, number(1e3 * total))
        leave_room(time, 1e3 * float(totals.max()), 0.16)
        time.locator_params(axis="x", prune="upper")  # or it would run into the first tick of the other panel
        time.set_xlabel("critical path of a mean output token (ms)")
        stack(share, {part: (100 * values / totals).tolist() for part, values in series.items()}, PART_LOOKS)
        share.set_xlim(0, 100)
        share.set_xlabel("share of it (%)")
        if along is not None:
            time.set_ylabel(axis_words(along.name))
        for axes in (time, share):
            name_rows(axes, [label for label, _, _ in rows])
        legend_above(figure, {label: handle for label, handle in handles(time).items() if label in entries})
    return figure


def _evenly(along: Axis) -> list[int]:
    """Places along an axis, in the order of its values where these are numbers; evenly thinned out where too many."""
    order = np.argsort(along.values, kind="stable") if along.numeric else np.arange(len(along.values))
    chosen = np.unique(np.linspace(0, len(order) - 1, min(len(order), _MOST_ROWS)).round().astype(int))
    return [int(place) for place in order[chosen]]


def _parts(
    sweep: Sweep, policy: str, fixed: Sequence[Fixed], along: Axis | None, place: int | None
) -> dict[str, float]:
    """Parts of the critical path of one row [s]: from the sweep where it holds them all, else computed again."""
    names = [f"{part}_s" for part in PARTS]
    if all(name in sweep.metrics for name in names):
        dims = [] if along is None else [along.dim]
        found = {name: sweep.values(name, policy, dims) for name in names}
        return {p: float(found[n] if place is None else found[n][place]) for p, n in zip(PARTS, names, strict=True)}
    here = list(fixed)
    if along is not None and place is not None:
        here += [
            Fixed(one, one.values[[place]].tolist()[0], "chosen") for one in sweep.axes.values() if one.dim == along.dim
        ]
    scenario = scenario_of(sweep.dataset)
    priced = scenario.prices(policy, settings_of(scenario, here), {}, names)
    return {part: float(priced[name].reshape(-1)[0]) for part, name in zip(PARTS, names, strict=True)}
