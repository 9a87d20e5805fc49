"""GGUF files of statistics: the tables at their start, and 32-bit tensors behind them."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from perfmodel.errors import TraceError
from perfmodel.gguf_header import Header, HeaderBytes, read_header
from perfmodel.routing.importers.files import check_file, reason
from perfmodel.routing.npz import one_line, shown

#: Bytes of one number of the plain types, by number; other types come in blocks, of which only the start is checked.
_SIZES = {0: 4, 1: 2, 24: 1, 25: 2, 26: 4, 27: 8, 28: 8, 30: 2}
#: Number of the type of 32-bit floats among tensor types.
F32 = 0
#: Most bytes of tensors that are read at once.
_MOST_READ = 2**24


@dataclass(frozen=True)
class Gguf(Header):
    """The tables of one file, and where it is."""

    path: Path

    def read(self, names: Iterable[str]) -> dict[str, NDArray[np.float32]]:
        """The named tensors of 32-bit floats, each as one axis in file order.

        TraceError for a tensor of another type, and for tensors that have more bytes together than the file, or than
        counts have.
        """
        chosen = {name: self.tensors[name] for name in names}
        name, size = one_line(self.path), check_file(self.path)
        total = 0
        for key, tensor in chosen.items():
            where = f"{name}: tensor {shown(key)}"
            if tensor.kind != F32:
                raise TraceError(f"{where} is of type {tensor.kind}, expected {F32} (32-bit floats)")
            total += 4 * math.prod(tensor.shape)
        if total > size:
            raise TraceError(f"{name}: tensors of {total} bytes overlap in a file of {size}")
        if total > _MOST_READ:
            raise TraceError(f"{name}: {len(chosen)} tensors have {total} bytes; allowed: at most {_MOST_READ} at once")
        found = {}
        try:
            with self.path.open("rb") as file:
                source = HeaderBytes(file, size, name, TraceError)
                for key, tensor in chosen.items():
                    source.skip(tensor.start - source.at, "")
                    data = source.take(4 * math.prod(tensor.shape), f"tensor {shown(key)}")
                    found[key] = np.frombuffer(data, "<f4").astype(np.float32, copy=False)
        except OSError as error:
            raise TraceError(f"{name}: cannot be read ({reason(error)})") from None
        return found


def read_gguf(path: Path) -> Gguf:
    """The tables of a GGUF file; TraceError for anything that breaks the format."""
    name, size = one_line(path), check_file(path)
    header = read_header(path, name, size, TraceError)
    for key, one in header.tensors.items():
        stop = one.start + math.prod(one.shape) * _SIZES.get(one.kind, 0)
        if stop > size:
            raise TraceError(f"{name}: tensor {shown(key)} ends at byte {stop}, the file at {size}: it is cut")
    return Gguf(header.version, header.values, header.tensors, path)
