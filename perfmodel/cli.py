"""The command line: ``perfmodel reproduce | compare | policies | specs``.

Heavy imports happen inside the commands, so that help and mistakes answer at once.
"""

import argparse
import io
import json
import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from perfmodel import __version__
from perfmodel.errors import PerfModelError

EXIT_BAD_INPUT = 2
_DEFAULT_POLICIES = ("monde", "hobbit", "context-aware:mean_bits=3", "context-aware:mean_bits=2")


class _Parser(argparse.ArgumentParser):
    """Argument errors in one line, like every other error; options are written in full."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{**options, "allow_abbrev": False})

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_BAD_INPUT, f"{self.prog}: error: {_one_line(message)} (see {self.prog} --help)\n")


def _one_line(message: object) -> str:
    # Names of files and arguments may hold line breaks of any kind.
    return " ".join(str(message).split())


def _print(text: str) -> None:
    sys.stdout.write(text + "\n")


def _print_json(document: Any) -> None:
    _print(json.dumps(document, indent=2, allow_nan=False))


def _say(text: str) -> None:
    """A message about what was done; on standard error, so that standard output stays one document."""
    sys.stderr.write(text + "\n")


def _plots() -> Any:
    """The module that draws. Figures go to files, so the backend of the caller's shell is of no use, or not there."""
    if "matplotlib" not in sys.modules:
        os.environ["MPLBACKEND"] = "agg"
        # Remarks about its own cache folder are not about the figures.
        logging.getLogger("matplotlib").setLevel(logging.ERROR)
    from perfmodel import plots

    return plots


def _load_trace(source: str) -> Any:
    from perfmodel.routing import RoutingTrace

    return RoutingTrace.load(source)


def _reproduce(options: argparse.Namespace) -> int:
    from perfmodel import reports
    from perfmodel.evidence.reproduce import reproduce

    if not options.out:
        raise PerfModelError("--out: found an empty name, allowed: a folder")
    folder = Path(options.out)
    _check_folder(folder)
    trace = None if options.trace is None else _load_trace(options.trace)
    result = reproduce(trace=trace, system=options.system)
    written = _write_reproduction(result, folder)
    if options.json:
        _print_json(result.to_dict())
    else:
        _print(reports.reproduction(result))
    _say(f"wrote {', '.join(written)} to {folder}")
    return 0


def _check_folder(folder: Path) -> None:
    """Refuse an output folder that cannot be written before any work is done, without creating anything."""
    try:
        nearest = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())
    except (OSError, ValueError) as error:
        raise PerfModelError(f"--out {folder}: not a usable folder name ({error})") from None
    if not nearest.is_dir():
        raise PerfModelError(f"--out {folder}: {nearest} is not a folder")
    if not os.access(nearest, os.W_OK):
        raise PerfModelError(f"--out {folder}: {nearest} cannot be written")


def _write_reproduction(result: Any, folder: Path) -> list[str]:
    """Figures, the table and the fitted constants as an overlay spec."""
    from perfmodel.evidence.reproduce import write_calibrated_system, write_csv

    plots = _plots()
    names = []
    for name, figure in plots.reproduction_figures(result).items():
        for suffix in ("png", "svg"):
            plots.save(figure, folder / f"{name}.{suffix}")
        names.append(f"{name}.png/.svg")
    write_csv(result, folder / "reproduce.csv")
    write_calibrated_system(result, folder / "calibrated.toml")
    return [*names, "reproduce.csv", "calibrated.toml"]


def _compare(options: argparse.Namespace) -> int:
    from perfmodel import reports
    from perfmodel.bitwidth import LossTable
    from perfmodel.hardware import load_system
    from perfmodel.model import MoEModel
    from perfmodel.run import make_replay, plan_run

    if options.plot is not None:
        from perfmodel.plots import check_suffix

        check_suffix(options.plot)  # before any work is done
    model = MoEModel.from_config(options.model)
    system = load_system(options.system)
    texts = options.policy or _default_policies(system)
    trace = _load_trace(options.trace)
    losses = None if options.loss is None else LossTable.load(options.loss)
    replay = make_replay(model, trace, options.prompt, options.output, options.layers)
    runs = [plan_run(model, system, replay, text, losses=losses) for text in texts]
    evaluations = [run.price() for run in runs]
    differences = [_check(run, one) for run, one in zip(runs, evaluations, strict=True)] if options.check else None
    if options.plot is not None:
        plots = _plots()
        capacity = {system.name: system.gpu.memory_capacity_bytes}
        plots.save(plots.comparison_figure(evaluations, labels=texts, gpu_capacity_bytes=capacity), Path(options.plot))
        _say(f"wrote {options.plot}")
    if options.json:
        _print_json(reports.comparison_data(evaluations, model, system, trace, differences))
    else:
        _print(reports.comparison(evaluations, differences))
    return 0


def _default_policies(system: Any) -> list[str]:
    """The published systems that can run on this one."""
    from perfmodel.policies import parse_policy

    if system.ndp is not None:
        return list(_DEFAULT_POLICIES)
    texts = [text for text in _DEFAULT_POLICIES if not parse_policy(text).needs_ndp]
    _say(f"system {system.name} has no near-data device; policies by default: {', '.join(texts)}")
    return texts


def _check(run: Any, evaluation: Any) -> float:
    """Largest relative difference between the states and the plain loop over every pick."""
    from perfmodel.oracle import largest_difference, per_pick

    return largest_difference(evaluation, per_pick(run))


def _policies(options: argparse.Namespace) -> int:
    from perfmodel import reports

    if options.json:
        _print_json(reports.policies_data())
    else:
        _print(reports.policies())
    return 0


