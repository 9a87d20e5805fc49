"""Questions to a sweep or a scenario: ``pareto``, ``best``, ``sensitivity``, ``break-even`` and ``solve``."""

import argparse
from typing import Any

from perfmodel.cli.base import add_command, add_scenario, check_folder, print_json, print_text, say
from perfmodel.errors import PerfModelError

_MODEL = "mixtral-8x7b"
_ONE = ("context-aware",)
_TWO = ("context-aware:mean_bits=3", "hobbit")


def add(commands: Any) -> None:
    """Add the commands."""
    one = add_command(commands, "solve", "find the value of an axis at which a metric meets a target", _solve)
    one.add_argument("--for", required=True, dest="axis", metavar="AXIS", help="what to find, any axis of numbers")
    one.add_argument("--target", required=True, metavar="NAME=VALUE", help="such as tpot_ms=50 or tok_per_s=20")
    one.add_argument("--low", type=float, metavar="X", help="low end of the search (default: the axis' own)")
    one.add_argument("--high", type=float, metavar="X", help="high end of the search (default: the axis' own)")
    _finish(one, f"one policy, by default {_ONE[0]}")

    one = add_command(
        commands, "sensitivity", "show what a metric depends on, one number at a time or all", _sensitivity
    )
    one.add_argument("--key", action="append", metavar="AXIS", help="repeatable (default: every hardware number)")
    one.add_argument("--change", type=float, metavar="SHARE", help="relative change of every number (default 0.1)")
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
    _finish(one, f"repeatable, by default {_ONE[0]}")

    one = add_command(commands, "break-even", "find where one policy overtakes another along an axis", _break_even)
    one.add_argument(
        "--axis", required=True, metavar="NAME[=LOW:HIGH]", help="axis of numbers, and the range to search"
    )
    one.add_argument("--along", metavar="NAME=VALUES", help="one search for each value of a further axis")
    one.add_argument("--metric", default="tpot_mean_s", metavar="NAME", help="metric (default %(default)s)")
    one.add_argument("-o", "--out", metavar="FILE", help="also save the result (.nc, .zarr, .csv or .parquet)")
    _finish(one, f"given twice, by default {_TWO[0]} and {_TWO[1]}")

    one = add_command(commands, "pareto", "list the points of a sweep that no other point beats", _pareto)
    one.add_argument("dataset", metavar="DATASET", help="saved sweep (.nc or .zarr)")
    one.add_argument("--minimise", action="append", metavar="A,B", help="metrics or axes that should be small")
    one.add_argument("--maximise", action="append", metavar="A,B", help="metrics or axes that should be large")
    one.add_argument("-o", "--out", metavar="FILE", help="also save the points (.nc, .zarr, .csv or .parquet)")
    one.add_argument("--json", action="store_true", help="print one JSON document")

    one = add_command(commands, "best", "show the best point of a sweep, among those that meet a condition", _best)
    one.add_argument("dataset", metavar="DATASET", help="saved sweep (.nc or .zarr)")
    one.add_argument(
        "--metric", default="tpot_mean_s", metavar="NAME", help="what should be best (default %(default)s)"
    )
    one.add_argument("--where", metavar="EXPR", help="such as 'tpot_p99_s < 0.05 and gpu_memory_bytes <= 8e10'")
    one.add_argument("--json", action="store_true", help="print one JSON document")


def _finish(parser: argparse.ArgumentParser, policies: str) -> None:
    """Options of every question to a scenario."""
    add_scenario(parser, model=_MODEL, policies=policies)
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def _scenario(options: argparse.Namespace, policies: tuple[str, ...]) -> Any:
    from perfmodel.scenario import Scenario

    return Scenario.of(
        options.model,
        options.system,
        options.trace,
        options.policy or policies,
        prompt=options.prompt,
        output=options.output,
        losses=options.loss,
        layers=options.layers,
    )


