"""The routing of a sequence before and after a row (its prefill and its decode), beside that of other sequences.

``ids``, ``start``, ``first``, ``last``, ``offsets``, ``splits``, ``group`` are as in `tally.picks_and_chance`.
``usable`` is bool [S], which sequences take part; one without any pick on either side never does.
"""

# The compiler infers the types of kernels.
# mypy: allow-untyped-defs

import math

import numpy as np
from numba import types

from perfmodel.kernels._jit import loop, read_only, scalar
from perfmodel.kernels.tally import count_rows

SHARE_UNIT = 2**36
"""A share of one as a whole number, so that sums of shares do not depend on their order."""

# Rows of the tables of hits: what a placement was chosen by.
OWN, OTHER, STATIC, POOLED, ORACLE = range(5)
# Columns of the cosines: of decode with the own prefill, another sequence's, and equal counts.
COSINE_OWN, COSINE_OTHER, COSINE_UNIFORM = range(3)

_IDS = read_only(types.uint16[:, :, ::1])
_INTS = read_only(types.int64[::1])
_FLAGS = read_only(types.boolean[::1])
_COUNTS = types.int64[:, :, ::1]


@scalar
def _ranked(counts, key):
    """Experts from the most to the least picked, the lower number first among equals."""
    experts = counts.shape[0]
    for expert in range(experts):
        key[expert] = -counts[expert]
    return np.argsort(key, kind="mergesort")


@scalar
def _norm(counts):
    """Length of a vector of counts."""
    total = 0.0
    for expert in range(counts.shape[0]):
        total += np.float64(counts[expert]) * counts[expert]
    return math.sqrt(total)


@scalar
def _sum(counts):
    """All picks of [L, E]."""
    total = 0
    for layer in range(counts.shape[0]):
        for expert in range(counts.shape[1]):
            total += counts[layer, expert]
    return total


@scalar
def _share(count, total):
    """A share as a whole number."""
    return np.int64(math.floor(count * (SHARE_UNIT / total) + 0.5))


@loop(
    types.int64(
        _IDS, types.int64, types.int64, types.int64, _INTS, _INTS, _FLAGS, _INTS, _COUNTS,
        types.float64[:, ::1], types.float64[:, ::1], types.int32[:, :, ::1], types.int64[:, ::1],
        types.int64[:, ::1], types.int64[:, ::1], types.int64[:, ::1], types.int64[::1], _INTS,
        types.int64[:, :, :, ::1],
    )
)  # fmt: skip
def profiles(
    ids, start, first, last, offsets, splits, usable, slot, counts,
    directions, later_directions, placed, half_placed, pooled, alike, layers_alike, directed, unit, kept,
):  # fmt: skip
    """Add up what sequences look like to each other; returns how many sequences were added.

    slot : int64 [E], for each rank among the most picked experts the first entry of a list of capacities that places
        it, n if none does.
    counts : state, int64 [2, L, E].
    directions : float64 [L, E], sum of prefill counts scaled to length one. directed : int64 [L], how many those are.
    later_directions : float64 [L, E], the same of the decode counts, where the prefill has some too.
    placed : int32 [L, E, n], how many prefills place an expert first at each entry of the list of capacities.
    half_placed : int64 [L, E], how many prefills place an expert among their E // 2.
    pooled, alike : int64 [L, E], sum of decode counts, and of their shares of the sequence's picks in SHARE_UNIT.
    layers_alike : int64 [L, E], sum of the decode counts' shares of the sequence's picks in the layer in SHARE_UNIT.
    unit : int64 [S], below m for each usable sequence. kept : int64 [3, m, L, E], what is added up in ``alike``,
        ``pooled`` and ``layers_alike``, by unit; m may be 0.
    """
    added = 0
    layers, experts = counts.shape[1:]
    key = np.empty(experts, np.int64)
    for s in range(first, last):
        if not usable[s]:
            continue
        low, high = max(offsets[s], start), min(offsets[s + 1], start + ids.shape[0])
        if low == offsets[s]:
            counts[:] = 0
        count_rows(ids, start, low, high, offsets[s] + splits[s], counts)
        if high < offsets[s + 1]:
            continue
        total = _sum(counts[1])
        if total == 0 or _sum(counts[0]) == 0:
            continue
        added += 1
        for layer in range(layers):
            norm, decode_norm = _norm(counts[0, layer]), _norm(counts[1, layer])
            picks = 0
            for expert in range(experts):
                picks += counts[1, layer, expert]
            order = _ranked(counts[0, layer], key)
            directed[layer] += norm > 0
            for rank in range(experts):
                expert = order[rank]
                if norm > 0:
                    directions[layer, expert] += counts[0, layer, expert] / norm
                    if decode_norm > 0:
                        later_directions[layer, expert] += counts[1, layer, expert] / decode_norm
                if slot[rank] < placed.shape[2]:
                    placed[layer, expert, slot[rank]] += 1
                half_placed[layer, expert] += rank < experts // 2
                pooled[layer, expert] += counts[1, layer, expert]
                alike[layer, expert] += _share(counts[1, layer, expert], total)
                layers_alike[layer, expert] += _share(counts[1, layer, expert], max(picks, 1))
                if kept.shape[1] > 0:
                    kept[0, unit[s], layer, expert] += _share(counts[1, layer, expert], total)
                    kept[1, unit[s], layer, expert] += counts[1, layer, expert]
                    kept[2, unit[s], layer, expert] += _share(counts[1, layer, expert], max(picks, 1))
    return added


