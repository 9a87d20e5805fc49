"""The expert scores of ESFT: text files, one a MoE layer, one line a sequence.

A line holds the experts of n tokens, k each, then an empty column, then their n * k weights, all separated by tabs.
The layer stands in the file's name, ``expert_weights_7.txt``. Neither k nor where a prompt ends is in the files: a
prompt and its reference answer were read in one forward pass, so every row counts as prefill unless told. Picks
are not in the order of their weights, and weights are as the router gave them, for DeepSeek-V2-Lite softmax over all
experts without renormalising (github.com/deepseek-ai/ESFT, ``deepseek/modeling_deepseek.py``).
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfmodel.errors import TraceError
from perfmodel.routing.importers.base import (
    Format,
    Imported,
    ImportOptions,
    described,
    number_of_experts,
    one_pass,
)
from perfmodel.routing.importers.columns import by_layer, integers, reals
from perfmodel.routing.importers.files import columns, list_folder, read_lines
from perfmodel.routing.importers.probe import Probe
from perfmodel.routing.npz import one_line
from perfmodel.routing.trace import RoutingTrace

_START = re.compile(rb"[0-9]{1,5}(?:\t[0-9]{1,5})*\t\t[0-9.]")
_NAME = re.compile(r"expert_weights_[0-9]{1,5}\.txt")
_CUT = re.compile(rb"[0-9]{1,5}(?:\t[0-9]{1,5})+\t?")
# Sequences of up to 40,000 tokens of six picks.
_LONGEST, _MOST = 2**22, 500_000


def recognise(probe: Probe) -> str | None:
    """Integers, an empty column, decimals, all separated by tabs."""
    if probe.kind == "folder":
        files = _files_of(probe.path)
        if not files or recognise(Probe.of(files[0])) is None:
            return None
        return f"a folder of {len(files)} files such as {one_line(files[0].name)}, with scores"
    line, end, _ = probe.head.partition(b"\n")
    cut = not end and probe.size > len(probe.head)
    if probe.kind == "text" and (_START.match(line) or (cut and _CUT.fullmatch(line))):
        return "integers and decimals separated by tabs, with an empty column between"
    return None


def read(files: Sequence[Path], options: ImportOptions) -> Imported:
    """One file for each layer, in any order, or the folder of them."""
    files = [file for path in files for file in _expanded(path)]
    first = one_line(files[0])
    if options.top_k is None:
        raise TraceError(f"{first}: does not say how many experts a token picks; --top-k says it")
    layers = by_layer(files, options)
    several = next((paths for paths in layers.values() if len(paths) > 1), None)
    if several:
        raise TraceError(f"{one_line(several[1])}: is of the same layer as {one_line(several[0].name)}")
    ids: list[NDArray[Any]] = []
    weights = []
    lengths: NDArray[np.int64] | None = None
    for (path,) in layers.values():
        found = _read_layer(path, options.top_k)
        if lengths is not None and not np.array_equal(lengths, found[0]):
            raise TraceError(
                f"{one_line(path)}: its lines have {one_line(found[0])} tokens, those of another layer "
                f"{one_line(lengths)}; expected the same sequences in every layer"
            )
        lengths = found[0]
        ids.append(found[1])
        weights.append(found[2])
    every = np.stack(ids, axis=1)
    experts, noted = number_of_experts(options, every)
    lengths = np.array(lengths, np.int64)
    try:
        trace = RoutingTrace(
            topk_ids=every,
            topk_weights=np.stack(weights, axis=1),
            sequence_offsets=np.append(0, np.cumsum(lengths)),
            prompt_len=one_pass(options, lengths, first),
            layer_index=np.array(list(layers), np.int64),
            num_experts=experts,
            metadata=described(FORMAT.name, files, options, **noted),
        )
    except TraceError as error:
        raise error if str(error).startswith(first) else TraceError(f"{first}: {error}") from error
    return Imported(trace)


def _files_of(folder: Path) -> list[Path]:
    """The files of layers in a folder, by their names."""
    return [path for path in list_folder(folder, "expert_weights_*.txt") if _NAME.fullmatch(path.name)]


def _expanded(path: Path) -> list[Path]:
    """A file itself, or the files of layers in a folder; TraceError where there are none."""
    if Probe.of(path).kind != "folder":
        return [path]
    files = _files_of(path)
    if not files:
        raise TraceError(f"{one_line(path)}: is a folder without files such as expert_weights_7.txt, one a layer")
    return files


def _read_layer(path: Path, k: int) -> tuple[NDArray[np.int64], NDArray[Any], NDArray[np.float32]]:
    """Tokens of every line, and picks and weights [T, k] of one layer."""
    lengths, ids, weights = [], [], []
    for number, text in read_lines(path, longest=_LONGEST):
        where = f"{one_line(path)}: line {number}"
        if not text.strip():
            raise TraceError(f"{where} is empty, expected the picks of a sequence")
        parts = columns(text.rstrip("\t"), "\t", where, _MOST)
        count = len(parts) // 2
        if len(parts) != 2 * count + 1 or not count or parts[count]:
            raise TraceError(
                f"{where} has {len(parts)} columns; expected as many weights as experts and an empty column between"
            )
        if count % k:
            raise TraceError(f"{where} has {count} picks, which is no multiple of --top-k {k}")
        lengths.append(count // k)
        ids.append(integers(parts[:count], where).astype(np.int32).reshape(-1, k))
        weights.append(reals(parts[count + 1 :], where, count + 2).reshape(-1, k))
    return np.array(lengths, np.int64), np.concatenate(ids), np.concatenate(weights)


FORMAT = Format(
    name="esft",
    summary="ESFT's expert scores, text with one file a layer and one line a sequence; needs --top-k",
    gives="trace",
    takes=frozenset({"num_experts", "top_k", "prompt_len", "layers"}),
    files=(
        "one file a layer, its number in the name, as in expert_weights_7.txt, or a folder of such files: "
        "a line a sequence, experts, an empty column, weights, by tabs"
    ),
    recognise=recognise,
    read=read,
)
