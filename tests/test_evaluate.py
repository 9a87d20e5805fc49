"""What times do when hardware, routing and precision change; and a few of them by hand."""

import dataclasses
import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal
from strategies import (
    NDP_SYSTEM,
    attention_kind,
    decode_rows,
    mixtral,
    models,
    plain_model,
    policy_texts,
    recording,
    small_trace,
    system_values,
    systems,
    traces,
    without_chance,
)

from perfmodel.errors import PerfModelError, TraceError
from perfmodel.hardware import System, load_system
from perfmodel.point import dram_efficiency, hardware_point
from perfmodel.policies import Executor
from perfmodel.run import Evaluation, Run, evaluate, plan_run

ALONE = ("context-aware", "monde", "hobbit")
ULP = 1 + 1e-13


@st.composite
def planned(draw: st.DrawFn, names: tuple[str, ...] = (*ALONE, "static")) -> Run:
    """A planned policy on `NDP_SYSTEM` with a prefill."""
    model = draw(models())
    trace = draw(traces(model, min_sequences=2, prefill=True))
    text = draw(policy_texts(model, names))
    if trace.topk_weights is None:
        text = text.replace("split=gates", "split=published")
    return plan_run(model, NDP_SYSTEM, trace, text)


def every_time(run: Run, system: System) -> np.ndarray:
    """Time of every prefill, migration and token."""
    point = hardware_point(system)
    prefill = run.prefill_times(point)
    assert prefill is not None
    return np.concatenate([prefill, run.migration_times(point), run.token_times(point)])


# --- physics, for a fixed plan ---

MORE_IS_FASTER = (
    "link.bandwidth_gb_per_s",
    "link.efficiency",
    "gpu.memory_bandwidth_gb_per_s",
    "gpu.memory_efficiency",
    "gpu.peak_tflop_per_s.fp16",
    "gpu.compute_efficiency",
    "ndp.dram_bandwidth_gb_per_s",
    "ndp.arrays",
    "ndp.clock_ghz",
)
LESS_IS_FASTER = (
    "link.latency_us",
    "link.n_half_kb",
    "gpu.memory_n_half_kb",
    "gpu.launch_overhead_us",
    "ndp.scale_bits_per_weight",
)


@settings(max_examples=120)
@given(planned(), system_values(), st.sampled_from(MORE_IS_FASTER), st.floats(1.0, 4.0))
def test_more_of_anything_never_slows(run: Run, values, key: str, factor: float) -> None:
    slow = NDP_SYSTEM.with_values(values)
    value = slow.get(key) * factor
    if key == "ndp.arrays":
        value = math.ceil(value)
    if key.endswith("efficiency"):
        value = min(1.0, value)
    fast = slow.with_values({key: value})
    assert (every_time(run, fast) <= every_time(run, slow) * ULP).all()


@settings(max_examples=60)
@given(planned(), system_values(), st.sampled_from(LESS_IS_FASTER), st.floats(0.0, 1.0))
def test_less_overhead_never_slows(run: Run, values, key: str, factor: float) -> None:
    slow = NDP_SYSTEM.with_values(values)
    fast = slow.with_values({key: slow.get(key) * factor})
    assert (every_time(run, fast) <= every_time(run, slow) * ULP).all()


@settings(max_examples=100)
@given(planned(), systems(), st.integers(0, 2**32 - 1))
def test_fewer_bits_never_slow(run: Run, system: System, seed: int) -> None:
    shares = np.random.default_rng(seed).choice([1.0, 0.9, 0.5, 0.25], len(run.plan.classes))
    lighter = tuple(
        work._replace(bits=max(1.0, work.bits * share))
        for work, share in zip(run.plan.classes, shares.tolist(), strict=True)
    )
    other = dataclasses.replace(run, plan=dataclasses.replace(run.plan, classes=lighter))
    assert (every_time(other, system) <= every_time(run, system) * ULP).all()


