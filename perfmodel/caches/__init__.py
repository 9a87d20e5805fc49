"""Caches of experts on the GPU: which picks find their expert there, and what is copied.

What happens in layer l of step t, in this order:

1. Experts that were predicted for it and are not resident are copied ahead, in their listed order. Such a copy enters
   the cache and is not aborted, so a wrong one occupies the link as well.
2. Its picks ask in their listed order. A pick that wants high precision is served by a high copy only, one that wants
   low precision, or is not worth a copy, by either. On a miss the expert is copied as the pick wants it, or not run.

``protected`` (default) keeps everything that serves a pick of the step, or was predicted for it, from being evicted in
that step; the picks are not yet known while copies are made ahead. A copy that then finds no room is used and not
kept: below top-k slots a step fills the cache with the first picks that fit. Without ``protected`` requests are served
strictly one after another, so that a pick may evict what a later pick of the same step needs, and with fewer slots
than picks the last ones stay.

What is evicted is the resident with the lowest score; of equal ones the least recently used, then that of the lower
layer and the lower number. A copy is as recent as its arrival. Scores, of expert e of layer i while layer l runs:

=============== =====================================================================================================
lru             none, so the least recently used one
lfu             uses
weighted        (w1 R + w2 F + w3 H) / T + w4 (1 - ((i - l) mod L) / L), HOBBIT: R the step of the last use or copy,
                F uses, H uses at high precision, T the current step, all counted from 1
recent-score    S, where every step of the layer makes S = a s + (1 - a) S of it, HybriMoE: s the pick's gate weight,
                0 for experts that were not picked
activation      (p + 1e-4) (1 - ((i - l) mod L) / L), MoE-Infinity: p the expert's share of the uses of its layer, or
                the likelihood that is given
belady          minus the next request: the best that a cache on demand can do (Belady, IBM Systems Journal 5, 1966).
                It does not keep an expert that is requested later than all residents, and ``protected`` does not bind
                it, so that it bounds caches of both kinds.
=============== =====================================================================================================

Uses are picks that ran; they are counted from the start of the sequence, or of the trace for a persistent cache, and
survive eviction. The published weights of HOBBIT's terms and the constant of HybriMoE's mean are not known; the
defaults (0.25 each, 0.5) are assumptions. MoE-Infinity's layer term is read as nearness in the order of execution.
"""

from perfmodel.caches.on_demand import lru_hits_by_capacity
from perfmodel.caches.replay import CacheReplay, replay_cache
from perfmodel.caches.settings import RULES, CacheRule, ExpertCache, Scope
from perfmodel.kernels.cache import (
    AHEAD_HIGH,
    AHEAD_LOW,
    HIGH,
    HIT_HIGH,
    HIT_LOW,
    LOW,
    MISS_HIGH,
    MISS_LOW,
    NOT_RUN,
    NOTHING,
)
from perfmodel.kernels.tally import NO_EXPERT

__all__ = [
    "AHEAD_HIGH",
    "AHEAD_LOW",
    "HIGH",
    "HIT_HIGH",
    "HIT_LOW",
    "LOW",
    "MISS_HIGH",
    "MISS_LOW",
    "NOTHING",
    "NOT_RUN",
    "NO_EXPERT",
    "RULES",
    "CacheReplay",
    "CacheRule",
    "ExpertCache",
    "Scope",
    "lru_hits_by_capacity",
    "replay_cache",
]