def _pair(option: str, text: str, form: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (equals and name.strip() and value.strip()):
        raise PerfModelError(f"{option}: found {text!r}, allowed {form}")
    return name.strip(), value.strip()


def _ends(scenario: Any, option: str, name: str, text: str) -> Any:
    """Low and high end of an axis as written, with whether to go by factors."""
    from perfmodel.sweeps.axes import Range, parse_values

    axis = scenario.axis(name)
    found = parse_values(text, axis)
    if not isinstance(found, Range):
        raise PerfModelError(f"{option} {name}: found {text!r}, allowed LOW:HIGH")
    return found


def _check_out(out: str | None) -> None:
    """Refuse an output that cannot be written before any work is done."""
    if out is None:
        return
    from perfmodel.sweeps.dataset import check_output

    check_folder("-o", check_output(out).parent)


def _save(dataset: Any, out: str | None) -> None:
    if out is None:
        return
    from perfmodel.sweeps.dataset import save

    save(dataset, out)
    say(f"wrote {out}")


def _solve(options: argparse.Namespace) -> int:
    from perfmodel.answers import solve
    from perfmodel.cli import answer_reports as text

    if options.policy is not None and len(options.policy) > 1:
        raise PerfModelError(f"--policy: found {len(options.policy)}, allowed one; use break-even to compare two")
    scenario = _scenario(options, _ONE)
    found = solve(scenario, options.axis, options.target, low=options.low, high=options.high)
    if options.json:
        print_json({**found.to_dict(), **text.provenance(scenario, found)})
    else:
        print_text(text.solution(found, scenario))
    return 0


def _sensitivity(options: argparse.Namespace) -> int:
    from perfmodel.answers import sobol_indices, tornado
    from perfmodel.cli import answer_reports as text

    _check_out(options.out)
    if not options.sobol and (options.n is not None or options.seed is not None):
        raise PerfModelError("--n and --seed: allowed with --sobol only")
    if options.range and (options.change is not None or options.key):
        raise PerfModelError("--range: not allowed with --change or --key; it says which axes, and how far")
    scenario = _scenario(options, _ONE)
    pairs = [_pair("--range", one, "AXIS=LOW:HIGH[:log]") for one in options.range or ()]
    ranges = {name: _ends(scenario, "--range", name, value) for name, value in pairs}
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
    from perfmodel.sweeps.axes import Range, parse_values

    _check_out(options.out)
    if options.policy is not None and len(options.policy) != 2:
        raise PerfModelError(f"--policy: found {len(options.policy)}, allowed two policies to compare")
    # A policy is not named after an option that varies.
    varied = [one.partition("=")[0].strip() for one in (options.axis, options.along or "")]
    by_bits = any(name in ("mean_bits", "policy.mean_bits") for name in varied)
    scenario = _scenario(options, ("context-aware", _TWO[1]) if by_bits else _TWO)
    axis: Any = options.axis
    if "=" in options.axis:
        name, written = _pair("--axis", options.axis, "NAME=LOW:HIGH")
        ends = _ends(scenario, "--axis", name, written)
        axis = (name, ends.low, ends.high)
    along = None
    if options.along is not None:
        name, written = _pair("--along", options.along, "NAME=VALUES")
        values = parse_values(written, scenario.axis(name))
        if isinstance(values, Range):
            raise PerfModelError(f"--along {name}: found {written!r}, allowed a list a,b,c or start:stop:count[:log]")
        along = (name, values)
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

    _check_out(options.out)
    small, large = (
        [name.strip() for part in parts or () for name in part.split(",")]
        for parts in (options.minimise, options.maximise)
    )
    with open_dataset(options.dataset) as dataset:
        found = pareto(dataset, small, large).load()
    _save(found, options.out)
    if options.json:
        print_json(text.pareto_data(found))
    else:
        print_text(text.pareto(found))
    return 0


def _best(options: argparse.Namespace) -> int:
    from perfmodel.answers import best
    from perfmodel.cli import answer_reports as text
    from perfmodel.sweeps.dataset import open_dataset

    with open_dataset(options.dataset) as dataset:
        found = best(dataset, options.metric, options.where).load()
    if options.json:
        print_json(text.best_data(found, options.metric, options.where))
    else:
        print_text(text.best(found, options.metric, options.where))
    return 0
