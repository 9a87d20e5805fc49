"""Dumps of SGLang's expert distribution recorder in the mode ``per_token``.

A ``.pt`` file, or the same content as JSON or ``.npz``: ``records``, one a forward pass, each with ``input_ids``,
``positions``, ``extend_seq_lens``, ``forward_mode`` and ``topk_ids_of_layer`` [layers, tokens, 8], which is layer
first, filled with -1 and counts the slots that hold experts ("physical" ids); and ``last_physical_to_logical_map``
[layers, slots]. Requests are not named: :mod:`perfmodel.routing.importers.requests` finds which tokens are whose.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfmodel.errors import TraceError
from perfmodel.routing.checks import as_int64
from perfmodel.routing.defects import Finding
from perfmodel.routing.defects.rows import counted
from perfmodel.routing.importers.base import (
    Format,
    Imported,
    ImportOptions,
    as_signed,
    described,
    sequence_lengths,
)
from perfmodel.routing.importers.files import brief, entry, table, whole
from perfmodel.routing.importers.probe import Probe
from perfmodel.routing.importers.pt import read_nested
from perfmodel.routing.importers.requests import Pass, Rows, rows_of, rows_one_by_one
from perfmodel.routing.npz import one_line
from perfmodel.routing.trace import RoutingTrace

PICKS, MAP = "topk_ids_of_layer", "last_physical_to_logical_map"
#: Values of ``forward_mode`` that are read; others are of speculative decoding and the like.
EXTEND, DECODE, MIXED, IDLE = 1, 2, 3, 4


def recognise(probe: Probe) -> str | None:
    """The keys of the first record."""
    record = first_record(probe)
    return f"holds records with {PICKS}" if record is not None and PICKS in record else None


def first_record(probe: Probe) -> frozenset[str] | None:
    """Keys of the first record of a dump, or None of what is no dump of records."""
    if probe.kind == "npz":
        keys = {name.removeprefix("records/0/") for name in probe.shapes if name.startswith("records/0/")}
        return frozenset(keys) or None
    found = probe.document if probe.kind in ("json", "pt") else None
    records = found.get("records") if isinstance(found, Mapping) else None
    first = records[0] if isinstance(records, list) and records else None
    return frozenset(map(str, first)) if isinstance(first, Mapping) else None


def read(files: Sequence[Path], options: ImportOptions) -> Imported:
    """Every file is the dump of one rank; their requests follow one another."""
    findings: list[Finding] = []
    parts, rows, experts = [], list[Rows](), 0
    seen: list[list[Pass]] = []
    for path in files:
        name = one_line(path)
        passes, mapping, gaps = _load(path, options)
        if any(_same(passes, other) for other in seen):
            mended = "duplicate-tokens" in options.mend
            found = f"{name} repeats every token of another rank"
            findings.append(Finding("duplicate-tokens", found, "leave the file out", mended=mended))
            if mended:
                continue
        seen.append(passes)
        if gaps:
            found = f"{name} has no record of the forward passes {gaps}: steps without tokens, or lost ones"
            findings.append(Finding("missing-phase", found))
        try:
            rows.append(_rows(passes, options, name, len(files)))
        except TraceError as error:
            if not gaps:
                raise
            raise TraceError(f"{error}; forward passes {gaps} have no record") from None
        ids = np.concatenate([one.ids for one in passes], axis=1)[:, rows[-1].order]
        parts.append(_logical(ids, mapping, name, findings))
        experts = max(experts, int(mapping.max()) + 1)
    where = one_line(files[0])
    if len({part.shape[0] for part in parts}) > 1:
        raise TraceError(f"{where}: the files have {parts[0].shape[0]} and other numbers of layers")
    cached = np.array([n for one in rows for n in one.cached], np.int64)
    if cached.any():
        findings.append(
            Finding(
                "missing-phase",
                f"{int(cached.sum())} tokens at the start of {counted(int((cached > 0).sum()), 'prompt')} have no "
                "rows: the server took them from its cache and did not compute them",
            )
        )
    metadata = described(FORMAT.name, files, options, cached_prompt_tokens=int(cached.sum()) or None)
    lengths, prompts = ([n for one in rows for n in getattr(one, name)] for name in ("lengths", "prompts"))
    sequences = np.append(0, np.cumsum(lengths)), np.array(prompts, np.int64)
    experts = options.num_experts or experts
    return Imported(
        _trace(np.concatenate(parts, axis=1), sequences, experts, metadata, options, where), tuple(findings)
    )


def _rows(passes: list[Pass], options: ImportOptions, name: str, files: int) -> Rows:
    if options.sequence_len is None:
        return rows_of(passes, name)
    if files > 1:
        raise TraceError(f"{name}: --sequence-len is for requests made one at a time, in one file; found {files} files")
    return rows_one_by_one(passes, sequence_lengths(options, sum(len(one.positions) for one in passes), name), name)


def _trace(
    ids: NDArray[np.int32],
    sequences: tuple[NDArray[np.int64], NDArray[np.int64]],
    experts: int,
    metadata: dict[str, Any],
    options: ImportOptions,
    where: str,
) -> RoutingTrace:
    """A trace of ids [layers, T, picks], without the layers and the last picks that only hold fillers."""
    picked = ids >= 0
    layers, columns = np.flatnonzero(picked.any(axis=(1, 2))), np.flatnonzero(picked.any(axis=(0, 1)))
    if not len(layers):
        raise TraceError(f"{where}: holds no picks, only the filler -1")
    top_k = int(columns[-1]) + 1
    if options.top_k not in (None, top_k):
        raise TraceError(f"{where}: tokens have {top_k} picks, --top-k is {options.top_k}")
    try:
        return RoutingTrace(
            topk_ids=ids[layers][:, :, :top_k].transpose(1, 0, 2),  # type: ignore[arg-type]  # kept unsigned
            topk_weights=None,
            sequence_offsets=sequences[0],
            prompt_len=sequences[1],
            layer_index=layers,
            num_experts=experts,
            metadata=metadata,
        )
    except TraceError as error:
        raise TraceError(f"{where}: {error}") from None


def _load(path: Path, options: ImportOptions) -> tuple[list[Pass], NDArray[np.int64], str | None]:
    name = one_line(path)
    dump = table(read_nested(path), f"{name}: the content")
    records = entry(dump, "records", name)
    if not isinstance(records, list) or not records:
        raise TraceError(f"{name}: records is {brief(records)}, expected a list of forward passes")
    mapping = slot_map(dump, options, name)
    gaps, after = check_passes(records, name)
    every = (_pass(table(one, f"{name}: record {i}"), f"{name}: record {i}", mapping) for i, one in enumerate(records))
    passes = [one._replace(after_gap=i in after) for i, one in enumerate(every) if one is not None]
    if not passes:
        raise TraceError(f"{name}: holds no tokens")
    return passes, mapping, gaps


def check_passes(records: Sequence[Any], name: str) -> tuple[str | None, set[int]]:
    """Which forward passes have no record, in a few words or None, and which records come right after such a gap.

    For records of one rank in the order of its passes: TraceError for several ranks, for a pass that is there twice,
    and for a wrong order. Records may lack ``rank`` and ``forward_pass_id``. A step in which a server computes nothing
    may have no record, or one that does not count, so that passes without a record need not be lost ones.
    """
    before: dict[str, int] = {}
    missing: list[str] = []
    after: set[int] = set()
    for i, record in enumerate(records):
        where = f"{name}: record {i}"
        found = {
            key: whole(record[key], f"{where}: {key}", 0, 2**53)
            for key in ("rank", "forward_pass_id")
            if isinstance(record, Mapping) and record.get(key) is not None
        }
        if found.get("rank", before.get("rank")) != before.get("rank", found.get("rank")):
            raise TraceError(
                f"{where}: is of rank {found['rank']}, records before it are of rank {before['rank']}; expected a file "
                "for each rank"
            )
        number, last = found.get("forward_pass_id"), before.get("forward_pass_id")
        if number is not None and last is not None:
            if number <= last and record.get("forward_mode") == IDLE:
                continue
            if number == last:
                raise TraceError(f"{where}: is forward pass {number}, as is the record before it: it is recorded twice")
            if number < last:
                raise TraceError(f"{where}: is forward pass {number}, after pass {last}; expected ids that increase")
            if number > last + 1:
                after.add(i)
                missing.append(str(last + 1) if number == last + 2 else f"{last + 1}-{number - 1}")
        before |= found
    return (", ".join(missing[:6]) + ", ..." * (len(missing) > 6) if missing else None), after


def slot_map(dump: Mapping[str, Any], options: ImportOptions, name: str) -> NDArray[np.int64]:
    """Logical expert of every slot [layers, slots]: of the user's file, else of the dump."""
    if options.expert_map is not None:
        name = one_line(options.expert_map)
        found, where = read_nested(options.expert_map), f"{name}: the map"
    else:
        found, where = entry(dump, MAP, name), f"{name}: {MAP}"
    mapping = as_signed(where, found, 2)
    if mapping.size == 0 or mapping.min() < 0 or mapping.max() >= 2**16 - 1:
        raise TraceError(f"{where} has shape {mapping.shape} and holds {_extremes(mapping)}, expected experts 0..65534")
    if mapping.max() >= mapping.shape[1]:
        raise TraceError(
            f"{where} names expert {mapping.max()} for {mapping.shape[1]} slots a layer; expected every expert to have "
            f"a slot, so experts 0..{mapping.shape[1] - 1}"
        )
    return mapping.astype(np.int64)


