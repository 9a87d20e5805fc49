"""The memory of each device, as sums of parts."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from perfmodel.memory.activations import activation_parts
from perfmodel.memory.ranks import Stage, rank_stages
from perfmodel.memory.request import Request
from perfmodel.model.cache import allocated
from perfmodel.placement import Behind, Side

Use = Literal["weights", "experts", "replicas", "buffers", "kv", "activations", "reserve"]
Role = Literal["gpu", "near-data", "host"]


@dataclass(frozen=True, slots=True)
class Part:
    """One line of a device's memory.

    use : what it is for. name : which of these, such as ``attention`` or ``latent``. bytes : its size [byte].
    source : ``exact`` for what follows from the shape, ``assumed`` for an estimate.
    """

    use: Use
    name: str
    bytes: float
    source: Literal["exact", "assumed"] = "exact"


@dataclass(frozen=True, slots=True)
class Device:
    """A device and what it holds; of several GPUs the one that holds most.

    capacity_bytes : its memory [byte], None where the spec does not state it.
    """

    role: Role
    name: str
    parts: tuple[Part, ...]
    capacity_bytes: float | None

    @property
    def use_bytes(self) -> float:
        """Sum of the parts [byte]."""
        return math.fsum(part.bytes for part in self.parts)

    @property
    def headroom_bytes(self) -> float | None:
        """Capacity less use [byte], negative where it does not fit; None without a stated capacity."""
        return None if self.capacity_bytes is None else self.capacity_bytes - self.use_bytes

    @property
    def fits(self) -> bool | None:
        """Whether the parts fit; None without a stated capacity."""
        return None if self.capacity_bytes is None else self.use_bytes <= self.capacity_bytes

    def by_use(self) -> dict[Use, float]:
        """Sums by use [byte]."""
        uses = dict.fromkeys(part.use for part in self.parts)
        return {use: math.fsum(part.bytes for part in self.parts if part.use == use) for use in uses}


@dataclass(frozen=True, slots=True)
class Kept:
    """What stays where.

    resident : experts of each MoE layer on the GPUs, all of them together, in the order of the layers.
    buffer_bytes : caches and staging buffers on the GPU [byte].
    replica_bits : widths of the quantised copies behind the link [bit].
    per_layer : the same number for every layer, where there is one; None for all experts.
    attention_on, trunk_on : where attention with its cache is, and where everything else beside the experts is.
    behind : what a policy keeps behind the link.
    """

    resident: tuple[int, ...]
    buffer_bytes: float = 0.0
    replica_bits: tuple[float, ...] = ()
    per_layer: int | None = None
    attention_on: Side = "gpu"
    trunk_on: Side = "gpu"
    behind: Behind = "experts"

    def on(self, weights: str) -> Side:
        """Where the weights of a class are that is not the experts'."""
        return self.attention_on if weights == "attention" else self.trunk_on


def largest(fits: Callable[[int], bool], low: int, high: int) -> int:
    """Largest number from ``low`` to ``high`` that fits, where none fits above one that does not; ``low - 1`` for none.

    The answer has been tried, and so has the number above it.
    """
    if not fits(low):
        return low - 1
    step = 1
    while low < high:  # low fits
        tried = min(low + step, high)
        if not fits(tried):
            high = tried - 1
            break
        low, step = tried, 2 * step
    while low < high:
        tried = (low + high + 1) // 2
        low, high = (tried, high) if fits(tried) else (low, tried - 1)
    return low


