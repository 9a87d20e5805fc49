"""Predictions of experts against plain loops, and what may and may not be known when they are made."""

import itertools
import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal
from numpy.typing import NDArray
from strategies import plain_model, recording, small_trace

from perfmodel.errors import TraceError
from perfmodel.kernels import tally
from perfmodel.routing import Replay, RoutingTrace
from perfmodel.routing.prediction import (
    NO_EXPERT,
    activation_matches,
    activation_prediction,
    gate_prediction,
    oracle_prediction,
    prediction_accuracy,
    table_prediction,
)

NONE = -1


@st.composite
def replays(draw: st.DrawFn, min_sequences: int = 1) -> Replay:
    """Ragged sequences: some without prefill, some without decode steps, some with unassigned picks."""
    experts = draw(st.integers(1, 7))
    model = plain_model(
        num_layers=draw(st.integers(1, 4)), num_experts=experts, top_k=draw(st.integers(1, min(3, experts)))
    )
    # At least one sequence decodes.
    first = (draw(st.integers(0, 4)), draw(st.integers(1, 7)))
    others = st.sampled_from([(0, 1), (3, 0), (2, 5), (0, 4)])
    trace = small_trace(
        model,
        [first, *draw(st.lists(others, min_size=min_sequences - 1, max_size=3))],
        seed=draw(st.integers(0, 2**32 - 1)),
        unassigned=draw(st.sampled_from([0.0, 0.3])),
    )
    return trace.replay()


def picks_of(trace: RoutingTrace, row: int, layer: int) -> list[int]:
    """Experts that a row picks in a layer, in listed order."""
    return [int(e) for e in trace.topk_ids[row, layer] if e != trace.unassigned]


def decode_rows_of(trace: RoutingTrace) -> list[tuple[int, int]]:
    """Sequence and row of every decode step, in the order of the replay."""
    slices = [trace.decode_slice(s) for s in range(trace.num_sequences)]
    return [(s, row) for s, rows in enumerate(slices) for row in range(rows.start, rows.stop)]


def padded(experts: list[int], width: int) -> list[int]:
    return experts[:width] + [NONE] * (width - len(experts))


def shown(predictions: NDArray[Any]) -> NDArray[Any]:
    return np.where(predictions == NO_EXPERT, NONE, predictions.astype(np.int64))


# ---- the oracle and the measure ----


@given(replays(), st.data())
def test_the_oracle_is_always_right_and_misses_nothing(replay: Replay, data: st.DataObject) -> None:
    predicted = oracle_prediction(replay)
    accuracy = prediction_accuracy(replay, predicted)
    picked = sum(
        len(picks_of(replay.trace, row, layer))
        for _, row in decode_rows_of(replay.trace)
        for layer in range(1, replay.trace.num_layers)
    )
    assert accuracy == (picked, picked, picked)
    assert (predicted[:, 0] == NO_EXPERT).all()
    assert accuracy.precision == accuracy.recall == 1.0 if picked else math.isnan(accuracy.recall)
    width = data.draw(st.integers(1, replay.trace.top_k))
    assert_array_equal(oracle_prediction(replay, width), predicted[..., :width])


@given(replays(), st.integers(0, 2**32 - 1))
def test_accuracy_counts_what_a_plain_loop_counts(replay: Replay, seed: int) -> None:
    trace = replay.trace
    rng = np.random.default_rng(seed)
    shape = (*replay.decode_ids.shape[:2], trace.num_experts)
    named = np.argsort(rng.random(shape), axis=-1)[..., : rng.integers(1, trace.num_experts + 1)].astype(np.uint16)
    named[rng.random(named.shape) < 0.3] = NO_EXPERT
    predicted = right = picked = 0
    for t, (_, row) in enumerate(decode_rows_of(trace)):
        for layer in range(1, trace.num_layers):
            mine, picks = set(named[t, layer].tolist()) - {NO_EXPERT}, set(picks_of(trace, row, layer))
            predicted, right, picked = predicted + len(mine), right + len(mine & picks), picked + len(picks)
    assert prediction_accuracy(replay, named) == (predicted, right, picked)


# ---- the table ----


