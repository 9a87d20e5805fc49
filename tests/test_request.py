"""Requests: what a sweep computes, whatever way it is asked for, and the same numbers however it is divided."""

import json
import pickle
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import mixtral, recording

from perfmodel.errors import PerfModelError
from perfmodel.policies import parse_policy
from perfmodel.run import evaluate
from perfmodel.sweeps import layout
from perfmodel.sweeps.request import Request

SHORT: dict[str, Any] = {"prompt": 8, "output": 8}
POLICIES = ["monde:reading=balance", "hobbit", "context-aware"]
AXES: dict[str, Any] = {
    "link.bandwidth_gb_per_s": [16.0, 48.0],
    "gpu.memory_capacity_gb": [20, 80],
    "mean_bits": [1, 2.5],
    "ndp.arrays": [2, 64],
    "policy.gpu_experts": ["auto", 4],
}


def ask(policy: Any = "context-aware", axes: Any = None, **options: Any) -> Request:
    """A request with a short workload."""
    return Request.of(policy=policy, axes=axes, **{**SHORT, **options})


def whole(request: Request, points: int = 10**9) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    """All points of a request, priced in blocks of so many points."""
    found = {name: np.full(request.design.shape, 7.0) for name in request.metrics}
    reasons: dict[str, int] = {}
    for block in request.design.blocks(points):
        priced = request.price(block)
        for name, values in priced.values.items():
            assert values.shape == block.shape
            assert values.dtype == request.dtype
            found[name][block.slices] = values
        for reason, count in priced.infeasible.items():
            reasons[reason] = reasons.get(reason, 0) + count
    return found, reasons


def points_of(request: Request) -> list[dict[str, Any]]:
    """The axis values of every point, in C order, by plain loops."""
    found = []
    for index in np.ndindex(request.design.shape):
        point: dict[str, Any] = {}
        for dim, i in zip(request.design.dims, index, strict=True):
            point |= {name: values[i] for name, values in dim.axes.items()}
        found.append(point)
    return found


def alone(request: Request, point: dict[str, Any]) -> float:
    """Mean token time of one point by a single evaluation; NaN where it has no plan."""
    text = point.get("policy", request.scenario.labels[0])
    known = {option.name for option in type(parse_policy(text)).options()}
    options = {
        name.removeprefix("policy."): value
        for name, value in point.items()
        if name.startswith("policy.") and name.removeprefix("policy.") in known
    }
    name, _, spelled = text.partition(":")
    joined = ",".join(filter(None, [spelled, *(f"{key}={value}" for key, value in options.items())]))
    hardware = {key: value for key, value in point.items() if key.partition(".")[0] in ("gpu", "link", "ndp")}
    try:
        return evaluate(
            mixtral(), request.scenario.system.with_values(hardware), recording(), f"{name}:{joined}",
            prompt=int(point.get("workload.prompt", 8)), output=int(point.get("workload.output", 8)),
        ).tpot_mean_s  # fmt: skip
    except PerfModelError:
        return float("nan")


# ---- prices ----


def test_every_point_of_a_grid_is_its_own_evaluation() -> None:
    request = ask(POLICIES, AXES)
    assert [dim.name for dim in request.design.dims] == [
        "policy", "link.bandwidth_gb_per_s", "gpu.memory_capacity_gb", "policy.mean_bits", "policy.gpu_experts",
        "ndp.arrays",
    ]  # fmt: skip
    found, reasons = whole(request)
    expected = np.array([alone(request, point) for point in points_of(request)])
    np.testing.assert_array_equal(found["tpot_mean_s"].ravel(), expected)
    assert np.isnan(expected).sum() == sum(reasons.values()) > 0


@settings(max_examples=15)
@given(st.integers(1, 100))
def test_blocks_of_any_size_give_the_same_bits(points: int) -> None:
    request = ask(POLICIES, AXES, metrics=["tpot_mean_s", "ttft_s", "tpot_p95_s", "hit_rate"])
    first, reasons = whole(request)
    again, same = whole(pickle.loads(pickle.dumps(request)), points)
    for name, values in first.items():
        np.testing.assert_array_equal(values, again[name])
    assert reasons == same


