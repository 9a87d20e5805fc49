"""Cycles and time of matrix products on systolic arrays.

A product ``[m, k] x [k, n]`` is cut into folds of at most ``rows x cols`` elements of the operand that stays
in the array, while the third dimension streams through:

=================  ======  ======  =======  =========================
dataflow           rows    cols    stream   cycles of one fold
=================  ======  ======  =======  =========================
output stationary  m       n       k        ``rows + cols + k - 2``
weight stationary  k       n       m        ``2 rows + cols + m - 2``
input stationary   k       m       n        ``2 rows + cols + n - 2``
=================  ======  ======  =======  =========================

There are ``ceil(./rows) * ceil(./cols)`` folds; an edge fold costs as much as a full one and folds do not
overlap. These forms give exactly the demand cycles of SCALE-Sim 3.0.0, whose report counts cycles from 0 and
so shows one less (A. Samajdar et al., "A systematic methodology for characterizing scalability of DNN
accelerators using SCALE-Sim", ISPASS 2020, doi:10.1109/ISPASS48437.2020.00016).

Sizes are whole numbers held in float64 (exact below 2**53), ``rows``, ``cols`` and ``arrays`` at least 1. An
unknown dataflow code gives NaN. An empty product takes no time.
"""

# The compiler infers the types of kernels.
# mypy: allow-untyped-defs

import math

import numpy as np

from perfmodel.kernels._jit import scalar, ufunc

OS, WS, IS = 0, 1, 2
"""Dataflow codes: output, weight and input stationary."""

DATAFLOWS = {"os": OS, "ws": WS, "is": IS}
"""Codes by the names that hardware specs use."""


@scalar
def _folds1(m, k, n, rows, cols, dataflow):
    if m * k * n == 0.0:
        return 0.0
    if dataflow == OS:
        return np.ceil(m / rows) * np.ceil(n / cols)
    if dataflow == WS:
        return np.ceil(k / rows) * np.ceil(n / cols)
    if dataflow == IS:
        return np.ceil(k / rows) * np.ceil(m / cols)
    return math.nan


@scalar
def _fold_cycles1(m, k, n, rows, cols, dataflow):
    if m * k * n == 0.0:
        return 0.0
    if dataflow == OS:
        return rows + cols + k - 2.0
    if dataflow == WS:
        return 2.0 * rows + cols + m - 2.0
    if dataflow == IS:
        return 2.0 * rows + cols + n - 2.0
    return math.nan


@scalar
def _gemm_cycles1(m, k, n, rows, cols, dataflow):
    return _folds1(m, k, n, rows, cols, dataflow) * _fold_cycles1(m, k, n, rows, cols, dataflow)


@scalar
def _gemm_cycles_dealt1(m, k, n, rows, cols, arrays, dataflow):
    rounds = np.ceil(_folds1(m, k, n, rows, cols, dataflow) / arrays)
    return rounds * _fold_cycles1(m, k, n, rows, cols, dataflow)


@scalar
def _gemm_time1(m, k, n, weight_bits, rows, cols, arrays, clock_hz, dataflow, rate, dram_bytes_per_s):
    if m == 0.0:
        return 0.0
    stream_s = k * n * weight_bits / 8.0 / dram_bytes_per_s
    compute_s = _gemm_cycles_dealt1(m, k, n, rows, cols, arrays, dataflow) / clock_hz / rate
    return np.maximum(stream_s, compute_s)


@ufunc(6)
def folds(m, k, n, rows, cols, dataflow):
    """Number of folds of ``[m, k] x [k, n]`` on arrays of ``rows x cols`` [1]; see the module's table.

    >>> float(folds(2, 192, 131, 4, 4, OS))
    33.0
    """
    return _folds1(m, k, n, rows, cols, dataflow)


@ufunc(6)
def fold_cycles(m, k, n, rows, cols, dataflow):
    """Cycles of one fold of ``[m, k] x [k, n]`` on ``rows x cols`` [cycle]; see the module's table.

    >>> float(fold_cycles(1, 128, 37, 4, 4, WS))
    11.0
    """
    return _fold_cycles1(m, k, n, rows, cols, dataflow)


@ufunc(6)
def gemm_cycles(m, k, n, rows, cols, dataflow):
    """Demand cycles of ``[m, k] x [k, n]`` on one array [cycle]: folds times cycles per fold.

    Parameters (all broadcast)
    --------------------------
    m, k, n : tokens, input size, output size [1]
    rows, cols : processing elements of the array [1]
    dataflow : `OS`, `WS` or `IS`

    >>> float(gemm_cycles(1, 128, 37, 4, 4, WS))
    3520.0
    """
    return _gemm_cycles1(m, k, n, rows, cols, dataflow)


@ufunc(7)
def gemm_cycles_dealt(m, k, n, rows, cols, arrays, dataflow):
    """Cycles until the busiest of ``arrays`` equal arrays is done [cycle], the folds being dealt evenly.

    Equation: ``ceil(folds / arrays) * fold_cycles``. Other parameters as in `gemm_cycles`.

    >>> float(gemm_cycles_dealt(2, 192, 131, 4, 4, 8, OS))
    990.0
    """
    return _gemm_cycles_dealt1(m, k, n, rows, cols, arrays, dataflow)


@ufunc(11)
def gemm_time(m, k, n, weight_bits, rows, cols, arrays, clock_hz, dataflow, rate, dram_bytes_per_s):
    """Time of one weight matrix streamed from DRAM through the arrays [s].

    Equation: ``max(k n weight_bits / 8 / dram_bytes_per_s, gemm_cycles_dealt / clock_hz / rate)``, and 0
    without tokens. Activations stay on chip.

    Parameters (all broadcast)
    --------------------------
    m, k, n : tokens, input size, output size [1]
    weight_bits : stored bits per weight, scales included [bit]
    rows, cols, arrays : shape and number of the arrays [1]
    clock_hz : clock of the arrays [Hz]
    dataflow : `OS`, `WS` or `IS`
    rate : speed-up over FP16 at this precision [1]: 1 when there is none, ``16 / bits`` when linear
    dram_bytes_per_s : rate at which DRAM delivers weights [byte/s]

    >>> float(gemm_time(1, 4096, 4096, 16, 4, 4, 64, 1e9, OS, 1.0, 512e9))
    6.5632e-05
    """
    return _gemm_time1(m, k, n, weight_bits, rows, cols, arrays, clock_hz, dataflow, rate, dram_bytes_per_s)
