"""Sweeps as xarray datasets, and as files.

Dimensions are axes, named by their dotted names (zipped ones joined by ``+``; tables of cases and samples are
numbered). Coordinates and metrics carry ``units`` and ``long_name``, the dataset carries its provenance. Nothing in it
depends on when or where it was computed, so that two runs of the same request are identical.
"""

import json
import os
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from perfmodel.errors import PerfModelError
from perfmodel.evaluation import metric
from perfmodel.hardware.base import shown
from perfmodel.hardware.files import path_text
from perfmodel.paths import replace_when_done
from perfmodel.scenario import Scenario
from perfmodel.sweeps.lock import claim
from perfmodel.sweeps.provenance import attributes, closing_attributes
from perfmodel.sweeps.request import Request

if TYPE_CHECKING:
    import xarray as xr

#: Kinds of files that `save` writes; the first two are read again by `open_dataset`.
SUFFIXES = (".nc", ".zarr", ".csv", ".parquet")
#: File in a Zarr folder that says which sweep it is and whether it is complete.
MANIFEST = "perfmodel-sweep.json"
#: Version of the layout of such a folder.
FORMAT = 1
#: Datasets up to this size are read at once when they are opened [byte].
_AT_ONCE = 2**26


def template(request: Request) -> "xr.Dataset":
    """The dataset of a sweep before it is computed: coordinates, attributes, and metrics that are NaN everywhere.

    The metrics take no memory: each is one number seen from every point. Without a policy dimension, ``policy`` is a
    coordinate without dimensions.
    """
    import xarray as xr

    design = request.design
    coords: dict[str, Any] = {}
    for dim in design.dims:
        if dim.numbered:
            coords[dim.name] = (dim.name, np.arange(dim.size), {"long_name": f"number of the {dim.name}"})
        for name, values in dim.axes.items():
            coords[name] = (dim.name, _plain(values), _described(request.scenario, name))
    if "policy" not in coords:
        label = np.array(request.scenario.labels[0], dtype=object)
        coords["policy"] = ((), label, _described(request.scenario, "policy"))
    dims = tuple(dim.name for dim in design.dims)
    empty = np.broadcast_to(np.array(np.nan, dtype=request.dtype), design.shape)
    found = {}
    for one in map(metric, request.metrics):
        found[one.name] = (dims, empty, {"units": one.unit, "long_name": one.meaning, "family": one.family})
    return xr.Dataset(found, coords, attributes(request))


def finish(dataset: "xr.Dataset", request: Request, infeasible: Mapping[str, int]) -> "xr.Dataset":
    """The dataset with the attributes that only the whole sweep can tell (see `closing_attributes`)."""
    return dataset.assign_attrs(closing_attributes(request, infeasible))


def scenario_of(dataset: "xr.Dataset") -> Scenario:
    """The scenario of a dataset that perfmodel made, rebuilt from its provenance.

    Raises
    ------
    PerfModelError : no provenance, inputs that existed in memory only, or files that have changed since.
    """
    try:
        described, hashes = json.loads(dataset.attrs["scenario"]), json.loads(dataset.attrs["hashes"])
    except (KeyError, TypeError, ValueError):
        raise PerfModelError("dataset: holds no scenario; allowed: a dataset that perfmodel made") from None
    scenario = Scenario.from_dict(described)
    now = scenario.content()
    changed = [name for name, value in now.items() if name != "perfmodel" and hashes.get(name) != value]
    if changed:
        raise PerfModelError(
            f"dataset: its {' and '.join(changed)} changed since it was computed; compute it again with"
            f" {dataset.attrs.get('command', 'perfmodel')}"
        )
    return scenario


def _plain(values: NDArray[Any]) -> NDArray[Any]:
    """Coordinates that files can hold: numbers, or texts where values are words or mixed."""
    if values.dtype != object:
        return values
    return np.array([value if isinstance(value, str) else f"{value:g}" for value in values.tolist()], dtype=object)


def _described(scenario: Scenario, name: str) -> dict[str, str]:
    info = scenario.axis(name)
    return {**({"units": info.unit} if info.unit else {}), "long_name": info.meaning}


def check_output(path: str | os.PathLike[str]) -> Path:
    """The path of an output, refused when its ending is none of `SUFFIXES`."""
    if not isinstance(path, str | os.PathLike):
        raise PerfModelError(f"output: found {shown(path)}, allowed a path that ends in {', '.join(SUFFIXES)}")
    found = Path(os.fsdecode(path))
    if found.suffix not in SUFFIXES:
        raise PerfModelError(
            f"{path_text(found)}: unknown kind of file; allowed: a name that ends in {', '.join(SUFFIXES)}"
        )
    return found


