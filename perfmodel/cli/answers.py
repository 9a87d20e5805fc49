"""Questions to a sweep or a scenario: ``pareto``, ``best``, ``sensitivity`` and ``break-even``."""

import argparse
from typing import Any

from perfmodel.cli.base import add_command, add_scenario, load_model, print_json, print_text, quoted, say
from perfmodel.errors import PerfModelError

_MODEL = "mixtral-8x7b"
_ONE = ("context-aware",)
_WHERE = "such as 'tpot_p99_ms < 50 and gpu_memory_gb <= 80'; repeatable, all must hold"
_TWO = ("context-aware:mean_bits=3", "hobbit")


def add(commands: Any) -> None:
    """Add the commands."""
    one = add_command(
        commands, "sensitivity", "show what a metric depends on, one number at a time or all", _sensitivity
    )
    one.add_argument("--key", action="append", metavar="AXIS", help="repeatable (default: every hardware number)")
    one.add_argument(
        "--change", type=float, metavar="SHARE", help="relative change of every number, below 1 (default 0.1)"
    )
    one.add_argument(
        "--range",
        action="append",
        metavar="AXIS=LOW:HIGH[:log]",
        help="repeatable; ends of an axis, instead of a change",
    )
    one.add_argument("--metric", default="tpot_mean_s", metavar="NAME", help="metric (default %(default)s)")
    one.add_argument("--sobol", action="store_true", help="all at once: shares of the variance (Sobol indices)")
    one.add_argument("--n", type=int, metavar="N", help="with --sobol: base samples, a power of two (default 1024)")
    one.add_argument("--seed", type=int, metavar="N", help="with --sobol: seed of the samples (default 0)")
    one.add_argument("-o", "--out", metavar="FILE", help="also save the result (.nc, .zarr, .csv or .parquet)")
    finish(one, f"repeatable, by default {_ONE[0]}")

    one = add_command(commands, "break-even", "find where one policy overtakes another along an axis", _break_even)
    one.epilog = exit_codes("no value lets the two be compared") + " No crossing is an answer too: exit code 0."
    one.add_argument(
        "--axis", required=True, metavar="NAME[=LOW:HIGH]", help="axis of numbers, and the range to search"
    )
    one.add_argument("--along", metavar="NAME=VALUES", help="one search for each value of a further axis")
    one.add_argument("--metric", default="tpot_mean_s", metavar="NAME", help="metric (default %(default)s)")
    one.add_argument("-o", "--out", metavar="FILE", help="also save the result (.nc, .zarr, .csv or .parquet)")
    finish(one, f"given twice, by default {_TWO[0]} and {_TWO[1]}")

    one = add_command(commands, "pareto", "list the points of a sweep that no other point beats", _pareto)
    one.epilog = exit_codes("no point meets the conditions")
    one.add_argument("dataset", metavar="DATASET", help="saved sweep (.nc or .zarr)")
    small = "repeatable; metrics or axes that should be small"
    large = "repeatable; metrics or axes that should be large"
    one.add_argument("--minimise", "--minimize", action="append", metavar="A,B", help=small)
    one.add_argument("--maximise", "--maximize", action="append", metavar="A,B", help=large)
    one.add_argument("--where", action="append", metavar="EXPR", help=f"which points count, {_WHERE}")
    one.add_argument("-o", "--out", metavar="FILE", help="also save the points (.nc, .zarr, .csv or .parquet)")
    one.add_argument("--json", action="store_true", help="print one JSON document")

    one = add_command(commands, "best", "show the best point of a sweep, among those that meet a condition", _best)
    one.epilog = exit_codes("no point meets the conditions")
    one.add_argument("dataset", metavar="DATASET", help="saved sweep (.nc or .zarr)")
    one.add_argument(
        "--metric", default="tpot_mean_s", metavar="NAME", help="what should be best (default %(default)s)"
    )
    way = one.add_mutually_exclusive_group()
    way.add_argument(
        "--maximise", "--maximize", action="store_true", help="more is better (default: as the metric says)"
    )
    way.add_argument("--minimise", "--minimize", action="store_true", help="less is better")
    one.add_argument("--where", action="append", metavar="EXPR", help=f"condition, {_WHERE}")
    one.add_argument("--json", action="store_true", help="print one JSON document")


def exit_codes(nowhere: str) -> str:
    """What the exit codes of a question mean."""
    return f"Exit code: 0 with an answer, 1 if {nowhere} (a sentence on standard output says why), 2 after bad input."


def finish(parser: argparse.ArgumentParser, policies: str) -> None:
    """Options of every question to a scenario."""
    add_scenario(parser, model=_MODEL, policies=policies)
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def scenario_of(options: argparse.Namespace, policies: tuple[str, ...]) -> Any:
    """The scenario that the options describe; ``policies`` where they name none."""
    from perfmodel.scenario import Scenario

    return Scenario.of(
        load_model(options),
        options.system,
        options.trace,
        options.policy or policies,
        prompt=options.prompt,
        output=options.output,
        losses=options.loss,
        layers=options.layers,
        batch=options.batch,
        batch_of=options.batch_of,
        micro_batch=options.micro_batch,
        engine=options.engine,
    )


