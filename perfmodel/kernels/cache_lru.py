"""Least-recently-used caches on demand: one capacity, or the hits at every capacity in one pass.

A cache of C experts holds the first C of the list of the latest requests, so the depth of an expert in that list tells
at which capacities it hits (Mattson, Gecsei, Slutz and Traiger, IBM Systems Journal 9, 1970).

Where what a step picks is protected, the residents among its picks count as used before the first of them asks. From
there on the step goes as without protection while there is room for all its picks; where there is not, copies are kept
until picks of the step fill the cache.
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

# Eight numbers below 255 in one integer, the latest in the lowest byte; 255 is an empty place.
_ONES, _TOPS = np.uint64(0x0101010101010101), np.uint64(0x8080808080808080)
_EMPTY = np.uint64(0xFFFFFFFFFFFFFFFF)
_ONE, _SEVEN, _EIGHT = np.uint64(1), np.uint64(7), np.uint64(8)


@scalar
def _to_front(recent, expert):
    """The list with the expert in front, and an integer with as many ones in its low bytes as others were before it.

    An expert that is not in the list has eight such bytes.
    """
    differs = recent ^ (expert * _ONES)
    zeros = (differs - _ONES) & ~differs & _TOPS  # the lowest bit set is that of the byte that is zero
    lowest = zeros & (~zeros + _ONE)
    up_to = (lowest << _ONE) - _ONE
    return (recent & ~up_to) | ((recent << _EIGHT) & up_to) | expert, (lowest >> _SEVEN) - _ONE


@loop(_RESULT(_IDS, _INTS, _IDS, types.int64, types.int64, types.boolean))
def lru_of_few(ids, offsets, initial, num_experts, capacity, protected):
    """Outcome [T, L, k] of every pick in caches of at most 8 experts a layer, and whether it is kept [T, L, k].

    Parameters as in `cache.replay`. Where there is room for all picks of a step, everything that runs is kept, and
    the second array is empty.
    """
    steps, layers, width = ids.shape
    outcome = np.empty((steps, layers, width), np.uint8)
    scarce = capacity < (width if protected else 1)
    kept = np.zeros((steps, layers, width) if scarce else (0, 0, 0), np.bool_)
    recent = np.empty(layers, np.uint64)
    experts = np.uint64(num_experts)
    limit = _EMPTY if capacity >= 8 else (_ONE << np.uint64(8 * capacity)) - _ONE
    protected = protected and capacity < num_experts
    for s in range(offsets.shape[0] - 1):
        recent[:] = _EMPTY
        row = min(s, initial.shape[0] - 1)
        for layer in range(layers):
            loaded = 0
            for rank in range(initial.shape[2]):
                expert = np.uint64(initial[row, layer, rank])
                if expert < experts and loaded < capacity and _to_front(recent[layer], expert)[1] == _EMPTY:
                    # To the end of the list, of which the empty places are the rest.
                    place = np.uint64(8 * loaded)
                    recent[layer] &= ~(np.uint64(255) << place)
                    recent[layer] |= expert << place
                    loaded += 1
        for t in range(offsets[s], offsets[s + 1]):
            for layer in range(layers):
                order = recent[layer]
                safe = 0  # residents that the step picks
                if protected:
                    for j in range(width):
                        expert = np.uint64(ids[t, layer, j])
                        if expert < experts:
                            used, before = _to_front(order, expert)
                            order = used if before < limit else order
                            safe += before < limit
                if scarce:
                    for j in range(width):
                        expert = np.uint64(ids[t, layer, j])
                        code = NOT_RUN
                        if expert < experts:
                            used, before = _to_front(order, expert)
                            code = HIT_HIGH if before < limit else MISS_HIGH
                            room = safe < capacity
                            kept[t, layer, j] = before < limit or room
                            order = used if before < limit or room else order
                            safe += before >= limit and room
                        outcome[t, layer, j] = code
                else:
                    for j in range(width):
                        expert = np.uint64(ids[t, layer, j])
                        code = NOT_RUN
                        if expert < experts:
                            order, before = _to_front(order, expert)
                            code = HIT_HIGH if before < limit else MISS_HIGH
                        outcome[t, layer, j] = code
                recent[layer] = order
    return outcome, kept


@scalar
def _unlink(before, after, node):
    after[before[node]] = after[node]
    before[after[node]] = before[node]


@scalar
def _link(before, after, end, node):
    """Make a node the first one of a ring, of which ``end`` is the place between the last and the first."""
    first = after[end]
    before[node] = end
    after[node] = first
    before[first] = node
    after[end] = node


@loop(_RESULT(_IDS, _INTS, _IDS, types.int64, types.int64, types.boolean, types.boolean))
def lru_of_many(ids, offsets, initial, num_experts, capacity, protected, everywhere):
    """As `lru_of_few`, of any number of experts of a layer, or of all layers; the second array is never left out."""
    steps, layers, width = ids.shape
    outcome = np.empty((steps, layers, width), np.uint8)
    kept = np.zeros((steps, layers, width), np.bool_)
    nodes, rings = layers * num_experts, 1 if everywhere else layers
    # Residents in rings, by falling recency; -1 before those that are not resident.
    before, after = np.empty(nodes + rings, np.int32), np.empty(nodes + rings, np.int32)
    filled = np.empty(rings, np.int64)
    for s in range(offsets.shape[0] - 1):
        before[:nodes] = -1
        for ring in range(rings):
            before[nodes + ring] = after[nodes + ring] = nodes + ring
            filled[ring] = 0
        for rank in range(initial.shape[2]):
            for layer in range(layers):
                expert = initial[min(s, initial.shape[0] - 1), layer, rank]
                ring = 0 if everywhere else layer
                node = layer * num_experts + expert
                if expert < num_experts and before[node] < 0 and filled[ring] < capacity:
                    # Between the last one and the end.
                    _link(after, before, nodes + ring, node)
                    filled[ring] += 1
        for t in range(offsets[s], offsets[s + 1]):
            for layer in range(layers):
                ring = 0 if everywhere else layer
                end, base = nodes + ring, layer * num_experts
                safe = 0  # residents that the step picks
                if protected:
                    for j in range(width):
                        node = base + ids[t, layer, j]
                        if ids[t, layer, j] < num_experts and before[node] >= 0:
                            _unlink(before, after, node)
                            _link(before, after, end, node)
                            safe += 1
                for j in range(width):
                    node = base + ids[t, layer, j]
                    if ids[t, layer, j] >= num_experts:
                        outcome[t, layer, j] = NOT_RUN
                        continue
                    if before[node] >= 0:
                        outcome[t, layer, j] = HIT_HIGH
                        _unlink(before, after, node)
                    else:
                        outcome[t, layer, j] = MISS_HIGH
                        if safe >= capacity:
                            continue
                        safe += protected
                        if filled[ring] < capacity:
                            filled[ring] += 1
                        else:
                            oldest = before[end]
                            _unlink(before, after, oldest)
                            before[oldest] = -1
                    _link(before, after, end, node)
                    kept[t, layer, j] = True
    return outcome, kept


@scalar
def _add_depths(ids, offsets, num_experts, depth, nowhere, found):
    """Add up depths, with the depth of every expert at hand; all of them change with every pick, but at once."""
    layers, width = ids.shape[1:]
    for s in range(offsets.shape[0] - 1):
        depth[:] = nowhere
        for t in range(offsets[s], offsets[s + 1]):
            for layer in range(layers):
                places = depth[layer]
                for j in range(width):
                    expert = ids[t, layer, j]
                    if expert >= num_experts:
                        continue
                    own = places[expert]
                    found[layer, min(np.int64(own), num_experts)] += 1
                    for other in range(num_experts):
                        places[other] += places[other] < own
                    places[expert] = 0


@loop(types.void(_IDS, _INTS, types.int64, types.int64[:, ::1]))
def lru_depths(ids, offsets, num_experts, found):
    """Add up at which depths picks find their experts in the lists of the latest requests, of at most 254 experts.

    found : int64 [L, E + 1], picks found at depth 0..E - 1, and in column E those found nowhere.
    """
    _add_depths(ids, offsets, num_experts, np.empty((ids.shape[1], num_experts), np.uint8), 255, found)


@loop(types.void(_IDS, _INTS, types.int64, types.int64[:, ::1]))
def lru_depths_of_many(ids, offsets, num_experts, found):
    """As `lru_depths`, of at most 65534 experts."""
    _add_depths(ids, offsets, num_experts, np.empty((ids.shape[1], num_experts), np.uint16), 65535, found)
