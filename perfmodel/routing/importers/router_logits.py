"""Router logits of Transformers (``output_router_logits=True``): picks and weights by the rule of the model's family.

Where logits lie in a file says :mod:`perfmodel.routing.importers.logit_files`, what a family makes of them
:mod:`perfmodel.routing.importers.rules`. Rows of padding, which belong to no token, are left out by the mask. Of two
equal logits at the last pick nothing tells which one the model took: the lower expert is listed, and
``metadata["tied_picks"]`` counts them.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfmodel.errors import ModelConfigError, TraceError
from perfmodel.families import ConfigKeys, read_shape
from perfmodel.routing.defects import Finding
from perfmodel.routing.importers.base import (
    Format,
    Imported,
    ImportOptions,
    described,
    layer_numbers,
    prompt_lengths,
    sequence_lengths,
)
from perfmodel.routing.importers.files import brief, read_json, table
from perfmodel.routing.importers.logit_files import LogitFile, logits_in_memory, read_logits
from perfmodel.routing.importers.logit_names import logit_names
from perfmodel.routing.importers.probe import Probe
from perfmodel.routing.importers.rules import FAMILIES, Rule, routing_rule
from perfmodel.routing.npz import one_line, shown
from perfmodel.routing.trace import RoutingTrace

#: How far the sum of rounded probabilities, such as those of bfloat16, may be from 1.
_ROUNDED = 0.02


def recognise(probe: Probe) -> str | None:
    """Arrays that are called router_logits, or a list of equal arrays of floating point numbers."""
    names = logit_names(probe) if probe.kind in ("npz", "safetensors", "pt", "json") else []
    return f"holds {names[0]}" if names else None


def read(files: Sequence[Path], options: ImportOptions) -> Imported:
    """Each file is a batch of sequences of its own, of one model."""
    return _import([read_logits(path) for path in files], files, options)


def from_arrays(source: Any, options: ImportOptions) -> Imported:
    """Logits in memory: the tuple ``router_logits`` of a model's output, or a table with what a file would hold."""
    return _import([logits_in_memory(source, "router logits")], [], options)


def _import(batches: list[LogitFile], files: Sequence[Path], options: ImportOptions) -> Imported:
    first = batches[0]
    for other in batches[1:]:
        if (other.layers, other.experts, other.side) != (first.layers, first.experts, first.side):
            raise TraceError(
                f"{other.where}: has {other.layers} layers of {other.experts} experts, {first.where} has "
                f"{first.layers} of {first.experts}; expected batches of one model"
            )
    if options.num_experts not in (None, first.experts):
        raise TraceError(
            f"{first.where}: has logits of {first.experts} experts, --num-experts is {options.num_experts}"
        )
    family, config = _family(options, first.where)
    rule = routing_rule(family, config, options.top_k, first.experts, first.where)
    layers = _layers(options, rule, config, first)
    parts = [_convert(batch, rule, options) for batch in batches]
    lengths = np.concatenate([part.lengths for part in parts])
    ids = np.concatenate([part.ids for part in parts])
    metadata = described(
        FORMAT.name,
        files,
        options,
        how=None if files else f"made from arrays in memory ({FORMAT.name})",
        model=_name(config),
        family=rule.family,
        weight_rule=rule.weight_rule,
        tied_picks=sum(part.tied for part in parts),
        dropped_picks=None if rule.capacity is None else int((ids < 0).sum()),
    )
    try:
        trace = RoutingTrace(
            topk_ids=ids,
            topk_weights=np.concatenate([part.weights for part in parts]),
            sequence_offsets=np.append(0, np.cumsum(lengths)),
            prompt_len=_prompts(parts, lengths, options, first),
            layer_index=layers,
            num_experts=first.experts,
            metadata=metadata,
        )
    except TraceError as error:
        raise TraceError(f"{first.where}: {error}") from error
    padding = sum(part.padding for part in parts)
    found = f"{padding} rows of padding, as the attention mask says"
    return Imported(trace, (Finding("padding", found, "leave them out", mended=True),) if padding else ())


class _Part:
    """Picks and weights of one batch, its sequences one after another."""

    def __init__(self, layers: int, rows: NDArray[np.int64], lengths: NDArray[np.int64], k: int) -> None:
        self.rows, self.lengths = rows, lengths
        self.ids = np.empty((len(rows), layers, k), np.int32)
        self.weights = np.empty((len(rows), layers, k), np.float32)
        self.tied = self.padding = 0
        self.prompts: NDArray[np.int64] | None = None


