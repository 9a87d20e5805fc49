"""Counts over the rows of a routing trace, block by block: picks, reuse by lag, distinct experts, gate weights.

A block is a run of rows that holds whole sequences or a piece of one. What a sequence that goes on in the next block
needs there is kept in the arrays called state, which are set back at the first row of each sequence.
"""

# The compiler infers the types of kernels.
# mypy: allow-untyped-defs

import numpy as np
from numba import types

from perfmodel.kernels._jit import loop, read_only, scalar

NO_EXPERT = 65535
"""What stands for no pick, as in `routing.blocks`."""
# Of a pair of rows or of a window: all within the prefill, all within decode, or from one into the other.
PREFILL, DECODE, ACROSS = range(3)
# Of a window, in place of ACROSS: whatever the phases.
ALL = 2

_IDS = read_only(types.uint16[:, :, ::1])
_INTS = read_only(types.int64[::1])
_SUMS3, _SUMS4 = types.int64[:, :, ::1], types.int64[:, :, :, ::1]


@scalar
def _kind(t, lag, prompt):
    """Where row ``t`` of a sequence and the row ``lag`` before lie, -1 if there is none."""
    if t < lag:
        return -1
    if t < prompt:
        return PREFILL
    return DECODE if t - lag >= prompt else ACROSS


@loop(
    types.void(
        _IDS, types.int64, types.int64, types.int64, _INTS, _INTS, _INTS, _INTS, _INTS,
        types.uint64[:, ::1], types.int64[:, ::1], _SUMS3, _SUMS4, _SUMS4, _SUMS4, _SUMS3,
    )
)  # fmt: skip
def reuse_and_windows(
    ids, start, first, last, offsets, prompts, group, lags, windows,
    history, latest, pending, shared, asked, distinct, whole,
):  # fmt: skip
    """Add up picks that an earlier row made too, and distinct experts in windows that follow one another.

    ids, start, first, last, offsets, prompts, group : as in `reuse.stack_distances`.
    lags : int64, 1..64. windows : int64, rows of a window.
    history, latest, pending : state; uint64 [L, E], int64 [L, E], int64 [2, windows, L].
    shared, asked : int64 [G, L, 3, lags], picks that the row ``lag`` before made too, and all picks that have such a
        row, by PREFILL, DECODE, ACROSS.
    distinct : int64 [G, L, 3, windows], sums over whole windows, by PREFILL, DECODE, ALL.
    whole : int64 [G, 3, windows], how many windows those are.
    """
    rows, layers, width = ids.shape
    kind = np.empty(lags.shape[0], np.int64)
    opened = np.empty((2, windows.shape[0]), np.int64)
    for s in range(first, last):
        begin, prompt, g = offsets[s], prompts[s], group[s]
        low, high = max(begin, start), min(offsets[s + 1], start + rows)
        if low == begin:
            latest[:] = -1
            pending[:] = 0
        for row in range(low, high):
            t = row - begin
            phase, within = (PREFILL, t) if t < prompt else (DECODE, t - prompt)
            if within == 0:
                pending[1] = 0
            for d in range(lags.shape[0]):
                kind[d] = _kind(t, lags[d], prompt)
            for w in range(windows.shape[0]):
                opened[0, w] = t - t % windows[w]
                opened[1, w] = t - within % windows[w]
            for layer in range(layers):
                picked = 0
                for j in range(width):
                    expert = ids[row - start, layer, j]
                    if expert == NO_EXPERT:
                        continue
                    picked += 1
                    before = latest[layer, expert]
                    for w in range(windows.shape[0]):
                        pending[0, w, layer] += before < opened[0, w]
                        pending[1, w, layer] += before < opened[1, w]
                    # Bit b of the history: picked b rows before the latest time.
                    gap = t - before
                    if before >= 0 and gap <= 64:
                        bits = history[layer, expert]
                        for d in range(lags.shape[0]):
                            if lags[d] >= gap and (bits >> np.uint64(lags[d] - gap)) & np.uint64(1):
                                shared[g, layer, kind[d], d] += 1
                        bits = bits << np.uint64(gap) if gap < 64 else np.uint64(0)
                        history[layer, expert] = bits | np.uint64(1)
                    else:
                        history[layer, expert] = np.uint64(1)
                    latest[layer, expert] = t
                for d in range(lags.shape[0]):
                    if kind[d] >= 0:
                        asked[g, layer, kind[d], d] += picked
            for w in range(windows.shape[0]):
                if (t + 1) % windows[w] == 0:
                    whole[g, ALL, w] += 1
                    for layer in range(layers):
                        distinct[g, layer, ALL, w] += pending[0, w, layer]
                        pending[0, w, layer] = 0
                if (within + 1) % windows[w] == 0:
                    whole[g, phase, w] += 1
                    for layer in range(layers):
                        distinct[g, layer, phase, w] += pending[1, w, layer]
                        pending[1, w, layer] = 0


