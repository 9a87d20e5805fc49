"""``perfmodel measure``: small experiments on this machine, and a system file that holds what they say."""

from __future__ import annotations

import argparse
import contextlib
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from perfmodel.cli.base import EXIT_NO_ANSWER, add_command, one_line, print_json, print_text, quoted, same_file, say
from perfmodel.errors import PerfModelError
from perfmodel.progress import Report, bar, watched

if TYPE_CHECKING:
    from perfmodel.measure import Measurement
    from perfmodel.measure.cpu import Row

_BASE, _KERNELS = "rtx4090-pcie4-cpu", "blas"


def add(commands: Any) -> None:
    """Add the command."""
    one = add_command(commands, "measure", "measure this machine and write what it reaches as a system spec", _measure)
    one.epilog = (
        "The processor is measured always, a GPU where PyTorch finds one. Nothing is written without -o. Experts in"
        " memory are multiplied by 1 to 64 tokens, and the closed form that prices them is fitted to the times; --check"
        " then runs another program, a forward pass of expert layers, and compares its times with the predicted ones."
    )
    one.add_argument("-o", "--output", metavar="SPEC.toml", help="system file to write, an overlay of the base")
    one.add_argument(
        "--base", metavar="SYSTEM", help=f"system whose GPU and link it keeps unless measured (default {_BASE})"
    )
    one.add_argument("--seconds", metavar="N", help="time of the experiments (default 40; at least a few passes each)")
    one.add_argument("--threads", metavar="N,...", help="numbers of threads (default: 1 and all physical cores)")
    one.add_argument("--memory-gb", metavar="X", help="most memory (default 2, or a quarter of what is free)")
    one.add_argument("--kernels", metavar="NAME", help=f"what runs experts: blas or quantised (default {_KERNELS})")
    one.add_argument("--check", action="store_true", help="compare a real forward pass with its prediction")
    there = one.add_mutually_exclusive_group()
    there.add_argument("--gpu", action="store_true", help="measure a GPU, which must be there")
    there.add_argument("--no-gpu", action="store_true", help="measure no GPU")
    one.add_argument("--json", action="store_true", help="print one JSON document")


def _measure(options: argparse.Namespace) -> int:
    seconds = None if options.seconds is None else _number("--seconds", options.seconds)
    memory = None if options.memory_gb is None else _number("--memory-gb", options.memory_gb)
    threads = None if options.threads is None else [_count(text) for text in options.threads.split(",")]
    from perfmodel.measure import BASE, SECONDS, measure
    from perfmodel.measure.overlay import check_output

    output = None if options.output is None else check_output(options.output)
    base = BASE if options.base is None else options.base
    if output is not None and same_file(output, base):
        raise PerfModelError(f"-o: found {quoted(str(output))}, which is the base itself; allowed another file")
    found = measure(
        base=base,
        seconds=SECONDS if seconds is None else seconds,
        threads=threads,
        memory_gb=memory,
        kernels=_KERNELS if options.kernels is None else options.kernels,
        gpu=True if options.gpu else False if options.no_gpu else None,
        check=options.check,
        bar=_bar,
    )
    # What took so long to measure is printed before writing may fail.
    if options.json:
        print_json(_data(found))
    else:
        print_text(_text(found))
    if output is None:
        return 0
    if found.doubts:
        say(f"perfmodel: {one_line(f'{output} was not written: {found.refusal}', 1000)}")
        return EXIT_NO_ANSWER
    found.write(output)
    say(f"wrote {output}")
    return 0


@contextlib.contextmanager
def _bar(label: str) -> Iterator[Report | None]:
    """A bar where somebody watches."""
    if not watched():
        yield None
        return
    with bar(label, "steps") as report:
        yield report


