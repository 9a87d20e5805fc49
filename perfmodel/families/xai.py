"""Grok-1 (xAI, weights and code published in March 2024)."""

import functools

from perfmodel.families.attention import HEAD_DEFAULTS, by_window, grouped_query, heads_of
from perfmodel.families.feed_forward import UNIFORM_KEYS, gated, uniform
from perfmodel.families.keys import ConfigKeys, Declared
from perfmodel.families.network import Shape
from perfmodel.families.registry import Family


def _grok(config: ConfigKeys) -> Shape:
    hidden, num_layers = config.size("hidden_size"), config.size("num_hidden_layers")
    heads, kv_heads, head_dim = heads_of(config)
    tensors = grouped_query(hidden, heads, kv_heads, head_dim, prefix="attn")
    norms = 2 * hidden  # one norm before attention and experts, and one after each
    return uniform(
        config,
        by_window([None] * num_layers, tensors, heads, kv_heads, head_dim, norm_params=norms),
        expert=functools.partial(gated, "moe_block.experts", names=("linear", "linear_v", "linear_1")),
        router="moe_block.gate",
        norm_params=norms,
        tied=True,
    )


FAMILIES = {
    "grok-1": Family(
        Declared(
            required=UNIFORM_KEYS,
            optional={**HEAD_DEFAULTS, "tie_word_embeddings": "true"},
        ),
        _grok,
    ),
}
