"""LFM2 with experts (Liquid AI, LFM2 report arXiv:2511.23404): gated short convolutions, and attention in some layers.

A convolution layer projects the hidden vector to three of its size. The product of two passes a depthwise convolution
over the latest few tokens, and the third gates what comes out. So a layer keeps the latest inputs of the convolution,
however long the context is.
"""

from perfmodel.families.attention import FULL, HEAD_DEFAULTS, heads_of, kv_cache, linear
from perfmodel.families.feed_forward import count_and_top_k, decoder, dense_and_moe, gated, moe_layers_of
from perfmodel.families.keys import ConfigKeys, Declared
from perfmodel.families.network import Attention, Experts, FeedForward, Shape, Tensor
from perfmodel.families.registry import Family

_CONVOLUTION = "conv"
_MATRICES = ("w1", "w3", "w2")


def _kinds(config: ConfigKeys, num_layers: int) -> list[str]:
    """The kind of each layer, from ``layer_types``, or from ``full_attn_idxs``, the layers with attention."""
    listed = config.kinds("layer_types", num_layers, FULL, _CONVOLUTION) if config.has("layer_types") else None
    if config.has("full_attn_idxs"):
        allowed = f"a list of layers, counted from 0 to {num_layers - 1}"
        indices = config.sequence("full_attn_idxs", allowed)
        if any(type(one) is not int or not 0 <= one < num_layers for one in indices):
            raise config.error("full_attn_idxs", allowed)
        full = set(indices)
        kinds = [FULL if layer in full else _CONVOLUTION for layer in range(num_layers)]
        if listed is not None and listed != kinds:
            raise config.error("full_attn_idxs", f"the layers that layer_types calls {FULL}")
        return kinds
    if listed is None:
        raise config.error("layer_types", "the kind of each layer, or full_attn_idxs")
    return listed


def _convolution(config: ConfigKeys, layers: tuple[int, ...]) -> Attention:
    hidden, kernel = config.size("hidden_size"), config.size("conv_L_cache")
    bias = config.flag("conv_bias", default=False)
    for same in ("conv_dim", "conv_dim_out"):
        config.only(same, hidden)
    return Attention(
        name="convolution",
        layers=layers,
        tensors=(
            *linear("conv.in_proj", hidden, 3 * hidden, bias=bias),
            Tensor("conv.conv", (hidden, 1, kernel)),
            *((Tensor("conv.conv.bias", (hidden,)),) if bias else ()),
            *linear("conv.out_proj", hidden, hidden, bias=bias),
        ),
        norm_params=hidden,
        convolution_elements=hidden * (kernel - 1),
    )


def _full(config: ConfigKeys, layers: tuple[int, ...]) -> Attention:
    hidden = config.size("hidden_size")
    heads, kv_heads, head_dim = heads_of(config)
    at = "self_attn"
    return Attention(
        name="full",
        layers=layers,
        tensors=(
            *linear(f"{at}.q_proj", hidden, heads * head_dim),
            *linear(f"{at}.k_proj", hidden, kv_heads * head_dim),
            *linear(f"{at}.v_proj", hidden, kv_heads * head_dim),
            *linear(f"{at}.out_proj", heads * head_dim, hidden),
            Tensor(f"{at}.q_layernorm", (head_dim,)),
            Tensor(f"{at}.k_layernorm", (head_dim,)),
        ),
        norm_params=hidden,
        caches=kv_cache(heads, kv_heads, head_dim, None),
    )


def _networks(config: ConfigKeys, num_layers: int) -> tuple[FeedForward, ...]:
    hidden, width = config.size("hidden_size"), config.size("expert_size")
    count, top_k = count_and_top_k(config)
    first = config.size("num_dense_layers", least=0)
    at = "feed_forward"
    router = linear(f"{at}.gate", hidden, count)
    if config.flag("use_expert_bias", default=True):
        router += (Tensor(f"{at}.expert_bias", (count,)),)
    return dense_and_moe(
        num_layers,
        moe_layers_of(config, range(first, num_layers), "num_dense_layers"),
        norm_params=hidden,
        dense=gated(at, hidden, config.size("intermediate_size"), names=_MATRICES),
        experts=Experts(
            count=count, top_k=top_k, size=width, tensors=gated(f"{at}.experts", hidden, width, names=_MATRICES)
        ),
        router=router,
    )


def _lfm2_moe(config: ConfigKeys) -> Shape:
    num_layers = config.size("num_hidden_layers")
    kinds = _kinds(config, num_layers)
    full = tuple(layer for layer, kind in enumerate(kinds) if kind == FULL)
    others = tuple(layer for layer, kind in enumerate(kinds) if kind != FULL)
    tied = config.flag("tie_embedding") if config.has("tie_embedding") else True
    shape = decoder(
        config,
        (
            *((_convolution(config, others),) if others else ()),
            *((_full(config, full),) if full else ()),
        ),
        _networks(config, num_layers),
        tied=tied,
    )
    config.only("tie_embedding", shape.tied_embeddings)  # an older name of tie_word_embeddings
    return shape


FAMILIES = {
    "lfm2_moe": Family(
        Declared(
            required=(
                "hidden_size",
                "intermediate_size",
                "expert_size",
                "num_hidden_layers",
                "num_attention_heads",
                "num_experts",
                "top_k",
                "num_dense_layers",
                "conv_L_cache",
                "vocab_size",
            ),
            optional={
                **HEAD_DEFAULTS,
                "conv_bias": "false",
                "use_expert_bias": "true",
                "tie_word_embeddings": "as tie_embedding says, else true",
            },
        ),
        _lfm2_moe,
    ),
}
