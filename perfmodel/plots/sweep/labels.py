"""Names of axes, metrics and policies as readers of a figure expect them, with units; and ticks that can be read."""

import math
import re
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from numpy.typing import NDArray

from perfmodel.evaluation import Metric
from perfmodel.plots.sweep.axes import TABLES, Axis, Fixed, log_spaced
from perfmodel.plots.sweep.selection import Sweep
from perfmodel.plots.words import number, plain, policy_names
from perfmodel.scenario.axis import FILES

#: Unit in which a metric is shown, by the unit of its values: from this many of the latter on.
_SCALES = {
    "s": ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")),
    "byte": ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")),
    "token/s": ((1.0, "tok/s"),),
}
_METRIC_WORDS = {
    "tpot_mean_s": "mean time per output token",
    "tpot_p50_s": "median time per output token",
    "ttft_s": "time to first token",
    "decode_tok_per_s": "decode rate",
    "decode_s": "decode time of a sequence",
    "end_to_end_s": "end-to-end time",
    "migration_s": "time of one-off copies",
    "hit_rate": "hit rate on the GPU",
    "quant_loss": "quantisation loss of a decode pick",
    "quant_loss_vs_uniform": "quantisation loss over that of uniform bits",
    "quant_noise": "noise: quantisation loss over output variance",
    "gpu_memory_bytes": "GPU memory in use",
    "offload_memory_bytes": "offload memory in use",
}
_AXIS_WORDS = {"gpu": "GPU", "ndp": "NDP", "cpu": "CPU", "dram": "DRAM", "workload": "", "policy": "", "kv": "KV"}
_WORKLOAD = {
    "workload.prompt": "prompt",
    "workload.output": "output",
    "workload.batch": "batch",
    "workload.micro_batch": "prefill pass",
}
#: Endings of keys that repeat the unit.
_UNIT_ENDING = re.compile(r"_(gb_per_s|tflop_per_s|gb|kb|us|ns|ghz|mt_s)(?=\.|$)")

#: Keys whose words say nothing, such as ``n_ccd_l``: they are shown as they are written in a spec.
_CODE = re.compile(r"(^|[._])(n_|tck)")
_UNITS = {"token": "tokens", "us": "µs"}

Which = Literal["x", "y"]


class Scale(NamedTuple):
    """How values are shown: divided by ``size``, in ``unit``."""

    size: float
    unit: str


def metric_scale(metric: Metric, values: Iterable[NDArray[np.float64]]) -> Scale:
    """The unit in which the largest value has at least one digit before the point."""
    highest = max((float(np.nanmax(one)) for one in values if np.isfinite(one).any()), default=0.0)
    choices = _SCALES.get(metric.unit, ((1.0, metric.unit),))
    for size, unit in choices:
        if highest >= size:
            return Scale(size, unit)
    return Scale(*choices[-1])


def metric_words(metric: Metric) -> str:
    """A metric in words."""
    known = _METRIC_WORDS.get(metric.name)
    return known or metric.meaning.replace("percentile of the time", "percentile of time")


def metric_label(metric: Metric, unit: str) -> str:
    """A metric in words, with the unit in which it is shown."""
    return with_unit(metric_words(metric), unit)


def with_unit(text: str, unit: str) -> str:
    """A label with its unit; a pure number has none."""
    return f"{text} ({unit_words(unit)})" if unit not in ("", "1") else text


def unit_words(unit: str) -> str:
    """A unit as readers expect it."""
    return _UNITS.get(unit, plain(unit))


def with_log(label: str) -> str:
    """A label whose axis is logarithmic."""
    return f"{label[:-1]}, log)" if label.endswith(")") else f"{label} (log)"


def axis_words(name: str) -> str:
    """An axis in words: ``link.bandwidth_gb_per_s`` is the link bandwidth; a key without words stays as it is."""
    if _CODE.search(name):
        return plain(name)
    if name in _WORKLOAD:
        return _WORKLOAD[name]
    words = re.sub("[._]", " ", _UNIT_ENDING.sub("", name)).split()
    return plain(" ".join(filter(None, (_AXIS_WORDS.get(word, word) for word in words))))


def axis_label(axis: Axis) -> str:
    """An axis in words, with its unit."""
    return with_unit(axis_words(axis.name), axis.unit) if axis.numeric else axis_words(axis.name)


def value_words(axis: Axis, value: object) -> str:
    """A value of an axis with its unit."""
    if not axis.numeric:
        return plain(value)
    # The space before a unit does not break, so that captions keep both in one line.
    size = float(str(value))
    shown = f"{size:.0f}" if size.is_integer() and abs(size) < 1e9 else f"{size:.4g}"
    return shown + (f"\u00a0{unit_words(axis.unit)}" if axis.unit not in ("", "1") else "")


