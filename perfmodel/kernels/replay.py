"""Price the distinct states of a plan on hardware points, and sum them over a trace.

Two layers whose picks fall in the same kinds of work equally often cost the same, wherever they stand in a trace.
So a plan is held as its different rows of (work, count) pairs. A state is such a row, together with the row of the
layer before it where copies are issued one layer ahead. Weighting the states by how often they occur gives the sums
over the whole trace without any sampling. Sums run in a fixed order, so splitting the points changes no bit.

Arrays
------
points : float64 [N, POINT_SIZE], one hardware point a row; the places are named in ``point.py``.
work : float64 [A, WORK_SIZE], one kind of work a row; the places are named below.
matrices : float64 [M, 2], input and output size of each matrix of one expert.
row_offsets, row_work, row_count : rows in compressed form; row r holds the entries
    ``row_offsets[r]:row_offsets[r + 1]``, each a number of ``work`` and how often it occurs.
state_row, state_before : int64 [S], row of the state and row of the layer before (-1: none).
"""

# The compiler infers the types of kernels.
# mypy: allow-untyped-defs

import numpy as np

from perfmodel.kernels._jit import loop, scalar
from perfmodel.kernels.link import _transfer_time1
from perfmodel.kernels.point import (
    GPU_BANDWIDTH,
    GPU_FLOPS,
    GPU_N_HALF,
    LAUNCH_OVERHEAD,
    LINK_BANDWIDTH,
    LINK_LATENCY,
    LINK_N_HALF,
    MAX_RATE_BITS,
    NDP_ARRAYS,
    NDP_BANDWIDTH,
    NDP_CLOCK,
    NDP_COLS,
    NDP_DATAFLOW,
    NDP_RATES,
    NDP_ROWS,
    NDP_SCALE_BITS,
    NDP_SCALING,
    SCALING_LINEAR,
    SCALING_NONE,
)
from perfmodel.kernels.roofline import _roofline_time1
from perfmodel.kernels.systolic import _gemm_time1

# Places in a row of work.
EXECUTOR, TOKENS, BITS, QUANTISED, AHEAD, WASTED = range(6)
WORK_SIZE = 6
ON_GPU, ON_GPU_AFTER_FETCH, ON_NDP, SKIPPED = 0, 1, 2, 3

# Columns of a priced row.
_LINK, _LINK_AHEAD, _GPU, _NDP_LINK, _NDP = range(5)

# Columns of a priced state, all in seconds.
TIME = 0  # what the expert part adds to the layer
PATH_LINK, PATH_GPU, PATH_NDP = 1, 2, 3  # the same, split by what is on the critical path
BUSY_LINK, BUSY_GPU, BUSY_NDP = 4, 5, 6  # how long each part works, hidden or not
STATE_SIZE = 7

ACTIVATION_BYTES = 2.0  # FP16


@scalar
def _rate1(point, bits):
    """Speed-up of the arrays over FP16 at this many stored bits; block scales do not change a native format."""
    scaling = point[NDP_SCALING]
    if scaling == SCALING_NONE:
        return 1.0
    if scaling == SCALING_LINEAR:
        return 16.0 / bits
    if bits >= MAX_RATE_BITS + 1.0:
        return 1.0  # wider than any table; such weights are computed at the FP16 rate
    return point[NDP_RATES + int(np.floor(bits))]


