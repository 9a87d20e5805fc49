"""Layers and tokens that are recorded more than once."""

import numpy as np
from numpy.typing import NDArray

from perfmodel.routing.defects import Seen
from perfmodel.routing.defects.order import ends_before_loops
from perfmodel.routing.defects.rows import (
    Bools,
    Numbers,
    counted,
    layer_marks,
    like_previous,
    row_marks,
    some,
    without_rows,
)
from perfmodel.routing.trace import RoutingTrace

#: A layer that picks like another for this share of the tokens is a copy of it.
COPY = 0.99
#: Fewest changes of a layer's picks from a token to the next that make an agreement with another layer telling.
CHANGES = 12
#: Fewest rows of a passage that is recorded again, and fewest different ones among them.
PASSAGE, DIFFERENT = 8, 4
#: Picks of a token that, all alike in two rows that follow one another, mean one token.
ALONE = 64
#: Most tokens that layers are compared on, evenly spread.
_SAMPLE = 4096


def repeated_layers(trace: RoutingTrace) -> Seen | None:
    """A layer picks the same sets of experts as an earlier one for at least 99 % of the tokens.

    Layers whose picks change fewer than 12 times between neighbouring tokens are left alone. Mended by keeping the
    first of each group of copies.
    """
    marks = layer_marks(trace)
    marks = marks[:: -(-len(marks) // _SAMPLE)]
    lively = (marks[1:] != marks[:-1]).sum(0) >= CHANGES
    copies: dict[int, int] = {}
    for layer in range(1, trace.num_layers):
        if not lively[layer]:
            continue
        same = (marks[:, :layer] == marks[:, layer : layer + 1]).mean(0)
        first = int(np.argmax(same >= COPY))
        if same[first] >= COPY:
            copies[layer] = copies.get(first, first)
    if not copies:
        return None
    number = trace.layer_index
    pairs = [f"{number[layer]} of {number[first]}" for layer, first in copies.items()]
    more = ", ..." if len(pairs) > 5 else ""
    kept = [layer for layer in range(trace.num_layers) if layer not in copies]
    return Seen(
        f"{counted(len(copies), 'model layer')} {'copies' if len(copies) == 1 else 'copy'} another: "
        f"{', '.join(pairs[:5])}{more}",
        f"leave out {counted(len(copies), 'layer')} and keep {some(number[kept])}",
        lambda: trace.map_layers(kept, number[kept]),
    )


def duplicate_tokens(trace: RoutingTrace) -> Seen | None:
    """Rows, passages or sequences that are recorded again, alike in every pick and weight.

    * every row of a sequence stands n times in a row;
    * one row stands twice in a row, where the sequence has no other like it: only in recordings of 64 picks a token
      and more, in which no real token was ever seen to route just like the one before (26,000 of three recordings);
    * a passage of at least 8 rows, 4 of them different, comes again in the same sequence. A token's routing depends
      on all before it, so text that repeats does not give equal rows in all layers, the more so with weights;
    * a sequence equals an earlier one, as with two recordings of one request.

    A passage that repeats to the end of its sequence is a loop, see :func:`perfmodel.routing.defects.order.looping`,
    and not told here. Mended by leaving out the later ones.
    """
    marks = row_marks(layer_marks(trace, weights=True))
    again = _sequences_again(trace, marks)
    sequences = int(again[trace.sequence_offsets[:-1]].sum())
    multiplied, passages, doubled = np.zeros_like(again), np.zeros_like(again), np.zeros_like(again)
    stops = ends_before_loops(trace)
    for s in range(trace.num_sequences):
        rows = slice(int(trace.sequence_offsets[s]), int(trace.sequence_offsets[s + 1]))
        if not again[rows].any():
            multiplied[rows] = _rows_multiplied(marks[rows])
            if not multiplied[rows].any() and _can_tell(trace):
                before = slice(rows.start, int(stops[s]))
                passages[before] = _passages_again(marks[before])
                if trace.num_layers * trace.top_k >= ALONE:
                    doubled[before] = _rows_doubled(marks[before]) & ~passages[before]
    gone = again | multiplied | passages | doubled
    if not gone.any():
        return None
    parts = [
        (sequences, "sequence", "equal", " an earlier one"),
        (multiplied.sum(), "row", "only repeat", " the row before, in sequences where every row does so"),
        (doubled.sum(), "row", "only repeat", " the row before"),
        (passages.sum(), "row", "", " of passages that are recorded again in their sequence"),
    ]
    found = "; ".join(counted(int(n), thing) + _does(int(n), verb) + what for n, thing, verb, what in parts if n)
    return Seen(found, f"leave out {counted(int(gone.sum()), 'row')}", lambda: without_rows(trace, gone))


def _does(count: int, verb: str) -> str:
    """What that many do: `` that repeats``, `` that repeat``; nothing without a verb."""
    return verb and f" that {verb}{'s' if count == 1 else ''}"


def _can_tell(trace: RoutingTrace) -> bool:
    """Whether equal rows mean equal tokens: a few picks without weights are often alike."""
    return trace.num_layers * trace.top_k >= 16


def _sequences_again(trace: RoutingTrace, marks: Numbers) -> Bools:
    """Rows [T] of the sequences whose rows and prompt equal those of an earlier one."""
    again, seen = np.zeros(len(marks), bool), set()
    for s in range(trace.num_sequences):
        rows = marks[trace.sequence_offsets[s] : trace.sequence_offsets[s + 1]]
        key = int(trace.prompt_len[s]), rows.tobytes()
        if key in seen and len(np.unique(rows)) >= DIFFERENT and len(rows) >= PASSAGE:
            again[trace.sequence_offsets[s] : trace.sequence_offsets[s + 1]] = True
        seen.add(key)
    return again


def _rows_multiplied(marks: Numbers) -> Bools:
    """Rows that are copies, where the lengths of all runs of equal rows have a divisor above one."""
    starts = np.flatnonzero(~like_previous(marks, np.array([0, len(marks)])))
    times = int(np.gcd.reduce(np.diff(np.append(starts, len(marks)))))
    copies = np.zeros(len(marks), bool)
    if times > 1 and len(starts) >= CHANGES:
        copies[:] = True
        copies[::times] = False
    return copies


def _rows_doubled(marks: Numbers) -> Bools:
    """Rows that equal the row before, and no other of the sequence: longer runs may be dummy tokens or a loop."""
    _, numbers, counts = np.unique(marks, return_inverse=True, return_counts=True)
    return np.asarray(np.append(False, marks[1:] == marks[:-1]) & (counts[numbers] == 2))


def _passages_again(marks: Numbers) -> Bools:
    """Rows of the passages that came before at one distance."""
    rows = np.arange(len(marks))
    order = np.argsort(marks, kind="stable")
    before = np.full(len(marks), -1)
    same = marks[order[1:]] == marks[order[:-1]]
    before[order[1:][same]] = order[:-1][same]
    distance: NDArray[np.int64] = np.where(before < 0, 0, rows - before)
    starts = np.flatnonzero(np.append(True, distance[1:] != distance[:-1]))
    copies = np.zeros(len(marks), bool)
    for start, stop in zip(starts, np.append(starts[1:], len(marks)), strict=True):
        if distance[start] > 1 and stop - start >= PASSAGE and len(np.unique(marks[start:stop])) >= DIFFERENT:
            copies[start:stop] = True
    return copies
