"""One metric of one policy as a function of one axis, priced by the scenario itself at any value that is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from perfmodel.answers.roots import Domain
from perfmodel.errors import PerfModelError
from perfmodel.hardware.base import shown
from perfmodel.scenario import Scenario
from perfmodel.scenario.numbers import plain, real, whole

if TYPE_CHECKING:
    from perfmodel.scenario.axis import AxisInfo

#: Values scanned along an axis: hardware is priced all at once, the others plan anew for every value.
SCAN_HARDWARE = 513
SCAN_PLANS = 65
#: Where an axis has no end of its own (tokens of a workload), the search ends here.
DEFAULT_HIGH = 4096.0


class Curve:
    """A metric along an axis.

    Parameters
    ----------
    policy : one of the scenario's policies by label, or any other as text.
    axis : what varies. metric : name of a metric.
    settings : other axes set to one value each.

    Attributes
    ----------
    refusals : why there was no plan, each reason once, in the order of their discovery.
    """

    def __init__(
        self, scenario: Scenario, policy: str, axis: AxisInfo, metric: str, settings: Mapping[str, Any] | None = None
    ) -> None:
        self.scenario, self.policy, self.axis, self.metric = scenario, policy, axis, metric
        self.settings = dict(settings or {})
        self.refusals: dict[str, None] = {}

    def __call__(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """The metric at every value of the axis, NaN where the policy has no plan or the trace cannot tell."""
        if self.axis.kind == "hardware":
            return self._price({}, {self.axis.name: values})
        numbers = [int(v) if self.axis.whole else float(v) for v in values]
        return np.array([self._price({self.axis.name: v}, {})[0] for v in numbers], dtype=np.float64)

    def at(self, value: float) -> float:
        """The metric at one value."""
        return float(self(np.array([value], dtype=np.float64))[0])

    def _price(self, own: Mapping[str, Any], hardware: Mapping[str, Any]) -> NDArray[np.float64]:
        refused: dict[str, int] = {}
        prices = self.scenario.prices(
            self.policy, {**self.settings, **own}, hardware, (self.metric,), infeasible=refused
        )
        self.refusals |= dict.fromkeys(refused)
        return np.atleast_1d(np.asarray(prices[self.metric], dtype=np.float64))

    def why_nowhere(self) -> str:
        """The first reason for the lack of a value."""
        return next(iter(self.refusals), f"the trace or the policy cannot tell {self.metric}")


def checked_scenario(given: object) -> Scenario:
    """A scenario; PerfModelError for anything else."""
    if not isinstance(given, Scenario):
        raise PerfModelError(f"scenario: found {shown(given)}, allowed a Scenario, such as Scenario.of(policy='monde')")
    return given


def numeric_axis(scenario: Scenario, name: object) -> AxisInfo:
    """An axis whose values are numbers; PerfModelError for words, and for unknown names (with close matches)."""
    if not isinstance(name, str):
        raise PerfModelError(f"axis: found {shown(name)}, allowed the name of an axis")
    axis = scenario.axis(name)
    if not axis.numeric:
        raise PerfModelError(f"axis {axis.name}: holds words, allowed an axis of numbers")
    return axis


def domain(scenario: Scenario, axis: AxisInfo, low: float | None, high: float | None) -> Domain:
    """The range to search: by default all that the axis allows.

    Raises
    ------
    PerfModelError : an end outside of the allowed range, not whole where it must be, or ends in the wrong order.
    """
    own_low, own_high = axis.low, DEFAULT_HIGH if axis.kind == "workload" else axis.high
    ends = []
    for what, asked, own in (("low", low, own_low), ("high", high, own_high)):
        if asked is not None:
            ends.append(as_number(axis, scenario.check(axis.name, [asked])[0]))
        elif own is not None:
            ends.append(own)  # it may contradict other values of the same spec: no value there, and no mistake
        else:
            raise PerfModelError(f"axis {axis.name}: has no {what} limit of its own; give the {what} end of the range")
    first, last = ends
    if first > last:
        raise PerfModelError(f"axis {axis.name}: found {first:g} to {last:g}, allowed a low end below the high end")
    return Domain(first, last, axis.whole, SCAN_HARDWARE if axis.kind == "hardware" else SCAN_PLANS)


def as_number(axis: AxisInfo, value: object) -> float:
    """An end of a range as a number; PerfModelError for a word such as ``auto``."""
    number = real(value)
    if number is None:
        raise PerfModelError(f"axis {axis.name}: found {shown(value)}, allowed a number as an end of a range")
    return number


def present(scenario: Scenario, axis: AxisInfo, policy: str) -> float | None:
    """The value of an axis as the scenario stands, or None where it is not a number (such as an automatic count)."""
    if axis.kind == "hardware":
        value: Any = scenario.system.get(axis.name) if axis.name in scenario.system.numeric_keys() else None
    elif axis.kind == "option":
        value = getattr(scenario.policy(policy), axis.name.removeprefix("policy."), None)
    else:
        value = getattr(scenario, axis.name.removeprefix("workload."))
    return float(value) if isinstance(value, int | float) else None


def one_policy(scenario: Scenario, policy: str | int | None) -> str:
    """Label of one of the scenario's policies; without a choice the scenario must have one only."""
    labels = scenario.labels
    if policy is None and len(labels) == 1:
        return labels[0]
    number = whole(policy)
    if number is not None and 0 <= number < len(labels):
        return labels[number]
    if isinstance(policy, str) and policy in labels:
        return policy
    raise PerfModelError(f"policy: found {shown(plain(policy))}, allowed one of {', '.join(labels)}")