def test_zipped_axes_vary_together() -> None:
    axes = {
        "link.bandwidth_gb_per_s": [16.0, 48.0, 16.0],
        "ndp.arrays": [2, 8],
        "mean_bits": [1, 2, 1],
        "policy": ["context-aware", "hobbit", "static"],
    }
    request = ask(None, axes, zip=[["policy", "mean_bits", "link.bandwidth_gb_per_s"]])
    assert request.design.shape == (3, 2)
    assert request.design.dims[0].name == "policy+policy.mean_bits+link.bandwidth_gb_per_s"
    assert request.scenario.labels == ("context-aware", "hobbit", "static")
    expected = [alone(request, point) for point in points_of(request)]
    for points in (1, 4, 100):
        np.testing.assert_array_equal(whole(request, points)[0]["tpot_mean_s"].ravel(), expected)


def test_cases_are_points_of_any_axes(tmp_path: Path) -> None:
    table = {
        "policy": ["hobbit", "context-aware", "hobbit", "monde:reading=balance", "context-aware"],
        "policy.gpu_experts": ["auto", 4, "auto", "auto", 4],
        "gpu.memory_capacity_gb": [80.0, 80.0, 40.0, 80.0, 20.0],
        "link.bandwidth_gb_per_s": [16.0, 32.0, 64.0, 16.0, 32.0],
        "output": [5, 8, 5, 3, 8],
    }
    pd.DataFrame(table).to_csv(tmp_path / "cases.csv", index=False)
    request = ask(None, {"ndp.clock_ghz": [0.5, 1.0]}, cases=tmp_path / "cases.csv")
    assert [dim.name for dim in request.design.dims] == ["case", "ndp.clock_ghz"]
    expected = [alone(request, point) for point in points_of(request)]
    assert np.isnan(expected).sum() == 2
    for points in (1, 3, 100):
        found, reasons = whole(request, points)
        np.testing.assert_array_equal(found["tpot_mean_s"].ravel(), expected)
        assert list(reasons.values()) == [2]
    in_memory = ask(None, {"ndp.clock_ghz": [0.5, 1.0]}, cases=table)
    assert in_memory.key() == request.key()


def test_samples_are_points_of_their_ranges() -> None:
    axes = {"link.bandwidth_gb_per_s": "16:64:log", "ndp.arrays": "1:8", "mean_bits": "1:4", "alpha": [0.25, 0.75]}
    request = ask("context-aware", axes, sample="sobol:8:3")
    assert {dim.name: dim.size for dim in request.design.dims} == {"policy": 1, "sample": 8, "policy.alpha": 2}
    expected = [alone(request, point) for point in points_of(request)]
    np.testing.assert_array_equal(whole(request, 3)[0]["tpot_mean_s"].ravel(), expected)


def test_small_numbers_are_rounded_once() -> None:
    axes = {"link.bandwidth_gb_per_s": [16.0, 48.0], "mean_bits": [1.0, 2.0]}
    double, single = (whole(ask(axes=axes, dtype=dtype))[0]["tpot_mean_s"] for dtype in ("float64", "float32"))
    np.testing.assert_array_equal(double.astype(np.float32), single.astype(np.float32))


@pytest.mark.parametrize("dtype", [np.float32, np.dtype("float32"), "float32"])
def test_types_of_numpy_are_types_of_results(dtype: Any) -> None:
    assert ask(dtype=dtype).dtype == "float32"
    assert ask(prompt=np.int64(8)).key() == ask(prompt=8).key()


def test_a_request_without_axes_is_one_point() -> None:
    request = ask()
    assert request.design.shape == (1,)  # the policy
    values = request.price(request.design.blocks(10)[0]).values["tpot_mean_s"]
    assert values.shape == (1,)
    assert values.item() == alone(request, {})


