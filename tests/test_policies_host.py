"""Policies that run experts on the CPU: invariants, rules against plain loops, and reported cases."""

import dataclasses
import functools
import itertools
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal, assert_equal
from strategies import attention_kind, mixtral, models, plain_model, recording, small_trace, spread_floats, traces

from perfmodel import oracle
from perfmodel.caches import NO_EXPERT
from perfmodel.errors import PerfModelError, PlacementError, PolicyError
from perfmodel.evaluation import Evaluation
from perfmodel.hardware import System, load_spec, load_system
from perfmodel.kernels.schedule import hybrid_split
from perfmodel.model import MoEModel
from perfmodel.policies import Executor, PlanInputs, When, parse_policy
from perfmodel.policies.base import Residency
from perfmodel.policies.costs import expert_costs
from perfmodel.policies.hosted import most_used
from perfmodel.routing import RoutingTrace, statistics
from perfmodel.routing.prediction import gate_prediction
from perfmodel.routing.synthetic import generate
from perfmodel.run import Run, plan_run
from perfmodel.storage import Format, Storage

DESKTOP = load_system("rtx4090-pcie4-cpu")
SERVER = load_system("h100-pcie5-cpu")
NAMES = ("all-resident", "all-cpu", "llama-cpp", "fiddler", "ktransformers", "hybrimoe", "daop")
COPIES = (Executor.FETCH, Executor.COPY)


@st.composite
def machines(draw: st.DrawFn) -> System:
    """GPU, link, CPU and host with random rates, so that each is the slow one in some example."""
    return SERVER.with_values(
        {
            "cpu.dram_bandwidth_gb_per_s": draw(spread_floats(1.0, 2000.0)),
            "link.bandwidth_gb_per_s": draw(spread_floats(1.0, 900.0)),
            "gpu.memory_bandwidth_gb_per_s": draw(spread_floats(50.0, 5000.0)),
            "gpu.launch_overhead_us": draw(st.sampled_from([0.0, 1.0])),
            "host.round_trip_us": draw(st.sampled_from([0.0, 20.0])),
            "host.copy_overhead_us": draw(st.sampled_from([0.0, 5.0])),
        }
    )


@st.composite
def texts(draw: st.DrawFn, model: MoEModel, names: tuple[str, ...] = NAMES) -> str:
    """Policies with their options set, as the command line reads them."""
    name = draw(st.sampled_from(names))
    count = st.one_of(st.just("auto"), st.integers(0, model.num_experts))
    prefill = st.sampled_from(["fetch", "cpu", "threshold", "each", "faster"])
    options: dict[str, Any] = {"bits": draw(st.sampled_from(["auto", 4]))}
    if name == "llama-cpp":
        cache = draw(st.sampled_from(["none", "lru", "lfu", "static"]))
        options |= {
            "n_cpu_moe": draw(st.one_of(st.just("auto"), st.integers(0, len(model.moe_layers)))),
            "cache": cache,
            "slots": "auto" if cache == "none" else draw(count),
            "op_offload": draw(st.sampled_from(["on", "off"])),
            "threshold": draw(st.sampled_from(["auto", 0, 4])),
            "overlap": draw(st.sampled_from(["on", "off"])),
            "trunk": draw(st.sampled_from(["gpu", "cpu"])),
        }
    elif name == "fiddler":
        every = model.num_experts * len(model.moe_layers)
        options |= {
            "experts": draw(st.one_of(st.just("auto"), st.integers(0, every))),
            "costs": draw(st.sampled_from(["system", "published"])),
            "overlap": draw(st.sampled_from(["max", "sum"])),
        }
    elif name == "ktransformers":
        options |= {
            "deferral": draw(st.integers(0, model.top_k - 1)),
            "gpu_experts": draw(count),
            "prefill": draw(prefill),
            "round_trips": draw(st.sampled_from(["none", "cpu"])),
        }
    elif name == "hybrimoe":
        options |= {
            "slots": draw(count),
            "warm": draw(st.sampled_from(["prompt", "empty"])),
            "admit": draw(st.sampled_from(["auto", "all", "none"])),
            "predict": draw(st.sampled_from(["none", "gate"])),
            "accuracy": draw(st.sampled_from([0, 0.5, 1])),
            "prefill": draw(st.sampled_from(["hybrid", "cpu", "fetch"])),
        }
    elif name == "daop":
        options |= {
            "gpu_experts": draw(count),
            "ratio": draw(st.sampled_from([1, 1.05, 2])),
            "accuracy": draw(st.sampled_from([0, 0.841, 1])),
            "ahead": draw(st.sampled_from(["yes", "no"])),
            "prefill": draw(prefill),
        }
    return f"{name}:" + ",".join(f"{key}={value}" for key, value in options.items())


@st.composite
def host_runs(draw: st.DrawFn) -> Run:
    model = draw(models())
    return plan_run(model, draw(machines()), draw(traces(model, min_sequences=2)), draw(texts(model)))


def executors(run: Run) -> np.ndarray:
    """Executor of every pick [T, L, k]."""
    return np.array([work.executor for work in run.plan.classes])[run.plan.picks]


# --- what holds for all of them ---


@settings(max_examples=150)
@given(host_runs())
def test_every_run_equals_the_plain_loop(run: Run) -> None:
    assert oracle.largest_difference(run.price(), oracle.per_pick(run)) <= 1e-12


