"""GPTQ: rounding a matrix so that its output on given inputs changes little.

Columns are rounded one after another. The error that rounding one makes in the output is made up for, as far as the
inputs allow, by the columns that are not rounded yet [1]. What the inputs allow stands in their second moment; a moment
that was measured on few rows is drawn towards a multiple of the identity, which knows no relation between inputs [2].

References
----------
.. [1] Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers",
   arXiv:2210.17323, 2022.
.. [2] Ledoit and Wolf, "A well-conditioned estimator for large-dimensional covariance matrices", Journal of
   Multivariate Analysis 88 (2004), 365-411, doi:10.1016/S0047-259X(03)00096-4.
"""

from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from perfmodel.kernels.quantise import quantise_columns

Damping = float | Literal["auto"]
Order = Literal["natural", "activation"]

#: Least damping where it is found from the rows, as a share of the mean square of an input.
LEAST_DAMPING = 0.01
#: Columns between two updates of all columns behind them.
_BLOCK = 128


class Moments(NamedTuple):
    """What GPTQ needs to know of the inputs of a matrix with I columns.

    order : int64 [I]; the columns in the order in which they are rounded
    factor : float64 [I, I]; upper triangle U with ``U' U`` the inverse of the damped second moment in that order
    damping : what was added to the diagonal, as a share of its mean
    """

    order: NDArray[np.int64]
    factor: NDArray[np.float64]
    damping: float


def shrinkage(rows: NDArray[np.float64], second: NDArray[np.float64]) -> float:
    r"""The share of a multiple of the identity that brings a measured second moment closest to the true one, 0 to 1.

    .. math:: \rho = \min\left(1, \frac{\frac{1}{n} \left(\frac{1}{n} \sum_k |x_k|^4 - |S|_F^2\right)}
        {|S - \mu I|_F^2}\right), \qquad \mu = \mathrm{tr}\, S / p

    which is the estimate of Ledoit and Wolf (2004) for rows whose mean is known to be zero. For n rows that are one
    and the same it is 0, though they say nothing: give more rows than a few.

    rows : float64 [n, p]; second : float64 [p, p], ``rows' rows / n``
    """
    size = len(second)
    mean = np.trace(second) / size
    squared = float(np.sum(second * second))
    distance = squared - size * mean * mean
    spread = (float(np.mean(np.sum(rows * rows, axis=1) ** 2)) - squared) / len(rows)
    return 1.0 if distance <= 0 else min(max(spread, 0.0) / distance, 1.0)


def moments(rows: NDArray[np.float64], damping: Damping = "auto", order: Order = "natural") -> Moments:
    """Second moment of the inputs, damped, as the factor of its inverse.

    The damped moment is ``(1 - rho) S + rho mu I`` with S the mean of ``x x'`` over the rows and mu its mean diagonal.
    That is S with the share ``rho / (1 - rho)`` of mu added to its diagonal, up to a factor that changes nothing. An
    input that is zero in all rows is thereby unrelated to the others; its column is rounded to nearest.

    Parameters
    ----------
    rows : float64 [n, I], at least one; the inputs
    damping : share of the mean diagonal that is added to it, above 0; ``"auto"`` takes `shrinkage` of the rows, and
        `LEAST_DAMPING` at least
    order : ``"natural"``, or ``"activation"``: the column with the largest inputs first
    """
    from scipy.linalg.lapack import dtrtri

    size = rows.shape[1]
    second = rows.T @ rows / len(rows)
    diagonal = np.diagonal(second).copy()
    columns = np.argsort(-diagonal, kind="stable") if order == "activation" else np.arange(size)
    if damping == "auto":
        rho = max(shrinkage(rows, second), LEAST_DAMPING / (1 + LEAST_DAMPING))
    else:
        rho = damping / (1 + damping)
    mean = float(diagonal.mean())
    if mean > 0:
        second *= (1 - rho) / mean
        second[np.arange(size), np.arange(size)] += rho
    else:
        second[:] = np.eye(size)
    # With J the matrix that turns the order around and J H J = L L', V = J L J is an upper triangle with H = V V'.
    # So the inverse of H is U' U with U the inverse of V: one factorisation, and H itself is never inverted.
    turned = second[np.ix_(columns[::-1], columns[::-1])]
    del second  # of the widest matrix these are gigabytes
    lower = np.linalg.cholesky(turned)
    del turned
    upper = np.ascontiguousarray(lower[::-1, ::-1])
    del lower
    # LAPACK counts by columns, and so takes rows for columns and the upper triangle for the lower one; in place.
    factor = dtrtri(upper.T, lower=1, overwrite_c=1)[0].T
    return Moments(columns, factor, rho / (1 - rho) if rho < 1 else float("inf"))


def quantised(
    weights: NDArray[np.float64], inputs: Moments, bits: int, group: int | None = None
) -> NDArray[np.float64]:
    """A matrix rounded to the grids of `perfmodel.losses.grids.rounded`, column after column.

    The grid of a group is made when its first column is reached, from the weights as they are then. Groups are formed
    of columns that follow each other in the order of rounding.

    Parameters
    ----------
    weights : float64 [O, I], finite
    inputs : of a matrix with I columns
    bits : bits of a weight [bit]
    group : columns that share a grid; all where None
    """
    outputs, size = weights.shape
    step = size if group is None else min(group, size)
    found = np.ascontiguousarray(weights[:, inputs.order])
    scale, zero = np.zeros(outputs), np.zeros(outputs)
    for start, stop in _blocks(size, step):
        errors = np.empty((outputs, stop - start))
        quantise_columns(found, errors, inputs.factor, start, stop, step, bits, scale, zero)
        if stop < size:
            found[:, stop:] -= errors @ inputs.factor[start:stop, stop:]
    back = np.empty_like(found)
    back[:, inputs.order] = found
    return back


def _blocks(size: int, group: int) -> list[tuple[int, int]]:
    """Columns to round between two updates of those behind: whole groups, or pieces of one."""
    block = max(_BLOCK // group, 1) * group
    return [
        (start, min(start + _BLOCK, group_start + block, size))
        for group_start in range(0, size, block)
        for start in range(group_start, min(group_start + block, size), _BLOCK)
    ]
