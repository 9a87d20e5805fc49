"""Ranges of axes that an answer goes through."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from perfmodel.answers.curve import as_number, numeric_axis
from perfmodel.errors import PerfModelError
from perfmodel.hardware.base import shown
from perfmodel.scenario.axis import AxisInfo
from perfmodel.sweeps.axes import Range, parse_values

if TYPE_CHECKING:
    from perfmodel.scenario import Scenario


class Spread(NamedTuple):
    """An axis and the range it goes through; ``clipped`` where a limit of the axis cut it short."""

    axis: AxisInfo
    range: Range
    clipped: bool = False


def given(scenario: "Scenario", key: object, ends: object) -> Spread:
    """The range of an axis from its two ends, with ``"log"`` after them for orders of magnitude, or from a text.

    A text is written as for sweeps: ``"16:128"`` or ``"16:128:log"``.

    Raises
    ------
    PerfModelError : other things, and ends that are not allowed.
    """
    axis = numeric_axis(scenario, key)
    if isinstance(ends, str):
        low, high, by_factors = range_of(ends, axis)
        ends = [low, high, "log"] if by_factors else [low, high]
    listed = ends.tolist() if isinstance(ends, np.ndarray) else ends
    listed = list(listed) if isinstance(listed, tuple | list) else []
    log = len(listed) == 3 and isinstance(listed[2], str) and listed[2] == "log"
    if len(listed) != 2 + log:
        raise PerfModelError(f"range of {axis.name}: found {shown(ends)}, allowed two numbers, low and high, and 'log'")
    low, high = (checked_end(scenario, axis, end) for end in listed[:2])
    if low > high or (log and low <= 0.0):
        above = ", both above 0" if log else ""
        raise PerfModelError(f"range of {axis.name}: found {low:g} to {high:g}, allowed low below high{above}")
    return Spread(axis, Range(low, high, log))


def range_of(text: str, axis: AxisInfo) -> Range:
    """The range that a text ``low:high`` or ``low:high:log`` means; PerfModelError for a list, or one with a count."""
    found = parse_values(text, axis)
    if not isinstance(found, Range):
        raise PerfModelError(f"range of {axis.name}: found {shown(text)}, allowed LOW:HIGH[:log]")
    return found


def values_of(scenario: "Scenario", axis: AxisInfo, values: object) -> tuple[Any, ...]:
    """Checked values of an axis, from a list, or from a text as for sweeps: ``"16,32"`` or ``"16:128:8[:log]"``."""
    found = parse_values(values, axis) if isinstance(values, str) else values
    if isinstance(found, Range):
        raise PerfModelError(f"axis {axis.name}: found {shown(values)}, allowed a list a,b,c or start:stop:count[:log]")
    return scenario.check(axis.name, found)


def checked_end(scenario: "Scenario", axis: AxisInfo, value: object) -> float:
    """A number that the axis allows."""
    (clean,) = scenario.check(axis.name, [value])
    return as_number(axis, clean)


def table_of_ends(what: str, found: object) -> Mapping[str, Any]:
    """A table of ranges by axis, at least one; PerfModelError for anything else."""
    if not isinstance(found, Mapping) or not found:
        raise PerfModelError(f"{what}: found {shown(found)}, allowed the low and high end of at least one axis")
    return found
