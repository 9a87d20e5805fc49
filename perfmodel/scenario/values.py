"""Values of an axis, checked: numbers within their range, whole where they must be, words that are known."""

import dataclasses
import os
from collections.abc import Iterable, Sequence
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfmodel.errors import PerfModelError
from perfmodel.hardware.base import shown
from perfmodel.policies import Policy
from perfmodel.scenario.axis import AUTO, FILES, AxisInfo, fields_of, kinds_of
from perfmodel.scenario.numbers import plain

#: Numbers beyond this are no longer told apart from their neighbours.
_LARGEST = 2.0**53


def clean(info: AxisInfo, values: object, policies: Sequence[Policy]) -> NDArray[Any]:
    """Values of an axis as one checked array: float64 or int64 for numbers, objects for words and mixtures.

    Files and policies are only checked to be texts here.

    Raises
    ------
    PerfModelError : no values, or one of the wrong type or out of range, with axis, value and what is allowed.
    """
    listed = _listed(values)
    if len(listed) == 0:
        raise PerfModelError(f"axis {info.name}: no values; allowed {info.allowed}")
    if info.kind == "option":
        return _clean_options(info, listed, policies)
    if info.numeric:
        return _clean_numbers(info, listed)
    return np.array([_text(info, value) for value in listed], dtype=object)


def check_distinct(info: AxisInfo, array: NDArray[Any]) -> None:
    """Refuse a value that is given twice."""
    if array.dtype != object:
        values, counts = np.unique(array, return_counts=True)
        twice = values[counts > 1][:1].tolist()
    else:
        listed = array.tolist()
        # 1 and 1.0 are one value, and so they are to a set.
        twice = [] if len(set(listed)) == len(listed) else [next(v for v in listed if listed.count(v) > 1)]
    if twice:
        raise PerfModelError(f"axis {info.name}: value {shown(twice[0])} is given twice; allowed: distinct values")


def _listed(values: object) -> Any:
    """A sequence of the values; a single value counts as a sequence of one."""
    if isinstance(values, np.ndarray):
        return values.reshape(-1)
    if isinstance(values, str | bytes | os.PathLike | Policy) or not isinstance(values, Iterable):
        return [values]
    return list(values)


def _refuse(info: AxisInfo, value: object, index: int | None = None) -> PerfModelError:
    where = "" if index is None else f"value {index + 1}: "
    return PerfModelError(f"axis {info.name}: {where}found {shown(value)}, allowed {info.allowed}")


def _clean_numbers(info: AxisInfo, listed: Any) -> NDArray[Any]:
    if not (isinstance(listed, np.ndarray) and listed.dtype.kind in "iuf"):
        for i, value in enumerate(listed):
            if isinstance(value, bool | np.bool_) or not isinstance(value, Real):
                raise _refuse(info, plain(value), i)
    try:
        numbers = np.asarray(listed, dtype=np.float64)
    except (OverflowError, ValueError, TypeError):
        raise PerfModelError(f"axis {info.name}: found a number beyond all limits, allowed {info.allowed}") from None
    wrong = ~np.isfinite(numbers)
    if info.low is not None:
        wrong |= numbers < info.low
    if info.high is not None:
        wrong |= numbers > info.high
    if info.whole:
        wrong |= (numbers != np.rint(numbers)) | (np.abs(numbers) > _LARGEST)
    if wrong.any():
        i = int(np.flatnonzero(wrong)[0])
        raise _refuse(info, plain(listed[i]), i)
    return numbers.astype(np.int64) if info.whole else numbers


def _clean_options(info: AxisInfo, listed: Any, policies: Sequence[Policy]) -> NDArray[Any]:
    having = fields_of(policies, info.name.removeprefix("policy."))
    if info.numeric and isinstance(listed, np.ndarray) and listed.dtype.kind in "iuf":
        # Many numbers at once: only the extremes have to be looked at one by one.
        numbers = _clean_numbers(info._replace(low=None, high=None), listed)
        for end in (int(numbers.argmin()), int(numbers.argmax())):
            _one_option(info, numbers[end].item(), having, end)
        return numbers
    known: dict[tuple[type, Any], Any] = {}
    found = []
    for i, raw in enumerate(listed):
        value = AUTO if raw is None else plain(raw)
        if isinstance(value, bool) or not isinstance(value, str | Real):
            raise _refuse(info, value, i)
        if (type(value), value) not in known:
            known[type(value), value] = _one_option(info, value, having, i)
        found.append(known[type(value), value])
    if any(isinstance(value, str) for value in found):
        return np.array(found, dtype=object)
    return np.array(found, dtype=np.int64 if info.whole else np.float64)


def _one_option(
    info: AxisInfo, value: Any, having: Sequence[tuple[Policy, "dataclasses.Field[Any]"]], index: int
) -> Any:
    if not isinstance(value, str) and info.numeric:
        if not abs(value) <= _LARGEST or (info.whole and value != round(value)):
            raise _refuse(info, value, index)
        value = int(float(value)) if info.whole else float(value)
    for policy, field in having:
        if value == AUTO and type(None) in kinds_of(field):
            continue
        try:
            # The option alone: what contradicts other options is a point without a plan.
            policy.check_option(field, value)
        except PerfModelError as error:
            raise PerfModelError(f"axis {info.name}: {error}") from None
    return value


def _text(info: AxisInfo, value: object) -> str:
    if isinstance(value, Policy):
        return value.spec
    if isinstance(value, os.PathLike) and info.kind in FILES:
        return os.fsdecode(value)
    if not isinstance(value, str) or not value.strip():
        raise _refuse(info, value)
    return value.strip()
