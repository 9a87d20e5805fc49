"""MoNDE: full-precision experts, some copied to the GPU on demand, the others computed near memory.

Source: arXiv 2405.18832, and arXiv 2512.04476, which runs it as a baseline on its own hardware and calls it
on-demand and context-agnostic. How many experts a decode step copies is not published; the readings:

- ``one`` (default): in every layer and step the pick with the largest routing weight is copied to the GPU, where
  nothing is resident; the others run near memory at the same time. This is the only reading that comes near the
  published absolute rate. With ``resident=N`` the GPU keeps the last N experts it copied for the layer, and copies
  only on a miss.
- ``balance``: MoNDE's own rule, ``H = n B_link / (B_link + B_NDP)`` of the layer's n experts go to the GPU. At one
  token and two picks it usually rounds to zero.
- ``all-ndp``: nothing is copied.

Every token counts one for an expert, so at batch 1 the experts with most tokens are those with the largest weight.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from perfmodel.bitwidth import LossTable
from perfmodel.caches import HIT_HIGH, NO_EXPERT, ExpertCache, replay_cache
from perfmodel.model import MoEModel
from perfmodel.policies.base import (
    EXPERTS,
    SPLIT_KEYS,
    ClassTable,
    Executor,
    Plan,
    PlanInputs,
    Policy,
    PrefillMode,
    Residency,
    Rounding,
    WorkClass,
    make_plan,
    need_ndp,
    option,
    plan_prefill,
    require,
    require_experts,
    split_count,
)
from perfmodel.routing import Replay

Reading = Literal["one", "balance", "all-ndp"]


@dataclass(frozen=True)
class Monde(Policy):
    """Near-data processing with on-demand copies of full-precision experts."""

    name: ClassVar[str] = "monde"
    summary: ClassVar[str] = "full-precision experts near memory, some copied to the GPU on demand"
    source: ClassVar[str] = "arXiv 2405.18832; readings argued from arXiv 2512.04476"

    reading: Reading = option("one", "how many of a layer's picks are copied to the GPU in a decode step")
    resident: int = option(
        0, "with reading=one: experts a layer that stay on the GPU after a copy (LRU)", low=0, high=EXPERTS
    )
    rounding: Rounding = option("nearest", "with reading=balance: how the split becomes a whole number")
    prefill: PrefillMode = option("ndp", "where the prefill runs its experts")

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "resident", self.resident == 0 or self.reading == "one", "0 unless reading=one")

    @property
    def plan_keys(self) -> tuple[str, ...]:
        splits = self.reading == "balance" or self.prefill == "balanced"
        return (*super().plan_keys, *SPLIT_KEYS) if splits else super().plan_keys

    def _copied(self, inputs: PlanInputs, assigned: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Which picks go to the GPU [T, L, k]: the H with the largest weight, ties to the earlier pick."""
        if self.reading == "all-ndp":
            return np.zeros_like(assigned)
        rank = inputs.replay.weight_rank
        if self.reading == "one":
            return np.asarray(rank == 0)
        wanted = split_count(assigned.sum(axis=-1, keepdims=True), inputs.system, self.rounding)
        return np.asarray(assigned & (rank < wanted))

    def _hits(
        self, ids: NDArray[Any], copied: NDArray[np.bool_], replay: Replay, num_experts: int
    ) -> NDArray[np.bool_]:
        """Which copied picks are still on the GPU from an earlier step of the same sequence [T, L, k]."""
        if self.resident == 0:
            return np.zeros_like(copied)
        asked = np.where(copied, ids, NO_EXPERT).astype(np.uint16)
        cache = ExpertCache(self.resident, protected=False)
        found = replay_cache(asked, replay.decode_offsets, num_experts, cache, batch=replay.batch.tokens)
        return np.asarray(found.outcome == HIT_HIGH)

    def residency(self, model: MoEModel, most_gpu_experts: float, losses: LossTable | None = None) -> Residency:
        require_experts(self, model, "resident")
        copies = self.reading != "all-ndp" and not self.resident
        return Residency(float(self.resident), model.expert_bytes(float(model.expert_bits)) if copies else 0.0, ())

    def plan(self, inputs: PlanInputs) -> Plan:
        need_ndp(self, inputs.system)
        model, trace = inputs.model, inputs.replay.trace
        kept = self.residency(model, inputs.most_gpu_experts)
        full = float(model.expert_bits)
        ids, assigned = inputs.replay.decode_ids, inputs.replay.assigned
        copied = self._copied(inputs, assigned)
        hits = self._hits(ids, copied, inputs.replay, model.num_experts)
        table = ClassTable()
        picks = np.full(ids.shape, table.number(WorkClass(Executor.NDP, full)), np.uint8)
        num_copied, num_hits = int(np.count_nonzero(copied)), int(np.count_nonzero(hits))
        if num_copied:
            np.copyto(picks, table.number(WorkClass(Executor.FETCH, full)), where=copied)
        if num_hits:
            np.copyto(picks, table.number(WorkClass(Executor.GPU, full)), where=hits)
        if not inputs.replay.all_assigned:
            np.copyto(picks, table.number(WorkClass(Executor.SKIP, full)), where=~assigned)
        prefill = plan_prefill(inputs, self.prefill, table)
        if not num_copied:
            kept = kept._replace(gpu_buffer_bytes=0.0)
        reading = f"reading={self.reading}" + (f", resident={self.resident}" if self.resident else "")
        return make_plan(
            self,
            inputs,
            table,
            picks,
            prefill,
            overlap="max",
            **kept._asdict(),
            notes=(
                f"MoNDE {reading}: {num_copied / max(1, ids.shape[0] * ids.shape[1]):.3f} picks a layer and token go"
                f" to the GPU, {1 - num_hits / max(1, num_copied):.3f} of them after a copy; both sides overlap",
                f"prefill experts: {self.prefill}",
                *(
                    ("the trace has no routing weights: the first listed pick counts as the better-weighted one",)
                    if trace.topk_weights is None
                    else ()
                ),
            ),
        )
