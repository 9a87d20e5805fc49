"""Which memory holds what of a model, whether it fits, and the most that does.

``memory_report`` sums weights, caches and buffers by device, ``largest_*`` search for the most that fits, ``Parallel``
divides a model among several GPUs, and ``distinct_experts`` says how many experts a batch visits.
"""

from perfmodel.memory.activations import ACTIVATION_TOKENS, RESERVE_BYTES
from perfmodel.memory.distinct import distinct_bound, distinct_experts, distinct_weighted
from perfmodel.memory.parallel import Parallel
from perfmodel.memory.report import MemoryReport, memory_report
from perfmodel.memory.request import Options
from perfmodel.memory.search import GpuExperts, largest_batch, largest_context, largest_gpu_experts
from perfmodel.memory.sums import Device, Part

__all__ = [
    "ACTIVATION_TOKENS",
    "RESERVE_BYTES",
    "Device",
    "GpuExperts",
    "MemoryReport",
    "Options",
    "Parallel",
    "Part",
    "distinct_bound",
    "distinct_experts",
    "distinct_weighted",
    "largest_batch",
    "largest_context",
    "largest_gpu_experts",
    "memory_report",
]
