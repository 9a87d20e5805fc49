"""Time of GPU operators: the slower of arithmetic and memory traffic, plus a fixed overhead.

Every quantity is float64 in base units (FLOP, byte, FLOP/s, byte/s, s). Rates must be positive (``inf`` is
allowed and makes its side free); amounts must not be negative. A NaN anywhere gives NaN.

Reference: S. Williams, A. Waterman, D. Patterson, "Roofline", CACM 52(4), 2009, doi:10.1145/1498765.1498785;
half-performance length n_1/2: R. Hockney, C. Jesshope, "Parallel Computers 2", 1988.
"""

# The compiler infers the types of kernels.
# mypy: allow-untyped-defs

import numpy as np

from perfmodel.kernels._jit import scalar, ufunc

VECTOR_TOKENS = 8.0
"""Most tokens of an expert that run by kernels for vectors (assumed; llama.cpp switches there)."""


@scalar
def _roofline1(flops, bytes_moved, s_per_flop, s_per_byte, n_half_bytes, overhead_s):
    """An operator that moves something, from the times of an operation and of a byte."""
    return np.maximum(flops * s_per_flop, (bytes_moved + n_half_bytes) * s_per_byte) + overhead_s


@scalar
def _roofline_time1(flops, bytes_moved, flops_per_s, bytes_per_s, n_half_bytes, overhead_s):
    if bytes_moved == 0.0:
        return flops / flops_per_s + overhead_s
    return _roofline1(flops, bytes_moved, 1.0 / flops_per_s, 1.0 / bytes_per_s, n_half_bytes, overhead_s)


@scalar
def _padded_tokens1(tokens, tile):
    if tile == 0.0 or tokens <= VECTOR_TOKENS:
        return tokens
    return np.maximum(tile, tokens + tile / 2.0)


@scalar
def _decode_attention_time1(
    context,
    window,
    weight_flops,
    weight_bytes,
    flops_per_context,
    bytes_per_context,
    flops_per_s,
    bytes_per_s,
    n_half_bytes,
    overhead_s,
):
    seen = np.minimum(context, window)
    return _roofline_time1(
        weight_flops + flops_per_context * seen,
        weight_bytes + bytes_per_context * seen,
        flops_per_s,
        bytes_per_s,
        n_half_bytes,
        overhead_s,
    )


@scalar
def _causal_pairs1(tokens, window):
    # The first `ramp` tokens see 1, 2, 3, ... tokens; the others see a full window each.
    ramp = np.minimum(tokens, window)
    pairs = ramp * (ramp + 1.0) / 2.0
    if tokens > ramp:
        pairs += (tokens - ramp) * ramp
    return pairs


@scalar
def _prefill_attention_time1(
    tokens,
    window,
    weight_flops_per_token,
    weight_bytes,
    flops_per_pair,
    kv_bytes_per_token,
    flops_per_s,
    bytes_per_s,
    n_half_bytes,
    overhead_s,
):
    return _roofline_time1(
        weight_flops_per_token * tokens + flops_per_pair * _causal_pairs1(tokens, window),
        weight_bytes + kv_bytes_per_token * tokens,
        flops_per_s,
        bytes_per_s,
        n_half_bytes,
        overhead_s,
    )


@ufunc(6)
def roofline_time(flops, bytes_moved, flops_per_s, bytes_per_s, n_half_bytes, overhead_s):
    """Time of one operator [s].

    Equation: ``max(flops / flops_per_s, (bytes_moved + n_half_bytes) / bytes_per_s) + overhead_s``, the
    memory term being 0 when nothing is moved: the achieved rate is ``bytes_per_s * b / (b + n_half_bytes)``.

    Parameters (all broadcast)
    --------------------------
    flops : arithmetic [FLOP]
    bytes_moved : memory traffic [byte]
    flops_per_s, bytes_per_s : rates the operator can reach [FLOP/s], [byte/s]
    n_half_bytes : traffic at which half of ``bytes_per_s`` is reached [byte]
    overhead_s : fixed time, paid also by an empty operator [s]

    >>> float(roofline_time(2e12, 3e9, 1e15, 3e12, 0.0, 5e-6))
    0.002005
    """
    return _roofline_time1(flops, bytes_moved, flops_per_s, bytes_per_s, n_half_bytes, overhead_s)


@ufunc(2)
def padded_tokens(tokens, tile):
    """Tokens that matrix kernels compute for those of one expert [1].

    They fill whole tiles of ``tile`` tokens, of which half of one is empty in the mean: ``max(tile, tokens + tile /
    2)``. Up to ``VECTOR_TOKENS`` tokens run by kernels for vectors and pad nothing, and with a tile of 0 nothing does.

    >>> float(padded_tokens(8, 128)), float(padded_tokens(32, 128)), float(padded_tokens(512, 128))
    (8.0, 128.0, 576.0)
    """
    return _padded_tokens1(tokens, tile)


@ufunc(10)
def decode_attention_time(
    context,
    window,
    weight_flops,
    weight_bytes,
    flops_per_context,
    bytes_per_context,
    flops_per_s,
    bytes_per_s,
    n_half_bytes,
    overhead_s,
):
    """Time of the attention of one decode step in one layer [s], as one operator.

    Equation: with ``c = min(context, window)``, the roofline of ``weight_flops + flops_per_context * c`` and
    ``weight_bytes + bytes_per_context * c``.

    Parameters (all broadcast)
    --------------------------
    context : tokens in the KV cache that the new token attends to [1]
    window : sliding window [tokens]; ``inf`` for full attention
    weight_flops, weight_bytes : projections, independent of the context [FLOP], [byte]
    flops_per_context, bytes_per_context : scores, values and KV cache per context token [FLOP], [byte]
    others : as in `roofline_time`
    """
    return _decode_attention_time1(
        context,
        window,
        weight_flops,
        weight_bytes,
        flops_per_context,
        bytes_per_context,
        flops_per_s,
        bytes_per_s,
        n_half_bytes,
        overhead_s,
    )


@ufunc(2)
def causal_pairs(tokens, window):
    """Number of (query, key) pairs of a causal prefill [1]: the sum of ``min(i, window)`` for i = 1..tokens.

    ``tokens`` and ``window`` are whole numbers; ``window`` is ``inf`` for full attention.

    >>> float(causal_pairs(4, 2))
    7.0
    """
    return _causal_pairs1(tokens, window)


@ufunc(10)
def prefill_attention_time(
    tokens,
    window,
    weight_flops_per_token,
    weight_bytes,
    flops_per_pair,
    kv_bytes_per_token,
    flops_per_s,
    bytes_per_s,
    n_half_bytes,
    overhead_s,
):
    """Time of the attention of a whole prompt in one layer [s], as one operator.

    Equation: the roofline of ``weight_flops_per_token * tokens + flops_per_pair * causal_pairs`` and
    ``weight_bytes + kv_bytes_per_token * tokens``. Scores stay on chip (a fused kernel).

    Parameters (all broadcast)
    --------------------------
    tokens : prompt length [1]
    window : sliding window [tokens]; ``inf`` for full attention
    weight_flops_per_token, weight_bytes : projections [FLOP], [byte]
    flops_per_pair : score and value arithmetic of one query and one key [FLOP]
    kv_bytes_per_token : KV cache of one token [byte]
    others : as in `roofline_time`
    """
    return _prefill_attention_time1(
        tokens,
        window,
        weight_flops_per_token,
        weight_bytes,
        flops_per_pair,
        kv_bytes_per_token,
        flops_per_s,
        bytes_per_s,
        n_half_bytes,
        overhead_s,
    )
