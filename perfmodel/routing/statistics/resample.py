"""Intervals of statistics by resampling sequences (percentile bootstrap)."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfmodel.routing.statistics.ratios import divide
from perfmodel.routing.statistics.results import Estimate, Floats, Layered

MIDDLE = 0.95
"""Part of the resamples that lies within an interval."""
_CHUNK_BYTES = 2**25


class Resampler:
    """Draws groups of sequences with replacement, the same draws for every statistic.

    A statistic is a function of sums over groups. Its value comes from the sums over all groups, its interval from the
    sums over as many groups drawn at random, many times (B. Efron, "Bootstrap methods", Annals of Statistics 7, 1979).
    """

    def __init__(self, groups: int, resamples: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        # How often each group is drawn; one draw at a time, because all numbers at once would take much room.
        self._times = np.zeros((resamples if groups > 1 else 0, groups))
        for times in self._times:
            times += np.bincount(rng.integers(0, groups, groups), minlength=groups)

    def ratio(self, parts: NDArray[Any], whole: NDArray[Any]) -> Estimate:
        """Sum of ``parts`` [groups, ...] over that of ``whole``, which has the same axes or fewer at the end."""
        return _told(self.estimates(lambda *sums: (divide(*sums),), parts, whole)[0], whole)

    def layered_ratio(self, parts: NDArray[Any], whole: NDArray[Any]) -> Layered:
        """The same for tables [groups, L, ...]: of the sums over layers, and of each layer."""
        overall, layers = self.estimates(lambda a, b: (divide(a.sum(1), b.sum(1)), divide(a, b)), parts, whole)
        return Layered(_told(overall, whole.sum(1)), _told(layers, whole))

    def estimates(self, statistics: Callable[..., tuple[Floats, ...]], *tables: NDArray[Any]) -> tuple[Estimate, ...]:
        """Values and intervals of several statistics that need the same sums.

        Each table is [groups, ...]. ``statistics`` gets the sums of each over groups, with one axis for resamples
        before the others, and returns arrays with that axis first.
        """
        flat = [np.asarray(table, np.float64).reshape(len(table), -1) for table in tables]
        shapes = [table.shape[1:] for table in tables]
        width = max(1, sum(one.shape[1] for one in flat))
        chunk = max(1, _CHUNK_BYTES // (8 * width))
        drawn = [self._times[i : i + chunk] for i in range(0, len(self._times), chunk)]
        found = [
            statistics(*((times @ one).reshape(len(times), *shape) for one, shape in zip(flat, shapes, strict=True)))
            for times in (np.ones((1, len(flat[0]))), *drawn)
        ]
        estimates = []
        for value, *resampled in zip(*found, strict=True):
            low, high = _interval(np.concatenate(resampled)) if resampled else np.full((2, *value[0].shape), np.nan)
            estimates.append(Estimate(value[0], low, high))
        return tuple(estimates)


def _told(estimate: Estimate, whole: NDArray[Any]) -> Estimate:
    """The estimate, without an interval where fewer than two groups have anything to tell."""
    few = np.asarray((whole != 0).sum(0) < 2)
    few = few.reshape((*few.shape, *(1 for _ in range(estimate.value.ndim - few.ndim))))
    return Estimate(estimate.value, *(np.where(few, np.nan, end) for end in (estimate.low, estimate.high)))


def _interval(found: Floats) -> tuple[Floats, Floats]:
    """Ends of the middle part of the first axis, over the resamples in which the statistic can be told."""
    ordered = np.sort(found, axis=0)  # NaN comes last
    known = (~np.isnan(found)).sum(0)
    ends = []
    for part in ((1 - MIDDLE) / 2, (1 + MIDDLE) / 2):
        place = part * np.maximum(known - 1, 0)
        below = np.floor(place).astype(np.int64)
        above = np.minimum(below + 1, np.maximum(known - 1, 0))
        one, two = (np.take_along_axis(ordered, i[None], 0)[0] for i in (below, above))
        ends.append(one + (two - one) * (place - below))
    return ends[0], ends[1]
