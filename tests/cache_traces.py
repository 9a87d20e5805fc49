"""Generated traces with the statistics of measured caches, as the arrays that a replay takes.

No curve was fitted. Qwen3-30B's parameters are the preset's, which was fitted to reuse, skew and distinct experts; the
batched trace was given the shape that reaches the published mean batch and distinct experts.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from perfmodel.routing.presets import PRESETS
from perfmodel.routing.synthetic import generate

NO_EXPERT = 65535
Used = NDArray[np.bool_]


class Picks(NamedTuple):
    """Picks of decode steps: uint16 [T, L, k] with 65535 for none, the first step of each sequence, experts a layer."""

    ids: NDArray[np.uint16]
    offsets: NDArray[np.int64]
    num_experts: int

    @property
    def counts(self) -> NDArray[np.int64]:
        """How often every expert is asked for [L, E]."""
        return self.used.sum(axis=0)

    @property
    def used(self) -> Used:
        """Which experts every step asks for [T, L, E]."""
        return used(self.ids, self.num_experts)

    @property
    def asked(self) -> int:
        """All requests."""
        return int((self.ids < self.num_experts).sum())


def used(ids: NDArray[Any], num_experts: int) -> Used:
    """Which experts the picks of each row name [..., E]."""
    found = np.zeros((*ids.shape[:-1], num_experts + 1), np.bool_)
    np.put_along_axis(found, np.minimum(ids, num_experts).astype(np.int64), True, axis=-1)
    return found[..., :-1]


def sequences(name: str, number: int, steps: int, seed: int = 0) -> Picks:
    """Decode steps by a preset of the generator, one sequence after another."""
    preset = PRESETS[name]
    shape = (preset.num_layers, preset.num_experts, preset.top_k)
    trace = generate(number, 0, steps, *shape, seed=seed, **preset.skew._asdict())
    return Picks(trace.topk_ids.astype(np.uint16), np.arange(number + 1, dtype=np.int64) * steps, preset.num_experts)


def loosely_reused(number: int = 4, steps: int = 256, seed: int = 0) -> Picks:
    """Top-6 of 256 experts, skewed; reuse only by a sequence's own profile. 16 layers, chosen to show both regimes."""
    trace = generate(number, 0, steps, 16, 256, 6, alpha=0.15, sequence_concentration=200.0, seed=seed)
    return Picks(trace.topk_ids.astype(np.uint16), np.arange(number + 1, dtype=np.int64) * steps, 256)


def batched(picks: Picks, in_flight: NDArray[np.int64]) -> Picks:
    """One sequence whose step t asks for what the first ``in_flight[t]`` sequences pick at their token t.

    Every expert is asked for once a step and layer, by rising number, as an engine does that runs expert by expert.
    """
    steps = int(picks.offsets[1])
    each = picks.used.reshape(-1, steps, *picks.used.shape[1:])
    together = np.stack([each[:batch, step].any(axis=0) for step, batch in enumerate(in_flight)])
    ids = np.where(together, np.arange(picks.num_experts), NO_EXPERT).astype(np.uint16)
    ids = np.sort(ids, axis=-1)[..., : together.sum(axis=-1).max()]
    return Picks(np.ascontiguousarray(ids), np.array([0, len(ids)]), picks.num_experts)


def draining(steps: int) -> NDArray[np.int64]:
    """Requests in flight: 32 falling to 26, and in the last quarter only the longest ones, 4 falling to 1.

    The mean is 21 and the most 32, as published; how many run at which time is not. With Mixtral's picks the drain
    brings the distinct experts of a layer down to the published 6.92 of 8, which 20 requests at all times never do.
    """
    return np.round(np.interp(np.arange(steps) / steps, [0, 0.65, 0.75, 1], [32, 26, 4, 1])).astype(np.int64)


def by_importance(picks: Picks) -> NDArray[np.uint16]:
    """Experts of every layer by falling use over the whole trace, as the start of a warm cache [1, L, E]."""
    return np.argsort(-picks.counts, axis=-1, kind="stable").astype(np.uint16)[None]


def frequency_hits(counts: NDArray[np.int64], known: NDArray[np.int64], capacity: int) -> int:
    """Picks that hit when the experts of all layers that are used most by ``known`` [L, E] never leave the cache."""
    return int(counts.ravel()[np.argsort(-known, axis=None, kind="stable")[:capacity]].sum())


def reuse_within(picks: Picks, tokens: int) -> float:
    """Share of picks whose expert is picked again by one of the next tokens of the sequence [1]."""
    found = asked = 0
    for rows in np.split(picks.used, picks.offsets[1:-1]):
        first = rows[:-tokens]
        soon = np.zeros_like(first)
        for lag in range(1, tokens + 1):
            soon |= rows[lag : len(first) + lag]
        found, asked = found + int((first & soon).sum()), asked + int(first.sum())
    return found / asked


def distinct_within(picks: Picks, tokens: int) -> float:
    """Mean distinct experts of a layer in so many consecutive tokens of one sequence."""
    steps = int(picks.offsets[1])
    each = picks.used.reshape(-1, steps, *picks.used.shape[1:])[:, : steps // tokens * tokens]
    windows = each.reshape(-1, tokens, *each.shape[2:])
    return float(windows.any(axis=1).sum(axis=-1).mean())
