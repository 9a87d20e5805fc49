"""Builders of the attention kinds that several families share."""

from collections.abc import Sequence
from typing import Literal

from perfmodel.families.keys import ConfigKeys
from perfmodel.families.network import Attention, Cache, Tensor, Tensors

FULL, SLIDING = "full_attention", "sliding_attention"


def linear(name: str, inputs: int, outputs: int, *, bias: bool = False) -> Tensors:
    """The weight of a linear map and, where it has one, its bias."""
    weight = Tensor(name, (outputs, inputs))
    return (weight, Tensor(f"{name}.bias", (outputs,))) if bias else (weight,)


def heads_of(config: ConfigKeys, *, head_dim: str = "head_dim") -> tuple[int, int, int]:
    """Query heads, key-value heads, and the size of one head.

    Without ``num_key_value_heads`` there are as many as query heads; without ``head_dim`` a head has
    ``hidden_size / num_attention_heads`` numbers. Both must be declared optional by the family to be left out.
    """
    heads = config.size("num_attention_heads")
    kv_heads = config.size("num_key_value_heads", default=heads)
    if heads % kv_heads:
        raise config.error("num_key_value_heads", f"a divisor of num_attention_heads, {heads}")
    hidden = config.size("hidden_size")
    if not config.has(head_dim) and hidden % heads:
        raise config.error(head_dim, f"an integer, because hidden_size {hidden} is no multiple of {heads} heads")
    return heads, kv_heads, config.size(head_dim, default=hidden // heads)


#: The optional fields that `heads_of` may take defaults for.
HEAD_DEFAULTS = {
    "num_key_value_heads": "num_attention_heads",
    "head_dim": "hidden_size / num_attention_heads",
}


def grouped_query(
    hidden: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    *,
    value_dim: int | None = None,
    bias: bool = False,
    output_bias: bool = False,
    norms: Literal["none", "head", "whole"] = "none",
    sinks: bool = False,
    output_gate: bool = False,
    prefix: str = "self_attn",
) -> Tensors:
    """Tensors of grouped-query attention.

    value_dim : size of a value head; by default ``head_dim``.
    norms : norms of queries and keys: one for all heads, or over the whole projections.
    sinks : one learned number per query head. output_gate : the query projection also makes a gate of its own size.
    """
    value_dim = head_dim if value_dim is None else value_dim
    query, key, value = heads * head_dim, kv_heads * head_dim, kv_heads * value_dim
    tensors = (
        *linear(f"{prefix}.q_proj", hidden, query * (2 if output_gate else 1), bias=bias),
        *linear(f"{prefix}.k_proj", hidden, key, bias=bias),
        *linear(f"{prefix}.v_proj", hidden, value, bias=bias),
        *linear(f"{prefix}.o_proj", heads * value_dim, hidden, bias=output_bias),
    )
    if norms != "none":
        sizes = (head_dim, head_dim) if norms == "head" else (query, key)
        tensors += tuple(Tensor(f"{prefix}.{name}_norm", (size,)) for name, size in zip(("q", "k"), sizes, strict=True))
    if sinks:
        tensors += (Tensor(f"{prefix}.sinks", (heads,)),)
    return tensors


def kv_cache(
    heads: int, kv_heads: int, head_dim: int, window: int | None, *, value_dim: int | None = None
) -> tuple[Cache, ...]:
    """The keys and values of grouped-query attention."""
    both = head_dim + (head_dim if value_dim is None else value_dim)
    cache = Cache(
        name="keys and values",
        elements=kv_heads * both,
        flops_per_entry=2 * heads * both,
        window=window,
        heads=kv_heads,
    )
    return (cache,)


def by_window(
    windows: Sequence[int | None], tensors: Tensors, heads: int, kv_heads: int, head_dim: int, *, norm_params: int
) -> tuple[Attention, ...]:
    """One kind of attention for each different window, in the order in which they first occur."""
    return tuple(
        Attention(
            name="full" if window is None else "sliding",
            layers=tuple(layer for layer, other in enumerate(windows) if other == window),
            tensors=tensors,
            norm_params=norm_params,
            caches=kv_cache(heads, kv_heads, head_dim, window),
        )
        for window in dict.fromkeys(windows)
    )


def windows_of(config: ConfigKeys, num_layers: int, *, switched: bool = False) -> list[int | None]:
    """The window of each layer, from ``layer_types`` if the config has it, else the same for all layers.

    With ``switched`` the window counts only where ``use_sliding_window`` is true, and from layer
    ``max_window_layers`` on. The family declares ``sliding_window`` (and ``use_sliding_window``) optional.
    """
    if switched and not config.flag("use_sliding_window", default=False):
        return [None] * num_layers
    if config.has("layer_types"):
        slides = [kind == SLIDING for kind in config.kinds("layer_types", num_layers, FULL, SLIDING)]
        window = config.size("sliding_window") if any(slides) else None
        return [window if slide else None for slide in slides]
    if not switched and not config.has("sliding_window"):
        if "sliding_window" not in config.values:
            config.take("sliding_window", "none")
        return [None] * num_layers
    window = config.size("sliding_window")
    first = config.size("max_window_layers", least=0) if switched else 0
    return [window if layer >= first else None for layer in range(num_layers)]


def latent(config: ConfigKeys, layers: tuple[int, ...], *, bias: bool, norm_params: int) -> Attention:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1)."""
    hidden, heads = config.size("hidden_size"), config.size("num_attention_heads")
    rank = config.size("kv_lora_rank")
    nope, rope = config.size("qk_nope_head_dim"), config.size("qk_rope_head_dim")
    value = config.size("v_head_dim")
    query_rank = config.size_or_none("q_lora_rank")
    query = heads * (nope + rope)
    at = "self_attn"
    tensors: Tensors
    if query_rank is None:
        tensors = linear(f"{at}.q_proj", hidden, query)
    else:
        tensors = (
            *linear(f"{at}.q_a_proj", hidden, query_rank, bias=bias),
            Tensor(f"{at}.q_a_layernorm", (query_rank,)),
            *linear(f"{at}.q_b_proj", query_rank, query),
        )
    tensors += (
        *linear(f"{at}.kv_a_proj_with_mqa", hidden, rank + rope, bias=bias),
        Tensor(f"{at}.kv_a_layernorm", (rank,)),
        *linear(f"{at}.kv_b_proj", rank, heads * (nope + value)),
        *linear(f"{at}.o_proj", heads * value, hidden, bias=bias),
    )
    cache = Cache(
        name="latent",
        elements=rank + rope,
        flops_per_entry=2 * heads * (rank + rope + rank),
        expanded_elements=heads * (nope + rope + value),
        expanded_heads=heads,
    )
    return Attention(name="latent", layers=layers, tensors=tensors, norm_params=norm_params, caches=(cache,))
