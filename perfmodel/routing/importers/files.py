"""Bounded reading of files that anybody may have written: lines, JSON, base64 and numbers in text.

Whatever goes wrong becomes one :class:`TraceError` that starts with the file's name and fits on a line. Sizes are
checked before anything of that size is made.
"""

import base64
import binascii
import json
import math
import os
import re
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from perfmodel.errors import TraceError
from perfmodel.routing.npz import MAX_BYTES, one_line, shown

#: Longest line of a text file [byte], unless a format has longer ones; with line break.
LONGEST_LINE = 2**20
#: Most columns of a line, unless a format has more.
MOST_COLUMNS = 2**16
#: Largest JSON document [byte], and the most memory that reading one may take [byte].
LARGEST_JSON, MOST_MEMORY = 48 * 2**20, 130 * 10**6
#: Kinds of values that may be long, and are not printed within a list.
_LONG = (str, bytes, Mapping, list, tuple, np.ndarray)
#: What a value costs at most once it is read, by the mark that comes with it [byte].
_COSTS = {",": 32, "[": 100, "{": 230, '"': 30}


def check_file(path: Path, most: int = MAX_BYTES) -> int:
    """Size [byte] of a regular file that is not empty and has at most ``most`` bytes; otherwise TraceError."""
    name = one_line(path)
    try:
        found = path.stat()
    except FileNotFoundError:
        raise TraceError(f"{name}: no such file") from None
    except (OSError, ValueError) as error:
        raise TraceError(f"{name}: cannot be opened ({reason(error)})") from None
    if stat.S_ISDIR(found.st_mode):
        raise TraceError(f"{name}: is a folder, expected a file")
    if not stat.S_ISREG(found.st_mode):
        raise TraceError(f"{name}: is not a regular file")
    if found.st_size == 0:
        raise TraceError(f"{name}: is empty")
    if found.st_size > most:
        raise TraceError(f"{name}: has {found.st_size:,} bytes; allowed: at most {most:,}")
    return found.st_size


def reason(error: BaseException) -> str:
    """What an exception says, on one line."""
    return one_line(getattr(error, "strerror", None) or error) or type(error).__name__


def read_bytes(path: Path, most: int = MAX_BYTES) -> bytes:
    """All bytes of a file of at most ``most``; TraceError as `check_file`."""
    check_file(path, most)
    try:
        with path.open("rb") as file:
            data = file.read(most + 1)
    except OSError as error:
        raise TraceError(f"{one_line(path)}: cannot be read ({reason(error)})") from None
    if len(data) > most:
        raise TraceError(f"{one_line(path)}: grew while it was read; allowed: at most {most:,} bytes")
    return data


def brief(value: object) -> str:
    """A value found in a file, for a message: short ones as they stand, of long ones their kind and size."""
    if isinstance(value, np.ndarray):
        return f"an array {value.shape} of {value.dtype}" if value.ndim else brief(value.item())
    if isinstance(value, Mapping) and value:
        return f"an object with {one_line(', '.join(map(str, list(value)[:8])))}{', ...' * (len(value) > 8)}"
    if isinstance(value, list | tuple) and (len(value) > 8 or any(isinstance(one, _LONG) for one in value)):
        return f"a list of {len(value):,}"
    if isinstance(value, str) and len(value) > 60:
        return f"a text of {len(value):,} letters"
    return shown(value)


# ---- lines ----


def read_lines(path: Path, *, longest: int = LONGEST_LINE, most: int = MAX_BYTES) -> Iterator[tuple[int, str]]:
    """Number (from 1) and text of every line, without its line break; one line is held at a time.

    A byte order mark is dropped. TraceError for a line of more than ``longest`` bytes, for bytes that are no UTF-8
    and for the byte zero, which no text has.
    """
    check_file(path, most)
    name = one_line(path)
    try:
        with path.open("rb") as file:
            number = 0
            while line := file.readline(longest + 1):
                number += 1
                if len(line) > longest:
                    raise TraceError(f"{name}: line {number} is longer than {longest:,} bytes")
                if b"\0" in line:
                    raise TraceError(f"{name}: line {number} holds the byte zero, which no text has")
                try:
                    text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                except UnicodeDecodeError as error:
                    raise TraceError(f"{name}: line {number}, byte {error.start} is not UTF-8 text") from None
                yield number, text.rstrip("\r\n")
    except OSError as error:
        raise TraceError(f"{name}: cannot be read ({reason(error)})") from None


def columns(text: str, separator: str, where: str, most: int = MOST_COLUMNS) -> list[str]:
    """The columns of a line, refused before it is split where there are more than ``most``."""
    count = text.count(separator) + 1
    if count > most:
        raise TraceError(f"{where}: {count:,} columns; allowed: at most {most:,}")
    return text.split(separator)


_INTEGER = re.compile(r"[+-]?[0-9]{1,18}")
_REAL = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")


def integer(text: str, where: str, lowest: int = 0, highest: int = 2**31 - 1) -> int:
    """A whole number written in plain digits, in lowest..highest."""
    text = text.strip()
    value = int(text) if _INTEGER.fullmatch(text) else None
    if value is None or not lowest <= value <= highest:
        raise TraceError(f"{where} is {shown(text)}, expected an integer in {lowest}..{highest}")
    return value


