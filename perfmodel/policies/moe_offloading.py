"""MoE-Offloading: a small LRU cache in every layer, the next gate applied early, and quantised experts.

Source: arXiv 2312.17238 (mixtral-offloading).

- ``slots`` experts of every layer stay on the GPU, least recently used out first. Published: 2 on 12 GB, 4 on 16 GB
  for Mixtral; the default is as many as fit, for comparisons at equal memory.
- While a layer runs, the gate of the next one is applied to the current hidden state, and what it picks is copied
  ahead. A copy enters the cache only when it is used. Only the recall of that early gate is published, 0.8 to 0.9;
  0.85 is assumed. The authors foretell 1 or 2 experts of Mixtral; ``predicted`` is all top-k by default.
- Experts are quantised to ``bits``, at which they are stored, copied and run. The authors use HQQ with 2, 3 and 4
  bits; 4 loses least and is the default. Group scales belong to stored bits: 2-bit HQQ takes about 2.5.
- ``load=layers`` is their naive way, which copies every expert of a layer in every step; it has neither cache nor
  prediction, so ``slots=0`` and ``predicted=0`` go with it.

The published ablation is the default, then ``predicted=0``, then ``slots=0,predicted=0``, then ``load=layers`` too.
A prefill copies every selected expert once.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from perfmodel.bitwidth import LossTable
from perfmodel.caches import CacheReplay
from perfmodel.model import MoEModel
from perfmodel.policies.ahead import CopiedAhead
from perfmodel.policies.base import ClassTable, Executor, PlanInputs, Residency, WorkClass, option, require
from perfmodel.policies.cached import extra_copies

Load = Literal["experts", "layers"]


@dataclass(frozen=True)
class MoEOffloading(CopiedAhead):
    """Per-layer LRU cache with early gates."""

    name: ClassVar[str] = "moe-offloading"
    summary: ClassVar[str] = "quantised experts in an LRU cache per layer; the next gate applied early copies ahead"
    source: ClassVar[str] = "arXiv 2312.17238"

    bits: float | None = option(4.0, "stored bits of every expert; auto: the model's", "1 to 32 | auto", low=1, high=32)
    load: Load = option("experts", "copies the experts that are picked, or all of a layer in every step")

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "slots", self.load == "experts" or self.slots == 0, "0 with load=layers")
        require(self, "predicted", self.load == "experts" or self.predicted == 0, "0 with load=layers")

    def residency(self, model: MoEModel, most_gpu_experts: float, losses: LossTable | None = None) -> Residency:
        kept = super().residency(model, most_gpu_experts, losses)
        if self.load == "experts":
            return kept
        return kept._replace(gpu_buffer_bytes=model.num_experts * model.expert_bytes(self._bits(model)))

    def _work(
        self, inputs: PlanInputs, found: CacheReplay, bits: float, table: ClassTable
    ) -> tuple[NDArray[np.uint8], NDArray[np.uint8] | None]:
        picks, copies = super()._work(inputs, found, bits, table)
        if self.load == "experts":
            return picks, copies
        others = inputs.model.num_experts - inputs.replay.assigned.sum(axis=2)
        return picks, extra_copies([(others, WorkClass(Executor.COPY, bits))], table, bits)
