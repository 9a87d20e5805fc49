"""Constants of engines that may be fitted to measured runs: what they are, where they begin, and what physics allows.

A name is a key of an engine, such as ``kernel_us``, and means that constant of every shared profile at once: engines
differ in how many kernels they run, which is counted and not fitted, while what a kernel costs is a matter of the
hardware. ``PROFILE.KEY`` means the constant of one profile alone.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from perfmodel.errors import SpecError
from perfmodel.evidence.described import machine_class, profile_of, residency
from perfmodel.evidence.fit import Constant, Problem
from perfmodel.evidence.measured import MeasuredRun
from perfmodel.evidence.predict import Predicted
from perfmodel.hardware.base import suggestion
from perfmodel.point import hardware_points

#: Profiles whose constants are shared; the others hold what was measured on one machine.
SHARED = ("llama-cpp-cuda", "vllm", "sglang", "ktransformers", "ktransformers-amx")
#: Profiles of engines that launch kernels one by one: all constants but that of a launch are shared.
STREAMED = ("fiddler", "moe-infinity")


class Allowed(NamedTuple):
    """What physics allows a constant to be, and what is known of it without any run, in the unit of its key.

    A fit begins there, and a constant that is not fitted stays there. The values of the profiles would not do: they
    were fitted to these runs, and a run that is left out would still speak through them.
    """

    low: float
    high: float
    unit: str
    start: float


#: Bounds: a saturating read reaches 92 % of the datasheet rate at most; a kernel in a recorded graph costs 0.3 us at
#: least; host memory gives experts less than a stream, which reaches 85 % at most.
ALLOWED = {
    "memory_efficiency": Allowed(0.3, 0.92, "1", 0.68),
    "expert_efficiency": Allowed(0.1, 0.92, "1", 0.85),
    "memory_n_half_kb": Allowed(10.0, 30_000.0, "kB", 1000.0),
    "compute_efficiency": Allowed(0.02, 1.0, "1", 0.6),
    "kernel_us": Allowed(0.3, 15.0, "us", 1.27),
    "attention_kernels": Allowed(2.0, 100.0, "1", 12.0),
    "recurrent_kernels": Allowed(2.0, 200.0, "1", 20.0),
    "expert_kernels": Allowed(2.0, 300.0, "1", 12.0),
    "sequence_us": Allowed(0.5, 2000.0, "us", 10.0),
    "step_us": Allowed(1.0, 10_000.0, "us", 100.0),
    "all_reduce_us": Allowed(1.0, 200.0, "us", 10.0),
    "cpu_efficiency": Allowed(0.1, 0.85, "1", 0.5),
    "cpu_compute_efficiency": Allowed(0.02, 1.0, "1", 0.4),
    "round_trip_us": Allowed(1.0, 1000.0, "us", 35.0),
    "copy_overhead_us": Allowed(0.5, 500.0, "us", 10.0),
    "pageable_gb_per_s": Allowed(2.0, 20.0, "GB/s", 9.0),
}


def _applies(name: str, run: MeasuredRun) -> str | None:
    """The key of an engine that a constant stands for in a run, or None where it is none of its constants."""
    profile = profile_of(run)
    only, _, key = name.rpartition(".")
    if key == "cpu_efficiency" and run.expert_read_gb_per_s is not None:
        return None  # measured on that machine
    if only:
        return key if only == profile else None
    if profile in SHARED or (profile in STREAMED and key != "kernel_us"):
        return key
    return None


def check_names(names: Sequence[str]) -> tuple[str, ...]:
    """The names themselves; SpecError for one that is no constant of an engine, or is named twice."""
    for name in names:
        only, _, key = name.rpartition(".")
        if key not in ALLOWED or (only and only not in (*SHARED, *STREAMED)):
            known = [*ALLOWED, *(f"{profile}.kernel_us" for profile in SHARED)]
            raise SpecError(
                f"fit: found constant {name!r}{suggestion(name, known)}, allowed: {', '.join(ALLOWED)}, or one of"
                f" them after the name of a profile ({', '.join((*SHARED, *STREAMED))}) and a dot"
            )
    if len(set(names)) < len(names) or not names:
        raise SpecError(f"fit: found constants {', '.join(names) or 'none'}, allowed: one or more, each once")
    return tuple(names)


class _Group(NamedTuple):
    """Rows on one machine under one engine: their points are made together. keys : constant and key that apply."""

    rows: list[int]
    keys: list[tuple[int, str]]


def make_problem(rows: Sequence[Predicted], names: Sequence[str]) -> Problem:
    """A fit of constants to rows.

    rows : runs ready to be priced, decode and prefill alike. names : constants, see the module.

    Raises
    ------
    SpecError : an unknown constant, or one that no row depends on.
    """
    chosen = check_names(names)
    if not rows:
        raise SpecError("fit: found no row that counts, allowed: one or more")
    constants = []
    for name in chosen:
        allowed = ALLOWED[name.rpartition(".")[2]]
        constants.append(Constant(name, allowed.start, allowed.low, allowed.high, allowed.unit, allowed.start))
    groups: dict[str, _Group] = {}
    for at, row in enumerate(rows):
        keys = {key: i for i, name in enumerate(chosen) if (key := _applies(name, row.run)) is not None}
        # A constant of one profile comes after the shared one of the same key, and wins.
        specific = {key: i for i, name in enumerate(chosen) if "." in name and (key := _applies(name, row.run))}
        found = [(i, key) for key, i in (keys | specific).items()]
        groups.setdefault(f"{row.system.content_hash()} {found}", _Group([], found)).rows.append(at)
    target = np.log([row.measured for row in rows])
    # Rows that no constant applies to, most of them of documented machines, are priced once.
    fixed = np.full(len(rows), np.nan)
    for group in groups.values():
        if not group.keys:
            fixed[group.rows] = [math.log(rows[at].rate()) for at in group.rows]

    def predict(logs: NDArray[np.float64]) -> NDArray[np.float64]:
        values = np.exp(logs)
        result = np.tile(fixed, (len(logs), 1))
        for rows_here, keys in groups.values():
            if not keys:
                continue
            system = rows[rows_here[0]].system
            here = {f"engine.{key}": values[:, i] for i, key in keys}
            points = hardware_points(system, here)
            for at in rows_here:
                result[:, at] = np.log(rows[at].rates(points))
        return result

    return Problem(
        tuple(constants),
        predict,
        np.asarray(target, dtype=np.float64),
        [row.run.source for row in rows],
        [machine_class(row.run) for row in rows],
        [(row.quantity, residency(row.run)) for row in rows],
    )


def log_errors(rows: Sequence[Predicted]) -> NDArray[np.float64]:
    """ln(predicted / measured) of rows on their own systems [R]."""
    return np.array([math.log(row.rate() / row.measured) for row in rows])
