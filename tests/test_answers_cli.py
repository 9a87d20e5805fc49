"""The commands that answer questions: text, JSON, files, and refusals in one line."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import xarray as xr
from commands import check_refusal, run

from perfmodel.answers import best, break_even, pareto, sobol_indices, solve, tornado
from perfmodel.errors import NoAnswerError
from perfmodel.run import evaluate
from perfmodel.scenario import Scenario
from perfmodel.sweeps.dataset import open_dataset, save

SHORT = ("--prompt", 8, "--output", 8)
NAMES = ("mixtral-8x7b", "h100-cxl2-ndp", "tiny-mixtral-32l-mini")
NEAR = "context-aware:mean_bits=3"


def scenario(*policies: str) -> Scenario:
    return Scenario.of(policy=policies, prompt=8, output=8)


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved sweep by hand: two policies, three link rates, one point without a value."""
    dims = ("policy", "link.bandwidth_gb_per_s")
    times = np.array([[0.5, 0.25, 0.2], [0.8, 0.25, np.nan]])
    data = {
        "tpot_mean_s": (dims, times, {"units": "s", "long_name": "mean time per output token", "family": "mean"}),
        "gpu_memory_bytes": (dims, np.array([[4e10] * 3, [1e10] * 3]), {"units": "byte", "family": "plan"}),
    }
    coords = {
        "policy": ("policy", np.array(["context-aware", "hobbit"], dtype=object), {"long_name": "policy"}),
        "link.bandwidth_gb_per_s": (dims[1], [16.0, 32.0, 64.0], {"units": "GB/s", "long_name": "link bandwidth"}),
    }
    attrs: dict[str, Any] = {
        "title": "perfmodel sweep",
        "kind": "sweep",
        "complete": 1,
        "perfmodel_version": "0",
        "model": "mixtral-8x7b",
        "system": "h100-cxl2-ndp",
        "trace": "tiny",
        "trace_source": "recorded",
        "weakest_source": "assumed",
        "notes": json.dumps(["4 of 8 experts a layer on the GPU"]),
    }
    path = tmp_path_factory.mktemp("swept") / "sweep.nc"
    save(xr.Dataset(data, coords, attrs), path)
    return path


# ---- solve ----


def test_solve_with_nothing_but_the_question() -> None:
    document = run("solve", "--for", "link.bandwidth_gb_per_s", "--target", "tpot_ms=50", "--json").document
    (found,) = document["answers"]
    assert (document["metric"], document["target"], document["goal"]) == ("tpot_mean_s", 0.05, "at most")
    system = Scenario.of(policy=NEAR).system.with_values({"link.bandwidth_gb_per_s": found["value"]})
    reached = evaluate("mixtral-8x7b", system, "tiny-mixtral-32l-mini", "context-aware")
    np.testing.assert_allclose(reached.tpot_mean_s, 0.05, rtol=1e-9, atol=0)
    (crossing,) = found["crossings"]
    for name in ("ttft_s", "migration_s", "decode_s", "end_to_end_s"):
        np.testing.assert_allclose(crossing[name], getattr(reached, name), rtol=1e-12, atol=0)
    assert found["met"] == [[found["value"], 5000.0]]
    assert (found["policy"], found["unit"], found["goal"]) == ("context-aware", "GB/s", "at most")
    text = run("solve", "--for", "link.bandwidth_gb_per_s", "--target", "tpot_ms=50").out
    for words in (f"{found['value']:.10g}", "[GB/s]", "from here up", "exact", "weakest source", "note: "):
        assert words in text
    # Decode meets the target where copying the experts takes an hour.
    assert f"migration takes {crossing['migration_s']:.4g} s of {crossing['end_to_end_s']:.4g} s end to end" in text
    for words in ("TTFT [s]", "migration [s]", "decode [s]", "end to end [s]", f"{crossing['end_to_end_s']:.4g}"):
        assert words in text


