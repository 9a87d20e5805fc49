"""Spec of an inference engine: what software costs on top of the devices, and what it reaches of them."""

from __future__ import annotations

from collections.abc import Container
from typing import TYPE_CHECKING, Literal, Self

from pydantic import Field, field_validator, model_validator

from perfmodel.hardware.base import Spec, number
from perfmodel.hardware.devices import GB, KB, US, efficiency

if TYPE_CHECKING:
    from perfmodel.hardware.system import System

Launch = Literal["graph", "stream"]
ExpertKernels = Literal["grouped", "single"]
Copies = Literal["pinned", "pageable"]
CpuUnits = Literal["matrix", "vector"]
Overlap = Literal["max", "sum"]
PrefillExperts = Literal["stream", "cpu"]

#: Keys of a system that an engine replaces, and the key of the engine that counts instead.
REPLACED = {
    "gpu.memory_efficiency": "engine.memory_efficiency",
    "gpu.memory_n_half_kb": "engine.memory_n_half_kb",
    "gpu.compute_efficiency": "engine.compute_efficiency",
    "gpu.launch_overhead_us": "engine.kernel_us",
    "gpu.layer_overhead_us": "engine.kernel_us",
    "cpu.dram_efficiency": "engine.cpu_efficiency",
    "cpu.compute_efficiency": "engine.cpu_compute_efficiency",
    "host.round_trip_us": "engine.round_trip_us",
    "host.copy_overhead_us": "engine.copy_overhead_us",
}


def _kernels(text: str) -> float:
    return number("1", 0, 10_000, f"kernels {text}")  # type: ignore[no-any-return]


class EngineSpec(Spec):
    """What software reaches of a machine, and what it costs beside the work itself.

    A GPU kernel that moves ``b`` bytes of weights takes ``kernel_us + (b + n_half) / (peak * efficiency)``. A layer
    counts the kernels of its kinds: attention or a recurrent mixer, and experts or a dense network; a step adds its
    own. ``grouped`` experts of a layer share one set of kernels, so ``n_half`` is paid once for each of their
    matrices and not once for each expert; with ``single`` ones every matrix of every expert is a kernel of its own.
    From ``batched_from_tokens`` tokens a step on, every layer with experts pays ``batched_layer_us`` more: engines
    that have special kernels for one token leave them there. Matrix kernels, which run an expert with more than 8
    tokens, work on tiles of ``expert_tile_tokens``: at least one, and half of one is empty in the mean. With several
    GPUs that share every layer, it is reduced over them twice. ``pageable`` copies go through a staging buffer at
    ``pageable_gb_per_s``, whatever the link.

    ``overlap`` and what is said of prefills hold for steps that are told by counts (``perfmodel/steps.py``); a policy
    brings its own. These values replace the shares of the peaks that the devices of a system state (`REPLACED`),
    because devices describe hardware and what is reached depends on who asks. ``cpu_efficiency``,
    ``cpu_compute_efficiency``, ``round_trip_us`` and ``copy_overhead_us`` do so only where they are given, and none of
    the ``cpu_`` ones does so on a CPU whose ``rates`` were ``reached`` by experts (`perfmodel measure` writes such).
    """

    kind: Literal["engine"] = "engine"
    memory_efficiency: float = efficiency("achieved GPU memory bandwidth of large kernels")
    expert_efficiency: float | None = efficiency("the same of expert kernels; without it that of all kernels", None)
    memory_n_half_kb: float = number("kB", 0, 1e7, "bytes at which a kernel reaches half the rate", 0.0)
    compute_efficiency: float = efficiency("achieved compute rate")
    launch: Launch = Field(description="kernels replayed from a recorded graph, or launched one by one")
    kernel_us: float = number("us", 0, 1e5, "fixed time per kernel")
    attention_kernels: float = _kernels("of attention, per layer")
    recurrent_kernels: float = _kernels("of linear attention, state space or convolution, per layer")
    expert_kernels: float = _kernels("of routing and experts, per layer with experts")
    dense_kernels: float = _kernels("of a dense feed-forward network, per layer")
    step_kernels: float = _kernels("around the layers, per step")
    step_us: float = number("us", 0, 1e6, "host time per step", 0.0)
    sequence_us: float = number("us", 0, 1e6, "the same per sequence of a step: scheduling and sampling", 0.0)
    experts: ExpertKernels = Field(description="one set of kernels for all experts of a layer, or one per expert")
    expert_tile_tokens: float | None = number(
        "1", 1, 4096, "tokens that matrix kernels pad an expert's to, from more than 8 on", None
    )
    batched_from_tokens: int | None = number("1", 1, 1e6, "tokens of a step that leave the one-token kernels", None)
    batched_layer_us: float | None = number("us", 0, 1e5, "fixed time per layer with experts from there on", None)
    all_reduce_us: float = number("us", 0, 1e5, "one reduction over GPUs that meet over the host's link", 0.0)
    peer_all_reduce_us: float = number("us", 0, 1e5, "the same over GPUs with a link of their own", 0.0)
    copies: Copies = Field(description="memory that weights are copied from")
    pageable_gb_per_s: float | None = number("GB/s", 0.01, 5000, "rate of copies from pageable memory", None)
    copy_overhead_us: float | None = number("us", 0, 1e5, "host call and synchronisation, per copy of weights", None)
    round_trip_us: float | None = number("us", 0, 1e5, "the host takes part in a layer, per layer", None)
    overlap: Overlap = Field(description="CPU and GPU work on a layer at the same time (max), or in turn (sum)")
    cpu_efficiency: float | None = efficiency("achieved host memory bandwidth of expert products", None)
    cpu_units: CpuUnits = Field("matrix", description="units of the CPU that experts run on, where it has both")
    cpu_compute_efficiency: float | None = efficiency("achieved compute rate of the CPU", None)
    prefill_experts: PrefillExperts = Field(description="where a long prompt runs the experts of host memory")
    prefill_cpu_below_tokens: float | None = number("1", 1, 1e9, "shorter passes run them on the CPU anyway", None)
    micro_batch_tokens: int | None = number("1", 1, 1e9, "tokens of one pass of a prefill", None)

    @field_validator("batched_from_tokens", "micro_batch_tokens", mode="before")
    @classmethod
    def _whole(cls, value: object) -> object:
        return int(value) if isinstance(value, float) and value.is_integer() else value  # 512.0 is a count as well

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if (self.batched_from_tokens is None) != (self.batched_layer_us is None):
            raise ValueError("batched_from_tokens and batched_layer_us go together; give both or neither")
        if self.copies == "pageable" and self.pageable_gb_per_s is None:
            raise ValueError("copies is 'pageable', which needs pageable_gb_per_s")
        return self

    @property
    def memory_n_half_bytes(self) -> float:
        """Bytes a kernel must move to reach half the rate [byte]."""
        return self.memory_n_half_kb * KB

    @property
    def kernel_s(self) -> float:
        """Fixed time per kernel [s]."""
        return self.kernel_us * US

    @property
    def step_s(self) -> float:
        """Fixed time per step: the host's, and the kernels around the layers [s]."""
        return self.step_us * US + self.step_kernels * self.kernel_s

    @property
    def sequence_s(self) -> float:
        """Host time per sequence of a step [s]."""
        return self.sequence_us * US

    @property
    def all_reduce_s(self) -> float:
        """One reduction over the GPUs that share a layer, over the host's link [s]."""
        return self.all_reduce_us * US

    @property
    def peer_all_reduce_s(self) -> float:
        """One reduction over the GPUs that share a layer, over their own link [s]."""
        return self.peer_all_reduce_us * US

    @property
    def batched_layer_s(self) -> float:
        """Fixed time per layer with experts beside the one-token kernels [s]."""
        return 0.0 if self.batched_layer_us is None else self.batched_layer_us * US

    @property
    def round_trip_s(self) -> float | None:
        """Time of the host in a layer that it takes part in [s], or ``None`` to leave that to the system."""
        return None if self.round_trip_us is None else self.round_trip_us * US

    @property
    def copy_overhead_s(self) -> float | None:
        """Time of the host per copy [s], or ``None`` to leave that to the system."""
        return None if self.copy_overhead_us is None else self.copy_overhead_us * US

    @property
    def pageable_bytes_per_s(self) -> float | None:
        """Most that copies reach [byte/s], or ``None`` where the link alone limits them."""
        if self.copies == "pinned" or self.pageable_gb_per_s is None:
            return None
        return self.pageable_gb_per_s * GB


