"""Qwen3-Next and Qwen3.5 (Alibaba, 2025): gated attention in one layer of four, Gated DeltaNet in the others.

Gated DeltaNet (arXiv:2412.06464) is linear attention: instead of keys and values of every token it keeps, for each
value head, one matrix of key size times value size, and the latest inputs of a short convolution.
"""

from collections.abc import Callable

from perfmodel.families.attention import HEAD_DEFAULTS, grouped_query, heads_of, kv_cache, linear
from perfmodel.families.feed_forward import decoder, prediction_layers
from perfmodel.families.keys import ConfigKeys, Declared
from perfmodel.families.network import Attention, FeedForward, Shape, Tensor, Tensors
from perfmodel.families.qwen import (
    EXPERT_SIZES,
    SIZES,
    SPARSE_DEFAULTS,
    SPARSE_KEYS,
    dense_layers,
    experts_of,
    sparse_layers,
)
from perfmodel.families.registry import Family, Wrapper

_FULL, _LINEAR = "full_attention", "linear_attention"


def layer_kinds(config: ConfigKeys, num_layers: int) -> list[str]:
    """The kind of each layer, from ``layer_types``, or full attention in every ``full_attention_interval``-th."""
    listed = config.kinds("layer_types", num_layers, _FULL, _LINEAR) if config.has("layer_types") else None
    if listed is not None and not config.has("full_attention_interval"):
        return listed
    if not config.has("full_attention_interval"):
        raise config.error("layer_types", "the kind of each layer, or full_attention_interval")
    interval = config.size("full_attention_interval")
    kinds = [_LINEAR if (layer + 1) % interval else _FULL for layer in range(num_layers)]
    if listed is not None and listed != kinds:
        raise config.error("full_attention_interval", "the interval at which layer_types has full attention")
    return kinds


def _delta_net(config: ConfigKeys, layers: tuple[int, ...], *, fused: bool) -> Attention:
    """Gated DeltaNet; ``fused`` checkpoints hold the input projections as two matrices, others as four."""
    hidden = config.size("hidden_size")
    key_heads, value_heads = config.size("linear_num_key_heads"), config.size("linear_num_value_heads")
    key_dim, value_dim = config.size("linear_key_head_dim"), config.size("linear_value_head_dim")
    kernel = config.size("linear_conv_kernel_dim")
    if value_heads % key_heads:
        raise config.error("linear_num_value_heads", f"a multiple of linear_num_key_heads, {key_heads}")
    values = value_heads * value_dim
    mixed = 2 * key_heads * key_dim + values  # queries, keys and values, which pass the convolution
    at = "linear_attn"
    inputs: Tensors
    if fused:
        inputs = (
            *linear(f"{at}.in_proj_qkvz", hidden, mixed + values),
            *linear(f"{at}.in_proj_ba", hidden, 2 * value_heads),
        )
    else:
        inputs = (
            *linear(f"{at}.in_proj_qkv", hidden, mixed),
            *linear(f"{at}.in_proj_z", hidden, values),
            *linear(f"{at}.in_proj_b", hidden, value_heads),
            *linear(f"{at}.in_proj_a", hidden, value_heads),
        )
    return Attention(
        name="linear",
        layers=layers,
        tensors=(
            *inputs,
            Tensor(f"{at}.conv1d", (mixed, 1, kernel)),
            Tensor(f"{at}.dt_bias", (value_heads,)),
            Tensor(f"{at}.A_log", (value_heads,)),
            Tensor(f"{at}.norm", (value_dim,)),
            *linear(f"{at}.out_proj", values, hidden),
        ),
        norm_params=hidden,
        recurrent_elements=value_heads * key_dim * value_dim,
        convolution_elements=mixed * (kernel - 1),
    )


def _attention(config: ConfigKeys, *, fused: bool) -> tuple[Attention, ...]:
    hidden, num_layers = config.size("hidden_size"), config.size("num_hidden_layers")
    kinds = layer_kinds(config, num_layers)
    full = tuple(layer for layer, kind in enumerate(kinds) if kind == _FULL)
    others = tuple(layer for layer, kind in enumerate(kinds) if kind == _LINEAR)
    found: list[Attention] = []
    if others:
        found.append(_delta_net(config, others, fused=fused))
    if full:
        heads, kv_heads, head_dim = heads_of(config)
        bias = config.flag("attention_bias", default=False)
        gate = config.flag("attn_output_gate", default=True)
        tensors = grouped_query(
            hidden, heads, kv_heads, head_dim, bias=bias, output_bias=bias, norms="head", output_gate=gate
        )
        caches = kv_cache(heads, kv_heads, head_dim, None)
        found.append(Attention(name="full", layers=full, tensors=tensors, norm_params=hidden, caches=caches))
    return tuple(found)


def _shape(config: ConfigKeys, feed_forward: Callable[[ConfigKeys], tuple[FeedForward, ...]], *, fused: bool) -> Shape:
    return decoder(
        config,
        _attention(config, fused=fused),
        feed_forward(config),
        tied=False,
        left_out=prediction_layers(config),
    )


def _some_moe(config: ConfigKeys) -> tuple[FeedForward, ...]:
    return experts_of(config, sparse_layers(config, config.size("num_hidden_layers")), shared=True)


def _all_moe(config: ConfigKeys) -> tuple[FeedForward, ...]:
    return experts_of(config, tuple(range(config.size("num_hidden_layers"))), shared=True)


def _qwen3_next(config: ConfigKeys) -> Shape:
    return _shape(config, _some_moe, fused=True)


def _qwen3_5(config: ConfigKeys) -> Shape:
    return _shape(config, dense_layers, fused=False)


def _qwen3_5_moe(config: ConfigKeys) -> Shape:
    return _shape(config, _all_moe, fused=False)


_LINEAR_SIZES = (
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
)
_REQUIRED = (*SIZES, *_LINEAR_SIZES)
_OPTIONAL = {
    **HEAD_DEFAULTS,
    "attention_bias": "false",
    "attn_output_gate": "true",
    "tie_word_embeddings": "false",
}
_SHARED = "shared_expert_intermediate_size"

FAMILIES: dict[str, Family | Wrapper] = {
    "qwen3_next": Family(
        Declared(
            required=(*_REQUIRED, *EXPERT_SIZES, *SPARSE_KEYS, _SHARED), optional={**_OPTIONAL, **SPARSE_DEFAULTS}
        ),
        _qwen3_next,
    ),
    "qwen3_5": Wrapper("text_config", "qwen3_5_text"),
    "qwen3_5_text": Family(Declared(required=(*_REQUIRED, "intermediate_size"), optional=_OPTIONAL), _qwen3_5),
    "qwen3_5_moe": Wrapper("text_config", "qwen3_5_moe_text"),
    "qwen3_5_moe_text": Family(
        Declared(required=(*_REQUIRED, *EXPERT_SIZES, _SHARED), optional=_OPTIONAL), _qwen3_5_moe
    ),
}
