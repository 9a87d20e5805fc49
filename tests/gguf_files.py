"""GGUF files written by hand, byte by byte, for the tests of their reader."""

import math
import struct
from collections.abc import Sequence
from typing import Any

TEXT, LIST = 8, 9
CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


def text(value: str | bytes, order: str = "<") -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack(f"{order}Q", len(data)) + data


def value(name: str | bytes, kind: int, content: Any, items: int | None = None) -> bytes:
    """One entry of the table of values; of a list ``items`` is the type of its items."""
    start = text(name) + struct.pack("<I", kind)
    if kind == TEXT:
        return start + text(content)
    if kind == LIST:
        body = b"".join(text(one) if items == TEXT else struct.pack("<" + CODES[items], one) for one in content)
        return start + struct.pack("<IQ", items, len(content)) + body
    return start + struct.pack("<" + CODES[kind], content)


def tensor(name: str | bytes, shape: Sequence[int], offset: int, kind: int = 0) -> bytes:
    """One entry of the table of tensors."""
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def header(version: int = 3, tensors: int = 0, values: int = 0, magic: bytes = b"GGUF", order: str = "<") -> bytes:
    return magic + struct.pack(f"{order}IQQ", version, tensors, values)


def whole_file(
    tensors: dict[str, tuple[Sequence[int], Sequence[float]]],
    values: Sequence[bytes] = (),
    *,
    alignment: int = 32,
    version: int = 3,
) -> bytes:
    """A file with tensors of 32-bit floats: shape and numbers by name."""
    table, data = b"", b""
    for name, (shape, numbers) in tensors.items():
        assert math.prod(shape) == len(numbers)
        table += tensor(name, shape, len(data))
        data += struct.pack(f"<{len(numbers)}f", *numbers)
        data += bytes(-len(data) % alignment)
    start = header(version, len(tensors), len(values)) + b"".join(values) + table
    return start + bytes(-len(start) % alignment) + data
