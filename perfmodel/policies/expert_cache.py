"""A cache of experts on the GPU by any rule, and Belady's bound for all of them.

All experts are in host memory; a cache on the GPU holds some of them. What misses is copied and run on the GPU, or runs
on the CPU. Rules and the order of requests: `perfmodel.caches`. ``rule=belady`` knows the future and has the fewest
misses that any cache on demand of the same size can have; it bounds hit rates, not times, since a cache that copies
ahead, at fewer bits or runs misses elsewhere can be faster.

- ``predict`` copies ahead what the next layer is expected to pick: ``oracle`` is always right, ``table`` learns from
  the other sequences which experts follow which, ``gate`` applies the next gate to the current hidden state and is
  right with the chance ``accuracy``. A copy that was started is not aborted.
- ``warm=prompt`` starts each sequence with the experts that its prompt used most, of those that the prefill has just
  copied. ``warm=filled`` fills the rest of the slots with copies before the first step, which count as migrations.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from perfmodel.caches import CacheRule, ExpertCache
from perfmodel.errors import PolicyError
from perfmodel.model import MoEModel
from perfmodel.policies.base import PlanInputs, option, require
from perfmodel.policies.cached import CachedExperts, Misses

Predict = Literal["none", "oracle", "table", "gate"]


@dataclass(frozen=True)
class CachedByRule(CachedExperts):
    """An expert cache by any rule."""

    name: ClassVar[str] = "expert-cache"
    summary: ClassVar[str] = "experts cached on the GPU by a rule; misses copied or run on the CPU"
    source: ClassVar[str] = "rules as in perfmodel.caches; belady: IBM Systems Journal 5 (1966)"

    rule: CacheRule = option("lru", "which expert is evicted")
    misses: Misses = option("fetch", "picks that miss are copied and run on the GPU, or run on the CPU")
    predict: Predict = option("none", "what the next layer is expected to pick, and is copied ahead")
    accuracy: float = option(0.96, "with predict=gate: chance that a predicted expert is right", low=0, high=1)
    persistent: Literal["no", "yes"] = option("no", "whether the cache lives on from one sequence to the next")
    seed: int = option(0, "with predict=gate: seed of the wrong predictions", low=0, high=2**32 - 1)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "predict", self.rule != "belady" or self.predict == "none", "none with rule=belady")

    @property
    def where_missing(self) -> Misses:
        return self.misses

    def _cache(self, model: MoEModel, slots: int) -> ExpertCache:
        capacity = slots * len(model.moe_layers) if self.scope == "global" else slots
        return ExpertCache(capacity, self.rule, self.scope, persistent=self.persistent == "yes")

    def _requests(self, inputs: PlanInputs) -> dict[str, Any]:
        from perfmodel.routing import prediction

        found: dict[str, Any] = {}
        if self.rule == "recent-score":
            if inputs.replay.trace.topk_weights is None:
                raise PolicyError(f"policy {self.name}: rule=recent-score needs routing weights, this trace has none")
            found["scores"] = inputs.replay.decode_weights
        if self.predict == "oracle":
            found["predicted"] = prediction.oracle_prediction(inputs.replay)
        elif self.predict == "table":
            found["predicted"] = prediction.table_prediction(inputs.replay, inputs.model.top_k)
        elif self.predict == "gate":
            found["predicted"] = prediction.gate_prediction(inputs.replay, self.accuracy, self.seed)
        return found
