"""``perfmodel sweep``: many points at once, to a dataset on disk and a summary on the terminal."""

import argparse
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from perfmodel.cli.base import add_command, add_scenario, print_json, print_text, quoted, say
from perfmodel.errors import PerfModelError

if TYPE_CHECKING:
    import xarray as xr

_EPILOG = """\
VALUES is a list a,b,c or a range start:stop:count[:log] with both ends included; with --sample also low:high[:log].
Axes are any number of the system spec (link.bandwidth_gb_per_s), any option of the policies (policy.mean_bits), and
policy, workload.prompt, workload.output, workload.batch, workload.micro_batch, model, trace, system, loss. Policies
and files may be separated by ';' instead; a text that ends in ';' is a single one.
"""
#: Options that are called like the parameters of `perfmodel.sweep`.
_SAME_NAMES = (
    "model", "system", "trace", "policy", "prompt", "output", "batch", "batch_of", "micro_batch", "layers", "engine",
    "zip", "cases", "sample", "dtype",
)  # fmt: skip
#: Options that say nothing about the scenario.
_NOT_LISTED = (
    "axis", "zip", "cases", "sample", "metric", "dtype", "out", "resume", "overwrite", "dask", "threads", "memory_gb",
)  # fmt: skip
#: Points up to which each has a row of its own below the summary.
_MOST_ROWS = 12
#: Attributes that hold JSON.
_JSON = ("request", "scenario", "hashes", "policies", "infeasible", "notes")


def add(commands: Any) -> None:
    """Add the command."""
    one = add_command(commands, "sweep", "price every combination of axis values", _sweep)
    one.epilog = _EPILOG
    one.formatter_class = argparse.RawDescriptionHelpFormatter
    one.add_argument("file", nargs="?", metavar="FILE.toml", help="sweep file; options replace what it says")
    one.add_argument("--axis", action="append", default=[], metavar="NAME=VALUES", help="vary something; repeatable")
    one.add_argument("--zip", action="append", metavar="A,B", help="vary these axes together; repeatable")
    one.add_argument("--cases", metavar="FILE", help="table of points (.csv or .parquet), one axis a column")
    one.add_argument("--sample", metavar="METHOD:N[:SEED]", help="draw points from the ranges: sobol or lhs")
    one.add_argument("--metric", action="append", metavar="NAME", help="repeatable (default tpot_mean_s)")
    add_scenario(one, model="mixtral-8x7b", from_file=True)
    one.add_argument("--dtype", choices=["float64", "float32"], help="of the result (default float64)")
    one.add_argument("-o", "--out", metavar="OUT", help="write the dataset (.zarr, .nc, .csv or .parquet)")
    one.add_argument("--resume", action="store_true", help="go on with an unfinished .zarr output")
    one.add_argument(
        "--overwrite",
        action="store_true",
        help="throw an unfinished .zarr output away (a finished sweep is replaced like any other output file)",
    )
    one.add_argument(
        "--dask",
        nargs="?",
        const=True,
        metavar="ADDRESS",
        help="price on a Dask scheduler, or without ADDRESS in worker processes here",
    )
    one.add_argument("--threads", type=int, metavar="N", help="threads or worker processes (default: one a core)")
    one.add_argument("--memory-gb", type=float, metavar="G", help="for blocks in work (default 1)")
    one.add_argument("--quiet", action="store_true", help="no progress bar")
    one.add_argument("--json", action="store_true", help="print the summary as one JSON document")
    one.add_argument("--list-axes", action="store_true", help="list every axis of this scenario, and stop")


def _sweep(options: argparse.Namespace) -> int:
    given = {name: getattr(options, name) for name in _SAME_NAMES}
    given |= {"losses": options.loss, "metrics": options.metric, "axes": _axes(options.axis)}
    given = {name: value for name, value in given.items() if value not in (None, {})}
    if options.list_axes:
        return _list_axes(options, given)
    from perfmodel.sweeps.api import run_sweep
    from perfmodel.sweeps.request import Request

    request = Request.of(**given) if options.file is None else Request.load(options.file, **given)
    dataset = run_sweep(
        request,
        out=options.out,
        resume=options.resume,
        overwrite=options.overwrite,
        dask=options.dask,
        threads=options.threads,
        memory_gb=1.0 if options.memory_gb is None else options.memory_gb,
        progress=False if options.quiet else None,
    )
    if options.json:
        print_json(_document(dataset, options.out))
    else:
        print_text(_text(dataset))
    if options.out is not None:
        say(f"wrote {options.out}")
    return 0