def _extremes(array: NDArray[Any]) -> str:
    return f"{array.min()} to {array.max()}" if array.size else "nothing"


def _pass(record: Mapping[str, Any], where: str, mapping: NDArray[np.int64]) -> Pass | None:
    """One forward pass; None of one that computes no request's tokens."""
    if PICKS not in record:
        raise TraceError(f"{where}: lacks {PICKS}; counts alone are of the format sglang-stat")
    mode = entry(record, "forward_mode", where)
    mode = mode.item() if isinstance(mode, np.ndarray) and mode.size == 1 else mode
    if type(mode) is not int or mode not in (EXTEND, DECODE, MIXED, IDLE):
        allowed = f"{EXTEND} (extend), {DECODE} (decode), {MIXED} (mixed) and {IDLE} (idle)"
        raise TraceError(f"{where}: forward_mode is {brief(mode)}; allowed: {allowed}")
    tokens, positions = (_column(record, key, where) for key in ("input_ids", "positions"))
    if mode == IDLE or not len(tokens):
        return None
    ids = as_signed(f"{where}: {PICKS}", record[PICKS], 3)
    if not len(positions) == len(tokens) == ids.shape[1]:
        counts = f"{len(tokens)} input_ids, {len(positions)} positions"
        raise TraceError(f"{where}: has {counts} and {PICKS} of {ids.shape[1]} tokens (layers come first)")
    if ids.shape[0] != mapping.shape[0]:
        raise TraceError(f"{where}: {PICKS} has {ids.shape[0]} layers, the map of slots {mapping.shape[0]}")
    if ids.size and (ids.min() < -1 or ids.max() >= mapping.shape[1]):
        raise TraceError(f"{where}: {PICKS} holds {_extremes(ids)}; allowed: slots 0..{mapping.shape[1] - 1}, or -1")
    extends: list[int] = []
    if mode in (EXTEND, MIXED):
        extends = _column(record, "extend_seq_lens", where).tolist()
        if sum(extends) != len(positions) or min(extends, default=0) < 1:
            raise TraceError(
                f"{where}: extend_seq_lens adds up to {sum(extends)} tokens, the pass has {len(positions)}"
            )
    return Pass(where, ids.astype(np.int32, copy=False), positions, tokens, extends, mixed=mode == MIXED)


