"""Distinct states against the plain loop over every pick, and what follows from summing states exactly."""

import dataclasses
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal
from strategies import (
    EVERY_POLICY,
    NDP_SYSTEM,
    mixtral,
    models,
    plain_model,
    policy_texts,
    recording,
    small_trace,
    systems,
    traces,
)

from perfmodel import oracle
from perfmodel.evaluation import QUALITY
from perfmodel.point import hardware_point
from perfmodel.policies import Executor, Plan, When, WorkClass
from perfmodel.run import PARTS, Run, plan_run
from perfmodel.states import decode_states, prefill_states


@st.composite
def runs(draw: st.DrawFn, names: tuple[str, ...] = EVERY_POLICY) -> Run:
    """A planned policy on a random model, trace and system."""
    model = draw(models())
    name = draw(st.sampled_from(names))
    trace = draw(
        traces(model, min_sequences=2 if name == "static" else 1, prefill=True if name == "context-aware" else None)
    )
    text = draw(policy_texts(model, [name]))
    if trace.topk_weights is None:
        text = text.replace("split=gates", "split=published")
    longer = draw(st.sampled_from([None, None, 20]))
    return plan_run(model, draw(systems()), trace, text, prompt=longer, output=draw(st.sampled_from([None, 11])))


# --- the oracle ---


@settings(max_examples=250)
@given(runs())
def test_every_metric_equals_the_plain_loop(run: Run) -> None:
    assert oracle.largest_difference(run.price(), oracle.per_pick(run)) <= 1e-12


@settings(max_examples=60)
@given(runs(), systems())
def test_a_plan_is_priced_on_another_system_as_by_the_plain_loop(run: Run, other) -> None:
    checked = oracle.per_pick(run, other)
    assert oracle.largest_difference(run.price(other), checked) <= 1e-12


@given(models(expert_bits=[32.0]), st.data())
def test_32_bit_experts_equal_the_plain_loop(model, data) -> None:
    trace = data.draw(traces(model))
    run = plan_run(model, data.draw(systems()), trace, "monde:reading=all-ndp")
    assert oracle.largest_difference(run.price(), oracle.per_pick(run)) <= 1e-12


@pytest.mark.parametrize("bits", [16.0, 16.5, 17.0, 32.0, 64.0])
@pytest.mark.parametrize("table", [{"16": 2.0}, {"32": 0.5}, {"4": 4.0}])
def test_native_rates_of_wide_weights_equal_the_plain_loop(bits: float, table: dict[str, float]) -> None:
    rates = {f"ndp.native_rate_by_bits.{width}": rate for width, rate in table.items()}
    # Slow arrays, so that their rate is what counts.
    system = NDP_SYSTEM.with_values({"ndp.precision_scaling": "native", "ndp.clock_ghz": 0.001, **rates})
    model = plain_model(expert_bits=bits)
    run = plan_run(model, system, small_trace(model, [(2, 3)]), "monde:reading=all-ndp")
    assert system.ndp is not None
    plain = run.price(system.with_values({"ndp.precision_scaling": "none"}))
    expected = system.ndp.array_rate(math.floor(bits)) if bits <= 32 else 1.0
    assert_allclose(plain.ndp_side_s / run.price().ndp_side_s, expected, rtol=1e-12, atol=0)
    assert oracle.largest_difference(run.price(), oracle.per_pick(run)) <= 1e-12


@pytest.mark.parametrize("policy", ["context-aware", "monde", "hobbit:prefetch_accuracy=0.5,cache_high=2"])
def test_a_real_model_equals_the_plain_loop(policy: str) -> None:
    trace = recording().sequences([0, 3])
    run = plan_run(mixtral(), NDP_SYSTEM, trace, policy, prompt=16, output=24)
    assert oracle.largest_difference(run.price(), oracle.per_pick(run)) <= 1e-12


def test_the_comparison_notices_every_metric() -> None:
    run = plan_run(mixtral(), NDP_SYSTEM, recording(), "context-aware:mean_bits=2", prompt=4, output=3)
    evaluation, checked = run.price(), oracle.per_pick(run)
    names = {field.name for field in dataclasses.fields(evaluation)}
    timed = {name for name in names if name.endswith("_s")} - {"bandwidth_floor_s"}
    assert timed | {"bytes_per_token", "decode_tok_per_s", *QUALITY} == set(checked)
    for name in checked:
        value = getattr(evaluation, name)
        for wrong in (1 + 1e-9, math.nan, math.inf):
            if isinstance(value, dict):
                key = max(value, key=value.__getitem__)
                other = dataclasses.replace(evaluation, **{name: {**value, key: value[key] * wrong}})
            else:
                # 1e-300 so that a migration of zero changes as well.
                other = dataclasses.replace(evaluation, **{name: (value or 1e-300) * wrong})
            assert not oracle.largest_difference(other, checked) < 9e-10, (name, wrong)
    missing = dataclasses.replace(evaluation, ttft_s=None)
    assert oracle.largest_difference(missing, checked) == math.inf


