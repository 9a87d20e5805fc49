"""Experiments on a GPU, if there is one: its memory, products of expert matrices, launches, and copies to it.

What is timed is behind a small interface, so that the rest can be tried without a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from perfmodel.measure.pool import SHAPES, Shape
from perfmodel.measure.timing import Pass, Timing, summary
from perfmodel.progress import Report

#: Sizes of what is read on the GPU, and of what is copied to it [byte].
READS = tuple(2**power for power in range(16, 31, 2))
COPIES = tuple(2**power for power in range(12, 29, 2))
#: A copy whose bytes take no time, which leaves the latency [byte].
TINY = 64
#: Passes of every experiment.
PASSES = 9
_HALF_BYTES = 2
#: Copies from here on tell the rate [byte].
_LARGE = 2**16


class Device(Protocol):
    """A GPU that can be timed; every call is one pass, the time of one piece of work in it [s]."""

    name: str
    memory_bytes: float

    def read(self, size: int) -> float:
        """Read so many bytes of its memory that are in no cache, one kernel after another."""

    def gemv(self, rows: int, cols: int) -> float:
        """Multiply a 16-bit matrix that is in no cache by a vector, one kernel after another."""

    def launch(self) -> float:
        """Launch a kernel that does nothing, one after another."""

    def synchronise(self) -> float:
        """Launch such a kernel and wait for it."""

    def copy(self, size: int, pinned: bool) -> float:
        """Copy so many bytes of host memory to the GPU and wait for it."""


class GpuRow(NamedTuple):
    """One experiment. kind : "read", "gemv", "launch", "synchronise", "pinned" or "pageable". size : [byte]."""

    kind: str
    label: str
    size: int
    timing: Timing


class Line(NamedTuple):
    """``time = fixed_s + bytes / bytes_per_s``."""

    fixed_s: float
    bytes_per_s: float


def measure_gpu(device: Device, report: Report | None = None) -> list[GpuRow]:
    """All experiments, in turns."""
    work: list[tuple[str, str, int]] = [
        *(("read", "", size) for size in READS if size <= device.memory_bytes / 8),
        *(("gemv", shape.model, _HALF_BYTES * shape.params) for shape in _shapes()),
        ("launch", "", 0),
        ("synchronise", "", 0),
        *((kind, "", size) for kind in ("pinned", "pageable") for size in (TINY, *COPIES)),
    ]
    shapes = {shape.model: shape for shape in _shapes()}

    def once(kind: str, label: str, size: int) -> float:
        if kind == "read":
            return device.read(size)
        if kind == "gemv":
            return device.gemv(shapes[label].rows, shapes[label].cols)
        if kind == "launch":
            return device.launch()
        if kind == "synchronise":
            return device.synchronise()
        return device.copy(size, kind == "pinned")

    times: list[list[Pass]] = [[] for _ in work]
    for turn in range(PASSES + 1):
        for place, one in enumerate(work):
            found = once(*one)
            if turn > 0:  # the first turn warms up
                times[place].append(Pass(found, 0.0))
            if report is not None:
                report(turn * len(work) + place + 1, (PASSES + 1) * len(work))
    return [GpuRow(*one, summary(found)) for one, found in zip(work, times, strict=True)]


def _shapes() -> Sequence[Shape]:
    return SHAPES


def fit_line(sizes: Sequence[float], seconds: Sequence[float]) -> Line:
    """The line with the least squared relative errors; one through zero where the fixed time came out negative."""
    size, time = np.asarray(sizes, dtype=np.float64), np.asarray(seconds, dtype=np.float64)
    # The columns are brought to one scale: a second and a byte are far apart.
    unit = float(np.max(size))
    columns = np.stack([1.0 / time, size / unit / time], axis=1)
    (fixed, slope), *_ = np.linalg.lstsq(columns, np.ones(len(time)), rcond=None)
    if fixed <= 0.0:
        slope = float(columns[:, 1].sum() / (columns[:, 1] ** 2).sum())
        fixed = 0.0
    return Line(float(fixed), unit / float(slope))


class GpuConstants(NamedTuple):
    """What the experiments say, in the units of spec files, and the kind of rows that each rests on."""

    values: dict[str, float]
    rests_on: dict[str, str]
    pageable: Line


def gpu_constants(device: Device, rows: Sequence[GpuRow]) -> GpuConstants:
    """Constants of the GPU and of the link to it.

    A product takes ``launch + (bytes + n_half) / rate``, a copy ``latency + (bytes + n_half) / rate``. The latency is
    the time of a copy of a few bytes; what larger copies take beside their bytes beyond it is ``n_half``.
    """
    by_kind = {kind: [row for row in rows if row.kind == kind] for kind in {row.kind for row in rows}}
    launch_s = by_kind["launch"][0].timing.seconds
    best = max(row.size / row.timing.seconds for row in by_kind["read"])
    products = _line(by_kind["gemv"])
    best = max(best, products.bytes_per_s)
    pinned = _line([row for row in by_kind["pinned"] if row.size >= _LARGE])
    latency_s = min(by_kind["pinned"][0].timing.seconds, pinned.fixed_s) if pinned.fixed_s else 0.0
    values = {
        "gpu.memory_capacity_gb": (device.memory_bytes / 1e9, ""),
        "gpu.memory_bandwidth_gb_per_s": (best / 1e9, "read"),
        "gpu.memory_efficiency": (products.bytes_per_s / best, "gemv"),
        "gpu.memory_n_half_kb": (max(products.fixed_s - launch_s, 0.0) * products.bytes_per_s / 1e3, "gemv"),
        "gpu.launch_overhead_us": (launch_s * 1e6, "launch"),
        "link.bandwidth_gb_per_s": (pinned.bytes_per_s / 1e9, "pinned"),
        "link.efficiency": (1.0, "pinned"),
        "link.latency_us": (latency_s * 1e6, "pinned"),
        "link.n_half_kb": ((pinned.fixed_s - latency_s) * pinned.bytes_per_s / 1e3, "pinned"),
    }
    pageable = _line([row for row in by_kind["pageable"] if row.size >= _LARGE])
    return GpuConstants(
        {key: value for key, (value, _) in values.items()}, {key: kind for key, (_, kind) in values.items()}, pageable
    )


def _line(rows: Sequence[GpuRow]) -> Line:
    return fit_line([row.size for row in rows], [row.timing.seconds for row in rows])