def _column(record: Mapping[str, Any], key: str, where: str) -> NDArray[np.int64]:
    """Integers of a record; an empty or missing list is none of them."""
    found = entry(record, key, where)
    empty = found is None or (isinstance(found, list) and not found)
    return as_int64(f"{where}: {key}", np.zeros(0, np.int64) if empty else found, None)


def _same(passes: list[Pass], others: list[Pass]) -> bool:
    return len(passes) == len(others) and all(
        np.array_equal(a.positions, b.positions) and np.array_equal(a.tokens, b.tokens)
        for a, b in zip(passes, others, strict=True)
    )


def _logical(
    ids: NDArray[np.int32], mapping: NDArray[np.int64], name: str, findings: list[Finding]
) -> NDArray[np.int32]:
    """Experts in place of slots."""
    if (mapping == np.arange(mapping.shape[1])).all():
        return ids
    found = f"{name} counts {mapping.shape[1]} slots of experts, of which its last map says what they hold"
    findings.append(Finding("physical-ids", found, "replace every slot by its expert", mended=True))
    logical = np.take_along_axis(mapping.astype(np.int32), np.maximum(ids, 0).reshape(len(ids), -1), axis=1).reshape(
        ids.shape
    )
    logical[ids < 0] = -1
    return logical


FORMAT = Format(
    name="sglang",
    summary="SGLang expert distribution recorder, mode per_token (.pt, or its content as .json or .npz); ids only",
    gives="trace",
    takes=frozenset({"num_experts", "top_k", "sequence_len", "expert_map"}),
    files=(
        "records, each with input_ids, positions, extend_seq_lens, forward_mode, topk_ids_of_layer; and "
        "last_physical_to_logical_map; a file a rank; in an .npz the keys are records/0/positions and so "
        "on"
    ),
    recognise=recognise,
    read=read,
)