# --- the compression itself ---


def plan_of(picks: np.ndarray, classes: tuple[WorkClass, ...]) -> Plan:
    """A plan of one sequence with these picks."""
    return Plan(
        policy="none",
        classes=classes,
        picks=picks.astype(np.uint8),
        offsets=np.array([0, len(picks)]),
        context_start=np.zeros(1, np.int64),
        prompt_tokens=np.zeros(1, np.int64),
        overlap="max",
        prefill_class=None,
        prefill_tokens=None,
        migrated_experts=np.zeros(1),
        gpu_experts=0,
        gpu_buffer_bytes=0.0,
        replica_bits=(),
        hot=None,
        alpha=None,
        notes=(),
    )


def expand(states, state: int) -> Counter:
    """Kinds of work of a state, with how often each occurs."""
    row = states.state_row[state]
    entries = range(states.row_offsets[row], states.row_offsets[row + 1])
    return Counter({int(states.row_work[i]): int(states.row_count[i]) for i in entries})


# Widths on both sides of what fits a 62-bit key, and class counts on both sides of a directly indexed table.
@given(
    st.integers(1, 12),
    st.integers(1, 4),
    st.sampled_from([1, 2, 3, 8, 24]),
    st.integers(1, 9),
    st.sampled_from(When),
    st.integers(0, 2**32 - 1),
)
@example(12, 4, 24, 2, When.NOW, 0)
@example(12, 4, 24, 2, When.AHEAD, 0)
def test_states_hold_exactly_the_picks(tokens, layers, width, num_classes, issued, seed) -> None:
    picks = np.random.default_rng(seed).integers(0, num_classes, (tokens, layers, width))
    whens = [issued] + [When.NOW] * (num_classes - 1)
    classes = tuple(WorkClass(Executor.FETCH, 1.0 + i, when=when) for i, when in enumerate(whens))
    states = decode_states(plan_of(picks, classes))
    assert states.state_id.shape == (tokens, layers)
    for t in range(tokens):
        for layer in range(layers):
            state = states.state_id[t, layer]
            assert expand(states, state) == Counter(picks[t, layer].tolist())
            before = states.state_before[state]
            if issued and layer > 0:
                rows = np.flatnonzero(states.state_row == before)
                assert expand(states, rows[0]) == Counter(picks[t, layer - 1].tolist())
            else:
                assert before == -1
    assert len(np.unique(states.state_id)) == len(states.state_row)
    assert_array_equal(states.state_count, np.bincount(states.state_id.ravel()))
    assert_array_equal(states.work_count(states.state_count), np.bincount(picks.ravel(), minlength=num_classes))
    expected = {tuple(sorted(cell)) for cell in picks.reshape(-1, width).tolist()}
    if not issued:
        assert len(states.state_row) == len(expected)


@pytest.mark.parametrize(("width", "num_classes"), [(3, 4), (24, 6)])
def test_the_order_of_picks_makes_no_state(width: int, num_classes: int) -> None:
    rng = np.random.default_rng(1)
    multiset = np.sort(rng.integers(0, num_classes, width))
    picks = rng.permuted(np.broadcast_to(multiset, (30, 2, width)), axis=-1)
    classes = tuple(WorkClass(Executor.NDP, 1.0 + i) for i in range(num_classes))
    states = decode_states(plan_of(picks, classes))
    assert len(states.state_row) == 1
    assert expand(states, 0) == Counter(multiset.tolist())


def test_wide_layers_and_many_pairs_equal_the_plain_loop() -> None:
    # 9 classes and 24 picks do not fit a key; over 1023 distinct rows make pairs that do not fit a table.
    model = plain_model(num_layers=10, num_experts=40, top_k=24)
    trace = small_trace(model, [(3, 100), (2, 60)], seed=5, unassigned=0.05)
    text = "hobbit:cache_high=12,cache_low=6,prefetch_accuracy=0.6,low_bits=4"
    run = plan_run(model, NDP_SYSTEM, trace, text)
    assert len(run.plan.classes) == 9
    assert len(run.decode.row_offsets) - 1 > 1024
    assert oracle.largest_difference(run.price(), oracle.per_pick(run)) <= 1e-12


@settings(max_examples=40)
@given(runs())
def test_prefill_states_hold_every_selected_expert(run: Run) -> None:
    plan, states = run.plan, prefill_states(run.plan)
    if plan.prefill_tokens is None:
        assert states is None
        return
    assert states is not None
    sequences, layers, experts = plan.prefill_tokens.shape
    for s in range(sequences):
        for layer in range(layers):
            row = states.state_row[states.state_id[s, layer]]
            part = slice(states.row_offsets[row], states.row_offsets[row + 1])
            found = [tuple(states.work[w]) for w in states.row_work[part]]
            expected = []
            for e in range(experts):
                tokens = plan.prefill_tokens[s, layer, e]
                work = plan.classes[plan.prefill_class[s, layer, e]]
                if tokens:
                    expected.append((work.executor, tokens, work.bits, float(work.quantised), float(work.when)))
            assert sorted(found) == sorted(expected)
            assert (states.row_count[part] == 1).all()
    assert_array_equal(states.state_count, np.bincount(states.state_id.ravel()))


