"""Steps and prefills told by counts: those of a trace give the times of its run, and nothing is lost."""

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from engines import engine, engines
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import NDP_SYSTEM, models, plain_model, small_trace
from test_timelines import experts_take, machines, planned

from perfmodel.errors import ModelConfigError, PerfModelError
from perfmodel.hardware import System, load_system
from perfmodel.model import MoEModel
from perfmodel.point import Points, hardware_point
from perfmodel.policies import Executor, When, WorkClass
from perfmodel.policies.costs import expert_costs
from perfmodel.run import Run, plan_run
from perfmodel.steps import (
    Experts,
    Layers,
    Prefill,
    PricedPrefill,
    PricedStep,
    Step,
    binomial_layers,
    mean_tokens,
)

SERVER = load_system("h100-pcie5-cpu")


def point(system: System) -> Points:
    return Points.one(hardware_point(system))


def step_time(model: MoEModel, step: Step, system: System) -> float:
    return float(PricedStep(model, step).times(point(system))[0])


def prefill_time(model: MoEModel, prefill: Prefill, system: System) -> float:
    return float(PricedPrefill(model, prefill).times(point(system))[0])


def layers_of(
    steps: Iterable[list[list[tuple[WorkClass, int]]]], round_trips: str, tokens: float
) -> tuple[Layers, ...]:
    """The mean layers of steps, by the rules of a plan: round trips, and tokens of a step that cross to the CPU."""
    found: Counter[tuple[tuple[WorkClass, int], ...]] = Counter()
    number = 0
    for step in steps:
        number += 1
        for layer in step:
            work = sorted(layer, key=lambda one: (one[0].executor, one[0].bits, one[0].when, one[1]))
            found[tuple(one for one in work if one[0].executor != Executor.SKIP)] += 1
    layers = []
    for row, often in found.items():
        experts = [
            Experts(work.executor, float(count), float(each), work.bits, work.when)
            for (work, each), count in Counter(row).items()
        ]
        on_cpu = any(work.executor == Executor.CPU for work, _ in row)
        trips = 1.0 if round_trips == "layer" or (round_trips == "cpu" and on_cpu) else 0.0
        layers.append(Layers(often / number, tuple(experts), trips, tokens if on_cpu else 0.0))
    return tuple(layers)


# ---- decode steps ----


@st.composite
def placed_runs(draw: st.DrawFn) -> Run:
    """Runs of one decode step for each of several equal prompts, with every kind of work on demand."""
    model = draw(models())
    sequences, prompt = draw(st.integers(1, 4)), draw(st.integers(1, 9))
    trace = small_trace(model, [(prompt, 1)] * sequences, seed=draw(st.integers(0, 2**32 - 1)))
    run = plan_run(model, NDP_SYSTEM, trace, "monde")
    executors = draw(st.lists(st.sampled_from([Executor.GPU, Executor.FETCH, Executor.NDP, Executor.CPU]), min_size=1))
    classes = [WorkClass(one, draw(st.sampled_from([2.0, 4.0, 16.0]))) for one in executors]
    classes = [*dict.fromkeys((*classes, WorkClass(Executor.SKIP, 16.0)))]
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    plan = dataclasses.replace(
        run.plan,
        classes=tuple(classes),
        picks=rng.integers(0, len(classes), run.plan.picks.shape).astype(np.uint8),
        overlap=draw(st.sampled_from(["max", "sum"])),
        # Copies queue by class in a plan, and in the order of the list in a step.
        fetch="before",
        round_trips=draw(st.sampled_from(["none", "cpu", "layer"])),
    )
    system = draw(machines())
    system = system.with_engine(draw(engines())) if draw(st.booleans()) else system
    return dataclasses.replace(run, system=system, plan=plan)


@settings(max_examples=80)
@given(placed_runs())
def test_a_step_of_a_traces_counts_takes_the_mean_time_of_its_run(run: Run) -> None:
    plan = run.plan
    steps = [[[(plan.classes[n], 1) for n in layer] for layer in token] for token in plan.picks.tolist()]
    layers = layers_of(steps, plan.round_trips, 1.0)
    context = float(run.contexts[0])
    assert (run.contexts == context).all()
    step = Step(1.0, 1.0, context, layers, plan.overlap)
    assert step_time(run.model, step, run.system) == pytest.approx(run.price().tpot_mean_s, rel=1e-12, abs=0)


