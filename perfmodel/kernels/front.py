"""What comes before the experts of a layer, and around the layers: attention, router, dense layers and LM head.

All of it runs on the GPU, or on the CPU: at the faster of its rates of computing, without launches, and with the full
bandwidth for pieces of any size.

Arrays
------
p, r : one block of hardware points, see ``block.py``.
rates : float64 [RATES, BLOCK], what a unit of work costs where the operators run; the rows are named below.
attention : float64 [A, ATTENTION_SIZE], one kind of attention a row; the places are named below.
operators : float64 [M, OPERATOR_SIZE], one GPU operator a row; the places are named below.
counts : float64 [COUNTS], how often fixed times are paid, and by how many tokens; the places are named below.
"""

# The compiler infers the types of kernels.
# mypy: allow-untyped-defs

import numpy as np

from perfmodel.kernels._jit import scalar
from perfmodel.kernels.block import (
    BLOCK,
    PER_CPU_BYTE,
    PER_CPU_FLOP,
    PER_CPU_VECTOR_FLOP,
    PER_FLOP,
    PER_GPU_BYTE,
)
from perfmodel.kernels.point import (
    ATTENTION_FIXED,
    BATCHED_FIXED,
    BATCHED_FROM,
    GPU_N_HALF,
    LAUNCH_OVERHEAD,
    LAYER_OVERHEAD,
    PER_REDUCED_BYTE,
)
from perfmodel.kernels.roofline import _causal_pairs1, _roofline1

# Places in a row of attention. Context means: for every token that is attended to.
LAYERS, WINDOW, WEIGHT_FLOPS, WEIGHT_BYTES, CONTEXT_FLOPS, CONTEXT_BYTES, ATTENTION_LAUNCHES = range(7)
ATTENTION_SIZE = 7

# Places of counts: how often a step, or a prefill, pays each fixed time, from ATTENTION_COUNT to SEQUENCE_COUNT in the
# order of the places of a point; then tokens of one pass, and bytes that several GPUs reduce.
LAYERS_COUNT = 0
ATTENTION_COUNT, RECURRENT_COUNT, EXPERTS_COUNT, MATRIX_COUNT, DENSE_COUNT, STEP_COUNT, SEQUENCE_COUNT = range(1, 8)
TOKENS_COUNT, REDUCED_COUNT = 8, 9
COUNTS = 10

# Places in a row of operators.
REPEATS, FLOPS, BYTES, LAUNCHES = range(4)
OPERATOR_SIZE = 4

# Rows of rates: of a flop, of a byte, bytes at which half the bandwidth is reached, of a launch.
FLOP_S, BYTE_S, N_HALF, LAUNCH_S = range(4)
RATES = 4

# Rows of lines: roofline of one kind of attention as two straight lines in the context, start and slope [s].
FLOPS_S, FLOPS_SLOPE_S, BYTES_S, BYTES_SLOPE_S, OVERHEAD_S = range(5)
LINES = 5

# Rows of seen, what a sum over contexts needs to know of them.
WEIGHTS, WEIGHTED, LEAST, MOST = range(4)


@scalar
def _fill_rates(p, r, on_cpu, rates):
    """Fill ``rates``."""
    for b in range(BLOCK):
        if on_cpu:
            rates[FLOP_S, b] = min(r[PER_CPU_FLOP, b], r[PER_CPU_VECTOR_FLOP, b])
            rates[BYTE_S, b] = r[PER_CPU_BYTE, b]
            rates[N_HALF, b] = rates[LAUNCH_S, b] = 0.0
        else:
            rates[FLOP_S, b], rates[BYTE_S, b] = r[PER_FLOP, b], r[PER_GPU_BYTE, b]
            rates[N_HALF, b], rates[LAUNCH_S, b] = p[GPU_N_HALF, b], p[LAUNCH_OVERHEAD, b]


@scalar
def _context_lines(rates, attention, lines):
    """Fill ``lines`` [A, LINES, BLOCK]."""
    for a in range(attention.shape[0]):
        kind = attention[a]
        for b in range(BLOCK):
            lines[a, FLOPS_S, b] = kind[WEIGHT_FLOPS] * rates[FLOP_S, b]
            lines[a, FLOPS_SLOPE_S, b] = kind[CONTEXT_FLOPS] * rates[FLOP_S, b]
            lines[a, BYTES_S, b] = (kind[WEIGHT_BYTES] + rates[N_HALF, b]) * rates[BYTE_S, b]
            lines[a, BYTES_SLOPE_S, b] = kind[CONTEXT_BYTES] * rates[BYTE_S, b]
            lines[a, OVERHEAD_S, b] = kind[ATTENTION_LAUNCHES] * rates[LAUNCH_S, b]


@scalar
def _sum_contexts(contexts, weight, attention):
    """Sum of the weights and of the weighted contexts, shortest and longest context, for every kind [A, 4]."""
    seen = np.zeros((attention.shape[0], 4))
    for a in range(attention.shape[0]):
        seen[a, LEAST] = np.inf
        for t in range(contexts.shape[0]):
            context = min(contexts[t], attention[a, WINDOW])
            seen[a, WEIGHTS] += weight[t]
            seen[a, WEIGHTED] += weight[t] * context
            seen[a, LEAST] = min(seen[a, LEAST], context)
            seen[a, MOST] = max(seen[a, MOST], context)
    return seen


