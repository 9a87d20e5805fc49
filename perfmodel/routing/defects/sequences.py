"""Defects of whole sequences and of their ends: dummy rows, padding, phases that are not there."""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from perfmodel.routing.defects import Seen
from perfmodel.routing.defects.rows import (
    Bools,
    chunks,
    counted,
    layer_marks,
    like_previous,
    row_marks,
    some,
    without_rows,
)
from perfmodel.routing.trace import RoutingTrace

#: Fewest equal rows in a row, and fewest repeated lists of picks in them, that no text brings about: a mark that is
#: typed many times over does not route alike in every layer for so long.
ROWS, LISTS = 8, 64


def warm_up(trace: RoutingTrace) -> Seen | None:
    """The recording starts with sequences each of whose rows is like its first, at least 8 rows and 64 lists of picks.

    All tokens of a dummy batch are the same, so attention leaves them the same. Mended by leaving those sequences out.
    """
    marks, offsets = row_marks(layer_marks(trace)), trace.sequence_offsets
    changes = ~like_previous(marks, offsets)
    changes[offsets[:-1]] = False
    # A sequence of one row is like itself; it counts where it is like the first row of all.
    plain = ~np.logical_or.reduceat(changes, offsets[:-1])
    plain &= (trace.sequence_lengths > 1) | (marks[offsets[:-1]] == marks[0])
    count = len(plain) if plain.all() else int(np.argmin(plain))
    rows = int(offsets[count])
    repeated = int((marks[1:rows] == marks[: max(rows - 1, 0)]).sum())
    if rows < ROWS or repeated * trace.num_layers < LISTS:
        return None
    found = f"the first {counted(count, 'sequence')} ({counted(rows, 'row')}) repeat one row each, as dummy tokens do"
    if count == trace.num_sequences:
        return Seen(f"{found}; nothing else is recorded")
    return Seen(
        found,
        f"leave out the first {counted(count, 'sequence')}",
        lambda: trace.sequences(range(count, trace.num_sequences)),
    )


def padding(trace: RoutingTrace) -> Seen | None:
    """Picks that belong to no token, of five kinds, each named with how often it occurs.

    Layers and pick slots that are unassigned throughout; rows that are unassigned in every other layer; and runs of
    equal rows (at least 8, and 64 lists of picks) at the start of a prefill, or at its end where no decode follows.
    Mended by leaving them out. Single unassigned picks among others are counted, and stay.
    """
    layers, slots, rows, single = _unassigned(trace)
    ends = _constant_ends(trace) & ~rows
    parts = [
        (layers.sum(), "layer", f" without a pick (model layers {some(trace.layer_index[layers])})"),
        (slots.sum(), "pick slot", " that no token uses"),
        (rows.sum(), "row", " without a pick"),
        (ends.sum(), "row", " at an end of a prompt that all repeat one row"),
        (single, "pick", " unassigned where others of the token are assigned, which may be meant so"),
    ]
    found = "; ".join(counted(int(n), thing) + what for n, thing, what in parts if n)
    gone = rows | ends
    if not found:
        return None
    if layers.all() or gone.all() or not (layers.any() or slots.any() or gone.any()):
        return Seen(found)
    return Seen(found, "leave out those layers, slots and rows", lambda: _without(trace, layers, slots, gone))


def _unassigned(trace: RoutingTrace) -> tuple[Bools, Bools, Bools, int]:
    """Layers [L], pick slots [k] and rows [T] that hold no pick, and how many single picks besides are unassigned."""
    layers, slots = np.ones(trace.num_layers, bool), np.ones(trace.top_k, bool)
    rows, total = np.empty(trace.num_tokens, bool), 0
    by_layer_slot = np.zeros((trace.num_layers, trace.top_k), np.int64)
    for part in chunks(trace):
        empty = trace.topk_ids[part] == trace.unassigned
        rows[part] = empty.all((1, 2))
        layers &= empty.all((0, 2))
        slots &= empty.all((0, 1))
        by_layer_slot += empty[~rows[part]].sum(0)
    total = int(by_layer_slot[~layers][:, ~slots].sum())
    return layers, slots, rows, total


def _constant_ends(trace: RoutingTrace) -> Bools:
    """Rows [T] of the runs of equal rows that :func:`padding` describes; whole sequences are left to warm-up."""
    alike = like_previous(row_marks(layer_marks(trace)), trace.sequence_offsets)
    ends, lengths = np.zeros(trace.num_tokens, bool), trace.sequence_lengths
    for s in range(trace.num_sequences):
        start, length, prompt = int(trace.sequence_offsets[s]), int(lengths[s]), int(trace.prompt_len[s])
        inside = alike[start + 1 : start + length]
        if inside.all():
            continue
        head = int(np.argmin(inside)) + 1
        if _is_long(head, trace.num_layers) and head < prompt:
            ends[start : start + head] = True
        tail = int(np.argmin(inside[::-1])) + 1
        if _is_long(tail, trace.num_layers) and prompt == length:
            ends[start + length - tail : start + length] = True
    return ends


def _is_long(rows: int, layers: int) -> bool:
    return rows >= ROWS and (rows - 1) * layers >= LISTS


def _without(trace: RoutingTrace, layers: Bools, slots: Bools, rows: Bools) -> RoutingTrace:
    ids = trace.topk_ids[:, ~layers][:, :, ~slots]
    weights = trace.topk_weights
    thinner = replace(
        trace,
        topk_ids=ids,
        topk_weights=None if weights is None else weights[:, ~layers][:, :, ~slots],
        layer_index=trace.layer_index[~layers],
    )
    return without_rows(thinner, rows) if rows.any() else thinner


def missing_phase(trace: RoutingTrace) -> Seen | None:
    """Some sequence has no prefill, or no decode steps. Mended by leaving those out where others have both."""
    no_prefill = trace.prompt_len == 0
    no_decode = trace.prompt_len == trace.sequence_lengths
    missing: NDArray[np.bool_] = no_prefill | no_decode
    if not missing.any():
        return None
    every = counted(trace.num_sequences, "sequence")
    found = " and ".join(
        f"{int(which.sum()):,} of {every} without {what}"
        for which, what in ((no_prefill, "a prefill"), (no_decode, "decode steps"))
        if which.any()
    )
    if missing.all():
        return Seen(found)
    return Seen(
        found,
        f"leave out {counted(int(missing.sum()), 'sequence')} and keep those with both phases",
        lambda: trace.sequences(np.flatnonzero(~missing)),
    )
