"""Fiddler: popular experts on the GPU; what is missing runs on the CPU or is copied, whichever costs less.

Source: arXiv 2402.07033 and its code. Rules, and the readings taken:

- The experts that are used most, over all layers together, are on the GPU for good: by the decode steps of the other
  sequences, in place of the published offline profile.
- A missing expert with s tokens runs on the CPU or is copied and run on the GPU. The published code counts 7 for each
  token on the CPU, 70 for a copy whatever the tokens, and nothing for a resident (``costs=published``). As it measures
  these on its machine, ``costs=system`` (default) takes the times of the system instead.
- The code tries every split and takes the least *sum* of both sides, though a remark in it speaks of the larger one.
  The least sum decides for every expert on its own. Both sides are read as overlapping when they run; ``overlap=sum``
  runs them in turn.
- The rule is the same in decode, where every expert has one token, and prefill. The host decides in every layer.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from perfmodel.bitwidth import LossTable
from perfmodel.kernels.schedule import fiddler_split
from perfmodel.model import MoEModel
from perfmodel.policies.base import (
    ClassTable,
    Executor,
    Overlap,
    Plan,
    PlanInputs,
    Residency,
    make_plan,
    option,
    prefill_counts,
    require,
)
from perfmodel.policies.costs import COST_KEYS, ExpertCosts, expert_costs, need_cpu
from perfmodel.policies.host import Prefill
from perfmodel.policies.hosted import HostedExperts, most_used, split_prefill
from perfmodel.routing.batches import of_picks, tokens_of_steps

#: Published costs of a token on the CPU and of a copy, in the same unit.
CPU_PER_TOKEN, COPY = 7.0, 70.0


@dataclass(frozen=True)
class Fiddler(HostedExperts):
    """Popular experts on the GPU, the others by least cost."""

    name: ClassVar[str] = "fiddler"
    summary: ClassVar[str] = "popular experts on the GPU; the others on the CPU or copied, whichever costs less"
    source: ClassVar[str] = "arXiv 2402.07033"

    experts: int | None = option(None, "experts of all layers together on the GPU; auto: as many as fit", low=0)
    costs: Literal["system", "published"] = option("system", "costs to decide by: the system's, or 7 a token and 70")
    overlap: Overlap = option("max", "GPU and CPU of a decode layer at the same time, or in turn")

    @property
    def copies_experts(self) -> bool:
        return True

    @property
    def plan_keys(self) -> tuple[str, ...]:
        return COST_KEYS if self.costs == "system" else super().plan_keys

    def _count(self, model: MoEModel, most: float) -> int:
        if self.experts is None:
            return self._room(model, most)
        every = len(model.moe_layers) * model.num_experts
        require(self, "experts", self.experts <= every, f"0 to {every} for {model.name}")
        return self.experts

    def residency(self, model: MoEModel, most_gpu_experts: float, losses: LossTable | None = None) -> Residency:
        return self._keeps(model, self._count(model, most_gpu_experts))

    def _costs(self, inputs: PlanInputs, most_tokens: int) -> ExpertCosts:
        """Costs of an expert with 0 to ``most_tokens`` tokens."""
        tokens = np.arange(most_tokens + 1, dtype=np.float64)
        if self.costs == "system":
            return expert_costs(inputs.model, inputs.system, tokens, self._bits(inputs.model))
        return ExpertCosts(np.zeros_like(tokens), CPU_PER_TOKEN * tokens, np.full_like(tokens, np.inf), COPY)

    def plan(self, inputs: PlanInputs) -> Plan:
        need_cpu(self, inputs.system)
        model, bits, trace = inputs.model, self._bits(inputs.model), inputs.replay.trace
        count = self._count(model, inputs.most_gpu_experts)
        shape = (trace.num_sequences, len(model.moe_layers), model.num_experts)
        hot = np.full(shape, count > 0)
        notes: tuple[str, ...] = ()
        if 0 < count < shape[1] * shape[2]:
            use = self.use_of_others(inputs)
            hot, notes = most_used(use.counts, count), use.notes
        table = ClassTable()
        picks, copied = self._decode(inputs, hot, table)
        prefill = self._prefill(inputs, hot, table)
        kept: dict[str, Any] = self.residency(model, inputs.most_gpu_experts)._asdict()
        return make_plan(
            self,
            inputs,
            table,
            picks,
            prefill,
            overlap=self.overlap,
            round_trips="layer",
            pinned_experts=model.num_experts - count / len(model.moe_layers),
            **kept,
            notes=(
                self.placed_note(inputs, hot),
                *notes,
                f"missing experts {copied} in decode, by costs={self.costs} at {bits:g} bits",
            ),
        )

    def _decode(self, inputs: PlanInputs, hot: NDArray[np.bool_], table: ClassTable) -> tuple[NDArray[np.uint8], str]:
        """Class of every pick, and what becomes of missing experts in words."""
        replay = inputs.replay
        costs = self._costs(inputs, replay.batch.tokens)
        copy = costs.cpu_s > costs.copy_s + costs.gpu_s
        if replay.batch.tokens == 1 or copy[1:].all() or not copy[1:].any():
            missing = Executor.FETCH if copy[1] else Executor.CPU
            return self.pick_classes(inputs, hot, table, missing), "are copied" if copy[1] else "run on the CPU"
        on_cpu, copied = (self.pick_classes(inputs, hot, table, where) for where in (Executor.CPU, Executor.FETCH))
        tokens = of_picks(tokens_of_steps(replay), replay, 0)
        return np.where(copy[tokens], copied, on_cpu), "run on the CPU or are copied, by their tokens in the step,"

    def _prefill(self, inputs: PlanInputs, hot: NDArray[np.bool_], table: ClassTable) -> Prefill:
        tokens = prefill_counts(inputs)
        if tokens is None:
            return Prefill(None, None)
        costs = self._costs(inputs, int(tokens.max(initial=1)))
        flat = np.ascontiguousarray(tokens.reshape(-1, tokens.shape[-1]), np.int32)
        split, _ = fiddler_split(flat, hot.reshape(flat.shape), costs.gpu_s, costs.cpu_s, costs.copy_s)
        return split_prefill(tokens, split.reshape(tokens.shape), table, self._bits(inputs.model))
