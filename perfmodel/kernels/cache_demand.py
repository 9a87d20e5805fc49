"""Caches on demand whose victim is the resident with the lowest or highest key: least frequently used, and Belady's.

Keys lie in one row for each cache, so that the search for a victim is a plain minimum of the row.
"""

# The compiler infers the types of kernels.
# mypy: allow-untyped-defs, allow-untyped-calls

import numpy as np
from numba import types

from perfmodel.kernels._jit import loop, read_only, scalar
from perfmodel.kernels.cache import HIT_HIGH, MISS_HIGH, NOT_RUN

_IDS = read_only(types.uint16[:, :, ::1])
_INTS = read_only(types.int64[::1])
_RESULT = types.Tuple((types.uint8[:, :, ::1], types.boolean[:, :, ::1]))

# Key of what is not resident, or must not be evicted.
_AWAY = np.int64(2**63 - 1)
# A key of the least frequently used counts uses in its upper half, and in its lower one when the last use was.
_USE = np.int64(2**32)
# A next request that does not come, and what is not resident, or whose next request is over.
_NEVER, _NOWHERE = np.int32(2**31 - 1), np.int32(-1)


@scalar
def _lowest(keys):
    """Place of the lowest key, -1 where all are away."""
    lowest = _AWAY
    for place in range(keys.shape[0]):
        lowest = min(lowest, keys[place])
    found = -1
    if lowest < _AWAY:
        for place in range(keys.shape[0]):
            found = max(found, place if keys[place] == lowest else -1)
    return found


@loop(_RESULT(_IDS, _INTS, _IDS, types.int64, types.int64, types.boolean, types.boolean))
def lfu(ids, offsets, initial, num_experts, capacity, protected, everywhere):
    """Outcome [T, L, k] of every pick in a cache of ``capacity`` experts, and whether its expert is kept [T, L, k].

    Parameters as in `cache.replay`. Less than 2**31 picks a sequence.
    """
    steps, layers, width = ids.shape
    outcome = np.full((steps, layers, width), NOT_RUN, np.uint8)
    kept = np.zeros((steps, layers, width), np.bool_)
    caches = 1 if everywhere else layers
    per_cache = layers * num_experts // caches
    key = np.empty((caches, per_cache), np.int64)
    # What the key is while the expert is resident and may be evicted: uses and the time of the last one or the arrival.
    record = np.empty((caches, per_cache), np.int64)
    held = np.empty((caches, per_cache), np.bool_)
    filled = np.empty(caches, np.int64)
    for s in range(offsets.shape[0] - 1):
        key[:] = _AWAY
        record[:] = 0
        held[:] = False
        filled[:] = 0
        # Times of what is loaded at the start fall below those of the picks.
        clock = np.int64(initial.shape[2] * layers)
        for rank in range(initial.shape[2]):
            for layer in range(layers):
                cache, base = (0, layer * num_experts) if everywhere else (layer, 0)
                expert = initial[min(s, initial.shape[0] - 1), layer, rank]
                if expert >= num_experts or held[cache, base + expert] or filled[cache] >= capacity:
                    continue
                clock -= 1
                held[cache, base + expert] = True
                record[cache, base + expert] = key[cache, base + expert] = clock
                filled[cache] += 1
        clock = np.int64(initial.shape[2] * layers)
        for t in range(offsets[s], offsets[s + 1]):
            for layer in range(layers):
                cache, base = (0, layer * num_experts) if everywhere else (layer, 0)
                keys, records, there = key[cache], record[cache], held[cache]
                if protected:
                    for j in range(width):
                        if ids[t, layer, j] < num_experts:
                            keys[base + ids[t, layer, j]] = _AWAY
                for j in range(width):
                    if ids[t, layer, j] >= num_experts:
                        continue
                    node = base + ids[t, layer, j]
                    clock += 1
                    records[node] = ((records[node] & ~(_USE - 1)) + _USE) | clock
                    outcome[t, layer, j] = HIT_HIGH if there[node] else MISS_HIGH
                    if not there[node]:
                        if filled[cache] < capacity:
                            filled[cache] += 1
                        else:
                            victim = _lowest(keys)
                            if victim < 0:
                                continue
                            there[victim] = False
                            keys[victim] = _AWAY
                        there[node] = True
                    kept[t, layer, j] = True
                    if not protected:
                        keys[node] = records[node]
                if protected:
                    for j in range(width):
                        node = base + ids[t, layer, j]
                        if ids[t, layer, j] < num_experts and there[node]:
                            keys[node] = records[node]
    return outcome, kept


@loop(_RESULT(_IDS, _INTS, _IDS, types.int64, types.int64, types.boolean))
def belady(ids, offsets, initial, num_experts, capacity, everywhere):
    """As `lfu`, for the cache that evicts what is requested last, and keeps nothing that is requested later than all.

    Less than 2**31 picks a sequence.
    """
    steps, layers, width = ids.shape
    outcome = np.full((steps, layers, width), NOT_RUN, np.uint8)
    kept = np.zeros((steps, layers, width), np.bool_)
    caches = 1 if everywhere else layers
    per_cache = layers * num_experts // caches
    longest = np.int64(0)
    for s in range(offsets.shape[0] - 1):
        longest = max(longest, offsets[s + 1] - offsets[s])
    again = np.empty((longest, layers, width), np.int32)
    following = np.empty((layers, num_experts), np.int32)
    # When each resident is requested next.
    upcoming = np.empty((caches, per_cache), np.int32)
    filled = np.empty(caches, np.int64)
    for s in range(offsets.shape[0] - 1):
        begin, end = offsets[s], offsets[s + 1]
        following[:] = _NEVER
        for t in range(end - 1, begin - 1, -1):
            for layer in range(layers - 1, -1, -1):
                for j in range(width - 1, -1, -1):
                    expert = ids[t, layer, j]
                    if expert < num_experts:
                        again[t - begin, layer, j] = following[layer, expert]
                        following[layer, expert] = ((t - begin) * layers + layer) * width + j
        upcoming[:] = _NOWHERE
        filled[:] = 0
        for rank in range(initial.shape[2]):
            for layer in range(layers):
                cache, base = (0, layer * num_experts) if everywhere else (layer, 0)
                expert = initial[min(s, initial.shape[0] - 1), layer, rank]
                if expert >= num_experts or upcoming[cache, base + expert] >= 0 or filled[cache] >= capacity:
                    continue
                upcoming[cache, base + expert] = following[layer, expert]
                filled[cache] += 1
        for t in range(begin, end):
            for layer in range(layers):
                cache, base = (0, layer * num_experts) if everywhere else (layer, 0)
                when = upcoming[cache]
                for j in range(width):
                    if ids[t, layer, j] >= num_experts:
                        continue
                    node = base + ids[t, layer, j]
                    next_time = again[t - begin, layer, j]
                    outcome[t, layer, j] = HIT_HIGH if when[node] >= 0 else MISS_HIGH
                    if when[node] < 0:
                        if filled[cache] < capacity:
                            filled[cache] += 1
                        else:
                            latest = next_time
                            for place in range(per_cache):
                                latest = max(latest, when[place])
                            if latest == next_time:
                                continue
                            victim = 0
                            for place in range(per_cache):
                                victim = max(victim, place if when[place] == latest else 0)
                            when[victim] = _NOWHERE
                    kept[t, layer, j] = True
                    when[node] = next_time
    return outcome, kept
