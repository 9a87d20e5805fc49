"""Experts of a checkpoint, one at a time."""

import hashlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from perfmodel.errors import ModelConfigError, PerfModelError
from perfmodel.losses.shards import WIDTHS, Shard, Stored, check_regular
from perfmodel.model import MoEModel
from perfmodel.routing.npz import one_line, shown

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
#: An index has some hundred bytes a tensor.
_LARGEST_JSON_BYTES = 2**28
#: Endings of the names of one expert's matrices (gate, up, down), by what the layout is called.
_LAYOUTS = {
    "w1/w2/w3": tuple(f"block_sparse_moe.experts.{{e}}.{name}.weight" for name in ("w1", "w3", "w2")),
    "gate_proj/up_proj/down_proj": tuple(f"mlp.experts.{{e}}.{name}_proj.weight" for name in ("gate", "up", "down")),
    "gate_up_proj/down_proj": tuple(f"mlp.experts.{name}_proj" for name in ("gate_up", "gate_up", "down")),
}
_FUSED = "gate_up_proj/down_proj"


class Expert(NamedTuple):
    """The weights of one gated expert, ``y = (silu(x gate') * (x up')) down'``.

    gate, up : float64 [expert_size, hidden_size]
    down : float64 [hidden_size, expert_size]
    """

    gate: NDArray[np.float64]
    up: NDArray[np.float64]
    down: NDArray[np.float64]


