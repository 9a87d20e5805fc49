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
from perfmodel.evidence.errors import errors
from perfmodel.evidence.fit import Constant, fit, leave_one_out
from perfmodel.evidence.holdout import held_out
from perfmodel.evidence.measured import load_measured
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


def test_the_overlay_says_where_its_values_come_from(evidence, tmp_path) -> None:
    base = load_system("h100-pcie5-cpu").with_engine("vllm")
    assert base.engine is not None
    system = tmp_path / "base.toml"
    system.write_text('kind = "system"\nname = "base"\ndescription = "x"\nbase = "h100-pcie5-cpu"\nengine = "vllm"\n')
    arguments = ("calibrate", "--evidence", evidence, "--fit", "memory_efficiency", "--system", system)
    answer = run(*arguments, "-o", tmp_path / "mine.toml")
    assert answer.code == 0, answer.err
    mine = load_system(tmp_path / "mine.toml")
    assert mine.get("engine.memory_efficiency") == pytest.approx(0.55, rel=0.05)
    source = mine.source_of("engine.memory_efficiency")
    assert source.source == "calibrated"
    assert source.citation.startswith("fitted to 12 rows of 4 sources in rows.toml, median error on unseen sources")
    check_refusal(run(*arguments), "--system and --output")
    check_refusal(
        run(*arguments[:-1], "h100-pcie5-cpu", "-o", tmp_path / "other.toml"), "found no engine", "h100-pcie5-cpu"
    )


def test_the_command_refuses_bad_input(evidence, tmp_path) -> None:
    start = ("calibrate", "--evidence", evidence, "--fit")
    check_refusal(run(*start, "memory_eficiency"), "memory_efficiency")
    check_refusal(run(*start, "memory_efficiency,kernel_us,step_us"), "12 rows for 3 constants")
    check_refusal(run(*start, "memory_efficiency", "--hold-out", "gpu=x"), "hold-out rule")
    check_refusal(run("calibrate", "--evidence", tmp_path / "no.toml", "--fit", "kernel_us"), "no.toml")
    check_refusal(run("calibrate"), "--fit")
