"""Pre-gated MoE: the router of a block picks the experts of the next one, so that copies ahead are exact.

Source: arXiv 2308.12066. The network is trained anew so that block N routes for block N + 1. All experts of a block but
the first are copied while the block before runs; the first block's are copied on demand. The peak memory is all but the
experts, and the active experts of two blocks.

- The trace is taken for what the retrained routers would pick: what they change is not published.
- Two blocks of top-k experts are buffers, unless all experts are resident. A prefill streams through them, every
  selected expert once, and is not overlapped from layer to layer.
- The main design keeps no expert (``slots=0``); the authors also add a cache of some experts, which is ``slots`` of
  every layer by ``rule``.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from perfmodel.bitwidth import LossTable
from perfmodel.caches import ExpertCache
from perfmodel.model import MoEModel
from perfmodel.policies.base import EXPERTS, PlanInputs, Residency, option
from perfmodel.policies.cached import CachedExperts


@dataclass(frozen=True)
class PreGated(CachedExperts):
    """Exact copies one block ahead."""

    name: ClassVar[str] = "pregated"
    summary: ClassVar[str] = "the router of a block picks the next one's experts, so every copy is right and ahead"
    source: ClassVar[str] = "arXiv 2308.12066"

    slots: int | None = option(
        0, "experts of each layer that a cache holds beside; auto: as many as fit", "0 to E | auto", low=0, high=EXPERTS
    )
    rule: Literal["lru", "lfu"] = option("lru", "which expert the cache evicts")

    def _slots(self, model: MoEModel, most: float) -> int:
        if self.slots is not None:
            return super()._slots(model, most)
        experts, layers = model.num_experts, len(model.moe_layers)
        if most >= experts:
            return experts
        room = most * layers * model.expert_bytes() - self._active_bytes(model)
        return max(0, min(experts, int(room / (layers * model.expert_bytes(self._bits(model))))))

    def _active_bytes(self, model: MoEModel) -> float:
        """Active experts of two blocks [byte]."""
        return 2 * model.top_k * model.expert_bytes(self._bits(model))

    def residency(self, model: MoEModel, most_gpu_experts: float, losses: LossTable | None = None) -> Residency:
        kept = super().residency(model, most_gpu_experts, losses)
        slots = self._slots(model, most_gpu_experts)
        if slots == model.num_experts:
            return kept
        # The two blocks stand in for the buffer of a single expert that goes with an empty cache.
        single = 0.0 if slots else model.expert_bytes(self._bits(model))
        return kept._replace(gpu_buffer_bytes=kept.gpu_buffer_bytes - single + self._active_bytes(model))

    def at_capacity(self, model: MoEModel, most_gpu_experts: float) -> "PreGated":
        return dataclasses.replace(self, slots=None)

    def _cache(self, model: MoEModel, slots: int) -> ExpertCache:
        capacity = slots * len(model.moe_layers) if self.scope == "global" else slots
        return ExpertCache(capacity, self.rule, self.scope)

    def _requests(self, inputs: PlanInputs) -> dict[str, Any]:
        from perfmodel.routing import prediction

        return {"predicted": prediction.oracle_prediction(inputs.replay)}
