"""Read arrays from an ``.npz`` file that may be damaged or hostile.

``numpy.load`` trusts the sizes a file declares. Here they are checked against each other before anything is
allocated, nothing is ever unpickled, and whatever goes wrong becomes one :class:`TraceError`. The header of an array
tells the order of its bytes, so arrays of either order are read.
"""

import contextlib
import io
import math
import os
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from perfmodel.errors import TraceError

MAX_BYTES = 8 * 2**30
"""Largest total size [byte] of the uncompressed arrays of one file, and of one replayed trace."""
MAX_STREAMED_BYTES = 2**40
"""The same for a file whose arrays are read piece by piece."""
MAX_RATIO, FREE_BYTES = 64, 64 * 2**20
"""Arrays may take this many times the bytes of their file, and so many more, whatever their file. Recorded routing
packs ten to one at most; a file that promises far more was made to fill the memory."""
MAX_DIRECTORY_BYTES = 2**19
"""Largest list of contents of an archive, some thousand arrays."""
MAX_HEADER_BYTES = 10_000
"""Longest description of the shape and type of an array."""
_PIECE = 2**18  # bytes that are unpacked together


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


class ArrayStream(NamedTuple):
    """An array of an open file, to be read from its start to its end."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    fortran_order: bool
    stream: IO[bytes]
    where: str

    def take(self, items: int) -> NDArray[Any]:
        """The next ``items`` numbers, in the order of the file."""
        data = self.stream.read(items * self.dtype.itemsize)
        if len(data) != items * self.dtype.itemsize:
            raise TraceError(f"{self.where} ends too early; the file is damaged")
        return np.frombuffer(data, self.dtype)

    def finish(self) -> None:
        """Read to the end, where the check sum is compared."""
        if self.stream.read(1):
            raise TraceError(f"{self.where} goes on after its end; the file is damaged")


@contextlib.contextmanager
def array_streams(path: str | Path, keys: Iterable[str]) -> Iterator[dict[str, ArrayStream]]:
    """The arrays of the given names, open to be read piece by piece; names that are not there are left out.

    A file may hold more than ``MAX_BYTES`` here, as nobody needs to keep it whole. Raises :class:`TraceError` as
    `read_npz` does.
    """
    with _open(path, streamed=True) as (archive, members), contextlib.ExitStack() as stack:
        found = {}
        for key in keys:
            if key in members:
                stream = stack.enter_context(archive.open(members[key]))
                where = f"{one_line(path)}: {key}"
                shape, fortran_order, dtype = _header(stream, members[key], where)
                found[key] = ArrayStream(shape, dtype, fortran_order, stream, where)
        yield found


@contextlib.contextmanager
def _open(path: str | Path, streamed: bool = False) -> Iterator[tuple[zipfile.ZipFile, dict[str, zipfile.ZipInfo]]]:
    if not isinstance(path, str | os.PathLike):
        raise TraceError(f"expected the path of an .npz file, found {shown(path)}")
    name = one_line(path)
    try:
        file = Path(path)
        if file.is_dir():
            raise TraceError(f"{name}: is a directory, expected an .npz file")
        if not file.is_file():
            raise TraceError(f"{name}: {'not a regular file' if Path(path).exists() else 'no such file'}")
        with open_archive(file) as archive:
            largest = MAX_STREAMED_BYTES if streamed else MAX_BYTES
            yield archive, _members(archive, file.stat().st_size, name, largest)
    except TraceError:
        raise
    except zipfile.BadZipFile as error:
        if _starts_as_zip(Path(path)):
            raise TraceError(f"{name}: cannot be read as an .npz file ({one_line(error)})") from error
        hint = "perfmodel trace import reads recordings in other formats"
        raise TraceError(f"{name}: cannot be read, for it is no .npz file ({hint})") from error
    except Exception as error:  # decoders may raise anything at all when fed with broken bytes
        reason = one_line(error) or type(error).__name__
        raise TraceError(f"{name}: cannot be read as an .npz file ({reason})") from error


def _starts_as_zip(file: Path) -> bool:
    try:
        with file.open("rb") as stream:
            return stream.read(2) == b"PK"
    except OSError:
        return False


class _Opened(io.FileIO):
    """A file that refuses to hand out more than ``most`` bytes at once, for as long as that is a number."""

    most: int | None = MAX_DIRECTORY_BYTES

    def read(self, size: int | None = -1, /) -> bytes:
        if size is not None and self.most is not None and size > self.most:
            raise TraceError(f"{one_line(self.name)}: its list of contents has {size:,} bytes, at most {self.most:,}")
        return super().read(-1 if size is None else size)


@contextlib.contextmanager
def open_archive(path: Path) -> Iterator[zipfile.ZipFile]:
    """A zip archive whose list of contents is of reasonable length; everything else is left to be checked.

    Raises TraceError for a longer list, and what :class:`zipfile.ZipFile` raises.
    """
    # The list is read whole when the archive is opened; what it lists is read in pieces later.
    with _Opened(path) as file, zipfile.ZipFile(file) as archive:
        file.most = None
        yield archive


def _members(archive: zipfile.ZipFile, size: int, name: str, largest: int) -> dict[str, zipfile.ZipInfo]:
    arrays = [info for info in archive.infolist() if info.filename.endswith(".npy")]
    if not arrays:
        raise TraceError(f"{name}: is a zip archive that holds no arrays, expected an .npz file")
    total = sum(info.file_size for info in arrays)
    if total > largest:
        raise TraceError(f"{name}: would expand to {total / 2**30:.1f} GiB, at most {largest / 2**30:.0f} GiB")
    if total > MAX_RATIO * size + FREE_BYTES:
        raise TraceError(
            f"{name}: {size:,} bytes would expand to {total:,}, at most {MAX_RATIO} times as many and "
            f"{FREE_BYTES / 2**20:.0f} MiB; store such arrays uncompressed (numpy.savez)"
        )
    members = {info.filename.removesuffix(".npy"): info for info in arrays}
    if len(members) != len(arrays):
        raise TraceError(f"{name}: holds two arrays of the same name")
    for info in archive.infolist():
        # Damage to the list of contents must not hide an array: opening compares the two places where its name
        # stands, and a wrong length would make one entry's comment swallow the next entry.
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise TraceError(f"{name}: {one_line(info.filename)} is packed in a way that NumPy never does")
        archive.open(info).close()
        if info.comment:
            raise TraceError(f"{name}: has a comment on {one_line(info.filename)}; the file is damaged")
    return members


def _read(archive: zipfile.ZipFile, info: zipfile.ZipInfo, path: str | Path, key: str) -> NDArray[Any]:
    where = f"{one_line(path)}: {key}"
    with archive.open(info) as stream:
        shape, fortran_order, dtype = _header(stream, info, where)
        data = np.empty(math.prod(shape) * dtype.itemsize, np.uint8)
        # In pieces, because an archive may hold more than it declares, and would be unpacked whole.
        for start in range(0, len(data), _PIECE):
            part = data[start : start + _PIECE]
            found = stream.read(len(part))
            if len(found) != len(part):
                raise TraceError(f"{where} ends too early; the file is damaged")
            part[:] = np.frombuffer(found, np.uint8)
        stream.read(1)  # at the end, which is here, the check sum is compared
    data.flags.writeable = False
    return np.ndarray(shape, dtype, buffer=data, order="F" if fortran_order else "C")


def _header(stream: IO[bytes], info: zipfile.ZipInfo, where: str) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    return array_header(stream, info.file_size, where)


def array_header(stream: IO[bytes], total: int, where: str) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Shape, whether columns come first, and type of a ``.npy`` array, of which ``total`` bytes are there.

    The stream stands at the start of the array, and at the first number afterwards. Raises :class:`TraceError`, whose
    message starts with ``where``, for Python objects and for sizes that no array has or that are not there; and what
    NumPy's parser raises for broken headers, which may be anything.
    """
    version = npy.read_magic(io.BytesIO(stream.read(npy.MAGIC_LEN)))
    if version not in ((1, 0), (2, 0)):
        raise TraceError(f"{where} uses version {version} of the .npy format, expected (1, 0) or (2, 0)")
    count = stream.read(2 if version == (1, 0) else 4)
    length = int.from_bytes(count, "little")
    if length > MAX_HEADER_BYTES:
        raise TraceError(f"{where} has a header of {length:,} bytes, at most {MAX_HEADER_BYTES:,}")
    text = io.BytesIO(count + stream.read(length))
    if version == (1, 0):
        shape, fortran_order, dtype = npy.read_array_header_1_0(text)
    else:
        shape, fortran_order, dtype = npy.read_array_header_2_0(text)
    if dtype.hasobject:
        raise TraceError(f"{where} holds pickled Python objects, expected a plain array")
    if dtype.itemsize == 0 or not all(0 <= one < 2**48 for one in shape):
        raise TraceError(f"{where} declares shape {one_line(shape)} of type {dtype}, which no array has")
    size, present = math.prod(shape) * dtype.itemsize, total - npy.MAGIC_LEN - len(count) - length
    if size != present:
        raise TraceError(f"{where} declares shape {one_line(shape)} ({size} bytes) but holds {present} bytes")
    return shape, fortran_order, dtype
