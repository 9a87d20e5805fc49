"""Datasets as Zarr folders: put in place so that nothing is lost, and opened by what they say they hold.

Beside the files of Zarr there is a manifest: what the dataset is of, whether it is complete, and how many bytes every
array takes. The metadata of all arrays also stand in those of the group ("consolidated"), in the order of the dataset.
Readers go by them and never list the folder, so that other files in it do not matter.
"""

import json
import os
import shutil
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from perfmodel.errors import PerfModelError
from perfmodel.hardware.base import shown
from perfmodel.hardware.files import path_text
from perfmodel.paths import replace_when_done

if TYPE_CHECKING:
    import xarray as xr

#: File in a Zarr folder that says which sweep it is and whether it is complete.
MANIFEST = "perfmodel-sweep.json"
#: Version of the layout of such a folder.
FORMAT = 2
#: Files that make a folder one of Zarr's.
_OF_ZARR = (MANIFEST, "zarr.json", ".zgroup", ".zarray")


# ---- folders and their names ----


def beside(path: Path, word: str) -> Path:
    """The hidden neighbour of a folder, under a name that nobody else gives: ``.NAME.perfmodel-WORD.zarr``."""
    return path.with_name(f".{path.stem}.perfmodel-{word}{path.suffix}")


def put_in_place(fresh: Path, path: Path) -> None:
    """Give a folder its name; what had the name before stands aside, as ``.NAME.perfmodel-previous.zarr``."""
    aside = beside(path, "previous")
    had = path.exists()
    if had:
        _check_ours(path)
        discard(aside)
        path.rename(aside)
    try:
        fresh.rename(path)
    except BaseException:
        if had:
            aside.rename(path)
        raise


def _check_ours(path: Path) -> None:
    """Refuse to replace a finished dataset whose folder also holds what somebody else put there."""
    manifest = read_manifest(path)
    if manifest is not None and manifest["complete"]:
        own = {"zarr.json", MANIFEST, *manifest["bytes"]}
        others = sorted(one.name for one in path.iterdir() if one.name not in own and not one.name.startswith("."))
        if others:
            raise PerfModelError(
                f"{path_text(path)}: holds {shown(others[0])}, which perfmodel did not write; it is left alone, choose"
                " another output"
            )


def put_back(path: Path) -> None:
    """What stands aside gets its name again where nothing has it: a process died, or gave up."""
    aside = beside(path, "previous")
    if aside.exists() and not os.path.lexists(path):
        aside.rename(path)


def discard(folder: Path) -> None:
    """Remove a folder if it is there."""
    if folder.exists():
        shutil.rmtree(folder)


def around(path: Path) -> Path | None:
    """The nearest Zarr folder that a path lies in; what is put into one is lost when that one is replaced."""
    return next((folder for folder in path.parents if any((folder / name).exists() for name in _OF_ZARR)), None)


def in_words(error: OSError) -> str:
    """What went wrong, in the words of the system."""
    return os.strerror(error.errno) if error.errno else str(error.strerror or error)


# ---- manifests ----


def read_manifest(path: Path, advice: str = "", *, called: Path | None = None) -> dict[str, Any] | None:
    """The manifest of a dataset, None where nothing is.

    Raises
    ------
    PerfModelError : where something else is; it ends in ``advice``, and names the path as it is ``called``.
    """
    if not os.path.lexists(path):
        return None
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        known = manifest["format"] == FORMAT and manifest["complete"] in (True, False)
        if known and manifest["points_per_block"] >= 1 and isinstance(manifest["bytes"], dict):
            return dict(manifest)
    except (OSError, ValueError, KeyError, TypeError):
        pass
    raise PerfModelError(
        f"{path_text(called or path)}: exists and is no dataset that this version of perfmodel wrote, or a damaged one"
        f"{advice}"
    )


def write_json(file: Path, content: Any) -> None:
    """Replace a JSON file by one that is wholly on the disk."""
    with replace_when_done(file) as temporary:
        temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        flush(temporary)


def flush(file: Path) -> None:
    """Wait until a file is on the disk."""
    handle = os.open(file, os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# ---- arrays ----


def write_arrays(dataset: "xr.Dataset", folder: Path) -> None:
    """Write variables with every chunk, also those that hold nothing but the value that stands for none."""
    # Fixed-width texts have no place in the third version of the format.
    with_objects(dataset).to_zarr(folder, zarr_format=3, consolidated=False, write_empty_chunks=True)


def with_objects(dataset: "xr.Dataset") -> "xr.Dataset":
    """The dataset with texts as objects and plain attributes, whatever a file or library made of them."""
    import xarray as xr

    found: dict[str, dict[Any, xr.Variable]] = {"values": {}, "labels": {}}
    for name, one in dataset.variables.items():
        part = found["labels" if name in dataset.coords else "values"]
        part[name] = one.astype(object) if one.dtype.kind in "UST" else one
    attributes = {
        name: value.item() if isinstance(value, np.generic) else value for name, value in dataset.attrs.items()
    }
    # A new one, since replacing coordinates changes their order.
    return xr.Dataset(found["values"], found["labels"], attributes)


def gather(folder: Path, names: Iterable[str], attributes: Mapping[str, Any] | None = None) -> None:
    """Put the metadata of arrays into those of their group, in this order, and add attributes of the group."""
    file = folder / "zarr.json"
    stated = json.loads(file.read_text(encoding="utf-8"))
    stated["attributes"] = {**stated.get("attributes", {}), **(attributes or {})}
    arrays = {name: json.loads((folder / name / "zarr.json").read_text(encoding="utf-8")) for name in names}
    stated["consolidated_metadata"] = {"kind": "inline", "must_understand": False, "metadata": arrays}
    write_json(file, stated)


def sizes(folder: Path, names: Iterable[str]) -> dict[str, int]:
    """Bytes of the metadata and chunks of arrays, by name."""
    return {name: sum(_sizes(folder / name)) for name in names}


def _sizes(array: Path) -> Iterable[int]:
    for place, folders, files in os.walk(array):
        folders[:] = [name for name in folders if not name.startswith(".")]
        inside = Path(place) != array
        for name in files:
            # Not what a desktop leaves behind, nor what a dead process was writing.
            ours = name == "zarr.json" or name == "c" or name.startswith("c.") or (inside and name[0] != ".")
            if ours and not name.endswith(".partial"):
                yield (Path(place) / name).stat().st_size


def check_sizes(folder: Path, expected: Mapping[str, int]) -> None:
    """Raise an error in words without the folder's name where files of an array are lost, torn or changed."""
    for name, size in sizes(folder, expected).items():
        if size != expected[name]:
            raise PerfModelError(f"files of {name} are missing or changed")


def open_arrays(folder: Path, manifest: Mapping[str, Any]) -> "xr.Dataset":
    """The dataset in a folder, to be read when its values are used."""
    import xarray as xr

    check_sizes(folder, manifest["bytes"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that consolidated metadata are no part of the third version yet
        found = xr.open_zarr(folder, consolidated=True, chunks=None)
    if set(found.variables) != set(manifest["bytes"]):
        raise PerfModelError("its metadata are changed")
    return with_objects(found)
