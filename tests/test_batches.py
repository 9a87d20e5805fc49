"""Decode steps of several tokens and prefills in passes: against the plain loop, and against what must hold."""

import dataclasses
import itertools
import pickle
import re
import shlex
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from commands import run as run_command
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_array_equal
from plain_caches import NAMES, plain_replay
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
from test_timelines import WHEN, machines

import perfmodel
from perfmodel import oracle
from perfmodel.caches import NO_EXPERT, ExpertCache, replay_cache
from perfmodel.errors import PerfModelError, PlacementError
from perfmodel.hardware import load_spec, load_system
from perfmodel.kernels import work as kinds
from perfmodel.model import MoEModel
from perfmodel.policies import Executor, When, WorkClass
from perfmodel.routing import RoutingTrace
from perfmodel.routing.replay import Batch, BatchOf
from perfmodel.run import Run, evaluate, make_replay, plan_run
from perfmodel.states import prefill_states
from perfmodel.sweeps.request import Request

POLICIES = ("context-aware", "monde", "hobbit", "expert-cache", "fluxmoe", "pmpd")


@st.composite
def batched_runs(draw: st.DrawFn) -> Run:
    """A run whose plan holds every kind of work anywhere, in steps of several tokens."""
    model = draw(models())
    size, of = draw(st.integers(1, 5)), draw(st.sampled_from(["sequences", "tokens"]))
    trace = draw(traces(model))
    output = draw(st.integers(size, 9))
    micro = draw(st.sampled_from([None, 1, 2, 3, 7]))
    run = plan_run(model, NDP_SYSTEM, trace, "monde", output=output, batch=size, batch_of=of, micro_batch=micro)
    plan, system = run.plan, draw(machines())
    executors = draw(st.lists(st.sampled_from(Executor), min_size=1, max_size=6))
    classes = [
        WorkClass(one, draw(st.sampled_from([2.0, 4.0, 16.0])), when=draw(st.sampled_from(WHEN.get(one, (When.NOW,)))))
        for one in executors
    ]
    classes = [*dict.fromkeys((WorkClass(Executor.SKIP, 16.0), *classes))]
    copies_only = [n for n, work in enumerate(classes) if work.executor in (Executor.COPY, Executor.SKIP)]
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    copies = rng.choice(copies_only, (*plan.picks.shape[:2], draw(st.integers(1, 2)))).astype(np.uint8)
    changes = {
        "classes": tuple(classes),
        "picks": rng.integers(0, len(classes), plan.picks.shape).astype(np.uint8),
        "copies": draw(st.sampled_from([None, copies])),
        "overlap": draw(st.sampled_from(["max", "sum"])),
        "fetch": draw(st.sampled_from(["before", "pipelined"])),
        "round_trips": draw(st.sampled_from(["none", "cpu", "layer"])),
        "attention_on": draw(st.sampled_from(["gpu", "cpu"])),
        "trunk_on": draw(st.sampled_from(["gpu", "cpu"])),
    }
    if plan.prefill_tokens is not None:
        changes["prefill_class"] = rng.integers(0, len(classes), plan.prefill_tokens.shape).astype(np.uint8)
    return dataclasses.replace(run, system=system, plan=dataclasses.replace(plan, **changes))


@settings(max_examples=150)
@given(batched_runs())
def test_every_step_and_pass_equals_the_plain_loop(run: Run) -> None:
    evaluation = run.price()
    assert oracle.largest_difference(evaluation, oracle.per_pick(run)) <= 1e-12
    assert sum(evaluation.breakdown_s.values()) == pytest.approx(evaluation.tpot_mean_s, rel=1e-12, abs=0)


