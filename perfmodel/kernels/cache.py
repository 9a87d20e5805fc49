"""Replay expert caches over a trace, step by step: every rule, any pools, and copies issued ahead.

The rules are those of `perfmodel.caches`. An eviction compares the layers by their lowest records, so that it looks
at the residents of few of them; `cache_lru`, `cache_demand` and
`cache_weighted` do the common caches on demand faster and with the same result.
"""

# The compiler infers the types of kernels.
# mypy: allow-untyped-defs, allow-untyped-calls

import numpy as np
from numba import types

from perfmodel.kernels._jit import loop, read_only, scalar

# What a request finds.
HIT_HIGH, HIT_LOW, MISS_HIGH, MISS_LOW, NOT_RUN, AHEAD_HIGH, AHEAD_LOW = range(7)
# What a pick is copied at on a miss.
HIGH, LOW, NOTHING = range(3)
# The rules by number, in the order of `perfmodel.caches.RULES`.
LRU, LFU, WEIGHTED, RECENT_SCORE, ACTIVATION, BELADY = range(6)

_IDS = read_only(types.uint16[:, :, ::1])
_CODES = read_only(types.uint8[:, :, ::1])
_INTS = read_only(types.int64[::1])
_FLOATS = read_only(types.float64[:, :, ::1])
# Added to a likelihood, so that nearness orders the experts that were never used.
_SMALL = 1e-4
# A request that never comes: later than all others, and exact as a number with a point.
_NEVER = np.int64(2**53)
# The bits of an infinite number.
INFINITE = np.array(np.inf).view(np.int64)[()]


@scalar
def _score(rule, record, step, near, weights):
    """Score of a resident in step ``step``, counted from 1; it never falls where the record rises."""
    if rule == WEIGHTED:
        return record / step + weights[3] * near
    if rule == ACTIVATION:
        return (record + _SMALL) * near
    return record


@scalar
def _look_again(bits, layer, shares, uses, total, record, held, guard, stale, lowest, loose):
    """Bring the lowest record of a layer's residents that may be evicted up to date, and their number."""
    if shares:
        for expert in range(held.shape[2]):
            record[bits, layer, expert] = uses[layer, expert] / max(total[layer], 1)
    # Numbers >= 0 are in the order of their bits, of which many are compared at once.
    coded, found, count = record.view(np.int64), INFINITE, 0
    for expert in range(held.shape[2]):
        free = held[bits, layer, expert] > guard[bits, layer, expert]
        found = min(found, coded[bits, layer, expert] if free else INFINITE)
        count += free
    lowest.view(np.int64)[bits, layer], loose[bits, layer], stale[bits, layer] = found, count, False


@scalar
def _insert(
    bits, layer, expert, clock, rule, everywhere, shared, precisions, sizes, capacity, step, weights, near, shares,
    uses, total, record, held, guard, last, filled, stale, lowest, loose, score,
):  # fmt: skip
    """Put a copy into the cache if there is or can be made room; whether it is there now.

    Arrays come one by one: taking them out of a tuple costs more than what is done with them.
    """
    layers, experts = held.shape[1], held.shape[2]
    group = 0 if everywhere else layer
    pool = 0 if shared else bits
    first, stop = (0, layers) if everywhere else (layer, layer + 1)
    from_bits, to_bits = (0, precisions) if shared else (bits, bits + 1)
    if sizes[bits] > capacity[pool]:
        return False
    while filled[pool, group] + sizes[bits] > capacity[pool]:
        least = np.inf
        for q in range(from_bits, to_bits):
            for i in range(first, stop):
                if stale[q, i]:
                    _look_again(q, i, shares, uses, total, record, held, guard, stale, lowest, loose)
                score[q, i] = _score(rule, lowest[q, i], step, near[layers + i - layer], weights)
                least = min(least, score[q, i])
        if least == np.inf:
            return False
        # Where all copies have one size, any of them makes room; of smaller ones there have to be enough.
        if to_bits - from_bits > 1 and sizes[0] != sizes[1]:
            removable = 0
            for q in range(from_bits, to_bits):
                for i in range(first, stop):
                    removable += loose[q, i] * sizes[q]
            if filled[pool, group] - removable + sizes[bits] > capacity[pool]:
                return False
        # Of the residents with this score, which are in layers whose lowest record has it, the least recent one.
        out_bits, out_layer, out_expert = 0, -1, -1
        for q in range(from_bits, to_bits):
            for i in range(first, stop):
                if score[q, i] > least:
                    continue
                for e in range(experts):
                    if not held[q, i, e] or guard[q, i, e]:
                        continue
                    if _score(rule, record[q, i, e], step, near[layers + i - layer], weights) > least:
                        continue
                    if out_layer < 0 or last[q, i, e] < last[out_bits, out_layer, out_expert]:
                        out_bits, out_layer, out_expert = q, i, e
        if rule == BELADY and record[out_bits, out_layer, out_expert] >= record[bits, layer, expert]:
            return False
        held[out_bits, out_layer, out_expert] = False
        stale[out_bits, out_layer] = True
        filled[pool, group] -= sizes[out_bits]
    held[bits, layer, expert] = True
    last[bits, layer, expert] = clock
    if rule == LRU:
        record[bits, layer, expert] = clock
    filled[pool, group] += sizes[bits]
    return True


