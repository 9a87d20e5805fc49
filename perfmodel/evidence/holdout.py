"""Rules that say which rows a fit may not see, such as ``engine=vllm;id=M001,M002``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from perfmodel.errors import SpecError

#: What a rule can name.
KEYS = ("source", "machine", "engine", "model", "id")
_MOST = 8


def held_out(rule: str, labels: Mapping[str, Sequence[str | None]]) -> NDArray[np.bool_]:
    """The rows [R] that a rule holds out: those that any part of it names.

    A part is ``KEY=VALUE``, with further values of the same key after commas. Parts stand after semicolons or commas.

    Parameters
    ----------
    labels : for every one of KEYS, what the rows [R] have there; None for nothing.

    Raises
    ------
    SpecError : a rule that cannot be read, a value that no row has, or a rule that holds out every row.
    """
    out = np.zeros(len(labels[KEYS[0]]), dtype=bool)
    for key, value in _parts(rule):
        named = np.array([label == value for label in labels[key]], dtype=bool)
        if not named.any():
            known = sorted({label for label in labels[key] if label is not None})
            more = f" and {len(known) - _MOST} more" if len(known) > _MOST else ""
            raise SpecError(f"hold-out rule: no row has {key} {value!r}; allowed: {', '.join(known[:_MOST])}{more}")
        out |= named
    if out.all():
        raise SpecError(f"hold-out rule {rule!r}: no row is left to fit to")
    return out


def _parts(rule: str) -> list[tuple[str, str]]:
    """Keys and values of a rule, in its order."""
    parts: list[tuple[str, str]] = []
    for text in rule.split(";"):
        key = ""
        for piece in text.split(","):
            before, equals, value = (word.strip() for word in piece.partition("="))
            if equals:
                key = before
            else:
                value = before
            if key not in KEYS or not value:
                raise SpecError(
                    f"hold-out rule: found {piece.strip()!r} in {rule!r}; allowed: KEY=VALUE,VALUE,... separated by"
                    f" semicolons, with the keys {', '.join(KEYS)}"
                )
            parts.append((key, value))
    return parts
