"""Price a plan at many hardware points: means over a trace, the times of its tokens, percentiles, and prefills.

The three kernels below are all that evaluates a plan, whether for one point or for a million.

Arrays
------
base, places, values : hardware points, see ``block.py``. Dataflow and precision scaling must not vary.
attention, operators : what surrounds the experts, see ``front.py``. The operators are router, dense layers, LM head
    and, in the last row, the shared experts of one layer. Overheads of a layer count ``num_layers`` times, unless the
    CPU runs all but the experts.
work ... state_before : the states of the plan, see ``layer.py``.
how : switches of the plan, see ``layer.py``.
"""

# The compiler infers the types of kernels.
# mypy: allow-untyped-defs

import numpy as np

from perfmodel.kernels._jit import loop, scalar
from perfmodel.kernels.block import BLOCK, RECIPROCALS, _fill_block, _load_block
from perfmodel.kernels.front import (
    LINES,
    RATES,
    _attention_at,
    _attention_sum,
    _context_lines,
    _fill_rates,
    _operator_times,
    _prefill_attention,
    _sum_contexts,
)
from perfmodel.kernels.layer import (
    ATTENTION_ON_CPU,
    PIPELINED,
    STATE_SIZE,
    TIME,
    TRUNK_ON_CPU,
    WAITS,
    _add_parts,
    _add_simple_parts,
    _is_simple,
    _keep_rows,
    _new_rows,
    _price_state,
    _used_columns,
)
from perfmodel.kernels.link import _transfer_time1
from perfmodel.kernels.order import _order_statistics
from perfmodel.kernels.point import COPY_OVERHEAD, LAYER_OVERHEAD, LINK_BANDWIDTH, LINK_LATENCY, LINK_N_HALF
from perfmodel.kernels.work import EVERY, _price_work

# Rows of the result of `token_means`.
TOTAL, ATTENTION, ROUTER, DENSE, HEAD, OVERHEAD = range(6)
STATE = 6  # first of STATE_SIZE rows, the columns of a state
MEANS = STATE + STATE_SIZE
#: Numbers between the steps of two points, so that they do not all fall into the same place of a cache.
PAD = 8
SHARED = 3  # the operator of the shared experts

_POINTS = "float64[::1], int64[::1], float64[:,::1]"
_STATES = (
    "float64[:,::1], float64, float64, float64[:,::1], int64[::1], int64[::1], float64[::1], float64[:,::1],"
    " int64[::1], int64[::1], int64[::1]"
)


