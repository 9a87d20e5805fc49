"""Everything a point may vary, by dotted name: what each axis means and which values it takes."""

import dataclasses
import os
from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from types import UnionType
from typing import Any, Literal, NamedTuple, get_args, get_origin

import numpy as np
from numpy.typing import NDArray

from perfmodel.errors import PerfModelError, SpecError
from perfmodel.hardware import System
from perfmodel.hardware.base import shown, suggestion
from perfmodel.policies import Policy

Kind = Literal["hardware", "option", "policy", "workload", "model", "trace", "system", "loss"]

#: How to find the names of all axes, for error messages.
LISTING = "`perfmodel sweep --list-axes` shows all axes"
#: What a text stands for where an option is chosen automatically.
AUTO = "auto"
#: Numbers beyond this are no longer told apart from their neighbours.
_LARGEST = 2.0**53
_PARTS = {"gpu": "GPU", "link": "link", "ndp": "near-data", "cpu": "CPU"}
_UNIT_SUFFIXES = ("_tflop_per_s", "_gb_per_s", "_gb", "_kb", "_us", "_ns", "_ghz", "_mhz")


class AxisInfo(NamedTuple):
    """One thing that may vary.

    name : full dotted name.
    kind : ``hardware`` (a number of the system spec), ``option`` (of a policy), ``policy``, ``workload``, or the name
        of a file: ``model``, ``trace``, ``system``, ``loss``.
    unit : unit of the values ("1" for pure numbers, "" for words).
    low, high : smallest and largest allowed value, None where the range depends on other inputs or has no end.
    whole : whether values must be whole numbers. numeric : whether values are numbers at all.
    choices : allowed words, empty where any name or number may stand.
    meaning : a few words for labels.
    """

    name: str
    kind: Kind
    unit: str
    low: float | None
    high: float | None
    whole: bool
    numeric: bool
    choices: tuple[str, ...]
    meaning: str

    @property
    def allowed(self) -> str:
        """The allowed values in words."""
        if self.choices:
            return " | ".join(self.choices)
        if not self.numeric:
            return "names or paths" if self.kind != "policy" else "policies such as context-aware:mean_bits=3"
        what = "whole numbers" if self.whole else "numbers"
        unit = "" if self.unit in ("", "1") else f" {self.unit}"
        if self.low is not None and self.high is not None:
            return f"{what} from {self.low:.9g} to {self.high:.9g}{unit}"
        return f"{what} from {self.low:.9g}{unit}" if self.low is not None else what


def _words(name: str, kind: Kind, meaning: str, choices: tuple[str, ...] = ()) -> AxisInfo:
    return AxisInfo(name, kind, "", None, None, False, False, choices, meaning)


#: Axes that every scenario has, by name.
FIXED_AXES = {
    one.name: one
    for one in (
        _words("policy", "policy", "policy"),
        _words("model", "model", "model"),
        _words("trace", "trace", "routing trace"),
        _words("system", "system", "system"),
        _words("loss", "loss", "loss table"),
        AxisInfo("workload.prompt", "workload", "token", 1, None, True, True, (), "prompt tokens"),
        AxisInfo("workload.output", "workload", "token", 1, None, True, True, (), "output tokens"),
    )
}
#: Axes whose values are names or paths of files.
FILES = ("model", "trace", "system", "loss")


def all_axes(system: System, policies: Sequence[Policy]) -> tuple[AxisInfo, ...]:
    """Every axis of a system and policies: files, workload, options, then the numbers of the hardware."""
    options = dict.fromkeys(f.name for policy in policies for f in dataclasses.fields(policy))
    hardware = [_hardware(system, key) for key in _settable(system)]
    return (*FIXED_AXES.values(), *(_option(policies, name) for name in options), *hardware)


def _settable(system: System) -> list[str]:
    """Dotted keys of all numbers that can be set, also of those that the system does not give."""
    found = []
    for part in _PARTS:
        spec = getattr(system, part)
        for inner in () if spec is None else spec.settable_keys():
            try:
                system.limits_of(f"{part}.{inner}")
            except SpecError:
                continue  # a word
            found.append(f"{part}.{inner}")
    return found