class Checkpoint:
    """A folder with a ``config.json`` and the weights as safetensors files, read one expert at a time.

    The weights are ``model.safetensors``, or several files that ``model.safetensors.index.json`` lists. Experts are
    found under the names that Mixtral, Qwen3-MoE, OLMoE and DeepSeek checkpoints use, and as the arrays of all experts
    of a layer that Transformers 5 can write. Numbers may be F16, BF16, F32 or F64, and F8_E4M3 with scales of blocks
    (``quantization_config.weight_block_size`` and tensors ``..._scale_inv``).

    Parameters
    ----------
    folder : the folder

    Attributes
    ----------
    folder, model : the folder, and the shape that its config describes
    name : what the model is called: the last part of ``_name_or_path`` in the config, or else the folder's name
    layout : how the tensors of experts are named
    shards : the files that hold experts, by name; only their headers are read so far

    Raises
    ------
    ModelConfigError : the config is missing, damaged, or of another kind of model or activation
    PerfModelError : a file is missing, damaged or lies about its size; or a tensor of an expert is not there, or has
        another shape or type
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = _checked_folder(folder)
        self.config = self.folder / "config.json"
        check_regular(self.config)
        self.model = MoEModel.from_config(self.config)
        values: Mapping[str, Any] = json.loads(self.config.read_text(encoding="utf-8-sig"))
        _check_experts(self.model, values, self.config)
        self._block = _scale_block(values)
        self.name = _name(values) or self.model.name
        self.shards: dict[str, Shard] = {}
        self._places = self._find_tensors()
        first = self.model.moe_layers[0]
        self.layout, self._prefix = self._find_layout(f"layers.{first}.")
        self._check_tensors()

    def expert(self, row: int, expert: int) -> Expert:
        """The weights of an expert of the ``row``-th layer that has experts, both counted from 0.

        Raises PerfModelError for weights that are not finite, and for a file that was changed meanwhile.
        """
        return self.hashed_expert(row, expert)[0]

    def hashed_expert(self, row: int, expert: int) -> tuple[Expert, bytes]:
        """The weights of an expert, and the hash of the very bytes that they were made from; see `expert_hash`."""
        stored = self._stored(row, expert)
        found = [self._matrix(name, *parts) for name, parts in stored.items()]
        if self.layout == _FUSED:
            size = self.model.expert_size
            found = [found[0][:size], found[0][size:], found[1]]
        return Expert(*found), self._hash(stored)

    def expert_hash(self, row: int, expert: int) -> bytes:
        """SHA-256 of everything that the weights of an expert follow from: types, shapes, bytes, and scales of blocks.

        Names of files and tensors and the rest of the config do not count. Reads the expert, and nothing is decoded.
        """
        return self._hash(self._stored(row, expert))

    def _stored(self, row: int, expert: int) -> dict[str, tuple[Stored, Stored | None]]:
        """The tensors of an expert by name, each with its scales where it has any."""
        first = expert if self.layout == _FUSED else None
        found = {}
        for name in dict.fromkeys(self._names(self.model.moe_layers[row], expert)):
            numbers, scales = self._shard(self._places[name]).read(name, first), None
            if numbers.dtype == "F8_E4M3":
                scale = f"{name}_scale_inv"
                scales = self._shard(self._places[scale]).read(scale)
            found[name] = numbers, scales
        return found

    def _hash(self, stored: Mapping[str, tuple[Stored, Stored | None]]) -> bytes:
        digest = hashlib.sha256()
        for parts in stored.values():
            for part in filter(None, parts):
                digest.update(f"{part.dtype} {part.shape} {self._block}:".encode())
                digest.update(part.data)
        return digest.digest()

    def _shard(self, name: str) -> Shard:
        if name not in self.shards:
            self.shards[name] = Shard(self.folder / name)
        return self.shards[name]

    def _find_tensors(self) -> dict[str, str]:
        """The file of every tensor."""
        single, index = self.folder / SINGLE, self.folder / INDEX
        if os.path.lexists(single):
            return dict.fromkeys(self._shard(SINGLE).tensors, SINGLE)
        if not os.path.lexists(index):
            found = f"{one_line(self.folder)}: holds neither {SINGLE} nor {INDEX}"
            raise PerfModelError(f"{found}; allowed: a folder with the weights as safetensors files")
        return _read_index(index)

    def _find_layout(self, layer: str) -> tuple[str, str]:
        """The layout of this checkpoint, and what its names begin with before ``layers.``."""
        found = [
            (layout, name.removesuffix(layer + endings[2].format(e=0)))
            for layout, endings in _LAYOUTS.items()
            for name in self._places
            if name.endswith(layer + endings[2].format(e=0))
        ]
        found = [one for one in found if not one[1] or one[1].endswith(".")]
        where = one_line(self.folder)
        if not found:
            allowed = ", ".join(f"{layer}{endings[2].format(e=0)}" for endings in _LAYOUTS.values())
            raise PerfModelError(f"{where}: no tensor of an expert in layer {layer[7:-1]}; allowed names: {allowed}")
        if len(found) > 1:
            names = ", ".join(shown(f"{prefix}{layer} ... {layout}") for layout, prefix in found[:4])
            raise PerfModelError(f"{where}: experts under several names ({names}); allowed: one set of experts")
        return found[0]

    def _names(self, layer: int, expert: int) -> tuple[str, ...]:
        endings = _LAYOUTS[self.layout]
        return tuple(f"{self._prefix}layers.{layer}.{ending.format(e=expert)}" for ending in endings)

    def _shapes(self) -> tuple[tuple[int, ...], ...]:
        hidden, size, experts = self.model.hidden_size, self.model.expert_size, self.model.num_experts
        if self.layout == _FUSED:
            return ((experts, 2 * size, hidden),) * 2 + ((experts, hidden, size),)
        return (size, hidden), (size, hidden), (hidden, size)

    def _check_tensors(self) -> None:
        """Look at the headers of all experts' tensors, so that nothing is missed after hours of work."""
        experts = 1 if self.layout == _FUSED else self.model.num_experts
        for layer in self.model.moe_layers:
            for expert in range(experts):
                for name, shape in zip(self._names(layer, expert), self._shapes(), strict=True):
                    self._check_tensor(name, shape)

    def _check_tensor(self, name: str, shape: tuple[int, ...]) -> None:
        if name not in self._places:
            raise PerfModelError(f"{one_line(self.folder)}: tensor {shown(name)} is missing")
        file = self._places[name]
        shard = self._shard(file)
        where = f"{one_line(shard.path)}: tensor {shown(name)}"
        if name not in shard.tensors:
            raise PerfModelError(f"{where} is not in this file, though {INDEX} says so")
        tensor = shard.tensors[name]
        if tensor.shape != shape:
            raise PerfModelError(f"{where} has shape {list(tensor.shape)}; allowed: {list(shape)}, as config.json says")
        if tensor.dtype not in WIDTHS or (tensor.dtype == "F8_E4M3" and (self._block is None or len(shape) != 2)):
            allowed = "F16, BF16, F32, F64, or F8_E4M3 of single experts with quantization_config.weight_block_size"
            raise PerfModelError(f"{where} is of type {tensor.dtype}; allowed: {allowed}")
        if tensor.dtype == "F8_E4M3" and self._block is not None:
            scales = tuple(math.ceil(side / block) for side, block in zip(shape, self._block, strict=True))
            name = f"{name}_scale_inv"
            if name not in self._places or self._shard(self._places[name]).tensors.get(name) is None:
                raise PerfModelError(f"{one_line(self.folder)}: tensor {shown(name)} is missing")
            found = self._shard(self._places[name]).tensors[name]
            if found.shape != scales or found.dtype not in ("F32", "BF16"):
                raise PerfModelError(
                    f"{one_line(self.folder)}: tensor {shown(name)} is {found.dtype} {list(found.shape)};"
                    f" allowed: F32 or BF16 {list(scales)}"
                )

    def _matrix(self, name: str, numbers: Stored, scale: Stored | None) -> NDArray[np.float64]:
        found = numbers.values()
        if scale is not None and self._block is not None:
            scales = scale.values()
            for axis, block in enumerate(self._block):
                scales = scales.repeat(block, axis)
            found *= scales[: found.shape[0], : found.shape[1]]
        if not np.isfinite(found).all():
            place = [int(i) for i in np.argwhere(~np.isfinite(found))[0]]
            where = f"{one_line(self._shard(self._places[name]).path)}: tensor {shown(name)}"
            raise PerfModelError(f"{where} holds {found[tuple(place)]} at {place}; allowed: finite numbers")
        return found


