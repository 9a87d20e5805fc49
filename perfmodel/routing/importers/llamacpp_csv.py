"""Expert picks that patched builds of llama.cpp log: ``layer_id,expert_ids``, one row a token and layer.

``3,52 40 85 110`` is a token's picks in layer 3, best first. Rows come as the graph runs: all tokens of a call in the
first MoE layer, then all of them in the next. So the rows of one layer tell the size of a call, and a call of several
tokens is prefill, a call of one token a decode step; a new sequence starts where prefill follows a decode step. That
holds for one sequence at a time: what several slots decode together looks like prefill, and the last token of a prompt
that ends in a call of its own looks like a decode step, unless ``--sequence-len`` and ``--prompt-len`` say better.

Known traps. In the last layer llama.cpp computes only the token whose logits are asked for: a call of several tokens
has one row there or none, and the other tokens stay unassigned. The warm-up call picks all experts. Logs that read the
strided top-k view as if it were contiguous show one expert several times in a token, and are refused.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfmodel.errors import TraceError
from perfmodel.routing.checks import MAX_EXPERTS
from perfmodel.routing.defects import Finding
from perfmodel.routing.defects.rows import counted
from perfmodel.routing.importers.base import (
    Format,
    Imported,
    ImportOptions,
    described,
    number_of_experts,
    prompt_lengths,
    sequence_lengths,
)
from perfmodel.routing.importers.canonical import only
from perfmodel.routing.importers.columns import integers
from perfmodel.routing.importers.files import columns, integer, read_lines
from perfmodel.routing.importers.probe import Probe
from perfmodel.routing.npz import one_line
from perfmodel.routing.trace import RoutingTrace

_HEADER = "layer_id,expert_ids"
_ROW = re.compile(r"[0-9]{1,5},[0-9]{1,5}( [0-9]{1,5})*")
#: Lines of inputs of routers, which the same builds write into the same log.
_OTHER = "gate_input,"
#: Calls, and lines, that are looked at to tell a log without a header.
_ENOUGH, _MOST_LINES = 32, 200_000


@dataclass(frozen=True)
class _Block:
    """Rows of one layer that follow one another: the first one's place in the file and their number."""

    layer: int
    start: int
    count: int


def recognise(probe: Probe) -> str | None:
    """The header, or rows of a layer and a list of experts over several calls, in which the same layers come again."""
    lines = [line for line in probe.lines if not line.startswith(_OTHER)][:20]
    if probe.kind != "text" or not lines:
        return None
    if _is_header(lines[0]):
        return f"has the header {_HEADER}"
    layers = _layers_of_calls(probe) if _are_rows(lines) else 0
    return f"has rows of a layer and a list of experts, {layers} layers again and again" if layers else None


def nearly(probe: Probe) -> str | None:
    """Rows without a header that do not show calls: any list of lists may look so."""
    lines = [line for line in probe.lines if not line.startswith(_OTHER)][:20]
    if probe.kind != "text" or not lines or not _are_rows(lines):
        return None
    return (
        "it has neither the header nor the same layers again in a second call; if its rows are of layers and experts, "
        "name the format llamacpp-csv"
    )


def _is_header(line: str) -> bool:
    """The header, whatever its case, with blanks and quotes around the names."""
    return [part.strip().strip('"').lower() for part in line.split(",")] == _HEADER.split(",")


def _are_rows(lines: Sequence[str]) -> bool:
    return all(_ROW.fullmatch(line.strip()) for line in lines) and " " in lines[0].strip()


