"""Replay expert caches over a trace: which requests find their expert resident."""

# The compiler infers the types of kernels.
# mypy: allow-untyped-defs

import numpy as np
from numba import types

from perfmodel.kernels._jit import loop, read_only, scalar

_IDS = read_only(types.uint16[:, :, ::1])
_MASK = read_only(types.boolean[:, :, ::1])
_OFFSETS = read_only(types.int64[::1])

# What a request to a pair of caches finds.
HIT_HIGH, HIT_LOW, MISS_HIGH, MISS_LOW, NOT_RUN = range(5)


@scalar
def _resident(last, expert, capacity):
    """Whether fewer than ``capacity`` others were used since the expert was."""
    if capacity == 0 or last[expert] < 0:
        return False
    newer = 0
    for other in range(last.shape[0]):
        if last[other] > last[expert]:
            newer += 1
    return newer < capacity


@loop(types.boolean[:, :, ::1](_IDS, _MASK, _OFFSETS, types.int64, types.int64))
def lru_hits(ids, requested, offsets, num_experts, capacity):
    """Which requests hit a least-recently-used cache of ``capacity`` experts a layer [T, L, k].

    ids : uint16 [T, L, k], expert of every pick.
    requested : bool [T, L, k], which picks ask the cache; the others neither hit nor change it.
    offsets : int64 [S + 1], first step of each sequence; the cache is empty at the start of each.
    num_experts, capacity : experts a layer, and how many of them the cache holds.

    An expert hits when fewer than ``capacity`` other experts were requested since its last request. The picks
    of one step are requested in their listed order.
    """
    tokens, layers, width = ids.shape
    hits = np.zeros((tokens, layers, width), np.bool_)
    last = np.empty(num_experts, np.int64)
    for s in range(offsets.shape[0] - 1):
        for layer in range(layers):
            last[:] = -1
            clock = np.int64(0)
            for t in range(offsets[s], offsets[s + 1]):
                for j in range(width):
                    if not requested[t, layer, j]:
                        continue
                    expert = ids[t, layer, j]
                    hits[t, layer, j] = _resident(last, expert, capacity)
                    last[expert] = clock
                    clock += 1
    return hits


@loop(types.uint8[:, :, ::1](_IDS, types.uint8[:, :, ::1], _MASK, _OFFSETS, types.int64, types.int64, types.int64))
def mixed_cache(ids, wanted, assigned, offsets, num_experts, capacity_high, capacity_low):
    """Replay two LRU caches a layer, one of high- and one of low-precision experts [T, L, k].

    wanted : uint8, 0 high, 1 low, 2 skip: what a pick is copied at if it misses.
    assigned : picks that exist; the others come out as NOT_RUN.
    Other parameters as in `lru_hits`.

    A pick found in the high cache runs from there whatever it wanted; a pick that wanted low precision or
    nothing also runs from the low cache. A miss is copied at its wanted precision into that cache, or not run.
    """
    tokens, layers, width = ids.shape
    outcome = np.full((tokens, layers, width), NOT_RUN, np.uint8)
    if capacity_high == 0 and capacity_low == 0:  # everything misses, so the order of requests does not matter
        for t in range(tokens):
            for layer in range(layers):
                for j in range(width):
                    if assigned[t, layer, j] and wanted[t, layer, j] <= 1:
                        outcome[t, layer, j] = MISS_HIGH + wanted[t, layer, j]
        return outcome
    high = np.empty(num_experts, np.int64)
    low = np.empty(num_experts, np.int64)
    for s in range(offsets.shape[0] - 1):
        for layer in range(layers):
            high[:] = -1
            low[:] = -1
            clock = np.int64(0)
            for t in range(offsets[s], offsets[s + 1]):
                for j in range(width):
                    if not assigned[t, layer, j]:
                        continue
                    expert = ids[t, layer, j]
                    clock += 1
                    if _resident(high, expert, capacity_high):
                        outcome[t, layer, j] = HIT_HIGH
                        high[expert] = clock
                    elif wanted[t, layer, j] >= 1 and _resident(low, expert, capacity_low):
                        outcome[t, layer, j] = HIT_LOW
                        low[expert] = clock
                    elif wanted[t, layer, j] == 0:
                        outcome[t, layer, j] = MISS_HIGH
                        high[expert] = clock
                    elif wanted[t, layer, j] == 1:
                        outcome[t, layer, j] = MISS_LOW
                        low[expert] = clock
    return outcome