def test_solve_says_the_same_as_the_function() -> None:
    arguments = ("solve", "--for", "gpu_experts", "--target", "tpot_ms=20", *SHORT)
    (found,) = run(*arguments, "--json").document["answers"]
    expected = json.loads(json.dumps(solve(scenario("context-aware"), "gpu_experts", "tpot_ms=20").to_dict()))
    assert found == {**expected, "reason": None}
    text = run(*arguments).out
    assert "step" in text
    assert "does not fit" in text
    everywhere = run("solve", "--for", "ndp.arrays", "--target", "tpot_ms=1e6", "--high", 64, *SHORT).out
    assert "met everywhere: at 1 to 64; searched 1 to 64" in everywhere


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--for", "link.bandwidth_gb_per_s", "--target", "tpot=50"), ("has no unit", "tpot_ms or tpot_mean_s")),
        (("--for", "ndp.arrays", "--target", "tpot_ms=9", "--target", "tpot_ms=8"), ("--target", "given twice")),
        (("--for", "ndp.arrays", "--for", "ndp.rows", "--target", "tpot_ms=9"), ("--for", "given twice")),
        (("--for", "ndp.arrays", "--target", "tpot_ms=9", "--along", "ndp.rows=1:2"), ("start:stop:count",)),
        (("--for", "ndp.arrays", "--target", "tpot_ms=9", "--along", "ndp.arrays=1,2"), ("other axes than",)),
        (("--for", "link.bandwith_gb_per_s", "--target", "tpot_ms=50"), ("did you mean",)),
        (("--for", "link.bandwidth_gb_per_s", "--target", "tpt_ms=50"), ("did you mean", "tpot_ms")),
        (("--for", "link.bandwidth_gb_per_s", "--target", "tpot_ms"), ("NAME=VALUE",)),
        (("--for", "link.bandwidth_gb_per_s"), ("--target",)),
        (("--target", "tpot_ms=50"), ("--for",)),
        (("--for", "policy.overlap", "--target", "tpot_ms=50"), ("words",)),
        (("--for", "ndp.arrays", "--target", "tpot_ms=50", "--low", "1.5"), ("whole",)),
        (("--for", "ndp.arrays", "--target", "tpot_ms=50", "--low", "x"), ("--low",)),
        (("--for", "ndp.arrays", "--target", "tpot_ms=50", "--low", "9", "--high", "3"), ("low end below",)),
        (("--for", "ndp.arrays", "--target", "tpot_ms=9", "--policy", "monde", "--policy", "monde"), ("same policy",)),
        (("--for", "ndp.arrays", "--target", "tpot_ms=9", "--policy", "hobit"), ("did you mean hobbit",)),
        (("--for", "ndp.arrays", "--target", "tpot_ms=9", "--system", "nothing"), ("nothing",)),
        (("--for", "ndp.arrays", "--target", "tpot_ms=9", "--loss", "/nowhere.npz"), ("/nowhere.npz",)),
    ],
)
def test_solve_refuses(arguments: tuple[str, ...], words: tuple[str, ...]) -> None:
    check_refusal(run("solve", *arguments, *SHORT), *words)


def test_a_target_that_is_out_of_reach_is_an_answer() -> None:
    arguments = ("solve", "--for", "link.bandwidth_gb_per_s", "--target", "tpot_ms=50", *SHORT)
    both = (*arguments, "--policy", "monde", "--policy", "hobbit")
    answer = run(*both)
    assert (answer.code, answer.err) == (1, "")
    with pytest.raises(NoAnswerError) as error:
        solve(scenario("monde"), "link.bandwidth_gb_per_s", "tpot_ms=50")
    assert str(error.value) in answer.out
    found = solve(scenario("hobbit"), "link.bandwidth_gb_per_s", "tpot_ms=50")
    assert f"met at {found.value:.6g} to 5000 GB/s" in answer.out
    answer = run(*both, "--json")
    assert answer.code == 1
    monde, hobbit = json.loads(answer.out)["answers"]
    assert (monde["policy"], monde["value"], monde["met"], monde["reason"]) == ("monde", None, [], str(error.value))
    assert monde["nearest"]["link.bandwidth_gb_per_s"] == 5000.0
    assert (hobbit["policy"], hobbit["value"], hobbit["reason"]) == ("hobbit", found.value, None)
    assert run(*arguments, "--policy", "hobbit").code == 0
    for command in ("solve", "best", "pareto", "break-even"):
        text = " ".join(run(command, "--help").out.split())
        assert "Exit code: 0 with an answer, 1 if" in text
        assert "2 after bad input" in text


