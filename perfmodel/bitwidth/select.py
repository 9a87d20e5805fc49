"""The selector that spends a bit budget on near-data experts."""

import math
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from perfmodel.bitwidth.checks import finite, not_negative
from perfmodel.bitwidth.table import BITS
from perfmodel.errors import PolicyError
from perfmodel.kernels.selector import select_prefix
from perfmodel.routing.npz import shown


def bit_budget(num_experts: int, mean_bits: float) -> int:
    """One-bit increments above 1 bit that a mean of ``mean_bits`` allows ``num_experts`` experts [bit].

    Equation: ``floor(num_experts * (mean_bits - 1) + 1e-9)``; the small term undoes rounding, as in 2.3 - 1.

    Raises PolicyError when ``mean_bits`` is not a number from 1 to 4.

    >>> bit_budget(6, 2.5)
    9
    """
    given: Any = mean_bits
    is_number = isinstance(given, Real) and not isinstance(given, bool)
    if not is_number or not 1 <= given <= 4:
        raise PolicyError(f"mean_bits is {shown(given)}; it must be a number from 1 to 4")
    return math.floor(num_experts * (float(mean_bits) - 1) + 1e-9)


def select_bitwidths(importance: ArrayLike, losses: ArrayLike, mean_bits: float) -> NDArray[np.int8]:
    """Bit width of each near-data expert under a mean budget, chosen for each layer on its own.

    Experts are ordered by decreasing importance (ties: lower index first). Of all assignments whose bits do
    not increase along that order and whose increments above 1 bit sum to `bit_budget` exactly, the one with
    the smallest summed loss is taken (ties: fewest experts at 4 bits, then fewest at 3).

    To weigh each expert's loss by its importance, pass ``losses * importance[..., None]``.

    Parameters
    ----------
    importance : finite numbers [..., E]; usually [sequences, layers, experts on the near-data device]
    losses : finite numbers, not negative [..., E, 4]; output error of each expert at 1, 2, 3 and 4 bits.
        Leading axes broadcast against those of ``importance``.
    mean_bits : mean bits per expert, 1 to 4 [bit]

    Returns
    -------
    int8 [..., E] : 1, 2, 3 or 4 for each expert, in the caller's order; empty when E is 0

    Raises
    ------
    PolicyError : when shapes do not match, or a number is missing, infinite or out of range

    References
    ----------
    Fan et al., "Context-Aware Mixture-of-Experts Inference on CXL-Enabled GPU-NDP Systems", arXiv:2512.04476.

    >>> select_bitwidths([0.1, 0.9], [[2, 1.5, 1, 0.5], [8, 4, 2, 1]], 2.0).tolist()
    [1, 3]
    """
    rank = finite(importance, "importance", PolicyError)
    loss = finite(losses, "losses", PolicyError)
    if rank.ndim < 1 or loss.ndim < 2 or loss.shape[-2:] != (rank.shape[-1], len(BITS)):
        raise PolicyError(
            f"importance has shape {list(rank.shape)} and losses {list(loss.shape)}; "
            "they must be [..., experts] and [..., experts, 4]"
        )
    not_negative(loss, "losses", PolicyError)
    num_experts = rank.shape[-1]
    bit_budget(num_experts, mean_bits)  # refuses a bad mean where there is nothing to choose as well
    try:
        lead = np.broadcast_shapes(rank.shape[:-1], loss.shape[:-2])
    except ValueError:
        raise PolicyError(
            f"the leading axes of importance {list(rank.shape)} and losses {list(loss.shape)} do not match"
        ) from None
    if num_experts == 0 or 0 in lead:
        return np.empty((*lead, num_experts), dtype=np.int8)

    rank = np.broadcast_to(rank, (*lead, num_experts)).reshape(-1, num_experts)
    loss = np.broadcast_to(loss, (*lead, num_experts, len(BITS))).reshape(-1, num_experts, len(BITS))
    order = np.argsort(-rank, axis=1, kind="stable")
    ordered = np.take_along_axis(loss, order[:, :, None], axis=1)
    bits = np.empty(order.shape, dtype=np.int8)
    np.put_along_axis(bits, order, bits_by_rank(ordered, mean_bits), axis=1)
    return bits.reshape(*lead, num_experts)


def bits_by_rank(losses: NDArray[np.float64], mean_bits: float) -> NDArray[np.int8]:
    """What `select_bitwidths` chooses where experts are already in order of decreasing importance [B, E].

    losses : float64 [B, E, 4] of at least one expert, finite and not negative; not checked.
    """
    num_rows, num_experts = losses.shape[:2]
    counts = select_prefix(_scaled(losses), np.full(num_rows, bit_budget(num_experts, mean_bits), dtype=np.int64))
    # The first n4 experts in order get 4 bits, up to n4 + n3 get 3, up to n4 + n3 + n2 get 2.
    ends = np.cumsum(counts[:, :3], axis=1)
    position = np.arange(num_experts)
    bits = np.ones((num_rows, num_experts), dtype=np.int8)
    for end in ends.T:
        bits += position < end[:, None]
    return bits


def _scaled(losses: NDArray[np.float64]) -> NDArray[np.float64]:
    """Rows divided by a power of two: sums cannot overflow and the choice does not depend on the unit."""
    _, exponent = np.frexp(losses.max(axis=(1, 2)))
    return np.ascontiguousarray(np.ldexp(losses, -exponent[:, None, None]))
