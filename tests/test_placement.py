"""Importance, top-K, leave-one-out profiles, and what fits in memory."""

import dataclasses
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal
from strategies import NDP_SYSTEM, mixtral, models, plain_model, recording, small_trace, traces

from perfmodel import placement
from perfmodel.errors import PlacementError, PolicyError
from perfmodel.hardware import load_spec, load_system
from perfmodel.routing import RoutingTrace
from perfmodel.run import plan_run

GB = 1e9


def plain_importance(trace: RoutingTrace, s: int, layer: int, rows: slice, alpha: float, norm: str) -> list[float]:
    """Importance of every expert from the rows of one sequence, by loops."""
    counts, weights = [0.0] * trace.num_experts, [0.0] * trace.num_experts
    for t in range(rows.start, rows.stop):
        for j in range(trace.top_k):
            expert = int(trace.topk_ids[t, layer, j])
            if expert == trace.unassigned:
                continue
            counts[expert] += 1
            if trace.topk_weights is not None:
                weights[expert] += float(trace.topk_weights[t, layer, j])

    def normalised(values: list[float]) -> list[float]:
        if norm == "sum":
            total = sum(values)
            return [v / total if total else 0.0 for v in values]
        low, high = min(values), max(values)
        return [(v - low) / (high - low) if high > low else 0.0 for v in values]

    share = 1.0 if trace.topk_weights is None else alpha
    return [share * c + (1 - share) * w for c, w in zip(normalised(counts), normalised(weights), strict=True)]


@given(st.data(), st.sampled_from([0.0, 0.3, 0.5, 1.0]), st.sampled_from(["sum", "min-max"]))
def test_importance_is_the_formula(data, alpha, norm) -> None:
    model = data.draw(models())
    trace = data.draw(traces(model, prefill=True))
    found = placement.importance(trace, alpha=alpha, norm=norm)
    assert found.values.shape == (trace.num_sequences, trace.num_layers, trace.num_experts)
    for s in range(trace.num_sequences):
        for layer in range(trace.num_layers):
            expected = plain_importance(trace, s, layer, trace.prefill_slice(s), alpha, norm)
            assert_allclose(found.values[s, layer], expected, rtol=1e-12, atol=1e-15)


@given(st.data(), st.sampled_from([0.0, 0.5, 1.0]), st.sampled_from(["sum", "min-max"]))
def test_decode_importance_is_the_formula(data, alpha, norm) -> None:
    trace = data.draw(traces(data.draw(models())))
    found = placement.importance(trace, alpha=alpha, norm=norm, phase="decode")
    for s in range(trace.num_sequences):
        expected = plain_importance(trace, s, 0, trace.decode_slice(s), alpha, norm)
        assert_allclose(found.values[s, 0], expected, rtol=1e-12, atol=1e-15)


def test_importance_by_hand() -> None:
    trace = RoutingTrace(
        topk_ids=np.array([[[0, 1]], [[0, 2]], [[3, 0]]]),
        topk_weights=np.array([[[0.75, 0.25]], [[0.5, 0.5]], [[1.0, 0.0]]]),
        sequence_offsets=np.array([0, 3]),
        prompt_len=np.array([2]),
        layer_index=np.array([0]),
        num_experts=4,
        metadata={"model": "hand", "source": "synthetic"},
    )
    by_sum = placement.importance(trace, alpha=0.25).values[0, 0]
    assert_allclose(by_sum, [0.25 * 2 / 4 + 0.75 * 1.25 / 2, 0.25 / 4 + 0.75 / 8, 0.25 / 4 + 0.75 / 4, 0], rtol=1e-15)
    by_range = placement.importance(trace, alpha=0.25, norm="min-max").values[0, 0]
    assert_allclose(by_range, [1.0, 0.25 / 2 + 0.75 * 0.25 / 1.25, 0.25 / 2 + 0.75 * 0.5 / 1.25, 0], rtol=1e-15)


def test_counts_alone_without_weights_and_the_notes_say_so() -> None:
    bare = dataclasses.replace(recording(), topk_weights=None)
    found = placement.importance(bare, alpha=0.5)
    assert found.alpha == 1.0
    assert len(found.notes) == 1
    assert re.search(r"no routing weights.*alpha forced from 0.5 to 1", found.notes[0])
    assert_array_equal(found.values, placement.importance(recording(), alpha=1.0).values)
    assert placement.importance(bare, alpha=1.0).notes == placement.importance(recording(), alpha=0.5).notes == ()
    run = plan_run(mixtral(), NDP_SYSTEM, bare, "context-aware", prompt=16, output=2)
    assert run.plan.alpha == 1.0
    assert found.notes[0] in run.price().notes


