"""What the commands share: parsing, printing, and the options that say what is priced."""

import argparse
import json
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from perfmodel.errors import PerfModelError

EXIT_BAD_INPUT = 2


class Parser(argparse.ArgumentParser):
    """Argument errors in one line, like every other error; options are written in full."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{**options, "allow_abbrev": False})

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_BAD_INPUT, f"{self.prog}: error: {one_line(message)} (see {self.prog} --help)\n")


def add_command(
    commands: Any, name: str, text: str, run: Callable[[argparse.Namespace], int]
) -> argparse.ArgumentParser:
    """A command that calls ``run`` with its parsed options."""
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text)
    parser.set_defaults(run=run)
    return parser


def add_scenario(
    parser: argparse.ArgumentParser,
    *,
    model: str | None = None,
    from_file: bool = False,
    policies: str = "repeatable; the first is the baseline",
) -> None:
    """The options that say what is priced: model, system, trace, policies and workload.

    model : default of ``--model``; without one the option is required. from_file : an option that is not given is
        None, since a file may say what holds then. policies : what ``--policy`` takes.
    """
    inputs = {
        "model": ("CONFIG", "config.json, its folder, or a bundled name", model),
        "system": ("SPEC", "system spec", "h100-cxl2-ndp"),
        "trace": ("FILE", "trace", "tiny-mixtral-32l-mini"),
    }
    for name, (metavar, meaning, default) in inputs.items():
        what = meaning if default is None else f"{meaning} (default {default})"
        value = None if from_file else default
        parser.add_argument(f"--{name}", required=default is None, default=value, metavar=metavar, help=what)
    parser.add_argument(
        "--policy",
        action="append",
        metavar="NAME[:key=value,...]",
        help=f"{policies} (see perfmodel policies)",
    )
    parser.add_argument("--prompt", type=int, metavar="N", help="prompt tokens of every sequence (default: recorded)")
    parser.add_argument("--output", type=int, metavar="N", help="decode steps of every sequence (default: recorded)")
    parser.add_argument("--layers", choices=["cycle"], help="replay a trace that has another number of layers")
    parser.add_argument("--loss", metavar="FILE", help="loss table (.npz, key losses [L, E, 4])")


def default_policies(system: Any) -> list[str]:
    """The published systems that can run on this one."""
    from perfmodel.scenario.inputs import default_policies

    texts = list(default_policies(system))
    if system.ndp is None:
        say(f"system {system.name} has no near-data device; policies by default: {', '.join(texts)}")
    return texts


def one_line(message: object) -> str:
    """A message without line breaks of any kind, which names of files and arguments may hold."""
    return " ".join(str(message).split())


def print_text(text: str) -> None:
    """The answer, on standard output."""
    sys.stdout.write(text + "\n")


def print_json(document: Any) -> None:
    """The answer as one JSON document on standard output."""
    print_text(json.dumps(document, indent=2, allow_nan=False))


def say(text: str) -> None:
    """A message about what was done; on standard error, so that standard output stays one document."""
    sys.stderr.write(text + "\n")


def load_trace(source: str) -> Any:
    """Trace by bundled name or path."""
    from perfmodel.routing import RoutingTrace

    return RoutingTrace.load(source)


def load_plots() -> Any:
    """The package that draws. Figures go to files, so the backend of the caller's shell is of no use, or not there."""
    if "matplotlib" not in sys.modules:
        os.environ["MPLBACKEND"] = "agg"
        # Remarks about its own cache folder are not about the figures.
        logging.getLogger("matplotlib").setLevel(logging.ERROR)
    from perfmodel import plots

    return plots


def check_folder(option: str, folder: Path) -> None:
    """Refuse an output folder that cannot be written before any work is done, without creating anything."""
    try:
        nearest = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())
    except (OSError, ValueError) as error:
        raise PerfModelError(f"{option} {folder}: not a usable folder name ({error})") from None
    if not nearest.is_dir():
        raise PerfModelError(f"{option} {folder}: {nearest} is not a folder")
    if not os.access(nearest, os.W_OK):
        raise PerfModelError(f"{option} {folder}: {nearest} cannot be written")
