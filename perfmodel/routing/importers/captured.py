"""What the arrays [tokens, layers, k] that serving systems return per request have in common.

Their layer axis usually counts every layer of the model. A layer without experts holds a filler, 0 or -1, and so do
tokens whose picks were never written.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from perfmodel.errors import TraceError
from perfmodel.routing.defects import Finding
from perfmodel.routing.importers.base import (
    Imported,
    ImportOptions,
    as_signed,
    layer_numbers,
    number_of_experts,
    per_sequence,
    prompt_lengths,
    sequence_lengths,
)
from perfmodel.routing.npz import one_line
from perfmodel.routing.trace import RoutingTrace


def join(sequences: Sequence[ArrayLike], where: str) -> tuple[NDArray[np.signedinteger[Any]], NDArray[np.int64]]:
    """Ids [T, L, k] of all sequences one after another, and the rows of each; TraceError unless L and k agree."""
    parts = [_picks(ids, f"{where}: sequence {s}") for s, ids in enumerate(sequences)]
    if not parts or any(0 in part.shape for part in parts):
        raise TraceError(f"{where}: holds no picks; expected arrays of [tokens, layers, picks]")
    for s, part in enumerate(parts):
        if part.shape[1:] != parts[0].shape[1:]:
            found = "{} layers and {} picks".format(*part.shape[1:])
            raise TraceError(f"{where}: sequence {s} has {found}, sequence 0 has {parts[0].shape[1:]}")
    ids = parts[0] if len(parts) == 1 else np.concatenate(parts)
    return ids, np.array([len(part) for part in parts], np.int64)


def _picks(ids: ArrayLike, where: str) -> NDArray[np.signedinteger[Any]]:
    found = np.shape(ids) if isinstance(ids, np.ndarray) else ()
    if len(found) == 2:
        raise TraceError(
            f"{where} has shape {found}, expected [tokens, layers, picks]; picks of one layer need an axis for "
            "it, as array[:, None] makes"
        )
    if len(found) == 4:
        raise TraceError(
            f"{where} has shape {found}, expected [tokens, layers, picks]; requests of a batch need an array each, as "
            "array[0, :rows] is"
        )
    return as_signed(where, ids, 3)


def trace_of(
    sequences: Sequence[ArrayLike],
    prompts: Sequence[int | None] | None,
    options: ImportOptions,
    where: str,
    metadata: dict[str, Any],
    *,
    num_experts: int | None = None,
) -> Imported:
    """A trace of captured ids, without the layers and the last rows that hold fillers only.

    Parameters
    ----------
    sequences : integer [T_s, L, k] of each sequence; 0 in every pick, or -1, is a filler
    prompts : prefill rows of each sequence, where the files say, None of each where they do not; what the user said
        may not contradict them
    options : what the user said; ``layers`` numbers every row of the layer axis, by default 0, 1, 2, ...
    where : name of the file, for messages
    metadata : of the trace
    num_experts : routed experts a layer, where the files say
    """
    ids, lengths = join(sequences, where)
    if options.sequence_len is not None:
        lengths = _told_apart(options, lengths, where)
    if options.prompt_len is not None or prompts is None or None in prompts:
        prompts = _said(prompts, prompt_lengths(options, lengths, where), where)
    findings: list[Finding] = []
    numbers = layer_numbers(options, ids.shape[1], where)
    numbers = np.arange(ids.shape[1]) if numbers is None else numbers
    ids, numbers = _moe_layers(ids, numbers, where, findings)
    ids, lengths = _written_rows(ids, lengths, where, findings)
    experts, noted = number_of_experts(options, ids, num_experts)
    try:
        trace = RoutingTrace(
            topk_ids=ids,  # type: ignore[arg-type]  # any integers; the trace keeps them unsigned
            topk_weights=None,
            sequence_offsets=np.append(0, np.cumsum(lengths)),
            prompt_len=np.array(prompts, np.int64),
            layer_index=numbers,
            num_experts=experts,
            metadata={**metadata, **noted},
        )
    except TraceError as error:
        raise TraceError(f"{where}: {error}") from None
    missing = int((ids < 0).all(axis=2).sum()) * ids.shape[2]
    return Imported(trace, tuple(findings), unassigned=missing)


def _told_apart(options: ImportOptions, lengths: NDArray[np.int64], where: str) -> NDArray[np.int64]:
    """Rows of each sequence as the user said; of several arrays each is one, which may not be contradicted."""
    if len(lengths) == 1:
        return sequence_lengths(options, int(lengths[0]), where)
    said = per_sequence("--sequence-len", options.sequence_len or (), len(lengths), where)
    wrong = np.flatnonzero(said != lengths)
    if len(wrong):
        s = int(wrong[0])
        raise TraceError(f"{where}: --sequence-len is {said[s]} for sequence {s}, whose array has {lengths[s]} rows")
    return lengths


def _said(stated: Sequence[int | None] | None, said: NDArray[np.int64], where: str) -> list[int]:
    """What the user said of every prompt; TraceError where the file states another number."""
    if stated is not None and len(stated) == len(said):
        for s, (own, other) in enumerate(zip(stated, said.tolist(), strict=True)):
            if own not in (None, other):
                raise TraceError(f"{where}: says that sequence {s} has {own} prompt rows, --prompt-len says {other}")
    return [int(n) for n in said]


def _fillers(ids: NDArray[np.signedinteger[Any]]) -> NDArray[np.bool_]:
    """Tokens and layers [T, L] without a pick: -1 throughout, or zeros where a real token has several experts."""
    missing = np.asarray((ids < 0).all(axis=2))
    return missing | np.asarray((ids == 0).all(axis=2)) if ids.shape[2] > 1 else missing


def _moe_layers(
    ids: NDArray[np.signedinteger[Any]], numbers: NDArray[np.int64], where: str, findings: list[Finding]
) -> tuple[NDArray[np.signedinteger[Any]], NDArray[np.int64]]:
    """Without the layers that hold no pick of any token. With one pick a token, expert 0 throughout counts as none."""
    filled = np.asarray(_fillers(ids).all(axis=0) | (ids == 0).all(axis=(0, 2)))
    if filled.all():
        raise TraceError(f"{where}: every layer holds the filler 0 or -1 throughout, expected picks of experts")
    if filled.any():
        layers = one_line(", ".join(map(str, numbers[filled])))
        found = f"layers without a pick of any token, as layers without experts are recorded: {layers}"
        findings.append(Finding("padding", found, "leave these layers out", mended=True))
        ids, numbers = ids[:, ~filled], numbers[~filled]
    return ids, numbers


def _written_rows(
    ids: NDArray[np.signedinteger[Any]], lengths: NDArray[np.int64], where: str, findings: list[Finding]
) -> tuple[NDArray[np.signedinteger[Any]], NDArray[np.int64]]:
    """Without the rows at the end of a sequence that hold no pick; earlier ones are kept, with unassigned picks."""
    missing = _fillers(ids)
    empty = np.asarray(missing.all(axis=1))
    if not missing.any():
        return ids, lengths
    starts = np.append(0, np.cumsum(lengths)[:-1])
    kept = [
        length - int(np.argmin(np.append(empty[first : first + length][::-1], False)))
        for first, length in zip(starts, lengths, strict=True)
    ]
    if min(kept) == 0:
        raise TraceError(f"{where}: sequence {kept.index(0)} holds fillers only, expected picks of experts")
    dropped = int(lengths.sum()) - sum(kept)
    if dropped:
        found = f"{dropped} rows at the end of sequences without any pick"
        findings.append(Finding("padding", found, "leave these rows out", mended=True))
    inside = int(missing.sum()) - dropped * ids.shape[1]
    if inside:
        found = f"{inside} tokens of a layer without a pick between others that have them"
        findings.append(Finding("padding", found, "count their picks as unassigned", mended=True))
        ids = np.where(missing[:, :, None], -1, ids)
    rows = np.concatenate([np.arange(first, first + n) for first, n in zip(starts, kept, strict=True)])
    return ids[rows], np.array(kept, np.int64)
