"""MiniMax-Text-01 and M1 (arXiv:2506.13585), M2 (October 2025) and M3 (2026)."""

import dataclasses
from collections.abc import Sequence

from perfmodel.families.attention import FULL, HEAD_DEFAULTS, grouped_query, heads_of, kv_cache, linear
from perfmodel.families.deepseek import listed_layers
from perfmodel.families.feed_forward import (
    count_and_top_k,
    decoder,
    dense_and_moe,
    gated,
    moe_layers_of,
    prediction_layers,
)
from perfmodel.families.keys import ConfigKeys, Declared
from perfmodel.families.network import Attention, Cache, Experts, FeedForward, Shape, Tensor, Tensors
from perfmodel.families.registry import Family, Wrapper

_REQUIRED = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_experts",
    "top_k",
    "vocab_size",
)
_LINEAR = "linear_attention"
_MOE = "block_sparse_moe"


def _networks(
    config: ConfigKeys,
    moe: Sequence[int] | None = None,
    *,
    router_bias: bool,
    dense: Tensors = (),
    shared: Tensors = (),
) -> tuple[FeedForward, ...]:
    """Experts of the width ``intermediate_size``, by default in every layer; the names are those of Mixtral."""
    hidden, num_layers = config.size("hidden_size"), config.size("num_hidden_layers")
    count, top_k = count_and_top_k(config)
    width = config.size("intermediate_size")
    router = linear(f"{_MOE}.gate", hidden, count)
    if router_bias:
        router += (Tensor(f"{_MOE}.e_score_correction_bias", (count,)),)
    return dense_and_moe(
        num_layers,
        tuple(range(num_layers) if moe is None else moe),
        norm_params=hidden,
        dense=dense,
        experts=Experts(
            count=count,
            top_k=top_k,
            size=width,
            tensors=gated(f"{_MOE}.experts", hidden, width, names=("w1", "w3", "w2")),
        ),
        router=router,
        shared=shared,
    )


def _flags(config: ConfigKeys, field: str, num_layers: int) -> list[bool]:
    """A number for each layer, 0 or 1."""
    allowed = f"a list of {num_layers} numbers, each 0 or 1"
    flags = config.sequence(field, allowed)
    if len(flags) != num_layers or any(type(flag) is not int or flag not in (0, 1) for flag in flags):
        raise config.error(field, allowed)
    return [flag == 1 for flag in flags]


def _lightning(config: ConfigKeys, full: Sequence[bool]) -> Shape:
    """Lightning attention (arXiv:2401.04658), a square state for each head, and some layers of usual attention."""
    hidden = config.size("hidden_size")
    heads, kv_heads, head_dim = heads_of(config)
    config.only("sliding_window")
    config.only("shared_intermediate_size", 0)
    config.has("shared_moe_mode")  # of the shared network, which there is none of
    width, at = heads * head_dim, "self_attn"
    mixers = (
        Attention(
            name="linear",
            layers=tuple(layer for layer, one in enumerate(full) if not one),
            tensors=(
                *linear(f"{at}.qkv_proj", hidden, 3 * width),
                Tensor(f"{at}.norm", (width,)),
                *linear(f"{at}.output_gate", hidden, width),
                *linear(f"{at}.out_proj", width, hidden),
            ),
            norm_params=hidden,
            recurrent_elements=width * head_dim,
        ),
        Attention(
            name="full",
            layers=tuple(layer for layer, one in enumerate(full) if one),
            tensors=grouped_query(hidden, heads, kv_heads, head_dim),
            norm_params=hidden,
            caches=kv_cache(heads, kv_heads, head_dim, None),
        ),
    )
    return decoder(
        config, tuple(kind for kind in mixers if kind.layers), _networks(config, router_bias=False), tied=False
    )


def _minimax_m1(config: ConfigKeys) -> Shape:
    return _lightning(config, _flags(config, "attn_type_list", config.size("num_hidden_layers")))


def _minimax(config: ConfigKeys) -> Shape:
    kinds = config.kinds("layer_types", config.size("num_hidden_layers"), FULL, _LINEAR)
    return _lightning(config, [kind == FULL for kind in kinds])


def _minimax_m2(config: ConfigKeys) -> Shape:
    hidden, num_layers = config.size("hidden_size"), config.size("num_hidden_layers")
    heads, kv_heads, head_dim = heads_of(config)
    config.only("shared_intermediate_size", 0)
    config.only("attn_type_list", [1] * num_layers)
    config.only("use_qk_norm", True)
    config.only("qk_norm_type", "per_layer")
    config.only("use_routing_bias", True)
    attention = Attention(
        name="full",
        layers=tuple(range(num_layers)),
        tensors=grouped_query(hidden, heads, kv_heads, head_dim, norms="whole"),
        norm_params=hidden,
        caches=kv_cache(heads, kv_heads, head_dim, None),
    )
    return decoder(
        config,
        (attention,),
        _networks(config, router_bias=True),
        tied=False,
        left_out=prediction_layers(config),
    )


_SPARSE = Declared(
    required=(
        "use_sparse_attention",
        "sparse_attention_freq",
        "sparse_disable_index_value",
        "sparse_index_dim",
        "sparse_num_index_heads",
        "sparse_block_size",
        "sparse_topk_blocks",
    )
)


