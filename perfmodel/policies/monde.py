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

from perfmodel.kernels.cache import lru_hits
from perfmodel.kernels.picks import weight_rank
from perfmodel.policies.base import (
    ClassTable,
    Executor,
    Plan,
    PlanInputs,
    Policy,
    PrefillMode,
    Rounding,
    WorkClass,
    decode_ids,
    decode_weights,
    make_plan,
    need_ndp,
    option,
    plan_prefill,
    require,
    split_count,
)

Reading = Literal["one", "balance", "all-ndp"]


@dataclass(frozen=True)
class Monde(Policy):
    """Near-data processing with on-demand copies of full-precision experts."""

    name: ClassVar[str] = "monde"
    summary: ClassVar[str] = "full-precision experts near memory, some copied to the GPU on demand"
    source: ClassVar[str] = "arXiv 2405.18832; readings argued from arXiv 2512.04476"

    reading: Reading = option("one", "how many of a layer's picks are copied to the GPU in a decode step")
    resident: int = option(0, "with reading=one: experts a layer that stay on the GPU after a copy (LRU)", "0 to E")
    rounding: Rounding = option("nearest", "with reading=balance: how the split becomes a whole number")
    prefill: PrefillMode = option("ndp", "where the prefill runs its experts")

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "resident", self.resident >= 0, "0 or more")
        require(self, "resident", self.resident == 0 or self.reading == "one", "0 unless reading=one")

    @property
    def hardware_dependent(self) -> bool:
        return self.reading == "balance" or self.prefill == "balanced"

    def _copied(self, inputs: PlanInputs, assigned: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Which picks go to the GPU [T, L, k]: the H with the largest weight, ties to the earlier pick."""
        if self.reading == "all-ndp":
            return np.zeros_like(assigned)
        rank = weight_rank(decode_weights(inputs), np.ascontiguousarray(assigned))
        active = assigned.sum(axis=-1, keepdims=True)
        wanted = np.minimum(active, 1) if self.reading == "one" else split_count(active, inputs.system, self.rounding)
        return np.asarray(assigned & (rank < wanted))

    def _hits(
        self, ids: NDArray[Any], copied: NDArray[np.bool_], offsets: NDArray[np.int64], num_experts: int
    ) -> NDArray[np.bool_]:
        """Which copied picks are still on the GPU from an earlier step of the same sequence [T, L, k]."""
        if self.resident == 0:
            return np.zeros_like(copied)
        return np.asarray(lru_hits(ids, copied, offsets, num_experts, self.resident))

    def plan(self, inputs: PlanInputs) -> Plan:
        need_ndp(self, inputs.system)
        model, trace = inputs.model, inputs.replay.trace
        require(self, "resident", self.resident <= model.num_experts, f"0 to {model.num_experts} for {model.name}")
        full = float(model.expert_bits)
        ids, assigned, _, offsets = decode_ids(inputs)
        copied = self._copied(inputs, assigned)
        hits = self._hits(ids, copied, offsets, model.num_experts)
        table = ClassTable()
        picks = np.full(ids.shape, table.number(WorkClass(Executor.NDP, full)), np.uint8)
        if copied.any():
            picks[copied] = table.number(WorkClass(Executor.FETCH, full))
        if hits.any():
            picks[hits] = table.number(WorkClass(Executor.GPU, full))
        if not assigned.all():
            picks[~assigned] = table.number(WorkClass(Executor.SKIP, full))
        prefill = plan_prefill(inputs, self.prefill, table)
        staging = 0.0 if self.resident or not copied.any() else model.expert_bytes(full)
        reading = f"reading={self.reading}" + (f", resident={self.resident}" if self.resident else "")
        return make_plan(
            self,
            inputs,
            table,
            picks,
            prefill,
            overlap="max",
            gpu_experts=float(self.resident),
            gpu_buffer_bytes=staging,
            replica_bits=(),
            notes=(
                f"MoNDE {reading}: {copied.sum() / max(1, ids.shape[0] * ids.shape[1]):.3f} picks a layer and token go"
                f" to the GPU, {1 - hits.sum() / max(1, copied.sum()):.3f} of them after a copy; both sides overlap",
                f"prefill experts: {self.prefill}",
                *(
                    ("the trace has no routing weights: the first listed pick counts as the better-weighted one",)
                    if trace.topk_weights is None
                    else ()
                ),
            ),
        )
