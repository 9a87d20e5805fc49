"""What the commands on models know, as plain values: the JSON documents, from which the texts are made."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

from perfmodel import __version__
from perfmodel.families import params_of
from perfmodel.model.cache import LAYOUTS, MlaCache, state_bytes

if TYPE_CHECKING:
    from perfmodel.families import Attention, Cache, Experts, FeedForward, Tensors
    from perfmodel.memory import MemoryReport
    from perfmodel.model import MoEModel

#: Bits at which the size of an expert is shown, beside the stored ones.
EXPERT_BITS = (16, 8, 4, 3, 2, 1)
#: Classes of tensors that belong to layers.
_OF_LAYER = ("attention", "dense", "shared", "router", "expert", "norm")
#: The three ways to count active parameters: property of the model, and who counts so.
CONVENTIONS = {
    "active_params": "Mixtral, OLMoE, Qwen",
    "active_params_without_input_embedding": "gpt-oss, DeepSeek",
    "active_params_without_embeddings": "GLM-4.5, MiniMax",
}


class Caching(NamedTuple):
    """How a cache is kept: context [token], batch [1], bits of a number [bit], layout and kind of latent cache."""

    context: int
    batch: int
    bits: float
    layout: str
    mla_cache: MlaCache


def card(
    model: MoEModel,
    caching: Caching,
    notes: tuple[str, ...],
    report: MemoryReport | None,
    largest: dict[str, Any] | None,
) -> dict[str, Any]:
    """What ``model show`` says.

    notes : sentences on what the options chose. report, largest : what a system makes of it, where one is named.
    """
    return {
        **_header(model),
        "shape": _shape(model),
        "params": _params(model),
        "storage": _storage(model),
        "expert_bytes": [_expert_bytes(model, one) for one in _kinds_of_experts(model)],
        "kv": _kv(model, caching),
        **_memory(model, notes, report, largest),
    }


def fit(model: MoEModel, notes: tuple[str, ...], report: MemoryReport, largest: dict[str, Any]) -> dict[str, Any]:
    """What ``model fit`` says; arguments as in `card`."""
    return {**_header(model), **_memory(model, notes, report, largest)}


def _header(model: MoEModel) -> dict[str, Any]:
    return {"perfmodel": __version__, "kind": "model", "name": model.name, "family": model.family}


def _memory(
    model: MoEModel, notes: tuple[str, ...], report: MemoryReport | None, largest: dict[str, Any] | None
) -> dict[str, Any]:
    """Memory by device, and all assumptions, which stand in one place."""
    memory = None if report is None else {**report.to_dict(), "largest": largest}
    assumed = [] if memory is None else memory.pop("notes")
    return {"memory": memory, "assumptions": list(dict.fromkeys([*model.assumptions, *notes, *assumed]))}


# ---- shape ----


def _shape(model: MoEModel) -> dict[str, Any]:
    return {
        "num_layers": model.num_layers,
        "encoder_layers": model.encoder_layers,
        "moe_layers": list(model.moe_layers),
        "hidden_size": model.hidden_size,
        "vocab_size": model.vocab_size,
        "tied_embeddings": model.tied_embeddings,
        "attention": [_attention(kind) for kind in model.attention],
        "feed_forward": [_feed_forward(kind, model.hidden_size) for kind in model.feed_forward],
    }


def _attention(kind: Attention) -> dict[str, Any]:
    first = kind.caches[0] if kind.caches else None
    return {
        "name": kind.name,
        "layers": list(kind.layers),
        "query_heads": None if first is None else _query_heads(first),
        "kv_heads": None if first is None else first.heads,
        "params": kind.params,
        "state_bytes": state_bytes(kind),
        "caches": [
            {
                "name": cache.name,
                "elements": cache.elements,
                "expanded_elements": cache.expanded_elements,
                "window_tokens": cache.window,
                "tokens_per_entry": cache.tokens_per_entry,
                "read_entries": cache.read_entries,
                "borrowed": cache.borrowed,
            }
            for cache in kind.caches
        ],
    }


def _query_heads(cache: Cache) -> int | None:
    """Query heads that read an entry; None where the work on one is not a multiple of one head's.

    Of grouped-query attention a query head multiplies and adds each number of its key and value once, which is
    ``2 * elements / heads`` flop. With a latent it works on the latent twice, and has keys and values of its own when
    they are unpacked.
    """
    if cache.expanded_elements is not None:
        return cache.expanded_heads
    heads, rest = divmod(cache.flops_per_entry * cache.heads, 2 * cache.elements)
    return None if rest else heads


def _feed_forward(kind: FeedForward, hidden_size: int) -> dict[str, Any]:
    experts = kind.experts
    return {
        "name": kind.name,
        "layers": list(kind.layers),
        "experts": None
        if experts is None
        else {
            "count": experts.count,
            "top_k": experts.top_k,
            "size": experts.size,
            "params": experts.params,
            "matrices": [list(matrix) for matrix in experts.matrices],
        },
        "shared_size": _width(kind.shared, hidden_size),
        "shared_params": params_of(kind.shared),
        "dense_size": _width(kind.dense, hidden_size) if experts is None else None,
        "dense_params": params_of(kind.dense),
        "router_params": params_of(kind.router),
    }


def _width(tensors: Tensors, hidden_size: int) -> int | None:
    """Inner width of a network: what its first matrix makes of the hidden state, gates of one output aside."""
    for tensor in tensors:
        if tensor.is_matrix and tensor.shape[1] == hidden_size and tensor.shape[0] > 1:
            return tensor.shape[0]
    return None


def layer_rows(model: MoEModel) -> list[dict[str, Any]]:
    """One row a layer: its kinds, its parameters by class, and their sum."""
    return [{**row, "params": sum(int(row[name]) for name in _OF_LAYER)} for row in model.params_by_layer()]


# ---- parameters and bytes ----


def _params(model: MoEModel) -> dict[str, Any]:
    return {
        "total_params": model.total_params,
        "routed_expert_params": model.routed_expert_params,
        "non_expert_params": model.non_expert_params,
        **{name: getattr(model, name) for name in CONVENTIONS},
        "by_class": model.params_by_class(),
    }


def _storage(model: MoEModel) -> dict[str, Any]:
    sizes = model.bytes_by_class()
    return {
        "compute_format": model.compute,
        "weight_bytes": model.weight_bytes,
        "mean_bits": 8 * model.weight_bytes / model.total_params,
        "by_class": {
            name: {"format": stored.name, "bits": stored.bits, "bytes": sizes[name]}
            for name, stored in model.storage.by_class().items()
        },
    }


def _kinds_of_experts(model: MoEModel) -> list[Experts]:
    return list(dict.fromkeys(kind.experts for kind in model.feed_forward if kind.experts is not None))


def _expert_bytes(model: MoEModel, experts: Experts) -> dict[str, Any]:
    """Size of one routed expert at several precisions, and of all such experts."""
    layers = sum(len(kind.layers) for kind in model.feed_forward if kind.experts == experts)
    widths = {"stored": model.expert_bits, **{str(bits): float(bits) for bits in EXPERT_BITS}}
    return {
        "experts_per_layer": experts.count,
        "layers": layers,
        "params": experts.params,
        "by_bits": [
            {
                "precision": name,
                "bits": bits,
                "bytes": experts.params * bits / 8,
                "bytes_of_all": layers * experts.count * experts.params * bits / 8,
            }
            for name, bits in widths.items()
        ],
    }


# ---- cache ----


def _kv(model: MoEModel, caching: Caching) -> dict[str, Any]:
    context, batch, bits, layout, mla_cache = caching
    other: MlaCache = "expanded" if mla_cache == "compressed" else "compressed"
    read = model.kv_read_parts(context, bits, mla_cache=mla_cache)
    has_latent = any(cache.expanded_elements is not None for kind in model.attention for cache in kind.caches)
    return {
        "context_tokens": context,
        "batch": batch,
        "bits": bits,
        "layout": layout,
        "mla_cache": mla_cache,
        "layouts": {name: _allocated(model, caching._replace(layout=name)) for name in LAYOUTS},
        "other_mla_cache": _allocated(model, caching._replace(mla_cache=other)) if has_latent else None,
        "read": {
            "bytes_per_sequence": sum(read.values()),
            "bytes": batch * sum(read.values()),
            "parts": read,
        },
    }


def _allocated(model: MoEModel, caching: Caching) -> dict[str, Any]:
    """What a cache takes: what one more token adds at this context, and what a sequence and the batch take."""
    context, batch, bits, layout, mla_cache = caching
    # Where several tokens share an entry, one more token adds its part of one.
    step = math.lcm(*(cache.tokens_per_entry for kind in model.attention for cache in kind.caches))
    sizes = model.kv_parts(context, bits, layout=layout, mla_cache=mla_cache)
    later = model.kv_parts(context + step, bits, layout=layout, mla_cache=mla_cache)
    parts = {
        name: {"bytes_per_token": (later[name] - size) / step, "bytes_per_sequence": size}
        for name, size in sizes.items()
    }
    whole = {key: sum(part[key] for part in parts.values()) for key in ("bytes_per_token", "bytes_per_sequence")}
    return {**whole, "bytes": batch * whole["bytes_per_sequence"], "parts": parts}
