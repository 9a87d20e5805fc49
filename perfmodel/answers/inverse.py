"""Inverse questions: at which value of an axis does a prediction meet a target?"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from perfmodel.answers.curve import Curve, domain, numeric_axis, one_policy, present
from perfmodel.answers.roots import Domain, Stretch, stretches, turning_point
from perfmodel.answers.targets import Target, parse_target, target_of
from perfmodel.errors import PerfModelError

if TYPE_CHECKING:
    from perfmodel.scenario import Scenario

Side = Literal["from here up", "from here down", "here only"]


class Crossing(NamedTuple):
    """A place where the target starts or stops to be met.

    value : value of the axis, the last one that meets the target [unit of the axis].
    reached : the metric there, priced by the scenario.
    side : on which side the target is met.
    kind : ``exact`` where the metric equals the target, ``step`` where it jumps past it.
    beyond, reached_beyond : with ``step``, the nearest value that misses the target, and the metric there (None where
        there is no plan).
    """

    value: float
    reached: float
    side: Side
    kind: Literal["exact", "step"]
    beyond: float | None = None
    reached_beyond: float | None = None


@dataclass(frozen=True)
class Solution:
    """Where one policy meets a target along one axis.

    axis, unit : what was varied. metric, target, goal : what was asked for, ``goal`` being at most or at least.
    low, high : range searched. value : the only or lowest crossing; None where the target is met all along.
    crossings : every place where the target starts or stops to be met, rising.
    met : ranges in which it is met, ends included, rising.
    notes : what the answer cannot see.
    """

    policy: str
    axis: str
    unit: str
    metric: str
    metric_unit: str
    target: float
    goal: str
    low: float
    high: float
    value: float | None
    crossings: tuple[Crossing, ...]
    met: tuple[tuple[float, float], ...]
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values, ready for JSON."""
        crossings = [one._asdict() for one in self.crossings]
        return {**asdict(self), "crossings": crossings, "met": [list(one) for one in self.met]}


def solve(
    scenario: Scenario,
    axis: str,
    target: str | tuple[str, float],
    *,
    policy: str | int | None = None,
    low: float | None = None,
    high: float | None = None,
) -> Solution:
    """Values of an axis at which a policy meets a target.

    The range is scanned on a grid (whole numbers one by one where there are few), and every crossing is closed in on
    with the model itself: where the metric is continuous, the answer priced again equals the target within 1e-9.

    Parameters
    ----------
    scenario : what is priced.
    axis : any axis of numbers: hardware, a policy option, or the workload.
    target : such as ``"tpot_ms=50"``, or a name and a number.
    policy : which of the scenario's policies, by text or number; needed only if there are several.
    low, high : range to search, in the unit of the axis; by default all that the axis allows.

    Raises
    ------
    PerfModelError : unknown axis, metric or policy, a bad range, or a target that is met nowhere; the message then says
        what is reached, and where.
    """
    text = one_policy(scenario, policy)
    info = numeric_axis(scenario, axis)
    wanted = parse_target(target) if isinstance(target, str) else target_of(*target)
    span = domain(scenario, info, low, high)
    curve = Curve(scenario, text, info, wanted.metric.name)

    def difference(values: NDArray[np.float64]) -> NDArray[np.float64]:
        return curve(values) / wanted.value - 1.0

    now = present(scenario, info, text)
    found = stretches(difference, span, () if now is None else (now,))
    good = (-1, 0) if wanted.metric.better == "lower" else (0, 1)
    if all(one.state not in good for one in found):
        raise PerfModelError(_unreachable(curve, span, wanted))
    crossings = tuple(_crossings(curve, found, good))
    return Solution(
        policy=text,
        axis=info.name,
        unit=info.unit,
        metric=wanted.metric.name,
        metric_unit=wanted.metric.unit,
        target=wanted.value,
        goal=wanted.goal,
        low=span.low,
        high=span.high,
        value=crossings[0].value if crossings else None,
        crossings=crossings,
        met=_met(found, good),
        notes=_notes(curve, span, found, high),
    )


def _met(found: Sequence[Stretch], good: tuple[int, int]) -> tuple[tuple[float, float], ...]:
    """Ranges that meet the target; neighbouring stretches that do so become one."""
    ranges: list[tuple[float, float]] = []
    joins = False
    for one in found:
        if one.state in good:
            ranges = [*ranges[:-1], (ranges[-1][0], one.high)] if joins else [*ranges, (one.low, one.high)]
        joins = one.state in good
    return tuple(ranges)


def _crossings(curve: Curve, found: Sequence[Stretch], good: tuple[int, int]) -> list[Crossing]:
    """Both ends of every range that meets the target, apart from the ends of the search."""
    crossings: list[Crossing] = []
    for left, right in itertools.pairwise(found):
        up = right.state in good
        if up == (left.state in good):
            continue
        value, beyond = (right.low, left.high) if up else (left.high, right.low)
        alone = (right if up else left).low == (right if up else left).high and not curve.axis.whole
        side: Side = "here only" if alone else "from here up" if up else "from here down"
        if alone and crossings and crossings[-1].value == value:
            continue  # the other side of the same place
        if left.cut == "exact":
            crossings.append(Crossing(value, curve.at(value), side, "exact"))
            continue
        missed = curve.at(beyond)
        reached_beyond = None if np.isnan(missed) else missed
        crossings.append(Crossing(value, curve.at(value), side, "step", beyond, reached_beyond))
    return crossings


def _unreachable(curve: Curve, span: Domain, wanted: Target) -> str:
    """The best that the axis can do, and where."""
    grid = span.grid()
    values = curve(grid)
    unit, name = wanted.metric.unit, wanted.metric.name
    along = f"{curve.axis.name} from {span.low:g} to {span.high:g} {_unit(curve.axis.unit)}".rstrip()
    known = ~np.isnan(values)
    if not known.any():
        return f"solve: {curve.policy} has no value of {name} for {along}: {curve.why_nowhere()}"
    if known.all() and values.max() == values.min():
        return (
            f"solve: {curve.axis.name} has no effect on {name} of {curve.policy}: {values[0]:.6g} {unit} at any value,"
            f" and the target is {wanted.goal} {wanted.value:.6g} {unit}"
        )
    sign = 1.0 if wanted.metric.better == "lower" else -1.0
    best = int(np.nanargmin(sign * values))
    place, reached = float(grid[best]), float(values[best])
    if not span.whole and 0 < best < len(grid) - 1:
        finer = turning_point(curve, float(grid[best - 1]), float(grid[best + 1]), sign)
        if sign * curve.at(finer) < sign * reached:
            place, reached = finer, curve.at(finer)
    return (
        f"solve: {name} of {curve.policy} is never {wanted.goal} {wanted.value:.6g} {unit} for {along}; the best is"
        f" {reached:.6g} {unit}, at {place:.6g} {_unit(curve.axis.unit)}".rstrip()
    )


def _unit(unit: str) -> str:
    return "" if unit == "1" else unit


def _notes(curve: Curve, span: Domain, found: Sequence[Stretch], high: float | None) -> tuple[str, ...]:
    notes = []
    if not span.exhaustive:
        notes.append(f"searched on a grid of {len(span.grid())} values; what lies between two of them can be missed")
    if high is None and curve.axis.kind == "workload":
        notes.append(f"{curve.axis.name} has no end of its own; searched up to {span.high:g}")
    gaps = [f"{one.low:.6g} to {one.high:.6g}" for one in found if one.state is None]
    if gaps:
        notes.append(f"no value at {', '.join(gaps)}: {curve.why_nowhere()}")
    return tuple(notes)
