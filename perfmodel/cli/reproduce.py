"""``perfmodel reproduce``: the published figures, recomputed."""

import argparse
from pathlib import Path
from typing import Any

from perfmodel.cli.base import add_command, check_folder, load_plots, load_trace, print_json, print_text, say
from perfmodel.errors import PerfModelError


def add(commands: Any) -> None:
    """Add the command."""
    one = add_command(commands, "reproduce", "recompute the published figures beside what was published", _reproduce)
    one.add_argument("--json", action="store_true", help="print one JSON document")
    one.add_argument(
        "--out", default="reproduction", metavar="DIR", help="folder for figures, CSV and fitted constants"
    )
    one.add_argument("--system", metavar="SPEC", help="use this system for all columns")
    one.add_argument("--trace", metavar="FILE", help="routing trace: a file or a bundled name")


def _reproduce(options: argparse.Namespace) -> int:
    from perfmodel import reports
    from perfmodel.evidence.reproduce import reproduce

    if not options.out:
        raise PerfModelError("--out: found an empty name, allowed: a folder")
    folder = Path(options.out)
    check_folder("--out", folder)
    trace = None if options.trace is None else load_trace(options.trace)
    result = reproduce(trace=trace, system=options.system)
    written = _write_reproduction(result, folder)
    if options.json:
        print_json(result.to_dict())
    else:
        print_text(reports.reproduction(result))
    say(f"wrote {', '.join(written)} to {folder}")
    return 0


def _write_reproduction(result: Any, folder: Path) -> list[str]:
    """Figures, the table and the fitted constants as an overlay spec."""
    from perfmodel.evidence.context import write_quality_csv
    from perfmodel.evidence.reproduce import write_calibrated_system, write_csv

    plots = load_plots()
    names = []
    for name, figure in plots.reproduction_figures(result).items():
        for suffix in ("png", "svg"):
            plots.save(figure, folder / f"{name}.{suffix}")
        names.append(f"{name}.png/.svg")
    write_csv(result, folder / "reproduce.csv")
    write_quality_csv(result.quality, folder / "quality.csv")
    write_calibrated_system(result, folder / "calibrated.toml")
    return [*names, "reproduce.csv", "quality.csv", "calibrated.toml"]
