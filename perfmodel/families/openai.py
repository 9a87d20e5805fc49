"""gpt-oss (OpenAI, model card of August 2025)."""

import functools

from perfmodel.families.attention import HEAD_DEFAULTS, by_window, grouped_query, heads_of, windows_of
from perfmodel.families.feed_forward import UNIFORM_KEYS, gated, uniform
from perfmodel.families.keys import ConfigKeys, Declared
from perfmodel.families.network import Shape
from perfmodel.families.registry import Family


def _gpt_oss(config: ConfigKeys) -> Shape:
    hidden, num_layers = config.size("hidden_size"), config.size("num_hidden_layers")
    heads, kv_heads, head_dim = heads_of(config)
    bias = config.flag("attention_bias", default=True)
    tensors = grouped_query(hidden, heads, kv_heads, head_dim, bias=bias, output_bias=bias, sinks=True)
    attention = by_window(windows_of(config, num_layers), tensors, heads, kv_heads, head_dim, norm_params=hidden)
    expert = functools.partial(gated, "mlp.experts", bias=True)
    return uniform(config, attention, expert=expert, router="mlp.router", router_bias=True)


FAMILIES = {
    "gpt_oss": Family(
        Declared(
            required=(*UNIFORM_KEYS, "layer_types"),
            optional={**HEAD_DEFAULTS, "attention_bias": "true", "tie_word_embeddings": "false"},
        ),
        _gpt_oss,
    ),
}
