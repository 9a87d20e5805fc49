"""Logs of vLLM's routing, one JSON object a line, as several small loggers write them.

The common kind has a line ``{"type": "meta", "model_id", "top_k", ...}`` and then a line ``{"type": "route", "req_id",
"token_idx", "layer", "topk_ids", "topk_weights"}`` for every token of every logged layer. What ``req_id`` and
``token_idx`` count differs: a request or one forward call, on and on or anew in every call. A profiler of Mixtral
writes ``{"problem_id", "layer", "token_idx", "experts", "gating_probs"}`` for generated tokens only.
"""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfmodel.errors import TraceError
from perfmodel.routing.defects import Finding
from perfmodel.routing.importers.base import Format, Imported, ImportOptions, described, number_of_experts
from perfmodel.routing.importers.canonical import only
from perfmodel.routing.importers.files import LARGEST_JSON, brief, entry, parse_json, read_lines, table, whole
from perfmodel.routing.importers.phases import order_of, phases_of_calls
from perfmodel.routing.importers.probe import Probe
from perfmodel.routing.npz import one_line
from perfmodel.routing.trace import RoutingTrace

#: Names of picks, weights and sequence in the two kinds of lines.
_ROUTE, _PROFILE = ("topk_ids", "topk_weights"), ("experts", "gating_probs")
MOST_PICKS, MOST_LAYERS = 1024, 4096
_MISSING = object()


@dataclass
class Rows:
    """The tokens of one layer, in the order of the file.

    ids, weights : picks one after another
    request, token : number of the request in the order of the file, and ``token_idx``
    call : meta lines above it, which some loggers write anew before every forward call
    line : where it stands
    """

    ids: "array[int]" = field(default_factory=lambda: array("i"))
    weights: "array[float]" = field(default_factory=lambda: array("d"))
    request: "array[int]" = field(default_factory=lambda: array("q"))
    token: "array[int]" = field(default_factory=lambda: array("q"))
    call: "array[int]" = field(default_factory=lambda: array("q"))
    line: "array[int]" = field(default_factory=lambda: array("q"))


def recognise(probe: Probe) -> str | None:
    """The keys of the first line, or of the line below a first one that says what was logged."""
    first = probe.first
    if not isinstance(first, Mapping):
        return None
    if first.get("type") == "meta":
        below = _second(probe)
        keys = _keys_of_route(below) if isinstance(below, Mapping) and below.get("type") != "meta" else None
        return f"starts with a meta line, and below it are lines with {keys}" if keys else None
    keys = _keys_of_route(first)
    return f"holds lines with {keys}" if keys else None


def _second(probe: Probe) -> Any:
    """The second line that is not empty, as a document."""
    found = (pair for pair in read_lines(probe.path, longest=LARGEST_JSON) if pair[1].strip())
    line = next(islice(found, 1, None), None)
    return None if line is None else parse_json(line[1], f"{one_line(probe.path)}: line {line[0]}")


def _keys_of_route(line: Mapping[str, Any]) -> str | None:
    """The keys that tell that a line holds picks; what is called experts may be anything."""
    for keys in (("token_idx", "layer", _ROUTE[0]), ("problem_id", "token_idx", "layer", *_PROFILE)):
        if set(keys) <= set(line) and isinstance(line[keys[-1]], list) and type(line["layer"]) is int:
            return f"{', '.join(keys[:-1])} and {keys[-1]}"
    return None