def _convert(batch: LogitFile, rule: Rule, options: ImportOptions) -> _Part:
    if rule.needs_bias and batch.bias is None:
        raise TraceError(
            f"{batch.where}: the picks of {rule.family} are not in its logits alone; allowed: also an array "
            f"e_score_correction_bias [layers, experts], what the routers add to their scores"
        )
    calls = _calls(batch, options)
    kept = _kept(batch, calls)
    # Rows of a sequence: those of the prompt, then one of each further call.
    sequences = [np.concatenate([np.arange(*call[s]) for call in calls]) for s in range(len(calls[0]))]
    lengths = np.array([int(kept[rows].sum()) for rows in sequences], np.int64)
    if not lengths.all():
        raise TraceError(f"{batch.where}: sequence {int(np.argmin(lengths))} is all padding")
    order = np.concatenate(sequences)
    part = _Part(batch.layers, order[kept[order]], lengths, rule.top_k)
    part.padding = int((~kept).sum())
    if len(calls) > 1:
        part.prompts = np.array([int(kept[slice(*rows)].sum()) for rows in calls[0]], np.int64)
    elif batch.side == "encoder_":
        part.prompts = lengths
    else:
        part.prompts = batch.prompt_len
    none = np.zeros(batch.experts, np.float32)
    for layer in range(batch.layers):
        logits = batch.layer(layer)
        _refuse_probabilities(logits, f"{batch.where}: router_logits of MoE layer {layer}")
        picks = rule.apply(logits, none if batch.bias is None else batch.bias[layer])
        ids = picks.ids
        if rule.capacity is not None:
            ids = _within_capacity(ids, calls, rule.capacity, batch.experts)
        part.ids[:, layer], part.weights[:, layer] = ids[part.rows], picks.weights[part.rows]
        part.tied += int(picks.tied[part.rows].sum())
    return part


def _refuse_probabilities(logits: NDArray[np.float32], where: str) -> None:
    """TraceError where every row holds shares of one, as after a softmax: the rule would apply it once more."""
    if logits.min() < 0 or logits.max() > 1 or logits.shape[1] < 2:
        return
    if (np.abs(logits.sum(axis=1, dtype=np.float64) - 1) < _ROUNDED).all():
        raise TraceError(
            f"{where} holds probabilities (0..1, every row adds up to 1), expected logits; record them before the "
            "softmax, or store the logarithms of these, whose softmax they are"
        )