# What each rate bounds, so that it is really used: halving it doubles the time of what it bounds.
@pytest.mark.parametrize(
    ("policy", "keys", "part"),
    [
        ("monde:reading=all-ndp", ("ndp.dram_bandwidth_gb_per_s", "ndp.clock_ghz"), "ndp"),
        ("hobbit", ("link.bandwidth_gb_per_s",), "link"),
        ("hobbit:cache_high=4", ("gpu.memory_bandwidth_gb_per_s", "gpu.peak_tflop_per_s.fp16"), "attention"),
    ],
)
def test_a_part_takes_twice_as_long_at_half_the_rate(policy: str, keys: tuple[str, ...], part: str) -> None:
    system = NDP_SYSTEM.with_values({"link.latency_us": 0, "ndp.dram_efficiency": 0.5})
    run = plan_run(mixtral(), system, recording(), policy, prompt=16, output=8)
    half = system.with_values({key: system.get(key) / 2 for key in keys})
    before, after = run.price().breakdown_s[part], run.price(half).breakdown_s[part]
    assert before > 0
    assert_allclose(after, 2 * before, rtol=1e-12, atol=0)


def test_derating_is_applied_once() -> None:
    run = plan_run(mixtral(), NDP_SYSTEM, recording(), "monde", prompt=16, output=8)
    assert NDP_SYSTEM.ndp is not None
    for peak, efficiency in (
        ("gpu.memory_bandwidth_gb_per_s", "gpu.memory_efficiency"),
        ("link.bandwidth_gb_per_s", "link.efficiency"),
        ("gpu.peak_tflop_per_s.fp16", "gpu.compute_efficiency"),
    ):
        product = NDP_SYSTEM.get(peak) * NDP_SYSTEM.get(efficiency)
        other = NDP_SYSTEM.with_values({peak: product, efficiency: 1.0})
        assert_allclose(every_time(run, other), every_time(run, NDP_SYSTEM), rtol=1e-13, atol=0)
    derived = dram_efficiency(NDP_SYSTEM.ndp)
    assert 0.39 < derived < 0.42
    given_rate = NDP_SYSTEM.with_values({"ndp.dram_efficiency": derived})
    assert_allclose(every_time(run, given_rate), every_time(run, NDP_SYSTEM), rtol=1e-14, atol=0)


def test_an_overhead_per_layer_replaces_launches() -> None:
    model = mixtral()
    launches = NDP_SYSTEM.with_values({"gpu.launch_overhead_us": 50})
    both = launches.with_values({"gpu.layer_overhead_us": 30})
    run = plan_run(model, NDP_SYSTEM, recording(), "monde", prompt=16, output=4)
    bare, replaced = run.price(), run.price(both)
    assert_allclose(replaced.tpot_mean_s, bare.tpot_mean_s + 32 * 30e-6, rtol=1e-12, atol=0)
    assert replaced.breakdown_s["overhead"] == pytest.approx(32 * 30e-6, rel=1e-12)
    assert run.price(launches).breakdown_s["overhead"] == 0
    # 5 launches for attention and 2 for the router in 32 layers, 2 for the head; those of the copied expert hide
    # nothing, as the link side is the longer one.
    assert_allclose(
        run.price(launches).tpot_mean_s, bare.tpot_mean_s + (32 * (5 + 2 + 3) + 2) * 50e-6, rtol=1e-12, atol=0
    )


# --- sequences add up ---


def weighted(parts: list[Evaluation], tokens: list[int], name: str) -> Any:
    """Token-weighted mean of a number or a table of numbers."""
    values = [getattr(part, name) for part in parts]
    if isinstance(values[0], dict):
        return {key: np.average([value[key] for value in values], weights=tokens) for key in values[0]}
    return np.average(values, weights=tokens)