@loop(
    f"float64[:,::1]({_POINTS}, float64[:,::1], float64[:,::1], float64, {_STATES}, float64[::1], float64[::1],"
    " float64[::1], float64, boolean)"
)
def token_means(
    base,
    places,
    values,
    attention,
    operators,
    num_layers,
    work,
    expert_params,
    hidden_size,
    matrices,
    row_offsets,
    row_work,
    row_count,
    row_host,
    state_row,
    state_before,
    how,
    state_weight,
    contexts,
    context_weight,
    num_tokens,
    with_parts,
):
    """Mean decode step over a trace at every point [1 or MEANS, N] [s]: TOTAL alone, or with its parts.

    ``state_weight`` [S] and ``context_weight`` [C] say how often each state and each of ``contexts`` [C] tokens
    occurs among the ``num_tokens`` steps.
    """
    num_points = values.shape[1]
    means = np.empty((MEANS if with_parts else 1, num_points))
    p, r = np.empty((base.shape[0], BLOCK)), np.empty((RECIPROCALS, BLOCK))
    lines = np.empty((attention.shape[0], LINES, BLOCK))
    seen = _sum_contexts(contexts, context_weight, attention)
    attention_s, crossing, one = np.empty(BLOCK), np.empty(BLOCK), np.empty(BLOCK)
    fixed = np.empty((operators.shape[0], BLOCK))
    shared = fixed[SHARED]
    simple = _is_simple(work, row_host, how)
    used = _used_columns(simple, with_parts)
    priced, rows = np.empty((work.shape[0], EVERY, BLOCK)), _new_rows(work, row_offsets)
    between, rates, waits = np.empty(BLOCK), np.empty((RATES, BLOCK)), np.empty((WAITS, BLOCK))
    time, totals = np.empty(BLOCK), np.empty((STATE_SIZE, BLOCK))
    overheads = 0.0 if how[TRUNK_ON_CPU] else num_layers
    per_token = 1.0 / num_tokens
    _fill_block(base, p, r)
    for start in range(0, num_points, BLOCK):
        count = _load_block(places, values, start, p, r)
        _fill_rates(p, r, how[ATTENTION_ON_CPU], rates)
        _context_lines(rates, attention, lines)
        _attention_sum(lines, attention, contexts, context_weight, seen, crossing, one, attention_s)
        _attention_between(lines, attention, num_layers, between)
        _fill_rates(p, r, how[TRUNK_ON_CPU], rates)
        _operator_times(rates, operators, fixed)
        _price_work(p, r, work, expert_params, hidden_size, matrices, used, priced)
        _keep_rows(priced, work, row_offsets, row_work, row_count, used, how[PIPELINED], rows)
        for c in range(STATE_SIZE):
            for b in range(BLOCK):
                totals[c, b] = 0.0
        for s in range(state_row.shape[0]):
            weight = state_weight[s]
            at = _price_state(
                p,
                r,
                priced,
                work,
                row_offsets,
                row_work,
                row_count,
                row_host,
                hidden_size,
                state_row[s],
                state_before[s],
                how,
                shared,
                between,
                simple,
                used,
                rows,
                waits,
                time,
            )
            for b in range(BLOCK):
                totals[TIME, b] += weight * time[b]
            if with_parts:
                if simple:
                    _add_simple_parts(rows, at, how, shared, weight, totals)
                else:
                    _add_parts(rows, at, how, shared, waits, weight, totals)
        for b in range(count):
            around = fixed[0, b] + fixed[1, b] + fixed[2, b] + overheads * p[LAYER_OVERHEAD, b]
            means[TOTAL, start + b] = around + (attention_s[b] + totals[TIME, b]) * per_token
        if with_parts:
            for b in range(count):
                means[ATTENTION, start + b] = attention_s[b] * per_token
                means[ROUTER, start + b] = fixed[0, b]
                means[DENSE, start + b] = fixed[1, b]
                means[HEAD, start + b] = fixed[2, b]
                means[OVERHEAD, start + b] = overheads * p[LAYER_OVERHEAD, b]
            for c in range(STATE_SIZE):
                for b in range(count):
                    means[STATE + c, start + b] = totals[c, b] * per_token
    return means


@scalar
def _attention_between(lines, attention, num_layers, between):
    """Fill ``between`` [BLOCK]: attention of a mean layer to a single token [s]."""
    for b in range(BLOCK):
        between[b] = 0.0
    _attention_at(lines, attention, 1.0, between)
    for b in range(BLOCK):
        between[b] /= num_layers


@scalar
def _token_block(lines, attention, fixed, overhead, contexts, token_offsets, token_state, token_count, states, tokens):
    """Fill ``tokens`` [BLOCK, T] with the time of every decode step, from the times of the states [S, BLOCK]."""
    total = np.empty(BLOCK)
    for t in range(contexts.shape[0]):
        for b in range(BLOCK):
            total[b] = fixed[0, b] + fixed[1, b] + fixed[2, b] + overhead[b]
        _attention_at(lines, attention, contexts[t], total)
        for i in range(token_offsets[t], token_offsets[t + 1]):
            s, count = token_state[i], token_count[i]
            for b in range(BLOCK):
                total[b] += count * states[s, b]
        for b in range(BLOCK):
            tokens[b, t] = total[b]


