"""Times of the kinds of work that a plan distinguishes, each priced once for a block of hardware points.

Arrays
------
p, r : one block of hardware points, see ``block.py``. Dataflow and precision scaling must not vary.
work : float64 [A, WORK_SIZE], one kind of work a row; the places are named below.
matrices : float64 [M, 3], input size and output size of the matrices of one expert, and how many there are of each.
priced : float64 [A, EVERY, BLOCK], what each kind of work takes, by where it is spent [s].
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
    PER_CYCLE,
    PER_EXPERT_BYTE,
    PER_FLOP,
    PER_LINK_BYTE,
    PER_NDP_BYTE,
    PER_PACK_BYTE,
)
from perfmodel.kernels.cpu import ACTIVATION_BYTES, _cpu_expert1
from perfmodel.kernels.link import _transfer1
from perfmodel.kernels.point import (
    COPY_OVERHEAD,
    CPU_OVERHEAD,
    CPU_TILE,
    EXPERT_LAUNCH,
    EXPERT_N_HALF,
    EXPERT_TILE,
    LINK_LATENCY,
    LINK_N_HALF,
    MAX_RATE_BITS,
    NDP_ARRAYS,
    NDP_COLS,
    NDP_DATAFLOW,
    NDP_RATES,
    NDP_ROWS,
    NDP_SCALE_BITS,
    NDP_SCALING,
    SCALING_LINEAR,
    SCALING_NATIVE,
)
from perfmodel.kernels.roofline import _padded_tokens1, _roofline1
from perfmodel.kernels.systolic import _gemm_cycles_dealt1

# Places in a row of work.
EXECUTOR, TOKENS, BITS, QUANTISED, WHEN = range(5)
WORK_SIZE = 5
ON_GPU, ON_GPU_AFTER_FETCH, ON_NDP, SKIPPED, ON_CPU, COPIED = range(6)
NOW, AHEAD, BEHIND = range(3)

# Columns of priced work. Both sides of a layer come first, because most sums need nothing else; then what simple
# layers are made of; then what only layers need that look at the one before or use the CPU.
GPU_SIDE, NDP_SIDE, GPU, LINK, NDP, NDP_LINK, CPU, CPU_BEHIND, LINK_AHEAD, LINK_BEHIND = range(10)
SIDES, PARTED, EVERY = 2, 6, 10


@scalar
def _array_time(p, r, tokens, matrices, activation_bytes, array_s, one_way_s):
    """Fill ``array_s`` [M, BLOCK], a matrix on the arrays at FP16, and ``one_way_s`` [BLOCK], its activations sent."""
    for i in range(matrices.shape[0]):
        k, n = matrices[i, 0], matrices[i, 1]
        # The dataflow is the same in all points, and known outside the loop the compiler can turn it into vectors.
        dataflow = p[NDP_DATAFLOW, 0]
        for b in range(BLOCK):
            cycles = _gemm_cycles_dealt1(tokens, k, n, p[NDP_ROWS, b], p[NDP_COLS, b], p[NDP_ARRAYS, b], dataflow)
            array_s[i, b] = cycles * r[PER_CYCLE, b]
    _one_way(p, r, activation_bytes, one_way_s)


@scalar
def _one_way(p, r, activation_bytes, one_way_s):
    """Fill ``one_way_s`` [BLOCK]: activations sent over the link."""
    for b in range(BLOCK):
        one_way_s[b] = _transfer1(activation_bytes, r[PER_LINK_BYTE, b], p[LINK_LATENCY, b], p[LINK_N_HALF, b])


@scalar
def _slower_by(p, bits, slower):
    """Fill ``slower`` [BLOCK]: time of the arrays at this many stored bits, relative to FP16.

    Block scales do not change a native format, and weights wider than any table run at the FP16 rate.
    """
    scaling = p[NDP_SCALING, 0]
    alike = bits / 16.0 if scaling == SCALING_LINEAR else 1.0
    for b in range(BLOCK):
        slower[b] = alike
    if scaling == SCALING_NATIVE and bits < MAX_RATE_BITS + 1.0:
        row = NDP_RATES + int(np.floor(bits))
        for b in range(BLOCK):
            slower[b] = 1.0 / p[row, b]


@scalar
def _price_work(p, r, work, expert_params, hidden_size, matrices, used, priced):
    """Fill the first ``used`` columns of ``priced``."""
    num_matrices = 0.0
    for i in range(matrices.shape[0]):
        num_matrices += matrices[i, 2]
    array_s = np.empty((matrices.shape[0], BLOCK))
    one_way_s, slower = np.empty(BLOCK), np.empty(BLOCK)
    known_tokens = -1.0
    for a in range(work.shape[0]):
        for c in range(used):
            for b in range(BLOCK):
                priced[a, c, b] = 0.0
        executor, tokens, bits = work[a, EXECUTOR], work[a, TOKENS], work[a, BITS]
        if tokens == 0.0 or executor == SKIPPED:
            continue
        activations = tokens * hidden_size * ACTIVATION_BYTES
        if executor == ON_NDP:
            if tokens != known_tokens:
                _array_time(p, r, tokens, matrices, activations, array_s, one_way_s)
                known_tokens = tokens
            _slower_by(p, bits, slower)
            _near_work(p, r, bits, work[a, QUANTISED], matrices, array_s, one_way_s, slower, used, a, priced)
            continue
        weights = expert_params * bits / 8.0
        if executor == ON_CPU:
            _cpu_work(p, r, tokens, expert_params, weights, hidden_size, work[a, WHEN], used, a, priced)
            continue
        if executor != COPIED:
            moved = weights + 2.0 * activations
            for b in range(BLOCK):
                flops = 2.0 * _padded_tokens1(tokens, p[EXPERT_TILE, b]) * expert_params
                n_half, overhead_s = num_matrices * p[EXPERT_N_HALF, b], num_matrices * p[EXPERT_LAUNCH, b]
                priced[a, GPU_SIDE, b] = _roofline1(
                    flops, moved, r[PER_FLOP, b], r[PER_EXPERT_BYTE, b], n_half, overhead_s
                )
            if used > SIDES:
                for b in range(BLOCK):
                    priced[a, GPU, b] = priced[a, GPU_SIDE, b]
        if executor != ON_GPU:
            _copy(p, r, weights, work[a, WHEN], used, a, priced)


@scalar
def _near_work(p, r, bits, quantised, matrices, array_s, one_way_s, slower, used, a, priced):
    """An expert on the near-data device: activations there and back, and every matrix from DRAM through the arrays."""
    for b in range(BLOCK):
        priced[a, NDP_SIDE, b] = 0.0
    for i in range(matrices.shape[0]):
        eighth, repeats = matrices[i, 0] * matrices[i, 1] / 8.0, matrices[i, 2]
        for b in range(BLOCK):
            stream_s = eighth * (bits + quantised * p[NDP_SCALE_BITS, b]) * r[PER_NDP_BYTE, b]
            priced[a, NDP_SIDE, b] += repeats * max(stream_s, array_s[i, b] * slower[b])
    if used > SIDES:
        for b in range(BLOCK):
            priced[a, NDP, b] = priced[a, NDP_SIDE, b]
            priced[a, NDP_LINK, b] = 2.0 * one_way_s[b]
    for b in range(BLOCK):
        priced[a, NDP_SIDE, b] += 2.0 * one_way_s[b]


@scalar
def _cpu_work(p, r, tokens, expert_params, weights, hidden_size, when, used, a, priced):
    """An expert on the host; only layers of every column have such work."""
    if used == EVERY:
        column = CPU if when == NOW else CPU_BEHIND
        for b in range(BLOCK):
            priced[a, column, b] = _cpu_expert1(
                tokens,
                expert_params,
                weights,
                hidden_size,
                r[PER_CPU_FLOP, b],
                r[PER_CPU_VECTOR_FLOP, b],
                p[CPU_TILE, b],
                r[PER_CPU_BYTE, b],
                p[CPU_OVERHEAD, b],
                r[PER_PACK_BYTE, b],
            )


@scalar
def _copy(p, r, weights, when, used, a, priced):
    """A copy of weights over the link, in the column of when it is issued."""
    for b in range(BLOCK):
        copy = _transfer1(weights, r[PER_LINK_BYTE, b], p[LINK_LATENCY, b] + p[COPY_OVERHEAD, b], p[LINK_N_HALF, b])
        if when == NOW:
            priced[a, GPU_SIDE, b] += copy
            if used > SIDES:
                priced[a, LINK, b] = copy
        elif used == EVERY:
            priced[a, LINK_AHEAD if when == AHEAD else LINK_BEHIND, b] = copy
