"""K-EXAONE (LG AI Research, January 2026)."""

from perfmodel.families.attention import HEAD_DEFAULTS, by_window, grouped_query, heads_of, windows_of
from perfmodel.families.deepseek import MOE_KEYS, feed_forward
from perfmodel.families.feed_forward import decoder, moe_layers_of, prediction_layers
from perfmodel.families.keys import ConfigKeys, Declared
from perfmodel.families.network import Shape
from perfmodel.families.registry import Family


def _exaone(config: ConfigKeys) -> Shape:
    hidden, num_layers = config.size("hidden_size"), config.size("num_hidden_layers")
    heads, kv_heads, head_dim = heads_of(config)
    moe = range(config.size("first_k_dense_replace", least=0), num_layers)
    kinds = feed_forward(config, router_bias=True, moe=moe_layers_of(config, moe, "first_k_dense_replace"))
    # Says in full what first_k_dense_replace says in short.
    config.only("is_moe_layer", [layer in moe for layer in range(num_layers)])
    return decoder(
        config,
        by_window(
            windows_of(config, num_layers),
            grouped_query(hidden, heads, kv_heads, head_dim, norms="head"),
            heads,
            kv_heads,
            head_dim,
            norm_params=hidden,
        ),
        kinds,
        tied=False,
        left_out=prediction_layers(config),
    )


FAMILIES = {
    "exaone_moe": Family(
        Declared(
            required=(*MOE_KEYS, "layer_types"),
            nullable=("shared_experts",),
            optional={**HEAD_DEFAULTS, "tie_word_embeddings": "false"},
        ),
        _exaone,
    ),
}
