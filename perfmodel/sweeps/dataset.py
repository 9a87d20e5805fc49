"""Sweeps as xarray datasets, and as files.

Dimensions are axes, named by their dotted names (zipped ones joined by ``+``; tables of cases and samples are
numbered). Coordinates and metrics carry ``units`` and ``long_name``, the dataset carries its provenance. Nothing in it
depends on when or where it was computed, so that two runs of the same request are identical.
"""

import io
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from perfmodel.errors import PerfModelError
from perfmodel.evaluation import metric
from perfmodel.hardware.files import path_text
from perfmodel.paths import replace_when_done
from perfmodel.scenario import Scenario
from perfmodel.sweeps.folder import (
    FORMAT,
    MANIFEST,
    beside,
    discard,
    gather,
    in_words,
    open_arrays,
    put_back,
    put_in_place,
    read_manifest,
    sizes,
    with_objects,
    write_arrays,
    write_json,
)
from perfmodel.sweeps.lock import claim
from perfmodel.sweeps.outputs import NETCDF, TABLE_BYTES, ZARR, beside_table, check_output, known_kind
from perfmodel.sweeps.provenance import attributes, closing_attributes
from perfmodel.sweeps.request import Request

if TYPE_CHECKING:
    import xarray as xr

#: Datasets up to this size are read at once when they are opened [byte].
_AT_ONCE = 2**26


def template(request: Request) -> "xr.Dataset":
    """The dataset of a sweep before it is computed: coordinates, attributes, and metrics that are NaN everywhere.

    The metrics take no memory: each is one number seen from every point.
    """
    import xarray as xr

    design = request.design
    coords: dict[str, Any] = {}
    for dim in design.dims:
        if dim.numbered:
            coords[dim.name] = (dim.name, np.arange(dim.size), {"long_name": f"number of the {dim.name}"})
        for name, values in dim.axes.items():
            coords[name] = (dim.name, _plain(values), _described(request.scenario, name))
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


def save(dataset: "xr.Dataset", path: str | os.PathLike[str]) -> None:
    """Write a dataset as netCDF (.nc), Zarr (.zarr), or a table with one row a point (.csv, .parquet).

    Tables have a column for every axis and metric. Their provenance is in the metadata of a Parquet file, and beside
    a CSV file as ``NAME.csv.json``. The file appears under its name when it is whole, and takes the place of a dataset
    that perfmodel wrote, and of nothing else.

    Raises
    ------
    PerfModelError : another ending, a place that cannot be written, or something else in that place.
    """
    path = check_output(path)
    target = path.resolve()  # so that a link stays one
    try:
        if path.suffix == ZARR:
            with claim(target):
                _save_folder(dataset, target)
            return
        from perfmodel.sweeps import tables

        write = {".nc": _write_netcdf, ".csv": tables.write_csv, ".parquet": tables.write_parquet}[path.suffix]
        with replace_when_done(target) as temporary:
            write(dataset, temporary)
            if path.suffix == ".csv":  # in place just before its table: one without it counts as somebody else's
                described = {**tables.description(dataset), TABLE_BYTES: temporary.stat().st_size}
                with replace_when_done(beside_table(path)) as description:
                    description.write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise PerfModelError(f"{path_text(path)}: cannot be written ({in_words(error)})") from None


def _write_netcdf(dataset: "xr.Dataset", path: Path) -> None:
    """Put the file together in memory first: the HDF5 library does not survive a disk that is full."""
    import h5netcdf
    import xarray as xr

    content = io.BytesIO()
    with h5netcdf.File(content, "w") as file:
        dataset.dump_to_store(xr.backends.H5NetCDFStore(file))
    path.write_bytes(content.getbuffer())


def _save_folder(dataset: "xr.Dataset", target: Path) -> None:
    put_back(target)
    manifest = read_manifest(target, "; it is left alone, choose another output")
    if manifest is not None and not manifest["complete"]:
        raise PerfModelError(f"{path_text(target)}: is an unfinished sweep; it is left alone, choose another output")
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh = beside(target, "new")
    try:
        discard(fresh)
        write_arrays(dataset, fresh)
        names = [str(name) for name in dataset.variables]
        gather(fresh, names)
        stated = {
            "format": FORMAT,
            "key": dataset.attrs.get("key", ""),
            "request": json.loads(dataset.attrs.get("request", "{}")),
            "points_per_block": max(1, int(np.prod(list(dataset.sizes.values())))),
            "bytes": sizes(fresh, names),
            "complete": True,
        }
        write_json(fresh / MANIFEST, stated)
        put_in_place(fresh, target)
        shutil.rmtree(beside(target, "previous"), ignore_errors=True)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def open_dataset(path: str | os.PathLike[str]) -> "xr.Dataset":
    """A dataset that perfmodel wrote as .nc or .zarr; large Zarr folders are read when their values are used.

    Raises
    ------
    PerfModelError : no such file, another kind of file, a damaged one, or a sweep that is not complete.
    """
    path = known_kind(path)
    where = path_text(path)
    if path.suffix not in (NETCDF, ZARR):
        raise PerfModelError(f"{where}: is a table for other programs; allowed: a .nc or .zarr dataset")
    try:
        target = path.resolve()
        if path.suffix == ZARR and beside(target, "previous").exists() and not os.path.lexists(target):
            with claim(target):
                put_back(target)
        if not target.exists():
            raise PerfModelError(f"{where}: no such dataset")
        found = _read_folder(target) if path.suffix == ZARR else _read_netcdf(target)
    except _UnfinishedError:
        raise PerfModelError(f"{where}: an unfinished sweep; finish it with perfmodel sweep ... --resume") from None
    except Exception as error:  # readers raise many kinds of errors when fed with other files
        if isinstance(error, PerfModelError) and str(error).startswith((where, path_text(target))):
            raise
        what = " ".join(str(error).split())[:200] or type(error).__name__
        raise PerfModelError(f"{where}: not a dataset, or a damaged one ({what})") from None
    if "perfmodel_version" not in found.attrs:
        raise PerfModelError(f"{where}: a dataset that perfmodel did not write")
    return found


class _UnfinishedError(Exception):
    """What was opened is a sweep that is not complete."""


def _read_folder(target: Path) -> "xr.Dataset":
    manifest = read_manifest(target)
    assert manifest is not None  # the caller saw it
    if not manifest["complete"]:
        raise _UnfinishedError
    found = open_arrays(target, manifest)
    if found.attrs.get("complete", 1) != 1:
        raise _UnfinishedError
    return found.load() if found.nbytes <= _AT_ONCE else found


def _read_netcdf(target: Path) -> "xr.Dataset":
    import xarray as xr

    with xr.open_dataset(target, engine="h5netcdf") as file:
        found = with_objects(file.load())
    if found.attrs.get("complete", 1) != 1:
        raise _UnfinishedError
    return found