def test_memory_timings_vary_together_or_not_at_all() -> None:
    axes: dict[str, Any] = {
        "ndp.dram.data_rate_mt_s": [6400.0, 3200.0],
        "ndp.dram.peak_gb_per_s": [12.8, 6.4],
        "ndp.dram.tck_ns": [1.25, 2.5],
    }
    request = ask(axes=axes, zip=[list(axes)])
    expected = [alone(request, point) for point in points_of(request)]
    np.testing.assert_array_equal(whole(request)[0]["tpot_mean_s"].ravel(), expected)
    # Values that contradict each other are points without a value, among others that have one.
    crossed = ask(axes=axes)
    found, reasons = whole(crossed)
    expected = [alone(crossed, point) for point in points_of(crossed)]
    np.testing.assert_array_equal(found["tpot_mean_s"].ravel(), expected)
    assert np.isnan(expected).sum() == sum(reasons.values()) == 6
    assert all("zipped" in reason and "peak_gb_per_s is ..." in reason for reason in reasons)
    with pytest.raises(PerfModelError, match=r"ndp\.dram_efficiency"):
        ask(axes={"ndp.dram.n_rp": [15, 16], "ndp.dram_efficiency": [0.5, 0.6]})


def test_no_sweep_stops_half_way_because_values_contradict_each_other() -> None:
    # More combinations than anyone would look at beforehand; those that fit are near two lines of the grid.
    rates = np.linspace(3200.0, 6400.0, 40)
    axes: dict[str, Any] = {
        "ndp.dram.data_rate_mt_s": rates, "ndp.dram.peak_gb_per_s": rates / 500.0, "ndp.dram.tck_ns": [1.25, 2.5],
    }  # fmt: skip
    for policy in ("context-aware", "hobbit"):
        request = ask(policy, axes)
        found, reasons = whole(request)
        again, same = whole(request, 300)
        np.testing.assert_array_equal(found["tpot_mean_s"], again["tpot_mean_s"])
        assert reasons == same
        known = np.argwhere(~np.isnan(found["tpot_mean_s"][0])).tolist()
        assert [0, 0, 1] in known
        assert [39, 39, 0] in known
        for place in known:
            point = {name: float(values[i]) for (name, values), i in zip(axes.items(), place, strict=True)}
            assert found["tpot_mean_s"][0][tuple(place)] == alone(request, point)
        assert sum(reasons.values()) == found["tpot_mean_s"].size - len(known)
        assert len(reasons) <= 4, "one reason, whatever its numbers"


def test_options_that_contradict_each_other_are_points_without_a_plan() -> None:
    axes = {"selector": ["prefix", "uniform"], "mean_bits": [2.0, 2.5]}
    found, reasons = whole(ask("context-aware", axes))
    assert np.isnan(found["tpot_mean_s"]).tolist() == [[[False, False], [False, True]]]
    assert list(reasons.values()) == [1]
    zipped = ask("hobbit:split=gates", {"t1": [0.2, 0.95], "t2": [0.5, 0.99]}, zip="t1,t2")
    expected = [alone(zipped, {**point, "policy": "hobbit:split=gates"}) for point in points_of(zipped)]
    assert not np.isnan(expected).any()
    np.testing.assert_array_equal(whole(zipped)[0]["tpot_mean_s"].ravel(), expected)


def test_more_dimensions_than_arrays_have_are_refused() -> None:
    system = ask().scenario.system
    options: dict[str, list[Any]] = {"mean_bits": [3.0], "alpha": [0.5], "gpu_experts": ["auto"], "output": [8]}
    axes = {**options, **{key: [system.get(key)] for key in system.numeric_keys() if key != "ndp.dram_efficiency"}}
    assert len(axes) > 32
    with pytest.raises(PerfModelError, match=f"{1 + len(axes)} dimensions; allowed at most 32"):
        ask(axes=axes)
    request = ask(axes=dict(list(axes.items())[-31:]))
    assert len(request.design.shape) == 32
    assert whole(request)[0]["tpot_mean_s"].item() == alone(request, {})