@st.composite
def policy_runs(draw: st.DrawFn) -> Run:
    """A planned policy in steps of several tokens, on a random model, trace and system."""
    model, name = draw(models()), draw(st.sampled_from(POLICIES))
    of: BatchOf = draw(st.sampled_from(["sequences", "tokens"]))
    trace = draw(traces(model, min_sequences=1, prefill=True if name == "context-aware" else None))
    text = draw(policy_texts(model, [name])) if name in EVERY_POLICY else name
    if trace.topk_weights is None:
        text = text.replace("split=gates", "split=published")
    how = {"batch": draw(st.integers(2, 5)), "batch_of": of, "micro_batch": draw(st.sampled_from([None, 3]))}
    return plan_run(model, draw(systems()), trace, text, output=draw(st.integers(5, 11)), **how)


@settings(max_examples=80)
@given(policy_runs())
def test_policies_in_batches_equal_the_plain_loop(run: Run) -> None:
    evaluation = run.price()
    assert oracle.largest_difference(evaluation, oracle.per_pick(run)) <= 1e-12
    assert evaluation.bandwidth_floor_s <= evaluation.tpot_mean_s * (1 + 1e-9)


@pytest.mark.parametrize("policy", ["context-aware", "expert-cache:slots=3", "moe-infinity:slots=3", "fluxmoe"])
@pytest.mark.parametrize("of", ["sequences", "tokens"])
def test_a_real_model_in_batches_equals_the_plain_loop(policy: str, of: BatchOf) -> None:
    trace = recording().sequences([0, 3, 4])
    run = plan_run(mixtral(), NDP_SYSTEM, trace, policy, prompt=16, output=9, batch=3, batch_of=of, micro_batch=10)
    assert oracle.largest_difference(run.price(), oracle.per_pick(run)) <= 1e-12


@pytest.mark.parametrize("name", ["vllm", "llama-cpp-cuda"])
@pytest.mark.parametrize("of", ["sequences", "tokens"])
def test_fixed_costs_of_an_engine_count_for_a_step_and_a_pass(name: str, of: BatchOf) -> None:
    system = load_system("h100-pcie5-cpu").model_copy(update={"engine": load_spec(name)})
    trace = recording().sequences([0, 3])
    run = plan_run(mixtral(), system, trace, "fiddler", output=6, batch=2, batch_of=of, micro_batch=50)
    assert oracle.largest_difference(run.price(), oracle.per_pick(run)) <= 1e-12


@pytest.mark.parametrize("policy", ["context-aware", "monde", "expert-cache"])
def test_one_token_and_one_pass_are_what_they_were(policy: str) -> None:
    plain = evaluate(mixtral(), NDP_SYSTEM, recording(), policy, output=7)
    same = evaluate(mixtral(), NDP_SYSTEM, recording(), policy, output=7, batch_of="tokens", micro_batch=10**6)
    assert plain == same


# --- distinct experts ---


def rows(run: Run) -> list[list[dict[int, float]]]:
    """How many experts every step and layer runs with each number of tokens."""
    states = run.decode
    found = []
    for step in states.state_id:
        found.append([])
        for state in step:
            row = states.state_row[state]
            counts: dict[int, float] = {}
            for i in range(states.row_offsets[row], states.row_offsets[row + 1]):
                tokens = int(states.work[states.row_work[i], kinds.TOKENS])
                counts[tokens] = counts.get(tokens, 0.0) + states.row_count[i]
            found[-1].append(counts)
    return found


def distinct(run: Run) -> np.ndarray:
    """Experts that every step and layer runs."""
    return np.array([[sum(counts.values()) for counts in step] for step in rows(run)])


def equal_trace(model: MoEModel, sequences: int, steps: int, seed: int = 0) -> RoutingTrace:
    return small_trace(model, [(3, steps)] * sequences, seed=seed)


