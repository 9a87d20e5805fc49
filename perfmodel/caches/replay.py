"""Replay a cache over decode steps."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from perfmodel.caches.checks import (
    check_shape,
    checked_ids,
    checked_match,
    checked_numbers,
    checked_offsets,
    checked_wanted,
)
from perfmodel.caches.on_demand import on_demand
from perfmodel.caches.settings import RULES, ExpertCache
from perfmodel.caches.steps import Requests, by_token, foretold, requests, sum_scores
from perfmodel.errors import PolicyError, TraceError
from perfmodel.kernels.cache import (
    AHEAD_HIGH,
    AHEAD_LOW,
    HIT_HIGH,
    HIT_LOW,
    MISS_HIGH,
    MISS_LOW,
    NOT_RUN,
    replay,
)


class CacheReplay(NamedTuple):
    """What became of every pick.

    outcome : uint8 [T, L, k], codes HIT_HIGH to AHEAD_LOW of this module
    kept : bool [T, L, k], whether the expert that ran is resident after its request: False where nothing ran, where
        a copy found no room, and where Belady's rule did not want it
    wasted_high, wasted_low : uint8 [T, L], copies issued ahead for this step that none of its picks used
    """

    outcome: NDArray[np.uint8]
    kept: NDArray[np.bool_]
    wasted_high: NDArray[np.uint8]
    wasted_low: NDArray[np.uint8]

    @property
    def counts(self) -> NDArray[np.int64]:
        """How many picks had each outcome [7]."""
        return np.bincount(self.outcome.ravel(), minlength=7)

    @property
    def hit_rate(self) -> float:
        """Share of the picks that ran whose expert was resident before their step [1]; 0 without any."""
        counts = self.counts
        ran = counts.sum() - counts[NOT_RUN]
        return float(counts[[HIT_HIGH, HIT_LOW]].sum() / ran) if ran else 0.0

    @property
    def copies_high(self) -> int:
        """Copies at high precision, wasted ones included."""
        return int(self.counts[[MISS_HIGH, AHEAD_HIGH]].sum() + self.wasted_high.sum(dtype=np.int64))

    @property
    def copies_low(self) -> int:
        """Copies at low precision, wasted ones included."""
        return int(self.counts[[MISS_LOW, AHEAD_LOW]].sum() + self.wasted_low.sum(dtype=np.int64))


def replay_cache(
    ids: NDArray[np.uint16],
    offsets: NDArray[np.int64],
    num_experts: int,
    cache: ExpertCache,
    *,
    wanted: NDArray[np.uint8] | None = None,
    predicted: NDArray[np.uint16] | None = None,
    predicted_wanted: NDArray[np.uint8] | None = None,
    initial: NDArray[np.uint16] | None = None,
    scores: NDArray[np.floating[Any]] | None = None,
    likelihood: NDArray[np.floating[Any]] | None = None,
    match: NDArray[np.int64] | None = None,
    batch: int = 1,
) -> CacheReplay:
    """Replay a cache over decode steps, see the module for the rules.

    Parameters
    ----------
    ids : uint16 [T, L, k], expert of every pick, none twice in a step and layer; ``num_experts`` or 65535 is no pick.
        Replace the picks that are not to ask the cache by one of these.
    offsets : int64 [S + 1], rising from 0 to T, first step of each sequence
    num_experts : experts a layer
    cache : capacity, rule and scope
    wanted : uint8 [T, L, k], 0 high, 1 low, 2 nothing: what a pick is copied at on a miss; None: all high
    predicted : uint16 [T, L, p], experts foretold for this step, marked as ``ids``; None: nothing is copied ahead
    predicted_wanted : uint8 [T, L, p], as ``wanted``
    initial : uint16 [S or 1, L, n], what is resident at high precision at the start of a sequence, as far as it fits:
        the experts of a layer by falling importance, of which the first counts as the most recent. In scope "global"
        the first of all layers come before the second ones. None: empty. A persistent cache takes the first row.
    scores : [T, L, k], gate weight of every pick, needed by rule "recent-score"
    likelihood : [N, L, E], likelihoods of activation for rule "activation"; None: shares of the uses so far
    match : int64 [T], which of the N holds in a step; None where N is 1
    batch : tokens of a decode step, which stand one after another in all these arrays and ask together, see
        ``caches/steps.py``. Then ``kept`` is said of the first pick of an expert in a step, what is wasted of the first
        token, and that of the first token holds of ``match``.

    Raises
    ------
    TraceError : for arrays of other types or shapes, or entries that are out of range
    PolicyError : for rule "belady" with predictions or with two precisions, of which no best order is known
    """
    ids = checked_ids("ids", ids, num_experts)
    steps, layers, _ = ids.shape
    bounds = checked_offsets(offsets, steps)
    if (bounds % batch).any():
        raise TraceError(f"batch is {batch}, expected a number that divides the tokens of every sequence")
    if cache.rule == "belady" and (wanted is not None or predicted is not None):
        what = "wanted precisions" if wanted is not None else "predictions"
        raise PolicyError(f"cache: rule belady is the bound of caches on demand at one precision; {what} are given")
    if cache.rule == "recent-score" and scores is None:
        raise TraceError("scores are missing, rule recent-score needs the gate weight of every pick")
    shape = ids.shape
    wants = checked_wanted("wanted", wanted, shape)
    ahead = np.empty((steps, layers, 0), np.uint16)
    if predicted is not None:
        ahead = checked_ids("predicted", predicted, num_experts)
        check_shape("predicted", ahead, (steps, layers, None))
    elif predicted_wanted is not None:
        raise TraceError("predicted_wanted is given without predicted")
    ahead_wants = checked_wanted("predicted_wanted", predicted_wanted, ahead.shape)
    asked = None
    if batch > 1:
        asked = requests(ids, wants, num_experts, batch)
        ahead, ahead_wants = foretold(ahead, ahead_wants, num_experts, batch)
        ids, wants, bounds, steps = asked.ids, asked.wanted, bounds // batch, steps // batch
    if ahead.shape[2] > 255:
        raise TraceError(f"predicted has {ahead.shape[2]} experts a step and layer, at most 255")
    first = np.empty((1, layers, 0), np.uint16)
    if initial is not None:
        first = checked_ids("initial", initial, num_experts)
        check_shape("initial", first, ((1, len(bounds) - 1), layers, None))
    gates = np.empty((0, 0, 0))
    if scores is not None:
        gates = checked_numbers("scores", scores, shape)
        gates = gates if asked is None else sum_scores(gates, asked.place, batch)
    chances, rows = np.empty((0, 0, 0)), np.zeros(0, np.int64)
    if likelihood is not None:
        chances = checked_numbers("likelihood", likelihood, (None, layers, num_experts))
        rows = np.ascontiguousarray(checked_match(match, shape[0], len(chances))[::batch])
    elif match is not None:
        raise TraceError("match is given without likelihood")
    if cache.persistent:
        bounds = bounds[[0, -1]]
    if wanted is None and predicted is None:
        found = on_demand(ids, bounds, first, num_experts, cache)
        if found is not None:
            return _by_pick(CacheReplay(*found, *np.zeros((2, steps, layers), np.uint8)), asked, batch)
    outcome, kept, wasted = replay(
        ids,
        wants,
        ahead,
        ahead_wants,
        bounds,
        first,
        gates,
        chances,
        rows,
        np.array([cache.capacity, cache.capacity_low or 0]).astype(np.int64),
        np.ceil([cache.high_size, cache.low_size]).astype(np.int64),
        np.array([*cache.weights, cache.smoothing], np.float64),
        num_experts,
        RULES.index(cache.rule),
        cache.scope == "global",
        cache.capacity_low is None,
        cache.protected,
    )
    return _by_pick(CacheReplay(outcome, kept, wasted[..., 0], wasted[..., 1]), asked, batch)


def _by_pick(found: CacheReplay, asked: Requests | None, batch: int) -> CacheReplay:
    """What became of the picks of every token, from what became of the requests of every step."""
    if asked is None:
        return found
    wasted = np.zeros((2, len(found.outcome) * batch, found.outcome.shape[1]), np.uint8)
    wasted[:, ::batch] = found.wasted_high, found.wasted_low
    return CacheReplay(asked.each_token(found.outcome, batch), by_token(found.kept, batch), *wasted)
