"""``perfmodel plot``: figures of a sweep."""

import argparse
from pathlib import Path
from typing import Any

from perfmodel.cli.base import add_command, check_figure, load_plots, quoted, say
from perfmodel.errors import PerfModelError
from perfmodel.plots.sweep.kinds import KINDS, check_kind


def add(commands: Any) -> None:
    """Add the command."""
    one = add_command(commands, "plot", "draw a sweep or an answer that was saved as .nc or .zarr", _plot)
    one.formatter_class = argparse.RawDescriptionHelpFormatter
    one.epilog = "kinds, and the options that each takes:\n" + "\n".join(
        f"  {name:<10} {kind.text}\n{'':13}{' '.join(f'--{option}' for option in kind.options)}"
        for name, kind in KINDS.items()
    )
    one.add_argument("kind", metavar="KIND", help=" | ".join(KINDS))
    one.add_argument(
        "dataset",
        metavar="DATASET",
        help="what sweep -o wrote, or an answer that was saved",
    )
    one.add_argument("-o", "--out", metavar="FILE", help=".png, .svg or .pdf (default: DATASET-KIND.svg beside it)")
    one.add_argument("--x", metavar="AXIS", help="axis, or for pareto also a metric")
    one.add_argument("--y", metavar="AXIS", help="axis, or for pareto also a metric")
    one.add_argument("--panels", metavar="AXIS", help="axis with one panel a value, up to six")
    one.add_argument("--metric", metavar="NAME", help="metric of the sweep (default: tpot_mean_s, else the first)")
    one.add_argument("--baseline", metavar="POLICY", help="gains are over this policy (default: monde, else hobbit)")
    one.add_argument("--policy", action="append", metavar="POLICY", help="draw only this one; repeatable")
    one.add_argument(
        "--at",
        action="append",
        metavar="NAME=VALUE,...",
        help="hold axes that are not drawn at these values (default: nearest the system's own)",
    )


def _plot(options: argparse.Namespace) -> int:
    from perfmodel.sweeps.dataset import open_dataset

    names = ("x", "y", "panels", "metric", "baseline", "policy")
    given = {name: getattr(options, name) for name in names}
    given = check_kind(options.kind, {**given, "at": read_at(options.at)})
    source = Path(options.dataset)
    target = Path(options.out) if options.out is not None else source.with_name(f"{source.stem}-{options.kind}.svg")
    check_figure("-o", target)
    dataset = open_dataset(source)
    plots = load_plots()
    plots.save(plots.sweep_figure(options.kind, dataset, **given), target)
    say(f"wrote {target}")
    return 0


def read_at(texts: list[str] | None) -> dict[str, str] | None:
    """Values by axis from ``NAME=VALUE,NAME=VALUE``; what follows a comma without ``=`` belongs to the value."""
    if texts is None:
        return None
    found: dict[str, str] = {}
    for text in texts:
        name = ""
        for piece in text.split(","):
            before, equals, after = piece.partition("=")
            if equals and before.strip():
                name = before.strip()
                if name in found:
                    raise PerfModelError(f"--at: {quoted(name)} is given twice; allowed: one value for an axis")
                found[name] = after.strip()
            elif name:
                found[name] += f",{piece}"
            else:
                raise PerfModelError(f"--at: found {quoted(text)}, allowed NAME=VALUE,...")
    return found
