"""Which experts of a layer a system expects before the layer's router has run, for every decode step of a replay.

Predictions are uint16 [T, L, p], the most trusted expert first and ``NO_EXPERT`` where nothing is named. A prediction
for layer l is made while layer l - 1 runs, so the first layer is never predicted.

- `oracle_prediction`: what will be picked. Pre-gated MoE (arXiv 2308.12066) is exact in this sense, because its
  routers choose one block ahead.
- `table_prediction`: how often an expert follows those that the step picked in the layer before, learned from other
  sequences.
- `gate_prediction`: the next layer's router applied too early, as MoE-Offloading and HOBBIT do. Only its accuracy is
  published, so every pick is right with that chance, independent of anything else.
- `activation_prediction`: MoE-Infinity (arXiv 2401.14361), the expected use of an expert in the recorded sequence that
  went most like this one so far. That paper weighs likelihood with the nearness of a layer; among the experts of one
  layer the order is that of the likelihood.

Nothing is learned from the steps that are predicted: tables and matrices come from the other sequences, and from the
prefill of the same one where there is no other.
"""

import itertools
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from perfmodel.errors import TraceError
from perfmodel.routing.blocks import NO_EXPERT
from perfmodel.routing.checks import as_count, as_integers
from perfmodel.routing.npz import MAX_BYTES
from perfmodel.routing.replay import Replay
from perfmodel.routing.synthetic_checks import between
from perfmodel.routing.trace import RoutingTrace

Predictions = NDArray[np.uint16]

_DRAWN_AT_ONCE = 2**22  # random numbers


class PredictionAccuracy(NamedTuple):
    """How good predictions are, over all layers but the first, which none are for.

    predicted, right : experts named, and those of them that the step picked.
    picked : picks that name an expert.
    """

    predicted: int
    right: int
    picked: int

    @property
    def precision(self) -> float:
        """Share of the predictions that were right; nan without any."""
        return self.right / self.predicted if self.predicted else float("nan")

    @property
    def recall(self) -> float:
        """Share of the picks that were predicted; nan without any."""
        return self.right / self.picked if self.picked else float("nan")


class ActivationMatches(NamedTuple):
    """Activation matrices of recorded sequences, and which of them each step is most like.

    library : float32 [N, L, E], share of a layer's picks that went to each expert. A layer without picks is all 0.
    best : int64 [T], the entry of the library that a decode step expects to repeat.
    """

    library: NDArray[np.float32]
    best: NDArray[np.int64]


def prediction_accuracy(replay: Replay, predictions: Predictions) -> PredictionAccuracy:
    """Compare predictions [T, L, p] with the decode picks; an expert is named at most once in a step and layer.

    Raises :class:`TraceError` if the shape does not fit the replay, or an entry is neither an expert nor NO_EXPERT.
    """
    from perfmodel.kernels.prediction import count_right  # imported here, because Numba loads slowly

    named = as_integers("predictions", predictions, 3)
    ids, experts = replay.decode_ids, replay.trace.num_experts
    if named.shape[:2] != ids.shape[:2]:
        raise TraceError(f"predictions have shape {named.shape}, expected {ids.shape[0]} steps, {ids.shape[1]} layers")
    wrong = named[(named != NO_EXPERT) & ((named < 0) | (named >= experts))]
    if wrong.size:
        raise TraceError(f"predictions hold {wrong[0]}, expected an expert in 0..{experts - 1} or {NO_EXPERT}")
    return PredictionAccuracy(*count_right(ids, experts, np.ascontiguousarray(named, np.uint16)))


def oracle_prediction(replay: Replay, width: int | None = None) -> Predictions:
    """The first ``width`` picks of every step and layer (1 to k; None: all k), in listed order."""
    width = _gate_width(replay, width)
    predicted = _none(replay, width)
    later = replay.assigned[:, 1:, :width]
    predicted[:, 1:][later] = replay.decode_ids[:, 1:, :width][later]
    return predicted


