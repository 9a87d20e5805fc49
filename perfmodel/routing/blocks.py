"""Read a routing trace block by block, so that it may be larger than memory.

A block is a run of rows that holds whole sequences, or a piece of one that is too long for a block.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from perfmodel.errors import TraceError
from perfmodel.progress import Report, check_report
from perfmodel.routing.checks import (
    MAX_EXPERTS,
    as_count,
    as_integers,
    as_texts,
    checked_ids,
    checked_labels,
    checked_layers,
    checked_metadata,
    checked_sequences,
    checked_weights,
    stored_metadata,
)
from perfmodel.routing.npz import MAX_BYTES, ArrayStream, array_streams, one_line
from perfmodel.routing.trace import CANONICAL_KEYS, OPTIONAL_KEYS, RoutingTrace, trace_path

NO_EXPERT = 65535
"""What stands for no pick in the ids of a block."""
BLOCK_PICKS = 2**23
"""Most picks in a block."""
BLOCK_ROWS = 65536
"""Most rows in a block."""
MAX_ROW_PICKS = 2**18
"""Most picks in a row."""


class Block(NamedTuple):
    """Rows ``start``.. of a trace: all of its sequences ``first``..``last`` - 1, or a piece of one.

    ids : uint16 [n, L, k], 65535 where a pick is unassigned
    weights : float32 [n, L, k], or None where the trace has none or nobody asked for them
    """

    start: int
    first: int
    last: int
    ids: NDArray[np.uint16]
    weights: NDArray[np.float32] | None


@dataclass(frozen=True, eq=False, repr=False)
class TraceFile:
    """A checked trace whose rows are read when they are asked for; what else there is of it is in memory.

    ``sequence_offsets`` [S + 1], ``prompt_len`` [S], ``layer_index`` [L], ``num_experts``, ``metadata`` and ``labels``
    are as in :class:`RoutingTrace`. Made by :func:`open_trace`.
    """

    sequence_offsets: NDArray[np.int64]
    prompt_len: NDArray[np.int64]
    layer_index: NDArray[np.int64]
    num_experts: int
    top_k: int
    has_weights: bool
    metadata: dict[str, Any]
    labels: tuple[str, ...] | None
    _source: "RoutingTrace | Path"
    _stamp: tuple[int, int] | None

    def __repr__(self) -> str:
        model, source = self.metadata["model"], self.metadata["source"]
        return (
            f"TraceFile({model}, {source}: {self.num_sequences} sequences, {self.num_tokens} tokens, "
            f"{self.num_layers} layers, top-{self.top_k} of {self.num_experts} experts)"
        )

    @property
    def num_tokens(self) -> int:
        """Rows of all sequences together, T."""
        return int(self.sequence_offsets[-1])

    @property
    def num_layers(self) -> int:
        """MoE layers recorded, L."""
        return len(self.layer_index)

    @property
    def num_sequences(self) -> int:
        """Sequences, S."""
        return len(self.prompt_len)

    @property
    def sequence_lengths(self) -> NDArray[np.int64]:
        """Rows of each sequence [S]."""
        return np.diff(self.sequence_offsets)

    @property
    def block_rows(self) -> int:
        """Most rows in a block; a longer sequence is cut after every so many of its rows."""
        return max(1, min(BLOCK_ROWS, BLOCK_PICKS // (self.num_layers * self.top_k)))

    def blocks(self, *, weights: bool = False) -> Iterator[Block]:
        """All rows, block by block, each once and in their order.

        Raises :class:`TraceError` if the file was changed since it was opened, or cannot be read any more.
        """
        if isinstance(self._source, RoutingTrace):
            for start, stop, first, last in self._plan():
                yield _slice(self._source, start, stop, first, last, weights)
            return
        if _stamp(self._source) != self._stamp:
            raise TraceError(f"{one_line(self._source)}: was changed while it was being read")
        wanted = ("topk_ids", "topk_weights") if weights and self.has_weights else ("topk_ids",)
        with array_streams(self._source, wanted) as streams:
            for start, stop, first, last in self._plan():
                try:
                    yield self._read(streams, start, stop, first, last)
                except TraceError as error:
                    raise _named(self._source, error) from error
            for one in streams.values():
                one.finish()

    def _plan(self) -> Iterator[tuple[int, int, int, int]]:
        """First row, last row + 1, first sequence, last sequence + 1 of each block."""
        rows, bounds = self.block_rows, self.sequence_offsets
        first = 0
        while first < self.num_sequences:
            start = int(bounds[first])
            last = int(np.searchsorted(bounds, start + rows, side="right")) - 1
            if last > first:
                yield start, int(bounds[last]), first, last
                first = last
                continue
            stop = int(bounds[first + 1])
            for cut in range(start, stop, rows):
                yield cut, min(cut + rows, stop), first, first + 1
            first += 1

    def _read(self, streams: Mapping[str, ArrayStream], start: int, stop: int, first: int, last: int) -> Block:
        shape = (stop - start, self.num_layers, self.top_k)
        size = shape[0] * shape[1] * shape[2]
        raw = as_integers("topk_ids", streams["topk_ids"].take(size).reshape(shape), 3)
        kept = checked_ids(raw, self.num_experts, self.layer_index, start)
        weights = None
        if "topk_weights" in streams:
            weights = checked_weights(streams["topk_weights"].take(size).reshape(shape), kept, start)
        return Block(start, first, last, _wide(kept), weights)


def open_trace(source: "str | Path | RoutingTrace | TraceFile", *, report: Report | None = None) -> TraceFile:
    """Open a trace to be read block by block, and check every row of it once.

    Parameters
    ----------
    source : the path of an ``.npz`` file or the name of a bundled trace, as :meth:`RoutingTrace.load` takes them, or a
        trace in memory. Only canonical files in C order, compressed or stored, are read block by block; any other
        recording that :meth:`RoutingTrace.load` knows is loaded whole.
    report : called with the rows checked and all of them, where a file is read block by block

    Raises :class:`TraceError` for everything that :meth:`RoutingTrace.load` refuses; a file may be larger, though.
    """
    check_report("report", report)
    if isinstance(source, TraceFile):
        return source
    if isinstance(source, RoutingTrace):
        return _of_trace(source)
    path = trace_path(source)
    try:
        opened = _of_file(path)
    except TraceError as error:
        raise _named(path, error) from error
    if opened is None:
        return _of_trace(RoutingTrace.load(path))
    for block in opened.blocks(weights=True):  # which checks every row
        if report is not None:
            report(block.start + len(block.ids), opened.num_tokens)
    return opened


def _of_trace(trace: RoutingTrace) -> TraceFile:
    return TraceFile(
        sequence_offsets=trace.sequence_offsets,
        prompt_len=trace.prompt_len,
        layer_index=trace.layer_index,
        num_experts=trace.num_experts,
        top_k=trace.top_k,
        has_weights=trace.topk_weights is not None,
        metadata=trace.metadata,
        labels=trace.labels,
        _source=trace,
        _stamp=None,
    )


def _of_file(path: str | Path) -> TraceFile | None:
    """What is small of a canonical file in C order that is larger than a block, else None."""
    with array_streams(path, (*sorted(CANONICAL_KEYS), *sorted(OPTIONAL_KEYS))) as streams:
        if not set(streams) >= CANONICAL_KEYS or any(
            one.fortran_order and len(one.shape) > 1 for one in streams.values()
        ):
            return None
        stamp = _stamp(path)
        tokens, layers, top_k = _shape_of_rows(streams)
        if tokens * layers * top_k <= BLOCK_PICKS:
            return None
        arrays = _small(streams, tokens, layers)
    if arrays["num_experts"].shape != ():
        raise TraceError(f"num_experts has shape {arrays['num_experts'].shape}, expected a single number")
    layer_index = checked_layers(arrays["layer_index"], layers)
    offsets, prompts = checked_sequences(arrays["sequence_offsets"], arrays["prompt_len"], tokens)
    labels = arrays.get("labels", arrays.get("domain"))
    for array in (offsets, prompts, layer_index):
        array.flags.writeable = False
    return TraceFile(
        sequence_offsets=offsets,
        prompt_len=prompts,
        layer_index=layer_index,
        num_experts=as_count("num_experts", arrays["num_experts"][()], top_k, MAX_EXPERTS),
        top_k=top_k,
        has_weights="topk_weights" in streams,
        metadata=checked_metadata(stored_metadata(arrays["metadata"])),
        labels=checked_labels(None if labels is None else as_texts("labels", labels, 1), len(prompts)),
        _source=Path(path),
        _stamp=stamp,
    )


def _shape_of_rows(streams: Mapping[str, ArrayStream]) -> tuple[int, int, int]:
    """Tokens, layers and picks that the headers declare."""
    ids = streams["topk_ids"]
    # An array of the same kind that takes no room, so that complaints are those about a trace in memory.
    as_integers("topk_ids", np.broadcast_to(np.zeros((), ids.dtype), ids.shape), 3)
    if 0 in ids.shape:
        raise TraceError(f"topk_ids has shape {ids.shape}, expected at least one token, layer and pick")
    tokens, layers, top_k = ids.shape
    if layers * top_k > MAX_ROW_PICKS:
        raise TraceError(f"topk_ids has shape {ids.shape}, expected at most {MAX_ROW_PICKS} picks of a token")
    weights = streams.get("topk_weights")
    if weights is not None and weights.dtype.kind != "f":
        raise TraceError(f"topk_weights has dtype {weights.dtype}, expected floating point numbers")
    if weights is not None and weights.shape != ids.shape:
        raise TraceError(f"topk_weights has shape {weights.shape}, topk_ids has {ids.shape}")
    return tokens, layers, top_k


def _small(streams: Mapping[str, ArrayStream], tokens: int, layers: int) -> dict[str, NDArray[Any]]:
    """The arrays that are kept in memory, once it is certain that they are small."""
    longest = {"layer_index": layers, "num_experts": 1, "metadata": 1}
    arrays = {}
    for name, one in streams.items():
        if name in ("topk_ids", "topk_weights"):
            continue
        size, most = math.prod(one.shape), longest.get(name, tokens + 1)
        if size > most or size * one.dtype.itemsize > MAX_BYTES // 8:
            raise TraceError(f"{name} has dtype {one.dtype} and shape {one.shape}, too large for {tokens} tokens")
        arrays[name] = one.take(size).reshape(one.shape)
        one.finish()
    return arrays


def _stamp(path: str | Path) -> tuple[int, int]:
    """Changes when the file does."""
    try:
        status = Path(path).stat()
    except OSError as error:
        raise TraceError(f"{one_line(path)}: cannot be read any more ({error.strerror})") from error
    return status.st_size, status.st_mtime_ns


def _named(path: str | Path, error: TraceError) -> TraceError:
    text, name = str(error), one_line(path)
    return error if text.startswith(name) else TraceError(f"{name}: {text}")


def _slice(trace: RoutingTrace, start: int, stop: int, first: int, last: int, weights: bool) -> Block:
    return Block(
        start,
        first,
        last,
        _wide(trace.topk_ids[start:stop]),
        trace.topk_weights[start:stop] if weights and trace.topk_weights is not None else None,
    )


def _wide(ids: NDArray[np.unsignedinteger[Any]]) -> NDArray[np.uint16]:
    """The ids in two bytes each."""
    if ids.dtype == np.uint16:
        return ids
    wide = ids.astype(np.uint16)
    wide[ids == np.iinfo(ids.dtype).max] = NO_EXPERT
    return wide
