"""Grok-1 (xAI, weights and code published in March 2024)."""

from perfmodel.families.attention import HEAD_DEFAULTS, by_window, grouped_query, heads_of, linear
from perfmodel.families.feed_forward import count_and_top_k, decoder, dense_and_moe, gated
from perfmodel.families.keys import ConfigKeys, Declared
from perfmodel.families.network import Experts, Shape
from perfmodel.families.registry import Family


def _grok(config: ConfigKeys) -> Shape:
    hidden, num_layers = config.size("hidden_size"), config.size("num_hidden_layers")
    count, top_k = count_and_top_k(config)
    width = config.size("intermediate_size")
    heads, kv_heads, head_dim = heads_of(config)
    return decoder(
        config,
        by_window(
            [None] * num_layers,
            grouped_query(hidden, heads, kv_heads, head_dim, prefix="attn"),
            heads,
            kv_heads,
            head_dim,
            norm_params=2 * hidden,  # one norm before attention and experts, and one after each
        ),
        dense_and_moe(
            num_layers,
            tuple(range(num_layers)),
            norm_params=2 * hidden,
            experts=Experts(
                count=count,
                top_k=top_k,
                size=width,
                tensors=gated("moe_block.experts", hidden, width, names=("linear", "linear_v", "linear_1")),
            ),
            router=linear("moe_block.gate", hidden, count),
        ),
        tied=True,
    )


FAMILIES = {
    "grok-1": Family(
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
            optional={**HEAD_DEFAULTS, "tie_word_embeddings": "true"},
        ),
        _grok,
    ),
}
