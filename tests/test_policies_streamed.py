"""Systems that page all experts through the GPU."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import models, plain_model, small_trace, traces

from perfmodel import oracle
from perfmodel.errors import PerfModelError
from perfmodel.hardware import load_system
from perfmodel.policies import Executor, When
from perfmodel.run import Run, plan_run

SYSTEM = load_system("h100-pcie5-cpu")
NAMES = ("moe-lightning", "moe-lens", "fluxmoe")


@st.composite
def runs(draw: st.DrawFn) -> Run:
    """A paging system on a small model; tiny memory leaves some experts out."""
    model = draw(models())
    text = draw(st.sampled_from(NAMES))
    kept = draw(st.one_of(st.none(), st.integers(0, model.num_experts)))
    return plan_run(model, SYSTEM, draw(traces(model)), text if kept is None else f"{text}:gpu_experts={kept}")


@settings(max_examples=60)
@given(runs())
def test_every_step_copies_every_expert_that_is_not_resident(run: Run) -> None:
    plan, model = run.plan, run.model
    kept, full = int(plan.gpu_experts), float(model.expert_bits)
    for t, layer in np.ndindex(plan.picks.shape[:2]):
        picks = [plan.classes[number] for number in plan.picks[t, layer]]
        copies = [] if plan.copies is None else [plan.classes[number] for number in plan.copies[t, layer]]
        moved = 0.0
        for work, expert in zip(picks, run.replay.decode_ids[t, layer].tolist(), strict=True):
            if expert == model.num_experts:
                assert work.executor == Executor.SKIP
            elif expert < kept:
                assert work.executor == Executor.GPU
            else:
                assert (work.executor, work.when) == (Executor.FETCH, When.AHEAD)
                moved += work.bits
        for work in copies:
            if work.executor != Executor.SKIP:
                assert (work.executor, work.when) == (Executor.COPY, When.AHEAD)
                moved += work.bits
        assert moved == pytest.approx((model.num_experts - kept) * full)
    every = (model.num_experts - kept) * len(model.moe_layers) * model.expert_bytes(full)
    assert run.bytes_per_token()["link_weights"] == pytest.approx(every)
    assert oracle.largest_difference(run.price(), oracle.per_pick(run)) <= 1e-12


@given(runs())
def test_nothing_is_copied_where_everything_fits(run: Run) -> None:
    policy = f"{run.policy.name}:gpu_experts={run.model.num_experts}"
    whole = plan_run(run.model, SYSTEM, run.replay, policy).price()
    assert whole.bytes_per_token["link_weights"] == 0
    assert whole.hit_rate.own == pytest.approx(1.0) or not run.replay.assigned.any()
    assert whole.tpot_mean_s <= run.price().tpot_mean_s * (1 + 1e-12)


def test_residents_and_two_layers_of_the_others_fill_the_memory() -> None:
    model = plain_model(num_layers=8, num_experts=12)
    trace = small_trace(model, [(3, 4)])
    whole = plan_run(model, SYSTEM, trace, "fluxmoe:gpu_experts=12")
    one = 8 * model.expert_bytes(16)
    for most in range(13):
        room = whole.memory()["gpu"]["total"] - (12 - most) * one
        system = SYSTEM.model_copy(update={"gpu": SYSTEM.gpu.model_copy(update={"memory_capacity_gb": room / 1e9})})
        if most < 3:  # two layers of twelve experts do not fit
            with pytest.raises(PerfModelError, match="does not fit"):
                plan_run(model, system, trace, "moe-lightning:gpu_experts=1")
            continue
        lightning = plan_run(model, system, trace, "fluxmoe")
        used = lightning.memory()["gpu"]["total"]
        assert used <= room * (1 + 1e-12)
        assert lightning.plan.gpu_experts <= most


def test_attention_and_its_cache_are_on_the_cpu() -> None:
    model = plain_model()
    trace = small_trace(model, [(3, 4)])
    lightning, lens, flux = (plan_run(model, SYSTEM, trace, name).price() for name in NAMES)
    assert lightning.memory_bytes["gpu"]["kv_cache"] == 0 < flux.memory_bytes["gpu"]["kv_cache"]
    assert lightning.busy_s["cpu"] == pytest.approx(lightning.breakdown_s["attention"])
    assert lightning.busy_s["cpu"] > 0 == flux.busy_s["cpu"]
    assert lightning.bytes_per_token["link_activations"] > 0 == flux.bytes_per_token["link_activations"]
    assert lens.tpot_mean_s == lightning.tpot_mean_s
    with pytest.raises(PerfModelError, match="has none"):
        plan_run(model, load_system("a5000-pcie4"), trace, "moe-lightning")


def test_fluxmoe_keeps_the_fewest_that_load_as_fast_as_they_compute() -> None:
    model = plain_model(num_layers=6, num_experts=6)
    trace = small_trace(model, [(3, 4)])
    kept = []
    for rate in (0.01, 1.0, 5000.0):
        system = SYSTEM.with_values({"link.bandwidth_gb_per_s": rate, "link.latency_us": 0, "host.copy_overhead_us": 0})
        kept.append(plan_run(model, system, trace, "fluxmoe").plan.gpu_experts)
    assert kept == sorted(kept, reverse=True)
    assert kept[0] == 6
    assert kept[-1] == 0
