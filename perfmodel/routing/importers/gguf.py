"""GGUF files: the table of values and the table of tensors at their start, and 32-bit tensors behind them.

A file is the letters ``GGUF``, a version, the number of tensors and of values, the values (name, type, value), the
tensors (name, axes, type, place), and from the next multiple of the alignment on the tensors' bytes. Versions 2 and 3
are read, of little-endian machines. Every length that a file states is held against what is left of the file before
anything of that length is made, and the tables are small, so that a hostile file is refused at once.

Source: the description of the format in the ggml project, docs/gguf.md.
"""

import math
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from perfmodel.errors import TraceError
from perfmodel.routing.importers.files import check_file, reason
from perfmodel.routing.npz import one_line, shown

VERSIONS = (2, 3)
#: Bytes of one number of the plain types, by number; other types come in blocks, of which only the start is checked.
_SIZES = {0: 4, 1: 2, 24: 1, 25: 2, 26: 4, 27: 8, 28: 8, 30: 2}
#: Number of the type of 32-bit floats among tensor types.
F32 = 0
#: Most values, tensors and items of lists of texts of one file. Statistics of a model have some thousand tensors.
_MOST_VALUES, _MOST_TENSORS, _MOST_TEXTS = 1_000, 20_000, 100_000
#: Longest name of a value or a tensor, and longest text [byte].
_LONGEST_NAME, _LONGEST_TEXT = 2**16 - 1, 2**20
#: All names and texts of one file together [byte].
_LONGEST_TEXTS = 2**25
#: A list of numbers longer than this is passed over, for only short ones say something about statistics.
_LONGEST_LIST = 1_000
_MOST_AXES = 4
#: Most bytes of tensors that are read at once.
_MOST_READ = 2**24
_TEXT, _LIST = 8, 9
#: How the types of single values are packed, by number.
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}


class Tensor(NamedTuple):
    """What the table says of one tensor.

    shape : axes, the one whose neighbours lie side by side first. kind : number of its type. start : first byte.
    """

    shape: tuple[int, ...]
    kind: int
    start: int


@dataclass(frozen=True)
class Gguf:
    """The tables of one file.

    values : single values, texts and short lists, by name; None for a list of numbers that was passed over
    tensors : by name, in file order
    """

    path: Path
    version: int
    values: dict[str, Any]
    tensors: dict[str, Tensor]

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
        with _opened(self.path) as file:
            source = _Bytes(file, size, name)
            for key, tensor in chosen.items():
                source.skip(tensor.start - source.at, "")
                data = source.take(4 * math.prod(tensor.shape), f"tensor {shown(key)}")
                found[key] = np.frombuffer(data, "<f4").astype(np.float32, copy=False)
        return found