def test_far_too_many_points_are_refused_before_they_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any) -> Any:
        raise AssertionError("values were made")

    monkeypatch.setattr(layout, "parse_values", never)
    with pytest.raises(PerfModelError, match=r"1e\+14 points"):
        ask(axes={"link.latency_us": "1:20:10000000", "link.bandwidth_gb_per_s": "1:20:10000000"})


# ---- ways to ask ----


def test_policies_may_be_an_axis() -> None:
    for axes in (
        {"policy": "monde,context-aware:mean_bits=2,alpha=1"},
        {"policy": ["monde", "context-aware:mean_bits=2,alpha=1"]},
    ):
        request = ask(None, axes)
        assert request.scenario.labels == ("monde", "context-aware:mean_bits=2,alpha=1")
        assert request.design.shape == (2,)
        assert request.key() == ask(["monde", "context-aware:mean_bits=2,alpha=1"]).key()


def test_default_policies_leave_out_what_is_varied() -> None:
    assert ask(None, {"mean_bits": [1, 2]}).scenario.labels == ("monde", "hobbit", "context-aware")
    assert ask(None, system="rtx4090-pcie4").scenario.labels == ("hobbit",)


def test_files_may_be_axes(tmp_path: Path) -> None:
    recording().sequences([0, 1]).save(tmp_path / "two.npz")
    axes = {
        "trace": ["tiny-mixtral-32l-mini", str(tmp_path / "two.npz")],
        "system": ["h100-cxl2-ndp", "rtx4090-pcie4"],
        "model": ["mixtral-8x7b", "mixtral-8x22b"],
    }
    request = ask("hobbit", axes, layers="cycle", metrics="decode_tok_per_s")
    found = whole(request)[0]["decode_tok_per_s"]
    expected = evaluate("mixtral-8x22b", "rtx4090-pcie4", tmp_path / "two.npz", "hobbit", layers="cycle", **SHORT)
    assert found[0, 1, 1, 1] == expected.decode_tok_per_s
    values, reasons = whole(ask(["monde", "hobbit"], {"system": axes["system"]}))
    assert np.isnan(values["tpot_mean_s"]).tolist() == [[False, True], [False, False]]
    assert len(reasons) == 1
    assert "near-data" in next(iter(reasons))


def test_hardware_axes_must_exist_in_every_system() -> None:
    with pytest.raises(PerfModelError, match="system rtx4090-pcie4 has no ndp"):
        ask("hobbit", {"system": ["h100-cxl2-ndp", "rtx4090-pcie4"], "ndp.arrays": [1, 2]})


def test_plain_values_rebuild_the_request(tmp_path: Path) -> None:
    pd.DataFrame({"ndp.arrays": [1, 2], "policy": ["monde", "hobbit"]}).to_csv(tmp_path / "cases.csv", index=False)
    for request in (
        ask(
            POLICIES,
            {"link.bandwidth_gb_per_s": "16:64:4", "ndp.cols": [1, 2], "ndp.rows": [3, 4]},
            zip="ndp.cols,ndp.rows",
        ),
        ask(None, {"link.latency_us": "1:2"}, sample="lhs:5:9", cases=str(tmp_path / "cases.csv"), dtype="float32"),
        ask(
            None,
            {"policy": ["monde", "hobbit"], "output": [3, 4]},
            zip="policy,output",
            metrics=["ttft_s", "tpot_p50_s"],
        ),
    ):
        again = Request.from_dict(json.loads(json.dumps(request.to_dict())))
        assert again.to_dict() == request.to_dict()
        assert again.key() == request.key()
        assert again.design.shape == request.design.shape


