"""ERNIE 4.5 MoE (Baidu, technical report of June 2025)."""

from perfmodel.families.attention import HEAD_DEFAULTS, by_window, grouped_query, heads_of, linear
from perfmodel.families.feed_forward import count_and_top_k, decoder, dense_and_moe, gated, moe_layers_of
from perfmodel.families.keys import ConfigKeys, Declared
from perfmodel.families.network import Experts, Shape, Tensor
from perfmodel.families.registry import Family


def _ernie(config: ConfigKeys) -> Shape:
    hidden, num_layers = config.size("hidden_size"), config.size("num_hidden_layers")
    count, top_k = count_and_top_k(config)
    width = config.size("expert_size")
    heads, kv_heads, head_dim = heads_of(config)
    config.only("use_bias", False)  # whether experts would have one too, no checkpoint shows
    first, step = config.size("moe_layer_start_index", least=0), config.size("moe_layer_interval")
    last = config.size("moe_layer_end_index", least=-1)
    last = num_layers - 1 if last == -1 else last
    if last >= num_layers:
        raise config.error("moe_layer_end_index", f"-1 for the last layer, or at most {num_layers - 1}")
    config.only("moe_use_aux_free", True)
    config.only("moe_gate", "topk")
    moe = [layer for layer in range(num_layers) if first <= layer <= last and (layer + 1) % step == 0]
    shared = config.size("shared_experts", least=0) if config.has("shared_experts") else 0
    return decoder(
        config,
        by_window(
            [None] * num_layers,
            grouped_query(hidden, heads, kv_heads, head_dim),
            heads,
            kv_heads,
            head_dim,
            norm_params=hidden,
        ),
        dense_and_moe(
            num_layers,
            moe_layers_of(config, moe, "moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval"),
            norm_params=hidden,
            dense=gated("mlp", hidden, config.size("intermediate_size")),
            experts=Experts(count=count, top_k=top_k, size=width, tensors=gated("mlp.experts", hidden, width)),
            # Balancing without an auxiliary loss adds one correction per expert to the scores.
            router=(*linear("mlp.gate", hidden, count), Tensor("mlp.moe_statics.e_score_correction_bias", (count,))),
            shared=gated("mlp.shared_experts", hidden, shared * width) if shared else (),
        ),
        tied=True,
    )


FAMILIES = {
    "ernie4_5_moe": Family(
        Declared(
            required=(
                "hidden_size",
                "intermediate_size",
                "expert_size",
                "num_hidden_layers",
                "num_attention_heads",
                "num_experts",
                "top_k",
                "moe_layer_start_index",
                "moe_layer_end_index",
                "moe_layer_interval",
                "vocab_size",
            ),
            nullable=("shared_experts",),
            optional={**HEAD_DEFAULTS, "tie_word_embeddings": "true"},
        ),
        _ernie,
    ),
}