@settings(max_examples=100)
@given(host_runs())
def test_every_pick_runs_once_and_copies_are_what_crosses_the_link(run: Run) -> None:
    plan, model = run.plan, run.model
    runs = np.isin(executors(run), (Executor.GPU, Executor.FETCH, Executor.CPU))
    assert_array_equal(runs, run.replay.assigned)
    size = [model.expert_bytes(work.bits) if work.executor in COPIES else 0.0 for work in plan.classes]
    moved = np.array(size)[plan.picks].sum() + (0.0 if plan.copies is None else np.array(size)[plan.copies].sum())
    assert_allclose(run.bytes_per_token()["link_weights"], moved / len(plan.picks), rtol=1e-12, atol=0)
    if plan.copies is not None:
        beside = {plan.classes[number].executor for number in np.unique(plan.copies)}
        assert beside <= {Executor.COPY, Executor.SKIP, *([Executor.CPU] if run.policy.name == "daop" else [])}


@settings(max_examples=100)
@given(host_runs())
def test_residency_is_what_the_plan_keeps_and_never_more_than_fits(run: Run) -> None:
    plan = run.plan
    inputs = PlanInputs(run.model, run.system, run.replay, None)
    kept = run.policy.residency(run.model, inputs.most_gpu_experts)
    assert kept == Residency(**{name: getattr(plan, name) for name in Residency._fields})
    # Never more residents of a layer in a step than the memory of all layers holds.
    held = plan.gpu_experts * len(run.model.moe_layers)
    held += plan.gpu_buffer_bytes / run.model.expert_bytes(plan.classes[0].bits)
    assert ((executors(run) == Executor.GPU).sum(axis=(1, 2)) <= held + 1e-9).all()


@settings(max_examples=40)
@given(st.data())
def test_the_same_trace_and_seed_give_the_same_plan(data: st.DataObject) -> None:
    model = data.draw(models())
    trace, text = data.draw(traces(model, min_sequences=2)), data.draw(texts(model))
    one, other = (plan_run(model, SERVER, trace, text).plan for _ in range(2))
    assert one.classes == other.classes
    assert_array_equal(one.picks, other.picks)
    assert_array_equal(one.migrated_experts, other.migrated_experts)


FULL = {
    "llama-cpp": ["", "n_cpu_moe=0", "cache=static", "cache=static,n_cpu_moe=2"],
    "fiddler": ["", "costs=published", "overlap=sum"],
    "ktransformers": ["gpu_experts=auto", "gpu_experts=auto,deferral=1", "gpu_experts=auto,prefill=fetch"],
    "hybrimoe": ["", "admit=all", "warm=empty"],
    "daop": ["", "ahead=no"],
}


@pytest.mark.parametrize("text", [f"{name}:{one}" for name, some in FULL.items() for one in some])
def test_with_room_for_all_experts_they_are_all_resident(text: str) -> None:
    model = plain_model(num_experts=6, shared_params=500)
    trace = small_trace(model, [(7, 9), (3, 5)], seed=3)
    free = SERVER.with_values({"host.round_trip_us": 0})
    found, bound = (plan_run(model, free, trace, one).price() for one in (text, "all-resident"))
    assert_allclose(found.tpot_mean_s, bound.tpot_mean_s, rtol=1e-12, atol=0)
    assert found.migration_s == 0
    assert found.ttft_s == pytest.approx(bound.ttft_s, rel=1e-12)
    assert set(executors(plan_run(model, free, trace, text)).ravel()) == {Executor.GPU}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("llama-cpp:n_cpu_moe=4", ["n_cpu_moe", "found 4", "0 to 3"]),
        ("llama-cpp:slots=2", ["slots", "auto with cache=none"]),
        ("llama-cpp:cache=lru,slots=5", ["slots", "found 5", "0 to 4"]),
        ("llama-cpp:cache=belady", ["cache", "none | lru | lfu | static"]),
        ("fiddler:experts=13", ["experts", "found 13", "0 to 12"]),
        ("ktransformers:deferral=2", ["deferral", "found 2", "0 to 1"]),
        ("ktransformers:gpu_experts=5", ["gpu_experts", "found 5", "0 to 4"]),
        ("hybrimoe:slots=5", ["slots", "found 5", "0 to 4"]),
        ("daop:gpu_experts=5", ["gpu_experts", "found 5", "0 to 4"]),
        ("daop:ratio=0.5", ["ratio", "0.5"]),
    ],
)
def test_refused_options(text: str, words: list[str]) -> None:
    model = plain_model()
    with pytest.raises(PolicyError) as error:
        plan_run(model, SERVER, small_trace(model, [(2, 2), (2, 2)]), text)
    assert "\n" not in str(error.value)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    "text", ["all-cpu", "llama-cpp:n_cpu_moe=1", "llama-cpp:trunk=cpu", "fiddler", "ktransformers", "hybrimoe", "daop"]
)
def test_a_system_without_a_cpu_is_refused(text: str) -> None:
    model = plain_model()
    with pytest.raises(PolicyError, match="runs experts on the CPU, and system h100-cxl-ndp has none"):
        plan_run(model, "h100-cxl-ndp", small_trace(model, [(2, 2), (2, 2)]), text)


@pytest.mark.parametrize("text", ["fiddler:experts=2", "ktransformers:gpu_experts=1", "daop:gpu_experts=1"])
def test_one_sequence_without_a_prompt_tells_nothing_about_use(text: str) -> None:
    model = plain_model()
    with pytest.raises(
        PolicyError, match="one sequence without a prefill; allowed: at least 2 sequences, or a prefill"
    ):
        plan_run(model, SERVER, small_trace(model, [(0, 4)]), text)
    noted = plan_run(model, SERVER, small_trace(model, [(3, 4)]), text).plan.notes
    assert any("placed by its own prompt" in note for note in noted)


