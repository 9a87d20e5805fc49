"""Where one policy overtakes another along an axis."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from perfmodel.answers.curve import Curve, checked_scenario, domain, numeric_axis, one_policy, present
from perfmodel.answers.provenance import described_by
from perfmodel.answers.ranges import range_of, values_of
from perfmodel.answers.roots import Domain, Stretch, stretches, touches
from perfmodel.errors import NoAnswerError, PerfModelError
from perfmodel.evaluation import metric as find_metric
from perfmodel.hardware.base import shown

if TYPE_CHECKING:
    import xarray as xr

    from perfmodel.scenario import Scenario
    from perfmodel.scenario.axis import AxisInfo

TIE, UNKNOWN = "tie", "unknown"


class _Change(NamedTuple):
    """The winner changes at ``value``: the place where both are equal, or the first value of the new winner."""

    value: float
    before: str
    after: str
    kind: str
    a: float
    b: float


def break_even(
    scenario: Scenario,
    axis: str | tuple[str, str] | tuple[str, float | None, float | None],
    a: str | int = 0,
    b: str | int = 1,
    *,
    metric: str = "tpot_mean_s",
    along: tuple[str, str | Sequence[Any]] | None = None,
) -> xr.Dataset:
    """Where the better of two policies changes along an axis.

    The range is scanned on a grid (whole numbers one by one where there are few), and every change is closed in on with
    the model itself: at an ``exact`` one both policies priced again are equal within 1e-9.

    Parameters
    ----------
    scenario : what is priced.
    axis : any axis of numbers, by name, or with the range to search: its two ends, or a text such as ``"1:1000"``; by
        default all that it allows.
    a, b : two policies of the scenario, by label or number.
    metric : what is compared.
    along : a further axis and its values, a list or a text such as ``"32:128:4"``; one search for each of them, which
        gives a break-even line.

    Returns
    -------
    Data set with dimension ``crossing``, and the name of the further axis where there is one:
    ``break_even`` : where the winner changes, rising [unit of the axis], NaN beyond the last change. On an axis of
    whole numbers, and where a metric jumps, the first value of the new winner.
    ``kind`` : ``exact`` where both are equal there, ``step`` where one jumps past the other.
    ``before``, ``after`` : who is better on either side: a label, ``tie``, or ``unknown`` without a plan.
    ``a``, ``b`` : the metric of both there.
    ``winner`` : who is better all along, empty where that changes.

    Raises
    ------
    PerfModelError : unknown axis, metric or policy, the same policy twice, or a bad range.
    NoAnswerError : no value of the axis lets the two be compared.
    """
    labels = one_policy(checked_scenario(scenario), a), one_policy(scenario, b)
    if labels[0] == labels[1]:
        raise PerfModelError(f"break-even: {labels[0]} is given twice, allowed two different policies")
    name, low, high = _axis_and_ends(scenario, axis)
    info = numeric_axis(scenario, name)
    span = domain(scenario, info, low, high)
    wanted = find_metric(metric)
    further, values = _further(scenario, info, along)
    scenario.check_varied([info.name, *([] if further is None else [further.name])])
    found = []
    reasons: dict[str, None] = {}
    for value in values:
        settings = {} if further is None else {further.name: value}
        curves = [Curve(scenario, label, info, wanted.name, settings) for label in labels]
        found.append(_changes(curves, span, present(scenario, info, labels[0]), wanted.better == "lower"))
        reasons |= next((curve.refusals for curve in curves if curve.refusals), {})
    if all(start == UNKNOWN and not changes for start, changes in found):
        why = next(iter(reasons), f"the trace or a policy cannot tell {wanted.name}")
        raise NoAnswerError(f"break-even: no value of {info.name} lets {labels[0]} and {labels[1]} be compared: {why}")
    return _dataset(scenario, info, span, labels, wanted.name, further, values, found)


def _axis_and_ends(scenario: Scenario, axis: object) -> tuple[Any, Any, Any]:
    if isinstance(axis, str):
        return axis, None, None
    if isinstance(axis, tuple | list) and len(axis) == 2 and isinstance(axis[1], str):
        return axis[0], *range_of(axis[1], numeric_axis(scenario, axis[0]))[:2]
    if not isinstance(axis, tuple | list) or len(axis) != 3:
        raise PerfModelError(f"axis: found {shown(axis)}, allowed the name of an axis, or its name, low and high end")
    return axis[0], axis[1], axis[2]


def _further(scenario: Scenario, info: AxisInfo, along: object) -> tuple[AxisInfo | None, tuple[Any, ...]]:
    if along is None:
        return None, (None,)
    if not isinstance(along, tuple | list) or len(along) != 2:
        raise PerfModelError(f"along: found {shown(along)}, allowed the name of an axis and its values")
    further = scenario.axis(along[0])
    if further.name == info.name or further.kind == "policy":
        raise PerfModelError(f"along: found {further.name}, allowed another axis than {info.name} and policy")
    return further, values_of(scenario, further, along[1])


def _changes(curves: list[Curve], span: Domain, now: float | None, lower: bool) -> tuple[str, list[_Change]]:
    """Winner at the start, and every change of the winner."""

    def difference(values: NDArray[np.float64]) -> NDArray[np.float64]:
        a, b = (curve(values) for curve in curves)
        largest = np.maximum(np.abs(a), np.abs(b))
        return (a - b) / np.where(largest == 0.0, 1.0, largest)

    found = stretches(difference, span, () if now is None else (now,))
    # Where both touch without passing, the winner stays.
    found = [one for i, one in enumerate(found) if span.whole or not touches(found, i)]

    def winner(one: Stretch) -> str:
        if one.state is None or one.state == 0:
            return UNKNOWN if one.state is None else TIE
        return curves[0 if (one.state < 0) == lower else 1].policy

    changes = []
    for left, right in itertools.pairwise(found):
        if left.state == right.state:
            continue
        value = right.low
        pair = curves[0].at(value), curves[1].at(value)
        changes.append(_Change(value, winner(left), winner(right), left.cut, *pair))
    return winner(found[0]), changes


def _dataset(
    scenario: Scenario,
    info: AxisInfo,
    span: Domain,
    labels: tuple[str, str],
    metric: str,
    further: AxisInfo | None,
    values: tuple[Any, ...],
    found: Sequence[tuple[str, list[_Change]]],
) -> xr.Dataset:
    import xarray as xr

    count = max(len(changes) for _, changes in found)
    numbers = {name: np.full((len(found), count), np.nan) for name in ("value", "a", "b")}
    words = {name: np.full((len(found), count), "", dtype=object) for name in ("kind", "before", "after")}
    for i, (_, changes) in enumerate(found):
        for j, change in enumerate(changes):
            for table in (numbers, words):
                for name in table:
                    table[name][i, j] = getattr(change, name)
    winner = np.array([start if not changes else "" for start, changes in found], dtype=object)
    unit = find_metric(metric).unit
    data = {
        "break_even": (numbers["value"], {"units": info.unit, "long_name": f"break-even {info.meaning}"}),
        "kind": (words["kind"], {"long_name": "exact: both are equal there; step: one jumps past the other"}),
        "before": (words["before"], {"long_name": "better policy below"}),
        "after": (words["after"], {"long_name": "better policy above"}),
        "a": (numbers["a"], {"units": unit, "long_name": f"{metric} of {labels[0]}"}),
        "b": (numbers["b"], {"units": unit, "long_name": f"{metric} of {labels[1]}"}),
    }
    along = "along" if further is None else further.name
    dataset = xr.Dataset(
        {
            **{name: ((along, "crossing"), table, attrs) for name, (table, attrs) in data.items()},
            "winner": (along, winner, {"long_name": "better policy all along, empty where it changes"}),
        }
    )
    if further is None:
        dataset = dataset.isel(along=0)
    else:
        coordinate = np.array(values, dtype=None if further.numeric else object)
        dataset = dataset.assign_coords(
            {further.name: (further.name, coordinate, {"units": further.unit, "long_name": further.meaning})}
        )
    return dataset.assign_attrs(
        {
            **described_by(scenario, "break-even", metric, labels, [info.name]),
            "a": labels[0],
            "b": labels[1],
            "metric": metric,
            "axis": info.name,
            "axis_units": info.unit,
            "low": span.low,
            "high": span.high,
        }
    )