@settings(max_examples=60)
@given(st.data(), st.sampled_from(ALONE))
def test_a_trace_is_the_sum_of_its_sequences(data, name) -> None:
    model, system = data.draw(models()), data.draw(systems())
    trace = data.draw(traces(model, min_sequences=2, prefill=True))
    text = data.draw(policy_texts(model, [name]))
    if trace.topk_weights is None:
        text = text.replace("split=gates", "split=published")
    text = without_chance(text)
    whole = evaluate(model, system, trace, text)
    parts = [evaluate(model, system, trace.sequences([s]), text) for s in range(trace.num_sequences)]
    tokens = (trace.sequence_lengths - trace.prompt_len).tolist()
    for field in ("tpot_mean_s", "ndp_side_s", "breakdown_s", "busy_s", "bytes_per_token"):
        found, expected = getattr(whole, field), weighted(parts, tokens, field)
        if isinstance(found, dict):
            assert list(found) == list(expected)
            found, expected = list(found.values()), list(expected.values())
        assert_allclose(found, expected, rtol=1e-11, atol=0)
    for field in ("ttft_s", "migration_s", "decode_s", "end_to_end_s", "prompt_tokens", "output_tokens"):
        assert_allclose(getattr(whole, field), np.mean([getattr(part, field) for part in parts]), rtol=1e-11, atol=0)
    assert whole.tpot_max_s == max(part.tpot_max_s for part in parts)


def test_cycling_repeats_a_sequence_while_its_context_grows() -> None:
    model = mixtral()
    run = plan_run(model, NDP_SYSTEM, recording().sequences([0]), "monde", prompt=10, output=400)
    recorded = int((recording().sequence_lengths - recording().prompt_len)[0])
    assert run.contexts.tolist() == list(range(11, 411))
    assert_array_equal(run.plan.picks[:recorded], run.plan.picks[recorded : 2 * recorded])
    times = run.token_times(hardware_point(NDP_SYSTEM))
    # The same picks cost the same; only the KV cache is longer.
    kv = model.kv_bytes(recorded) / NDP_SYSTEM.gpu.effective_memory_bandwidth_bytes_per_s
    assert_allclose(times[recorded : 2 * recorded] - times[:recorded], kv, rtol=1e-6, atol=0)


# --- the ends of the range ---


@settings(max_examples=60)
@given(st.data(), st.sampled_from(["context-aware", "static"]))
def test_all_experts_on_the_gpu_leave_nothing_to_the_device(data, name) -> None:
    model, system = data.draw(models()), data.draw(systems())
    trace = data.draw(traces(model, min_sequences=2, prefill=True))
    run = plan_run(model, system, trace, f"{name}:gpu_experts={model.num_experts}")
    found = run.price()
    assert found.ndp_side_s == found.breakdown_s["ndp"] == found.breakdown_s["link"] == 0
    assert found.busy_s["link"] == found.busy_s["ndp"] == 0
    assert found.bytes_per_token["ndp_memory"] == found.bytes_per_token["link_weights"] == 0
    assert found.bytes_per_token["link_activations"] == 0
    assert found.hit_rate is not None
    assert_allclose([rate for rate in found.hit_rate if rate is not None], 1.0, rtol=1e-12, atol=0)
    assert {run.plan.classes[c].executor for c in np.unique(run.plan.picks)} <= {Executor.GPU, Executor.SKIP}


