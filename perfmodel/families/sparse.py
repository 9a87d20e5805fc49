"""Latent attention that reads only what an indexer picks: DeepSeek-V3.2 (arXiv:2512.02556) and GLM-5 (Z.ai)."""

import dataclasses

from perfmodel.families.attention import latent, linear
from perfmodel.families.deepseek import LATENT_KEYS, MOE_KEYS, OPTIONAL, feed_forward
from perfmodel.families.feed_forward import decoder, prediction_layers
from perfmodel.families.keys import ConfigKeys, Declared
from perfmodel.families.network import Attention, Cache, Shape, Tensor
from perfmodel.families.registry import Family


def indexed(config: ConfigKeys, whole: tuple[int, ...], sharing: tuple[int, ...] = ()) -> tuple[Attention, ...]:
    """Latent attention with an indexer in the layers ``whole``; those of ``sharing`` reuse picks."""
    hidden, rank = config.size("hidden_size"), config.size("q_lora_rank")
    heads, size, picked = config.size("index_n_heads"), config.size("index_head_dim"), config.size("index_topk")
    bias = config.flag("attention_bias", default=False)
    at = "self_attn.indexer"
    indexer = (
        *linear(f"{at}.wq_b", rank, heads * size),
        *linear(f"{at}.wk", hidden, size),
        Tensor(f"{at}.k_norm", (size,)),
        Tensor(f"{at}.k_norm.bias", (size,)),
        *linear(f"{at}.weights_proj", hidden, heads),
    )
    kinds = []
    for layers, owns in ((whole, True), (sharing, False)):
        if not layers:
            continue
        plain = latent(config, layers, bias=bias, norm_params=hidden)
        caches = tuple(dataclasses.replace(cache, read_entries=picked) for cache in plain.caches)
        # Every query is scored against the index keys of the whole context.
        keys = Cache(name="index keys", elements=size, flops_per_entry=2 * heads * size)
        kinds.append(
            dataclasses.replace(
                plain,
                name="sparse latent",
                tensors=plain.tensors + (indexer if owns else ()),
                caches=(*caches, keys) if owns else caches,
            )
        )
    return tuple(kinds)


def _deepseek_v32(config: ConfigKeys) -> Shape:
    layers = tuple(range(config.size("num_hidden_layers")))
    return decoder(
        config,
        indexed(config, layers),
        feed_forward(config, router_bias=True),
        tied=False,
        left_out=prediction_layers(config),
    )


def _indexer_layers(config: ConfigKeys, num_layers: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Layers with an indexer of their own, and layers that share one (GLM-5.2)."""
    if config.has("indexer_types"):
        kinds = config.kinds("indexer_types", num_layers, "full", "shared")
        if kinds[0] == "shared":
            raise config.error("indexer_types", "a list that starts with full")
        whole = tuple(layer for layer, kind in enumerate(kinds) if kind == "full")
        return whole, tuple(layer for layer, kind in enumerate(kinds) if kind == "shared")
    for key, usual in (("index_topk_freq", 1), ("index_topk_pattern", None)):
        if config.values.get(key) not in (None, usual):
            raise config.error(key, f"{usual}, unless indexer_types lists the layers")
    return tuple(range(num_layers)), ()


def _glm_dsa(config: ConfigKeys) -> Shape:
    num_layers = config.size("num_hidden_layers")
    return decoder(
        config,
        indexed(config, *_indexer_layers(config, num_layers)),
        feed_forward(config, router_bias=True),
        tied=False,
        left_out=prediction_layers(config),
    )


_DECLARED = Declared(
    required=(*MOE_KEYS, *LATENT_KEYS, "q_lora_rank", "index_n_heads", "index_head_dim", "index_topk"),
    nullable=("shared_experts",),
    optional=OPTIONAL,
)

FAMILIES = {
    "deepseek_v32": Family(_DECLARED, _deepseek_v32),
    "glm_moe_dsa": Family(_DECLARED, _glm_dsa),
}
