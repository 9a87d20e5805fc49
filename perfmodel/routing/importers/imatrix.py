"""Importance matrices of llama.cpp, which count how many rows each expert of each layer was given.

The GGUF layout has two tensors for each weight: sums of squares, of which nothing is read, and ``NAME.counts``. The
gate, up and down matrices of a layer's experts are given the same rows, so one of them is counted and the others must
agree; adding them would count every pick three times. Where an attention matrix tells the number of tokens, picks a
token follow. All rows are prefill: texts are run in chunks, nothing is generated.

The older ``.dat`` layout holds, for each weight, mean squares and how many calls there were. Its writer divided by the
uses of every expert and stored one number of calls for all, so that uses cannot be had back; nor from GGUF files that
were converted from it, which have one count for all experts. Both are refused.
"""

import re
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfmodel.errors import TraceError
from perfmodel.routing.importers.base import Format, Imported, ImportOptions
from perfmodel.routing.importers.counts import profile_of
from perfmodel.routing.importers.gguf import Gguf, read_gguf
from perfmodel.routing.importers.probe import Probe
from perfmodel.routing.npz import one_line, shown

NAME = "imatrix"
_EXPERTS = re.compile(r"blk\.([0-9]{1,5})\.ffn_(?:gate|up|down|gate_up)_exps\.weight\.counts")
_TOKENS = re.compile(r"blk\.[0-9]{1,5}\.attn_[a-z0-9_]+\.weight\.counts")
_WHY_NOT = (
    "the .dat layout holds no uses of experts (its numbers are divided by them); "
    "run llama-imatrix with --output-format gguf"
)


def recognise(probe: Probe) -> str | None:
    """A GGUF file whose tensors come in pairs of sums and counts, or a ``.dat`` file that starts as one does."""
    if probe.kind == "gguf":
        gguf = read_gguf(probe.path)
        counted = sum(name.endswith(".counts") for name in gguf.tensors)
        return f"GGUF statistics with {counted} tensors of counts" if counted else None
    return "starts as a llama.cpp .dat importance matrix" if _is_legacy(probe.head, probe.size) else None


def read(files: Sequence[Path], options: ImportOptions) -> Imported:
    """Counts of all files are added, as the tool that writes them does."""
    tables = [_read(path) for path in files]
    first, total = tables[0]
    layers, experts = list(first), len(next(iter(first.values())))
    for path, (table, _) in zip(files[1:], tables[1:], strict=True):
        if list(table) != layers or len(next(iter(table.values()))) != experts:
            raise TraceError(
                f"{one_line(path)}: counts {len(table)} layers of {len(next(iter(table.values())))} experts, "
                f"{one_line(files[0].name)} {len(layers)} of {experts}; allowed: files of one model"
            )
    counts = np.array([[table[layer] for layer in layers] for table, _ in tables], np.float64).sum(axis=0)
    known = {
        key: sum(one[key] for _, one in tables) for key in ("tokens", "chunks") if all(key in t for _, t in tables)
    }
    datasets = [name for _, one in tables for name in one.get("datasets", ())]
    return profile_of(
        NAME,
        files,
        options,
        counts,
        layers=layers,
        scale="counts",
        top_k=_picks(counts, known.get("tokens")),
        phase="prefill",
        datasets=datasets or None,
        chunk_size=total.get("chunk_size"),
        **known,
    )


def _read(path: Path) -> tuple[dict[int, NDArray[np.float32]], dict[str, Any]]:
    """Counts of the experts of each layer of one file, and what else the file says."""
    name, probe = one_line(path), Probe.of(path)
    if probe.kind != "gguf":
        if _is_legacy(probe.head, probe.size):
            raise TraceError(f"{name}: {_WHY_NOT}")
        raise TraceError(f"{name}: is a {probe.kind} file; allowed: a GGUF file written by llama-imatrix")
    gguf = read_gguf(path)
    found = {key: match for key in gguf.tensors if (match := _EXPERTS.fullmatch(key))}
    if not found:
        kind = gguf.values.get("general.type", "nothing")
        raise TraceError(
            f"{name}: counts no experts (general.type is {shown(kind)}); allowed: statistics of a model with experts, "
            f"with tensors such as blk.0.ffn_gate_exps.weight.counts"
        )
    tokens = [key for key in gguf.tensors if _TOKENS.fullmatch(key)]
    numbers = gguf.read([*found, *tokens])
    table = _by_layer({key: (int(match[1]), numbers[key]) for key, match in found.items()}, name)
    return table, _stated(gguf, {float(numbers[key][0]) for key in tokens if numbers[key].size == 1})


