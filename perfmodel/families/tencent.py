"""Hunyuan-Large (Tencent, arXiv:2411.02265) and Hunyuan-A13B (June 2025)."""

import dataclasses

from perfmodel.families.attention import HEAD_DEFAULTS, grouped_query, heads_of, kv_cache, linear
from perfmodel.families.feed_forward import decoder, gated, moe_layers_of
from perfmodel.families.keys import ConfigKeys, Declared
from perfmodel.families.network import Attention, Experts, FeedForward, Shape, Tensor
from perfmodel.families.registry import Family


def _attention(config: ConfigKeys, num_layers: int) -> tuple[Attention, ...]:
    """Usual attention; with cross-layer attention only every so-many-th layer makes keys and values."""
    hidden = config.size("hidden_size")
    heads, kv_heads, head_dim = heads_of(config)
    config.only("use_mla", False)
    bias = config.flag("attention_bias", default=False)
    norms = tuple(Tensor(f"self_attn.{name}_layernorm", (head_dim,)) for name in ("query", "key"))
    if not config.flag("use_qk_norm", default=True):
        norms = ()
    tensors = grouped_query(hidden, heads, kv_heads, head_dim, bias=bias, output_bias=bias) + norms
    share = config.size("cla_share_factor") if config.flag("use_cla", default=False) else 1
    config.has("cla_share_factor")
    own = Attention(
        name="full",
        layers=tuple(range(0, num_layers, share)),
        tensors=tensors,
        norm_params=hidden,
        caches=kv_cache(heads, kv_heads, head_dim, None),
    )
    sharing = dataclasses.replace(
        own,
        name="sharing",
        layers=tuple(layer for layer in range(num_layers) if layer % share),
        tensors=tuple(one for one in tensors if not one.name.startswith(("self_attn.k_proj", "self_attn.v_proj"))),
        caches=tuple(dataclasses.replace(cache, borrowed=True) for cache in own.caches),
    )
    return (own, sharing) if sharing.layers else (own,)


def _per_layer(config: ConfigKeys, num_layers: int) -> list[tuple[int, int, int]]:
    """Expert width, top-k and shared experts of every layer; each may be a list or one number for all."""
    if config.has("expert_size"):
        widths = config.sizes("expert_size", num_layers, least=1)
    else:
        widths = [config.size("expert_size", default=config.size("intermediate_size"))] * num_layers
    top_ks = config.sizes("top_k", num_layers, least=1)
    mixed = config.flag("use_mixed_mlp_moe", default=True)
    shared = config.sizes("shared_experts", num_layers) if mixed else [0] * num_layers
    config.has("shared_experts")
    return list(zip(widths, top_ks, shared, strict=True))


def _networks(config: ConfigKeys, num_layers: int) -> tuple[FeedForward, ...]:
    """One kind of layers for each different width, top-k and number of shared experts."""
    hidden, count = config.size("hidden_size"), config.size("num_experts")
    config.only("group_limited_greedy", False)
    config.only("expert_groups", 1, False)
    config.only("kept_groups", 1, False)
    skipped = config.size("moe_layer_num_skipped", least=0, default=0)
    moe = moe_layers_of(config, range(skipped, num_layers), "moe_layer_num_skipped")
    at: dict[tuple[int, int, int], list[int]] = {}
    parts = _per_layer(config, num_layers)
    for layer in moe:
        at.setdefault(parts[layer], []).append(layer)
    kinds = []
    if skipped:
        dense = gated("mlp", hidden, config.size("intermediate_size"))
        kinds.append(FeedForward(name="dense", layers=tuple(range(skipped)), norm_params=hidden, dense=dense))
    for (width, top_k, shared), layers in at.items():
        if top_k > count:
            raise config.error(config.key("top_k"), f"at most the number of experts, {count}")
        kinds.append(
            FeedForward(
                name="moe",
                layers=tuple(layers),
                norm_params=hidden,
                shared=gated("mlp.shared_mlp", hidden, shared * width) if shared else (),
                router=linear("mlp.gate.wg", hidden, count),
                experts=Experts(count=count, top_k=top_k, size=width, tensors=gated("mlp.experts", hidden, width)),
            )
        )
    return tuple(kinds)


def _hunyuan(config: ConfigKeys) -> Shape:
    num_layers = config.size("num_hidden_layers")
    attention = _attention(config, num_layers)
    shares = "layers without keys and values of their own attend to those of a layer before (use_cla)"
    return decoder(
        config,
        attention,
        _networks(config, num_layers),
        tied=False,
        left_out=(shares,) if len(attention) > 1 else (),
    )


_REQUIRED = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_experts",
    "top_k",
    "vocab_size",
)
_OPTIONAL = {
    **HEAD_DEFAULTS,
    "attention_bias": "false",
    "expert_size": "intermediate_size",
    "moe_layer_num_skipped": "0",
    "tie_word_embeddings": "false",
}
_FLAGS = {"use_cla": "false", "use_mixed_mlp_moe": "true", "use_qk_norm": "true"}

FAMILIES = {
    "hunyuan": Family(Declared(required=(*_REQUIRED, *_FLAGS), optional=_OPTIONAL), _hunyuan),
    "hunyuan_v1_moe": Family(Declared(required=_REQUIRED, optional={**_OPTIONAL, **_FLAGS}), _hunyuan),
}