@settings(max_examples=40)
@given(st.data())
def test_a_step_of_several_sequences_takes_the_time_of_its_batch(data: st.DataObject) -> None:
    model = data.draw(models())
    batch = data.draw(st.integers(1, 4))
    trace = small_trace(model, [(5, 1)] * batch, seed=data.draw(st.integers(0, 2**32 - 1)))
    system = data.draw(machines()).with_engine(data.draw(engines()))
    run = plan_run(model, system, trace, "all-resident", batch=batch)
    work = WorkClass(Executor.GPU, model.expert_bits)
    ids = run.replay.decode_ids
    step = [[(work, each) for each in Counter(ids[:, at].ravel().tolist()).values()] for at in range(ids.shape[1])]
    told = Step(batch, batch, 6.0, layers_of([step], "none", batch))
    assert step_time(model, told, system) == pytest.approx(run.price().tpot_mean_s, rel=1e-12, abs=0)


AHEAD = st.sampled_from(
    [
        WorkClass(Executor.FETCH, 4.0, when=When.AHEAD),
        WorkClass(Executor.COPY, 16.0, when=When.BEHIND),
        WorkClass(Executor.CPU, 16.0, when=When.BEHIND),
        WorkClass(Executor.FETCH, 16.0),
        WorkClass(Executor.GPU, 16.0),
        WorkClass(Executor.CPU, 4.0),
    ]
)


@settings(max_examples=60)
@given(machines(), st.lists(st.lists(AHEAD, min_size=1, max_size=3), min_size=2, max_size=3, unique_by=tuple))
def test_what_looks_back_finds_every_layer_before_it_as_often_as_chance_has_it(
    system: System, rows: list[list[WorkClass]]
) -> None:
    rows = [sorted(row, key=lambda one: (one.executor, one.bits, one.when)) for row in rows]
    rows[0].append(WorkClass(Executor.FETCH, 2.0, when=When.AHEAD))
    model = planned(system, [rows[0]]).model
    # Fixed times that hide nothing, and are longer than the work of any layer: so no resource bounds a step.
    busiest = max(planned(system, rows).price().busy_s.values())
    system = system.with_values({"gpu.layer_overhead_us": busiest * 1e6})
    model = plain_model(num_layers=6, num_experts=model.num_experts, top_k=model.top_k)
    share = np.arange(1.0, len(rows) + 1.0)
    share *= model.num_layers / share.sum()
    context = 3.0
    layers = tuple(one_layer(number, row) for number, row in zip(share.tolist(), rows, strict=True))
    nothing = step_time(model, Step(1.0, 1.0, context, (Layers(float(model.num_layers), ()),)), system)
    told = step_time(model, Step(1.0, 1.0, context, layers), system) - nothing
    pairs = [
        (often_before * often / model.num_layers, before, row)
        for often_before, before in zip(share.tolist(), rows, strict=True)
        for often, row in zip(share.tolist(), rows, strict=True)
    ]
    expected = math.fsum(
        often * (experts_take(planned(system, [before, row])) - experts_take(planned(system, [before])))
        for often, before, row in pairs
    )
    # The difference of two steps loses digits.
    assert told == pytest.approx(expected, rel=1e-9, abs=1e-12 * nothing)


@pytest.mark.parametrize("executor", [Executor.CPU, Executor.COPY])
def test_a_step_is_no_shorter_than_the_work_of_its_cpu_or_link(executor: Executor) -> None:
    rates = {"gpu.memory_bandwidth_gb_per_s": 30, "cpu.dram_bandwidth_gb_per_s": 12, "link.bandwidth_gb_per_s": 10}
    system = SERVER.with_values(rates).with_engine("ideal")
    model = plain_model(num_layers=6, hidden_size=1024, expert_size=3584)
    # What a layer leaves outlasts it, and hides beside the longer side of the next one, which leaves as much itself.
    longer, left = (Executor.GPU, 1) if executor == Executor.CPU else (Executor.CPU, 2)
    row = [WorkClass(longer, 16.0)] * (3 - left) + [WorkClass(executor, 16.0, when=When.BEHIND)] * left
    costs = expert_costs(model, system, 1, 16.0)
    needs = 6 * left * (float(costs.cpu_s[0]) if executor == Executor.CPU else costs.copy_s)
    step = PricedStep(model, Step(1.0, 1.0, 3.0, (Layers(6.0, one_layer(6.0, row).experts),)))
    parts = step.parts(point(system))
    total = parts.pop("total_s")[0]
    assert total == step.times(point(system))[0] == pytest.approx(needs, rel=1e-12, abs=0)
    assert sum(values[0] for values in parts.values()) == pytest.approx(total, rel=1e-12, abs=0)
    # Most of a step is the longer side; the resource bounds it by what is missing there.
    part = "cpu_s" if executor == Executor.CPU else "link_s"
    assert 0.0 < parts[part][0] < needs / 2


