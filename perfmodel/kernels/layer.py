"""The distinct states of a plan, timed on a block of hardware points.

Two layers whose picks fall in the same kinds of work equally often cost the same, wherever they stand in a trace.
So a plan is held as its different rows of (work, count) pairs. A state is such a row, together with the row of the
layer before it where some work is issued ahead or left behind. Weighting the states by how often they occur gives the
sums over the whole trace without any sampling. Sums run in a fixed order.

A layer has up to three sides. The GPU copies what it misses and computes, the near-data device gets activations,
computes and returns results, and the CPU computes from host memory. They work at the same time, or in turn. Most plans
need no more than that (the simple case). Otherwise

- copies and computing on the GPU may be pipelined: an expert computes when its copy is there and the GPU is free.
  With copies c and computing g in a fixed order, the residents' computing first, the GPU side ends after
  ``max_j(c_1 + ... + c_j + g_j + g_(j+1) + ...)`` or after all computing, whichever is later; within a run of equal
  experts the maximum is at one of the ends, because it is linear in between.
- copies issued ahead, and copies of the layer before that nobody waited for, share the link during the layer before
  and the attention in between, less the copies that layer waited for. What does not fit is exposed.
- experts that the layer before deferred run on the CPU after its others, beside the rest of that layer and the
  attention in between; they delay the CPU by what is longer.
- the host may take part: a round trip, and activations sent to the CPU and back, come before everything else.

The attention in between is that of a mean layer in the step at hand. So where something can be late, a state costs
another time at another context, and sums over a trace visit every step.

A state knows one layer back, so what a layer hides of the one before may be time that was needed already for what came
from two layers before. Work is not lost by being hidden: a decode step therefore lasts at least as long as the CPU
works for it, and as the link does, for copies that are waited for, ahead or behind and for activations to the CPU and
back. What a step is short of that goes to the busier of the two. Attention and operators count for the CPU where they
run there; on the GPU they may hide the work of both, and add nothing. No other bound is needed. The GPU computes, and
the near-data device works, within its side of the layer itself, and attention and operators are added in full, so a
step is never shorter than either. Activations of the near-data device do not contend with copies and are within its
side. Without work ahead or behind this holds for CPU and link as well, and nothing changes; so it does for a prefill.

Arrays
------
row_offsets, row_work, row_count : rows in compressed form; row r holds the entries
    ``row_offsets[r]:row_offsets[r + 1]``, each a number of ``work`` and how often it occurs.
row_host : float64 [R, 2], host round trips of a row, and tokens whose activations cross the link and come back.
state_row, state_before : int64 [S], row of the state and row of the layer before (-1: none).
how : int64 [HOW_SIZE], switches of the plan; the places are named below.
sums : float64 [SUMS, BLOCK], one state in the general case; the rows are named below.
attention_s : float64 [BLOCK], attention of a mean layer in the step at hand.
rows : float64 [N, COLUMNS, BLOCK], sums of the rows by column, see ``work.py``, and their pipelined ends.
"""

# The compiler infers the types of kernels.
# mypy: allow-untyped-defs

import numpy as np

from perfmodel.kernels._jit import loop, scalar
from perfmodel.kernels.block import BLOCK
from perfmodel.kernels.cpu import ACTIVATION_BYTES
from perfmodel.kernels.point import ROUND_TRIP
from perfmodel.kernels.work import (
    COPIED,
    CPU,
    CPU_BEHIND,
    EVERY,
    EXECUTOR,
    GPU,
    GPU_SIDE,
    LINK,
    LINK_AHEAD,
    LINK_BEHIND,
    NDP,
    NDP_LINK,
    NDP_SIDE,
    NOW,
    ON_CPU,
    ON_GPU_AFTER_FETCH,
    ON_NDP,
    PARTED,
    SIDES,
    WHEN,
    _one_way,
)

# Switches of a plan: sides at the same time, copies and computing pipelined, and what is on the CPU.
OVERLAPPED, PIPELINED, ATTENTION_ON_CPU, TRUNK_ON_CPU = range(4)
HOW_SIZE = 4

# Columns of host: round trips, and tokens whose activations cross.
TRIPS, CROSSING = range(2)

# Rows of a state in the general case: the host, activations there and back, the three sides by themselves, and by how
# much copies and the CPU are late before attention hides some of it (minus infinity where nothing can be late); then
# how long link and CPU work for the layer, whoever waits for it.
HOST_S, CROSSING_S, GPU_S, NEAR_S, CPU_S, COPIES_LATE, CPU_LATE, LINK_WORKS, CPU_WORKS = range(9)
SUMS = 9