def test_what_existed_in_memory_cannot_be_rebuilt() -> None:
    for options in (
        {"cases": {"ndp.arrays": [1, 2]}},
        {"trace": recording()},
        {"model": mixtral()},
    ):
        request = ask(**options)
        with pytest.raises(PerfModelError, match="in memory only"):
            Request.from_dict(json.loads(json.dumps(request.to_dict())))
        assert "in memory only" in request.command()
    with pytest.raises(PerfModelError, match="request"):
        Request.from_dict({"axes": {}})


def test_the_key_follows_what_decides_the_numbers() -> None:
    axes = {"link.bandwidth_gb_per_s": "16:64:4"}
    key = ask("context-aware:mean_bits=3", axes).key()
    same = [
        ask("context-aware", {"link.bandwidth_gb_per_s": [16, 32, 48, 64]}),
        ask("context-aware:alpha=0.5", axes, trace=recording()),
    ]
    assert {one.key() for one in same} == {key}
    others = [
        ask("context-aware:mean_bits=2", axes), ask(axes=axes, output=9), ask(axes=axes, metrics="ttft_s"),
        ask(axes=axes, dtype="float32"), ask(axes={"link.bandwidth_gb_per_s": "16:64:5"}),
        ask(axes={"link.latency_us": "16:64:4"}), ask(axes=axes, system="h100-cxl-ndp"),
        ask(axes=axes, trace=recording().sequences([0])), ask(axes=axes, losses="tiny-mixtral-32l-losses"),
    ]  # fmt: skip
    keys = {one.key() for one in others}
    assert key not in keys
    assert len(keys) == len(others)


def test_the_key_holds_the_contents_of_profiles_and_files(tmp_path: Path) -> None:
    path = tmp_path / "two.npz"
    recording().sequences([0, 1]).save(path)
    ways: list[dict[str, Any]] = [
        {"policy": f"static:profile={path}"},
        {"policy": "static", "axes": {"policy.profile": [str(path)]}},
        {"policy": "hobbit", "axes": {"trace": [str(path)]}},
    ]
    before = [ask(**way).key() for way in ways]
    recording().sequences([2, 3]).save(path)
    after = [ask(**way).key() for way in ways]
    assert all(a != b for a, b in zip(before, after, strict=True))


def test_the_command_says_it_all() -> None:
    request = ask(
        ["monde", "context-aware:gpu_experts=4,alpha=0.25"],
        {"link.bandwidth_gb_per_s": "16: 64:4", "ndp.cols": [1, 2], "ndp.rows": [3, 4], "ndp.clock_ghz": "0.5:2:log"},
        zip="ndp.cols,ndp.rows", sample="sobol:4", metrics=["ttft_s", "tpot_mean_s"], dtype="float32", layers="cycle",
    )  # fmt: skip
    assert shlex.split(request.command()) == [
        "perfmodel", "sweep", "--model", "mixtral-8x7b", "--system", "h100-cxl2-ndp",
        "--trace", "tiny-mixtral-32l-mini", "--policy", "monde", "--policy", "context-aware:gpu_experts=4,alpha=0.25",
        "--prompt", "8", "--output", "8", "--layers", "cycle", "--axis", "link.bandwidth_gb_per_s=16:64:4",
        "--axis", "ndp.cols=1,2", "--axis", "ndp.rows=3,4", "--axis", "ndp.clock_ghz=0.5:2:log",
        "--zip", "ndp.cols,ndp.rows", "--sample", "sobol:4:0", "--metric", "ttft_s", "--metric", "tpot_mean_s",
        "--dtype", "float32",
    ]  # fmt: skip


# ---- files ----

TOML = """
kind = "sweep"
model = "mixtral-8x7b"
policy = ["hobbit", "context-aware"]
prompt = 8
output = 8
metrics = ["tpot_mean_s", "ttft_s"]
zip = [["ndp.cols", "ndp.rows"]]

[axes]
link.bandwidth_gb_per_s = "16:64:4"
"ndp.cols" = [1, 2]
ndp.rows = [3, 4]
gpu_experts = ["auto", 4]
"""


