"""GLM-4.5, GLM-4.6, GLM-4.5V and GLM-4.7-Flash (Z.ai, arXiv:2508.06471, arXiv:2507.01006)."""

from perfmodel.families.attention import HEAD_DEFAULTS, by_window, grouped_query, heads_of
from perfmodel.families.deepseek import LATENT, MOE_KEYS, OPTIONAL, deepseek_v3, feed_forward
from perfmodel.families.feed_forward import decoder, prediction_layers
from perfmodel.families.keys import ConfigKeys, Declared
from perfmodel.families.network import Shape
from perfmodel.families.registry import Family, Wrapper


def _glm(config: ConfigKeys, *, biased: bool, normed: bool) -> Shape:
    hidden, num_layers = config.size("hidden_size"), config.size("num_hidden_layers")
    heads, kv_heads, head_dim = heads_of(config)
    tensors = grouped_query(
        hidden,
        heads,
        kv_heads,
        head_dim,
        bias=config.flag("attention_bias", default=biased),  # of queries, keys and values, never of the output
        norms="head" if normed else "none",
    )
    return decoder(
        config,
        by_window([None] * num_layers, tensors, heads, kv_heads, head_dim, norm_params=hidden),
        feed_forward(config, router_bias=True),
        tied=False,
        left_out=prediction_layers(config),
    )


def _glm4_moe(config: ConfigKeys) -> Shape:
    return _glm(config, biased=False, normed=config.flag("use_qk_norm", default=False))


def _glm4v_moe(config: ConfigKeys) -> Shape:
    config.only("use_qk_norm", False)
    return _glm(config, biased=True, normed=False)


_OPTIONAL = {**HEAD_DEFAULTS, **OPTIONAL}

FAMILIES: dict[str, Family | Wrapper] = {
    "glm4_moe": Family(
        Declared(required=MOE_KEYS, nullable=("shared_experts",), optional={**_OPTIONAL, "use_qk_norm": "false"}),
        _glm4_moe,
    ),
    "glm4v_moe_text": Family(
        Declared(required=MOE_KEYS, nullable=("shared_experts",), optional={**_OPTIONAL, "attention_bias": "true"}),
        _glm4v_moe,
    ),
    "glm4v_moe": Wrapper("text_config", "glm4v_moe_text"),
    "glm4_moe_lite": Family(LATENT, deepseek_v3),
}
