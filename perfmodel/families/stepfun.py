"""Step-3.7-Flash (StepFun, 2026): the language model, where no object around it describes a vision tower too."""

from perfmodel.families.attention import (
    HEAD_DEFAULTS,
    grouped_query,
    heads_of,
    kv_cache,
    linear,
    windows_of,
)
from perfmodel.families.feed_forward import (
    count_and_top_k,
    decoder,
    dense_and_moe,
    gated,
    moe_layers_of,
    prediction_layers,
)
from perfmodel.families.keys import ConfigKeys, Declared
from perfmodel.families.network import Attention, Experts, FeedForward, Shape, Tensor
from perfmodel.families.registry import Family


def _mixers(config: ConfigKeys, num_layers: int) -> tuple[Attention, ...]:
    """Attention with a gate for each head; layers with a window may have another number of heads."""
    hidden = config.size("hidden_size")
    usual = heads_of(config)
    bias = config.flag("attention_bias", default=False)
    config.only("use_head_wise_attn_gate", True)
    config.only("use_qk_norm", True)
    sliding = usual
    if config.has("attention_other_setting"):
        other = config.table("attention_other_setting")
        other.only("attention_type", "sliding_attention")
        heads, kv_heads = other.size("num_attention_heads"), other.size("num_key_value_heads")
        if heads % kv_heads:
            raise other.error(other.key("num_key_value_heads"), f"a divisor of num_attention_heads, {heads}")
        sliding = (heads, kv_heads, other.size("head_dim"))
    windows = windows_of(config, num_layers)
    kinds = []
    for window in dict.fromkeys(windows):
        heads, kv_heads, head_dim = usual if window is None else sliding
        tensors = grouped_query(hidden, heads, kv_heads, head_dim, bias=bias, output_bias=bias, norms="head")
        kinds.append(
            Attention(
                name="full" if window is None else "sliding",
                layers=tuple(layer for layer, one in enumerate(windows) if one == window),
                tensors=(*tensors, *linear("self_attn.g_proj", hidden, heads)),
                norm_params=hidden,
                caches=kv_cache(heads, kv_heads, head_dim, window),
            )
        )
    return tuple(kinds)


def _networks(config: ConfigKeys, num_layers: int) -> tuple[FeedForward, ...]:
    hidden, width = config.size("hidden_size"), config.size("expert_size")
    count, top_k = count_and_top_k(config)
    config.only("mlp_bias", False)
    config.only("use_moe_router_bias", True)
    config.only("shared_experts", 1)  # of the width share_expert_dim
    first = config.size("first_k_dense_replace", least=0)
    dense = gated("mlp", hidden, config.size("intermediate_size")) if first else ()
    return dense_and_moe(
        num_layers,
        moe_layers_of(config, range(first, num_layers), "first_k_dense_replace"),
        norm_params=hidden,
        dense=dense,
        experts=Experts(count=count, top_k=top_k, size=width, tensors=gated("moe", hidden, width)),
        router=(*linear("moe.gate", hidden, count), Tensor("moe.router_bias", (count,))),
        shared=gated("share_expert", hidden, config.size("share_expert_dim")),
    )


def _step(config: ConfigKeys) -> Shape:
    if config.has("text_config"):  # Transformers adds one of the values of its class, which are not those beside it
        raise config.error(
            "text_config",
            "null, or no such key: the language model is described at two levels, by the keys beside it and in there",
        )
    num_layers = config.size("num_hidden_layers")
    return decoder(
        config,
        _mixers(config, num_layers),
        _networks(config, num_layers),
        tied=False,
        left_out=prediction_layers(config),
    )


FAMILIES = {
    "step3p7": Family(
        Declared(
            required=(
                "hidden_size",
                "expert_size",
                "num_hidden_layers",
                "num_attention_heads",
                "num_experts",
                "top_k",
                "first_k_dense_replace",
                "share_expert_dim",
                "layer_types",
                "vocab_size",
            ),
            optional={**HEAD_DEFAULTS, "attention_bias": "false", "tie_word_embeddings": "false"},
        ),
        _step,
    ),
}
