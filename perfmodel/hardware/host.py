"""Specs of the host: a CPU that runs experts from its memory, and what the host costs everything else."""

from __future__ import annotations

from typing import Any, Literal, Self, cast

import numpy as np
from pydantic import Field, model_validator

from perfmodel.hardware.base import Spec, number
from perfmodel.hardware.devices import GB, TERA, US, Dtype, PeakTable, efficiency, peak_of

Numa = Literal["interleaved", "replicated", "one-socket"]
Rates = Literal["peak", "reached"]

#: Which peak experts run at: the first of these that a spec gives, else the first in its table.
_EXPERT_DTYPES: tuple[Dtype, ...] = ("bf16", "fp16", "fp32")


class CpuSpec(Spec):
    """A CPU that runs experts from host memory; bandwidth and peaks are those of all sockets together.

    The rate of the memory is

        ``min(peak * populated / channels * dram_efficiency * share, threads * thread_bandwidth)``

    with the ``share`` of their joint rate that several sockets reach: without ``numa`` it is part of
    ``dram_efficiency``; ``replicated`` (one copy of the weights a socket) and ``interleaved`` (one copy, page by page
    over the sockets) have a measured scaling; ``one-socket`` is one over the sockets. The arithmetic is shared out
    evenly over the cores, and so is repacking weights for it: fewer threads than cores do less of both. More threads
    than physical cores gain nothing.
    """

    kind: Literal["cpu"] = "cpu"
    sockets: int = number("1", 1, 64, "sockets")
    cores_per_socket: int = number("1", 1, 4096, "physical cores of a socket")
    threads: int | None = number("1", 1, 65_536, "threads that run experts; without it one per physical core", None)
    numa: Numa | None = Field(
        None, description="where the weights lie on several sockets; without it dram_efficiency is of all of them"
    )
    replicated_scaling: float | None = efficiency("rate of all sockets with a weight copy each", None)
    interleaved_scaling: float | None = efficiency("rate of all sockets with pages spread over them", None)
    dram_bandwidth_gb_per_s: float = number("GB/s", 0.1, 20_000, "peak host memory bandwidth, all sockets")
    dram_efficiency: float = efficiency("achieved host memory bandwidth")
    memory_channels: int | None = number("1", 1, 1024, "memory channels behind the peak, all sockets", None)
    populated_channels: int | None = number("1", 1, 1024, "channels with memory in them, all sockets", None)
    thread_bandwidth_gb_per_s: float | None = number("GB/s", 0.01, 5000, "memory bandwidth of one thread", None)
    peak_tflop_per_s: PeakTable = Field(
        min_length=1,
        description="dense peaks by dtype, all sockets, of the matrix units if it has them",
        json_schema_extra={"unit": "TFLOP/s"},
    )
    vector_tflop_per_s: float | None = number(
        "TFLOP/s", 1e-4, 1e5, "peak of the vector units beside matrix units, all sockets", None
    )
    tile_rows: int | None = number("1", 1, 4096, "rows to which the matrix units pad the tokens of an expert", None)
    pack_gb_per_s: float | None = number(
        "GB/s", 0.01, 20_000, "rate at which matrix kernels repack weights first; without it they need not", None
    )
    compute_efficiency: float = efficiency("achieved compute rate", 1.0)
    expert_overhead_us: float = number("us", 0, 1e5, "fixed time per expert", 0.0)
    rates: Rates = Field(
        "peak", description="peaks that an engine reaches its share of, or what experts reached, whatever the engine"
    )
    memory_capacity_gb: float | None = number("GB", 0.1, 1e6, "host memory size, all sockets", None)

    @model_validator(mode="after")
    def _complete(self) -> Self:
        scaling = f"{self.numa}_scaling"
        if self.sockets > 1 and self.numa in ("replicated", "interleaved") and getattr(self, scaling) is None:
            raise ValueError(f"numa is {self.numa!r} on {self.sockets} sockets, which needs {scaling}")
        if self.populated_channels is not None:
            if self.memory_channels is None:
                raise ValueError("populated_channels needs memory_channels, the channels behind the peak")
            if self.populated_channels > self.memory_channels:
                raise ValueError(
                    f"populated_channels is {self.populated_channels};"
                    f" allowed: at most memory_channels ({self.memory_channels})"
                )
        return self

    @property
    def expert_copies(self) -> int:
        """Copies of the experts that host memory holds: one a socket where they are replicated [1]."""
        return self.sockets if self.numa == "replicated" else 1

    @property
    def cores(self) -> int:
        """Physical cores of the sockets that run experts [1]."""
        return self.cores_per_socket if self.numa == "one-socket" else self.sockets * self.cores_per_socket

    @property
    def working_threads(self) -> float:
        """Threads that do something for the rate: at most one per physical core [1]."""
        return self.cores if self.threads is None else np.minimum(self.threads, self.cores)

    @property
    def dram_bandwidth_bytes_per_s(self) -> float:
        """Peak host memory bandwidth of all sockets [byte/s]."""
        return self.dram_bandwidth_gb_per_s * GB

    @property
    def effective_dram_bandwidth_bytes_per_s(self) -> float:
        """Rate at which experts are read [byte/s], by the equation above."""
        populated = 1.0
        if self.memory_channels is not None and self.populated_channels is not None:
            populated = self.populated_channels / self.memory_channels
        rate = self.dram_bandwidth_bytes_per_s * populated * self.dram_efficiency * self._numa_share
        if self.thread_bandwidth_gb_per_s is None:
            return rate
        capped: float = np.minimum(rate, self.working_threads * (self.thread_bandwidth_gb_per_s * GB))
        return capped

    @property
    def _numa_share(self) -> float:
        """Share of the joint rate of all sockets that experts are read at [1]."""
        if self.numa is None:
            return 1.0
        if self.numa == "one-socket":
            return 1.0 / self.sockets
        scaling = self.replicated_scaling if self.numa == "replicated" else self.interleaved_scaling
        share: Any = 1.0 if scaling is None else np.where(np.greater(self.sockets, 1), scaling, 1.0)[()]
        return cast(float, share)

    def peak_flops_per_s(self, dtype: str = "bf16") -> float:
        """Dense peak of ``dtype``, all sockets [flop/s]; `SpecError` when the spec does not give it."""
        return peak_of(self, self.peak_tflop_per_s, dtype)

    def effective_flops_per_s(self, dtype: str | None = None) -> float:
        """Peak times compute efficiency and the share of the cores at work [flop/s].

        dtype : by default the first of bf16, fp16 and fp32 that the spec gives, else the first in its table.
        """
        first = next(one for one in (*_EXPERT_DTYPES, *self.peak_tflop_per_s) if one in self.peak_tflop_per_s)
        return self._reached(self.peak_flops_per_s(first if dtype is None else dtype))

    @property
    def effective_vector_flops_per_s(self) -> float:
        """The same of the vector units [flop/s]; 0 where the peaks are not those of matrix units beside them."""
        return 0.0 if self.vector_tflop_per_s is None else self._reached(self.vector_tflop_per_s * TERA)

    @property
    def effective_pack_bytes_per_s(self) -> float:
        """Rate at which the cores at work repack weights for matrix kernels [byte/s]; 0 where these need not."""
        return 0.0 if self.pack_gb_per_s is None else self.pack_gb_per_s * GB * self._working_share

    def without_packing(self) -> Self:
        """The same CPU under kernels that multiply weights as they are stored."""
        sources = {key: source for key, source in self.sources.items() if key != "pack_gb_per_s"}
        return self.model_copy(update={"pack_gb_per_s": None, "sources": sources})

    def _reached(self, peak_flops_per_s: float) -> float:
        return peak_flops_per_s * self.compute_efficiency * self._working_share

    @property
    def _working_share(self) -> float:
        """Share of all cores that are at work [1]."""
        return self.working_threads / (self.sockets * self.cores_per_socket)

    @property
    def expert_overhead_s(self) -> float:
        """Fixed time per expert [s]."""
        return self.expert_overhead_us * US

    @property
    def memory_capacity_bytes(self) -> float | None:
        """Host memory size [byte], or ``None`` when not given."""
        return None if self.memory_capacity_gb is None else self.memory_capacity_gb * GB

    @property
    def warnings(self) -> tuple[str, ...]:
        """Sentences about settings that hurt more than the model says, or do something else than they seem to."""
        found = []
        if self.threads is not None and self.threads > self.cores:
            found.append(
                f"cpu.threads {self.threads} is above the {self.cores} physical cores of {self.name} that run experts: "
                "counted as no faster; slow-downs of 10x and more were reported"
            )
        channels, populated = self.memory_channels, self.populated_channels
        if channels is not None and populated is None:
            found.append(
                f"cpu.memory_channels {channels} of {self.name} changes nothing without cpu.populated_channels; "
                "the peak of all channels is cpu.dram_bandwidth_gb_per_s"
            )
        elif channels is not None and populated is not None and populated < channels:
            found.append(
                f"cpu.populated_channels {populated} of {channels} of {self.name}: {populated}/{channels} of "
                "cpu.dram_bandwidth_gb_per_s is counted, which is the peak of all channels"
            )
        return tuple(found)


class HostSpec(Spec):
    """What the host costs a layer that it takes part in, and how much of its memory the GPU can copy from at speed."""

    kind: Literal["host"] = "host"
    round_trip_us: float = number("us", 0, 1e5, "the host reads what the GPU found and starts work anew, per layer")
    copy_overhead_us: float = number("us", 0, 1e5, "host call and synchronisation, per copy of weights")
    pinned_memory_gb: float | None = number("GB", 0, 1e6, "most host memory that may be pinned", None)

    @property
    def round_trip_s(self) -> float:
        """Time from the GPU to the host and back, without any work [s]."""
        return self.round_trip_us * US

    @property
    def copy_overhead_s(self) -> float:
        """Time of the host per copy [s]."""
        return self.copy_overhead_us * US

    @property
    def pinned_memory_bytes(self) -> float | None:
        """Most host memory that may be pinned [byte], or ``None`` when not limited."""
        return None if self.pinned_memory_gb is None else self.pinned_memory_gb * GB
