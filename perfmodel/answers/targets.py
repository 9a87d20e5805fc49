"""Targets as people write them, such as ``tpot_ms=50`` or ``tok_per_s=20``."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from perfmodel.errors import PerfModelError
from perfmodel.evaluation import METRICS, Metric, metric
from perfmodel.hardware.base import shown, suggestion
from perfmodel.scenario.numbers import plain, real

#: Size of a written unit in the base unit that the metric is kept in.
_TIMES = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
_SIZES = {"bytes": 1.0, "kb": 1e3, "mb": 1e6, "gb": 1e9, "gib": 2.0**30}
#: Other names: the mean time per output token has no further word, and a rate no further meaning.
_SHORT = {"tpot_s": "tpot_mean_s", "tok_per_s": "decode_tok_per_s"}


class Target(NamedTuple):
    """A metric and the value it should have.

    value : in the unit of the metric.
    """

    metric: Metric
    value: float

    @property
    def goal(self) -> str:
        """``at most`` where lower is better, ``at least`` where higher is."""
        return "at most" if self.metric.better == "lower" else "at least"


def parse_target(text: str) -> Target:
    """A target from ``name=value``: a metric, with ``_ms``, ``_us``, ``_gb``, ``_gib``, ... for other units.

    ``tpot_ms`` is the mean time per output token, and ``tok_per_s`` the decode rate.

    Raises
    ------
    PerfModelError : unknown metric (with close matches), one without a unit, or a value that is not a positive number.
    """
    name, equals, number = text.partition("=")
    if not equals:
        raise PerfModelError(f"target: found {shown(text)}, allowed NAME=VALUE such as tpot_ms=50")
    try:
        value = float(number) if "_" not in number else None
    except ValueError:
        value = None
    return _target(name.strip(), value, number.strip())


def target_of(given: object) -> Target:
    """A target from a text as in `parse_target`, or from a name and its number.

    Raises
    ------
    PerfModelError : anything else, and as in `parse_target`.
    """
    if isinstance(given, str):
        return parse_target(given)
    if not isinstance(given, tuple | list) or len(given) != 2 or not isinstance(given[0], str):
        raise PerfModelError(f"target: found {shown(given)}, allowed a text such as tpot_ms=50, or a name and a number")
    return _target(given[0].strip(), real(given[1]), plain(given[1]))


def _target(name: str, value: float | None, written: object) -> Target:
    found, factor = _metric(name)
    if value is None or not 0.0 < value * factor < float("inf"):
        raise PerfModelError(f"target {name}: found {shown(written)}, allowed a number above 0")
    return Target(found, value * factor)


def in_other_units(name: str) -> tuple[str, float] | None:
    """The name in the base unit that a name like ``tpot_ms`` or ``gpu_memory_gb`` stands for, and the unit's size."""
    stem, _, suffix = name.rpartition("_")
    if name in _SHORT:
        return _SHORT[name], 1.0
    if suffix in _TIMES and not stem.endswith("_per"):
        base = f"{stem}_s"
        return _SHORT.get(base, base), _TIMES[suffix]
    return (f"{stem}_bytes", _SIZES[suffix]) if suffix in _SIZES else None


def unit_is_missing(name: str, known: Iterable[str]) -> str:
    """What to write instead of a name like ``tpot`` that says no unit; empty for others."""
    names = set(known)
    for suffix, forms in (("s", ("ms", "s")), ("bytes", ("gb", "bytes"))):
        full = _SHORT.get(f"{name}_{suffix}", f"{name}_{suffix}")
        if full in names:
            written = [f"{name}_{forms[0]}", full if forms[1] == suffix else f"{name}_{forms[1]}"]
            return f"has no unit; allowed {' or '.join(written)}"
    return ""


def _metric(name: str) -> tuple[Metric, float]:
    """Metric, and size of the written unit."""
    if name in METRICS:
        return METRICS[name], 1.0
    found = in_other_units(name)
    if found is not None and (found[0] in METRICS or re.fullmatch(r"tpot_p[0-9.]+_s", found[0])):
        return metric(found[0]), found[1]
    missing = unit_is_missing(name, METRICS)
    if missing:
        raise PerfModelError(f"target: {shown(name)} {missing}")
    examples = ("tpot_ms", "ttft_ms", "end_to_end_ms", "gpu_memory_gb", "tok_per_s", *METRICS)
    close = suggestion(name, examples)
    raise PerfModelError(
        f"target: unknown metric {shown(name)}{close}, allowed {', '.join(METRICS)}, tpot_pQ_s,"
        " and the same in other units, such as tpot_ms, ttft_us, gpu_memory_gb, tok_per_s"
    )
