"""What can be read: model types with the keys of their configs, and formats of stored weights."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from typing import Any

from perfmodel import __version__
from perfmodel.families import Family, families
from perfmodel.families.aliases import ALIASES
from perfmodel.reports import table
from perfmodel.storage import FORMATS, GGUF_BLOCKS

_WIDTH = 120


def families_data() -> dict[str, Any]:
    """Every ``model_type`` that is read, with the fields of its configs, and the spellings of fields that have several.

    A type with ``inside`` describes its language model in the object under that key, which names a type of its own.
    """
    rows: list[dict[str, Any]] = []
    for name, entry in sorted(families().items()):
        row: dict[str, Any] = {"model_type": name, "inside": None, "required": [], "nullable": [], "optional": {}}
        if isinstance(entry, Family):
            declared = entry.declared
            row["required"], row["nullable"] = list(declared.required), list(declared.nullable)
            row["optional"] = dict(declared.optional)
        else:
            row["inside"] = entry.inside
        rows.append(row)
    return {
        "perfmodel": __version__,
        "kind": "model families",
        "families": rows,
        "spellings": {field: list(keys) for field, keys in ALIASES.items()},
    }


def families_text(data: dict[str, Any]) -> str:
    """What ``model families`` prints: of each model type the fields of its configs, then the spellings of fields."""
    parts = []
    for one in data["families"]:
        lines = [one["model_type"]]
        if one["inside"] is not None:
            lines += _fields("language model", [f"the object under {one['inside']}"])
        lines += _fields("required", one["required"])
        lines += _fields("may be null", one["nullable"])
        lines += _fields("optional", [f"{field} = {default}" for field, default in one["optional"].items()])
        parts.append("\n".join(lines))
    spelled = [f"  {field}: {' | '.join(keys)}" for field, keys in data["spellings"].items()]
    return "\n\n".join([*parts, "\n".join(["Fields with more than one spelling, or another one", *spelled])])


def _fields(label: str, fields: Iterable[str]) -> list[str]:
    text = ", ".join(fields)
    return textwrap.wrap(f"  {label}: {text}", _WIDTH, subsequent_indent="    ", break_on_hyphens=False) if text else []


def formats_data() -> dict[str, Any]:
    """Every storage format with its bits; where it is one of GGUF files, also with its block."""
    rows = []
    for name, stored in FORMATS.items():
        weights, size = GGUF_BLOCKS.get(name, (None, None))
        rows.append({"format": name, "bits": stored.bits, "block_weights": weights, "block_bytes": size})
    return {"perfmodel": __version__, "kind": "storage formats", "formats": rows}


def formats_text(data: dict[str, Any]) -> str:
    """What ``model formats`` prints."""
    rows = [
        [
            one["format"],
            f"{one['bits']:.6g}",
            *("-" if one[key] is None else str(one[key]) for key in ("block_weights", "block_bytes")),
        ]
        for one in data["formats"]
    ]
    return table(("format", "bits a weight", "weights a GGUF block", "bytes a block"), rows)