@scalar
def _attention_sum(lines, attention, contexts, weight, seen, crossing, one, total):
    """Fill ``total`` [BLOCK]: attention of all layers, summed over contexts with their weights [s].

    Where one of the two lines is the higher at the shortest and at the longest context, it is the higher in between,
    and the sum needs only ``seen``. Only points where the lines cross visit every context.
    """
    for b in range(BLOCK):
        total[b] = 0.0
    for a in range(attention.shape[0]):
        layers = attention[a, LAYERS]
        weights, weighted, low, high = seen[a, WEIGHTS], seen[a, WEIGHTED], seen[a, LEAST], seen[a, MOST]
        for b in range(BLOCK):
            start = lines[a, BYTES_S, b] - lines[a, FLOPS_S, b]
            slope = lines[a, BYTES_SLOPE_S, b] - lines[a, FLOPS_SLOPE_S, b]
            first, last = start + slope * low, start + slope * high
            by_bytes = lines[a, BYTES_S, b] * weights + lines[a, BYTES_SLOPE_S, b] * weighted
            by_flops = lines[a, FLOPS_S, b] * weights + lines[a, FLOPS_SLOPE_S, b] * weighted
            crossing[b] = first * last
            one[b] = by_bytes if first + last >= 0.0 else by_flops
        for b in range(BLOCK):
            if crossing[b] < 0.0:
                one[b] = 0.0
                for t in range(contexts.shape[0]):
                    context = min(contexts[t], attention[a, WINDOW])
                    by_flops = lines[a, FLOPS_S, b] + lines[a, FLOPS_SLOPE_S, b] * context
                    by_bytes = lines[a, BYTES_S, b] + lines[a, BYTES_SLOPE_S, b] * context
                    one[b] += weight[t] * max(by_flops, by_bytes)
        for b in range(BLOCK):
            total[b] += layers * (one[b] + lines[a, OVERHEAD_S, b] * weights)


@scalar
def _attention_at(lines, attention, context, total):
    """Add to ``total`` [BLOCK] the attention of all layers for one new token at one context [s]."""
    for a in range(attention.shape[0]):
        layers, seen = attention[a, LAYERS], min(context, attention[a, WINDOW])
        for b in range(BLOCK):
            by_flops = lines[a, FLOPS_S, b] + lines[a, FLOPS_SLOPE_S, b] * seen
            by_bytes = lines[a, BYTES_S, b] + lines[a, BYTES_SLOPE_S, b] * seen
            total[b] += layers * (max(by_flops, by_bytes) + lines[a, OVERHEAD_S, b])


@scalar
def _prefill_attention(rates, attention, prompt, prompts, passes, total):
    """Fill ``total`` [BLOCK]: attention of all layers over so many prompts of one length [s].

    Every pass reads the weights once, and the keys and values of all tokens up to its own.
    """
    for b in range(BLOCK):
        total[b] = 0.0
    for a in range(attention.shape[0]):
        kind = attention[a]
        pairs = prompts * _causal_pairs1(prompt, kind[WINDOW])
        flops = kind[WEIGHT_FLOPS] * (prompts * prompt) + kind[CONTEXT_FLOPS] * pairs
        moved = kind[WEIGHT_BYTES] * passes + kind[CONTEXT_BYTES] * (prompts * prompt * ((passes + 1.0) / 2.0))
        for b in range(BLOCK):
            overhead_s = kind[ATTENTION_LAUNCHES] * rates[LAUNCH_S, b] * passes
            total[b] += kind[LAYERS] * _roofline1(
                flops, moved, rates[FLOP_S, b], rates[BYTE_S, b], rates[N_HALF, b] * passes, overhead_s
            )


@scalar
def _fixed_times(p, counts, total):
    """Fill ``total`` [BLOCK]: what no work changes, of one step or pass [s]."""
    for b in range(BLOCK):
        total[b] = counts[LAYERS_COUNT] * p[LAYER_OVERHEAD, b]
    for i in range(ATTENTION_COUNT, SEQUENCE_COUNT + 1):
        if counts[i] != 0.0:
            for b in range(BLOCK):
                total[b] += counts[i] * p[ATTENTION_FIXED + i - ATTENTION_COUNT, b]
    for b in range(BLOCK):
        if counts[TOKENS_COUNT] >= p[BATCHED_FROM, b]:
            total[b] += counts[EXPERTS_COUNT] * p[BATCHED_FIXED, b]
        total[b] += counts[REDUCED_COUNT] * p[PER_REDUCED_BYTE, b]


@scalar
def _operator_times(rates, operators, times):
    """Fill ``times`` [M, BLOCK]: every operator with its repeats [s]; one without bytes does not exist."""
    for m in range(operators.shape[0]):
        repeats, flops = operators[m, REPEATS], operators[m, FLOPS]
        moved, launches = operators[m, BYTES], operators[m, LAUNCHES]
        for b in range(BLOCK):
            times[m, b] = 0.0
        if moved != 0.0:
            for b in range(BLOCK):
                overhead_s = launches * rates[LAUNCH_S, b]
                times[m, b] = repeats * _roofline1(
                    flops, moved, rates[FLOP_S, b], rates[BYTE_S, b], rates[N_HALF, b], overhead_s
                )