# One more column of a row: when the last copied expert has computed, if copies and computing are pipelined.
_PIPED = EVERY
COLUMNS = EVERY + 1

# Columns of a priced state, all in seconds.
TIME = 0  # what the expert part adds to the layer
PATH_LINK, PATH_GPU, PATH_NDP, PATH_CPU, PATH_HOST = 1, 2, 3, 4, 5  # the same, split by what is on the critical path
BUSY_LINK, BUSY_GPU, BUSY_NDP, BUSY_CPU = 6, 7, 8, 9  # how long each part works, hidden or not
STATE_SIZE = 10


@scalar
def _looks_back(work):
    """Whether some work is not done in its own layer; only then does a state depend on the layer before."""
    found = False
    for a in range(work.shape[0]):
        found = found or work[a, WHEN] != NOW
    return found


@scalar
def _is_simple(work, row_host, how):
    """Whether a layer is no more than a GPU side and a near-data side."""
    simple = how[PIPELINED] == 0 and how[TRUNK_ON_CPU] == 0
    for a in range(work.shape[0]):
        simple = simple and work[a, WHEN] == NOW and work[a, EXECUTOR] != ON_CPU
    for n in range(row_host.shape[0]):
        simple = simple and row_host[n, TRIPS] == 0.0 and row_host[n, CROSSING] == 0.0
    return simple


@scalar
def _used_columns(simple, with_parts):
    """How many columns of the priced work are needed."""
    if not simple:
        return EVERY
    return PARTED if with_parts else SIDES


@scalar
def _new_rows(work, row_offsets):
    """Room for rows: all of them where some state looks back, else one that is summed where it is used."""
    return np.empty((row_offsets.shape[0] - 1 if _looks_back(work) else 1, COLUMNS, BLOCK))


@scalar
def _keep_rows(priced, work, row_offsets, row_work, row_count, used, piped, rows):
    """Sum all rows that states may look back to."""
    if _looks_back(work):
        for n in range(rows.shape[0]):
            _price_row(priced, work, row_offsets[n], row_offsets[n + 1], row_work, row_count, used, piped, rows, n)


@scalar
def _price_row(priced, work, first, last, row_work, row_count, used, piped, rows, at):
    """Fill ``rows[at]`` with the sum of the row's work, entries ``first`` to ``last`` [s]."""
    for c in range(used):
        for b in range(BLOCK):
            rows[at, c, b] = 0.0
    for i in range(first, last):
        a, count = row_work[i], row_count[i]
        if used == SIDES:
            # An expert works on one side only; the other column is zero.
            c = NDP_SIDE if work[a, EXECUTOR] == ON_NDP else GPU_SIDE
            for b in range(BLOCK):
                rows[at, c, b] += count * priced[a, c, b]
        else:
            for c in range(used):
                for b in range(BLOCK):
                    rows[at, c, b] += count * priced[a, c, b]
    if used == EVERY:
        for b in range(BLOCK):
            rows[at, _PIPED, b] = 0.0
        if piped:
            _pipeline(priced, work, first, last, row_work, row_count, rows, at)


@scalar
def _pipeline(priced, work, first, last, row_work, row_count, rows, at):
    """Fill the pipelined end of a row: the latest of all copies so far and all computing from there on [s]."""
    copied, left = np.zeros(BLOCK), np.zeros(BLOCK)
    for i in range(first, last):
        a = row_work[i]
        if work[a, EXECUTOR] == ON_GPU_AFTER_FETCH and work[a, WHEN] == NOW:
            for b in range(BLOCK):
                left[b] += row_count[i] * priced[a, GPU, b]
    for i in range(first, last):
        a, count = row_work[i], row_count[i]
        fetched = work[a, EXECUTOR] == ON_GPU_AFTER_FETCH
        if work[a, WHEN] == NOW and (fetched or work[a, EXECUTOR] == COPIED):
            one_of = min(1.0, count)  # the mean pass of a prefill may hold a part of an expert
            for b in range(BLOCK):
                copy, compute = one_of * priced[a, LINK, b], one_of * priced[a, GPU, b]
                one = copied[b] + copy + left[b]
                copied[b] += count * priced[a, LINK, b]
                left[b] -= count * priced[a, GPU, b]
                rows[at, _PIPED, b] = max(rows[at, _PIPED, b], one, copied[b] + compute + left[b])


