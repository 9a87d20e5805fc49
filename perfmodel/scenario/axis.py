"""Everything a point may vary, by dotted name, and what each axis means."""

import dataclasses
from collections.abc import Container, Iterable, Mapping, Sequence
from types import UnionType
from typing import Any, Literal, NamedTuple, get_args, get_origin

from perfmodel.errors import PerfModelError, SpecError
from perfmodel.hardware import System
from perfmodel.hardware.base import shown, suggestion
from perfmodel.policies import POLICIES, Policy
from perfmodel.policies.base import EXPERTS

Kind = Literal["hardware", "option", "policy", "workload", "model", "trace", "system", "loss"]

#: How to find the names of all axes, for error messages.
LISTING = "`perfmodel sweep --list-axes` shows all axes"
#: What a text stands for where an option is chosen automatically.
AUTO = "auto"
_PARTS = {"gpu": "GPU", "link": "link", "ndp": "near-data", "cpu": "CPU", "host": "host", "engine": "engine"}
#: A number of an engine that may be set, but that no plan depends on where the workload says it, and why.
_DEFAULTS = {"engine.micro_batch_tokens": "is the default of workload.micro_batch; vary that instead"}
_UNIT_SUFFIXES = ("_tflop_per_s", "_gb_per_s", "_gb", "_kb", "_us", "_ns", "_ghz", "_mhz")


