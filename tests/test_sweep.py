"""Sweeps in memory: the numbers of single comparisons, whatever the threads and blocks; and what is refused."""

import itertools
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfmodel import progress
from perfmodel.errors import PerfModelError
from perfmodel.hardware import load_system
from perfmodel.run import evaluate
from perfmodel.sweeps import executor
from perfmodel.sweeps.api import run_sweep, sweep
from perfmodel.sweeps.request import Request
from perfmodel.sweeps.summary import ranges

POLICIES = ["monde", "context-aware:mean_bits=3"]
WORKLOAD: dict[str, Any] = {"model": "mixtral-8x7b", "trace": "tiny-mixtral-32l-mini", "prompt": 8, "output": 8}
SYSTEM = "h100-cxl2-ndp"
GRID: dict[str, Any] = {
    "link.bandwidth_gb_per_s": [16.0, 40.0, 55.5],
    "ndp.arrays": [8, 64],
    "gpu.memory_bandwidth_gb_per_s": [900.0, 3350.0],
}


def small_request(**changes: Any) -> Request:
    """Two policies, one of whose plans does not fit, and two hardware axes."""
    axes = {"gpu_experts": [2, 4, 8], "link.bandwidth_gb_per_s": "16:64:23", "link.latency_us": "0.1:10:31:log"}
    return Request.of(**{**WORKLOAD, "policy": POLICIES, "axes": axes, **changes})


def test_grid_equals_comparisons() -> None:
    metrics = ["tpot_mean_s", "tpot_p99_s", "ttft_s", "end_to_end_s", "hit_rate"]
    found = sweep(**WORKLOAD, system=SYSTEM, policy=POLICIES, axes=GRID, metrics=metrics, progress=False)
    assert found["tpot_mean_s"].shape == (2, 3, 2, 2)
    system = load_system(SYSTEM)
    for policy, *values in itertools.product(POLICIES, *GRID.values()):
        where = dict(zip(GRID, values, strict=True))
        one = evaluate(policy=policy, system=system.with_values(where), **WORKLOAD)
        point = found.sel(policy=policy, **where)
        for name in ("tpot_mean_s", "tpot_p99_s", "ttft_s", "end_to_end_s"):
            assert point[name].item() == getattr(one, name), (name, where)
        if one.hit_rate is None:
            assert np.isnan(point["hit_rate"].item())
        else:
            assert point["hit_rate"].item() == one.hit_rate.own


@settings(max_examples=8)
@given(threads=st.integers(1, 4), memory_gb=st.sampled_from([0.001, 0.003, 1.0]), points=st.integers(1, 900))
def test_threads_and_blocks_change_no_bit(threads: int, memory_gb: float, points: int) -> None:
    request = small_request()
    expected = run_sweep(request, threads=1, progress=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executor, "_FEWEST_POINTS", 1)
        patch.setattr(executor, "_MOST_POINTS", points)
        found = run_sweep(request, threads=threads, memory_gb=memory_gb, progress=False)
    assert found.identical(expected)


def test_plans_that_do_not_fit_are_counted() -> None:
    found = run_sweep(small_request(), progress=False)
    place = found["tpot_mean_s"].sel(policy="context-aware:mean_bits=3")
    assert np.isnan(place.sel({"policy.gpu_experts": 8})).all()
    assert not np.isnan(place.sel({"policy.gpu_experts": [2, 4]})).any()
    assert not np.isnan(found["tpot_mean_s"].sel(policy="monde")).any()
    stated = json.loads(found.attrs["infeasible"])
    assert (stated["points"], stated["of"]) == (23 * 31, 2 * 3 * 23 * 31)
    assert "does not fit" in stated["reasons"][0][0]


def test_a_block_is_bounded_by_memory_and_threads() -> None:
    axes = {"link.bandwidth_gb_per_s": "16:64:1000", "link.latency_us": "0.1:10:1000", "ndp.clock_ghz": "0.5:2:1000"}
    request = small_request(axes=axes)
    for threads, memory in itertools.product((1, 2, 16), (0.01, 0.1, 1.0)):
        plan = executor.plan_schedule(request, threads, memory)
        held = plan.in_flight * plan.points_per_block * (8 * 3 + 4)
        assert held <= memory * 1e9
        assert 1 <= plan.threads <= threads
        assert plan.points_per_block >= 1024
    slow = executor.plan_schedule(small_request(axes=axes, metrics="tpot_p99_s"), 2, 1.0)
    assert slow.points_per_block < executor.plan_schedule(request, 2, 1.0).points_per_block
    # Where every point needs a plan of its own, a block is small.
    plans = small_request(axes={"gpu_experts": [2, 3, 4], "alpha": "0:1:1000"})
    assert executor.plan_schedule(plans, 1, 1.0).points_per_block < 500
    # A sweep that goes on keeps its blocks, and works on fewer of them at once.
    kept = executor.plan_schedule(request, 16, 0.01, points_per_block=2**18)
    assert (kept.points_per_block, kept.threads) == (2**18, 1)


