"""The files of a checkpoint: which tensors they hold, and the numbers of any one of them.

The ``safetensors`` package opens every file first and so checks its header: that it is JSON, and that the tensors it
names fill the rest of the file without gap or overlap. For that it maps the file, which takes address space of the
file's size, but no memory, and only for this moment. The numbers are then read here, because the package hands tensors
to NumPy under NumPy's own types only, and most published checkpoints are in BF16 or FP8, which NumPy lacks. Both take a
line to decode, against one more library for two types. These reads are plain reads of the bytes that are asked for, not
of a mapped file, which would end the process if somebody cuts the file meanwhile.
"""

import json
import math
import os
import stat
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from perfmodel.errors import PerfModelError
from perfmodel.routing.npz import one_line, shown

#: Types of numbers that are read, by the names of the format, with their size [byte].
WIDTHS = {"F16": 2, "BF16": 2, "F32": 4, "F64": 8, "F8_E4M3": 1}


class Tensor(NamedTuple):
    """One tensor of a file.

    dtype : its type by the name of the format; may be one that is not read
    shape : its sizes
    start, stop : its place in the file [byte]
    """

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


class Stored(NamedTuple):
    """Numbers as a file holds them.

    dtype : their type by the name of the format, one of `WIDTHS`
    shape : their sizes
    data : their bytes
    """

    dtype: str
    shape: tuple[int, ...]
    data: bytearray

    def values(self) -> NDArray[np.float64]:
        """The numbers as float64, not all of them finite perhaps."""
        return np.asarray(_decode(self.data, self.dtype).reshape(self.shape))


class Shard:
    """One safetensors file.

    path : the file
    tensors : what its header names

    Raises PerfModelError for a file that is missing or is no whole safetensors file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        check_regular(path)
        _check_whole(path)
        try:
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                header = file.read(length)
        except OSError as error:
            raise PerfModelError(f"{one_line(path)}: cannot be read ({one_line(error.strerror or error)})") from None
        self.tensors = {
            name: Tensor(str(one["dtype"]), tuple(one["shape"]), *(8 + length + end for end in one["data_offsets"]))
            for name, one in json.loads(header).items()
            if name != "__metadata__"
        }

    def read(self, name: str, first: int | None = None) -> "Stored":
        """A tensor, or with ``first`` what stands at that index of its first axis, as it is stored.

        Raises PerfModelError for a type that is not read, and for a file that ends too soon.
        """
        tensor = self.tensors[name]
        start, stop, shape = tensor.start, tensor.stop, tensor.shape
        if first is not None:
            size = (stop - start) // shape[0]
            start, stop, shape = start + first * size, start + (first + 1) * size, shape[1:]
        self._check_readable(name, stop - start, math.prod(shape))
        return Stored(tensor.dtype, shape, self._bytes(start, stop))

    def _check_readable(self, name: str, num_bytes: int, count: int) -> None:
        dtype = self.tensors[name].dtype
        if dtype not in WIDTHS:
            allowed = ", ".join(WIDTHS)
            raise PerfModelError(f"{one_line(self.path)}: tensor {shown(name)} is of type {dtype}; allowed: {allowed}")
        if num_bytes != count * WIDTHS[dtype]:
            raise PerfModelError(f"{one_line(self.path)}: tensor {shown(name)} has not the size that its shape says")

    def _bytes(self, start: int, stop: int) -> bytearray:
        found = bytearray(stop - start)
        try:
            with self.path.open("rb", buffering=0) as file:
                file.seek(start)
                view, done = memoryview(found), 0
                while done < len(found):
                    count = file.readinto(view[done:])
                    if not count:
                        raise PerfModelError(f"{one_line(self.path)}: has become shorter than its header says")
                    done += count
        except OSError as error:
            raise PerfModelError(
                f"{one_line(self.path)}: cannot be read ({one_line(error.strerror or error)})"
            ) from None
        return found


def check_regular(path: Path) -> None:
    """Refuse what is not a file with contents, or a link to one."""
    where = one_line(path)
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        found = "is a link that leads nowhere" if path.is_symlink() else "no such file"
        raise PerfModelError(f"{where}: {found}; the checkpoint is not complete") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise PerfModelError(f"{where}: cannot be opened ({one_line(reason)})") from None
    if not stat.S_ISREG(mode):
        raise PerfModelError(f"{where}: is not a regular file; allowed: a file or a link to one")
    if not os.access(path, os.R_OK):
        raise PerfModelError(f"{where}: cannot be read (no permission)")


def _check_whole(path: Path) -> None:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np"):
            pass
    except MemoryError:
        size = path.stat().st_size / 2**30
        raise PerfModelError(
            f"{one_line(path)}: cannot be mapped for a look at its header; allowed: more address space than its size,"
            f" {size:.1f} GiB (see ulimit -v)"
        ) from None
    except (SafetensorError, OSError, ValueError) as error:
        raise PerfModelError(f"{one_line(path)}: is no whole safetensors file ({one_line(error)})") from None


@cache
def _e4m3() -> NDArray[np.float64]:
    """The values of the 8-bit floats with four bits of exponent: no infinities, and NaN where all bits but one are set.

    Source: Micikevicius et al., "FP8 Formats for Deep Learning", arXiv:2209.05433.
    """
    code = np.arange(256)
    exponent, fraction = (code >> 3) & 15, code & 7
    value = np.where(exponent == 0, fraction * 2.0**-9, (8 + fraction) * 2.0 ** (exponent - 10.0))
    value[(code & 127) == 127] = np.nan
    value[code > 127] *= -1
    return value


def _decode(found: bytearray, dtype: str) -> NDArray[Any]:
    if dtype == "BF16":  # the upper half of a float32
        high = np.frombuffer(found, "<u2").astype(np.uint32) << 16
        return high.view(np.float32).astype(np.float64)
    if dtype == "F8_E4M3":
        return _e4m3()[np.frombuffer(found, np.uint8)]
    return np.frombuffer(found, f"<f{WIDTHS[dtype]}").astype(np.float64)
