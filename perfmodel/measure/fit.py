"""The constants of a processor from measured products: the closed form that prices experts, fitted to their times."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from perfmodel.errors import PerfModelError
from perfmodel.measure.cpu import Row

#: Rows that matrix units may pad the tokens of an expert to; the best one is kept.
TILES = (1, 2, 4, 8, 16, 32, 64)
#: Products of an expert: gate, up, down.
PRODUCTS = 3
#: Residuals (in ln) beyond about this size weigh linearly, so that one disturbed row does not steer the constants.
_ROBUST = 0.1
#: A product takes at least this and at most that, beside its weights and its arithmetic [s].
_LEAST_S, _MOST_S = 1e-8, 1e-2
#: How far a constant may move from where it starts, and the steps in which it does [ln].
_REACH, _FIRST_STEP, _LAST_STEP = 2.0, 0.25, 1e-5
#: A rate of repacking is part of the form only where it makes the loss of a row so much smaller, at the mean.
_WORTH = 0.05
#: How often the descent begins anew with long steps from where it ended.
_AGAIN = 2


class CpuFit(NamedTuple):
    """Constants of the closed form of `perfmodel.kernels.cpu`, with the most threads at work.

    product_s : fixed time of a product, a third of that of an expert [s]. bytes_per_s : rate of the memory.
    thread_bytes_per_s : rate of one thread; None where only one number of threads was measured. vector_flops_per_s,
    matrix_flops_per_s : rates with few tokens and with many. tile_rows : to which many are padded [1].
    pack_bytes_per_s : rate at which weights are repacked for many; None where the times show none.
    residuals : ln(computed / measured) of the rows with the most threads [rows].
    """

    product_s: float
    bytes_per_s: float
    thread_bytes_per_s: float | None
    vector_flops_per_s: float
    matrix_flops_per_s: float
    tile_rows: int
    pack_bytes_per_s: float | None
    residuals: NDArray[np.float64]

    @property
    def median_error(self) -> float:
        """Median of |computed / measured - 1| over the rows [1]."""
        return float(np.median(np.abs(np.expm1(self.residuals))))


def fit_products(rows: Sequence[Row], like: CpuFit | None = None) -> CpuFit:
    """Fit the closed form to products of expert matrices that came from memory.

    Minimises the soft-L1 loss of ln(computed / measured) over the rows with the most threads, for every tile of TILES,
    without and with repacking of the weights, and keeps the best. Vector units are at least as fast as the products
    with one token. The rate of one thread is that of products with one token on the fewest threads.

    Parameters
    ----------
    rows : products; some with one token, at the most threads.
    like : whose matrix rate and tile hold, where the rows have one token only; nothing is repacked

    Raises
    ------
    PerfModelError : no products with one token and the most threads
    """
    most = max((row.threads for row in rows), default=0)
    fewest = min((row.threads for row in rows), default=0)
    widest = max((row.bits for row in rows), default=0.0)  # narrower weights may be bound by arithmetic
    used = [row for row in rows if row.threads == most]
    single = [row for row in used if row.tokens == 1]
    if not single:
        raise PerfModelError("measured products: found none with one token and the most threads, allowed at least one")
    memory = max(row.gb_per_s for row in single) * 1e9
    vector = float(np.median([row.gflop_per_s for row in single])) * 1e9
    matrix = max(row.gflop_per_s for row in used) * 1e9
    tiles = TILES if like is None else (like.tile_rows,)
    # The descent finds the nearest valley, so it begins at both ends of what vector units may do.
    starts = [[2e-6, memory, vector, matrix], [2e-6, memory, max(vector, matrix), matrix]]
    plain = _best(used, [start if like is None else start[:3] for start in starts], vector, tiles, like)
    # Repacking reads the weights and writes them.
    packed = plain if like else _best(used, [[*start, memory / 2] for start in starts], vector, tiles, like)
    _, constants, tile = packed if packed[0] < plain[0] - _WORTH * len(used) else plain
    product_s, memory, vector, matrix, pack = (float(one) for one in _whole(constants[None, :], like)[0])
    alone = [
        row.weight_bytes / max(row.timing.seconds - product_s, 0.5 * row.timing.seconds) / fewest
        for row in rows
        if row.tokens == 1 and row.threads == fewest < most and row.bits == widest
    ]
    return CpuFit(
        product_s=product_s,
        bytes_per_s=memory,
        thread_bytes_per_s=float(np.median(alone)) if alone else None,
        vector_flops_per_s=vector,
        matrix_flops_per_s=matrix,
        tile_rows=tile,
        pack_bytes_per_s=pack or None,
        residuals=np.log(_computed(used, constants[None, :], tile, like)[0] / [row.timing.seconds for row in used]),
    )


def _whole(constants: NDArray[np.float64], like: CpuFit | None) -> NDArray[np.float64]:
    """Constants with the matrix rate, which may come from another fit, and the rate of packing, 0 for none [N, 5]."""
    if like is not None:
        constants = np.column_stack([constants, np.full(len(constants), like.matrix_flops_per_s)])
    return constants if constants.shape[1] == 5 else np.column_stack([constants, np.zeros(len(constants))])


def _computed(
    rows: Sequence[Row], constants: NDArray[np.float64], tile: int, like: CpuFit | None
) -> NDArray[np.float64]:
    """Times of the products at many constants [N, rows]."""
    from perfmodel.kernels.cpu import cpu_expert_time

    tokens, params, weight_bytes, cols = np.array(
        [(row.tokens, row.shape.params, row.weight_bytes, row.shape.cols) for row in rows], dtype=np.float64
    ).T
    product_s, memory, vector, matrix, pack = _whole(constants, like).T[:, :, None]
    found: NDArray[np.float64] = cpu_expert_time(
        tokens, params, weight_bytes, cols, matrix, vector, tile, memory, product_s, pack
    )
    return found


def _best(
    rows: Sequence[Row],
    starts: Sequence[Sequence[float]],
    least_vector: float,
    tiles: Sequence[int],
    like: CpuFit | None,
) -> tuple[float, NDArray[np.float64], int]:
    """Cost, constants and the tile of the best of all tiles and starts."""
    return min(
        (_solve(rows, np.array(start), least_vector, tile, like) for tile, start in itertools.product(tiles, starts)),
        # Of tiles that fit as well as each other, which a slow memory hides, the largest is the careful one.
        key=lambda found: (round(found[0], 3), -found[2]),
    )


def _solve(
    rows: Sequence[Row], start: NDArray[np.float64], least_vector: float, tile: int, like: CpuFit | None
) -> tuple[float, NDArray[np.float64], int]:
    """Cost, constants and the tile: downhill in all directions at once, as the closed form has kinks.

    Along a kink the derivatives lead nowhere.
    """
    low, high = np.log(start) - _REACH, np.log(start) + _REACH
    low[0], high[0] = np.log(_LEAST_S), np.log(_MOST_S)
    low[2] = np.log(least_vector)
    measured = np.log([row.timing.seconds for row in rows])
    directions = np.array(list(itertools.product((-1.0, 0.0, 1.0), repeat=len(start))))

    def costs(logs: NDArray[np.float64]) -> NDArray[np.float64]:
        residuals = (np.log(_computed(rows, np.exp(logs), tile, like)) - measured) / _ROBUST
        found: NDArray[np.float64] = (np.sqrt(1.0 + residuals**2) - 1.0).sum(axis=1)
        return found

    x = np.log(start)
    best, step, again = float(costs(x[None, :])[0]), _FIRST_STEP, _AGAIN
    while step > _LAST_STEP or again:
        if step <= _LAST_STEP:
            step, again = _FIRST_STEP, again - 1
        places = np.clip(x + step * directions, low, high)
        found = costs(places)
        lowest = int(np.argmin(found))
        if found[lowest] < best:
            x, best = places[lowest], float(found[lowest])
        else:
            step /= 2.0
    return best, np.exp(x), tile