def table_prediction(replay: Replay, width: int) -> Predictions:
    """The ``width`` experts (1 to E) that most often followed the step's picks in the layer before.

    The score of expert e' in layer l + 1 is the sum over the step's picks e in layer l of P(e' | e), the share of the
    rows with e that had e' in the next layer. It is counted on the decode steps of all other sequences (in a batch, of
    those outside it); if they have none, on the sequence's own prefill. Equal scores: lower id first. An expert with a
    score of 0 is not named.

    Raises :class:`TraceError` if a sequence has decode steps and there is nothing to learn from, or if the table is
    too large for memory.
    """
    from perfmodel.kernels.prediction import count_pairs, predict_by_pairs  # imported here, because Numba loads slowly

    trace, ids, offsets = replay.trace, replay.decode_ids, replay.decode_offsets
    experts, pairs_of_layers = trace.num_experts, trace.num_layers - 1
    predicted = _none(replay, as_count("width", width, 1, experts))
    if pairs_of_layers == 0:
        return predicted
    if 4 * pairs_of_layers * experts**2 > MAX_BYTES:
        raise TraceError(
            f"a table of pairs of {experts} experts in {trace.num_layers} layers is too large: "
            f"at most {MAX_BYTES // 2**30} GiB"
        )
    pairs = np.zeros((pairs_of_layers, experts, experts), np.int32)
    own = np.zeros((pairs_of_layers, experts), np.int32)
    known, bounds = replay.single.decode_ids, replay.single.decode_offsets
    count_pairs(known, 0, len(known), 1, pairs, own)
    for s, (start, stop) in enumerate(itertools.pairwise(offsets)):
        if start == stop:
            continue
        held = [(bounds[one], bounds[one + 1]) for one in np.flatnonzero(~replay.outside[s])]
        for first, last in held:
            count_pairs(known, first, last, -1, pairs, own)
        if sum(last - first for first, last in held) == len(known):  # so the table is empty now
            prefill = _prefill_ids(trace, s)
            if len(prefill) == 0:
                raise _nothing_known(replay, s)
            count_pairs(prefill, 0, len(prefill), 1, pairs, own)
        predict_by_pairs(ids, start, stop, pairs, own, predicted)
        for first, last in held:
            count_pairs(known, first, last, 1, pairs, own)
    return predicted


