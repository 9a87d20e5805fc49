"""Routing statistics against plain loops, hand-made traces and published figures."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.errors import TraceError
from perfmodel.routing import RoutingTrace
from perfmodel.routing.statistics import (
    adjacent_overlap,
    hit_rate,
    hit_rate_controls,
    load_cosine,
    selection_counts,
    top_experts,
    top_share,
    weight_sums,
)

Array = np.ndarray[Any, Any]


def trace_of(ids: Any, prompts: list[int], offsets: list[int], experts: int, weights: Any = None) -> RoutingTrace:
    """A one-layer trace from a table of picks [tokens, k]."""
    table = np.array(ids)[:, None, :]
    return RoutingTrace(
        topk_ids=table,
        topk_weights=None if weights is None else np.array(weights)[:, None, :],
        sequence_offsets=np.array(offsets),
        prompt_len=np.array(prompts),
        layer_index=np.arange(1),
        num_experts=experts,
        metadata={"model": "toy", "source": "recorded"},
    )


@st.composite
def traces(draw: st.DrawFn) -> RoutingTrace:
    """Small traces of ragged sequences with weights, some with unassigned picks or a missing phase."""
    top_k = draw(st.integers(1, 3))
    experts = draw(st.integers(top_k, 6))
    layers = draw(st.integers(1, 3))
    lengths = draw(st.lists(st.integers(1, 7), min_size=1, max_size=4))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    ids = rng.random((sum(lengths), layers, experts)).argsort(-1)[..., :top_k]
    if draw(st.booleans()):
        ids[rng.random(ids.shape) < 0.3] = -1
    return RoutingTrace(
        topk_ids=ids,
        topk_weights=rng.random(ids.shape),
        sequence_offsets=np.cumsum([0, *lengths]),
        prompt_len=np.array([draw(st.integers(0, length)) for length in lengths]),
        layer_index=np.arange(layers),
        num_experts=experts,
        metadata={"model": "toy", "source": "recorded"},
    )


def tables(trace: RoutingTrace, phase: str) -> tuple[Array, Array]:
    """Counts and weight sums by plain loops."""
    counts = np.zeros((trace.num_sequences, trace.num_layers, trace.num_experts))
    sums = counts.copy()
    assert trace.topk_weights is not None
    for s in range(trace.num_sequences):
        rows = trace.prefill_slice(s) if phase == "prefill" else trace.decode_slice(s)
        for t in range(rows.start, rows.stop):
            for layer in range(trace.num_layers):
                for pick in range(trace.top_k):
                    expert = trace.topk_ids[t, layer, pick]
                    if expert != trace.unassigned:
                        counts[s, layer, expert] += 1
                        sums[s, layer, expert] += float(trace.topk_weights[t, layer, pick])
    return counts, sums


def importance_of(trace: RoutingTrace) -> Array:
    counts, sums = selection_counts(trace, "prefill"), weight_sums(trace, "prefill")
    return 0.5 * counts / counts.sum(-1, keepdims=True) + 0.5 * sums / sums.sum(-1, keepdims=True)


@given(traces(), st.sampled_from(["prefill", "decode"]))
def test_counts_and_weight_sums(trace: RoutingTrace, phase: Any) -> None:
    counts, sums = tables(trace, phase)
    found = selection_counts(trace, phase)
    assert found.dtype == np.int64
    np.testing.assert_array_equal(found, counts)
    np.testing.assert_allclose(weight_sums(trace, phase), sums, rtol=1e-12, atol=0)


@given(traces())
def test_counts_of_both_phases_cover_every_assigned_pick(trace: RoutingTrace) -> None:
    both = selection_counts(trace, "prefill") + selection_counts(trace, "decode")
    assert both.sum() == (trace.topk_ids != trace.unassigned).sum()


def test_weight_sums_need_weights() -> None:
    trace = trace_of([[0], [1]], [1], [0, 2], 2)
    with pytest.raises(TraceError, match="no gate weights"):
        weight_sums(trace, "prefill")
    with pytest.raises(TraceError, match="unknown phase"):
        selection_counts(trace, "both")  # type: ignore[arg-type]


def test_load_cosine_by_hand() -> None:
    # Prefill counts (2, 1, 0), decode counts (1, 0, 1): 2 / sqrt(5 * 2). The second sequence has no decode.
    trace = trace_of([[0], [0], [1], [0], [2], [1]], [3, 1], [0, 5, 6], 3)
    np.testing.assert_allclose(load_cosine(trace), [2 / math.sqrt(10)], rtol=1e-15, atol=0)
    assert np.isnan(load_cosine(trace_of([[0], [1]], [2], [0, 2], 2))).all()


def test_top_share() -> None:
    np.testing.assert_allclose(top_share([[1, 5, 2, 2], [1, 1, 1, 1]]), [0.7, 0.5], rtol=1e-15, atol=0)
    np.testing.assert_allclose(top_share([1, 5, 2], 1), 5 / 8, rtol=1e-15, atol=0)
    np.testing.assert_allclose(top_share([1, 5, 2]), 5 / 8, rtol=1e-15, atol=0)
    assert np.isnan(top_share([0, 0]))


def test_adjacent_overlap_by_hand() -> None:
    # Decode steps of one sequence: {0,1} {1,2} {1,0}, unassigned {2,-}; the next sequence does not continue it.
    trace = trace_of([[3, 2], [0, 1], [1, 2], [1, 0], [2, -1], [2, 3]], [1, 0], [0, 5, 6], 4)
    np.testing.assert_allclose(adjacent_overlap(trace).measured, [2 / 5], rtol=1e-15, atol=0)
    np.testing.assert_allclose(adjacent_overlap(trace, lag=2).measured, [(2 + 1) / 3], rtol=1e-15, atol=0)
    # Counts 2, 3, 2 in four tokens and 1, 1 in one token: (4 + 9 + 4) / 4 + 2 of 9 picks.
    np.testing.assert_allclose(adjacent_overlap(trace).chance, [(17 / 4 + 2) / 9], rtol=1e-15, atol=0)
    assert np.isnan(adjacent_overlap(trace, lag=9).measured).all()
    assert np.isnan(adjacent_overlap(trace, "prefill").measured).all()
    for lag in (0, -1, 1.5, True):
        with pytest.raises(TraceError, match="lag is"):
            adjacent_overlap(trace, lag=lag)  # type: ignore[arg-type]


@given(traces(), st.integers(1, 3))
def test_adjacent_overlap_by_loops(trace: RoutingTrace, lag: int) -> None:
    shared = np.zeros(trace.num_layers)
    picks = np.zeros(trace.num_layers)
    for s in range(trace.num_sequences):
        rows = trace.decode_slice(s)
        for t in range(rows.start + lag, rows.stop):
            for layer in range(trace.num_layers):
                now = {int(e) for e in trace.topk_ids[t, layer]} - {trace.unassigned}
                before = {int(e) for e in trace.topk_ids[t - lag, layer]}
                shared[layer] += len(now & before)
                picks[layer] += len(now)
    wanted = [a / b if b else math.nan for a, b in zip(shared, picks, strict=True)]
    np.testing.assert_allclose(adjacent_overlap(trace, lag=lag).measured, wanted, rtol=1e-15, atol=0)


def test_top_experts_breaks_ties_by_the_lower_id() -> None:
    mask = top_experts([[1.0, 2.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0]], 2)
    np.testing.assert_array_equal(mask, [[True, True, False, False], [True, True, False, False]])
    assert top_experts([1.0, 2.0], 0).sum() == 0
    assert top_experts([1.0, 2.0], 2).all()


@pytest.mark.parametrize("gpu_experts", [-1, 4, True, 1.5, math.nan, "2", None])
def test_bad_number_of_experts(gpu_experts: Any) -> None:
    with pytest.raises(TraceError, match="gpu_experts is"):
        top_experts([1.0, 2.0, 3.0], gpu_experts)


def test_importance_must_be_a_number() -> None:
    with pytest.raises(TraceError, match="NaN"):
        top_experts([1.0, math.nan], 1)


def test_hit_rate_by_hand() -> None:
    # Decode picks: first sequence 0, 0, 2; second sequence 1 and one that was not assigned.
    trace = trace_of([[3], [0], [0], [2], [1], [-1]], [1, 0], [0, 4, 6], 4)
    placed = np.array([[[True, False, False, False]], [[True, False, False, False]]])
    found = hit_rate(trace, placed)
    np.testing.assert_allclose(found.over_picks, 2 / 4, rtol=1e-15, atol=0)
    np.testing.assert_allclose(found.over_sequences, (2 / 3 + 0) / 2, rtol=1e-15, atol=0)
    np.testing.assert_allclose(found.per_sequence, [2 / 3, 0], rtol=1e-15, atol=0)
    assert hit_rate(trace, placed[0]).over_picks == found.over_picks
    with pytest.raises(TraceError, match="the placement has shape"):
        hit_rate(trace, placed[:, :, :3])
    with pytest.raises(TraceError, match="no decode steps"):
        hit_rate(trace_of([[0]], [1], [0, 1], 4), placed[:1])


@given(traces(), st.data())
def test_hit_rate_controls_by_loops(trace: RoutingTrace, data: st.DataObject) -> None:
    counts, _ = tables(trace, "decode")
    gpu_experts = data.draw(st.integers(0, trace.num_experts))
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    importance = rng.integers(0, 4, counts.shape).astype(float)
    if not counts.any():
        with pytest.raises(TraceError, match="no decode steps"):
            hit_rate_controls(trace, gpu_experts, importance)
        return

    def hit(chosen: Array, s: int) -> float:
        order = [sorted(range(trace.num_experts), key=lambda e: (-row[e], e)) for row in chosen]
        hits = sum(counts[s, layer, order[layer][:gpu_experts]].sum() for layer in range(trace.num_layers))
        return float(hits / counts[s].sum())

    used = [s for s in range(trace.num_sequences) if counts[s].any()]
    found = hit_rate_controls(trace, gpu_experts, importance)
    np.testing.assert_allclose(found.own, np.mean([hit(importance[s], s) for s in used]), rtol=1e-12, atol=1e-15)
    np.testing.assert_allclose(found.oracle, np.mean([hit(counts[s], s) for s in used]), rtol=1e-12, atol=1e-15)
    assert found.uniform == gpu_experts / trace.num_experts
    assert found.oracle >= found.own - 1e-12
    if len(used) == 1:
        assert found.other_sequence is None
        assert found.static is None
        return
    assert found.other_sequence is not None
    others = [np.mean([hit(importance[o], s) for o in used if o != s]) for s in used]
    np.testing.assert_allclose(found.other_sequence, np.mean(others), rtol=1e-9, atol=1e-12)
    pooled = [hit(sum(counts[o] for o in used if o != s), s) for s in used]
    np.testing.assert_allclose(found.static_pooled, np.mean(pooled), rtol=1e-12, atol=1e-15)


def test_static_control_leaves_the_sequence_itself_out() -> None:
    # Three sequences of one decode step each, on experts 1, 1 and 2; the profile of the others decides.
    trace = trace_of([[1], [1], [2]], [0, 0, 0], [0, 1, 2, 3], 3)
    found = hit_rate_controls(trace, 1, np.zeros((3, 1, 3)))
    # Others of the first: 1 and 2 tie, the lower id 1 hits. Likewise the second. Others of the third: 1, a miss.
    assert found.static == pytest.approx(2 / 3, rel=1e-15, abs=0)
    assert found.own == 0
    assert found.other_sequence == 0
    assert found.oracle == 1
    with pytest.raises(TraceError, match="importance has shape"):
        hit_rate_controls(trace, 1, np.zeros((2, 1, 3)))


def test_long_sequences_do_not_outweigh_short_ones_in_the_static_profile() -> None:
    # The first sequence picks expert 2 five times, the second and third pick expert 1 once.
    trace = trace_of([[2]] * 5 + [[1], [1], [1]], [0, 0, 0, 0], [0, 5, 6, 7, 8], 3)
    found = hit_rate_controls(trace, 1, np.zeros((4, 1, 3)))
    assert found.static == pytest.approx(3 / 4, rel=1e-15, abs=0)
    # With every pick alike the five picks of the first decide for the three others.
    assert found.static_pooled == 0


@pytest.mark.parametrize(
    ("gpu_experts", "own", "other", "static", "oracle"),
    [(4, 0.661, 0.482, 0.472, 0.713), (2, 0.401, 0.233, 0.221, 0.438)],
)
def test_bundled_recording(gpu_experts: int, own: float, other: float, static: float, oracle: float) -> None:
    trace = RoutingTrace.load("tiny-mixtral-32l-mini")
    found = hit_rate_controls(trace, gpu_experts, importance_of(trace))
    wanted = (own, gpu_experts / 8, other, static, oracle)
    assert [round(rate, 3) for name, rate in found._asdict().items() if name != "static_pooled"] == list(wanted)


@pytest.mark.parametrize(
    ("gpu_experts", "wanted"),
    [(4, (0.675, 0.5, 0.502, 0.514, 0.713)), (2, (0.404, 0.25, 0.251, 0.263, 0.437))],
)
def test_full_recording(gpu_experts: int, wanted: tuple[float, ...], shared: Path) -> None:
    trace = RoutingTrace.load(shared / "tiny-mixtral" / "tiny-mixtral-32l.npz")
    importance = importance_of(trace)
    found = hit_rate_controls(trace, gpu_experts, importance)
    assert [round(rate, 3) for name, rate in found._asdict().items() if name != "static_pooled"] == list(wanted)
    rate = hit_rate(trace, top_experts(importance, gpu_experts))
    np.testing.assert_allclose(rate.over_sequences, found.own, rtol=1e-12, atol=0)


def test_full_recording_loads(shared: Path) -> None:
    trace = RoutingTrace.load(shared / "tiny-mixtral" / "tiny-mixtral-32l.npz")
    overlap = adjacent_overlap(trace)
    pooled = selection_counts(trace, "prefill").sum(0) + selection_counts(trace, "decode").sum(0)
    assert round(load_cosine(trace).mean(), 3) == 0.960
    assert round(overlap.measured.mean(), 3) == 0.328
    assert round(overlap.chance.mean(), 3) == 0.325
    assert round(top_share(pooled).mean(), 3) == 0.543
    assert round(top_share(selection_counts(trace, "decode")).mean(), 3) == 0.713


def test_public_decode_recording(shared: Path) -> None:
    trace = RoutingTrace.load(shared / "traces" / "gpt-oss-20b" / "gptoss20b_decode.npz")
    overlap = adjacent_overlap(trace)
    assert round(overlap.measured.mean(), 3) == 0.457
    assert round(top_share(selection_counts(trace, "decode").sum(0)).mean(), 3) == 0.827
