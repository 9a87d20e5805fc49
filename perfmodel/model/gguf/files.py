"""The files of a model and the tensors in them. The tensors' numbers are never read."""

import math
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perfmodel.errors import ModelConfigError
from perfmodel.gguf_header import Header, read_header, shown
from perfmodel.model.gguf.metadata import Metadata
from perfmodel.model.sources import plain
from perfmodel.storage import Format, format_named

_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_LARGEST_FILE = 2**48
_INSTALL = "pip install 'perfmodel[gguf]'"


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor of a GGUF file.

    name : as in the file. shape : outputs first, as elsewhere in this package; the file lists axes the other way round.
    stored : its format, with the exact bits of a number. size : its bytes [byte].
    """

    name: str
    shape: tuple[int, ...]
    stored: Format
    size: int

    @property
    def params(self) -> int:
        """Numbers in it [1]."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class GgufFiles:
    """A model's file, or all parts of a model that is split into several.

    name : the file's name, without the number of a part. metadata : the values of the first part. tensors : those of
    all parts, in order.
    """

    name: str
    metadata: Metadata
    tensors: tuple[GgufTensor, ...]


def gguf_tensors(path: str | os.PathLike[str]) -> tuple[GgufTensor, ...]:
    """The tensors of a GGUF file; of all parts where it is one of several.

    Raises
    ------
    ModelConfigError : as `read_files`.
    """
    return read_files(path).tensors


def read_files(path: object) -> GgufFiles:
    """The metadata and tensors of a GGUF file. Of a split model any part may be named; all must lie beside it.

    Raises
    ------
    ModelConfigError : there is no such file, a part is missing, a file is damaged, it breaks the format, or the
        ``gguf`` package is not installed. One line that names file and place.
    """
    types = _types()
    first = _file(path)
    parts = _parts(first)
    headers = [_header(part) for part in parts]
    where = plain(parts[0])
    tensors: dict[str, GgufTensor] = {}
    for number, (part, header) in enumerate(zip(parts, headers, strict=True)):
        _check_part(part, header, number, len(parts))
        for tensor in _tensors(part, header, types):
            if tensor.name in tensors:
                raise ModelConfigError(f"{plain(part)}: tensor {shown(tensor.name)} is in an earlier part too")
            tensors[tensor.name] = tensor
    expected = headers[0].values.get("split.tensors.count")
    if len(parts) > 1 and expected != len(tensors):
        raise ModelConfigError(
            f"{where}: split.tensors.count is {shown(expected)}; allowed: {len(tensors)}, the tensors of all parts"
        )
    match = _PART.fullmatch(first.name)
    return GgufFiles(
        match["stem"] if match else first.stem, Metadata.of(headers[0].values, where), tuple(tensors.values())
    )


def _file(path: object) -> Path:
    allowed = "a .gguf file"
    if not isinstance(path, str | os.PathLike):
        raise ModelConfigError(f"GGUF file: found {shown(path)}; allowed: {allowed}")
    try:
        file = Path(os.fsdecode(path))
        mode = file.stat().st_mode
    except FileNotFoundError:
        raise ModelConfigError(f"{plain(path)}: no such file; allowed: {allowed}") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "not a path"
        raise ModelConfigError(f"{plain(path)}: cannot be opened ({reason}); allowed: {allowed}") from None
    if not stat.S_ISREG(mode):
        kind = "is a folder" if stat.S_ISDIR(mode) else "is not a regular file"
        raise ModelConfigError(f"{plain(path)}: {kind}; allowed: {allowed}")
    return file


def _parts(file: Path) -> list[Path]:
    """All parts of the model that the file is one of, in order; each must be there."""
    match = _PART.fullmatch(file.name)
    if match is None:
        return [file]
    count = int(match["count"])
    if not 1 <= int(match["number"]) <= count:
        raise ModelConfigError(f"{plain(file)}: is part {int(match['number'])} of {count}; allowed: 1 to {count}")
    parts = []
    for number in range(1, count + 1):
        part = file.with_name(f"{match['stem']}-{number:05d}-of-{count:05d}.gguf")
        if not part.is_file():
            raise ModelConfigError(f"{plain(part)}: no such file; allowed: all {count} parts in one folder")
        parts.append(part)
    return parts