class AxisInfo(NamedTuple):
    """One thing that may vary.

    name : full dotted name.
    kind : ``hardware`` (a number of the system spec), ``option`` (of a policy), ``policy``, ``workload``, or the name
        of a file: ``model``, ``trace``, ``system``, ``loss``.
    unit : unit of the values ("1" for pure numbers, "" for words).
    low, high : smallest and largest allowed value, None where the range depends on other inputs or has no end.
    whole : whether values must be whole numbers. numeric : whether values are numbers at all.
    choices : allowed words; empty where any name or number may stand. Numbers may have some beside them (``auto``).
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
        if self.choices and not self.numeric:
            return " | ".join(self.choices)
        if not self.numeric:
            return "names or paths" if self.kind != "policy" else "policies such as context-aware:mean_bits=3"
        what = "whole numbers" if self.whole else "numbers"
        unit = "" if self.unit in ("", "1") else f" {self.unit}"
        words = "".join(f" | {word}" for word in self.choices)
        if self.low is not None and self.high is not None:
            return f"{what} from {self.low:.9g} to {self.high:.9g}{unit}{words}"
        return f"{what} from {self.low:.9g}{unit}{words}" if self.low is not None else f"{what}{words}"


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
        AxisInfo("workload.batch", "workload", "token", 1, None, True, True, (), "tokens of a decode step"),
        AxisInfo("workload.micro_batch", "workload", "token", 1, None, True, True, (), "tokens of a prefill pass"),
    )
}
#: Axes whose values are names or paths of files.
FILES = ("model", "trace", "system", "loss")


def all_axes(system: System, policies: Sequence[Policy], experts: int) -> tuple[AxisInfo, ...]:
    """Every axis of a system and policies: files, workload, options, then the numbers of the hardware.

    experts : of a layer of the model, which limits some options.
    """
    options = dict.fromkeys(f.name for policy in policies for f in dataclasses.fields(policy))
    hardware = [_hardware(system, key) for key in _settable(system)]
    return (*FIXED_AXES.values(), *(_option(policies, name, experts) for name in options), *hardware)


def _settable(system: System) -> list[str]:
    """Dotted keys of all numbers that can be set, also of those that the system does not give."""
    found = []
    for part in _PARTS:
        spec = getattr(system, part)
        for inner in () if spec is None else spec.settable_keys():
            key = f"{part}.{inner}"
            if not _number(system, key) or system.replaced_by(key) is not None or _idle(system, key, ()) is not None:
                continue  # it would change nothing
            found.append(key)
    return found


def _number(system: System, key: str) -> bool:
    """Whether a key holds a number, or could."""
    try:
        system.limits_of(key)
    except SpecError:
        return False
    return True


def _idle(system: System, key: str, varied: Container[str] | None) -> str | None:
    """Why an axis would change nothing beside others that vary, or None where it would; see `System.idle`."""
    return _DEFAULTS.get(key) if key in _DEFAULTS and system.engine is not None else system.idle(key, varied)


def axis_info(system: System, policies: Sequence[Policy], experts: int, name: object) -> AxisInfo:
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
        return _option(policies, option, experts)
    settable = _settable(system)
    counts = system.replaced_by(text) is None and _idle(system, text, None) is None
    if counts and _number(system, text):
        return _hardware(system, text)
    why = _why_not(system, policies, text)
    names = [*FIXED_AXES, *(f"policy.{one}" for one in sorted(options)), *settable]
    # A name that exists elsewhere is no slip of the pen.
    exists = option in _all_options() or any(
        one is not None for one in (_idle(system, text, None), system.replaced_by(text))
    )
    close = "" if exists else suggestion(text, names)
    raise PerfModelError(f"axis {shown(name)}: {why}{close}; {LISTING}")


def _all_options() -> set[str]:
    """Options of every policy there is."""
    return {field.name for kind in POLICIES.values() for field in dataclasses.fields(kind)}


def _why_not(system: System, policies: Sequence[Policy], name: str) -> str:
    """What is wrong with the name of an axis that does not exist."""
    part, _, inner = name.partition(".")
    having = [kind.name for kind in POLICIES.values() if has_option(kind, name.removeprefix("policy."))]
    if part == "policy" or having:
        kinds = ", ".join(dict.fromkeys(policy.name for policy in policies))
        *first, last = having or [""]
        these = f"{', '.join(first)} and {last} have" if first else f"{last} has"
        others = f"; {these} it" if having else ""
        return f"none of the policies ({kinds}) has this option{others}"
    if part in _PARTS and inner:
        spec = getattr(system, part)
        if spec is None:
            return f"system {system.name} has no {part}"
        counts = system.replaced_by(name)
        if counts is not None and system.engine is not None:
            return f"engine {system.engine.name} replaces it; vary {counts} instead"
        if inner in spec.settable_keys():
            return (_idle(system, name, None) or "unknown") if _number(system, name) else "is a word and not a number"
    return "unknown"


def _hardware(system: System, key: str) -> AxisInfo:
    limits = system.limits_of(key)
    part, _, inner = key.partition(".")
    words = inner
    for suffix in _UNIT_SUFFIXES:
        words = words.replace(suffix, "")
    meaning = f"{_PARTS[part]} {words.replace('_', ' ').replace('.', ' ')}"
    return AxisInfo(key, "hardware", limits.unit, limits.low, limits.high, limits.whole, True, (), meaning)


def kinds_of(field: "dataclasses.Field[Any]") -> tuple[Any, ...]:
    return get_args(field.type) if isinstance(field.type, UnionType) else (field.type,)


def fields_of(policies: Iterable[Policy], name: str) -> list[tuple[Policy, "dataclasses.Field[Any]"]]:
    return [(policy, f) for policy in policies for f in dataclasses.fields(policy) if f.name == name]


def _option(policies: Sequence[Policy], name: str, experts: int) -> AxisInfo:
    having = fields_of(policies, name)
    _, field = having[0]
    kinds = kinds_of(field)
    meaning = str(field.metadata["meaning"])
    if get_origin(field.type) is Literal:
        return _words(f"policy.{name}", "option", meaning, tuple(map(str, get_args(field.type))))
    numeric = bool({int, float} & set(kinds))
    if not numeric:
        return _words(f"policy.{name}", "option", meaning)
    lows = [one.metadata["low"] for _, one in having if one.metadata["low"] is not None]
    highs = [one.metadata["high"] for _, one in having if one.metadata["high"] is not None]
    low = max(map(float, lows), default=None)
    high = min((float(experts if one == EXPERTS else one) for one in highs), default=None)
    unit = "bit" if name.endswith("bits") else "1"
    words = (AUTO,) if type(None) in kinds else ()
    return AxisInfo(f"policy.{name}", "option", unit, low, high, int in kinds, True, words, meaning)


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
            if value == AUTO and type(None) in kinds_of(field):
                value = None
            changed[field.name] = value
    return dataclasses.replace(policy, **changed) if changed else policy


def matching(name: object, known: Iterable[str]) -> str | None:
    """The known name that is meant: the same, or the only one with this last part (``mean_bits``); else None."""
    names = list(known)
    if name in names:
        return str(name)
    ending = [one for one in names if one.rpartition(".")[2] == name]
    return ending[0] if len(ending) == 1 else None


def has_option(policy: Policy | type[Policy], name: str) -> bool:
    """Whether a policy, or a kind of policies, has an option."""
    return any(field.name == name for field in dataclasses.fields(policy))