def _calls(batch: LogitFile, options: ImportOptions) -> list[list[tuple[int, int]]]:
    """First and last row (exclusive) of every sequence in every call."""
    prompt, *steps = batch.rows
    if batch.batch is not None:
        lengths = np.full(batch.batch, prompt // batch.batch, np.int64)
        if options.sequence_len not in (None, (prompt // batch.batch,)):
            raise TraceError(
                f"{batch.where}: has {prompt // batch.batch} rows a sequence; --sequence-len says otherwise"
            )
    elif options.sequence_len is None:
        raise TraceError(
            f"{batch.where}: does not say where a sequence of its batch ends; --sequence-len says how many rows each "
            f"has ({prompt} if there is only one)"
        )
    else:
        lengths = sequence_lengths(options, prompt, batch.where)
    stops = np.cumsum(lengths)
    calls = [list(zip((stops - lengths).tolist(), stops.tolist(), strict=True))]
    for step, count in enumerate(steps):
        start = prompt + sum(steps[:step])
        calls.append([(start + s, start + s + 1) for s in range(count)])
    return calls


def _kept(batch: LogitFile, calls: list[list[tuple[int, int]]]) -> NDArray[np.bool_]:
    """Which rows are of tokens and not of padding."""
    kept = np.ones(sum(batch.rows), np.bool_)
    if batch.mask is not None:
        width = batch.rows[0] // len(batch.mask)
        kept[: batch.rows[0]] = batch.mask[:, :width].ravel()
        for column, call in enumerate(calls[1:], width):
            if column < batch.mask.shape[1]:
                kept[call[0][0] : call[-1][1]] = batch.mask[:, column]
    return kept


def _within_capacity(
    ids: NDArray[np.int64], calls: list[list[tuple[int, int]]], capacity: int, experts: int
) -> NDArray[np.int64]:
    """Top-1 picks with -1 for tokens that came to an expert after ``capacity`` others of their sequence and call."""
    taken = ids.copy()
    for start, stop in (rows for call in calls for rows in call):
        one_hot = ids[start:stop] == np.arange(experts)
        place = (np.cumsum(one_hot, axis=0) * one_hot).sum(axis=1)
        taken[start:stop][place > capacity] = -1
    return taken


def _prompts(
    parts: list[_Part], lengths: NDArray[np.int64], options: ImportOptions, first: LogitFile
) -> NDArray[np.int64]:
    stated = [part.prompts for part in parts if part.prompts is not None]
    if len(stated) < len(parts):
        return prompt_lengths(options, lengths, first.where)
    prompts = np.concatenate(stated)
    if options.prompt_len is not None and not np.array_equal(prompt_lengths(options, lengths, first.where), prompts):
        raise TraceError(f"{first.where}: its prompts have {one_line(prompts)} rows; --prompt-len says otherwise")
    return prompts


# ---- the model ----


def _family(options: ImportOptions, where: str) -> tuple[str, Mapping[str, Any]]:
    """The family, and the values of the model's config, which are empty where there is none."""
    config: Mapping[str, Any] = {}
    if options.config is not None:
        path = options.config / "config.json" if options.config.is_dir() else options.config
        config = table(read_json(path), one_line(path))
        inner = config.get("text_config")
        if config.get("model_type") not in FAMILIES and isinstance(inner, Mapping):
            config = inner  # of a model that also sees or hears
        if not isinstance(config.get("model_type"), str):
            raise TraceError(f"{one_line(path)}: model_type is {brief(config.get('model_type'))}, expected a family")
    family = options.family or config.get("model_type")
    if family is None:
        raise TraceError(f"{where}: does not say whose router logits it holds; --config or --family says it")
    if config and config["model_type"] != family:
        raise TraceError(f"{where}: --family is {shown(family)}, but the config is of {shown(config['model_type'])}")
    return str(family), config


def _name(config: Mapping[str, Any]) -> str | None:
    name = config.get("_name_or_path")
    return name if isinstance(name, str) and name and name.isprintable() and len(name) <= 200 else None


def _layers(options: ImportOptions, rule: Rule, config: Mapping[str, Any], first: LogitFile) -> NDArray[np.int64]:
    """The model layers of the MoE layers, as the user said, as the config says, or by counting where all are MoE."""
    said = layer_numbers(options, first.layers, first.where)
    if said is not None:
        return said
    layers: Sequence[int] = range(first.layers)
    stated = config.get("num_hidden_layers")
    if not rule.every_layer:
        why = ""
        try:
            layers = read_shape(ConfigKeys(config, "config.json")).shape.moe_layers
        except ModelConfigError as error:
            why = f" (by its config it cannot be told: {error})"
        # Where every layer has experts, a part of the config is enough to know which they are.
        if why and stated != first.layers:
            raise TraceError(
                f"{first.where}: has {first.layers} MoE layers; which of the model's they are says --layers{why}"
            )
    if len(layers) != first.layers or (rule.every_layer and stated not in (None, first.layers)):
        count = stated if rule.every_layer else len(layers)
        raise TraceError(f"{first.where}: has {first.layers} MoE layers, by its config the model has {shown(count)}")
    return np.array(layers, np.int64)


FORMAT = Format(
    name="router-logits",
    summary="Transformers' output_router_logits as .npz, .safetensors, .pt or .json; picks by the family's own rule",
    gives="trace",
    takes=frozenset({"num_experts", "top_k", "prompt_len", "sequence_len", "layers", "family", "config"}),
    files=(
        "router_logits [layers, rows, experts]; or router_logits.0, router_logits.1, ... (layer_0, ... "
        "and arr_0, ... too), one a MoE layer; or router_logits.CALL.LAYER; beside them attention_mask "
        "[batch, seq], prompt_len [batch], e_score_correction_bias [layers, experts]; a .pt may be the "
        "tuple, or the list of tuples of generate()"
    ),
    recognise=recognise,
    read=read,
)
