"""The formulas of the kernels again, in plain Python and NumPy: slow, simple, and the oracle of the tests.

Each function has the name and the arguments of its kernel but takes scalars. Where it can, it arrives at the
result in another way: it counts folds one by one, adds up pairs, follows the commands of a DRAM row, or tries
every split.
"""

import itertools
from collections.abc import Iterator, Sequence
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

OS, WS, IS = 0, 1, 2


def roofline_time(
    flops: float,
    bytes_moved: float,
    flops_per_s: float,
    bytes_per_s: float,
    n_half_bytes: float,
    overhead_s: float,
) -> float:
    """Time of one operator [s]; the bandwidth achieved is ``bytes_per_s * b / (b + n_half_bytes)``."""
    compute_s = flops / flops_per_s
    if bytes_moved == 0:
        return compute_s + overhead_s
    achieved = bytes_per_s * (bytes_moved / (bytes_moved + n_half_bytes))
    return max(compute_s, bytes_moved / achieved) + overhead_s


def decode_attention_time(
    context: float,
    window: float,
    weight_flops: float,
    weight_bytes: float,
    flops_per_context: float,
    bytes_per_context: float,
    flops_per_s: float,
    bytes_per_s: float,
    n_half_bytes: float,
    overhead_s: float,
) -> float:
    """Time of the attention of one decode step in one layer [s]."""
    seen = context if context < window else window
    flops = weight_flops + seen * flops_per_context
    moved = weight_bytes + seen * bytes_per_context
    return roofline_time(flops, moved, flops_per_s, bytes_per_s, n_half_bytes, overhead_s)


def causal_pairs(tokens: int, window: float) -> float:
    """Number of (query, key) pairs of a causal prefill [1], one query at a time."""
    return float(sum(min(i, window) for i in range(1, tokens + 1)))


def prefill_attention_time(
    tokens: int,
    window: float,
    weight_flops_per_token: float,
    weight_bytes: float,
    flops_per_pair: float,
    kv_bytes_per_token: float,
    flops_per_s: float,
    bytes_per_s: float,
    n_half_bytes: float,
    overhead_s: float,
) -> float:
    """Time of the attention of a whole prompt in one layer [s]."""
    flops = tokens * weight_flops_per_token + causal_pairs(tokens, window) * flops_per_pair
    moved = weight_bytes + tokens * kv_bytes_per_token
    return roofline_time(flops, moved, flops_per_s, bytes_per_s, n_half_bytes, overhead_s)


def transfer_time(bytes_moved: float, bytes_per_s: float, latency_s: float, n_half_bytes: float) -> float:
    """Time of one transfer in one direction [s]."""
    if bytes_moved == 0:
        return 0.0
    return latency_s + n_half_bytes / bytes_per_s + bytes_moved / bytes_per_s


def cpu_expert_time(
    tokens: int,
    params: float,
    weight_bytes: float,
    hidden: float,
    flops_per_s: float,
    vector_flops_per_s: float,
    tile_rows: int,
    bytes_per_s: float,
    overhead_s: float,
    pack_bytes_per_s: float = 0.0,
) -> float:
    """Time of one expert on a CPU [s], its tiles counted one by one."""
    if tokens == 0:
        return 0.0
    tiles = len(range(0, tokens, tile_rows))
    packing = weight_bytes / pack_bytes_per_s if pack_bytes_per_s else 0.0
    arithmetic = [packing + tiles * (2 * tile_rows * params) / flops_per_s]
    if vector_flops_per_s:
        arithmetic.append(tokens * (2 * params) / vector_flops_per_s)
    activations = sum(2 * hidden for _ in ("read", "written")) * tokens
    return overhead_s + max(min(arithmetic), (weight_bytes + activations) / bytes_per_s)


def _each_fold(m: int, k: int, n: int, rows: int, cols: int, dataflow: int) -> Iterator[int]:
    """Cycles of every fold in turn."""
    if 0 in (m, k, n):
        return
    down, across, stream = {OS: (m, n, k), WS: (k, n, m), IS: (k, m, n)}[dataflow]
    # Operands enter skewed: the far corner of the array starts this much later than the near one.
    skew = (rows - 1) + (cols - 1)
    # The weight and input stationary arrays are filled first, one row a cycle.
    fill = 0 if dataflow == OS else rows
    for _ in range(0, down, rows):
        for _ in range(0, across, cols):
            yield fill + skew + stream


def folds(m: int, k: int, n: int, rows: int, cols: int, dataflow: int) -> int:
    """Number of folds [1]."""
    return sum(1 for _ in _each_fold(m, k, n, rows, cols, dataflow))


def fold_cycles(m: int, k: int, n: int, rows: int, cols: int, dataflow: int) -> int:
    """Cycles of one fold [cycle]."""
    return next(_each_fold(m, k, n, rows, cols, dataflow), 0)


def gemm_cycles(m: int, k: int, n: int, rows: int, cols: int, dataflow: int) -> int:
    """Demand cycles on one array [cycle]."""
    return sum(_each_fold(m, k, n, rows, cols, dataflow))


def gemm_cycles_dealt(m: int, k: int, n: int, rows: int, cols: int, arrays: int, dataflow: int) -> int:
    """Cycles of the busiest array when folds are dealt in turn [cycle]."""
    busy = [0] * arrays
    for i, cycles in enumerate(_each_fold(m, k, n, rows, cols, dataflow)):
        busy[i % arrays] += cycles
    return max(busy)


