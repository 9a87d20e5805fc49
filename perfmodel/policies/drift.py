"""What decode steps say about a placement that was made before them."""

from typing import Any

import numpy as np
from numpy.typing import NDArray


def held(use: NDArray[np.number[Any]], hot: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Picks that a placement holds, and all picks, of every layer [2, L], from use and placement [L, E]."""
    return np.stack([np.where(hot, use, 0).sum(axis=1), use.sum(axis=1)]).astype(np.float64)


def count_spread(recent: NDArray[np.uint16], experts: int) -> float:
    """How much more counts of experts vary than those of independent steps [1], from some steps [N, L, k].

    Where a pick is made again in the next step with a chance of rho beyond coincidence, fading alike with every
    further step, the variance of counts is (1 + rho) / (1 - rho) times as large. Coincidence is how often any two of
    the steps share a pick. At least 1; at most N, as if all steps were one observation. All layers count together.
    """
    steps, layers = recent.shape[:2]
    if steps < 2:
        return 1.0
    cells = np.arange(layers)[:, None] * (experts + 1) + recent
    count = np.bincount(cells.ravel(), minlength=layers * (experts + 1)).reshape(layers, -1)[:, :-1]
    picked = recent[1:] < experts
    kept = ((recent[1:, :, :, None] == recent[:-1, :, None, :]).any(axis=-1) & picked).sum()
    again = float(kept) / max(1, int(picked.sum()))
    chance = float((count * (count - 1)).sum()) / max(1, int(count.sum()) * (steps - 1))
    if again <= chance:
        return 1.0
    return float(steps) if again == 1.0 else min(float(steps), (1.0 + again - 2.0 * chance) / (1.0 - again))
