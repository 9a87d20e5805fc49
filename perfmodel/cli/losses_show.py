"""``perfmodel losses show``: what a loss table holds."""

import argparse
from pathlib import Path
from typing import Any

from perfmodel.cli.base import add_command, check_figure, load_plots, print_json, print_text, say

TABLE_HELP = "loss table (.npz: losses [L, E, widths], and bits beside it), or the name of a bundled one"


def add(commands: Any) -> None:
    """Add the command."""
    one = add_command(commands, "show", "show a loss table: losses by width, unlike experts, broken orders", _show)
    one.add_argument("table", metavar="FILE|NAME", help=TABLE_HELP)
    one.add_argument("--json", action="store_true", help="print one JSON document")
    one.add_argument("--plot", metavar="FILE", help="also draw the table (.png, .svg or .pdf)")


def _show(options: argparse.Namespace) -> int:
    from perfmodel.bitwidth import LossTable
    from perfmodel.cli.losses_reports import summary_text
    from perfmodel.losses.summary import load_extras, summarise

    if options.plot is not None:
        check_figure("--plot", options.plot)
    table = LossTable.load(options.table)
    summary = summarise(table, load_extras(options.table, table))
    if options.plot is not None:
        plots = load_plots()
        plots.save(plots.losses_figure(summary), Path(options.plot))
        say(f"wrote {options.plot}")
    if options.json:
        print_json(summary.to_dict())
    else:
        print_text(summary_text(summary))
    return 0
