"""Requests of vLLM as people save them: under which names the picks and the length of the prompt stand."""

import re
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfmodel.errors import TraceError
from perfmodel.routing.checks import as_count
from perfmodel.routing.importers.base import ImportOptions, per_sequence
from perfmodel.routing.importers.files import LARGEST_JSON, brief, parse_json, read_lines
from perfmodel.routing.npz import one_line, shown

IDS, TOKENS = "routed_experts", "prompt_token_ids"
#: Names of the length of the prompt, or of the lengths of all prompts.
LENGTHS = ("prompt_len", "prompt_lens", "prompt_length", "prompt_lengths", "num_prompt_tokens")
_NUMBERED = re.compile(r"(.*?)_?([0-9]{1,9})")
_PROMPT = re.compile(rf"(?:{'|'.join((*LENGTHS, TOKENS))})(?:_[0-9]{{1,9}})?")


def is_prompt(key: str) -> bool:
    """Whether a name is of the prompt of one request, or of all."""
    return _PROMPT.fullmatch(key) is not None


def holds_ids(request: Mapping[Any, Any]) -> bool:
    """Whether an object is a request with picks, its own or those of its outputs."""
    outputs = request.get("outputs")
    first = outputs[0] if isinstance(outputs, list) and outputs else None
    return IDS in request or (isinstance(first, Mapping) and IDS in first)


def read_documents(path: Path) -> list[Any]:
    """The documents of a file of JSON lines."""
    name = one_line(path)
    lines = read_lines(path, longest=LARGEST_JSON)
    return [parse_json(text, f"{name}: line {n}") for n, text in lines if text.strip()]


def requests_of_arrays(
    found: Mapping[str, Any], options: ImportOptions, name: str
) -> tuple[list[Any], list[int | None]]:
    """Ids and prompt lengths of arrays by their names, in the order of the numbers that the names end in.

    ``prompt_len`` is of all requests in that order; ``prompt_len_7`` and ``prompt_token_ids_7`` are of the request
    whose name ends in 7. Names without numbers keep the order of the file.
    """
    keys = _in_order([key for key in found if not is_prompt(key)], name)
    if not keys or not all(isinstance(found[key], np.ndarray) for key in keys):
        raise TraceError(f"{name}: holds {one_line(', '.join(map(str, found)))}; expected routed_experts")
    odd = next((key for key in keys if found[key].ndim < 3), None)
    if odd is not None and (len(keys) > 1 or odd not in ("", "arr_0", IDS)):
        raise TraceError(
            f"{name}: holds {shown(odd)} of shape {found[odd].shape} beside the picks; allowed: picks [tokens, layers, "
            f"picks], and lengths of prompts as prompt_len [requests]"
        )
    arrays: list[Any] = []
    for key in keys:
        arrays += split(found[key], options, f"{name}: {key}") if len(keys) == 1 else [found[key]]
    stated = [key for key in found if is_prompt(key)]
    if not stated:
        return arrays, [None] * len(arrays)
    if len(stated) == 1 and stated[0] in LENGTHS:
        lengths = np.asarray(found[stated[0]]).reshape(-1)
        if lengths.dtype.kind not in "iu" or len(lengths) != len(arrays):
            raise TraceError(f"{name}: {stated[0]} is {brief(found[stated[0]])}, expected {len(arrays)} integers")
        return arrays, [int(n) for n in lengths]
    return arrays, [_length_of(found, key, stated, name) for key in keys]


def _in_order(keys: list[str], name: str) -> list[str]:
    """Names by the numbers that they end in, where all but one name do so alike."""
    numbered = [_NUMBERED.fullmatch(key) for key in keys]
    if len(keys) < 2 or not all(numbered) or len({one[1] for one in numbered if one}) > 1:
        return keys
    numbers = sorted((int(one[2]), one[0]) for one in numbered if one)
    for (low, first), (high, second) in pairwise(numbers):
        if low == high:
            raise TraceError(f"{name}: {first} and {second} are both number {low}; expected each request once")
    return [key for _, key in numbers]


