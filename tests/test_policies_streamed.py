"""Systems that page all experts through the GPU, and what policies keep in host memory."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import models, plain_model, small_trace, traces

from perfmodel import oracle
from perfmodel.errors import PerfModelError, PlacementError
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


# --- what is behind the link ---


def test_policies_of_one_width_keep_no_full_precision_behind_the_link() -> None:
    model = plain_model(num_layers=4, num_experts=8)
    trace = small_trace(model, [(3, 4), (2, 3)])
    whole = 4 * 8 * model.expert_bytes(16) * SYSTEM.cpu.expert_copies
    names = ("expert-cache", "moe-offloading", "fiddler", "ktransformers", "hybrimoe", "daop", "llama-cpp", "all-cpu")
    for name in names:
        behind = plan_run(model, SYSTEM, trace, f"{name}:bits=4").memory()["host"]
        assert behind["experts"] + behind["replicas"] == pytest.approx(whole / 4), name
    for text in ("all-resident:bits=4", "pmpd"):
        behind = plan_run(model, SYSTEM, trace, text).memory()["host"]
        assert behind["experts"] + behind["replicas"] == 0, text
    behind = plan_run(model, SYSTEM, trace, "hobbit:low_bits=4").memory()["host"]
    assert behind["experts"] + behind["replicas"] == pytest.approx(whole * 1.25)


def test_what_must_be_pinned_is_what_is_stored() -> None:
    model = plain_model(num_layers=4, num_experts=8)
    trace = small_trace(model, [(3, 4), (2, 3)])
    stored = {
        "fluxmoe": 16,
        "moe-lightning": 16,
        "promoe:slots=1": 16,
        "moe-offloading:slots=2": 4,
        "hybrimoe:bits=4,slots=2,admit=all": 4,
        "daop:bits=4,gpu_experts=4,prefill=fetch": 4,
        "expert-cache:slots=2,misses=cpu,bits=8": 8,
        "hobbit:low_bits=4": 20,
    }
    for text, bits in stored.items():
        needed = 4 * 8 * model.expert_bytes(16) * bits / 16 / 1e9
        for share, fits in ((1.001, True), (0.999, False)):
            host = SYSTEM.host.model_copy(update={"pinned_memory_gb": needed * share})
            system = SYSTEM.model_copy(update={"host": host})
            if fits:
                plan_run(model, system, trace, text)
            else:
                with pytest.raises(PlacementError, match="pinned"):
                    plan_run(model, system, trace, text)


@given(st.data())
def test_a_warm_cache_holds_only_what_was_copied(data: st.DataObject) -> None:
    model = data.draw(models(max_experts=6))
    trace = data.draw(traces(model, prefill=True))
    mode = data.draw(st.sampled_from(["fetch", "cpu", "each"]))
    text = f"expert-cache:slots={data.draw(st.integers(0, model.num_experts))},prefill={mode}"
    run = plan_run(model, SYSTEM, trace, f"{text},warm=prompt")
    plan = run.plan
    assert plan.prefill_class is not None
    assert plan.prefill_tokens is not None
    for s in range(trace.num_sequences):
        first = int(plan.offsets[s])
        for layer in range(plan.picks.shape[1]):
            for expert, number in zip(run.replay.decode_ids[first, layer], plan.picks[first, layer], strict=True):
                if plan.classes[number].executor == Executor.GPU:
                    assert plan.prefill_tokens[s, layer, expert] > 0
                    assert plan.classes[plan.prefill_class[s, layer, expert]].executor == Executor.FETCH
    filled = plan_run(model, SYSTEM, run.replay, f"{text},warm=filled").plan
    copied = sum(
        plan.classes[number].executor == Executor.FETCH and tokens > 0
        for number, tokens in zip(plan.prefill_class.ravel(), plan.prefill_tokens.ravel(), strict=True)
    )
    slots = int(filled.gpu_experts) * plan.picks.shape[1] * trace.num_sequences
    assert max(0, slots - copied) <= filled.migrated_experts.sum() <= slots
    assert plan.migrated_experts.sum() == 0
