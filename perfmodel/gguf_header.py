"""The tables at the start of GGUF files: values and tensors.

A file is the letters ``GGUF``, a version, the number of tensors and of values, the values (name, type, value), the
tensors (name, axes, type, place), and from the next multiple of the alignment on the tensors' bytes. Versions 2 and 3
are read, of little-endian machines. Every length that a file states is held against what is left of the file before
anything of that length is made, and the tables are small, so that a hostile file is refused at once.

The reader of the ``gguf`` package makes several objects for each token of a vocabulary: with 250,000 tokens it takes
ten seconds and a gigabyte, against a tenth of a second here.

Source: the description of the format in the ggml project, docs/gguf.md.
"""

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

from perfmodel.errors import PerfModelError

VERSIONS = (2, 3)
#: Most values, tensors and items of lists of texts of one file. Models and their statistics have some thousand tensors.
_MOST_VALUES, _MOST_TENSORS, _MOST_TEXTS = 1_000, 20_000, 100_000
#: Longest name of a value or a tensor, and longest text [byte].
_LONGEST_NAME, _LONGEST_TEXT = 2**16 - 1, 2**20
#: All names and texts of one file together [byte].
_LONGEST_TEXTS = 2**25
#: Most items of lists of texts that are passed over, and their bytes together. A vocabulary with its rules of merging
#: has half a million and some megabytes.
_MOST_PASSED, _LONGEST_PASSED = 2**22, 2**28
#: A list of numbers longer than this is passed over: what there is for every layer or count is shorter.
_LONGEST_LIST = 1_000
_MOST_AXES = 4
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
class Header:
    """The tables of one file.

    values : single values, texts and short lists, by name; None for what was passed over. tensors : by name, in file
    order.
    """

    version: int
    values: dict[str, Any]
    tensors: dict[str, Tensor]


def read_header(path: Path, name: str, size: int, error: type[PerfModelError], *, vocabularies: bool = False) -> Header:
    """The tables of a GGUF file.

    name, size : what errors call the file, and its bytes. error : raised for anything that breaks the format or a limit
    above. vocabularies : whether lists of texts, and texts longer than a mebibyte, are passed over; otherwise lists are
    read, and long ones refused.
    """
    try:
        with path.open("rb") as file:
            return _Tables(HeaderBytes(file, size, name, error), vocabularies).read()
    except OSError as failure:
        reason = " ".join(str(failure.strerror or failure).split())
        raise error(f"{name}: cannot be read ({reason})") from None


def shown(value: object) -> str:
    """A value of the file for a message, on one line."""
    text = ascii(value) if not repr(value).isprintable() else repr(value)
    return text if len(text) <= 300 else f"{text[:297]}..."


class HeaderBytes:
    """A file from its start on, from which nothing is taken that is not there.

    at : bytes passed so far. texts : bytes of texts among them. passed, passed_bytes : texts of lists that were passed
    over.
    """

    def __init__(self, file: IO[bytes], size: int, name: str, error: type[PerfModelError]) -> None:
        self.file, self.size, self.name, self.error = file, size, name, error
        self.at = self.texts = self.passed = self.passed_bytes = 0

    def refuse(self, said: str) -> PerfModelError:
        return self.error(f"{self.name}: {said}")

    def take(self, count: int, what: str) -> bytes:
        self._need(count, what)
        data = self.file.read(count)
        if len(data) != count:
            raise self.refuse(f"ends within {what}")
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
            raise self.refuse(f"{what} is {found}; allowed: at most {most}")
        return int(found)

    def text(self, what: str, longest: int) -> str:
        return self.decoded(self.number("<Q", what), what, longest)

    def decoded(self, length: int, what: str, longest: int) -> str:
        """The next ``length`` bytes as a text."""
        self.texts += length
        if length > longest or self.texts > _LONGEST_TEXTS:
            all_texts = f"{longest}, {_LONGEST_TEXTS} with the texts before it"
            raise self.refuse(f"{what} has {length} bytes; allowed: at most {all_texts}")
        try:
            return self.take(length, what).decode()
        except UnicodeDecodeError:
            raise self.refuse(f"{what} is not UTF-8 text") from None

    def skip_texts(self, count: int, what: str) -> None:
        """Pass over ``count`` texts, in large pieces, because a vocabulary has many."""
        self._need(8 * count, what)
        self.passed += count
        if self.passed > _MOST_PASSED:
            raise self.refuse(f"{what} is a list of {count} texts; allowed: at most {_MOST_PASSED} in all lists")
        start, length_of = self.at, struct.Struct("<Q").unpack_from
        while count:
            piece = self.file.read(min(2**20, self.size - self.at))
            position, last = 0, len(piece) - 8
            while count and position <= last:
                position += 8 + length_of(piece, position)[0]
                count -= 1
            if position == 0:
                self._need(8, what)
                raise self.refuse(f"ends within {what}")
            self.skip(position, what)
            if self.passed_bytes + self.at - start > _LONGEST_PASSED:
                raise self.refuse(f"{what} has more than {_LONGEST_PASSED} bytes with the lists before it")
        self.passed_bytes += self.at - start

    def _need(self, count: int, what: str) -> None:
        left = self.size - self.at
        if count > left:
            raise self.refuse(f"{what} needs {count} bytes, {left} are left: the file is cut or damaged")