@scalar
def _host_times(p, r, trips, crossing, hidden_size, sums):
    """Fill the host's part of a layer, and activations there and back."""
    for b in range(BLOCK):
        sums[HOST_S, b] = trips * p[ROUND_TRIP, b]
        sums[CROSSING_S, b] = 0.0
    if crossing != 0.0:
        _one_way(p, r, crossing * hidden_size * ACTIVATION_BYTES, sums[CROSSING_S])
        for b in range(BLOCK):
            sums[CROSSING_S, b] *= 2.0


@scalar
def _gpu_side(rows, at, how, shared_s, b):
    """Copies waited for, and computing, without what was issued ahead."""
    compute = rows[at, GPU, b] + (0.0 if how[TRUNK_ON_CPU] else shared_s[b])
    if how[PIPELINED]:
        return max(compute, rows[at, _PIPED, b])
    return rows[at, LINK, b] + compute


@scalar
def _cpu_side(rows, at, how, shared_s, b):
    """Computing on the CPU, without what the layer before deferred."""
    return rows[at, CPU, b] + (shared_s[b] if how[TRUNK_ON_CPU] else 0.0)


@scalar
def _together(how, gpu, near, cpu):
    """Three sides at the same time, or in turn."""
    return max(gpu, near, cpu) if how[OVERLAPPED] else gpu + near + cpu


@scalar
def _sum_state(p, r, rows, at, before, row_host, n, hidden_size, how, shared_s, sums):
    """Fill ``sums`` for the state of row ``n``, which stands at ``at``, after the row ``before``."""
    _host_times(p, r, row_host[n, TRIPS], row_host[n, CROSSING], hidden_size, sums)
    for b in range(BLOCK):
        sums[GPU_S, b] = _gpu_side(rows, at, how, shared_s, b)
        sums[NEAR_S, b] = rows[at, NDP_SIDE, b]
        sums[CPU_S, b] = _cpu_side(rows, at, how, shared_s, b)
        sums[COPIES_LATE, b] = sums[CPU_LATE, b] = -np.inf
        copied = rows[at, LINK, b] + rows[at, LINK_AHEAD, b] + rows[at, LINK_BEHIND, b]
        sums[LINK_WORKS, b] = copied + sums[CROSSING_S, b]
        sums[CPU_WORKS, b] = sums[CPU_S, b] + rows[at, CPU_BEHIND, b]
        if before < 0:
            sums[GPU_S, b] += rows[at, LINK_AHEAD, b]  # nothing hides it
        else:
            cpu = _cpu_side(rows, before, how, shared_s, b)
            sides = _together(how, _gpu_side(rows, before, how, shared_s, b), rows[before, NDP_SIDE, b], cpu)
            copies = rows[at, LINK_AHEAD, b] + rows[before, LINK_BEHIND, b]
            sums[COPIES_LATE, b] = copies - (sides - rows[before, LINK, b])
            sums[CPU_LATE, b] = cpu + rows[before, CPU_BEHIND, b] - sides


@scalar
def _sides(sums, attention_s, b):
    """GPU, near-data device and CPU with what is late of the layer before."""
    gpu = sums[GPU_S, b] + max(0.0, sums[COPIES_LATE, b] - attention_s[b])
    return gpu, sums[NEAR_S, b], sums[CPU_S, b] + max(0.0, sums[CPU_LATE, b] - attention_s[b])


@scalar
def _state_time(sums, how, attention_s, time):
    """Fill ``time`` [BLOCK], what a layer's expert part takes in the general case."""
    for b in range(BLOCK):
        gpu, near, cpu = _sides(sums, attention_s, b)
        time[b] = sums[HOST_S, b] + sums[CROSSING_S, b] + _together(how, gpu, near, cpu)


@scalar
def _short_of(sums, token_state, token_count, first, last, how, attention_s, around_s, step_s, link_s, cpu_s):
    """Fill ``link_s`` and ``cpu_s`` [BLOCK]: what a step lacks of the work of the busier one; 0 for the other.

    sums : float64 [S, SUMS, BLOCK], all states; those of the step are ``token_state[first:last]``, as often as
    ``token_count`` says. attention_s, around_s : its attention, and the operators around the layers. step_s : its sum.
    """
    for b in range(BLOCK):
        link_s[b] = 0.0
        cpu_s[b] = (attention_s[b] if how[ATTENTION_ON_CPU] else 0.0) + (around_s[b] if how[TRUNK_ON_CPU] else 0.0)
    for i in range(first, last):
        s, count = token_state[i], token_count[i]
        for b in range(BLOCK):
            link_s[b] += count * sums[s, LINK_WORKS, b]
            cpu_s[b] += count * sums[s, CPU_WORKS, b]
    for b in range(BLOCK):
        link, cpu = link_s[b] - step_s[b], cpu_s[b] - step_s[b]
        link_s[b] = link if link > 0.0 and link > cpu else 0.0
        cpu_s[b] = cpu if cpu > 0.0 and cpu >= link else 0.0


