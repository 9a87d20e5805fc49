"""How often each sequence of a trace in memory picks each expert, and how well a placement would have hit."""

from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import ArrayLike, NDArray

from perfmodel.errors import TraceError
from perfmodel.routing.checks import as_count
from perfmodel.routing.npz import shown
from perfmodel.routing.statistics.ratios import Floats, divide, mean_known
from perfmodel.routing.trace import Phase, RoutingTrace

# Several policies and every statistic ask for the same sums of the same, immutable trace.
_sums: WeakKeyDictionary[RoutingTrace, dict[tuple[str, bool], NDArray[Any]]] = WeakKeyDictionary()


class HitRate(NamedTuple):
    """Share of decode picks that find their expert in a placement.

    ``over_picks`` weighs every pick alike, ``over_sequences`` every sequence alike; ``per_sequence`` is
    [S], NaN for a sequence without assigned decode picks.
    """

    over_picks: float
    over_sequences: float
    per_sequence: Floats


class HitRateControls(NamedTuple):
    """Hit rate of a placement beside what it should be compared with, each the mean over sequences.

    own : experts chosen by the sequence's own importance
    uniform : any choice if all experts were picked alike, K / E
    other_sequence : chosen by another sequence's importance, mean over all others; None for one sequence
    static : chosen by how often the other sequences' decode steps picked each expert, every sequence alike; None
        for one sequence
    static_pooled : the same with every pick alike, so that long sequences weigh more; None for one sequence
    oracle : chosen by what the sequence's decode steps really picked, the best any fixed choice can do
    """

    own: float
    uniform: float
    other_sequence: float | None
    static: float | None
    static_pooled: float | None
    oracle: float


class Overlap(NamedTuple):
    """Share of a token's experts that an earlier token used too [L], and what independent picks would."""

    measured: Floats
    chance: Floats


def selection_counts(trace: RoutingTrace, phase: Phase) -> NDArray[np.int64]:
    """How often each sequence picks each expert in one phase: [S, L, E]. Unassigned picks do not count."""
    return _per_sequence(trace, phase, weighted=False)


def weight_sums(trace: RoutingTrace, phase: Phase) -> Floats:
    """Sum of the gate weights that each sequence gives each expert in one phase: [S, L, E].

    Raises :class:`TraceError` for a trace without weights.
    """
    if trace.topk_weights is None:
        raise TraceError(f"the trace of {trace.metadata['model']} has no gate weights, only expert ids")
    return _per_sequence(trace, phase, weighted=True)


def _per_sequence(trace: RoutingTrace, phase: Phase, weighted: bool) -> NDArray[Any]:
    """Counts, or sums of weights, made once for each trace; read-only."""
    if phase not in ("prefill", "decode"):
        raise TraceError(f"unknown phase {shown(phase)}, allowed are 'prefill' and 'decode'")
    known = _sums.setdefault(trace, {})
    if (phase, weighted) not in known:
        sums = _summed(trace, phase, weighted)
        sums.flags.writeable = False
        known[phase, weighted] = sums
    return known[phase, weighted]


def _summed(trace: RoutingTrace, phase: Phase, weighted: bool) -> NDArray[Any]:
    layers, experts = trace.num_layers, trace.num_experts
    # One bin more than experts takes the unassigned picks, whose id is larger than any expert's.
    first_bin = np.arange(layers)[:, None] * (experts + 1)
    sums = np.empty((trace.num_sequences, layers, experts), np.float64 if weighted else np.int64)
    for s in range(trace.num_sequences):
        rows = trace.prefill_slice(s) if phase == "prefill" else trace.decode_slice(s)
        bins = first_bin + np.minimum(trace.topk_ids[rows], experts)
        weights = trace.topk_weights[rows].ravel() if weighted and trace.topk_weights is not None else None
        counts = np.bincount(bins.ravel(), weights, minlength=layers * (experts + 1))
        sums[s] = counts.reshape(layers, experts + 1)[:, :experts]
    return sums


def load_cosine(trace: RoutingTrace) -> Floats:
    """Cosine between a sequence's prefill and decode counts in each layer, mean over sequences: [L].

    Sequences that lack either phase are left out; NaN where none is left.
    """
    prefill, decode = (selection_counts(trace, phase).astype(np.float64) for phase in ("prefill", "decode"))
    norms = np.sqrt((prefill**2).sum(-1) * (decode**2).sum(-1))
    return mean_known(divide((prefill * decode).sum(-1), norms))