def test_solve_along_a_further_axis() -> None:
    arguments = ("solve", "--for", "mean_bits", "--target", "tpot_ms=30", "--along", "ndp.arrays=4,64", *SHORT)
    few, many = run(*arguments, "--json").document["answers"]
    assert (few["settings"], many["settings"]) == ({"ndp.arrays": 4}, {"ndp.arrays": 64})
    for one in (few, many):
        expected = solve(scenario("context-aware"), "mean_bits", "tpot_ms=30", settings=one["settings"])
        assert one["met"] == [list(ends) for ends in expected.met]
    text = run(*arguments).out
    assert "context-aware, ndp.arrays=4: tpot_mean_s at most 0.03 s" in text
    assert "context-aware, ndp.arrays=64: tpot_mean_s at most 0.03 s" in text


def test_both_sides_of_a_step_are_told_apart() -> None:
    low, high = (evaluate(*NAMES, f"context-aware:mean_bits={b}", prompt=8, output=8).tpot_mean_s for b in (2, 3))
    target = f"tpot_s={(low + high) / 2!r}"
    text = run("solve", "--for", "mean_bits", "--target", target, *SHORT).out
    found = solve(scenario("context-aware"), "mean_bits", target)
    (one,) = found.crossings
    assert one.beyond is not None
    assert f"{one.value:.10g}" == f"{one.beyond:.10g}"
    assert f"step, {one.reached_beyond:.6g} just above" in text
    whole = run("solve", "--for", "ndp.arrays", "--target", "tpot_ms=50", "--low", 1, *SHORT).out
    assert re.search(r"step, [0-9.]+ at [0-9]+", whole)


# ---- sensitivity ----


def test_sensitivity_of_the_hardware(tmp_path: Path) -> None:
    out = tmp_path / "tornado.nc"
    arguments = ("sensitivity", "--policy", NEAR, "--policy", "hobbit", "--change", 0.2, *SHORT)
    found = run(*arguments, "--json", "-o", out).document
    expected = tornado(scenario(NEAR, "hobbit"), change=0.2)
    assert open_dataset(out).equals(expected)
    assert [one["key"] for one in found["keys"]] == expected.key.values.tolist()
    first = found["keys"][0]
    assert first["policies"]["hobbit"]["low"] == float(expected.value.sel(policy="hobbit", side="low")[0])
    assert found["base"][NEAR] == float(expected.base[0])
    text = run(*arguments).out
    for words in (first["key"], "swing [%]", "no effect", "zero", "not changed alone", "hobbit: tpot_mean_s"):
        assert words in text


def test_sensitivity_under_an_engine_leaves_out_what_it_replaces() -> None:
    arguments = (
        "sensitivity",
        "--system",
        "rtx4090-pcie4-cpu",
        "--engine",
        "vllm",
        "--policy",
        "fiddler:bits=4",
        *SHORT,
    )
    found = run(*arguments, "--json").document
    keys = {one["key"] for one in found["keys"]}
    assert "engine.memory_efficiency" in keys
    assert "gpu.memory_efficiency" not in keys
    shares = run(*arguments, "--sobol", "--n", 16, "--json")
    assert shares.code == 0