@scalar
def _simple_time(rows, at, how, shared_s, time):
    """Fill ``time`` [BLOCK], what a layer's expert part takes in the simple case."""
    if how[OVERLAPPED]:
        for b in range(BLOCK):
            time[b] = max(rows[at, GPU_SIDE, b] + shared_s[b], rows[at, NDP_SIDE, b])
    else:
        for b in range(BLOCK):
            time[b] = rows[at, GPU_SIDE, b] + shared_s[b] + rows[at, NDP_SIDE, b]


@scalar
def _add_simple_parts(rows, at, how, shared_s, weight, totals):
    """Add the other columns of a simple state, times ``weight``, to ``totals`` [STATE_SIZE, BLOCK]."""
    for b in range(BLOCK):
        gpu = rows[at, GPU, b] + shared_s[b]
        gpu_first = rows[at, GPU_SIDE, b] + shared_s[b] >= rows[at, NDP_SIDE, b]
        on_gpu = 1.0 if not how[OVERLAPPED] or gpu_first else 0.0
        on_ndp = 1.0 if not how[OVERLAPPED] or not gpu_first else 0.0
        totals[PATH_LINK, b] += weight * (on_gpu * rows[at, LINK, b] + on_ndp * rows[at, NDP_LINK, b])
        totals[PATH_GPU, b] += weight * (on_gpu * gpu)
        totals[PATH_NDP, b] += weight * (on_ndp * rows[at, NDP, b])
        totals[BUSY_LINK, b] += weight * (rows[at, LINK, b] + rows[at, NDP_LINK, b])
        totals[BUSY_GPU, b] += weight * gpu
        totals[BUSY_NDP, b] += weight * rows[at, NDP, b]


@scalar
def _add_parts(rows, at, how, shared_s, attention_s, sums, weight, totals):
    """Add the other columns of a state in the general case, times ``weight``, to ``totals`` [STATE_SIZE, BLOCK].

    Of sides at the same time the longest is on the critical path; of equals the GPU's, then the near-data one.
    """
    for b in range(BLOCK):
        shared_gpu = 0.0 if how[TRUNK_ON_CPU] else shared_s[b]
        compute = rows[at, GPU, b] + shared_gpu
        gpu, near, cpu = _sides(sums, attention_s, b)
        in_turn = how[OVERLAPPED] == 0
        on_gpu = 1.0 if in_turn or (gpu >= near and gpu >= cpu) else 0.0
        on_ndp = 1.0 if in_turn or (gpu < near and near >= cpu) else 0.0
        on_cpu = 1.0 if in_turn or (gpu < cpu and near < cpu) else 0.0
        link = on_gpu * (gpu - compute) + on_ndp * rows[at, NDP_LINK, b]
        totals[PATH_LINK, b] += weight * (sums[CROSSING_S, b] + link)
        totals[PATH_GPU, b] += weight * (on_gpu * compute)
        totals[PATH_NDP, b] += weight * (on_ndp * rows[at, NDP, b])
        totals[PATH_CPU, b] += weight * (on_cpu * cpu)
        totals[PATH_HOST, b] += weight * sums[HOST_S, b]
        copies = rows[at, LINK, b] + rows[at, LINK_AHEAD, b] + rows[at, LINK_BEHIND, b]
        totals[BUSY_LINK, b] += weight * (copies + rows[at, NDP_LINK, b] + sums[CROSSING_S, b])
        totals[BUSY_GPU, b] += weight * compute
        totals[BUSY_NDP, b] += weight * rows[at, NDP, b]
        on_host = rows[at, CPU, b] + rows[at, CPU_BEHIND, b] + (shared_s[b] - shared_gpu)
        totals[BUSY_CPU, b] += weight * on_host


@scalar
def _place_row(priced, work, row_offsets, row_work, row_count, n, used, piped, rows):
    """Where in ``rows`` row ``n`` stands, summed now unless all rows are kept."""
    if _looks_back(work):
        return n
    _price_row(priced, work, row_offsets[n], row_offsets[n + 1], row_work, row_count, used, piped, rows, 0)
    return 0


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
