"""Pick the experts of generated routing, one token after the other."""

# The compiler infers the types of kernels.
# mypy: allow-untyped-defs

import numpy as np
from numba import types

from perfmodel.kernels._jit import loop, read_only, scalar

_SCORES = types.float64[:, :, ::1]


@scalar
def _keep_groups(noise, log_p, stickiness, memory, kept, allowed):
    """Mark in ``allowed`` [groups] the groups whose two best scores have the largest sums."""
    groups = allowed.shape[0]
    each = noise.shape[0] // groups
    sums = np.empty(groups)
    for group in range(groups):
        first = second = -np.inf
        for expert in range(group * each, (group + 1) * each):
            score = log_p[expert] + noise[expert]
            score += stickiness * memory[expert]
            if score > first:
                first, second = score, first
            elif score > second:
                second = score
        sums[group] = first + second
        allowed[group] = False
    for _ in range(kept):
        chosen = -1
        for group in range(groups):
            if not allowed[group] and (chosen < 0 or sums[group] > sums[chosen]):
                chosen = group
        allowed[chosen] = True


@loop(
    types.void(
        read_only(_SCORES),
        read_only(types.float64[:, ::1]),
        read_only(types.float64[::1]),
        read_only(types.float64[::1]),
        types.float64,
        types.int64,
        types.int64,
        types.float64[:, ::1],
        types.uint16[:, :, ::1],
        _SCORES,
    )
)
def sticky_top(noise, log_p, stickiness, order_noise, fading, groups, kept, memory, ids, best):
    """Fill ``ids`` [T, L, k] with the experts of the largest scores, and ``best`` with what orders them, largest first.

    noise : float64 [T, L, E], what is drawn for every token.
    log_p : float64 [L, E], what every token has in common; -inf for an expert that is never picked. At least k
        experts of a layer are above -inf.
    stickiness : float64 [L], weight of the memory.
    order_noise : float64 [L], weight of the noise when the chosen are ordered.
    fading : what is left of the memory after one token, 0 to 1.
    groups, kept : equal groups that the experts of a layer form in the order of their numbers, and how many of them
        a token may pick from: those with the largest sums of their two best scores, lower group first where equal.
        One group: no limit.
    memory : float64 [L, E], how fresh the last use of an expert is, 1 right after it; changed in place.

    The score is log_p + noise + stickiness * memory; what orders the chosen is the same with order_noise * noise.
    Equal scores: lower id first; equal order: the one with the larger score first.
    """
    tokens, layers, experts = noise.shape
    width = ids.shape[2]
    each = experts // groups
    allowed = np.ones(groups, np.bool_)
    for t in range(tokens):
        for layer in range(layers):
            if kept < groups:
                _keep_groups(noise[t, layer], log_p[layer], stickiness[layer], memory[layer], kept, allowed)
            filled = 0
            for expert in range(experts):
                if not allowed[expert // each]:
                    continue
                score = log_p[layer, expert] + noise[t, layer, expert]
                score += stickiness[layer] * memory[layer, expert]
                if filled == width:
                    if score <= best[t, layer, width - 1]:
                        continue
                else:
                    filled += 1
                place = filled - 1
                while place > 0 and best[t, layer, place - 1] < score:
                    best[t, layer, place] = best[t, layer, place - 1]
                    ids[t, layer, place] = ids[t, layer, place - 1]
                    place -= 1
                best[t, layer, place] = score
                ids[t, layer, place] = np.uint16(expert)
            if order_noise[layer] != 1.0:
                for j in range(width):
                    chosen = ids[t, layer, j]
                    score = log_p[layer, chosen] + order_noise[layer] * noise[t, layer, chosen]
                    score += stickiness[layer] * memory[layer, chosen]
                    place = j
                    while place > 0 and best[t, layer, place - 1] < score:
                        best[t, layer, place] = best[t, layer, place - 1]
                        ids[t, layer, place] = ids[t, layer, place - 1]
                        place -= 1
                    best[t, layer, place] = score
                    ids[t, layer, place] = chosen
            for expert in range(experts):
                memory[layer, expert] *= fading
            for j in range(width):
                memory[layer, ids[t, layer, j]] = 1.0
