"""Experts cached on the GPU, the others copied when they are asked for or run on the CPU: what cache policies share."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from perfmodel.bitwidth import LossTable
from perfmodel.caches import (
    AHEAD_HIGH,
    AHEAD_LOW,
    HIT_HIGH,
    HIT_LOW,
    MISS_HIGH,
    MISS_LOW,
    NOT_RUN,
    CacheReplay,
    ExpertCache,
    Scope,
    replay_cache,
)
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
    require_experts,
)
from perfmodel.policies.costs import COST_KEYS, need_cpu
from perfmodel.policies.host import HostPrefill, by_falling_use, host_prefill, prefill_copies
from perfmodel.routing import statistics

Misses = Literal["fetch", "cpu"]
Warm = Literal["prompt", "filled", "empty"]


@dataclass(frozen=True)
class CachedExperts(Policy):
    """What cache policies share: experts in slots on the GPU, and all of them in host memory.

    A policy of this kind says by `_cache` which cache it has, by `_requests` what its picks want and what it predicts,
    and by the options below the rest.
    """

    slots: int | None = option(
        None, "experts of each layer that the cache holds; auto: as many as fit", low=0, high=EXPERTS
    )
    bits: float | None = option(None, "stored bits of every expert; auto: the model's", low=1, high=32)
    scope: Scope = option("layer", "slots of each layer, or of all layers together")
    warm: Warm = option(
        "prompt",
        "the cache starts with what the prompt used most of what its prefill copied; filled up, by the prompt's use,"
        " with copies of its own; or empty",
    )
    fetch: Fetch = option("pipelined", "copies all before the layer computes, or each expert when its copy is there")
    prefill: HostPrefill = option("fetch", "where the prefill runs experts")

    needs_ndp: ClassVar[bool] = False
    #: What becomes of copies ahead that turn out wrong, as the report says it.
    wrong_copies: ClassVar[str] = "are not aborted"

    @property
    def where_missing(self) -> Misses:
        """Where picks run that miss."""
        return "fetch"

    @property
    def uploads(self) -> bool:
        """Whether an expert that missed and ran on the CPU is then copied into the cache behind its layer."""
        return True

    @property
    def plan_keys(self) -> tuple[str, ...]:
        return COST_KEYS if self.prefill in ("each", "faster") else super().plan_keys

    def _bits(self, model: MoEModel) -> float:
        return float(model.expert_bits) if self.bits is None else min(self.bits, float(model.expert_bits))

    def _slots(self, model: MoEModel, most: float) -> int:
        """Slots a layer, resolved against the model and the most experts that fit the GPU at the stored precision."""
        if self.slots is None:
            return max(0, min(model.num_experts, int(most * model.expert_bits / self._bits(model))))
        require_experts(self, model, "slots")
        return self.slots

    def residency(self, model: MoEModel, most_gpu_experts: float, losses: LossTable | None = None) -> Residency:
        slots, bits, full = self._slots(model, most_gpu_experts), self._bits(model), float(model.expert_bits)
        staging = model.expert_bytes(bits) if slots == 0 and self.where_missing == "fetch" else 0.0
        if bits == full:
            return Residency(float(slots), staging, ())
        held = slots * len(model.moe_layers) * model.expert_bytes(bits)
        return Residency(0.0, held + staging, (bits,), behind="replicas")

    def _cache(self, model: MoEModel, slots: int) -> ExpertCache:
        """The cache, with its capacity in experts."""
        capacity = slots * len(model.moe_layers) if self.scope == "global" else slots
        return ExpertCache(capacity, scope=self.scope)

    def _requests(self, inputs: PlanInputs) -> dict[str, Any]:
        """What the picks want and what is predicted: further arguments of `replay_cache`."""
        return {}

    def _initial(self, inputs: PlanInputs) -> NDArray[np.uint16] | None:
        """Experts of every sequence and layer by falling importance before the first decode step [S, L, E].

        Of what the prefill did not copy there is NO_EXPERT, unless the cache is filled up.
        """
        copied = prefill_copies(inputs, self.prefill, bits=self._bits(inputs.model))
        if self.warm == "empty" or copied is None:
            return None
        counts = statistics.selection_counts(inputs.replay.trace, "prefill")
        if self.warm == "filled":
            return statistics.ranked_experts(counts).astype(np.uint16)
        return by_falling_use(np.where(copied, counts, 0))

    def _moved(self, inputs: PlanInputs, slots: int) -> NDArray[np.float64]:
        """Copies that fill the cache up before the first decode step, as experts at the stored precision [S]."""
        model, copied = inputs.model, prefill_copies(inputs, self.prefill, bits=self._bits(inputs.model))
        if self.warm != "filled" or copied is None:
            return np.zeros(inputs.replay.trace.num_sequences)
        counts = statistics.selection_counts(inputs.replay.trace, "prefill")
        there = np.take_along_axis(copied, statistics.ranked_experts(counts)[..., :slots], axis=-1)
        # A copy of fewer bits counts as that part of one.
        return np.asarray((~there).sum(axis=(1, 2)) * (self._bits(model) / float(model.expert_bits)))

    def replay(self, inputs: PlanInputs, slots: int) -> CacheReplay:
        """Which picks find their expert, with so many slots a layer."""
        return replay_cache(
            inputs.replay.decode_ids,
            inputs.replay.decode_offsets,
            inputs.model.num_experts,
            self._cache(inputs.model, slots),
            initial=self._initial(inputs),
            batch=inputs.replay.batch.tokens,
            **self._requests(inputs),
        )

    def plan(self, inputs: PlanInputs) -> Plan:
        model = inputs.model
        if self.where_missing == "cpu" or self.prefill != "fetch":
            need_cpu(self, inputs.system)
        slots, bits = self._slots(model, inputs.most_gpu_experts), self._bits(model)
        kept = self.residency(model, inputs.most_gpu_experts)
        found = self.replay(inputs, slots)
        table = ClassTable()
        picks, copies = self._work(inputs, found, bits, table)
        prefill = host_prefill(inputs, table, self.prefill, bits=bits)
        return make_plan(
            self,
            inputs,
            table,
            picks,
            prefill,
            overlap="max",
            copies=copies,
            fetch=self.fetch,
            round_trips="layer",
            migrated_experts=self._moved(inputs, slots),
            **kept._asdict(),
            notes=self._notes(inputs, found, slots, bits),
        )

    def _low_bits(self, bits: float) -> float:
        """Bits of what is copied at low precision; only for policies whose picks want that."""
        return bits

    def _wrong_bits(self, bits: float) -> float:
        """Bits a weight that a wrong copy of so many moves."""
        return bits

    def _work(
        self, inputs: PlanInputs, found: CacheReplay, bits: float, table: ClassTable
    ) -> tuple[NDArray[np.uint8], NDArray[np.uint8] | None]:
        """Class of every pick, and of the copies that no pick waits for."""
        low = self._low_bits(bits)
        missed = Executor.FETCH if self.where_missing == "fetch" else Executor.CPU
        works = {
            HIT_HIGH: WorkClass(Executor.GPU, bits),
            HIT_LOW: WorkClass(Executor.GPU, low),
            AHEAD_HIGH: WorkClass(Executor.FETCH, bits, when=When.AHEAD),
            AHEAD_LOW: WorkClass(Executor.FETCH, low, when=When.AHEAD),
            MISS_HIGH: WorkClass(missed, bits),
            MISS_LOW: WorkClass(missed, low),
            NOT_RUN: WorkClass(Executor.SKIP, bits),
        }
        numbers = np.zeros(len(works), np.uint8)
        for code, work in works.items():
            if (found.outcome == code).any():
                numbers[code] = table.number(work)
        columns = []
        for wrong, width in ((found.wasted_high, bits), (found.wasted_low, low)):
            columns.append((wrong, WorkClass(Executor.COPY, self._wrong_bits(width), when=When.AHEAD)))
        if missed == Executor.CPU and self.uploads:
            for code, width in ((MISS_HIGH, bits), (MISS_LOW, low)):
                uploaded = ((found.outcome == code) & found.kept).sum(axis=2)
                columns.append((uploaded, WorkClass(Executor.COPY, width, when=When.BEHIND)))
        return numbers[found.outcome], extra_copies(columns, table, bits)

    def _notes(self, inputs: PlanInputs, found: CacheReplay, slots: int, bits: float) -> tuple[str, ...]:
        model = inputs.model
        ran = max(1, int((found.outcome != NOT_RUN).sum()))
        ahead = int(((found.outcome == AHEAD_HIGH) | (found.outcome == AHEAD_LOW)).sum())
        where = "copied and run on the GPU" if self.where_missing == "fetch" else "run on the CPU"
        notes = [
            f"{slots} of {model.num_experts} experts a layer cached at {bits:g} bits"
            f"{', all layers together' if self.scope == 'global' else ''}: {100 * found.hit_rate:.1f} % of picks hit,"
            f" the others are {where}"
        ]
        if self.warm != "empty" and not inputs.replay.trace.has_prefill:
            notes.append("the trace holds no prefill, so the cache starts empty")
        wrong = int(found.wasted_high.sum(dtype=np.int64) + found.wasted_low.sum(dtype=np.int64))
        if ahead or wrong:
            notes.append(
                f"{100 * ahead / ran:.1f} % of picks were copied a layer ahead; {wrong / max(1, ahead + wrong):.3f} of"
                f" these copies were not needed and {self.wrong_copies}"
            )
        return tuple(notes)


def extra_copies(
    columns: list[tuple[NDArray[Any], WorkClass]], table: ClassTable, bits: float
) -> NDArray[np.uint8] | None:
    """Copies that no pick runs as classes [T, L, W], from how many there are of each kind [T, L]; None without any."""
    present = [(number.astype(np.int64), work) for number, work in columns if number.any()]
    if not present:
        return None
    total = sum(number for number, _ in present)
    nothing = table.number(WorkClass(Executor.SKIP, bits))
    copies = np.full((*present[0][0].shape, int(np.max(total))), nothing, np.uint8)
    place = np.arange(copies.shape[2])
    start = np.zeros_like(present[0][0])
    for number, work in present:
        stop = start + number
        copies[(place >= start[..., None]) & (place < stop[..., None])] = table.number(work)
        start = stop
    return copies