@loop(
    types.void(
        _IDS, types.int64, types.int64, types.int64, _INTS, _INTS, _INTS, _FLAGS, _INTS, _COUNTS,
        read_only(types.float64[:, ::1]), read_only(types.float64[:, ::1]), read_only(types.int32[:, :, ::1]),
        read_only(types.int64[:, ::1]), read_only(types.int64[:, ::1]), read_only(types.int64[:, ::1]), _INTS,
        read_only(types.int64[:, ::1]), types.int64,
        types.float64[:, :, ::1], types.int64[:, ::1], types.int64[:, ::1], types.float64[:, :, ::1],
        types.float64[:, :, ::1], types.int64[:, ::1], types.int64[::1],
        types.float64[:, ::1], types.int64[:, ::1], types.float64[:, ::1], types.float64[:, ::1],
    )
)  # fmt: skip
def controls(
    ids, start, first, last, offsets, splits, group, usable, slot, counts,
    directions, later_directions, placed, pooled, alike, layers_alike, directed, half_placed, added,
    cosines, compared, overlap, hits, layer_hits, layer_compared, sequences,
    chosen_cosines, choosing, chosen_hits, chosen_layer_hits,
):  # fmt: skip
    """Compare every usable sequence with itself and with the sums over all that `profiles` made.

    directions, later_directions, placed, half_placed, pooled, alike, layers_alike, directed, added, slot, counts : as
        in `profiles`.
    cosines : float64 [G, L, 3]. compared : int64 [G, L], sequences in them.
    overlap : int64 [G, E], experts by the larger of their two ranks, in prefill and in decode, over all layers.
    hits : float64 [G, 5, n], share of a sequence's decode picks whose expert is first placed at each entry of the list
        of capacities, by OWN, OTHER, STATIC, POOLED, ORACLE. sequences : int64 [G], sequences in them.
    layer_hits : float64 [G, L, 5], share of a layer's picks that hit with E // 2 experts placed.
    layer_compared : int64 [G, L], sequences in them.
    chosen_cosines : float64 [G, L], sum over the other sequences of their decode's cosine with this one's prefill, over
        the number of others. choosing : int64 [G, L], sequences in them.
    chosen_hits, chosen_layer_hits : float64 [G, n], [G, L], the same of the shares that hit where this one's prefill
        places, as in ``hits`` and ``layer_hits``.
    """
    layers, experts = counts.shape[1:]
    capacities = placed.shape[2]
    half = experts // 2
    key = np.empty(experts, np.int64)
    rank = np.empty(experts, np.int64)
    others = np.empty(experts, np.int64)
    by_others = np.empty(capacities)
    for s in range(first, last):
        if not usable[s]:
            continue
        low, high = max(offsets[s], start), min(offsets[s + 1], start + ids.shape[0])
        if low == offsets[s]:
            counts[:] = 0
        count_rows(ids, start, low, high, offsets[s] + splits[s], counts)
        if high < offsets[s + 1]:
            continue
        total = _sum(counts[1])
        if total == 0 or _sum(counts[0]) == 0:
            continue
        g = group[s]
        sequences[g] += 1
        by_others[:] = 0.0
        for layer in range(layers):
            before, after = counts[0, layer], counts[1, layer]
            norm, decode_norm = _norm(before), _norm(after)
            picks = 0
            for expert in range(experts):
                picks += after[expert]
            if norm > 0 and decode_norm > 0:
                compared[g, layer] += 1
                own, other = 0.0, 0.0
                for expert in range(experts):
                    part = before[expert] / norm
                    own += part * after[expert]
                    other += (directions[layer, expert] - part) * after[expert]
                cosines[g, layer, COSINE_OWN] += own / decode_norm
                if directed[layer] > 1:
                    cosines[g, layer, COSINE_OTHER] += other / decode_norm / (directed[layer] - 1)
                cosines[g, layer, COSINE_UNIFORM] += picks / decode_norm / math.sqrt(experts)
            if norm > 0:
                choosing[g, layer] += 1
                if directed[layer] > 1:
                    let = 0.0
                    for expert in range(experts):
                        of_others = later_directions[layer, expert]
                        if decode_norm > 0:
                            of_others -= after[expert] / decode_norm
                        let += before[expert] / norm * of_others
                    chosen_cosines[g, layer] += let / (directed[layer] - 1)
            layer_compared[g, layer] += picks > 0
            per_pick = 1.0 / max(picks, 1)
            order = _ranked(before, key)
            for r in range(experts):
                rank[order[r]] = r
            if added > 1:
                for expert in range(experts):
                    let = np.float64(alike[layer, expert] - _share(after[expert], total))
                    if slot[rank[expert]] < capacities:
                        chosen_hits[g, slot[rank[expert]]] += let / SHARE_UNIT / (added - 1)
                    if rank[expert] < half:
                        let = np.float64(layers_alike[layer, expert] - _share(after[expert], max(picks, 1)))
                        chosen_layer_hits[g, layer] += let / SHARE_UNIT / (added - 1)
            for expert in range(experts):
                if after[expert] == 0:
                    continue
                count = after[expert] / total
                mine = slot[rank[expert]]
                in_half = rank[expert] < half
                if mine < capacities:
                    hits[g, OWN, mine] += count
                    by_others[mine] -= count
                layer_hits[g, layer, OWN] += in_half * after[expert] * per_pick
                if added > 1:
                    for i in range(capacities):
                        by_others[i] += count * placed[layer, expert, i]
                    by = (half_placed[layer, expert] - in_half) / (added - 1)
                    layer_hits[g, layer, OTHER] += by * after[expert] * per_pick
            best = _ranked(after, key)
            if norm > 0 and decode_norm > 0:
                for r in range(experts):
                    overlap[g, max(r, rank[best[r]])] += 1
            for by in range(STATIC, ORACLE + 1):
                if by == STATIC:
                    for expert in range(experts):
                        others[expert] = alike[layer, expert] - _share(after[expert], total)
                elif by == POOLED:
                    for expert in range(experts):
                        others[expert] = pooled[layer, expert] - after[expert]
                order = best if by == ORACLE else _ranked(others, key)
                for r in range(experts):
                    if slot[r] < capacities:
                        hits[g, by, slot[r]] += after[order[r]] / total
                    if r < half:
                        layer_hits[g, layer, by] += after[order[r]] * per_pick
        if added > 1:
            for i in range(capacities):
                hits[g, OTHER, i] += by_others[i] / (added - 1)


