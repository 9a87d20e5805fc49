"""DeepSeekMoE (arXiv:2401.06066), DeepSeek-V2 (arXiv:2405.04434), V3 (arXiv:2412.19437), and others built like them."""

from perfmodel.families.attention import HEAD_DEFAULTS, by_window, grouped_query, heads_of, latent, linear
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
from perfmodel.families.registry import Family, Wrapper

#: Required keys of every family whose first layers are dense and whose experts have a width of their own.
MOE_KEYS = (
    "hidden_size",
    "intermediate_size",
    "expert_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_experts",
    "top_k",
    "first_k_dense_replace",
    "vocab_size",
)
#: Required keys of multi-head latent attention; ``q_lora_rank`` may be null beside them.
LATENT_KEYS = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_TOPK_METHODS = ("greedy", "group_limited_greedy", "noaux_tc")
OPTIONAL = {"moe_layer_freq": "1", "attention_bias": "false", "tie_word_embeddings": "false"}


def layers_after_first(config: ConfigKeys, num_layers: int) -> tuple[int, ...]:
    """MoE layers: from ``first_k_dense_replace`` on, those whose index is a multiple of ``moe_layer_freq``.

    A list as ``moe_layer_freq`` has a 1 for each MoE layer instead.
    """
    first = config.size("first_k_dense_replace", least=0)
    if isinstance(config.values.get("moe_layer_freq"), list | tuple):
        moe = list(listed_layers(config, num_layers))
        if moe and moe[0] < first:
            raise config.error("moe_layer_freq", f"0 for the first {first} layers, as first_k_dense_replace says")
    else:
        step = config.size("moe_layer_freq", default=1)
        moe = [layer for layer in range(first, num_layers) if layer % step == 0]
    if config.has("mlp_layer_types"):  # says in full what the others say in short
        kinds = config.kinds("mlp_layer_types", num_layers, "dense", "sparse")
        if [layer for layer, kind in enumerate(kinds) if kind == "sparse"] != moe:
            raise config.error("mlp_layer_types", "sparse for the layers that first_k_dense_replace leaves")
    return moe_layers_of(config, moe, "first_k_dense_replace", "moe_layer_freq")


def listed_layers(config: ConfigKeys, num_layers: int) -> tuple[int, ...]:
    """MoE layers where ``moe_layer_freq`` is a list with a 1 for each of them."""
    flags = config.sizes("moe_layer_freq", num_layers)
    if any(flag > 1 for flag in flags):
        raise config.error("moe_layer_freq", f"a list of {num_layers} numbers, each 0 or 1")
    return tuple(layer for layer, flag in enumerate(flags) if flag)


def feed_forward(
    config: ConfigKeys, *, router_bias: bool, moe: tuple[int, ...] | None = None
) -> tuple[FeedForward, ...]:
    """Dense layers first, then experts of one width with shared ones of the same width beside them.

    ``moe`` is for families that say by other keys which layers have experts.
    """
    config.only("mlp_bias", False)
    hidden, num_layers = config.size("hidden_size"), config.size("num_hidden_layers")
    count, top_k = count_and_top_k(config)
    width = config.size("expert_size")
    moe = layers_after_first(config, num_layers) if moe is None else moe
    shared = config.size("shared_experts", least=0) if config.has("shared_experts") else 0
    router = linear("mlp.gate", hidden, count)
    if router_bias:
        router += (Tensor("mlp.gate.e_score_correction_bias", (count,)),)
    return dense_and_moe(
        num_layers,
        moe,
        norm_params=hidden,
        dense=gated("mlp", hidden, config.size("intermediate_size")),
        experts=Experts(count=count, top_k=top_k, size=width, tensors=gated("mlp.experts", hidden, width)),
        router=router,
        shared=gated("mlp.shared_experts", hidden, shared * width) if shared else (),
    )


def _every_layer(config: ConfigKeys) -> tuple[int, ...]:
    return tuple(range(config.size("num_hidden_layers")))


def _plain_attention(config: ConfigKeys) -> tuple[Attention, ...]:
    hidden, num_layers = config.size("hidden_size"), config.size("num_hidden_layers")
    heads, kv_heads, head_dim = heads_of(config)
    bias = config.flag("attention_bias", default=False)
    tensors = grouped_query(hidden, heads, kv_heads, head_dim, bias=bias, output_bias=bias)
    return by_window([None] * num_layers, tensors, heads, kv_heads, head_dim, norm_params=hidden)


def _latent_attention(config: ConfigKeys) -> tuple[Attention, ...]:
    for key in LATENT_KEYS:
        if not config.has(key):
            raise config.error(key, "a value, unless use_mla is false; it has no default")
    bias = config.flag("attention_bias", default=False)
    return (latent(config, _every_layer(config), bias=bias, norm_params=config.size("hidden_size")),)


def _deepseek(config: ConfigKeys) -> Shape:
    return decoder(config, _plain_attention(config), feed_forward(config, router_bias=False), tied=False)


def _deepseek_v2(config: ConfigKeys) -> Shape:
    # The small ones of the vision models have plain attention, and say so.
    attention = _latent_attention if config.flag("use_mla", default=True) else _plain_attention
    # The larger vision models choose experts as V3 does, with a correction of the scores.
    if not config.has("topk_method"):
        config.take("topk_method", "greedy")
    corrected = config.has("topk_method") and config.choice("topk_method", *_TOPK_METHODS) == "noaux_tc"
    return decoder(config, attention(config), feed_forward(config, router_bias=corrected), tied=False)


def deepseek_v3(config: ConfigKeys) -> Shape:
    """The network of DeepSeek-V3: latent attention and experts that are chosen by corrected scores."""
    # Auxiliary-loss-free balancing adds one correction per expert to the scores.
    config.only("topk_method", "noaux_tc")
    return decoder(
        config,
        _latent_attention(config),
        feed_forward(config, router_bias=True),
        tied=False,
        left_out=prediction_layers(config),
    )


#: What the configs of DeepSeek-V3 and of families that are built like it hold.
LATENT = Declared(required=(*MOE_KEYS, *LATENT_KEYS), nullable=("q_lora_rank", "shared_experts"), optional=OPTIONAL)

FAMILIES: dict[str, Family | Wrapper] = {
    "deepseek": Family(
        Declared(required=MOE_KEYS, nullable=("shared_experts",), optional={**HEAD_DEFAULTS, **OPTIONAL}), _deepseek
    ),
    "deepseek_v2": Family(
        Declared(
            required=MOE_KEYS,
            nullable=(*LATENT_KEYS, "q_lora_rank", "shared_experts"),
            optional={**HEAD_DEFAULTS, **OPTIONAL, "use_mla": "true", "topk_method": "greedy"},
        ),
        _deepseek_v2,
    ),
    "deepseek_v3": Family(LATENT, deepseek_v3),
    "deepseek_vl_v2": Wrapper("language_config", "deepseek_v2"),
}