@settings(max_examples=40)
@given(st.integers(2, 9), st.integers(1, 4), st.integers(0, 2**16), st.sampled_from(["sequences", "tokens"]))
def test_experts_of_a_step_are_those_that_its_tokens_pick(experts: int, top_k: int, seed: int, of: BatchOf) -> None:
    model = plain_model(num_layers=2, num_experts=experts, top_k=min(top_k, experts))
    trace = equal_trace(model, 4, 8, seed)
    before = None
    for size in (1, 2, 4):
        run = plan_run(model, NDP_SYSTEM, trace, "monde:reading=all-ndp", batch=size, batch_of=of)
        found = distinct(run)
        assert (found <= min(experts, size * model.top_k)).all()
        assert (found == model.top_k).all() if size == 1 else (found >= model.top_k).all()
        for step in rows(run):
            for counts in step:
                assert sum(tokens * count for tokens, count in counts.items()) == size * model.top_k
        ids = run.replay.decode_ids.reshape(-1, size, 2, model.top_k)
        assert_array_equal(found, [[len(set(step[:, layer].ravel())) for layer in range(2)] for step in ids])
        assert before is None or found.mean() >= before
        before = found.mean()


def test_case_of_three_tokens_with_two_picks_of_eight() -> None:
    """At most 6 of 8 experts; 4.63 if all are alike; a text keeps to fewer."""
    model = plain_model(num_layers=1, num_experts=8, top_k=2)
    rng = np.random.default_rng(0)
    trace = equal_trace(model, 3, 2000)
    trace = dataclasses.replace(trace, topk_ids=np.argsort(rng.random((trace.num_tokens, 1, 8)))[..., :2])
    uniform = distinct(plan_run(model, NDP_SYSTEM, trace, "monde:reading=all-ndp", batch=3))
    assert uniform.max() <= 6
    assert uniform.mean() == pytest.approx(8 * (1 - (1 - 2 / 8) ** 3), abs=0.05)
    text = plan_run(mixtral(), NDP_SYSTEM, recording(), "monde:reading=all-ndp", batch=3, batch_of="tokens")
    assert 3 < distinct(text).mean() < uniform.mean()


@pytest.mark.parametrize("policy", ["context-aware", "monde:reading=all-ndp", "all-cpu", "expert-cache:slots=3"])
def test_copies_of_a_sequence_touch_its_experts_alone(policy: str) -> None:
    system = load_system("h100-pcie5-cpu") if policy == "all-cpu" else NDP_SYSTEM
    alone = plan_run(mixtral(), system, recording().sequences([2]), policy)
    times = [alone.price().tpot_mean_s]
    for size in (2, 5):
        run = plan_run(mixtral(), system, recording().sequences([2] * size), policy, batch=size)
        assert all(set(counts) == {size} for step in rows(run) for counts in step)
        assert_array_equal(distinct(run), distinct(alone))
        evaluation = run.price()
        assert evaluation.hit_rate.own == alone.hit_rates.own
        assert times[-1] <= evaluation.tpot_mean_s <= size * times[0]
        assert evaluation.decode_tok_per_s == size / evaluation.tpot_mean_s
        times.append(evaluation.tpot_mean_s)


@pytest.mark.parametrize("policy", ["context-aware", "monde:reading=all-ndp", "all-resident"])
def test_the_order_of_sequences_in_a_batch_does_not_matter_to_a_placement(policy: str) -> None:
    model = plain_model(num_layers=3, num_experts=6, top_k=2)
    trace = small_trace(model, [(4, 6), (2, 9), (5, 7), (3, 6)], seed=5)
    one = evaluate(model, NDP_SYSTEM, trace, policy, batch=4, micro_batch=5)
    other = evaluate(model, NDP_SYSTEM, trace.sequences([2, 0, 3, 1]), policy, batch=4, micro_batch=5)
    for name in ("tpot_mean_s", "tpot_p95_s", "end_to_end_s", "decode_tok_per_s", "bandwidth_floor_s"):
        assert getattr(one, name) == pytest.approx(getattr(other, name), rel=1e-12, abs=0)


# --- what becomes of a trace ---