@loop(
    types.void(
        read_only(types.int64[:, :, :, ::1]), _INTS, _INTS, read_only(types.int64[:, ::1]),
        read_only(types.int64[:, ::1]), types.float64[:, :, ::1], types.float64[:, :, ::1],
    )
)  # fmt: skip
def static_resampled(kept, slot, sequences, layer_sequences, times, hits, layer_hits):
    """What the static placements reach among units of sequences that were drawn with replacement.

    kept, slot : as in `profiles`. sequences : int64 [m], of each unit. layer_sequences : int64 [m, L], that pick there.
    times : int64 [R, m], how often each unit was drawn; no copy of a unit helps to choose for another.
    hits : float64 [R, 2, n], of STATIC and POOLED: mean share of the decode picks whose expert is first placed at each
        entry of the list of capacities.
    layer_hits : float64 [R, 2, L], mean share of a layer's picks that hit with E // 2 experts placed, NaN if none.
    """
    count, layers, experts = kept.shape[1:]
    capacities, half = hits.shape[2], experts // 2
    key, order = np.empty(experts, np.int64), np.empty(experts, np.int64)
    every = np.empty(experts, np.int64)
    for layer in range(layers):
        for kind in range(2):
            for r in range(times.shape[0]):
                every[:] = 0
                drawn, counted = 0, 0
                for s in range(count):
                    often = times[r, s]
                    if often > 0:
                        drawn += often * sequences[s]
                        counted += often * layer_sequences[s, layer]
                        for expert in range(experts):
                            every[expert] += often * kept[kind, s, layer, expert]
                ranked = _ranked(every, key)
                total = 0.0
                for s in range(count):
                    often = times[r, s]
                    if often == 0 or layer_sequences[s, layer] == 0:
                        continue
                    # One unit less changes the order little, so that sorting by insertion is quick.
                    for i in range(experts):
                        expert = ranked[i]
                        score = every[expert] - often * kept[kind, s, layer, expert]
                        place = i
                        while place > 0 and (
                            key[place - 1] < score or (key[place - 1] == score and order[place - 1] > expert)
                        ):
                            key[place] = key[place - 1]
                            order[place] = order[place - 1]
                            place -= 1
                        key[place] = score
                        order[place] = expert
                    unit = often / SHARE_UNIT
                    for i in range(experts):
                        if slot[i] < capacities:
                            hits[r, kind, slot[i]] += unit * kept[0, s, layer, order[i]] / drawn
                        if i < half:
                            total += unit * kept[2, s, layer, order[i]]
                layer_hits[r, kind, layer] = total / counted if counted > 0 else np.nan