@pytest.mark.parametrize("alpha", [-1e-9, 1 + 1e-9, np.nan, np.inf])
def test_alpha_out_of_range_is_refused(alpha) -> None:
    with pytest.raises(PolicyError, match=r"alpha.*allowed 0 to 1"):
        placement.importance(recording(), alpha=alpha)
    with pytest.raises(PolicyError, match=r"alpha.*allowed 0 to 1"):
        placement.importance_of(np.ones((1, 2)), np.ones((1, 2)), alpha=alpha)


def test_importance_of_counts_needs_weights_unless_counts_are_all() -> None:
    counts = np.array([[3, 1, 0, 0], [0, 0, 0, 0]])
    assert placement.importance_of(counts, None, alpha=1.0).tolist() == [[0.75, 0.25, 0.0, 0.0], [0.0] * 4]
    with pytest.raises(PolicyError, match=r"alpha: found 0.5, allowed 1 without routing weights"):
        placement.importance_of(counts, None)


# --- leave one out ---


@given(st.data(), st.sampled_from([0.0, 0.5, 1.0]), st.sampled_from(["sum", "min-max"]))
def test_a_left_out_sequence_leaves_no_trace_in_its_profile(data, alpha, norm) -> None:
    model = data.draw(models())
    trace = data.draw(traces(model, min_sequences=2))
    options = {"alpha": alpha, "norm": norm}
    before = placement.importance_of_others(trace.replay(), **options).values
    own = data.draw(st.integers(0, trace.num_sequences - 1))
    rows = trace.decode_slice(own)
    ids, other = trace.topk_ids.astype(np.int64), np.random.default_rng(data.draw(st.integers(0, 99)))
    ids[trace.topk_ids == trace.unassigned] = -1
    shape = ids[rows].shape
    ids[rows] = np.argsort(other.random((*shape[:2], model.num_experts)), axis=-1)[..., : model.top_k]
    weights = None if trace.topk_weights is None else trace.topk_weights.copy()
    if weights is not None:
        # So large that a sum with them has no room for the digits of the others.
        weights[rows] = other.random(shape) * 1e12
    changed = dataclasses.replace(trace, topk_ids=ids, topk_weights=weights)
    # Not one bit: a residue of rounding would already break ties by what the sequence itself did.
    assert_array_equal(placement.importance_of_others(changed.replay(), **options).values[own], before[own])


@given(st.data(), st.sampled_from([0.0, 0.5, 1.0]), st.sampled_from(["sum", "min-max"]))
def test_the_profile_of_the_others_is_the_mean_of_their_importance(data, alpha, norm) -> None:
    trace = data.draw(traces(data.draw(models()), min_sequences=2))
    found = placement.importance_of_others(trace.replay(), alpha=alpha, norm=norm).values
    for s in range(trace.num_sequences):
        others = [
            plain_importance(trace, other, 0, trace.decode_slice(other), alpha, norm)
            for other in range(trace.num_sequences)
            if other != s
        ]
        assert_allclose(found[s, 0], np.mean(others, axis=0), rtol=1e-12, atol=1e-15)


def test_a_long_sequence_has_no_more_say_in_a_profile_than_a_short_one() -> None:
    # Decode picks: 0 nine times; 1 once; 2 once. Counted together, expert 0 would have nine tenths of the profile.
    trace = RoutingTrace(
        topk_ids=np.array([[[0]]] * 9 + [[[1]], [[2]]]),
        topk_weights=None,
        sequence_offsets=np.array([0, 9, 10, 11]),
        prompt_len=np.array([0, 0, 0]),
        layer_index=np.array([0]),
        num_experts=3,
        metadata={"model": "hand", "source": "synthetic"},
    )
    found = placement.importance_of_others(trace.replay(), alpha=1.0).values[:, 0]
    assert_allclose(found, [[0, 0.5, 0.5], [0.5, 0, 0.5], [0.5, 0.5, 0]], rtol=1e-15, atol=0)


def test_static_places_by_the_profile_that_its_control_uses() -> None:
    evaluation = plan_run(mixtral(), NDP_SYSTEM, recording(), "static:alpha=1,gpu_experts=3", output=40).price()
    assert evaluation.hit_rate is not None
    assert evaluation.hit_rate.static is not None
    assert_allclose(evaluation.hit_rate.own, evaluation.hit_rate.static, rtol=1e-12, atol=0)


