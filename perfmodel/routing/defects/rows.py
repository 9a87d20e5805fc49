"""What several checks need: which rows are alike, how many picks two rows share, and traces without some rows."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfmodel.routing.trace import RoutingTrace

Ids = NDArray[np.unsignedinteger[Any]]
Bools = NDArray[np.bool_]
Numbers = NDArray[np.uint64]

_CHUNK = 2**20  # picks that are looked at together, so that little memory is needed beside the trace


def chunks(trace: RoutingTrace) -> Iterator[slice]:
    """Slices of rows that cover the trace."""
    step = max(1, _CHUNK // (trace.num_layers * trace.top_k))
    return (slice(start, start + step) for start in range(0, trace.num_tokens, step))


def layer_marks(trace: RoutingTrace, weights: bool = False) -> Numbers:
    """A number for each token and layer [T, L], equal for equal sets of picks (and of weights); hardly else."""
    random = np.random.default_rng(20261129)
    factors = random.integers(2**63, size=(2, trace.top_k), dtype=np.uint64) * np.uint64(2) + np.uint64(1)
    marks = np.empty((trace.num_tokens, trace.num_layers), np.uint64)
    for rows in chunks(trace):
        ids = trace.topk_ids[rows]
        if weights and trace.topk_weights is not None:
            order = np.argsort(ids, axis=-1)
            held = np.take_along_axis(trace.topk_weights[rows], order, -1)
            ids = np.take_along_axis(ids, order, -1)
            marks[rows] = _mixed((held.view(np.uint32) * factors[1]).sum(-1, dtype=np.uint64))
        else:
            ids = np.sort(ids, axis=-1)
            marks[rows] = 0
        marks[rows] += _mixed((ids * factors[0]).sum(-1, dtype=np.uint64))
    return marks


def row_marks(marks: Numbers) -> Numbers:
    """A number for each token [T], equal for tokens that are alike in every layer."""
    factors = np.random.default_rng(7).integers(2**63, size=marks.shape[1], dtype=np.uint64) | np.uint64(1)
    return _mixed((marks * factors).sum(-1, dtype=np.uint64))


def _mixed(numbers: Numbers) -> Numbers:
    """Sums of products scattered over all bits, so that sums of them do not agree by their structure."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))


def like_previous(marks: Numbers, offsets: NDArray[np.int64]) -> Bools:
    """Which tokens [T] are like the token before them in their sequence."""
    alike = np.append(False, marks[1:] == marks[:-1])
    alike[offsets[:-1]] = False
    return alike


def shared(
    now: NDArray[np.unsignedinteger], before: NDArray[np.unsignedinteger], unassigned: int
) -> NDArray[np.float64]:
    """Share of the picks of each row of ``now`` [n, L, k] that the same row of ``before`` has too, [n]."""
    found = np.zeros(now.shape, dtype=bool)
    for pick in range(now.shape[-1]):
        found |= now == before[..., pick : pick + 1]
    assigned = now != unassigned
    picks = assigned.sum((1, 2))
    return (found & assigned).sum((1, 2)) / np.maximum(picks, 1)  # type: ignore[no-any-return]


def without_rows(trace: RoutingTrace, left_out: Bools) -> RoutingTrace:
    """The trace without the marked rows [T]; sequences of which nothing is left go too."""
    lengths, prompts, kept, labels = trace.sequence_lengths, [], [], []
    for s in range(trace.num_sequences):
        start = int(trace.sequence_offsets[s])
        rows = np.flatnonzero(~left_out[start : start + int(lengths[s])])
        if len(rows):
            kept.append(rows + start)
            prompts.append(int((rows < trace.prompt_len[s]).sum()))
            labels.append(trace.labels[s] if trace.labels else "")
    return trace.take_rows(kept, prompts, tuple(labels) if trace.labels else None)


def some(numbers: NDArray[np.int64] | list[int], most: int = 5) -> str:
    """Numbers for a message, the first few where there are many."""
    text = ", ".join(str(int(one)) for one in numbers[:most])
    return f"{text}, ..." if len(numbers) > most else text


def counted(count: int, thing: str) -> str:
    """A count and its noun: ``1 row``, ``2 rows``."""
    return f"{count:,} {thing}{'' if count == 1 else 's'}"
