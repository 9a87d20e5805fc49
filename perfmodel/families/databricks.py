"""DBRX (Databricks, March 2024), whose sizes of attention and experts stand in objects of their own."""

from perfmodel.families.attention import kv_cache, linear
from perfmodel.families.feed_forward import check_top_k, decoder, dense_and_moe, gated
from perfmodel.families.keys import ConfigKeys, Declared
from perfmodel.families.network import Attention, Experts, Shape
from perfmodel.families.registry import Family

_ATTENTION = Declared(required=("kv_n_heads",))
_EXPERTS = Declared(required=("ffn_hidden_size", "num_experts", "top_k"))


def _dbrx(config: ConfigKeys) -> Shape:
    hidden, num_layers = config.size("hidden_size"), config.size("num_hidden_layers")
    heads = config.size("num_attention_heads")
    if hidden % heads:
        raise config.error(config.key("num_attention_heads"), f"a divisor of the width, {hidden}")
    attn = config.table("attn_config", declared=_ATTENTION)
    ffn = config.table("ffn_config", declared=_EXPERTS)
    kv_heads = attn.size("kv_n_heads")
    if heads % kv_heads:
        raise attn.error("kv_n_heads", f"a divisor of the number of heads, {heads}")
    count, top_k, width = ffn.size("num_experts"), ffn.size("top_k"), ffn.size("ffn_hidden_size")
    check_top_k(ffn, count, top_k)
    head_dim = hidden // heads
    layers = tuple(range(num_layers))
    at = "norm_attn_norm.attn"
    tensors = (
        *linear(f"{at}.Wqkv", hidden, (heads + 2 * kv_heads) * head_dim),
        *linear(f"{at}.out_proj", heads * head_dim, hidden),
    )
    return decoder(
        config,
        (
            Attention(
                name="full",
                layers=layers,
                tensors=tensors,
                norm_params=hidden,
                caches=kv_cache(heads, kv_heads, head_dim, None),
            ),
        ),
        dense_and_moe(
            num_layers,
            layers,
            norm_params=hidden,
            experts=Experts(
                count=count,
                top_k=top_k,
                size=width,
                tensors=gated("ffn.experts.mlp", hidden, width, names=("w1", "v1", "w2")),
            ),
            router=linear("ffn.router.layer", hidden, count),
        ),
        tied=False,
        embedding_name="transformer.wte",
    )


FAMILIES = {
    "dbrx": Family(
        Declared(
            required=(
                "hidden_size",
                "num_hidden_layers",
                "num_attention_heads",
                "vocab_size",
                "attn_config",
                "ffn_config",
            ),
            optional={"tie_word_embeddings": "false"},
        ),
        _dbrx,
    ),
}
