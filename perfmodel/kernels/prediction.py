"""Foretell the experts of the next layer from those of this one, or from sequences that went alike.

Everywhere here an id of E or above stands for no pick in the ids, and `NO_EXPERT` for no prediction.
"""

# The compiler infers the types of kernels.
# mypy: allow-untyped-defs, allow-untyped-calls

import math

import numpy as np
from numba import types

from perfmodel.kernels._jit import loop, read_only, scalar
from perfmodel.kernels.tally import NO_EXPERT

_IDS = read_only(types.uint16[:, :, ::1])
_OUT = types.uint16[:, :, ::1]
_INTS = read_only(types.int64[::1])
_COUNTS = types.UniTuple(types.int64, 3)
_PAIRS, _OWN = types.int32[:, :, ::1], types.int32[:, ::1]


@loop(types.void(_IDS, types.int64, types.int64, types.int32, _PAIRS, _OWN))
def count_pairs(ids, first, last, sign, pairs, own):
    """Add what rows first..last - 1 say about following layers to a table, or take it away again.

    sign : 1 to add, -1 to take away.
    pairs : int32 [L - 1, E, E], rows that pick the first expert in a layer and the second in the next.
    own : int32 [L - 1, E], rows that pick the expert in the layer.
    """
    layers, width = ids.shape[1:]
    experts = own.shape[1]
    for row in range(first, last):
        for layer in range(layers - 1):
            for j in range(width):
                before = ids[row, layer, j]
                if before >= experts:
                    continue
                own[layer, before] += sign
                for i in range(width):
                    after = ids[row, layer + 1, i]
                    if after < experts:
                        pairs[layer, before, after] += sign


@scalar
def _best_first(score, best, found):
    """Fill ``best`` with the experts of the largest positive scores, lower id first where equal; the rest keep."""
    filled = 0
    for expert in range(score.shape[0]):
        if score[expert] <= 0.0:
            continue
        i = filled
        if filled == best.shape[0]:
            if found[i - 1] >= score[expert]:
                continue
            i -= 1
        else:
            filled += 1
        while i > 0 and found[i - 1] < score[expert]:
            found[i], best[i] = found[i - 1], best[i - 1]
            i -= 1
        found[i], best[i] = score[expert], expert


@loop(types.void(_IDS, types.int64, types.int64, read_only(_PAIRS), read_only(_OWN), _OUT))
def predict_by_pairs(ids, first, last, pairs, own, predicted):
    """Predict rows first..last - 1 by a table that `count_pairs` made, best expert first.

    predicted : uint16 [T, L, p], NO_EXPERT before the call.

    The score of an expert is the sum over the row's picks in the layer before, in listed order, of pairs / own; a pick
    that the table has never seen adds nothing, and an expert with a score of 0 is not predicted.
    """
    layers, width = ids.shape[1:]
    experts = own.shape[1]
    score, found = np.empty(experts), np.empty(predicted.shape[2])
    for row in range(first, last):
        for layer in range(layers - 1):
            score[:] = 0.0
            for j in range(width):
                before = ids[row, layer, j]
                if before < experts and own[layer, before] > 0:
                    seen = float(own[layer, before])
                    for expert in range(experts):
                        score[expert] += pairs[layer, before, expert] / seen
            _best_first(score, predicted[row, layer + 1], found)


@scalar
def _draw(use, taken, uniform):
    """An expert that is not taken, in proportion to its use, or any of them alike where none was used."""
    total = np.int64(0)
    free = np.int64(0)
    for expert in range(use.shape[0]):
        if not taken[expert]:
            total += use[expert]
            free += 1
    if free == 0:
        return np.int64(NO_EXPERT)
    left = np.int64(uniform * (total if total > 0 else free))
    for expert in range(use.shape[0]):
        if not taken[expert]:
            left -= use[expert] if total > 0 else 1
            if left < 0:
                return np.int64(expert)
    return np.int64(NO_EXPERT)


