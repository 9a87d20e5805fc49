"""Checked access to the values of a GGUF file."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from perfmodel.errors import ModelConfigError
from perfmodel.gguf_header import shown
from perfmodel.model.gguf.architectures import ARCHITECTURES

_LARGEST = 10**7


@dataclass(frozen=True)
class Metadata:
    """The values of a file; errors name file, key, value found and what is allowed.

    arch : ``general.architecture``, with which the keys of the network start. where : what errors call the file.
    """

    values: Mapping[str, Any]
    where: str
    arch: str

    @classmethod
    def of(cls, values: Mapping[str, Any], where: str) -> "Metadata":
        """The values of a file, whose architecture is not checked yet."""
        return cls(values, where, str(values.get("general.architecture")))

    def check_architecture(self) -> None:
        """Refuse an architecture that is not known."""
        found = self.values.get("general.architecture")
        if found not in ARCHITECTURES:
            close = difflib.get_close_matches(found[:80], ARCHITECTURES, n=2) if isinstance(found, str) else []
            hint = f"{' or '.join(map(repr, close))} (close by name; nothing is guessed), or " if close else ""
            raise self.refuse("general.architecture", f"{hint}one of {', '.join(ARCHITECTURES)}")

    def error(self, key: str, allowed: str) -> ModelConfigError:
        """The error for a key of the network that is missing or has a value that is not allowed."""
        return self.refuse(self.key(key), allowed)

    def refuse(self, key: str, allowed: str) -> ModelConfigError:
        """The same for a key with its prefix."""
        found = f"is {_short(self.values[key])}" if key in self.values else "is missing"
        return ModelConfigError(f"{self.where}: key {key!r} {found}; allowed: {allowed}")

    def key(self, key: str) -> str:
        return f"{self.arch}.{key}"

    def has(self, key: str) -> bool:
        return self.key(key) in self.values

    def get(self, key: str) -> Any:
        return self.values.get(self.key(key))

    def size(self, key: str, *, least: int = 1, default: int | None = None) -> int:
        """An integer from ``least`` up; ``default`` where the key is absent."""
        if default is not None and not self.has(key):
            return default
        value = self.get(key)
        if not _is_size(value, least):
            raise self.error(key, f"an integer from {least} to {_LARGEST}")
        return int(value)

    def sizes(self, key: str, count: int, *, default: list[int] | None = None) -> list[int]:
        """An integer from 0 up for each of ``count`` layers, from a list or one integer for all.

        A list may go on for layers behind them, as for layers for multi-token prediction.
        """
        if default is not None and not self.has(key):
            return default
        value = self.get(key)
        if _is_size(value, 0):
            return [int(value)] * count
        lengths = (count, self.size("block_count"))
        if not isinstance(value, tuple) or len(value) not in lengths or not all(_is_size(one, 0) for one in value):
            raise self.error(key, f"an integer from 0 to {_LARGEST}, or a list of {count} of them, one for each layer")
        return list(value[:count])

    def truths(self, key: str, count: int) -> list[bool]:
        """True or false for each of ``count`` layers, from a list as `sizes` reads it; 1 and 0 count as such."""
        value = self.get(key)
        lengths = (count, self.size("block_count"))
        if not isinstance(value, tuple) or len(value) not in lengths or any(one not in (0, 1) for one in value):
            raise self.error(key, f"a list of {count} truths, one for each layer")
        return [bool(one) for one in value[:count]]


def _is_size(value: object, least: int) -> bool:
    return type(value) is int and least <= value <= _LARGEST


def _short(value: object) -> str:
    text = shown(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