#: Keys that only steps told by counts read, and why.
_OF_COUNTS = {
    "engine.prefill_cpu_below_tokens": "is for steps told by counts; a policy says where its prefill runs",
    "engine.prefill_experts": "is for steps told by counts; a policy says where its prefill runs",
    "engine.overlap": "is for steps told by counts; a policy says what overlaps",
    "engine.launch": "says in a word what engine.kernel_us is the time of; set that instead",
}
#: Both or neither.
_SWITCH = ("engine.batched_from_tokens", "engine.batched_layer_us")
_PEER = "gpu.peer_bandwidth_gb_per_s"


def idle(system: System, key: str, varied: Container[str] | None = ()) -> str | None:
    """Why another value of an engine's key can change nothing on a system, or ``None`` where it can.

    varied : keys that vary beside it, whatever the system says of them; ``None`` for any that could.
    """
    engine = system.engine
    if engine is None or not key.startswith("engine."):
        return None
    if key in _OF_COUNTS:
        return _OF_COUNTS[key]
    if key == "engine.pageable_gb_per_s" and engine.copies == "pinned":
        return f"is of pageable copies, and those of engine {engine.name} are pinned"
    if key in _SWITCH and engine.batched_layer_us is None:
        other = _SWITCH[1 - _SWITCH.index(key)]
        if varied is not None and other not in varied:
            return f"counts together with {other}, which engine {engine.name} does not give; give both"
    if key in ("engine.all_reduce_us", "engine.peer_all_reduce_us"):
        return _idle_reduction(system, key, varied)
    if key in ("engine.cpu_efficiency", "engine.cpu_compute_efficiency", "engine.cpu_units"):
        if system.cpu is None:
            return f"is of a CPU, and system {system.name} has none"
        if system.cpu.rates == "reached":
            return f"is left out, since cpu.rates of {system.cpu.name} are what experts reached"
        if key == "engine.cpu_units" and system.cpu.vector_tflop_per_s is None:
            return f"chooses between the units of a CPU, and {system.cpu.name} states one kind"
    return None


def _idle_reduction(system: System, key: str, varied: Container[str] | None) -> str | None:
    """The same of the times of a reduction over several GPUs."""
    gpu = system.gpu
    if gpu.split == "layer":
        return "is of GPUs that share every layer, and gpu.split is 'layer'"
    if gpu.devices == 1 and varied is not None and "gpu.devices" not in varied:
        return f"is of several GPUs, and system {system.name} has one (gpu.devices)"
    own = gpu.peer_bandwidth_gb_per_s is not None
    asked = varied is not None and _PEER in varied
    if key == "engine.all_reduce_us" and (own or asked):
        return f"is of GPUs without a link of their own, and {_PEER} is given; engine.peer_all_reduce_us counts"
    if key == "engine.peer_all_reduce_us" and not own and not asked and varied is not None:
        return f"is of GPUs with a link of their own, and {_PEER} is not given; engine.all_reduce_us counts"
    return None
