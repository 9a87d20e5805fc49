"""Policies beside a near-data device: what they decide, against plain loops, and which way they come out."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_array_equal
from strategies import NDP_SYSTEM, mixtral, models, plain_model, recording, small_trace, systems, traces

from perfmodel import oracle
from perfmodel.errors import PolicyError
from perfmodel.hardware import load_system
from perfmodel.model import MoEModel
from perfmodel.placement import gpu_footprint, gpu_room, wanted_gpu_experts
from perfmodel.policies import Executor, WorkClass, footprints, parse_policy
from perfmodel.policies.base import ClassTable, PlanInputs
from perfmodel.policies.costs import expert_costs
from perfmodel.run import Run, plan_run

MONDE_MACHINE = load_system("a100-cxl-ndp")


@st.composite
def texts(draw: st.DrawFn, model: MoEModel) -> str:
    """PIMoE or PMPD with every option."""
    if draw(st.booleans()):
        options: dict[str, Any] = {
            "gpu_experts": draw(st.integers(0, model.num_experts)),
            "channels": draw(st.integers(1, 5)),
            "moves": draw(st.sampled_from(["guarded", "published"])),
        }
    else:
        bits = sorted(draw(st.sets(st.sampled_from([1, 2, 3.5, 4, 8, 16, 32]), min_size=1)), reverse=True)
        starts = [0, *sorted(draw(st.sets(st.integers(1, 9), min_size=len(bits) - 1, max_size=len(bits) - 1)))]
        steps = "/".join(f"{width:g}@{start}" for width, start in zip(bits, starts, strict=True))
        return f"pmpd:schedule={steps},place={draw(st.sampled_from(['gpu', 'ndp']))}"
    return f"pimoe:{','.join(f'{key}={value}' for key, value in options.items())}"


@st.composite
def runs(draw: st.DrawFn) -> Run:
    model = draw(models())
    return plan_run(model, draw(systems()), draw(traces(model, prefill=True)), draw(texts(model)))


@given(runs())
def test_runs_equal_the_plain_loop(run: Run) -> None:
    assert oracle.largest_difference(run.price(), oracle.per_pick(run)) <= 1e-12


@given(runs())
def test_every_assigned_pick_is_executed_once(run: Run) -> None:
    skipped = np.array([work.executor == Executor.SKIP for work in run.plan.classes])[run.plan.picks]
    assert_array_equal(skipped, ~run.replay.assigned)
    executed = {work.executor for work in run.plan.classes}
    assert executed <= {Executor.GPU, Executor.FETCH, Executor.NDP, Executor.SKIP}
    assert run.plan.copies is None


@given(runs())
def test_bytes_over_the_link_are_those_of_the_copies(run: Run) -> None:
    bits = np.array([work.bits if work.executor == Executor.FETCH else 0.0 for work in run.plan.classes])
    copied = bits[run.plan.picks].sum() * run.model.expert_params / 8 / len(run.plan.picks)
    assert run.bytes_per_token()["link_weights"] == pytest.approx(copied, rel=1e-12, abs=0)


@given(runs())
def test_plans_keep_what_the_policy_says_and_are_reproducible(run: Run) -> None:
    inputs = PlanInputs(run.model, run.system, run.replay, None)
    kept = run.policy.residency(run.model, inputs.most_gpu_experts)
    plan = run.plan
    assert (plan.gpu_experts, plan.replica_bits) == (kept.gpu_experts, kept.replica_bits)
    assert plan.gpu_buffer_bytes in (0.0, kept.gpu_buffer_bytes)
    gpu, behind = footprints(inputs, plan)
    assert gpu.total <= run.system.gpu.memory_capacity_bytes
    assert run.system.ndp is not None
    assert behind.total <= run.system.ndp.capacity_bytes
    again = run.policy.plan(inputs)
    assert_array_equal(again.picks, plan.picks)
    assert again.classes == plan.classes


@settings(max_examples=30)
@given(st.data())
def test_with_room_for_all_they_are_all_resident(data: st.DataObject) -> None:
    model = data.draw(models())
    system, trace = data.draw(systems()), data.draw(traces(model, prefill=True))
    every = f"context-aware:gpu_experts={model.num_experts}"
    resident = plan_run(model, system, trace, every).price().tpot_mean_s
    for text in (f"pimoe:gpu_experts={model.num_experts}", "pmpd:schedule=32@0,place=gpu"):
        assert plan_run(model, system, trace, text).price().tpot_mean_s == pytest.approx(resident, rel=1e-12, abs=0)


@given(st.data())
def test_pimoe_moves_what_a_plain_loop_moves(data: st.DataObject) -> None:
    model = data.draw(models())
    hot_count, channels = data.draw(st.integers(0, model.num_experts)), data.draw(st.integers(1, 4))
    guarded = data.draw(st.booleans())
    text = f"pimoe:gpu_experts={hot_count},channels={channels},moves={'guarded' if guarded else 'published'}"
    run = plan_run(model, data.draw(systems()), data.draw(traces(model, prefill=True)), text)
    trace, plan = run.replay.trace, run.plan
    cost = expert_costs(model, run.system, 1, float(model.expert_bits))
    for s in range(trace.num_sequences):
        prompt, steps = trace.topk_ids[trace.prefill_slice(s)], trace.topk_ids[trace.decode_slice(s)]
        for layer in range(trace.num_layers):
            used = [int((prompt[:, layer] == expert).sum()) for expert in range(model.num_experts)]
            hot = np.argsort(-np.array(used), kind="stable")[:hot_count].tolist()
            for step, picked in enumerate(steps[:, layer].tolist()):
                where = _moved(picked, hot, channels, guarded=guarded, cost=cost, experts=model.num_experts)
                found = [plan.classes[c].executor for c in plan.picks[plan.offsets[s] + step, layer]]
                assert found == [where.get(expert, Executor.SKIP) for expert in picked]


def _moved(
    picked: list[int], hot: list[int], channels: int, *, guarded: bool, cost: Any, experts: int
) -> dict[int, Executor]:
    """Where the picked experts of one layer run, one token each."""
    picked = sorted(expert for expert in picked if expert < experts)
    where = {expert: Executor.GPU if expert in hot else Executor.NDP for expert in picked}
    gpu = sum(float(cost.gpu_s[0]) for expert in picked if expert in hot)
    link = 0.0
    while True:
        queues = [[e for e in picked if where[e] == Executor.NDP and e % channels == c] for c in range(channels)]
        busy = [sum(float(cost.ndp_s[0]) * channels for _ in queue) for queue in queues]
        longest = busy.index(max(busy))
        if busy[longest] <= gpu:
            return where
        after = max(gpu, link + cost.copy_s) + float(cost.gpu_s[0])
        if guarded and after > busy[longest]:
            return where
        where[queues[longest][0]] = Executor.FETCH
        gpu, link = after, link + cost.copy_s


def test_pmpd_takes_the_width_of_the_step() -> None:
    model = plain_model()
    trace = small_trace(model, [(3, 7), (2, 4)], seed=1)
    run = plan_run(model, NDP_SYSTEM, trace, "pmpd:schedule=4@0/3@2/2@5,place=ndp")
    expected = [4.0, 4.0, 3.0, 3.0, 3.0, 2.0, 2.0, 4.0, 4.0, 3.0, 3.0]
    for step, bits in enumerate(expected):
        assert {run.plan.classes[c] for c in run.plan.picks[step].ravel()} == {WorkClass(Executor.NDP, bits, True)}
    assert run.plan.replica_bits == (2.0, 3.0, 4.0)
    assert run.plan.prefill_class is not None
    assert {run.plan.classes[c].bits for c in run.plan.prefill_class.ravel()} == {4.0}


def test_pmpd_gets_faster_and_worse_as_the_answer_grows() -> None:
    trace = recording()
    narrow, wide = (
        plan_run(mixtral(), NDP_SYSTEM, trace, f"pmpd:schedule={schedule}") for schedule in ("4@0/2@32", "4@0")
    )
    assert narrow.price().tpot_mean_s < wide.price().tpot_mean_s
    assert narrow.quality.loss > wide.quality.loss > 0.0
    assert 2.0 < narrow.quality.mean_bits < wide.quality.mean_bits == 4.0


@pytest.mark.parametrize(
    "schedule", ["", "4", "4@1", "4@0/", "3@0/4@8", "4@0/3@0", "4@8/3@0", "4@0/4@3", "0@0", "33@0", "4@0/3@-1", "x@0"]
)
def test_schedules_are_refused_in_one_line(schedule: str) -> None:
    with pytest.raises(PolicyError, match="option schedule: found") as error:
        parse_policy(f"pmpd:schedule={schedule}")
    assert "\n" not in str(error.value)


def test_what_does_not_apply_is_refused() -> None:
    model = plain_model()
    trace = small_trace(model, [(3, 4)])
    without = load_system("rtx4090-pcie4-cpu")
    for text in ("pimoe", "pmpd:place=ndp"):
        with pytest.raises(PolicyError, match="near-data device"):
            plan_run(model, without, trace, text)
    with pytest.raises(PolicyError, match="holds no prefill"):
        plan_run(model, NDP_SYSTEM, small_trace(model, [(3, 4), (0, 4)]), "pimoe")
    with pytest.raises(PolicyError, match="allowed 0 to 4"):
        plan_run(model, NDP_SYSTEM, trace, "pimoe:gpu_experts=5")
    with pytest.raises(PolicyError, match="allowed 1 to 1024"):
        parse_policy("pimoe:channels=0")


def test_guarded_moves_are_never_worse_than_none() -> None:
    """With slow copies the published rule moves too much; guarded it is no slower than hot experts by counts alone."""
    trace = recording()
    fixed, guarded, published = (
        plan_run(mixtral(), NDP_SYSTEM, trace, text).price().tpot_mean_s
        for text in ("context-aware:selector=full,alpha=1", "pimoe", "pimoe:moves=published")
    )
    assert guarded <= fixed * (1 + 1e-12)
    assert published > guarded


def test_monde_is_no_slower_than_moving_parameters() -> None:
    """Published means over moving parameters: 3.1 and 1.1 times (encoder, decoder), 6.7 and 1.9 on a second model."""
    trace = recording()
    moving = plan_run(mixtral(), MONDE_MACHINE, trace, "expert-cache:slots=0").price()
    plain, balanced = (
        plan_run(mixtral(), MONDE_MACHINE, trace, f"monde:{text}").price()
        for text in ("reading=all-ndp,prefill=ndp", "reading=balance,prefill=balanced")
    )
    assert moving.ttft_s is not None
    assert plain.ttft_s is not None
    assert balanced.ttft_s is not None
    assert balanced.tpot_mean_s <= plain.tpot_mean_s < moving.tpot_mean_s
    assert balanced.ttft_s <= plain.ttft_s < moving.ttft_s


@given(st.data())
def test_pimoe_by_default_keeps_what_fits_beside_a_copy(data: st.DataObject) -> None:
    model = data.draw(models())
    layers = len(model.moe_layers)
    each = model.expert_bytes(float(model.expert_bits))
    room = data.draw(st.integers(1, layers * model.num_experts)) + data.draw(st.sampled_from([0.0, 0.5]))
    fixed = gpu_footprint(model, 0, 0).total
    kept = parse_policy("pimoe").residency(model, gpu_room(model, fixed + room * each, 0))
    needed = kept.gpu_experts * layers * each + kept.gpu_buffer_bytes
    assert needed <= room * each * (1 + 1e-12)
    every = room >= layers * model.num_experts
    most = max(n for n in range(model.num_experts + 1) if every or n * layers + 1 <= room)
    assert kept.gpu_experts == wanted_gpu_experts(model, most)


def test_pimoe_is_not_refused_where_fewer_experts_fit() -> None:
    model = plain_model(num_experts=8)
    trace = small_trace(model, [(4, 6)])
    # Three experts in every one of three layers would fill the memory, and leave no room for one in copy.
    each, fixed = model.expert_bytes(16), gpu_footprint(model, 0, 10).total
    gpu = NDP_SYSTEM.gpu.model_copy(update={"memory_capacity_gb": (fixed + 9.5 * each) / 1e9})
    system = NDP_SYSTEM.model_copy(update={"gpu": gpu})
    assert plan_run(model, system, trace, "pimoe").plan.gpu_experts == 2
    assert plan_run(model, system, trace, "pimoe:gpu_experts=2").plan.gpu_experts == 2


@pytest.mark.parametrize(("steps", "refused"), [(254, False), (255, True), (300, True)])
def test_a_schedule_has_no_more_widths_than_a_plan_can_tell_apart(steps: int, refused: bool) -> None:
    schedule = "/".join(f"{16 - 0.01 * i:.2f}@{i}" for i in range(steps))
    if refused:
        with pytest.raises(PolicyError, match=rf"option schedule: found {steps} steps, allowed at most 254 steps$"):
            parse_policy(f"pmpd:schedule={schedule}")
        return
    model = plain_model(num_experts=4, bits=16.0)
    run = plan_run(model, NDP_SYSTEM, small_trace(model, [(2, 260)], unassigned=0.3), f"pmpd:schedule={schedule}")
    assert len(run.plan.classes) == steps + 1
    assert oracle.largest_difference(run.price(), oracle.per_pick(run)) <= 1e-12


def test_a_plan_has_at_most_255_classes() -> None:
    table = ClassTable()
    for i in range(255):
        assert table.number(WorkClass(Executor.GPU, 1 + i)) == i
    assert table.number(WorkClass(Executor.GPU, 1)) == 0
    with pytest.raises(PolicyError, match=r"^found more than 255 kinds of work in a plan, allowed 255$"):
        table.number(WorkClass(Executor.NDP, 1))
