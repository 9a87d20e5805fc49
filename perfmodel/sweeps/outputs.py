"""Where results may be written: in the place of other results, and never over anything else."""

import json
import os
from pathlib import Path

from perfmodel.errors import PerfModelError
from perfmodel.hardware.base import shown
from perfmodel.hardware.files import path_text
from perfmodel.sweeps.folder import around, read_manifest

NETCDF, ZARR = ".nc", ".zarr"
#: Kinds of datasets; the first two are read again by ``open_dataset``.
SUFFIXES = (NETCDF, ZARR, ".csv", ".parquet")
#: Size of a CSV table in its description, by which the table is known again [byte].
TABLE_BYTES = "table_bytes"
#: What every dataset of perfmodel says of itself.
_MARK = "perfmodel_version"


def known_kind(path: str | os.PathLike[str]) -> Path:
    """A path whose name, which may be that of a link, ends in one of `SUFFIXES`."""
    if not isinstance(path, str | os.PathLike):
        raise PerfModelError(f"output: found {shown(path)}, allowed a path that ends in {', '.join(SUFFIXES)}")
    found = Path(os.fsdecode(path))
    if found.suffix not in SUFFIXES:
        raise PerfModelError(
            f"{path_text(found)}: unknown kind of file; allowed: a name that ends in {', '.join(SUFFIXES)}"
        )
    return found


def beside_table(table: Path) -> Path:
    """The file that describes a CSV table."""
    return table.with_name(f"{table.name}.json")


def check_output(path: str | os.PathLike[str], made_from: str | os.PathLike[str] | None = None) -> Path:
    """The path of an output, refused before any work is done, without creating anything, where it cannot be written.

    made_from : the dataset that the output is made from, which it must not replace.

    Raises
    ------
    PerfModelError : another ending than `SUFFIXES`; a place that is no folder, or cannot be written, or lies inside
        another Zarr folder; ``made_from``; or whatever perfmodel did not write, which is left alone.
    """
    found = known_kind(path)
    where = path_text(found)
    try:
        target = found.resolve()
        nearest = next(folder for folder in target.parents if folder.exists())
        outer = around(target)
        if target.is_symlink():
            raise PerfModelError(f"{where}: is a link that leads to itself")
        if not nearest.is_dir() or not os.access(nearest, os.W_OK):
            raise PerfModelError(f"{where}: {path_text(nearest)} is not a folder that can be written")
        if outer is not None:
            raise PerfModelError(f"{where}: lies inside the Zarr folder {path_text(outer)}; choose another output")
        if made_from is not None and target.exists() and target == Path(made_from).resolve():
            raise PerfModelError(f"{where}: is what the result is made from; choose another output")
        if found.suffix == ZARR:
            read_manifest(target, "; it is left alone, choose another output", called=found)
        elif target.is_dir():
            raise PerfModelError(f"{where}: is a folder; allowed: a file name")
        else:
            for file in [found, *([beside_table(found)] if found.suffix == ".csv" else [])]:
                if file.exists() and not _made_here(file):
                    raise PerfModelError(
                        f"{path_text(file)}: exists and is nothing that perfmodel wrote; it is left alone, choose"
                        " another output"
                    )
    except (OSError, ValueError, RuntimeError) as error:
        if isinstance(error, PerfModelError):
            raise
        raise PerfModelError(f"{where}: not a usable name ({getattr(error, 'strerror', None) or error})") from None
    return found


def _made_here(file: Path) -> bool:
    """Whether a file carries the provenance that perfmodel writes."""
    try:
        if file.suffix == NETCDF:
            import h5py

            with h5py.File(file, "r") as content:
                return _MARK in content.attrs
        if file.suffix == ".parquet":
            import pyarrow.parquet as parquet

            return b"perfmodel" in (parquet.read_metadata(file).metadata or {})
        if file.suffix == ".json":
            return _MARK in json.loads(file.read_text(encoding="utf-8"))
        described = json.loads(beside_table(file).read_text(encoding="utf-8"))
        return _MARK in described and described[TABLE_BYTES] == file.stat().st_size
    except Exception:  # readers raise many kinds of errors when fed with other files
        return False
