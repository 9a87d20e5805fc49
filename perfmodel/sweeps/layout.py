"""From what was asked for to a design: axes resolved, values checked, dimensions put in order."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from perfmodel.errors import PerfModelError
from perfmodel.hardware.base import shown, suggestion
from perfmodel.point import TIMINGS
from perfmodel.scenario import Scenario
from perfmodel.scenario.axis import AxisInfo
from perfmodel.scenario.plans import replans
from perfmodel.sweeps.axes import Range, count_of, parse_values
from perfmodel.sweeps.design import HARDWARE, PLAN, POLICY, Design, Dim, check_points
from perfmodel.sweeps.samples import Sample, draw


class Wanted(NamedTuple):
    """Axes as they were asked for, by full name.

    grid : checked values. ranges : ranges to sample from. cases : columns of the table. written : values as they were
    written, for provenance: a text for a range, else a list.
    """

    grid: dict[str, NDArray[Any]]
    ranges: dict[str, Range]
    cases: dict[str, NDArray[Any]]
    written: dict[str, Any]


def read_axes(
    scenario: Scenario,
    axes: Mapping[str, Any],
    cases: Mapping[str, Any],
    zipped: Iterable[str],
    source: str = "cases",
) -> Wanted:
    """Axes and cases with full names and checked values; zipped axes and cases may repeat values.

    source : where the cases come from, for messages.
    """
    together = {scenario.axis(name).name for name in zipped}
    _check_counts(scenario, axes, together)
    wanted = Wanted({}, {}, {}, {})
    for name, given in axes.items():
        info = scenario.axis(name)
        if info.name in wanted.written:
            raise PerfModelError(f"axis {info.name}: given twice, the second time as {shown(name)}; allowed: once")
        values = parse_values(given, info) if isinstance(given, str) else given
        if isinstance(values, Range):
            wanted.ranges[info.name] = _checked_range(scenario, info, values)
            wanted.written[info.name] = values.text
            continue
        array = scenario.check_array(info.name, values, distinct=info.name not in together, alone=False)
        wanted.grid[info.name] = array
        written = isinstance(given, str) and info.numeric and ":" in given
        wanted.written[info.name] = "".join(str(given).split()) if written else array.tolist()
    for name, column in cases.items():
        try:
            info = scenario.axis(name)
            if info.name in wanted.written or info.name in wanted.cases:
                raise PerfModelError(f"axis {info.name}: given twice, once as a column of the cases; allowed: once")
            wanted.cases[info.name] = scenario.check_array(info.name, column, distinct=False, alone=False)
        except PerfModelError as error:
            raise PerfModelError(f"{source}: {error}") from None
    _check_other_systems(scenario, wanted)
    return wanted


def _check_counts(scenario: Scenario, axes: Mapping[str, Any], together: set[str]) -> None:
    """Refuse far too many points before any of them is made."""
    counts = {}
    for name, given in axes.items():
        info = scenario.axis(name)
        if info.name not in together:
            listed = isinstance(given, Sequence) or (isinstance(given, np.ndarray) and given.ndim > 0)
            counts[info.name] = count_of(given, info) if isinstance(given, str) else len(given) if listed else 1
    check_points(max(count, 1) for count in counts.values())


def _checked_range(scenario: Scenario, info: AxisInfo, span: Range) -> Range:
    low, high = scenario.check_array(info.name, [span.low, span.high], alone=False).tolist()
    return Range(float(low), float(high), span.log)


def _check_other_systems(scenario: Scenario, wanted: Wanted) -> None:
    """Hardware axes must exist, with these values, in every system that is an axis value."""
    everything = {**wanted.grid, **wanted.cases}
    for reference in dict.fromkeys(everything.get("system", np.array([], dtype=object)).tolist()):
        other = dataclasses.replace(scenario, system=scenario.file("system", reference))
        for name, values in {**everything, **{n: [*r[:2]] for n, r in wanted.ranges.items()}}.items():
            if scenario.axis(name).kind == "hardware":
                other.check_array(name, values, distinct=False, alone=False)


def zip_groups(zip_: Any) -> list[tuple[str, ...]]:
    """Groups of axes that vary together, from ``"a,b"``, ``["a", "b"]``, or a list of such groups."""
    if isinstance(zip_, str):
        given: list[Any] = [zip_]
    elif isinstance(zip_, Sequence):
        given = list(zip_)
        if given and all(isinstance(one, str) and "," not in one for one in given):
            given = [given]
    else:
        raise PerfModelError(f"zip: found {shown(zip_)}, allowed names of axes, such as 'link.latency_us,ndp.arrays'")
    groups = []
    for one in given:
        names = one.split(",") if isinstance(one, str) else list(one) if isinstance(one, Sequence) else [one]
        if len(names) < 2 or not all(isinstance(name, str) and name.strip() for name in names):
            raise PerfModelError(f"zip: found {shown(one)}, allowed two or more names of axes")
        groups.append(tuple(name.strip() for name in names))
    return groups


def lay_out(scenario: Scenario, wanted: Wanted, zipped: Sequence[tuple[str, ...]], sample: Sample | None) -> Design:
    """The design of a request: the policy outermost, then what changes plans, then hardware.

    Raises
    ------
    PerfModelError : zipped axes that are missing or of unequal length, a range without a sample, or the other way.
    """
    partner = _partners(scenario, wanted, zipped)
    dims: list[Dim] = []
    notes: tuple[str, ...] = ()
    if wanted.cases:
        dims.append(_dim(scenario, "case", wanted.cases, numbered=True))
    if sample is None and wanted.ranges:
        name, span = next(iter(wanted.ranges.items()))
        raise PerfModelError(
            f"axis {name}: range {span.text!r} has no count; allowed: start:stop:count[:log], or a sample to draw"
        )
    if sample is not None:
        if not wanted.ranges:
            raise PerfModelError("sample: no axis to draw from; allowed: at least one axis given as low:high[:log]")
        spans = {name: (span, scenario.axis(name).whole) for name, span in wanted.ranges.items()}
        table, notes = draw(sample, spans)
        dims.append(_dim(scenario, "sample", table, numbered=True))
    done: set[str] = set()
    for name in wanted.grid:
        group = partner.get(name, (name,))
        if name not in done:
            dims.append(_dim(scenario, "+".join(group), {one: wanted.grid[one] for one in group}))
            done |= set(group)
    if not any("policy" in dim.axes for dim in dims):  # also a single policy: what was asked for can be selected
        dims.append(_dim(scenario, "policy", {"policy": np.array(scenario.labels, dtype=object)}))
    _check_timings(dims)
    return Design.of(dims, notes)


def _check_timings(dims: Sequence[Dim]) -> None:
    """Timings of a memory give way to an efficiency that is set, so that not both can vary."""
    names = [name for dim in dims for name in dim.axes if name.startswith(TIMINGS)]
    if names and any("ndp.dram_efficiency" in dim.axes for dim in dims):
        what = "ndp.dram_efficiency is an axis too and replaces it"
        raise PerfModelError(f"axis {names[0]}: {what}; allowed: one of them")


def _partners(scenario: Scenario, wanted: Wanted, zipped: Sequence[tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """By axis, the axes it varies with, in the order they were zipped."""
    partner: dict[str, tuple[str, ...]] = {}
    for names in zipped:
        group = tuple(scenario.axis(name).name for name in names)
        for name in group:
            if name not in wanted.grid:
                close = suggestion(name, wanted.grid)
                given = ", ".join(wanted.grid) or "none"
                raise PerfModelError(f"zip: {name} is not an axis with values{close}; allowed: {given}")
            if name in partner or group.count(name) > 1:
                raise PerfModelError(f"zip: {name} is zipped twice; allowed: every axis once")
        lengths = {name: len(wanted.grid[name]) for name in group}
        if len(set(lengths.values())) > 1:
            found = ", ".join(f"{name} has {length}" for name, length in lengths.items())
            raise PerfModelError(f"zip: axes of unequal length ({found} values); allowed: equal lengths")
        partner |= dict.fromkeys(group, group)
    return partner


def _dim(scenario: Scenario, name: str, axes: Mapping[str, NDArray[Any]], *, numbered: bool = False) -> Dim:
    if tuple(axes) == ("policy",) and not numbered:
        return Dim(name, dict(axes), POLICY)
    hardware = all(scenario.axis(axis).kind == "hardware" for axis in axes)
    planned = any(replans(policy, axis) for policy in scenario.policies for axis in axes)
    return Dim(name, dict(axes), HARDWARE if hardware and not planned else PLAN, numbered)
