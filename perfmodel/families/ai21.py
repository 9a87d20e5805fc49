"""Jamba (AI21 Labs, arXiv:2403.19887): one attention layer to several Mamba layers, experts in every second layer."""

import math

from perfmodel.families.attention import HEAD_DEFAULTS, grouped_query, heads_of, kv_cache, linear
from perfmodel.families.feed_forward import check_top_k, decoder, dense_and_moe, gated, moe_layers_of
from perfmodel.families.keys import ConfigKeys, Declared
from perfmodel.families.mamba import mamba_1
from perfmodel.families.network import Attention, Experts, FeedForward, Shape
from perfmodel.families.registry import Family


def _every(config: ConfigKeys, num_layers: int, what: str) -> tuple[int, ...]:
    """Layers whose index leaves the rest ``*_layer_offset`` when divided by ``*_layer_period``."""
    period, offset = config.size(f"{what}_layer_period"), config.size(f"{what}_layer_offset", least=0)
    if offset >= period:
        raise config.error(f"{what}_layer_offset", f"less than {what}_layer_period, {period}")
    return tuple(range(offset, num_layers, period))


def _mixers(config: ConfigKeys, num_layers: int) -> tuple[Attention, ...]:
    hidden = config.size("hidden_size")
    heads, kv_heads, head_dim = heads_of(config)
    config.only("sliding_window")
    config.only("mamba_inner_layernorms", True)
    full = Attention(
        name="full",
        layers=_every(config, num_layers, "attn"),
        tensors=grouped_query(hidden, heads, kv_heads, head_dim),
        norm_params=hidden,
        caches=kv_cache(heads, kv_heads, head_dim, None),
    )
    automatic = config.values.get("mamba_dt_rank") == "auto"
    mamba = mamba_1(
        "mamba",
        hidden,
        config.size("mamba_expand") * hidden,
        tuple(sorted(set(range(num_layers)) - set(full.layers))),
        state=config.size("mamba_d_state"),
        rank=math.ceil(hidden / 16) if automatic else config.size("mamba_dt_rank"),
        kernel=config.size("mamba_d_conv"),
        bias=config.flag("mamba_proj_bias", default=False),
        convolution_bias=config.flag("mamba_conv_bias", default=True),
    )
    return tuple(kind for kind in (mamba, full) if kind.layers)


def _networks(config: ConfigKeys, num_layers: int) -> tuple[FeedForward, ...]:
    hidden, width = config.size("hidden_size"), config.size("intermediate_size")
    count, top_k = config.size("num_experts"), config.size("top_k")
    layers = _every(config, num_layers, "expert")
    dense = gated("feed_forward", hidden, width)
    if count == 1:  # the small models of the family: a plain network in every layer, and no router
        return (FeedForward(name="dense", layers=tuple(range(num_layers)), norm_params=hidden, dense=dense),)
    check_top_k(config, count, top_k)
    return dense_and_moe(
        num_layers,
        moe_layers_of(config, layers, "expert_layer_period", "expert_layer_offset"),
        norm_params=hidden,
        dense=dense,
        experts=Experts(count=count, top_k=top_k, size=width, tensors=gated("feed_forward.experts", hidden, width)),
        router=linear("feed_forward.router", hidden, count),
    )


def _jamba(config: ConfigKeys) -> Shape:
    num_layers = config.size("num_hidden_layers")
    return decoder(config, _mixers(config, num_layers), _networks(config, num_layers), tied=False)


FAMILIES = {
    "jamba": Family(
        Declared(
            required=(
                "hidden_size",
                "intermediate_size",
                "num_hidden_layers",
                "num_attention_heads",
                "num_experts",
                "top_k",
                "attn_layer_period",
                "attn_layer_offset",
                "expert_layer_period",
                "expert_layer_offset",
                "mamba_expand",
                "mamba_d_state",
                "mamba_d_conv",
                "mamba_dt_rank",
                "vocab_size",
            ),
            optional={
                **HEAD_DEFAULTS,
                "mamba_conv_bias": "true",
                "mamba_proj_bias": "false",
                "tie_word_embeddings": "false",
            },
        ),
        _jamba,
    ),
}