def gate_prediction(replay: Replay, accuracy: float, seed: int, width: int | None = None) -> Predictions:
    """The first ``width`` picks (1 to k; None: all k), each right with the chance ``accuracy`` [0 to 1].

    Where one is wrong, an expert that the step does not pick there is named instead, drawn in proportion to how often
    the replay's decode steps pick it in that layer (all alike where none of those left ever is), and not named twice.
    Nothing is named where no such expert is left, or where the pick is unassigned. With the same seed, a pick that is
    right at one accuracy is right at every higher one.
    """
    from perfmodel.kernels.prediction import activation_counts, predict_by_stale_gate  # Numba loads slowly

    accuracy = between("accuracy", accuracy, 0, 1)
    rng = np.random.default_rng(as_count("seed", seed, 0, None))
    width = _gate_width(replay, width)
    predicted = _none(replay, width)
    ids, layers = replay.decode_ids, replay.trace.num_layers
    use = activation_counts(ids, np.array([0, len(ids)]), replay.trace.num_experts)[0]
    each = 2 * max(layers - 1, 1) * width
    rows = max(1, _DRAWN_AT_ONCE // each)
    for first in range(0, len(ids), rows):
        uniform = rng.random((min(rows, len(ids) - first), layers - 1, width, 2))
        predict_by_stale_gate(ids, first, use, accuracy, uniform, predicted)
    return predicted


def activation_matches(replay: Replay) -> ActivationMatches:
    """MoE-Infinity: the recorded sequence whose expert use is most like that of the sequence so far.

    The library holds one matrix a sequence of the replay, prefill and decode steps together. Before every decode step,
    the counts of the same sequence's earlier rows, prefill included, are compared with those of all *other* sequences:
    the mean over layers of the cosine, as the published code does; the lowest number wins among equals, and so without
    any earlier row. That code compares again in every layer and with what follows only; here a step is compared once.
    Sequences in a batch have one count together, which is compared with the sequences outside the batch.

    Where there is no other sequence, the library holds its own prefill, and without one the same share for every
    expert.
    """
    from perfmodel.kernels.prediction import activation_counts, match_activations  # Numba loads slowly

    trace = replay.trace
    if not replay.outside.any():
        prefill = _prefill_ids(trace, 0)
        counts = activation_counts(prefill, np.array([0, len(prefill)]), trace.num_experts)
        if len(prefill) == 0:
            counts += 1
        return ActivationMatches(_scaled(counts, counts.sum(-1)), np.zeros(len(replay.decode_ids), np.int64))
    others = replay.single.trace
    counts = activation_counts(_ids(others, slice(None)), others.sequence_offsets, trace.num_experts)
    unit = _scaled(counts, np.sqrt((counts.astype(np.float64) ** 2).sum(-1)))
    # Sequences last, so that one pick adds to the products with all of them in one run.
    best = match_activations(
        _ids(trace, slice(None)),
        trace.sequence_offsets,
        trace.prompt_len,
        np.ascontiguousarray(unit.transpose(1, 2, 0)),
        replay.outside,
    )
    return ActivationMatches(_scaled(counts, counts.sum(-1)), best)


def activation_prediction(replay: Replay, width: int) -> Predictions:
    """The ``width`` experts (1 to E) of a layer that are used most in the matrix that `activation_matches` chooses.

    Equal use: lower id first. An expert that the matrix never uses is not named. Raises :class:`TraceError` for a
    single sequence, or batch of all sequences, without prefill, about which nothing is known.
    """
    width = as_count("width", width, 1, replay.trace.num_experts)
    if not replay.outside.any() and replay.trace.prompt_len[0] == 0:
        raise _nothing_known(replay, 0)
    library, best = activation_matches(replay)
    order = np.argsort(-library, axis=-1, kind="stable")[..., :width]
    named = np.where(np.take_along_axis(library, order, axis=-1) > 0, order, NO_EXPERT).astype(np.uint16)
    named[:, 0] = NO_EXPERT
    return np.ascontiguousarray(named[best])


def _nothing_known(replay: Replay, number: int) -> TraceError:
    what = "sequence" if replay.groups is None else "group"
    return TraceError(
        f"no prediction for {what} {number}: no other sequence has decode steps and it has no prefill to learn from; "
        "use a trace with more sequences or with prefill"
    )


def _none(replay: Replay, width: int) -> Predictions:
    return np.full((*replay.decode_ids.shape[:2], width), NO_EXPERT, np.uint16)


def _gate_width(replay: Replay, width: int | None) -> int:
    top_k = replay.trace.top_k
    return top_k if width is None else as_count("width", width, 1, top_k)


def _ids(trace: RoutingTrace, rows: slice) -> NDArray[np.uint16]:
    """Experts of some rows [R, L, k], E where a pick is unassigned."""
    return np.ascontiguousarray(np.minimum(trace.topk_ids[rows], trace.num_experts), np.uint16)


def _prefill_ids(trace: RoutingTrace, sequence: int) -> NDArray[np.uint16]:
    return _ids(trace, trace.prefill_slice(sequence))


def _scaled(counts: NDArray[np.int64], size: NDArray[np.generic]) -> NDArray[np.float32]:
    """Counts [N, L, E] over ``size`` [N, L], and 0 where that is 0."""
    return (counts / np.where(size > 0, size, 1)[..., None]).astype(np.float32)  # type: ignore[operator]