def test_sensitivity_by_ranges_and_shares(tmp_path: Path) -> None:
    out = tmp_path / "sobol.nc"
    ranges = ("--range", "mean_bits=1:4", "--range", "link.bandwidth_gb_per_s=1:100:log")
    arguments = ("sensitivity", "--sobol", "--n", 16, "--seed", 3, *ranges, *SHORT)
    found = run(*arguments, "--json", "-o", out).document
    limits = {"mean_bits": (1.0, 4.0), "link.bandwidth_gb_per_s": (1.0, 100.0, "log")}
    expected = sobol_indices(scenario("context-aware"), limits, 16, 3)
    assert open_dataset(out).equals(expected)
    assert [one["policies"]["context-aware"]["total"] for one in found["keys"]] == expected.total[0].values.tolist()
    assert "with interactions [1]" in run(*arguments).out
    one_each = run("sensitivity", "--range", "mean_bits=1:4", "--metric", "ttft_s", *SHORT, "--json").document
    assert [(one["key"], one["low"], one["high"]) for one in one_each["keys"]] == [("policy.mean_bits", 1.0, 4.0)]
    by_default = run("sensitivity", "--sobol", "--n", 16, "--key", "link.latency_us", *SHORT, "--json").document
    (one,) = by_default["keys"]
    np.testing.assert_allclose([one["low"], one["high"]], [0.225, 0.275], rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--key", "link.bandwith"), ("link.bandwith",)),
        (("--metric", "tpot"), ("metric", "tpot_mean_s")),
        (("--change", "-1"), ("above 0",)),
        (("--change", "1"), ("below 1",)),
        (("--change", "1e308", "--key", "output"), ("below 1",)),
        (("--metric", "ttft_s", "--metric", "tpot_mean_s"), ("--metric", "given twice")),
        (("--n", "16"), ("--sobol",)),
        (("--sobol", "--n", "17"), ("power of two",)),
        (("--range", "mean_bits"), ("AXIS=LOW:HIGH",)),
        (("--range", "mean_bits=1,2"), ("LOW:HIGH",)),
        (("--range", "mean_bits=1:9"), ("1 to 4",)),
        (("--range", "link.latency_us=1:2:log"), ("--sobol only",)),
        (("--range", "mean_bits=1:2", "--range", "mean_bits=1:3"), ("twice",)),
        (("--range", "mean_bits=1:2", "--change", "0.1"), ("not allowed",)),
        (("-o", "x.txt"), (".nc",)),
    ],
)
def test_sensitivity_refuses(
    arguments: tuple[str, ...], words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    check_refusal(run("sensitivity", *arguments, *SHORT), *words)
    assert list(tmp_path.iterdir()) == []


# ---- break-even ----


def test_break_even_line(tmp_path: Path) -> None:
    out = tmp_path / "line.nc"
    axis = "ndp.dram_bandwidth_gb_per_s"
    arguments = ("break-even", "--axis", f"{axis}=1:500", "--along", "mean_bits=2,4", *SHORT)
    found = run(*arguments, "--json", "-o", out).document
    policies = ("context-aware", "hobbit")
    expected = break_even(scenario(*policies), (axis, 1, 500), along=("mean_bits", [2, 4]))
    assert open_dataset(out).equals(expected)
    values = [line["crossings"][0]["value"] for line in found["lines"]]
    assert values == expected.break_even[:, 0].values.tolist()
    assert [line["along"] for line in found["lines"]] == [{"policy.mean_bits": 2.0}, {"policy.mean_bits": 4.0}]
    text = run(*arguments).out
    for words in (f"{values[0]:.10g}", "[GB/s]", "hobbit", "exact", "a [s]"):
        assert words in text


def test_sensitivity_to_all_that_is_allowed() -> None:
    found = run("sensitivity", "--change", "0.99", *SHORT, "--json").document
    assert found["clipped"]
    assert all(one["low"] < one["high"] for one in found["keys"])


def test_break_even_that_never_comes() -> None:
    arguments = ("break-even", "--axis", "link.bandwidth_gb_per_s", *SHORT)
    assert f"no crossing: {NEAR} all along" in run(*arguments).out
    (line,) = run(*arguments, "--json").document["lines"]
    assert line == {"along": {}, "winner": NEAR, "crossings": []}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), ("--axis",)),
        (("--axis", "ndp.arays"), ("did you mean",)),
        (("--axis", "ndp.arrays=1"), ("LOW:HIGH",)),
        (("--axis", "ndp.arrays=1:x"), ("ndp.arrays",)),
        (("--axis", "=1:2"), ("NAME=LOW:HIGH",)),
        (("--axis", "ndp.arrays=8:8"), ("equal",)),
        (("--axis", "ndp.arrays", "--axis", "ndp.rows"), ("--axis", "given twice")),
        (("--axis", "ndp.arrays", "--along", "a=1", "--along", "b=1"), ("--along", "given twice")),
        (("--axis", "ndp.arrays", "--policy", "monde"), ("found 1", "two policies")),
        (("--axis", "ndp.arrays", "--policy", "monde", "--policy", "monde"), ("same policy",)),
        (("--axis", "ndp.arrays", "--along", "mean_bits"), ("NAME=VALUES",)),
        (("--axis", "ndp.arrays", "--along", "mean_bits=1:2"), ("start:stop:count",)),
        (("--axis", "ndp.arrays", "--along", "ndp.arrays=1,2"), ("another axis",)),
        (("--axis", "ndp.arrays", "--metric", "x"), ("metric",)),
        (
            (
                "--axis",
                "ndp.arrays",
                "--along",
                "mean_bits=2,4",
                "--policy",
                "context-aware:mean_bits=3",
                "--policy",
                "hobbit",
            ),
            ("sets mean_bits itself",),
        ),
        (("--axis", "ndp.arrays", "-o", "/dev/null/x.nc"), ("/dev/null/x.nc",)),
    ],
)
def test_break_even_refuses(arguments: tuple[str, ...], words: tuple[str, ...]) -> None:
    check_refusal(run("break-even", *arguments, *SHORT), *words)