def write(folder: Path, text: str) -> Path:
    """A sweep file."""
    path = folder / "sweep.toml"
    path.write_text(text)
    return path


def test_a_file_says_the_same_as_python(tmp_path: Path) -> None:
    axes = {
        "link.bandwidth_gb_per_s": "16:64:4", "ndp.cols": [1, 2], "ndp.rows": [3, 4],
        "policy.gpu_experts": ["auto", 4],
    }  # fmt: skip
    asked = ask(["hobbit", "context-aware"], axes, zip=[["ndp.cols", "ndp.rows"]], metrics=["tpot_mean_s", "ttft_s"])
    assert Request.load(write(tmp_path, TOML)).to_dict() == asked.to_dict()


def test_arguments_replace_what_a_file_says(tmp_path: Path) -> None:
    path = write(tmp_path, TOML)
    axes = {"policy.gpu_experts": [3], "link.latency_us": [1, 2]}
    found = Request.load(path, axes=axes, policy="context-aware", output=5, model=None, metrics=["ttft_s"])
    assert found.scenario.output == 5
    assert found.scenario.labels == ("context-aware",)
    assert found.metrics == ("ttft_s",)
    assert found.design.axes["policy.gpu_experts"].tolist() == [3]
    assert set(found.design.axes) == {
        "link.bandwidth_gb_per_s", "ndp.cols", "ndp.rows", "policy.gpu_experts", "link.latency_us",
        "policy",
    }  # fmt: skip


def test_paths_start_at_the_folder_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "sub"
    folder.mkdir()
    recording().sequences([0]).save(folder / "one.npz")
    (folder / "cases.csv").write_text("ndp.arrays\n1\n2\n")
    text = 'kind = "sweep"\npolicy = "hobbit"\ntrace = "one.npz"\ncases = "./cases.csv"\n'
    path = write(folder, text + '[axes]\ntrace = ["one.npz", "tiny-mixtral-32l-mini"]\n')
    monkeypatch.chdir(tmp_path)
    found = Request.load(path)
    assert found.design.axes["trace"].tolist() == [str(folder / "one.npz"), "tiny-mixtral-32l-mini"]
    assert found.design.shape == (1, 2, 2)
    assert Request.load("sub/sweep.toml").key() == found.key()


def test_every_path_of_a_file_starts_at_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "sub"
    folder.mkdir()
    for name in ("one,two.npz", "three.npz"):
        recording().sequences([0, 1]).save(folder / name)
    monkeypatch.chdir(tmp_path)
    texts = {
        'policy = "hobbit"\n[axes]\ntrace = "one,two.npz; tiny-mixtral-32l-mini"': "trace",
        'policy = "hobbit"\n[axes]\ntrace = "three.npz,tiny-mixtral-32l-mini"': "trace",
        'policy = "static"\n[axes]\nprofile = "three.npz,others"': "policy.profile",
        '[axes]\npolicy = "monde,static:profile=three.npz,alpha=1"': "policy",
        'policy = ["static:profile=three.npz", "monde"]': "policy",
    }
    for text, axis in texts.items():
        request = Request.load(write(folder, f'kind = "sweep"\nprompt = 8\noutput = 8\n{text}\n'))
        assert len(request.design.axes[axis]) == 2
        assert not np.isnan(whole(request)[0]["tpot_mean_s"]).any()
        assert request.key()