def _blocks_in_table(config: ConfigKeys, num_layers: int) -> tuple[list[bool], int, int, int]:
    """Published files: the sparse layers, index heads, size of an index head, and keys that a query reads."""
    table = config.table("sparse_attention_config", declared=_SPARSE)
    sparse = _flags(table, "sparse_attention_freq", num_layers)
    if not table.flag("use_sparse_attention"):
        sparse = [False] * num_layers
    without_value = _flags(table, "sparse_disable_index_value", num_layers)
    if any(one and not off for one, off in zip(sparse, without_value, strict=True)):
        raise table.error("sparse_disable_index_value", "1 for every sparse layer: index values are not known")
    table.only("sparse_init_block", 0)
    picked = table.size("sparse_topk_blocks") * table.size("sparse_block_size")
    return sparse, table.size("sparse_num_index_heads"), table.size("sparse_index_dim"), picked


def _blocks_in_keys(config: ConfigKeys, num_layers: int) -> tuple[list[bool], int, int, int]:
    """The same from the keys of files that Transformers wrote."""
    sparse = [kind != FULL for kind in config.kinds("layer_types", num_layers, FULL, "minimax_m3_sparse")]
    picked = config.size("index_topk_blocks") * config.size("index_block_size")
    return sparse, config.size("index_n_heads"), config.size("index_head_dim"), picked


def _blocks(config: ConfigKeys, num_layers: int) -> tuple[list[bool], int, int, int]:
    """From either form, which must agree where a file has both."""
    if not config.has("layer_types"):
        return _blocks_in_table(config, num_layers)
    found = _blocks_in_keys(config, num_layers)
    if config.has("sparse_attention_config") and _blocks_in_table(config, num_layers) != found:
        raise config.error("sparse_attention_config", "what layer_types and the keys that start with index_ say")
    return found


def _block_sparse(config: ConfigKeys) -> tuple[Attention, ...]:
    """Usual attention, and layers in which an indexer picks blocks of keys for each key-value head."""
    hidden, num_layers = config.size("hidden_size"), config.size("num_hidden_layers")
    heads, kv_heads, head_dim = heads_of(config)
    config.only("attention_output_gate", False)
    sparse, index_heads, size, picked = _blocks(config, num_layers)
    config.only("use_qk_norm", True)
    config.only("qk_norm_type", "per_head")
    tensors = grouped_query(hidden, heads, kv_heads, head_dim, norms="head")
    at = "self_attn"
    indexer = (
        *linear(f"{at}.index_q_proj", hidden, index_heads * size),
        *linear(f"{at}.index_k_proj", hidden, size),
        Tensor(f"{at}.index_q_norm", (size,)),
        Tensor(f"{at}.index_k_norm", (size,)),
    )
    (whole,) = kv_cache(heads, kv_heads, head_dim, None)
    part = dataclasses.replace(whole, read_entries=picked)
    # Every query is scored against the index keys of the whole context, which all index heads share.
    keys = Cache(name="index keys", elements=size, flops_per_entry=2 * index_heads * size)
    kinds = [("full", False, tensors, (whole,)), ("sparse", True, tensors + indexer, (part, keys))]
    return tuple(
        Attention(
            name=name,
            layers=tuple(layer for layer, one in enumerate(sparse) if one == wanted),
            tensors=parts,
            norm_params=hidden,
            caches=caches,
        )
        for name, wanted, parts, caches in kinds
        if wanted in sparse
    )


def _listed_moe(config: ConfigKeys, num_layers: int) -> tuple[int, ...]:
    """MoE layers by ``moe_layer_freq``, or by ``mlp_layer_types`` where Transformers wrote the file."""
    if config.has("moe_layer_freq") or not config.has("mlp_layer_types"):
        return moe_layers_of(config, listed_layers(config, num_layers), "moe_layer_freq")
    kinds = config.kinds("mlp_layer_types", num_layers, "dense", "sparse")
    moe = [layer for layer, kind in enumerate(kinds) if kind == "sparse"]
    return moe_layers_of(config, moe, "mlp_layer_types")


def _minimax_m3(config: ConfigKeys) -> Shape:
    hidden, num_layers = config.size("hidden_size"), config.size("num_hidden_layers")
    moe = _listed_moe(config, num_layers)
    config.only("first_k_dense_replace", moe[0])  # the lists say the same in full
    config.only("expert_size", config.size("intermediate_size"))
    config.only("shared_experts", 1)
    config.only("use_routing_bias", True)
    dense = gated("mlp", hidden, config.size("dense_intermediate_size")) if len(moe) < num_layers else ()
    return decoder(
        config,
        _block_sparse(config),
        _networks(
            config,
            moe,
            router_bias=True,
            dense=dense,
            shared=gated(f"{_MOE}.shared_experts", hidden, config.size("shared_intermediate_size")),
        ),
        tied=False,
        left_out=prediction_layers(config),
    )


_OPTIONAL = {**HEAD_DEFAULTS, "tie_word_embeddings": "false"}
_M1 = Family(Declared(required=(*_REQUIRED, "attn_type_list"), optional=_OPTIONAL), _minimax_m1)
_M3 = Family(
    Declared(
        required=(*_REQUIRED, "shared_intermediate_size"),
        optional=_OPTIONAL,
    ),
    _minimax_m3,
)

FAMILIES = {
    "minimax": Family(Declared(required=(*_REQUIRED, "layer_types"), optional=_OPTIONAL), _minimax),
    "minimax_text_01": _M1,
    "minimax_m1": _M1,
    "minimax_m2": Family(Declared(required=_REQUIRED, optional=_OPTIONAL), _minimax_m2),
    "minimax_m3": _M3,
    "minimax_m3_vl_text": _M3,
    "minimax_m3_vl": Wrapper("text_config", "minimax_m3_vl_text"),
}