@scalar
def _price_work(point, work, expert_params, hidden_size, matrices, priced):
    """Fill ``priced`` [A, 5] with the time of each kind of work once, by where it is spent [s]."""
    launches = matrices.shape[0] * point[LAUNCH_OVERHEAD]
    n_half = matrices.shape[0] * point[GPU_N_HALF]
    for a in range(work.shape[0]):
        priced[a, :] = 0.0
        executor, tokens, bits = work[a, EXECUTOR], work[a, TOKENS], work[a, BITS]
        if tokens == 0.0 or executor == SKIPPED:
            continue
        activations = tokens * hidden_size * ACTIVATION_BYTES
        if executor == ON_NDP:
            one_way = _transfer_time1(activations, point[LINK_BANDWIDTH], point[LINK_LATENCY], point[LINK_N_HALF])
            priced[a, _NDP_LINK] = 2.0 * one_way
            stored = bits + work[a, QUANTISED] * point[NDP_SCALE_BITS]
            rate = _rate1(point, bits)
            for i in range(matrices.shape[0]):
                priced[a, _NDP] += _gemm_time1(
                    tokens,
                    matrices[i, 0],
                    matrices[i, 1],
                    stored,
                    point[NDP_ROWS],
                    point[NDP_COLS],
                    point[NDP_ARRAYS],
                    point[NDP_CLOCK],
                    point[NDP_DATAFLOW],
                    rate,
                    point[NDP_BANDWIDTH],
                )
            continue
        weights = expert_params * bits / 8.0
        priced[a, _GPU] = _roofline_time1(
            2.0 * tokens * expert_params,
            weights + 2.0 * activations,
            point[GPU_FLOPS],
            point[GPU_BANDWIDTH],
            n_half,
            launches,
        )
        if executor == ON_GPU_AFTER_FETCH:
            copy = _transfer_time1(weights, point[LINK_BANDWIDTH], point[LINK_LATENCY], point[LINK_N_HALF])
            priced[a, _LINK] = (1.0 - work[a, AHEAD]) * copy
            priced[a, _LINK_AHEAD] = (work[a, AHEAD] + work[a, WASTED]) * copy


@scalar
def _price_rows(priced, row_offsets, row_work, row_count, rows):
    """Fill ``rows`` [R, 5] with the sum of each row's work [s]."""
    for r in range(rows.shape[0]):
        rows[r, :] = 0.0
        for i in range(row_offsets[r], row_offsets[r + 1]):
            for c in range(5):
                rows[r, c] += row_count[i] * priced[row_work[i], c]


@scalar
def _price_state(rows, row, before, shared_s, overlapped, state):
    """Fill ``state`` [STATE_SIZE]: both sides of one layer, together.

    The GPU side copies what it misses, then computes; a copy issued ahead is exposed only for what the GPU work
    of the layer before cannot hide. The near-data side sends activations, computes and returns results.
    """
    hidden_by = 0.0
    if before >= 0:
        hidden_by = rows[before, _GPU] + shared_s
    link = rows[row, _LINK] + max(0.0, rows[row, _LINK_AHEAD] - hidden_by)
    gpu = rows[row, _GPU] + shared_s
    gpu_side = link + gpu
    ndp_side = rows[row, _NDP_LINK] + rows[row, _NDP]
    state[BUSY_LINK] = rows[row, _LINK] + rows[row, _LINK_AHEAD] + rows[row, _NDP_LINK]
    state[BUSY_GPU] = gpu
    state[BUSY_NDP] = rows[row, _NDP]
    on_gpu = 1.0
    on_ndp = 1.0
    if overlapped:
        state[TIME] = max(gpu_side, ndp_side)
        on_gpu = 1.0 if gpu_side >= ndp_side else 0.0
        on_ndp = 1.0 - on_gpu
    else:
        state[TIME] = gpu_side + ndp_side
    state[PATH_LINK] = on_gpu * link + on_ndp * rows[row, _NDP_LINK]
    state[PATH_GPU] = on_gpu * gpu
    state[PATH_NDP] = on_ndp * rows[row, _NDP]