def read(files: Sequence[Path], options: ImportOptions) -> Imported:
    """One log."""
    path = only(files)
    name = one_line(path)
    log = _Log(name)
    for number, text in read_lines(path):
        if text.strip():
            log.add(table(parse_json(text, f"{name}: line {number}"), f"{name}: line {number}"), number)
    numbers, first = log.checked_layers()
    tokens, requests, calls, lines = (np.array(one) for one in (first.token, first.request, first.call, first.line))
    ids = np.stack([_matrix(log.layers[layer].ids, log.top_k) for layer in numbers], axis=1)
    weights = None
    if len(first.weights):
        weights = np.stack([_matrix(log.layers[layer].weights, log.top_k) for layer in numbers], axis=1)
    findings: tuple[Finding, ...] = ()
    copies = _copies(tokens, requests, ids)
    if copies.any():
        found = f"{int(copies.sum())} of {len(copies)} tokens repeat the line before them, as logs of several ranks do"
        mended = "duplicate-tokens" in options.mend
        findings = (Finding("duplicate-tokens", found, "leave the copies out", mended=mended),)
    kept = np.flatnonzero(~copies)
    order = order_of(tokens[kept], requests[kept], lines[kept], name, starts_at_zero=log.keys == _ROUTE)
    if copies.any() and not mended:
        if (np.diff(order) != 1).any():
            raise TraceError(
                f"{name}: {findings[0].found}, and requests take turns; --mend duplicate-tokens tells them apart"
            )
        tokens = np.arange(len(tokens))
    else:
        order = kept[order]
        tokens, requests, calls, ids = tokens[order], requests[order], calls[order], ids[order]
        weights = None if weights is None else weights[order]
    lengths, prompts = phases_of_calls(
        tokens,
        requests,
        options,
        name,
        decode_only=log.keys == _PROFILE,
        breaks=np.append(True, calls[1:] != calls[:-1]),
        repeats=np.append(False, (ids[1:] == ids[:-1]).all(axis=(1, 2))),
        apart=bool((np.diff(order) != 1).any()) and not copies.any(),
    )
    stated = log.meta.get("num_experts")
    stated = None if stated is None else whole(stated, f"{name}: num_experts of the meta line", 1)
    experts, noted = number_of_experts(options, ids, stated)
    known = {key: log.meta[key] for key in ("vllm_version", "torch_version", "seed") if key in log.meta}
    model = log.meta.get("model_id")
    known["model"] = model if isinstance(model, str) and model and model != "unknown" else None
    try:
        trace = RoutingTrace(
            topk_ids=ids,
            topk_weights=weights,
            sequence_offsets=np.append(0, np.cumsum(lengths)),
            prompt_len=prompts,
            layer_index=np.array(numbers, np.int64),
            num_experts=experts,
            metadata={**described(FORMAT.name, files, options, **known), **noted},
        )
    except TraceError as error:
        raise TraceError(f"{name}: {error}") from None
    return Imported(trace, findings)


def _copies(tokens: NDArray[np.int64], requests: NDArray[np.int64], ids: NDArray[Any]) -> NDArray[np.bool_]:
    """Tokens [T] that are the one before them once more, where every token comes equally often and the counter runs on.

    Where the counter does not run on, a token may well pick what the one before it picked.
    """
    same = (tokens[1:] == tokens[:-1]) & (requests[1:] == requests[:-1]) & (ids[1:] == ids[:-1]).all(axis=(1, 2))
    copies = np.append(False, same)
    first = np.flatnonzero(~copies)
    times = np.diff(np.append(first, len(copies)))
    kept, of = tokens[first], requests[first]
    runs_on = bool(((kept[1:] > kept[:-1]) | (of[1:] != of[:-1])).all()) and len(kept) > 1
    return copies if runs_on and (times == times[0]).all() else np.zeros_like(copies)


def _matrix(values: "array[Any]", top_k: int) -> NDArray[Any]:
    return np.frombuffer(values, values.typecode).reshape(-1, top_k)


