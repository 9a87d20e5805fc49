"""MoE-Infinity: cache and copies ahead follow the recorded sequence that went most like this one.

Source: arXiv 2401.14361. Every sequence leaves a matrix that counts the uses of each expert in each layer. While
decoding, the matrix so far is compared with the stored ones by cosine distance. The most similar one says how likely
each expert is, in all layers; prefetch and cache rank experts by that likelihood times the nearness of their layer,
and the cache, one for all layers, evicts the lowest.

- The stored matrices are those of the other sequences of the trace; for comparison and readings see
  `perfmodel.routing.prediction.activation_matches`. The cache rule is ``activation`` of `perfmodel.caches`.
- ``cache_by=own`` lets the cache rank by the counts of the sequence itself so far. That needs no similar record, and
  serves better where the other sequences are of other kinds; prefetch follows the match in any case.
- ``predicted`` experts of the next layer are copied ahead, the most likely first, if they are not resident; they
  enter the cache whether right or not. The published queue holds candidates of all layers, drops those that are out
  of date, and lets copies on demand pass, so that at most one wrong copy is under way when a router has run. The
  default is therefore one expert a layer; with more, every wrong one occupies the link.
- Experts keep the model's precision. A prefill copies every selected expert once.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from perfmodel.caches import ExpertCache, Scope
from perfmodel.model import MoEModel
from perfmodel.policies.base import EXPERTS, MOST_FORETOLD, PlanInputs, option, require
from perfmodel.policies.cached import CachedExperts


@dataclass(frozen=True)
class MoEInfinity(CachedExperts):
    """Activation-aware cache and prefetch."""

    name: ClassVar[str] = "moe-infinity"
    summary: ClassVar[str] = "cache of all layers and copies ahead by the use of experts in the most similar sequence"
    source: ClassVar[str] = "arXiv 2401.14361"

    scope: Scope = option("global", "slots of each layer, or of all layers together")
    cache_by: Literal["matched", "own"] = option(
        "matched", "the cache ranks experts by their use in the most similar sequence, or in this one so far"
    )
    predicted: int = option(1, "experts of the next layer that are foretold; 0: none", low=0, high=EXPERTS)

    def _cache(self, model: MoEModel, slots: int) -> ExpertCache:
        capacity = slots * len(model.moe_layers) if self.scope == "global" else slots
        return ExpertCache(capacity, "activation", self.scope)

    def _requests(self, inputs: PlanInputs) -> dict[str, Any]:
        from perfmodel.routing import prediction

        most = min(inputs.model.num_experts, MOST_FORETOLD)
        require(self, "predicted", self.predicted <= most, f"0 to {most} for {inputs.model.name}")
        found: dict[str, Any] = {}
        if self.cache_by == "matched":
            matches = prediction.activation_matches(inputs.replay)
            found |= {"likelihood": matches.library, "match": matches.best}
        if self.predicted:
            found["predicted"] = prediction.activation_prediction(inputs.replay, self.predicted)
        return found