@loop(
    f"float64[:,::1]({_POINTS}, float64[:,::1], float64[:,::1], float64, {_STATES}, float64[::1], int64[::1],"
    " int32[::1], float64[::1], int64[::1], float64[::1])"
)
def token_percentiles(
    base,
    places,
    values,
    attention,
    operators,
    num_layers,
    work,
    expert_params,
    hidden_size,
    matrices,
    row_offsets,
    row_work,
    row_count,
    row_host,
    state_row,
    state_before,
    how,
    contexts,
    token_offsets,
    token_state,
    token_count,
    rank,
    fraction,
):
    """Percentiles of the time of a decode step at every point [Q, N] [s]; without any, all times [T, N].

    Step t sees ``contexts[t]`` tokens, and its layers are in the states ``token_state[i]``, ``token_count[i]`` of them
    each, for i from ``token_offsets[t]`` to ``token_offsets[t + 1]``. A percentile lies the ``fraction`` of the way
    from the step of ``rank`` in rising order to the next one, interpolated as NumPy does.
    """
    num_points, num_tokens, num_ranks = values.shape[1], contexts.shape[0], rank.shape[0]
    found = np.empty((num_ranks if num_ranks > 0 else num_tokens, num_points))
    p, r = np.empty((base.shape[0], BLOCK)), np.empty((RECIPROCALS, BLOCK))
    lines = np.empty((attention.shape[0], LINES, BLOCK))
    fixed, overhead = np.empty((operators.shape[0], BLOCK)), np.empty(BLOCK)
    shared = fixed[SHARED]
    simple = _is_simple(work, row_host, how)
    used = _used_columns(simple, False)
    priced, rows = np.empty((work.shape[0], EVERY, BLOCK)), _new_rows(work, row_offsets)
    between, rates, waits = np.empty(BLOCK), np.empty((RATES, BLOCK)), np.empty((WAITS, BLOCK))
    overheads = 0.0 if how[TRUNK_ON_CPU] else num_layers
    states, tokens = np.empty((state_row.shape[0], BLOCK)), np.empty((BLOCK, num_tokens + PAD))
    _fill_block(base, p, r)
    for start in range(0, num_points, BLOCK):
        count = _load_block(places, values, start, p, r)
        _fill_rates(p, r, how[ATTENTION_ON_CPU], rates)
        _context_lines(rates, attention, lines)
        _attention_between(lines, attention, num_layers, between)
        _fill_rates(p, r, how[TRUNK_ON_CPU], rates)
        _operator_times(rates, operators, fixed)
        for b in range(BLOCK):
            overhead[b] = overheads * p[LAYER_OVERHEAD, b]
        _price_work(p, r, work, expert_params, hidden_size, matrices, used, priced)
        _keep_rows(priced, work, row_offsets, row_work, row_count, used, how[PIPELINED], rows)
        for s in range(state_row.shape[0]):
            _price_state(
                p,
                r,
                priced,
                work,
                row_offsets,
                row_work,
                row_count,
                row_host,
                hidden_size,
                state_row[s],
                state_before[s],
                how,
                shared,
                between,
                simple,
                used,
                rows,
                waits,
                states[s],
            )
        _token_block(
            lines, attention, fixed, overhead, contexts, token_offsets, token_state, token_count, states, tokens
        )
        for b in range(count):
            if num_ranks > 0:
                _order_statistics(tokens[b, :num_tokens], rank, fraction, found, start + b)
            else:
                for t in range(num_tokens):
                    found[t, start + b] = tokens[b, t]
    return found


