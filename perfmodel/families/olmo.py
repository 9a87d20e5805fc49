"""OLMoE (Allen Institute for AI, arXiv:2409.02060)."""

import functools

from perfmodel.families.attention import HEAD_DEFAULTS, by_window, grouped_query, heads_of
from perfmodel.families.feed_forward import UNIFORM_KEYS, gated, uniform
from perfmodel.families.keys import ConfigKeys, Declared
from perfmodel.families.network import Shape
from perfmodel.families.registry import Family


def _olmoe(config: ConfigKeys) -> Shape:
    hidden, num_layers = config.size("hidden_size"), config.size("num_hidden_layers")
    heads, kv_heads, head_dim = heads_of(config)
    bias = config.flag("attention_bias", default=False)
    tensors = grouped_query(hidden, heads, kv_heads, head_dim, bias=bias, output_bias=bias, norms="whole")
    attention = by_window([None] * num_layers, tensors, heads, kv_heads, head_dim, norm_params=hidden)
    return uniform(config, attention, expert=functools.partial(gated, "mlp.experts"), router="mlp.gate")


FAMILIES = {
    "olmoe": Family(
        Declared(
            required=UNIFORM_KEYS,
            optional={**HEAD_DEFAULTS, "attention_bias": "false", "tie_word_embeddings": "false"},
        ),
        _olmoe,
    ),
}