def one_layer(number: float, row: list[WorkClass]) -> Layers:
    """A layer of a step with the experts of a planned one."""
    experts = tuple(
        Experts(work.executor, float(count), 1.0, work.bits, work.when) for work, count in Counter(row).items()
    )
    on_cpu = any(work.executor == Executor.CPU for work in row)
    return Layers(number, experts, crossing=1.0 if on_cpu else 0.0)


@settings(max_examples=40)
@given(placed_runs(), st.integers(2, 5))
def test_equal_layers_may_be_told_together_or_apart(run: Run, parts: int) -> None:
    plan = run.plan
    steps = [[[(plan.classes[n], 1) for n in layer] for layer in token] for token in plan.picks.tolist()]
    layers = layers_of(steps, plan.round_trips, 1.0)
    apart = tuple(one._replace(number=one.number / parts) for one in layers for _ in range(parts))
    halves = tuple(
        one._replace(experts=tuple(part._replace(number=part.number / 2) for part in one.experts for _ in range(2)))
        for one in layers
    )
    whole = step_time(run.model, Step(1.0, 1.0, 5.0, layers), run.system)
    for other in (apart, halves, layers[::-1]):
        assert step_time(run.model, Step(1.0, 1.0, 5.0, other), run.system) == pytest.approx(whole, rel=1e-12, abs=0)


@settings(max_examples=40)
@given(placed_runs())
def test_parts_of_a_step_add_up(run: Run) -> None:
    plan = run.plan
    steps = [[[(plan.classes[n], 1) for n in layer] for layer in token] for token in plan.picks.tolist()]
    layers = layers_of(steps, plan.round_trips, 1.0)
    parts = PricedStep(run.model, Step(1.0, 1.0, 5.0, layers, plan.overlap)).parts(point(run.system))
    added = sum(values[0] for name, values in parts.items() if name != "total_s")
    assert added == pytest.approx(parts["total_s"][0], rel=1e-12, abs=0)


# ---- prefills ----


@settings(max_examples=60)
@given(st.data())
def test_a_prefill_in_one_pass_takes_the_time_of_the_runs(data: st.DataObject) -> None:
    model = data.draw(models())
    prompt = data.draw(st.integers(1, 30))
    trace = small_trace(model, [(prompt, 1)], seed=data.draw(st.integers(0, 2**32 - 1)))
    run = plan_run(model, NDP_SYSTEM, trace, "monde")
    assert run.plan.prefill_tokens is not None
    classes = (WorkClass(Executor.GPU, 4.0), WorkClass(Executor.FETCH, 16.0), WorkClass(Executor.CPU, 16.0))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    chosen = rng.integers(0, 3, run.plan.prefill_tokens.shape).astype(np.uint8)
    system = data.draw(machines()).with_engine(data.draw(engines()))
    plan = dataclasses.replace(
        run.plan, classes=classes, prefill_class=chosen, round_trips="layer", picks=np.zeros_like(run.plan.picks)
    )
    run = dataclasses.replace(run, plan=plan, system=system, micro_batch=None)
    work = [
        [(classes[n], int(tokens)) for n, tokens in zip(numbers, counts, strict=True) if tokens]
        for numbers, counts in zip(chosen[0].tolist(), run.plan.prefill_tokens[0].tolist(), strict=True)
    ]
    told = Prefill(prompt, 1.0, layers_of([work], "layer", prompt), overlap="max", fetch="before")
    assert prefill_time(model, told, system) == pytest.approx(run.price().ttft_s, rel=1e-12, abs=0)


