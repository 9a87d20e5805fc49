"""One row of evidence: its keys, their units and what they may be. `perfmodel.evidence.measured` reads files of it."""

import math
from dataclasses import dataclass, fields
from typing import Any

from perfmodel.errors import SpecError
from perfmodel.hardware.base import shown, suggestion

_LONGEST_TEXT = 500

#: Smallest and largest value of each number; a key whose limits are integers takes whole numbers alone.
_NUMBERS: dict[str, tuple[float, float]] = {
    "expert_bits": (0.5, 64.0),
    "other_bits": (0.5, 64.0),
    "head_bits": (0.5, 64.0),
    "devices": (1, 65_536),
    "sockets": (1, 64),
    "batch": (1e-3, 1e7),
    "prompt_tokens": (1, 10**9),
    "output_tokens": (1, 10**9),
    "context_tokens": (0.0, 1e9),
    "gpu_experts": (0.0, 1.0),
    "active_experts": (1, 100_000),
    "slots_per_layer": (0.0, 1e6),
    "misses_per_token": (0.0, 1e7),
    "uploads_per_token": (0.0, 1e7),
    "distinct_experts": (0.0, 1e6),
    "loads_per_step": (0.0, 1e7),
    "prefetches_per_step": (0.0, 1e7),
    "dram_gb_per_s": (0.1, 20_000.0),
    "expert_read_gb_per_s": (0.1, 20_000.0),
    "decode_tok_per_s": (1e-6, 1e9),
    "step_ms": (1e-6, 1e9),
    "prefill_tok_per_s": (1e-6, 1e9),
    "prefill_micro_batch": (1, 10**9),
    "prefill_after_tokens": (0, 10**9),
}
_WORDS: dict[str, tuple[str, ...]] = {
    "confidence": ("high", "medium", "low"),
    "split": ("tensor", "layer"),
    "numa": ("interleaved", "replicated", "one-socket"),
    "copies": ("pinned", "pageable"),
    "batch_of": ("sequences", "tokens", "text"),
    "elsewhere": ("cpu", "fetch"),
    "prefetch": ("none", "oracle", "oracle-1"),
}
#: A key that says nothing without another one.
_NEEDS = {
    "split": "gpu",
    "sockets": "cpu",
    "numa": "cpu",
    "expert_read_gb_per_s": "cpu",
    "decode_excluded_because": "decode_tok_per_s",
    "prefill_micro_batch": "prefill_tok_per_s",
    "prefill_after_tokens": "prefill_tok_per_s",
    "prefill_excluded_because": "prefill_tok_per_s",
}


