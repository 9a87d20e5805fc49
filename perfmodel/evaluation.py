"""What an evaluation says: one policy on one system, for one recorded trace."""

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from perfmodel.errors import PerfModelError

#: Parts of a token's critical path; they add up to the time per output token.
PARTS = ("attention", "router", "dense", "experts_gpu", "link", "ndp", "cpu", "head", "overhead")


#: What works at the same time, and how busy it is.
RESOURCES = ("gpu", "link", "ndp", "cpu")

Family = Literal["mean", "percentile", "prefill", "plan"]


class Metric(NamedTuple):
    """A number that can be asked for at many points at once.

    family : what it costs: a ``mean`` needs the distinct states, a ``percentile`` every token's sum, ``prefill`` the
        prefill's own states, and ``plan`` nothing (it does not depend on the hardware).
    better : which way is better.
    """

    name: str
    unit: str
    family: Family
    better: Literal["lower", "higher"]
    meaning: str


_METRICS = (
    Metric("tpot_mean_s", "s", "mean", "lower", "mean time per output token"),
    Metric("decode_tok_per_s", "token/s", "mean", "higher", "decode rate, tokens of a step / mean time of a step"),
    Metric("decode_s", "s", "mean", "lower", "decode time of a sequence"),
    *(Metric(f"{part}_s", "s", "mean", "lower", f"critical path of a mean token: {part}") for part in PARTS),
    *(Metric(f"busy_{one}_s", "s", "mean", "lower", f"busy time of the {one} in a mean token") for one in RESOURCES),
    Metric("tpot_p50_s", "s", "percentile", "lower", "median time per output token"),
    Metric("tpot_p95_s", "s", "percentile", "lower", "95th percentile of the time per output token"),
    Metric("tpot_p99_s", "s", "percentile", "lower", "99th percentile of the time per output token"),
    Metric("tpot_max_s", "s", "percentile", "lower", "slowest output token"),
    Metric("ttft_s", "s", "prefill", "lower", "time to first token: the prefill"),
    Metric("migration_s", "s", "prefill", "lower", "one-off copies after the prefill"),
    Metric("end_to_end_s", "s", "prefill", "lower", "prefill, copies and decode"),
    Metric("hit_rate", "1", "plan", "higher", "share of decode picks that find their expert on the GPU"),
    Metric("quant_loss", "1", "plan", "lower", "mean quantisation loss of a decode pick: output error of its expert"),
    Metric("quant_loss_vs_uniform", "1", "plan", "lower", "quantisation loss over that of uniform bits at its mean"),
    Metric("quant_noise", "1", "plan", "lower", "noise: quantisation loss over the experts' output variance"),
    Metric("gpu_memory_bytes", "byte", "plan", "lower", "GPU memory in use"),
    Metric("offload_memory_bytes", "byte", "plan", "lower", "memory in use on the near-data device or the host"),
)
#: Metrics of the expected quantisation loss, see `perfmodel.quality`.
QUALITY = ("quant_loss", "quant_loss_vs_uniform", "quant_noise")
#: Every metric by name; ``tpot_pQ_s`` with any percentile Q is understood by `metric` too.
METRICS = {one.name: one for one in _METRICS}
_PERCENTILE = re.compile(r"tpot_p([0-9]{1,3}(?:\.[0-9]+)?)_s", re.ASCII)
_LONGEST = 80


def percentile_of(name: str) -> float | None:
    """Percentile that a metric's name asks for, or None for other metrics; the slowest token is the 100th."""
    if name == "tpot_max_s":
        return 100.0
    found = _PERCENTILE.fullmatch(name)
    return float(found[1]) if found else None


def metric(name: object) -> Metric:
    """The metric of this name; PerfModelError with close matches for an unknown one.

    A percentile has one spelling: ``tpot_p50_s``, and not ``tpot_p050_s`` or ``tpot_p50.0_s``.
    """
    text = name if isinstance(name, str) else ""
    known = METRICS.get(text)
    if known is not None:
        return known
    percentile = percentile_of(text) if len(text) <= _LONGEST else None
    if percentile is not None and percentile <= 100.0:
        spelled = f"tpot_p{np.format_float_positional(percentile, trim='-')}_s"
        if text != spelled:
            raise PerfModelError(f"metric: found {text!a}, its name is {spelled}")
        return Metric(text, "s", "percentile", "lower", f"percentile {percentile:g} of the time per output token")
    close = difflib.get_close_matches(text[:_LONGEST], METRICS, n=3)
    hint = f" (did you mean {' or '.join(close)}?)" if close else ""
    found = ascii(text[:_LONGEST]) if isinstance(name, str) else f"a {type(name).__name__}"
    raise PerfModelError(f"metric: found {found}{hint}, allowed {', '.join(METRICS)}, tpot_pQ_s")


