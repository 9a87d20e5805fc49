"""FluxMoE: a window of two layers slides over the experts of the model, and residency follows the load.

The experts of the next layer are brought into the window while this one computes, all of them, from several places at
once that share the load in proportion to their rates. How many stay resident follows the ratio of computing to loading
of a layer: above 1 there is time to spare, and fewer stay (the memory goes to the KV cache); below 0.9 more stay. Here
the places are GPU memory, which is what resident means, and host memory behind the link.

The published controller adapts while it runs; with one sequence its ratio hardly changes, so the plan takes the count
at which it comes to rest: the fewest residents with a ratio of at least 0.9, or as many as fit where none has.
Computing is that of one token with none of its experts resident. `residency` knows no rates and gives the most that
may stay. Source: arXiv 2604.02715, read from a summary.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from perfmodel.policies.base import PlanInputs
from perfmodel.policies.costs import COST_KEYS, expert_costs
from perfmodel.policies.streamed import StreamedExperts
from perfmodel.routing.batches import tokens_of_steps

#: Below this ratio of computing to loading more experts stay on the GPU.
_LEAST_RATIO = 0.9


@dataclass(frozen=True)
class FluxMoE(StreamedExperts):
    """A sliding window over all experts, with residency by load."""

    name: ClassVar[str] = "fluxmoe"
    summary: ClassVar[str] = "all experts pass a window of two layers; residency by computing over loading"
    source: ClassVar[str] = "arXiv 2604.02715, from a summary; one sequence instead of its large batches"

    @property
    def plan_keys(self) -> tuple[str, ...]:
        return COST_KEYS

    def _chosen(self, inputs: PlanInputs) -> int:
        most = self.residents(inputs.model, inputs.most_gpu_experts)
        if self.gpu_experts is not None:
            return most
        size = inputs.replay.batch.tokens
        costs = expert_costs(inputs.model, inputs.system, np.arange(size + 1.0), float(inputs.model.expert_bits))
        computing = inputs.model.top_k * float(costs.gpu_s[1])
        if size > 1:
            counts = tokens_of_steps(inputs.replay)
            computing = float(np.where(counts > 0, costs.gpu_s[counts], 0.0).sum(axis=2).mean())
        experts = inputs.model.num_experts
        for residents in range(most):
            if computing >= _LEAST_RATIO * (experts - residents) * costs.copy_s:
                return residents
        return most