def test_one_sequence_has_no_others() -> None:
    single = recording().sequences([0])
    with pytest.raises(PolicyError, match=r"at least 2 sequences, found 1"):
        placement.importance_of_others(single.replay())


# --- top-K ---


@given(st.data())
def test_the_most_important_experts_are_placed_and_ties_go_to_the_lower_id(data) -> None:
    model = data.draw(models())
    trace = data.draw(traces(model, prefill=True))
    count = data.draw(st.integers(0, model.num_experts))
    run = plan_run(model, NDP_SYSTEM, trace, f"context-aware:gpu_experts={count},alpha=1")
    values = placement.importance(trace, alpha=1.0).values
    assert run.plan.hot is not None
    for s in range(trace.num_sequences):
        for layer in range(trace.num_layers):
            ranked = sorted(range(model.num_experts), key=lambda e: (-values[s, layer, e], e))
            assert sorted(np.flatnonzero(run.plan.hot[s, layer])) == sorted(ranked[:count])


# --- memory ---


def test_two_full_experts_of_8x22b_fit_80_gb_and_three_do_not() -> None:
    model = mixtral("mixtral-8x22b")
    use = placement.gpu_footprint(model, 2, 2176)
    assert_allclose(use.total / GB, 78.8, rtol=0, atol=0.05)
    assert_allclose(use.experts / GB, 2 * 56 * 3 * 6144 * 16384 * 2 / GB, rtol=1e-15)
    assert_allclose(use.kv_cache, 56 * 2 * 8 * 128 * 2 * 2176, rtol=1e-15)
    for options, count in (("context-aware", 2), ("context-aware:gpu_experts=2", 2)):
        run = plan_run(model, NDP_SYSTEM, recording(), options, prompt=128, output=2048, layers="cycle")
        assert run.plan.gpu_experts == count
        memory = run.memory()
        assert_allclose(memory["gpu"]["total"], use.total, rtol=1e-15)
        assert_allclose(memory["ndp"]["total"] / GB, 271 + 169, rtol=0, atol=1)
    with pytest.raises(PlacementError) as caught:
        plan_run(model, NDP_SYSTEM, recording(), "context-aware:gpu_experts=3", prompt=128, output=2048, layers="cycle")
    message = str(caught.value)
    parts = re.search(
        r"other weights ([\d.]+) \+ experts ([\d.]+) \+ KV cache ([\d.]+) = ([\d.]+) GB, capacity ([\d.]+) GB", message
    )
    assert parts is not None, message
    other, experts, kv, total, capacity = map(float, parts.groups())
    assert_allclose(other + experts + kv, total, rtol=0, atol=0.02)
    assert_allclose(total, placement.gpu_footprint(model, 3, 2176).total / GB, rtol=0, atol=0.006)
    assert capacity == 80
    assert "at most 2 experts a layer fit" in message
    assert "\n" not in message


def test_a_context_that_does_not_fit_is_refused() -> None:
    model = mixtral("mixtral-8x22b")
    with pytest.raises(PlacementError, match=r"not even zero|at most 1 experts"):
        plan_run(model, NDP_SYSTEM, recording(), "monde:resident=2", prompt=16000, output=1, layers="cycle")


def test_experts_that_do_not_fit_the_host_are_refused() -> None:
    desktop, cpu = load_system("rtx4090-pcie4"), load_spec("xeon-gold-6454s")
    model = mixtral("mixtral-8x22b")
    options = {"prompt": 16, "output": 2, "layers": "cycle"}
    stated = desktop.with_values({"cpu.memory_capacity_gb": 300})
    with pytest.raises(
        PlacementError, match=r"memory of ryzen-9950x.*270\.\d+ \+ replicas 67\.\d+ = 338\.\d+ GB, .* 300"
    ):
        plan_run(model, stated, recording(), "hobbit", **options)
    roomy = desktop.with_values({"cpu.memory_capacity_gb": 340})
    for system in (roomy, desktop._copy(cpu=cpu)):
        notes = plan_run(model, system, recording(), "hobbit", **options).plan.notes
        assert not [note for note in notes if "host memory" in note]
    # What is not stated is not checked, and the notes say so.
    notes = plan_run(model, desktop, recording(), "hobbit", **options).price().notes
    text = "host memory is not stated by cpu ryzen-9950x, so it is not checked against the 338.2 GB of experts"
    assert [note for note in notes if "host memory" in note] == [text]
    bare = plan_run(model, desktop._copy(cpu=None), recording(), "hobbit", **options).plan.notes
    assert any("host memory is not stated by system rtx4090-pcie4, which has no cpu" in note for note in bare)
    # With a near-data device the experts are there, whatever the host has.
    near = NDP_SYSTEM._copy(cpu=stated.cpu)
    assert not [n for n in plan_run(model, near, recording(), "hobbit", **options).plan.notes if "host" in n]


