"""The commands that answer questions: text, JSON, files, and refusals in one line."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import xarray as xr
from commands import check_refusal, run

from perfmodel.answers import best, break_even, pareto, sobol_indices, solve, tornado
from perfmodel.run import evaluate
from perfmodel.scenario import Scenario
from perfmodel.sweeps.dataset import open_dataset, save

SHORT = ("--prompt", 8, "--output", 8)
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
    found = run("solve", "--for", "link.bandwidth_gb_per_s", "--target", "tpot_ms=50", "--json").document
    system = Scenario.of(policy=NEAR).system.with_values({"link.bandwidth_gb_per_s": found["value"]})
    reached = evaluate("mixtral-8x7b", system, "tiny-mixtral-32l-mini", "context-aware").tpot_mean_s
    np.testing.assert_allclose(reached, 0.05, rtol=1e-9, atol=0)
    assert found["met"] == [[found["value"], 5000.0]]
    assert (found["policy"], found["unit"], found["goal"]) == ("context-aware", "GB/s", "at most")
    text = run("solve", "--for", "link.bandwidth_gb_per_s", "--target", "tpot_ms=50").out
    for words in (f"{found['value']:.10g}", "[GB/s]", "from here up", "exact", "weakest source", "note: "):
        assert words in text


def test_solve_says_the_same_as_the_function() -> None:
    arguments = ("solve", "--for", "gpu_experts", "--target", "tpot_ms=20", *SHORT)
    found = run(*arguments, "--json").document
    expected = json.loads(json.dumps(solve(scenario("context-aware"), "gpu_experts", "tpot_ms=20").to_dict()))
    assert {name: found[name] for name in expected if name != "notes"} == {
        name: value for name, value in expected.items() if name != "notes"
    }
    assert found["notes"][: len(expected["notes"])] == expected["notes"]
    text = run(*arguments).out
    assert "step" in text
    assert "does not fit" in text
    everywhere = run("solve", "--for", "ndp.arrays", "--target", "tpot_ms=1e6", "--high", 64, *SHORT).out
    assert "met everywhere: at 1 to 64; searched 1 to 64" in everywhere


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--for", "link.bandwidth_gb_per_s", "--target", "tpot_ms=0.01"), ("never at most", "the best is")),
        (("--for", "link.bandwith_gb_per_s", "--target", "tpot_ms=50"), ("did you mean",)),
        (("--for", "link.bandwidth_gb_per_s", "--target", "tpt_ms=50"), ("did you mean", "tpot_ms")),
        (("--for", "link.bandwidth_gb_per_s", "--target", "tpot_ms"), ("NAME=VALUE",)),
        (("--for", "link.bandwidth_gb_per_s"), ("--target",)),
        (("--target", "tpot_ms=50"), ("--for",)),
        (("--for", "policy.overlap", "--target", "tpot_ms=50"), ("words",)),
        (("--for", "ndp.arrays", "--target", "tpot_ms=50", "--low", "1.5"), ("whole",)),
        (("--for", "ndp.arrays", "--target", "tpot_ms=50", "--low", "x"), ("--low",)),
        (("--for", "ndp.arrays", "--target", "tpot_ms=50", "--low", "9", "--high", "3"), ("low end below",)),
        (("--for", "ndp.arrays", "--target", "tpot_ms=9", "--policy", "monde", "--policy", "hobbit"), ("found 2",)),
        (("--for", "ndp.arrays", "--target", "tpot_ms=9", "--policy", "hobit"), ("did you mean hobbit",)),
        (("--for", "ndp.arrays", "--target", "tpot_ms=9", "--system", "nothing"), ("nothing",)),
        (("--for", "ndp.arrays", "--target", "tpot_ms=9", "--loss", "/nowhere.npz"), ("/nowhere.npz",)),
    ],
)
def test_solve_refuses(arguments: tuple[str, ...], words: tuple[str, ...]) -> None:
    check_refusal(run("solve", *arguments, *SHORT), *words)


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
        (("--axis", "ndp.arrays=8:1"), ("low end",)),
        (("--axis", "ndp.arrays", "--policy", "monde"), ("found 1", "two policies")),
        (("--axis", "ndp.arrays", "--policy", "monde", "--policy", "monde"), ("same policy",)),
        (("--axis", "ndp.arrays", "--along", "mean_bits"), ("NAME=VALUES",)),
        (("--axis", "ndp.arrays", "--along", "mean_bits=1:2"), ("start:stop:count",)),
        (("--axis", "ndp.arrays", "--along", "ndp.arrays=1,2"), ("another axis",)),
        (("--axis", "ndp.arrays", "--metric", "x"), ("metric",)),
        (("--axis", "ndp.arrays", "-o", "/dev/null/x.nc"), ("-o",)),
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
    folder = tmp_path / "front.nc"
    run("pareto", swept, "--maximise", "link.bandwidth_gb_per_s", "--minimise", "tpot_mean_s", "-o", folder)
    expected = pareto(open_dataset(swept), "tpot_mean_s", "link.bandwidth_gb_per_s")
    assert open_dataset(folder).equals(expected)


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
        (("best", "--where", "tpot_mean_s < 0.1"), ("the nearest", "context-aware", "by 1")),
        (("best", "--where", "tpot < 0.1"), ("unknown name", "tpot_mean_s")),
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
