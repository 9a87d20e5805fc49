"""The cache on demand whose score weighs recency, uses and nearness of layers, fast where layers have few experts."""

# The compiler infers the types of kernels.
# mypy: allow-untyped-defs, allow-untyped-calls

import numpy as np
from numba import types

from perfmodel.kernels._jit import loop, read_only, scalar
from perfmodel.kernels.cache import HIT_HIGH, INFINITE, MISS_HIGH, NOT_RUN

_IDS = read_only(types.uint16[:, :, ::1])
_INTS = read_only(types.int64[::1])
_RESULT = types.Tuple((types.uint8[:, :, ::1], types.boolean[:, :, ::1]))


@scalar
def _look_again(layer, records, loose, lowest):
    """Bring the lowest record of a layer's residents that may be evicted up to date; inf without any.

    Numbers >= 0 are in the order of their bits, of which many are compared at once.
    """
    coded, found = records.view(np.int64), INFINITE
    for expert in range(records.shape[1]):
        found = min(found, coded[layer, expert] if loose[layer, expert] else INFINITE)
    lowest.view(np.int64)[layer] = found


@loop(
    _RESULT(
        _IDS, _INTS, _IDS, read_only(types.float64[::1]), types.int64, types.int64, types.boolean, types.boolean
    )
)  # fmt: skip
def weighted(ids, offsets, initial, weights, num_experts, capacity, protected, everywhere):
    """Outcome [T, L, k] of every pick in a cache of ``capacity`` experts, and whether its expert is kept [T, L, k].

    Parameters as in `cache.replay`.

    A score is what was recorded of the expert, divided by the step, plus a term of its layer. Both keep the order of
    the records of a layer, so that its lowest record has the lowest score, and only equal scores need a closer look.
    """
    steps, layers, width = ids.shape
    outcome = np.full((steps, layers, width), NOT_RUN, np.uint8)
    kept = np.zeros((steps, layers, width), np.bool_)
    near = np.empty(layers)  # term of a layer that runs so many layers later
    for ahead in range(layers):
        near[ahead] = weights[3] * (1.0 - ahead / layers)
    shape = (layers, num_experts)
    records, uses, last = np.empty(shape), np.empty(shape, np.int64), np.empty(shape, np.int64)
    held = np.empty(shape, np.bool_)
    # Residents that may be evicted: in the layer that runs, without those that it picks.
    loose = np.empty(shape, np.bool_)
    lowest, score = np.empty(layers), np.empty(layers)
    filled = np.empty(layers, np.int64)
    for s in range(offsets.shape[0] - 1):
        records[:] = 0.0
        uses[:] = 0
        held[:] = False
        filled[:] = 0
        clock = np.int64(0)
        for rank in range(initial.shape[2]):
            for layer in range(layers):
                expert = initial[min(s, initial.shape[0] - 1), layer, rank]
                group = 0 if everywhere else layer
                if expert >= num_experts or held[layer, expert] or filled[group] >= capacity:
                    continue
                clock -= 1
                held[layer, expert] = True
                last[layer, expert] = clock
                filled[group] += 1
        loose[:] = held
        for layer in range(layers):
            _look_again(layer, records, held, lowest)
        clock = np.int64(0)
        for t in range(offsets[s], offsets[s + 1]):
            step = t - offsets[s] + 1
            for layer in range(layers):
                group = 0 if everywhere else layer
                first, stop = (0, layers) if everywhere else (layer, layer + 1)
                if protected:
                    for j in range(width):
                        if ids[t, layer, j] < num_experts:
                            loose[layer, ids[t, layer, j]] = False
                    _look_again(layer, records, loose, lowest)
                for j in range(width):
                    expert = ids[t, layer, j]
                    if expert >= num_experts:
                        continue
                    clock += 1
                    last[layer, expert] = clock
                    uses[layer, expert] += 1
                    records[layer, expert] = weights[0] * step + weights[1] * uses[layer, expert]
                    records[layer, expert] += weights[2] * uses[layer, expert]
                    if held[layer, expert]:
                        outcome[t, layer, j] = HIT_HIGH
                    else:
                        outcome[t, layer, j] = MISS_HIGH
                        if filled[group] < capacity:
                            filled[group] += 1
                        else:
                            if not protected:  # a hit just before may have raised it
                                _look_again(layer, records, loose, lowest)
                            least = np.inf
                            for i in range(first, stop):
                                ahead = i - layer if i >= layer else i - layer + layers
                                score[i] = lowest[i] / step + near[ahead]
                                least = min(least, score[i])
                            if least == np.inf:
                                continue
                            out_layer, out_expert = -1, -1
                            for i in range(first, stop):
                                if score[i] > least:
                                    continue
                                ahead = i - layer if i >= layer else i - layer + layers
                                for e in range(num_experts):
                                    if not loose[i, e] or records[i, e] / step + near[ahead] > least:
                                        continue
                                    if out_layer < 0 or last[i, e] < last[out_layer, out_expert]:
                                        out_layer, out_expert = i, e
                            held[out_layer, out_expert] = loose[out_layer, out_expert] = False
                            _look_again(out_layer, records, loose, lowest)
                        held[layer, expert] = True
                    kept[t, layer, j] = True
                    if not protected:
                        loose[layer, expert] = True
                if protected:
                    for j in range(width):
                        if ids[t, layer, j] < num_experts:
                            loose[layer, ids[t, layer, j]] = held[layer, ids[t, layer, j]]
                _look_again(layer, records, loose, lowest)
    return outcome, kept
