"""Datasets of sweeps: their layout, what they say about themselves, and the files they are written to."""

import csv
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as parquet
import pytest
import xarray as xr
from commands import check_refusal, run
from strategies import recording

import perfmodel
from perfmodel import __version__
from perfmodel.errors import PerfModelError, PlacementError
from perfmodel.evaluation import METRICS
from perfmodel.hardware import load_system
from perfmodel.sweeps import dataset as datasets
from perfmodel.sweeps.dataset import finish, open_dataset, save, scenario_of, template
from perfmodel.sweeps.folder import MANIFEST
from perfmodel.sweeps.outputs import SUFFIXES
from perfmodel.sweeps.request import Request

SHORT: dict[str, Any] = {"prompt": 8, "output": 8}
AXES: dict[str, Any] = {
    "link.bandwidth_gb_per_s": [16.0, 32.0, 61.3],
    "gpu_experts": ["auto", 4],
    "gpu.memory_capacity_gb": [20.0, 80.0],
    "ndp.rows": [4, 8],
    "ndp.cols": [2, 4],
}


def ask(policy: Any = ("monde", "context-aware"), axes: Any = AXES, **options: Any) -> Request:
    """A request with zipped axes and points without a plan."""
    zipped = {"zip": "ndp.rows,ndp.cols"} if axes is AXES else {}
    return Request.of(policy=policy, axes=axes, **{**SHORT, **zipped, **options})


def computed(request: Request) -> xr.Dataset:
    """The finished dataset, priced in one block."""
    found = template(request)
    priced = request.price(request.design.blocks(10**9)[0])
    for name, values in priced.values.items():
        found[name].variable.values = values
    return finish(found, request, priced.infeasible)


@pytest.fixture(scope="module")
def sweep() -> xr.Dataset:
    """A sweep with every kind of coordinate."""
    return computed(ask(metrics=["tpot_mean_s", "ttft_s", "hit_rate"], dtype="float32"))


# ---- layout ----


def test_axes_are_labelled_dimensions(sweep: xr.Dataset) -> None:
    assert dict(sweep.sizes) == {
        "policy": 2, "policy.gpu_experts": 2, "gpu.memory_capacity_gb": 2, "link.bandwidth_gb_per_s": 3,
        "ndp.rows+ndp.cols": 2,
    }  # fmt: skip
    assert tuple(sweep["tpot_mean_s"].dims) == tuple(sweep.sizes)
    assert sweep["policy"].values.tolist() == ["monde", "context-aware"]
    assert sweep["policy.gpu_experts"].values.tolist() == ["auto", "4"]
    assert sweep["ndp.rows"].dims == sweep["ndp.cols"].dims == ("ndp.rows+ndp.cols",)
    assert sweep["ndp.rows"].dtype == np.int64
    point = sweep.sel(policy="context-aware").sel({"link.bandwidth_gb_per_s": 61.3, "policy.gpu_experts": "4"})
    expected = ask("context-aware:gpu_experts=4", {"link.bandwidth_gb_per_s": [61.3], "ndp.rows": [4], "ndp.cols": [2]})
    value = point["tpot_mean_s"].sel({"gpu.memory_capacity_gb": 80.0}).values[0]
    assert value == computed(expected)["tpot_mean_s"].values.astype(np.float32).item()


def test_units_and_meanings_are_attributes(sweep: xr.Dataset) -> None:
    system = load_system("h100-cxl2-ndp")
    for name in ("link.bandwidth_gb_per_s", "gpu.memory_capacity_gb", "ndp.rows"):
        assert sweep[name].attrs["units"] == system.limits_of(name).unit
        assert sweep[name].attrs["long_name"]
    for name in sweep.data_vars:
        one = METRICS[str(name)]
        assert sweep[name].attrs == {"units": one.unit, "long_name": one.meaning, "family": one.family}
        assert sweep[name].dtype == np.float32


def test_one_policy_is_a_dimension_too() -> None:
    found = template(ask("monde", {"link.latency_us": [1, 2]}))
    assert found["policy"].dims == ("policy",)
    assert dict(found.sizes) == {"policy": 1, "link.latency_us": 2}
    assert found["tpot_mean_s"].sel(policy="monde").dims == ("link.latency_us",)