def test_groups_fill_up_and_start_repeated_sequences_elsewhere() -> None:
    model = plain_model(num_layers=1, num_experts=5, top_k=1)
    trace = small_trace(model, [(2, 6), (3, 4), (1, 8)], seed=2)
    replay = make_replay(model, trace, batch=4)
    ids = trace.topk_ids[:, 0, 0]
    first, second, third = (ids[trace.decode_slice(s)] for s in range(3))
    # As long as the shortest; the sequence that stands twice starts its second time in its middle.
    expected = np.array([first[:4], second[:4], third[:4], first[3 + np.arange(4) - 6]]).T
    assert_array_equal(replay.decode_ids[:16, 0, 0], expected.ravel())
    assert len(replay.decode_offsets) == 2
    assert replay.members is not None
    assert replay.members.tolist() == [[2, 3, 1, 2]]
    assert replay.trace.prompt_len.tolist() == [8]
    assert replay.max_context == 3 + 4
    again = pickle.loads(pickle.dumps(replay))
    assert again.batch == Batch(4, "sequences")
    assert again.max_context == replay.max_context
    run = plan_run(model, NDP_SYSTEM, replay, "monde")
    assert run.contexts.tolist() == [3.0, 4.0, 5.0, 6.0]
    assert any("more than once" in note for note in run.price().notes)


def test_consecutive_tokens_leave_out_what_fills_no_step() -> None:
    model = plain_model(num_layers=2, num_experts=5, top_k=2)
    trace = small_trace(model, [(2, 7), (3, 6)], seed=2)
    run = plan_run(model, NDP_SYSTEM, trace, "monde", batch=3, batch_of="tokens")
    kept = [trace.topk_ids[trace.decode_slice(0)][:6], trace.topk_ids[trace.decode_slice(1)]]
    assert_array_equal(run.replay.decode_ids, np.concatenate(kept))
    assert run.contexts.tolist() == [4.0, 7.0, 5.0, 8.0]
    assert run.price().output_tokens == 6
    assert any("1 tokens" in note for note in run.price().notes)


@pytest.mark.parametrize(
    ("how", "what"),
    [
        ({"batch": 0}, "batch"),
        ({"batch": True}, "batch"),
        ({"batch": 2.5}, "batch"),
        ({"batch": 2, "batch_of": "words"}, "batch_of: found 'words', allowed 'sequences' or 'tokens'"),
        ({"batch": 9, "batch_of": "tokens"}, "batch: sequence 1 of the trace has 6 decode steps, allowed 9 or more"),
        ({"batch": 10**9}, "batch: found 1000000000, allowed up to 13: "),
        ({"micro_batch": 0}, "micro_batch: found 0, allowed 1 to 1000000000 tokens"),
        ({"micro_batch": 1.5}, "micro_batch: found 1.5, allowed a whole number"),
    ],
)
def test_bad_batches_are_refused_in_one_line(how: dict, what: str) -> None:
    model = plain_model()
    with pytest.raises(PerfModelError, match=what) as caught:
        evaluate(model, NDP_SYSTEM, small_trace(model, [(2, 9), (3, 6)]), "monde", **how)
    assert "\n" not in str(caught.value)


def test_a_replay_keeps_its_batch() -> None:
    model = plain_model()
    replay = make_replay(model, small_trace(model, [(2, 9), (3, 6)]), batch=2)
    assert plan_run(model, NDP_SYSTEM, replay, "monde", batch=2).batch == Batch(2)
    with pytest.raises(PerfModelError, match="batch: found 3 sequences"):
        plan_run(model, NDP_SYSTEM, replay, "monde", batch=3)


@pytest.mark.parametrize("size", [1, 6])
def test_every_sequence_of_a_batch_has_its_cache(size: int) -> None:
    model = mixtral()
    run = plan_run(model, NDP_SYSTEM, recording(), "monde", prompt=100, output=20, batch=size)
    assert run.memory()["gpu"]["kv_cache"] == size * model.kv_bytes(120, model.cached_bits)
    together = plan_run(model, NDP_SYSTEM, recording(), "monde", prompt=100, output=20, batch=2, batch_of="tokens")
    assert together.memory()["gpu"]["kv_cache"] == model.kv_bytes(120, model.cached_bits)


def test_a_batch_without_room_is_refused() -> None:
    small = NDP_SYSTEM.with_values({"gpu.memory_capacity_gb": 10})
    plan_run(mixtral(), small, recording(), "monde", prompt=4000, output=4)
    with pytest.raises(PlacementError, match="of each of 20 sequences"):
        plan_run(mixtral(), small, recording(), "monde", prompt=4000, output=4, batch=20)