def test_replicas_that_do_not_fit_the_device_are_refused() -> None:
    small = NDP_SYSTEM.with_values({"ndp.capacity_gb": 400})
    model = mixtral("mixtral-8x22b")
    options = {"prompt": 16, "output": 2, "layers": "cycle"}
    with pytest.raises(PlacementError, match=r"experts 270\.\d+ \+ replicas 169\.\d+ = 439\.\d+ GB, capacity 400"):
        plan_run(model, small, recording(), "context-aware", **options)
    plan_run(model, small, recording(), "context-aware:selector=full", **options)
    plan_run(model, small, recording(), "monde", **options)
    with pytest.raises(PlacementError, match="does not fit"):
        plan_run(model, NDP_SYSTEM.with_values({"ndp.capacity_gb": 270}), recording(), "monde", **options)


@given(models(), st.floats(0.0, 3.0), st.integers(1, 100))
def test_the_largest_count_fits_and_one_more_does_not(model, scale, context) -> None:
    capacity = scale * placement.gpu_footprint(model, model.num_experts / 2, context).total
    most = placement.largest_gpu_experts(model, capacity, context)
    assert -1 <= most <= model.num_experts
    slack = 1 + 1e-12
    if most >= 0:
        assert placement.gpu_footprint(model, most, context).total <= capacity * slack
    if most < model.num_experts:
        assert placement.gpu_footprint(model, most + 1, context).total * slack > capacity


def default_gpu_experts(model, capacity: float, context: int) -> int:
    return placement.wanted_gpu_experts(model, placement.largest_gpu_experts(model, capacity, context))


def test_default_counts() -> None:
    large, small = mixtral("mixtral-8x22b"), mixtral()
    assert default_gpu_experts(small, 80 * GB, 2176) == 4
    assert default_gpu_experts(large, 80 * GB, 2176) == 2
    # A published count is not exceeded on a larger GPU, and gives way on a smaller one.
    assert default_gpu_experts(large, 200 * GB, 2176) == 2
    assert default_gpu_experts(large, 50 * GB, 2176) == 1
    assert default_gpu_experts(small, 24 * GB, 2176) == 1
    assert default_gpu_experts(large, 5 * GB, 2176) == 0
    other = plain_model(num_experts=7, top_k=2)
    one = placement.gpu_footprint(other, 1, 10)
    assert default_gpu_experts(other, 1e9, 10) == 3
    assert default_gpu_experts(other, one.total + one.experts / 2, 10) == 1
    assert default_gpu_experts(other, one.other_weights / 2, 10) == 0


def test_defaults_reach_the_plan_and_are_said() -> None:
    model = plain_model(num_experts=7)
    trace = small_trace(model, [(4, 3), (5, 2)])
    for name in ("context-aware", "static"):
        run = plan_run(model, NDP_SYSTEM, trace, name)
        assert run.plan.gpu_experts == 3
        assert run.plan.hot is not None
        assert (run.plan.hot.sum(axis=-1) == 3).all()
        assert any("3 of 7 experts a layer on the GPU" in note for note in run.plan.notes)
    tight = NDP_SYSTEM.with_values({"gpu.memory_capacity_gb": 50})
    run = plan_run(mixtral("mixtral-8x22b"), tight, recording(), "context-aware", prompt=16, output=2, layers="cycle")
    assert run.plan.gpu_experts == 1


def test_buffers_count() -> None:
    model = plain_model()
    bare = placement.gpu_footprint(model, 1, 5)
    assert placement.gpu_footprint(model, 1, 5, buffer_bytes=100.0).total == bare.total + 100
    trace = small_trace(model, [(2, 3)])
    expert = model.expert_bytes()
    layers = len(model.moe_layers)

    def buffers(policy: str) -> tuple[float, float]:
        use = plan_run(model, NDP_SYSTEM, trace, policy).memory()["gpu"]
        return use["experts"], use["buffers"]

    assert buffers("monde") == (0, expert)
    assert buffers("monde:resident=2") == (2 * layers * expert, 0)
    assert buffers("monde:reading=all-ndp") == (0, 0)
    assert buffers("hobbit") == (0, expert)
    assert buffers("hobbit:cache_high=2,cache_low=3") == (2 * layers * expert, 3 * layers * expert / 4)