@loop(f"float64[:,::1]({_POINTS}, float64[:,::1], float64[:,:,::1], float64, {_STATES}, int64[::1], float64[::1])")
def prefill_times(
    base,
    places,
    values,
    attention,
    operators,
    num_layers,
    work,
    expert_params,
    hidden_size,
    matrices,
    row_offsets,
    row_work,
    row_count,
    row_host,
    state_row,
    state_before,
    how,
    state_offsets,
    prompts,
):
    """Time of the prefill of every sequence at every point [G, N] [s].

    Sequence g has ``prompts[g]`` tokens, its own ``operators[g]``, and the states from ``state_offsets[g]`` to
    ``state_offsets[g + 1]``, one a layer.
    """
    num_points, sequences = values.shape[1], prompts.shape[0]
    times = np.empty((sequences, num_points))
    p, r = np.empty((base.shape[0], BLOCK)), np.empty((RECIPROCALS, BLOCK))
    simple = _is_simple(work, row_host, how)
    used = _used_columns(simple, False)
    priced, rows = np.empty((work.shape[0], EVERY, BLOCK)), _new_rows(work, row_offsets)
    fixed = np.empty((operators.shape[1], BLOCK))
    shared = fixed[SHARED]
    between, rates, waits = np.zeros(BLOCK), np.empty((RATES, BLOCK)), np.empty((WAITS, BLOCK))
    time, total = np.empty(BLOCK), np.empty(BLOCK)
    overheads = 0.0 if how[TRUNK_ON_CPU] else num_layers
    _fill_block(base, p, r)
    for start in range(0, num_points, BLOCK):
        count = _load_block(places, values, start, p, r)
        _price_work(p, r, work, expert_params, hidden_size, matrices, used, priced)
        _keep_rows(priced, work, row_offsets, row_work, row_count, used, how[PIPELINED], rows)
        for g in range(sequences):
            _fill_rates(p, r, how[ATTENTION_ON_CPU], rates)
            _prefill_attention(rates, attention, prompts[g], total)
            _fill_rates(p, r, how[TRUNK_ON_CPU], rates)
            _operator_times(rates, operators[g], fixed)
            for b in range(BLOCK):
                total[b] += fixed[0, b] + fixed[1, b] + fixed[2, b] + overheads * p[LAYER_OVERHEAD, b]
            for s in range(state_offsets[g], state_offsets[g + 1]):
                _price_state(
                    p,
                    r,
                    priced,
                    work,
                    row_offsets,
                    row_work,
                    row_count,
                    row_host,
                    hidden_size,
                    state_row[s],
                    state_before[s],
                    how,
                    shared,
                    between,
                    simple,
                    used,
                    rows,
                    waits,
                    time,
                )
                for b in range(BLOCK):
                    total[b] += time[b]
            for b in range(count):
                times[g, start + b] = total[b]
    return times


@loop(f"float64[::1]({_POINTS}, float64)")
def copy_times(base, places, values, size):
    """Time of one copy of ``size`` bytes over the link at every point [N] [s]."""
    times = np.empty(values.shape[1])
    point = base.copy()
    for n in range(values.shape[1]):
        for v in range(places.shape[0]):
            point[places[v]] = values[v, n]
        latency_s = point[LINK_LATENCY] + point[COPY_OVERHEAD]
        times[n] = _transfer_time1(size, point[LINK_BANDWIDTH], latency_s, point[LINK_N_HALF])
    return times


@loop(f"float64[:,:,::1]({_POINTS}, float64[:,::1], float64, float64, float64[:,::1])")
def work_times(base, places, values, work, expert_params, hidden_size, matrices):
    """Time of each kind of work at every point, by where it is spent, see ``work.py`` [A, EVERY, N] [s]."""
    num_points = values.shape[1]
    times = np.empty((work.shape[0], EVERY, num_points))
    p, r = np.empty((base.shape[0], BLOCK)), np.empty((RECIPROCALS, BLOCK))
    priced = np.empty((work.shape[0], EVERY, BLOCK))
    _fill_block(base, p, r)
    for start in range(0, num_points, BLOCK):
        count = _load_block(places, values, start, p, r)
        _price_work(p, r, work, expert_params, hidden_size, matrices, EVERY, priced)
        for a in range(work.shape[0]):
            for c in range(EVERY):
                for b in range(count):
                    times[a, c, start + b] = priced[a, c, b]
    return times