@pytest.mark.parametrize("kind", ["case", "sample"])
def test_tables_of_points_are_numbered(kind: str) -> None:
    if kind == "case":
        request = ask(None, None, cases={"policy": ["monde", "hobbit", "monde"], "ndp.rows": [1, 2, 3]})
    else:
        request = ask("monde", {"ndp.rows": "1:8"}, sample="sobol:3")
    found = template(request)
    assert dict(found.sizes) == {kind: 3, **({"policy": 1} if kind == "sample" else {})}
    assert found[kind].values.tolist() == [0, 1, 2]
    assert found["ndp.rows"].dims == (kind,)


def test_a_template_of_a_billion_points_takes_no_memory() -> None:
    axes = {"link.bandwidth_gb_per_s": "1:1000:1000", "link.latency_us": "1:1000:1000", "ndp.clock_ghz": "1:2:1000"}
    found = template(ask("monde", axes, dtype="float32"))
    assert found["tpot_mean_s"].size == 10**9
    assert found["tpot_mean_s"].values.strides == (0, 0, 0, 0)


# ---- provenance ----


def test_a_dataset_says_what_it_rests_on(sweep: xr.Dataset) -> None:
    a = sweep.attrs
    assert all(type(value) in (str, int) for value in a.values())
    assert a["kind"] == "sweep"
    assert a["complete"] == 1
    assert a["perfmodel_version"] == __version__
    assert a["numpy_version"] == np.__version__
    assert (a["model"], a["system"], a["trace"]) == ("mixtral-8x7b", "h100-cxl2-ndp", "tiny-mixtral-32l")
    assert a["trace_source"] == "recorded"
    assert json.loads(a["policies"]) == ["monde", "context-aware"]
    assert json.loads(a["hashes"])["trace"] == recording().content_hash()
    assert json.loads(a["hashes"])["system"] == load_system("h100-cxl2-ndp").content_hash()
    assert a["weakest_source"] == "assumed"
    again = Request.from_dict(json.loads(a["request"]))
    assert again.key() == a["key"]
    assert again.command() == a["command"]
    notes = json.loads(a["notes"])
    assert any("above the stated peak" in note and "61.3" in note for note in notes)
    assert any("prompts set to 8 tokens" in note for note in notes)
    assert any("experts a layer on the GPU" in note for note in notes)


def test_points_without_a_plan_are_stated(sweep: xr.Dataset) -> None:
    stated = json.loads(sweep.attrs["infeasible"])
    missing = int(np.isnan(sweep["tpot_mean_s"].values).sum())
    # MoNDE has no such option and fits; four experts do not fit into 20 GB.
    assert stated["points"] == missing == 3 * 2
    assert stated["of"] == sweep["tpot_mean_s"].size
    assert [count for _, count in stated["reasons"]] == [6]
    assert "does not fit" in stated["reasons"][0][0]


def test_reasons_are_sorted_and_cut() -> None:
    request = ask("monde", {"link.latency_us": np.linspace(1, 2, 100)})
    counts = {f"reason {i}": 5 + i % 3 for i in range(9)}
    stated = json.loads(finish(template(request), request, counts).attrs["infeasible"])
    assert stated["points"] == sum(counts.values())
    assert [reason for reason, _ in stated["reasons"]] == ["reason 2", "reason 5", "reason 8", "reason 1", "reason 4"]


def test_a_sweep_without_a_single_plan_is_refused() -> None:
    with pytest.raises(PlacementError, match=r"none of its 2 points .*does not fit"):
        computed(ask("context-aware", {"gpu.memory_capacity_gb": [1.0, 2.0]}))


def test_the_weakest_source_is_that_of_what_does_not_vary() -> None:
    base = load_system("h100-cxl2-ndp")
    sourced = base.with_values(
        {key: base.get(key) for key in base.numeric_keys() if base.source_of(key).source == "assumed"},
        source="measured", citation="by this test",
    )  # fmt: skip
    assumed = sourced.with_values({"link.latency_us": 3.0})
    assert assumed.weakest_source() == "assumed"
    for axis, weakest in (("link.latency_us", sourced.weakest_source()), ("link.efficiency", "assumed")):
        request = ask("monde", {axis: [0.5, 0.6]}, system=assumed)
        assert finish(template(request), request, {}).attrs["weakest_source"] == weakest
    assert sourced.weakest_source() != "assumed"