@settings(max_examples=60)
@given(st.data(), st.sampled_from(["context-aware", "static"]))
def test_no_expert_on_the_gpu_sends_every_pick_to_the_device(data, name) -> None:
    model, system = data.draw(models()), data.draw(systems())
    trace = data.draw(traces(model, min_sequences=2, prefill=True))
    run = plan_run(model, system, trace, f"{name}:gpu_experts=0,selector=full")
    found = run.price()
    picks = sum(int(decode_rows(trace, s)[1].sum()) for s in range(trace.num_sequences))
    steps = len(run.contexts)
    activations = 2 * 2 * model.hidden_size
    assert_allclose(found.bytes_per_token["link_activations"], activations * picks / steps, rtol=1e-12, atol=0)
    weights = sum(a * b for a, b in model.expert_matrices) * model.expert_bits / 8
    assert_allclose(found.bytes_per_token["ndp_memory"], weights * picks / steps, rtol=1e-12, atol=0)
    assert found.bytes_per_token["link_weights"] == 0
    assert found.migration_s == 0
    assert found.hit_rate is not None
    assert found.hit_rate.own == found.hit_rate.uniform == 0
    # Nothing is fetched, so it is MoNDE without copies.
    monde = evaluate(model, system, trace, "monde:reading=all-ndp")
    assert_allclose(found.tpot_mean_s, monde.tpot_mean_s, rtol=1e-13, atol=0)
    assert_allclose(found.ttft_s, monde.ttft_s, rtol=1e-13, atol=0)


@pytest.mark.parametrize("name", ["mixtral-8x7b", "mixtral-8x22b"])
@pytest.mark.parametrize(("bits", "gain"), [(1, 16.0), (2, 8.0), (3, 16 / 3), (4, 4.0)])
def test_the_device_works_in_proportion_to_bits(name: str, bits: int, gain: float) -> None:
    options: dict[str, Any] = {"prompt": 16, "output": 12, "layers": "cycle"}

    def near(selector: str) -> Evaluation:
        text = f"context-aware:mean_bits={bits},gpu_experts=0,selector={selector}"
        return evaluate(mixtral(name), NDP_SYSTEM, recording(), text, **options)

    full, few = near("full"), near("uniform")
    assert_allclose(full.ndp_side_s / few.ndp_side_s, gain, rtol=1e-9, atol=0)
    assert_allclose(full.breakdown_s["ndp"] / few.breakdown_s["ndp"], gain, rtol=1e-9, atol=0)
    moved = full.bytes_per_token["ndp_memory"] / few.bytes_per_token["ndp_memory"]
    assert_allclose(moved, gain, rtol=1e-12, atol=0)


def test_arrays_at_a_fixed_rate_gain_nothing_from_bits_where_they_are_the_slow_part() -> None:
    slow = NDP_SYSTEM.with_values({"ndp.precision_scaling": "none", "ndp.dram_efficiency": 1.0, "ndp.clock_ghz": 0.5})
    text = "context-aware:gpu_experts=0,selector="
    options: dict[str, Any] = {"prompt": 16, "output": 12}
    full = evaluate(mixtral(), slow, recording(), f"{text}full", **options)
    few = evaluate(mixtral(), slow, recording(), f"{text}uniform", **options)
    assert full.ndp_side_s == few.ndp_side_s


def test_group_scales_are_read_with_quantised_experts_only() -> None:
    scaled = NDP_SYSTEM.with_values({"ndp.scale_bits_per_weight": 0.5, "ndp.clock_ghz": 20})
    options: dict[str, Any] = {"prompt": 16, "output": 12}
    for selector, ratio in (("uniform", 3.5 / 3), ("full", 1.0)):
        text = f"context-aware:gpu_experts=0,selector={selector}"
        run = plan_run(mixtral(), scaled, recording(), text, **options)
        bare = scaled.with_values({"ndp.scale_bits_per_weight": 0.0})
        plain, found = run.price(bare), run.price()
        assert plain == plan_run(mixtral(), bare, recording(), text, **options).price()
        assert_allclose(found.ndp_side_s / plain.ndp_side_s, ratio, rtol=1e-12, atol=0)
        moved = found.bytes_per_token["ndp_memory"] / plain.bytes_per_token["ndp_memory"]
        assert_allclose(moved, ratio, rtol=1e-12, atol=0)


# --- by hand ---