@loop(
    "float64[:,::1](float64[::1], float64[:,::1], float64, float64, float64[:,::1], int64[::1], int64[::1],"
    " float64[::1], int64[::1], int64[::1], float64, boolean)"
)
def state_times(
    point,
    work,
    expert_params,
    hidden_size,
    matrices,
    row_offsets,
    row_work,
    row_count,
    state_row,
    state_before,
    shared_s,
    overlapped,
):
    """Time of every state at one hardware point [S, STATE_SIZE], in seconds; see the columns above.

    ``shared_s`` is the time of the shared experts of a layer on the GPU [s]; with ``overlapped`` the two sides
    run at the same time, else one after the other.
    """
    priced = np.empty((work.shape[0], 5))
    rows = np.empty((row_offsets.shape[0] - 1, 5))
    _price_work(point, work, expert_params, hidden_size, matrices, priced)
    _price_rows(priced, row_offsets, row_work, row_count, rows)
    states = np.empty((state_row.shape[0], STATE_SIZE))
    for s in range(state_row.shape[0]):
        _price_state(rows, state_row[s], state_before[s], shared_s, overlapped, states[s])
    return states


@loop(
    "float64[:,::1](float64[:,::1], float64[:,::1], float64, float64, float64[:,::1], int64[::1], int64[::1],"
    " float64[::1], int64[::1], int64[::1], float64[::1], boolean, float64[::1])"
)
def weighted_state_times(
    points,
    work,
    expert_params,
    hidden_size,
    matrices,
    row_offsets,
    row_work,
    row_count,
    state_row,
    state_before,
    shared_s,
    overlapped,
    weight,
):
    """Sum of all states, each times its ``weight`` [S], at every hardware point [N, STATE_SIZE].

    ``shared_s`` [N] is given per point; everything else as in `state_times`.
    """
    priced = np.empty((work.shape[0], 5))
    rows = np.empty((row_offsets.shape[0] - 1, 5))
    state = np.empty(STATE_SIZE)
    totals = np.zeros((points.shape[0], STATE_SIZE))
    for n in range(points.shape[0]):
        _price_work(points[n], work, expert_params, hidden_size, matrices, priced)
        _price_rows(priced, row_offsets, row_work, row_count, rows)
        for s in range(state_row.shape[0]):
            _price_state(rows, state_row[s], state_before[s], shared_s[n], overlapped, state)
            for c in range(STATE_SIZE):
                totals[n, c] += weight[s] * state[c]
    return totals


@loop("float64(float64[::1], float64)")
def copy_time(point, size):
    """Time of one copy of ``size`` bytes over the link of a hardware point [s]."""
    return _transfer_time1(size, point[LINK_BANDWIDTH], point[LINK_LATENCY], point[LINK_N_HALF])


@loop("float64[::1](float64[::1], int32[:,::1])")
def token_sums(state_time, state_id):
    """Sum of each token's states over its layers [T]; ``state_id`` [T, L] numbers the states."""
    sums = np.zeros(state_id.shape[0])
    for t in range(state_id.shape[0]):
        for layer in range(state_id.shape[1]):
            sums[t] += state_time[state_id[t, layer]]
    return sums


@loop("Tuple((int32[:,::1], int64[::1]))(uint8[:,:,::1], int64[::1], int64)")
def pick_rows(picks, digit, num_keys):
    """Number the distinct multisets of classes of all layers.

    Parameters
    ----------
    picks : uint8 [T, L, k], class of every pick; their order does not matter.
    digit : int64 [classes], what one pick of a class adds to the key of its layer: powers of k + 1, so that the
        digits of a key count the picks of each class.
    num_keys : above every key, the size of the table that is filled on the way; below 2**31.

    Returns
    -------
    row [T, L] : number of each token's and layer's multiset.
    keys [R] : key of each number, rising.
    """
    tokens, layers, width = picks.shape
    row = np.empty((tokens, layers), np.int32)
    place = np.full(num_keys, -1, np.int32)
    for t in range(tokens):
        for layer in range(layers):
            row[t, layer] = 0
            for j in range(width):
                row[t, layer] += digit[picks[t, layer, j]]
            place[row[t, layer]] = 0
    count = 0
    for key in range(num_keys):
        if place[key] == 0:
            place[key] = count
            count += 1
    keys = np.empty(count, np.int64)
    for key in range(num_keys):
        if place[key] >= 0:
            keys[place[key]] = key
    for t in range(tokens):
        for layer in range(layers):
            row[t, layer] = place[row[t, layer]]
    return row, keys