def test_a_path_with_a_comma_survives(tmp_path: Path) -> None:
    path = tmp_path / "one,two.npz"
    recording().sequences([0, 1]).save(path)
    for values in (f"{path};", [str(path)], [str(path), "tiny-mixtral-32l-mini"]):
        request = ask("hobbit", {"trace": values})
        assert request.design.axes["trace"][0] == str(path)
        words = shlex.split(request.command())
        (text,) = [word for word in words if word.startswith("trace=")]
        assert ask("hobbit", {"trace": text.partition("=")[2]}).key() == request.key()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[axes]\nlink.latency_us = "1:x:3"', ["axis link.latency_us"]),
        ("[axes]\nlink.latency_us = [-1]", ["axis link.latency_us", "found -1"]),
        ('policy = "hobbt"', ["policy", "hobbit"]),
        ('zip = [["ndp.rows", "ndp.cols"]]', ["zip", "ndp.rows"]),
        ("[sample]\nn = 0", ["sample: n", "found 0"]),
        ('metrics = "tpot"', ["metric", "'tpot'"]),
        ('dtype = "int8"', ["dtype", "'int8'"]),
        ("prompt = 0", ["prompt", "found 0"]),
        ('layers = "x"', ["layers"]),
        ('cases = ""', ["cases: found ''"]),
        ('cases = "cases.csv"', ["cases.csv", "ndp.arrays", "value 2", "found 0"]),
        ('cases = "traces.csv"', ["traces.csv: column trace", "gone.npz"]),
        ('cases = "policies.csv"', ["policies.csv: column policy", "hobbit"]),
        ('cases = "names.csv"', ["names.csv", "'ndp.arrays'"]),
    ],
)
def test_mistakes_in_a_file_name_the_file(tmp_path: Path, text: str, words: list[str]) -> None:
    (tmp_path / "cases.csv").write_text("ndp.arrays\n1\n0\n")
    (tmp_path / "names.csv").write_text("ndp.array\n1\n")
    (tmp_path / "traces.csv").write_text("trace\ngone.npz\n")
    (tmp_path / "policies.csv").write_text("policy\nhobbt\n")
    path = write(tmp_path, f'kind = "sweep"\n{text}\n')
    with pytest.raises(PerfModelError) as error:
        Request.load(path)
    assert str(error.value).startswith(f"{path}: ")
    for word in words:
        assert word in str(error.value)
    with pytest.raises(PerfModelError) as error:
        Request.load(path, output=5)
    assert str(error.value).startswith(f"{path} (with other output): ")


def test_a_loss_table_by_both_names(tmp_path: Path) -> None:
    text = 'kind = "sweep"\npolicy = "context-aware"\n{} = "tiny-mixtral-32l-losses"\n'
    first, second = (Request.load(write(tmp_path, text.format(name))) for name in ("loss", "losses"))
    assert first.key() == second.key()
    assert first.scenario.references["loss"] == "tiny-mixtral-32l-losses"
    with pytest.raises(PerfModelError, match="two names of one key"):
        Request.load(write(tmp_path, text.format("loss") + 'losses = "x.npz"\n'))
    with pytest.raises(PerfModelError, match=f"{tmp_path}/x.npz"):
        Request.load(write(tmp_path, text.format("losses").replace("tiny-mixtral-32l-losses", "x.npz")))


def test_a_file_may_draw_samples(tmp_path: Path) -> None:
    text = (
        'kind = "sweep"\npolicy = "monde"\n[axes]\nlink.latency_us = "1:2"\n[sample]\nmethod = "lhs"\nn = 4\nseed = 2\n'
    )
    found = Request.load(write(tmp_path, text))
    assert found.design.shape == (1, 4)
    assert "--sample lhs:4:2" in found.command()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["kind", "missing"]),
        ('kind = "system"', ["'sweep'"]),
        ('kind = "sweep"\nmodell = "x"', ["'modell'", "'model'"]),
        ('kind = "sweep"\npolicy = 3', ["policy", "3"]),
        ('kind = "sweep"\nprompt = "8"', ["prompt", "whole number"]),
        ('kind = "sweep"\nprompt = true', ["prompt", "True"]),
        ('kind = "sweep"\naxes = [1]', ["axes", "table"]),
        ('kind = "sweep"\n[axes]\nlink.bandwith_gb_per_s = [1]', ["link.bandwidth_gb_per_s"]),
        ('kind = "sweep"\n[axes]\n"ndp.rows" = [1]\nndp.rows = [2]', ["twice"]),
        ('kind = "sweep"\n[axes]\nndp.rows = ["1"]', ["ndp.rows", "'1'"]),
        ('kind = "sweep"\n[sample]\nm = 3', ["sample", "'m'"]),
        ('kind = "sweep"\nmodel = "gone.json"', ["gone.json"]),
        ('kind = "sweep"\ncases = "gone.csv"', ["gone.csv"]),
        ("kind = ", ["TOML"]),
    ],
)
def test_refused_files(tmp_path: Path, text: str, words: list[str]) -> None:
    with pytest.raises(PerfModelError) as error:
        Request.load(write(tmp_path, text))
    assert "\n" not in str(error.value)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize("path", ["gone.toml", 3, "\0"])
