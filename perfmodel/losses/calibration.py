"""Calibration rows: what goes into the experts of a model while it reads text."""

import functools
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from perfmodel.errors import TraceError
from perfmodel.model import MoEModel
from perfmodel.paths import replace_when_done
from perfmodel.routing.npz import declared, npz_keys, one_line, read_npz, shown

#: Longest metadata that are read.
_LONGEST_TEXT_BYTES = 2**26
_KEYS = ("hidden", "expert_ids", "expert_weights", "layer_index", "metadata")


@dataclass(frozen=True, eq=False)
class Calibration:
    """Inputs of every layer's experts for the same N tokens, and the experts that the router sent them to.

    hidden : float16 or float32 [layers, rows, hidden_size], finite; what the experts get, that is after the norm
    expert_ids : whole numbers [layers, rows, top_k]; no expert twice in a row
    name : what messages call it
    expert_weights : float16 or float32 [layers, rows, top_k], finite and not negative; the router's weights, or None
    layer_index : int64 [layers], rising; which layer of the model each is, or None where it is not said
    info : plain values on how the rows were made

    Raises
    ------
    TraceError : shapes that do not fit together, numbers out of range or not finite
    """

    hidden: NDArray[np.floating[Any]]
    expert_ids: NDArray[np.integer[Any]]
    name: str = "calibration"
    expert_weights: NDArray[np.floating[Any]] | None = None
    layer_index: NDArray[np.int64] | None = None
    info: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        hidden = _floats(self.hidden, f"{self.name}: hidden", 3)
        shape = hidden.shape[:2]
        ids = _integers(self.expert_ids, f"{self.name}: expert_ids", 3)
        _check_shapes(self.name, {"hidden": hidden.shape, "expert_ids": ids.shape})
        if ids.min() < 0:
            layer, row, _ = np.argwhere(ids < 0)[0]
            raise TraceError(f"{self.name}: expert_ids of layer {layer}, row {row} is {ids.min()}; allowed: 0 or more")
        ordered = np.sort(ids, axis=2)
        twice = (ordered[..., 1:] == ordered[..., :-1]).any(axis=2)
        if twice.any():
            layer, row = np.argwhere(twice)[0]
            raise TraceError(
                f"{self.name}: expert_ids of layer {layer}, row {row} is {ids[layer, row].tolist()};"
                " allowed: every expert once"
            )
        self._set("hidden", hidden)
        self._set("expert_ids", ids)
        if self.expert_weights is not None:
            weights = _floats(self.expert_weights, f"{self.name}: expert_weights", 3)
            if weights.shape != ids.shape or weights.min() < 0:
                raise TraceError(
                    f"{self.name}: expert_weights has shape {list(weights.shape)} and numbers from"
                    f" {weights.min():.3g} up; allowed: {list(ids.shape)} as expert_ids, and 0 or more"
                )
            self._set("expert_weights", weights)
        if self.layer_index is not None:
            index = _integers(self.layer_index, f"{self.name}: layer_index", 1).astype(np.int64)
            if len(index) != shape[0] or index.min() < 0 or (np.diff(index) <= 0).any():
                found = shown(index.tolist())
                raise TraceError(f"{self.name}: layer_index is {found}; allowed: {shape[0]} layers, rising")
            self._set("layer_index", index)
        object.__setattr__(self, "info", MappingProxyType(dict(self.info)))

    def _set(self, name: str, array: NDArray[Any]) -> None:
        array.flags.writeable = False
        object.__setattr__(self, name, array)

    @property
    def num_layers(self) -> int:
        """Number of layers [1]."""
        return int(self.hidden.shape[0])

    @property
    def num_rows(self) -> int:
        """Rows of every layer [1]."""
        return int(self.hidden.shape[1])

    @classmethod
    def load(cls, path: str | os.PathLike[str], model: MoEModel | None = None) -> "Calibration":
        """Read an ``.npz`` file with the attributes as arrays, ``metadata`` as one JSON text.

        With a model, rows of another one are refused, and what the file says of its shapes before anything is read.

        Raises TraceError when there is no such file, or it does not hold calibration rows, or not of this model.
        """
        where = one_line(path)
        sizes = declared(_path(path), _KEYS)
        for key in ("hidden", "expert_ids"):
            if key not in sizes:
                found = ", ".join(npz_keys(_path(path))[:10])
                raise TraceError(f"{where}: no array {key!r}, found {one_line(found)}; allowed: a calibration file")
        shapes = {key: shape for key, (shape, _) in sizes.items()}
        if "metadata" in sizes and sizes["metadata"][1].itemsize > _LONGEST_TEXT_BYTES:
            raise TraceError(f"{where}: metadata is longer than {_LONGEST_TEXT_BYTES >> 20} MiB; allowed: a JSON text")
        _check_shapes(where, shapes)
        if model is not None:
            _check_sizes(where, shapes, model)
        arrays = read_npz(_path(path), _KEYS)
        info = _read_info(arrays.pop("metadata"), where) if "metadata" in arrays else {}
        rows = cls(name=where, info=info, **arrays)
        if model is not None:
            rows.check_model(model)
        return rows

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the ``.npz`` file that `load` reads, under a temporary name first; ``path`` ends in ``.npz``.

        Raises TraceError when it cannot be written.
        """
        file = Path(path)
        if file.suffix != ".npz":
            raise TraceError(f"{one_line(path)}: a calibration file's name ends in .npz")
        arrays: dict[str, Any] = {key: getattr(self, key) for key in _KEYS[:-1] if getattr(self, key) is not None}
        arrays["metadata"] = np.array(json.dumps(dict(self.info), sort_keys=True))
        try:
            with replace_when_done(file) as temporary, temporary.open("wb") as stream:
                np.savez_compressed(stream, **arrays)
        except OSError as error:
            raise TraceError(f"{one_line(path)}: cannot be written ({one_line(error.strerror or error)})") from None

    @functools.cached_property
    def _hash(self) -> str:
        digest = hashlib.sha256()
        for key in ("hidden", "expert_ids", "layer_index"):
            array = getattr(self, key)
            if array is not None:
                little = np.ascontiguousarray(array.astype("<i8" if array.dtype.kind in "iu" else "<f4"))
                digest.update(f"{key} {little.shape}:".encode())
                digest.update(little.data.cast("B"))
        return digest.hexdigest()

    def content_hash(self) -> str:
        """SHA-256 of the rows and their experts; how they were made, and the router's weights, do not count."""
        return self._hash

    def check_model(self, model: MoEModel) -> None:
        """Refuse rows of another model.

        Raises TraceError when layers, hidden size or experts differ from the model's.
        """
        _check_sizes(self.name, {"hidden": self.hidden.shape, "expert_ids": self.expert_ids.shape}, model)
        highest = int(self.expert_ids.max())
        if highest >= model.num_experts:
            allowed = f"0 to {model.num_experts - 1}, the experts of model {shown(model.name)}"
            raise TraceError(f"{self.name}: expert_ids holds {highest}; allowed: {allowed}")
        if self.layer_index is not None and self.layer_index.tolist() != list(model.moe_layers):
            layers = shown(list(model.moe_layers))
            raise TraceError(
                f"{self.name}: layer_index is {shown(self.layer_index.tolist())};"
                f" allowed: {layers}, the layers of model {shown(model.name)} that have experts"
            )

    def rows(self, layer: int, expert: int | None = None) -> NDArray[np.float64]:
        """What goes into an expert of a layer, both counted from 0; into any for None [rows, hidden_size]."""
        hidden = self.hidden[layer]
        if expert is not None:
            hidden = hidden[(self.expert_ids[layer] == expert).any(axis=1)]
        return np.asarray(hidden, dtype=np.float64)


