"""The whole command line, and what happens to errors."""

import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from perfmodel import __version__
from perfmodel.cli import (
    answers,
    breakeven,
    calibrate,
    compare,
    losses,
    measure,
    model,
    plot,
    rank,
    reproduce,
    solve,
    specs,
    sweep,
    trace,
    tune,
    validate,
)
from perfmodel.cli.base import EXIT_BAD_INPUT, Parser, no_answer, one_line, say
from perfmodel.errors import NoAnswerError, PerfModelError


def build_parser() -> Parser:
    """The whole command line."""
    parser = Parser(
        prog="perfmodel",
        description="What a Mixture-of-Experts model costs to serve when its experts are offloaded.",
    )
    parser.add_argument("--version", action="version", version=f"perfmodel {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for group in (
        reproduce, compare, rank, sweep, solve, answers, breakeven, tune, model, trace, losses, plot, specs, calibrate,
        measure, validate,
    ):  # fmt: skip
        group.add(commands)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    The exit code is 0; 1 for a question without an answer, with a sentence on standard output; or 2 after bad input,
    with one line on standard error.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by whoever started this, who wants no output, not an error
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal that lacks a character still gets the rest
    try:
        options = build_parser().parse_args(arguments)
        try:
            code: int = options.run(options)
        except NoAnswerError as error:
            code = no_answer(error, as_json=getattr(options, "json", False))
        sys.stdout.flush()
    except PerfModelError as error:
        say(f"perfmodel: error: {one_line(error)}")
        return EXIT_BAD_INPUT
    except BrokenPipeError:
        # The reader of a pipe went away; nothing is left to say, and Python must not say it at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        say(f"perfmodel: error: {error.filename2 or error.filename or 'output'}: {error.strerror or error}")
        return EXIT_BAD_INPUT
    except MemoryError:
        say("perfmodel: error: not enough memory for this; allowed: less at once, such as fewer points, rows or tokens")
        return EXIT_BAD_INPUT
    return code
