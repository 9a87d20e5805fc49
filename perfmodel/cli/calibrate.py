"""``perfmodel calibrate``: fit constants of engines to measured runs, and say what the fit is worth."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from perfmodel.cli.base import add_command, print_json, print_text, quoted, same_file, say
from perfmodel.errors import SpecError

if TYPE_CHECKING:
    from perfmodel.evidence.calibration import Calibration
    from perfmodel.evidence.errors import Errors, Statistics
    from perfmodel.evidence.fit import Problem
    from perfmodel.evidence.predict import Predicted
    from perfmodel.hardware import EngineSpec

#: What an overlay changes by default: this system, under this engine where it has none of its own.
_BASE, _ENGINE = "rtx4090-pcie4-cpu", "llama-cpp-cuda"
_EPILOG = """\
A constant that does not lower the error on sources that the fit has not seen is rejected, and a fit that the rows
cannot carry is refused. An overlay is a system file: the base, its engine, and the fitted values of that engine with
their source.

example: fit a constant to the bundled runs, and price with it
  perfmodel calibrate --fit memory_n_half_kb --system rtx4090-pcie4-cpu --engine llama-cpp-cuda -o mine.toml
  perfmodel compare --model mixtral-8x7b --system mine.toml
"""
_QUANTITIES = ("decode", "prefill")


def add(commands: Any) -> None:
    """Add the command."""
    one = add_command(commands, "calibrate", "fit constants of engines to measured runs", _calibrate)
    one.epilog = _EPILOG
    one.formatter_class = argparse.RawDescriptionHelpFormatter
    one.add_argument(
        "--evidence", metavar="FILE", help="measured runs, as in measured.toml (default: the bundled ones)"
    )
    one.add_argument("--fit", required=True, metavar="NAME,...", help="constants, such as kernel_us,vllm.step_us")
    one.add_argument(
        "--hold-out",
        metavar="RULE",
        help="rows that the fit may not see: source, machine, engine, model or id = values, such as"
        " 'engine=vllm;id=M001,M002'",
    )
    one.add_argument("--quantity", choices=[*_QUANTITIES, "all"], default="decode", help="rows (default: decode)")
    one.add_argument("--system", metavar="BASE", help=f"with -o: system that the overlay changes (default {_BASE})")
    one.add_argument(
        "--engine",
        metavar="NAME|FILE",
        help="with -o: engine that the fitted values are for, in place of that of the base (default: its own, or"
        f" {_ENGINE} where it has none)",
    )
    one.add_argument("-o", "--output", metavar="OVERLAY.toml", help="write a system file with the fitted values")
    one.add_argument("--json", action="store_true", help="print one JSON document")


def _calibrate(options: argparse.Namespace) -> int:
    from perfmodel.evidence.calibration import calibrate_problem
    from perfmodel.evidence.constants import make_problem
    from perfmodel.evidence.holdout import held_out
    from perfmodel.evidence.measured import QUANTITIES, counting, load_measured
    from perfmodel.evidence.predict import predicted

    place = _place(options)
    runs = load_measured(options.evidence)
    quantities = [one for one in QUANTITIES if options.quantity in (one, "all")]
    rows = [row for one in quantities for row in predicted(counting(runs, one), one)]
    problem = make_problem(rows, [name.strip() for name in options.fit.split(",")])
    out = None if options.hold_out is None else held_out(options.hold_out, _labels(problem, rows))
    found = calibrate_problem(problem, out)
    if place is not None:
        say(f"wrote {_write(found, place, options)}")
    if options.json:
        print_json(_data(found, rows))
    else:
        print_text(_text(found, rows))
    return 0


def _labels(problem: Problem, rows: list[Predicted]) -> dict[str, list[str | None]]:
    """What a hold-out rule can name, of every row."""
    return {
        "source": list(problem.source),
        "machine": list(problem.machine),
        "engine": [row.run.engine for row in rows],
        "model": [row.run.model for row in rows],
        "id": [row.run.id for row in rows],
    }


class _Place(NamedTuple):
    """Where an overlay goes: its file, its base, the engine that is calibrated, and whether the base has that one."""

    output: Path
    base: str
    engine: EngineSpec
    own: bool


def _place(options: argparse.Namespace) -> _Place | None:
    """What is written, or None; refused before any work is done."""
    if options.output is None:
        for name in ("system", "engine"):
            if getattr(options, name) is not None:
                raise SpecError(f"--{name}: found without -o, allowed with -o: it says what the overlay changes")
        return None
    from perfmodel.hardware import load_system
    from perfmodel.measure.overlay import check_output
    from perfmodel.scenario.inputs import under_engine

    output = check_output(options.output)
    base = _BASE if options.system is None else options.system
    if same_file(output, base):
        raise SpecError(f"-o: found {quoted(options.output)}, which is the base itself; allowed another file")
    system = load_system(base)
    own = options.engine is None and system.engine is not None
    engine = system.engine if own else under_engine(system, options.engine or _ENGINE).engine
    if engine is None:
        raise SpecError(f"--engine: found {quoted(options.engine)}, allowed: an engine, whose values the overlay holds")
    return _Place(output, base, engine, own)


def _that_count(values: dict[str, float], place: _Place) -> dict[str, float]:
    """The values that change something on the system; the others are told."""
    from perfmodel.hardware import load_system

    system = load_system(place.base).with_engine(place.engine)
    idle = {key: reason for key in values if (reason := system.idle(key)) is not None}
    if len(idle) == len(values):
        raise SpecError(f"--system: none of the fitted constants ({', '.join(idle)}) counts on system {system.name}")
    for key, reason in idle.items():
        say(f"{key} is not written: it {reason}")
    return {key: value for key, value in values.items() if key not in idle}


def _write(found: Calibration, place: _Place, options: argparse.Namespace) -> Path:
    """The overlay of a system under the engine that the constants belong to."""
    from perfmodel.evidence.calibration import engine_values
    from perfmodel.hardware import Source, write_overlay

    values = _that_count(engine_values(found.fit, place.engine.name), place)
    seen = found.unseen_source
    error = ", not checked on unseen sources"
    if seen is not None:
        error = f", median error on unseen sources {100 * seen.by_row.median:.0f} %"
    rule = "" if options.hold_out is None else f", held out: {options.hold_out}"
    file = "the bundled measured runs" if options.evidence is None else Path(options.evidence).name
    citation = (
        f"fitted to {found.in_sample.rows} rows of {_count(found.in_sample.sources, 'source')} in {file}{rule}{error}"
        " (perfmodel calibrate)"
    )
    sources = dict.fromkeys(values, Source(source="calibrated", citation=citation))
    keys = ", ".join(key.partition(".")[2] for key in values)
    return write_overlay(
        place.output,
        place.base,
        values,
        sources,
        parts=() if place.own else (place.engine,),
        description=f"{Path(place.base).stem} under {place.engine.name} with fitted {keys}",
    )


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _data(found: Calibration, rows: list[Predicted]) -> dict[str, Any]:
    """Everything as plain values."""
    fit = found.fit
    constants = [
        {
            "name": c.name,
            "unit": c.unit,
            "start": c.start,
            "absent": c.start if c.absent is None else c.absent,
            "low": c.low,
            "high": c.high,
            "value": fit.values[c.name],
            "fitted": bool(fit.fitted[i]),
            "relative_standard_error": _finite(fit.standard_errors[i]),
            "on_bound": bool(fit.on_bound[i]),
            "rows": int(fit.rows[i]),
            "correlations": {d.name: _finite(fit.correlations[i, j]) for j, d in enumerate(fit.constants) if j != i},
        }
        for i, c in enumerate(fit.constants)
    ]
    rejected = [{**one._asdict(), "message": str(one)} for one in found.rejected]
    unjudged = [{**one._asdict(), "message": str(one)} for one in found.unjudged]
    errors = {name: None if one is None else _errors(one, rows) for name, one in _kinds(found)}
    predictions = [
        {
            "id": row.run.id,
            "quantity": row.quantity,
            "measured": row.measured,
            "predicted": row.measured * math.exp(in_sample),
            "predicted_unseen": None if kept and found.unseen_source is None else row.measured * math.exp(unseen),
            "fitted": bool(kept),
        }
        for row, in_sample, unseen, kept in zip(rows, fit.residuals, found.residuals, fit.kept, strict=True)
    ]
    condition = _finite(fit.condition)
    return {
        "constants": constants, "condition": condition, "rejected": rejected, "unjudged": unjudged, "errors": errors,
        "rows": predictions,
    }  # fmt: skip


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _errors(one: Errors, rows: list[Predicted]) -> dict[str, Any]:
    return {
        "rows": one.rows,
        "sources": one.sources,
        "by_row": one.by_row._asdict(),
        "by_source": one.by_source._asdict(),
        "worst": {"id": rows[one.worst].run.id, "factor": one.worst_factor},
    }


def _kinds(found: Calibration) -> list[tuple[str, Errors | None]]:
    return [
        ("in_sample", found.in_sample),
        ("unseen_source", found.unseen_source),
        ("unseen_machine", found.unseen_machine),
        ("held_out", found.held_out),
    ]


def _text(found: Calibration, rows: list[Predicted]) -> str:
    """Tables of constants, of correlations that matter, and of errors."""
    from perfmodel.reports import number, percent, table

    fit = found.fit
    gone = {one.name for one in found.rejected}
    unjudged = {one.name for one in found.unjudged if one.by == "source"}
    lines = []
    for i, c in enumerate(fit.constants):
        states = {"rejected": c.name in gone, "not judged": c.name in unjudged, "on its bound": bool(fit.on_bound[i])}
        state = ", ".join(word for word, holds in states.items() if holds)
        value = fit.values[c.name]
        lines.append([
            c.name, c.unit, number(c.start), number(value), percent(_finite(fit.standard_errors[i])),
            f"{number(c.low)} to {number(c.high)}", str(int(fit.rows[i])), state,
        ])  # fmt: skip
    header = ("constant", "unit", "start", "fitted", "standard error", "allowed", "rows", "")
    parts = [table(header, lines, left=2), "", f"condition number {fit.condition:.3g}"]
    names = [c.name for c in fit.constants]
    for i in range(len(names)):
        parts += [
            f"correlation of {names[j]} and {names[i]}: {fit.correlations[i, j]:+.2f}"
            for j in range(i)
            if math.isfinite(fit.correlations[i, j])
        ]
    errors = [_row(name.replace("_", " "), one, rows) for name, one in _kinds(found) if one is not None]
    columns = ("error", "rows", "sources", "median", "p90", "bias", "within 1.25x", "within 1.5x", "worst")
    parts += ["", table(columns, [cells for pair in errors for cells in pair])]
    if found.unseen_source is None and not unjudged:
        parts.append("one source only: what the constants are worth elsewhere cannot be told")
    return "\n".join([*parts, *map(str, (*found.rejected, *found.unjudged))])


def _row(name: str, one: Errors, rows: list[Predicted]) -> tuple[list[str], list[str]]:
    """Two lines of a kind of error: rows weighing the same, and sources weighing the same."""
    worst = f"{rows[one.worst].run.id} {one.worst_factor:.2f}x"
    return (
        [name, str(one.rows), str(one.sources), *_cells(one.by_row), worst],
        ["  sources alike", "", "", *_cells(one.by_source), ""],
    )


def _cells(one: Statistics) -> list[str]:
    from perfmodel.reports import percent

    return [percent(value) for value in one]