def _check_sizes(name: str, shapes: Mapping[str, tuple[int, ...]], model: MoEModel) -> None:
    sizes = {
        "layers": (shapes["hidden"][0], model.num_moe_layers),
        "hidden size": (shapes["hidden"][2], model.hidden_size),
        "experts of a row": (shapes["expert_ids"][2], model.top_k),
    }
    for what, (found, expected) in sizes.items():
        if found != expected:
            raise TraceError(f"{name}: {what} {found}; allowed: {expected}, as model {shown(model.name)} has")


def _check_shapes(name: str, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Shapes that do not fit together; None of the sizes are 0 afterwards."""
    for key, axes in (("hidden", 3), ("expert_ids", 3), ("expert_weights", 3), ("layer_index", 1), ("metadata", 0)):
        if key in shapes and (len(shapes[key]) != axes or 0 in shapes[key]):
            raise TraceError(f"{name}: {key} has shape {list(shapes[key])}; allowed: {_axes(axes)}")
    hidden, ids = shapes["hidden"], shapes["expert_ids"]
    if ids[:2] != hidden[:2]:
        raise TraceError(
            f"{name}: expert_ids has shape {list(ids)};"
            f" allowed: [{hidden[0]}, {hidden[1]}, experts of a row], as hidden has shape {list(hidden)}"
        )
    if shapes.get("expert_weights", ids) != ids:
        found = list(shapes["expert_weights"])
        raise TraceError(f"{name}: expert_weights has shape {found}; allowed: {list(ids)}, as expert_ids")
    if shapes.get("layer_index", hidden[:1]) != hidden[:1]:
        found = list(shapes["layer_index"])
        raise TraceError(f"{name}: layer_index has shape {found}; allowed: {hidden[0]} layers, rising")


def _axes(count: int) -> str:
    return f"{count} axes, not empty" if count else "one JSON text"


def _path(given: Any) -> Path:
    if not isinstance(given, str | os.PathLike):
        raise TraceError(f"a calibration file is given by its path, not by {shown(given)}")
    return Path(os.fsdecode(given))


def _array(values: ArrayLike, where: str, axes: int) -> NDArray[Any]:
    try:
        array = np.asarray(values)
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise TraceError(f"{where} is no array of numbers ({one_line(error)})") from None
    if array.ndim != axes or 0 in array.shape:
        raise TraceError(f"{where} has shape {list(array.shape)}; allowed: {_axes(axes)}")
    return array.view()


def _floats(values: ArrayLike, where: str, axes: int) -> NDArray[np.floating[Any]]:
    array = _array(values, where, axes)
    if array.dtype.kind != "f" or array.dtype.itemsize > 4:
        raise TraceError(f"{where} is of type {array.dtype}; allowed: float16 or float32")
    for layer, part in enumerate(array):
        if not np.isfinite(part).all():
            row = np.argwhere(~np.isfinite(part))[0][0]
            raise TraceError(f"{where} of layer {layer}, row {row} is not finite; allowed: finite numbers")
    return array


def _integers(values: ArrayLike, where: str, axes: int) -> NDArray[np.integer[Any]]:
    array = _array(values, where, axes)
    if array.dtype.kind not in "iu":
        raise TraceError(f"{where} is of type {array.dtype}; allowed: whole numbers")
    return array


def _read_info(stored: NDArray[Any], where: str) -> dict[str, Any]:
    try:
        info = json.loads(str(stored.item()))
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{where}: metadata is not one JSON text ({one_line(error)})") from None
    if not isinstance(info, dict):
        raise TraceError(f"{where}: metadata holds {type(info).__name__}; allowed: a JSON object")
    return info
