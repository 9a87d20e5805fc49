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
from perfmodel.routing.npz import npz_keys, one_line, read_npz, shown

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
        ids = _whole(self.expert_ids, f"{self.name}: expert_ids", 3)
        if ids.shape[:2] != shape or ids.shape[2] == 0:
            raise TraceError(
                f"{self.name}: expert_ids has shape {list(ids.shape)};"
                f" allowed: [{shape[0]}, {shape[1]}, experts of a row], as hidden has shape {list(hidden.shape)}"
            )
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
            index = _whole(self.layer_index, f"{self.name}: layer_index", 1).astype(np.int64)
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
    def load(cls, path: str | os.PathLike[str]) -> "Calibration":
        """Read an ``.npz`` file with the attributes as arrays, ``metadata`` as one JSON text.

        Raises TraceError when there is no such file, or it does not hold calibration rows.
        """
        arrays = read_npz(_path(path), _KEYS)
        where = one_line(path)
        for key in ("hidden", "expert_ids"):
            if key not in arrays:
                found = ", ".join(npz_keys(_path(path))[:10])
                raise TraceError(f"{where}: no array {key!r}, found {one_line(found)}; allowed: a calibration file")
        info = _read_info(arrays.pop("metadata"), where) if "metadata" in arrays else {}
        return cls(name=where, info=info, **arrays)

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
        sizes = {
            "layers": (self.num_layers, model.num_moe_layers),
            "hidden size": (self.hidden.shape[2], model.hidden_size),
            "experts of a row": (self.expert_ids.shape[2], model.top_k),
        }
        for what, (found, expected) in sizes.items():
            if found != expected:
                raise TraceError(f"{self.name}: {what} {found}; allowed: {expected}, as model {model.name} has")
        highest = int(self.expert_ids.max())
        if highest >= model.num_experts:
            allowed = f"0 to {model.num_experts - 1}, the experts of model {model.name}"
            raise TraceError(f"{self.name}: expert_ids holds {highest}; allowed: {allowed}")
        if self.layer_index is not None and self.layer_index.tolist() != list(model.moe_layers):
            layers = shown(list(model.moe_layers))
            raise TraceError(
                f"{self.name}: layer_index is {shown(self.layer_index.tolist())};"
                f" allowed: {layers}, the layers of model {model.name} that have experts"
            )

    def rows(self, layer: int, expert: int | None = None) -> NDArray[np.float64]:
        """What goes into an expert of a layer, both counted from 0; into any for None [rows, hidden_size]."""
        hidden = self.hidden[layer]
        if expert is not None:
            hidden = hidden[(self.expert_ids[layer] == expert).any(axis=1)]
        return np.asarray(hidden, dtype=np.float64)


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
        raise TraceError(f"{where} has shape {list(array.shape)}; allowed: {axes} axes, not empty")
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


def _whole(values: ArrayLike, where: str, axes: int) -> NDArray[np.integer[Any]]:
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
