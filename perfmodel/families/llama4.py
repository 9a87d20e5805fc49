"""Llama 4 (Meta, 2025): one shared expert beside the routed ones, and attention within chunks in most layers."""

from perfmodel.families.attention import HEAD_DEFAULTS, by_window, grouped_query, heads_of, linear
from perfmodel.families.feed_forward import count_and_top_k, decoder, dense_and_moe, gated, moe_layers_of
from perfmodel.families.keys import ConfigKeys, Declared
from perfmodel.families.network import Experts, FeedForward, Shape
from perfmodel.families.registry import Family, Wrapper

_FULL, _CHUNKED = "full_attention", "chunked_attention"


def moe_layers(config: ConfigKeys, num_layers: int) -> tuple[int, ...]:
    """MoE layers: those that ``moe_layers`` lists, else the last of every ``interleave_moe_layer_step``."""
    if not config.has("moe_layers"):
        config.take("moe_layers", "none")
        step = config.size("interleave_moe_layer_step")
        return moe_layers_of(config, range(step - 1, num_layers, step), "interleave_moe_layer_step")
    allowed = f"a list of layer indices from 0 to {num_layers - 1}"
    config.has("interleave_moe_layer_step")  # what the list says instead
    listed = [layer for layer in config.sequence("moe_layers", allowed) if type(layer) is int]
    if len(listed) != len(config.sequence("moe_layers", allowed)) or any(not 0 <= one < num_layers for one in listed):
        raise config.error("moe_layers", allowed)
    return moe_layers_of(config, sorted(set(listed)), "moe_layers")


def _chunked(config: ConfigKeys, num_layers: int) -> list[bool]:
    """Which layers attend within a chunk: those that ``layer_types`` says, else those with rotary positions."""
    if config.has("layer_types"):
        return [kind == _CHUNKED for kind in config.kinds("layer_types", num_layers, _FULL, _CHUNKED)]
    if config.sequence("no_rope_layers", "a list"):
        rotary = config.sizes("no_rope_layers", num_layers)
        if any(flag > 1 for flag in rotary):
            raise config.error("no_rope_layers", f"a list of {num_layers} numbers, each 0 or 1, or an empty one")
        return [bool(flag) for flag in rotary]
    interval = config.size("no_rope_layer_interval", default=4)
    return [bool((layer + 1) % interval) for layer in range(num_layers)]


def _feed_forward(config: ConfigKeys, num_layers: int) -> tuple[FeedForward, ...]:
    hidden = config.size("hidden_size")
    count, top_k = count_and_top_k(config)
    width = config.size("intermediate_size")
    moe = moe_layers(config, num_layers)
    at = "feed_forward"
    return dense_and_moe(
        num_layers,
        moe,
        norm_params=hidden,
        dense=gated(at, hidden, config.size("intermediate_size_mlp")) if len(moe) < num_layers else (),
        experts=Experts(count=count, top_k=top_k, size=width, tensors=gated(f"{at}.experts", hidden, width)),
        router=linear(f"{at}.router", hidden, count),
        shared=gated(f"{at}.shared_expert", hidden, width),
    )


def _llama4(config: ConfigKeys) -> Shape:
    hidden, num_layers = config.size("hidden_size"), config.size("num_hidden_layers")
    heads, kv_heads, head_dim = heads_of(config)
    bias = config.flag("attention_bias", default=False)
    # The norms of queries and keys (use_qk_norm) have no parameters.
    tensors = grouped_query(hidden, heads, kv_heads, head_dim, bias=bias, output_bias=bias)
    chunk = config.size_or_none("attention_chunk_size")
    chunked = _chunked(config, num_layers) if chunk is not None else [False] * num_layers
    windows = [chunk if one else None for one in chunked]
    note = f"chunks of {chunk} tokens are read as a window of as many, the most a token sees (attention_chunk_size)"
    return decoder(
        config,
        by_window(windows, tensors, heads, kv_heads, head_dim, norm_params=hidden),
        _feed_forward(config, num_layers),
        tied=False,
        left_out=(note,) if any(chunked) else (),
    )


FAMILIES: dict[str, Family | Wrapper] = {
    "llama4": Wrapper("text_config", "llama4_text"),
    "llama4_text": Family(
        Declared(
            required=(
                "hidden_size",
                "intermediate_size",
                "num_hidden_layers",
                "num_attention_heads",
                "num_experts",
                "top_k",
                "vocab_size",
            ),
            nullable=("attention_chunk_size",),
            optional={
                **HEAD_DEFAULTS,
                "moe_layers": "interleave_moe_layer_step says which layers have experts",
                "no_rope_layer_interval": "4",
                "attention_bias": "false",
                "tie_word_embeddings": "false",
            },
        ),
        _llama4,
    ),
}
