"""Routing of the DynaNDE simulator: one file a MoE layer, as CSV or as a table of tensors.

CSV: ``layer_id,token_id,expert_0,...``, one row a token with the score of every expert, 0 where it is not picked. The
column ``layer_id`` is written as 0: the layer stands in the file's name alone (``..._layer12_...csv``). Scores have six
decimals, so that a pick with a smaller one is lost; ``metadata["lost_picks"]`` counts those. Which picks came first is
not in the file; they are listed by their score.

Tensors (``.pt``, or the same content as ``.npz`` or JSON): ``indices`` int [T, k], ``scores`` float [T, k], ``layer``,
and either ``num_sequences`` and ``sequence_length``, or ``token_position``: then the rows are the tokens of all
sequences at one position, and a layer has one file for each position
(github.com/Akash-N-Pai/DynaNDE-Simulator, ``DynaNDE-Trcegenerator``).

No file says which tokens are prefill. Scores are as the router gave them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfmodel.errors import TraceError
from perfmodel.routing.checks import MAX_EXPERTS
from perfmodel.routing.importers.base import (
    Format,
    Imported,
    ImportOptions,
    as_signed,
    described,
    number_of_experts,
    prompt_lengths,
    sequence_lengths,
)
from perfmodel.routing.importers.columns import by_layer, reals
from perfmodel.routing.importers.files import brief, columns, entry, integer, read_lines, table
from perfmodel.routing.importers.probe import Probe
from perfmodel.routing.importers.pt import read_nested
from perfmodel.routing.npz import one_line
from perfmodel.routing.trace import RoutingTrace

_HEADER = ["layer_id", "token_id"]
_TENSORS = frozenset({"indices", "scores", "samples"})


@dataclass(frozen=True)
class _Rows:
    """What one file holds: picks and scores [T, k], -1 and 0 where a pick is missing."""

    ids: NDArray[Any]
    scores: NDArray[np.float32]
    layer: int | None = None
    position: int | None = None
    sequence_length: int | None = None
    experts: int | None = None
    model: str | None = None


def recognise(probe: Probe) -> str | None:
    """A header of layer_id, token_id and the experts, or tensors called samples, scores and indices."""
    if probe.kind == "text":
        found = [_title(one) for one in probe.lines[0].split(",", 3)[:3]] if probe.lines else []
        return "has the header layer_id,token_id,expert_0" if found == [*_HEADER, "expert_0"] else None
    if probe.kind == "npz":
        held = set(probe.shapes)
    else:
        held = set(probe.document) if isinstance(probe.document, Mapping) else set()
    return "holds samples, scores and indices" if held >= _TENSORS else None


def read(files: Sequence[Path], options: ImportOptions) -> Imported:
    """The files of all layers, in any order; files of one layer follow one another as given, or by their position."""
    first = one_line(files[0])
    parts = {path: _read_file(path, options) for path in files}
    if options.layers is None and all(part.layer is not None for part in parts.values()):
        layers: dict[int, list[Path]] = {}
        for path, part in sorted(parts.items(), key=lambda item: item[1].layer or 0):
            layers.setdefault(part.layer or 0, []).append(path)
    else:
        layers = by_layer(files, options)
    for layer, paths in layers.items():
        wrong = [path for path in paths if parts[path].layer not in (None, layer)]
        if wrong:
            raise TraceError(f"{one_line(wrong[0])}: holds layer {parts[wrong[0]].layer}, expected layer {layer}")
    k = max(part.ids.shape[1] for part in parts.values())
    each = [_one_layer([parts[path] for path in paths], k, one_line(paths[0])) for paths in layers.values()]
    ids, _, by_position = each[0]
    for (other, _, positions), paths in zip(each, layers.values(), strict=True):
        if len(other) != len(ids) or positions != by_position:
            raise TraceError(
                f"{one_line(paths[0])}: its layer has {len(other)} rows, layer {next(iter(layers))} has {len(ids)}; "
                f"expected the same tokens in every layer"
            )
    ids = np.stack([one[0] for one in each], axis=1)
    lengths = _lengths(options, len(ids), by_position, next(iter(parts.values())), first)
    stated = {part.experts for part in parts.values()} - {None}
    if len(stated) > 1:
        raise TraceError(f"{first}: files have {one_line(sorted(map(str, stated)))} experts; expected one model")
    experts, noted = number_of_experts(options, ids, next(iter(stated), None))
    lost = int((ids < 0).sum())
    try:
        trace = RoutingTrace(
            topk_ids=ids,
            topk_weights=np.stack([one[1] for one in each], axis=1),
            sequence_offsets=np.append(0, np.cumsum(lengths)),
            prompt_len=prompt_lengths(options, lengths, first),
            layer_index=np.array(list(layers), np.int64),
            num_experts=experts,
            metadata=described(
                FORMAT.name, files, options, model=next(iter(parts.values())).model, lost_picks=lost or None, **noted
            ),
        )
    except TraceError as error:
        raise error if str(error).startswith(first) else TraceError(f"{first}: {error}") from error
    return Imported(trace)


def _one_layer(parts: list[_Rows], k: int, where: str) -> tuple[NDArray[Any], NDArray[np.float32], int | None]:
    """Picks and scores of one layer, and over how many positions its sequences run where files are of positions."""
    positions = [part.position for part in parts]
    ids = [np.pad(part.ids, ((0, 0), (0, k - part.ids.shape[1])), constant_values=-1) for part in parts]
    scores = [np.pad(part.scores, ((0, 0), (0, k - part.scores.shape[1]))) for part in parts]
    if None in positions:
        if any(position is not None for position in positions):
            raise TraceError(f"{where}: some files of its layer say their token_position and others do not")
        return np.concatenate(ids), np.concatenate(scores), None
    order = sorted(range(len(parts)), key=lambda i: positions[i] or 0)
    run = [positions[i] or 0 for i in order]
    if run != list(range(run[0], run[0] + len(run))) or len({len(one) for one in ids}) > 1:
        raise TraceError(
            f"{where}: files of its layer are of positions {one_line(run)} and {one_line([len(one) for one in ids])} "
            f"rows; expected one file for each position in a row, of equally many sequences"
        )
    # Rows of a file are sequences: put each sequence's positions one after another.
    return (
        np.stack([ids[i] for i in order], axis=1).reshape(-1, k),
        np.stack([scores[i] for i in order], axis=1).reshape(-1, k),
        len(run),
    )


def _lengths(options: ImportOptions, rows: int, by_position: int | None, part: _Rows, where: str) -> NDArray[np.int64]:
    stated = by_position or part.sequence_length
    if options.sequence_len is None and stated is not None:
        if rows % stated:
            raise TraceError(f"{where}: has {rows} rows, which is no multiple of its sequence_length {stated}")
        return np.full(rows // stated, stated, np.int64)
    if options.sequence_len is None:
        raise TraceError(
            f"{where}: does not say where a sequence ends; --sequence-len says how many rows each has ({rows} if there "
            f"is only one)"
        )
    if by_position is not None and options.sequence_len != (by_position,):
        raise TraceError(f"{where}: has {by_position} positions of each sequence; --sequence-len says otherwise")
    return sequence_lengths(options, rows, where)


# ---- one file ----


def _read_file(path: Path, options: ImportOptions) -> _Rows:
    probe = Probe.of(path)
    return _read_csv(path, options.top_k) if probe.kind == "text" else _read_tensors(path, options.top_k)


def _title(text: str) -> str:
    """A title of a column without its case, quotes and the blanks around it."""
    return text.strip().strip('"').lower()


def _read_csv(path: Path, top_k: int | None) -> _Rows:
    name = one_line(path)
    lines = read_lines(path)
    _, header = next(lines)
    titles = [_title(one) for one in columns(header, ",", f"{name}: line 1")]
    experts = len(titles) - 2
    if titles != [*_HEADER, *(f"expert_{e}" for e in range(experts))] or not 0 < experts <= MAX_EXPERTS:
        raise TraceError(f"{name}: line 1 is {one_line(header[:80])}, expected layer_id,token_id,expert_0,expert_1,...")
    picked: list[NDArray[np.int64]] = []
    scored: list[NDArray[np.float32]] = []
    layer = None
    for number, text in lines:
        where = f"{name}: line {number}"
        parts = columns(text, ",", where)
        if len(parts) != experts + 2:
            raise TraceError(f"{where} has {len(parts)} columns, expected {experts + 2} as in the header")
        layer = integer(parts[0], f"{where}, layer_id", *(() if layer is None else (layer, layer)))
        integer(parts[1], f"{where}, token_id", len(picked), len(picked))
        scores = reals(parts[2:], where, 3)
        if scores.min() < 0:
            raise TraceError(f"{where}, expert_{int(scores.argmin())} is {scores.min()}, expected a score >= 0")
        ids = np.flatnonzero(scores)
        if top_k is not None and len(ids) > top_k:
            raise TraceError(f"{where} has {len(ids)} picks, --top-k is {top_k}")
        ids = ids[np.argsort(-scores[ids], kind="stable")]
        picked.append(ids)
        scored.append(scores[ids])
    if not picked:
        raise TraceError(f"{name}: has a header and no rows")
    k = top_k or max(1, *map(len, picked))
    if k > experts:
        raise TraceError(f"{name}: has {experts} experts, --top-k is {k}")
    kept = np.full((len(picked), k), -1, np.int32)
    weights = np.zeros((len(picked), k), np.float32)
    for row, (ids, scores) in enumerate(zip(picked, scored, strict=True)):
        kept[row, : len(ids)], weights[row, : len(ids)] = ids, scores
    return _Rows(kept, weights, layer=layer or None, experts=experts)


def _read_tensors(path: Path, top_k: int | None) -> _Rows:
    name = one_line(path)
    values = table(read_nested(path), f"{name}: the content")
    try:
        ids = as_signed("indices", entry(values, "indices", name), 2)
        scores = np.asarray(entry(values, "scores", name))
        if scores.dtype.kind != "f" or scores.shape != ids.shape or not ids.size:
            raise TraceError(f"scores has shape {scores.shape} and dtype {scores.dtype}, indices has {ids.shape}")
        if top_k not in (None, ids.shape[1]):
            raise TraceError(f"indices has {ids.shape[1]} picks a token, --top-k is {top_k}")
    except TraceError as error:
        raise error if str(error).startswith(name) else TraceError(f"{name}: {error}") from None
    except ValueError as error:
        raise TraceError(f"{name}: scores is no array ({one_line(error)})") from None
    length, count = (_number(values, key, name) for key in ("sequence_length", "num_sequences"))
    position = _number(values, "token_position", name)
    if position is None and length is not None and count is not None and length * count != len(ids):
        raise TraceError(f"{name}: has {len(ids)} rows, expected {count} sequences of {length}")
    model = values.get("model")
    return _Rows(
        ids,
        scores,
        layer=_number(values, "layer", name),
        position=position,
        sequence_length=length if position is None else None,
        model=model if isinstance(model, str) and model and model.isprintable() and len(model) <= 200 else None,
    )


def _number(values: Mapping[str, Any], key: str, where: str) -> int | None:
    """A whole number >= 0 under a key that may be missing; in an ``.npz`` file it is an array without axes."""
    value = values.get(key)
    if isinstance(value, np.ndarray) and value.shape == () and value.dtype.kind in "iu":
        value = int(value)
    if value is None:
        return None
    if type(value) is not int or not 0 <= value < 2**31:
        raise TraceError(f"{where}: {key} is {brief(value)}, expected an integer >= 0")
    return value


FORMAT = Format(
    name="dynande",
    summary="DynaNDE's scores, one .csv or .pt file a layer; needs --prompt-len, of .csv also --sequence-len",
    gives="trace",
    takes=frozenset({"num_experts", "top_k", "prompt_len", "sequence_len", "layers"}),
    files=(
        "one file a layer, as in run_layer7.csv with the header layer_id,token_id,expert_0,...; or .pt, "
        ".npz, .json with samples, indices, scores, layer, num_sequences, sequence_length"
    ),
    recognise=recognise,
    read=read,
)