class Sums:
    """The sums of one request, for any context, batch and placement."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self._stages = rank_stages(request.model, request.parallel)

    @cached_property
    def _layers(self) -> tuple[tuple[int, float], ...]:
        """Experts of each MoE layer, and the size of one [byte]."""
        bits = self.request.model.storage.expert.bits
        layers = [
            (layer, kind.experts.count, kind.experts.params * bits / 8)
            for kind in self.request.model.feed_forward
            if kind.experts is not None
            for layer in kind.layers
        ]
        return tuple((count, size) for _, count, size in sorted(layers))

    @property
    def counts(self) -> tuple[int, ...]:
        """Experts of each MoE layer, in the order of the layers."""
        return tuple(count for count, _ in self._layers)

    # --- where experts are

    def kept(self, context: int, batch: int) -> Kept:
        """What the request keeps where, with the policy's own choice where the request leaves it open."""
        request = self.request
        widths = request.replica_bits
        if request.policy is None:
            return self.with_experts(request.gpu_experts, replica_bits=widths or ())
        own = request.policy.residency(request.model, self._most(context, batch))
        replicas = own.replica_bits if widths is None else widths
        if request.gpu_experts is not None:
            kept = self.with_experts(request.gpu_experts, own.gpu_buffer_bytes, replicas)
        elif float(own.gpu_experts).is_integer():
            kept = self.with_experts(int(own.gpu_experts), own.gpu_buffer_bytes, replicas)
        else:
            kept = Kept(self._spread(own.gpu_experts), own.gpu_buffer_bytes, replicas)
        return replace(kept, attention_on=own.attention_on, trunk_on=own.trunk_on, behind=own.behind)

    def _spread(self, mean: float) -> tuple[int, ...]:
        """A mean number of experts a layer as whole numbers: as alike as can be, the last layers with one more."""
        layers = len(self.counts)
        least, more = divmod(round(mean * layers), layers)
        return tuple(min(count, least + (i >= layers - more)) for i, count in enumerate(self.counts))

    def with_experts(
        self, per_layer: int | None, buffer_bytes: float = 0.0, replica_bits: tuple[float, ...] = ()
    ) -> Kept:
        """So many experts of every layer on the GPUs, or as many as the layer has; None for all."""
        resident = tuple(count if per_layer is None else min(per_layer, count) for count in self.counts)
        return Kept(resident, buffer_bytes, replica_bits, per_layer)

    def _most(self, context: int, batch: int) -> float:
        """Experts per layer that the GPU has room for beside everything else, -1 if not even for none."""

        def headroom(count: int) -> float:
            room = self.gpu(context, batch, self.with_experts(count)).headroom_bytes
            assert room is not None  # the memory of a GPU is always stated
            return room

        most = max(self.counts, default=0)
        whole = largest(lambda count: headroom(count) >= 0, 0, most)
        if whole in (-1, most):
            return whole
        left, lacking = headroom(whole), headroom(whole + 1)
        return whole + left / (left - lacking)

    # --- devices

    def _sequences(self, batch: int) -> int:
        """Sequences of one replica of attention."""
        return math.ceil(batch / self.request.parallel.replicas)

    def _stage_parts(self, stage: Stage, context: int, batch: int, kept: Kept) -> tuple[Part, ...]:
        request, parallel = self.request, self.request.parallel
        parts = [Part("weights", name, size) for name, size in stage.weights.items() if size and kept.on(name) == "gpu"]
        held = dict(zip(self.request.model.moe_layers, kept.resident, strict=True))
        experts = math.fsum(math.ceil(held[layer] / parallel.expert) * size for layer, _, size in stage.experts)
        parts += [Part("experts", "resident experts", experts)] * bool(stage.experts)
        parts += [Part("buffers", "cached and staged experts", kept.buffer_bytes)] * bool(kept.buffer_bytes)
        sequences = self._sequences(batch)
        if kept.attention_on == "gpu":
            parts += self._cache(stage, context, sequences)
        live = activation_parts(request.model, stage, parallel, request.activation_tokens, sequences)
        parts += [Part("activations", name, size, "assumed") for name, size in live.items()]
        parts.append(Part("reserve", "driver, graphs and libraries", request.reserve_bytes, "assumed"))
        return tuple(parts)

    def _cache(self, stage: Stage, context: int, sequences: int) -> tuple[Part, ...]:
        request = self.request
        cache = allocated(stage.attention, context, request.kv_bits, request.kv_layout, request.mla_cache)
        return tuple(Part("kv", name, sequences * size) for name, size in cache.items())

    def gpu(self, context: int, batch: int, kept: Kept) -> Device:
        """The GPU that holds most."""
        gpu = self.request.system.gpu
        every = [
            Device("gpu", gpu.name, self._stage_parts(stage, context, batch, kept), gpu.memory_capacity_bytes)
            for stage in self._stages
        ]
        return max(every, key=lambda device: device.use_bytes)

    def behind(self, context: int, batch: int, kept: Kept) -> Device | None:
        """What is behind the link, one for all GPUs; None where nothing is kept there.

        A policy keeps every expert there, also those that are on the GPU, for they move, unless it says otherwise;
        without one, only the others are. Every socket that reads its own experts has them all.
        """
        system = self.request.system
        copies = system.cpu.expert_copies if system.cpu is not None and system.ndp is None else 1
        whole = sum(count * size for count, size in self._layers)
        away = [(count - on_gpu) * size for (count, size), on_gpu in zip(self._layers, kept.resident, strict=True)]
        experts = whole * (kept.behind == "experts") if self.request.policy is not None else math.fsum(away)
        stored = self.request.model.storage.expert.bits
        parts = [Part("experts", "experts at stored precision", copies * experts)] * bool(experts)
        parts += [
            Part("replicas", f"{width:g}-bit copies", copies * whole * width / stored)
            for width in kept.replica_bits
            if whole and kept.behind != "nothing"
        ]
        for stage in self._stages if "cpu" in (kept.attention_on, kept.trunk_on) else ():
            parts += [
                Part("weights", name, size) for name, size in stage.weights.items() if size and kept.on(name) == "cpu"
            ]
            if kept.attention_on == "cpu":
                parts += self._cache(stage, context, self._sequences(batch))
        if not parts:
            return None
        if system.ndp is not None:
            return Device("near-data", system.ndp.name, tuple(parts), system.ndp.capacity_bytes)
        if system.cpu is not None:
            return Device("host", system.cpu.name, tuple(parts), system.cpu.memory_capacity_bytes)
        return Device("host", "host memory", tuple(parts), None)

    def devices(self, context: int, batch: int, kept: Kept) -> tuple[Device, ...]:
        """The GPU that holds most, and what is behind the link."""
        behind = self.behind(context, batch, kept)
        return (self.gpu(context, batch, kept), *(() if behind is None else (behind,)))

    def fits(self, context: int, batch: int, kept: Kept | None = None) -> bool:
        """Whether every device holds what it must, as far as capacities are stated."""
        placed = self.kept(context, batch) if kept is None else kept
        return all(device.fits is not False for device in self.devices(context, batch, placed))