def held_words(axis: Axis, value: object) -> str:
    """An axis at a value, such as ``link bandwidth 64 GB/s``; bits are not said twice."""
    words = axis_words(axis.name)
    shown = value_words(axis, value)
    return f"{words} {shown.partition(chr(0xA0))[0] if words.endswith(f'{axis.unit}s') and axis.unit else shown}"


def fixed_words(fixed: Sequence[Fixed]) -> str:
    """Sentences about the axes that are held at one value, and why there where nobody chose it."""
    groups: dict[str, list[str]] = {}
    for one in sorted(fixed, key=lambda one: one.reason != "chosen"):
        groups.setdefault(_why(one), []).append(held_words(one.axis, one.value) + _aside(one))
    return " ".join(f"{start}: {', '.join(kept)}." for start, kept in groups.items())


def _why(fixed: Fixed) -> str:
    """How a sentence about a held axis begins."""
    what = "point" if fixed.axis.dim in TABLES else "value"
    if fixed.reason == "chosen":
        return "Held at"
    if fixed.reason != "own":
        return f"Not drawn, held at the {fixed.reason} {what} of the sweep"
    name = fixed.axis.name
    owner = (
        "scenario" if name in FILES else {"policy": "policy", "workload": "workload"}.get(name.split(".")[0], "system")
    )
    return f"Not drawn, held at the sweep's {what} nearest the {owner}'s own"


def _aside(fixed: Fixed) -> str:
    """The scenario's own number, where the sweep does not have it."""
    if fixed.own is None or not fixed.axis.numeric or math.isclose(float(fixed.own), float(fixed.value), rel_tol=1e-3):
        return ""
    return f" (own: {value_words(fixed.axis, fixed.own)})"


def together_words(sweep: Sweep, *drawn: Axis) -> str:
    """Names what else varies along zipped dimensions that are drawn."""
    dims, names = {one.dim for one in drawn}, {one.name for one in drawn}
    others = [axis_words(one.name) for one in sweep.axes.values() if one.dim in dims and one.name not in names]
    return f"Varies together with the axis: {', '.join(others)}." if others else ""


def names_of(sweep: Sweep) -> dict[str, str]:
    """Every policy of a sweep by its text, as readers of the figure see it."""
    return dict(zip(sweep.policies, policy_names(sweep.policies), strict=True))


def nice_ticks(low: float, high: float, most: int = 7) -> list[float]:
    """Ticks of a logarithmic axis, as many of 1, 2, 5 times powers of ten as there is room for."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    found: list[float] = []
    for steps in ((1, 1.5, 2, 3, 4, 5, 6, 8), (1, 2, 3, 5), (1, 2, 5), (1, 3), (1,)):
        ticks = [m * 10.0**p for p in range(first, last + 1) for m in steps]
        found = [tick for tick in ticks if low * (1 - 1e-9) <= tick <= high * (1 + 1e-9)]
        if len(found) <= most:
            return found
    return found[:: math.ceil(len(found) / most)]


def tick_text(value: float) -> str:
    """A tick as people write it, without an exponent up to a million."""
    if value and not 1e-4 <= abs(value) < 1e6:
        return f"{value:.0e}".replace("e+0", "e").replace("e-0", "e-")
    return f"{value:.10g}"


def log_axis(axes: Axes, which: Which, low: float, high: float, most: int = 7) -> None:
    """Make ``x`` or ``y`` logarithmic from ``low`` to ``high``, with ticks that can be read."""
    axes.set(**{f"{which}scale": "log", f"{which}lim": (low, high)})
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_locator(FixedLocator(nice_ticks(low, high, most)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: tick_text(value)))
    axis.set_minor_locator(NullLocator())


def place_axis(axes: Axes, which: Which, axis: Axis, *, pad: float = 0.02, most: int = 7) -> None:
    """Scale, limits, ticks and label for the values of an axis of the sweep; few values are the ticks themselves."""
    values = np.unique(axis.values).astype(np.float64)
    low, high = float(values[0]), float(values[-1])
    log = log_spaced(values)
    if log:
        room = (high / low) ** pad
        log_axis(axes, which, low / room, high * room, most)
    else:
        room = (high - low) * pad or abs(high) * pad or 1.0
        axes.set(**{f"{which}lim": (low - room, high + room)})
        axes.locator_params(axis=which, nbins=most)
    lined = axes.xaxis if which == "x" else axes.yaxis
    if len(values) <= most and all(len(number(v)) <= 6 for v in values):
        lined.set_major_locator(FixedLocator(values.tolist()))
        lined.set_major_formatter(FuncFormatter(lambda value, _: tick_text(float(f"{value:.4g}"))))
    label = axis_label(axis)
    axes.set(**{f"{which}label": with_log(label) if log else label})