@settings(max_examples=60)
@given(st.data())
def test_no_other_key_changes_a_plan(data: st.DataObject) -> None:
    model = data.draw(models())
    trace, policy = data.draw(traces(model, min_sequences=2)), parse_policy(data.draw(texts(model)))
    system = data.draw(machines())
    changed: dict[str, Any] = {}
    for key in system.numeric_keys():
        if not any(key == one or (one.endswith(".") and key.startswith(one)) for one in policy.plan_keys):
            limits = system.limits_of(key)
            value = data.draw(st.floats(limits.low, limits.high))
            changed[key] = round(value) if limits.whole else value
    changed.pop("cpu.populated_channels", None)  # no more than there are
    changed.pop("cpu.memory_channels", None)
    one, other = (plan_run(model, machine, trace, policy).plan for machine in (system, system.with_values(changed)))
    assert one.classes == other.classes
    for name in ("picks", "copies", "prefill_class", "migrated_experts"):
        assert_equal(getattr(one, name), getattr(other, name))


def test_filled_memory_holds_as_many_experts_for_all() -> None:
    model = plain_model(num_experts=8)
    for text in ("ktransformers", "ktransformers:deferral=1", "hybrimoe", "daop", "llama-cpp:cache=lru,op_offload=off"):
        full = parse_policy(text).at_capacity(model, 5)
        assert full.residency(model, 5).gpu_experts == 5
    # One expert less where prompts are copied, which needs room for the copy.
    assert parse_policy("fiddler").residency(model, 5).gpu_experts == (3 * 5 - 1) / 3
    assert parse_policy("llama-cpp").residency(model, 7).gpu_experts == 2 * 8 / 3


# --- rules, against plain loops ---


def ranked(use: np.ndarray, experts: Any = None) -> list[int]:
    """Experts from the most to the least used; ties go to the lower id."""
    return sorted(range(len(use)) if experts is None else experts, key=lambda expert: (-use[expert], expert))


def use_of_others(trace: RoutingTrace, sequence: int) -> np.ndarray:
    """Decode picks of every expert by the other sequences [L, E]."""
    use = np.zeros((trace.num_layers, trace.num_experts))
    for other in range(trace.num_sequences):
        rows = trace.topk_ids[trace.decode_slice(other)] if other != sequence else trace.topk_ids[:0]
        for layer, expert in itertools.product(range(trace.num_layers), range(trace.num_experts)):
            use[layer, expert] += (rows[:, layer] == expert).sum()
    return use


def by_sequence(run: Run) -> list[tuple[int, int, int, int, int]]:
    """Sequence, step, layer, place and expert of every assigned pick."""
    found = []
    for s, (start, stop) in enumerate(itertools.pairwise(run.plan.offsets.tolist())):
        for t, layer, j in itertools.product(range(start, stop), *map(range, run.plan.picks.shape[1:])):
            if run.replay.assigned[t, layer, j]:
                found.append((s, t, layer, j, int(run.replay.decode_ids[t, layer, j])))
    return found


@settings(max_examples=30)
@given(st.data())
def test_placed_experts_are_the_most_used_of_the_others(data: st.DataObject) -> None:
    model = data.draw(models())
    trace = data.draw(traces(model, min_sequences=2))
    layers, experts = len(model.moe_layers), model.num_experts
    per_layer, together = data.draw(st.integers(0, experts)), data.draw(st.integers(0, layers * experts))
    hot: dict[str, list[set[tuple[int, int]]]] = {"static": [], "kt": [], "fiddler": []}
    for s in range(trace.num_sequences):
        use = use_of_others(trace, s)
        every = sorted(itertools.product(range(layers), range(experts)), key=lambda le: (-use[le], le))
        hot["fiddler"].append(set(every[:together]))
        hot["kt"].append({le for le in every if [x for x in every if x[0] == le[0]].index(le) < per_layer})
        hot["static"].append(hot["kt"][-1])
    for name, text in (
        ("kt", f"ktransformers:gpu_experts={per_layer}"),
        ("static", f"llama-cpp:cache=static,n_cpu_moe={layers},slots={per_layer}"),
        ("fiddler", f"fiddler:experts={together}"),
    ):
        run = plan_run(model, SERVER, trace, text)
        where = executors(run)
        for s, t, layer, j, expert in by_sequence(run):
            assert (where[t, layer, j] == Executor.GPU) == ((layer, expert) in hot[name][s])


def test_most_used_counts_all_layers_together() -> None:
    use = np.array([[[3.0, 1.0], [5.0, 3.0]]])
    assert most_used(use, 2).tolist() == [[[True, False], [True, False]]]
    assert most_used(use, 3).tolist() == [[[True, False], [True, True]]]


@pytest.mark.parametrize(("tokens", "where"), [(10, Executor.CPU), (11, Executor.FETCH)])
def test_published_costs_copy_from_eleven_tokens_on(tokens: int, where: Executor) -> None:
    model = plain_model(num_experts=2, top_k=2)
    trace = small_trace(model, [(tokens, 2), (tokens, 2)])
    run = plan_run(model, SERVER, trace, "fiddler:experts=0,costs=published")
    assert run.plan.prefill_class is not None
    assert {run.plan.classes[number].executor for number in np.unique(run.plan.prefill_class)} == {where}
    assert set(executors(run).ravel()) == {Executor.CPU}


