"""The distinct states of a plan, priced on a block of hardware points.

Two layers whose picks fall in the same kinds of work equally often cost the same, wherever they stand in a trace.
So a plan is held as its different rows of (work, count) pairs. A state is such a row, together with the row of the
layer before it where copies are issued one layer ahead. Weighting the states by how often they occur gives the sums
over the whole trace without any sampling. Sums run in a fixed order.

Arrays
------
p, r : one block of hardware points, see ``block.py``. Dataflow and precision scaling must not vary.
work : float64 [A, WORK_SIZE], one kind of work a row; the places are named below.
matrices : float64 [M, 3], input size and output size of the matrices of one expert, and how many there are of each.
row_offsets, row_work, row_count : rows in compressed form; row r holds the entries
    ``row_offsets[r]:row_offsets[r + 1]``, each a number of ``work`` and how often it occurs.
state_row, state_before : int64 [S], row of the state and row of the layer before (-1: none).
"""

# The compiler infers the types of kernels.
# mypy: allow-untyped-defs

import numpy as np

from perfmodel.kernels._jit import loop, scalar
from perfmodel.kernels.block import BLOCK, PER_CYCLE, PER_FLOP, PER_GPU_BYTE, PER_LINK_BYTE, PER_NDP_BYTE
from perfmodel.kernels.link import _transfer1
from perfmodel.kernels.point import (
    GPU_N_HALF,
    LAUNCH_OVERHEAD,
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
from perfmodel.kernels.roofline import _roofline1
from perfmodel.kernels.systolic import _gemm_cycles_dealt1

# Places in a row of work.
EXECUTOR, TOKENS, BITS, QUANTISED, AHEAD, WASTED = range(6)
WORK_SIZE = 6
ON_GPU, ON_GPU_AFTER_FETCH, ON_NDP, SKIPPED = 0, 1, 2, 3

# Columns of priced work and of a row. Both sides of a layer come first, because most sums need nothing else.
_GPU_SIDE, _NDP_SIDE, _GPU, _LINK_AHEAD, _LINK, _NDP, _NDP_LINK = range(7)
_SIDES, _SIDES_AND_AHEAD, _ALL = 2, 4, 7

# Columns of a priced state, all in seconds.
TIME = 0  # what the expert part adds to the layer
PATH_LINK, PATH_GPU, PATH_NDP = 1, 2, 3  # the same, split by what is on the critical path
BUSY_LINK, BUSY_GPU, BUSY_NDP = 4, 5, 6  # how long each part works, hidden or not
STATE_SIZE = 7

ACTIVATION_BYTES = 2.0  # FP16


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
    """Fill ``priced`` [A, 7, BLOCK] with the time of each kind of work once, by where it is spent [s]."""
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
        flops, weights = 2.0 * tokens * expert_params, expert_params * bits / 8.0
        moved = weights + 2.0 * activations
        for b in range(BLOCK):
            n_half, overhead_s = num_matrices * p[GPU_N_HALF, b], num_matrices * p[LAUNCH_OVERHEAD, b]
            priced[a, _GPU_SIDE, b] = _roofline1(flops, moved, r[PER_FLOP, b], r[PER_GPU_BYTE, b], n_half, overhead_s)
        if used > _SIDES:
            for b in range(BLOCK):
                priced[a, _GPU, b] = priced[a, _GPU_SIDE, b]
        if executor == ON_GPU_AFTER_FETCH:
            _copies(p, r, weights, work[a, AHEAD], work[a, WASTED], used, a, priced)


@scalar
def _near_work(p, r, bits, quantised, matrices, array_s, one_way_s, slower, used, a, priced):
    """An expert on the near-data device: activations there and back, and every matrix from DRAM through the arrays."""
    for b in range(BLOCK):
        priced[a, _NDP_SIDE, b] = 0.0
    for i in range(matrices.shape[0]):
        eighth, repeats = matrices[i, 0] * matrices[i, 1] / 8.0, matrices[i, 2]
        for b in range(BLOCK):
            stream_s = eighth * (bits + quantised * p[NDP_SCALE_BITS, b]) * r[PER_NDP_BYTE, b]
            priced[a, _NDP_SIDE, b] += repeats * max(stream_s, array_s[i, b] * slower[b])
    if used == _ALL:
        for b in range(BLOCK):
            priced[a, _NDP, b] = priced[a, _NDP_SIDE, b]
            priced[a, _NDP_LINK, b] = 2.0 * one_way_s[b]
    for b in range(BLOCK):
        priced[a, _NDP_SIDE, b] += 2.0 * one_way_s[b]


@scalar
def _copies(p, r, weights, ahead, wasted, used, a, priced):
    """Copies to the GPU: on demand they come before the work, issued ahead they run beside the layer before."""
    for b in range(BLOCK):
        copy = _transfer1(weights, r[PER_LINK_BYTE, b], p[LINK_LATENCY, b], p[LINK_N_HALF, b])
        priced[a, _GPU_SIDE, b] += (1.0 - ahead) * copy
        if used > _SIDES:
            priced[a, _LINK_AHEAD, b] = (ahead + wasted) * copy
        if used == _ALL:
            priced[a, _LINK, b] = (1.0 - ahead) * copy


@scalar
def _looks_back(work):
    """Whether copies are issued ahead; only those look at the layer before."""
    ahead = False
    for a in range(work.shape[0]):
        ahead = ahead or work[a, AHEAD] != 0.0 or work[a, WASTED] != 0.0
    return ahead


@scalar
def _used_columns(work, with_parts):
    """How many columns of the priced work are needed."""
    if with_parts:
        return _ALL
    return _SIDES_AND_AHEAD if _looks_back(work) else _SIDES


@scalar
def _new_rows(work, row_offsets):
    """Room for rows [R, 7, BLOCK]: all of them where some look back, else one that is summed where it is used."""
    return np.empty((row_offsets.shape[0] - 1 if _looks_back(work) else 1, 7, BLOCK))


@scalar
def _keep_rows(priced, work, row_offsets, row_work, row_count, used, rows):
    """Sum all rows that states may look back to."""
    if _looks_back(work):
        for n in range(rows.shape[0]):
            _price_row(priced, work, row_offsets[n], row_offsets[n + 1], row_work, row_count, used, rows, n)


@scalar
def _price_state(
    priced,
    work,
    row_offsets,
    row_work,
    row_count,
    n,
    before,
    shared_s,
    overlapped,
    used,
    looks_back,
    rows,
    exposed,
    time,
):
    """Fill ``time`` and ``exposed`` [BLOCK] for the state of row ``n``; returns where in ``rows`` its row stands."""
    at = 0
    if looks_back:
        at = n
        _expose(rows, at, before, shared_s, exposed)
    else:
        _price_row(priced, work, row_offsets[n], row_offsets[n + 1], row_work, row_count, used, rows, at)
    _both_sides(rows, at, exposed, shared_s, overlapped, time)
    return at


@scalar
def _price_row(priced, work, first, last, row_work, row_count, used, rows, at):
    """Fill ``rows[at]`` [7, BLOCK] with the sum of the row's work, entries ``first`` to ``last`` [s]."""
    for c in range(used):
        for b in range(BLOCK):
            rows[at, c, b] = 0.0
    for i in range(first, last):
        a, count = row_work[i], row_count[i]
        if used == _SIDES:
            # An expert works on one side only; the other column is zero.
            c = _NDP_SIDE if work[a, EXECUTOR] == ON_NDP else _GPU_SIDE
            for b in range(BLOCK):
                rows[at, c, b] += count * priced[a, c, b]
        else:
            for c in range(used):
                for b in range(BLOCK):
                    rows[at, c, b] += count * priced[a, c, b]


@scalar
def _expose(rows, at, before, shared_s, exposed):
    """Fill ``exposed`` [BLOCK]: copies issued ahead, less what the GPU work of the layer before hides."""
    for b in range(BLOCK):
        hidden_by = rows[before, _GPU, b] + shared_s[b] if before >= 0 else 0.0
        exposed[b] = max(0.0, rows[at, _LINK_AHEAD, b] - hidden_by)


@scalar
def _both_sides(rows, at, exposed, shared_s, overlapped, time):
    """Fill ``time`` [BLOCK], what a layer's expert part takes.

    The GPU side copies what it misses, then computes. The near-data side sends activations, computes and returns
    results. ``exposed`` [BLOCK] is the part of the copies issued ahead that nothing hides.
    """
    if overlapped:
        for b in range(BLOCK):
            time[b] = max(rows[at, _GPU_SIDE, b] + exposed[b] + shared_s[b], rows[at, _NDP_SIDE, b])
    else:
        for b in range(BLOCK):
            time[b] = rows[at, _GPU_SIDE, b] + exposed[b] + shared_s[b] + rows[at, _NDP_SIDE, b]


@scalar
def _add_parts(rows, at, exposed, shared_s, overlapped, weight, totals):
    """Add the other columns of a state, times ``weight``, to ``totals`` [STATE_SIZE, BLOCK]."""
    for b in range(BLOCK):
        link, gpu = rows[at, _LINK, b] + exposed[b], rows[at, _GPU, b] + shared_s[b]
        gpu_first = rows[at, _GPU_SIDE, b] + exposed[b] + shared_s[b] >= rows[at, _NDP_SIDE, b]
        on_gpu = 1.0 if not overlapped or gpu_first else 0.0
        on_ndp = 1.0 if not overlapped or not gpu_first else 0.0
        totals[PATH_LINK, b] += weight * (on_gpu * link + on_ndp * rows[at, _NDP_LINK, b])
        totals[PATH_GPU, b] += weight * (on_gpu * gpu)
        totals[PATH_NDP, b] += weight * (on_ndp * rows[at, _NDP, b])
        totals[BUSY_LINK, b] += weight * (rows[at, _LINK, b] + rows[at, _LINK_AHEAD, b] + rows[at, _NDP_LINK, b])
        totals[BUSY_GPU, b] += weight * gpu
        totals[BUSY_NDP, b] += weight * rows[at, _NDP, b]


@loop("Tuple((int64[::1], int32[::1], float64[::1]))(int32[:,::1], int64)")
def token_states(state_id, num_states):
    """The states of each token in compressed form, from ``state_id`` [T, L].

    Token t is in the states ``state[i]``, in ``count[i]`` of its layers each, for i from ``offsets[t]`` to
    ``offsets[t + 1]``; in the order of the layers.
    """
    tokens, layers = state_id.shape
    offsets = np.zeros(tokens + 1, np.int64)
    last = np.full(num_states, -1, np.int64)
    for t in range(tokens):
        offsets[t + 1] = offsets[t]
        for layer in range(layers):
            if last[state_id[t, layer]] != t:
                last[state_id[t, layer]] = t
                offsets[t + 1] += 1
    state, count = np.empty(offsets[tokens], np.int32), np.zeros(offsets[tokens])
    place = np.empty(num_states, np.int64)
    last[:] = -1
    for t in range(tokens):
        end = offsets[t]
        for layer in range(layers):
            s = state_id[t, layer]
            if last[s] != t:
                last[s], place[s], state[end] = t, end, s
                end += 1
            count[place[s]] += 1.0
    return offsets, state, count