def plain_table(replay: Replay, width: int) -> NDArray[Any] | None:
    """Scores from dictionaries, counted anew for every sequence; None where there is nothing to learn from."""
    trace = replay.trace
    rows = decode_rows_of(trace)
    found = []
    for s, group in itertools.groupby(rows, key=lambda place: place[0]):
        learned = [row for other, row in rows if other != s]
        if not learned:
            learned = list(range(*trace.prefill_slice(s).indices(trace.num_tokens)))
        if not learned and trace.num_layers > 1:
            return None
        own: Counter[tuple[int, int]] = Counter()
        pairs: Counter[tuple[int, int, int]] = Counter()
        for row in learned:
            for layer in range(trace.num_layers - 1):
                for before in picks_of(trace, row, layer):
                    own[layer, before] += 1
                    for after in picks_of(trace, row, layer + 1):
                        pairs[layer, before, after] += 1
        for _, row in group:
            step = [padded([], width)]
            for layer in range(trace.num_layers - 1):
                score = [0.0] * trace.num_experts
                for before in picks_of(trace, row, layer):
                    for after in range(trace.num_experts):
                        if own[layer, before]:
                            score[after] += pairs[layer, before, after] / own[layer, before]
                order = sorted(range(trace.num_experts), key=lambda e: (-score[e], e))
                step.append(padded([e for e in order if score[e] > 0], width))
            found.append(step)
    return np.array(found).reshape(len(rows), trace.num_layers, width)


@given(replays(), st.data())
def test_the_table_equals_a_plain_one(replay: Replay, data: st.DataObject) -> None:
    width = data.draw(st.integers(1, replay.trace.num_experts))
    expected = plain_table(replay, width)
    if expected is None:
        with pytest.raises(TraceError, match="no prediction for sequence 0"):
            table_prediction(replay, width)
    else:
        assert_array_equal(shown(table_prediction(replay, width)), expected)


def test_a_sequence_does_not_learn_from_its_own_steps() -> None:
    """Where the picks of the layer before are the same, other own picks elsewhere change no prediction."""
    trace = small_trace(plain_model(num_layers=2, num_experts=6), [(3, 9), (2, 8), (1, 7)], seed=3)
    ids = trace.topk_ids.astype(np.int64)
    rows = trace.decode_slice(1)
    ids[rows, 1] = (ids[rows, 1] + 1) % 6
    other = RoutingTrace(
        ids, None, trace.sequence_offsets, trace.prompt_len, trace.layer_index, 6, trace.metadata
    ).replay()
    mine = slice(*trace.replay().decode_offsets[1:3])
    before, after = table_prediction(trace.replay(), 3), table_prediction(other, 3)
    assert_array_equal(before[mine], after[mine])
    assert (before != after).any()  # the others do learn from it


def test_the_table_knows_a_chain() -> None:
    """Experts e and e + 1 of one layer are followed by e + 1 and e + 2: each by its next, always."""
    start = np.random.default_rng(0).integers(0, 5, 200)
    ids = np.stack([np.stack([(start + layer) % 5, (start + layer + 1) % 5], -1) for layer in range(4)], 1)
    trace = RoutingTrace(
        ids, None, np.array([0, 100, 200]), np.array([5, 5]), np.arange(4), 5, {"model": "chain", "source": "synthetic"}
    )
    replay = trace.replay()
    assert prediction_accuracy(replay, table_prediction(replay, 2)) == (190 * 3 * 2,) * 3


# ---- the stale gate ----


@given(replays(), st.floats(0, 1), st.integers(0, 1000), st.data())
def test_the_gate_repeats_picks_and_names_others_where_wrong(
    replay: Replay, accuracy: float, seed: int, data: st.DataObject
) -> None:
    trace = replay.trace
    width = data.draw(st.integers(1, trace.top_k))
    predicted = shown(gate_prediction(replay, accuracy, seed, width))
    assert predicted.shape == (*replay.decode_ids.shape[:2], width)
    use = [Counter(replay.decode_ids[:, layer].ravel().tolist()) for layer in range(trace.num_layers)]
    for t, (_, row) in enumerate(decode_rows_of(trace)):
        assert (predicted[t, 0] == NONE).all()
        for layer in range(1, trace.num_layers):
            picks = set(picks_of(trace, row, layer))
            spare = set(range(trace.num_experts)) - picks
            named = [e for e in predicted[t, layer].tolist() if e != NONE]
            assert len(set(named)) == len(named)
            for listed, expert in zip(trace.topk_ids[row, layer], predicted[t, layer].tolist(), strict=False):
                if listed == trace.unassigned:
                    assert expert == NONE
                elif expert == NONE:
                    assert spare <= set(named)
                else:
                    assert expert == listed or expert in spare
            # One that is never used is drawn only when no other is left.
            wrong = [e for e in named if e in spare]
            if any(use[layer][e] == 0 for e in wrong):
                assert all(e in named for e in spare if use[layer][e] > 0)
    assert_array_equal(predicted, shown(gate_prediction(replay, accuracy, seed, width)))