def metric_names(metrics: object) -> tuple[str, ...]:
    """Names of metrics that were asked for, one or several.

    Raises
    ------
    PerfModelError : none at all, an unknown one (with close matches), or one given twice.
    """
    metrics = metrics.tolist() if isinstance(metrics, np.ndarray) else metrics
    several = isinstance(metrics, Iterable) and not isinstance(metrics, str | bytes)
    listed: list[Any] = list(metrics) if isinstance(metrics, Iterable) and several else [metrics]
    if not listed or not (several or isinstance(metrics, str)):
        raise PerfModelError(f"metrics: found {metrics!a:.60}, allowed at least one name of a metric")
    names = [metric(name).name for name in listed]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise PerfModelError(f"metrics: {twice} is given twice; allowed: every metric once")
    return tuple(names)


class HitRates(NamedTuple):
    """Share of decode picks that find their expert on the GPU, beside its controls; every sequence counts alike.

    own : the policy's placement or cache. uniform : K / E, None where no K is kept in every layer.
    other_sequence : placed by another sequence's prefill.
    static : placed by the decode profile of the other sequences. oracle : placed by the sequence's own decode.
    None where the trace cannot tell, or the policy does not place experts by importance.
    """

    own: float
    uniform: float | None
    other_sequence: float | None
    static: float | None
    oracle: float | None


@dataclass(frozen=True)
class Evaluation:
    """What one policy costs on one system. Times in seconds, sizes in bytes; None where the trace has no prefill.

    ttft_s : prefill, mean over sequences. migration_s : one-off copies after it. end_to_end_s : everything.
    tpot_*_s : time per output token over all decode steps, which is that of a step. batch, batch_of : tokens of a step,
    and whether they are of as many sequences; all but ``bytes_per_token`` is said of a step. ndp_side_s : busy time of
    the near-data device. breakdown_s : the mean step by what is on the critical path. busy_s : the same work whether
    hidden or not. bytes_per_token : by tier. memory_bytes : by device and use. bandwidth_floor_s : the busiest tier at
    its datasheet rate. binding_resource : the largest share of the critical path. weakest_source : the weakest kind of
    evidence among the hardware constants. quant_* : expected quantisation loss of the decode picks, relative to
    uniform bits, and as a share of the output variance (see `perfmodel.quality`); None where it is unknown.
    """

    policy: str
    model: str
    system: str
    trace: str
    trace_source: str
    prompt_tokens: float
    output_tokens: float
    ttft_s: float | None
    migration_s: float
    end_to_end_s: float | None
    decode_s: float
    tpot_mean_s: float
    tpot_p50_s: float
    tpot_p95_s: float
    tpot_p99_s: float
    tpot_max_s: float
    decode_tok_per_s: float
    ndp_side_s: float
    breakdown_s: dict[str, float]
    busy_s: dict[str, float]
    bytes_per_token: dict[str, float]
    memory_bytes: dict[str, dict[str, float]]
    bandwidth_floor_s: float
    binding_resource: str
    hit_rate: HitRates
    prefill_decode_cosine: tuple[float, ...] | None
    quant_loss: float | None
    quant_loss_vs_uniform: float | None
    quant_noise: float | None
    weakest_source: str
    notes: tuple[str, ...]
    batch: int = 1
    batch_of: str = "sequences"

    @property
    def batch_text(self) -> str:
        """What a decode step runs, in words."""
        kind = " consecutive tokens" if self.batch > 1 and self.batch_of == "tokens" else ""
        return f"batch {self.batch}{kind}"

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain Python values, ready for JSON."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        values["hit_rate"] = self.hit_rate._asdict()
        values["notes"] = list(self.notes)
        if self.prefill_decode_cosine is not None:
            # A layer without a single assigned pick has no cosine.
            values["prefill_decode_cosine"] = [None if np.isnan(c) else c for c in self.prefill_decode_cosine]
        return values
