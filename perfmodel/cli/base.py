"""What the commands share: parsing, printing, and the options that say what is priced."""

import argparse
import json
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from perfmodel.errors import NoAnswerError, PerfModelError

#: Exit codes: a question was understood and has no answer; it was not understood.
EXIT_NO_ANSWER, EXIT_BAD_INPUT = 1, 2
#: Letters of a message; the middle of a longer one is left out.
_LONGEST = 1200


def _once(action: type[argparse.Action]) -> type[argparse.Action]:
    """A kind of option that may be given once only: a second value would silently replace the first."""

    class Once(action):  # type: ignore[valid-type,misc]
        def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
            given = namespace.__dict__.setdefault(_GIVEN, set())
            if self.option_strings and id(self) in given:
                raise argparse.ArgumentError(self, "given twice, allowed: once")
            given.add(id(self))
            super().__call__(parser, namespace, values, option_string)

    return Once


_GIVEN = "_given"


class Parser(argparse.ArgumentParser):
    """Argument errors in one line, like every other error; options are written in full.

    An option that is not repeatable (``action="append"``) is refused when it is given twice.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**{**options, "allow_abbrev": False})
        for name in (None, "store", "store_const", "store_true", "store_false"):
            self.register("action", name, _once(self._registry_get("action", name)))

    def error(self, message: str) -> NoReturn:
        # What was typed comes first in these messages, and what is allowed last.
        self.exit(EXIT_BAD_INPUT, f"{self.prog}: error: {one_line(message, 400)} (see {self.prog} --help)\n")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        # Left-over arguments of a command are its own error, so that the message names its help.
        found, rest = super().parse_known_args(args, namespace)
        if rest:
            self.error(f"unrecognized arguments: {' '.join(rest)}")
        return found, rest

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        # argparse takes ``--option=--`` for an option without its value, and hands over an empty list.
        if action.option_strings and "--" in arg_strings:
            self.error(f"argument {'/'.join(action.option_strings)}: found '--', allowed a value")
        return super()._get_values(action, arg_strings)


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
    policies: str | None = "repeatable; the first is the baseline",
) -> None:
    """The options that say what is priced: model, system, trace, policies and workload.

    model : default of ``--model``; without one the option is required. from_file : an option that is not given is
        None, since a file may say what holds then. policies : what ``--policy`` takes; None without it.
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
    if not from_file:
        add_formats(parser)
    add_engine(parser)
    if policies is not None:
        parser.add_argument(
            "--policy",
            action="append",
            metavar="NAME[:key=value,...]",
            help=f"{policies} (see perfmodel policies)",
        )
    parser.add_argument("--prompt", type=int, metavar="N", help="prompt tokens of every sequence (default: recorded)")
    parser.add_argument("--output", type=int, metavar="N", help="decode steps of every sequence (default: recorded)")
    parser.add_argument(
        "--batch", type=int, default=None if from_file else 1, metavar="N", help="tokens of a decode step (default 1)"
    )
    parser.add_argument(
        "--batch-of",
        choices=["sequences", "tokens"],
        default=None if from_file else "sequences",
        help="a step's tokens are the next of as many sequences, or follow one another (default sequences)",
    )
    parser.add_argument("--micro-batch", type=int, metavar="N", help="tokens of a prefill pass (default: one pass)")
    parser.add_argument("--layers", choices=["cycle"], help="replay a trace that has another number of layers")
    parser.add_argument("--loss", "--losses", metavar="FILE", help="loss table (.npz; widths up to 4 bits are used)")


def add_formats(parser: argparse.ArgumentParser) -> None:
    """The option of the formats that a model is stored in."""
    parser.add_argument(
        "--dtype",
        action="append",
        metavar="CLASS=FORMAT",
        help="store a class of tensors otherwise, as in expert=q4_k or all=q8_0; repeatable (see model formats)",
    )


def load_model(options: argparse.Namespace) -> Any:
    """The model of ``--model``, with the formats of ``--dtype``."""
    from perfmodel.model import MoEModel

    model = MoEModel.from_config(options.model)
    return model.stored_as(formats(options)) if options.dtype else model


def formats(options: argparse.Namespace) -> list[str]:
    """What ``--dtype`` says, one choice each."""
    return [choice for text in options.dtype or () for choice in text.split(",")]


def add_engine(parser: argparse.ArgumentParser) -> None:
    """The option of the engine that a system runs under."""
    text = "inference engine of the system: bundled profile or file, or none (default: the system's own)"
    parser.add_argument("--engine", metavar="NAME", help=text)


def load_machine(options: argparse.Namespace) -> Any:
    """The system of ``--system``, under the engine of ``--engine`` where that is given."""
    from perfmodel.scenario.inputs import load_input, under_engine

    return under_engine(load_input("system", options.system), options.engine)


def default_policies(system: Any) -> list[str]:
    """The published systems that can run on this one."""
    from perfmodel.scenario.inputs import default_policies

    texts = list(default_policies(system))
    if system.ndp is None:
        say(f"system {system.name} has no near-data device; policies by default: {', '.join(texts)}")
    return texts


def no_answer(error: NoAnswerError, *, as_json: bool) -> int:
    """Say on standard output that a question has no answer, and why."""
    if as_json:
        print_json({"answer": None, "reason": str(error), **error.details})
    else:
        print_text(one_line(error))
    return EXIT_NO_ANSWER


def one_line(message: object, longest: int = _LONGEST) -> str:
    """A message without line breaks of any kind, which names of files and arguments may hold, and never very long."""
    text = " ".join(str(message).split())
    half = longest // 2
    return text if len(text) <= longest else f"{text[:half]} ... {text[-half:]}"


def quoted(text: str) -> str:
    """An argument as it was typed, for messages; never long."""
    found = ascii(text)
    return found if len(found) <= 60 else f"{found[:57]}..."


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


def same_file(output: Path, base: str) -> bool:
    """Whether an output would replace the file that it is made from."""
    try:
        return output.exists() and Path(base).exists() and output.samefile(base)
    except (OSError, ValueError):
        return False


def check_figure(option: str, target: str | Path) -> None:
    """Refuse the file of a figure whose suffix names no format, or whose folder cannot be written, before any work."""
    from perfmodel.plots import check_suffix

    check_suffix(target)
    check_folder(option, Path(target).parent)