def test_progress_is_told_every_block() -> None:
    seen: list[tuple[int, int]] = []
    request = small_request()
    run_sweep(request, threads=2, memory_gb=0.001, progress=lambda done, total: seen.append((done, total)))
    assert seen[0] == (0, request.design.size)
    assert seen[-1] == (request.design.size, request.design.size)
    assert len(seen) > 3
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})


def test_bar_shows_rate_and_is_silent_off_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    run_sweep(small_request())
    assert capsys.readouterr() == ("", "")
    run_sweep(small_request(), progress=True)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "100% of 4.28 k points" in shown.err


@pytest.mark.parametrize(("number", "text"), [(7, "7"), (1250, "1.25 k"), (3.2e6, "3.2 M"), (1e9, "1 G"), (0.5, "0.5")])
def test_short_numbers(number: float, text: str) -> None:
    assert progress.short(number) == text


def test_an_error_in_a_block_is_raised_once_and_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def fail(_self: Request, block: Any) -> Any:
        calls.append(block.index)
        raise PerfModelError("block: broken")

    monkeypatch.setattr(Request, "price", fail)
    with pytest.raises(PerfModelError, match="block: broken"):
        run_sweep(small_request(), threads=2, memory_gb=0.001, progress=False)
    assert len(calls) < 5


def test_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "study.toml"
    path.write_text(
        'kind = "sweep"\npolicy = ["monde"]\nprompt = 8\noutput = 8\n[axes]\n"link.latency_us" = "0.5:2:4"\n'
    )
    found = run_sweep(path, progress=False)
    assert found.identical(run_sweep(str(path), progress=False))
    expected = sweep(policy=["monde"], prompt=8, output=8, axes={"link.latency_us": [0.5, 1.0, 1.5, 2.0]})
    np.testing.assert_array_equal(found["tpot_mean_s"], expected["tpot_mean_s"])


def test_summary_matches_the_arrays() -> None:
    found = run_sweep(small_request(metrics=["tpot_mean_s", "decode_tok_per_s"]), progress=False)
    lines = {(one.metric, one.policy): one for one in ranges(found)}
    assert len(lines) == 4
    for (name, policy), line in lines.items():
        values = found[name].sel(policy=policy)
        assert line.low == float(values.min())
        assert line.high == float(values.max())
        assert line.empty == int(values.isnull().sum())
        best = values.sel(line.best).item()
        assert best == (line.low if name == "tpot_mean_s" else line.high)
    # Read chunk by chunk, the same.
    found["tpot_mean_s"].encoding["preferred_chunks"] = dict(zip(found["tpot_mean_s"].dims, (1, 2, 5, 7), strict=True))
    assert ranges(found)[:2] == [lines["tpot_mean_s", policy] for policy in POLICIES]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"threads": 0}, "threads: found 0"),
        ({"threads": True}, "threads: found True"),
        ({"threads": 2.0}, "threads: found 2.0"),
        ({"memory_gb": float("nan")}, "memory_gb: found nan"),
        ({"memory_gb": 0}, "memory_gb: found 0"),
        ({"memory_gb": "1"}, "memory_gb: found '1'"),
        ({"dask": 8786}, "dask: found 8786"),
        ({"resume": True}, "resume needs an output"),
        ({"overwrite": True}, "overwrite needs an output"),
        ({"resume": True, "overwrite": True, "out": "a.zarr"}, "exclude each other"),
        ({"resume": True, "out": "a.nc"}, "a.nc: resume is for .zarr outputs"),
        ({"out": "a.hdf"}, "a.hdf: unknown kind"),
        ({"out": 7}, "found 7"),
        ({"out": "no\0name.zarr"}, "not a usable name"),
    ],
)
def test_bad_arguments(options: dict[str, Any], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PerfModelError) as caught:
        run_sweep(small_request(), **options)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_places_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text")
    (tmp_path / "folder.nc").mkdir()
    for out, words in (("file/a.zarr", "not a folder"), ("folder.nc", "is a folder")):
        with pytest.raises(PerfModelError, match=words):
            run_sweep(small_request(), out=tmp_path / out, progress=False)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["file", "folder.nc"]


@pytest.mark.parametrize("request_", [None, 7, {"axes": {}}])
def test_no_request(request_: Any) -> None:
    with pytest.raises(PerfModelError, match="allowed a Request, or the path"):
        run_sweep(request_)


def test_a_result_larger_than_the_machine_is_refused() -> None:
    wide = {f"link.{name}": "0.1:0.9:7000" for name in ("latency_us", "efficiency", "bandwidth_gb_per_s")}
    with pytest.raises(PerfModelError, match=r"need 5\.49e\+03 GB, and this machine has .*write it to a \.zarr output"):
        sweep(**WORKLOAD, policy=POLICIES, axes=wide)


def test_default_threads_are_the_cores_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 5, 7}, raising=False)
    assert executor.cores() == 3
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert executor.cores() == 1