def axis_info(system: System, policies: Sequence[Policy], name: object) -> AxisInfo:
    """The axis of a name; options and workload lengths may be given without their prefix.

    Raises
    ------
    PerfModelError : no such axis (with close matches), or an option that none of the policies has.
    """
    text = name if isinstance(name, str) else ""
    for known in (text, f"workload.{text}"):
        if known in FIXED_AXES:
            return FIXED_AXES[known]
    options = {f.name for policy in policies for f in dataclasses.fields(policy)}
    option = text.removeprefix("policy.")
    if option in options:
        return _option(policies, option)
    settable = _settable(system)
    if text in settable:
        return _hardware(system, text)
    names = [*FIXED_AXES, *(f"policy.{one}" for one in sorted(options)), *settable]
    raise PerfModelError(f"axis {shown(name)}: {_why_not(system, policies, text)}{suggestion(text, names)}; {LISTING}")


def _why_not(system: System, policies: Sequence[Policy], name: str) -> str:
    """What is wrong with the name of an axis that does not exist."""
    part, _, inner = name.partition(".")
    if part == "policy":
        kinds = ", ".join(dict.fromkeys(policy.name for policy in policies))
        return f"none of the policies ({kinds}) has this option"
    if part in _PARTS and inner:
        spec = getattr(system, part)
        if spec is None:
            return f"system {system.name} has no {part}"
        if inner in spec.settable_keys():
            return "is a word and not a number"
    return "unknown"


def _hardware(system: System, key: str) -> AxisInfo:
    limits = system.limits_of(key)
    part, _, inner = key.partition(".")
    words = inner
    for suffix in _UNIT_SUFFIXES:
        words = words.replace(suffix, "")
    meaning = f"{_PARTS[part]} {words.replace('_', ' ').replace('.', ' ')}"
    return AxisInfo(key, "hardware", limits.unit, limits.low, limits.high, limits.whole, True, (), meaning)


def _kinds(field: "dataclasses.Field[Any]") -> tuple[Any, ...]:
    return get_args(field.type) if isinstance(field.type, UnionType) else (field.type,)


def _fields(policies: Iterable[Policy], name: str) -> list[tuple[Policy, "dataclasses.Field[Any]"]]:
    return [(policy, f) for policy in policies for f in dataclasses.fields(policy) if f.name == name]


def _option(policies: Sequence[Policy], name: str) -> AxisInfo:
    _, field = _fields(policies, name)[0]
    kinds = _kinds(field)
    meaning = str(field.metadata["meaning"])
    if get_origin(field.type) is Literal:
        return _words(f"policy.{name}", "option", meaning, tuple(map(str, get_args(field.type))))
    numeric = bool({int, float} & set(kinds))
    unit = "bit" if name.endswith("bits") else "1"
    return AxisInfo(f"policy.{name}", "option", unit if numeric else "", None, None, int in kinds, numeric, (), meaning)


def with_options(policy: Policy, options: Mapping[str, Any]) -> Policy:
    """A policy with other values of those options that it has; `AUTO` stands for an automatic choice.

    Raises
    ------
    PolicyError : a value that the policy does not allow.
    """
    changed = {}
    for field in dataclasses.fields(policy):
        if field.name in options:
            value = options[field.name]
            if value == AUTO and type(None) in _kinds(field):
                value = None
            changed[field.name] = value
    return dataclasses.replace(policy, **changed) if changed else policy


def has_option(policy: Policy, name: str) -> bool:
    """Whether a policy has an option."""
    return any(field.name == name for field in dataclasses.fields(policy))


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
                raise _refuse(info, _plain(value), i)
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
        raise _refuse(info, _plain(listed[i]), i)
    return numbers.astype(np.int64) if info.whole else numbers


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def _clean_options(info: AxisInfo, listed: Any, policies: Sequence[Policy]) -> NDArray[Any]:
    name = info.name.removeprefix("policy.")
    having = _fields(policies, name)
    known: dict[tuple[type, Any], Any] = {}
    found = []
    for i, raw in enumerate(listed):
        value = AUTO if raw is None else _plain(raw)
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
    for policy, _ in having:
        try:
            with_options(policy, {info.name.removeprefix("policy."): value})
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
