"""The caches on demand at one precision that have a kernel of their own, and all capacities of the LRU rule at once."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfmodel.caches.checks import checked_ids, checked_offsets
from perfmodel.caches.settings import ExpertCache
from perfmodel.kernels import cache_demand, cache_lru, cache_weighted
from perfmodel.kernels.cache import NOT_RUN

_FEW = 8  # experts whose order fits into one integer
_MOST_PICKS = 2**31 - 1  # that the kernels can tell apart by their place
_MOST_RANKED = 254  # experts whose depths fit into a byte, 255 being nowhere


def on_demand(
    ids: NDArray[np.uint16],
    offsets: NDArray[np.int64],
    initial: NDArray[np.uint16],
    num_experts: int,
    cache: ExpertCache,
) -> tuple[NDArray[np.uint8], NDArray[np.bool_]] | None:
    """Outcome and whether it is kept of every pick, all of high precision, or None where only the general kernel can.

    The arguments are those of :func:`replay_cache`, checked.
    """
    capacity = int(cache.capacity) // int(np.ceil(cache.high_size))
    everywhere = cache.scope == "global"
    where: tuple[Any, ...] = (ids, offsets, initial)
    outcome: NDArray[np.uint8]
    kept: NDArray[np.bool_]
    if cache.rule == "lru":
        if num_experts <= _FEW and not everywhere:
            outcome, kept = cache_lru.lru_of_few(*where, num_experts, capacity, cache.protected)
            kept = kept if kept.size else outcome != NOT_RUN
        else:
            outcome, kept = cache_lru.lru_of_many(*where, num_experts, capacity, cache.protected, everywhere)
        return outcome, kept
    if ids.size + initial.size > _MOST_PICKS:
        return None
    if cache.rule == "lfu":
        outcome, kept = cache_demand.lfu(*where, num_experts, capacity, cache.protected, everywhere)
    elif cache.rule == "belady":
        outcome, kept = cache_demand.belady(*where, num_experts, capacity, everywhere)
    elif cache.rule == "weighted":
        weights = np.array(cache.weights, np.float64)
        outcome, kept = cache_weighted.weighted(*where, weights, num_experts, capacity, cache.protected, everywhere)
    else:
        return None
    return outcome, kept


def lru_hits_by_capacity(
    ids: NDArray[np.uint16], offsets: NDArray[np.int64], num_experts: int, *, persistent: bool = False
) -> NDArray[np.int64]:
    """Hits of an LRU cache of every layer at every capacity, in one pass [L, E + 1].

    Entry C is the number of hits of the layer's picks in a cache of C experts, without protection of what a step picks
    and empty at the start: what :func:`replay_cache` counts for ``ExpertCache(C, protected=False)``.

    Parameters
    ----------
    ids : uint16 [T, L, k], as for :func:`replay_cache`
    offsets : int64 [S + 1], first step of each sequence
    num_experts : experts a layer
    persistent : the cache lives on from one sequence to the next

    Raises
    ------
    TraceError : for arrays of other types or shapes, or entries that are out of range
    """
    ids = checked_ids("ids", ids, num_experts)
    bounds = checked_offsets(offsets, len(ids))
    if persistent:
        bounds = bounds[[0, -1]]
    found = np.zeros((ids.shape[1], num_experts + 1), np.int64)
    if num_experts <= _MOST_RANKED:
        cache_lru.lru_depths(ids, bounds, num_experts, found)
    else:
        cache_lru.lru_depths_of_many(ids, bounds, num_experts, found)
    hits = np.zeros_like(found)
    np.cumsum(found[:, :-1], axis=1, out=hits[:, 1:])
    return hits