# --- several points at once ---


@settings(max_examples=60)
@given(runs(), st.lists(systems(), min_size=2, max_size=5), st.integers(1, 4))
def test_many_points_equal_one_price_each(run: Run, several, cut: int) -> None:
    points = np.stack([hardware_point(system) for system in several])
    together = run.mean_token_s(points)
    assert_allclose(together, [run.price(system).tpot_mean_s for system in several], rtol=1e-12, atol=0)
    parts = [run.mean_token_s(part) for part in (points[:cut], points[cut:]) if len(part)]
    assert_array_equal(np.concatenate(parts), together)
    assert_array_equal([run.mean_token_s(point[None])[0] for point in points], together)


def test_splitting_points_changes_no_bit_on_a_long_trace() -> None:
    run = plan_run(mixtral(), NDP_SYSTEM, recording(), "monde", prompt=32, output=300)
    efficiencies = np.linspace(0.2, 0.9, 7)
    points = np.stack([hardware_point(NDP_SYSTEM.with_values({"gpu.memory_efficiency": e})) for e in efficiencies])
    together = run.mean_token_s(points)
    for cut in (1, 2, 3, 6):
        assert_array_equal(np.concatenate([run.mean_token_s(points[:cut]), run.mean_token_s(points[cut:])]), together)


# --- what a price consists of ---


@settings(max_examples=80)
@given(runs())
def test_parts_and_percentiles_describe_the_same_tokens(run: Run) -> None:
    evaluation = run.price()
    times = run.token_times(hardware_point(run.system))
    assert len(times) == run.plan.offsets[-1] == len(run.plan.picks)
    assert (times > 0).all()
    assert_allclose(evaluation.tpot_mean_s, math.fsum(times) / len(times), rtol=1e-13, atol=0)
    assert evaluation.tpot_max_s == times.max()
    ordered = np.sort(times)
    for q, value in ((50, evaluation.tpot_p50_s), (95, evaluation.tpot_p95_s), (99, evaluation.tpot_p99_s)):
        place = q / 100 * (len(ordered) - 1)
        low, high = ordered[math.floor(place)], ordered[math.ceil(place)]
        assert_allclose(value, low + (high - low) * (place - math.floor(place)), rtol=1e-13, atol=0)
    assert set(evaluation.breakdown_s) == set(PARTS)
    assert all(value >= 0 for value in evaluation.breakdown_s.values())
    assert_allclose(math.fsum(evaluation.breakdown_s.values()), evaluation.tpot_mean_s, rtol=1e-12, atol=0)
    assert_allclose(evaluation.decode_tok_per_s * evaluation.tpot_mean_s, 1.0, rtol=1e-15, atol=0)
    steps = np.diff(run.plan.offsets)
    assert_allclose(evaluation.decode_s, evaluation.tpot_mean_s * steps.mean(), rtol=1e-12, atol=0)
    assert evaluation.busy_s["ndp"] == evaluation.ndp_side_s
    for part, busy in (("link", "link"), ("ndp", "ndp")):
        assert evaluation.busy_s[busy] >= evaluation.breakdown_s[part] * (1 - 1e-12)
    if evaluation.ttft_s is not None:
        whole = evaluation.ttft_s + evaluation.migration_s + evaluation.decode_s
        assert_allclose(evaluation.end_to_end_s, whole, rtol=1e-12, atol=0)


@settings(max_examples=150)
@given(runs(), systems())
def test_no_token_is_faster_than_the_busiest_tier(run: Run, other) -> None:
    for system in (run.system, run.system.at_peak(), other, other.at_peak()):
        evaluation = run.price(system)
        assert evaluation.bandwidth_floor_s > 0
        assert evaluation.tpot_mean_s >= evaluation.bandwidth_floor_s * (1 - 1e-12)


def test_the_floor_holds_where_copies_and_activations_use_the_link_at_once() -> None:
    model = plain_model(hidden_size=64, expert_size=2, expert_matrices=((64, 2), (64, 2), (2, 64)))
    fast = {"gpu.memory_bandwidth_gb_per_s": 5000, "link.bandwidth_gb_per_s": 1, "link.latency_us": 0}
    system = NDP_SYSTEM.with_values({**fast, "ndp.dram_efficiency": 1, "ndp.clock_ghz": 20}).at_peak()
    for text in ("monde", "monde:reading=all-ndp", "hobbit"):
        evaluation = plan_run(model, system, small_trace(model, [(2, 5)]), text).price()
        assert evaluation.binding_resource == "link"
        assert evaluation.tpot_mean_s >= evaluation.bandwidth_floor_s >= 0.4 * evaluation.tpot_mean_s
