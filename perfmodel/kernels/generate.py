"""Pick the experts of generated routing, one token after the other."""

# The compiler infers the types of kernels.
# mypy: allow-untyped-defs

import numpy as np
from numba import types

from perfmodel.kernels._jit import loop, read_only

_SCORES = types.float64[:, :, ::1]


@loop(
    types.void(
        read_only(_SCORES),
        read_only(types.float64[:, ::1]),
        read_only(types.float64[::1]),
        read_only(types.float64[::1]),
        types.float64,
        types.float64[:, ::1],
        types.uint16[:, :, ::1],
        _SCORES,
    )
)
def sticky_top(noise, log_p, stickiness, order_noise, fading, memory, ids, best):
    """Fill ``ids`` [T, L, k] with the experts of the largest scores, and ``best`` with what orders them, largest first.

    noise : float64 [T, L, E], what is drawn for every token.
    log_p : float64 [L, E], what every token has in common; -inf for an expert that is never picked. At least k
        experts of a layer are above -inf.
    stickiness : float64 [L], weight of the memory.
    order_noise : float64 [L], weight of the noise when the chosen are ordered.
    fading : what is left of the memory after one token, 0 to 1.
    memory : float64 [L, E], how fresh the last use of an expert is, 1 right after it; changed in place.

    The score is log_p + noise + stickiness * memory; what orders the chosen is the same with order_noise * noise.
    Equal scores: lower id first; equal order: the one with the larger score first.
    """
    tokens, layers, experts = noise.shape
    width = ids.shape[2]
    for t in range(tokens):
        for layer in range(layers):
            filled = 0
            for expert in range(experts):
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
