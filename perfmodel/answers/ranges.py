"""Ranges of axes that an answer goes through."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from perfmodel.answers.curve import as_number, numeric_axis
from perfmodel.errors import PerfModelError
from perfmodel.hardware.base import shown
from perfmodel.scenario.axis import AxisInfo

if TYPE_CHECKING:
    from perfmodel.scenario import Scenario


class Spread(NamedTuple):
    """The range of one axis; ``clipped`` where a limit of the axis cut it short."""

    axis: AxisInfo
    low: float
    high: float
    clipped: bool


def given(scenario: "Scenario", key: object, ends: object) -> Spread:
    """The range of an axis from its two ends; PerfModelError for other things, and for ends that are not allowed."""
    axis = numeric_axis(scenario, key)
    if not isinstance(ends, tuple | list) or len(ends) != 2:
        raise PerfModelError(f"range of {axis.name}: found {shown(ends)}, allowed two numbers, low and high")
    low, high = (_checked(scenario, axis, end) for end in ends)
    if low > high:
        raise PerfModelError(f"range of {axis.name}: found {low:g} to {high:g}, allowed low below high")
    return Spread(axis, low, high, False)


def _checked(scenario: "Scenario", axis: AxisInfo, value: object) -> float:
    (clean,) = scenario.check(axis.name, [value])
    return as_number(axis, clean)


def table_of_ends(what: str, found: object) -> Mapping[str, Any]:
    """A table of ranges by axis, at least one; PerfModelError for anything else."""
    if not isinstance(found, Mapping) or not found:
        raise PerfModelError(f"{what}: found {shown(found)}, allowed the low and high end of at least one axis")
    return found