def pair(option: str, text: str, form: str) -> tuple[str, str]:
    """Name and value of ``NAME=VALUE``."""
    name, equals, value = text.partition("=")
    if not (equals and name.strip() and value.strip()):
        raise PerfModelError(f"{option}: found {quoted(text)}, allowed {form}")
    return name.strip(), value.strip()


def _check_out(out: str | None, made_from: str | None = None) -> None:
    """Refuse an output that cannot be written, or would replace what it is made from, before any work is done."""
    if out is None:
        return
    from perfmodel.sweeps.outputs import check_output

    check_output(out, made_from)


def _save(dataset: Any, out: str | None) -> None:
    if out is None:
        return
    from perfmodel.sweeps.dataset import save

    save(dataset, out)
    say(f"wrote {out}")


def _sensitivity(options: argparse.Namespace) -> int:
    from perfmodel.answers import sobol_indices, tornado
    from perfmodel.answers.curve import numeric_axis
    from perfmodel.answers.ranges import range_of
    from perfmodel.cli import answer_reports as text

    _check_out(options.out)
    if not options.sobol and (options.n is not None or options.seed is not None):
        raise PerfModelError("--n and --seed: allowed with --sobol only")
    if options.range and (options.change is not None or options.key):
        raise PerfModelError("--range: not allowed with --change or --key; it says which axes, and how far")
    scenario = scenario_of(options, _ONE)
    pairs = [pair("--range", one, "AXIS=LOW:HIGH[:log]") for one in options.range or ()]
    ranges = {name: range_of(value, numeric_axis(scenario, name)) for name, value in pairs}
    if len(ranges) < len(pairs):
        raise PerfModelError("--range: an axis is given twice")
    change: Any = 0.1 if options.change is None else options.change
    if not options.sobol or not ranges:
        if not options.sobol and any(one.log for one in ranges.values()):
            raise PerfModelError("--range: log is allowed with --sobol only")
        given = {name: (one.low, one.high) for name, one in ranges.items()}
        found = tornado(scenario, options.key, options.metric, given or change)
    if options.sobol:
        if ranges:
            limits: Any = {name: (one.low, one.high, *(["log"] if one.log else [])) for name, one in ranges.items()}
        else:  # what has an effect alone, each as far as there
            limits = dict(zip(found.key.values.tolist(), map(tuple, found.setting.values.tolist()), strict=True))
        n, seed = 1024 if options.n is None else options.n, options.seed or 0
        found = sobol_indices(scenario, limits, n, seed, options.metric)
    _save(found, options.out)
    if options.json:
        print_json(text.sobol_data(found) if options.sobol else text.tornado_data(found))
    else:
        print_text(text.sobol(found) if options.sobol else text.tornado(found))
    return 0


def _break_even(options: argparse.Namespace) -> int:
    from perfmodel.answers import break_even
    from perfmodel.cli import answer_reports as text
    from perfmodel.scenario.inputs import without_options

    _check_out(options.out)
    if options.policy is not None and len(options.policy) != 2:
        raise PerfModelError(f"--policy: found {len(options.policy)}, allowed two policies to compare")
    # A policy is not named after an option that varies.
    varied = [one.partition("=")[0].strip() for one in (options.axis, options.along or "")]
    scenario = scenario_of(options, without_options(_TWO, varied))
    axis: Any = options.axis if "=" not in options.axis else pair("--axis", options.axis, "NAME=LOW:HIGH")
    along = None if options.along is None else pair("--along", options.along, "NAME=VALUES")
    found = break_even(scenario, axis, metric=options.metric, along=along)
    _save(found, options.out)
    if options.json:
        print_json(text.break_even_data(found))
    else:
        print_text(text.break_even(found))
    return 0


def _pareto(options: argparse.Namespace) -> int:
    from perfmodel.answers import pareto
    from perfmodel.cli import answer_reports as text
    from perfmodel.sweeps.dataset import open_dataset

    _check_out(options.out, options.dataset)
    small, large = (
        [name.strip() for part in parts or () for name in part.split(",")]
        for parts in (options.minimise, options.maximise)
    )
    with open_dataset(options.dataset) as dataset:
        found = pareto(dataset, small, large, options.where).load()
    _save(found, options.out)
    if options.json:
        print_json(text.pareto_data(found))
    else:
        print_text(text.pareto(found))
    return 0


def _best(options: argparse.Namespace) -> int:
    from perfmodel.answers import best
    from perfmodel.answers.grid import Grid
    from perfmodel.cli import answer_reports as text
    from perfmodel.sweeps.dataset import open_dataset

    with open_dataset(options.dataset) as dataset:
        maximise = True if options.maximise else False if options.minimise else None
        found = best(dataset, options.metric, options.where, maximise=maximise).load()
        name = Grid(dataset).find(options.metric, "metric")
    given = [" ".join(one.split()) for one in options.where or ()]
    where = " and ".join(given if len(given) == 1 else [f"({one})" for one in given]) or None
    if options.json:
        print_json(text.best_data(found, name, where))
    else:
        print_text(text.best(found, name, where))
    return 0
