"""The arrays ``routed_experts`` that vLLM returns with ``enable_return_routed_experts``.

One integer array [tokens, layers, k] a request, experts as the model numbers them. The layer axis counts every layer of
the model, and layers without experts hold zeros. Prompt and output are not told apart, and the last token that was
sampled has no row. Files: a ``.npy`` a request; an ``.npz`` with an array a request and perhaps ``prompt_len``; or JSON
or ``.pt`` of requests with ``routed_experts`` and ``prompt_token_ids`` or ``prompt_len``.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from perfmodel.errors import TraceError
from perfmodel.routing.checks import as_count
from perfmodel.routing.importers.base import Format, Imported, ImportOptions, described
from perfmodel.routing.importers.captured import trace_of
from perfmodel.routing.importers.probe import Probe
from perfmodel.routing.importers.pt import read_nested
from perfmodel.routing.npz import one_line, shown

#: Names that arrays of requests are recognised by: of an array alone, of ``numpy.savez``, and of the field itself.
_NAMES = re.compile(r"|arr_[0-9]+|routed_experts\w*")
#: What may stand beside the picks of a request.
_PROMPTS = ("prompt_len", "prompt_token_ids")


def recognise(probe: Probe) -> str | None:
    """Requests by their keys; arrays by integers whose last axis holds no expert twice, but for fillers."""
    if probe.kind in ("json", "pt") and not probe.shapes:
        requests = probe.document if isinstance(probe.document, list) else [probe.document]
        first = requests[0] if requests else None
        picks = first.get("routed_experts") if isinstance(first, Mapping) else None
        return None if picks is None or isinstance(picks, str) else "holds requests with routed_experts"
    if probe.kind not in ("npy", "npz", "pt"):
        return None
    arrays = {name: one for name, one in probe.shapes.items() if name not in _PROMPTS}
    if not arrays or not all(map(_NAMES.fullmatch, arrays)):
        return None
    if any(len(shape) != 3 or dtype.kind not in "iu" or 0 in shape for shape, dtype in arrays.values()):
        return None
    if not all(_may_be_picks(probe.array(name)) for name in arrays):
        return None
    return "holds integers [tokens, layers, picks] in which no token picks an expert twice"


def _may_be_picks(ids: NDArray[Any]) -> bool:
    ordered = np.sort(ids[: 2**18 // max(1, ids.shape[1] * ids.shape[2]) + 1], axis=2)
    twice = (ordered[..., 1:] == ordered[..., :-1]).any(axis=2)
    filler = (ordered == 0).all(axis=2) | (ordered < 0).all(axis=2)
    return bool(
        (~twice | filler).all() and not filler.all() and ids.max(initial=0) < 2**16 and ids.min(initial=0) >= -1
    )


def read(files: Sequence[Path], options: ImportOptions) -> Imported:
    """Every array of every file is a sequence, in the order of the files and of what they hold."""
    sequences: list[Any] = []
    prompts: list[int | None] = []
    for path in files:
        ids, lengths = _requests(path)
        sequences += ids
        prompts += lengths
    known = [one for one in prompts if one is not None]
    where = one_line(files[0]) if len(files) == 1 else f"{one_line(files[0])} and {len(files) - 1} more"
    said = known if len(known) == len(prompts) else None
    return trace_of(sequences, said, options, where, described(FORMAT.name, files, options))


def _requests(path: Path) -> tuple[list[Any], list[int | None]]:
    """Ids and prompt lengths of the requests in one file; None where a length is not said."""
    name, found = one_line(path), read_nested(path)
    if isinstance(found, np.ndarray):
        return [found], [None]
    if isinstance(found, Mapping) and "routed_experts" not in found:
        prompts = found.get("prompt_len")
        arrays = [value for key, value in found.items() if key != "prompt_len"]
        if not arrays or not all(isinstance(value, np.ndarray) for value in arrays):
            raise TraceError(f"{name}: holds {one_line(', '.join(map(str, found)))}; expected routed_experts")
        if prompts is None:
            return arrays, [None] * len(arrays)
        lengths = np.asarray(prompts).reshape(-1)
        if lengths.dtype.kind not in "iu" or len(lengths) != len(arrays):
            raise TraceError(f"{name}: prompt_len is {shown(prompts)}, expected {len(arrays)} integers")
        return arrays, [int(n) for n in lengths]
    requests = found if isinstance(found, list) else [found]
    if not requests:
        raise TraceError(f"{name}: holds no requests")
    pairs = [_request(one, f"{name}: request {i}") for i, one in enumerate(requests)]
    return [ids for ids, _ in pairs], [prompt for _, prompt in pairs]


def _request(one: Any, where: str) -> tuple[NDArray[Any], int | None]:
    if not isinstance(one, Mapping) or one.get("routed_experts") is None:
        raise TraceError(f"{where} is {shown(one)}, expected an object with routed_experts")
    try:
        ids = np.asarray(one["routed_experts"])
    except (ValueError, OverflowError) as error:
        raise TraceError(f"{where}: routed_experts is no array ({one_line(error)})") from None
    if "prompt_token_ids" in one:
        tokens = one["prompt_token_ids"]
        if not isinstance(tokens, list | np.ndarray):
            raise TraceError(f"{where}: prompt_token_ids is {shown(tokens)}, expected a list")
        return ids, len(tokens)
    if "prompt_len" in one:
        prompt = one["prompt_len"]
        prompt = prompt.item() if isinstance(prompt, np.ndarray) and prompt.size == 1 else prompt
        return ids, as_count(f"{where}: prompt_len", prompt, 0, None)
    return ids, None


def from_arrays(arrays: ArrayLike | Sequence[ArrayLike], options: ImportOptions) -> Imported:
    """Arrays that are in memory: one [tokens, layers, k] or a list of them; prompts as ``options.prompt_len`` says."""
    several = isinstance(arrays, list | tuple) and all(isinstance(one, np.ndarray) for one in arrays)
    metadata = {**described(FORMAT.name, [], options), "how": "made from arrays in memory (vllm)"}
    return trace_of(arrays if several else [arrays], None, options, "routed_experts", metadata)  # type: ignore[list-item,arg-type]


FORMAT = Format(
    name="vllm",
    summary="vLLM routed_experts arrays [tokens, layers, k], one a request (.npy, .npz, .json or .pt); ids only",
    gives="trace",
    takes=frozenset({"num_experts", "prompt_len", "sequence_len", "layers"}),
    recognise=recognise,
    read=read,
)