def _layers_of_calls(probe: Probe) -> int:
    """Layers of each call where at least two calls of two layers show, all alike; 0 where they do not.

    The first rows are enough. Every row has as many experts, none of them twice; the last call may be cut, and its
    own last layer may be left out, which llama.cpp does for prompts.
    """
    calls: list[list[int]] = []
    widths = set()
    try:
        for number, text in read_lines(probe.path):
            row = text.strip()
            if not row or row.startswith(_OTHER):
                continue
            if not _ROW.fullmatch(row):
                return 0
            layer, _, experts = row.partition(",")
            chosen = experts.split(" ")
            widths.add(len(chosen))
            if len(set(chosen)) < len(chosen):
                return 0
            if calls and int(layer) == calls[-1][-1]:
                continue
            if calls and int(layer) > calls[-1][-1]:
                calls[-1].append(int(layer))
            else:
                calls.append([int(layer)])
            if len(calls) > _ENOUGH or number > _MOST_LINES:
                break
    except TraceError:
        return 0
    whole = calls[:-1] if len(calls) > 2 else calls
    longest = max(whole, key=len, default=[])
    alike = all(call in (longest, longest[:-1]) for call in whole) and len(longest) > 1
    return len(longest) if alike and len(calls) > 1 and len(widths) <= 2 else 0


def read(files: Sequence[Path], options: ImportOptions) -> Imported:
    """One file."""
    path = only(files)
    name = one_line(path)
    layers, picks, lines = _rows(path)
    widths = [len(row) for row in picks]
    blocks = _blocks(layers)
    findings: list[Finding] = []
    k = options.top_k or max(set(widths), key=widths.count)
    experts = None
    calls = _calls(blocks)
    if {widths[row] for block in calls[0] for row in range(block.start, block.start + block.count)} != {k}:
        experts, warm_up = _warm_up(calls.pop(0), widths, k)
        if warm_up is None or not calls:
            row = next(i for i, width in enumerate(widths) if width != k)
            raise TraceError(f"{name}: line {lines[row]} has {widths[row]} experts, expected {k}")
        findings.append(warm_up)
    start = calls[0][0].start
    odd = next((row for row in range(start, len(widths)) if widths[row] != k), None)
    if odd is not None:
        raise TraceError(f"{name}: line {lines[odd]} has {widths[odd]} experts, expected {k}")
    known = sorted({block.layer for call in calls for block in call})
    ids, sizes, skipped = _tokens(calls, known, np.array(picks[start:], np.int32), start, name, lines)
    if skipped:
        tokens = counted(skipped, "token")
        found = f"layer {known[-1]}: {tokens} of prompts without picks; llama.cpp computes only the last one"
        findings.append(Finding("padding", found, "leave them unassigned", mended=True))
    lengths, prompts = _sequences(options, sizes, len(known), name)
    experts, noted = number_of_experts(options, ids, experts)
    try:
        trace = RoutingTrace(
            topk_ids=ids,
            topk_weights=None,
            sequence_offsets=np.append(0, np.cumsum(lengths)),
            prompt_len=prompts,
            layer_index=np.array(known, np.int64),
            num_experts=experts,
            metadata=described(FORMAT.name, files, options, **noted),
        )
    except TraceError as error:
        raise TraceError(f"{name}: {error}") from error
    return Imported(trace, tuple(findings), unassigned=skipped * k)


def _rows(path: Path) -> tuple[list[int], list[list[int]], list[int]]:
    """Layer, picks and line number of every row."""
    name = one_line(path)
    layers: list[int] = []
    picks: list[list[int]] = []
    lines: list[int] = []
    for number, text in read_lines(path):
        row = text.strip()
        if row.startswith(_OTHER) or not row or (not picks and _is_header(row)) or row == _HEADER:
            continue
        where = f"{name}: line {number}"
        layer, comma, experts = row.partition(",")
        if not comma or "," in experts:
            raise TraceError(f"{where} is {one_line(row[:60])!r}, expected layer_id,expert_ids as in '3,52 40 85'")
        chosen = integers(columns(experts.strip(), " ", where), where)
        if chosen.max() >= MAX_EXPERTS:
            raise TraceError(f"{where} picks expert {chosen.max()}; allowed: 0..{MAX_EXPERTS - 1}")
        if len(set(chosen.tolist())) < len(chosen):
            raise TraceError(
                f"{where} picks an expert twice; a log does that when it reads the top-k of llama.cpp, a strided view "
                f"of argsort, as if it were contiguous"
            )
        layers.append(integer(layer, f"{where}, layer_id", 0, 99_999))
        picks.append(chosen.tolist())
        lines.append(number)
    if not picks:
        raise TraceError(f"{name}: has no rows of picks")
    return layers, picks, lines


