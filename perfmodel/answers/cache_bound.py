"""Belady's hit rate beside that of a policy's expert cache: same slots, same scope, same start.

Of all caches that copy on demand, the rule that knows the future has the fewest misses. The bound is of hits, not of
time, and a cache that copies ahead may exceed it. Caches that start with other experts than these rules have no bound
here.
"""

from typing import Literal, NamedTuple

import numpy as np

from perfmodel.caches import HIT_HIGH, Scope
from perfmodel.policies import Hobbit, PlanInputs, Policy
from perfmodel.policies.cached import CachedExperts, Warm
from perfmodel.policies.expert_cache import CachedByRule
from perfmodel.policies.hybrimoe import HybriMoE
from perfmodel.policies.llama_cpp import LlamaCpp


class CacheSize(NamedTuple):
    """What Belady's rule needs to know of a cache.

    slots : experts of a layer that it holds. warm : what it starts with. persistent : whether it lives on from one
    sequence to the next. resident_from : place of the first MoE layer, and of all after it, whose experts are always
    on the GPU; None without any.
    """

    slots: int
    scope: Scope
    warm: Warm
    persistent: Literal["no", "yes"] = "no"
    resident_from: int | None = None


def cache_size(rule: Policy, inputs: PlanInputs) -> CacheSize | None:
    """Size of a policy's expert cache, whatever it evicts by; None for a policy that has none, or starts otherwise.

    HOBBIT has two pools, which together hold at most as many distinct experts as both have slots; it starts empty.
    """
    model, most = inputs.model, inputs.most_gpu_experts
    if isinstance(rule, CachedExperts):
        lives_on = rule.persistent if isinstance(rule, CachedByRule) else "no"
        return CacheSize(rule._slots(model, most), rule.scope, rule.warm, lives_on)
    if isinstance(rule, Hobbit):
        return CacheSize(min(model.num_experts, rule.cache_high + rule.cache_low), rule.scope, "empty")
    if isinstance(rule, HybriMoE) and rule.warm == "prompt" and inputs.replay.trace.has_prefill:
        return CacheSize(rule._slots(model, most), "layer", "prompt")
    if isinstance(rule, LlamaCpp) and rule.cache in ("lru", "lfu"):
        split = rule._split(model, most)
        return CacheSize(split.slots, "layer", "prompt", resident_from=split.cpu_layers)
    return None


def belady_hit_rate(size: CacheSize, inputs: PlanInputs) -> float:
    """Share of decode picks that hit by Belady's rule in a cache of this size, mean over sequences [1]."""
    rule = CachedByRule(rule="belady", slots=size.slots, scope=size.scope, warm=size.warm, persistent=size.persistent)
    hits = rule.replay(inputs, size.slots).outcome == HIT_HIGH
    if size.resident_from is not None:
        hits[:, size.resident_from :] = True
    hits &= inputs.replay.assigned
    starts = inputs.replay.decode_offsets[:-1]
    asked = np.add.reduceat(inputs.replay.assigned.sum(axis=(1, 2)), starts)
    return float((np.add.reduceat(hits.sum(axis=(1, 2)), starts) / np.maximum(asked, 1)).mean())
