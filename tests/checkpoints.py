"""Small random checkpoints in every layout that is read, and calibration rows for them."""

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from perfmodel.losses.calibration import Calibration

LAYERS, EXPERTS, TOP_K, HIDDEN, INNER = 2, 4, 2, 12, 20

MIXTRAL, QWEN, FUSED = "mixtral", "qwen3_moe", "fused"
LAYOUTS = (MIXTRAL, QWEN, FUSED)

#: What every family's reader needs beside the sizes of experts.
_CONFIG = {
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_experts_per_tok": TOP_K,
    "vocab_size": 32,
    "tie_word_embeddings": False,
    "intermediate_size": INNER,
}
CONFIGS: dict[str, dict[str, Any]] = {
    MIXTRAL: {**_CONFIG, "model_type": "mixtral", "num_local_experts": EXPERTS},
    QWEN: {
        **_CONFIG,
        "model_type": "qwen3_moe",
        "num_experts": EXPERTS,
        "moe_intermediate_size": INNER,
        "head_dim": 6,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
}
CONFIGS[FUSED] = CONFIGS[MIXTRAL]


class Stored(NamedTuple):
    """A tensor as its file holds it."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


class Made(NamedTuple):
    """A checkpoint on disk, and the values of its experts [layers, experts, ...], which its types hold exactly."""

    folder: Path
    gate: NDArray[np.float64]
    up: NDArray[np.float64]
    down: NDArray[np.float64]
    tensors: dict[str, Stored]


def stored(values: NDArray[np.float64], dtype: str) -> Stored:
    """Values in a type of safetensors that holds them exactly."""
    if dtype == "BF16":
        data = (values.astype("<f4").view("<u4") >> 16).astype("<u2").tobytes()
    else:
        data = values.astype({"F16": "<f2", "F32": "<f4", "F64": "<f8"}[dtype]).tobytes()
    return Stored(dtype, values.shape, data)


def safetensors_bytes(tensors: Mapping[str, Stored], **changes: Any) -> bytes:
    """A file as the format says, with parts of its header changed by tensor."""
    header: dict[str, Any] = {}
    place = 0
    for name, one in tensors.items():
        header[name] = {
            "dtype": one.dtype,
            "shape": list(one.shape),
            "data_offsets": [place, place + len(one.data)],
            **changes.get(name, {}),
        }
        place += len(one.data)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + b"".join(one.data for one in tensors.values())


def names(layout: str, layer: int, expert: int) -> tuple[str, str, str]:
    """Names of gate, up and down of one expert that has tensors of its own."""
    if layout == MIXTRAL:
        base, parts = f"model.layers.{layer}.block_sparse_moe.experts.{expert}", ("w1", "w3", "w2")
    else:
        base, parts = f"model.layers.{layer}.mlp.experts.{expert}", ("gate_proj", "up_proj", "down_proj")
    return tuple(f"{base}.{part}.weight" for part in parts)  # type: ignore[return-value]


def make(folder: Path, layout: str = MIXTRAL, dtype: str = "F32", shards: int = 1, seed: int = 0) -> Made:
    """Write a checkpoint with weights of few bits, so that every type holds them."""
    rng = np.random.default_rng(seed)
    gate, up, down = (
        rng.integers(-100, 101, (LAYERS, EXPERTS, *shape)) / 256.0
        for shape in ((INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER))
    )
    tensors: dict[str, Stored] = {"model.embed_tokens.weight": stored(np.zeros((32, HIDDEN)), "F32")}
    for layer in range(LAYERS):
        if layout == FUSED:
            both = np.concatenate([gate[layer], up[layer]], axis=1)
            tensors[f"model.layers.{layer}.mlp.experts.gate_up_proj"] = stored(both, dtype)
            tensors[f"model.layers.{layer}.mlp.experts.down_proj"] = stored(down[layer], dtype)
            continue
        for expert in range(EXPERTS):
            for name, part in zip(names(layout, layer, expert), (gate, up, down), strict=True):
                tensors[name] = stored(part[layer, expert], dtype)
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIGS[layout]), encoding="utf-8")
    write(folder, tensors, shards)
    return Made(folder, gate, up, down, tensors)


def write(folder: Path, tensors: Mapping[str, Stored], shards: int = 1) -> None:
    """The weights as one file, or as several with an index."""
    if shards == 1:
        (folder / "model.safetensors").write_bytes(safetensors_bytes(tensors))
        return
    files = [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]
    where = {name: files[i % shards] for i, name in enumerate(tensors)}
    for file in files:
        held = {name: one for name, one in tensors.items() if where[name] == file}
        (folder / file).write_bytes(safetensors_bytes(held))
    index = {"metadata": {"total_size": 1}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def rows(num_rows: int = 48, seed: int = 1, **changes: Any) -> Calibration:
    """Correlated inputs, and two experts for every row."""
    rng = np.random.default_rng(seed)
    mix = rng.normal(size=(LAYERS, HIDDEN, HIDDEN))
    hidden = (rng.normal(size=(LAYERS, num_rows, HIDDEN)) @ mix).astype(np.float16)
    ids = np.argsort(rng.random((LAYERS, num_rows, EXPERTS)), axis=2)[..., :TOP_K].astype(np.uint8)
    return Calibration(**{"hidden": hidden, "expert_ids": ids, **changes})