@given(replays(), st.floats(0, 1), st.floats(0, 1), st.integers(0, 1000))
def test_a_better_gate_is_right_wherever_a_worse_one_is(replay: Replay, one: float, two: float, seed: int) -> None:
    worse, better = (gate_prediction(replay, accuracy, seed) for accuracy in sorted((one, two)))
    oracle = oracle_prediction(replay)
    assert ((worse == oracle) <= (better == oracle)).all()
    assert_array_equal(gate_prediction(replay, 1.0, seed), oracle)
    if replay.trace.num_experts > replay.trace.top_k:
        assert prediction_accuracy(replay, gate_prediction(replay, 0.0, seed)).right == 0


def test_the_gate_has_its_accuracy_and_errs_towards_popular_experts() -> None:
    replay = recording().replay()
    predicted = gate_prediction(replay, 0.9, 5)
    accuracy = prediction_accuracy(replay, predicted)
    sigma = math.sqrt(0.9 * 0.1 / accuracy.picked)
    assert accuracy.recall == accuracy.precision == pytest.approx(0.9, abs=5 * sigma)
    assert (gate_prediction(replay, 0.9, 6) != predicted).any()
    # No link from one pick to the next: both wrong as often as chance has it.
    wrong = (predicted != oracle_prediction(replay))[:, 1:]
    both = wrong.all(-1).mean()
    assert both == pytest.approx(0.01, abs=5 * math.sqrt(0.01 * 0.99 / wrong[..., 0].size))
    # Wrong experts: expected number of draws of each, from the weights that were left.
    layer = 3
    ids = replay.decode_ids[:, layer].astype(np.int64)
    use = np.bincount(ids.ravel(), minlength=8).astype(float)
    left = np.tile(use, (len(ids), 1))
    np.put_along_axis(left, ids, 0.0, axis=1)
    share = left / left.sum(1, keepdims=True)
    drawn = np.zeros(8)
    expected, spread = np.zeros(8), np.zeros(8)
    for seed in range(40):
        named = gate_prediction(replay, 0.5, seed, 1)[:, layer, 0].astype(np.int64)
        out = named != ids[:, 0]
        drawn += np.bincount(named[out], minlength=8)
        expected += share[out].sum(0)
        spread += (share[out] * (1 - share[out])).sum(0)
    assert (abs(drawn - expected) < 5 * np.sqrt(spread)).all()


# ---- activation matrices ----


def plain_counts(trace: RoutingTrace, rows: range) -> NDArray[np.float64]:
    counts = np.zeros((trace.num_layers, trace.num_experts))
    for row in rows:
        for layer in range(trace.num_layers):
            counts[layer, picks_of(trace, row, layer)] += 1
    return counts


def likeness(one: NDArray[np.float64], other: NDArray[np.float64]) -> float:
    """Sum over layers of the cosine; nothing for an empty layer."""
    sizes = np.linalg.norm(one, axis=1) * np.linalg.norm(other, axis=1)
    return float(((one * other).sum(1) / np.where(sizes > 0, sizes, 1)).sum())


@given(replays(min_sequences=2))
def test_the_match_is_the_most_alike_of_the_other_sequences(replay: Replay) -> None:
    trace = replay.trace
    offsets = trace.sequence_offsets.tolist()
    whole = [plain_counts(trace, range(*bounds)) for bounds in itertools.pairwise(offsets)]
    library, best = activation_matches(replay)
    assert library.dtype == np.float32
    for matrix, counts in zip(library, whole, strict=True):
        total = counts.sum(1, keepdims=True)
        assert_allclose(matrix, counts / np.where(total > 0, total, 1), rtol=1e-6)
    assert len(best) == len(replay.decode_ids)
    for (s, row), chosen in zip(decode_rows_of(trace), best.tolist(), strict=True):
        assert chosen != s
        so_far = plain_counts(trace, range(offsets[s], row))
        values = {other: likeness(so_far, counts) for other, counts in enumerate(whole) if other != s}
        assert values[chosen] >= max(values.values()) - 1e-5
        if row == offsets[s]:
            assert chosen == min(values)