def test_refused_paths_of_files(path: Any) -> None:
    with pytest.raises(PerfModelError):
        Request.load(path)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"axes": {"link.bandwidth_gb_per_s": "1:8"}}, ["no count", "start:stop:count"]),
        ({"axes": {"ndp.arrays": [1]}, "sample": "sobol:8"}, ["sample", "low:high"]),
        ({"axes": {"ndp.arrays": "0:8"}, "sample": "sobol:8"}, ["ndp.arrays", "found 0"]),
        ({"axes": {"ndp.arrays": "1.5:8"}, "sample": "sobol:8"}, ["ndp.arrays", "1.5"]),
        ({"policy": "context-aware:mean_bits=3", "axes": {"mean_bits": [1]}}, ["sets mean_bits itself"]),
        ({"axes": {"mean_bits": [1], "policy.mean_bits": [2]}}, ["twice"]),
        ({"axes": {"ndp.arrays": [1]}, "cases": {"ndp.arrays": [1]}}, ["twice"]),
        ({"policy": "monde", "axes": {"policy": ["hobbit"]}}, ["policy", "twice"]),
        ({"policy": None, "axes": {"policy": "monde,monde"}}, ["same policy"]),
        ({"policy": None, "axes": {"policy": [[1]]}}, ["policy"]),
        ({"policy": None, "cases": {"policy": [3]}}, ["policy", "3"]),
        ({"axes": {"model": []}}, ["model", "no values"]),
        ({"axes": {"model": ""}}, ["model", "no values"]),
        ({"axes": {3: [1]}}, ["3"]),
        ({"axes": [1]}, ["axes"]),
        (
            {"axes": {"ndp.rows": [1, 2], "ndp.cols": [1]}, "zip": "ndp.rows,ndp.cols"},
            ["ndp.rows has 2", "ndp.cols has 1"],
        ),
        ({"axes": {"ndp.rows": [1]}, "zip": "ndp.rows,ndp.cols"}, ["zip", "ndp.cols", "not an axis with values"]),
        ({"axes": {"ndp.rows": [1], "ndp.cols": [1]}, "zip": ["ndp.rows,ndp.cols"] * 2}, ["zipped twice"]),
        ({"cases": {"ndp.arrays": [1, 0]}}, ["cases", "value 2", "found 0"]),
        ({"cases": {"ndp.array": [1]}}, ["'ndp.arrays'"]),
        ({"metrics": []}, ["metrics"]),
        ({"metrics": 3}, ["metrics"]),
        ({"metrics": "tpot_mean"}, ["tpot_mean_s"]),
        ({"metrics": ["ttft_s", "ttft_s"]}, ["twice"]),
        ({"dtype": "float16"}, ["dtype", "float32"]),
        ({"dtype": np.float16}, ["dtype", "float32"]),
        ({"metrics": ["tpot_p50_s", "tpot_p050_s"]}, ["tpot_p050_s", "its name is tpot_p50_s"]),
        ({"metrics": "tpot_p50.0_s"}, ["its name is tpot_p50_s"]),
        ({"cases": ""}, ["cases: found ''"]),
        ({"dtype": None}, ["dtype", "None"]),
    ],
)
def test_refused_requests(options: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(PerfModelError) as error:
        ask(**options)
    assert "\n" not in str(error.value)
    for word in words:
        assert word in str(error.value)