@settings(max_examples=40)
@given(st.data())
def test_fiddler_takes_what_costs_less_on_the_system(data: st.DataObject) -> None:
    model, system = data.draw(models()), data.draw(machines())
    trace = data.draw(traces(model, min_sequences=2, prefill=True))
    run = plan_run(model, system, trace, "fiddler:experts=0")
    tokens, classes = run.plan.prefill_tokens, run.plan.prefill_class
    assert tokens is not None
    assert classes is not None
    for count, number in zip(tokens.ravel().tolist(), classes.ravel().tolist(), strict=True):
        if count:
            costs = expert_costs(model, system, count, model.expert_bits)
            cheaper = Executor.FETCH if costs.copy_s + costs.gpu_s[0] < costs.cpu_s[0] else Executor.CPU
            assert run.plan.classes[number].executor == cheaper
    costs = expert_costs(model, system, 1, model.expert_bits)
    copied = costs.copy_s + costs.gpu_s[0] < costs.cpu_s[0]
    assert set(executors(run)[run.replay.assigned]) == {Executor.FETCH if copied else Executor.CPU}


@settings(max_examples=40)
@given(st.data())
def test_the_lightest_experts_on_the_cpu_are_deferred(data: st.DataObject) -> None:
    model = data.draw(models().filter(lambda one: one.top_k > 1))
    trace = data.draw(traces(model, min_sequences=2))
    deferral = data.draw(st.integers(1, model.top_k - 1))
    run = plan_run(model, SERVER, trace, f"ktransformers:deferral={deferral},gpu_experts=1")
    weights = run.replay.decode_weights
    for t, layer in itertools.product(*map(range, run.plan.picks.shape[:2])):
        works = [run.plan.classes[number] for number in run.plan.picks[t, layer].tolist()]
        asked = [j for j, work in enumerate(works) if work.executor != Executor.SKIP]
        best = max(asked, key=lambda j: (weights[t, layer, j], -j), default=None)
        cpu = [j for j in asked if works[j].executor == Executor.CPU]
        cpu.sort(key=lambda j: (weights[t, layer, j], -j))
        late = {j for j in cpu[:deferral] if j != best} if layer < len(model.moe_layers) - 1 else set()
        assert {j for j in asked if works[j].when == When.BEHIND} == late


@settings(max_examples=40)
@given(st.data())
def test_hybrimoe_splits_every_layer_as_the_simulation_does(data: st.DataObject) -> None:
    model, system = data.draw(models()), data.draw(machines())
    slots = data.draw(st.integers(0, model.num_experts))
    trace = data.draw(traces(model, min_sequences=2))
    run = plan_run(model, system, trace, f"hybrimoe:slots={slots},admit={data.draw(st.sampled_from(['all', 'none']))}")
    costs = expert_costs(model, system, np.arange(2.0), model.expert_bits)
    where = executors(run)
    for t, layer in itertools.product(*map(range, run.plan.picks.shape[:2])):
        tokens = np.zeros((1, model.num_experts), np.int32)
        resident = np.zeros((1, model.num_experts), np.bool_)
        ids, asked = run.replay.decode_ids[t, layer], run.replay.assigned[t, layer]
        tokens[0, ids[asked]] = 1
        resident[0, ids[where[t, layer] == Executor.GPU]] = True
        split, _ = hybrid_split(tokens, resident, costs.gpu_s, costs.cpu_s, costs.copy_s)
        assert_array_equal(split[0, ids[asked]], where[t, layer][asked])


def test_hybrimoe_starts_with_what_the_prompt_used_and_pays_for_what_was_not_copied() -> None:
    model = plain_model(num_layers=2, num_experts=6, top_k=2)
    trace = small_trace(model, [(9, 6), (12, 6)], seed=4)
    run = plan_run(model, DESKTOP, trace, "hybrimoe:slots=2,admit=none,prefill=cpu")
    for s in range(2):
        own, others = statistics.selection_counts(trace, "prefill")[s], use_of_others(trace, s)
        first, before = ([set(ranked(use[layer])[:2]) for layer in range(2)] for use in (own, others))
        assert run.plan.migrated_experts[s] == sum(len(a - b) for a, b in zip(first, before, strict=True))
        where = executors(run)
        for sequence, t, layer, j, expert in by_sequence(run):
            if sequence == s:
                assert (where[t, layer, j] == Executor.GPU) == (expert in first[layer])