def test_routing_that_is_no_recording_is_named(tmp_path: Path) -> None:
    recording().with_metadata(source="synthetic").save(tmp_path / "made.npz")
    request = ask("hobbit", {"trace": ["tiny-mixtral-32l-mini", str(tmp_path / "made.npz")]})
    a = computed(request).attrs
    assert a["trace_source"] == "recorded, synthetic"
    assert "the routing is synthetic, not a recording" in json.loads(a["notes"])


def test_two_runs_are_identical(sweep: xr.Dataset) -> None:
    again = computed(ask(metrics=["tpot_mean_s", "ttft_s", "hit_rate"], dtype="float32"))
    assert again.identical(sweep)


def test_the_scenario_is_rebuilt_from_a_dataset(sweep: xr.Dataset, tmp_path: Path) -> None:
    found = scenario_of(sweep)
    assert found.labels == ("monde", "context-aware")
    assert found.content() == ask().scenario.content()
    path = tmp_path / "trace.npz"
    recording().save(path)
    mine = computed(ask("hobbit", None, trace=str(path)))
    scenario_of(mine)
    recording().sequences([0]).save(path)
    with pytest.raises(PerfModelError, match="trace changed since"):
        scenario_of(mine)
    with pytest.raises(PerfModelError, match="in memory only"):
        scenario_of(computed(ask("hobbit", None, trace=recording())))
    with pytest.raises(PerfModelError, match="no scenario"):
        scenario_of(xr.Dataset())


# ---- files ----


