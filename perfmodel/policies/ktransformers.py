"""KTransformers: the CPU runs routed experts, the GPU everything else; some experts are deferred.

Source: KTransformers, SOSP 2025. Rules, and the readings taken where they are not published in full:

- The CPU runs the routed experts, with matrix units where a prompt gives an expert many tokens and vector units where
  it has few: the cost model of the CPU takes the faster. ``gpu_experts`` hot experts a layer may be on the GPU, chosen
  by the decode steps of the other sequences; by default none. A prompt runs where its experts are; nothing is copied
  unless ``prefill`` says so.
- ``deferral`` experts of a layer run beside the attention of the next layer instead of holding it up. Reading: of a
  token's picks that run on the CPU, those with the smallest routing weight; at least one pick of a layer is never
  deferred, and none of the last layer is. How many is best is set by hand; up to 1.45x faster was published. That
  results arrive one layer late changes what the network computes; no loss is counted for it.
- One CUDA graph holds the whole decode step, so the host is never waited for. ``round_trips=cpu`` charges one for every
  layer with work on the CPU, as without a graph.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from perfmodel.bitwidth import LossTable
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
    require,
)
from perfmodel.policies.costs import COST_KEYS, need_cpu
from perfmodel.policies.host import HostPrefill, host_prefill
from perfmodel.policies.hosted import HostedExperts
from perfmodel.routing import statistics


@dataclass(frozen=True)
class KTransformers(HostedExperts):
    """Routed experts on the CPU beside the GPU, with deferral."""

    name: ClassVar[str] = "ktransformers"
    summary: ClassVar[str] = "routed experts on the CPU, some deferred beside the next layer's attention"
    source: ClassVar[str] = "KTransformers, SOSP 2025"

    deferral: int = option(0, "experts of a layer that run beside the next layer's attention", "0 to k - 1", low=0)
    gpu_experts: int | None = option(
        0, "hot experts a layer on the GPU; auto: as many as fit", "0 to E | auto", low=0, high=EXPERTS
    )
    prefill: HostPrefill = option("cpu", "where the prefill runs experts of host memory")
    round_trips: Literal["none", "cpu"] = option("none", "host round trips: none, or in layers with CPU work")

    @property
    def copies_experts(self) -> bool:
        return self.prefill != "cpu"

    @property
    def plan_keys(self) -> tuple[str, ...]:
        return COST_KEYS if self.prefill in ("each", "faster") else super().plan_keys

    def at_capacity(self, model: MoEModel, most_gpu_experts: float) -> "KTransformers":
        return dataclasses.replace(self, gpu_experts=None)

    def _count(self, model: MoEModel, most: float) -> int:
        return self._a_layer(model, most, "gpu_experts")

    def residency(self, model: MoEModel, most_gpu_experts: float, losses: LossTable | None = None) -> Residency:
        require(self, "deferral", self.deferral < model.top_k, f"0 to {model.top_k - 1} for {model.name}")
        return self._keeps(model, self._count(model, most_gpu_experts) * len(model.moe_layers))

    def plan(self, inputs: PlanInputs) -> Plan:
        need_cpu(self, inputs.system)
        model, bits, trace = inputs.model, self._bits(inputs.model), inputs.replay.trace
        kept: dict[str, Any] = self.residency(model, inputs.most_gpu_experts)._asdict()
        count = self._count(model, inputs.most_gpu_experts)
        notes: tuple[str, ...] = ()
        hot = np.zeros((trace.num_sequences, len(model.moe_layers), model.num_experts), np.bool_)
        if count:
            use = self.use_of_others(inputs)
            hot, notes = statistics.top_experts(use.counts, count), use.notes
        table = ClassTable()
        picks = self.pick_classes(inputs, hot, table)
        late = self._deferred(inputs, picks, table)
        if late.any():
            picks[late] = table.number(WorkClass(Executor.CPU, bits, when=When.BEHIND))
        return make_plan(
            self,
            inputs,
            table,
            picks,
            host_prefill(inputs, table, self.prefill, bits=bits, hot=hot),
            overlap="max",
            round_trips=self.round_trips,
            pinned_experts=float(model.num_experts - count),
            **kept,
            notes=(
                self.placed_note(inputs, hot),
                *notes,
                f"{late.sum() / max(1, late.shape[0] * late.shape[1]):.2f} experts a layer deferred beside the next"
                " layer's attention",
            ),
        )

    def _deferred(self, inputs: PlanInputs, picks: NDArray[np.uint8], table: ClassTable) -> NDArray[np.bool_]:
        """Picks that run beside the next layer's attention [T, L, k]."""
        on_cpu = np.array([work.executor == Executor.CPU for work in table.classes()])[picks]
        if self.deferral == 0:
            return np.zeros_like(on_cpu)
        rank = inputs.replay.weight_rank.astype(np.int64)
        lighter = (on_cpu[..., None, :] & (rank[..., None, :] > rank[..., :, None])).sum(axis=-1)
        # The best pick has none that is heavier, so it is never among the deferred.
        late = on_cpu & (lighter < self.deferral) & (rank > 0)
        late[:, -1] = False
        return np.asarray(late)