def _by_layer(counted: Mapping[str, tuple[int, NDArray[np.float32]]], name: str) -> dict[int, NDArray[np.float32]]:
    table: dict[int, NDArray[np.float32]] = {}
    for key, (layer, counts) in sorted(counted.items(), key=lambda item: item[1][0]):
        where = f"{name}: tensor {shown(key)}"
        if counts.size == 1:
            raise TraceError(f"{where} has one count for all experts, as files made from a .dat have: {_WHY_NOT}")
        wrong = ~((counts >= 0) & (counts < np.inf)) | (counts != np.floor(counts))
        if wrong.any():
            expert = int(np.flatnonzero(wrong)[0])
            raise TraceError(f"{where}, expert {expert} is {counts[expert]}, expected a whole number >= 0")
        if counts.shape != (table.setdefault(layer, counts)).shape or (counts != table[layer]).any():
            raise TraceError(f"{where} differs from the counts of another matrix of layer {layer}: the file is damaged")
    sizes = {len(counts) for counts in table.values()}
    if len(sizes) > 1:
        raise TraceError(f"{name}: layers have {min(sizes)} to {max(sizes)} experts, expected as many in every layer")
    return table


def _stated(gguf: Gguf, tokens: set[float]) -> dict[str, Any]:
    """What the values of a file say, and the number of tokens where all attention matrices agree on it."""
    stated: dict[str, Any] = {}
    for key, name in (("chunks", "imatrix.chunk_count"), ("chunk_size", "imatrix.chunk_size")):
        if type(value := gguf.values.get(name)) is int:
            stated[key] = value
    datasets = gguf.values.get("imatrix.datasets")
    if isinstance(datasets, tuple) and all(isinstance(one, str) for one in datasets):
        stated["datasets"] = list(datasets)
    if len(tokens) == 1 and 0 < (count := tokens.pop()) < 2**53 and count.is_integer():
        stated["tokens"] = int(count)
    return stated


def _picks(counts: NDArray[np.float64], tokens: int | None) -> int | None:
    """Picks of a token, where every layer has the same whole number of them; dense or partly counted ones have not."""
    sums = counts.sum(axis=1)
    picks = sums / tokens if tokens else np.zeros(1)
    whole = bool((picks == picks[0]).all()) and 1 <= picks[0] <= counts.shape[1] and float(picks[0]).is_integer()
    return int(picks[0]) if whole else None


def _is_legacy(head: bytes, size: int) -> bool:
    """Whether a file starts as a ``.dat``: entries, length of a name, the name, calls, and values that fit the file."""
    if len(head) < 16:
        return False
    entries, length = struct.unpack_from("<ii", head)
    if not (1 <= entries <= 2**20 and 1 <= length <= 256 and len(head) >= 16 + length):
        return False
    name = head[8 : 8 + length]
    calls, values = struct.unpack_from("<ii", head, 8 + length)
    readable = name.isascii() and name.decode().isprintable() and b"." in name
    return readable and calls >= 1 and values >= 1 and 16 + length + 4 * values <= size


FORMAT = Format(
    name=NAME,
    summary="llama.cpp importance matrix with counts of every expert, GGUF (the older .dat holds none)",
    gives="profile",
    takes=frozenset({"num_experts", "top_k"}),
    files=("GGUF of llama-imatrix, with tensors such as blk.0.ffn_gate_exps.weight.counts; several files are added"),
    recognise=recognise,
    read=read,
)
