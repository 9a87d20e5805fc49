"""HOBBIT: everything runs on the GPU; missing experts are copied at a precision that depends on their weight.

Source: arXiv 2411.01433. The picks of a token are ranked by routing weight; ``s`` is the sum of the normalised
weights of the better-ranked ones (0 for the best). On a cache miss a pick is copied at high precision for
``s <= t1``, at low precision for ``s <= t2``, and skipped above. On Mixtral the published thresholds give
67 / 30 / 3 % of the picks.

- ``split=published`` (default) applies those shares: within every sequence the 67 % of picks with the smallest
  ``s`` are high, the next 30 % low, the rest skipped. Ties are spread evenly over the sequence.
- ``split=gates`` applies the thresholds to the trace's own weights.
- Caches are per layer and precision, least recently used first, empty at the start of a sequence. The published
  eviction score mixes four terms whose weights are not published; LRU is its recency term alone.
- ``prefetch_accuracy`` is the share of misses whose copy was issued a layer ahead. The other misses pay for a
  wrongly predicted copy as well, because a started copy is not aborted. The first layer is never ahead.
- A prefill copies every selected expert once, at high precision.
"""

import functools
import itertools
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from perfmodel.bitwidth import LossTable
from perfmodel.errors import PolicyError
from perfmodel.kernels.cache import MISS_HIGH, MISS_LOW, mixed_cache
from perfmodel.model import MoEModel
from perfmodel.policies.base import (
    EXPERTS,
    ClassTable,
    Executor,
    Plan,
    PlanInputs,
    Policy,
    Residency,
    When,
    WorkClass,
    make_plan,
    option,
    plan_prefill,
    require,
)

Split = Literal["published", "gates"]

#: Shares of picks at high precision, low precision and skipped on Mixtral (arXiv 2411.01433).
PUBLISHED_SHARES = (0.67, 0.30, 0.03)
_HIGH, _LOW, _SKIP = 0, 1, 2
_GOLDEN = 0.6180339887498949  # fractional parts of its multiples spread evenly over [0, 1)


@functools.lru_cache(maxsize=8)
def _spread(count: int) -> NDArray[np.float64]:
    """An evenly spread sequence in [0, 1): the same for the same length, and without clusters."""
    spread = np.asarray(np.arange(count) * _GOLDEN % 1.0, dtype=np.float64)
    spread.flags.writeable = False
    return spread


