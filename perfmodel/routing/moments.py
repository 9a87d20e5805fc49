"""What the generator of routing is fitted to: hit rates of placements and reuse, layer by layer and by sequence."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from perfmodel.routing.blocks import open_trace
from perfmodel.routing.statistics import selection_counts, top_experts
from perfmodel.routing.statistics.ratios import divide
from perfmodel.routing.trace import Phase, RoutingTrace

Floats = NDArray[np.float64]

LAGS = (1, 2, 4, 8)
"""Distances [tokens] at which reuse is matched."""

NEAR = 32
"""Tokens before one, among which the most similar is looked for."""


class Moments(NamedTuple):
    """Statistics of the decode steps of S sequences in L layers, at n sizes of a placement.

    own : [n, S, L], hit rate of the experts that the sequence's prefill used most; NaN without prefill
    other : [n, S, L], of those that another sequence's prefill used most, mean over all others; NaN for lack of them
    static : [n, S, L], of the most used ones of one profile for all sequences
    oracle : [n, S, L], of those that the sequence's own decode steps used most
    shared : [lags, S, L], picks that repeat one of the token ``lag`` before
    pairs : [lags, S, L], picks that could
    lru : [n, S, L], hit rate of a cache of the most recently used experts, empty when decode starts

    Hit rates are NaN where the sequence's decode steps pick nothing in the layer.
    """

    own: Floats
    other: Floats
    static: Floats
    oracle: Floats
    shared: Floats
    pairs: Floats
    lru: Floats

    @property
    def reuse(self) -> Floats:
        """Share of a token's experts that the token ``lag`` before used too, all pairs alike [lags, L].

        NaN for a lag that no sequence is long enough for, and for a layer without picks.
        """
        return divide(self.shared.sum(1), self.pairs.sum(1))


def capacities(experts: int) -> tuple[int, ...]:
    """A quarter, half and three quarters of the experts, without repetition; at least 1, and not all."""
    most = max(experts - 1, 1)
    return tuple(sorted({min(max(round(experts * part / 4), 1), most) for part in (1, 2, 3)}))


def moments(trace: RoutingTrace, static: Floats) -> Moments:
    """Statistics to fit, of sequences that all have decode steps; ``static`` [L, E] is the profile for all."""
    prefill = selection_counts(trace, "prefill").astype(np.float64)
    decode = selection_counts(trace, "decode").astype(np.float64)
    share = divide(decode, decode.sum(-1))
    others = trace.num_sequences - 1
    sizes = capacities(trace.num_experts)
    own, other, fixed, oracle = np.full((4, len(sizes), trace.num_sequences, trace.num_layers), np.nan)
    for at, size in enumerate(sizes):
        oracle[at] = (share * top_experts(decode, size)).sum(-1)
        fixed[at] = (share * top_experts(static, size)).sum(-1)
        if trace.has_prefill:
            placed = top_experts(prefill, size)
            own[at] = (share * placed).sum(-1)
            if others:
                other[at] = ((share * placed.sum(0)).sum(-1) - own[at]) / others
    return Moments(own, other, fixed, oracle, *_repeats(trace), lru_rates(trace))


def heaviest_picks(trace: RoutingTrace) -> RoutingTrace | None:
    """The same tokens with one pick each, that with the largest gate weight; the first of equals.

    None where the trace has no weights.
    """
    if trace.topk_weights is None:
        return None
    first = np.where(trace.topk_ids == trace.unassigned, -1.0, trace.topk_weights).argmax(-1)[..., None]
    return RoutingTrace(
        topk_ids=np.take_along_axis(trace.topk_ids, first, -1),
        topk_weights=None,
        sequence_offsets=trace.sequence_offsets,
        prompt_len=trace.prompt_len,
        layer_index=trace.layer_index,
        num_experts=trace.num_experts,
        metadata=trace.metadata,
    )


def lru_rates(trace: RoutingTrace) -> Floats:
    """Share of decode picks that hit a cache of each of :func:`capacities` experts a layer [n, S, L].

    Sequences all have decode steps; the cache is empty at the start of each. NaN for a layer without picks.
    """
    ends = _decode_offsets(trace)[:-1]
    found = []
    for size in capacities(trace.num_experts):
        hits, assigned = _lru(trace, size)
        found.append(divide(np.add.reduceat(hits.sum(-1), ends), np.add.reduceat(assigned.sum(-1), ends)))
    return np.array(found)


def token_rates(trace: RoutingTrace) -> Floats:
    """Share of every decode step's picks, of all layers, that hit a cache of half of the experts of a layer [T]."""
    sizes = capacities(trace.num_experts)
    hits, assigned = _lru(trace, sizes[len(sizes) // 2])
    rates: Floats = hits.sum((1, 2)) / np.maximum(assigned.sum((1, 2)), 1)
    return rates


def inclusion(trace: RoutingTrace, phase: Phase) -> Floats:
    """Share of a sequence's tokens that pick each expert in one phase [S, L, E]: between 0 and 1, about k in sum.

    Half a pick a layer, spread evenly, is added to every sequence, so that no expert is impossible.
    """
    counts = selection_counts(trace, phase)
    tokens = trace.prompt_len if phase == "prefill" else trace.sequence_lengths - trace.prompt_len
    found: Floats = (counts + 0.5 / trace.num_experts) / (tokens + 0.5 / trace.top_k)[:, None, None]
    return found


def frequencies_of(share: Floats, top_k: int) -> Floats:
    """Frequencies [..., E] with which drawing ``top_k`` experts without replacement picks each for a share of tokens.

    The clock of an expert with frequency p rings within t with probability 1 - exp(-p t), and t is when ``top_k``
    clocks have rung. With one t for all tokens p is proportional to -log(1 - share): within about a tenth for 2 of 8
    experts of which none is more than four times as frequent as another, and closer for more experts. A single pick
    has its share as its frequency.
    """
    if top_k == 1:
        return share
    frequencies: Floats = -np.log1p(-np.minimum(share, 0.999))
    return frequencies


def nearest_token(trace: RoutingTrace) -> Floats:
    """Share of every decode step's picks that the most similar of up to :data:`NEAR` steps before it made too [T].

    Picks of all layers together; 0 for the first step of a sequence, which has none before it.
    """
    found = [np.empty(0)]
    for s in range(trace.num_sequences):
        ids = trace.topk_ids[trace.decode_slice(s)].astype(np.int64)
        assigned = ids != trace.unassigned
        ids[~assigned] = trace.num_experts  # one more, that no token uses
        used = np.zeros((*ids.shape[:2], trace.num_experts + 1), dtype=bool)
        np.put_along_axis(used, ids, True, axis=-1)
        used[..., -1] = False
        most = np.zeros(len(ids))
        for lag in range(1, min(NEAR, len(ids) - 1) + 1):
            shared = np.take_along_axis(used[:-lag], ids[lag:], axis=-1).sum((1, 2))
            np.maximum(most[lag:], shared, out=most[lag:])
        found.append(most / np.maximum(assigned.sum((1, 2)), 1))
    return np.concatenate(found)


def _decode_offsets(trace: RoutingTrace) -> NDArray[np.int64]:
    return np.append(0, np.cumsum(trace.sequence_lengths - trace.prompt_len))


def _lru(trace: RoutingTrace, size: int) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Which picks of decode hit a cache of so many experts a layer, and which picks there are [T, L, k]."""
    from perfmodel.kernels.cache import HIT_HIGH  # compiled code is loaded only where it is used
    from perfmodel.kernels.cache_lru import lru_of_many

    rows = trace.phase("decode")
    assigned = np.ascontiguousarray(trace.topk_ids[rows] != trace.unassigned)
    ids = np.where(assigned, trace.topk_ids[rows], trace.num_experts).astype(np.uint16)
    empty = np.empty((1, ids.shape[1], 0), np.uint16)
    found, _ = lru_of_many(ids, _decode_offsets(trace), empty, trace.num_experts, size, False, False)
    return found == HIT_HIGH, assigned


def _repeats(trace: RoutingTrace) -> tuple[Floats, Floats]:
    shared = np.zeros((len(LAGS), trace.num_sequences, trace.num_layers))
    pairs = np.zeros_like(shared)
    for s in range(trace.num_sequences):
        ids = trace.topk_ids[trace.decode_slice(s)]
        for at, lag in enumerate(LAGS):
            now, before = ids[lag:], ids[:-lag]
            found = np.zeros(now.shape, dtype=bool)
            for pick in range(trace.top_k):
                found |= now == before[..., pick : pick + 1]
            assigned = now != trace.unassigned
            shared[at, s] = (found & assigned).sum((0, 2))
            pairs[at, s] = assigned.sum((0, 2))
    return shared, pairs


def next_layer_recall(trace: RoutingTrace) -> Floats:
    """Share of a layer's picks that a table of picks in the layer before foretells [L - 1].

    The table is learnt from the sequences with even numbers and tried on the others, as in
    :attr:`perfmodel.routing.statistics.Survey.next_layer`.
    """
    from perfmodel.kernels.forecast import foretell, learn_pairs  # compiled code is loaded only where it is used

    steps, experts, offsets = trace.num_layers - 1, trace.num_experts, trace.sequence_offsets
    pairs, (own, following) = np.zeros((steps, experts, experts)), np.zeros((2, steps, experts), np.int64)
    blocks = open_trace(trace).blocks
    for block in blocks():
        learn_pairs(block.ids, block.start, block.first, block.last, offsets, pairs, own, following)
    chances = (pairs + 0.1) / (own + 1.0)[..., None]
    found, asked = np.zeros((1, steps, 2), np.int64), np.zeros((1, steps), np.int64)
    whatever, one_group = np.zeros((steps, experts), np.bool_), np.zeros(trace.num_sequences, np.int64)
    for block in blocks():
        foretell(block.ids, block.start, block.first, block.last, offsets, one_group, chances, whatever, found, asked)
    recall: Floats = found[0, :, 0] / np.maximum(asked[0], 1)
    return recall