HAND_MODEL = plain_model(
    hidden_size=8,
    num_layers=2,
    num_experts=4,
    top_k=2,
    expert_size=8,
    expert_matrices=((8, 8), (8, 8), (8, 8)),
    router_params=32,
    vocab_size=10,
    attention=(attention_kind((0, 1), params=256, kv_elements=16, context_flops=32),),
)
# GPU 100 GB/s, link 10 GB/s with 1 us, near-data memory 20 GB/s; arithmetic is free.
HAND_SYSTEM = NDP_SYSTEM.with_values(
    {
        "gpu.memory_bandwidth_gb_per_s": 100,
        "gpu.memory_efficiency": 1,
        "gpu.compute_efficiency": 1,
        "link.bandwidth_gb_per_s": 10,
        "link.efficiency": 1,
        "link.latency_us": 1,
        "ndp.dram_bandwidth_gb_per_s": 20,
        "ndp.dram_efficiency": 1,
        "ndp.clock_ghz": 20,
        "ndp.arrays": 1000,
    }
)
NS = 1e-9
ATTENTION = [2 * (512 + 32 * context) / 100 * NS for context in (4, 5)]  # 2 layers, context 3 + 1 and 3 + 2
ROUTER = 2 * (64 + 32) / 100 * NS
HEAD = (160 + 32) / 100 * NS
COPY = 1000 * NS + 384 / 10 * NS
ON_GPU = (384 + 32) / 100 * NS
NEAR = 2 * (1000 + 16 / 10) * NS + 384 / 20 * NS


def hand(policy: str, **values: Any) -> Evaluation:
    """One sequence of 3 prompt and 2 output tokens; layer 0 picks experts 0 and 1, layer 1 experts 2 and 3."""
    ids = np.tile(np.array([[0, 1], [2, 3]]), (5, 1, 1))
    trace = dataclasses.replace(
        small_trace(HAND_MODEL, [(3, 2)]), topk_ids=ids, topk_weights=np.tile([0.75, 0.25], (5, 2, 1))
    )
    return evaluate(HAND_MODEL, HAND_SYSTEM.with_values(values), trace, policy)


def tokens_take(found: Evaluation, first: float, second: float) -> None:
    """Both decode steps, beside attention, router and head."""
    times = [ATTENTION[0] + ROUTER + HEAD + first, ATTENTION[1] + ROUTER + HEAD + second]
    assert_allclose(found.tpot_mean_s, sum(times) / 2, rtol=1e-12, atol=0)
    assert_allclose(found.tpot_max_s, max(times), rtol=1e-12, atol=0)
    assert_allclose(found.tpot_p50_s, sum(times) / 2, rtol=1e-12, atol=0)
    assert_allclose(found.decode_s, sum(times), rtol=1e-12, atol=0)


def test_monde_by_hand() -> None:
    found = hand("monde")
    # The near-data side (activations there and back) is longer than a copy.
    tokens_take(found, 2 * NEAR, 2 * NEAR)
    assert_allclose(found.breakdown_s["ndp"], 2 * 384 / 20 * NS, rtol=1e-12, atol=0)
    assert_allclose(found.breakdown_s["link"], 2 * 2 * 1001.6 * NS, rtol=1e-12, atol=0)
    assert_allclose(found.busy_s["link"], 2 * (2 * 1001.6 * NS + COPY), rtol=1e-12, atol=0)
    assert found.binding_resource == "link"
    tokens_take(hand("monde", **{"link.latency_us": 0}), *[2 * (384 / 10 + 416 / 100) * NS] * 2)
    tokens_take(hand("monde:reading=all-ndp"), *[2 * 2 * NEAR] * 2)
    tokens_take(hand("monde:resident=1", **{"link.latency_us": 0}), 2 * (384 / 10 + 416 / 100) * NS, 2 * 22.4 * NS)


