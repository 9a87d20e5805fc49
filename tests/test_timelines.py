"""Layers on up to four resources: the kernels against the plain loop, and against tasks scheduled one by one."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import NDP_SYSTEM, models, plain_model, small_trace, spread_floats, systems, traces
from timelines import Timeline

from perfmodel import oracle
from perfmodel.errors import PlacementError
from perfmodel.evaluation import PARTS
from perfmodel.hardware import System, load_system
from perfmodel.point import hardware_point
from perfmodel.policies import POLICIES, Executor, When, WorkClass
from perfmodel.policies.costs import expert_costs
from perfmodel.run import Run, plan_run

HOST_SYSTEM = load_system("h100-pcie5-cpu")
DESKTOP = load_system("rtx4090-pcie4-cpu")
WHEN = {Executor.FETCH: (When.NOW, When.AHEAD), Executor.COPY: tuple(When), Executor.CPU: (When.NOW, When.BEHIND)}


@st.composite
def machines(draw: st.DrawFn) -> System:
    """A system with every part."""
    near = draw(systems())
    system = near.model_copy(update={"cpu": HOST_SYSTEM.cpu, "host": HOST_SYSTEM.host})
    packing = {"cpu.pack_gb_per_s": draw(spread_floats(1.0, 2000.0))} if draw(st.booleans()) else {}
    return system.with_values(
        {
            "cpu.dram_bandwidth_gb_per_s": draw(spread_floats(1.0, 2000.0)),
            **packing,
            "host.round_trip_us": draw(st.sampled_from([0.0, 20.0])),
            "host.copy_overhead_us": draw(st.sampled_from([0.0, 5.0])),
        }
    )


@st.composite
def any_runs(draw: st.DrawFn) -> Run:
    """A run whose plan holds every kind of work anywhere."""
    model = draw(models())
    run = plan_run(model, NDP_SYSTEM, draw(traces(model)), "monde")
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
@given(any_runs())
def test_every_schedule_equals_the_plain_loop(run: Run) -> None:
    assert oracle.largest_difference(run.price(), oracle.per_pick(run)) <= 1e-12


@settings(max_examples=40)
@given(any_runs())
def test_parts_add_up_and_nobody_is_busier_than_the_token(run: Run) -> None:
    evaluation = run.price()
    assert sum(evaluation.breakdown_s.values()) == pytest.approx(evaluation.tpot_mean_s, rel=1e-12, abs=0)
    times = run.token_times(hardware_point(run.system))
    assert np.mean(times) == pytest.approx(evaluation.tpot_mean_s, rel=1e-12, abs=0)
    # Transfers of the near-data device run beside copies, so the link alone may work longer than the step.
    near = any(work.executor == Executor.NDP for work in run.plan.classes)
    for resource, busy in evaluation.busy_s.items():
        assert busy <= evaluation.tpot_mean_s * (1 + 1e-12) or (near and resource == "link")


def test_more_classes_than_a_key_holds_are_told_apart() -> None:
    model = plain_model(num_layers=4, num_experts=30, top_k=12)
    run = plan_run(model, NDP_SYSTEM, small_trace(model, [(3, 40)], seed=1), "monde")
    rng = np.random.default_rng(0)
    for count in (8, 20):  # 13 ** 8 is too large for a table, 13 ** 20 for 64 bits
        classes = tuple(WorkClass(Executor.NDP, 1.0 + n / 2) for n in range(count))
        plan = dataclasses.replace(
            run.plan, classes=classes, picks=rng.integers(0, count, run.plan.picks.shape).astype(np.uint8)
        )
        mixed = dataclasses.replace(run, plan=plan)
        assert oracle.largest_difference(mixed.price(), oracle.per_pick(mixed)) <= 1e-12


def planned(system: System, layers: list[list[WorkClass]], **changes: object) -> Run:
    """One decode step whose layers hold the given work."""
    width = max(map(len, layers))
    model = plain_model(num_layers=len(layers), num_experts=max(width, 2) + 1, top_k=width)
    run = plan_run(model, NDP_SYSTEM, small_trace(model, [(2, 1)], seed=3), "monde")
    nothing = WorkClass(Executor.SKIP, 16.0)
    classes = [*dict.fromkeys([*(work for layer in layers for work in layer), nothing])]
    rows = [
        [classes.index(work) for work in layer] + [classes.index(nothing)] * (width - len(layer)) for layer in layers
    ]
    plan = dataclasses.replace(run.plan, classes=tuple(classes), picks=np.array([rows], np.uint8), **changes)
    return dataclasses.replace(run, system=system, plan=plan)


def experts_take(run: Run) -> float:
    """What the experts add to the token [s]."""
    parts = run.price().breakdown_s
    return sum(parts[part] for part in ("link", "experts_gpu", "ndp", "cpu"))


def times(run: Run, system: System, bits: float) -> tuple[float, float, float]:
    """Computing on the GPU, a copy, and computing on the CPU [s]."""
    costs = expert_costs(run.model, system, 1, bits)
    return float(costs.gpu_s[0]), costs.copy_s, float(costs.cpu_s[0])


@settings(max_examples=60)
@given(machines(), st.integers(0, 3), st.lists(st.sampled_from([2.0, 4.0, 16.0]), max_size=5))
def test_pipelined_copies_equal_a_schedule_of_their_tasks(system: System, residents: int, copied: list[float]) -> None:
    bits = sorted(copied)
    layer = [WorkClass(Executor.GPU, 16.0)] * residents + [WorkClass(Executor.FETCH, width) for width in bits]
    run = planned(system, [layer or [WorkClass(Executor.SKIP, 16.0)]], fetch="pipelined")
    timeline = Timeline()
    for _ in range(residents):
        timeline.task("gpu", times(run, system, 16.0)[0])
    for width in bits:
        gpu_s, copy_s, _ = times(run, system, width)
        timeline.task("gpu", gpu_s, after=[timeline.task("link", copy_s)])
    assert experts_take(run) == pytest.approx(timeline.makespan if layer else 0.0, rel=1e-12, abs=0)


@settings(max_examples=150)
@given(machines(), st.integers(0, 3), st.integers(0, 3), st.integers(0, 2), st.integers(0, 2))
def test_deferred_experts_equal_a_schedule_of_their_tasks(
    system: System, here: int, now: int, deferred: int, later: int
) -> None:
    layers = [
        [WorkClass(Executor.GPU, 16.0)] * here
        + [WorkClass(Executor.CPU, 16.0)] * now
        + [WorkClass(Executor.CPU, 16.0, when=When.BEHIND)] * deferred,
        [WorkClass(Executor.GPU, 16.0)] * here + [WorkClass(Executor.CPU, 16.0)] * later,
    ]
    run = planned(system, [layer or [WorkClass(Executor.SKIP, 16.0)] for layer in layers])
    gpu_s, _, cpu_s = times(run, system, 16.0)
    evaluation = run.price()
    crossings = evaluation.busy_s["link"]
    attention = evaluation.breakdown_s["attention"] / run.model.num_layers
    timeline = Timeline()
    first = [timeline.task("gpu", gpu_s) for _ in range(here)] + [timeline.task("cpu", cpu_s) for _ in range(now)]
    for _ in range(deferred):
        timeline.task("cpu", cpu_s)
    between = timeline.task("gpu", attention, after=first)
    for _ in range(here):
        timeline.task("gpu", gpu_s, after=[between])
    for _ in range(later):
        timeline.task("cpu", cpu_s, after=[between])
    # The deferred work of the first layer ends before the second layer does, as its result is added there.
    assert experts_take(run) - crossings == pytest.approx(timeline.makespan - attention, rel=1e-9, abs=0)


#: With more experts on the CPU, and more work behind, than some rules have by themselves.
SPELLED = (
    "daop:gpu_experts=3", "daop:gpu_experts=5,accuracy=1", "ktransformers:deferral=1", "hybrimoe:admit=all,slots=3",
    "expert-cache:slots=3,misses=cpu",
)  # fmt: skip


@pytest.mark.parametrize("name", [*POLICIES, *SPELLED])
def test_no_step_is_shorter_than_its_work(name: str) -> None:
    model = plain_model(num_layers=6, num_experts=8, hidden_size=1024, expert_size=3584)
    whole, near = load_system("h100-pcie5-cpu"), load_system("h100-cxl-ndp")
    # Half of the experts fit, and CPU, GPU and near-data device are there for those rules that need one.
    system = whole.model_copy(update={"ndp": near.ndp}).with_values({"gpu.memory_capacity_gb": 0.6})
    trace = small_trace(model, [(4, 6)] * 3, seed=7)
    for batch in (1, 6, 16):
        try:
            run = plan_run(model, system, trace, name, batch=batch)
        except PlacementError:
            run = plan_run(model, system.with_values({"gpu.memory_capacity_gb": 2.0}), trace, name, batch=batch)
        for engine in (None, "ideal", "llama-cpp-cuda"):
            machine = run.system if engine is None else run.system.with_engine(engine)
            evaluation = run.price(machine)
            assert max(evaluation.busy_s.values()) <= evaluation.tpot_mean_s * (1 + 1e-12)
            if engine == "ideal":
                assert evaluation.bandwidth_floor_s <= evaluation.tpot_mean_s * (1 + 1e-12)


@pytest.mark.parametrize("executor", [Executor.CPU, Executor.COPY])
def test_what_every_layer_leaves_behind_is_hidden_once(executor: Executor) -> None:
    own = WorkClass(Executor.CPU if executor == Executor.CPU else Executor.FETCH, 16.0)
    # What is late of the first layer fills the second one, which then hides nothing of what it leaves itself.
    system = DESKTOP.with_values({"cpu.dram_bandwidth_gb_per_s": 0.1, "link.bandwidth_gb_per_s": 0.1})
    run = planned(system, [[WorkClass(executor, 16.0, when=When.BEHIND)] * 4 + [own]] * 6)
    evaluation = run.price()
    resource = "cpu" if executor == Executor.CPU else "link"
    assert evaluation.tpot_mean_s == pytest.approx(evaluation.busy_s[resource], rel=1e-12, abs=0)
    around = sum(evaluation.breakdown_s[part] for part in PARTS if part != resource)
    assert evaluation.breakdown_s[resource] == pytest.approx(evaluation.tpot_mean_s - around, rel=1e-12, abs=0)
    assert run.token_times(hardware_point(system))[0] == pytest.approx(evaluation.tpot_mean_s, rel=1e-12, abs=0)