def _specs_list(options: argparse.Namespace) -> int:
    from perfmodel import reports
    from perfmodel.hardware import list_specs

    entries = list_specs()
    if options.json:
        _print_json([{"kind": e.kind, "name": e.name, "description": e.description} for e in entries])
    else:
        _print(reports.spec_list(entries))
    return 0


def _specs_show(options: argparse.Namespace) -> int:
    from perfmodel import reports
    from perfmodel.hardware import load_spec

    spec = load_spec(options.name)
    items, choices = spec.constants(), spec.choices()
    derived = reports.derived_rate(spec)
    if options.json:
        data = {
            "name": spec.name,
            "description": spec.description,
            "constants": [c._asdict() for c in items],
            "choices": [c._asdict() for c in choices],
            "derived": derived,
        }
        _print_json(data)
    else:
        rate = "" if derived is None else f"\n\n{reports.derived_rate_line(derived)}"
        _print(f"{spec.name}: {spec.description}\n\n{reports.constants(items, choices)}{rate}")
    return 0


def _specs_validate(options: argparse.Namespace) -> int:
    from perfmodel.hardware import load_spec

    bad = 0
    for name in options.files:
        try:
            spec = load_spec(name)
        except PerfModelError as error:
            _say(f"perfmodel: error: {_one_line(error)}")
            bad += 1
        else:
            _print(f"{name}: ok ({spec.kind} {spec.name})")
    return EXIT_BAD_INPUT if bad else 0


def _specs_schema(options: argparse.Namespace) -> int:
    from perfmodel.hardware import json_schema

    _print_json(json_schema(options.kind))
    return 0


def _add(commands: Any, name: str, text: str, run: Callable[[argparse.Namespace], int]) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text)
    parser.set_defaults(run=run)
    return parser


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = _Parser(
        prog="perfmodel",
        description="What a Mixture-of-Experts model costs to serve when its experts are offloaded.",
    )
    parser.add_argument("--version", action="version", version=f"perfmodel {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    one = _add(commands, "reproduce", "recompute the published figures beside what was published", _reproduce)
    one.add_argument("--json", action="store_true", help="print one JSON document")
    one.add_argument(
        "--out", default="reproduction", metavar="DIR", help="folder for figures, CSV and fitted constants"
    )
    one.add_argument("--system", metavar="SPEC", help="use this system for all columns")
    one.add_argument("--trace", metavar="FILE", help="routing trace: a file or a bundled name")

    one = _add(commands, "compare", "compare policies on one model, system and trace", _compare)
    one.add_argument("--model", required=True, metavar="CONFIG", help="config.json, its folder, or a bundled name")
    one.add_argument("--system", default="h100-cxl2-ndp", metavar="SPEC", help="system spec (default %(default)s)")
    one.add_argument("--trace", default="tiny-mixtral-32l-mini", metavar="FILE", help="trace (default %(default)s)")
    one.add_argument(
        "--policy",
        action="append",
        metavar="NAME[:key=value,...]",
        help="repeatable; the first is the baseline (see perfmodel policies)",
    )
    one.add_argument("--prompt", type=int, metavar="N", help="prompt tokens of every sequence (default: as recorded)")
    one.add_argument("--output", type=int, metavar="N", help="decode steps of every sequence (default: as recorded)")
    one.add_argument("--layers", choices=["cycle"], help="replay a trace that has another number of layers")
    one.add_argument("--loss", metavar="FILE", help="loss table (.npz, key losses [L, E, 4])")
    one.add_argument("--json", action="store_true", help="print one JSON document")
    one.add_argument("--plot", metavar="FILE", help="also draw the comparison (.png, .svg or .pdf)")
    one.add_argument("--check", action="store_true", help="repeat every sum by the plain loop over picks (slow)")

    one = _add(commands, "policies", "list the systems that can be compared, with their options", _policies)
    one.add_argument("--json", action="store_true", help="print one JSON document")

    group = commands.add_parser("specs", help="list, show and validate hardware specs")
    specs = group.add_subparsers(metavar="ACTION", required=True)
    one = _add(specs, "list", "list the bundled specs", _specs_list)
    one.add_argument("--json", action="store_true", help="print one JSON document")
    one = _add(specs, "show", "show every number and choice of a spec with its source", _specs_show)
    one.add_argument("name", metavar="NAME", help="bundled name or file")
    one.add_argument("--json", action="store_true", help="print one JSON document")
    one = _add(specs, "validate", "check spec files", _specs_validate)
    one.add_argument("files", nargs="+", metavar="FILE")
    one = _add(specs, "schema", "print the JSON Schema of a kind of spec, for editors", _specs_schema)
    one.add_argument("kind", metavar="KIND", help="gpu, link, ndp, cpu, dram or system")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit code is 0, or 2 after bad input with one line on standard error."""
    options = build_parser().parse_args(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal that lacks a character still gets the rest
    try:
        code: int = options.run(options)
        sys.stdout.flush()
    except PerfModelError as error:
        _say(f"perfmodel: error: {_one_line(error)}")
        return EXIT_BAD_INPUT
    except BrokenPipeError:
        # The reader of a pipe went away; nothing is left to say, and Python must not say it at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        _say(f"perfmodel: error: {error.filename2 or error.filename or 'output'}: {error.strerror or error}")
        return EXIT_BAD_INPUT
    except MemoryError:
        _say("perfmodel: error: not enough memory; use a shorter --output, fewer sequences or a smaller trace")
        return EXIT_BAD_INPUT
    except KeyboardInterrupt:
        _say("perfmodel: interrupted")
        return 130
    return code