def gemm_time(
    m: int,
    k: int,
    n: int,
    weight_bits: float,
    rows: int,
    cols: int,
    arrays: int,
    clock_hz: float,
    dataflow: int,
    rate: float,
    dram_bytes_per_s: float,
) -> float:
    """Time of one weight matrix streamed from DRAM through the arrays [s]."""
    if m == 0:
        return 0.0
    stream_s = (k * n) * (weight_bits / 8) / dram_bytes_per_s
    compute_s = gemm_cycles_dealt(m, k, n, rows, cols, arrays, dataflow) / (clock_hz * rate)
    return max(stream_s, compute_s)


def refresh_fraction(n_rtp: int, n_rp: int, n_rfc: int, n_rcd: int, n_refi: int) -> float:
    """Share of time left by all-bank refresh [1]."""
    # Wait for the last read, close the rows, refresh, open a row again.
    usable = n_refi - sum((n_rtp, n_rp, n_rfc, n_rcd))
    return float(max(Fraction(0), Fraction(usable, n_refi)))


def row_by_row_fraction(
    lines_per_row: int, n_bl: int, n_ccd_l: int, n_rtp: int, n_rp: int, n_rcd: int, pseudo_channels: int
) -> float:
    """Share of peak of a stream that reads one row after the other in one bank [1]: one row, by commands."""
    read_at = n_rcd  # the row is activated in cycle 0
    for _ in range(lines_per_row - 1):
        read_at += max(n_ccd_l, n_bl)
    next_activate = read_at + n_rtp + n_rp
    share = Fraction(lines_per_row * n_bl, next_activate * pseudo_channels)
    return float(min(Fraction(1), share))


def bank_group_limited_fraction(
    lines_per_row: int, n_bl: int, n_ccd_l: int, n_rp: int, n_rcd: int, read_buffer: int
) -> float:
    """Share of peak of a stream whose consecutive rows lie in different bank groups [1]."""
    hidden = Fraction(n_rp + n_rcd, n_ccd_l)
    paired = max(Fraction(0), min(read_buffer - hidden, Fraction(lines_per_row, 2)))
    alone = lines_per_row - 2 * paired
    cycles = alone * n_ccd_l + paired * max(n_ccd_l, 2 * n_bl)
    return float(min(Fraction(1), lines_per_row * n_bl / cycles))


def random_fraction(n_bl: int, n_faw: int, n_rrd_s: int, pseudo_channels: int, command_cycles: int) -> float:
    """Upper bound of the share of peak of random single-line reads [1]: the tightest of up to four limits."""
    limits = [Fraction(1), Fraction(4 * n_bl, n_faw), Fraction(n_bl, n_rrd_s)]
    if command_cycles:
        limits.append(Fraction(n_bl, pseudo_channels) / command_cycles)
    return float(min(limits))


def one_bank_fraction(n_bl: int, n_rc: int, pseudo_channels: int) -> float:
    """Share of peak when every read opens another row of the same bank [1]."""
    return float(min(Fraction(1), Fraction(n_bl, n_rc * pseudo_channels)))


def prefix_splits(num_experts: int, budget: int) -> Iterator[tuple[int, int, int, int]]:
    """Every ``(n4, n3, n2, n1)`` with ``3 n4 + 2 n3 + n2 = budget``, n4 then n3 ascending."""
    for n4 in range(num_experts + 1):
        for n3 in range(num_experts - n4 + 1):
            for n2 in range(num_experts - n4 - n3 + 1):
                if 3 * n4 + 2 * n3 + n2 == budget:
                    yield n4, n3, n2, num_experts - n4 - n3 - n2


def summed_loss(losses: NDArray[np.float64], levels: Sequence[int]) -> Fraction:
    """Exact summed loss of one level for each expert; ``losses`` is [E, M]."""
    return sum((Fraction(float(losses[e, m])) for e, m in enumerate(levels)), Fraction(0))


def select_prefix(importance: NDArray[np.float64], losses: NDArray[np.float64], budget: int) -> NDArray[np.int64]:
    """Bits of every expert [E] by trying every prefix split with exact sums; the first of equals wins."""
    order = sorted(range(len(importance)), key=lambda e: (-importance[e], e))
    tried = (
        [level for level, count in zip((3, 2, 1, 0), split, strict=True) for _ in range(count)]
        for split in prefix_splits(len(order), budget)
    )
    best = min(tried, key=lambda levels: summed_loss(losses[order], levels))
    bits = np.empty(len(order), np.int64)
    bits[order] = np.array(best, np.int64) + 1
    return bits


def best_assignment(
    losses: NDArray[np.float64], costs: NDArray[np.int64], budget: int, at_most: bool, ordered: bool
) -> NDArray[np.int64] | None:
    """Levels [L, E] of the best assignment of L layers by trying every one with exact sums; None where there is none.

    losses, costs : [L, E, M] of all layers together. ``ordered`` keeps to levels that do not rise within a layer.
    """
    num_layers, num_experts, num_levels = losses.shape
    of_layer = [
        levels
        for levels in itertools.product(range(num_levels), repeat=num_experts)
        if not ordered or all(later <= earlier for earlier, later in itertools.pairwise(levels))
    ]
    best = None
    for tried in itertools.product(of_layer, repeat=num_layers):
        spent = [sum(int(costs[i, e, m]) for e, m in enumerate(levels)) for i, levels in enumerate(tried)]
        total = sum(spent)
        if total > budget or (total < budget and not at_most):
            continue
        loss = sum((summed_loss(losses[i], levels) for i, levels in enumerate(tried)), Fraction(0))
        # Of equal losses the cheapest, then what earlier layers spend least, then the lowest levels from the first on.
        key = loss, total, spent, tried
        if best is None or key < best:
            best = key
    return None if best is None else np.array(best[-1], np.int64).reshape(num_layers, num_experts)
