"""Qwen3 and Qwen3-MoE (Alibaba, arXiv:2505.09388)."""

from perfmodel.families.attention import HEAD_DEFAULTS, by_window, grouped_query, heads_of, linear, windows_of
from perfmodel.families.feed_forward import count_and_top_k, decoder, dense_and_moe, gated, moe_layers_of
from perfmodel.families.keys import ConfigKeys, Declared
from perfmodel.families.network import Attention, Experts, FeedForward, Shape
from perfmodel.families.registry import Family

_REQUIRED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
_OPTIONAL = {
    **HEAD_DEFAULTS,
    "attention_bias": "false",
    "use_sliding_window": "false",
    "tie_word_embeddings": "false",
}


def sparse_layers(config: ConfigKeys, num_layers: int) -> tuple[int, ...]:
    """Layer i has experts iff it is not in ``mlp_only_layers`` and ``(i + 1) % decoder_sparse_step`` is 0."""
    step = config.size("decoder_sparse_step")
    allowed = f"a list of layer indices from 0 to {num_layers - 1}"
    dense = config.sequence("mlp_only_layers", allowed)
    if any(type(layer) is not int or not 0 <= layer < num_layers for layer in dense):
        raise config.error("mlp_only_layers", allowed)
    without = set(dense)
    return tuple(layer for layer in range(num_layers) if layer not in without and (layer + 1) % step == 0)


def _attention(config: ConfigKeys, num_layers: int) -> tuple[Attention, ...]:
    hidden = config.size("hidden_size")
    heads, kv_heads, head_dim = heads_of(config)
    bias = config.flag("attention_bias", default=False)
    tensors = grouped_query(hidden, heads, kv_heads, head_dim, bias=bias, output_bias=bias, norms="head")
    windows = windows_of(config, num_layers, switched=True)
    return by_window(windows, tensors, heads, kv_heads, head_dim, norm_params=hidden)


def _qwen3_moe(config: ConfigKeys) -> Shape:
    hidden, num_layers = config.size("hidden_size"), config.size("num_hidden_layers")
    count, top_k = count_and_top_k(config)
    width = config.size("expert_size")
    moe = moe_layers_of(config, sparse_layers(config, num_layers), "decoder_sparse_step", "mlp_only_layers")
    dense = gated("mlp", hidden, config.size("intermediate_size")) if len(moe) < num_layers else ()
    return decoder(
        config,
        _attention(config, num_layers),
        dense_and_moe(
            num_layers,
            moe,
            norm_params=hidden,
            dense=dense,
            experts=Experts(count=count, top_k=top_k, size=width, tensors=gated("mlp.experts", hidden, width)),
            router=linear("mlp.gate", hidden, count),
        ),
        tied=False,
    )


def _qwen3(config: ConfigKeys) -> Shape:
    hidden, num_layers = config.size("hidden_size"), config.size("num_hidden_layers")
    dense = gated("mlp", hidden, config.size("intermediate_size"))
    layers = tuple(range(num_layers))
    return decoder(
        config,
        _attention(config, num_layers),
        (FeedForward(name="dense", layers=layers, norm_params=hidden, dense=dense),),
        tied=False,
    )


FAMILIES = {
    "qwen3": Family(Declared(required=(*_REQUIRED, "intermediate_size"), optional=_OPTIONAL), _qwen3),
    "qwen3_moe": Family(
        Declared(
            required=(*_REQUIRED, "num_experts", "top_k", "expert_size", "decoder_sparse_step"), optional=_OPTIONAL
        ),
        _qwen3_moe,
    ),
}