@loop(
    types.void(
        _IDS, types.int64, types.int64, types.int64, _INTS, _INTS, _INTS, _FLAGS, types.int64, _COUNTS,
        types.float64[:, ::1], types.int64[:, ::1], types.int64[:, ::1], types.int64[:, ::1], types.int64[::1],
    )
)  # fmt: skip
def drift(
    ids, start, first, last, offsets, splits, group, usable, rows, counts, cosines, compared, hits, picks, sequences
):
    """Compare the prefill of every usable sequence with whole windows of ``rows`` decode rows, one after another.

    counts : state, int64 [3, L, E]: picks of the prefill, of the window, and whether an expert is among the E // 2
        most picked of the prefill.
    cosines : float64 [G, W], summed over layers. compared : int64 [G, W], pairs of a sequence and a layer in them.
    hits, picks : int64 [G, W]. sequences : int64 [W], sequences that have the window.
    """
    layers, experts = counts.shape[1:]
    key = np.empty(experts, np.int64)
    for s in range(first, last):
        if not usable[s]:
            continue
        split, g = offsets[s] + splits[s], group[s]
        low, high = max(offsets[s], start), min(offsets[s + 1], start + ids.shape[0])
        if low == offsets[s]:
            counts[:] = 0
        if low < split:
            count_rows(ids, start, low, min(high, split), split, counts)
        if high >= split > low:
            for layer in range(layers):
                order = _ranked(counts[0, layer], key)
                for r in range(experts // 2):
                    counts[2, layer, order[r]] = 1
        row = max(low, split)
        while row < high:
            w = (row - split) // rows
            if w >= cosines.shape[1]:
                break
            stop = split + (w + 1) * rows
            count_rows(ids, start, row, min(high, stop), split, counts)
            if high >= stop:
                sequences[w] += 1
                for layer in range(layers):
                    norm = _norm(counts[0, layer]) * _norm(counts[1, layer])
                    dot = 0.0
                    for expert in range(experts):
                        count = counts[1, layer, expert]
                        dot += np.float64(counts[0, layer, expert]) * count
                        picks[g, w] += count
                        hits[g, w] += count * counts[2, layer, expert]
                    if norm > 0:
                        cosines[g, w] += dot / norm
                        compared[g, w] += 1
                counts[1] = 0
            row = stop