def test_a_twin_is_found_and_the_first_of_two_wins() -> None:
    trace = small_trace(plain_model(num_experts=8), [(4, 10), (4, 10), (4, 10)], seed=2)
    twins = trace.sequences([0, 1, 2, 1])
    best = activation_matches(twins.replay()).best.reshape(4, 10)
    assert (best[1] == 3).mean() > 0.8
    assert (best[3] == 1).mean() > 0.8
    assert not (best[[0, 2]] == 3).any()


@given(replays(), st.data())
def test_expected_use_names_the_most_used_experts_of_the_match(replay: Replay, data: st.DataObject) -> None:
    trace = replay.trace
    if trace.num_sequences == 1 and trace.prompt_len[0] == 0:
        return
    width = data.draw(st.integers(1, trace.num_experts))
    library, best = activation_matches(replay)
    predicted = shown(activation_prediction(replay, width))
    for step, chosen in enumerate(best.tolist()):
        assert (predicted[step, 0] == NONE).all()
        for layer in range(1, trace.num_layers):
            use = library[chosen, layer].tolist()
            order = sorted((e for e in range(trace.num_experts) if use[e] > 0), key=lambda e: (-use[e], e))
            assert predicted[step, layer].tolist() == padded(order, width)


def test_a_single_sequence_expects_its_own_prefill_or_nothing() -> None:
    model = plain_model(num_experts=5)
    prompted = small_trace(model, [(6, 4)], seed=1)
    library, best = activation_matches(prompted.replay())
    assert_allclose(library, plain_counts(prompted, range(6))[None] / 12, rtol=1e-6)
    assert best.tolist() == [0] * 4
    bare = small_trace(model, [(0, 4)], seed=1).replay()
    library, best = activation_matches(bare)
    assert_allclose(library, np.full((1, 3, 5), 0.2), rtol=1e-6)
    assert best.tolist() == [0] * 4
    for predict in (activation_prediction, table_prediction):
        with pytest.raises(TraceError, match="no prediction for sequence 0: no other sequence"):
            predict(bare, 2)


# ---- bad input, and all of them at once ----


def test_bad_input_is_told() -> None:
    replay = recording().replay()
    oracle = oracle_prediction(replay)
    for call, message in (
        (lambda: oracle_prediction(replay, 3), r"width is 3, expected an integer in 1\.\.2"),
        (lambda: table_prediction(replay, 0), r"width is 0, expected an integer in 1\.\.8"),
        (lambda: activation_prediction(replay, 9), r"width is 9, expected an integer in 1\.\.8"),
        (lambda: gate_prediction(replay, 1.5, 0), "accuracy is 1.5, expected 0 to 1"),
        (lambda: gate_prediction(replay, float("nan"), 0), "accuracy is nan, expected 0 to 1"),
        (lambda: gate_prediction(replay, True, 0), "accuracy is True, expected a number"),
        (lambda: gate_prediction(replay, 0.5, -1), "seed is -1, expected an integer >= 0"),
        (lambda: gate_prediction(replay, 0.5, 0, 4), r"width is 4, expected an integer in 1\.\.2"),
        (lambda: prediction_accuracy(replay, oracle[1:]), "predictions have shape .* expected 1344 steps, 32 layers"),
        (lambda: prediction_accuracy(replay, oracle[0]), "predictions has shape .* expected 3 axes"),
        (lambda: prediction_accuracy(replay, np.full_like(oracle, 8)), r"predictions hold 8, expected .* 0\.\.7"),
    ):
        with pytest.raises(TraceError, match=message) as caught:
            call()
        assert "\n" not in str(caught.value)


def test_a_table_too_large_for_memory_is_refused() -> None:
    ids = np.zeros((4, 2, 1), np.int64)
    trace = RoutingTrace(ids, None, np.array([0, 2, 4]), np.array([1, 1]), np.arange(2), 65535, {
        "model": "wide", "source": "synthetic",
    })  # fmt: skip
    with pytest.raises(TraceError, match="a table of pairs of 65535 experts in 2 layers is too large"):
        table_prediction(trace.replay(), 1)


def test_predictions_of_a_recording_beat_chance() -> None:
    replay = recording().replay()
    chance = 2 / 8
    for predicted in (table_prediction(replay, 2), activation_prediction(replay, 2)):
        assert predicted.dtype == np.uint16
        assert predicted.flags.c_contiguous
        assert chance < prediction_accuracy(replay, predicted).recall < 0.5
    assert NO_EXPERT == tally.NO_EXPERT
