"""RouterTrace version 2: one JSON document with the picks of every token, ``selections[token][layer][rank]``.

It says where the routing comes from (a pinned model that was run, or a generator), not where a sequence or a prompt
ends, nor which layers of the model its layers are. Texts were read in one forward pass, so every row counts as prefill
unless told (github.com/Labeeb2339/stratamoe-lab,
``docs/ROUTER_TRACE_SCHEMA.md``). Version 1 does not say whether a model was run, and is refused.
"""

import re
from collections.abc import Mapping, Sequence
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
    described,
    layer_numbers,
    one_pass,
    sequence_lengths,
)
from perfmodel.routing.importers.canonical import only
from perfmodel.routing.importers.files import brief, entry, read_json, table, whole
from perfmodel.routing.importers.probe import Probe
from perfmodel.routing.npz import one_line
from perfmodel.routing.trace import RoutingTrace

_KEYS = frozenset({"version", "selections", "expertsPerLayer", "topK"})
_PIN = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


def recognise(probe: Probe) -> str | None:
    """An object with selections, expertsPerLayer and topK."""
    if probe.kind != "json" or not isinstance(probe.document, Mapping) or not set(probe.document) >= _KEYS:
        return None
    return f"is an object with selections, version {one_line(probe.document['version'])}"


def read(files: Sequence[Path], options: ImportOptions) -> Imported:
    """One file."""
    path = only(files)
    return Imported(from_document(read_json(path), options, one_line(path), files))


def from_document(document: object, options: ImportOptions, where: str, files: Sequence[Path]) -> RoutingTrace:
    """The trace of a document; ``where`` starts every message."""
    values = table(document, f"{where}: the document")
    whole(entry(values, "version", where), f"{where}: version", 2, 2)
    tokens, layers = (whole(entry(values, key, where), f"{where}: {key}", 1) for key in ("tokens", "layers"))
    experts = whole(entry(values, "expertsPerLayer", where), f"{where}: expertsPerLayer", 1, MAX_EXPERTS)
    top_k = whole(entry(values, "topK", where), f"{where}: topK", 1, experts)
    if options.num_experts not in (None, experts):
        raise TraceError(f"{where}: expertsPerLayer is {experts}, --num-experts says {options.num_experts}")
    ids = _selections(entry(values, "selections", where), (tokens, layers, top_k), experts, where)
    source = _source(table(entry(values, "source", where), f"{where}: source"), values.get("seed"), where)
    lengths = sequence_lengths(options, tokens, where)
    numbers = layer_numbers(options, layers, where)
    metadata = described(FORMAT.name, files, options, scenario=_text(values.get("scenario")), **source)
    try:
        return RoutingTrace(
            topk_ids=ids,
            topk_weights=None,
            sequence_offsets=np.append(0, np.cumsum(lengths)),
            prompt_len=one_pass(options, lengths, where),
            layer_index=np.arange(layers) if numbers is None else numbers,
            num_experts=experts,
            metadata=metadata if numbers is not None else {**metadata, "layers_inferred": True},
        )
    except TraceError as error:
        raise error if str(error).startswith(where) else TraceError(f"{where}: {error}") from error


def _selections(value: object, shape: tuple[int, int, int], experts: int, where: str) -> NDArray[Any]:
    """Picks [tokens, layers, topK]; every list has the length that the document states."""
    where = f"{where}: selections"
    tokens = _list(value, shape[0], where)
    ids = []
    for t, token in enumerate(tokens):
        for layer, picks in enumerate(_list(token, shape[1], f"{where}[{t}]")):
            here = _list(picks, shape[2], f"{where}[{t}][{layer}]")
            ids += [whole(one, f"{where}[{t}][{layer}]", 0, experts - 1) for one in here]
    return np.array(ids, np.int32).reshape(shape)


def _list(value: object, length: int, where: str) -> list[Any]:
    if not isinstance(value, list) or len(value) != length:
        found = f"a list of {len(value)}" if isinstance(value, list) else brief(value)
        raise TraceError(f"{where} is {found}, expected a list of {length}")
    return value


def _source(source: Mapping[str, Any], seed: object, where: str) -> dict[str, Any]:
    """What the metadata of the trace says of where the routing comes from."""
    kind = entry(source, "kind", f"{where}: source")
    if kind == "synthetic":
        return {"source": "synthetic", "generator": _text(source.get("generator"))}
    if kind != "captured":
        raise TraceError(f"{where}: source.kind is {brief(kind)}, expected 'captured' or 'synthetic'")
    model = table(entry(source, "model", f"{where}: source"), f"{where}: source.model")
    revision = entry(model, "revision", f"{where}: source.model")
    if not isinstance(revision, str) or not _PIN.fullmatch(revision):
        raise TraceError(f"{where}: source.model.revision is {brief(revision)}, expected 40 or 64 hexadecimal digits")
    capture = table(source.get("capture", {}), f"{where}: source.capture")
    if "seed" in capture and capture["seed"] != seed:
        raise TraceError(f"{where}: source.capture.seed is {brief(capture['seed'])}, seed is {brief(seed)}")
    software = table(source.get("software", {}), f"{where}: source.software")
    name = _text(model.get("id"))
    return {
        "source": "recorded",
        "model": name if name and len(name) <= 200 else None,
        "revision": revision,
        "dtype": _text(capture.get("dtype")),
        "device": _text(capture.get("device")),
        "transformers": _text(software.get("transformersVersion")),
        "torch": _text(software.get("pytorchVersion")),
    }


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value and value.isprintable() else None


FORMAT = Format(
    name="router-trace-v2",
    summary="RouterTrace version 2, a JSON document of picks with its provenance",
    gives="trace",
    takes=frozenset({"num_experts", "prompt_len", "sequence_len", "layers"}),
    files="one JSON object with version, tokens, layers, expertsPerLayer, topK, selections, source",
    recognise=recognise,
    read=read,
)
