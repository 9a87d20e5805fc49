"""What was measured, as parts and values of a system, each with how it was measured."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from perfmodel.errors import PerfModelError
from perfmodel.hardware import CpuSpec, Source, System, write_overlay
from perfmodel.measure.cpu import LARGE_TOKENS, Row
from perfmodel.measure.fit import PRODUCTS, CpuFit, fit_products
from perfmodel.measure.gpu import GpuConstants, GpuRow
from perfmodel.measure.machine import Machine
from perfmodel.measure.timing import Timing

#: What experts are run by: NumPy's products in 32 bits, or compiled ones of 8 and 4 bits.
KERNELS = ("blas", "quantised")


class Fits(NamedTuple):
    """The closed form fitted to products in 32 bits, and to those of 8 and 4 bits."""

    blas: CpuFit
    quantised: CpuFit


def expert_rows(rows: Sequence[Row], kernels: str) -> list[Row]:
    """The rows that one fit is made to: products of weights that come from memory."""
    names = ("blas",) if kernels == "blas" else ("int8", "int4")
    return [row for row in rows if row.kernel in names and row.tokens < LARGE_TOKENS]


def fit_rows(rows: Sequence[Row]) -> Fits:
    """Both fits; products of few bits have one token only, so with many they run at the rates of 32 bits."""
    blas = fit_products(expert_rows(rows, "blas"))
    return Fits(blas, fit_products(expert_rows(rows, "quantised"), like=blas))


def cpu_spec(machine: Machine, rows: Sequence[Row], fits: Fits, kernels: str) -> CpuSpec:
    """The processor as experts see it that are run by ``kernels``. rows : that the fits rest on."""
    fit = fits.blas if kernels == "blas" else fits.quantised
    used = expert_rows(rows, kernels)
    threads = max(row.threads for row in rows)
    read = _one(rows, "read", threads)
    large = next(row for row in rows if row.tokens == LARGE_TOKENS and row.threads == threads)
    peak_bytes = max(read.gb_per_s * 1e9, fit.bytes_per_s)
    # Peaks are those of all cores, of which ``threads`` are at work.
    whole = machine.cores / min(threads, machine.cores)
    peak_flops = max(large.gflop_per_s * 1e9, fit.matrix_flops_per_s)
    share = fit.matrix_flops_per_s / peak_flops
    by = "NumPy products in 32 bits" if kernels == "blas" else "compiled products of weights of 8 and 4 bits"
    fitted = (
        f"fitted to {len(used)} {by} that come from memory, whose times it gives within"
        f" {100 * fit.median_error:.1f} % at the median ({_passes([row.timing for row in used])}); {machine.versions}"
    )
    direct = f"{_told(read.timing)}; {machine.versions}"
    system = f"as the operating system of the machine reports it, {machine.date}"
    values: dict[str, tuple[float | int | None, str]] = {
        "sockets": (machine.sockets, system),
        "cores_per_socket": (machine.cores // machine.sockets, system),
        "threads": (threads if threads < machine.cores else None, "most threads that were measured undisturbed"),
        "dram_bandwidth_gb_per_s": (
            peak_bytes / 1e9,
            f"read rate of {read.shape.cols / 1e9:.2g} GB on {_count(threads)}, not a peak; {direct}"
            if read.gb_per_s * 1e9 >= fit.bytes_per_s
            else f"rate of products with one token, which is above that of plain reads, not a peak; {fitted}",
        ),
        "dram_efficiency": (fit.bytes_per_s / peak_bytes, f"rate of products with one token over it, {fitted}"),
        "thread_bandwidth_gb_per_s": (
            None if fit.thread_bytes_per_s is None else fit.thread_bytes_per_s / 1e9,
            f"products with one token on fewer threads, {fitted}",
        ),
        "vector_tflop_per_s": (
            whole * fit.vector_flops_per_s / share / 1e12,
            f"before compute_efficiency; {fitted}",
        ),
        "tile_rows": (
            fit.tile_rows,
            f"tokens to which a product of several is padded, {fitted}"
            if kernels == "blas"
            else f"as of NumPy products in 32 bits; {machine.versions}",
        ),
        "pack_gb_per_s": (
            None if fit.pack_bytes_per_s is None else whole * fit.pack_bytes_per_s / 1e9,
            f"rearranging the weights before a product of several tokens, {fitted}",
        ),
        "compute_efficiency": (share, f"products of up to 64 tokens over a large one, {fitted}"),
        "expert_overhead_us": (PRODUCTS * fit.product_s * 1e6, f"{PRODUCTS} products an expert, {fitted}"),
        "memory_capacity_gb": (machine.memory_bytes / 1e9, system),
    }
    peak = Source(
        source="measured",
        citation=f"32-bit product of {large.shape.rows}x{large.shape.cols} and {LARGE_TOKENS} tokens on"
        f" {_count(threads)}; {_told(large.timing)}; {machine.versions}",
    )
    given = {key: value for key, (value, _) in values.items() if value is not None}
    sources = {key: Source(source="measured", citation=values[key][1]) for key in given}
    return CpuSpec(
        name=re.sub(r"[^A-Za-z0-9]+", "-", machine.cpu).strip("-")[:60] or "measured-cpu",
        description=f"{machine.cpu}, {machine.cores} cores, as measured with {by}",
        rates="reached",
        peak_tflop_per_s={"fp32": whole * peak_flops / 1e12},
        sources={**sources, "peak_tflop_per_s.fp32": peak},
        **given,  # type: ignore[arg-type]
    )


def _one(rows: Sequence[Row], kernel: str, threads: int) -> Row:
    return next(row for row in rows if row.kernel == kernel and row.threads == threads)


def _count(threads: int) -> str:
    return f"{threads} thread" + ("s" if threads > 1 else "")


def _told(timing: Timing) -> str:
    if timing.spread is None:
        return "one pass"
    return f"median of {timing.passes} passes, spread {100 * timing.spread:.1f} % (interquartile range over median)"


def _passes(timings: Sequence[Timing]) -> str:
    spreads = sorted(timing.spread for timing in timings if timing.spread is not None)
    if not spreads:
        return "one pass each"
    passes = [timing.passes for timing in timings if timing.spread is not None]
    several = f"{max(passes)}" if min(passes) == max(passes) else f"{min(passes)} to {max(passes)}"
    spread = 100 * spreads[len(spreads) // 2]
    alone = len(timings) - len(spreads)
    rest = f"; one pass of {alone} of them" if alone else ""
    return f"medians of {several} passes, spread {spread:.1f} % (interquartile range over median){rest}"


def gpu_sources(found: GpuConstants, rows: Sequence[GpuRow], name: str, versions: str) -> dict[str, Source]:
    """How each value of the GPU and its link was measured."""
    what = {
        "read": "sums of numbers on the GPU, best rate of all sizes",
        "gemv": "16-bit products of expert matrices with one token, time = launch + (bytes + n_half) / rate",
        "launch": "a thousand empty kernels",
        "pinned": "copies from pinned memory, time = latency + (bytes + n_half) / rate; efficiency is in the rate",
        "": "as the driver reports it",
    }
    sources = {}
    for key, kind in found.rests_on.items():
        timings = [row.timing for row in rows if row.kind == kind]
        spread = f" ({_passes(timings)})" if timings else ""
        sources[key] = Source(source="measured", citation=f"{what[kind]}{spread}; {name}, {versions}")
    return sources


def measured_system(base: System, cpu: CpuSpec, values: Mapping[str, float], sources: Mapping[str, Source]) -> System:
    """The base with the measured processor, and the measured values of the GPU and its link."""
    fields = {key: getattr(base, key) for key in System.model_fields}
    peaks = {key: peak for key, peak in base.stated_peaks.items() if not key.startswith("cpu.")}
    system = System(**{**fields, "cpu": cpu, "stated_peaks": peaks})
    for key, value in values.items():
        system = system.with_values({key: value}, source=sources[key].source, citation=sources[key].citation)
    return system


def write_system(
    path: Path,
    base: str,
    cpu: CpuSpec,
    values: Mapping[str, float],
    sources: Mapping[str, Source],
    gpu: str,
) -> None:
    """Write the overlay. Raises SpecError, and leaves an older file as it was."""
    other = f"GPU and link as measured on {gpu}" if gpu else f"GPU and link of {base}, which were not measured"
    name = re.sub(r"[^A-Za-z0-9._+-]+", "-", path.stem).lstrip("._+-")[:80] or "measured"
    write_overlay(
        path, base, dict(values), dict(sources), parts=[cpu], name=name, description=f"{cpu.description}; {other}"
    )


def check_output(text: str) -> Path:
    """The file that ``-o`` names, refused before any work is done. Raises PerfModelError."""
    path = Path(text)
    if not text or path.suffix != ".toml":
        raise PerfModelError(f"-o: found {text[:200]!r}, allowed a file that ends in .toml")
    if path.is_dir():
        raise PerfModelError(f"-o: found {text[:200]!r}, which is a folder, allowed a file that ends in .toml")
    try:
        nearest = next(folder for folder in path.absolute().parents if folder.exists())
        with tempfile.TemporaryFile(dir=nearest):
            pass
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise PerfModelError(f"-o: found {text[:200]!r}, allowed a file that can be written ({reason})") from None
    return path
