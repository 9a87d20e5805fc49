"""Intervals that predictions carry: bundled as the runs have them, of the right class, and printed by the commands."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from commands import check_refusal, run

import perfmodel
from perfmodel import reports
from perfmodel.cli.validate import Findings
from perfmodel.evidence import uncertainty
from perfmodel.evidence.constants import SHARED, STREAMED
from perfmodel.evidence.described import profile_of
from perfmodel.evidence.intervals import ALL, LEVEL, Interval
from perfmodel.evidence.uncertainty import DOCUMENTED, NEAR, NEAR_DATA, NO_ENGINE, bundled, interval_for
from perfmodel.evidence.validation import SIGNIFICANT, Validation, write_intervals
from perfmodel.hardware import EngineSpec, System, list_specs, load_spec, load_system
from perfmodel.run import Evaluation, evaluate
from perfmodel.scenario import Scenario
from perfmodel.sweeps.request import Request

MODEL, TRACE = "mixtral-8x7b", "tiny-mixtral-32l-mini"
DESKTOP, NEAR_SYSTEM = "rtx4090-pcie4-cpu", "h100-cxl2-ndp"
SHORT: dict[str, Any] = {"prompt": 4, "output": 3}
OPTIONS = ("--model", MODEL, "--system", DESKTOP, "--prompt", 4, "--output", 3)
ENGINES = [entry.name for entry in list_specs() if entry.kind == "engine"]


def under(engine: str | None, system: str = DESKTOP) -> System:
    return load_system(system).with_engine(engine)


def priced(policy: str, system: System) -> Evaluation:
    return evaluate(MODEL, system, TRACE, policy, **SHORT)


# ---- from measured runs ----


@pytest.fixture(scope="module")
def found(findings: Findings) -> Validation:
    assert findings.measured is not None
    return findings.measured


def test_the_bundled_intervals_are_those_of_the_runs(found: Validation) -> None:
    now, then = found.to_bundle(), bundled()
    assert {name: set(one.by_name) for name, one in now.intervals.items()} == {
        name: set(one.by_name) for name, one in then.intervals.items()
    }, "write them anew by perfmodel.evidence.validation.write_intervals"
    for quantity, intervals in now.intervals.items():
        for name, one in intervals.by_name.items():
            other = then.intervals[quantity].by_name[name]
            assert one[2:] == other[2:]
            assert one[:2] == pytest.approx(other[:2], rel=5e-3), name
    assert now.rows == then.rows


def test_intervals_are_written_as_they_are_read(found: Validation, tmp_path: Path, monkeypatch: Any) -> None:
    written = write_intervals(found, tmp_path / "intervals.toml")
    monkeypatch.setattr("perfmodel.evidence.uncertainty.resources.files", lambda _: tmp_path)
    read = bundled.__wrapped__()
    assert written.name == uncertainty.BUNDLED
    assert read.rows == found.to_bundle().rows
    for name, one in found.intervals.by_name.items():
        other = read.intervals["decode"].by_name[name]
        assert other[2:] == one[2:]
        assert other[:2] == pytest.approx(one[:2], rel=1e-3)


def test_held_out_rows_lie_within_as_often_as_the_intervals_say(found: Validation) -> None:
    decode = found.coverage
    assert decode.level == LEVEL
    assert min(decode.p_rows, decode.p_effective, decode.p_sources) >= SIGNIFICANT
    # Not of the documented machines, which have intervals of their own.
    runs = [row.run for row in found.rows if row.quantity == "decode"]
    shared = [run for run in runs if profile_of(run) in (*SHARED, *STREAMED)]
    assert decode.rows == len(shared) == found.intervals.by_name[ALL].rows < len(runs)
    assert decode.sources == len({run.source for run in shared})
    own = {name: one for name, one in found.intervals.by_name.items() if " on " in name}
    assert sum(one.rows for one in own.values()) == len(runs) - len(shared)
    assert {one.sources for one in own.values()} == {1}
    assert found.intervals.by_name[NO_ENGINE].rows == len(runs)
    assert ("prefill" in found.to_bundle().intervals) == (found.prefill_coverage.p_effective >= SIGNIFICANT)


# ---- of a prediction ----


@pytest.mark.parametrize(
    ("policy", "where"),
    [
        ("all-resident:bits=2", "resident"),
        ("llama-cpp:bits=4,n_cpu_moe=8", "cpu"),
        ("fiddler", "cpu"),
        ("expert-cache:bits=4", "fetched"),
    ],
)
def test_the_class_follows_from_where_the_experts_are(policy: str, where: str) -> None:
    for engine in ("vllm", None):
        system = under(engine, "h100-pcie5-cpu")
        evaluation = priced(policy, system)
        assert uncertainty.residency_of(evaluation) == where
        known = interval_for(evaluation, system)
        assert known.decode == bundled().intervals["decode"].by_name[ALL if engine else NO_ENGINE]
        assert known.decode is not None
        assert known.alike == bundled().rows[known.decode.name][where]
        assert known.engine == engine
        low, high = known.rate(evaluation) or (0.0, 0.0)
        assert low < evaluation.decode_tok_per_s * 1.1 < 1.1 * high
        document = known.to_dict(evaluation)
        assert document is not None
        assert (document["low"], document["high"]) == (low, high)
        assert document["tpot_low_s"] * high == pytest.approx(1.0, rel=1e-12)
        assert document["tpot_high_s"] * low == pytest.approx(1.0, rel=1e-12)
        assert (document["class"], document["level"]) == (known.decode.name, LEVEL)


def test_a_cache_with_misses_on_the_cpu_is_one() -> None:
    evaluation = priced("hybrimoe:bits=4,slots=2,admit=all", under("vllm"))
    assert uncertainty.residency_of(evaluation) == "cached"


def test_what_was_not_measured_has_no_interval() -> None:
    near = load_system(NEAR_SYSTEM)
    for system in (near, near.with_engine("vllm")):
        evaluation = priced("monde", system)
        assert uncertainty.residency_of(evaluation) == NEAR
        known = interval_for(evaluation, system)
        assert (known.decode, known.reason) == (None, NEAR_DATA)
        assert known.to_dict(evaluation) is None
    for engine in ("ideal", "ndp-simulator"):
        system = under(engine)
        known = interval_for(priced("fiddler:bits=4", system), system)
        assert known.decode is None
        assert engine in (known.reason or "")


CACHED, FETCHED = "hybrimoe:bits=4,slots=2,admit=all", "expert-cache:bits=16"
CACHING, FETCHING = ("llama-cpp-expert-cache", "rtx5070-7950x"), ("gpu-offloading", "gh200-c2c")


@pytest.mark.parametrize(
    ("engine", "machine", "policy", "own"),
    [(*CACHING, CACHED, "llama-cpp-expert-cache on rtx-5070 + ryzen-7950x"), (*FETCHING, FETCHED, DOCUMENTED[0].name)],
)
def test_a_documented_machine_has_its_own_interval_and_no_other_machine_has_it(
    engine: str, machine: str, policy: str, own: str
) -> None:
    system, spec = under(engine, machine), load_spec(engine)
    assert isinstance(spec, EngineSpec)
    evaluation = priced(policy, system)
    renamed = system.with_engine(spec.model_copy(update={"name": "mine"}))
    for same in (
        system,
        renamed,
        system.with_values({"host.round_trip_us": 0.0} if spec.round_trip_us is None else {}),
    ):
        known = interval_for(evaluation, same)
        assert known.decode is not None
        assert (known.decode.name, known.alike) == (own, known.decode.rows)
    # The names stay, and the values do not.
    for changed in (
        system.with_engine("llama-cpp-cuda"),
        under(engine),
        system.with_values({"engine.memory_efficiency": 0.1}),
        system.with_values({"gpu.memory_bandwidth_gb_per_s": 400.0}),
        system.with_values({"gpu.devices": 2}),
        system.with_values({"link.bandwidth_gb_per_s": 8.0}),
    ):
        assert class_of(evaluation, changed) == ALL
    slower = system.with_values({"cpu.dram_bandwidth_gb_per_s": 40.0})
    assert class_of(evaluation, slower) == (ALL if engine == CACHING[0] else own)


@pytest.mark.parametrize(("engine", "machine", "policy"), [(*FETCHING, "all-cpu:bits=4"), (*CACHING, "all-cpu:bits=4")])
def test_what_a_documented_machine_never_ran_has_the_class_of_all(engine: str, machine: str, policy: str) -> None:
    system = under(engine, machine)
    evaluation = priced(policy, system)
    known = interval_for(evaluation, system)
    assert known.decode is not None
    assert known.decode.name == ALL
    (text,) = reports.intervals(["[1]"], [evaluation], [known])
    assert f"experts in {known.alike} of them cpu" in text
    assert known.alike == bundled().rows[ALL]["cpu"]


def test_documented_machines_are_those_of_the_intervals() -> None:
    named = {name for name in bundled().intervals["decode"].by_name if " on " in name}
    assert {one.name for one in DOCUMENTED} == named
    for one in DOCUMENTED:
        assert sum(bundled().rows[one.name].values()) == bundled().intervals["decode"].by_name[one.name].rows


def test_an_engine_is_a_bound_by_its_values_and_not_by_its_name() -> None:
    evaluation = priced("fiddler:bits=4", under("vllm"))
    for name in uncertainty.UNMEASURED:
        spec = load_spec(name)
        assert isinstance(spec, EngineSpec)
        called, real = spec.model_copy(update={"name": "mine"}), load_spec("vllm").model_copy(update={"name": name})
        assert isinstance(real, EngineSpec)
        base = load_system(DESKTOP)
        assert interval_for(evaluation, base.with_engine(called)).reason == uncertainty.UNMEASURED[name]
        assert class_of(evaluation, base.with_engine(real)) == ALL


def class_of(evaluation: Evaluation, system: System) -> str | None:
    known = interval_for(evaluation, system).decode
    return None if known is None else known.name


def test_prefills_carry_one_where_there_is_one(monkeypatch: Any) -> None:
    system = under("vllm")
    evaluation = priced("fiddler:bits=4", system)
    one = Interval(0.5, 2.0, 0.8, 20, 6, ALL)
    known = interval_for(evaluation, system)._replace(prefill=one)
    assert evaluation.ttft_s is not None
    assert known.first_token(evaluation) == (evaluation.ttft_s / 2.0, evaluation.ttft_s / 0.5)
    document = known.to_dict(evaluation)
    assert document is not None
    assert document["ttft"]["high_s"] == 2.0 * evaluation.ttft_s
    assert document["ttft"]["rows"] == 20


# ---- printed ----


def test_compare_prints_and_writes_intervals() -> None:
    options = ("compare", *OPTIONS, "--policy", "fiddler:bits=4", "--policy", "expert-cache:bits=4")
    document = run(*options, "--engine", "vllm", "--json").document
    assert document["engine"] == "vllm"
    for one, policy in zip(document["evaluations"], ("fiddler:bits=4", "expert-cache:bits=4"), strict=True):
        evaluation = priced(policy, under("vllm"))
        assert one["interval"] == json.loads(json.dumps(interval_for(evaluation, under("vllm")).to_dict(evaluation)))
    text = run(*options, "--engine", "vllm").out
    line = next(line for line in text.splitlines() if "interval" in line)
    assert line.startswith("- 80 % interval of a measured tok/s: [1] ")
    assert f"[2] {document['evaluations'][1]['interval']['low']:.3g}-" in line
    assert "(engine vllm, class all: " in line
    bare = run(*options)
    assert "(no engine: " in bare.out
    assert run(*options, "--engine", "none").out == bare.out
    near = run("compare", "--prompt", 4, "--output", 3, "--model", MODEL, "--policy", "monde").out
    assert f"- no interval for [1]: {NEAR_DATA}" in near


def test_rank_prints_intervals_and_says_which_orders_they_leave_open() -> None:
    options = (*OPTIONS, "--policies", "fiddler;ktransformers;all-cpu", "--bits", 4, "--engine", "vllm")
    ranking = perfmodel.rank(
        MODEL, DESKTOP, TRACE, ["fiddler", "ktransformers", "all-cpu"], bits=4, engine="vllm", **SHORT
    )
    document = run("rank", *options, "--json").document
    assert document["engine"] == "vllm"
    assert document == json.loads(json.dumps(ranking.to_dict()))
    bands = [(one["interval"]["low"], one["interval"]["high"]) for one in document["ranking"]]
    assert [bands[i][0] <= bands[i + 1][1] for i in range(2)] == [True, False]
    assert document["unresolved"] == [["fiddler", "ktransformers"]]
    text = run("rank", *options).out
    assert "times the predicted one for fiddler, ktransformers, all-cpu (engine vllm, class all: " in text
    assert "intervals of neighbours overlap in places 1 to 2: " in text
    assert run("rank", *options, "--by", "ttft_s", "--json").document["unresolved"] == []


# ---- engines on the command line ----


@pytest.mark.parametrize("engine", ENGINES)
def test_every_profile_agrees_with_the_loop_over_picks(engine: str) -> None:
    policies = ("--policy", "fiddler:bits=4", "--policy", "expert-cache:bits=4", "--policy", "llama-cpp:bits=4")
    document = run("compare", *OPTIONS, *policies, "--engine", engine, "--check", "--json").document
    assert max(document["check"]) < 1e-12
    system = under(engine)
    assert document["system_hash"] == system.content_hash()
    rates = [one["decode_tok_per_s"] for one in document["evaluations"]]
    assert rates == [
        priced(policy, system).decode_tok_per_s
        for policy in ("fiddler:bits=4", "expert-cache:bits=4", "llama-cpp:bits=4")
    ]


def test_break_even_is_of_the_engine() -> None:
    options = ("breakeven", "--model", MODEL, "--system", DESKTOP, "--json")
    batches = {engine: run(*options, "--engine", engine).document["batch"] for engine in ("none", "fiddler", "ideal")}
    assert batches["none"] == run(*options).document["batch"]
    assert len(set(batches.values())) > 1


@pytest.mark.parametrize("command", ["compare", "rank", "sweep", "solve"])
def test_bad_engines_are_refused_in_one_line(command: str, tmp_path: Path) -> None:
    more = {"sweep": ("--quiet",), "solve": ("--for", "gpu.memory_bandwidth_gb_per_s", "--target", "tpot_ms=50")}
    bad = tmp_path / "bad.toml"
    bad.write_text('kind = "engine"\nname = "bad"\n', encoding="utf-8")
    for engine, words in (
        ("vlm", ("vlm", "vllm")),
        ("h100-sxm", ("h100-sxm",)),
        (tmp_path / "none.toml", ("none.toml",)),
        (bad, ("bad.toml",)),
        ("", ()),
    ):
        options = (*more.get(command, ()), *OPTIONS, "--engine", engine)
        check_refusal(run(command, *options), *words)


def test_python_refuses_what_is_no_engine() -> None:
    for given in (7, ["vllm"], True):
        with pytest.raises(perfmodel.PerfModelError, match="engine: found"):
            Scenario.of(MODEL, DESKTOP, TRACE, "fiddler", engine=given)  # type: ignore[arg-type]


def sweep_values(*options: object) -> Mapping[str, Any]:
    document: Mapping[str, Any] = run("sweep", "--quiet", "--json", *OPTIONS, *options).document
    return document


def test_numbers_of_an_engine_are_axes() -> None:
    swept = perfmodel.sweep(
        MODEL, DESKTOP, TRACE, "fiddler:bits=4", {"engine.kernel_us": "1:5:3", "engine.batched_layer_us": [0.0, 9.0]},
        engine="llama-cpp-cuda-2025", progress=False, **SHORT,
    ).tpot_mean_s.values.squeeze()  # fmt: skip
    system = under("llama-cpp-cuda-2025")
    expected = [
        [
            priced(
                "fiddler:bits=4", system.with_values({"engine.kernel_us": us, "engine.batched_layer_us": fixed})
            ).tpot_mean_s
            for fixed in (0.0, 9.0)
        ]
        for us in (1.0, 3.0, 5.0)
    ]
    assert swept.tolist() == expected
    assert len(set(swept[:, 0].tolist())) == 3


def test_the_sweep_command_knows_the_engine() -> None:
    axis = ("--policy", "fiddler:bits=4", "--axis", "engine.kernel_us=1:5:3")
    document = sweep_values(*axis, "--engine", "vllm")
    assert document["points"] == 3
    low, high = (
        priced("fiddler:bits=4", under("vllm").with_values({"engine.kernel_us": us})).tpot_mean_s for us in (1.0, 5.0)
    )
    (metric,) = document["metrics"]
    assert (metric["low"], metric["high"]) == (low, high)
    assert document["provenance"]["scenario"]["engine"] == "vllm"
    check_refusal(run("sweep", "--quiet", *OPTIONS, *axis), "has no engine")
    check_refusal(run("sweep", "--quiet", *OPTIONS, *axis, "--engine", "none"), "has no engine")


@pytest.mark.parametrize(
    ("key", "word"),
    [
        ("engine.micro_batch_tokens", "workload.micro_batch"),
        ("engine.prefill_cpu_below_tokens", "a policy says where its prefill runs"),
        ("engine.launch", "is a word"),
        ("engine.pageable_gb_per_s", "those of engine llama-cpp-expert-cache are pinned"),
        ("gpu.memory_efficiency", "engine.memory_efficiency"),
    ],
)
def test_axes_that_would_change_nothing_are_refused(key: str, word: str) -> None:
    options = ("sweep", *OPTIONS, "--engine", "llama-cpp-expert-cache", "--policy", "fiddler:bits=4")
    check_refusal(run(*options, "--quiet", "--axis", f"{key}=1,2"), key, word)
    listed = {one["name"] for one in run(*options, "--list-axes", "--json").document}
    assert key not in listed
    assert "engine.kernel_us" in listed


def test_what_counts_only_beside_another_axis_is_no_axis_alone() -> None:
    pairs = {
        "engine.batched_from_tokens": "engine.batched_layer_us",
        "engine.batched_layer_us": "engine.batched_from_tokens",
        "engine.all_reduce_us": "gpu.devices",
    }
    one = Scenario.of(MODEL, DESKTOP, TRACE, "fiddler:bits=4", engine="vllm")
    listed = {axis.name for axis in one.axes()}
    for key, other in pairs.items():
        assert key not in listed
        with pytest.raises(perfmodel.PerfModelError, match=f"axis {key}: .*{other}"):
            one.check_varied([key])
        one.check_varied([key, other])
        one.check_varied([key, "system"])
    with pytest.raises(perfmodel.PerfModelError, match=r"engine\.all_reduce_us counts"):
        one.check_varied(["engine.peer_all_reduce_us", "gpu.devices"])
    one.check_varied(["engine.peer_all_reduce_us", "gpu.devices", "gpu.peer_bandwidth_gb_per_s"])
    layered = Scenario.of(MODEL, under("vllm").with_values({"gpu.split": "layer"}), TRACE, "fiddler:bits=4")
    with pytest.raises(perfmodel.PerfModelError, match=r"gpu\.split is 'layer'"):
        layered.axis("engine.all_reduce_us")


@pytest.mark.parametrize(
    ("setting", "word"),
    [
        ("engine.prefill_cpu_below_tokens=500", "a policy says where its prefill runs"),
        ("engine.pageable_gb_per_s=1", "those of engine vllm are pinned"),
        ("engine.all_reduce_us=3", "has one (gpu.devices)"),
        ("engine.overlap=max", "a policy says what overlaps"),
        ("engine.micro_batch_tokens=1.5", "a whole number 1 to"),
        ("engine.batched_from_tokens=2", "give both or neither"),
    ],
)
def test_what_would_change_nothing_cannot_be_set(setting: str, word: str) -> None:
    check_refusal(run("rank", *OPTIONS, "--engine", "vllm", "--policies", "fiddler", "--set", setting), word)


def test_what_counts_together_can_be_set_together() -> None:
    values: dict[str, float | str] = {"engine.copies": "pageable", "engine.pageable_gb_per_s": 2.0}
    under("vllm").with_values(values).check_set(values)
    with pytest.raises(perfmodel.PerfModelError, match="pinned"):
        under("vllm").check_set(values)


def test_every_number_that_counts_under_an_engine_is_in_the_one_at_a_time_table() -> None:
    one = Scenario.of(MODEL, DESKTOP, TRACE, "fiddler:bits=4", engine="vllm", **SHORT)
    keys = set(perfmodel.answers.tornado(one).key.values.tolist())
    assert "engine.kernel_us" in keys
    assert not keys & {"gpu.memory_efficiency", "engine.all_reduce_us", "engine.micro_batch_tokens"}
    with pytest.raises(perfmodel.PerfModelError, match="has one"):
        perfmodel.answers.tornado(one, ["engine.all_reduce_us"])


def test_systems_of_an_axis_run_under_the_engine_too() -> None:
    systems = (DESKTOP, "h100-pcie5-cpu")
    found = perfmodel.sweep(
        MODEL, trace=TRACE, policy="fiddler:bits=4", axes={"system": systems}, engine="vllm", progress=False, **SHORT
    )
    expected = [priced("fiddler:bits=4", under("vllm", system)).tpot_mean_s for system in systems]
    assert found.tpot_mean_s.values.squeeze().tolist() == expected


def test_a_request_remembers_its_engine(tmp_path: Path) -> None:
    axes = {"link.latency_us": [1.0, 2.0]}
    one = Request.of(MODEL, DESKTOP, TRACE, "fiddler:bits=4", axes, engine="vllm", **SHORT)
    assert "--engine vllm" in one.command()
    again = Request.from_dict(json.loads(json.dumps(one.to_dict())))
    assert again.key() == one.key()
    assert again.scenario.system.engine == load_spec("vllm")
    without = Request.of(MODEL, DESKTOP, TRACE, "fiddler:bits=4", axes, **SHORT)
    assert without.key() != one.key()
    assert "--engine" not in without.command()
    held = Request.of(MODEL, DESKTOP, TRACE, "fiddler:bits=4", axes, engine=load_spec("vllm"), **SHORT)
    assert held.key() == one.key()
    assert "in memory only: engine" in held.command()

    text = load_spec_text("vllm").replace('name = "vllm"', 'name = "mine"')
    (tmp_path / "mine.toml").write_text(text, encoding="utf-8")
    file = tmp_path / "sweep.toml"
    file.write_text(
        f'kind = "sweep"\nmodel = "{MODEL}"\nsystem = "{DESKTOP}"\ntrace = "{TRACE}"\npolicy = "fiddler:bits=4"\n'
        'engine = "mine.toml"\nprompt = 4\noutput = 3\n[axes]\n"link.latency_us" = [1.0, 2.0]\n',
        encoding="utf-8",
    )
    loaded = Request.load(file).scenario.system
    assert loaded.engine is not None
    assert loaded.engine.name == "mine"
    assert loaded.content_hash() == under("vllm").content_hash()


def load_spec_text(name: str) -> str:
    return next(entry for entry in list_specs() if entry.name == name).path.read_text(encoding="utf-8")
