"""All experts pass through the GPU, layer by layer and before they are picked: what paging systems share.

Each layer's experts that are not resident are copied during the layer before, whether they will be picked or not, into
one of two buffers. The picked ones are single copies, the others one copy together. Which experts are resident makes no
difference to what is copied; the first of every layer are. Such systems share a pass over the weights among hundreds
of sequences; here a pass serves one, which is their worst case.
"""

from dataclasses import dataclass
from typing import ClassVar

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
    Policy,
    Residency,
    When,
    WorkClass,
    make_plan,
    option,
    require_experts,
)
from perfmodel.policies.cached import extra_copies
from perfmodel.policies.costs import need_cpu
from perfmodel.policies.host import host_prefill

#: Layers whose experts are on the GPU at once: the one that computes, and the one that arrives.
WINDOW = 2


@dataclass(frozen=True)
class StreamedExperts(Policy):
    """What paging systems share: every expert that is not resident is copied in every step."""

    needs_ndp: ClassVar[bool] = False

    gpu_experts: int | None = option(
        None,
        "experts per layer that stay on the GPU; auto: as many as fit beside two layers' others",
        low=0,
        high=EXPERTS,
    )

    def residents(self, model: MoEModel, most_gpu_experts: float) -> int:
        """Experts per layer that stay on the GPU."""
        if self.gpu_experts is not None:
            require_experts(self, model, "gpu_experts")
            return self.gpu_experts
        layers, experts = len(model.moe_layers), model.num_experts
        if most_gpu_experts >= experts or layers <= WINDOW:
            return max(0, min(experts, int(most_gpu_experts)))
        # Residents of all layers and the others of two: r L + 2 (E - r) <= most L.
        return max(0, int((most_gpu_experts * layers - WINDOW * experts) / (layers - WINDOW)))

    def residency(self, model: MoEModel, most_gpu_experts: float, losses: LossTable | None = None) -> Residency:
        return self._kept(model, self.residents(model, most_gpu_experts))

    def _kept(self, model: MoEModel, residents: int) -> Residency:
        others = min(WINDOW, len(model.moe_layers)) * (model.num_experts - residents)
        return Residency(float(residents), others * model.expert_bytes(float(model.expert_bits)), ())

    def _chosen(self, inputs: PlanInputs) -> int:
        """Experts per layer that stay on the GPU, for this workload and system."""
        return self.residents(inputs.model, inputs.most_gpu_experts)

    def plan(self, inputs: PlanInputs) -> Plan:
        model, bits = inputs.model, float(inputs.model.expert_bits)
        residents = self._chosen(inputs)
        kept = self._kept(model, residents)
        if "cpu" in (kept.attention_on, kept.trunk_on):
            need_cpu(self, inputs.system)
        ids, assigned = inputs.replay.decode_ids, inputs.replay.assigned
        table = ClassTable()
        picks = np.full(ids.shape, table.number(WorkClass(Executor.FETCH, bits, when=When.AHEAD)), np.uint8)
        if residents:
            picks[ids < residents] = table.number(WorkClass(Executor.GPU, bits))
        if not assigned.all():
            picks[~assigned] = table.number(WorkClass(Executor.SKIP, bits))
        unused = model.num_experts - residents - self._asked(inputs, residents)
        unused[np.arange(len(unused)) % inputs.replay.batch.tokens > 0] = 0  # a step copies them once
        columns = [
            (unused == number, WorkClass(Executor.COPY, bits * number, when=When.AHEAD))
            for number in np.unique(unused).tolist()
            if number
        ]
        hot = np.zeros((inputs.replay.trace.num_sequences, len(model.moe_layers), model.num_experts), np.bool_)
        hot[..., :residents] = True
        return make_plan(
            self,
            inputs,
            table,
            picks,
            host_prefill(inputs, table, "fetch", bits=bits, hot=hot),
            overlap="max",
            copies=extra_copies(columns, table, bits),
            fetch="pipelined",
            **kept._asdict(),
            notes=(
                f"{residents} of {model.num_experts} experts a layer stay on the GPU; the other"
                f" {model.num_experts - residents} are copied in every step,"
                f" for {_who(inputs.replay.batch.sequences)}",
            ),
        )

    def _asked(self, inputs: PlanInputs, residents: int) -> NDArray[np.int64]:
        """Different experts beyond the residents that the step of every token picks [T, L]."""
        ids, size = inputs.replay.decode_ids, inputs.replay.batch.tokens
        if size == 1:
            return np.asarray((inputs.replay.assigned & (ids >= residents)).sum(axis=2))
        counts = np.zeros((len(ids) // size, ids.shape[1]), np.int64)
        for expert in range(residents, inputs.model.num_experts):
            counts += (ids == expert).any(axis=2).reshape(-1, size, ids.shape[1]).any(axis=1)
        return np.repeat(counts, size, axis=0)


def _who(sequences: int) -> str:
    return "one sequence alone" if sequences == 1 else f"{sequences} sequences together"