def _number(option: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise PerfModelError(f"{option}: found {quoted(text)}, allowed a number")
    return number


def _count(text: str) -> int:
    if not (text.strip().isascii() and text.strip().isdigit() and len(text) < 8):
        raise PerfModelError(f"--threads: found {quoted(text)}, allowed whole numbers separated by commas")
    return int(text)


def _data(found: Measurement) -> dict[str, Any]:
    """The answer for JSON."""
    return {
        "machine": found.machine._asdict(),
        "threads": list(found.threads),
        "pool_gb": found.pool_bytes / 1e9,
        "base": found.base,
        "kernels": found.kernels,
        "constants": [one._asdict() for one in found.cpu.constants()],
        "overrides": [
            {"key": key, "value": value, "citation": found.sources[key].citation} for key, value in found.values.items()
        ],
        "fits": {
            name: {**fit._asdict(), "residuals": fit.residuals.tolist(), "median_error": fit.median_error}
            for name, fit in found.fits._asdict().items()
        },
        "rows": [_row(row) for row in found.rows],
        "gpu": found.gpu or None,
        "gpu_rows": [
            {"kind": row.kind, "label": row.label, "bytes": row.size, **row.timing._asdict()} for row in found.gpu_rows
        ],
        "pageable_gb_per_s": found.pageable_gb_per_s,
        "check": [
            {
                **row.layer._asdict(),
                "routing": row.routing,
                "tokens": row.tokens,
                "threads": row.threads,
                "measured_s": row.measured.seconds,
                "spread": row.measured.spread,
                "predicted_s": row.predicted_s,
                "error": row.error,
                "calm": row.measured.calm,
            }
            for row in found.check
        ],
        "check_median_error": found.check_error,
        "doubts": found.doubts,
        "notes": found.notes,
        "seconds": found.seconds,
    }


def _row(row: Row) -> dict[str, Any]:
    return {
        "kernel": row.kernel,
        **row.shape._asdict(),
        "bits": row.bits,
        "tokens": row.tokens,
        "threads": row.threads,
        **row.timing._asdict(),
        "gb_per_s": row.gb_per_s,
        "gflop_per_s": row.gflop_per_s,
    }


def _text(found: Measurement) -> str:
    """The machine, the experiments by shape, the constants, and the check."""
    from perfmodel.reports import table

    machine = found.machine
    header = ("matrix", "bits", "threads", "1 token [GB/s]", *(f"{n} [GFLOP/s]" for n in (2, 8, 32, 64)))
    lines = [
        f"{machine.cpu}: {machine.cores} cores, {machine.memory_bytes / 1e9:.4g} GB, last caches"
        f" {machine.cache_bytes / 2**20:.4g} MiB; {machine.versions}",
        f"experts read from {found.pool_bytes / 1e9:.2g} GB of weights; {len(found.rows)} experiments in"
        f" {found.seconds:.0f} s",
        "",
        *(
            f"memory read on {_threads(row.threads)}: {row.gb_per_s:.1f} GB/s ({_spread(row)})"
            for row in found.rows
            if row.kernel == "read"
        ),
        "",
        table(header, _shape_rows(found.rows)),
        "",
        "processor, as experts see it that are run by "
        + ("NumPy in 32 bits:" if found.kernels == "blas" else "compiled products of 8 and 4 bits:"),
        table(
            ("key", "value", "unit"),
            [[f"cpu.{one.key}", f"{one.value:.4g}", one.unit] for one in found.cpu.constants()],
        ),
        f"fitted times: {100 * found.fits.blas.median_error:.1f} % off at the median in 32 bits,"
        f" {100 * found.fits.quantised.median_error:.1f} % with 8 and 4 bits",
    ]
    if found.gpu:
        rows = [[key, f"{value:.4g}"] for key, value in found.values.items()]
        lines += ["", f"{found.gpu}:", table(("key", "value"), rows)]
        wait = next(row.timing.seconds for row in found.gpu_rows if row.kind == "synchronise")
        lines.append(
            f"launch and wait {1e6 * wait:.3g} us; pageable copies {found.pageable_gb_per_s:.3g} GB/s (not in the file)"
        )
    if found.check:
        lines += ["", *_check_lines(found)]
    notes = [f"note: {note}" for note in found.notes]
    return "\n".join([*lines, "", *notes, *([f"note: {found.refusal}"] if found.doubts else [])])


def _spread(row: Row) -> str:
    """How far the passes of an experiment lie apart."""
    spread, calm = row.timing.spread, row.timing.calm
    return ("one pass" if spread is None else f"spread {100 * spread:.0f} %") + ("" if calm else ", disturbed")


def _threads(count: int) -> str:
    return "1 thread" if count == 1 else f"{count} threads"


def _shape_rows(rows: list[Row]) -> list[list[str]]:
    """One line per matrix, bits and threads."""
    by: dict[tuple[str, str, int], dict[int, Row]] = {}
    for row in rows:
        if row.kernel != "read" and row.tokens <= 64:
            shape = row.shape
            scaled = "" if shape.factor == 1 else f" (1/{shape.factor})"
            name = f"{shape.model} {shape.rows}x{shape.cols}{scaled}"
            by.setdefault((name, f"{row.bits:g}", row.threads), {})[row.tokens] = row
    return [
        [
            name,
            bits,
            str(threads),
            f"{found[1].gb_per_s:.1f}",
            *(f"{found[n].gflop_per_s:.0f}" if n in found else "" for n in (2, 8, 32, 64)),
        ]
        for (name, bits, threads), found in by.items()
    ]


def _check_lines(found: Measurement) -> list[str]:
    """Measured and predicted times of the forward pass."""
    from perfmodel.reports import table

    rows = [
        [
            f"{row.layer.model}{'' if row.layer.factor == 1 else f' (1/{row.layer.factor})'}",
            row.routing,
            str(row.tokens),
            str(row.threads),
            f"{1e3 * row.measured.seconds:.4g}",
            f"{1e3 * row.predicted_s:.4g}",
            f"{100 * row.error:+.0f} %" + ("" if row.measured.calm else " (disturbed)"),
        ]
        for row in found.check
    ]
    header = ("layer", "experts picked", "tokens", "threads", "measured [ms]", "predicted [ms]", "error")
    counted = sum(row.measured.calm for row in found.check)
    error = found.check_error
    last = (
        "no row was left undisturbed by other programs, so there is no error to tell"
        if error is None
        else f"median error {100 * error:.1f} % over {counted} of {len(found.check)} rows, those left undisturbed"
    )
    return ["a layer of experts, run by NumPy in 32 bits:", table(header, rows, left=2), last]