@dataclass(frozen=True, kw_only=True)
class MeasuredRun:
    """One row of evidence.

    Attributes
    ----------
    id : its name, used once in a file. source : the repository it was published in, the unit that is left out when a
        fit is checked. citation : where in it. date : when, as far as known. confidence : "high" is tool output with
        its settings, "medium" misses one input, "low" is second hand.
    model : the shape of the network. expert_bits, other_bits, head_bits : stored bits of a weight of the routed
        experts, of all others, and of the head where it differs [bit].
    gpu, devices, split : the card, how many, and whether a layer is cut over them ("tensor") or they take turns in
        layers ("layer"). cpu, sockets, numa : the processor that experts run on or that was named, and where the
        weights lie on its sockets. link : how weights reach the GPU; copies : from which kind of memory.
        dram_gb_per_s : rate of host memory over all sockets that the row states [GB/s]. expert_read_gb_per_s : rate at
        which its CPU was measured to read experts, by a benchmark of its own [GB/s].
    engine, engine_version : profile and version of the software.
    batch, batch_of : mean rows of a decode step, and whether they, or the tokens of a prompt, are sequences,
        consecutive tokens of a random text, or of a real one ("text"), whose tokens visit fewer different experts.
    prompt_tokens, output_tokens : lengths [token]. context_tokens : mean context of a decode step [token].
    gpu_experts : share of the routed experts that the GPU holds [1]. elsewhere : whether the others run on the CPU or
        are fetched. active_experts : experts a token visits, where the run used another number than the model has.
    slots_per_layer : experts the GPU holds in a layer. misses_per_token, uploads_per_token : experts, over all layers,
        that a token did not find on the GPU, and that were copied into the cache behind its back.
        distinct_experts : different experts of one layer in one step. loads_per_step : experts, over all layers,
        copied in one step; prefetches_per_step : those of them that were copied ahead. policy, prefetch : what the
        cache keeps, and what it copies ahead ("oracle": all that will be needed, "oracle-1": that of the next layer).
    decode_tok_per_s : tokens a second over the whole batch. step_ms : time of a decode step [ms], where no rate was
        given. prefill_tok_per_s : the same of a prompt, in micro-batches of prefill_micro_batch tokens and with
        prefill_after_tokens in the cache already.
    excluded_because, decode_excluded_because, prefill_excluded_because : why the row, or one of its two rates, does not
        count.
    inferred : keys that were not stated. note : anything else, in a few words.

    Raises
    ------
    SpecError : a value is of the wrong type or out of range, or contradicts another one; one line.
    """

    id: str
    source: str
    citation: str
    confidence: str
    date: str | None = None
    model: str | None = None
    expert_bits: float | None = None
    other_bits: float | None = None
    head_bits: float | None = None
    gpu: str | None = None
    devices: int = 1
    split: str | None = None
    cpu: str | None = None
    sockets: int | None = None
    numa: str | None = None
    link: str | None = None
    copies: str | None = None
    engine: str | None = None
    engine_version: str | None = None
    batch: float | None = None
    batch_of: str = "sequences"
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    context_tokens: float | None = None
    gpu_experts: float | None = None
    elsewhere: str | None = None
    active_experts: int | None = None
    slots_per_layer: float | None = None
    misses_per_token: float | None = None
    uploads_per_token: float | None = None
    distinct_experts: float | None = None
    loads_per_step: float | None = None
    prefetches_per_step: float | None = None
    prefetch: str | None = None
    policy: str | None = None
    dram_gb_per_s: float | None = None
    expert_read_gb_per_s: float | None = None
    decode_tok_per_s: float | None = None
    step_ms: float | None = None
    prefill_tok_per_s: float | None = None
    prefill_micro_batch: int | None = None
    prefill_after_tokens: int | None = None
    excluded_because: str | None = None
    decode_excluded_because: str | None = None
    prefill_excluded_because: str | None = None
    inferred: tuple[str, ...] = ()
    note: str | None = None

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            if one.name == "inferred" or (value is None and one.default is None):
                continue
            if one.name in _NUMBERS:
                _check_number(one.name, value)
            else:
                _check_text(one.name, value)
        self._check_inferred()
        for key, other in _NEEDS.items():
            if getattr(self, key) is not None and getattr(self, other) is None:
                raise SpecError(f"key '{key}' says nothing without '{other}', which is missing")
        if self.elsewhere is not None and self.gpu_experts == 1:
            raise SpecError(f"key 'elsewhere' is {shown(self.elsewhere)}; allowed: no such key when gpu_experts is 1")
        if self.decode_tok_per_s is not None and self.step_ms is not None:
            raise SpecError("keys 'decode_tok_per_s' and 'step_ms' are both given; allowed: one of them")
        if self.prefetches_per_step is not None and self.prefetches_per_step > (self.loads_per_step or 0.0):
            raise SpecError(
                f"key 'prefetches_per_step' is {shown(self.prefetches_per_step)}; allowed: at most loads_per_step, of "
                f"which they are part, {shown(self.loads_per_step)}"
            )

    def _check_inferred(self) -> None:
        known = [one.name for one in fields(self) if one.name not in ("id", "inferred")]
        inferred: object = self.inferred
        if not isinstance(inferred, tuple):
            raise SpecError(f"key 'inferred' is {shown(inferred)}; allowed: a list of keys of the row")
        for key in inferred:
            if not isinstance(key, str) or key not in known or getattr(self, key) is None:
                hint = suggestion(key, known) if isinstance(key, str) else ""
                raise SpecError(f"key 'inferred' names {shown(key)}{hint}; allowed: keys that the row has")


def _check_number(key: str, value: object) -> None:
    low, high = _NUMBERS[key]
    whole = isinstance(low, int) and isinstance(high, int)
    known = isinstance(value, int) if whole else isinstance(value, int | float)
    if isinstance(value, bool) or not known or not math.isfinite(_plain(value)) or not low <= _plain(value) <= high:
        kind = "a whole number" if whole else "a number"
        raise SpecError(f"key '{key}' is {shown(value)}; allowed: {kind} from {low:.9g} to {high:.9g}")


def _plain(value: Any) -> float:
    """A number as a float; infinity for an integer that no float holds."""
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _check_text(key: str, value: object) -> None:
    words = _WORDS.get(key)
    if words is not None:
        if not isinstance(value, str) or value not in words:
            hint = suggestion(value, words) if isinstance(value, str) else ""
            raise SpecError(f"key '{key}' is {shown(value)}{hint}; allowed: {', '.join(words)}")
    elif not isinstance(value, str) or not value.strip() or len(value) > _LONGEST_TEXT or not value.isprintable():
        raise SpecError(f"key '{key}' is {shown(value)}; allowed: one line of 1 to {_LONGEST_TEXT} characters")
