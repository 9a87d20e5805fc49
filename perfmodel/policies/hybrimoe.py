"""HybriMoE: in every layer GPU, CPU and link share the experts as a small simulation says; a cache by recent scores.

Source: arXiv 2504.05897. Rules, and the readings taken:

- A warm-up measures what an expert takes on the CPU, on the GPU and over the link; here these are the system's costs.
  Per layer a greedy simulation of three timelines says who runs what, see ``kernels.schedule.hybrid_split``. In decode
  every expert has one token, so a table of all (hits, misses) holds all there is to decide. Among equal experts those
  of the highest ids are copied, as in the simulation. An expert computes as soon as its copy is there.
- ``slots`` experts a layer are cached; the one with the lowest recent score is evicted (`perfmodel.caches`). Before a
  sequence the cache holds what the decode steps of the other sequences use most, if there are any; with
  ``warm=prompt`` what its prompt used most after it. What the prefill has not copied for that is a migration.
- What enters the cache while decoding is not published in detail. ``admit=all``: every miss; what ran on the CPU is
  uploaded behind it. ``admit=none``: predicted experts only. ``admit=auto``: all where the
  simulation hides an upload behind a layer with one miss, else none, which is prefetching by simulated gain.
- ``predict=gate`` copies ahead what the next gate says early, right with the chance ``accuracy``; all of it, since the
  gain of a single expert depends on what was already resident, and that is not in the table.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from perfmodel.bitwidth import LossTable
from perfmodel.caches import (
    AHEAD_HIGH,
    HIT_HIGH,
    NO_EXPERT,
    NOT_RUN,
    NOTHING,
    CacheReplay,
    ExpertCache,
    replay_cache,
)
from perfmodel.kernels.schedule import hybrid_split
from perfmodel.model import MoEModel
from perfmodel.policies.base import (
    EXPERTS,
    ClassTable,
    Executor,
    Plan,
    PlanInputs,
    Residency,
    When,
    WorkClass,
    make_plan,
    option,
    prefill_counts,
)
from perfmodel.policies.cached import extra_copies
from perfmodel.policies.costs import COST_KEYS, expert_costs, need_cpu
from perfmodel.policies.host import Prefill, host_prefill
from perfmodel.policies.hosted import HostedExperts, split_prefill
from perfmodel.routing import prediction, statistics
from perfmodel.routing.batches import of_picks, tokens_of_steps
from perfmodel.routing.others import no_others_text


class _Table(NamedTuple):
    """What the simulation says for every number of hits and misses [k + 1, k + 1].

    copied : missed experts that are copied. seconds : time of the layer's experts [s]. copy_s : of one copy [s].
    """

    copied: NDArray[np.int64]
    seconds: NDArray[np.float64]
    copy_s: float


class _Start(NamedTuple):
    """Experts by falling importance before the first decode step [S, L, E], and how many moved for it [S]."""

    order: NDArray[np.uint16] | None
    moved: NDArray[np.float64]


@dataclass(frozen=True)
class HybriMoE(HostedExperts):
    """Three timelines balanced in every layer, over a cache by recent scores."""

    name: ClassVar[str] = "hybrimoe"
    summary: ClassVar[str] = "GPU, CPU and link balanced in every layer by simulation; cache by recent scores"
    source: ClassVar[str] = "arXiv 2504.05897"

    slots: int | None = option(None, "experts of each layer cached; auto: as many as fit", low=0, high=EXPERTS)
    warm: Literal["prompt", "empty"] = option(
        "prompt", "the cache starts with what the prompt used most, or as it was before the prompt"
    )
    admit: Literal["auto", "all", "none"] = option(
        "auto", "misses that enter the cache; auto: all if that costs nothing"
    )
    predict: Literal["none", "gate"] = option("none", "what is copied ahead for the next layer")
    accuracy: float = option(0.9, "with predict=gate: chance that a predicted expert is right", low=0, high=1)
    seed: int = option(0, "with predict=gate: seed of the wrong predictions", low=0, high=2**32 - 1)
    prefill: Literal["hybrid", "cpu", "fetch"] = option("hybrid", "prefill by simulation, on the CPU, or after copies")

    @property
    def plan_keys(self) -> tuple[str, ...]:
        return COST_KEYS

    def _slots(self, model: MoEModel, most: float) -> int:
        return self._a_layer(model, most, "slots")

    def residency(self, model: MoEModel, most_gpu_experts: float, losses: LossTable | None = None) -> Residency:
        slots = self._slots(model, most_gpu_experts)
        kept = self._keeps(model, slots * len(model.moe_layers))
        # Copies go into the slots, so only a cache of none needs room beside them.
        return kept if slots else kept._replace(gpu_buffer_bytes=model.expert_bytes(self._bits(model)))

    def plan(self, inputs: PlanInputs) -> Plan:
        need_cpu(self, inputs.system)
        model, bits = inputs.model, self._bits(inputs.model)
        slots = self._slots(model, inputs.most_gpu_experts)
        decide = self._table(inputs)
        admits = self.admit == "all" or (
            self.admit == "auto" and decide.copy_s <= decide.seconds[model.top_k - 1, min(1, model.top_k)]
        )
        table = ClassTable()
        before = self._before(inputs, slots)
        prefill = self._prefill(inputs, before, table)
        start = self._start(inputs, before, prefill, table, slots)
        found = self._replay(inputs, slots, start, admits=admits)
        picks, copies, copied = self._work(inputs, found, decide, table)
        kept: dict[str, Any] = self.residency(model, inputs.most_gpu_experts)._asdict()
        asked = max(1, int(inputs.replay.assigned.sum()))
        hits = int((found.outcome == HIT_HIGH).sum())
        return make_plan(
            self,
            inputs,
            table,
            picks,
            prefill,
            overlap="max",
            copies=copies,
            fetch="pipelined",
            round_trips="layer",
            # A copy of fewer bits counts as that part of one.
            migrated_experts=start.moved * (bits / float(model.expert_bits)),
            **kept,
            notes=(
                f"{slots} of {model.num_experts} experts a layer cached at {bits:g} bits: {100 * hits / asked:.1f} % of"
                f" picks hit, {100 * copied / asked:.1f} % are copied, the others run on the CPU",
                *self._batch_note(inputs),
                f"{'every miss enters' if admits else 'no miss enters'} the cache (admit={self.admit})",
                *(
                    ("the trace has no routing weights: earlier picks count as the better-weighted ones",)
                    if inputs.replay.trace.topk_weights is None
                    else ()
                ),
            ),
        )

    def _table(self, inputs: PlanInputs) -> _Table:
        """Simulate a layer of one-token experts for all numbers of hits and misses."""
        k = inputs.model.top_k
        costs = expert_costs(inputs.model, inputs.system, np.arange(2.0), self._bits(inputs.model))
        hits, misses = np.divmod(np.arange((k + 1) ** 2), k + 1)
        place = np.arange(2 * k)
        tokens = (place < (hits + misses)[:, None]).astype(np.int32)
        split, seconds = hybrid_split(tokens, place < hits[:, None], costs.gpu_s, costs.cpu_s, costs.copy_s)
        copied = (split == Executor.FETCH).sum(axis=1).astype(np.int64)
        return _Table(copied.reshape(k + 1, k + 1), seconds.reshape(k + 1, k + 1), costs.copy_s)

    def _before(self, inputs: PlanInputs, slots: int) -> NDArray[np.bool_]:
        """What is resident while the prompt runs [S, L, E]."""
        trace = inputs.replay.trace
        nobody = not inputs.replay.outside.any()
        if slots == inputs.model.num_experts or nobody or slots == 0:
            shape = (trace.num_sequences, trace.num_layers, trace.num_experts)
            return np.full(shape, slots == inputs.model.num_experts)
        return statistics.top_experts(self.use_of_others(inputs).counts, slots)

    def _batch_note(self, inputs: PlanInputs) -> tuple[str, ...]:
        """That a batch starts without what is known of others."""
        replay = inputs.replay
        if replay.groups is None or replay.outside.any():
            return ()
        return (f"{no_others_text(replay)}, so no expert is on the GPU before its prompts",)

    def _prefill(self, inputs: PlanInputs, before: NDArray[np.bool_], table: ClassTable) -> Prefill:
        bits, tokens = self._bits(inputs.model), prefill_counts(inputs)
        if self.prefill != "hybrid" or tokens is None:
            mode: Literal["cpu", "fetch"] = "fetch" if self.prefill == "fetch" else "cpu"
            return host_prefill(inputs, table, mode, bits=bits, hot=before)
        flat = np.ascontiguousarray(tokens.reshape(-1, tokens.shape[-1]), np.int32)
        costs = expert_costs(inputs.model, inputs.system, np.arange(flat.max(initial=1) + 1.0), bits)
        split, _ = hybrid_split(flat, before.reshape(flat.shape), costs.gpu_s, costs.cpu_s, costs.copy_s)
        return split_prefill(tokens, split.reshape(tokens.shape), table, bits)

    def _start(
        self, inputs: PlanInputs, before: NDArray[np.bool_], prefill: Prefill, table: ClassTable, slots: int
    ) -> _Start:
        """What the cache holds before the first decode step."""
        if self.warm == "empty" or prefill.classes is None or prefill.tokens is None:
            order = np.argsort(~before, axis=-1, kind="stable")
            there = np.take_along_axis(before, order, axis=-1)
            return _Start(np.where(there, order, NO_EXPERT).astype(np.uint16), np.zeros(len(before)))
        order = statistics.ranked_experts(prefill.tokens)
        wanted = np.zeros_like(before)
        np.put_along_axis(wanted, order[..., :slots], True, axis=-1)
        fetch = [number for number, work in enumerate(table.classes()) if work.executor == Executor.FETCH]
        there = before | (np.isin(prefill.classes, fetch) & (prefill.tokens > 0))
        moved = (wanted & ~there).sum(axis=(1, 2)).astype(np.float64)
        return _Start(order.astype(np.uint16), moved)

    def _replay(self, inputs: PlanInputs, slots: int, start: _Start, *, admits: bool) -> CacheReplay:
        replay = inputs.replay
        more: dict[str, Any] = {}
        if not admits:
            more["wanted"] = np.full(replay.decode_ids.shape, NOTHING, np.uint8)
        if self.predict == "gate":
            more["predicted"] = prediction.gate_prediction(replay, self.accuracy, self.seed)
        return replay_cache(
            replay.decode_ids,
            replay.decode_offsets,
            inputs.model.num_experts,
            ExpertCache(slots, "recent-score"),
            initial=start.order,
            scores=replay.decode_weights,
            batch=replay.batch.tokens,
            **more,
        )

    def _copied(
        self, inputs: PlanInputs, there: NDArray[np.bool_], missed: NDArray[np.bool_], decide: _Table
    ) -> NDArray[np.bool_]:
        """Which misses are copied [T, L, k], from which picks find their expert ``there`` and which do not."""
        replay = inputs.replay
        if replay.batch.tokens == 1:
            wanted = decide.copied[there.sum(axis=2), missed.sum(axis=2)]
            ids = np.where(missed, replay.decode_ids.astype(np.int64), -1)
            above = (ids[..., None, :] > ids[..., :, None]).sum(axis=-1)
            return np.asarray(missed & (above < wanted[..., None]))
        tokens = tokens_of_steps(replay)
        resident = np.zeros(tokens.shape, np.bool_)
        token, layer, pick = np.nonzero(there)
        resident[token // replay.batch.tokens, layer, replay.decode_ids[token, layer, pick]] = True
        costs = expert_costs(
            inputs.model, inputs.system, np.arange(replay.batch.tokens + 1.0), self._bits(inputs.model)
        )
        flat = (-1, tokens.shape[-1])
        split, _ = hybrid_split(tokens.reshape(flat), resident.reshape(flat), costs.gpu_s, costs.cpu_s, costs.copy_s)
        where = of_picks(split.reshape(tokens.shape), replay, Executor.SKIP)
        return np.asarray(missed & (where == Executor.FETCH))

    def _work(
        self, inputs: PlanInputs, found: CacheReplay, decide: _Table, table: ClassTable
    ) -> tuple[NDArray[np.uint8], NDArray[np.uint8] | None, int]:
        """Class of every pick, of copies that no pick waits for, and how many misses are copied."""
        bits, assigned = self._bits(inputs.model), inputs.replay.assigned
        ahead = found.outcome == AHEAD_HIGH
        hit = found.outcome == HIT_HIGH
        missed = assigned & ~hit & ~ahead
        copied = self._copied(inputs, hit | ahead, missed, decide)
        works = (
            (hit, WorkClass(Executor.GPU, bits)),
            (ahead, WorkClass(Executor.FETCH, bits, when=When.AHEAD)),
            (copied, WorkClass(Executor.FETCH, bits)),
            (missed & ~copied, WorkClass(Executor.CPU, bits)),
            (~assigned, WorkClass(Executor.SKIP, bits)),
        )
        picks = np.zeros(assigned.shape, np.uint8)
        for where, work in works:
            if where.any():
                picks[where] = table.number(work)
        uploaded = (missed & ~copied & found.kept & (found.outcome != NOT_RUN)).sum(axis=2)
        columns = [
            (found.wasted_high, WorkClass(Executor.COPY, bits, when=When.AHEAD)),
            (uploaded, WorkClass(Executor.COPY, bits, when=When.BEHIND)),
        ]
        return picks, extra_copies(columns, table, bits), int(copied.sum())