def test_prefill_by_hand() -> None:
    # 3 prompt tokens: the roofline of weights, KV and activations; the head runs once.
    front = 2 * (512 + 32 * 3) / 100 * NS + 2 * (64 + 3 * 32) / 100 * NS + HEAD
    near = 2 * 2 * (2 * (1000 + 3 * 16 / 10) * NS + 384 / 20 * NS)
    found = hand("monde:prefill=ndp")
    assert_allclose(found.ttft_s, front + near, rtol=1e-12, atol=0)
    fetched = hand("monde:prefill=fetch")
    assert_allclose(fetched.ttft_s, front + 2 * 2 * (COPY + (384 + 96) / 100 * NS), rtol=1e-12, atol=0)
    moved = hand("context-aware:gpu_experts=3")
    assert_allclose(moved.migration_s, 2 * 3 * COPY, rtol=1e-12, atol=0)
    assert_allclose(moved.end_to_end_s, moved.ttft_s + moved.migration_s + moved.decode_s, rtol=1e-15, atol=0)


def test_placement_and_overlap_by_hand() -> None:
    # One expert of each layer is hot and picked, the other pick runs near memory at 2 bits.
    near = 2 * 1001.6 * NS + 384 / 8 / 20 * NS
    options = "gpu_experts=1,mean_bits=2,selector=uniform"
    both = hand(f"context-aware:{options},overlap=max")
    tokens_take(both, *[2 * max(near, ON_GPU)] * 2)
    assert both.breakdown_s["experts_gpu"] == 0
    in_turn = hand(f"context-aware:{options},overlap=sum")
    tokens_take(in_turn, *[2 * (near + ON_GPU)] * 2)
    assert_allclose(in_turn.breakdown_s["experts_gpu"], 2 * ON_GPU, rtol=1e-12, atol=0)
    assert both.hit_rate is not None
    assert both.hit_rate.own == 0.5
    assert both.hit_rate.uniform == 0.25


def test_prefetch_by_hand() -> None:
    # Both picks of a layer are copied at 16 bits when nothing is skipped and low precision is the stored one.
    options = "low_bits=16,split=gates,t1=1,t2=1"
    slow_gpu = {"gpu.memory_bandwidth_gb_per_s": 1.0}
    late = hand(f"hobbit:{options}", **slow_gpu)
    ahead = hand(f"hobbit:{options},prefetch_accuracy=1", **slow_gpu)
    # Attention hides copies by what it takes: 512 bytes of weights and 32 of cache for each of 4 and 5 tokens.
    hides, copies = (2 * 416 + 512 + 32 * 4.5) * NS, 2 * COPY
    assert_allclose(late.breakdown_s["link"], 2 * copies, rtol=1e-12, atol=0)
    # The first layer is never ahead; the second hides behind the first one's work on the GPU and the attention.
    assert_allclose(ahead.breakdown_s["link"], copies + max(0, copies - hides), rtol=1e-12, atol=0)
    assert_allclose(ahead.busy_s["link"], late.busy_s["link"], rtol=1e-12, atol=0)
    wrong = hand(f"hobbit:{options},prefetch_accuracy=1e-9", **slow_gpu)
    # With each pick of the second layer a wrong copy comes as well.
    assert_allclose(wrong.breakdown_s["link"], copies + copies + max(0, 2 * COPY - hides), rtol=1e-12, atol=0)
    assert_allclose(wrong.bytes_per_token["link_weights"], 384 * 6, rtol=1e-12, atol=0)


# --- what is reported ---


def test_an_evaluation_is_plain_data() -> None:
    for policy in ("context-aware", "static", "monde", "hobbit"):
        found = evaluate(mixtral(), "h100-cxl-ndp", recording(), policy, output=3)
        data = found.to_dict()
        read_back = json.loads(json.dumps(data, allow_nan=False))
        assert read_back["tpot_mean_s"] == found.tpot_mean_s
        assert read_back["breakdown_s"] == found.breakdown_s
        assert set(data) == {field.name for field in dataclasses.fields(found)}
        assert (found.hit_rate.oracle is None) == (policy in ("monde", "hobbit"))
        assert found.policy.startswith(f"{policy}:")
        assert found.weakest_source == "assumed"
        assert found.model == "mixtral-8x7b"
        assert found.trace == "tiny-mixtral-32l"
        assert found.trace_source == "recorded"
        for use in found.memory_bytes.values():
            assert_allclose(use["total"], sum(value for key, value in use.items() if key != "total"), rtol=1e-15)


