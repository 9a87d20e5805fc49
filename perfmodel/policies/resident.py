"""The two ends that every other policy lies between: all experts on the GPU, and nothing on it.

- ``all-resident``: every expert is in GPU memory, and nothing is copied or waited for. It is refused where it does not
  fit.
- ``all-cpu``: attention, cache, routers, dense layers, head and experts run on the CPU from host memory. The GPU and
  the link do nothing, so no round trip is paid.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from perfmodel.bitwidth import LossTable
from perfmodel.model import MoEModel
from perfmodel.placement import Side
from perfmodel.policies.base import ClassTable, Plan, PlanInputs, Residency, make_plan
from perfmodel.policies.costs import need_cpu
from perfmodel.policies.host import host_prefill
from perfmodel.policies.hosted import HostedExperts


@dataclass(frozen=True)
class _OneDevice(HostedExperts):
    """Everything on one device."""

    device: ClassVar[Side]

    def residency(self, model: MoEModel, most_gpu_experts: float, losses: LossTable | None = None) -> Residency:
        experts = len(model.moe_layers) * model.num_experts if self.device == "gpu" else 0
        kept = self._keeps(model, experts)._replace(attention_on=self.device, trunk_on=self.device)
        return kept._replace(behind="nothing") if self.device == "gpu" else kept

    def plan(self, inputs: PlanInputs) -> Plan:
        if self.device == "cpu":
            need_cpu(self, inputs.system)
        model, bits = inputs.model, self._bits(inputs.model)
        shape = (inputs.replay.trace.num_sequences, len(model.moe_layers), model.num_experts)
        hot = np.full(shape, self.device == "gpu")
        table = ClassTable()
        picks = self.pick_classes(inputs, hot, table)
        kept: dict[str, Any] = self.residency(model, inputs.most_gpu_experts)._asdict()
        where = "GPU" if self.device == "gpu" else "CPU"
        return make_plan(
            self,
            inputs,
            table,
            picks,
            host_prefill(inputs, table, "cpu", bits=bits, hot=hot),
            overlap="max",
            **kept,
            notes=(f"the whole network runs on the {where}, its experts at {bits:g} bits",),
        )


@dataclass(frozen=True)
class AllResident(_OneDevice):
    """Everything in GPU memory."""

    name: ClassVar[str] = "all-resident"
    summary: ClassVar[str] = "every expert in GPU memory; refused where it does not fit"
    source: ClassVar[str] = "the bound of every policy that offloads"
    device: ClassVar[Side] = "gpu"
    needs_cpu: ClassVar[bool] = False


@dataclass(frozen=True)
class AllCpu(_OneDevice):
    """Everything on the CPU."""

    name: ClassVar[str] = "all-cpu"
    summary: ClassVar[str] = "the whole network on the CPU, nothing on the GPU"
    source: ClassVar[str] = "what an engine without a GPU does"
    device: ClassVar[Side] = "cpu"
