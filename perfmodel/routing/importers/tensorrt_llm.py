"""Expert statistics of TensorRT-LLM: a folder of tokens that every expert was given, by iteration, layer and rank.

``meta_info.json`` states the experts and the picks of a token; ``rankN.safetensors`` holds one tensor [experts] for
each iteration and layer, of the name ``ITERATION_LAYER``. Ranks and iterations are added. Other files of the folder,
such as how often two experts were used together, are not read.
"""

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfmodel.errors import TraceError
from perfmodel.routing.checks import MAX_EXPERTS
from perfmodel.routing.importers.arrays import read_safetensors, safetensors_declared
from perfmodel.routing.importers.base import Format, Imported, ImportOptions
from perfmodel.routing.importers.canonical import only
from perfmodel.routing.importers.counts import profile_of
from perfmodel.routing.importers.files import check_file, entry, list_folder, parse_json, read_bytes, table, whole
from perfmodel.routing.importers.probe import Probe
from perfmodel.routing.npz import one_line, shown

NAME = "tensorrt-llm"
META = "meta_info.json"
_RANK = re.compile(r"rank([0-9]{1,5})\.safetensors")
_KEY = re.compile(r"([0-9]{1,9})_([0-9]{1,5})")
#: Largest meta_info.json, and largest file of a rank [byte].
_LARGEST_META, _LARGEST_RANK = 2**20, 2**27


def recognise(probe: Probe) -> str | None:
    """A folder with files of ranks, and a meta_info.json that states the number of experts."""
    if probe.kind != "folder" or not (probe.path / META).is_file():
        return None
    ranks = _ranks(probe.path)
    if not ranks or "num_experts" not in _meta(probe.path):
        return None
    return f"a folder with {META}, which states num_experts, and statistics of {len(ranks)} ranks"


def read(files: Sequence[Path], options: ImportOptions) -> Imported:
    """One folder."""
    folder = only(files)
    if Probe.of(folder).kind != "folder":
        raise TraceError(f"{one_line(folder)}: is no folder; allowed: a folder with {META} and rank0.safetensors")
    where = one_line(folder / META)
    meta = _meta(folder)
    experts = whole(entry(meta, "num_experts", where), f"{where}: num_experts", 1, MAX_EXPERTS)
    picks = meta.get("num_experts_per_token")
    top_k = None if picks is None else whole(picks, f"{where}: num_experts_per_token", 1, experts)
    ranks = _ranks(folder)
    numbers = sorted(int(match[1]) for path in ranks if (match := _RANK.fullmatch(path.name)))
    if numbers != list(range(len(numbers))) or not numbers:
        found = ", ".join(path.name for path in ranks[:4]) or "none"
        raise TraceError(f"{one_line(folder)}: files of ranks are {found}; expected rank0.safetensors and on, no gap")
    sums: dict[int, NDArray[np.float64]] = {}
    seen = {path: _add(path, experts, sums) for path in ranks}
    iterations = _same_in_all_ranks(seen)
    layers = sorted(sums)
    return profile_of(
        NAME,
        files,
        options,
        np.array([sums[layer] for layer in layers]),
        layers=layers,
        scale="counts",
        top_k=top_k,
        ranks=len(ranks),
        iterations=[iterations[0], iterations[-1]],
    )


def _same_in_all_ranks(seen: Mapping[Path, set[tuple[int, int]]]) -> list[int]:
    """The iterations, which are the same in all ranks, without gap; TraceError where a rank lacks something.

    Every rank has all of its layers in every iteration. Ranks have the same layers, or (as stages of a pipeline)
    none in common.
    """
    first = next(iter(seen))
    iterations = sorted({iteration for iteration, _ in seen[first]})
    stages: list[tuple[Path, set[int]]] = []
    for path, pairs in seen.items():
        own, layers = {iteration for iteration, _ in pairs}, {layer for _, layer in pairs}
        differing = sorted(own ^ set(iterations))
        if differing:
            has, lacks = (path, first) if differing[0] in own else (first, path)
            raise TraceError(
                f"{one_line(lacks)}: lacks iteration {differing[0]}, which {one_line(has.name)} has; expected the same "
                "iterations in every rank"
            )
        lacking = next(((i, n) for i in iterations for n in sorted(layers) if (i, n) not in pairs), None)
        if lacking:
            raise TraceError(
                f"{one_line(path)}: iteration {lacking[0]} lacks layer {lacking[1]}; expected all layers in each"
            )
        for other, known in stages:
            if layers & known and layers != known:
                layer = min(layers ^ known)
                has, lacks = (path, other) if layer in layers else (other, path)
                raise TraceError(
                    f"{one_line(lacks)}: lacks layer {layer}, which {one_line(has.name)} has beside others that both "
                    "have; expected the same layers in every rank"
                )
        stages.append((path, layers))
    gap = next((i + 1 for i, after in pairwise(iterations) if after != i + 1), None)
    if gap is not None:
        raise TraceError(
            f"{one_line(first)}: has iterations {iterations[0]} to {iterations[-1]} without iteration {gap}; expected "
            "no gap"
        )
    return iterations


def _meta(folder: Path) -> Any:
    path = folder / META
    return table(parse_json(read_bytes(path, _LARGEST_META), one_line(path)), one_line(path))


def _ranks(folder: Path) -> list[Path]:
    return [path for path in list_folder(folder, "rank*.safetensors") if _RANK.fullmatch(path.name)]


def _add(path: Path, experts: int, sums: dict[int, NDArray[np.float64]]) -> set[tuple[int, int]]:
    """Add the counts of one rank to those of each layer; the iterations and layers that it has."""
    check_file(path, _LARGEST_RANK)
    declared = safetensors_declared(path)
    if not declared:
        raise TraceError(f"{one_line(path)}: holds no tensors, expected one for each iteration and layer")
    for key, one in declared.items():
        where = f"{one_line(path)}: tensor {shown(key)}"
        if not _KEY.fullmatch(key):
            raise TraceError(f"{where}; allowed: names such as 50_3, iteration and layer")
        if one.shape != (experts,) or one.numpy_dtype.kind not in "iu":
            raise TraceError(f"{where} has shape {one.shape} of {one.dtype}, expected {experts} integers")
    seen = set()
    for key, counts in read_safetensors(path).items():
        iteration, layer = map(int, key.split("_"))
        if (iteration, layer) in seen:
            raise TraceError(f"{one_line(path)}: iteration {iteration} has layer {layer} twice")
        if counts.min() < 0:
            raise TraceError(f"{one_line(path)}: tensor {shown(key)} holds {counts.min()}, expected counts >= 0")
        seen.add((iteration, layer))
        sums[layer] = sums.get(layer, 0.0) + counts.astype(np.float64)
    return seen


FORMAT = Format(
    name=NAME,
    summary="TensorRT-LLM expert statistics: a folder of meta_info.json and rank0.safetensors and on",
    gives="profile",
    takes=frozenset({"num_experts", "top_k"}),
    files=(
        "the folder itself: meta_info.json with num_experts and num_experts_per_token, and "
        "rank0.safetensors, rank1.safetensors, ... with tensors ITERATION_LAYER [experts]"
    ),
    recognise=recognise,
    read=read,
)
