"""HOBBIT: everything runs on the GPU; missing experts are copied at a precision that depends on their weight.

Source: arXiv 2411.01433. The picks of a token are ranked by routing weight; ``s`` is the sum of the normalised
weights of the better-ranked ones (0 for the best). On a cache miss a pick is copied at high precision for
``s <= t1``, at low precision for ``s <= t2``, and skipped above. On Mixtral the published thresholds give
67 / 30 / 3 % of the picks.

- ``split=published`` (default) applies those shares: within every sequence the 67 % of picks with the smallest
  ``s`` are high, the next 30 % low, the rest skipped. Ties are spread evenly over the sequence.
- ``split=gates`` applies the thresholds to the trace's own weights.
- Caches of high- and low-precision experts are separate, of every layer or of all layers together (``scope``), and
  start empty with every sequence, or with ``warm=prompt`` from what its prefill copied. ``rule=weighted`` is the
  published eviction score of recency, use, use at high precision and layer distance (see `perfmodel.caches`). Its
  weights are not published: ``w_lru`` to ``w_fld`` are assumed to be 0.25 each, and ``rule=lru``, the recency term
  alone, is the default.
- ``prefetch_accuracy`` is the chance that the next layer's gate, applied early, names a pick; published 0.96, 0
  switches prefetch off. What it names and is not resident is copied a layer ahead, at the precision of the pick's
  rank; a pick to be skipped is not copied. The authors go on to later layers until the first predicted miss; here
  copies hide behind one layer, so the next layer is as far as it goes. A started copy is not aborted, and a wrong
  one enters the cache. The first layer is never ahead.
- Requests are served strictly one after another. With prefetch, what a step needs or foretells is not evicted in it,
  because a copy under way is used before it goes.
- A prefill copies every selected expert once, at high precision.
"""

import dataclasses
import functools
import itertools
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from perfmodel.bitwidth import LossTable
from perfmodel.caches import (
    AHEAD_HIGH,
    AHEAD_LOW,
    HIGH,
    HIT_HIGH,
    HIT_LOW,
    LOW,
    MISS_HIGH,
    MISS_LOW,
    NOT_RUN,
    NOTHING,
    CacheReplay,
    ExpertCache,
    Scope,
    replay_cache,
)
from perfmodel.errors import PolicyError
from perfmodel.model import MoEModel
from perfmodel.policies.base import (
    EXPERTS,
    ClassTable,
    Executor,
    Fetch,
    Plan,
    PlanInputs,
    Policy,
    Residency,
    When,
    WorkClass,
    make_plan,
    option,
    plan_prefill,
    prefill_counts,
    require,
    require_experts,
)
from perfmodel.policies.cached import extra_copies
from perfmodel.policies.host import by_falling_use

Split = Literal["published", "gates"]

