"""The row-phase layout: one row a token, with a sequence number and a phase beside it.

Arrays: ``topk_ids`` [T, L, k], ``seq_id`` [T], ``phase`` [T] (0 prompt, 1 answer, 2 unknown),
``layer_index`` [L], and optionally ``topk_weights`` [T, L, k]. Neither the number of experts nor the model is
stored.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfmodel.errors import TraceError
from perfmodel.routing.checks import as_integers
from perfmodel.routing.importers.base import Format, Imported, ImportOptions
from perfmodel.routing.importers.canonical import only
from perfmodel.routing.importers.probe import Probe
from perfmodel.routing.npz import npz_keys, one_line, read_npz
from perfmodel.routing.trace import UNNAMED, RoutingTrace

ROW_PHASE_KEYS = frozenset({"topk_ids", "seq_id", "phase", "layer_index"})
PROMPT, ANSWER, UNKNOWN = 0, 1, 2


def from_row_phase(path: str | Path, *, num_experts: int | None = None, model: str | None = None) -> RoutingTrace:
    """Load a recording in the row-phase layout.

    Parameters
    ----------
    path : path of the ``.npz`` file
    num_experts : routed experts a layer; by default the largest id found plus one, which is a lower bound and
        is marked ``num_experts_inferred`` in the metadata (see :meth:`RoutingTrace.with_num_experts`)
    model : name of the recorded model; by default "an unknown model"

    Sequences with rows of unknown phase are left out and counted in ``metadata["left_out"]``.
    Raises :class:`TraceError` if a sequence is split in two, if its phases go back from answer to prompt, if
    no sequence is left, and for everything that :class:`RoutingTrace` refuses.
    """
    missing = ROW_PHASE_KEYS - set(npz_keys(path))
    if missing:
        raise TraceError(f"{one_line(path)}: the row-phase layout also needs {', '.join(sorted(missing))}")
    arrays = read_npz(path, (*ROW_PHASE_KEYS, "topk_weights"))
    try:
        return _convert(
            arrays,
            num_experts,
            {
                "model": model or UNNAMED,
                "how": f"imported from {Path(path).name}; the file names no source, taken as a recording",
            },
        )
    except TraceError as error:
        raise TraceError(f"{one_line(path)}: {error}") from error


def _convert(arrays: dict[str, NDArray[Any]], num_experts: int | None, metadata: dict[str, Any]) -> RoutingTrace:
    ids = as_integers("topk_ids", arrays["topk_ids"], 3)
    phase = as_integers("phase", arrays["phase"], 1)
    seq_id = as_integers("seq_id", arrays["seq_id"], 1)
    weights = arrays.get("topk_weights")
    tokens = len(ids)
    if tokens == 0:
        raise TraceError("topk_ids holds no tokens")
    for name, rows in (("seq_id", seq_id), ("phase", phase), ("topk_weights", weights)):
        if rows is not None and rows.shape[:1] != (tokens,):
            raise TraceError(f"{name} has shape {rows.shape}, expected one row for each of {tokens} tokens")
    strange = phase[~np.isin(phase, (PROMPT, ANSWER, UNKNOWN))]
    if len(strange):
        raise TraceError(f"phase holds {strange[0]}, allowed are 0 (prompt), 1 (answer) and 2 (unknown)")

    new_sequence = np.append(True, seq_id[1:] != seq_id[:-1])
    starts = np.flatnonzero(new_sequence)
    names, uses = np.unique(seq_id[starts], return_counts=True)
    if (uses > 1).any():
        raise TraceError(f"seq_id {names[uses > 1][0]} returns after another sequence; rows must be contiguous")
    sequence = np.cumsum(new_sequence) - 1
    keep = np.bincount(sequence, weights=phase == UNKNOWN) == 0
    if not keep.any():
        raise TraceError("every sequence has rows of unknown phase; nothing is left")
    backwards = np.flatnonzero((phase[1:] < phase[:-1]) & ~new_sequence[1:] & keep[sequence[1:]])
    if len(backwards):
        row = int(backwards[0]) + 1
        raise TraceError(f"phase goes back from answer to prompt at row {row} (seq_id {seq_id[row]})")

    rows = keep[sequence]
    lengths = np.diff(np.append(starts, tokens))[keep]
    prompts = np.bincount(sequence, weights=phase == PROMPT)[keep].astype(np.int64)
    metadata = {**metadata, "source": "recorded", "left_out": int((~keep).sum())}
    if num_experts is None:
        num_experts = _fewest_experts(ids)
        metadata["num_experts_inferred"] = True
    return RoutingTrace(
        topk_ids=ids[rows],
        topk_weights=None if weights is None else weights[rows],
        sequence_offsets=np.append(0, np.cumsum(lengths)),
        prompt_len=prompts,
        layer_index=arrays["layer_index"],
        num_experts=num_experts,
        metadata=metadata,
    )


def _fewest_experts(ids: NDArray[Any]) -> int:
    assigned = ids[ids != np.iinfo(ids.dtype).max] if ids.dtype.kind == "u" else ids
    largest = int(assigned.max()) if assigned.size else -1
    return max(largest + 1, int(ids.shape[2]))


def recognise(probe: Probe) -> str | None:
    """Every array that the layout needs is there."""
    return "holds topk_ids, seq_id, phase and layer_index" if set(probe.shapes) >= ROW_PHASE_KEYS else None


def read(files: Sequence[Path], options: ImportOptions) -> Imported:
    """One file."""
    trace = from_row_phase(only(files), num_experts=options.num_experts, model=options.model)
    return Imported(trace.with_metadata(import_format=FORMAT.name))


FORMAT = Format(
    name="row-phase",
    summary=".npz with one row a token, and sequence number and phase (0 prompt, 1 answer, 2 unknown) beside it",
    gives="trace",
    takes=frozenset({"num_experts"}),
    files=("topk_ids [tokens, layers, k], seq_id [tokens], phase [tokens], layer_index [layers], perhaps topk_weights"),
    recognise=recognise,
    read=read,
)
