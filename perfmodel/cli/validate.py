"""``perfmodel validate``: what the model says beside simulators, published figures and measured runs."""

from __future__ import annotations

import argparse
import contextlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from perfmodel.cli.base import add_command, check_folder, load_plots, print_json, print_text, say
from perfmodel.errors import PerfModelError

if TYPE_CHECKING:
    from perfmodel.cli.pages import Part
    from perfmodel.evidence.candidates import Tried
    from perfmodel.evidence.reproduce import Reproduction
    from perfmodel.evidence.simulators import Comparison
    from perfmodel.evidence.validation import Validation

SECTIONS = ("simulators", "published", "measured")


class Findings(NamedTuple):
    """What was asked for; None where it was not."""

    simulators: tuple[tuple[Comparison, ...], tuple[Comparison, ...]] | None
    published: Reproduction | None
    measured: Validation | None
    tried: tuple[Tried, ...] | None


def add(commands: Any) -> None:
    """Add the command."""
    one = add_command(commands, "validate", "predictions beside simulators, published and measured figures", _validate)
    one.epilog = (
        "Measured rows are predicted by fits that have not seen their source; --markdown writes docs/validation.md."
    )
    one.add_argument("--only", choices=SECTIONS, help="this section alone")
    one.add_argument(
        "--evidence", metavar="FILE", help="measured runs, as in measured.toml (default: the bundled ones)"
    )
    one.add_argument("--rows", action="store_true", help="list every measured row")
    one.add_argument(
        "--candidates", action="store_true", help="try constants that could be fitted, too (half a minute)"
    )
    one.add_argument("--plot", metavar="DIR", help="draw predicted against measured, and what is left")
    shown = one.add_mutually_exclusive_group()
    shown.add_argument("--json", action="store_true", help="print one JSON document")
    shown.add_argument("--markdown", action="store_true", help="print a Markdown page")


def _validate(options: argparse.Namespace) -> int:
    if options.plot is not None:
        if not options.plot:
            raise PerfModelError("--plot: found an empty name, allowed: a folder")
        check_folder("--plot", Path(options.plot))
    asked = SECTIONS if options.only is None else (options.only,)
    for option, given in (("--evidence", options.evidence), ("--plot", options.plot), ("--rows", options.rows),
                          ("--candidates", options.candidates)):  # fmt: skip
        if given and "measured" not in asked:
            raise PerfModelError(f"{option}: found with --only {options.only}, allowed: with measured runs")
    found = find(asked, options.evidence, candidates=options.candidates)
    if options.json:
        from perfmodel.cli.validate_data import data

        print_json(data(found))
    elif options.markdown:
        print_text(markdown(found).rstrip("\n"))
    else:
        from perfmodel.cli.pages import as_text

        print_text(as_text(_parts(found, rows=options.rows)))
    if options.plot is not None and found.measured is not None:
        say(f"wrote {', '.join(_draw(found.measured, Path(options.plot)))} to {options.plot}")
    return 0


def find(asked: tuple[str, ...] = SECTIONS, evidence: str | None = None, *, candidates: bool = False) -> Findings:
    """Everything that is asked for.

    candidates : whether constants are tried that could be fitted.

    Raises
    ------
    PerfModelError : the evidence is not a file of measured runs, or its rows cannot carry the constants.
    """
    measured, tried = None, None
    if "measured" in asked:
        measured, tried = _measured(evidence, candidates)
    simulators = published = None
    if "simulators" in asked:
        from perfmodel.evidence.simulators import compare_ramulator, compare_scalesim

        simulators = compare_scalesim(), compare_ramulator()
    if "published" in asked:
        from perfmodel.evidence.reproduce import reproduce

        published = reproduce(explore=False)
    return Findings(simulators, published, measured, tried)


def _measured(evidence: str | None, candidates: bool) -> tuple[Validation, tuple[Tried, ...] | None]:
    from perfmodel.evidence.candidates import rejected_constants
    from perfmodel.evidence.measured import load_measured
    from perfmodel.evidence.validation import problem_of, validate
    from perfmodel.progress import bar, tell, watched

    if watched():
        tell("predicting measured runs, with every source and every machine left out (some seconds)")
    found = validate(evidence)
    if not candidates:
        return found, None
    rows, _ = problem_of(load_measured(evidence))
    with bar("constants", "constants") if watched() else _silent() as report:
        return found, rejected_constants(rows, report=report)


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    yield None


def _parts(found: Findings, *, rows: bool) -> list[Part]:
    from perfmodel.cli.validate_cases import case_parts, published_parts, simulator_parts
    from perfmodel.cli.validate_measured import measured_parts

    parts: list[Part] = []
    if found.measured is not None:
        measured = measured_parts(found.measured, found.tried, rows=rows)
        listed = measured[-1:] if rows else []
        parts += [*measured[: len(measured) - len(listed)], *case_parts(found.measured)]
        parts += listed
    if found.simulators is not None:
        parts += simulator_parts(*found.simulators)
    if found.published is not None:
        parts += published_parts(found.published)
    return parts


def markdown(found: Findings) -> str:
    """The page docs/validation.md."""
    from perfmodel.cli.pages import as_markdown
    from perfmodel.cli.validate_cases import peer_part

    parts = _parts(found, rows=found.measured is not None)
    listed = [part for part in parts if part.title == "Every row"]
    parts = [part for part in parts if part not in listed]
    lead = (
        "What the model says beside what was measured, simulated and published, and how far to trust it for a machine"
        " of your kind. This page is written by a command; a test compares it with what the command writes now:",
        "```sh\nperfmodel validate --candidates --markdown > docs/validation.md\n```",
        "The same without `--markdown` is for a terminal, `--json` has every number in full, `--plot DIR` draws"
        " predicted against measured and what is left by batch, bytes a kernel reads, and offloaded share, and"
        " `--evidence FILE` takes your own runs. Tell it of your machine with `perfmodel measure`"
        " ([measuring.md](measuring.md)), and fit constants to your runs with `perfmodel calibrate`.",
    )
    return as_markdown("How far to trust it", lead, [*parts, peer_part(), *listed])


def _draw(found: Validation, folder: Path) -> list[str]:
    plots = load_plots()
    names = []
    for name, figure in plots.validation_figures(found).items():
        for suffix in ("png", "svg"):
            plots.save(figure, folder / f"{name}.{suffix}")
        names.append(f"{name}.png/.svg")
    return names


def finite(value: float) -> float | None:
    """A number for JSON, which has no word for what is not finite."""
    return float(value) if math.isfinite(value) else None
