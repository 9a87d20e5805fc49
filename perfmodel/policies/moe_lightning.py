"""MoE-Lightning and MoE-Lens: attention on the CPU, and the weights of all experts paged through the GPU.

Both keep the KV cache in host memory and compute attention there, so that the GPU has room for weights and the cache
for many sequences. The experts of the next layer are copied while this one computes. Their gain is throughput: one pass
over the weights serves hundreds of sequences, whose micro-batches hide it. Here a pass serves one sequence, so what is
modelled is the latency of that schedule, a lower bound of what it is good at. How many experts stay resident by default
is counted as for every policy, as if the KV cache were on the GPU.

MoE-Lens overlaps the prefill of some sequences with the decode of others, which lowers the cache that a sequence of
p prompt and g output tokens needs from p + g to p + g / 2 tokens. With one sequence at a time there is nothing to
overlap, and the two systems take the same time.

Sources: arXiv 2411.11217 (MoE-Lightning), arXiv 2504.09345 (MoE-Lens).
"""

from dataclasses import dataclass
from typing import ClassVar

from perfmodel.model import MoEModel
from perfmodel.policies.base import Residency
from perfmodel.policies.streamed import StreamedExperts


@dataclass(frozen=True)
class MoELightning(StreamedExperts):
    """Experts paged through the GPU, attention on the CPU."""

    name: ClassVar[str] = "moe-lightning"
    summary: ClassVar[str] = "attention on the CPU; all experts paged through the GPU a layer ahead"
    source: ClassVar[str] = "arXiv 2411.11217; one sequence instead of its large batches"
    needs_cpu: ClassVar[bool] = True

    def _kept(self, model: MoEModel, residents: int) -> Residency:
        return super()._kept(model, residents)._replace(attention_on="cpu")


@dataclass(frozen=True)
class MoELens(MoELightning):
    """The same schedule; its overlap of prefill and decode needs more than one sequence."""

    name: ClassVar[str] = "moe-lens"
    summary: ClassVar[str] = "as moe-lightning; overlaps prefill and decode, which one sequence has no use for"
    source: ClassVar[str] = "arXiv 2504.09345; one sequence instead of its large batches"
