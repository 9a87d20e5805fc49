"""What comes before the experts of a layer, and around the layers: attention, router, dense layers and LM head.

Arrays
------
points : float64 [N, POINT_SIZE], hardware points; the places are named in ``point.py``.
attention : float64 [A, ATTENTION_SIZE], one kind of attention a row; the places are named below.
operators : float64 [M, OPERATOR_SIZE], one GPU operator a row; the places are named below.
"""

# The compiler infers the types of kernels.
# mypy: allow-untyped-defs

import numpy as np

from perfmodel.kernels._jit import loop, scalar
from perfmodel.kernels.point import GPU_BANDWIDTH, GPU_FLOPS, GPU_N_HALF, LAUNCH_OVERHEAD
from perfmodel.kernels.roofline import _decode_attention_time1, _prefill_attention_time1, _roofline_time1

# Places in a row of attention. Context means: for every token that is attended to.
LAYERS, WINDOW, WEIGHT_FLOPS, WEIGHT_BYTES, CONTEXT_FLOPS, CONTEXT_BYTES, ATTENTION_LAUNCHES = range(7)
ATTENTION_SIZE = 7

# Places in a row of operators.
REPEATS, FLOPS, BYTES, LAUNCHES = range(4)
OPERATOR_SIZE = 4


@scalar
def _decode_attention(point, context, attention):
    total = 0.0
    for a in range(attention.shape[0]):
        total += attention[a, LAYERS] * _decode_attention_time1(
            context,
            attention[a, WINDOW],
            attention[a, WEIGHT_FLOPS],
            attention[a, WEIGHT_BYTES],
            attention[a, CONTEXT_FLOPS],
            attention[a, CONTEXT_BYTES],
            point[GPU_FLOPS],
            point[GPU_BANDWIDTH],
            point[GPU_N_HALF],
            attention[a, ATTENTION_LAUNCHES] * point[LAUNCH_OVERHEAD],
        )
    return total


@scalar
def _operator(point, operator):
    if operator[BYTES] == 0.0:
        return 0.0  # an operator that the model does not have
    return operator[REPEATS] * _roofline_time1(
        operator[FLOPS],
        operator[BYTES],
        point[GPU_FLOPS],
        point[GPU_BANDWIDTH],
        point[GPU_N_HALF],
        operator[LAUNCHES] * point[LAUNCH_OVERHEAD],
    )


@loop("float64[::1](float64[::1], float64[::1], float64[:,::1])")
def decode_attention_times(point, contexts, attention):
    """Attention of all layers for one new token at each of ``contexts`` [T] tokens [s]."""
    times = np.empty(contexts.shape[0])
    for t in range(contexts.shape[0]):
        times[t] = _decode_attention(point, contexts[t], attention)
    return times


@loop("float64[::1](float64[:,::1], float64[::1], float64[::1], float64[:,::1])")
def weighted_decode_attention_times(points, contexts, weight, attention):
    """Sum of `decode_attention_times`, each times its ``weight`` [T], at every hardware point [N] [s].

    Both sides of the roofline are straight lines in the context. Where one of them is the higher at the shortest
    and at the longest context it is the higher in between, and the sum needs only the sum of the weights and the
    weighted sum of the contexts. Only points where the lines cross visit every context.
    """
    num_contexts = contexts.shape[0]
    totals = np.zeros(points.shape[0])
    for a in range(attention.shape[0]):
        kind = attention[a]
        weights, weighted, least, most = 0.0, 0.0, np.inf, 0.0
        for t in range(num_contexts):
            seen = min(contexts[t], kind[WINDOW])
            weights += weight[t]
            weighted += weight[t] * seen
            least, most = min(least, seen), max(most, seen)
        for n in range(points.shape[0]):
            flops_per_s, bytes_per_s = points[n, GPU_FLOPS], points[n, GPU_BANDWIDTH]
            flops_s, flops_slope_s = kind[WEIGHT_FLOPS] / flops_per_s, kind[CONTEXT_FLOPS] / flops_per_s
            bytes_s = (kind[WEIGHT_BYTES] + points[n, GPU_N_HALF]) / bytes_per_s
            bytes_slope_s = kind[CONTEXT_BYTES] / bytes_per_s
            first = bytes_s + bytes_slope_s * least - flops_s - flops_slope_s * least
            last = bytes_s + bytes_slope_s * most - flops_s - flops_slope_s * most
            if first >= 0.0 and last >= 0.0:
                total = bytes_s * weights + bytes_slope_s * weighted
            elif first <= 0.0 and last <= 0.0:
                total = flops_s * weights + flops_slope_s * weighted
            else:
                total = 0.0
                for t in range(num_contexts):
                    seen = min(contexts[t], kind[WINDOW])
                    total += weight[t] * max(flops_s + flops_slope_s * seen, bytes_s + bytes_slope_s * seen)
            overhead_s = kind[ATTENTION_LAUNCHES] * points[n, LAUNCH_OVERHEAD]
            totals[n] += kind[LAYERS] * (total + overhead_s * weights)
    return totals


@loop("float64[::1](float64[::1], float64[::1], float64[:,::1])")
def prefill_attention_times(point, prompts, attention):
    """Attention of all layers over each prompt of ``prompts`` [S] tokens [s]; weights are read once a prompt."""
    times = np.zeros(prompts.shape[0])
    for s in range(prompts.shape[0]):
        for a in range(attention.shape[0]):
            times[s] += attention[a, LAYERS] * _prefill_attention_time1(
                prompts[s],
                attention[a, WINDOW],
                attention[a, WEIGHT_FLOPS],
                attention[a, WEIGHT_BYTES],
                attention[a, CONTEXT_FLOPS],
                attention[a, CONTEXT_BYTES],
                point[GPU_FLOPS],
                point[GPU_BANDWIDTH],
                point[GPU_N_HALF],
                attention[a, ATTENTION_LAUNCHES] * point[LAUNCH_OVERHEAD],
            )
    return times


@loop("float64[:,::1](float64[:,::1], float64[:,::1])")
def operator_times(points, operators):
    """Time of every operator with its repeats, at every hardware point [N, M] [s]."""
    times = np.empty((points.shape[0], operators.shape[0]))
    for n in range(points.shape[0]):
        for m in range(operators.shape[0]):
            times[n, m] = _operator(points[n], operators[m])
    return times