# ---- pareto and best ----


def test_front_of_a_file(swept: Path, tmp_path: Path) -> None:
    out = tmp_path / "front.csv"
    arguments = ("pareto", swept, "--minimise", "tpot_mean_s,gpu_memory_bytes")
    found = run(*arguments, "--json", "-o", out).document
    points = [(one["policy"], one["link.bandwidth_gb_per_s"]) for one in found["points"]]
    assert points == [("context-aware", 64.0), ("hobbit", 32.0)]
    assert found["objectives"] == {"tpot_mean_s": "minimise", "gpu_memory_bytes": "minimise"}
    assert pd.read_csv(out)["tpot_mean_s"].tolist() == [0.2, 0.25]
    text = run(*arguments).out
    for words in ("2 points", "tpot_mean_s [s]", "link.bandwidth_gb_per_s [GB/s]", "note: 4 of 8 experts"):
        assert words in text
    short = run("pareto", swept, "--minimise", "tpot_mean_s,bandwidth_gb_per_s", "--json").document
    assert list(short["objectives"]) == ["tpot_mean_s", "link.bandwidth_gb_per_s"]
    assert run("best", swept, "--where", "bandwidth_gb_per_s < 20", "--json").document["value"] == 0.5
    folder = tmp_path / "front.nc"
    run("pareto", swept, "--maximise", "link.bandwidth_gb_per_s", "--minimise", "tpot_mean_s", "-o", folder)
    expected = pareto(open_dataset(swept), "tpot_mean_s", "link.bandwidth_gb_per_s")
    assert open_dataset(folder).equals(expected)


def test_no_point_is_an_answer(swept: Path) -> None:
    for command in (("best",), ("pareto", "--minimize", "tpot_mean_s")):
        answer = run(command[0], swept, *command[1:], "--where", "tpot_ms < 100")
        assert (answer.code, answer.err) == (1, "")
        for words in (f"{command[0]}: no point of 6", "the nearest", "context-aware", "misses tpot_ms < 100 by 100 %"):
            assert words in answer.out
        answer = run(command[0], swept, *command[1:], "--where", "tpot_ms < 100", "--json")
        assert answer.code == 1
        document = json.loads(answer.out)
        assert document["answer"] is None
        assert "no point of 6" in document["reason"]
        nearest = {"policy": "context-aware", "link.bandwidth_gb_per_s": 64.0, "tpot_mean_s": 0.2}
        assert document["nearest"] == nearest


