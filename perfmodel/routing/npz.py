"""Read arrays from an ``.npz`` file that may be damaged or hostile.

``numpy.load`` trusts the sizes a file declares. Here they are checked against each other before anything is
allocated, nothing is ever unpickled, and whatever goes wrong becomes one :class:`TraceError`.
"""

import contextlib
import math
import os
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from perfmodel.errors import TraceError

MAX_BYTES = 8 * 2**30
"""Largest total size [byte] of the uncompressed arrays of one file, and of one replayed trace."""


def one_line(value: object) -> str:
    """Text of an exception, a path or a found value, on one line and short enough for a message."""
    text = " ".join(str(value).split())
    text = text if text.isprintable() else ascii(text)
    return text if len(text) <= 300 else text[:297] + "..."


def shown(value: object) -> str:
    """``value`` as it stands in Python, for a message, even if it is too deep or too long to be printed."""
    try:
        return one_line(repr(value))
    except (ValueError, RecursionError):
        return f"a {type(value).__name__} too large to print"


def npz_keys(path: str | Path) -> tuple[str, ...]:
    """Names of the arrays in an ``.npz`` file, in file order; nothing is decompressed.

    Raises :class:`TraceError` for anything that is not a readable zip archive of reasonable size.
    """
    with _open(path) as (_, members):
        return tuple(members)


def read_npz(path: str | Path, keys: Iterable[str]) -> dict[str, NDArray[Any]]:
    """Read-only arrays of the given names; names that the file does not hold are left out of the result.

    Raises :class:`TraceError` for a file that is missing, no zip archive, truncated or corrupt, for an array
    of Python objects (which would need unpickling), and for sizes that contradict each other or exceed
    ``MAX_BYTES``.
    """
    with _open(path) as (archive, members):
        return {key: _read(archive, members[key], path, key) for key in keys if key in members}


def declared(path: str | Path, keys: Iterable[str]) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]]]:
    """Shapes and types of the arrays of the given names, as their headers say; the numbers are not decompressed.

    Raises :class:`TraceError` as `read_npz` does.
    """
    with _open(path) as (archive, members):
        found = {}
        for key in keys:
            if key in members:
                with archive.open(members[key]) as stream:
                    shape, _, dtype = _header(stream, members[key], f"{one_line(path)}: {key}")
                found[key] = shape, dtype
        return found


@contextlib.contextmanager
def _open(path: str | Path) -> Iterator[tuple[zipfile.ZipFile, dict[str, zipfile.ZipInfo]]]:
    if not isinstance(path, str | os.PathLike):
        raise TraceError(f"expected the path of an .npz file, found {shown(path)}")
    name = one_line(path)
    try:
        file = Path(path)
        if file.is_dir():
            raise TraceError(f"{name}: is a directory, expected an .npz file")
        if not file.is_file():
            raise TraceError(f"{name}: {'not a regular file' if Path(path).exists() else 'no such file'}")
        with zipfile.ZipFile(file) as archive:
            yield archive, _members(archive, name)
    except TraceError:
        raise
    except Exception as error:  # decoders may raise anything at all when fed with broken bytes
        reason = one_line(error) or type(error).__name__
        raise TraceError(f"{name}: cannot be read as an .npz file ({reason})") from error


def _members(archive: zipfile.ZipFile, name: str) -> dict[str, zipfile.ZipInfo]:
    arrays = [info for info in archive.infolist() if info.filename.endswith(".npy")]
    if not arrays:
        raise TraceError(f"{name}: is a zip archive that holds no arrays, expected an .npz file")
    total = sum(info.file_size for info in arrays)
    if total > MAX_BYTES:
        raise TraceError(f"{name}: would expand to {total / 2**30:.1f} GiB, at most {MAX_BYTES / 2**30:.0f} GiB")
    members = {info.filename.removesuffix(".npy"): info for info in arrays}
    if len(members) != len(arrays):
        raise TraceError(f"{name}: holds two arrays of the same name")
    for info in archive.infolist():
        # Damage to the list of contents must not hide an array: opening compares the two places where its name
        # stands, and a wrong length would make one entry's comment swallow the next entry.
        archive.open(info).close()
        if info.comment:
            raise TraceError(f"{name}: has a comment on {one_line(info.filename)}; the file is damaged")
    return members


def _read(archive: zipfile.ZipFile, info: zipfile.ZipInfo, path: str | Path, key: str) -> NDArray[Any]:
    where = f"{one_line(path)}: {key}"
    with archive.open(info) as stream:
        shape, fortran_order, dtype = _header(stream, info, where)
        data = stream.read()
    return np.ndarray(shape, dtype, buffer=data, order="F" if fortran_order else "C")


def _header(stream: IO[bytes], info: zipfile.ZipInfo, where: str) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    version = npy.read_magic(stream)
    if version == (1, 0):
        shape, fortran_order, dtype = npy.read_array_header_1_0(stream)
    elif version == (2, 0):
        shape, fortran_order, dtype = npy.read_array_header_2_0(stream)
    else:
        raise TraceError(f"{where} uses version {version} of the .npy format, expected (1, 0) or (2, 0)")
    if dtype.hasobject:
        raise TraceError(f"{where} holds pickled Python objects, expected a plain array")
    size, present = math.prod(shape) * dtype.itemsize, info.file_size - stream.tell()
    if size != present:
        raise TraceError(f"{where} declares shape {shape} ({size} bytes) but holds {present} bytes")
    return shape, fortran_order, dtype
