"""``perfmodel sweep``: files, summaries, resuming after a kill, and one line for every mistake."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import xarray as xr
from commands import check_refusal, run

from perfmodel.sweeps import store
from perfmodel.sweeps.dataset import open_dataset

SCENARIO = ("--policy", "monde", "--policy", "context-aware:mean_bits=3", "--prompt", "8", "--output", "8")
LINK = ("--axis", "link.bandwidth_gb_per_s=16:64:7")
LATENCY = ("--axis", "link.latency_us=0.5,1,2")


def test_summary(tmp_path: Path) -> None:
    out = tmp_path / "a.nc"
    answer = run("sweep", *SCENARIO, *LINK, *LATENCY, "--axis", "gpu_experts=2,8", "-o", out)
    assert answer.code == 0
    assert answer.err == f"wrote {out}\n"
    lines = answer.out.splitlines()
    sizes = "policy 2 x policy.gpu_experts 2 x link.bandwidth_gb_per_s 7 x link.latency_us 3"
    assert lines[0] == f"84 points = {sizes}"
    found = open_dataset(out)["tpot_mean_s"]
    for policy in ("monde", "context-aware:mean_bits=3"):
        (row,) = [line for line in lines if line.startswith(policy + " ")]
        values = found.sel(policy=policy)
        assert row.split()[1:3] == ["tpot_mean_s", "s"]
        np.testing.assert_allclose(
            [float(x) for x in row.split()[3:5]], [values.min(), values.max()], rtol=1e-3, atol=0
        )
        assert "link.bandwidth_gb_per_s=64, link.latency_us=0.5" in row
    assert "21 of 84 points cannot be run, and have no values:" in lines
    assert any(line.startswith("  21: ") and "does not fit" in line for line in lines)
    assert any(line.startswith("weakest source among the hardware constants: ") for line in lines)
    assert any("above the stated peak" in line for line in lines)


def test_a_row_a_point_of_a_small_sweep(tmp_path: Path) -> None:
    out = tmp_path / "a.nc"
    metrics = ("--metric", "tpot_mean_s", "--metric", "hit_rate")
    answer = run("sweep", *SCENARIO, *LATENCY, "--axis", "gpu_experts=2,8", *metrics, "-o", out)
    found = open_dataset(out)
    lines = answer.out.splitlines()
    head = lines.index(next(line for line in lines if line.split()[-2:] == ["[s]", "hit_rate"]))
    assert lines[head].split() == ["policy", "policy.gpu_experts", "link.latency_us", "tpot_mean_s", "[s]", "hit_rate"]
    rows = [line.split() for line in lines[head + 2 : head + 14]]
    assert lines[head + 14] == ""
    points = [(policy, experts, latency) for policy in ("monde", "context-aware:mean_bits=3") for experts in (2, 8)
              for latency in (0.5, 1, 2)]  # fmt: skip
    assert [tuple(row[:3]) for row in rows] == [(policy, str(n), f"{latency:g}") for policy, n, latency in points]
    for row, (policy, experts, latency) in zip(rows, points, strict=True):
        place = {"policy": policy, "policy.gpu_experts": experts, "link.latency_us": latency}
        for text, name in zip(row[3:], ("tpot_mean_s", "hit_rate"), strict=True):
            value = found[name].sel(place).item()
            assert text == ("-" if np.isnan(value) else f"{value:.4g}")
    assert rows[-1][3:] == ["-", "-"]  # eight experts do not fit
    assert rows[-4][3:] != ["-", "-"]
    # A point more, and one alone, have the summary only.
    for more in (("--axis", "link.latency_us=1:13:13"), ()):
        few = run("sweep", "--policy", "monde", *SCENARIO[4:], *more).out
        assert "tpot_mean_s [s]" not in few
        assert "lowest" in few


def test_json_document(tmp_path: Path) -> None:
    out = tmp_path / "a.zarr"
    document = run(
        "sweep", *SCENARIO, *LINK, "--metric", "tpot_p99_s", "--metric", "quant_loss_vs_uniform", "--json", "-o", out
    )
    data = document.document
    assert data["points"] == 14
    assert data["dimensions"] == {"policy": 2, "link.bandwidth_gb_per_s": 7}
    assert [(one["policy"], one["metric"]) for one in data["metrics"]] == [
        (policy, metric)
        for metric in ("tpot_p99_s", "quant_loss_vs_uniform")
        for policy in ("monde", "context-aware:mean_bits=3")
    ]
    # MoNDE quantises nothing, so that the ratio is nothing, not a number that JSON lacks.
    nothing = data["metrics"][2]
    assert (nothing["low"], nothing["high"], nothing["best"], nothing["empty"]) == (None, None, {}, 7)
    assert data["provenance"]["policies"] == ["monde", "context-aware:mean_bits=3"]
    assert data["provenance"]["infeasible"]["points"] == 0
    assert data["out"] == str(out)


def test_the_command_in_the_provenance_computes_the_same(tmp_path: Path) -> None:
    first = run(
        "sweep", *SCENARIO, *LINK, *LATENCY, "--zip", "link.bandwidth_gb_per_s,latency", "-o", tmp_path / "a.nc"
    )
    check_refusal(first, "latency")
    run("sweep", *SCENARIO, *LINK, *LATENCY, "--dtype", "float32", "-o", tmp_path / "a.nc")
    found = open_dataset(tmp_path / "a.nc")
    words = shlex.split(found.attrs["command"])
    assert words[0] == "perfmodel"
    assert run(*words[1:], "-o", tmp_path / "b.nc").code == 0
    assert open_dataset(tmp_path / "b.nc").identical(found)


@pytest.mark.parametrize("suffix", [".nc", ".zarr", ".csv", ".parquet"])
def test_every_kind_of_output(suffix: str, tmp_path: Path) -> None:
    out = tmp_path / f"a{suffix}"
    assert run("sweep", *SCENARIO, *LINK, *LATENCY, "-o", out, "--quiet").code == 0
    assert run("sweep", *SCENARIO, *LINK, *LATENCY, "-o", out, "--quiet").code == 0  # replaced
    expected = open_dataset(_reference(tmp_path))["tpot_mean_s"]
    if suffix in (".csv", ".parquet"):
        table = pd.read_csv(out) if suffix == ".csv" else pd.read_parquet(out)
        np.testing.assert_array_equal(table["tpot_mean_s"], expected.values.reshape(-1))
    else:
        assert open_dataset(out)["tpot_mean_s"].identical(expected)


def _reference(folder: Path) -> Path:
    path = folder / "reference.nc"
    assert run("sweep", *SCENARIO, *LINK, *LATENCY, "-o", path, "--threads", "1").code == 0
    return path


def test_axes_that_do_not_matter_are_any() -> None:
    arguments = ("sweep", *SCENARIO[:2], "--policy", "context-aware", *SCENARIO[4:], *LINK, "--axis", "gpu_experts=2,4")
    lines = run(*arguments).out.splitlines()
    (monde,) = [line for line in lines if line.startswith("monde ")]
    (ours,) = [line for line in lines if line.startswith("context-aware ")]
    assert "policy.gpu_experts=any, link.bandwidth_gb_per_s=64" in monde
    assert "any" not in ours
    metrics = run(*arguments, "--json").document["metrics"]
    assert [one["any"] for one in metrics] == [["policy.gpu_experts"], []]
    assert metrics[0]["best"]["policy.gpu_experts"] == 2


def test_notes_say_for_whom_and_over_which_range_they_hold() -> None:
    answer = run(
        "sweep", "--policy", "context-aware", *SCENARIO[:2], *SCENARIO[4:], "--axis", "gpu_experts=0:6:7", *LINK
    )
    notes = [line for line in answer.out.splitlines() if line.startswith("note: ")]
    assert "note: context-aware: 0 to 6 of 8 experts a layer on the GPU" in notes
    assert any(note.startswith("note: monde: MoNDE reading=one") for note in notes)
    assert sum("above the stated peak" in note for note in notes) == 1
    alone = run("sweep", "--policy", "context-aware", *SCENARIO[4:], "--axis", "gpu_experts=2").out.splitlines()
    assert "note: 2 of 8 experts a layer on the GPU" in alone


def test_samples_that_are_no_power_of_two_are_remarked_upon() -> None:
    arguments = ["sweep", *SCENARIO, "--axis", "link.latency_us=10:0.1:log"]
    remark = "note: a Sobol sequence is balanced only for powers of two, and 12 is none"
    assert remark in run(*arguments, "--sample", "sobol:12").out.splitlines()
    assert "balanced" not in run(*arguments, "--sample", "sobol:16").out
    assert "balanced" not in run(*arguments, "--sample", "lhs:12").out


def test_ends_of_a_range_in_either_order() -> None:
    down, up = (
        run("sweep", *SCENARIO, "--axis", f"link.latency_us={text}", "--json").document for text in ("8:1:8", "1:8:8")
    )
    for one, other in zip(down["metrics"], up["metrics"], strict=True):
        assert (one["low"], one["high"], one["best"]) == (other["low"], other["high"], other["best"])
    down, up = (
        run("sweep", *SCENARIO, "--axis", f"link.latency_us={text}", "--sample", "sobol:8", "--json").document[
            "metrics"
        ]
        for text in ("8:1", "1:8")
    )
    assert down == up


@pytest.mark.parametrize(
    "option",
    ["--cases", "--sample", "--model", "--system", "--trace", "--prompt", "--output", "--loss", "--dtype", "-o"],
)
def test_options_that_are_given_twice(option: str) -> None:
    value = {"--dtype": "float32", "--sample": "sobol:8"}.get(option, "8")
    check_refusal(run("sweep", *LINK, option, value, option, value), option, "given twice")


def test_an_option_that_no_policy_has() -> None:
    refused = run("sweep", "--policy", "monde", "--axis", "mean_bits=2")
    check_refusal(
        refused, "mean_bits", "none of the policies (monde) has this option; context-aware, static and adaptive have it"
    )
    assert "did you mean" not in refused.err


def test_file_and_options(tmp_path: Path) -> None:
    file = tmp_path / "study.toml"
    file.write_text(
        'kind = "sweep"\npolicy = ["monde"]\nprompt = 8\noutput = 8\nsystem = "h100-cxl-ndp"\n'
        '[axes]\n"link.latency_us" = [1, 2]\n"ndp.arrays" = [8, 16]\n'
    )
    data = run("sweep", file, "--json").document
    assert data["dimensions"] == {"policy": 1, "link.latency_us": 2, "ndp.arrays": 2}
    assert data["provenance"]["scenario"]["system"] == "h100-cxl-ndp"
    data = run("sweep", file, "--axis", "ndp.arrays=8:64:8", "--output", "4", *LINK, "--json").document
    assert data["dimensions"] == {
        "policy": 1, "link.latency_us": 2, "ndp.arrays": 8, "link.bandwidth_gb_per_s": 7,
    }  # fmt: skip
    assert data["provenance"]["scenario"]["output"] == 4
    assert data["provenance"]["scenario"]["prompt"] == 8


def test_samples_and_cases(tmp_path: Path) -> None:
    sampled = run("sweep", *SCENARIO, "--axis", "link.latency_us=0.1:10:log", "--sample", "sobol:16:3", "--json")
    assert sampled.document["dimensions"] == {"policy": 2, "sample": 16}
    table = tmp_path / "cases.csv"
    table.write_text("link.latency_us,ndp.arrays\n1,8\n2,16\n4,64\n")
    data = run("sweep", *SCENARIO, "--cases", table, "--json").document
    assert data["dimensions"] == {"policy": 2, "case": 3}
    assert data["metrics"][1]["best"].keys() >= {"link.latency_us", "ndp.arrays"}


def test_list_axes(tmp_path: Path) -> None:
    answer = run("sweep", "--list-axes")
    assert answer.code == 0
    for name in ("link.bandwidth_gb_per_s", "policy.mean_bits", "workload.output", "policy", "model", "ndp.arrays"):
        assert any(line.split()[:1] == [name] for line in answer.out.splitlines()), name
    listed = run("sweep", "--list-axes", "--policy", "monde", "--json").document
    names = [one["name"] for one in listed]
    assert "policy.reading" in names
    assert "policy.mean_bits" not in names
    assert next(one for one in listed if one["name"] == "ndp.arrays")["whole"] is True
    file = tmp_path / "study.toml"
    file.write_text('kind = "sweep"\npolicy = "monde"\n[axes]\n"link.latency_us" = [1]\n')
    assert run("sweep", file, "--list-axes", "--json").document == listed
    lines = answer.out.splitlines()
    for name, allowed in (
        ("policy.mean_bits", "numbers from 1 to 4 bit"),
        ("policy.alpha", "numbers from 0 to 1"),
        ("policy.gpu_experts", "whole numbers from 0 to 8 | auto"),
    ):
        (line,) = [line for line in lines if line.split()[:1] == [name]]
        assert line.endswith(allowed)
    assert run("sweep", "--list-axes", "--policy", "monde", "--prompt", "8", "--layers", "cycle", "--json").code == 0


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--axis", "link.latency_us=1"), ("--zip", "a,b"), ("--cases", "gone.csv"), ("--sample", "sobol:8"),
        ("--metric", "ttft_s"), ("--dtype", "float32"), ("--out", "a.nc"), ("--threads", "2"), ("--memory-gb", "1"),
        ("--dask", "x"),
    ],
)  # fmt: skip
def test_a_list_of_axes_takes_no_other_options(option: str, value: str) -> None:
    check_refusal(run("sweep", "--list-axes", option, value), f"not allowed with {option}")
    check_refusal(run("sweep", "--list-axes", "--prompt", "0"), "prompt", "found 0")


def test_help_says_what_happens_to_outputs() -> None:
    text = " ".join(run("sweep", "--help").out.split())
    assert "a finished sweep is replaced like any other output file" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--axis", "link.latency_us"], ["--axis", "NAME=VALUES"]),
        (["--axis", "workload.batch=1,2", "--batch", "3"], ["batch: given twice", "workload.batch", "3"]),
        (["--axis", "micro_batch=8,16", "--micro-batch", "8"], ["micro_batch: given twice", "8"]),
        (["--axis", "=1,2"], ["--axis", "NAME=VALUES"]),
        (["--axis", "link.latency_us=1", "--axis", "link.latency_us=2"], ["link.latency_us", "twice"]),
        (["--axis", "link.latency_us="], ["link.latency_us", "no values"]),
        (["--axis", "link.latncy_us=1"], ["link.latncy_us", "link.latency_us", "--list-axes"]),
        (["--axis", "link.latency_us=1,two"], ["link.latency_us", "'two'"]),
        (["--axis", "link.bandwidth_gb_per_s=-1"], ["link.bandwidth_gb_per_s", "-1"]),
        (["--axis", "ndp.arrays=1:4:6"], ["ndp.arrays", "whole numbers"]),
        ([*LINK, "--metric", "tpot_man_s"], ["tpot_man_s", "tpot_mean_s"]),
        ([*LINK, "--policy", "mondee"], ["mondee", "monde"]),
        ([*LINK, "--model", "nowhere"], ["nowhere"]),
        ([*LINK, "--dtype", "float16"], ["float16", "float32"]),
        ([*LINK, "--threads", "0"], ["threads", "0"]),
        ([*LINK, "--threads", "two"], ["--threads", "two"]),
        ([*LINK, "--memory-gb", "nan"], ["memory_gb", "nan"]),
        ([*LINK, "--dask", "nowhere"], ["dask", "nowhere"]),
        ([*LINK, "-o", "a.hdf5"], ["a.hdf5", ".zarr"]),
        ([*LINK, "-o", "a.nc", "--resume"], ["a.nc", "resume", ".zarr"]),
        ([*LINK, "--resume"], ["resume"]),
        ([*LINK, "-o", "a.zarr", "--resume", "--overwrite"], ["resume", "overwrite"]),
        ([*LINK, "--zip", "link.bandwidth_gb_per_s,link.latency_us"], ["zip", "link.latency_us"]),
        ([*LINK, *LATENCY, "--zip", "link.bandwidth_gb_per_s,link.latency_us"], ["zip", "7", "3"]),
        (["--cases", "nowhere.csv"], ["nowhere.csv"]),
        ([*LINK, "--sample", "dice:8"], ["sample", "dice"]),
        (["nowhere.toml"], ["nowhere.toml"]),
        (["--axis", "gpu_experts=8", "--policy", "context-aware"], ["none of its 1 points", "does not fit"]),
        (["--axis", "link.latency_us=1:1.000000000001:100"], ["link.latency_us", "too narrow for 100"]),
        (["--axis", "link.latency_us=1:9:10000000", "--axis", "link.efficiency=0.1:1:10000000"], ["1e+14 points"]),
        (["--axis", "link.latency_us=1:9", "--sample", "lhs:300000000"], ["300000000", "held in memory"]),
        (["--axis", "ndp.dram.data_rate_mt_s=100:200:50"], ["none of its", "data_rate_mt_s"]),
    ],
)
def test_mistakes(arguments: list[str], words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    check_refusal(run("sweep", *arguments), *words)
    assert list(tmp_path.iterdir()) == []


def test_no_point_at_all_leaves_nothing(tmp_path: Path) -> None:
    out = tmp_path / "a.zarr"
    arguments = ["sweep", "--policy", "context-aware", "--prompt", "8", "--output", "8", *LINK, "-o", out]
    assert run(*arguments).code == 0
    before = open_dataset(out)
    check_refusal(run(*arguments, "--axis", "gpu_experts=8"), "none of its 7 points", "does not fit")
    assert open_dataset(out).identical(before)
    assert [one.name for one in tmp_path.iterdir()] == ["a.zarr"]


def test_killed_from_outside_and_resumed(tmp_path: Path) -> None:
    out, whole = tmp_path / "a.zarr", tmp_path / "b.zarr"
    arguments: list[Any] = ["sweep", *SCENARIO, *LINK, "--axis", "link.latency_us=0.1:10:20000", "--memory-gb", "0.001"]
    command = [sys.executable, "-m", "perfmodel", *arguments, "-o", str(out)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        while process.poll() is None and _lines(out) < 5:
            time.sleep(0.002)
        # A second one is refused at once, with --resume too.
        for more in ([], ["--resume"]):
            check_refusal(run(*arguments, "-o", out, *more), "another process is writing this sweep")
        assert process.poll() is None, process.stderr.read() if process.stderr else ""
        process.send_signal(signal.SIGKILL)
    before = _lines(out)
    assert before >= 5
    check_refusal(run(*arguments, "-o", out), "unfinished", "--resume", "--overwrite")
    check_refusal(run(*arguments, "--metric", "decode_s", "-o", out, "--resume"), "other inputs", "decode_s")
    assert run(*arguments, "-o", out, "--resume").code == 0
    assert run(*arguments, "-o", whole).code == 0
    assert xr.open_zarr(out, chunks=None).identical(xr.open_zarr(whole, chunks=None))
    again = run(*arguments, "-o", out, "--resume")
    assert again.code == 0
    assert not os.path.lexists(tmp_path / ".a.zarr.lock")


def _lines(out: Path) -> int:
    journal = out / store.JOURNAL
    try:
        return journal.read_bytes().count(b"\n")
    except OSError:
        return 0


def test_worker_processes_give_the_same_document() -> None:
    arguments = ["sweep", *SCENARIO, *LINK, *LATENCY, "--json"]
    assert json.loads(run(*arguments, "--dask", "--threads", "1").out) == run(*arguments).document