def read_gguf(path: Path) -> Gguf:
    """The tables of a GGUF file; TraceError for anything that breaks the format or a limit above."""
    name, size = one_line(path), check_file(path)
    with _opened(path) as file:
        source = _Bytes(file, size, name)
        version = _version(source)
        tensors = source.count("number of tensors", _MOST_TENSORS)
        values: dict[str, Any] = {}
        items = _MOST_TEXTS
        for _ in range(source.count("number of values", _MOST_VALUES)):
            key = source.text("name of a value", _LONGEST_NAME)
            if key in values:
                raise TraceError(f"{name}: value {shown(key)} occurs twice")
            values[key] = _value(source, f"value {shown(key)}", items)
            items -= len(values[key]) if isinstance(values[key], tuple) else 0
        alignment = values.get("general.alignment", 32)
        if type(alignment) is not int or not 1 <= alignment <= 2**20 or alignment % 8:
            raise TraceError(f"{name}: general.alignment is {shown(alignment)}, expected a multiple of 8, up to 2**20")
        table: dict[str, Tensor] = {}
        for _ in range(tensors):
            key = source.text("name of a tensor", _LONGEST_NAME)
            if key in table:
                raise TraceError(f"{name}: tensor {shown(key)} occurs twice")
            table[key] = _tensor(source, f"tensor {shown(key)}", alignment)
        start = -(-source.at // alignment) * alignment
    moved = {key: one._replace(start=start + one.start) for key, one in table.items()}
    for key, one in moved.items():
        stop = one.start + math.prod(one.shape) * _SIZES.get(one.kind, 0)
        if stop > size:
            raise TraceError(f"{name}: tensor {shown(key)} ends at byte {stop}, the file at {size}: it is cut")
    return Gguf(path, version, values, moved)


def _version(source: "_Bytes") -> int:
    magic = source.take(4, "letters GGUF")
    version = source.number("<I", "version")
    swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
    if magic == b"FUGG" or (magic == b"GGUF" and version > 2**16 and 1 <= swapped <= 2**16):
        raise TraceError(f"{source.name}: is a GGUF file of a big-endian machine; allowed: little-endian ones")
    if magic != b"GGUF":
        raise TraceError(f"{source.name}: is no GGUF file; it starts with {magic!r}")
    if version not in VERSIONS:
        raise TraceError(f"{source.name}: is version {version} of GGUF; allowed: {', '.join(map(str, VERSIONS))}")
    return int(version)


def _value(source: "_Bytes", what: str, most: int) -> Any:
    """The next value; a list of texts has at most ``most`` items."""
    kind = source.number("<I", what)
    if kind == _TEXT:
        return source.text(what, _LONGEST_TEXT)
    if kind != _LIST:
        return _scalar(source, kind, what)
    kind = source.number("<I", what)
    length = source.number("<Q", what)
    if kind == _TEXT:
        if length > most:
            raise TraceError(
                f"{source.name}: {what} is a list of {length} texts; allowed: at most {most}, and statistics need few: "
                f"the file is a model"
            )
        return tuple(source.text(what, _LONGEST_TEXT) for _ in range(length))
    if kind not in _SCALARS:
        raise TraceError(f"{source.name}: {what} is a list of type {kind}; allowed: texts, numbers and truths")
    if length > _LONGEST_LIST:
        source.skip(length * struct.calcsize(_SCALARS[kind]), what)
        return None
    return tuple(_scalar(source, kind, what) for _ in range(length))


def _scalar(source: "_Bytes", kind: int, what: str) -> Any:
    if kind not in _SCALARS:
        raise TraceError(f"{source.name}: {what} is of type {kind}; allowed: 0 to 12")
    return source.number(_SCALARS[kind], what)


def _tensor(source: "_Bytes", what: str, alignment: int) -> Tensor:
    axes = source.number("<I", what)
    if not 1 <= axes <= _MOST_AXES:
        raise TraceError(f"{source.name}: {what} has {axes} axes; allowed: 1 to {_MOST_AXES}")
    shape = tuple(source.number("<Q", what) for _ in range(axes))
    kind, offset = source.number("<I", what), source.number("<Q", what)
    if math.prod(shape) >= 2**48 or offset >= 2**48:
        raise TraceError(f"{source.name}: {what} has shape {shape} at byte {offset}, larger than any file")
    if offset % alignment:
        raise TraceError(f"{source.name}: {what} is at byte {offset}, which is no multiple of {alignment}")
    return Tensor(shape, kind, offset)


class _Bytes:
    """A file from its start on, from which nothing is taken that is not there.

    at : bytes passed so far. texts : bytes of texts among them.
    """

    def __init__(self, file: IO[bytes], size: int, name: str) -> None:
        self.file, self.size, self.name = file, size, name
        self.at = self.texts = 0

    def take(self, count: int, what: str) -> bytes:
        self._need(count, what)
        try:
            data = self.file.read(count)
        except OSError as error:
            raise TraceError(f"{self.name}: cannot be read ({reason(error)})") from None
        if len(data) != count:
            raise TraceError(f"{self.name}: ends within {what}")
        self.at += count
        return data

    def skip(self, count: int, what: str) -> None:
        self._need(count, what)
        self.at += count
        self.file.seek(self.at)

    def number(self, code: str, what: str) -> Any:
        return struct.unpack(code, self.take(struct.calcsize(code), what))[0]

    def count(self, what: str, most: int) -> int:
        found = self.number("<Q", what)
        if found > most:
            raise TraceError(f"{self.name}: {what} is {found}; allowed: at most {most}")
        return int(found)

    def text(self, what: str, longest: int) -> str:
        length = self.number("<Q", what)
        self.texts += length
        if length > longest or self.texts > _LONGEST_TEXTS:
            all_texts = f"{longest}, {_LONGEST_TEXTS} with the texts before it"
            raise TraceError(f"{self.name}: {what} has {length} bytes; allowed: at most {all_texts}")
        try:
            return self.take(length, what).decode()
        except UnicodeDecodeError:
            raise TraceError(f"{self.name}: {what} is not UTF-8 text") from None

    def _need(self, count: int, what: str) -> None:
        left = self.size - self.at
        if count > left:
            raise TraceError(f"{self.name}: {what} needs {count} bytes, {left} are left: the file is cut or damaged")


def _opened(path: Path) -> IO[bytes]:
    try:
        return path.open("rb")
    except OSError as error:
        raise TraceError(f"{one_line(path)}: cannot be read ({reason(error)})") from None