def adjacent_overlap(trace: RoutingTrace, phase: Phase = "decode", lag: int = 1) -> Overlap:
    """Share of a token's experts that the token ``lag`` steps before used in the same layer.

    Only pairs within one sequence and one phase count. ``chance`` is what independent draws with each
    sequence's own frequencies would share: sum over experts of q^2, divided by that of q, with
    q = selections / tokens. NaN for a layer without such pairs. A survey's chance is that of two different tokens
    (:class:`perfmodel.routing.statistics.Reuse`), a little less.
    """
    lag = as_count("lag", lag, 1, None)
    rows = np.flatnonzero(trace.phase(phase))
    sequence = np.repeat(np.arange(trace.num_sequences), trace.sequence_lengths)[rows]
    # Rows of one phase of one sequence lie together, so equal sequence numbers suffice.
    same = sequence[lag:] == sequence[:-lag]
    now, before = trace.topk_ids[rows[lag:][same]], trace.topk_ids[rows[:-lag][same]]
    assigned = now != trace.unassigned
    shared = np.zeros(now.shape, dtype=bool)
    for pick in range(trace.top_k):
        shared |= now == before[..., pick : pick + 1]
    measured = divide((shared & assigned).sum((0, 2)), assigned.sum((0, 2)))

    counts = selection_counts(trace, phase).astype(np.float64)
    tokens = np.bincount(sequence, minlength=trace.num_sequences)[:, None]
    repeated = divide((counts**2).sum(-1), tokens)  # expected shared picks of all tokens of a sequence
    return Overlap(measured, divide(repeated.sum(0), counts.sum((0, 2))))


def ranked_experts(importance: ArrayLike) -> NDArray[np.int64]:
    """Experts of each layer from the most to the least important [..., E]; ties go to the lower id.

    Raises :class:`TraceError` for NaN.
    """
    scores = np.asarray(importance, dtype=np.float64)
    if np.isnan(scores).any():
        raise TraceError("importance holds NaN, so experts cannot be ordered by it")
    return np.argsort(-scores, axis=-1, kind="stable")


def top_experts(importance: ArrayLike, gpu_experts: int) -> NDArray[np.bool_]:
    """Mask [..., E] of the ``gpu_experts`` most important experts of each layer; ties go to the lower id.

    Raises :class:`TraceError` for NaN and for a number outside 0..E.
    """
    order = ranked_experts(importance)
    gpu_experts = as_count("gpu_experts", gpu_experts, 0, order.shape[-1])
    mask = np.zeros(order.shape, dtype=bool)
    np.put_along_axis(mask, order[..., :gpu_experts], True, axis=-1)
    return mask


def hit_rate(trace: RoutingTrace, placed: NDArray[np.bool_]) -> HitRate:
    """Share of the assigned decode picks whose expert is placed; ``placed`` is [S, L, E] or [L, E].

    Raises :class:`TraceError` if the shape does not fit or the trace has no decode picks.
    """
    counts = _decode_counts(trace)
    mask = _fitting("the placement", placed, counts.shape)
    hits, picks = (counts * mask).sum((1, 2)), counts.sum((1, 2))
    per_sequence = divide(hits, picks)
    return HitRate(float(hits.sum() / picks.sum()), float(mean_known(per_sequence)), per_sequence)


def hit_rate_controls(trace: RoutingTrace, gpu_experts: int, importance: ArrayLike) -> HitRateControls:
    """Decode hit rate of the ``gpu_experts`` most important experts a layer, and its controls.

    Parameters
    ----------
    trace : the routing; sequences without decode picks are left out
    gpu_experts : experts placed in each layer, K
    importance : [S, L, E], what each sequence's placement is chosen by, usually from its prefill

    Every sequence counts alike.
    Raises :class:`TraceError` as :func:`hit_rate` and :func:`top_experts` do.
    """
    counts = _decode_counts(trace)
    scores = _fitting("importance", np.asarray(importance, dtype=np.float64), counts.shape)
    picks = counts.sum((1, 2))
    used = picks > 0
    share = counts[used] / picks[used, None, None]
    placed = top_experts(scores[used], gpu_experts)
    sequences = len(share)

    def mean_hit(mask: NDArray[np.bool_]) -> float:
        return float((share * mask).sum((1, 2)).mean())

    own = (share * placed).sum((1, 2))
    other_sequence = static = static_pooled = None
    if sequences > 1:
        # Chosen by any sequence, summed for each; the sequence's own part is taken away again.
        by_any = (share * placed.sum(0)).sum((1, 2))
        other_sequence = float((by_any - own).mean() / (sequences - 1))
        static = mean_hit(top_experts(sum_of_others(share), gpu_experts))
        static_pooled = mean_hit(top_experts(counts[used].sum(0) - counts[used], gpu_experts))
    return HitRateControls(
        own=float(own.mean()),
        uniform=gpu_experts / trace.num_experts,
        other_sequence=other_sequence,
        static=static,
        static_pooled=static_pooled,
        oracle=mean_hit(top_experts(counts[used], gpu_experts)),
    )


def sum_of_others(share: Floats) -> Floats:
    """For every sequence the sum over all other sequences [S, ...]."""
    # Sums from both ends, since total minus own would leave rounding noise where the others have exact zeros.
    before, after = np.zeros_like(share), np.zeros_like(share)
    before[1:] = np.cumsum(share[:-1], axis=0)
    after[:-1] = np.cumsum(share[:0:-1], axis=0)[::-1]
    return before + after


def _decode_counts(trace: RoutingTrace) -> Floats:
    counts = selection_counts(trace, "decode").astype(np.float64)
    if not counts.any():
        raise TraceError(
            f"the trace of {trace.metadata['model']} has no decode steps that pick an expert, so no decode hit rate"
        )
    return counts


def _fitting(name: str, array: NDArray[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    if array.shape not in (shape, shape[1:]):
        raise TraceError(f"{name} has shape {array.shape}, the trace needs {shape} (sequences, layers, experts)")
    return np.broadcast_to(array, shape)