# --- caches ask for every expert of a step once ---


@settings(max_examples=60)
@given(
    st.sampled_from(["lru", "lfu", "weighted", "recent-score", "belady"]),
    st.sampled_from(["layer", "global"]),
    st.integers(0, 5),
    st.sampled_from([None, 1, 2]),
    st.integers(0, 2**16),
)
def test_a_step_asks_for_every_expert_once(rule, scope, capacity, low, seed) -> None:
    rng = np.random.default_rng(seed)
    size, steps, layers, experts, width = 3, 4, 2, 5, 2
    picks = np.array([rng.permutation(experts)[:width] for _ in range(steps * size * layers)], np.uint16)
    ids = picks.reshape(steps * size, layers, width)
    how: dict = {"scores": rng.random(ids.shape)} if rule == "recent-score" else {}
    if rule != "belady" and low is not None:
        how["wanted"] = rng.integers(0, 3, ids.shape).astype(np.uint8)
        how["predicted"] = np.array([rng.permutation(experts)[:1] for _ in range(ids[..., 0].size)], np.uint16)
        how["predicted"] = how["predicted"].reshape(steps * size, layers, 1)
    cache = ExpertCache(capacity, rule, scope, capacity_low=low if "wanted" in how else None)
    found = replay_cache(ids, np.array([0, 2 * size, steps * size]), experts, cache, batch=size, **how)
    # The same requests written down step by step.
    asked = np.full((steps, layers, size * width), NO_EXPERT, np.uint16)
    foretold = np.full((steps, layers, size), NO_EXPERT, np.uint16)
    wanted, scores = np.zeros(asked.shape, np.uint8), np.zeros(asked.shape)
    places: dict[tuple[int, int, int], int] = {}
    for step in range(steps):
        for layer in range(layers):
            for t in range(size):
                now = step * size + t
                for j, expert in enumerate(ids[now, layer].tolist()):
                    place = places.setdefault((step, layer, expert), t * width + j)
                    want = int(how["wanted"][now, layer, j]) if "wanted" in how else 0
                    new = asked[step, layer, place] == NO_EXPERT
                    asked[step, layer, place] = expert
                    wanted[step, layer, place] = want if new else min(want, wanted[step, layer, place])
                    scores[step, layer, place] += how["scores"][now, layer, j] if "scores" in how else 0.0
            if "predicted" in how:
                named = dict.fromkeys(how["predicted"][step * size : (step + 1) * size, layer, 0].tolist())
                foretold[step, layer, : len(named)] = list(named)
    if "wanted" in how:
        how["wanted"], how["predicted"] = wanted, foretold
    if "scores" in how:
        how["scores"] = scores
    plain, _, _ = plain_replay(asked, np.array([0, 2, steps]), experts, cache, **how)
    for step in range(steps):
        for layer in range(layers):
            for t in range(size):
                for j, expert in enumerate(ids[step * size + t, layer].tolist()):
                    outcome = NAMES[found.outcome[step * size + t, layer, j]]
                    assert outcome == NAMES[plain[step, layer, places[step, layer, expert]]]


def test_copies_that_one_token_started_serve_the_step() -> None:
    """Three tokens that all want the same experts miss each of them once."""
    model = plain_model(num_layers=2, num_experts=6, top_k=2)
    trace = small_trace(model, [(2, 5)], seed=1).sequences([0, 0, 0])
    for scope in ("layer", "global"):
        text = f"expert-cache:slots=2,warm=empty,scope={scope}"
        one = plan_run(model, NDP_SYSTEM, trace.sequences([0]), text)
        run = plan_run(model, NDP_SYSTEM, trace, text, batch=3)
        links = [x.bytes_per_token()["link_weights"] * x.batch.tokens for x in (one, run)]
        assert links[0] == pytest.approx(links[1], rel=1e-12, abs=0)


