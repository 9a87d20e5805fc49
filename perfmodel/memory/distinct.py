"""How many different experts the tokens of a batch visit in one layer.

Memory follows from all experts, traffic from those that are visited: each is read once, however many tokens visit it.
A token visits k different experts, and tokens choose independently of each other. Real tokens of one text do not, so a
trace gives fewer.
"""

import math
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from perfmodel.errors import ModelConfigError
from perfmodel.families import one_line

_MOST_TOKENS = 1e15
_MOST_EXPERTS = 10**15
_SUM_TOLERANCE = 1e-6


def _count(value: object, what: str, allowed: str, high: float = math.inf) -> int:
    if isinstance(value, np.integer):
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= high:
        raise ModelConfigError(f"distinct experts: {what} is {one_line(value)}; allowed: {allowed}")
    return value


def _tokens(tokens: ArrayLike) -> NDArray[np.float64]:
    try:
        found: NDArray[Any] = np.asarray(tokens)
    except (ValueError, TypeError):
        found = np.empty(0, object)
    if found.dtype.kind in "iuf":
        counts = found.astype(np.float64)
        if bool(((counts >= 0) & (counts <= _MOST_TOKENS) & (counts == np.floor(counts))).all()):
            return counts
    raise ModelConfigError(
        f"distinct experts: tokens is {one_line(tokens)}; allowed: whole numbers from 0 to {_MOST_TOKENS:g}"
    )


def _visited(inclusion: NDArray[np.float64], tokens: NDArray[np.float64]) -> NDArray[np.float64]:
    """``1 - (1 - p)^B`` without cancellation; for one token that is p itself."""
    with np.errstate(divide="ignore", invalid="ignore"):
        chance = -np.expm1(tokens * np.log1p(-inclusion))
    return np.asarray(np.where(tokens == 0, 0.0, np.where(tokens == 1, inclusion, chance)))


def _result(values: NDArray[np.float64]) -> Any:
    return float(values) if values.ndim == 0 else values


def distinct_bound(experts: int, top_k: int, tokens: ArrayLike) -> Any:
    """The most different experts that tokens can visit in one layer [1], ``min(E, k B)``. Arguments as below."""
    experts = _count(experts, "experts", f"an integer from 1 to {_MOST_EXPERTS:.0e}", _MOST_EXPERTS)
    top_k = _count(top_k, "top_k", f"an integer from 1 to the number of experts, {experts}", experts)
    return _result(np.minimum(float(experts), top_k * _tokens(tokens)))


def distinct_experts(experts: int, top_k: int, tokens: ArrayLike, *, ranks: int = 1) -> Any:
    r"""Expected number of different experts where every expert is as likely as any other [1].

    .. math:: \frac{E}{R} \left(1 - \left(1 - \frac{k}{E}\right)^B\right)

    Exactly k for one token, rising with B, and never above min(E, k B).

    Parameters
    ----------
    experts : routed experts of the layer, E, on all ranks together.
    top_k : experts that one token visits, k, on all ranks together.
    tokens : tokens of the batch, B, those of all ranks together; a whole number or an array of such.
    ranks : ranks R of expert parallelism. The result is for one rank, and for the fullest where E is no multiple of R:
        ``ceil(E / R)`` experts, each still visited with the chance k / E.

    Raises
    ------
    ModelConfigError : an argument is not such a number.

    >>> distinct_experts(8, 2, 3)
    4.625
    >>> round(distinct_experts(128, 8, 8, ranks=8), 2)
    6.45
    """
    experts = _count(experts, "experts", f"an integer from 1 to {_MOST_EXPERTS:.0e}", _MOST_EXPERTS)
    top_k = _count(top_k, "top_k", f"an integer from 1 to the number of experts, {experts}", experts)
    ranks = _count(ranks, "ranks", f"an integer from 1 to the number of experts, {experts}", experts)
    counts = _tokens(tokens)
    whole = np.where(counts == 1, float(top_k), experts * _visited(np.asarray(top_k / experts), counts))
    # Rounding must not lift the expectation above what is possible.
    whole = np.minimum(whole, np.minimum(float(experts), top_k * counts))
    return _result(np.asarray(whole if ranks == 1 else whole * (math.ceil(experts / ranks) / experts)))


def distinct_weighted(inclusion: ArrayLike, top_k: int, tokens: ArrayLike, *, ranks: int | None = None) -> Any:
    r"""Expected number of different experts where some are more popular than others [1].

    .. math:: \sum_e 1 - (1 - p_e)^B

    For the same k and B, never more than with equal chances.

    Parameters
    ----------
    inclusion : float64 [E], the chance :math:`p_e` that a token visits each expert, from 0 to 1. They sum to k: shares
        of the selections, which sum to 1, must be multiplied by k.
    top_k : experts that one token visits, k.
    tokens : tokens of the batch, B; a whole number or an array of such.
    ranks : where given, the result is for each rank [..., R] of expert parallelism instead of for all together; a rank
        has ``ceil(E / R)`` neighbouring experts, the last ones what is left.

    Raises
    ------
    ModelConfigError : an argument is not such a value, or the chances do not sum to k within 1e-6 of it.
    """
    try:
        chances = np.asarray(inclusion, dtype=np.float64)
    except (ValueError, TypeError):
        chances = np.empty((0, 0))
    if chances.ndim != 1 or not chances.size or not bool(((chances >= 0) & (chances <= 1)).all()):
        raise ModelConfigError(
            f"distinct experts: inclusion is {one_line(inclusion)}; allowed: a chance from 0 to 1 for each expert"
        )
    experts = chances.size
    top_k = _count(top_k, "top_k", f"an integer from 1 to the number of experts, {experts}", experts)
    total = math.fsum(chances)
    if abs(total - top_k) > _SUM_TOLERANCE * top_k:
        raise ModelConfigError(
            f"distinct experts: inclusion sums to {total:.6g}; allowed: top_k, {top_k} (multiply shares by top_k)"
        )
    counts = _tokens(tokens)
    visited = _visited(chances, counts[..., None])
    if ranks is None:
        return _result(np.asarray(np.minimum(visited.sum(axis=-1), np.minimum(float(experts), top_k * counts))))
    ranks = _count(ranks, "ranks", f"an integer from 1 to the number of experts, {experts}", experts)
    each = math.ceil(experts / ranks)
    padded = np.concatenate([visited, np.zeros((*counts.shape, each * ranks - experts))], axis=-1)
    return padded.reshape(*counts.shape, ranks, each).sum(axis=-1)