class _Log:
    """Takes lines in and checks each against the ones before."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.meta: Mapping[str, Any] = {}
        self.layers: dict[int, Rows] = {}
        self.requests: dict[Any, int] = {}
        self.keys = ("", "")
        self.top_k = self.calls = 0

    def add(self, line: Mapping[str, Any], number: int) -> None:
        where = f"{self.name}: line {number}"
        if line.get("type") == "meta":
            self.calls += 1
            if self.meta or self.layers:
                self._repeated(line, where)
                return
            self.meta = line
            if "top_k" in line:
                self.top_k = whole(line["top_k"], f"{where}: top_k", 0, MOST_PICKS)
            return
        keys = _ROUTE if "topk_ids" in line else _PROFILE
        if self.layers and keys != self.keys:
            raise TraceError(f"{where}: holds {keys[0]}, lines before it {self.keys[0]}")
        self.keys = keys
        layer = whole(entry(line, "layer", where), f"{where}: layer", 0, 2**31 - 1)
        token = whole(entry(line, "token_idx", where), f"{where}: token_idx", 0, 2**53)
        picks = entry(line, keys[0], where)
        if not isinstance(picks, list) or not 1 <= len(picks) <= MOST_PICKS:
            raise TraceError(f"{where}: {keys[0]} is {brief(picks)}, expected a list of experts")
        self.top_k = self.top_k or len(picks)
        if len(picks) != self.top_k:
            raise TraceError(f"{where}: {keys[0]} has {len(picks)} picks, expected {self.top_k}")
        if layer not in self.layers and len(self.layers) >= MOST_LAYERS:
            raise TraceError(f"{where}: more than {MOST_LAYERS} layers")
        rows = self.layers.setdefault(layer, Rows())
        rows.ids.extend(whole(one, f"{where}: a pick of {keys[0]}", -1, 65534) for one in picks)
        self._add_weights(rows, line.get(keys[1]), where)
        rows.request.append(self.requests.setdefault(self._request(line, where), len(self.requests)))
        rows.token.append(token)
        rows.call.append(self.calls)
        rows.line.append(number)

    def _repeated(self, meta: Mapping[str, Any], where: str) -> None:
        """Refuse a second meta line, unless it says what the first one says: then a forward call starts."""
        keys = [key for key in (*self.meta, *meta) if self.meta.get(key, _MISSING) != meta.get(key, _MISSING)]
        if keys:
            says, said = (brief(one[keys[0]]) if keys[0] in one else "nothing" for one in (meta, self.meta))
            raise TraceError(
                f"{where}: a meta line that says {says} for {one_line(keys[0])}, where the first says {said}; the file "
                "joins several logs"
            )

    def _add_weights(self, rows: Rows, weights: Any, where: str) -> None:
        expected = bool(rows.weights) if rows.token else any(other.weights for other in self.layers.values())
        known = expected or weights is not None
        if known and (weights is None or (not expected and any(other.token for other in self.layers.values()))):
            raise TraceError(f"{where}: {self.keys[1]} is on some lines only, expected on all or none")
        if weights is None:
            return
        plain = isinstance(weights, list) and all(type(one) in (int, float) for one in weights)
        if not plain or len(weights) != self.top_k:
            raise TraceError(f"{where}: {self.keys[1]} is {brief(weights)}, expected {self.top_k} numbers")
        rows.weights.extend(weights)

    def _request(self, line: Mapping[str, Any], where: str) -> Any:
        names = ("req_id",) if self.keys == _ROUTE else ("dataset", "problem_id")
        found = tuple(line.get(name) for name in names)
        if not all(isinstance(one, str | int | None) for one in found):
            raise TraceError(f"{where}: {names[-1]} is {brief(found[-1])}, expected a text or a number")
        return found

    def checked_layers(self) -> tuple[list[int], Rows]:
        """Layers in order, and the rows of the first; TraceError unless all have the same tokens."""
        if not self.layers:
            raise TraceError(f"{self.name}: holds no lines with picks")
        numbers = sorted(self.layers)
        self._announced(numbers)
        first = self.layers[numbers[0]]
        for layer in numbers[1:]:
            self._same_tokens(self.layers[layer], first, layer, numbers[0])
        return numbers, first

    def _announced(self, found: list[int]) -> None:
        """Refuse a log that lacks layers which its meta line announces."""
        said = self.meta.get("layers_logged")
        known = [one for one in said if type(one) is int] if isinstance(said, list) else []
        lacking = sorted(set(known) - set(found))
        if lacking:
            raise TraceError(
                f"{self.name}: its meta line announces {len(known)} layers in layers_logged, of which "
                f"{one_line(', '.join(map(str, lacking[:8])))}{', ...' * (len(lacking) > 8)} has no line; the log is "
                "not whole (without layers_logged it is read as it stands)"
            )

    def _same_tokens(self, rows: Rows, first: Rows, layer: int, other: int) -> None:
        """Refuse a layer that does not list the tokens of another in the same order."""
        if rows.request == first.request and rows.token == first.token:
            return
        pairs = zip(rows.request, rows.token, first.request, first.token, strict=False)
        row = next((i for i, (r, t, of, at) in enumerate(pairs) if (r, t) != (of, at)), None)
        if row is None:
            counts = f"{len(rows.token)} tokens (the last on line {rows.line[-1]})"
            raise TraceError(f"{self.name}: layer {layer} has {counts}, layer {other} has {len(first.token)}")
        raise TraceError(
            f"{self.name}: line {rows.line[row]}: layer {layer} has token_idx {rows.token[row]}"
            f"{' of another request' * (rows.request[row] != first.request[row])} where layer {other} has "
            f"token_idx {first.token[row]} (line {first.line[row]}); expected the same tokens in the same order in "
            "every layer"
        )


FORMAT = Format(
    name="vllm-jsonl",
    summary="logs of vLLM's routing, a JSON object a token and layer (.jsonl); ids and weights",
    gives="trace",
    takes=frozenset({"num_experts", "prompt_len", "sequence_len"}),
    files=(
        "one .jsonl: lines with req_id, token_idx, layer, topk_ids, topk_weights, perhaps a meta line "
        "with model_id and top_k; or lines with problem_id, token_idx, layer, experts, gating_probs"
    ),
    recognise=recognise,
    read=read,
)