def _name(values: Mapping[str, Any]) -> str:
    """The last part of the name that a config gives its model, if it gives any."""
    found = values.get("_name_or_path")
    last = found.rstrip("/").rpartition("/")[2] if isinstance(found, str) else ""
    return "" if last in (".", "..") else one_line(last)


def _checked_folder(folder: Any) -> Path:
    allowed = "allowed: a folder with config.json and safetensors files"
    if not isinstance(folder, str | os.PathLike) or not os.fspath(folder):
        raise PerfModelError(f"checkpoint: found {shown(folder)}; {allowed}")
    path = Path(os.fsdecode(folder))
    try:
        is_folder, exists = path.is_dir(), path.exists()
    except (OSError, ValueError) as error:
        raise PerfModelError(f"checkpoint {one_line(path)}: cannot be opened ({one_line(error)}); {allowed}") from None
    if not is_folder:
        raise PerfModelError(f"checkpoint {one_line(path)}: {'is a file' if exists else 'no such folder'}; {allowed}")
    return path


def _check_experts(model: MoEModel, values: Mapping[str, Any], config: Path) -> None:
    """Refuse a network whose experts are not SiLU-gated ones of plain or FP8 weights."""
    if not model.moe_layers:
        raise ModelConfigError(
            f"{one_line(config)}: no layer has experts, so this is a dense model; allowed: a MoE model"
        )
    method = (values.get("quantization_config") or {}).get("quant_method", "fp8")
    if method != "fp8" and model.family != "gpt_oss":
        raise ModelConfigError(f"{one_line(config)}: key 'quant_method' is {shown(method)}; allowed: 'fp8', or none")
    if model.family == "gpt_oss":
        raise ModelConfigError(
            f"{one_line(config)}: key 'model_type' is 'gpt_oss', whose experts have biases, a clamped activation and"
            " weights in MXFP4; allowed: experts of two SiLU-gated matrices and one more, without biases"
        )
    found = values.get("hidden_act")
    if found != "silu":
        raise ModelConfigError(f"{one_line(config)}: key 'hidden_act' is {shown(found)}; allowed: 'silu'")


def _scale_block(values: Mapping[str, Any]) -> tuple[int, int] | None:
    """Rows and columns that share a scale; the model's reader has checked what is there."""
    block = (values.get("quantization_config") or {}).get("weight_block_size")
    return (block[0], block[1]) if block else None


def _read_index(path: Path) -> dict[str, str]:
    """The file of every tensor, as an index says."""
    check_regular(path)
    where = one_line(path)
    try:
        if path.stat().st_size > _LARGEST_JSON_BYTES:
            raise PerfModelError(f"{where}: larger than 256 MiB; allowed: an index of tensors")
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, PerfModelError):
            raise
        raise PerfModelError(f"{where}: cannot be read as JSON ({one_line(error)})") from None
    found = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(found, dict) or not found:
        raise PerfModelError(f"{where}: no key 'weight_map' with the file of every tensor")
    for name, file in found.items():
        if not isinstance(file, str) or not file.endswith(".safetensors") or Path(file).name != file:
            allowed = "the name of a .safetensors file in the same folder"
            raise PerfModelError(f"{where}: tensor {shown(name)} is in {shown(file)}; allowed: {allowed}")
    return found
