"""OLMoE (Allen Institute for AI, arXiv:2409.02060)."""

from perfmodel.families.attention import HEAD_DEFAULTS, by_window, grouped_query, heads_of, linear
from perfmodel.families.feed_forward import count_and_top_k, decoder, dense_and_moe, gated
from perfmodel.families.keys import ConfigKeys, Declared
from perfmodel.families.network import Experts, Shape
from perfmodel.families.registry import Family


def _olmoe(config: ConfigKeys) -> Shape:
    hidden, num_layers = config.size("hidden_size"), config.size("num_hidden_layers")
    count, top_k = count_and_top_k(config)
    width = config.size("intermediate_size")
    heads, kv_heads, head_dim = heads_of(config)
    bias = config.flag("attention_bias", default=False)
    tensors = grouped_query(hidden, heads, kv_heads, head_dim, bias=bias, output_bias=bias, norms="whole")
    return decoder(
        config,
        by_window([None] * num_layers, tensors, heads, kv_heads, head_dim, norm_params=hidden),
        dense_and_moe(
            num_layers,
            tuple(range(num_layers)),
            norm_params=hidden,
            experts=Experts(count=count, top_k=top_k, size=width, tensors=gated("mlp.experts", hidden, width)),
            router=linear("mlp.gate", hidden, count),
        ),
        tied=False,
    )


FAMILIES = {
    "olmoe": Family(
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
            optional={**HEAD_DEFAULTS, "attention_bias": "false", "tie_word_embeddings": "false"},
        ),
        _olmoe,
    ),
}