@pytest.mark.parametrize("suffix", [".nc", ".zarr"])
def test_datasets_come_back_identical(sweep: xr.Dataset, tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"sweep{suffix}"
    save(sweep, path)
    found = open_dataset(path)
    assert found.identical(sweep)
    assert {str(name): found[name].dtype for name in found.data_vars} == dict.fromkeys(
        map(str, sweep.data_vars), np.float32
    )
    for other in (".nc", ".zarr"):
        save(found, str(tmp_path / f"again{other}"))
        assert open_dataset(tmp_path / f"again{other}").identical(sweep)
    save(sweep.isel(policy=0), path)
    assert open_dataset(path).identical(sweep.isel(policy=0)), "a complete sweep is replaced"
    assert sorted(one.name for one in tmp_path.iterdir()) == sorted([path.name, "again.nc", "again.zarr"])


@pytest.mark.parametrize("axes", [None, {"link.latency_us": [1.0, 2.0]}])
def test_small_datasets_come_back_too(tmp_path: Path, axes: Any) -> None:
    one = computed(ask("hobbit", axes))
    for suffix in SUFFIXES:
        save(one, tmp_path / f"one{suffix}")
    assert open_dataset(tmp_path / "one.nc").identical(one)
    assert open_dataset(tmp_path / "one.zarr").identical(one)
    assert (
        len(pd.read_csv(tmp_path / "one.csv"))
        == len(pd.read_parquet(tmp_path / "one.parquet"))
        == one["tpot_mean_s"].size
    )


@pytest.mark.parametrize("rows", [2**20, 7])
def test_tables_have_one_row_a_point(
    sweep: xr.Dataset, tmp_path: Path, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("perfmodel.sweeps.tables._ROWS", rows)
    save(sweep, tmp_path / "sweep.csv")
    save(sweep, tmp_path / "sweep.parquet")
    expected = sweep.to_dataframe().reset_index()
    for table in (pd.read_csv(tmp_path / "sweep.csv"), pd.read_parquet(tmp_path / "sweep.parquet")):
        assert list(table.columns) == [
            "policy", "policy.gpu_experts", "gpu.memory_capacity_gb", "link.bandwidth_gb_per_s", "ndp.rows", "ndp.cols",
            "tpot_mean_s", "ttft_s", "hit_rate",
        ]  # fmt: skip
        assert len(table) == sweep["tpot_mean_s"].size
        for name in table.columns:
            if table[name].dtype.kind in "if":
                wanted = expected[name].to_numpy()
                np.testing.assert_array_equal(table[name].to_numpy().astype(wanted.dtype), wanted)
            else:
                assert table[name].tolist() == expected[name].tolist()


def test_tables_keep_double_precision(tmp_path: Path) -> None:
    one = computed(ask("hobbit", {"link.bandwidth_gb_per_s": np.linspace(16, 64, 50)}))
    save(one, tmp_path / "one.csv")
    with (tmp_path / "one.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    for name in ("link.bandwidth_gb_per_s", "tpot_mean_s"):
        np.testing.assert_array_equal([float(row[name]) for row in rows], one[name].values.ravel())


def test_tables_carry_their_provenance(sweep: xr.Dataset, tmp_path: Path) -> None:
    save(sweep, tmp_path / "sweep.csv")
    save(sweep, tmp_path / "sweep.parquet")
    beside = json.loads((tmp_path / "sweep.csv.json").read_text())
    inside = json.loads(parquet.read_schema(tmp_path / "sweep.parquet").metadata[b"perfmodel"])
    assert beside.pop("table_bytes") == (tmp_path / "sweep.csv").stat().st_size
    assert beside == inside
    assert {name: beside[name] for name in sweep.attrs} == sweep.attrs
    assert beside["columns"]["link.bandwidth_gb_per_s"]["units"] == "GB/s"


def test_large_folders_are_read_on_demand(sweep: xr.Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(sweep, tmp_path / "sweep.zarr")
    monkeypatch.setattr(datasets, "_AT_ONCE", 10)
    found = open_dataset(tmp_path / "sweep.zarr")
    assert not found["tpot_mean_s"].variable._in_memory
    assert found.identical(sweep)


@pytest.mark.parametrize("name", ["sweep.txt", "sweep", "sweep.nc4", ""])
def test_other_endings_are_refused(sweep: xr.Dataset, tmp_path: Path, name: str) -> None:
    for action in (lambda: save(sweep, tmp_path / name), lambda: open_dataset(tmp_path / name)):
        with pytest.raises(PerfModelError, match=r"\.nc, \.zarr, \.csv, \.parquet"):
            action()
    with pytest.raises(PerfModelError, match="output"):
        save(sweep, 3)  # type: ignore[arg-type]


def test_places_that_cannot_be_written(sweep: xr.Dataset, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for suffix in SUFFIXES:
        with pytest.raises(PerfModelError) as error:
            save(sweep, tmp_path / "file" / f"sweep{suffix}")
        assert "\n" not in str(error.value)
    for suffix in (".nc", ".csv", ".parquet"):
        (tmp_path / f"folder{suffix}").mkdir()
        with pytest.raises(PerfModelError, match="is a folder"):
            save(sweep, tmp_path / f"folder{suffix}")


def test_a_folder_that_is_no_sweep_is_left_alone(sweep: xr.Dataset, tmp_path: Path) -> None:
    folder = tmp_path / "mine.zarr"
    folder.mkdir()
    (folder / "thesis.txt").write_text("years of work")
    with pytest.raises(PerfModelError, match="left alone"):
        save(sweep, folder)
    assert (folder / "thesis.txt").read_text() == "years of work"
    (tmp_path / "file.zarr").write_text("a file")
    with pytest.raises(PerfModelError, match="left alone"):
        save(sweep, tmp_path / "file.zarr")


def test_a_failed_write_leaves_the_old_file(sweep: xr.Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for suffix in SUFFIXES:
        save(sweep, tmp_path / f"sweep{suffix}")
    names = sorted(one.name for one in tmp_path.iterdir())

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(xr.Dataset, "dump_to_store", fail)
    monkeypatch.setattr(xr.Dataset, "to_zarr", fail)
    monkeypatch.setattr("perfmodel.sweeps.tables.write_csv", fail)
    monkeypatch.setattr("perfmodel.sweeps.tables.write_parquet", fail)
    for suffix in SUFFIXES:
        with pytest.raises(PerfModelError, match="No space left"):
            save(sweep.isel(policy=0), tmp_path / f"sweep{suffix}")
    assert sorted(one.name for one in tmp_path.iterdir()) == names
    assert open_dataset(tmp_path / "sweep.zarr").identical(sweep)
    assert open_dataset(tmp_path / "sweep.nc").identical(sweep)


@pytest.mark.parametrize("suffix", [".nc", ".zarr"])
def test_unfinished_sweeps_are_not_opened(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"sweep{suffix}"
    save(template(ask("hobbit", {"link.latency_us": [1, 2]})), path)
    with pytest.raises(PerfModelError, match="unfinished"):
        open_dataset(path)


def test_a_manifest_may_say_that_a_sweep_is_unfinished(sweep: xr.Dataset, tmp_path: Path) -> None:
    save(sweep, tmp_path / "sweep.zarr")
    manifest = tmp_path / "sweep.zarr" / MANIFEST
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "complete": False}))
    with pytest.raises(PerfModelError, match="--resume"):
        open_dataset(tmp_path / "sweep.zarr")


def test_foreign_and_damaged_files_are_refused(sweep: xr.Dataset, tmp_path: Path) -> None:
    foreign = xr.Dataset({"a": ("x", [1.0, 2.0])})
    foreign.to_netcdf(tmp_path / "foreign.nc", engine="h5netcdf")
    (tmp_path / "text.nc").write_text("not a netCDF file")
    (tmp_path / "empty.nc").write_bytes(b"")
    save(sweep, tmp_path / "cut.nc")
    (tmp_path / "cut.nc").write_bytes((tmp_path / "cut.nc").read_bytes()[:3000])
    (tmp_path / "empty.zarr").mkdir()
    for name in ("foreign.nc", "text.nc", "empty.nc", "cut.nc", "empty.zarr", "gone.nc", "gone.zarr", "table.csv"):
        with pytest.raises(PerfModelError, match=name.replace(".", r"\.")) as error:
            open_dataset(tmp_path / name)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("how", ["lost", "torn"])
def test_chunks_that_are_lost_or_torn_are_noticed(sweep: xr.Dataset, tmp_path: Path, how: str) -> None:
    save(sweep, tmp_path / "sweep.zarr")
    chunk = max(
        one for one in (tmp_path / "sweep.zarr" / "ttft_s").rglob("*") if one.is_file() and one.suffix != ".json"
    )
    if how == "lost":
        chunk.unlink()
    else:
        chunk.write_bytes(chunk.read_bytes()[:9])
    with pytest.raises(PerfModelError, match="damaged"):
        open_dataset(tmp_path / "sweep.zarr")


# ---- what is left alone ----


@pytest.mark.parametrize("suffix", [".nc", ".csv", ".parquet"])
def test_only_results_are_replaced(tmp_path: Path, suffix: str) -> None:
    out = tmp_path / f"mine{suffix}"
    out.write_bytes(b"link.bandwidth_gb_per_s\n64\n")
    with pytest.raises(PerfModelError, match="nothing that perfmodel wrote"):
        perfmodel.sweep(policy="monde", axes={"ndp.arrays": [16, 32]}, prompt=4, output=2, out=out)
    assert out.read_bytes() == b"link.bandwidth_gb_per_s\n64\n"
    assert list(tmp_path.iterdir()) == [out]
    out.unlink()
    for arrays in ([16, 32], [16, 32, 64]):
        made = perfmodel.sweep(policy="monde", axes={"ndp.arrays": arrays}, prompt=4, output=2, out=out)
    assert made.sizes["ndp.arrays"] == 3
    if suffix == ".nc":
        assert perfmodel.open_dataset(out).identical(made)


def test_a_table_is_known_by_its_description(tmp_path: Path) -> None:
    out, beside = tmp_path / "mine.csv", tmp_path / "mine.csv.json"
    asked: dict[str, Any] = {"policy": "monde", "axes": {"ndp.arrays": [16, 32]}, "prompt": 4, "output": 2, "out": out}
    beside.write_text('{"mine": 1}')
    with pytest.raises(PerfModelError, match=r"csv\.json: exists"):
        perfmodel.sweep(**asked)
    assert beside.read_text() == '{"mine": 1}'
    beside.unlink()
    perfmodel.sweep(**asked)
    out.write_text("my,data\n1,2\n")
    with pytest.raises(PerfModelError, match=r"mine\.csv: exists"):
        perfmodel.sweep(**asked)
    assert out.read_text() == "my,data\n1,2\n"


def test_an_answer_does_not_replace_what_it_is_made_from(tmp_path: Path) -> None:
    for suffix in (".nc", ".zarr"):
        out = tmp_path / f"sweep{suffix}"
        made = perfmodel.sweep(policy="monde", axes={"ndp.arrays": [16, 32]}, prompt=4, output=2, out=out)
        answer = run("pareto", str(out), "--minimise", "tpot_mean_s,ndp.arrays", "-o", str(out))
        check_refusal(answer, "made from")
        assert perfmodel.open_dataset(out).identical(made)


def test_a_sweep_that_no_disk_holds_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(PerfModelError, match="before compression"):
        perfmodel.sweep(policy="monde", axes={"ndp.arrays": "1:2000:2000"}, prompt=4, output=2, out=tmp_path / "x.zarr")
    assert not list(tmp_path.iterdir())