class _Tables:
    """The reader of one file's tables."""

    def __init__(self, source: HeaderBytes, vocabularies: bool) -> None:
        self.source, self.vocabularies = source, vocabularies
        self.items = _MOST_TEXTS

    def read(self) -> Header:
        source = self.source
        version = self._version()
        tensors = source.count("number of tensors", _MOST_TENSORS)
        values: dict[str, Any] = {}
        for _ in range(source.count("number of values", _MOST_VALUES)):
            key = source.text("name of a value", _LONGEST_NAME)
            if key in values:
                raise source.refuse(f"value {shown(key)} occurs twice")
            values[key] = self._value(f"value {shown(key)}")
        alignment = values.get("general.alignment", 32)
        if type(alignment) is not int or not 1 <= alignment <= 2**20 or alignment % 8:
            raise source.refuse(f"general.alignment is {shown(alignment)}, expected a multiple of 8, up to 2**20")
        table: dict[str, Tensor] = {}
        for _ in range(tensors):
            key = source.text("name of a tensor", _LONGEST_NAME)
            if key in table:
                raise source.refuse(f"tensor {shown(key)} occurs twice")
            table[key] = self._tensor(f"tensor {shown(key)}", alignment)
        start = -(-source.at // alignment) * alignment
        return Header(version, values, {key: one._replace(start=start + one.start) for key, one in table.items()})

    def _version(self) -> int:
        source = self.source
        magic = source.take(4, "letters GGUF")
        version = source.number("<I", "version")
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        if magic == b"FUGG" or (magic == b"GGUF" and version > 2**16 and 1 <= swapped <= 2**16):
            raise source.refuse("is a GGUF file of a big-endian machine; allowed: little-endian ones")
        if magic != b"GGUF":
            raise source.refuse(f"is no GGUF file; it starts with {magic!r}")
        if version not in VERSIONS:
            raise source.refuse(f"is version {version} of GGUF; allowed: {', '.join(map(str, VERSIONS))}")
        return int(version)

    def _value(self, what: str) -> Any:
        """The next value."""
        source = self.source
        kind = source.number("<I", what)
        if kind == _TEXT:
            length = source.number("<Q", what)
            if not self.vocabularies or length <= _LONGEST_TEXT:
                return source.decoded(length, what, _LONGEST_TEXT)
            source.skip(length, what)
            return None
        if kind != _LIST:
            return self._scalar(kind, what)
        kind = source.number("<I", what)
        length = source.number("<Q", what)
        if kind == _TEXT:
            return self._texts(length, what)
        if kind not in _SCALARS:
            raise source.refuse(f"{what} is a list of type {kind}; allowed: texts, numbers and truths")
        if length > _LONGEST_LIST:
            source.skip(length * struct.calcsize(_SCALARS[kind]), what)
            return None
        return tuple(self._scalar(kind, what) for _ in range(length))

    def _texts(self, length: int, what: str) -> tuple[str, ...] | None:
        if self.vocabularies:
            self.source.skip_texts(length, what)
            return None
        if length > self.items:
            raise self.source.refuse(
                f"{what} is a list of {length} texts; allowed: at most {self.items}, and statistics need few: "
                f"the file is a model"
            )
        self.items -= length
        return tuple(self.source.text(what, _LONGEST_TEXT) for _ in range(length))

    def _scalar(self, kind: int, what: str) -> Any:
        if kind not in _SCALARS:
            raise self.source.refuse(f"{what} is of type {kind}; allowed: 0 to 12")
        return self.source.number(_SCALARS[kind], what)

    def _tensor(self, what: str, alignment: int) -> Tensor:
        source = self.source
        axes = source.number("<I", what)
        if not 1 <= axes <= _MOST_AXES:
            raise source.refuse(f"{what} has {axes} axes; allowed: 1 to {_MOST_AXES}")
        shape = tuple(source.number("<Q", what) for _ in range(axes))
        kind, offset = source.number("<I", what), source.number("<Q", what)
        if math.prod(shape) >= 2**48 or offset >= 2**48:
            raise source.refuse(f"{what} has shape {shape} at byte {offset}, larger than any file")
        if offset % alignment:
            raise source.refuse(f"{what} is at byte {offset}, which is no multiple of {alignment}")
        return Tensor(shape, kind, offset)
