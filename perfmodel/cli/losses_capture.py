"""``perfmodel losses capture``: calibration rows from a real model that reads text."""

import argparse
import contextlib
from typing import TYPE_CHECKING, Any

from perfmodel.cli.base import add_command, print_json, print_text, quoted, say

if TYPE_CHECKING:
    from perfmodel.losses.calibration import Calibration


def add(commands: Any) -> None:
    """Add the command."""
    one = add_command(commands, "capture", "run a checkpoint on text and keep what its experts are given", _capture)
    one.epilog = "Needs PyTorch and Transformers: pip install 'perfmodel[record]'. Nothing is downloaded."
    one.add_argument("checkpoint", metavar="CHECKPOINT_DIR", help="config.json, safetensors and tokenizer.json")
    one.add_argument(
        "--text", required=True, nargs="+", metavar="FILE", help="UTF-8 text, taken in turn from every file"
    )
    one.add_argument("--tokens", type=int, default=16_384, metavar="N", help="tokens to run (default 16384)")
    one.add_argument("--sequence", type=int, default=512, metavar="N", help="tokens read at once (default 512)")
    one.add_argument("--rows", type=int, metavar="N", help="tokens to keep, drawn at random (default: all)")
    one.add_argument("--seed", type=int, default=0, metavar="S", help="of the rows that are drawn (default 0)")
    one.add_argument(
        "--dtype", choices=["float32", "bfloat16", "float16"], default="float32", help="to run in (default float32)"
    )
    one.add_argument("-o", "--out", required=True, metavar="FILE.npz", help="calibration file to write")
    one.add_argument("--overwrite", action="store_true", help="replace a calibration file of other settings")
    one.add_argument("--quiet", action="store_true", help="no progress bar")
    one.add_argument("--json", action="store_true", help="print what was captured as one JSON document")


def _capture(options: argparse.Namespace) -> int:
    from perfmodel.losses.record.capture import capture
    from perfmodel.progress import bar, watched

    with contextlib.ExitStack() as stack:
        shown = watched() and not options.quiet
        rows = capture(
            options.checkpoint,
            options.text,
            tokens=options.tokens,
            sequence=options.sequence,
            rows=options.rows,
            seed=options.seed,
            dtype=options.dtype,
            output=options.out,
            overwrite=options.overwrite,
            report=stack.enter_context(bar("text", "tokens")) if shown else None,
        )
    document = _document(rows, options.out)
    if options.json:
        print_json(document)
    else:
        print_text(_text(document))
    say(f"wrote {options.out}")
    return 0


def _document(rows: "Calibration", out: str) -> dict[str, Any]:
    """What was captured, as plain values."""
    import numpy as np

    experts = int(rows.info["experts"])
    counts = np.array([np.bincount(ids.reshape(-1), minlength=experts) for ids in rows.expert_ids])
    return {
        "out": out,
        "layers": rows.num_layers,
        "experts": experts,
        "hidden_size": int(rows.hidden.shape[2]),
        "number_format": str(rows.hidden.dtype),
        "rows_per_expert": {"least": int(counts.min()), "mean": float(counts.mean()), "most": int(counts.max())},
        "info": dict(rows.info),
    }


def _text(found: dict[str, Any]) -> str:
    info, each = found["info"], found["rows_per_expert"]
    kept = "all kept" if info["rows"] == info["tokens"] else f"{info['rows']:,} kept, drawn with seed {info['seed']}"
    return (
        f"model {quoted(info['checkpoint'])} ({info['family']}): {info['tokens']:,} tokens of {len(info['texts'])}"
        f" files, {kept}\n"
        f"{found['layers']} layers x {found['hidden_size']} numbers a row, {found['number_format']}; {each['least']:,}"
        f" to {each['most']:,} rows an expert (mean {each['mean']:,.0f})"
    )
