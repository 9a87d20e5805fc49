"""Finding and reading spec files: bundled ones by name, any other by path."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from perfmodel.errors import SpecError
from perfmodel.hardware.base import Spec, shown, suggestion
from perfmodel.hardware.devices import DramSpec, GpuSpec, LinkSpec, NdpSpec
from perfmodel.hardware.engine import EngineSpec
from perfmodel.hardware.host import CpuSpec, HostSpec
from perfmodel.paths import data_folder

DEVICES: dict[str, type[Spec]] = {
    "gpu": GpuSpec,
    "link": LinkSpec,
    "ndp": NdpSpec,
    "cpu": CpuSpec,
    "host": HostSpec,
    "engine": EngineSpec,
    "dram": DramSpec,
}
KINDS = (*DEVICES, "system")

#: Folders of bundled specs that are not called like their kind.
_FOLDERS = {"system": "systems", "engine": "engines"}

# A spec is a page of text; anything larger is some other file.
_MAX_BYTES = 1 << 20

S = TypeVar("S", bound=Spec)


class SpecEntry(NamedTuple):
    """One bundled spec."""

    kind: str
    name: str
    description: str
    path: Path


def a_spec(kind: str) -> str:
    """A kind of spec with its article: ``an engine spec``."""
    return f"{'an' if kind in ('engine', 'ndp') else 'a'} {kind} spec"


def path_text(path: Path) -> str:
    """``path`` for a one-line message: escaped if unprintable, and only its end if very long."""
    text = str(path)
    text = text if len(text) <= 500 else "..." + text[-497:]
    return text if text.isprintable() else ascii(text)


def is_path(reference: object) -> bool:
    """Whether a reference is a file rather than the name of a bundled spec."""
    if isinstance(reference, os.PathLike):
        return True
    separators = {"/", os.sep, os.altsep or "/"}
    text = str(reference)
    return text.endswith(".toml") or any(mark in text for mark in separators)


def _bundled(kind: str) -> dict[str, Path]:
    folder = data_folder("hardware_specs") / _FOLDERS.get(kind, kind)
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}


def find(reference: object, kinds: tuple[str, ...], folder: Path | None = None) -> Path:
    """File of a reference of one of ``kinds``; relative paths start at ``folder``."""
    what = kinds[0] if len(kinds) == 1 else "hardware"
    if not isinstance(reference, (str, os.PathLike)):
        raise SpecError(f"{a_spec(what)} is {shown(reference)}; allowed: the name of a bundled spec, or a .toml file")
    if is_path(reference):
        raw = os.fspath(reference)
        path = Path(os.fsdecode(raw))
        return path if folder is None else folder / path
    name = str(reference)
    for kind in kinds:
        found = _bundled(kind)
        if name in found:
            return found[name]
    by_kind = {kind: _bundled(kind) for kind in KINDS}
    other = [kind for kind in KINDS if name in by_kind[kind]]
    if other:
        raise SpecError(f"{shown(name)} is {a_spec(other[0])}; {a_spec(what)} is needed here")
    known = [stem for kind in kinds for stem in by_kind[kind]]
    raise SpecError(
        f"no {what} spec is named {shown(name)}{suggestion(name.lower(), known)}; "
        "`perfmodel specs list` shows all names, and a file of your own must end in .toml"
    )


def read_toml(path: Path) -> dict[str, Any]:
    """Content of a TOML file; `SpecError` for anything that is not a readable, small, regular TOML file."""
    shown_path = path_text(path)
    try:
        if not path.is_file():
            state = "is not a regular file" if path.exists() else "does not exist"
            raise SpecError(f"{shown_path}: {state}; allowed: a TOML file")
        if path.stat().st_size > _MAX_BYTES:
            raise SpecError(f"{shown_path}: larger than {_MAX_BYTES} bytes, so it is not a spec file")
        return tomllib.loads(path.read_bytes().decode("utf-8-sig"))
    except SpecError:
        raise
    except UnicodeDecodeError:
        raise SpecError(f"{shown_path}: not UTF-8 text; allowed: a TOML file") from None
    except tomllib.TOMLDecodeError as error:
        raise SpecError(f"{shown_path}: not valid TOML: {' '.join(str(error).split())}") from None
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())[:200]
        raise SpecError(f"{shown_path}: cannot be read: {reason}") from None


def check_kind(data: dict[str, Any], kinds: tuple[str, ...], where: str) -> str:
    """The ``kind`` a spec file states, which must be one of ``kinds``."""
    kind = data.get("kind")
    if not isinstance(kind, str) or kind not in kinds:
        found = f"key 'kind' is {shown(kind)}" if "kind" in data else "key 'kind' is missing"
        raise SpecError(f"{where}: {found}; allowed: {' or '.join(repr(one) for one in kinds)}")
    return kind


def build(model: type[S], data: dict[str, Any], path: Path, label: str = "") -> S:
    """Spec from the content of a file, naming file (and the table in it) in errors."""
    where = f"{path_text(path)}{label}"
    data = dict(data)
    dram = data.get("dram")
    if model is NdpSpec and dram is not None:
        data["dram"] = resolve(dram, DramSpec, path, f"{label} dram")
    try:
        return model(**data)
    except SpecError as error:
        raise SpecError(f"{where}: {error}") from None


def resolve(reference: Any, model: type[S], path: Path, label: str) -> S:
    """Part of a spec file: a name, a path relative to that file, or an inline table."""
    if isinstance(reference, dict):
        return build(model, reference, path, label)
    try:
        return load_device(reference, model, path.parent)
    except SpecError as error:
        raise SpecError(f"{path_text(path)}{label}: {error}") from None


def load_device(reference: Any, model: type[S], folder: Path | None = None) -> S:
    """Spec of one known kind by name or path."""
    kind = str(model.model_fields["kind"].default)
    path = find(reference, (kind,), folder)
    data = read_toml(path)
    check_kind(data, (kind,), path_text(path))
    return build(model, data, path)


def list_specs() -> list[SpecEntry]:
    """All bundled specs: kind, name, description and file, in the order of kinds and names."""
    entries = []
    for kind in KINDS:
        for name, path in _bundled(kind).items():
            entries.append(SpecEntry(kind, name, str(read_toml(path).get("description", "")), path))
    return entries