def _length_of(found: Mapping[str, Any], key: str, stated: list[str], name: str) -> int | None:
    """The length of one request's prompt, by the name that ends as its own does; TraceError unless just one is."""
    match = _NUMBERED.fullmatch(key)
    ending = f"_{match[2]}" if match else ""
    own = [one for one in stated if one in {start + ending for start in (*LENGTHS, TOKENS)}]
    if len(own) != 1:
        raise TraceError(
            f"{name}: {key} has {len(own)} lengths of its prompt among {one_line(', '.join(stated[:6]))}; expected "
            f"prompt_len [requests], or one of prompt_len{ending} and {TOKENS}{ending}"
        )
    return _length(own[0], found[own[0]], name)


def _length(key: str, value: Any, where: str) -> int:
    """Prompt tokens by a number of them, or by the tokens themselves."""
    if key.startswith(TOKENS):
        if not isinstance(value, list | np.ndarray) or np.ndim(value) != 1:
            raise TraceError(f"{where}: {key} is {brief(value)}, expected a list")
        return len(value)
    if isinstance(value, np.ndarray):
        if value.size != 1:
            raise TraceError(f"{where}: {key} is {brief(value)}, expected an integer >= 0")
        value = value.item()
    return as_count(f"{where}: {key}", value, 0, None)


def split(array: Any, options: ImportOptions, where: str) -> list[Any]:
    """An array as it is, or the requests of a batch [requests, tokens, layers, k], each without the rows beyond it.

    The rows of each are ``options.sequence_len``, counted from the first; beyond them may only be fillers.
    """
    if getattr(array, "ndim", None) != 4:
        return [array]
    try:
        batch = np.asarray(array)
    except (ValueError, TypeError, OverflowError) as error:
        raise TraceError(f"{where}: is no array ({one_line(error)})") from None
    if options.sequence_len is None:
        raise TraceError(
            f"{where}: has shape {batch.shape}, a batch of {len(batch)} requests; --sequence-len says the rows of each "
            "(its prompt and output), or save an array for each, as array[0, :rows] is"
        )
    rows = per_sequence("--sequence-len", options.sequence_len, len(batch), where).tolist()
    for s, count in enumerate(rows):
        beyond = batch[s, count:]
        if count > batch.shape[1] or (beyond > 0).any():
            raise TraceError(
                f"{where}: --sequence-len is {count} for request {s} of a batch of {batch.shape[1]} rows each; "
                "expected picks in these rows and nothing but fillers beyond them"
            )
    return [batch[s, :count] for s, count in enumerate(rows)]


def requests_of(one: Any, where: str) -> list[tuple[NDArray[Any], int | None]]:
    """Ids and prompt length of one request, or of each of its outputs, whose rows begin with those of the prompt."""
    if not isinstance(one, Mapping) or not holds_ids(one) or (IDS in one and one[IDS] is None):
        raise TraceError(f"{where} is {brief(one)}, expected an object with routed_experts")
    prompt = _prompt(one, where)
    if IDS in one:
        return [(_ids(one[IDS], where), prompt)]
    found = []
    for i, output in enumerate(one["outputs"]):
        place = f"{where}, output {i}"
        if not isinstance(output, Mapping) or output.get(IDS) is None:
            raise TraceError(f"{place} is {brief(output)}, expected an object with routed_experts")
        ids, tokens = _ids(output[IDS], place), output.get("token_ids")
        if (
            prompt is not None
            and isinstance(tokens, list)
            and len(ids) not in (total := prompt + len(tokens), total - 1)
        ):
            raise TraceError(
                f"{place}: routed_experts has rows of {len(ids)} tokens, for {prompt} of the prompt and {len(tokens)} "
                f"of the output; expected {total - 1} or {total}"
            )
        found.append((ids, prompt))
    return found


def _prompt(one: Mapping[str, Any], where: str) -> int | None:
    """Prompt tokens of a request; TraceError where two entries contradict each other."""
    said = {key: _length(key, one[key], where) for key in (TOKENS, *LENGTHS) if one.get(key) is not None}
    if type(count := one.get("prompt_tokens")) is int:  # elsewhere the tokens themselves are called so
        said["prompt_tokens"] = _length("prompt_tokens", count, where)
    if len(set(said.values())) > 1:
        (first, low), (second, high) = list(said.items())[:2]
        raise TraceError(f"{where}: {first} says {low} prompt tokens, {second} says {high}")
    return next(iter(said.values()), None)


def _ids(value: Any, where: str) -> NDArray[Any]:
    try:
        return np.asarray(value)
    except (ValueError, OverflowError) as error:
        raise TraceError(f"{where}: routed_experts is no array ({one_line(error)})") from None