@loop(
    types.void(
        _IDS, types.int64, read_only(types.int64[:, ::1]), types.float64, read_only(types.float64[:, :, :, ::1]), _OUT
    )
)  # fmt: skip
def predict_by_stale_gate(ids, first, use, accuracy, uniform, predicted):
    """Repeat the first p picks of a layer, each with the chance ``accuracy``, and name a wrong expert otherwise.

    ids : uint16 [T, L, k].
    first : the row that ``uniform`` starts at; as many rows as it has are predicted.
    use : int64 [L, E], weights of the wrong experts, whose sum in a layer is below 2**53.
    uniform : float64 [rows, L - 1, p, 2], numbers in [0, 1).
    predicted : uint16 [T, L, p], NO_EXPERT before the call. It stays so where a pick is unassigned, and where no
        expert is left that is neither picked nor named already.
    """
    width = ids.shape[2]
    experts = use.shape[1]
    taken = np.zeros(experts, np.bool_)
    for i in range(uniform.shape[0]):
        row = first + i
        for layer in range(1, ids.shape[1]):
            taken[:] = False
            for j in range(width):
                if ids[row, layer, j] < experts:
                    taken[ids[row, layer, j]] = True
            for j in range(predicted.shape[2]):
                expert = ids[row, layer, j]
                if expert >= experts:
                    continue
                if uniform[i, layer - 1, j, 0] < accuracy:
                    predicted[row, layer, j] = expert
                    continue
                wrong = _draw(use[layer], taken, uniform[i, layer - 1, j, 1])
                predicted[row, layer, j] = wrong
                if wrong < experts:
                    taken[wrong] = True


@loop(_COUNTS(_IDS, types.int64, _IDS))
def count_right(ids, num_experts, predicted):
    """How many experts were predicted, how many of those were picked, and all picks, of the layers after the first."""
    named = right = picked = np.int64(0)
    for row in range(ids.shape[0]):
        for layer in range(1, ids.shape[1]):
            for j in range(ids.shape[2]):
                picked += ids[row, layer, j] < num_experts
            for i in range(predicted.shape[2]):
                expert = predicted[row, layer, i]
                if expert == NO_EXPERT:
                    continue
                named += 1
                for j in range(ids.shape[2]):
                    right += ids[row, layer, j] == expert
    return named, right, picked


@loop(types.int64[:, :, ::1](_IDS, _INTS, types.int64))
def activation_counts(ids, offsets, num_experts):
    """Picks of every expert in every sequence [S, L, E]; ``offsets`` [S + 1] are the first rows of the sequences."""
    layers, width = ids.shape[1:]
    counts = np.zeros((offsets.shape[0] - 1, layers, num_experts), np.int64)
    for s in range(offsets.shape[0] - 1):
        for row in range(offsets[s], offsets[s + 1]):
            for layer in range(layers):
                for j in range(width):
                    if ids[row, layer, j] < num_experts:
                        counts[s, layer, ids[row, layer, j]] += 1
    return counts


@loop(types.int64[::1](_IDS, _INTS, _INTS, read_only(types.float32[:, :, ::1]), read_only(types.boolean[:, ::1])))
def match_activations(ids, offsets, prompts, unit, outside):
    """Of every decode step, the sequence outside its own whose activations are most like those so far of its own [T].

    ids, offsets, prompts : uint16 [R, L, k] and int64 [S + 1], [S]: all rows, the first of every sequence, and how many
        of its rows are prefill.
    unit : float32 [L, E, N], counts of whole sequences, scaled to length 1 in every layer (or all 0).
    outside : bool [S, N], which of them may be chosen for a sequence of the rows: at least one.

    Likeness is the sum over layers of the cosine with the counts of the rows before the step; the lowest number wins
    among equals. A pick adds the same to the products with all sequences, whatever the length so far.
    """
    layers, width = ids.shape[1:]
    experts, library = unit.shape[1:]
    best = np.empty((offsets[-1] - prompts.sum()), np.int64)
    product = np.empty((layers, library))
    likeness = np.empty(library)
    counts = np.empty((layers, experts), np.int64)
    squares = np.empty(layers, np.int64)
    step = 0
    for s in range(len(prompts)):
        product[:], counts[:], squares[:] = 0.0, 0, 0
        for row in range(offsets[s], offsets[s + 1]):
            if row >= offsets[s] + prompts[s]:
                likeness[:] = 0.0
                for layer in range(layers):
                    if squares[layer] > 0:
                        scale = 1.0 / math.sqrt(float(squares[layer]))
                        for other in range(library):
                            likeness[other] += product[layer, other] * scale
                chosen = -1
                for other in range(library):
                    if outside[s, other] and (chosen < 0 or likeness[other] > likeness[chosen]):
                        chosen = other
                best[step] = chosen
                step += 1
            for layer in range(layers):
                for j in range(width):
                    expert = ids[row, layer, j]
                    if expert >= experts:
                        continue
                    squares[layer] += 2 * counts[layer, expert] + 1
                    counts[layer, expert] += 1
                    for other in range(library):
                        product[layer, other] += unit[layer, expert, other]
    return best