def save(dataset: "xr.Dataset", path: str | os.PathLike[str]) -> None:
    """Write a dataset as netCDF (.nc), Zarr (.zarr), or a table with one row a point (.csv, .parquet).

    Tables have a column for every axis and metric. Their provenance is in the metadata of a Parquet file, and beside
    a CSV file as ``NAME.csv.json``. The file appears under its name when it is whole; a Zarr folder takes the place
    of a complete sweep, and of nothing else.

    Raises
    ------
    PerfModelError : another ending, or a place that cannot be written.
    """
    target = check_output(path)
    try:
        if target.suffix == ".zarr":
            with claim(target):
                _save_folder(dataset, target)
            return
        from perfmodel.sweeps import tables

        write = {".nc": _write_netcdf, ".csv": tables.write_csv, ".parquet": tables.write_parquet}[target.suffix]
        if target.is_dir():
            raise PerfModelError(f"{path_text(target)}: is a folder; allowed: a file name")
        with replace_when_done(target) as temporary:
            write(dataset, temporary)
        if target.suffix == ".csv":
            with replace_when_done(target.with_name(f"{target.name}.json")) as temporary:
                temporary.write_text(json.dumps(tables.description(dataset), indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise PerfModelError(f"{path_text(target)}: cannot be written ({error.strerror or error})") from None


def _write_netcdf(dataset: "xr.Dataset", path: Path) -> None:
    dataset.to_netcdf(path, engine="h5netcdf")


def _save_folder(dataset: "xr.Dataset", target: Path) -> None:
    previous, fresh = (target.with_name(f".{target.name}.{word}") for word in ("previous", "saving"))
    if os.path.lexists(target) and not _manifest(target).get("complete"):
        raise PerfModelError(
            f"{path_text(target)}: exists and is no complete sweep; it is left alone, choose another output"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(fresh, ignore_errors=True)
    try:
        texts = {name: coordinate.astype(object) for name, coordinate in dataset.coords.items() if _is_text(coordinate)}
        # Fixed-width texts have no place in the third version of the format.
        dataset.assign_coords(texts).to_zarr(fresh, zarr_format=3, consolidated=False, write_empty_chunks=True)
        consolidate(fresh)
        stated = {
            "format": FORMAT,
            "key": dataset.attrs.get("key", ""),
            "request": json.loads(dataset.attrs.get("request", "{}")),
            "points_per_block": max(1, int(np.prod(list(dataset.sizes.values())))),
            "complete": True,
        }
        (fresh / MANIFEST).write_text(json.dumps(stated, indent=1) + "\n", encoding="utf-8")
        shutil.rmtree(previous, ignore_errors=True)
        if target.exists():
            target.rename(previous)
        fresh.rename(target)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
        shutil.rmtree(previous, ignore_errors=True)


def consolidate(folder: Path) -> None:
    """Gather the metadata of a Zarr folder in one file, as other readers of it expect."""
    import zarr

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that this is no part of the third version of the format yet
        zarr.consolidate_metadata(zarr.storage.LocalStore(str(folder)))


def _is_text(coordinate: "xr.DataArray") -> bool:
    return coordinate.dtype.kind in "UST"


def _manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a Zarr folder; empty where there is none."""
    try:
        found = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def open_dataset(path: str | os.PathLike[str]) -> "xr.Dataset":
    """A dataset that perfmodel wrote as .nc or .zarr; large Zarr folders are read when their values are used.

    Raises
    ------
    PerfModelError : no such file, another kind of file, a damaged one, or a sweep that is not complete.
    """
    import xarray as xr

    target = check_output(path)
    where = path_text(target)
    if target.suffix not in SUFFIXES[:2]:
        raise PerfModelError(f"{where}: is a table for other programs; allowed: a .nc or .zarr dataset")
    if not target.exists():
        raise PerfModelError(f"{where}: no such dataset")
    if target.suffix == ".zarr" and _manifest(target).get("complete") is False:
        raise PerfModelError(f"{where}: an unfinished sweep; finish it with perfmodel sweep ... --resume")
    try:
        if target.suffix == ".nc":
            with xr.open_dataset(target, engine="h5netcdf") as file:
                found = file.load()
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of the manifest, which is no part of Zarr
                found = xr.open_zarr(target, consolidated=False, chunks=None)
            lost = _lost_chunks(target, found)
            if lost:
                raise PerfModelError(f"{where}: damaged (values of {lost} are missing)")
            found = found.load() if found.nbytes <= _AT_ONCE else found
    except PerfModelError:
        raise
    except Exception as error:  # readers raise many kinds of errors when fed with other files
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise PerfModelError(f"{where}: not a dataset, or a damaged one ({reason})") from None
    if "perfmodel_version" not in found.attrs:
        raise PerfModelError(f"{where}: a dataset that perfmodel did not write")
    if found.attrs.get("complete", 1) != 1:
        raise PerfModelError(f"{where}: an unfinished sweep; finish it with perfmodel sweep ... --resume")
    return _in_order(found)


def _in_order(dataset: "xr.Dataset") -> "xr.Dataset":
    """Axes and metrics in the order of the request, which folders do not keep."""
    import xarray as xr

    try:
        request = json.loads(dataset.attrs["request"])
        wanted = [*(request["axes"] or ()), *request["metrics"]]
    except (KeyError, TypeError, ValueError):
        return dataset  # an answer, which has no request
    names = dict.fromkeys([*dataset.dims, *wanted, *dataset.variables])
    variables = {name: dataset.variables[name] for name in names if name in dataset.variables}
    coords = {name: value for name, value in variables.items() if name in dataset.coords}
    values = {name: value for name, value in variables.items() if name in dataset.data_vars}
    return xr.Dataset(values, coords, dataset.attrs)


def _lost_chunks(folder: Path, dataset: "xr.Dataset") -> str:
    """Name of the first variable with fewer chunks than it should have, or nothing."""
    import zarr

    group = zarr.open_group(str(folder), mode="r", use_consolidated=False)
    for name in dataset.variables:
        array: Any = group[str(name)]
        if array.nchunks_initialized < array.nchunks:
            return str(name)
    return ""
