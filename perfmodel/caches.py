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

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from perfmodel.errors import PolicyError, TraceError

CacheRule = Literal["lru", "lfu", "weighted", "recent-score", "activation", "belady"]
Scope = Literal["layer", "global"]

RULES: tuple[CacheRule, ...] = get_args(CacheRule)
#: What stands for no pick, as in a trace of 16-bit ids.
NO_EXPERT = 65535
#: What a pick is copied at on a miss.
HIGH, LOW, NOTHING = range(3)
#: What a request finds. AHEAD: the copy was issued in the layer before, for this very step. NOT_RUN: no pick, or a miss
#: that wants no copy.
HIT_HIGH, HIT_LOW, MISS_HIGH, MISS_LOW, NOT_RUN, AHEAD_HIGH, AHEAD_LOW = range(7)


@dataclass(frozen=True)
class ExpertCache:
    """A cache and its rule.

    Parameters
    ----------
    capacity : what it holds, in the unit of the sizes: experts by default, or bytes. Of every layer, or of all layers
        together in ``scope`` "global". A fraction of a unit is not used.
    rule : which resident is evicted, see the module.
    capacity_low : capacity of a pool for copies at low precision; None puts both precisions into one pool.
    high_size, low_size : > 0, what a copy takes; a fraction of a unit takes it whole.
    protected : nothing that serves the current step of the layer is evicted.
    persistent : the cache lives on from one sequence to the next; else each starts anew.
    weights : >= 0, w1 to w4 of rule "weighted"
    smoothing : 0 to 1, a of rule "recent-score"

    Raises
    ------
    PolicyError : for values outside these ranges
    """

    capacity: float
    rule: CacheRule = "lru"
    scope: Scope = "layer"
    capacity_low: float | None = None
    high_size: float = 1
    low_size: float = 1
    protected: bool = True
    persistent: bool = False
    weights: tuple[float, float, float, float] = (0.25, 0.25, 0.25, 0.25)
    smoothing: float = 0.5

    def __post_init__(self) -> None:
        for name, allowed in (("rule", RULES), ("scope", get_args(Scope))):
            if getattr(self, name) not in allowed:
                raise PolicyError(f"cache: {name} is {getattr(self, name)!r}, expected one of {', '.join(allowed)}")
        for name, lowest in (("capacity", 0), ("capacity_low", 0), ("high_size", 1e-9), ("low_size", 1e-9)):
            value = getattr(self, name)
            if value is None and name == "capacity_low":
                continue
            if not _is_number(value) or not lowest <= value <= _LARGEST:
                raise PolicyError(f"cache: {name} is {value!r}, expected a number {'>= 0' if lowest == 0 else '> 0'}")
        if len(self.weights) != 4 or not all(_is_number(value) and 0 <= value < math.inf for value in self.weights):
            raise PolicyError(f"cache: weights are {self.weights!r}, expected four numbers >= 0")
        if not _is_number(self.smoothing) or not 0 <= self.smoothing <= 1:
            raise PolicyError(f"cache: smoothing is {self.smoothing!r}, expected 0 to 1")