@loop(
    types.void(
        _IDS, types.int64, types.int64, types.int64, _INTS, _INTS, _INTS, _SUMS3, _SUMS4,
        types.float64[:, :, ::1], types.int64[:, :, ::1],
    )
)  # fmt: skip
def picks_and_chance(ids, start, first, last, offsets, splits, group, counts, picks, repeats, asked):
    """Add up the picks of every expert before and after row ``splits`` [S] of each sequence, and chance reuse.

    counts : state, int64 [2, L, E].
    picks : int64 [G, 2, L, E].
    repeats : float64 [G, L, 3] and asked : int64 [G, L, 3], for the rows before, after, and all of them: expected
        number of picks that another row of the same sequence, drawn at random, made too, sum over experts of
        n (n - 1) / (N - 1) for n picks in N rows; and the number of picks of sequences with at least two such rows.
    """
    rows, layers = ids.shape[:2]
    for s in range(first, last):
        begin, stop, g = offsets[s], offsets[s + 1], group[s]
        split = splits[s]
        low, high = max(begin, start), min(stop, start + rows)
        if low == begin:
            counts[:] = 0
        count_rows(ids, start, low, high, begin + split, counts)
        if high < stop:
            continue
        length = stop - begin
        for layer in range(layers):
            pairs = np.zeros(3, np.int64)
            total = np.zeros(3, np.int64)
            for expert in range(counts.shape[2]):
                before, after = counts[0, layer, expert], counts[1, layer, expert]
                both = before + after
                if both == 0:
                    continue
                picks[g, 0, layer, expert] += before
                picks[g, 1, layer, expert] += after
                pairs[0] += before * (before - 1)
                pairs[1] += after * (after - 1)
                pairs[2] += both * (both - 1)
                total[0] += before
                total[1] += after
                total[2] += both
            for i in range(3):
                n = split if i == 0 else length - split if i == 1 else length
                if n >= 2:
                    repeats[g, layer, i] += pairs[i] / (n - 1)
                    asked[g, layer, i] += total[i]


@scalar
def count_rows(ids, start, low, high, split, counts):
    """Count the picks of rows low..high - 1 into ``counts`` [2, L, E]: those before row ``split``, and the others."""
    for row in range(low, high):
        side = 1 if row >= split else 0
        for layer in range(ids.shape[1]):
            for j in range(ids.shape[2]):
                expert = ids[row - start, layer, j]
                if expert != NO_EXPERT:
                    counts[side, layer, expert] += 1


@loop(
    types.void(
        read_only(types.float32[:, :, ::1]), types.int64, types.int64, types.int64, _INTS, _INTS,
        types.float64[:, :, ::1], types.int64[:, ::1],
    )
)  # fmt: skip
def weights_by_rank(weights, start, first, last, offsets, group, sums, tokens):
    """Add up the share of a row's gate weight that its largest, second, ... weight has.

    weights : float32 [n, L, k], rows ``start``..; rows whose weights are all zero do not count.
    sums : float64 [G, L, k]. tokens : int64 [G, L], rows that counted.
    """
    rows, layers, width = weights.shape
    ordered = np.empty(width)
    for s in range(first, last):
        for row in range(max(offsets[s], start), min(offsets[s + 1], start + rows)):
            for layer in range(layers):
                total = 0.0
                for j in range(width):
                    value = np.float64(weights[row - start, layer, j])
                    total += value
                    place = j
                    while place > 0 and ordered[place - 1] < value:
                        ordered[place] = ordered[place - 1]
                        place -= 1
                    ordered[place] = value
                if total > 0:
                    tokens[group[s], layer] += 1
                    for j in range(width):
                        sums[group[s], layer, j] += ordered[j] / total


@loop(
    types.int64(
        read_only(types.uint16[:, :, :, ::1]), _INTS, read_only(types.int64[:, ::1]), types.int64, types.int64[::1]
    )
)
def batch_distinct(ids, lengths, batches, num_experts, sums):
    """Distinct experts that sequences pick at the same step of their decode; returns how many steps counted.

    ids : uint16 [M, steps, L, k], decode rows of M sequences. lengths : int64 [M], how many of them are there.
    batches : int64 [N, B], the sequences of each batch. sums : int64 [L], added to for every step of every batch at
    which all of its sequences are still decoding.
    """
    layers, width = ids.shape[2], ids.shape[3]
    stamp = np.zeros((layers, num_experts), np.int64)
    clock = 0
    for b in range(batches.shape[0]):
        steps = ids.shape[1]
        for i in range(batches.shape[1]):
            steps = min(steps, lengths[batches[b, i]])
        for t in range(steps):
            clock += 1
            for i in range(batches.shape[1]):
                for layer in range(layers):
                    for j in range(width):
                        expert = ids[batches[b, i], t, layer, j]
                        if expert != NO_EXPERT and stamp[layer, expert] != clock:
                            stamp[layer, expert] = clock
                            sums[layer] += 1
    return clock


@loop(
    types.int64(
        read_only(types.uint16[:, :, :, ::1]), read_only(types.int64[:, ::1]), read_only(types.int64[:, ::1]),
        types.int64, types.int64[::1],
    )
)  # fmt: skip
def drawn_distinct(ids, batches, rows, num_experts, sums):
    """Distinct experts of rows that lie at any positions in their sequences; returns how many batches counted.

    ids : uint16 [M, steps, L, k], decode rows of M sequences. batches, rows : int64 [N, B], the sequences of each batch
    and the row of each of them. sums : int64 [L], added to for every batch.
    """
    layers, width = ids.shape[2], ids.shape[3]
    stamp = np.zeros((layers, num_experts), np.int64)
    for b in range(batches.shape[0]):
        for i in range(batches.shape[1]):
            for layer in range(layers):
                for j in range(width):
                    expert = ids[batches[b, i], rows[b, i], layer, j]
                    if expert != NO_EXPERT and stamp[layer, expert] != b + 1:
                        stamp[layer, expert] = b + 1
                        sums[layer] += 1
    return batches.shape[0]
