"""How unevenly experts are picked: measures of counts."""

import numpy as np
from numpy.typing import ArrayLike

from perfmodel.routing.statistics.ratios import Floats, divide


def top_share(counts: ArrayLike, experts: int | None = None) -> Floats:
    """Share of the selections that the most used ``experts`` take, by default half of them (rounded down).

    ``counts`` is [..., E], the result [...]; NaN where nothing was selected.
    """
    loads = np.asarray(counts, dtype=np.float64)
    most = loads.shape[-1] // 2 if experts is None else experts
    ordered = np.sort(loads, axis=-1)[..., ::-1]
    return divide(ordered[..., :most].sum(-1), loads.sum(-1))


def gini(counts: ArrayLike) -> Floats:
    """Gini coefficient: sum over pairs of experts of |n_i - n_j| / (2 E sum n).

    ``counts`` is [..., E], the result [...]; 0 if all are alike, 1 - 1 / E if one expert takes all, NaN where nothing
    was selected.
    """
    ordered = np.sort(np.asarray(counts, dtype=np.float64), axis=-1)
    experts = ordered.shape[-1]
    return divide(ordered @ (2.0 * np.arange(1, experts + 1) - experts - 1), experts * ordered.sum(-1))


def entropy(counts: ArrayLike) -> Floats:
    """Entropy of the shares p, -sum p log p, as a part of that of equal shares, log E.

    ``counts`` is [..., E], the result [...]; 1 if all are alike (and for a single expert), 0 if one expert takes all,
    NaN where nothing was selected.
    """
    loads = np.asarray(counts, dtype=np.float64)
    shares = divide(loads, loads.sum(-1))
    logs = np.log(shares, out=np.zeros_like(shares), where=shares > 0)
    found: Floats = 0.0 - (shares * logs).sum(-1)  # never -0.0
    return found / np.log(loads.shape[-1]) if loads.shape[-1] > 1 else found + 1.0
