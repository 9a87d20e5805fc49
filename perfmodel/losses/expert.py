"""One expert: what it computes, its quantised weights, and how far their output is from the true one."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from perfmodel.losses.checkpoint import Expert
from perfmodel.losses.gptq import Damping, Moments, Order, moments, quantised
from perfmodel.losses.grids import rounded

#: Rows that an expert must have for every fold; for GPTQ with other rows held out, in all.
LEAST_ROWS_A_FOLD, LEAST_ROWS = 2, 8


class Rounding(NamedTuple):
    """How weights are rounded.

    bits : the widths, rising [bit]
    group : columns that share a grid; all columns of a row where None
    damping, order : see `perfmodel.losses.gptq.moments`
    """

    bits: tuple[int, ...]
    group: int | None = None
    damping: Damping = "auto"
    order: Order = "natural"


class ExpertLosses(NamedTuple):
    """What a table holds of one expert.

    losses, nearest : float64 [widths]; mean squared error of the output with weights rounded by GPTQ and to nearest
    output_variance : mean square of the output
    rows : rows that they are means over
    """

    losses: NDArray[np.float64]
    nearest: NDArray[np.float64]
    output_variance: float
    rows: int


def inner(expert: Expert, rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """What goes into the last matrix, ``silu(x gate') * (x up')`` [rows, expert_size]."""
    gate = rows @ expert.gate.T
    with np.errstate(over="ignore"):  # exp(-x) of a very negative x, whose result is the right zero
        gate /= 1 + np.exp(-gate)
    gate *= rows @ expert.up.T
    return np.asarray(gate)


def output(expert: Expert, rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """What an expert makes of its inputs [rows, hidden_size], without the router's weight."""
    return np.asarray(inner(expert, rows) @ expert.down.T)


def nearest_expert(expert: Expert, bits: int, group: int | None = None) -> Expert:
    """The expert with every weight rounded to the nearest value of its grid."""
    return Expert(*(rounded(matrix, bits, group) for matrix in expert))


def gptq_expert(
    expert: Expert, rows: NDArray[np.float64], bits: int, how: Rounding, inputs: Moments | None = None
) -> Expert:
    """The expert rounded by GPTQ to ``bits``: the first two matrices, then the last on what they now make of the rows.

    rows : float64 [n, hidden_size], at least one; inputs : their moments, where they are known already
    """
    known = moments(rows, how.damping, how.order) if inputs is None else inputs
    gate, up = (quantised(matrix, known, bits, how.group) for matrix in (expert.gate, expert.up))
    middle = moments(inner(Expert(gate, up, expert.down), rows), how.damping, how.order)
    return Expert(gate, up, quantised(expert.down, middle, bits, how.group))


def nearest_losses(expert: Expert, rows: NDArray[np.float64], bits: tuple[int, ...], group: int | None) -> ExpertLosses:
    """Losses of rounding to nearest, which needs no calibration, over all rows."""
    true = output(expert, rows)
    found = np.array([_mean_square(output(nearest_expert(expert, width, group), rows) - true) for width in bits])
    return ExpertLosses(found, found, _mean_square(true), len(rows))


def gptq_losses(
    expert: Expert, rows: NDArray[np.float64], held_out: NDArray[np.float64] | None, how: Rounding, folds: int
) -> ExpertLosses:
    """Losses of GPTQ on rows that it did not see.

    With ``held_out`` rows the weights are rounded once, by all ``rows``, and the loss is measured on ``held_out``.
    Without, every row is held out once: the rows are dealt to ``folds`` hands in turn, and the loss on each hand is
    that of weights rounded by the others.
    """
    if held_out is not None:
        parts = [(rows, held_out)]
    else:
        hand = np.arange(len(rows)) % folds
        parts = [(rows[hand != fold], rows[hand == fold]) for fold in range(folds)]
    measured = rows if held_out is None else held_out
    squares = np.zeros(len(how.bits))
    for seen, unseen in parts:
        true = output(expert, unseen)
        known = moments(seen, how.damping, how.order)
        for i, width in enumerate(how.bits):
            error = output(gptq_expert(expert, seen, width, how, known), unseen) - true
            squares[i] += float(np.sum(error * error))
    nearest = nearest_losses(expert, measured, how.bits, how.group)
    return nearest._replace(losses=squares / (measured.shape[0] * measured.shape[1]))


def _mean_square(values: NDArray[np.float64]) -> float:
    return float(np.mean(values * values))
