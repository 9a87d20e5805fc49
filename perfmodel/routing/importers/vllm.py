"""The arrays ``routed_experts`` that vLLM returns with ``enable_return_routed_experts``.

One integer array [tokens, layers, k] a request, experts as the model numbers them. The layer axis counts every layer of
the model, and layers without experts hold zeros. Prompt and output are not told apart, and the last token that was
sampled has no row. Files: a ``.npy`` a request; an ``.npz`` with an array a request and perhaps ``prompt_len``; or JSON
(of all, or one a line) or ``.pt`` of requests with ``routed_experts``, their own or that of their ``outputs``, and
``prompt_token_ids`` or ``prompt_len``. A batch [requests, tokens, layers, k] needs the rows of each request.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from perfmodel.errors import TraceError
from perfmodel.routing.importers.base import Format, Imported, ImportOptions, described
from perfmodel.routing.importers.captured import trace_of
from perfmodel.routing.importers.looks import why_not_picks
from perfmodel.routing.importers.probe import Probe
from perfmodel.routing.importers.pt import read_nested
from perfmodel.routing.importers.vllm_requests import (
    holds_ids,
    is_prompt,
    read_documents,
    requests_of,
    requests_of_arrays,
    split,
)
from perfmodel.routing.npz import one_line

IDS = "routed_experts"
#: Names that arrays of requests are recognised by: of an array alone, of ``numpy.savez``, and of the field itself.
_REQUEST = re.compile(rf"{IDS}(_[0-9]{{1,9}})?")
_NAMES = re.compile(r"|arr_[0-9]+|routed_experts\w*")
#: More layers, picks and experts than a model has; ids of words and pixels are often beyond.
_MOST_LAYERS, _MOST_PICKS, _MOST_EXPERTS = 1024, 128, 8192


def recognise(probe: Probe) -> str | None:
    """Requests by their keys; arrays by their names, or by traits that recordings of picks have."""
    if probe.kind == "jsonl" or (probe.kind in ("json", "pt") and not probe.shapes):
        found = probe.first if probe.kind == "jsonl" else probe.document
        requests = found if isinstance(found, list) else [found]
        held = isinstance(requests[0], Mapping) and holds_ids(requests[0]) if requests else False
        return "holds requests with routed_experts" if held else None
    if probe.kind in ("npz", "pt") and any(map(_REQUEST.fullmatch, probe.shapes)):
        return "holds requests with routed_experts"
    arrays = _arrays(probe)
    if not arrays or any(len(shape) != 3 or dtype.kind not in "iu" for shape, dtype in arrays.values()):
        return None
    for name in arrays:
        ids = probe.array(name)
        if _wrong(ids) or (not name.startswith(IDS) and why_not_picks(ids)):
            return None
    return "holds integers [tokens, layers, picks] in which no token picks an expert twice"


def nearly(probe: Probe) -> str | None:
    """What is wrong with integers of two to four axes, or what keeps them from being told from others."""
    for name, (shape, dtype) in _arrays(probe).items():
        where = f"{name}: " if name else ""
        if len(shape) == 2 and dtype.kind in "iu" and 2 <= shape[1] <= _MOST_PICKS:
            return f"{where}has shape {shape}, expected [tokens, layers, picks]; of one layer, array[:, None] has these"
        if len(shape) == 4 and dtype.kind in "iu" and shape[3] <= _MOST_PICKS:
            return (
                f"{where}has shape {shape}; a batch needs the format vllm and --sequence-len, the rows of each request"
            )
        if len(shape) != 3 or shape[2] > _MOST_PICKS or dtype.kind not in "iuf":
            return None
        ids = probe.array(name)
        if dtype.kind == "f":
            whole = bool((ids == np.floor(ids)).all()) and _wrong(ids) is None
            return f"{where}has dtype {dtype}, expected integers" if whole else None
        wrong = _wrong(ids)
        if wrong:
            return f"{where}{wrong}"
        unlike = None if name.startswith(IDS) else why_not_picks(ids)
        if unlike:
            return f"{where}{unlike}; if it is a recording all the same, name the format vllm"
    return None


def _arrays(probe: Probe) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]]]:
    """Shapes and types of arrays whose names a recording may have; none of a file that holds others too."""
    if probe.kind not in ("npy", "npz", "pt"):
        return {}
    found = {name: one for name, one in probe.shapes.items() if not is_prompt(name)}
    fits = all(map(_NAMES.fullmatch, found)) and not any(0 in shape for shape, _ in found.values())
    return found if fits else {}


def _wrong(ids: NDArray[Any]) -> str | None:
    """Why numbers [tokens, layers, picks] are no picks, looking at the first quarter of a million."""
    _, layers, picks = ids.shape
    if picks > _MOST_PICKS or layers > _MOST_LAYERS:
        return f"has {layers} layers of {picks} picks; allowed: at most {_MOST_LAYERS} and {_MOST_PICKS}"
    if ids.max() >= _MOST_EXPERTS or ids.min() < -1:
        return f"holds {ids.min()} to {ids.max()}, expected experts, or -1"
    ordered = np.sort(ids[: 2**18 // max(1, layers * picks) + 1], axis=2)
    filler = (ordered == 0).all(axis=2) | (ordered < 0).all(axis=2)
    if filler.all():
        return "holds the filler 0 or -1 throughout"
    twice = ((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)).any(axis=2) & ~filler
    if not twice.any():
        return None
    token, layer = (int(i) for i in np.argwhere(twice)[0])
    chosen, times = np.unique(ordered[token, layer], return_counts=True)
    return f"token {token}, layer row {layer} picks expert {chosen[times > 1][-1]} twice"


def read(files: Sequence[Path], options: ImportOptions) -> Imported:
    """Every array of every file is a sequence, in the order of the files and of what they hold."""
    sequences: list[Any] = []
    prompts: list[int | None] = []
    for path in files:
        ids, lengths = _requests(path, options)
        sequences += ids
        prompts += lengths
    where = one_line(files[0]) if len(files) == 1 else f"{one_line(files[0])} and {len(files) - 1} more"
    return trace_of(sequences, prompts, options, where, described(FORMAT.name, files, options))


def _requests(path: Path, options: ImportOptions) -> tuple[list[Any], list[int | None]]:
    """Ids and prompt lengths of the requests in one file; None where a length is not said."""
    name = one_line(path)
    found = read_documents(path) if Probe.of(path).kind == "jsonl" else read_nested(path)
    if isinstance(found, np.ndarray):
        arrays = split(found, options, name)
        return arrays, [None] * len(arrays)
    if isinstance(found, list) and found and all(isinstance(one, np.ndarray) for one in found):
        return found, [None] * len(found)
    if isinstance(found, Mapping) and not holds_ids(found):
        return requests_of_arrays(found, options, name)
    requests = found if isinstance(found, list) else [found]
    if not requests:
        raise TraceError(f"{name}: holds no requests")
    if len(requests) == 1 and isinstance(requests[0], Mapping) and getattr(requests[0].get(IDS), "ndim", 0) == 4:
        return requests_of_arrays(requests[0], options, name)
    pairs = [pair for i, one in enumerate(requests) for pair in requests_of(one, f"{name}: request {i}")]
    return [ids for ids, _ in pairs], [prompt for _, prompt in pairs]


def from_arrays(arrays: ArrayLike | Sequence[ArrayLike], options: ImportOptions) -> Imported:
    """Arrays, tensors or nested lists in memory: one [tokens, layers, k], a list of such, or a batch of four axes.

    Prompts are as long as ``options.prompt_len`` says, and requests of a batch as ``options.sequence_len`` does.
    """
    metadata = {**described(FORMAT.name, [], options), "how": "made from arrays in memory (vllm)"}
    several = isinstance(arrays, list | tuple) and len(arrays) > 0 and all(_axes(one) == 3 for one in arrays)
    parts: Sequence[ArrayLike] = arrays if several else split(arrays, options, "routed_experts")  # type: ignore[assignment]
    return trace_of(parts, None, options, "routed_experts", metadata)


def _axes(value: Any) -> int:
    """Axes of an array, or of lists within lists, by the first of each."""
    axes = 0
    while isinstance(value, list | tuple) and value and axes < 8:
        value, axes = value[0], axes + 1
    found = getattr(value, "ndim", 0)
    return axes + (found if isinstance(found, int) else 0)


FORMAT = Format(
    name="vllm",
    summary="vLLM routed_experts arrays [tokens, layers, k], one a request (.npy, .npz, .json or .pt); ids only",
    gives="trace",
    takes=frozenset({"num_experts", "prompt_len", "sequence_len", "layers"}),
    files=(
        "a .npy a request; or an .npz with routed_experts_0, routed_experts_1, ... (or arr_0, ...) and "
        "perhaps prompt_len [requests], or prompt_token_ids_0, ...; or .json, .jsonl, .pt: objects with "
        "routed_experts (or outputs with it) and prompt_token_ids or prompt_len"
    ),
    recognise=recognise,
    read=read,
    nearly=nearly,
)