def real(text: str, where: str) -> float:
    """A finite decimal number; neither words such as ``nan`` nor underscores, which float() would take."""
    text = text.strip()
    value = float(text) if len(text) <= 400 and _REAL.fullmatch(text) else math.nan
    if not math.isfinite(value):
        raise TraceError(f"{where} is {shown(text)}, expected a finite number")
    return value


# ---- JSON ----


def read_json(path: Path) -> Any:
    """The document in a JSON file; TraceError as `parse_json`."""
    return parse_json(read_bytes(path, LARGEST_JSON), one_line(path))


def parse_json(data: bytes | str, where: str) -> Any:
    """A JSON document, ``where`` being the start of every message about it.

    TraceError for what is no JSON or no UTF-8, for NaN, infinities and numbers beyond float64, integers of more than
    18 digits, a key that occurs twice in one object, nesting beyond Python's stack, and for a document that
    may take more than 130 MB once it is read.
    """
    try:
        text = data.decode("utf-8-sig") if isinstance(data, bytes) else data
        cost = 2 * len(text) + sum(text.count(mark) * cost for mark, cost in _COSTS.items())
        if cost > MOST_MEMORY:
            raise TraceError(
                f"{where}: {len(text):,} letters of JSON, which take up to {cost / 1e6:,.0f} MB of memory; allowed: "
                f"{MOST_MEMORY / 1e6:,.0f} MB; a larger recording belongs into arrays"
            )
        return _DECODER.decode(text)
    except TraceError as error:
        raise error if str(error).startswith(where) else TraceError(f"{where}: {error}") from None
    except UnicodeDecodeError as error:
        raise TraceError(f"{where}: byte {error.start} is not UTF-8 text; expected JSON") from None
    except RecursionError:
        raise TraceError(f"{where}: is nested too deeply; expected JSON") from None
    except ValueError as error:
        raise TraceError(f"{where}: is no JSON ({reason(error)})") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise TraceError(f"key {shown(twice)} occurs twice in one object")
    return values


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise TraceError(f"holds {one_line(text[:40])}, which is no finite number")
    return value


def _whole(text: str) -> int:
    if len(text) > 19 or len(text.lstrip("-")) > 18:
        raise TraceError(f"holds an integer of {len(text.lstrip('-'))} digits; allowed: at most 18")
    return int(text)


def _constant(text: str) -> None:
    raise TraceError(f"holds {text}, which is not JSON")


_DECODER = json.JSONDecoder(
    object_pairs_hook=_unique, parse_float=_finite, parse_int=_whole, parse_constant=_constant, strict=True
)


def table(value: object, where: str) -> Mapping[str, Any]:
    """``value`` where it is a JSON object."""
    if not isinstance(value, Mapping):
        raise TraceError(f"{where} is {brief(value)}, expected an object")
    return value


def entry(values: Mapping[str, Any], key: str, where: str) -> Any:
    """What stands under a key that must be there; the keys that are there are named otherwise."""
    if key not in values:
        raise TraceError(
            f"{where}: lacks {key!r}; holds {one_line(', '.join(map(str, list(values)[:20]))) or 'nothing'}"
        )
    return values[key]


def whole(value: object, where: str, lowest: int = 0, highest: int = 2**31 - 1) -> int:
    """A JSON number that is an integer in lowest..highest; true and 1.0 are none."""
    if type(value) is not int or not lowest <= value <= highest:
        raise TraceError(f"{where} is {brief(value)}, expected an integer in {lowest}..{highest}")
    return value


# ---- base64 ----


def decode_base64(text: object, where: str, *, item: int = 1, most: int = MAX_BYTES) -> bytes:
    """Bytes of a base64 text, a whole number of items of ``item`` bytes; nothing in it is skipped or padded."""
    if not isinstance(text, str) or not text.isascii():
        raise TraceError(f"{where} is {brief(text)}, expected base64 text")
    if len(text) // 4 * 3 > most:
        raise TraceError(f"{where} has {len(text):,} letters of base64; allowed: at most {most // 3 * 4:,}")
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise TraceError(f"{where} is no whole base64 text ({reason(error)})") from None
    if len(data) % item or not data:
        raise TraceError(f"{where} decodes to {len(data)} bytes, expected a positive multiple of {item}")
    return data


# ---- folders ----


def list_folder(path: Path, pattern: str, most: int = 4096) -> list[Path]:
    """The regular files of a folder whose names match a glob pattern, sorted by name; TraceError beyond ``most``."""
    name = one_line(path)
    try:
        found = []
        with os.scandir(path) as entries:
            for count, one in enumerate(entries):
                if count >= most:
                    raise TraceError(f"{name}: holds more than {most:,} files")
                if Path(one.name).match(pattern) and one.is_file():
                    found.append(Path(one.path))
    except OSError as error:
        raise TraceError(f"{name}: cannot be read as a folder ({reason(error)})") from None
    return sorted(found)
