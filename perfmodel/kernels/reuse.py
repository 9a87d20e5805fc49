"""Stack distances of expert picks: one pass gives the hits of a cache of every size.

A cache that holds the first C entries of a list, whatever C is, hits a request at depth d of the list if d <= C. The
lists of a least-recently-used cache and of the best possible one both have that property (Mattson, Gecsei, Slutz and
Traiger, "Evaluation techniques for storage hierarchies", IBM Systems Journal 9, 1970).
"""

# The compiler infers the types of kernels.
# mypy: allow-untyped-defs

import numpy as np
from numba import types

from perfmodel.kernels._jit import loop, read_only, scalar
from perfmodel.kernels.tally import NO_EXPERT

_NEVER = 2**31 - 1

_IDS = read_only(types.uint16[:, :, ::1])
_INTS = read_only(types.int64[::1])
_TABLE = types.int64[:, ::1]


@scalar
def _recency(recent, size, expert):
    """Depth of an expert in the list of the latest picks, -1 if it is not there; it moves to the front."""
    carried = expert
    for place in range(size):
        here = recent[place]
        recent[place] = carried
        if here == expert:
            return place
        carried = here
    recent[size] = carried
    return -1


@scalar
def _urgency(stack, size, now, again):
    """Depth of the expert that is requested ``now`` in the list of the best cache, and the new length of the list.

    The list holds for each expert when it is requested next; the expert at hand has ``now``. Its next request after
    this one, ``again``, wanders down to where the expert was; at each place the nearer request stays and the farther
    one wanders on. So the first C places keep what is needed soonest, and the expert at hand is itself not kept where
    it is the farthest. An expert that is never requested again leaves a hole that anything may fill.
    """
    carried = again
    for place in range(size):
        here = stack[place]
        if here == now:
            stack[place] = carried
            if carried == _NEVER and place == size - 1:
                size -= 1
            return place, size
        if carried < here:
            stack[place] = carried
            carried = here
    if carried != _NEVER:
        stack[size] = carried
        size += 1
    return -1, size


@loop(types.void(_IDS, types.int64, types.int64, types.int64, _INTS, _INTS, _INTS, _TABLE, _TABLE, _TABLE, _TABLE))
def stack_distances(ids, start, first, last, offsets, prompts, group, lru, belady, lru_layers, belady_layers):
    """Add up at which depths the decode picks of a block find their experts; the lists are empty at its start.

    ids : uint16 [n, L, k], rows ``start``.. of a trace; 65535 is no pick.
    first, last : the sequences of these rows, first..last - 1, whose rows begin at ``offsets`` [S + 1].
    prompts, group : int64 [S], prefill rows of each sequence, and the row of the tables that it counts in.
    lru, belady : int64 [G, E + 1], picks found at depth 0..E - 1, and in column E those found nowhere.
    lru_layers, belady_layers : int64 [L, E + 1].
    """
    rows, layers, width = ids.shape
    experts = lru.shape[1] - 1
    upcoming = np.empty(rows * width, np.int32)
    following = np.empty(experts, np.int32)
    recent = np.empty(experts + 1, np.uint16)
    stack = np.empty(experts + 1, np.int32)
    for s in range(first, last):
        begin = max(offsets[s] + prompts[s], start) - start
        end = min(offsets[s + 1], start + rows) - start
        for layer in range(layers):
            following[:] = _NEVER
            for t in range(end - 1, begin - 1, -1):
                for j in range(width - 1, -1, -1):
                    expert = ids[t, layer, j]
                    if expert != NO_EXPERT:
                        upcoming[t * width + j] = following[expert]
                        following[expert] = t * width + j
            latest, listed = 0, 0
            for t in range(begin, end):
                for j in range(width):
                    expert = ids[t, layer, j]
                    if expert == NO_EXPERT:
                        continue
                    now = t * width + j
                    depth = _recency(recent, latest, expert)
                    if depth < 0:
                        latest += 1
                        depth = experts
                    lru[group[s], depth] += 1
                    lru_layers[layer, depth] += 1
                    depth, listed = _urgency(stack, listed, now, upcoming[now])
                    if depth < 0:
                        depth = experts
                    belady[group[s], depth] += 1
                    belady_layers[layer, depth] += 1
