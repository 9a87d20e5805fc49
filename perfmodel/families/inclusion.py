"""Ling (inclusionAI, arXiv:2503.05139)."""

from perfmodel.families.attention import HEAD_DEFAULTS, heads_of, kv_cache, linear
from perfmodel.families.deepseek import MOE_KEYS, OPTIONAL, feed_forward
from perfmodel.families.feed_forward import decoder
from perfmodel.families.keys import ConfigKeys, Declared
from perfmodel.families.network import Attention, Shape
from perfmodel.families.registry import Family


def _bailing(config: ConfigKeys) -> Shape:
    hidden, num_layers = config.size("hidden_size"), config.size("num_hidden_layers")
    heads, kv_heads, head_dim = heads_of(config)
    config.only("use_bias", False)
    config.only("use_qk_norm", False)
    tensors = (
        *linear(
            "attention.query_key_value",
            hidden,
            (heads + 2 * kv_heads) * head_dim,
            bias=config.flag("use_qkv_bias", default=False),
        ),
        *linear("attention.dense", heads * head_dim, hidden),
    )
    attention = Attention(
        name="full",
        layers=tuple(range(num_layers)),
        tensors=tensors,
        norm_params=hidden,
        caches=kv_cache(heads, kv_heads, head_dim, None),
    )
    return decoder(
        config,
        (attention,),
        feed_forward(config, router_bias=False),
        tied=False,
        embedding_name="model.word_embeddings",
    )


FAMILIES = {
    "bailing_moe": Family(
        Declared(
            required=MOE_KEYS,
            nullable=("shared_experts",),
            optional={**HEAD_DEFAULTS, **OPTIONAL, "use_qkv_bias": "false"},
        ),
        _bailing,
    ),
}
