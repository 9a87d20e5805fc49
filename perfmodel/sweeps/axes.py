"""Axis values as people write them: lists, ranges, and ranges to sample from."""

import math
from typing import Any, NamedTuple

import numpy as np

from perfmodel.errors import PerfModelError
from perfmodel.hardware.base import shown
from perfmodel.policies import POLICIES
from perfmodel.scenario.axis import AxisInfo

_MOST_VALUES = 10_000_000


class Range(NamedTuple):
    """A range to draw samples from, both ends included. log : evenly over orders of magnitude."""

    low: float
    high: float
    log: bool = False

    @property
    def text(self) -> str:
        """The range as it is written."""
        return f"{number_text(self.low)}:{number_text(self.high)}{':log' if self.log else ''}"


def number_text(value: float) -> str:
    """The shortest text that reads back as the same number."""
    return str(int(value)) if float(value).is_integer() and abs(value) < 1e15 else repr(float(value))


def parse_values(text: str, axis: AxisInfo) -> list[Any] | Range:
    """Values of an axis from a text.

    - ``a,b,c``: these values. Where values are words that may hold commas themselves (policies, files), a ``;``
      anywhere in the text separates instead; policies are also told apart at commas, since each begins with a
      known name: ``monde,context-aware:mean_bits=3,alpha=0.4`` is two policies.
    - ``start:stop:count``, ``start:stop:count:log``: that many numbers from start to stop, both included, evenly
      spaced or evenly over orders of magnitude. Axes of whole numbers refuse a range with other numbers.
    - ``low:high``, ``low:high:log``: a `Range` for samples.

    Raises
    ------
    PerfModelError : a text that is none of these, with what was found and what is allowed.
    """
    if not text.strip():
        raise PerfModelError(f"axis {axis.name}: no values; allowed {axis.allowed}")
    if not axis.numeric:
        return _split_words(text, axis)
    if ":" in text:
        return _range(text, axis)
    return [_value(part, axis) for part in text.split(",")]


def _split_words(text: str, axis: AxisInfo) -> list[str]:
    if ";" in text or axis.kind != "policy":
        parts = text.split(";" if ";" in text else ",")
    else:
        parts = []
        for piece in text.split(","):
            head = piece.partition(":")[0].strip()
            if parts and head not in POLICIES and "=" in head:
                parts[-1] += f",{piece}"  # a further option of the same policy
            else:
                parts.append(piece)
    words = [part.strip() for part in parts]
    if not all(words):
        raise PerfModelError(f"axis {axis.name}: found an empty value in {shown(text)}, allowed {axis.allowed}")
    return words


def _value(text: str, axis: AxisInfo) -> Any:
    """A number, or the word of an option such as ``auto``."""
    number = plain_number(text)
    if number is not None:
        return number
    word = text.strip()
    if axis.kind == "option" and word.isalpha() and word.lower() not in ("nan", "inf", "infinity"):
        return word
    raise PerfModelError(f"axis {axis.name}: found {shown(text.strip())}, allowed {axis.allowed}")


def plain_number(text: str, otherwise: Any = None) -> Any:
    """A finite number, a whole one as an integer; ``otherwise`` for a text that is none."""
    plain = text.strip()
    if "_" in plain or not plain.isascii():
        return otherwise
    try:
        return int(plain) if len(plain) < 30 else otherwise
    except ValueError:
        pass
    try:
        number = float(plain)
    except ValueError:
        return otherwise
    return number if math.isfinite(number) else otherwise


def _range(text: str, axis: AxisInfo) -> list[Any] | Range:
    what = f"axis {axis.name}: range {shown(text)}"
    parts = [part.strip() for part in text.split(":")]
    log = parts[-1] == "log"
    numbers = [plain_number(part) for part in parts[: -1 if log else None]]
    if len(numbers) not in (2, 3) or None in numbers:
        raise PerfModelError(f"{what}: allowed start:stop:count[:log], or low:high[:log] for samples")
    start, stop = (float(n) for n in numbers[:2] if n is not None)
    if log and min(start, stop) <= 0:
        raise PerfModelError(f"{what}: a log range needs ends above 0")
    if len(numbers) == 2:
        if not start < stop:
            raise PerfModelError(f"{what}: the low end must be below the high end")
        return Range(start, stop, log)
    count = numbers[2]
    if not isinstance(count, int) or not 2 <= count <= _MOST_VALUES:
        raise PerfModelError(f"{what}: count must be a whole number from 2 to {_MOST_VALUES}")
    if start == stop:
        raise PerfModelError(f"{what}: start and stop are equal; allowed: distinct ends, or the value alone")
    found = (np.geomspace if log else np.linspace)(start, stop, count)
    # Thirteen digits turn 0.30000000000000004 into 0.3, and are more than any specification holds.
    values = [start, *(float(f"{value:.13g}") for value in found[1:-1].tolist()), stop]
    if axis.whole and not all(value.is_integer() for value in values):
        odd = next(value for value in values if not value.is_integer())
        hint = _whole_hint(start, stop, log)
        raise PerfModelError(f"{what}: gives {odd:g}, and this axis takes whole numbers; {hint}")
    return [int(value) for value in values] if axis.whole else values


def _whole_hint(start: float, stop: float, log: bool) -> str:
    if log or not (start.is_integer() and stop.is_integer()) or abs(stop - start) >= _MOST_VALUES:
        return "list the values instead, as in 1,2,4"
    return f"list the values, or use {number_text(start)}:{number_text(stop)}:{int(abs(stop - start)) + 1}"
