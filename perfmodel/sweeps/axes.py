"""Axis values as people write them: lists, ranges, and ranges to sample from."""

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from perfmodel.errors import PerfModelError
from perfmodel.hardware.base import shown
from perfmodel.policies import POLICIES
from perfmodel.scenario.axis import AxisInfo

_MOST_VALUES = 10_000_000
#: Significant digits of the values in a range: they turn 0.30000000000000004 into 0.3, and are more than any
#: specification holds.
_DIGITS = 13


class Range(NamedTuple):
    """A range of numbers, both ends included. log : evenly over orders of magnitude."""

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


def parse_values(text: str, axis: AxisInfo) -> list[Any] | NDArray[Any] | Range:
    """Values of an axis from a text.

    - ``a,b,c``: these values. Where values are words that may hold commas themselves (policies, files), a ``;``
      anywhere in the text separates instead, and one at the end makes it a single value; policies are also told
      apart at commas, since each begins with a known name: ``monde,static:mean_bits=3,alpha=0.4`` is two policies.
    - ``start:stop:count``, ``start:stop:count:log``: that many numbers from start to stop, both included, evenly
      spaced or evenly over orders of magnitude. Axes of whole numbers refuse a range with other numbers.
    - ``low:high``, ``low:high:log``: a `Range` for samples.

    The ends of a range may stand in either order: numbers then fall from start to stop, and samples are the same.

    Raises
    ------
    PerfModelError : a text that is none of these, with what was found and what is allowed.
    """
    if not text.strip():
        raise PerfModelError(f"axis {axis.name}: no values; allowed {axis.allowed}")
    if not axis.numeric:
        return split_words(text, axis)
    if ":" in text:
        return _range(text, axis)
    return [_value(part, axis) for part in text.split(",")]


def count_of(text: str, axis: AxisInfo) -> int:
    """About how many values a text stands for, without making them; 1 where it is none."""
    if not axis.numeric or ":" not in text:
        return text.count(";" if ";" in text else ",") + 1
    parts = text.split(":")
    count = plain_number(parts[2]) if len(parts) > 2 else None
    return count if isinstance(count, int) and count > 0 else 1


def split_words(text: str, axis: AxisInfo) -> list[str]:
    """Words of a text as in `parse_values`."""
    if ";" in text or axis.kind != "policy":
        parts = text.strip().removesuffix(";").split(";") if ";" in text else text.split(",")
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


def _range(text: str, axis: AxisInfo) -> NDArray[Any] | Range:
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
        if start == stop:
            raise PerfModelError(f"{what}: both ends are equal; allowed: distinct ends")
        return Range(min(start, stop), max(start, stop), log)
    count = numbers[2]
    if not isinstance(count, int) or not 2 <= count <= _MOST_VALUES:
        raise PerfModelError(f"{what}: count must be a whole number from 2 to {_MOST_VALUES}")
    if start == stop:
        raise PerfModelError(f"{what}: start and stop are equal; allowed: distinct ends, or the value alone")
    with np.errstate(all="ignore"):
        values = _rounded((np.geomspace if log else np.linspace)(start, stop, count))
    values[0], values[-1] = start, stop
    if not np.isfinite(values).all():
        raise PerfModelError(f"{what}: gives numbers beyond all limits, allowed {axis.allowed}")
    if (values[1:] == values[:-1]).any():
        raise PerfModelError(f"{what}: too narrow for {count} distinct values; allowed: fewer values, or a wider range")
    odd = values[values != np.rint(values)] if axis.whole else values[:0]
    if len(odd):
        hint = _whole_hint(start, stop, log)
        raise PerfModelError(f"{what}: gives {odd[0]:g}, and this axis takes whole numbers; {hint}")
    whole = axis.whole and float(np.abs(values).max()) < 2.0**53
    return values.astype(np.int64) if whole else values


def _rounded(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Values of `_DIGITS` significant digits, each the number that is nearest to its decimal form."""
    exponent = np.floor(np.log10(np.abs(np.where(values == 0.0, 1.0, values)))).astype(np.int64)
    places = _DIGITS - 1 - exponent
    # Powers of ten up to the 22nd are exact, and so is a whole number of thirteen digits: one rounding is left.
    power = 10.0 ** np.clip(np.abs(places), 0, 22)
    found = np.where(places >= 0, np.rint(values * power) / power, np.rint(values / power) * power)
    for i in np.flatnonzero(np.abs(places) > 22).tolist():
        found[i] = float(f"{values[i]:.{_DIGITS}g}")
    return np.asarray(found, dtype=np.float64)


def _whole_hint(start: float, stop: float, log: bool) -> str:
    if log or not (start.is_integer() and stop.is_integer()) or abs(stop - start) >= _MOST_VALUES:
        return "list the values instead, as in 1,2,4"
    return f"list the values, or use {number_text(start)}:{number_text(stop)}:{int(abs(stop - start)) + 1}"
