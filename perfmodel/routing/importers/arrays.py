"""Arrays in ``.npy`` and safetensors files; their headers are checked against the file before anything is read."""

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from perfmodel.errors import TraceError
from perfmodel.routing.importers.files import brief, check_file, parse_json, reason
from perfmodel.routing.npz import array_header, one_line, shown

#: Types of numbers of the safetensors format that are read.
DTYPES = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2",
    "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1",
    "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "u1", "BOOL": "u1",
}  # fmt: skip
_LONGEST_HEADER = 2**24


class Declared(NamedTuple):
    """What a file says of one array: its shape and type, and where its bytes stand."""

    shape: tuple[int, ...]
    dtype: str
    start: int
    stop: int

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """The type as it is read; bytes where it is none of `DTYPES`."""
        return np.dtype(np.float32 if self.dtype == "BF16" else DTYPES.get(self.dtype, "V1"))


# ---- .npy ----


def npy_declared(path: Path) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Shape and type of the array in a ``.npy`` file, which has just as many bytes as they need."""
    with _opened(path) as file:
        shape, _, dtype = _npy_header(file, path)
        return shape, dtype


def read_npy(path: Path) -> NDArray[Any]:
    """The array in a ``.npy`` file; TraceError for pickled objects and sizes that contradict each other."""
    with _opened(path) as file:
        shape, fortran_order, dtype = _npy_header(file, path)
        data = _read(file, math.prod(shape) * dtype.itemsize, path)
    return np.ndarray(shape, dtype, buffer=data, order="F" if fortran_order else "C")


def _npy_header(file: IO[bytes], path: Path) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    name = one_line(path)
    try:
        return array_header(file, path.stat().st_size, f"{name}: the array")
    except TraceError:
        raise
    except Exception as error:  # the parser of headers may raise anything when fed with broken bytes
        raise TraceError(f"{name}: cannot be read as a .npy file ({reason(error)})") from None


# ---- safetensors ----


def safetensors_declared(path: Path) -> dict[str, Declared]:
    """Name, shape, type and place of every tensor of a safetensors file; the note ``__metadata__`` is left out.

    TraceError unless the header is JSON and the tensors fill the rest of the file without gap or overlap.
    """
    name, size = one_line(path), check_file(path)
    with _opened(path) as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(size - 8, _LONGEST_HEADER):
            raise TraceError(f"{name}: is no safetensors file (a header of {length:,} bytes in a file of {size:,})")
        header = parse_json(_read(file, length, path), f"{name}: header")
    if not isinstance(header, dict):
        raise TraceError(f"{name}: is no safetensors file (its header is no object)")
    tensors = {key: _tensor(value, 8 + length, f"{name}: tensor {shown(key)}") for key, value in header.items()
               if key != "__metadata__"}  # fmt: skip
    at = 8 + length
    for key, one in sorted(tensors.items(), key=lambda item: item[1].start):
        if one.start != at:
            raise TraceError(f"{name}: tensor {shown(key)} starts at byte {one.start}, expected {at}")
        at = one.stop
    if at != size:
        raise TraceError(f"{name}: its tensors end at byte {at} of {size}; the file is cut or has more")
    return tensors


def _tensor(value: Any, first: int, where: str) -> Declared:
    try:
        dtype, shape, (start, stop) = value["dtype"], tuple(value["shape"]), value["data_offsets"]
        plain = all(type(n) is int and 0 <= n < 2**48 for n in (*shape, start, stop)) and len(shape) <= 8
    except (KeyError, TypeError, ValueError):
        raise TraceError(f"{where} is {brief(value)}, expected dtype, shape and data_offsets") from None
    if not plain or not isinstance(dtype, str):
        raise TraceError(f"{where} is {brief(value)}, expected a type, and sizes and offsets >= 0")
    if dtype in DTYPES and stop - start != math.prod(shape) * np.dtype(DTYPES[dtype]).itemsize:
        raise TraceError(f"{where} has {stop - start} bytes, which is not shape {shape} of {dtype}")
    return Declared(shape, dtype, first + start, first + stop)


def read_safetensors(path: Path, names: Iterable[str] | None = None) -> dict[str, NDArray[Any]]:
    """Tensors of the given names, by default all; BF16 as float32. Names that the file does not hold are left out."""
    tensors = safetensors_declared(path)
    found = {}
    with _opened(path) as file:
        for key in tensors if names is None else [key for key in names if key in tensors]:
            one = tensors[key]
            if one.dtype not in DTYPES:
                allowed = ", ".join(DTYPES)
                raise TraceError(f"{one_line(path)}: tensor {shown(key)} is of type {one.dtype}; allowed: {allowed}")
            file.seek(one.start)
            data = _read(file, one.stop - one.start, path)
            array = np.frombuffer(data, DTYPES[one.dtype]).reshape(one.shape)
            found[key] = (array.astype(np.uint32) << 16).view(np.float32) if one.dtype == "BF16" else array
    return found


def safetensors_note(path: Path) -> dict[str, str]:
    """The texts under ``__metadata__``, which may be missing; call `safetensors_declared` first."""
    with _opened(path) as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    note = header.get("__metadata__")
    return {str(key): str(value) for key, value in note.items()} if isinstance(note, dict) else {}


# ---- files ----


def _opened(path: Path) -> IO[bytes]:
    check_file(path)
    try:
        return path.open("rb")
    except OSError as error:
        raise TraceError(f"{one_line(path)}: cannot be read ({reason(error)})") from None


def _read(file: IO[bytes], size: int, path: Path) -> bytes:
    try:
        data = file.read(size)
    except OSError as error:
        raise TraceError(f"{one_line(path)}: cannot be read ({reason(error)})") from None
    if len(data) != size:
        raise TraceError(f"{one_line(path)}: ends after {len(data)} of {size} bytes")
    return data
