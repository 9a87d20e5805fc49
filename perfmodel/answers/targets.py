"""Targets as people write them, such as ``tpot_ms=50`` or ``tok_per_s=20``."""

from __future__ import annotations

import math
import re
from typing import NamedTuple

from perfmodel.errors import PerfModelError
from perfmodel.evaluation import METRICS, Metric, metric
from perfmodel.hardware.base import shown, suggestion

#: Size of a written unit in the base unit that the metric is kept in.
_TIMES = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
_SIZES = {"bytes": 1.0, "kb": 1e3, "mb": 1e6, "gb": 1e9, "gib": 2.0**30}
_SHORT = {"tpot": "tpot_mean_s", "tok_per_s": "decode_tok_per_s"}


class Target(NamedTuple):
    """A metric and the value it should have.

    value : in the unit of the metric. written : number and unit as they were asked for.
    """

    metric: Metric
    value: float
    written: str

    @property
    def goal(self) -> str:
        """``at most`` where lower is better, ``at least`` where higher is."""
        return "at most" if self.metric.better == "lower" else "at least"


def parse_target(text: str) -> Target:
    """A target from ``name=value``: a metric, with ``_ms``, ``_us``, ``_gb``, ``_gib``, ... for other units.

    ``tpot`` is short for the mean time per output token, and ``tok_per_s`` for the decode rate.

    Raises
    ------
    PerfModelError : unknown metric (with close matches), or a value that is not a positive number.
    """
    name, equals, number = str(text).partition("=")
    if not equals:
        raise PerfModelError(f"target: found {shown(text)}, allowed NAME=VALUE such as tpot_ms=50")
    found, factor, unit = _metric(name.strip())
    try:
        value = float(number) if "_" not in number else math.nan
    except ValueError:
        value = math.nan
    if not 0.0 < value < math.inf:
        raise PerfModelError(f"target {name.strip()}: found {shown(number.strip())}, allowed a number above 0")
    return Target(found, value * factor, f"{value:g} {unit}".replace(" 1", ""))


def target_of(name: str, value: float) -> Target:
    """A target from a name as in `parse_target` and its number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise PerfModelError(f"target {shown(name)}: found {shown(value)}, allowed a number above 0")
    return parse_target(f"{name}={value!r}")


def _metric(name: str) -> tuple[Metric, float, str]:
    """Metric, size of the written unit, and the unit's name."""
    if name in _SHORT:
        return METRICS[_SHORT[name]], 1.0, METRICS[_SHORT[name]].unit
    stem, _, suffix = name.rpartition("_")
    if suffix in _TIMES and not name.endswith("_per_s"):
        known = _SHORT.get(stem, f"{stem}_s")
        if known in METRICS or re.fullmatch(r"tpot_p[0-9.]+", stem):
            return metric(known), _TIMES[suffix], suffix
    if suffix in _SIZES and f"{stem}_bytes" in METRICS:
        return (
            METRICS[f"{stem}_bytes"],
            _SIZES[suffix],
            "byte" if suffix == "bytes" else suffix.upper().replace("I", "i"),
        )
    if name in METRICS:
        return METRICS[name], 1.0, METRICS[name].unit
    examples = ("tpot_ms", "ttft_ms", "end_to_end_ms", "gpu_memory_gb", "tok_per_s", *METRICS)
    close = suggestion(name, examples)
    raise PerfModelError(
        f"target: unknown metric {shown(name)}{close}, allowed {', '.join(METRICS)}, tpot_pQ_s,"
        " and the same in other units, such as tpot_ms, ttft_us, gpu_memory_gb, tok_per_s"
    )