@settings(max_examples=60)
@given(st.data(), st.sampled_from(["sum", "min-max"]), st.sampled_from([0.0, 0.5, 1.0]))
def test_hit_rates_are_counted_alike(data, norm, alpha) -> None:
    """Placement and controls use one rule and one mean, so that they can be compared."""
    model = data.draw(models())
    trace = data.draw(traces(model, min_sequences=2, prefill=True))
    count = data.draw(st.integers(0, model.num_experts))
    text = f"context-aware:gpu_experts={count},norm={norm},alpha={alpha}"
    run = plan_run(model, NDP_SYSTEM, trace, text)
    rates, hot = run.price().hit_rate, run.plan.hot
    assert rates is not None
    assert hot is not None

    def hits(sequence: int, placed: int) -> float:
        ids, assigned, _ = decode_rows(trace, sequence)
        found = [hot[placed, layer, ids[t, layer, j]] for t, layer, j in np.argwhere(assigned)]
        return float(np.mean(found))

    every = range(trace.num_sequences)
    assert_allclose(rates.own, np.mean([hits(s, s) for s in every]), rtol=1e-12, atol=1e-15)
    others = [hits(s, other) for s in every for other in every if other != s]
    assert rates.other_sequence is not None
    assert_allclose(rates.other_sequence, np.mean(others), rtol=1e-12, atol=1e-15)
    assert rates.uniform == count / model.num_experts
    assert rates.oracle >= max(rates.own, rates.other_sequence, rates.static or 0.0) - 1e-12


def test_a_bandwidth_above_the_stated_peak_is_flagged() -> None:
    fast = NDP_SYSTEM.with_values({"link.bandwidth_gb_per_s": 60}, source="calibrated", citation="fitted")
    notes = evaluate(mixtral(), fast, recording(), "monde", output=2).notes
    assert any("above the stated peak" in note for note in notes)


def test_layers_are_cycled_only_on_request() -> None:
    with pytest.raises(TraceError, match="layers"):
        evaluate(mixtral("mixtral-8x22b"), NDP_SYSTEM, recording(), "monde", output=2)
    found = evaluate(mixtral("mixtral-8x22b"), NDP_SYSTEM, recording(), "monde", output=2, layers="cycle")
    assert any("replay recorded layers" in note for note in found.notes)


@pytest.mark.parametrize(
    "arguments",
    [
        {"system": "no-such-system"},
        {"policy": "no-such-policy"},
        {"model": plain_model()},
        {"prompt": 0},
        {"output": 0},
        {"output": -1},
        {"output": 2.5},
        {"output": True},
        {"layers": "stretch"},
    ],
)
def test_bad_requests_are_refused(arguments: dict[str, Any]) -> None:
    good: dict[str, Any] = {
        "model": mixtral(),
        "system": "h100-cxl-ndp",
        "trace": recording(),
        "policy": "monde",
        "output": 2,
    }
    evaluate(**good)
    with pytest.raises(PerfModelError) as caught:
        evaluate(**{**good, **arguments})
    assert "\n" not in str(caught.value)


def test_system_by_name_is_the_loaded_one() -> None:
    by_name = evaluate(mixtral(), "h100-cxl2-ndp", recording(), "monde", output=2)
    loaded = evaluate(mixtral(), load_system("h100-cxl2-ndp"), recording(), "monde", output=2)
    assert by_name == loaded
    assert by_name.system == "h100-cxl2-ndp"