@loop(
    types.Tuple((types.uint8[:, :, ::1], types.boolean[:, :, ::1], types.uint8[:, :, ::1]))(
        _IDS, _CODES, _IDS, _CODES, _INTS, _IDS, _FLOATS, _FLOATS, _INTS, _INTS, _INTS, read_only(types.float64[::1]),
        types.int64, types.int64, types.boolean, types.boolean, types.boolean,
    )
)  # fmt: skip
def replay(
    ids, wanted, predicted, predicted_wanted, offsets, initial, scores, chances, match, capacity, sizes, weights,
    num_experts, rule, everywhere, shared, protected,
):  # fmt: skip
    """Outcome [T, L, k] of every pick, whether it is kept [T, L, k], and copies that nobody used [T, L, 2].

    See `perfmodel.caches.replay_cache`. An id from ``num_experts`` on is no pick.

    wanted, predicted_wanted : empty where all want high precision.
    capacity, sizes : int64 [2], of the pools and of a copy at high and low precision; with ``shared`` there is but the
        first pool.
    weights : float64 [5], those of the weighted rule and the constant of the mean of scores.
    everywhere : one cache for all layers.
    """
    steps, layers, width = ids.shape
    foretold = predicted.shape[2]
    outcome = np.full((steps, layers, width), NOT_RUN, np.uint8)
    kept = np.zeros((steps, layers, width), np.bool_)
    wasted = np.zeros((steps, layers, 2), np.uint8)
    shape = (layers, num_experts)
    held = np.empty((2, layers, num_experts), np.bool_)
    guard = np.zeros((2, layers, num_experts), np.bool_)
    last = np.empty((2, layers, num_experts), np.int64)
    filled = np.empty((2, layers), np.int64)
    # Of each layer's residents that may be evicted: whether what follows is out of date, lowest record (inf without
    # any), number, and the score of the lowest record.
    stale, lowest = np.empty((2, layers), np.bool_), np.empty((2, layers))
    loose, score = np.zeros((2, layers), np.int64), np.empty((2, layers))
    precisions = 2 if (wanted == LOW).any() or (predicted_wanted == LOW).any() else 1
    # Nearness of layer i while layer l runs, at L + i - l.
    near = 1.0 - np.arange(2 * layers) % layers / layers
    # Copies of this step that wait for their pick, and those among them for which the cache has no room.
    fresh = np.zeros((2, num_experts), np.bool_)
    aside = np.zeros((2, num_experts), np.bool_)
    uses, high_uses, used_at = np.empty(shape, np.int64), np.empty(shape, np.int64), np.empty(shape, np.int64)
    total, value, following = np.empty(layers, np.int64), np.empty(shape), np.empty(shape, np.int64)
    # What the score of a copy is made of that changes only when its own layer runs. Shares of the uses change with
    # every use in the layer, so they are formed when they are needed.
    record = np.empty((2, layers, num_experts))
    shares = rule == ACTIVATION and chances.shape[0] == 0
    again = np.empty(ids.shape if rule == BELADY else (0, 0, 0), np.int64)
    row = np.int64(0)
    for s in range(offsets.shape[0] - 1):
        begin, end = offsets[s], offsets[s + 1]
        held[:] = False
        filled[:] = 0
        last[:] = 0
        uses[:] = 0
        high_uses[:] = 0
        used_at[:] = 0
        total[:] = 0
        value[:] = 0.0
        record[:] = 0.0
        stale[:] = True
        # Times of what is loaded at the start fall below those of the picks.
        clock = np.int64(initial.shape[2] * layers)
        if rule == BELADY:
            following[:] = _NEVER
            for t in range(end - 1, begin - 1, -1):
                for layer in range(layers - 1, -1, -1):
                    for j in range(width - 1, -1, -1):
                        expert = ids[t, layer, j]
                        if expert < num_experts:
                            again[t, layer, j] = following[layer, expert]
                            following[layer, expert] = (t * layers + layer) * width + j
            record[:] = _NEVER - following
        for rank in range(initial.shape[2]):
            for layer in range(layers):
                expert = initial[min(s, initial.shape[0] - 1), layer, rank]
                group = 0 if everywhere else layer
                if expert >= num_experts or held[0, layer, expert] or filled[0, group] + sizes[0] > capacity[0]:
                    continue
                clock -= 1
                held[0, layer, expert] = True
                last[0, layer, expert] = clock
                if rule == LRU:
                    record[0, layer, expert] = clock
                filled[0, group] += sizes[0]
        clock = np.int64(initial.shape[2] * layers)
        for t in range(begin, end):
            step = t - begin + 1
            if match.shape[0] > 0 and rule == ACTIVATION and (t == begin or match[t] != row):
                row = match[t]
                record[:] = chances[row]
                stale[:] = True
            for layer in range(layers):
                stale[0, layer] = stale[1, layer] = True
                if protected and rule != BELADY:
                    for j in range(foretold):
                        expert = predicted[t, layer, j]
                        want = predicted_wanted[t, layer, j] if predicted_wanted.shape[0] > 0 else HIGH
                        if expert < num_experts and want != NOTHING:
                            guard[0, layer, expert] = True
                            guard[1, layer, expert] = want == LOW or guard[1, layer, expert]
                for j in range(foretold):
                    expert = predicted[t, layer, j]
                    bits = predicted_wanted[t, layer, j] if predicted_wanted.shape[0] > 0 else HIGH
                    if expert >= num_experts or bits == NOTHING or fresh[0, expert] or held[0, layer, expert]:
                        continue
                    if bits == LOW and (fresh[1, expert] or held[1, layer, expert]):
                        continue
                    clock += 1
                    fresh[bits, expert] = True
                    used_at[layer, expert] = step
                    if rule == WEIGHTED:
                        now = weights[0] * step + weights[1] * uses[layer, expert]
                        now += weights[2] * high_uses[layer, expert]
                        record[0, layer, expert] = record[1, layer, expert] = now
                    stale[0, layer] = stale[1, layer] = True
                    aside[bits, expert] = not _insert(
                        bits, layer, expert, clock, rule, everywhere, shared, precisions, sizes, capacity, step,
                        weights, near, shares, uses, total, record, held, guard, last, filled, stale, lowest,
                        loose, score,
                    )  # fmt: skip
                stale[0, layer] = stale[1, layer] = True
                if rule == RECENT_SCORE:
                    for expert in range(num_experts):
                        value[layer, expert] *= 1.0 - weights[4]
                for j in range(width):
                    expert = ids[t, layer, j]
                    if expert >= num_experts:
                        continue
                    if rule == RECENT_SCORE:
                        value[layer, expert] += weights[4] * scores[t, layer, j]
                    if protected and rule != BELADY:
                        guard[0, layer, expert] = True
                        if wanted.shape[0] > 0 and wanted[t, layer, j] != HIGH:
                            guard[1, layer, expert] = True
                if rule == RECENT_SCORE:
                    for expert in range(num_experts):
                        record[0, layer, expert] = record[1, layer, expert] = value[layer, expert]
                for j in range(width):
                    expert = ids[t, layer, j]
                    if expert >= num_experts:
                        continue
                    want = wanted[t, layer, j] if wanted.shape[0] > 0 else HIGH
                    if held[0, layer, expert] or aside[0, expert]:
                        bits = HIGH
                        outcome[t, layer, j] = AHEAD_HIGH if fresh[0, expert] else HIT_HIGH
                        fresh[0, expert] = False
                    elif want != HIGH and (held[1, layer, expert] or aside[1, expert]):
                        bits = LOW
                        outcome[t, layer, j] = AHEAD_LOW if fresh[1, expert] else HIT_LOW
                        fresh[1, expert] = False
                    elif want != NOTHING:
                        bits = want
                        outcome[t, layer, j] = MISS_HIGH + want
                    else:
                        continue
                    clock += 1
                    uses[layer, expert] += 1
                    high_uses[layer, expert] += bits == HIGH
                    total[layer] += 1
                    stale[0, layer] = stale[1, layer] = True
                    used_at[layer, expert] = step
                    if rule == BELADY:
                        record[0, layer, expert] = record[1, layer, expert] = _NEVER - again[t, layer, j]
                    elif rule == LFU:
                        record[0, layer, expert] = record[1, layer, expert] = uses[layer, expert]
                    elif rule == WEIGHTED:
                        now = weights[0] * step + weights[1] * uses[layer, expert]
                        now += weights[2] * high_uses[layer, expert]
                        record[0, layer, expert] = record[1, layer, expert] = now
                    if held[bits, layer, expert]:
                        last[bits, layer, expert] = clock
                        if rule == LRU:
                            record[bits, layer, expert] = clock
                        kept[t, layer, j] = True
                    elif not aside[bits, expert]:
                        kept[t, layer, j] = _insert(
                            bits, layer, expert, clock, rule, everywhere, shared, precisions, sizes, capacity,
                            step, weights, near, shares, uses, total, record, held, guard, last, filled, stale,
                            lowest, loose, score,
                        )  # fmt: skip
                stale[0, layer] = stale[1, layer] = True
                for j in range(width):
                    expert = ids[t, layer, j]
                    if expert < num_experts:
                        guard[0, layer, expert] = guard[1, layer, expert] = False
                for j in range(foretold):
                    expert = predicted[t, layer, j]
                    if expert < num_experts:
                        for bits in range(2):
                            wasted[t, layer, bits] += fresh[bits, expert]
                            fresh[bits, expert] = aside[bits, expert] = guard[bits, layer, expert] = False
    return outcome, kept, wasted