_LARGEST = 1e15  # whole numbers up to here are exact


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

    Raises
    ------
    TraceError : for arrays of other types or shapes, or entries that are out of range
    PolicyError : for rule "belady" with predictions or with two precisions, of which no best order is known
    """
    ids = _ids("ids", ids, num_experts)
    steps, layers, width = ids.shape
    bounds = _offsets(offsets, steps)
    if cache.rule == "belady" and (wanted is not None or predicted is not None):
        what = "wanted precisions" if wanted is not None else "predictions"
        raise PolicyError(f"cache: rule belady is the bound of caches on demand at one precision; {what} are given")
    if cache.rule == "recent-score" and scores is None:
        raise TraceError("scores are missing, rule recent-score needs the gate weight of every pick")
    wants = _wanted("wanted", wanted, ids.shape)
    ahead = np.empty((steps, layers, 0), np.uint16)
    if predicted is not None:
        ahead = _ids("predicted", predicted, num_experts)
        _check_shape("predicted", ahead, (steps, layers, None))
        if ahead.shape[2] > 255:
            raise TraceError(f"predicted has {ahead.shape[2]} experts a step and layer, at most 255")
    elif predicted_wanted is not None:
        raise TraceError("predicted_wanted is given without predicted")
    ahead_wants = _wanted("predicted_wanted", predicted_wanted, ahead.shape)
    first = np.empty((1, layers, 0), np.uint16)
    if initial is not None:
        first = _ids("initial", initial, num_experts)
        _check_shape("initial", first, ((1, len(bounds) - 1), layers, None))
    gates = np.empty((0, 0, 0))
    if scores is not None:
        gates = _numbers("scores", scores, ids.shape)
    chances, rows = np.empty((0, 0, 0)), np.zeros(0, np.int64)
    if likelihood is not None:
        chances = _numbers("likelihood", likelihood, (None, layers, num_experts))
        rows = _match(match, steps, len(chances))
    elif match is not None:
        raise TraceError("match is given without likelihood")
    if cache.persistent:
        bounds = bounds[[0, -1]]
    from perfmodel.kernels import cache as kernels  # compiled code is loaded only after everything is checked

    capacity_low = cache.capacity_low
    outcome, kept, wasted = kernels.replay(
        ids,
        wants,
        ahead,
        ahead_wants,
        bounds,
        first,
        gates,
        chances,
        rows,
        np.array([cache.capacity, capacity_low or 0]).astype(np.int64),
        np.ceil([cache.high_size, cache.low_size]).astype(np.int64),
        np.array([*cache.weights, cache.smoothing], np.float64),
        num_experts,
        RULES.index(cache.rule),
        cache.scope == "global",
        capacity_low is None,
        cache.protected,
    )
    return CacheReplay(outcome, kept, wasted[..., 0], wasted[..., 1])


def _is_number(value: object) -> bool:
    return isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)


def _check_shape(name: str, array: NDArray[Any], shape: tuple[int | tuple[int, ...] | None, ...]) -> None:
    """Refuse another shape than this one, in which None is any length."""
    fits = array.ndim == len(shape) and all(
        want is None or found in (want if isinstance(want, tuple) else (want,))
        for found, want in zip(array.shape, shape, strict=True)
    )
    if not fits:
        wanted = ", ".join(
            "any"
            if want is None
            else " or ".join(map(str, dict.fromkeys(want)))
            if isinstance(want, tuple)
            else f"{want}"
            for want in shape
        )
        raise TraceError(f"{name} has shape {array.shape}, expected ({wanted})")


def _ids(name: str, value: NDArray[np.uint16], num_experts: int) -> NDArray[np.uint16]:
    """Ids as an array whose entries are experts or no pick."""
    if not isinstance(num_experts, int | np.integer) or not 1 <= num_experts <= NO_EXPERT:
        raise TraceError(f"num_experts is {num_experts!r}, expected 1 to {NO_EXPERT}")
    array = np.asarray(value)
    if array.dtype != np.uint16 or array.ndim != 3:
        raise TraceError(f"{name} has dtype {array.dtype} and {array.ndim} axes, expected uint16 and 3 axes")
    if ((array > num_experts) & (array != NO_EXPERT)).any():
        wrong = array[(array > num_experts) & (array != NO_EXPERT)][0]
        raise TraceError(f"{name} holds expert {wrong}, expected 0 to {num_experts - 1}, or {NO_EXPERT} for none")
    return np.ascontiguousarray(array)


def _offsets(value: NDArray[np.int64], steps: int) -> NDArray[np.int64]:
    array = np.asarray(value)
    if array.dtype.kind not in "iu" or array.ndim != 1 or len(array) < 2:
        raise TraceError(f"offsets have dtype {array.dtype} and shape {array.shape}, expected whole numbers [S + 1]")
    array = array.astype(np.int64)
    if array[0] != 0 or array[-1] != steps or (np.diff(array) < 0).any():
        raise TraceError(f"offsets run from {array[0]} to {array[-1]}, expected to rise from 0 to {steps}")
    return array


def _wanted(name: str, value: NDArray[np.uint8] | None, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    if value is None:
        return np.empty((0, 0, 0), np.uint8)
    array = np.asarray(value)
    _check_shape(name, array, shape)
    if array.dtype != np.uint8 or array.max(initial=0) > NOTHING:
        raise TraceError(f"{name} is no uint8 array of 0 (high), 1 (low) and 2 (nothing)")
    return np.ascontiguousarray(array)


def _numbers(name: str, value: NDArray[np.floating[Any]], shape: tuple[int | None, ...]) -> NDArray[np.float64]:
    array = np.asarray(value)
    _check_shape(name, array, shape)
    if array.dtype.kind != "f" or not (np.isfinite(array) & (array >= 0)).all():
        raise TraceError(f"{name} has other entries than finite numbers >= 0")
    return np.ascontiguousarray(array, np.float64)


def _match(value: NDArray[np.int64] | None, steps: int, rows: int) -> NDArray[np.int64]:
    if value is None:
        if rows != 1:
            raise TraceError(f"match is missing, but likelihood has {rows} rows, expected 1")
        return np.zeros(steps, np.int64)
    array = np.asarray(value)
    _check_shape("match", array, (steps,))
    if array.dtype.kind not in "iu" or (steps and not 0 <= array.min() <= array.max() < rows):
        raise TraceError(f"match has other entries than whole numbers from 0 to {rows - 1}")
    return array.astype(np.int64)
