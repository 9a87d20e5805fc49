"""``perfmodel losses compare``: objectives and rules that assign bit widths, on a loss table and a trace."""

import argparse
import contextlib
from pathlib import Path
from typing import Any

from perfmodel.cli.base import add_command, check_figure, load_plots, load_trace, print_json, print_text, quoted, say
from perfmodel.cli.losses_show import TABLE_HELP
from perfmodel.errors import PerfModelError

#: Tokens of the text that every assignment predicts.
_TOKENS = 16_384


def add(commands: Any) -> None:
    """Add the command."""
    one = add_command(commands, "compare", "compare objectives and rules that assign bit widths", _compare)
    one.add_argument("table", metavar="FILE|NAME", help=TABLE_HELP)
    one.add_argument(
        "--trace",
        default="tiny-mixtral-32l-mini",
        metavar="FILE",
        help="trace with as many experts (default %(default)s)",
    )
    one.add_argument(
        "--gpu-experts", metavar="K,...", help="experts of a layer on the GPU (default: 0, E/4, E/2; on text: 0)"
    )
    one.add_argument("--mean-bits", metavar="B,...", help="mean bits of the others (default: 2, 3)")
    one.add_argument("--alpha", type=float, default=0.5, metavar="X", help="share of counts in the importance")
    one.add_argument(
        "--norm", default="sum", choices=["sum", "min-max"], help="of the importance (default %(default)s)"
    )
    one.add_argument("--min-bits", type=int, default=2, metavar="N", help="width of the floor (default %(default)s)")
    one.add_argument(
        "--budget",
        choices=["exact", "at-most"],
        help="whether budgets are spent to the last bit (default: exact, unless the table's widths have gaps)",
    )
    one.add_argument("--seed", type=int, default=0, metavar="N", help="of the random orders (default %(default)s)")
    text = one.add_argument_group("held-out language-model loss (extra record; both of the first two)")
    text.add_argument("--checkpoint", metavar="DIR", help="model whose experts are quantised as compared")
    text.add_argument("--text", nargs="+", action="extend", metavar="FILE", help="text that it is to predict")
    text.add_argument("--tokens", type=int, metavar="N", help="tokens of the text, at most (default 16384)")
    text.add_argument("--method", choices=["gptq", "rtn"], help="of the quantised weights (default: the table's)")
    text.add_argument("--calibration", metavar="FILE", help="rows (.npz) for a table by GPTQ; not from the text")
    one.add_argument("--json", action="store_true", help="print one JSON document")
    one.add_argument("--plot", metavar="FILE", help="also draw the comparison (.png, .svg or .pdf)")


def _compare(options: argparse.Namespace) -> int:
    from perfmodel.bitwidth import LossTable
    from perfmodel.cli.assignment_reports import comparison_text, held_out_text
    from perfmodel.losses.assignments import compare_assignments

    if options.plot is not None:
        check_figure("--plot", options.plot)
    _check_text(options)
    gpu_experts = _numbers("--gpu-experts", options.gpu_experts, int, "whole numbers")
    mean_bits = _numbers("--mean-bits", options.mean_bits, float, "numbers")
    table = LossTable.load(options.table)
    if options.checkpoint is not None:
        table = _table_for_text(options, table)
    trace = load_trace(options.trace)
    found = compare_assignments(
        table,
        trace,
        gpu_experts=gpu_experts,
        mean_bits=mean_bits,
        alpha=options.alpha,
        norm=options.norm,
        min_bits=options.min_bits,
        budget=options.budget,
        seed=options.seed,
    )
    tried = None if options.checkpoint is None else _predict(options, found, table, trace)
    if options.plot is not None:
        plots = load_plots()
        plots.save(plots.assignments_figure(found, tried), Path(options.plot))
        say(f"wrote {options.plot}")
    if options.json:
        print_json({**found.to_dict(), "held_out": None if tried is None else tried.to_dict()})
    else:
        print_text(comparison_text(found))
        if tried is not None:
            print_text("\n" + held_out_text(tried))
    return 0


def _check_text(options: argparse.Namespace) -> None:
    """Refuse half a question about text before any work is done, and what needs an extra that is not there."""
    given = {name: getattr(options, name) for name in ("checkpoint", "text", "tokens", "method", "calibration")}
    found = [f"--{name}" for name, value in given.items() if value is not None]
    if found and (options.checkpoint is None or options.text is None):
        missing = [f"--{name}" for name in ("checkpoint", "text") if given[name] is None]
        raise PerfModelError(f"{', '.join(found)}: found without {' and '.join(missing)}, allowed together")
    if found:
        from perfmodel.record.libraries import import_transformers

        import_transformers()


def _table_for_text(options: argparse.Namespace, table: Any) -> Any:
    """The losses of the weights that text is tried with; what cannot be made again is refused before any work."""
    from perfmodel.losses.origin import quantisation, table_for_text
    from perfmodel.losses.summary import load_extras

    calibrated = options.calibration is not None
    rtn = load_extras(options.table, table).rtn
    chosen = table_for_text(table, rtn, options.method)
    quantisation(chosen, options.method, calibrated=calibrated, has_rtn=rtn is not None)
    return chosen


def _predict(options: argparse.Namespace, found: Any, table: Any, trace: Any) -> Any:
    """Held-out loss of the assignments, with a bar where somebody watches."""
    from perfmodel.losses.heldout import predict
    from perfmodel.progress import bar, watched

    with contextlib.ExitStack() as stack:
        report = stack.enter_context(bar("text", "assignments")) if watched() else None
        return predict(
            found,
            table,
            trace,
            options.checkpoint,
            options.text,
            gpu_experts=None if options.gpu_experts is None else found.gpu_experts,
            method=options.method,
            calibration=options.calibration,
            tokens=_TOKENS if options.tokens is None else options.tokens,
            report=report,
        )


def _numbers(option: str, text: str | None, kind: type[int] | type[float], words: str) -> list[Any] | None:
    """Numbers separated by commas; None where the option is not given."""
    if text is None:
        return None
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError:
        raise PerfModelError(f"{option}: found {quoted(text)}; allowed: {words} separated by commas") from None
