"""``perfmodel losses build``: a loss table from the weights of a checkpoint."""

import argparse
import contextlib
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perfmodel.cli.base import add_command, print_json, print_text, quoted, say
from perfmodel.errors import PerfModelError

if TYPE_CHECKING:
    from perfmodel.bitwidth import LossTable


def add(commands: Any) -> None:
    """Add the command."""
    one = add_command(commands, "build", "quantise every expert of a checkpoint and measure its losses", _build)
    one.add_argument("checkpoint", metavar="CHECKPOINT_DIR", help="folder with config.json and safetensors files")
    one.add_argument("--calibration", required=True, metavar="FILE", help="rows that go into the experts (.npz)")
    one.add_argument("--held-out", metavar="FILE", help="measure on these rows (default: hold every row out once)")
    one.add_argument("--method", metavar="NAME", help="gptq, or rtn for rounding to nearest (default gptq)")
    one.add_argument("--bits", metavar="B,B,...", help="widths of the table (default 1,2,3,4)")
    one.add_argument("--group-size", metavar="G", help="columns that share a scale (default: all of a row)")
    one.add_argument("--damping", metavar="auto|X", help="share of the mean diagonal added to it (default auto)")
    one.add_argument("--order", metavar="NAME", help="natural, or activation for large inputs first (default natural)")
    one.add_argument("--folds", metavar="N", help="parts of the rows, each held out once (default 4)")
    one.add_argument("-o", "--out", required=True, metavar="FILE", help="write the table (.npz)")
    one.add_argument("--resume", action="store_true", help="go on with an unfinished build of the same")
    one.add_argument("--overwrite", action="store_true", help="replace a table of other inputs, finished or not")
    one.add_argument("--quiet", action="store_true", help="no progress bar")
    one.add_argument("--json", action="store_true", help="print what was built as one JSON document")


def _build(options: argparse.Namespace) -> int:
    from perfmodel.losses.build import build_losses
    from perfmodel.progress import bar, watched

    given = {
        "held_out": options.held_out,
        "method": options.method,
        "bits": None if options.bits is None else [_typed_whole("--bits", text) for text in options.bits.split(",")],
        "group_size": None if options.group_size is None else _typed_whole("--group-size", options.group_size),
        "damping": None if options.damping is None else _damping(options.damping),
        "order": options.order,
        "folds": None if options.folds is None else _typed_whole("--folds", options.folds),
    }
    start, before = time.monotonic(), []
    with contextlib.ExitStack() as stack:
        shown = stack.enter_context(bar("losses", "experts")) if watched() and not options.quiet else None

        def report(done: int, total: int) -> None:
            before.append(done)
            if shown is not None:
                shown(done, total)

        table = build_losses(
            options.checkpoint,
            options.calibration,
            options.out,
            resume=options.resume,
            overwrite=options.overwrite,
            report=report,
            **{name: value for name, value in given.items() if value is not None},
        )
    document = _document(table, options.out, time.monotonic() - start, before[0])
    if options.json:
        print_json(document)
    else:
        print_text(_text(document))
    say(_finished(options.out) if before == [table.losses[..., 0].size] else f"wrote {options.out}")
    return 0


def _finished(out: str) -> str:
    from perfmodel.losses.outputs import partial_file

    left = partial_file(Path(out))
    more = f"; an unfinished build beside it ({quoted(left.name)}) is left as it is" if os.path.lexists(left) else ""
    return f"{out} is finished already{more}"


def _typed_whole(option: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise PerfModelError(f"{option}: found {quoted(text)}; allowed: whole numbers") from None


def _damping(text: str) -> float | str:
    if text == "auto":
        return text
    try:
        return float(text)
    except ValueError:
        raise PerfModelError(f"--damping: found {quoted(text)}; allowed: auto, or a number above 0") from None


def _document(table: "LossTable", out: str, seconds: float, before: int) -> dict[str, Any]:
    """What was built, as plain values; the losses of rounding to nearest come from the file."""
    from perfmodel.routing.npz import read_npz

    stored = read_npz(out, ["losses_rtn", "borrowed"])
    means = table.losses.mean(axis=(0, 1))
    nearest = stored.get("losses_rtn", table.losses).mean(axis=(0, 1))
    tokens, variance = table.n_tokens, table.output_variance
    if tokens is None or variance is None:
        raise PerfModelError(f"{out}: lacks what was just written to it")
    return {
        "out": out,
        "layers": table.num_layers,
        "experts": table.num_experts,
        "experts_done_before": before,
        "seconds": seconds,
        "rows_per_expert": {"least": int(tokens.min()), "mean": float(tokens.mean()), "most": int(tokens.max())},
        "experts_with_borrowed_rows": int(stored["borrowed"].sum()),
        "mean_output_variance": float(variance.mean()),
        "mean_losses": [
            {
                "bits": bits,
                "loss": float(means[i]),
                "loss_rtn": float(nearest[i]),
                "over_rtn": float(means[i] / nearest[i]) if nearest[i] > 0 else None,
            }
            for i, bits in enumerate(table.bits)
        ],
        "info": dict(table.info),
    }


def _text(found: dict[str, Any]) -> str:
    from perfmodel.reports import number, table

    info, rows = found["info"], found["rows_per_expert"]
    variance = found["mean_output_variance"]
    method = info["method"]
    header = ["bits", f"{method} loss", "rtn loss", f"{method}/rtn", "noise"]
    body = []
    for one in found["mean_losses"]:
        ratio = "-" if one["over_rtn"] is None else number(one["over_rtn"])
        share = f"{100 * one['loss'] / variance:.3g} %" if variance > 0 else "-"
        body.append([str(one["bits"]), number(one["loss"]), number(one["loss_rtn"]), ratio, share])
    if method == "rtn":
        header, body = [header[0], header[1], header[4]], [[row[0], row[1], row[4]] for row in body]
    experts = found["layers"] * found["experts"]
    again = f", {found['experts_done_before']:,} of them before" if found["experts_done_before"] else ""
    lines = [
        f"model {quoted(str(info['model']))}: {found['layers']} layers x {found['experts']} experts ="
        f" {experts:,} experts{again}, in {found['seconds']:.1f} s",
        f"measured on {rows['least']:,} to {rows['most']:,} rows an expert (mean {rows['mean']:,.0f}), {_how(info)}",
    ]
    if found["experts_with_borrowed_rows"]:
        lines.append(
            f"{found['experts_with_borrowed_rows']:,} experts had fewer than {info['least_rows']} rows of their own"
            " and were given all rows of their layer"
        )
    return "\n".join([*lines, "", "mean squared error of the output, over all experts:", table(header, body, left=0)])


def _how(info: dict[str, Any]) -> str:
    if "held_out" in info:
        return f"all of {info['held_out']}"
    if info["method"] == "rtn":
        return f"all of {info['calibration']}"
    return f"every one held out once in {info['folds']} folds"