def _header(part: Path) -> Header:
    where, size = plain(part), part.stat().st_size
    if not 0 < size < _LARGEST_FILE:
        raise ModelConfigError(f"{where}: has {size} bytes; allowed: a GGUF file")
    try:
        return read_header(part, where, size, ModelConfigError, vocabularies=True)
    except ModelConfigError as error:
        # The reader of headers serves traces too, and says what is wrong; what a model may be is said here.
        said = str(error)
        raise ModelConfigError(said if "allowed" in said else f"{said}; allowed: a whole GGUF file") from None


def _check_part(part: Path, header: Header, number: int, count: int) -> None:
    """Refuse a file that says of itself that it is another part, or one of other parts, than its name says."""
    found = header.values.get("split.count", 1 if count == 1 else None)
    if type(found) is not int or max(found, 1) != count:
        said = f"{count}, as the file's name says" if count > 1 else "1, for a part is named NAME-00001-of-00002.gguf"
        raise ModelConfigError(f"{plain(part)}: split.count is {shown(found)}; allowed: {said}")
    index = header.values.get("split.no", 0 if count == 1 else None)
    if type(index) is not int or index != number:
        raise ModelConfigError(f"{plain(part)}: split.no is {shown(index)}; allowed: {number}, as the file's name says")


@dataclass(frozen=True)
class _Type:
    """A type of tensors: its format, and its blocks' numbers and bytes."""

    stored: Format
    block: int
    size: int


def _types() -> Mapping[int, _Type]:
    """The types of tensors by number, from the ``gguf`` package."""
    try:
        from gguf.constants import GGML_QUANT_SIZES
    except ImportError as error:
        raise ModelConfigError(f"GGUF files need the gguf package ({error}): {_INSTALL}") from None
    found = {}
    for kind, (block, size) in GGML_QUANT_SIZES.items():
        name = kind.name.lower()
        stored = format_named(name).name if name in ("f16", "f32", "f64", "bf16") else name
        found[int(kind)] = _Type(Format(stored, 8 * size / block), block, size)
    return found


def _tensors(part: Path, header: Header, types: Mapping[int, _Type]) -> list[GgufTensor]:
    """The tensors of one file, whose places must lie within it, one behind the other."""
    where, size = plain(part), part.stat().st_size
    found: list[GgufTensor] = []
    places: list[tuple[int, int, str]] = []
    for name, tensor in header.tensors.items():
        what = f"{where}: tensor {shown(name)}"
        kind = types.get(tensor.kind)
        if kind is None:
            raise ModelConfigError(
                f"{what} is of type {tensor.kind}; allowed: the types that the installed gguf package has, "
                f"{_ranges(types)} (a newer one may have more)"
            )
        if math.prod(tensor.shape) < 1:
            raise ModelConfigError(f"{what} has shape {tensor.shape}; allowed: axes from 1 up")
        if tensor.shape[0] % kind.block:
            allowed = f"a multiple of {kind.block}, a block of {kind.stored.name}"
            raise ModelConfigError(f"{what} has rows of {tensor.shape[0]}; allowed: {allowed}")
        length = math.prod(tensor.shape) // kind.block * kind.size
        places.append((tensor.start, length, name))
        found.append(GgufTensor(name, tensor.shape[::-1], kind.stored, length))
    end, before = 0, ""
    for start, length, name in sorted(places):
        if start < end:
            raise ModelConfigError(f"{where}: tensors {shown(before)} and {shown(name)} overlap at byte {start}")
        end, before = start + length, name
        if end > size:
            raise ModelConfigError(f"{where}: tensor {shown(name)} ends at byte {end}, the file at {size}: it is cut")
    return found


def _ranges(numbers: Mapping[int, Any]) -> str:
    """Numbers as text, with ranges: ``0-3, 6``."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
