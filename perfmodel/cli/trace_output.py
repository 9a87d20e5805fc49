"""Where commands write a trace, checked before any work is done, and what all of them say of one as JSON."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perfmodel.errors import PerfModelError

if TYPE_CHECKING:
    from perfmodel.routing import RoutingTrace


def add_output(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """The options that say which trace to write, and whether another may be replaced."""
    parser.add_argument("-o", "--out", required=required, metavar="OUT.npz", help="trace to write")
    parser.add_argument("--overwrite", action="store_true", help="replace a trace that is there")


def check_output(out: str, *, overwrite: bool) -> Path:
    """The file to write. PerfModelError where it cannot be written, where a trace is there that may not be replaced,
    and where anything else is there, whatever is asked."""
    from perfmodel.errors import TraceError
    from perfmodel.routing.npz import npz_keys, one_line
    from perfmodel.routing.places import check_place

    place = check_place(out)
    if not place.exists():
        return place
    where = f"output {one_line(out)}"
    try:
        keys = set(npz_keys(place))
        is_trace = {"topk_ids", "prompt_len"} <= keys or {"counts", "scale"} <= keys  # an import may give a profile
    except TraceError:
        is_trace = False
    if not is_trace:
        raise PerfModelError(f"{where}: exists and is no trace; it is left alone, choose another output")
    if not overwrite:
        raise PerfModelError(f"{where}: exists; choose another output, or replace it with --overwrite")
    return place


def trace_data(trace: "RoutingTrace") -> dict[str, Any]:
    """Size and shape of a trace for JSON, under the names that every command uses."""
    prefill = int(trace.prompt_len.sum())
    return {
        "sequences": trace.num_sequences,
        "tokens": trace.num_tokens,
        "prefill_tokens": prefill,
        "decode_tokens": trace.num_tokens - prefill,
        "layers": trace.num_layers,
        "num_experts": trace.num_experts,
        "top_k": trace.top_k,
        "layer_index": trace.layer_index.tolist(),
        "metadata": trace.metadata,
    }