@settings(max_examples=40)
@given(st.data())
def test_daop_swaps_the_hottest_for_the_coldest(data: st.DataObject) -> None:
    model = data.draw(models())
    trace = data.draw(traces(model, min_sequences=2, prefill=True))
    count, ratio = data.draw(st.integers(0, model.num_experts)), data.draw(st.sampled_from([1.0, 1.05, 2.0]))
    run = plan_run(model, SERVER, trace, f"daop:gpu_experts={count},ratio={ratio}")
    prompt = statistics.selection_counts(trace, "prefill")
    hot: list[list[set[int]]] = []
    for s in range(trace.num_sequences):
        use, moved = use_of_others(trace, s), 0
        hot.append([])
        for layer in range(trace.num_layers):
            own = prompt[s, layer]
            gpu = ranked(use[layer])[:count]
            cold = ranked(-own, gpu)
            coming = ranked(own, set(range(model.num_experts)) - set(gpu))
            for a, b in itertools.islice(zip(coming, cold, strict=False), count // 2):
                if own[a] > ratio * own[b]:
                    gpu[gpu.index(b)] = a
                    moved += 1
            hot[-1].append(set(gpu))
        assert run.plan.migrated_experts[s] == moved
    where = executors(run)
    for s, t, layer, j, expert in by_sequence(run):
        assert (where[t, layer, j] == Executor.GPU) == (expert in hot[s][layer])


def test_daop_computes_ahead_what_it_predicts() -> None:
    model = plain_model(num_layers=4, num_experts=8, top_k=2)
    trace = small_trace(model, [(4, 40), (4, 40)], seed=2)
    sure = plan_run(model, SERVER, trace, "daop:gpu_experts=3,accuracy=1")
    behind = np.array([work.when == When.BEHIND for work in sure.plan.classes])[sure.plan.picks]
    assert sure.plan.copies is None
    assert_array_equal(behind[:, 1:-1], executors(sure)[:, 1:-1] == Executor.CPU)
    assert not behind[:, [0, -1]].any()
    wrong = plan_run(model, SERVER, trace, "daop:gpu_experts=3,accuracy=0")
    assert wrong.plan.copies is not None
    vain = np.array([work.executor == Executor.CPU for work in wrong.plan.classes])[wrong.plan.copies]
    assert not np.array([work.when == When.BEHIND for work in wrong.plan.classes])[wrong.plan.picks].any()
    assert vain[:, 1:].any()
    assert not vain[:, 0].any()
    lazy = plan_run(model, SERVER, trace, "daop:gpu_experts=3,ahead=no").price()
    assert sure.price().tpot_mean_s <= lazy.tpot_mean_s < wrong.price().tpot_mean_s


@settings(max_examples=40)
@given(st.data())
def test_llama_cpp_cache_is_an_lru_of_the_cpu_layers(data: st.DataObject) -> None:
    model = data.draw(models().filter(lambda one: one.top_k <= 2))
    trace = data.draw(traces(model))
    layers, slots = len(model.moe_layers), data.draw(st.integers(model.top_k, max(model.top_k, model.num_experts)))
    on_cpu = data.draw(st.integers(1, layers))
    text = f"llama-cpp:cache=lru,n_cpu_moe={on_cpu},slots={slots},op_offload=off"
    run = plan_run(model, SERVER, trace, text)
    where, last = executors(run), -1
    held: list[OrderedDict[int, None]] = []
    step_of, here = (-1, -1), set()
    for s, t, layer, j, expert in by_sequence(run):
        if s != last:
            last, held = s, [OrderedDict() for _ in range(layers)]
        if step_of != (t, layer):
            ids, asked = run.replay.decode_ids[t, layer], run.replay.assigned[t, layer]
            step_of, here = (t, layer), set(ids[asked].tolist())
        if layer >= on_cpu:
            assert where[t, layer, j] == Executor.GPU
            continue
        assert where[t, layer, j] == (Executor.GPU if expert in held[layer] else Executor.CPU)
        if expert not in held[layer] and len(held[layer]) == slots:
            # What the same step picks is not evicted.
            del held[layer][next(old for old in held[layer] if old not in here)]
        held[layer][expert] = None
        held[layer].move_to_end(expert)
    uploads = (
        0
        if run.plan.copies is None
        else int((np.array([w.executor for w in run.plan.classes])[run.plan.copies] == Executor.COPY).sum())
    )
    assert uploads == int((where[:, :on_cpu] == Executor.CPU).sum())


def test_a_cache_starts_with_the_prompt_only_if_that_was_copied() -> None:
    model = plain_model(num_experts=8)
    trace = small_trace(model, [(30, 5), (30, 5)], seed=1)
    start = [0, 5]
    for threshold, warm in ((0, True), (31, False)):
        run = plan_run(model, SERVER, trace, f"llama-cpp:cache=lru,n_cpu_moe=3,slots=8,threshold={threshold}")
        used = statistics.selection_counts(trace, "prefill") > 0
        for s, t in enumerate(start):
            hit = executors(run)[t] == Executor.GPU
            ids = run.replay.decode_ids[t]
            assert_array_equal(hit, np.take_along_axis(used[s], ids.astype(np.int64), axis=1) & warm)


def test_layers_on_the_cpu_are_the_fewest_that_fit() -> None:
    model = four_bits()
    for capacity in (8, 12, 20, 24, 30):
        system = DESKTOP.with_values({"gpu.memory_capacity_gb": capacity})
        run = plan_run(model, system, recording(), "llama-cpp")
        on_cpu = int(run.plan.notes[0].split()[0])
        most = PlanInputs(model, system, run.replay, None).most_gpu_experts
        # One expert is being copied while a prompt runs, unless all are resident.
        room = 32 * most - (most < 8)
        assert 8 * (32 - on_cpu) <= room < 8 * (32 - on_cpu + 1) or (on_cpu == 0 and most == 8)


@functools.cache
def four_bits() -> MoEModel:
    """Mixtral 8x7B with experts of 4 bits."""
    whole = mixtral()
    return dataclasses.replace(whole, storage=dataclasses.replace(whole.storage, expert=Format("4 bits", 4.0)))


@pytest.mark.parametrize(
    ("text", "round_trips", "on"),
    [
        ("all-resident", "none", "gpu"),
        ("all-cpu", "none", "cpu"),
        ("llama-cpp:n_cpu_moe=2", "cpu", "gpu"),
        ("llama-cpp:n_cpu_moe=2,cache=lru,slots=1", "layer", "gpu"),
        ("llama-cpp:n_cpu_moe=3,trunk=cpu", "none", "cpu"),
        ("llama-cpp:n_cpu_moe=2,trunk=cpu", "layer", "cpu"),
        ("fiddler:experts=3", "layer", "gpu"),
        ("ktransformers", "none", "gpu"),
        ("ktransformers:round_trips=cpu", "cpu", "gpu"),
        ("hybrimoe:slots=1", "layer", "gpu"),
        ("daop:gpu_experts=1", "layer", "gpu"),
    ],
)
def test_where_the_network_is_and_when_the_host_takes_part(text: str, round_trips: str, on: str) -> None:
    model = plain_model()
    plan = plan_run(model, SERVER, small_trace(model, [(3, 3), (3, 3)]), text).plan
    assert (plan.round_trips, plan.attention_on, plan.trunk_on) == (round_trips, on, on)


@pytest.mark.parametrize("speed", [0.5, 1.0, 2.0])
def test_hybrimoe_copies_the_highest_ids_and_uploads_what_the_cpu_ran(speed: float) -> None:
    model = plain_model(num_experts=12, top_k=6, hidden_size=256, expert_size=256)
    costs = expert_costs(model, DESKTOP, 1, 16.0)
    # A CPU about as fast as the link, so that both get some of the misses.
    rate = DESKTOP.cpu.dram_bandwidth_gb_per_s * float(costs.cpu_s[0]) / costs.copy_s * speed  # type: ignore[union-attr]
    system = DESKTOP.with_values({"cpu.dram_bandwidth_gb_per_s": rate})
    run = plan_run(model, system, small_trace(model, [(4, 9), (4, 9)]), "hybrimoe:slots=6,admit=all")
    where, mixed = executors(run), 0
    assert run.plan.copies is not None
    uploaded = np.array([work.executor == Executor.COPY for work in run.plan.classes])[run.plan.copies].sum(axis=2)
    assert_array_equal(uploaded, (where == Executor.CPU).sum(axis=2))
    for ids, here in zip(run.replay.decode_ids.reshape(-1, 6), where.reshape(-1, 6), strict=True):
        copied, on_cpu = ids[here == Executor.FETCH], ids[here == Executor.CPU]
        mixed += bool(len(copied) and len(on_cpu))
        assert copied.min(initial=12) > on_cpu.max(initial=0) or not len(on_cpu)
    assert mixed > 10


def test_daop_swaps_above_the_ratio_only() -> None:
    model = plain_model(num_layers=1, num_experts=4, top_k=1)

    def moved(prompt: list[int], ratio: float) -> float:
        ids = [[[e]] for e, count in enumerate(prompt) for _ in range(count)] + [[[0]], [[1]]]
        other = [[[0]], [[0]], [[1]]]
        trace = RoutingTrace(
            topk_ids=np.array(ids + other),
            topk_weights=None,
            sequence_offsets=np.array([0, len(ids), len(ids) + 3]),
            prompt_len=np.array([sum(prompt), 1]),
            layer_index=np.array([0]),
            num_experts=4,
            metadata={"model": "small", "source": "synthetic"},
        )
        text = f"daop:gpu_experts=2,ratio={ratio}"
        return float(plan_run(model, SERVER, trace, text).plan.migrated_experts[0])

    assert [moved([20, 30, 21, 5], 1.05), moved([20, 30, 22, 5], 1.05), moved([20, 30, 21, 5], 1.0)] == [0, 1, 1]


def test_daop_computes_wrong_predictions_of_cpu_experts_in_vain() -> None:
    model = plain_model(num_layers=4, num_experts=8, top_k=3)
    trace = small_trace(model, [(4, 30), (4, 30)], seed=2)
    run = plan_run(model, SERVER, trace, "daop:gpu_experts=3,accuracy=0.5,seed=5")
    named = gate_prediction(run.replay, 0.5, 5)
    assert run.plan.copies is not None
    vain = np.array([work.executor == Executor.CPU for work in run.plan.classes])[run.plan.copies].sum(axis=2)
    resident: list[set[tuple[int, int]]] = [set(), set()]
    for s, t, layer, j, expert in by_sequence(run):
        if executors(run)[t, layer, j] == Executor.GPU:
            resident[s].add((layer, expert))
    for t, layer in itertools.product(range(60), range(4)):
        wrong = set(named[t, layer].tolist()) - set(run.replay.decode_ids[t, layer].tolist()) - {NO_EXPERT}
        assert vain[t, layer] == len([e for e in wrong if (layer, e) not in resident[t // 30]])


# --- pinned memory ---


def test_copies_need_pinned_memory() -> None:
    model = plain_model(num_experts=8)
    trace = small_trace(model, [(6, 4), (6, 4)])
    one = 3 * model.expert_bytes(16.0)  # an expert of each of the 3 layers
    for text, experts in (
        ("llama-cpp:n_cpu_moe=3,threshold=0", 8),
        ("llama-cpp:n_cpu_moe=2,threshold=0", 2 * 8 / 3),
        ("llama-cpp:n_cpu_moe=3,threshold=0,cache=static,slots=3", 5),
        ("llama-cpp:n_cpu_moe=3,op_offload=off,cache=lru,slots=3", 8),
        ("ktransformers:gpu_experts=3,prefill=fetch", 5),
        ("hybrimoe:slots=3,admit=all", 8),
        ("expert-cache:slots=3", 8),
        ("expert-cache:slots=3,bits=4", 8 / 4),
    ):
        limited = DESKTOP.with_values({"host.pinned_memory_gb": experts * one * 1.001 / 1e9})
        assert plan_run(model, limited, trace, text).price().tpot_mean_s > 0
        with pytest.raises(PlacementError) as error:
            plan_run(model, limited.with_values({"host.pinned_memory_gb": experts * one * 0.999 / 1e9}), trace, text)
        for word in ("pinned", "host.pinned_memory_gb", f"{experts * one / 1e9:.2f} GB", "op_offload=off"):
            assert word in str(error.value)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "text", ["all-cpu", "all-resident", "ktransformers:gpu_experts=2", "llama-cpp:n_cpu_moe=3,op_offload=off"]
)
def test_what_copies_nothing_needs_none(text: str) -> None:
    model = plain_model(num_experts=8)
    none = DESKTOP.with_values({"host.pinned_memory_gb": 0})
    plan = plan_run(model, none, small_trace(model, [(6, 4), (6, 4)]), text).plan
    assert not {work.executor for work in plan.classes} & set(COPIES)


def test_the_pinned_budget_is_read_by_every_plan() -> None:
    assert all("host.pinned_memory_gb" in parse_policy(name).plan_keys for name in NAMES)


# --- published directions, on the recording with Mixtral 8x7B of 4-bit experts ---

MIXTRAL_SYSTEMS = ("rtx4090-pcie4-cpu", "rtx3090-pcie4-cpu", "h100-pcie5-cpu")


@functools.cache
def of_mixtral(system: str, text: str) -> Evaluation:
    return plan_run(four_bits(), system, recording(), text).price()


def ttft(evaluation: Evaluation) -> float:
    assert evaluation.ttft_s is not None
    return evaluation.ttft_s


@pytest.mark.parametrize("system", MIXTRAL_SYSTEMS)
@pytest.mark.parametrize("experts", [2, 4])
def test_published_directions(system: str, experts: int) -> None:
    plain = of_mixtral(system, f"ktransformers:gpu_experts={experts}")
    deferred = of_mixtral(system, f"ktransformers:gpu_experts={experts},deferral=1")
    hybrid = of_mixtral(system, f"hybrimoe:slots={experts}")
    fiddler = of_mixtral(system, f"fiddler:experts={32 * experts}")
    on_demand = of_mixtral(system, f"expert-cache:slots={experts}")
    # Up to 1.45x was published; 1.08 to 1.16 here.
    assert 1.0 <= plain.tpot_mean_s / deferred.tpot_mean_s < 1.45
    # Published: 1.70x in decode and 1.33x in prefill; 1.12 to 1.22 and 1.19 to 1.83 here.
    assert 1.05 < plain.tpot_mean_s / hybrid.tpot_mean_s < 1.70
    assert 1.1 < ttft(plain) / ttft(hybrid) < 2.0
    assert fiddler.tpot_mean_s < on_demand.tpot_mean_s
    assert ttft(fiddler) < ttft(on_demand)
    memory = [one.memory_bytes["gpu"]["total"] for one in (plain, deferred, hybrid, on_demand)]
    assert memory == pytest.approx([memory[0]] * 4, rel=1e-12)


@pytest.mark.parametrize(("experts", "hit_rate"), [(56, 0.252), (125, 0.530)])
def test_fiddler_hit_rates(experts: int, hit_rate: float) -> None:
    # Published for Mixtral 8x7B with so many of its 256 experts on the GPU; the recording's router is less skewed.
    found = of_mixtral("rtx4090-pcie4-cpu", f"fiddler:experts={experts}").hit_rate.own
    assert found == pytest.approx(hit_rate, abs=0.06)


# --- reported cases ---


@pytest.mark.parametrize(("experts", "top_k", "tokens"), [(256, 8, 1024), (128, 8, 512), (128, 4, 1024), (8, 2, 128)])
def test_prompts_are_copied_from_32_tokens_an_expert_on(experts: int, top_k: int, tokens: int) -> None:
    model = plain_model(num_layers=1, num_experts=experts, top_k=top_k)
    for prompt, where in ((tokens - 1, Executor.CPU), (tokens, Executor.FETCH)):
        trace = generate(1, prompt, 1, 1, experts, top_k)
        run = plan_run(model, SERVER, trace, "llama-cpp:n_cpu_moe=1")
        assert run.plan.prefill_class is not None
        assert run.plan.prefill_tokens is not None
        found = run.plan.prefill_class[run.plan.prefill_tokens > 0]
        assert {run.plan.classes[number].executor for number in np.unique(found)} == {where}


@functools.cache
def stored(path: Any, bits: float) -> MoEModel:
    return dataclasses.replace(MoEModel.from_config(path), storage=Storage.uniform(bits))


def test_a_short_prompt_of_a_large_model_is_left_to_the_cpu(shared: Any) -> None:
    # 130 GiB behind 8 lanes of PCIe 3; reported: 23 s for 34 tokens when they were copied, 3 s on the CPU. Two thirds
    # of the experts are used and copied; the reported engine copied whole layers. Two cards hold 48 GB together; the
    # CPU reads 1.67-bit weights at 30 GB/s, a third of what its memory gives (assumed: unpacking them is slow).
    model = stored(shared / "configs" / "deepseek-ai__DeepSeek-V3", 1.67)
    assert model.weight_bytes / 2**30 == pytest.approx(130, rel=0.01)
    system = load_system("rtx3090-pcie4-cpu").model_copy(update={"link": load_spec("pcie-3.0-x8")})
    system = system.with_values({"gpu.memory_capacity_gb": 48, "cpu.dram_efficiency": 0.33, "link.efficiency": 0.7614})
    trace = generate(1, 34, 2, 58, 256, 8)
    copied, left, auto = (
        plan_run(model, system, trace, f"llama-cpp:n_cpu_moe=58{how}").price()
        for how in (",threshold=0", ",op_offload=off", "")
    )
    assert 15 < ttft(copied) < 25
    assert 3 < ttft(left) < 5
    assert ttft(auto) == ttft(left)


@pytest.mark.parametrize("text", ["n_cpu_moe=32", "n_cpu_moe=20,cache=lru,slots=2"])
def test_overlapping_copies_helps_prompts_and_not_decode(text: str) -> None:
    on, off = (
        plan_run(four_bits(), DESKTOP, recording(), f"llama-cpp:{text},threshold=0,overlap={how}", prompt=1024).price()
        for how in ("on", "off")
    )
    assert ttft(off) > 1.1 * ttft(on)
    assert on.tpot_mean_s == pytest.approx(off.tpot_mean_s, rel=0.02)


@pytest.mark.parametrize("text", ["llama-cpp:n_cpu_moe=32", "ktransformers"])
def test_execution_on_the_cpu_follows_the_memory_and_not_the_link(text: str) -> None:
    server = DESKTOP.model_copy(update={"cpu": load_spec("epyc-9654")})
    systems = [
        server.model_copy(update={"link": load_spec(link)}) for link in ("pcie-3.0-x16", "pcie-4.0-x16", "pcie-5.0-x16")
    ]
    run = plan_run(four_bits(), server, recording(), text)
    full, half = (
        [run.price(system.with_values({"cpu.populated_channels": channels})) for system in systems]
        for channels in (12, 7)
    )
    for some in (full, half):
        times = [one.tpot_mean_s for one in some]
        assert max(times) < 1.03 * min(times)
    for one, other in zip(full, half, strict=True):
        assert other.breakdown_s["cpu"] / one.breakdown_s["cpu"] == pytest.approx(12 / 7, rel=1e-9)


def test_attention_on_the_gpu_beats_everything_on_the_cpu(shared: Any) -> None:
    # Reported for a model of this shape on an RTX 5080: 14.6 and 36.5 tokens/s, prompts at 46 and 692, 2.9 GB of GPU
    # memory. The host is not stated; 30 GB/s from memory explains the first number.
    model = stored(shared / "configs" / "Qwen__Qwen3.5-35B-A3B", 4.85)
    system = DESKTOP.model_copy(update={"gpu": load_spec("rtx-5080")}).with_values({"cpu.dram_efficiency": 0.34})
    trace = small_trace(model, [(16, 4), (16, 4)])
    cpu, split = (
        plan_run(model, system, trace, text, prompt=2700).price() for text in ("all-cpu", "llama-cpp:n_cpu_moe=40")
    )
    assert 2 < cpu.tpot_mean_s / split.tpot_mean_s < 3
    assert ttft(cpu) > 5 * ttft(split)
    assert split.memory_bytes["gpu"]["total"] < 2.9e9
    # Pinning failed there; then the long prompt cannot be copied either, and has to stay on the CPU.
    limited = system.with_values({"host.pinned_memory_gb": 15})
    with pytest.raises(PlacementError, match=r"has to be pinned, host measured allows 15\.00 GB"):
        plan_run(model, limited, trace, "llama-cpp:n_cpu_moe=40", prompt=2700)
    assert plan_run(model, limited, trace, "llama-cpp:n_cpu_moe=40,op_offload=off", prompt=2700).price().ttft_s


def test_the_newer_box_with_slow_memory_decodes_slower_and_reads_prompts_faster() -> None:
    # Reported: 18.4 against 32.0 tokens/s, prompts at 596 against 402, with 32 GB/s from the memory of the newer box.
    # The other's is derived: as much more as it decodes faster, 55.7 GB/s. The rates rank both ways, hits do not.
    def box(system: str, rate: float) -> Evaluation:
        machine = load_system(system).with_values({"cpu.dram_bandwidth_gb_per_s": rate, "cpu.dram_efficiency": 1.0})
        return plan_run(four_bits(), machine, recording(), "llama-cpp:n_cpu_moe=20", prompt=2048).price()

    newer, older = box("rtx5090-pcie5-cpu", 32.0), box("rtx3090-pcie4-cpu", 32.0 * 32.0 / 18.4)
    assert newer.decode_tok_per_s < 0.9 * older.decode_tok_per_s
    assert ttft(newer) < 0.9 * ttft(older)
    assert newer.hit_rate.own == older.hit_rate.own


def test_hits_hardly_matter_while_the_trunk_is_on_the_cpu() -> None:
    # Reported: 1.8 GB a token beside the experts on the CPU at 30 GB/s, 190 MB of experts at 81 % hits, 50 MB at 95 %.
    layers, hidden, width = 40, 2048, 1920
    model = plain_model(
        num_layers=layers,
        num_experts=64,
        top_k=4,
        hidden_size=hidden,
        expert_size=width,
        attention=(attention_kind(range(layers), params=1_800_000_000 // layers),),
        bits=8.0,
        expert_bits=4.25,
    )
    system = DESKTOP.with_values({"cpu.dram_bandwidth_gb_per_s": 30, "cpu.dram_efficiency": 1.0})
    trace = generate(2, 16, 60, layers, 64, 4, alpha=0.2, seed=1)

    def cached(slots: int, trunk: str) -> Evaluation:
        text = f"llama-cpp:n_cpu_moe={layers},cache=static,slots={slots},trunk={trunk}"
        return plan_run(model, system, trace, text).price()

    slots = {goal: next(n for n in range(65) if cached(n, "cpu").hit_rate.own >= goal) for goal in (0.81, 0.95)}
    low, high = (cached(slots[goal], "cpu") for goal in (0.81, 0.95))
    assert high.hit_rate.own - low.hit_rate.own > 0.1
    missed = [(1 - one.hit_rate.own) * layers * 4 * model.expert_bytes(4.25) / 1e6 for one in (low, high)]
    assert missed == pytest.approx([190, 50], rel=0.15)
    assert 1.0 < low.tpot_mean_s / high.tpot_mean_s < 1.08
    assert cached(slots[0.81], "gpu").tpot_mean_s < 0.5 * high.tpot_mean_s


def test_refusals_have_one_line() -> None:
    with pytest.raises(PerfModelError) as error:
        plan_run(mixtral(), DESKTOP, recording(), "all-resident")
    assert isinstance(error.value, PlacementError)
    assert "does not fit" in str(error.value)
    assert "\n" not in str(error.value)