def test_a_streamed_layer_crosses_the_link_once_a_step() -> None:
    model = mixtral()
    run = plan_run(model, NDP_SYSTEM, recording(), "fluxmoe:gpu_experts=1", batch=6)
    every = 7 * len(model.moe_layers) * model.expert_bytes(16)
    assert run.bytes_per_token()["link_weights"] * 6 == pytest.approx(every, rel=1e-12, abs=0)


# --- policies that weigh where an expert runs weigh all its tokens in the step ---


def test_fiddler_copies_what_many_tokens_of_a_step_pick() -> None:
    # Published costs: 7 a token on the CPU against 70 for a copy.
    trace = recording().sequences([0, 1] * 6)
    run = plan_run(mixtral(), load_system("h100-pcie5-cpu"), trace, "fiddler:costs=published,experts=64", batch=12)
    states = run.decode
    executor, tokens = states.work[:, kinds.EXECUTOR], states.work[:, kinds.TOKENS]
    assert (tokens[executor == Executor.FETCH] >= 10 + 1).all()
    assert (tokens[executor == Executor.CPU] <= 10).all()
    assert {Executor.FETCH, Executor.CPU} <= set(executor.astype(int).tolist())


@pytest.mark.parametrize(("policy", "system"), [("hybrimoe:slots=3", "h100-pcie5-cpu"), ("pimoe", "h100-cxl-ndp")])
def test_balanced_steps_split_all_their_tokens_at_once(policy: str, system: str) -> None:
    trace = recording().sequences([0, 1, 2])
    run = plan_run(mixtral(), load_system(system), trace, policy, output=12, batch=3)
    assert oracle.largest_difference(run.price(), oracle.per_pick(run)) <= 1e-12
    # Every token of a step finds an expert in the same place.
    ids, picks = run.replay.decode_ids.reshape(-1, 3, 32, 2), run.plan.picks.reshape(-1, 3, 32, 2)
    for step in range(len(ids)):
        for layer in range(32):
            where: dict[int, int] = {}
            for expert, number in zip(ids[step, :, layer].ravel(), picks[step, :, layer].ravel(), strict=True):
                assert where.setdefault(int(expert), int(number)) == number


# --- prefill in passes ---


def weights_read(run: Run, passes: int) -> float:
    """Experts that are read in all passes of all prefills."""
    states = prefill_states(run.plan, np.full(len(run.plan.prompt_tokens), passes))
    assert states is not None
    return float(states.row_count.sum()) * passes


@settings(max_examples=30)
@given(st.integers(1, 40), st.integers(2, 9), st.integers(0, 2**16))
def test_passes_read_more_weights_and_lose_no_token(prompt: int, experts: int, seed: int) -> None:
    model = plain_model(num_layers=2, num_experts=experts, top_k=2)
    run = plan_run(model, NDP_SYSTEM, small_trace(model, [(prompt, 1)], seed=seed), "monde")
    read = [weights_read(run, n) for n in (1, 2, 3, 10, 1000)]
    assert all(b >= a * (1 - 1e-12) for a, b in pairwise(read))
    assert run.plan.prefill_tokens is not None
    assert read[0] == np.count_nonzero(run.plan.prefill_tokens)
    assert read[-1] <= prompt * 2 * 2 * (1 + 1e-12)
    for n in (2, 5):
        states = prefill_states(run.plan, np.array([n]))
        assert states is not None
        tokens = float((states.row_count * states.work[states.row_work, kinds.TOKENS]).sum()) * n
        assert tokens == pytest.approx(prompt * 2 * 2, rel=1e-12, abs=0)


def test_visits_are_those_of_tokens_that_fall_anywhere() -> None:
    """Against the mean over all ways in which four tokens fall into three passes."""
    ways = [len(set(way)) for way in itertools.product(range(3), repeat=4)]
    model = plain_model(num_layers=1, num_experts=2, top_k=1)
    run = plan_run(model, NDP_SYSTEM, small_trace(model, [(4, 1)]), "monde")
    plan = dataclasses.replace(run.plan, prefill_tokens=np.array([[[4, 0]]]))
    states = prefill_states(plan, np.array([3]))
    assert states is not None
    assert states.row_count.sum() * 3 == pytest.approx(sum(ways) / len(ways), rel=1e-12, abs=0)


