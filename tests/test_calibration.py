"""Calibrations from the command line: rows that the model itself made give its constants back."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from commands import check_refusal, run
from numpy.testing import assert_allclose, assert_array_equal
from test_fit import KERNEL, TRUTH, problem, with_extra

from perfmodel.errors import NoAnswerError, SpecError
from perfmodel.evidence.calibration import calibrate_problem, engine_values
from perfmodel.evidence.constants import make_problem
from perfmodel.evidence.errors import errors
from perfmodel.evidence.fit import Constant, fit, leave_one_out
from perfmodel.evidence.holdout import held_out
from perfmodel.evidence.measured import counting, load_measured
from perfmodel.evidence.predict import predicted
from perfmodel.hardware import load_system
from perfmodel.point import hardware_points

LABELS = {
    "source": ["a", "a", "b", "c"],
    "machine": ["m", "n", "n", "m"],
    "engine": ["vllm", None, "fiddler", "vllm"],
    "model": ["x", "x", "y", None],
    "id": ["M1", "M2", "M3", "M4"],
}


# ---- rules ----


@pytest.mark.parametrize(
    ("rule", "rows"),
    [
        ("source=b", [2]),
        ("id=M1,M3", [0, 2]),
        ("engine=vllm; id=M2", [0, 1, 3]),
        ("engine=fiddler,model=y,id=M4", [2, 3]),
        ("machine=n", [1, 2]),
    ],
)
def test_rules_name_rows(rule, rows) -> None:
    assert_array_equal(np.flatnonzero(held_out(rule, LABELS)), rows)


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ("", "found ''"),
        ("b", "found 'b' in 'b'; allowed: KEY=VALUE"),
        ("gpu=h100", "found 'gpu=h100'"),
        ("source=", "found 'source='"),
        ("id=M1,", "found ''"),
        ("id=M9", "no row has id 'M9'; allowed: M1, M2, M3, M4"),
        ("engine=None", "no row has engine 'None'; allowed: fiddler, vllm"),
        ("source=a,b,c", "no row is left to fit to"),
    ],
)
def test_bad_rules_are_refused(rule, words) -> None:
    with pytest.raises(SpecError) as refusal:
        held_out(rule, LABELS)
    assert words in str(refusal.value)


# ---- calibrations ----


def test_errors_are_those_of_the_fits() -> None:
    one = problem(noise=0.1)
    out = np.asarray(one.source) == "s3"
    found = calibrate_problem(one, out, reject=False)
    assert found.rejected == ()
    assert found.fit.values == fit(one, ~out).values
    sources = np.asarray(one.source)
    unseen, machine = (leave_one_out(one, by, keep=~out)[~out] for by in ("source", "machine"))
    assert found.unseen_source is not None
    assert found.unseen_machine is not None
    assert found.held_out is not None
    assert found.unseen_source.by_row == errors(unseen, sources[~out].tolist()).by_row
    assert found.unseen_machine.by_row == errors(machine, sources[~out].tolist()).by_row
    assert found.in_sample.by_source == errors(found.fit.residuals[~out], sources[~out].tolist()).by_source
    assert (found.held_out.rows, found.held_out.sources) == (5, 1)
    assert out[found.held_out.worst]
    assert not out[found.in_sample.worst]
    assert_array_equal(found.residuals[~out], unseen)
    assert_array_equal(found.residuals[out], found.fit.residuals[out])


def test_what_is_held_out_has_no_say() -> None:
    one = problem(noise=0.1)
    out = np.asarray(one.machine) == "m2"
    poisoned = one.with_target(np.where(out, 5.0, one.target))
    found, other = calibrate_problem(one, out), calibrate_problem(poisoned, out)
    assert found.fit.values == other.fit.values
    assert found.unseen_source == other.unseen_source


def test_useless_constants_stay_at_their_start() -> None:
    effect = np.random.default_rng(0).uniform(-1.0, 1.0, 60)
    one = with_extra(problem(noise=0.1), Constant("useless", 1.0, 0.2, 5.0), lambda x: x * effect)
    found = calibrate_problem(one)
    assert [r.name for r in found.rejected] == ["useless"]
    assert found.fit.values["useless"] == pytest.approx(1.0)
    assert set(TRUTH) < set(found.fit.values)
    kept = calibrate_problem(one, reject=False)
    assert kept.rejected == ()
    assert kept.fit.fitted.all()
    only = replace(one, constants=(one.constants[3],), predict=lambda x: x * effect)
    with pytest.raises(NoAnswerError, match="no constant improves the error on unseen sources; constant useless"):
        calibrate_problem(only.with_target(np.random.default_rng(1).normal(size=60)))


def test_one_source_cannot_say_what_a_fit_is_worth() -> None:
    found = calibrate_problem(replace(problem(noise=0.1), source=["s"] * 60))
    assert found.unseen_source is None
    assert found.unseen_machine is not None
    assert found.rejected == ()
    assert_array_equal(found.residuals, found.fit.residuals)


@pytest.mark.parametrize(
    ("dependent", "by"),
    [
        ({"s0": 4, "s1": 4}, {"source", "machine"}),
        ({"s0": 5}, {"source", "machine"}),
        ({"s0": 4, "s4": 4}, {"source", "machine"}),  # two sources of one machine
        ({"s0": 5, "s1": 1}, set()),
        ({"s0": 5, "s4": 1}, {"machine"}),
    ],
)
def test_a_constant_that_was_never_tried_is_not_rejected(dependent, by) -> None:
    sources = np.arange(60) % 12
    effect = sum((sources == int(s[1:])) & (np.arange(60) // 12 < n) for s, n in dependent.items()) * 1.0
    one = with_extra(problem(noise=0.02), Constant("rare", 1.0, 0.2, 5.0), lambda x: x * effect)
    found = calibrate_problem(one.with_target(one.target + np.log(3.0) * effect))
    assert found.rejected == ()
    assert found.fit.values["rare"] == pytest.approx(3.0, rel=0.05)
    assert {one.by for one in found.unjudged if one.name == "rare"} == by
    assert (found.unseen_source is None) == ("source" in by)
    assert (found.unseen_machine is None) == ("machine" in by)
    if "source" in by:
        assert_array_equal(found.residuals, found.fit.residuals)
        assert "constant rare cannot be judged on unseen sources: without" in str(found.unjudged[0])


def test_values_of_an_engine() -> None:
    names = ("kernel_us", "vllm.kernel_us", "step_us", "sglang.step_us")
    constants = tuple(replace(KERNEL, name=name) for name in names)

    def predict(logs):
        return logs[:, np.arange(60) % 4]

    found = fit(replace(problem(), constants=constants, predict=predict, target=np.log(np.arange(60) % 4 + 1.0)))
    values = engine_values(found, "vllm")
    assert_allclose(list(values.values()), [2.0, 3.0], rtol=1e-4)
    assert list(values) == ["engine.kernel_us", "engine.step_us"]
    assert engine_values(found, "sglang")["engine.step_us"] == pytest.approx(4.0, rel=1e-4)
    alone = fit(replace(problem(), constants=constants[1:2], predict=lambda x: x + np.zeros(60), target=np.ones(60)))
    with pytest.raises(SpecError, match="no fitted constant belongs to the engine sglang"):
        engine_values(alone, "sglang")


# ---- the command ----

_ROW = """
[[run]]
id = "R{number}"
source = "lab{lab}"
citation = "made by a test"
confidence = "high"
model = "{model}"
expert_bits = {bits}
other_bits = {bits}
gpu = "{gpu}"
engine = "{engine}"
batch = 1
context_tokens = {context}
gpu_experts = 1.0
decode_tok_per_s = {rate!r}
"""


@pytest.fixture(scope="module")
def evidence(tmp_path_factory) -> Path:
    """Rows that the model itself makes when large kernels reach 55 % of the bandwidth, with 3 % of noise."""
    file = tmp_path_factory.mktemp("evidence") / "rows.toml"
    rows = [
        {"number": i, "lab": i % 4, "model": ("mixtral-8x7b", "qwen3-30b-a3b")[i % 2], "bits": (4.0, 8.0)[i % 3 == 0],
         "gpu": ("h100-sxm", "a100-80gb")[i // 2 % 2], "engine": ("llama-cpp-cuda", "vllm")[i // 4 % 2],
         "context": 512 * (i + 1)}
        for i in range(12)
    ]  # fmt: skip
    file.write_text("".join(_ROW.format(**row, rate=1.0) for row in rows))
    noise = np.random.default_rng(0).normal(0.0, 0.03, len(rows))
    for row, one, off in zip(rows, predicted(load_measured(file), "decode"), noise, strict=True):
        points = hardware_points(one.system, {"engine.memory_efficiency": np.array([0.55])})
        row["rate"] = float(one.rates(points)[0] * np.exp(off))
    file.write_text("".join(_ROW.format(**row) for row in rows))
    return file


def test_the_command_finds_the_constant(evidence, tmp_path) -> None:
    arguments = ("calibrate", "--evidence", evidence, "--fit", "memory_efficiency", "--hold-out", "id=R3;source=lab2")
    found = run(*arguments, "--json").document
    (constant,) = found["constants"]
    assert constant["value"] == pytest.approx(0.55, rel=0.05)
    assert 0.0 < constant["relative_standard_error"] < 0.05
    assert constant["fitted"]
    assert found["errors"]["in_sample"]["rows"] == 8
    assert found["errors"]["held_out"]["rows"] == 4
    assert found["errors"]["unseen_source"]["by_row"]["median"] < 0.1
    assert [row["id"] for row in found["rows"] if not row["fitted"]] == ["R2", "R3", "R6", "R10"]
    for row in found["rows"]:
        assert row["predicted"] == pytest.approx(row["measured"], rel=0.2)
    answer = run(*arguments)
    assert answer.code == 0
    for words in ("memory_efficiency", "condition number 1", "held out", "unseen source", "sources alike"):
        assert words in answer.out


def test_the_command_says_what_cannot_be_judged(evidence, tmp_path) -> None:
    arguments = ("calibrate", "--evidence", evidence, "--fit", "memory_efficiency", "--hold-out", "source=lab2,lab3")
    found = run(*arguments, "--json").document
    assert found["rejected"] == []
    assert found["constants"][0]["fitted"]
    assert found["errors"]["unseen_source"] is None
    assert {row["predicted_unseen"] is None for row in found["rows"] if row["fitted"]} == {True}
    assert found["errors"]["held_out"]["rows"] == 6
    (why,) = (one["message"] for one in found["unjudged"] if one["by"] == "source")
    answer = run(*arguments, "-o", tmp_path / "few.toml")
    assert answer.code == 0
    assert why in answer.out.splitlines()
    assert "fewer than 5 rows do" in why
    assert "not judged" in answer.out
    assert "one source only" not in answer.out
    citation = load_system(tmp_path / "few.toml").source_of("engine.memory_efficiency").citation
    assert "held out: source=lab2,lab3, not checked on unseen sources" in citation


def test_an_overlay_of_a_bundled_system_prices(evidence, tmp_path) -> None:
    file = tmp_path / "new" / "mine.toml"
    arguments = ("calibrate", "--evidence", evidence, "--fit", "memory_efficiency", "-o", file)
    answer = run(*arguments)
    assert answer.code == 0, answer.err
    assert answer.err == f"wrote {file}\n"
    mine, base = load_system(file), load_system("rtx4090-pcie4-cpu").with_engine("llama-cpp-cuda")
    value = mine.get("engine.memory_efficiency")
    assert value == pytest.approx(0.55, rel=0.1)
    assert mine.engine is not None
    assert mine.engine.name == "llama-cpp-cuda"
    # Everything but the fitted value is that of the base under its engine, sources included.
    same = base.with_values({"engine.memory_efficiency": value}, source="calibrated", citation="a fit")
    assert mine.content_hash() == same.content_hash()
    assert mine.source_of("engine.kernel_us") == base.source_of("engine.kernel_us")
    answer = run("compare", "--system", file, "--model", "mixtral-8x7b", "--policy", "hobbit", "--output", 2, "--json")
    assert answer.code == 0, answer.err
    assert run(*arguments, "--system", "h100-pcie5-cpu", "--engine", "vllm").code == 0
    other = load_system(file)
    assert other.engine is not None
    assert (other.engine.name, other.gpu.name) == ("vllm", load_system("h100-pcie5-cpu").gpu.name)
    assert other.source_of("engine.memory_efficiency").source == "calibrated"


def test_the_overlay_says_where_its_values_come_from(evidence, tmp_path) -> None:
    system = tmp_path / "base.toml"
    system.write_text('kind = "system"\nname = "base"\ndescription = "x"\nbase = "h100-pcie5-cpu"\nengine = "vllm"\n')
    arguments = ("calibrate", "--evidence", evidence, "--fit", "memory_efficiency", "--system", system)
    answer = run(*arguments, "-o", tmp_path / "mine.toml")
    assert answer.code == 0, answer.err
    mine = load_system(tmp_path / "mine.toml")
    assert mine.get("engine.memory_efficiency") == pytest.approx(0.55, rel=0.05)
    assert mine.description == "base under vllm with fitted memory_efficiency"
    assert "[engine]" not in (tmp_path / "mine.toml").read_text()
    source = mine.source_of("engine.memory_efficiency")
    assert source.source == "calibrated"
    assert source.citation.startswith("fitted to 12 rows of 4 sources in rows.toml, median error on unseen sources")
    # An engine takes the place of that of the base.
    assert run(*arguments, "--engine", "sglang", "-o", tmp_path / "mine.toml").code == 0
    engine = load_system(tmp_path / "mine.toml").engine
    assert engine is not None
    assert engine.name == "sglang"


def test_overlays_that_cannot_be_written_are_refused_before_the_fit(evidence, tmp_path) -> None:
    # The constant would be refused as well, by the fit.
    start = ("calibrate", "--evidence", evidence, "--fit", "no_such_constant")
    (tmp_path / "file").write_text("x")
    own = tmp_path / "own.toml"
    own.write_text('kind = "system"\nname = "own"\ndescription = "x"\nbase = "h100-pcie5-cpu"\n')
    for arguments, words in (
        (("--system", "h100-pcie5-cpu"), "--system: found without -o"),
        (("--engine", "vllm"), "--engine: found without -o"),
        (("-o", tmp_path / "x.json"), "ends in .toml"),
        (("-o", tmp_path / "file" / "x.toml"), "can be written"),
        (("-o", own, "--system", own), "the base itself"),
        (("-o", tmp_path / "x.toml", "--engine", "none"), "found 'none', allowed: an engine"),
        (("-o", tmp_path / "x.toml", "--engine", "vlm"), "vllm"),
        (("-o", tmp_path / "x.toml", "--system", "nowhere"), "nowhere"),
    ):
        check_refusal(run(*start, *arguments), words)
    # Which constants are left is known after the fit.
    of_one = (*start[:-1], "llama-cpp-cuda.memory_efficiency", "--engine", "vllm", "-o", tmp_path / "x.toml")
    check_refusal(run(*of_one), "no fitted constant belongs to the engine vllm; fitted: llama-cpp-cuda.memory_eff")
    assert not (tmp_path / "x.toml").exists()


def test_constants_that_real_rows_cannot_tell_apart_are_refused() -> None:
    """Rows of a source that ran models whose layers all have both kinds of kernel; all sources together differ."""
    names = "attention_kernels,expert_kernels"
    rows = predicted(counting(load_measured(None), "decode"), "decode")
    assert fit(make_problem(rows, names.split(","))).condition < 30.0
    others = sorted({row.run.source for row in rows} - {"ggml-org/llama.cpp"})
    answer = run("calibrate", "--fit", names, "--hold-out", f"source={','.join(others)}")
    check_refusal(answer, "cannot tell constants attention_kernels and expert_kernels apart (condition number")


def test_the_command_refuses_bad_input(evidence, tmp_path) -> None:
    start = ("calibrate", "--evidence", evidence, "--fit")
    check_refusal(run(*start, "memory_eficiency"), "memory_efficiency")
    check_refusal(run(*start, "memory_efficiency,kernel_us,step_us"), "12 rows for 3 constants")
    check_refusal(run(*start, "memory_efficiency", "--hold-out", "gpu=x"), "hold-out rule")
    check_refusal(run("calibrate", "--evidence", tmp_path / "no.toml", "--fit", "kernel_us"), "no.toml")
    check_refusal(run("calibrate"), "--fit")


def test_constants_without_effect_are_not_written(tmp_path) -> None:
    """A system without a CPU reads no experts there: that constant is left out, and refused where it is alone."""
    path = tmp_path / "mine.toml"
    base = ("calibrate", "--system", "h100-cxl2-ndp", "--engine", "vllm", "-o", path, "--fit")
    check_refusal(run(*base, "cpu_efficiency"), "none of the fitted constants (engine.cpu_efficiency) counts on system")
    assert not path.exists()
    found = run(*base, "memory_n_half_kb,cpu_efficiency")
    assert found.code == 0
    assert "engine.cpu_efficiency is not written: it is of a CPU" in found.err
    engine = load_system(path).engine
    assert engine is not None
    assert engine.source_of("memory_n_half_kb").source == "calibrated"
    assert (
        engine.source_of("cpu_efficiency").citation
        == load_system(path).with_engine("vllm").source_of("engine.cpu_efficiency").citation
    )