#: Shares of picks at high precision, low precision and skipped on Mixtral (arXiv 2411.01433).
PUBLISHED_SHARES = (0.67, 0.30, 0.03)
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
        0.0, "chance that a pick is foretold and copied a layer ahead; 0 switches prefetch off", low=0, high=1
    )
    rule: Literal["lru", "lfu", "weighted"] = option("lru", "which expert is evicted")
    scope: Scope = option("layer", "cached experts of each layer, or of all layers together")
    w_lru: float = option(0.25, "with rule=weighted: weight of recency", low=0, high=1)
    w_lfu: float = option(0.25, "with rule=weighted: weight of the use", low=0, high=1)
    w_lhu: float = option(0.25, "with rule=weighted: weight of the use at high precision", low=0, high=1)
    w_fld: float = option(0.25, "with rule=weighted: weight of the nearness of the layer", low=0, high=1)
    warm: Literal["prompt", "empty"] = option(
        "empty", "the cache starts empty, or with what the prompt used most at high precision"
    )
    fetch: Fetch = option("before", "copies all before the layer computes, or each expert when its copy is there")
    seed: int = option(0, "seed of the wrong predictions", low=0, high=2**32 - 1)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "t2", self.t1 <= self.t2 <= 1.0, f"t1={self.t1:g} to 1")

    def _wanted(self, inputs: PlanInputs, assigned: NDArray[np.bool_], offsets: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Precision each pick is copied at on a miss [T, L, k]."""
        s = inputs.replay.weight_before
        wanted = np.full(s.shape, NOTHING, np.uint8)
        if self.split == "gates":
            wanted[s <= self.t2] = LOW
            wanted[s <= self.t1] = HIGH
            return wanted
        for start, stop in itertools.pairwise(offsets):
            part = assigned[start:stop]
            values = s[start:stop][part]
            # The spread only orders equal s: it is far smaller than any difference of recorded weights.
            key = values + 1e-9 * _spread(len(values))
            high, low = np.rint(np.cumsum(PUBLISHED_SHARES[:2]) * len(values)).astype(np.int64)
            chosen = np.full(len(values), NOTHING, np.uint8)
            if low:
                chosen[key <= np.partition(key, low - 1)[low - 1]] = LOW
            if high:
                chosen[key <= np.partition(key, high - 1)[high - 1]] = HIGH
            wanted[start:stop][part] = chosen
        return wanted

    def _replay(self, inputs: PlanInputs, wanted: NDArray[np.uint8]) -> CacheReplay:
        """What becomes of every pick, and wrong copies."""
        layers = len(inputs.model.moe_layers) if self.scope == "global" else 1
        counts = prefill_counts(inputs) if self.warm == "prompt" else None
        initial = None if counts is None else by_falling_use(counts)
        ahead: dict[str, Any] = {}
        if self.prefetch_accuracy:
            from perfmodel.routing import prediction

            # A prediction stands in the place of the pick that it is for, and so has its rank.
            foretold = prediction.gate_prediction(inputs.replay, self.prefetch_accuracy, self.seed)
            ahead = {"predicted": foretold, "predicted_wanted": wanted}
        return replay_cache(
            inputs.replay.decode_ids,
            inputs.replay.decode_offsets,
            inputs.model.num_experts,
            ExpertCache(
                self.cache_high * layers,
                self.rule,
                self.scope,
                capacity_low=self.cache_low * layers,
                protected=bool(ahead),
                weights=(self.w_lru, self.w_lfu, self.w_lhu, self.w_fld),
            ),
            wanted=wanted,
            initial=initial,
            batch=inputs.replay.batch.tokens,
            **ahead,
        )

    def _classes(
        self, found: CacheReplay, full: float, table: ClassTable
    ) -> tuple[NDArray[np.uint8], NDArray[np.uint8] | None]:
        """Work class of every pick, from the outcome of its cache request, and wrongly predicted copies."""
        low = min(self.low_bits, full)
        works = {
            HIT_HIGH: WorkClass(Executor.GPU, full),
            HIT_LOW: WorkClass(Executor.GPU, low),
            MISS_HIGH: WorkClass(Executor.FETCH, full),
            MISS_LOW: WorkClass(Executor.FETCH, low),
            NOT_RUN: WorkClass(Executor.SKIP, full),
            AHEAD_HIGH: WorkClass(Executor.FETCH, full, when=When.AHEAD),
            AHEAD_LOW: WorkClass(Executor.FETCH, low, when=When.AHEAD),
        }
        if not self.prefetch_accuracy:
            works = {code: work for code, work in works.items() if work.when == When.NOW}
        numbers = np.zeros(AHEAD_LOW + 1, np.uint8)
        for code, work in works.items():
            numbers[code] = table.number(work)
        wrong = [
            (number, WorkClass(Executor.COPY, bits, when=When.AHEAD))
            for number, bits in ((found.wasted_high, full), (found.wasted_low, low))
        ]
        return numbers[found.outcome], extra_copies(wrong, table, full)

    def residency(self, model: MoEModel, most_gpu_experts: float, losses: LossTable | None = None) -> Residency:
        require_experts(self, model, "cache_high", "cache_low")
        full = float(model.expert_bits)
        low = min(self.low_bits, full)
        low_bytes = model.expert_bytes(low) * self.cache_low * len(model.moe_layers)
        staging = 0.0 if self.cache_high else model.expert_bytes(full)
        return Residency(float(self.cache_high), low_bytes + staging, (low,))

    def at_capacity(self, model: MoEModel, most_gpu_experts: float) -> "Hobbit":
        """Everything to the high-precision cache, which serves picks of both precisions.

        A byte of it saves 0.67 + 0.30 low / high bytes a request by the published shares, a byte of the low one 0.30.
        """
        most = max(0, min(int(most_gpu_experts), model.num_experts))
        return dataclasses.replace(self, cache_high=most, cache_low=0)

    def plan(self, inputs: PlanInputs) -> Plan:
        model, trace = inputs.model, inputs.replay.trace
        kept = self.residency(model, inputs.most_gpu_experts)
        full = float(model.expert_bits)
        if self.split == "gates" and trace.topk_weights is None:
            raise PolicyError("policy hobbit: split=gates needs routing weights, and this trace has none")
        assigned, offsets = inputs.replay.assigned, inputs.replay.decode_offsets
        wanted = self._wanted(inputs, assigned, offsets)
        found = self._replay(inputs, wanted)
        table = ClassTable()
        picks, wrong = self._classes(found, full, table)
        return make_plan(
            self,
            inputs,
            table,
            picks,
            plan_prefill(inputs, "fetch", table),
            overlap="max",
            copies=wrong,
            fetch=self.fetch,
            round_trips="layer",
            **kept._asdict(),
            notes=self._notes(wanted[assigned], found.outcome[assigned], low=min(self.low_bits, full), full=full),
        )

    def _notes(self, wanted: NDArray[Any], outcome: NDArray[Any], *, low: float, full: float) -> tuple[str, ...]:
        count = max(1, len(wanted))
        how = "one after another and before they are computed" if self.fetch == "before" else "and run as they come"
        shares = [100 * np.count_nonzero(wanted == code) / count for code in (HIGH, LOW, NOTHING)]
        missed = np.isin(outcome, (MISS_HIGH, MISS_LOW, AHEAD_HIGH, AHEAD_LOW)).mean() if len(outcome) else 0.0
        return (
            f"HOBBIT split={self.split}: {shares[0]:.1f} / {shares[1]:.1f} / {shares[2]:.1f} % of picks at"
            f" {full:g} bits, at {low:g} bits, skipped; {100 * missed:.1f} % of picks are copied,"
            f" {how}",
            f"caches of {self.cache_high} and {self.cache_low} experts a layer; prefetch accuracy"
            f" {self.prefetch_accuracy:g}",
        )
