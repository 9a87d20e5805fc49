"""``perfmodel breakeven``: from which batch on copying experts to the GPU beats running them on the CPU."""

from __future__ import annotations

import argparse
import dataclasses
import math
from typing import TYPE_CHECKING, Any

from perfmodel.cli.base import add_command, add_engine, load_machine, print_json, print_text, quoted
from perfmodel.errors import PerfModelError

if TYPE_CHECKING:
    from perfmodel.answers.breakeven import Batch, BreakEven

_MODEL, _SYSTEM = "mixtral-8x7b", "rtx4090-pcie4-cpu"


def add(commands: Any) -> None:
    """Add the command."""
    text = "find the batch from which copying experts to the GPU beats running them on the CPU, per MoE layer"
    one = add_command(commands, "breakeven", text, _breakeven)
    one.epilog = (
        "The break-even is the first such batch; the line below it says from which batch on the GPU stays ahead. Never"
        " is an answer too: exit code 0. A faster link raises the break-even only where experts are tiny, fewer bytes"
        " than the activations that cross it for the CPU. Policies are compared along an axis by"
        " `perfmodel break-even`."
    )
    one.add_argument(
        "--model", default=_MODEL, metavar="CONFIG", help=f"config, GGUF file or bundled name (default {_MODEL})"
    )
    one.add_argument("--system", default=_SYSTEM, metavar="SPEC", help=f"system with a cpu (default {_SYSTEM})")
    add_engine(one)
    stored = one.add_mutually_exclusive_group()
    stored.add_argument("--bits", type=float, metavar="N", help="stored bits of an expert's weights, scales included")
    stored.add_argument("--dtype", metavar="FORMAT", help="the same by format, such as q4_k or expert=q4_k")
    one.add_argument(
        "--trace",
        metavar="FILE",
        help="count experts in windows of this trace that do not overlap (default: uniform routing)",
    )
    one.add_argument("--pipelined", action="store_true", help="compute each expert as soon as its copy is there")
    one.add_argument("--most-batch", type=int, metavar="N", help="largest batch to look at (default 8192)")
    one.add_argument("--links", metavar="SPEC,...", help="with --ram: also a table over these links")
    one.add_argument("--ram", metavar="GB/S,...", help="with --links: peak rates of the host memory, all sockets")
    one.add_argument("--json", action="store_true", help="print one JSON document")


def _breakeven(options: argparse.Namespace) -> int:
    from perfmodel.answers.breakeven import MOST_BATCH, break_even
    from perfmodel.model import MoEModel

    if (options.links is None) != (options.ram is None):
        given, missing = ("--links", "--ram") if options.ram is None else ("--ram", "--links")
        raise PerfModelError(f"{given}: found without {missing}, allowed together")
    model = MoEModel.from_config(options.model)
    if options.dtype is not None:
        dtype = options.dtype if "=" in options.dtype else f"expert={options.dtype}"
        model = dataclasses.replace(model, storage=model.storage.override(dtype))
    found = break_even(
        model,
        load_machine(options),
        bits=options.bits,
        trace=options.trace,
        pipelined=options.pipelined,
        most_batch=MOST_BATCH if options.most_batch is None else options.most_batch,
        links=[] if options.links is None else [name.strip() for name in options.links.split(",")],
        ram_gb_per_s=[] if options.ram is None else [_rate(text) for text in options.ram.split(",")],
    )
    if options.json:
        print_json(_data(found))
    else:
        print_text(_text(found))
    return 0


def _rate(text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = math.nan
    if not math.isfinite(rate):
        raise PerfModelError(f"--ram: found {quoted(text)}, allowed numbers of GB/s separated by commas")
    return rate


def _data(found: BreakEven) -> dict[str, Any]:
    """The answer for JSON."""
    data = {field.name: getattr(found, field.name) for field in dataclasses.fields(found)}
    return {
        **data,
        "at": None if found.at is None else found.at._asdict(),
        "rows": [row._asdict() for row in found.rows],
        "cells": [cell._asdict() for cell in found.cells],
        "notes": list(found.notes),
    }


def _text(found: BreakEven) -> str:
    """The answer in a sentence, both sides by batch, and the table of other machines."""
    from perfmodel.reports import table

    routing = "uniform routing" if found.trace is None else f"routing of {found.trace}"
    order = "each expert computed as its copy arrives" if found.pipelined else "all copies before any computing"
    lines = [
        f"copy or compute the experts of a MoE layer: {found.model} ({found.top_k} of {found.num_experts} experts,"
        f" {found.bits:g} bits) on {found.system}, {routing}, {order}",
        "",
        _verdict(found),
        *_after(found),
        f"the rule of 32 tokens an expert copies from a batch of {found.rule_batch:.6g} on (32 E / k){_rule(found)}",
        "",
    ]
    marks = {row.tokens: row for row in (*found.rows, *([] if found.at is None else [found.at]))}
    rows = [_row(marks[tokens], found.batch) for tokens in sorted(marks)]
    header = ("batch", "used experts", "copies [ms]", "GPU [ms]", "GPU side [ms]", "CPU side [ms]", "faster")
    lines.append(table(header, rows, left=0))
    if found.cells:
        rates = list(dict.fromkeys(cell.ram_gb_per_s for cell in found.cells))
        batches = {(cell.link, cell.ram_gb_per_s): cell.batch for cell in found.cells}
        links = list(dict.fromkeys(cell.link for cell in found.cells))
        body = [
            [link, *("never" if (b := batches[link, rate]) is None else str(b) for rate in rates)] for link in links
        ]
        lines += ["", "break-even batch by link and peak rate of the host memory:"]
        lines.append(table(("link", *(f"{rate:g} GB/s" for rate in rates)), body))
    return "\n".join([*lines, *([""] if found.notes else []), *(f"note: {note}" for note in found.notes)])


def _verdict(found: BreakEven) -> str:
    if found.at is None:
        return f"never: the CPU is faster at every batch up to {found.most_batch}"
    at = found.at
    return (
        f"break-even: a batch of {at.tokens}, at which {at.used:.4g} experts are used and the sides take"
        f" {1e3 * at.gpu_side_s:.4g} ms (copied to the GPU) and {1e3 * at.cpu_side_s:.4g} ms (on the CPU)"
    )


def _after(found: BreakEven) -> list[str]:
    """Whether the GPU stays ahead after the break-even, where there is one."""
    if found.batch is None:
        return []
    if found.ahead_from == found.batch:
        return [f"the GPU stays ahead at every larger batch up to {found.most_batch}"]
    again = "the CPU is faster again at some larger batches"
    if found.ahead_from is None:
        return [f"{again}, and at the largest one, {found.most_batch}: the GPU does not stay ahead"]
    return [f"{again}; the GPU stays ahead from {found.ahead_from} on, up to {found.most_batch}"]


def _rule(found: BreakEven) -> str:
    """What the rule costs: whether it copies too early or too late."""
    if found.batch is None or found.batch > found.rule_batch:
        return ", too early here"
    return "" if found.batch == found.rule_batch else ", too late here"


def _row(row: Batch, batch: int | None) -> list[str]:
    times = (f"{1e3 * one:.4g}" for one in (row.copy_s, row.gpu_s, row.gpu_side_s, row.cpu_side_s))
    faster = "GPU" if row.gpu_side_s <= row.cpu_side_s else "CPU"
    return [str(row.tokens), f"{row.used:.4g}", *times, f"{faster} (break-even)" if row.tokens == batch else faster]
