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
from perfmodel.routing.importers.files import brief
from perfmodel.routing.importers.probe import Probe
from perfmodel.routing.importers.pt import read_nested
from perfmodel.routing.npz import one_line

#: Names that arrays of requests are recognised by: of an array alone, of ``numpy.savez``, and of the field itself.
_NAMES = re.compile(r"|arr_[0-9]+|routed_experts\w*")
#: More layers, picks and experts than a model has; ids of words and pixels are often beyond.
_MOST_LAYERS, _MOST_PICKS, _MOST_EXPERTS = 1024, 128, 8192
#: What may stand beside the picks of a request.
_PROMPTS = ("prompt_len", "prompt_token_ids")


def recognise(probe: Probe) -> str | None:
    """Requests by their keys; arrays by integers whose last axis holds no expert twice, but for fillers."""
    if probe.kind in ("json", "pt") and not probe.shapes:
        requests = probe.document if isinstance(probe.document, list) else [probe.document]
        first = requests[0] if requests else None
        held = isinstance(first, Mapping) and "routed_experts" in first
        return "holds requests with routed_experts" if held else None
    if probe.kind in ("npz", "pt") and "routed_experts" in probe.shapes:
        return "holds a request with routed_experts"
    arrays = _arrays(probe)
    if not arrays or any(len(shape) != 3 or dtype.kind not in "iu" for shape, dtype in arrays.values()):
        return None
    if any(_wrong(probe.array(name)) for name in arrays):
        return None
    return "holds integers [tokens, layers, picks] in which no token picks an expert twice"


def nearly(probe: Probe) -> str | None:
    """What is wrong with integers of two or three axes."""
    for name, (shape, dtype) in _arrays(probe).items():
        where = f"{name}: " if name else ""
        if len(shape) == 2 and dtype.kind in "iu" and 2 <= shape[1] <= _MOST_PICKS:
            return f"{where}has shape {shape}, expected [tokens, layers, picks]; of one layer, array[:, None] has these"
        if len(shape) != 3 or shape[2] > _MOST_PICKS or dtype.kind not in "iuf":
            return None
        ids = probe.array(name)
        if dtype.kind == "f":
            whole = bool((ids == np.floor(ids)).all()) and _wrong(ids) is None
            return f"{where}has dtype {dtype}, expected integers" if whole else None
        wrong = _wrong(ids)
        if wrong:
            return f"{where}{wrong}"
    return None


def _arrays(probe: Probe) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]]]:
    """Shapes and types of arrays whose names a recording may have; none of a file that holds others too."""
    if probe.kind not in ("npy", "npz", "pt"):
        return {}
    found = {name: one for name, one in probe.shapes.items() if name not in _PROMPTS}
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
        ids, lengths = _requests(path)
        sequences += ids
        prompts += lengths
    where = one_line(files[0]) if len(files) == 1 else f"{one_line(files[0])} and {len(files) - 1} more"
    return trace_of(sequences, prompts, options, where, described(FORMAT.name, files, options))


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
            raise TraceError(f"{name}: prompt_len is {brief(prompts)}, expected {len(arrays)} integers")
        return arrays, [int(n) for n in lengths]
    requests = found if isinstance(found, list) else [found]
    if not requests:
        raise TraceError(f"{name}: holds no requests")
    pairs = [_request(one, f"{name}: request {i}") for i, one in enumerate(requests)]
    return [ids for ids, _ in pairs], [prompt for _, prompt in pairs]


def _request(one: Any, where: str) -> tuple[NDArray[Any], int | None]:
    if not isinstance(one, Mapping) or one.get("routed_experts") is None:
        raise TraceError(f"{where} is {brief(one)}, expected an object with routed_experts")
    try:
        ids = np.asarray(one["routed_experts"])
    except (ValueError, OverflowError) as error:
        raise TraceError(f"{where}: routed_experts is no array ({one_line(error)})") from None
    if "prompt_token_ids" in one:
        tokens = one["prompt_token_ids"]
        if not isinstance(tokens, list | np.ndarray):
            raise TraceError(f"{where}: prompt_token_ids is {brief(tokens)}, expected a list")
        return ids, len(tokens)
    if "prompt_len" in one:
        prompt = one["prompt_len"]
        if isinstance(prompt, np.ndarray):
            if prompt.size != 1:
                raise TraceError(f"{where}: prompt_len is {brief(prompt)}, expected an integer >= 0")
            prompt = prompt.item()
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
    files=(
        "a .npy a request; or an .npz with routed_experts_0, routed_experts_1, ... (or arr_0, ...) and "
        "perhaps prompt_len [requests]; or .json, .pt: a list of objects with routed_experts and "
        "prompt_token_ids or prompt_len"
    ),
    recognise=recognise,
    read=read,
    nearly=nearly,
)
