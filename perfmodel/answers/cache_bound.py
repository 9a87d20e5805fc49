"""Belady's hit rate beside that of a policy's expert cache: same slots, same scope, same start.

Of all caches that copy on demand, the rule that knows the future has the fewest misses. A cache that never changes is
one of them: it keeps nothing of what it copies. The bound is of hits, not of time, and a cache that copies ahead may
exceed it.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from perfmodel.caches import HIT_HIGH, NO_EXPERT, ExpertCache, Scope, replay_cache
from perfmodel.policies import Hobbit, PlanInputs, Policy
from perfmodel.policies.base import prefill_counts
from perfmodel.policies.cached import CachedExperts
from perfmodel.policies.expert_cache import CachedByRule
from perfmodel.policies.hybrimoe import HybriMoE
from perfmodel.policies.llama_cpp import LlamaCpp
from perfmodel.routing import statistics


class CacheSize(NamedTuple):
    """What Belady's rule needs to know of a cache; policies of equal ones have one bound.

    slots : experts of a layer that it holds. start : what it starts with, the bytes of ``initial`` [S, L, E] of
    `replay_cache`; None: empty. persistent : whether it lives on from one sequence to the next. resident_from : place
    of the first MoE layer, and of all after it, whose experts are always on the GPU; None without any.
    """

    slots: int
    scope: Scope
    start: bytes | None
    persistent: bool = False
    resident_from: int | None = None


def cache_size(rule: Policy, inputs: PlanInputs) -> CacheSize | None:
    """Size of a policy's expert cache, whatever it evicts by; None for a policy that has none.

    HOBBIT has two pools, which together hold at most as many distinct experts as both have slots. llama.cpp's caches
    that change are taken to start with what the prompt used, which is no less than they do where it is not copied.
    """
    model, most = inputs.model, inputs.most_gpu_experts
    if isinstance(rule, CachedExperts):
        persistent = isinstance(rule, CachedByRule) and rule.persistent == "yes"
        initial = rule._initial(inputs)
        start = None if initial is None else initial.tobytes()
        return CacheSize(rule._slots(model, most), rule.scope, start, persistent)
    if isinstance(rule, Hobbit):
        start = _used_by_prompt(inputs) if rule.warm == "prompt" else None
        return CacheSize(min(model.num_experts, rule.cache_high + rule.cache_low), rule.scope, start)
    if isinstance(rule, HybriMoE):
        slots, counts = rule._slots(model, most), prefill_counts(inputs)
        if rule.warm == "empty" or counts is None:
            return CacheSize(slots, "layer", _listed(rule._before(inputs, slots)))
        return CacheSize(slots, "layer", statistics.ranked_experts(counts).astype(np.uint16).tobytes())
    if isinstance(rule, LlamaCpp) and rule.cache != "none":
        split = rule._split(model, most)
        start = _listed(rule._fixed(inputs, split)[0]) if rule.cache == "static" else _used_by_prompt(inputs)
        return CacheSize(split.slots, "layer", start, resident_from=split.cpu_layers)
    return None


def _listed(importance: NDArray[Any]) -> bytes:
    """Experts of some importance, the most important first."""
    order = statistics.ranked_experts(importance)
    return np.where(np.take_along_axis(importance, order, axis=-1) > 0, order, NO_EXPERT).astype(np.uint16).tobytes()


def _used_by_prompt(inputs: PlanInputs) -> bytes | None:
    counts = prefill_counts(inputs)
    return None if counts is None else _listed(counts)


def belady_hit_rate(size: CacheSize, inputs: PlanInputs) -> float:
    """Share of decode picks that hit by Belady's rule in a cache of this size, mean over sequences [1]."""
    replay = inputs.replay
    capacity = size.slots * len(inputs.model.moe_layers) if size.scope == "global" else size.slots
    cache = ExpertCache(capacity, "belady", size.scope, persistent=size.persistent)
    initial, shape = None, (replay.trace.num_sequences, len(inputs.model.moe_layers), inputs.model.num_experts)
    if size.start is not None:
        initial = np.frombuffer(size.start, np.uint16).reshape(shape)
    batch = replay.batch.tokens
    found = replay_cache(replay.decode_ids, replay.decode_offsets, shape[2], cache, initial=initial, batch=batch)
    hits = found.outcome == HIT_HIGH
    if size.resident_from is not None:
        hits[:, size.resident_from :] = True
    hits &= replay.assigned
    starts = replay.decode_offsets[:-1]
    asked = np.add.reduceat(replay.assigned.sum(axis=(1, 2)), starts)
    return float((np.add.reduceat(hits.sum(axis=(1, 2)), starts) / np.maximum(asked, 1)).mean())
