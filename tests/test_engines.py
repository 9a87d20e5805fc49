"""Inference engines: their specs, what they replace, and every price under one against the plain loop."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from engines import engine, engines
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_array_equal
from strategies import mixtral, plain_model, recording, small_trace
from test_timelines import WHEN, any_runs

from perfmodel import oracle
from perfmodel.errors import PerfModelError, SpecError
from perfmodel.hardware import EngineSpec, System, list_specs, load_spec, load_system
from perfmodel.hardware.engine import REPLACED
from perfmodel.point import Points, hardware_point, hardware_points
from perfmodel.policies import Executor, When
from perfmodel.run import Run, plan_run
from perfmodel.scenario.scenario import Scenario

MACHINE = load_system("h100-pcie5-cpu")
DESKTOP = load_system("rtx4090-pcie4-cpu")
BUNDLED = sorted(one.name for one in list_specs() if one.kind == "engine")

COSTS = ("kernel_us", "memory_n_half_kb", "all_reduce_us", "step_us", "batched_layer_us")


def time_of(system: System, run: Run) -> float:
    """Mean decode step on a system [s]."""
    return run.price(system).tpot_mean_s


# ---- specs ----


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"memory_efficiency": 1.1}, "memory_efficiency"),
        ({"memory_efficiency": 0.0}, "memory_efficiency"),
        ({"kernel_us": -1.0}, "kernel_us"),
        ({"kernel_us": float("nan")}, "kernel_us"),
        ({"launch": "eager"}, "launch"),
        ({"experts": "several"}, "experts"),
        ({"copies": "staged"}, "copies"),
        ({"copies": "pageable"}, "copies is 'pageable', which needs pageable_gb_per_s"),
        ({"batched_from_tokens": 2}, "batched_from_tokens and batched_layer_us go together; give both or neither"),
        ({"batched_layer_us": 2.0}, "batched_from_tokens and batched_layer_us go together; give both or neither"),
        ({"expert_tile_tokens": 0}, "expert_tile_tokens"),
        ({"cpu_units": "tensor"}, "cpu_units"),
        ({"nvlink_us": 1.0}, "nvlink_us"),
        ({"micro_batch_tokens": 1.5}, "a whole number 1 to"),
        ({"batched_from_tokens": 1.5, "batched_layer_us": 2.0}, "a whole number 1 to"),
    ],
)
def test_bad_engines_are_refused_in_one_line(changes, words: str) -> None:
    with pytest.raises(SpecError) as caught:
        engine(**changes)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", BUNDLED)
def test_bundled_engines_have_a_source_for_every_number(name: str) -> None:
    spec = load_spec(name)
    assert isinstance(spec, EngineSpec)
    given = spec.numeric_keys()
    assert {constant.key for constant in spec.constants()} == set(given)
    assert not [key for key in given if spec.source_of(key).citation.startswith("default of the spec format")]


def test_whole_numbers_of_tokens_may_be_written_as_floats() -> None:
    spec = engine(batched_from_tokens=2.0, batched_layer_us=1.0, micro_batch_tokens=512.0)
    assert spec == engine(batched_from_tokens=2, batched_layer_us=1.0, micro_batch_tokens=512)


def test_an_engine_is_a_part_of_a_system_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    head = 'kind = "system"\nname = "mine"\ndescription = "mine"\nbase = "h100-pcie5-cpu"\nengine = "vllm"\n'
    file.write_text(head)
    system = load_system(file)
    assert system.engine == load_spec("vllm")
    assert system.content_hash() == MACHINE.with_engine("vllm").content_hash()
    source = 'source = "assumed", citation = "a test"'
    file.write_text(
        f'{head}[overrides]\n"engine.kernel_us" = 9.5\n[override_sources]\n"engine.kernel_us" = {{ {source} }}\n'
    )
    assert load_system(file).get("engine.kernel_us") == 9.5
    file.write_text(
        f'{head}[overrides]\n"gpu.memory_efficiency" = 0.5\n[override_sources]\n'
        f'"gpu.memory_efficiency" = {{ {source} }}\n'
    )
    with pytest.raises(SpecError, match=r"engine vllm replaces gpu\.memory_efficiency; set engine\.memory_efficiency"):
        load_system(file)


def test_an_engine_is_given_by_name_by_file_or_as_a_spec(tmp_path: Path) -> None:
    by_name = MACHINE.with_engine("fiddler")
    path = next(one.path for one in list_specs() if one.name == "fiddler")
    assert MACHINE.with_engine(path) == MACHINE.with_engine(load_spec("fiddler")) == by_name  # type: ignore[arg-type]
    assert by_name.with_engine(None) == by_name.with_engine("none") == MACHINE
    with pytest.raises(SpecError, match="vlm"):
        MACHINE.with_engine("vlm")
    with pytest.raises(SpecError, match="'h100-sxm' is a gpu spec; an engine spec is needed here"):
        MACHINE.with_engine("h100-sxm")
    with pytest.raises(SpecError, match="an engine spec is 7; allowed"):
        MACHINE.with_engine(7)  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="'vllm' is an engine spec; a system spec is needed here"):
        load_system("vllm")


@pytest.mark.parametrize("key", sorted(REPLACED))
def test_what_an_engine_replaces_is_refused_with_the_key_that_counts(key: str) -> None:
    counts = REPLACED[key]
    whole = engine(cpu_efficiency=0.5, cpu_compute_efficiency=0.5, round_trip_us=1.0, copy_overhead_us=1.0)
    system = MACHINE.with_engine(whole)
    assert system.replaced_by(key) == counts
    with pytest.raises(SpecError) as caught:
        system.with_values({key: 0.5})
    assert f"engine toy replaces {key}; set {counts} instead" in str(caught.value)
    assert key not in {constant.key for constant in system.constants()}
    scenario = Scenario.of(mixtral(), system, recording(), "all-cpu")
    assert key not in {axis.name for axis in scenario.axes()}
    with pytest.raises(PerfModelError, match=f"engine toy replaces it; vary {counts} instead"):
        scenario.axis(key)
    assert scenario.axis(counts).name == counts
    # What the engine does not say is left to the system, and then that counts.
    if getattr(engine(), counts.partition(".")[2]) is None:
        assert MACHINE.with_engine(engine()).replaced_by(key) is None
        assert MACHINE.with_engine(engine()).with_values({key: 0.25}).get(key) == 0.25


def test_the_datasheet_column_has_no_engine() -> None:
    assert MACHINE.with_engine("vllm").at_peak() == MACHINE.at_peak()


# ---- points ----


@settings(max_examples=60)
@given(engines(), st.data())
def test_points_of_many_engines_equal_the_points_of_each(spec: EngineSpec, data: st.DataObject) -> None:
    several = {
        "gpu.devices": data.draw(st.integers(1, 8)),
        "gpu.split": data.draw(st.sampled_from(["tensor", "layer"])),
    }
    system = MACHINE.with_engine(spec).with_values(several)
    keys = [key for key in system.numeric_keys() if key.startswith("engine.")]
    chosen = [*data.draw(st.lists(st.sampled_from(keys), min_size=1, max_size=6, unique=True)), "gpu.devices"]
    values = {}
    for key in chosen:
        limits = system.limits_of(key)
        low, high = max(limits.low, system.get(key) / 2), min(limits.high, max(system.get(key) * 2, 1.0))
        one = st.integers(1, 8) if limits.whole else st.floats(low, max(low, high))
        values[key] = np.array(data.draw(st.lists(one, min_size=3, max_size=3)), dtype=np.float64)
    each = [hardware_point(system.with_values({key: column[n] for key, column in values.items()})) for n in range(3)]
    assert_array_equal(hardware_points(system, values).dense(), np.stack(each))


def test_every_number_of_an_engine_can_be_swept() -> None:
    whole = engine(
        memory_n_half_kb=100.0, kernel_us=2.0, attention_kernels=3, recurrent_kernels=4, expert_kernels=5,
        dense_kernels=6, step_kernels=7, step_us=8.0, sequence_us=9.0, expert_efficiency=0.5, expert_tile_tokens=8,
        batched_from_tokens=2, batched_layer_us=3.0, all_reduce_us=4.0, peer_all_reduce_us=5.0, copies="pageable",
        pageable_gb_per_s=6.0, copy_overhead_us=7.0, round_trip_us=8.0, cpu_efficiency=0.5, cpu_compute_efficiency=0.5,
        prefill_cpu_below_tokens=9, micro_batch_tokens=512,
    )  # fmt: skip
    system = MACHINE.with_engine(whole).with_values({"gpu.devices": 2})
    keys = [key for key in system.numeric_keys() if key.startswith("engine.")]
    assert len(keys) == sum(1 for name in whole.numeric_keys())
    for key in keys:
        low = system.limits_of(key).low
        found = hardware_points(system, {key: np.array([system.get(key), max(low, system.get(key) / 2)])}).dense()
        assert_array_equal(found[0], hardware_point(system))
        assert_array_equal(found[1], hardware_point(system.with_values({key: max(low, system.get(key) / 2)})))


# ---- prices ----


@st.composite
def engine_runs(draw: st.DrawFn) -> Run:
    """Any plan on any machine with one or several GPUs under any engine."""
    run = draw(any_runs())
    values: dict[str, float | str] = {
        "gpu.devices": draw(st.integers(1, 8)),
        "gpu.split": draw(st.sampled_from(["tensor", "layer"])),
    }
    if draw(st.booleans()):
        values["gpu.peer_bandwidth_gb_per_s"] = draw(st.sampled_from([5.0, 450.0]))
    system = run.system.with_values(values).with_engine(draw(engines()))
    return dataclasses.replace(run, system=system, micro_batch=draw(st.sampled_from([None, None, 1, 3])))


@settings(max_examples=120)
@given(engine_runs())
def test_every_price_under_an_engine_equals_the_plain_loop(run: Run) -> None:
    assert oracle.largest_difference(run.price(), oracle.per_pick(run)) <= 1e-12


@settings(max_examples=30)
@given(engine_runs())
def test_parts_under_an_engine_add_up(run: Run) -> None:
    evaluation = run.price()
    assert sum(evaluation.breakdown_s.values()) == pytest.approx(evaluation.tpot_mean_s, rel=1e-12, abs=0)


def hidden_once(run: Run) -> Run:
    """The run, with its sides at the same time where attention may hide work on the link and on the CPU at once.

    In turn, what either lacks of its cover is waited for: longer attention could hide twice what it takes.
    """
    late = {
        work.executor is Executor.CPU
        for work in run.plan.classes
        if work.when is not When.NOW and work.executor in WHEN
    }
    return run if len(late) < 2 else dataclasses.replace(run, plan=dataclasses.replace(run.plan, overlap="max"))


@settings(max_examples=60)
@given(
    engine_runs().map(hidden_once),
    st.sampled_from(["kernel_us", "memory_n_half_kb", "all_reduce_us", "step_us", "batched_layer_us"]),
)
def test_no_cost_of_an_engine_speeds_anything_up(run: Run, key: str) -> None:
    spec = run.system.engine
    assert spec is not None
    if key == "batched_layer_us" and spec.batched_layer_us is None:
        key = "sequence_us"
    more = {f"engine.{key}": np.array([1.0, 2.0, 5.0]) * (getattr(spec, key) + 0.5)}
    times = run.metrics(["tpot_mean_s"], hardware_points(run.system, more))["tpot_mean_s"]
    assert time_of(run.system, run) <= times[0] * (1 + 1e-12)
    assert (np.diff(times) >= -1e-12 * times[1:]).all()


@settings(max_examples=60)
@given(
    engine_runs().map(hidden_once), st.sampled_from(["memory_efficiency", "compute_efficiency"]), st.floats(1.0, 4.0)
)
def test_a_larger_share_of_the_peak_is_never_slower(run: Run, key: str, by: float) -> None:
    spec = run.system.engine
    assert spec is not None
    better = run.system.with_values({f"engine.{key}": min(1.0, getattr(spec, key) * by)})
    assert time_of(better, run) <= time_of(run.system, run) * (1 + 1e-12)


def test_the_ideal_engine_is_the_floor_of_bandwidth() -> None:
    run = plan_run(mixtral(), MACHINE.with_values({"gpu.memory_capacity_gb": 200}), recording(), "all-resident")
    model = run.model
    always = model.non_expert_bytes - model.bytes_by_class()["embedding"]
    moved = always + model.num_moe_layers * model.top_k * model.expert_bytes()
    floor = moved / (MACHINE.get("gpu.memory_bandwidth_gb_per_s") * 1e9)
    ideal = time_of(run.system.with_engine("ideal"), run)
    # Beside the weights a step reads its keys and values, which are few here.
    assert floor <= ideal < 1.002 * floor
    for name in BUNDLED:
        assert time_of(run.system.with_engine(name), run) >= ideal


@settings(max_examples=40)
@given(engine_runs().map(hidden_once))
def test_no_engine_beats_the_ideal_one(run: Run) -> None:
    ideal = run.system.with_engine("ideal")
    assert run.system.engine is not None
    # Where the engine is silent the host counts, which the ideal engine replaces; it replaces shares of the CPU too.
    assert time_of(ideal, run) <= time_of(run.system, run) * (1 + 1e-12)


@pytest.mark.parametrize("own_link", [True, False])
def test_two_gpus_halve_a_step_that_is_bound_by_memory(own_link: bool) -> None:
    spec = engine(memory_efficiency=0.7, expert_efficiency=0.6)
    run = plan_run(mixtral(), MACHINE.with_values({"gpu.memory_capacity_gb": 200}), recording(), "all-resident")
    one = run.system.with_engine(spec)
    link: dict[str, float | str] = {"gpu.peer_bandwidth_gb_per_s": 20_000} if own_link else {}
    free = {"link.bandwidth_gb_per_s": 5000, "link.efficiency": 1.0, **link}
    two = one.with_values({"gpu.devices": 2, **free})
    reduced = 2 * run.model.num_layers * run.model.hidden_size * 2 / (20_000e9 if own_link else 5000e9)
    assert time_of(two, run) - reduced == pytest.approx(time_of(one, run) / 2, rel=1e-12)
    assert time_of(one.with_values({"gpu.devices": 2, "gpu.split": "layer"}), run) == time_of(one, run)
    # Every layer is reduced twice, over the GPUs' own link where they have one.
    key = "engine.peer_all_reduce_us" if own_link else "engine.all_reduce_us"
    slower = time_of(two.with_values({key: 10.0}), run) - time_of(two, run)
    assert slower == pytest.approx(2 * run.model.num_layers * 10e-6, rel=1e-9)


def test_kernels_are_counted_by_kind_of_layer() -> None:
    # Three layers of attention, two of them with experts of three matrices and one with a dense network.
    model = plain_model(num_layers=3, moe_layers=[0, 2], dense_params=100)
    run = plan_run(model, MACHINE, small_trace(model, [(2, 3)]), "all-resident")
    base = MACHINE.with_engine(engine())
    nothing = time_of(base, run)
    counted = {
        "attention_kernels": 3,
        "recurrent_kernels": 0,
        "expert_kernels": 2,
        "dense_kernels": 1,
        "step_kernels": 1,
    }
    for key, layers in counted.items():
        system = base.with_values({"engine.kernel_us": 3.0, f"engine.{key}": 7})
        assert time_of(system, run) - nothing == pytest.approx(layers * 7 * 3e-6, rel=1e-9, abs=1e-15)
    # Single experts launch every matrix of every expert, grouped ones pay the ramp once for each matrix of a layer.
    rate = MACHINE.get("gpu.memory_bandwidth_gb_per_s") * 1e9
    for word, ramps in (("grouped", 3), ("single", 3 * model.top_k)):
        system = base.with_engine(engine(experts=word))
        ramp = time_of(system.with_values({"engine.memory_n_half_kb": 10.0}), run) - time_of(system, run)
        around = (3 + 2 + 1 + 1) * 1e4 / rate  # attention, routers, dense network, head
        assert ramp == pytest.approx(2 * ramps * 1e4 / rate + around, rel=1e-9)
    single = base.with_engine(engine(experts="single")).with_values({"engine.kernel_us": 3.0})
    assert time_of(single, run) - nothing == pytest.approx(2 * 3 * model.top_k * 3e-6, rel=1e-9)


def test_a_switch_of_kernels_costs_every_layer_with_experts_from_its_tokens_on() -> None:
    spec = engine(batched_from_tokens=2, batched_layer_us=40.0)
    model = plain_model(num_layers=3, moe_layers=[0, 2])
    trace = small_trace(model, [(2, 4), (2, 4)])
    off, on = MACHINE.with_engine(engine()), MACHINE.with_engine(spec)
    for batch, paid in ((1, 0.0), (2, 2 * 40e-6)):
        run = plan_run(model, MACHINE, trace, "all-resident", batch=batch)
        assert time_of(on, run) - time_of(off, run) == pytest.approx(paid, rel=1e-9, abs=1e-15)


def test_pageable_copies_are_no_faster_than_their_buffer() -> None:
    run = plan_run(mixtral(), DESKTOP, recording(), "all-cpu").system
    pinned, pageable = (run.with_engine(engine(copies=word, pageable_gb_per_s=5.0)) for word in ("pinned", "pageable"))
    rates = [Points.one(hardware_point(system)).dense()[0] for system in (pinned, pageable)]
    different = np.flatnonzero(rates[0] != rates[1])
    assert len(different) == 1
    assert rates[1][different[0]] == 5e9 < rates[0][different[0]]