@settings(max_examples=40)
@given(st.data())
def test_several_passes_read_weights_again_and_lose_no_token(data: st.DataObject) -> None:
    # Without a ramp of the memory rate a pass is a step of its own: passes add up, but for the head and attention.
    model = data.draw(models())
    system = data.draw(machines()).with_engine(engine(memory_efficiency=0.7, kernel_us=2.0, expert_kernels=3))
    passes, each = data.draw(st.integers(2, 5)), data.draw(st.integers(1, 40))
    distinct = float(model.num_experts)
    tokens = mean_tokens(each, model.top_k, distinct)

    def time(count: int) -> float:
        experts = Experts(Executor.FETCH, count * distinct, tokens, model.expert_bits)
        layers = Layers(float(model.num_moe_layers), (experts,), round_trips=count, crossing=0.0)
        return prefill_time(model, Prefill(count * each, count, (layers,)), system)

    once, several = time(1), time(passes)
    # One head is saved in each further pass; later passes attend to more than the first one does.
    head = float(model.head_params * model.storage.head.bits / 8 + 4 * model.hidden_size)
    peak = system.get("gpu.memory_bandwidth_gb_per_s") * 1e9 * 0.7
    work = 2.0 * model.head_params / (system.get("gpu.peak_tflop_per_s.fp16") * 1e12)
    saved = max(head / peak, work) if model.head_params else 0.0
    assert several >= (passes * once - (passes - 1) * saved) * (1 - 1e-9)


def test_shared_experts_run_in_every_pass() -> None:
    model, bare = (plain_model(shared_params=number) for number in (900, 0))
    system = SERVER.with_engine(engine(memory_n_half_kb=50.0))
    rate = system.get("gpu.memory_bandwidth_gb_per_s") * 1e9
    for passes in (1, 4):
        layers = (Layers(3.0, (Experts(Executor.GPU, 4.0 * passes, 4.0, 16.0),)),)
        told = Prefill(8.0 * passes, passes, layers)
        shared = prefill_time(model, told, system) - prefill_time(bare, told, system)
        read = 900 * 2 + 4 * 8 * model.hidden_size + 50e3
        assert shared == pytest.approx(3 * passes * read / rate, rel=1e-9)


def test_tokens_in_the_cache_make_a_prompt_slower_up_to_the_window() -> None:
    model = plain_model()
    layers = (Layers(3.0, (Experts(Executor.GPU, 4.0, 4.0, 16.0),)),)
    times = [prefill_time(model, Prefill(8.0, 1.0, layers, after), SERVER) for after in (0.0, 100.0, 200.0)]
    assert times[0] < times[1] < times[2]
    assert times[2] - times[1] == pytest.approx(times[1] - times[0], rel=1e-6)


# ---- counts ----


@given(st.integers(1, 40), st.integers(0, 12), st.floats(0.0, 1.0))
def test_layers_by_their_misses_keep_number_and_mean(layers: int, experts: int, share: float) -> None:
    rows = binomial_layers(layers, experts, share)
    assert math.fsum(number for number, _ in rows) == pytest.approx(layers, rel=1e-12)
    missed = math.fsum(number * misses for number, misses in rows)
    assert missed == pytest.approx(layers * experts * share, rel=1e-12, abs=1e-300)
    assert all(number >= 0.0 and 0.0 <= misses <= experts for number, misses in rows)
    if len(rows) > 1:
        spread = math.fsum(number * (misses - experts * share) ** 2 for number, misses in rows) / layers
        assert spread == pytest.approx(experts * share * (1.0 - share), rel=1e-9, abs=1e-12)


