"""How far a prediction moves when one number moves and the others stay: the bars of a tornado."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from perfmodel.answers.curve import Curve, checked_scenario, numeric_axis, present
from perfmodel.answers.provenance import described_by
from perfmodel.answers.ranges import Spread, checked_end, given, table_of_ends
from perfmodel.errors import PerfModelError
from perfmodel.evaluation import metric as find_metric
from perfmodel.hardware.base import shown
from perfmodel.scenario.numbers import plain, real
from perfmodel.sweeps.axes import Range

if TYPE_CHECKING:
    import xarray as xr

    from perfmodel.scenario import Scenario
    from perfmodel.scenario.axis import AxisInfo


class _Left(NamedTuple):
    """Keys that are not shown, with the reason: by sentence."""

    no_effect: list[str]
    zero: list[str]
    refused: dict[str, str]


def tornado(
    scenario: Scenario,
    keys: Sequence[str] | None = None,
    metric: str = "tpot_mean_s",
    change: float | Mapping[str, str | Sequence[float]] = 0.1,
) -> xr.Dataset:
    """How far a metric moves when one number moves, the others staying as they are.

    Parameters
    ----------
    scenario : what is priced, for every one of its policies.
    keys : axes of numbers; by default every number of the hardware. A key that is asked for by name is always shown.
    metric : what is looked at.
    change : relative change of every number, down and up, below 1; or by key its two ends, or a text such as
        ``"16:128"``. Ends are clipped to what the axis allows, and whole numbers move by at least 1.

    Returns
    -------
    Data set with dimensions ``policy``, ``key`` (largest swing first) and ``side`` (low, high): ``value``, the metric;
    ``setting``, the value of the key; ``base``, the metric as the scenario stands; ``swing``, the largest less the
    smallest of the three. Attributes (JSON): ``no_effect``, keys that change no policy; ``zero``, keys that are zero,
    so that a relative change does nothing; ``refused``, keys whose change contradicts the spec, with the reason;
    ``clipped``, keys that a limit stopped.

    Raises
    ------
    PerfModelError : unknown key or metric, a bad change, or nothing that has an effect.
    """
    wanted = find_metric(metric)
    spreads, left = _spreads(checked_scenario(scenario), keys, change)
    base = np.array([_base(scenario, label, wanted.name) for label in scenario.labels])
    if np.isnan(base).all():
        raise PerfModelError(f"tornado: the trace or the policies cannot tell {wanted.name}")
    shown_spreads: list[Spread] = []
    rows: list[NDArray[np.float64]] = []
    for one in spreads:
        values, reason = _both_ends(scenario, one, wanted.name)
        if reason is not None:
            if keys is not None:
                raise PerfModelError(f"tornado: {one.axis.name}: {reason}")
            left.refused[one.axis.name] = reason
            continue
        moved = bool(((values != base[:, None]) & ~np.isnan(base)[:, None]).any())
        if keys is None and not isinstance(change, Mapping) and not moved:
            left.no_effect.append(one.axis.name)
            continue
        shown_spreads.append(one)
        rows.append(values)
    if not rows:
        raise PerfModelError(f"tornado: no number of {scenario.system.name} has an effect on {wanted.name}")
    return _tornado_dataset(scenario, wanted.name, base, shown_spreads, np.stack(rows, axis=1), left)


def _base(scenario: Scenario, label: str, metric: str) -> float:
    """The metric as the scenario stands; a plan that is not possible is refused with its reason."""
    return float(scenario.prices(label, {}, {}, (metric,))[metric])


def _both_ends(scenario: Scenario, one: Spread, metric: str) -> tuple[NDArray[np.float64], str | None]:
    """The metric at the low and the high end [policies, 2], NaN where a policy has no plan; the reason if none has."""
    curves = [Curve(scenario, label, one.axis, metric) for label in scenario.labels]
    values = np.array([curve(np.array(one.range[:2])) for curve in curves])
    nowhere = bool(np.isnan(values).all(axis=0).any())
    return values, next((reason for curve in curves for reason in curve.refusals), None) if nowhere else None


def _spreads(
    scenario: Scenario, keys: Sequence[str] | None, change: float | Mapping[str, str | Sequence[float]]
) -> tuple[list[Spread], _Left]:
    """The ends of every key, and the keys that a relative change cannot move."""
    left = _Left([], [], {})
    names = _names(scenario, keys)
    share = real(change)
    if share is None and not isinstance(change, Mapping):
        wanted = "a number above 0 and below 1, or the low and high end by key"
        raise PerfModelError(f"change: found {shown(plain(change))}, allowed {wanted}")
    if share is None:
        given_ends = table_of_ends("change", change)
        by_name = {scenario.axis(key).name: ends for key, ends in given_ends.items()}
        if len(by_name) < len(given_ends):
            raise PerfModelError(f"change: found {', '.join(map(shown, given_ends))}, allowed every axis once")
        missing = [name for name in names or () if name not in by_name]
        if missing:
            raise PerfModelError(f"change: found none of {shown(missing[0])}, allowed the two ends of every key")
        return [given(scenario, name, by_name[name]) for name in (by_name if names is None else names)], left
    if not 0.0 < share < 1.0:  # the low end would be zero or less
        wanted = "a number above 0 and below 1 (0.1 is 10 % down and up), or the two ends by key"
        raise PerfModelError(f"change: found {shown(plain(change))}, allowed {wanted}")
    found_spreads = []
    own = {axis.name for axis in scenario.axes()}
    every = [key for key in scenario.system.numeric_keys() if key in own]
    for key in every if names is None else names:
        axis = numeric_axis(scenario, key)
        here = _here(scenario, axis)
        if here == 0.0 and names is not None:
            raise PerfModelError(f"axis {axis.name}: is 0, which no relative change moves; give its two ends")
        if here == 0.0:
            left.zero.append(axis.name)
            continue
        found_spreads.append(_around(scenario, axis, here, share))
    return found_spreads, left


def _names(scenario: Scenario, keys: object) -> list[str] | None:
    """Full names of the keys that were asked for."""
    if keys is None:
        return None
    keys = keys.tolist() if isinstance(keys, np.ndarray) else keys
    listed = [keys] if isinstance(keys, str) else list(keys) if isinstance(keys, Iterable) else []
    full = [numeric_axis(scenario, key).name for key in listed]
    for name in full:
        scenario.check_idle([name])
    if len(set(full)) < max(1, len(full)):
        raise PerfModelError(f"keys: found {shown(keys)}, allowed at least one key, and each once")
    return full


def _here(scenario: Scenario, axis: AxisInfo) -> float:
    """The value of an axis as the scenario stands, which all policies that have it must share."""
    found = {value for label in scenario.labels if (value := present(scenario, axis, label)) is not None}
    if len(found) != 1:
        what = "has different values" if found else "has no number to change by a share"
        raise PerfModelError(f"axis {axis.name}: {what} in the scenario; give its two ends")
    return found.pop()


def _around(scenario: Scenario, axis: AxisInfo, here: float, share: float) -> Spread:
    """A number changed down and up, as far as its axis allows."""
    wanted = [here * (1.0 - share), here * (1.0 + share)]
    ends = [
        max(wanted[0], -np.inf if axis.low is None else axis.low),
        min(wanted[1], np.inf if axis.high is None else axis.high),
    ]
    clipped = ends != wanted
    if axis.whole:
        low, high = (float(np.rint(end)) for end in ends)
        ends = [min(low, here - 1.0), max(high, here + 1.0)]
        inside = [
            max(ends[0], -np.inf if axis.low is None else axis.low),
            min(ends[1], np.inf if axis.high is None else axis.high),
        ]
        clipped |= inside != ends
        ends = inside
    if axis.low is None or axis.high is None:
        ends = [checked_end(scenario, axis, end) for end in ends]
    return Spread(axis, Range(float(ends[0]), float(ends[1])), clipped)


def _tornado_dataset(
    scenario: Scenario,
    metric: str,
    base: NDArray[np.float64],
    spreads: list[Spread],
    values: NDArray[np.float64],
    left: _Left,
) -> xr.Dataset:
    import xarray as xr

    swing = _swing(base, values)
    largest = np.where(np.isnan(swing), -1.0, swing).max(axis=0)
    order = np.argsort(-largest, kind="stable")
    spreads = [spreads[i] for i in order]
    unit = find_metric(metric).unit
    unit_of_key = np.array([one.axis.unit for one in spreads], dtype=object)
    attrs = {"units": unit, "long_name": find_metric(metric).meaning}
    lists: dict[str, Any] = {**left._asdict(), "clipped": [one.axis.name for one in spreads if one.clipped]}
    return xr.Dataset(
        {
            "value": (("policy", "key", "side"), values[:, order], attrs),
            "setting": (("key", "side"), np.array([one.range[:2] for one in spreads])),
            "base": ("policy", base, attrs),
            "swing": (("policy", "key"), swing[:, order], {"units": unit, "long_name": f"swing of {metric}"}),
        },
        coords={
            "policy": np.array(scenario.labels, dtype=object),
            "key": np.array([one.axis.name for one in spreads], dtype=object),
            "side": np.array(["low", "high"], dtype=object),
            "unit": ("key", unit_of_key, {"long_name": "unit of the setting"}),
        },
        attrs={
            **described_by(scenario, "tornado", metric, scenario.labels, []),
            "metric": metric,
            **{name: json.dumps(value) for name, value in lists.items()},
        },
    )


def _swing(base: NDArray[np.float64], values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Largest less smallest of the metric at both ends and in between [policies, keys]; NaN where an end has none."""
    every = np.concatenate((values, np.broadcast_to(base[:, None, None], (*values.shape[:2], 1))), axis=2)
    return np.asarray(every.max(axis=2) - every.min(axis=2))