def _axes(texts: list[str]) -> dict[str, str]:
    """Axis texts by name; the values are read later, when it is known what the axis takes."""
    axes: dict[str, str] = {}
    for text in texts:
        name, equals, values = (part.strip() for part in text.partition("="))
        if not name or not equals:
            raise PerfModelError(f"--axis: found {quoted(text)}, allowed NAME=VALUES, such as link.latency_us=0.5,1,2")
        if name in axes:
            raise PerfModelError(f"--axis {quoted(name)}: given twice; allowed: every axis once")
        axes[name] = values
    return axes


def _list_axes(options: argparse.Namespace, given: Mapping[str, Any]) -> int:
    from perfmodel.scenario import Scenario
    from perfmodel.sweeps.request import Request

    unused = [name for name in _NOT_LISTED if getattr(options, name)]
    if unused:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in unused)
        raise PerfModelError(f"--list-axes: not allowed with {names}; it lists what could be varied, and stops")
    scenario = Scenario.of(**given) if options.file is None else Request.load(options.file, **given).scenario
    axes = scenario.axes()
    if options.json:
        print_json([axis._asdict() for axis in axes])
        return 0
    from perfmodel.reports import table

    rows = [[axis.name, axis.meaning, axis.allowed] for axis in axes]
    print_text(table(("axis", "meaning", "allowed"), rows, left=3))
    return 0


def _document(dataset: "xr.Dataset", out: str | None) -> dict[str, Any]:
    from perfmodel.sweeps.summary import ranges

    return {
        "points": _points(dataset),
        "dimensions": {str(name): int(size) for name, size in dataset.sizes.items()},
        "metrics": [one._asdict() for one in ranges(dataset)],
        "out": out,
        "provenance": {
            str(name): json.loads(value) if name in _JSON else value for name, value in dataset.attrs.items()
        },
    }


def _points(dataset: "xr.Dataset") -> int:
    return int(next(iter(dataset.data_vars.values())).size)


def _text(dataset: "xr.Dataset") -> str:
    from perfmodel.reports import number, table
    from perfmodel.sweeps.summary import ranges

    stated = dataset.attrs
    found = ranges(dataset)
    rows = []
    for one in found:
        best = ", ".join(f"{name}={'any' if name in one.any else _value(value)}" for name, value in one.best.items())
        rows.append(
            [one.policy or "", one.metric, one.unit, number(one.low), number(one.high), one.better, best or "-"]
        )
    header = ["policy", "metric", "unit", "lowest", "highest", "better", "best at"]
    if all(one.policy is None for one in found):
        header, rows = header[1:], [row[1:] for row in rows]
    sizes = " x ".join(f"{name} {size:,}" for name, size in dataset.sizes.items())
    lines = [
        f"{_points(dataset):,} points" + (f" = {sizes}" if sizes else ""),
        f"model {stated['model']}; system {stated['system']}; routing {stated['trace']} ({stated['trace_source']})",
        "",
        table(header, rows, left=3 if len(header) > 6 else 2),
        "",
    ]
    if 1 < _points(dataset) <= _MOST_ROWS:
        lines += [_every_point(dataset), ""]
    lines += _remarks(stated)
    return "\n".join(lines)


def _every_point(dataset: "xr.Dataset") -> str:
    """A row a point: its axis values and its metrics."""
    from perfmodel.cli.answer_reports import with_unit
    from perfmodel.evaluation import metric
    from perfmodel.reports import number, table
    from perfmodel.sweeps.summary import points

    found = points(dataset)
    axes = list(found[0][0])
    metrics = map(str, dataset.data_vars)
    header = [*axes, *(with_unit(name, metric(name).unit) for name in metrics)]
    return table(header, [[*map(_value, at.values()), *map(number, row)] for at, row in found], left=len(axes))


def _remarks(stated: Mapping[str, Any]) -> list[str]:
    """What to know about the numbers: points without a plan, weakest source, notes."""
    infeasible = json.loads(stated["infeasible"])
    lines = []
    if infeasible["points"]:
        lines.append(f"{infeasible['points']:,} of {infeasible['of']:,} points cannot be run, and have no values:")
        lines += [f"  {count:,}: {reason}" for reason, count in infeasible["reasons"]]
    lines.append(f"weakest source among the hardware constants: {stated['weakest_source']}")
    return lines + [f"note: {note}" for note in json.loads(stated["notes"])]


def _value(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
