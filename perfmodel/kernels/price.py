"""Price a plan at many hardware points: means over a trace, the times of its tokens, percentiles, and prefills.

The three kernels below are all that evaluates a plan, whether for one point or for a million.

Arrays
------
base, places, values : hardware points, see ``block.py``. Dataflow and precision scaling must not vary.
attention, operators, counts : what surrounds the experts, see ``front.py``. The operators are router, dense layers,
    LM head and, in the last row, the shared experts of one layer. Fixed times count unless the CPU runs all but the
    experts.
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
    _fixed_times,
    _operator_times,
    _prefill_attention,
    _sum_contexts,
)
from perfmodel.kernels.layer import (
    ATTENTION_ON_CPU,
    PATH_CPU,
    PATH_LINK,
    PIPELINED,
    STATE_SIZE,
    SUMS,
    TIME,
    TRUNK_ON_CPU,
    _add_parts,
    _add_simple_parts,
    _is_simple,
    _keep_rows,
    _looks_back,
    _new_rows,
    _place_row,
    _short_of,
    _simple_time,
    _state_time,
    _sum_state,
    _used_columns,
)
from perfmodel.kernels.link import _transfer_time1
from perfmodel.kernels.order import _order_statistics
from perfmodel.kernels.point import COPY_OVERHEAD, LINK_BANDWIDTH, LINK_LATENCY, LINK_N_HALF
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


@scalar
def _mean_attention(lines, attention, context, num_layers, attention_s):
    """Fill ``attention_s`` [BLOCK]: attention of a mean layer at one context [s]."""
    for b in range(BLOCK):
        attention_s[b] = 0.0
    _attention_at(lines, attention, context, attention_s)
    for b in range(BLOCK):
        attention_s[b] /= num_layers


@scalar
def _fill_states(
    p, r, priced, work, row_offsets, row_work, row_count, row_host, hidden_size, state_row, state_before, how, shared,
    used, rows, sums,
):  # fmt: skip
    """Fill ``sums`` [S, SUMS, BLOCK] with every state in the general case."""
    kept = _looks_back(work)
    for s in range(state_row.shape[0]):
        n = state_row[s]
        at = _place_row(priced, work, row_offsets, row_work, row_count, n, used, how[PIPELINED], rows)
        before = state_before[s] if kept else -1
        _sum_state(p, r, rows, at, before, row_host, n, hidden_size, how, shared, sums[s])


@loop(
    f"float64[:,::1]({_POINTS}, float64[:,::1], float64[:,::1], float64[::1], float64, {_STATES}, float64[::1],"
    " float64[::1], float64[::1], float64, int64[::1], int32[::1], float64[::1], boolean)"
)
def token_means(
    base,
    places,
    values,
    attention,
    operators,
    counts,
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
    token_offsets,
    token_state,
    token_count,
    with_parts,
):
    """Mean decode step over a trace at every point [1 or MEANS, N] [s]: TOTAL alone, or with its parts.

    ``state_weight`` [S] and ``context_weight`` [C] say how often each state and each of ``contexts`` [C] tokens
    occurs among the ``num_tokens`` steps. Only where states look back, every step counts: then there is a context a
    step, and ``token_offsets`` to ``token_count`` are those of `token_percentiles`.
    """
    num_points = values.shape[1]
    means = np.empty((MEANS if with_parts else 1, num_points))
    p, r = np.empty((base.shape[0], BLOCK)), np.empty((RECIPROCALS, BLOCK))
    lines, rates = np.empty((attention.shape[0], LINES, BLOCK)), np.empty((RATES, BLOCK))
    seen = _sum_contexts(contexts, context_weight, attention)
    attention_s, crossing, one = np.empty(BLOCK), np.empty(BLOCK), np.empty(BLOCK)
    fixed = np.empty((operators.shape[0], BLOCK))
    shared = fixed[SHARED]
    simple, looks_back = _is_simple(work, row_host, how), _looks_back(work)
    used = _used_columns(simple, with_parts)
    priced, rows = np.empty((work.shape[0], EVERY, BLOCK)), _new_rows(work, row_offsets)
    sums = np.empty((state_row.shape[0] if looks_back else 1, SUMS, BLOCK))
    between, time, totals = np.zeros(BLOCK), np.empty(BLOCK), np.empty((STATE_SIZE, BLOCK))
    overhead, around, step, attend = np.zeros(BLOCK), np.empty(BLOCK), np.empty(BLOCK), np.empty(BLOCK)
    link, cpu = np.empty(BLOCK), np.empty(BLOCK)
    per_token = 1.0 / num_tokens
    _fill_block(base, p, r)
    for start in range(0, num_points, BLOCK):
        count = _load_block(places, values, start, p, r)
        _fill_rates(p, r, how[ATTENTION_ON_CPU], rates)
        _context_lines(rates, attention, lines)
        _attention_sum(lines, attention, contexts, context_weight, seen, crossing, one, attention_s)
        _fill_rates(p, r, how[TRUNK_ON_CPU], rates)
        _operator_times(rates, operators, fixed)
        if how[TRUNK_ON_CPU] == 0:
            _fixed_times(p, counts, overhead)
        _price_work(p, r, work, expert_params, hidden_size, matrices, used, priced)
        _keep_rows(priced, work, row_offsets, row_work, row_count, used, how[PIPELINED], rows)
        for b in range(BLOCK):
            around[b] = fixed[0, b] + fixed[1, b] + fixed[2, b] + overhead[b]
        for c in range(STATE_SIZE):
            for b in range(BLOCK):
                totals[c, b] = 0.0
        if looks_back:
            _fill_states(
                p, r, priced, work, row_offsets, row_work, row_count, row_host, hidden_size, state_row, state_before,
                how, shared, used, rows, sums,
            )  # fmt: skip
            for t in range(contexts.shape[0]):
                first, last = token_offsets[t], token_offsets[t + 1]
                _mean_attention(lines, attention, contexts[t], num_layers, between)
                for b in range(BLOCK):
                    attend[b] = num_layers * between[b]
                    step[b] = around[b] + attend[b]
                for i in range(first, last):
                    s, weight = token_state[i], token_count[i]
                    _state_time(sums[s], how, between, time)
                    for b in range(BLOCK):
                        step[b] += weight * time[b]
                        totals[TIME, b] += weight * time[b]
                    if with_parts:
                        _add_parts(rows, state_row[s], how, shared, between, sums[s], weight, totals)
                _short_of(sums, token_state, token_count, first, last, how, attend, around, step, link, cpu)
                for b in range(BLOCK):
                    totals[TIME, b] += link[b] + cpu[b]
                    totals[PATH_LINK, b] += link[b]
                    totals[PATH_CPU, b] += cpu[b]
        else:
            for s in range(state_row.shape[0]):
                n, weight = state_row[s], state_weight[s]
                at = _place_row(priced, work, row_offsets, row_work, row_count, n, used, how[PIPELINED], rows)
                if simple:
                    _simple_time(rows, at, how, shared, time)
                else:
                    _sum_state(p, r, rows, at, -1, row_host, n, hidden_size, how, shared, sums[0])
                    _state_time(sums[0], how, between, time)
                for b in range(BLOCK):
                    totals[TIME, b] += weight * time[b]
                if with_parts:
                    if simple:
                        _add_simple_parts(rows, at, how, shared, weight, totals)
                    else:
                        _add_parts(rows, at, how, shared, between, sums[0], weight, totals)
        for b in range(count):
            means[TOTAL, start + b] = around[b] + (attention_s[b] + totals[TIME, b]) * per_token
        if with_parts:
            for b in range(count):
                means[ATTENTION, start + b] = attention_s[b] * per_token
                means[ROUTER, start + b] = fixed[0, b]
                means[DENSE, start + b] = fixed[1, b]
                means[HEAD, start + b] = fixed[2, b]
                means[OVERHEAD, start + b] = overhead[b]
            for c in range(STATE_SIZE):
                for b in range(count):
                    means[STATE + c, start + b] = totals[c, b] * per_token
    return means


@scalar
def _token_block(
    lines, attention, num_layers, how, fixed, overhead, contexts, token_offsets, token_state, token_count, simple,
    looks_back, states, sums, tokens,
):  # fmt: skip
    """Fill ``tokens`` [BLOCK, T] with the time of every decode step, from its states.

    states : float64 [S, BLOCK], their times in the simple case. sums : float64 [S, SUMS, BLOCK], else.
    """
    total, between, time = np.empty(BLOCK), np.empty(BLOCK), np.empty(BLOCK)
    around, attend, link, cpu = np.empty(BLOCK), np.empty(BLOCK), np.empty(BLOCK), np.empty(BLOCK)
    for b in range(BLOCK):
        around[b] = fixed[0, b] + fixed[1, b] + fixed[2, b] + overhead[b]
    for t in range(contexts.shape[0]):
        first, last = token_offsets[t], token_offsets[t + 1]
        for b in range(BLOCK):
            total[b] = around[b]
        _attention_at(lines, attention, contexts[t], total)
        if simple:
            for i in range(first, last):
                s, count = token_state[i], token_count[i]
                for b in range(BLOCK):
                    total[b] += count * states[s, b]
        else:
            _mean_attention(lines, attention, contexts[t], num_layers, between)
            for i in range(first, last):
                s, count = token_state[i], token_count[i]
                _state_time(sums[s], how, between, time)
                for b in range(BLOCK):
                    total[b] += count * time[b]
        if looks_back:
            for b in range(BLOCK):
                attend[b] = num_layers * between[b]
            _short_of(sums, token_state, token_count, first, last, how, attend, around, total, link, cpu)
            for b in range(BLOCK):
                total[b] += link[b] + cpu[b]
        for b in range(BLOCK):
            tokens[b, t] = total[b]


@loop(
    f"float64[:,::1]({_POINTS}, float64[:,::1], float64[:,::1], float64[::1], float64, {_STATES}, float64[::1],"
    " int64[::1], int32[::1], float64[::1], int64[::1], float64[::1])"
)
def token_percentiles(
    base,
    places,
    values,
    attention,
    operators,
    counts,
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
    fixed, overhead = np.empty((operators.shape[0], BLOCK)), np.zeros(BLOCK)
    shared = fixed[SHARED]
    simple = _is_simple(work, row_host, how)
    used = _used_columns(simple, False)
    priced, rows = np.empty((work.shape[0], EVERY, BLOCK)), _new_rows(work, row_offsets)
    rates, sums = np.empty((RATES, BLOCK)), np.empty((0 if simple else state_row.shape[0], SUMS, BLOCK))
    states, tokens = np.empty((state_row.shape[0] if simple else 0, BLOCK)), np.empty((BLOCK, num_tokens + PAD))
    _fill_block(base, p, r)
    for start in range(0, num_points, BLOCK):
        count = _load_block(places, values, start, p, r)
        _fill_rates(p, r, how[ATTENTION_ON_CPU], rates)
        _context_lines(rates, attention, lines)
        _fill_rates(p, r, how[TRUNK_ON_CPU], rates)
        _operator_times(rates, operators, fixed)
        if how[TRUNK_ON_CPU] == 0:
            _fixed_times(p, counts, overhead)
        _price_work(p, r, work, expert_params, hidden_size, matrices, used, priced)
        _keep_rows(priced, work, row_offsets, row_work, row_count, used, how[PIPELINED], rows)
        if simple:
            for s in range(state_row.shape[0]):
                n = state_row[s]
                at = _place_row(priced, work, row_offsets, row_work, row_count, n, used, how[PIPELINED], rows)
                _simple_time(rows, at, how, shared, states[s])
        else:
            _fill_states(
                p, r, priced, work, row_offsets, row_work, row_count, row_host, hidden_size, state_row, state_before,
                how, shared, used, rows, sums,
            )  # fmt: skip
        _token_block(
            lines, attention, num_layers, how, fixed, overhead, contexts, token_offsets, token_state, token_count,
            simple, _looks_back(work), states, sums, tokens,
        )  # fmt: skip
        for b in range(count):
            if num_ranks > 0:
                _order_statistics(tokens[b, :num_tokens], rank, fraction, found, start + b)
            else:
                for t in range(num_tokens):
                    found[t, start + b] = tokens[b, t]
    return found


@loop(
    f"float64[:,::1]({_POINTS}, float64[:,::1], float64[:,:,::1], float64[:,::1], float64, {_STATES}, int64[::1],"
    " float64[::1], float64[::1], float64[::1])"
)
def prefill_times(
    base,
    places,
    values,
    attention,
    operators,
    counts,
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
    lengths,
    prompts,
    passes,
):
    """Time of every prefill at every point [G, N] [s].

    Prefill g has ``prompts[g]`` prompts of ``lengths[g]`` tokens each, its own ``operators[g]`` and ``counts[g]``, and
    the states from ``state_offsets[g]`` to ``state_offsets[g + 1]``, one a layer. No state of a prefill looks back.
    Attention reads its weights in each of ``passes[g]`` passes; operators, counts and states are those of all passes.
    """
    num_points, sequences = values.shape[1], lengths.shape[0]
    times = np.empty((sequences, num_points))
    p, r = np.empty((base.shape[0], BLOCK)), np.empty((RECIPROCALS, BLOCK))
    simple = _is_simple(work, row_host, how)
    used = _used_columns(simple, False)
    priced, rows = np.empty((work.shape[0], EVERY, BLOCK)), _new_rows(work, row_offsets)
    fixed = np.empty((operators.shape[1], BLOCK))
    shared = fixed[SHARED]
    rates, sums = np.empty((RATES, BLOCK)), np.empty((SUMS, BLOCK))
    hidden, time, total, overhead = np.zeros(BLOCK), np.empty(BLOCK), np.empty(BLOCK), np.zeros(BLOCK)
    _fill_block(base, p, r)
    for start in range(0, num_points, BLOCK):
        count = _load_block(places, values, start, p, r)
        _price_work(p, r, work, expert_params, hidden_size, matrices, used, priced)
        _keep_rows(priced, work, row_offsets, row_work, row_count, used, how[PIPELINED], rows)
        for g in range(sequences):
            _fill_rates(p, r, how[ATTENTION_ON_CPU], rates)
            _prefill_attention(rates, attention, lengths[g], prompts[g], passes[g], total)
            _fill_rates(p, r, how[TRUNK_ON_CPU], rates)
            _operator_times(rates, operators[g], fixed)
            if how[TRUNK_ON_CPU] == 0:
                _fixed_times(p, counts[g], overhead)
            for b in range(BLOCK):
                total[b] += fixed[0, b] + fixed[1, b] + fixed[2, b] + overhead[b]
            for s in range(state_offsets[g], state_offsets[g + 1]):
                n = state_row[s]
                at = _place_row(priced, work, row_offsets, row_work, row_count, n, used, how[PIPELINED], rows)
                if simple:
                    _simple_time(rows, at, how, shared, time)
                else:
                    _sum_state(p, r, rows, at, -1, row_host, n, hidden_size, how, shared, sums)
                    _state_time(sums, how, hidden, time)
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
