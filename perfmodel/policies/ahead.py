"""Copies ahead that stay out of the cache until they are used: what MoE-Offloading and ProMoE share.

The next layer's experts are foretold while a layer runs, each pick rightly with the chance ``accuracy`` (see
`perfmodel.routing.prediction.gate_prediction`). Those that are not resident are copied ahead. A right one enters the
cache when it is used. A wrong one crosses the link in vain and evicts nobody. An expert that is foretold and
resident counts as used, and is not evicted in that step.

Experts in flight are not counted as memory where there is a cache.
"""

from dataclasses import dataclass

import numpy as np

from perfmodel.caches import AHEAD_HIGH, HIGH, MISS_HIGH, NOT_RUN, NOTHING, CacheReplay, replay_cache
from perfmodel.policies.base import EXPERTS, MOST_FORETOLD, PlanInputs, option, require
from perfmodel.policies.cached import CachedExperts
from perfmodel.routing.blocks import NO_EXPERT


@dataclass(frozen=True)
class CopiedAhead(CachedExperts):
    """A cache that wrong copies do not enter."""

    predicted: int | None = option(
        None, "picks of the next layer that are foretold; auto: all; 0: none", "0 to k | auto", low=0, high=EXPERTS
    )
    accuracy: float = option(0.85, "chance that a foretold expert is right", low=0, high=1)
    seed: int = option(0, "seed of the wrong predictions", low=0, high=2**32 - 1)

    def replay(self, inputs: PlanInputs, slots: int) -> CacheReplay:
        top_k = inputs.model.top_k
        most = min(top_k, MOST_FORETOLD)
        foretold_picks = top_k if self.predicted is None else self.predicted
        require(self, "predicted", foretold_picks <= most, f"0 to {most}{' | auto' * (most == top_k)}")
        if self.predicted == 0:
            return super().replay(inputs, slots)
        from perfmodel.routing import prediction

        ids = inputs.replay.decode_ids
        foretold = prediction.gate_prediction(inputs.replay, self.accuracy, self.seed, self.predicted)
        # A prediction is right in the place of its pick, or names an expert that the step does not pick at all.
        right = foretold == ids[..., : foretold.shape[2]]
        wrong = np.where(right, np.uint16(NO_EXPERT), foretold)
        width = foretold.shape[2]
        # Wrong predictions ask first, and nothing is kept for them; which of them are not resident is then known.
        wanted = np.full((*ids.shape[:2], width + ids.shape[2]), HIGH, np.uint8)
        wanted[..., :width] = NOTHING
        found = replay_cache(
            np.concatenate([wrong, ids], axis=2),
            inputs.replay.decode_offsets,
            inputs.model.num_experts,
            self._cache(inputs.model, slots),
            wanted=wanted,
            initial=self._initial(inputs),
            batch=inputs.replay.batch.tokens,
        )
        absent = (found.outcome[..., :width] == NOT_RUN) & (wrong != NO_EXPERT)
        outcome = np.ascontiguousarray(found.outcome[..., width:])
        picks = outcome[..., :width]
        picks[right & (picks == MISS_HIGH)] = AHEAD_HIGH
        return CacheReplay(
            outcome,
            np.ascontiguousarray(found.kept[..., width:]),
            absent.sum(axis=2).astype(np.uint8),
            np.zeros_like(found.wasted_low),
        )
