"""Arctic (Snowflake, April 2024): a dense network runs beside the experts of every layer."""

import dataclasses

from perfmodel.families.attention import HEAD_DEFAULTS, by_window, grouped_query, heads_of, linear
from perfmodel.families.feed_forward import count_and_top_k, decoder, dense_and_moe, gated, moe_layers_of
from perfmodel.families.keys import ConfigKeys, Declared
from perfmodel.families.network import Experts, Shape
from perfmodel.families.registry import Family

_NAMES = ("w1", "w3", "w2")


def _arctic(config: ConfigKeys) -> Shape:
    hidden, num_layers = config.size("hidden_size"), config.size("num_hidden_layers")
    count, top_k = count_and_top_k(config)
    width = config.size("intermediate_size")
    heads, kv_heads, head_dim = heads_of(config)
    bias = config.flag("attention_bias", default=False)
    step = config.size("moe_layer_frequency")
    moe = tuple(layer for layer in range(num_layers) if (layer + 1) % step == 0)
    # The network beside the experts has a norm of its own, and the width of the model. Two keys ask for it.
    residual = config.flag("use_residual")
    config.only("parallel_attn_mlp_res", residual)
    kinds = dense_and_moe(
        num_layers,
        moe_layers_of(config, moe, "moe_layer_frequency"),
        norm_params=hidden,
        dense=gated("block_sparse_moe.mlp", hidden, width, names=_NAMES),
        experts=Experts(
            count=count, top_k=top_k, size=width, tensors=gated("block_sparse_moe.experts", hidden, width, names=_NAMES)
        ),
        router=linear("block_sparse_moe.gate", hidden, count),
        beside=gated("residual_mlp", hidden, hidden, names=_NAMES) if residual else (),
    )
    if residual:
        kinds = (*kinds[:-1], dataclasses.replace(kinds[-1], norm_params=2 * hidden))
    return decoder(
        config,
        by_window(
            [None] * num_layers,
            grouped_query(hidden, heads, kv_heads, head_dim, bias=bias, output_bias=bias),
            heads,
            kv_heads,
            head_dim,
            norm_params=hidden,
        ),
        kinds,
        tied=False,
    )


FAMILIES = {
    "arctic": Family(
        Declared(
            required=(
                "hidden_size",
                "intermediate_size",
                "num_hidden_layers",
                "num_attention_heads",
                "num_experts",
                "top_k",
                "moe_layer_frequency",
                "use_residual",
                "parallel_attn_mlp_res",
                "vocab_size",
            ),
            optional={**HEAD_DEFAULTS, "attention_bias": "false", "tie_word_embeddings": "false"},
        ),
        _arctic,
    ),
}