def test_smaller_passes_take_longer() -> None:
    times = [
        evaluate(
            mixtral(), NDP_SYSTEM, recording(), "monde:prefill=fetch", prompt=256, output=1, micro_batch=micro
        ).ttft_s
        for micro in (None, 256, 128, 32, 8)
    ]
    assert times[0] == times[1]
    assert all(a < b for a, b in pairwise(times[1:]))


# --- scenarios, sweeps, commands and the page ---


def test_a_sweep_over_batches_is_the_evaluations() -> None:
    axes = {"batch": [1, 3], "micro_batch": [8, 10**6]}
    how = {"policy": "context-aware", "prompt": 16, "output": 6}
    found = perfmodel.sweep(
        "mixtral-8x7b", NDP_SYSTEM, recording(), axes=axes, metrics=["tpot_mean_s", "ttft_s"], batch_of="tokens", **how
    )
    for batch, micro in itertools.product(*axes.values()):
        one = evaluate(mixtral(), NDP_SYSTEM, recording(), **how, batch=batch, batch_of="tokens", micro_batch=micro)
        at = {"workload.batch": batch, "workload.micro_batch": micro}
        assert found.tpot_mean_s.sel(at).item() == one.tpot_mean_s
        assert found.ttft_s.sel(at).item() == one.ttft_s


def test_a_request_in_batches_is_told_again() -> None:
    request = Request.of("mixtral-8x7b", policy="monde", batch=4, batch_of="tokens", micro_batch=64)
    assert "--batch 4 --batch-of tokens --micro-batch 64" in request.command()
    again = Request.from_dict(request.to_dict())
    assert again.key() == request.key()
    assert Request.of("mixtral-8x7b", policy="monde").key() != request.key()
    assert "--batch" not in Request.of("mixtral-8x7b", policy="monde").command()


def test_compare_and_rank_take_batches() -> None:
    words = ["--model", "mixtral-8x7b", "--prompt", "16", "--output", "8", "--batch", "4", "--batch-of", "tokens"]
    shown = run_command("compare", *words, "--micro-batch", "8", "--policy", "monde", "--check")
    assert shown.code == 0
    assert "batch 4 consecutive tokens" in shown.out
    ranked = run_command("rank", *words, "--policies", "monde;context-aware")
    assert ranked.code == 0
    assert "batch 4 consecutive tokens" in ranked.out
    # What is of a step is not said to be of a token; bytes are of a token.
    for words in ("time per step, mean", "near-data side, busy a step", "bandwidth floor a step", "bytes a token"):
        assert words in shown.out
    assert "step ms" in ranked.out
    assert "token ms" not in ranked.out
    refused = run_command("compare", *words[:-4], "--batch", "0")
    assert refused.code == 2
    assert refused.err.count("\n") == 1


def test_numbers_of_the_page_are_those_of_its_command() -> None:
    text = (Path(__file__).resolve().parent.parent / "docs" / "batches.md").read_text(encoding="utf-8")
    command = shlex.split(re.findall(r"```sh\n(.*?)```", text, flags=re.DOTALL)[0])
    assert command[:2] == ["perfmodel", "sweep"]
    sizes = [1, 2, 4, 8]
    found = [evaluate(mixtral(), "h100-cxl-ndp", "tiny-mixtral-32l-mini", command[5], batch=size) for size in sizes]
    rows = [
        f"| {size} | {one.decode_tok_per_s:.2f} | {1e3 * one.tpot_mean_s:.1f} |"
        for size, one in zip(sizes, found, strict=True)
    ]
    assert "\n".join(rows) in text
    result = run_command(*command[1:])
    assert result.code == 0
    for one in found:
        assert f"{one.decode_tok_per_s:.4g}" in result.out
