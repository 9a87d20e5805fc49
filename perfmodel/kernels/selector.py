"""The prefix selector: how many experts get 4, 3, 2 and 1 bits under an exact bit budget."""

# The compiler infers the types of kernels.
# mypy: allow-untyped-defs

import numpy as np
from numba import types

from perfmodel.kernels._jit import loop, read_only


@loop(types.int64[:, ::1](read_only(types.float64[:, :, ::1]), read_only(types.int64[::1])))
def select_prefix(losses, budget):
    """Best prefix split of each row.

    Experts 0, 1, 2, ... of a row are in order of decreasing importance. A split gives 4 bits to the first ``n4`` of
    them, 3 to ``n3`` more, 2 to a further ``n2`` and 1 to what is left, with ``3 n4 + 2 n3 + n2 = budget``. Of all
    such splits the one with the smallest summed loss is returned. It is found from prefix sums of the gains over 1
    bit, in O(1) a split and O(E^2) a row [1].

    Ties go to the split with the smallest ``n4``, then the smallest ``n3``. Sums are plain float64 additions
    in order of importance, so two splits that tie on paper may differ in the last bit.

    Parameters
    ----------
    losses : float64 [B, E, 4], C order; finite loss of each expert at 1, 2, 3 and 4 bits
    budget : int64 [B]; one-bit increments to hand out, 0 to 3 E

    Returns
    -------
    int64 [B, 4]: ``n4, n3, n2, n1`` of each row; all -1 when the budget cannot be met.

    References
    ----------
    .. [1] Fan et al., "Context-Aware Mixture-of-Experts Inference on CXL-Enabled GPU-NDP Systems",
       arXiv:2512.04476, 2025.

    >>> select_prefix(np.array([[[8.0, 4.0, 2.0, 1.0], [1.0, 0.5, 0.3, 0.2]]]), np.array([2])).tolist()
    [[0, 1, 0, 1]]
    """
    num_rows, num_experts = losses.shape[0], losses.shape[1]
    counts = np.full((num_rows, 4), -1, dtype=np.int64)
    # gain[q - 2, m]: what the first m experts gain together at q bits.
    gain = np.zeros((3, num_experts + 1))
    for row in range(num_rows):
        increments = budget[row]
        for expert in range(num_experts):
            for q in range(3):
                step = losses[row, expert, 0] - losses[row, expert, q + 1]
                gain[q, expert + 1] = gain[q, expert] + step
        best = -np.inf
        for n4 in range(min(num_experts, increments // 3) + 1):
            for n3 in range(min(num_experts - n4, (increments - 3 * n4) // 2) + 1):
                n2 = increments - 3 * n4 - 2 * n3
                n1 = num_experts - n4 - n3 - n2
                if n1 < 0:
                    continue
                total = gain[2, n4]
                total += gain[1, n4 + n3] - gain[1, n4]
                total += gain[0, n4 + n3 + n2] - gain[0, n4 + n3]
                if total > best:
                    best = total
                    counts[row, 0], counts[row, 1], counts[row, 2], counts[row, 3] = n4, n3, n2, n1
    return counts