def test_several_conditions_and_american_spelling(swept: Path) -> None:
    arguments = ("best", swept, "--where", "policy == 'hobbit' or tpot_ms < 1", "--where", "bandwidth_gb_per_s < 30")
    found = run(*arguments, "--json").document
    assert found["value"] == 0.8
    assert found["where"] == "(policy == 'hobbit' or tpot_ms < 1) and (bandwidth_gb_per_s < 30)"
    for option in ("--maximise", "--maximize"):
        assert run("best", swept, option, "--json").document["value"] == 0.8
    assert run("best", swept, "--minimize", "--metric", "bandwidth_gb_per_s", "--json").document["value"] == 16.0
    small, large = ("tpot_mean_s", "bandwidth_gb_per_s")
    british, american = (
        run("pareto", swept, f"--minimi{s}e", small, f"--maximi{s}e", large, "--json").document for s in "sz"
    )
    assert british == american
    held = run("pareto", swept, "--minimise", small, "--where", "bandwidth_gb_per_s == 32", "--json").document
    assert [one["link.bandwidth_gb_per_s"] for one in held["points"]] == [32.0]


def test_axes_that_do_not_matter_to_the_best_point(swept: Path) -> None:
    found = run("best", swept, "--metric", "gpu_memory_bytes", "--json").document
    assert found["any"] == ["link.bandwidth_gb_per_s"]
    assert "any (here 16)" in run("best", swept, "--metric", "gpu_memory_bytes").out


def test_best_of_a_file(swept: Path) -> None:
    condition = "policy == 'hobbit' or link.bandwidth_gb_per_s < 30"
    found = run("best", swept, "--where", condition, "--json").document
    expected = best(open_dataset(swept), constraint=condition)
    assert found["value"] == 0.25 == float(expected.tpot_mean_s)
    assert found["point"]["policy"] == "hobbit"
    assert found["point"]["link.bandwidth_gb_per_s"] == 32.0
    text = run("best", swept, "--where", condition).out
    for words in ("best tpot_mean_s where policy ==", "0.25 s", "hobbit", "GB/s"):
        assert words in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("best", "--where", "tpot < 0.1"), ("has no unit", "tpot_ms or tpot_mean_s")),
        (("best", "--where", "tpt < 0.1"), ("unknown name", "gpu_memory_bytes, link.bandwidth_gb_per_s, policy, tpot")),
        (("best", "--maximise", "--minimise"), ("not allowed with",)),
        (("best", "--metric", "tpot_mean_s", "--metric", "tpot_mean_s"), ("--metric", "given twice")),
        (("pareto", "--minimise", "tpot_mean_s", "--where", "a < 1"), ("unknown name",)),
        (("best", "--where", "import os"), ("unknown name",)),
        (("best", "--metric", "ttft_s"), ("ttft_s", "allowed")),
        (("pareto",), ("at least one",)),
        (("pareto", "--minimise", "tpot"), ("did you mean",)),
        (("pareto", "--minimise", "tpot_mean_s", "--maximise", "tpot_mean_s"), ("twice",)),
        (("pareto", "--minimise", "tpot_mean_s", "-o", "front.xlsx"), (".parquet",)),
    ],
)
def test_questions_to_a_file_that_are_refused(
    arguments: tuple[str, ...], words: tuple[str, ...], swept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    check_refusal(run(arguments[0], swept, *arguments[1:]), *words)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", [("pareto", "--minimise", "tpot_mean_s"), ("best",)])
@pytest.mark.parametrize("name", ["missing.nc", "text.nc", "table.csv", "folder.zarr"])
def test_files_that_are_no_sweep(command: tuple[str, ...], name: str, tmp_path: Path) -> None:
    (tmp_path / "text.nc").write_text("no netCDF\n")
    (tmp_path / "table.csv").write_text("a,b\n1,2\n")
    (tmp_path / "folder.zarr").mkdir()
    check_refusal(run(command[0], tmp_path / name, *command[1:]), name)
