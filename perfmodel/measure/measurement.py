"""A whole measurement: the processor always, the GPU where there is one, and the check if it is asked for."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import NamedTuple

from perfmodel.errors import PerfModelError
from perfmodel.hardware import CpuSpec, Source, System, load_system
from perfmodel.hardware.files import path_text
from perfmodel.measure.check import CheckRow, check_forward, median_error
from perfmodel.measure.cpu import Row, experiments, shapes_for
from perfmodel.measure.gpu import Device, GpuRow, gpu_constants, measure_gpu
from perfmodel.measure.machine import Machine, find_machine
from perfmodel.measure.overlay import (
    KERNELS,
    Fits,
    cpu_spec,
    fit_rows,
    gpu_sources,
    measured_system,
    write_system,
)
from perfmodel.measure.pool import make_pool, pool_bytes
from perfmodel.measure.timing import thread_clock, time_cases
from perfmodel.measure.torch_gpu import find_gpu
from perfmodel.measure.trust import find_doubts, undisturbed
from perfmodel.progress import Report

#: The system whose GPU and link an overlay keeps, where none is named.
BASE = "rtx4090-pcie4-cpu"
#: Time of the experiments [s]: by default, and the least and the most.
SECONDS, LEAST_SECONDS, MOST_SECONDS = 40.0, 1.0, 3600.0
#: Share of it that the check takes, where it is asked for.
_CHECK_SHARE = 0.4

#: Makes a bar for one part of the work: its name in, what reports to it out.
Bar = Callable[[str], AbstractContextManager[Report | None]]


class Measurement(NamedTuple):
    """What was measured, and the system that follows.

    rows, gpu_rows : experiments. kernels : whose fit ``cpu`` is. values, sources : of the GPU and its link; empty
    without one. gpu : its name, or empty. pageable_gb_per_s : rate of pageable copies. check : rows of the forward
    pass; empty where it was not asked for. notes : sentences. seconds : all of it took [s].
    """

    machine: Machine
    threads: tuple[int, ...]
    pool_bytes: int
    rows: list[Row]
    fits: Fits
    kernels: str
    base: str
    cpu: CpuSpec
    system: System
    gpu: str
    gpu_rows: list[GpuRow]
    values: dict[str, float]
    sources: dict[str, Source]
    pageable_gb_per_s: float | None
    check: list[CheckRow]
    notes: list[str]
    seconds: float

    @property
    def check_error(self) -> float | None:
        """Median absolute error of the check [1]; None without one, or where other programs disturbed all of it."""
        return median_error(self.check)

    @property
    def doubts(self) -> list[str]:
        """What speaks against the result; such a result is not written."""
        return find_doubts(undisturbed(self.rows), self.fits, self.kernels, self.check)

    @property
    def refusal(self) -> str:
        """Why the result is not written, and what helps; empty where it is."""
        if not self.doubts:
            return ""
        helps = "a calmer machine helps" if self.threads == (1,) else "a calmer machine or --threads 1 helps"
        return f"the result is not to be relied on: {'; '.join(self.doubts)}; {helps}"

    def write(self, path: Path) -> None:
        """Write the system as an overlay of its base. Raises PerfModelError for a result that is in doubt."""
        if self.doubts:
            raise PerfModelError(f"{path_text(path)} was not written: {self.refusal}")
        write_system(path, self.base, self.cpu, self.values, self.sources, self.gpu)


@contextmanager
def no_bar(_: str) -> Iterator[Report | None]:
    """Report to nobody."""
    yield None


def limit_blas(threads: int) -> AbstractContextManager[object]:
    """Let the BLAS library use so many threads meanwhile."""
    from threadpoolctl import threadpool_limits

    limits: AbstractContextManager[object] = threadpool_limits(threads, user_api="blas")
    return limits


def thread_counts(given: Sequence[int] | None, machine: Machine) -> tuple[int, ...]:
    """Numbers of threads to measure, ascending: by default one and all cores.

    Raises PerfModelError for a number outside of that, and where the BLAS library cannot be told and it is not all.
    """
    counts = tuple(sorted({1, machine.cores} if given is None else set(given)))
    wrong = [count for count in counts if not 1 <= count <= machine.cores]
    if wrong or not counts:
        found = wrong[0] if wrong else "none"
        raise PerfModelError(f"--threads: found {found}, allowed 1 to {machine.cores}, the physical cores here")
    if not machine.blas:
        if given is not None and counts != (machine.cores,):
            raise PerfModelError(
                f"--threads: found {counts[0]}, allowed {machine.cores}: this BLAS library cannot be told how many"
            )
        return (machine.cores,)
    return counts


def measure(
    *,
    base: str = BASE,
    seconds: float = SECONDS,
    threads: Sequence[int] | None = None,
    memory_gb: float | None = None,
    kernels: str = "blas",
    gpu: bool | None = None,
    check: bool = False,
    machine: Machine | None = None,
    device: Device | None = None,
    bar: Bar = no_bar,
    clock: Callable[[], float] = time.perf_counter,
    own_clock: Callable[[], float] | None = None,
) -> Measurement:
    """Measure this machine.

    Parameters
    ----------
    base : system that the overlay changes, by name or path. seconds : time of the experiments; the fewest passes of
        each are made in any case [s]. threads : numbers of threads, by default one and all cores. memory_gb : most
        memory, by default 2 or a quarter of what is free [GB]. kernels : "blas" or "quantised", whose fit the overlay
        holds. gpu : whether to measure one, which must then be there; by default if it is there. check : also run the
        forward pass.
    machine, device, bar, clock, own_clock : for tests; this machine, its GPU, no progress, the clock of the system
        and that of the calling thread.

    Raises
    ------
    PerfModelError : options that are not allowed here, too little memory, or no GPU where one was asked for
    """
    start = clock()
    own = thread_clock() if own_clock is None else own_clock
    if kernels not in KERNELS:
        raise PerfModelError(f"--kernels: found {kernels!r}, allowed {', '.join(KERNELS)}")
    if not LEAST_SECONDS <= seconds <= MOST_SECONDS:
        raise PerfModelError(f"--seconds: found {seconds:g}, allowed {LEAST_SECONDS:g} to {MOST_SECONDS:g}")
    if memory_gb is not None and not 0 < memory_gb < float("inf"):
        raise PerfModelError(f"--memory-gb: found {memory_gb:g}, allowed a number above 0")
    from_base = load_system(base)
    here = find_machine() if machine is None else machine
    counts = thread_counts(threads, here)
    size = pool_bytes(memory_gb, here.cache_bytes, here.free_bytes)
    notes = []
    if device is None and gpu is not False:
        device, reason = find_gpu()
        if device is None:
            if gpu:
                raise PerfModelError(f"--gpu: found none to measure: {reason}")
            notes.append(f"no GPU was measured: {reason}; gpu and link are those of {base}")
    elif gpu is False:
        device = None
        notes.append(f"no GPU was measured, as asked; gpu and link are those of {base}")
    pool = make_pool(size)
    shapes = shapes_for(seconds, size)
    checks = [] if not check else [seconds * _CHECK_SHARE]
    with ThreadPoolExecutor(counts[-1]) as executor:
        cases = experiments(pool, shapes, counts, executor, limit_blas)
        with bar("measuring the processor") as report:
            timings = time_cases([one.case for one in cases], seconds - sum(checks), clock, report, own_clock=own)
    rows = [one.row._replace(timing=timing) for one, timing in zip(cases, timings, strict=True)]
    used = undisturbed(rows)
    fits = fit_rows(used)
    cpu = cpu_spec(here, used, fits, kernels)
    gpu_rows: list[GpuRow] = []
    values: dict[str, float] = {}
    sources: dict[str, Source] = {}
    pageable = None
    if device is not None:
        with bar("measuring the GPU") as report:
            gpu_rows = measure_gpu(device, report)
        found = gpu_constants(device, gpu_rows)
        values, pageable = found.values, found.pageable.bytes_per_s / 1e9
        sources = gpu_sources(found, gpu_rows, device.name, here.versions)
        notes.append(f"arithmetic rates of the GPU are those of {base}, and were not measured")
    system = measured_system(from_base, cpu, values, sources)
    compared = []
    if check:
        with bar("checking a forward pass") as report:
            blas = measured_system(from_base, cpu_spec(here, used, fits, "blas"), values, sources)
            fitted = [count for count in counts if count <= max(row.threads for row in used)]
            compared = check_forward(blas, pool, fitted, checks[0], limit_blas, clock, report, own)
    notes += _notes(rows, used, kernels)
    return Measurement(
        here, counts, size, rows, fits, kernels, base, cpu, system, "" if device is None else device.name, gpu_rows,
        values, sources, pageable, compared, notes, clock() - start,
    )  # fmt: skip


def _notes(rows: Sequence[Row], used: Sequence[Row], kernels: str) -> list[str]:
    """What a reader should know about the numbers."""
    notes = []
    restless = sum(not row.timing.calm for row in rows)
    most, fitted = (max(row.threads for row in some) for some in (rows, used))
    if restless:
        left = f"leave out {len(rows) - len(used)}" if len(used) < len(rows) else "rest on them all the same"
        notes.append(
            f"other programs disturbed {restless} of {len(rows)} experiments; the constants {left}; an idle machine"
            " tells more"
        )
    if fitted < most:
        notes.append(
            f"too few experiments on {most} threads were left undisturbed: the constants are those of {fitted}, and"
            f" cpu.threads = {fitted}"
        )
    if kernels == "blas":
        notes.append(
            "experts in 32 bits by NumPy: engines for 8 or 4 bits spend nothing on rearranging weights, which"
            " --kernels quantised describes"
        )
    return notes