@dataclass(frozen=True)
class Hobbit(Policy):
    """GPU-only execution with mixed-precision copies."""

    name: ClassVar[str] = "hobbit"
    summary: ClassVar[str] = "GPU only; missing experts copied at high or low precision, or skipped"
    source: ClassVar[str] = "arXiv 2411.01433"
    needs_ndp: ClassVar[bool] = False

    split: Split = option("published", "published shares of the picks, or thresholds on the trace's own weights")
    t1: float = option(0.6, "with split=gates: largest s copied at high precision", low=0, high=1)
    t2: float = option(0.9, "with split=gates: largest s copied at low precision", "t1 to 1", low=0, high=1)
    low_bits: float = option(4.0, "bits of the low-precision copies; high precision is the stored one", low=1, high=16)
    cache_high: int = option(0, "high-precision experts a layer kept on the GPU", low=0, high=EXPERTS)
    cache_low: int = option(0, "low-precision experts a layer kept on the GPU", low=0, high=EXPERTS)
    prefetch_accuracy: float = option(
        0.0, "share of misses copied a layer ahead; 0 switches prefetch off", low=0, high=1
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "t2", self.t1 <= self.t2 <= 1.0, f"t1={self.t1:g} to 1")

    def _wanted(self, inputs: PlanInputs, assigned: NDArray[np.bool_], offsets: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Precision each pick is copied at on a miss [T, L, k]."""
        s = inputs.replay.weight_before
        wanted = np.full(s.shape, _SKIP, np.uint8)
        if self.split == "gates":
            wanted[s <= self.t2] = _LOW
            wanted[s <= self.t1] = _HIGH
            return wanted
        for start, stop in itertools.pairwise(offsets):
            part = assigned[start:stop]
            values = s[start:stop][part]
            # The spread only orders equal s: it is far smaller than any difference of recorded weights.
            key = values + 1e-9 * _spread(len(values))
            high, low = np.rint(np.cumsum(PUBLISHED_SHARES[:2]) * len(values)).astype(np.int64)
            chosen = np.full(len(values), _SKIP, np.uint8)
            if low:
                chosen[key <= np.partition(key, low - 1)[low - 1]] = _LOW
            if high:
                chosen[key <= np.partition(key, high - 1)[high - 1]] = _HIGH
            wanted[start:stop][part] = chosen
        return wanted

    def _ahead(self, misses: NDArray[np.bool_], offsets: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which misses were predicted and copied a layer ahead [T, L, k]."""
        ahead = np.zeros_like(misses)
        for start, stop in itertools.pairwise(offsets):
            part = misses[start:stop, 1:]
            ahead[start:stop, 1:][part] = _spread(int(part.sum())) < self.prefetch_accuracy
        return ahead

    def _classes(
        self, outcome: NDArray[np.uint8], full: float, offsets: NDArray[np.int64], table: ClassTable
    ) -> tuple[NDArray[np.uint8], NDArray[np.uint8] | None]:
        """Work class of every pick, from the outcome of its cache request, and wrongly predicted copies."""
        low = min(self.low_bits, full)
        hit_high, hit_low = WorkClass(Executor.GPU, full), WorkClass(Executor.GPU, low)
        skip = WorkClass(Executor.SKIP, full)
        numbers = [table.number(work) for work in (hit_high, hit_low)]
        numbers += [table.number(WorkClass(Executor.FETCH, bits)) for bits in (full, low)] + [table.number(skip)]
        picks = np.array(numbers, np.uint8)[outcome]
        if self.prefetch_accuracy == 0.0:
            return picks, None
        missed = (outcome == MISS_HIGH) | (outcome == MISS_LOW)
        ahead = self._ahead(missed, offsets)
        late = missed & ~ahead
        late[:, 0] = False  # nothing was predicted for the first layer
        wrong = np.full(picks.shape, table.number(skip), np.uint8)
        for code, bits in ((MISS_HIGH, full), (MISS_LOW, low)):
            picks[ahead & (outcome == code)] = table.number(WorkClass(Executor.FETCH, bits, when=When.AHEAD))
            wrong[late & (outcome == code)] = table.number(WorkClass(Executor.COPY, bits, when=When.AHEAD))
        return picks, wrong

    def residency(self, model: MoEModel, most_gpu_experts: int, losses: LossTable | None = None) -> Residency:
        for name in ("cache_high", "cache_low"):
            require(
                self,
                name,
                getattr(self, name) <= model.num_experts,
                f"0 to {model.num_experts} for {model.name}",
            )
        full = float(model.expert_bits)
        low = min(self.low_bits, full)
        low_bytes = model.expert_bytes(low) * self.cache_low * len(model.moe_layers)
        staging = 0.0 if self.cache_high else model.expert_bytes(full)
        return Residency(float(self.cache_high), low_bytes + staging, (low,))

    def plan(self, inputs: PlanInputs) -> Plan:
        model, trace = inputs.model, inputs.replay.trace
        kept = self.residency(model, inputs.most_gpu_experts)
        full = float(model.expert_bits)
        if self.split == "gates" and trace.topk_weights is None:
            raise PolicyError("policy hobbit: split=gates needs routing weights, and this trace has none")
        assigned, offsets = inputs.replay.assigned, inputs.replay.decode_offsets
        wanted = self._wanted(inputs, assigned, offsets)
        outcome = mixed_cache(
            inputs.replay.decode_ids,
            wanted,
            assigned,
            offsets,
            model.num_experts,
            self.cache_high,
            self.cache_low,
        )
        table = ClassTable()
        picks, wrong = self._classes(outcome, full, offsets, table)
        low = min(self.low_bits, full)
        return make_plan(
            self,
            inputs,
            table,
            picks,
            plan_prefill(inputs, "fetch", table),
            overlap="max",
            copies=wrong,
            **kept._asdict(),
            notes=self._notes(wanted[assigned], outcome[assigned], low=low, full=full),
        )

    def _notes(self, wanted: NDArray[Any], outcome: NDArray[Any], *, low: float, full: float) -> tuple[str, ...]:
        count = max(1, len(wanted))
        shares = [100 * np.count_nonzero(wanted == code) / count for code in (_HIGH, _LOW, _SKIP)]
        missed = np.count_nonzero((outcome == MISS_HIGH) | (outcome == MISS_LOW)) / count
        return (
            f"HOBBIT split={self.split}: {shares[0]:.1f} / {shares[1]:.1f} / {shares[2]:.1f} % of picks at"
            f" {full:g} bits, at {low:g} bits, skipped; {100 * missed:.1f} % of picks are copied, one after another"
            " and before they are computed",
            f"caches of {self.cache_high} and {self.cache_low} experts a layer; prefetch accuracy"
            f" {self.prefetch_accuracy:g}",
        )
