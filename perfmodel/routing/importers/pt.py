"""Reading ``.pt`` files: checked first without torch, then loaded by torch's weights-only loader."""

import importlib.util
from pathlib import Path
from typing import Any

from perfmodel.errors import TraceError
from perfmodel.routing.importers.arrays import read_npy
from perfmodel.routing.importers.files import read_json, reason
from perfmodel.routing.importers.probe import Probe
from perfmodel.routing.importers.pt_outline import nested, outline
from perfmodel.routing.npz import npz_keys, one_line, read_npz

#: Turns a .pt file into JSON of the same content, which needs no torch to be read.
RECIPE = (
    "python -c \"import json, torch; json.dump(torch.load({path!r}, map_location='cpu', weights_only=True), "
    "open({json!r}, 'w'), default=lambda t: t.tolist())\""
)


def read_pt(path: Path) -> Any:
    """Tables, lists, texts and numbers as the file nests them, with NumPy arrays for tensors (BF16 as float32).

    Tuples become lists. Raises :class:`TraceError` as `outline` does, and, with a command that converts the file
    elsewhere, where torch is not installed.
    """
    outline(path)
    name = one_line(path)
    if importlib.util.find_spec("torch") is None:
        how = RECIPE.format(path=path.name, json=path.with_suffix(".json").name)
        raise TraceError(f"{name}: reading .pt files needs torch (pip install torch); or convert it where it is: {how}")
    import torch

    def convert(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return (leaf.float() if leaf.dtype == torch.bfloat16 else leaf).detach().numpy()

    try:
        return nested(torch.load(path, map_location="cpu", weights_only=True), convert, name)
    except TraceError:
        raise
    except Exception as error:  # what torch raises for a file that it does not like is not documented
        raise TraceError(f"{name}: torch cannot load it ({reason(error)})") from None


def read_nested(path: Path) -> Any:
    """The content of a ``.pt`` file from the file itself, or from the same content as JSON or as arrays.

    In an ``.npz`` file the name of an array is its place, joined by ``/``: ``records/0/topk_ids_of_layer``. A ``.npy``
    file is an array alone. In JSON, tensors are lists.
    """
    probe = Probe.of(path)
    if probe.kind == "pt":
        return read_pt(path)
    if probe.kind == "npy":
        return read_npy(path)
    if probe.kind == "npz":
        return unflattened(read_npz(path, npz_keys(path)), one_line(path))
    if probe.kind == "json":
        return read_json(path)
    kind = "folder" if probe.kind == "folder" else f"{probe.kind} file"
    raise TraceError(f"{one_line(path)}: is a {kind}; allowed: .pt, or its content as .json, .npz or .npy")


def unflattened(arrays: dict[str, Any], where: str) -> Any:
    """Nested tables from names that are joined by ``/``; a table with the keys 0, 1, 2, ... is a list."""
    top: dict[str, Any] = {}
    for name, array in arrays.items():
        *folders, last = name.split("/")
        table = top
        for folder in folders:
            table = table.setdefault(folder, {})
            if not isinstance(table, dict):
                raise TraceError(f"{where}: {one_line(name)} lies within another array")
        if last in table:
            raise TraceError(f"{where}: {one_line(name)} is both an array and a folder of arrays")
        table[last] = array
    return _lists(top)


def _lists(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if value and set(value) == set(map(str, range(len(value)))):
        return [_lists(value[str(i)]) for i in range(len(value))]
    return {key: _lists(item) for key, item in value.items()}
