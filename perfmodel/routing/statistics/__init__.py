"""What a routing trace looks like: how often experts are picked, and how well a placement would have hit.

A cosine near 0.9 between two load vectors says little, as unrelated layers of a balanced model reach it too.
The hit rate of a placement beside its controls (:func:`hit_rate_controls`) is what decides latency.
:func:`survey` finds everything at once, with intervals, also of traces larger than memory.
"""

from perfmodel.routing.statistics.counts import (
    HitRate,
    HitRateControls,
    Overlap,
    adjacent_overlap,
    hit_rate,
    hit_rate_controls,
    load_cosine,
    ranked_experts,
    selection_counts,
    sum_of_others,
    top_experts,
    weight_sums,
)
from perfmodel.routing.statistics.reading import survey
from perfmodel.routing.statistics.results import (
    Batches,
    CacheCurves,
    Contents,
    Drift,
    Estimate,
    HitRates,
    Layered,
    NextLayer,
    Reuse,
    Similarity,
    Skew,
    Survey,
)
from perfmodel.routing.statistics.skew import entropy, gini, top_share

__all__ = [
    "Batches",
    "CacheCurves",
    "Contents",
    "Drift",
    "Estimate",
    "HitRate",
    "HitRateControls",
    "HitRates",
    "Layered",
    "NextLayer",
    "Overlap",
    "Reuse",
    "Similarity",
    "Skew",
    "Survey",
    "adjacent_overlap",
    "entropy",
    "gini",
    "hit_rate",
    "hit_rate_controls",
    "load_cosine",
    "ranked_experts",
    "selection_counts",
    "sum_of_others",
    "survey",
    "top_experts",
    "top_share",
    "weight_sums",
]
