"""Responses of SGLang and SGL-JAX servers that were asked to ``return_routed_experts``.

``meta_info["routed_experts"]`` is base64 of little-endian int32 [tokens, layers, k], -1 where a layer has no experts.
Neither layers nor k are said: the model's config or the user says them. ``prompt_tokens`` and ``completion_tokens``
beside it give the phases; the last sampled token may lack its row.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfmodel.errors import TraceError
from perfmodel.routing.importers.base import Format, Imported, ImportOptions, described
from perfmodel.routing.importers.captured import trace_of
from perfmodel.routing.importers.files import (
    LARGEST_JSON,
    brief,
    decode_base64,
    entry,
    parse_json,
    read_json,
    read_lines,
    table,
    whole,
)
from perfmodel.routing.importers.probe import Probe
from perfmodel.routing.npz import one_line


def recognise(probe: Probe) -> str | None:
    """A response, a list of them, or one a line, with base64 text under ``routed_experts``."""
    if probe.kind == "jsonl":
        found: Any = [probe.first]
        if not _holds_text(probe.first):
            # Some other line may hold it: the reader then says which response has none.
            found += [one for _, text in read_lines(probe.path, longest=LARGEST_JSON) if (one := _document(text))]
    else:
        found = probe.document if probe.kind == "json" else None
    every = found if isinstance(found, list) else [found]
    if any(map(_holds_text, every)):
        return "holds responses with base64 text in meta_info.routed_experts"
    return None


def _document(text: str) -> Any:
    """A line as a document, where it may be a response with picks; otherwise None."""
    return parse_json(text, "a line") if '"meta_info"' in text and '"routed_experts"' in text else None


def _holds_text(response: Any) -> bool:
    info = response.get("meta_info") if isinstance(response, Mapping) else None
    return isinstance(info, Mapping) and isinstance(info.get("routed_experts"), str)


def read(files: Sequence[Path], options: ImportOptions) -> Imported:
    """Every response of every file is a sequence."""
    responses = [pair for path in files for pair in _responses(path)]
    where = one_line(files[0])
    texts = [(info.get("routed_experts"), place) for info, place in responses]
    prompts = [_tokens(info, "prompt_tokens", place) for info, place in responses]
    outputs = [_tokens(info, "completion_tokens", place) for info, place in responses]
    totals = [None if None in pair else sum(pair) for pair in zip(prompts, outputs, strict=True)]  # type: ignore[arg-type]
    return _trace(texts, prompts, totals, options, where, described(FORMAT.name, files, options))


def from_texts(texts: Sequence[str], options: ImportOptions) -> Imported:
    """Base64 texts that are in memory, one a sequence; prompts as ``options.prompt_len`` says."""
    if not isinstance(texts, list | tuple) or not texts:
        raise TraceError(f"routed_experts is {brief(texts)}, expected a list of base64 texts")
    metadata = {**described(FORMAT.name, [], options), "how": "made from base64 texts in memory (sglang-response)"}
    every = [(text, f"text {s}") for s, text in enumerate(texts)]
    return _trace(every, [None] * len(every), [None] * len(every), options, "routed_experts", metadata)


def _responses(path: Path) -> list[tuple[Mapping[str, Any], str]]:
    """``meta_info`` of every response in a file, and where it stands."""
    name = one_line(path)
    if Probe.of(path).kind == "jsonl":
        lines = read_lines(path, longest=LARGEST_JSON)
        found = [(parse_json(text, f"{name}: line {n}"), f"{name}: line {n}") for n, text in lines if text.strip()]
    else:
        document = read_json(path)
        several = document if isinstance(document, list) else [document]
        found = [(one, f"{name}: response {i}") for i, one in enumerate(several)]
    if not found:
        raise TraceError(f"{name}: holds no responses")
    return [(table(entry(table(one, where), "meta_info", where), f"{where}: meta_info"), where) for one, where in found]


def _tokens(info: Mapping[str, Any], key: str, where: str) -> int | None:
    return whole(info[key], f"{where}: {key}") if key in info else None


def _trace(
    texts: Sequence[tuple[Any, str]],
    prompts: Sequence[int | None],
    totals: Sequence[int | None],
    options: ImportOptions,
    where: str,
    metadata: dict[str, Any],
) -> Imported:
    flat = [np.frombuffer(decode_base64(text, f"{place}: routed_experts", item=4), "<i4") for text, place in texts]
    top_k, layers, experts = _sizes(flat, totals, options, where)
    sequences = []
    for (_, place), ids, total in zip(texts, flat, totals, strict=True):
        if len(ids) % (layers * top_k):
            raise TraceError(f"{place}: routed_experts has {len(ids)} picks, no multiple of {layers} x {top_k}")
        rows = ids.reshape(-1, layers, top_k)
        if total is not None and len(rows) not in (total - 1, total):
            raise TraceError(
                f"{place}: routed_experts has rows of {len(rows)} tokens for a request of {total} tokens; "
                f"expected {total - 1} or {total} (are layers, {layers}, and picks, {top_k}, right?)"
            )
        sequences.append(rows)
    stated = [None if p is None else min(p, len(ids)) for p, ids in zip(prompts, sequences, strict=True)]
    return trace_of(sequences, stated, options, where, metadata, num_experts=experts)


def _sizes(
    flat: Sequence[NDArray[np.int32]], totals: Sequence[int | None], options: ImportOptions, where: str
) -> tuple[int, int, int | None]:
    """Picks of a token, layers, and experts where known: from the config, from the user, or from the tokens' number."""
    top_k, layers, experts = options.top_k, None if options.layers is None else len(options.layers), None
    if options.config is not None:
        from perfmodel.model import MoEModel  # imported here, because it brings pydantic

        model = MoEModel.from_config(str(options.config))
        top_k, layers, experts = top_k or model.top_k, layers or model.num_layers, model.num_experts
    if top_k is None:
        raise TraceError(f"{where}: does not say how many experts a token picks; --top-k or --config says it")
    if layers is None and totals[0] is not None:
        # The rows are one fewer than the tokens, or as many; only one of them divides well, or the user must say.
        tokens = [n for n in (totals[0] - 1, totals[0]) if n > 0 and len(flat[0]) % (n * top_k) == 0]
        layers = len(flat[0]) // (tokens[0] * top_k) if len(tokens) == 1 else None
    if not layers:
        raise TraceError(f"{where}: does not say how many layers it has; --layers or --config says it")
    return top_k, layers, experts


FORMAT = Format(
    name="sglang-response",
    summary="responses of SGLang or SGL-JAX with return_routed_experts (.json, .jsonl): base64 int32; ids only",
    gives="trace",
    takes=frozenset({"num_experts", "top_k", "prompt_len", "layers", "config"}),
    files=(
        "responses with meta_info of routed_experts, prompt_tokens, completion_tokens: one, a JSON list, or one a line"
    ),
    recognise=recognise,
    read=read,
)