def _blocks(layers: list[int]) -> list[_Block]:
    bounds = [0, *(np.flatnonzero(np.diff(layers)) + 1).tolist(), len(layers)]
    return [_Block(layers[a], a, b - a) for a, b in pairwise(bounds)]


def _calls(blocks: list[_Block]) -> list[list[_Block]]:
    """Blocks of each call: layers go up within one."""
    calls: list[list[_Block]] = []
    for block in blocks:
        if calls and block.layer > calls[-1][-1].layer:
            calls[-1].append(block)
        else:
            calls.append([block])
    return calls


def _warm_up(call: list[_Block], widths: list[int], k: int) -> tuple[int | None, Finding | None]:
    """The number of experts and a finding, where the first call is one that picks all of them."""
    rows = [row for block in call for row in range(block.start, block.start + block.count)]
    wide = {widths[row] for row in rows}
    if len(wide) != 1 or min(wide) <= k:
        return None, None
    experts = wide.pop()
    found = f"the first call, {call[0].count} tokens, picks all {experts} experts, as llama.cpp does to load them"
    return experts, Finding("warm-up", found, "leave it out", mended=True)


def _tokens(
    calls: list[list[_Block]], known: list[int], picks: NDArray[Any], start: int, name: str, lines: list[int]
) -> tuple[NDArray[Any], list[int], int]:
    """Picks [T, L, k] of all tokens, the tokens of each call, and how many tokens the last layer skips."""
    parts, sizes, skipped = [], [], 0
    for call in calls:
        size = call[0].count
        ids = np.full((size, len(known), picks.shape[1]), -1, np.int32)
        found = {block.layer: block for block in call}
        for at, layer in enumerate(known):
            block = found.get(layer, _Block(layer, call[-1].start + call[-1].count, 0))
            last = layer == known[-1] and size > 1 and len(known) > 1
            if block.count != size and not (last and block.count <= 1):
                line = lines[min(block.start, len(lines) - 1)]
                raise TraceError(
                    f"{name}: line {line}: layer {layer} has {block.count} rows, layer {call[0].layer} of its "
                    f"call has {size}; is the log cut, or of several calls at once?"
                )
            skipped += size - block.count
            if block.count:
                rows = picks[block.start - start : block.start - start + block.count]
                ids[size - block.count :, at] = rows
        parts.append(ids)
        sizes.append(size)
    return np.concatenate(parts), sizes, skipped


def _sequences(
    options: ImportOptions, sizes: list[int], layers: int, name: str
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Length and prefill rows of each sequence, as the user said or by the sizes of calls."""
    rows = sum(sizes)
    if options.sequence_len is not None or layers == 1:
        # One layer alone: where a call ends is not to be seen.
        lengths = sequence_lengths(options, rows, name)
        return lengths, prompt_lengths(options, lengths, name)
    calls = np.array(sizes, np.int64)
    prefill = calls > 1
    starts = np.append(0, np.flatnonzero(prefill[1:] & ~prefill[:-1]) + 1)
    lengths = np.add.reduceat(calls, starts)
    if options.prompt_len is not None:
        return lengths, prompt_lengths(options, lengths, name)
    return lengths, np.add.reduceat(calls * prefill, starts)


FORMAT = Format(
    name="llamacpp-csv",
    summary="picks logged by patched llama.cpp builds, layer_id,expert_ids; phases by the size of calls",
    gives="trace",
    takes=frozenset({"num_experts", "top_k", "prompt_len", "sequence_len"}),
    files="one file: rows such as 3,52 40 85, perhaps below the header layer_id,expert_ids",
    recognise=recognise,
    read=read,
    nearly=nearly,
)
