"""Inverse questions: at which value of an axis does a prediction meet a target?"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from perfmodel.answers.curve import Curve, checked_scenario, domain, numeric_axis, one_policy, present
from perfmodel.answers.roots import Domain, Stretch, stretches, turning_point
from perfmodel.answers.targets import Target, target_of
from perfmodel.errors import NoAnswerError, PerfModelError
from perfmodel.evaluation import Metric
from perfmodel.hardware.base import shown

if TYPE_CHECKING:
    from perfmodel.scenario import Scenario
    from perfmodel.scenario.axis import AxisInfo

Side = Literal["from here up", "from here down", "here only"]


class Crossing(NamedTuple):
    """A place where the target starts or stops to be met.

    value : value of the axis, the last one that meets the target [unit of the axis].
    reached : the metric there, priced by the scenario.
    side : on which side the target is met.
    kind : ``exact`` where the metric equals the target, ``step`` where it jumps past it.
    beyond, reached_beyond : with ``step``, the nearest value that misses the target, and the metric there (None where
        there is no plan).
    ttft_s, migration_s, decode_s, end_to_end_s : the whole request at ``value``; None where the trace cannot tell.
    """

    value: float
    reached: float
    side: Side
    kind: Literal["exact", "step"]
    beyond: float | None = None
    reached_beyond: float | None = None
    ttft_s: float | None = None
    migration_s: float | None = None
    decode_s: float | None = None
    end_to_end_s: float | None = None


@dataclass(frozen=True)
class Solution:
    """Where one policy meets a target along one axis.

    axis, unit : what was varied. settings : other axes, set to one value each.
    metric, target, goal : what was asked for, ``goal`` being at most or at least.
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
    settings: dict[str, Any]

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
    settings: Mapping[str, Any] | None = None,
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
    settings : other axes to hold at one value each.

    Returns
    -------
    A `Solution`: ``value``, the only or lowest place where the target starts or stops to be met (None where it is met
    all along), every such place, and the ranges that meet it. Each place says what the whole request takes there, as
    a target for the decode alone may be met where the copies before it take hours.

    Raises
    ------
    PerfModelError : unknown axis, metric or policy, or a bad range.
    NoAnswerError : a target that is met nowhere; the message says what is reached, and where.
    """
    text = one_policy(checked_scenario(scenario), policy)
    info = numeric_axis(scenario, axis)
    wanted = target_of(target)
    span = domain(scenario, info, low, high)
    held = _held(scenario, info, settings)
    scenario.check_varied([info.name, *held])
    curve = Curve(scenario, text, info, wanted.metric.name, held)

    def difference(values: NDArray[np.float64]) -> NDArray[np.float64]:
        return curve(values) / wanted.value - 1.0

    now = present(scenario, info, text)
    found = stretches(difference, span, () if now is None else (now,))
    good = (-1, 0) if wanted.metric.better == "lower" else (0, 1)
    if all(one.state not in good for one in found):
        raise _unreachable(curve, span, wanted)
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
        notes=(*_notes(curve, span, found, high), *_other_than_decode(wanted.metric, info.unit, crossings)),
        settings=held,
    )


def _held(scenario: Scenario, info: AxisInfo, settings: object) -> dict[str, Any]:
    """Other axes and their values, checked."""
    if settings is None:
        return {}
    if not isinstance(settings, Mapping):
        raise PerfModelError(f"settings: found {shown(settings)}, allowed one value by axis")
    held = {}
    for name, value in settings.items():
        axis = scenario.axis(name)
        if axis.name == info.name or axis.kind == "policy":
            raise PerfModelError(f"settings: found {axis.name}, allowed other axes than {info.name} and policy")
        (held[axis.name],) = scenario.check(axis.name, [value])
    return held


#: What a request takes, beside the time of a token.
_WHOLE = ("ttft_s", "migration_s", "decode_s", "end_to_end_s")


def _request(curve: Curve, value: float) -> dict[str, float | None]:
    """What the whole request takes at a value of the axis [s]."""
    at = {**curve.settings, curve.axis.name: int(value) if curve.axis.whole else value}
    prices = curve.scenario.prices(curve.policy, at, {}, _WHOLE)
    return {name: None if np.isnan(found) else float(found) for name, found in prices.items()}


def _other_than_decode(wanted: Metric, unit: str, crossings: Sequence[Crossing]) -> list[str]:
    """A note for every place where a target for decode is met while most of the time is not decode."""
    notes = []
    for one in crossings if wanted.family in ("mean", "percentile") else ():
        if one.end_to_end_s is None or one.decode_s is None or one.decode_s >= 0.5 * one.end_to_end_s:
            continue
        first, copies = one.ttft_s or 0.0, one.migration_s or 0.0
        what = f"the prefill takes {first:.4g} s" if first >= copies else f"migration takes {copies:.4g} s"
        notes.append(
            f"at {one.value:.6g} {_unit(unit)}".rstrip()
            + f" {what} of {one.end_to_end_s:.4g} s end to end, and decode {one.decode_s:.4g} s"
        )
    return notes


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
            crossings.append(Crossing(value, curve.at(value), side, "exact", **_request(curve, value)))
            continue
        missed = curve.at(beyond)
        reached_beyond = None if np.isnan(missed) else missed
        whole = _request(curve, value)
        crossings.append(Crossing(value, curve.at(value), side, "step", beyond, reached_beyond, **whole))
    return crossings


def _unreachable(curve: Curve, span: Domain, wanted: Target) -> NoAnswerError:
    """The best that the axis can do, and where."""
    grid = span.grid()
    values = curve(grid)
    unit, name = wanted.metric.unit, wanted.metric.name
    along = f"{curve.axis.name} from {span.low:g} to {span.high:g} {_unit(curve.axis.unit)}".rstrip()
    at = "".join(f", {key}={value}" for key, value in curve.settings.items())
    who = f"{curve.policy}{at}"
    known = ~np.isnan(values)
    if not known.any():
        return NoAnswerError(f"solve: {who} has no value of {name} for {along}: {curve.why_nowhere()}")
    sign = 1.0 if wanted.metric.better == "lower" else -1.0
    best = int(np.nanargmin(sign * values))
    place, reached = float(grid[best]), float(values[best])
    if not span.whole and 0 < best < len(grid) - 1:
        finer = turning_point(curve, float(grid[best - 1]), float(grid[best + 1]), sign)
        if sign * curve.at(finer) < sign * reached:
            place, reached = finer, curve.at(finer)
    nearest = {"nearest": {curve.axis.name: place, name: reached}}
    if known.all() and values.max() == values.min():
        return NoAnswerError(
            f"solve: {curve.axis.name} has no effect on {name} of {who}: {values[0]:.6g} {unit} at any value,"
            f" and the target is {wanted.goal} {wanted.value:.6g} {unit}",
            nearest,
        )
    return NoAnswerError(
        f"solve: {name} of {who} is never {wanted.goal} {wanted.value:.6g} {unit} for {along}; the best is"
        f" {reached:.6g} {unit}, at {place:.6g} {_unit(curve.axis.unit)}".rstrip(),
        nearest,
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