def test_experts_that_are_no_whole_number_miss_alike() -> None:
    assert binomial_layers(48, 6.5, 0.25) == [(48, 6.5 * 0.25)]
    assert mean_tokens(16, 8, 59.2) * 59.2 == pytest.approx(16 * 8)
    assert mean_tokens(16, 8, 0.0) == 0.0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokens": 0.0}, "step: found no tokens or no pass, allowed: numbers above 0"),
        ({"tokens": float("nan")}, "step: found the count nan"),
        ({"context": -1.0}, "step: found the count -1"),
        ({"layers": (Layers(2.0, ()),)}, "step: its layers with experts add up to 2, allowed: 3, those of model plain"),
        ({"layers": (Layers(-1.0, ()), Layers(4.0, ()))}, "step: found the count -1"),
        ({"layers": (Layers(3.0, (Experts(Executor.GPU, -2.0, 1.0, 16.0),)),)}, "step: found the count -2"),
        ({"layers": (Layers(3.0, (), crossing=math.inf),)}, "step: found the count inf"),
        ({"tokens": "1"}, "step: found '1', allowed: numbers from 0 up"),
        ({"tokens": True}, "step: found True, allowed: numbers from 0 up"),
        ({"layers": "abc"}, "step: layers: found 'abc', allowed: a tuple of Layers"),
        ({"layers": (Layers(3.0, (1,)),)}, "step: experts: found a list of 1 entries, allowed: a tuple of Experts"),  # type: ignore[arg-type]
        ({"layers": (Layers(3.0, (Experts("GPU", 1.0, 1.0, 16.0),)),)}, "step: experts: found executor 'GPU', when"),  # type: ignore[arg-type]
        ({"layers": (Layers(3.0, (Experts(Executor.GPU, 99.0, 1.0, 16.0),)),)}, "step: found 99 experts in a layer"),
    ],
)
def test_impossible_steps_are_refused_in_one_line(changes: dict[str, Any], words: str) -> None:
    step = Step(1.0, 1.0, 10.0, (Layers(3.0, ()),))
    with pytest.raises(PerfModelError) as caught:
        PricedStep(plain_model(), step._replace(**changes))
    assert words in str(caught.value)
    if "context" not in changes:
        layers = changes.get("layers", step.layers)
        with pytest.raises(PerfModelError) as caught:
            PricedPrefill(plain_model(), Prefill(changes.get("tokens", 1.0), 1.0, layers))
        assert words in str(caught.value)
    with pytest.raises(PerfModelError, match="found no tokens or no pass"):
        PricedPrefill(plain_model(), Prefill(4.0, 0.0, step.layers))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sequences": 5.0}, "step: found 5 sequences with 1 tokens, allowed: a token each or more"),
        ({"overlap": "foo"}, "step: overlap: found 'foo', allowed: max or sum"),
        ({"fetch": "late"}, "step: fetch: found 'late', allowed: before or pipelined"),
    ],
)
def test_steps_that_no_engine_runs_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(PerfModelError) as caught:
        PricedStep(plain_model(), Step(1.0, 1.0, 10.0, (Layers(3.0, ()),))._replace(**changes))
    assert words in str(caught.value)


@pytest.mark.parametrize(("executor", "name"), [(Executor.NDP, "a near-data device"), (Executor.CPU, "a CPU")])
def test_experts_need_the_device_that_they_run_on(executor: Executor, name: str) -> None:
    model, bare = plain_model(), SERVER.model_copy(update={"cpu": None})
    layers = (Layers(3.0, (Experts(executor, 2.0, 1.0, 16.0),)),)
    step, prompt = PricedStep(model, Step(1.0, 1.0, 4.0, layers)), PricedPrefill(model, Prefill(1.0, 1.0, layers))
    for price in (step.times, step.parts, prompt.times):
        with pytest.raises(PerfModelError, match=f"found experts on {name}, which the system does not have"):
            price(point(bare))


# ---- dense networks ----


def test_a_dense_network_is_a_step_without_layers() -> None:
    sparse = plain_model(dense_params=5000, moe_layers=[0])
    dense = dataclasses.replace(
        sparse,
        feed_forward=(dataclasses.replace(sparse.feed_forward[1], layers=(0, 1, 2)),),
    )
    system = SERVER.with_engine(engine(memory_efficiency=0.5))
    moved = dense.weight_bytes - dense.bytes_by_class()["embedding"] - 2 * dense.final_norm_params
    norms = 2 * sum(len(kind.layers) * kind.norm_params for kind in (*dense.attention, *dense.feed_forward))
    rate = 0.5 * system.get("gpu.memory_bandwidth_gb_per_s") * 1e9
    time = step_time(dense, Step(1.0, 1.0, 0.0, ()), system)
    activations = 4 * dense.num_layers * dense.hidden_size + 4 * dense.hidden_size  # of dense networks and the head
    assert time == pytest.approx((moved - norms + activations) / rate, rel=1e-12)
    assert prefill_time(dense, Prefill(1.0, 1.0, ()), system) > 0.0
    with pytest.raises(PerfModelError, match="add up to 1, allowed: 0"):
        PricedStep(dense, Step(1.0, 1.0, 0.0, (Layers(1.0, ()),)))
    with pytest.raises(ModelConfigError, match="a dense model"):
        plan_run(dense, SERVER, small_trace(sparse, [(2, 2)]), "all-resident")
