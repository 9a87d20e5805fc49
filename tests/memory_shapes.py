"""Networks of published sizes, for the tests of memory: built by hand, so that no reader is involved."""

import dataclasses

from perfmodel.families import Attention, Cache, Experts, FeedForward
from perfmodel.families.attention import grouped_query, kv_cache, latent, linear
from perfmodel.families.feed_forward import gated
from perfmodel.families.keys import ConfigKeys
from perfmodel.model import MoEModel
from perfmodel.storage import Storage


def gemma_4_26b(storage: Storage) -> MoEModel:
    """30 layers, 5 of them global with 2 key-value heads of 512, the others with a window of 1024 and 8 of 256."""
    hidden = 2816
    wide = tuple(layer for layer in range(30) if layer % 6 == 5)
    near = tuple(layer for layer in range(30) if layer % 6 != 5)
    kinds = (("sliding", near, 8, 256, 1024), ("full", wide, 2, 512, None))
    experts = Experts(count=128, top_k=8, size=704, tensors=gated("mlp.experts", hidden, 704))
    return MoEModel(
        name="gemma-4-26b-a4b",
        family="gemma4_text",
        hidden_size=hidden,
        num_layers=30,
        attention=tuple(
            Attention(
                name=name,
                layers=layers,
                tensors=grouped_query(hidden, 16, heads, size),
                norm_params=2 * hidden,
                caches=kv_cache(16, heads, size, window),
            )
            for name, layers, heads, size, window in kinds
        ),
        feed_forward=(
            FeedForward(
                name="moe",
                layers=tuple(range(30)),
                norm_params=5 * hidden,
                dense=gated("mlp", hidden, 2112),
                router=linear("router.proj", hidden, 128),
                experts=experts,
            ),
        ),
        vocab_size=262144,
        embedding=linear("embed_tokens", hidden, 262144),
        head=linear("lm_head", hidden, 262144),
        final_norm_params=hidden,
        tied_embeddings=True,
        storage=storage,
    )


def deepseek_v3(*, indexer: bool = False, layers: int = 61, storage: Storage | None = None) -> MoEModel:
    """DeepSeek-V3, 256 experts after 3 dense layers, in 8 bits; with an indexer, DeepSeek-V3.2."""
    hidden = 7168
    sizes = {
        "hidden_size": hidden,
        "num_attention_heads": 128,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "q_lora_rank": 1536,
    }
    mixer = latent(ConfigKeys(sizes, "sizes"), tuple(range(layers)), bias=False, norm_params=2 * hidden)
    if indexer:
        keys = Cache(name="index keys", elements=128, flops_per_entry=2 * 64 * 128)
        mixer = dataclasses.replace(mixer, caches=(*mixer.caches, keys))
    experts = Experts(count=256, top_k=8, size=2048, tensors=gated("mlp.experts", hidden, 2048))
    return MoEModel(
        name="deepseek-v3",
        family="deepseek_v3",
        hidden_size=hidden,
        num_layers=layers,
        attention=(mixer,),
        feed_forward=(
            FeedForward(name="dense", layers=(0, 1, 2), norm_params=0, dense=gated("mlp", hidden, 18432)),
            FeedForward(
                name="moe",
                layers=tuple(range(3, layers)),
                norm_params=0,
                shared=gated("mlp.shared_experts", hidden, 2048),
                router=linear("mlp.gate", hidden, 256),
                experts=experts,
            ),
        ),
        vocab_size=129280,
        embedding=linear("embed_tokens", hidden, 129280),
        head=linear("lm_head", hidden, 129280),
        final_norm_params=hidden,
        tied_embeddings=False,
        storage=Storage.uniform("fp8") if storage is None else storage,
    )


def with_cache(model: MoEModel, cache: Cache) -> MoEModel:
    """The same network with this cache in every layer instead of its own."""
    kinds = tuple(dataclasses.replace(kind, caches=(cache,)) for kind in model.attention)
    return dataclasses.replace(model, attention=kinds)
