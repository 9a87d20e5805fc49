"""What :func:`perfmodel.routing.statistics.survey` finds: plain records of arrays.

L layers, E experts, k picks of a token in a layer. A *scope* is ``all`` (every row of a sequence), ``prefill`` or
``decode``; only scopes that the recording has are there. Where a statistic cannot be told, its array holds NaN or its
record is None, and :attr:`Survey.notes` says why.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Scope = Literal["all", "prefill", "decode"]


class Estimate(NamedTuple):
    """A statistic and its 95 % interval, three arrays of one shape.

    The interval is for what endless sequences of the same kind would give, and holds the value; NaN where fewer than
    two sequences have anything to count, or fewer than three where other sequences place. See
    :class:`perfmodel.routing.statistics.intervals.Bootstrap`.
    """

    value: Floats
    low: Floats
    high: Floats


class Layered(NamedTuple):
    """A statistic over all layers, ``overall`` [...], and of each, ``layers`` [L, ...].

    Shares of picks weigh every pick alike over all layers and sequences unless said otherwise; cosines and measures
    of skew are means over layers.
    """

    overall: Estimate
    layers: Estimate


@dataclass(frozen=True)
class Contents:
    """What was surveyed: counts of tokens, the shape of the routing, and the metadata of the trace."""

    model: str
    source: str
    sequences: int
    prefill_tokens: int
    decode_tokens: int
    num_experts: int
    top_k: int
    layer_index: Integers
    metadata: dict[str, Any]

    @property
    def tokens(self) -> int:
        """Tokens (rows) of all sequences."""
        return self.prefill_tokens + self.decode_tokens


@dataclass(frozen=True)
class Skew:
    """How unevenly experts are picked, from the picks of all sequences together.

    Few sequences look more skewed than endless ones would. Values are of the picks as they are; intervals account for
    it, so that they reach mostly to the even side.

    picks : int64 [L, E], times that each expert was picked
    shares : float64 [L, E], the same as a share of the layer's picks
    top_half : share of the picks that go to the E // 2 most picked experts; 0.5 (E even) if all are alike
    gini : 0 if all experts are picked alike, towards 1 - 1 / E if only one is
    entropy : of the shares, as a part of that of equal shares, log(E); 1 if all are alike, 0 if one takes all
    """

    picks: Integers
    shares: Floats
    top_half: Layered
    gini: Layered
    entropy: Layered


@dataclass(frozen=True)
class Reuse:
    """Share of a token's picks that the token ``lag`` rows before made too, both in the same sequence and scope.

    measured : [..., lags], in the order of :attr:`Survey.lags`
    chance : [...], the same for two different tokens drawn from the sequence at random,
        sum over experts of n (n - 1) / (N (N - 1) k) with n picks in N rows
    """

    measured: Layered
    chance: Layered


@dataclass(frozen=True)
class Batches:
    """Distinct experts a layer that a batch picks in one decode step, a token of each of its sequences.

    A server takes up sequences at any time, so its batches hold tokens of unlike output positions; sequences at the
    same output position begin alike and pick fewer. There is no interval: a sequence less changes the batches that are
    drawn, not only what they hold.

    sizes : int64 [B], sequences in a batch
    distinct : float64 [B], each sequence at an output position of its own, drawn at random; mean over layers and draws
    layers : float64 [L, B], of each layer
    aligned : float64 [B], sequences at the same output position; mean over layers, drawn batches and the positions at
        which the whole batch is still decoding
    aligned_layers : float64 [L, B], of each layer
    sequences : how many sequences batches were drawn from
    steps : how many decode steps of each were looked at, at most
    """

    sizes: Integers
    distinct: Floats
    layers: Floats
    aligned: Floats
    aligned_layers: Floats
    sequences: int
    steps: int


@dataclass(frozen=True)
class NextLayer:
    """Share of a token's picks in the next layer that a table of pairs, learned on even sequences, finds on odd ones.

    recall : the k experts with the largest sum of P(expert of the next layer | own pick) over the token's own picks
    popular : the k experts picked most often in the next layer by the even sequences, whatever the token picked
    Both [...]; ``layers`` has L - 1 entries, the first for the step from layer 0 to layer 1. Intervals are about the
    odd sequences, with the table held as it was learned.
    """

    recall: Layered
    popular: Layered


@dataclass(frozen=True)
class Similarity:
    """Prefill counts of a sequence beside its decode counts, mean over sequences and layers.

    In a recording without any prefill the first half of each sequence stands in for it (:attr:`Survey.reference`).

    cosine : with its own prefill; other_sequence : with another sequence's prefill, mean over all others;
    uniform : with equal counts, what a prefill that knows nothing would reach
    overlap : [E - 1], share of the K most picked experts of prefill that are among the K of decode, K = 1..E - 1;
        K / E by chance
    sequences : how many sequences have both phases and enough decode rows
    """

    cosine: Layered
    other_sequence: Layered
    uniform: Layered
    overlap: Estimate
    sequences: int


@dataclass(frozen=True)
class HitRates:
    """Share of decode picks whose expert is among K placed ones, with what to compare it to; [n] for n values of K.

    Every sequence counts alike. In a recording without any prefill the first half of each sequence stands in for it
    and the rest is its decode (:attr:`Survey.reference`). A static profile is worse when it is made of few sequences:
    its intervals are for profiles of as many sequences as there are here. Where other sequences place, intervals need
    three of them.

    gpu_experts : int64 [n], values of K, every one of 1..E - 1 unless E is very large
    own : placed by the sequence's own prefill counts
    other_sequence : by those of another sequence, mean over all others
    static : by the decode picks of all other sequences, each sequence alike
    static_pooled : by the same, each pick alike
    oracle : by the sequence's own decode counts
    uniform : float64 [n], K / E
    layers : "own", "other_sequence", "static", "static_pooled" and "oracle" for K = E // 2, of shape [L]
    sequences : how many sequences the rates are over, as for :class:`Similarity`
    """

    gpu_experts: Integers
    own: Estimate
    other_sequence: Estimate
    static: Estimate
    static_pooled: Estimate
    oracle: Estimate
    uniform: Floats
    layers: dict[str, Estimate]
    sequences: int


@dataclass(frozen=True)
class Drift:
    """How a prefill wears off along the output: successive whole windows of decode rows, [W].

    Each window is over the sequences that are long enough for it, so a change from one window to the next is also one
    of sequences where ``sequences`` changes.

    In a recording without any prefill the first half of each sequence stands in for it, and the windows are of the
    second half (:attr:`Survey.reference`).

    first_row : int64 [W], row of the output at which each window starts; rows : rows of a window
    cosine : of the prefill's counts with those of the window, mean over sequences and layers
    hit_rate : share of the window's picks that are among the E // 2 most picked experts of the prefill
    sequences : int64 [W], sequences long enough to have the window
    """

    first_row: Integers
    rows: int
    cosine: Estimate
    hit_rate: Estimate
    sequences: Integers


@dataclass(frozen=True)
class CacheCurves:
    """Hit rate of decode picks in a cache of C experts a layer, C = 1..E, empty when a sequence's decode starts.

    lru : least recently used; picks of a token are requested in listed order
    belady : the best that any cache can do that fetches on demand, even one that may decide not to keep a fetched
        expert: it keeps what is needed soonest
    lru_layers, belady_layers : float64 [L, E]
    restart : rows of a sequence after which the caches start empty again, so that memory stays bounded
    """

    lru: Estimate
    belady: Estimate
    lru_layers: Floats
    belady_layers: Floats
    restart: int


@dataclass(frozen=True)
class Survey:
    """Every routing statistic of one trace.

    contents : what was surveyed
    skew : by scope
    weights : [..., k], mean share of a token's gate weight that its largest, second, ... weight has; None without
    lags : int64 [lags]; reuse : by scope
    windows : int64 [windows], rows of a window; distinct : by scope, [..., windows], mean number of distinct experts a
        layer in whole windows that follow one another within a sequence and scope
    batches, next_layer, similarity, hit_rates, drift, cache : see their records; None where they cannot be told
    reference : what decode is compared with: "prefill", or "first half" of each sequence where none has a prefill
    resamples, groups, seed : of the intervals; sequences are resampled, in random groups where they are very many
    min_decode : decode rows that a sequence needs to be compared with its prefill (or rows after the first half)
    notes : what could not be told or was limited, and why
    """

    contents: Contents
    skew: dict[Scope, Skew]
    weights: Layered | None
    lags: Integers
    reuse: dict[Scope, Reuse]
    windows: Integers
    distinct: dict[Scope, Layered]
    batches: Batches | None
    next_layer: NextLayer | None
    similarity: Similarity | None
    hit_rates: HitRates | None
    drift: Drift | None
    cache: CacheCurves | None
    reference: Literal["prefill", "first half"]
    resamples: int
    groups: int
    seed: int
    min_decode: int
    notes: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """The whole survey as values of JSON: lists for arrays, None for what cannot be told."""
        plain: dict[str, Any] = _plain(self)
        return plain


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return _plain(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if is_dataclass(value):
        return {one.name: _plain(getattr(value, one.name)) for one in fields(value)}
    if isinstance(value, Estimate | Layered):
        return {name: _plain(part) for name, part in value._asdict().items()}
    if isinstance(value, Mapping):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return value
