"""Time of one expert on a CPU: the slower of reading it from memory and its arithmetic.

Every quantity is float64 in base units. Rates must be positive (``inf`` is allowed and makes its side free), except
that vector units of rate 0 do not exist, and a rate of packing of 0 means that there is none. Parameters and tiles must
be positive, other amounts not negative. A NaN anywhere gives NaN.
"""

# The compiler infers the types of kernels.
# mypy: allow-untyped-defs

import math

import numpy as np

from perfmodel.kernels._jit import scalar, ufunc

#: Of one number of an activation, which CPUs keep in 16 bits [byte].
ACTIVATION_BYTES = 2.0


@scalar
def _cpu_expert1(
    tokens,
    params,
    weight_bytes,
    hidden,
    s_per_flop,
    s_per_vector_flop,
    tile_rows,
    s_per_byte,
    overhead_s,
    s_per_packed_byte,
):
    """An expert with at least one token, from the times of an operation and of a byte."""
    rows = np.ceil(tokens / tile_rows) * tile_rows
    on_matrix_units = weight_bytes * s_per_packed_byte + 2.0 * rows * params * s_per_flop
    arithmetic = np.minimum(2.0 * tokens * params * s_per_vector_flop, on_matrix_units)
    moved = weight_bytes + 2.0 * tokens * hidden * ACTIVATION_BYTES
    return np.maximum(moved * s_per_byte, arithmetic) + overhead_s


@scalar
def _cpu_expert_time1(
    tokens,
    params,
    weight_bytes,
    hidden,
    flops_per_s,
    vector_flops_per_s,
    tile_rows,
    bytes_per_s,
    overhead_s,
    pack_bytes_per_s,
):
    if tokens == 0.0:
        return 0.0
    per_packed_byte = 0.0 if pack_bytes_per_s == 0.0 else 1.0 / pack_bytes_per_s
    per_vector_flop = math.inf if vector_flops_per_s == 0.0 else 1.0 / vector_flops_per_s
    return _cpu_expert1(
        tokens,
        params,
        weight_bytes,
        hidden,
        1.0 / flops_per_s,
        per_vector_flop,
        tile_rows,
        1.0 / bytes_per_s,
        overhead_s,
        per_packed_byte,
    )


@ufunc(10)
def cpu_expert_time(
    tokens,
    params,
    weight_bytes,
    hidden,
    flops_per_s,
    vector_flops_per_s,
    tile_rows,
    bytes_per_s,
    overhead_s,
    pack_bytes_per_s,
):
    """Time of one expert on the CPU [s]; 0 without tokens.

    Equation: ``max(bytes / bytes_per_s, min(2 m params / vector_flops_per_s, weight_bytes / pack_bytes_per_s +
    2 ceil(m / tile) tile params / flops_per_s)) + overhead_s`` with ``m`` tokens and ``bytes = weight_bytes +
    2 m hidden 2``: the weights once, and 16-bit activations in and out. The faster of the two units runs it.

    Parameters (all broadcast)
    --------------------------
    tokens : whole number of tokens that picked the expert [1]
    params : its parameters [1]
    weight_bytes : its stored size, scales included [byte]
    hidden : hidden size of the model [1]
    flops_per_s : rate of the matrix units, or of whatever units there are [FLOP/s]
    vector_flops_per_s : rate of vector units beside them; 0 for none [FLOP/s]
    tile_rows : tokens are padded to a multiple of this on the matrix units; 1 pads nothing [1]
    bytes_per_s : rate of the memory [byte/s]
    overhead_s : fixed time of an expert [s]
    pack_bytes_per_s : rate at which kernels of the matrix units repack weights before they multiply; 0 where they need
        not [byte/s]

    >>> float(cpu_expert_time(1, 1e6, 1e6, 0, 1e12, 0, 16, 1e11, 0, 0))
    3.2e-05
    """
    return _cpu_expert_time1(
        tokens,
        params,
        weight_bytes,
        hidden,
        flops_per_s,
        vector_flops_per_s,
        tile_rows,
        bytes_per_s,
        overhead_s,
        pack_bytes_per_s,
    )
