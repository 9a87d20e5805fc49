"""How many different experts tokens visit, and how many of those a cache misses, where a run did not count them.

Two laws for two kinds of batches, because they differ: the tokens of several sequences choose nearly independently of
each other, those of one text resemble each other and visit fewer experts. Both rest on routing that was counted, on no
speed. Hit rates of a cache come from a replay of routing, on no speed either.
"""

import functools
import math

import numpy as np
from numpy.typing import NDArray

from perfmodel.evidence.measured import MeasuredRun
from perfmodel.model import MoEModel

#: How unevenly experts are visited: a law of popularity ``rank ** -ZIPF`` whose union over 16 tokens is the measured
#: 59.2 of 128 experts (Qwen3-30B-A3B, concurrent requests, shijiuzhang/moe-cache-eval).
ZIPF = 0.85

#: Tokens of one real text, and tokens at random that visit as many different experts: measured unions of 29.0, 52.8 and
#: 75.2 of 128 experts over 8, 32 and 128 tokens (Qwen3-30B-A3B, everett6/moe-prefetch
#: artifacts/r6_prefill_union.json), put through E (1 - (1 - k / E)^n). Beyond them in proportion to the logarithms.
TEXT = ((1.0, 8.0, 32.0, 128.0, 512.0), (1.0, 3.98, 8.24, 13.7, 22.8))

#: Hit rates of LRU slots in every layer over real prompts of Qwen3-30B-A3B (everett6/moe-prefetch
#: artifacts/p7_slot_allocation.json, 512 tokens): replayed there without an engine, so no speed is in them.
LRU_HITS = {
    16: 0.581,
    24: 0.7009,
    32: 0.7811,
    40: 0.838,
    48: 0.8785,
    56: 0.9074,
    64: 0.929,
    72: 0.944,
    80: 0.9556,
    88: 0.965,
}
_EXPERTS_OF_HITS = 128.0

#: Copies into a cache for each miss, where every first miss is admitted and nothing else is said (25.0 of 38.2 counted
#: by the engine of everett6/moe-prefetch, artifacts/r3_real_throughput_stack.json).
UPLOADS_PER_MISS = 0.654


@functools.cache
def _popularity(experts: int, top_k: int) -> NDArray[np.float64]:
    """Chance of each expert to be among those of a token [E], by the law of `ZIPF`; none above 1, their sum top_k."""
    chance = np.arange(1, experts + 1, dtype=np.float64) ** -ZIPF
    chance *= top_k / chance.sum()
    while chance.max() > 1.0:
        full = chance >= 1.0
        rest = chance[~full]
        chance[full] = 1.0
        chance[~full] = rest * ((top_k - full.sum()) / rest.sum())
    return chance


def distinct_experts(model: MoEModel, tokens: float, of_text: bool = False) -> float:
    """Different experts that so many tokens visit in one layer [1].

    Equation: the sum over experts of ``1 - (1 - p)^tokens`` with the popularities ``p`` of `ZIPF`; for consecutive
    tokens of one real text ``E (1 - (1 - k / E)^n)`` with the ``n`` of `TEXT`. Never above ``min(E, k tokens)``, and
    ``k`` for one token.

    tokens : of a step, all its sequences together [1]. of_text : they follow one another in one text.
    """
    count, top_k = model.num_experts, model.top_k
    if tokens <= 1.0:
        return float(top_k)
    if of_text:
        alike = math.exp(float(np.interp(math.log(tokens), np.log(TEXT[0]), np.log(TEXT[1]))))
        return float(min(-count * math.expm1(alike * math.log1p(-top_k / count)) if top_k < count else count, count))
    visited = -np.expm1(tokens * np.log1p(-np.minimum(_popularity(count, top_k), 1.0 - 1e-12)))
    return float(min(visited.sum(), count, top_k * tokens))


def missed_per_token(run: MeasuredRun, model: MoEModel) -> float:
    """Experts that a token finds missing, over all layers [1]: counted by the run, or from the slots of its cache.

    From slots: ``(1 - hit rate) * k * layers``, the hit rate that of `LRU_HITS` at the same share of the experts.
    """
    if run.misses_per_token is not None:
        return run.misses_per_token
    slots = 0.0 if run.slots_per_layer is None else run.slots_per_layer
    share = np.interp(slots * _EXPERTS_OF_HITS / model.num_experts, list(LRU_HITS), list(LRU_HITS.values()))
    return float((1.0 - share) * model.top_k * model.num_moe_layers)


def uploads_per_token(run: MeasuredRun, model: MoEModel) -> float:
    """Experts copied into the cache behind a token, over all layers [1]: counted by the run, or from its misses."""
    if run.uploads_per_token is not None:
        return run.uploads_per_token
    return UPLOADS_PER_MISS * missed_per_token(run, model)
