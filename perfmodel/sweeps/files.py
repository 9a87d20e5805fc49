"""Sweeps as TOML files."""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from perfmodel.errors import PerfModelError
from perfmodel.hardware.base import flatten, shown, suggestion
from perfmodel.hardware.files import check_kind, path_text, read_toml
from perfmodel.scenario.axis import FILES, FIXED_AXES
from perfmodel.sweeps.axes import split_words

#: Keys of a sweep file beside ``kind``.
KEYS = (
    "model", "system", "trace", "policy", "prompt", "output", "batch", "batch_of", "micro_batch", "layers", "engine",
    "loss", "losses", "metrics", "dtype", "zip", "cases", "axes", "sample",
)  # fmt: skip
#: Axes that hold the trace that a policy places experts by; policies may spell it too.
_PROFILES = ("policy.profile", "profile")
_PROFILE = re.compile(r"(?<=[:,])(\s*profile\s*=\s*)([^,;]+)")
_FILE_SUFFIXES = (".json", ".toml", ".npz", ".csv", ".parquet")


def read_file(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Parameters of `Request.of` from a TOML file, paths in it resolved against its folder.

    Raises
    ------
    PerfModelError : no readable TOML, another kind of file, an unknown key, or a value of the wrong type.
    """
    if not isinstance(path, str | os.PathLike):
        raise PerfModelError(f"sweep file: found {shown(path)}, allowed the path of a TOML file")
    file = Path(path)
    data = read_toml(file)
    where = path_text(file)
    check_kind(data, ("sweep",), where)
    for key in data:
        if key not in (*KEYS, "kind"):
            raise PerfModelError(
                f"{where}: unknown key {shown(key)}{suggestion(key, KEYS)}; allowed: {', '.join(KEYS)}"
            )
    found = {key: value for key, value in data.items() if key != "kind"}
    _check_types(found, where)
    if "loss" in found:  # as the axis is called; losses is the parameter
        if "losses" in found:
            raise PerfModelError(f"{where}: loss and losses are two names of one key; allowed: one of them")
        found["losses"] = found.pop("loss")
    for name in ("model", "system", "engine", "trace", "losses", "cases"):
        if name in found:
            found[name] = beside(name, found[name], file.parent)
    if "policy" in found:
        found["policy"] = beside("policy", found["policy"], file.parent)
    if "axes" in found:
        try:
            axes = flatten(found["axes"], lambda _: False)
        except ValueError as error:
            raise PerfModelError(f"{where}: [axes] {error}") from None
        found["axes"] = {name: _axis_beside(name, values, file.parent) for name, values in axes.items()}
    return found


def _check_types(data: Mapping[str, Any], where: str) -> None:
    texts = ("model", "system", "trace", "loss", "losses", "layers", "cases", "dtype", "batch_of", "engine")
    kinds: dict[str, tuple[tuple[type, ...], str]] = {
        **dict.fromkeys(texts, ((str,), "a text")),
        "policy": ((str, list), "a text or a list of texts"),
        "metrics": ((str, list), "a text or a list of texts"),
        **dict.fromkeys(("prompt", "output", "batch", "micro_batch"), ((int,), "a whole number")),
        "zip": ((str, list), "a list of lists of axes"),
        "axes": ((dict,), "a table of values by axis"),
        "sample": ((str, dict), "a table with method, n and seed"),
    }
    for key, value in data.items():
        types, allowed = kinds[key]
        if not isinstance(value, types) or isinstance(value, bool):
            raise PerfModelError(f"{where}: key {key!r} is {shown(value)}; allowed: {allowed}")


def _axis_beside(name: str, values: Any, folder: Path) -> Any:
    """Values of an axis in a file, with the paths among them resolved."""
    if isinstance(values, str) and values.strip() and name in (*FILES, *_PROFILES):
        values = split_words(values, FIXED_AXES["trace"])
    return beside(name, values, folder)


def beside(name: str, given: Any, folder: Path) -> Any:
    """What a file says of an input or axis, with relative paths starting at the folder of that file.

    Bundled names, and what is no path, stay as they are; of a policy the profile is resolved.
    """
    if isinstance(given, list):
        return [beside(name, one, folder) for one in given]
    if not isinstance(given, str):
        return given
    if name == "policy":
        return _PROFILE.sub(lambda found: found[1] + _resolved(found[2].strip(), folder), given)
    return _resolved(given, folder) if name in (*FILES, "engine", "losses", *_PROFILES, "cases") else given


def _resolved(reference: str, folder: Path) -> str:
    is_path = os.sep in reference or "/" in reference or reference.endswith(_FILE_SUFFIXES)
    return str(folder / reference) if is_path else reference


def merged(file: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters of a file with those that are given (None stands for not given) in their place."""
    found = {**file, **{name: value for name, value in changes.items() if value is not None and name != "axes"}}
    axes = dict(file.get("axes", {}))
    for name, values in (changes.get("axes") or {}).items():
        for known in list(axes):
            if _short(known) == _short(name):
                del axes[known]
        axes[name] = values
    return {**found, "axes": axes}


def _short(name: str) -> str:
    return str(name).removeprefix("policy.").removeprefix("workload.")
