"""MiMo-7B (Xiaomi, arXiv:2505.07608), a dense decoder, and MiMo-V2-Flash (December 2025)."""

from collections.abc import Sequence

from perfmodel.families.attention import HEAD_DEFAULTS, by_window, grouped_query, heads_of, kv_cache, windows_of
from perfmodel.families.deepseek import feed_forward, listed_layers
from perfmodel.families.feed_forward import decoder, gated, moe_layers_of, prediction_layers
from perfmodel.families.keys import ConfigKeys, Declared
from perfmodel.families.network import Attention, FeedForward, Shape, Tensor
from perfmodel.families.registry import Family


def _mimo(config: ConfigKeys) -> Shape:
    hidden, num_layers = config.size("hidden_size"), config.size("num_hidden_layers")
    heads, kv_heads, head_dim = heads_of(config)
    config.only("attention_bias", True)  # of queries, keys and values, as in Qwen2; the output has none
    tensors = grouped_query(hidden, heads, kv_heads, head_dim, bias=True)
    dense = gated("mlp", hidden, config.size("intermediate_size"))
    return decoder(
        config,
        by_window(
            windows_of(config, num_layers, switched=True), tensors, heads, kv_heads, head_dim, norm_params=hidden
        ),
        (FeedForward(name="dense", layers=tuple(range(num_layers)), norm_params=hidden, dense=dense),),
        tied=False,
        left_out=prediction_layers(config),
    )


def _kind(
    config: ConfigKeys, layers: Sequence[int], prefix: str, sizes: tuple[int, int, int], window: int | None
) -> Attention:
    """Layers that see the whole context or a window; the latter have other heads, by keys that start with ``swa_``."""
    hidden, (heads, kv_heads, head_dim) = config.size("hidden_size"), sizes
    value_dim = config.size(f"{prefix}v_head_dim")
    bias = config.flag("attention_bias", default=False)
    tensors = grouped_query(hidden, heads, kv_heads, head_dim, value_dim=value_dim, bias=bias)
    if config.flag(f"add_{'swa' if prefix else 'full'}_attention_sink_bias"):
        tensors += (Tensor("self_attn.attention_sink_bias", (heads,)),)
    return Attention(
        name="sliding" if prefix else "full",
        layers=tuple(layers),
        tensors=tensors,
        norm_params=hidden,
        caches=kv_cache(heads, kv_heads, head_dim, window, value_dim=value_dim),
    )


def _mixers(config: ConfigKeys, num_layers: int) -> tuple[Attention, ...]:
    allowed = f"a list of {num_layers} numbers, each 0 (whole context) or 1 (window)"
    slides = config.sequence("hybrid_layer_pattern", allowed)
    if len(slides) != num_layers or any(type(one) is not int or one not in (0, 1) for one in slides):
        raise config.error("hybrid_layer_pattern", allowed)
    window = config.size("sliding_window")
    # Transformers counts the token that looks back too, and then writes one more beside the published size.
    if config.has("sliding_window_size") and window == config.size("sliding_window_size") + 1:
        window -= 1
    for same in ("sliding_window_size", "attention_chunk_size"):
        config.only(same, window)
    heads, kv_heads = config.size("swa_num_attention_heads"), config.size("swa_num_key_value_heads")
    if heads % kv_heads:
        raise config.error("swa_num_key_value_heads", f"a divisor of swa_num_attention_heads, {heads}")
    swa = (heads, kv_heads, config.size("swa_head_dim"))
    kinds = (
        _kind(config, [layer for layer, one in enumerate(slides) if not one], "", heads_of(config), None),
        _kind(config, [layer for layer, one in enumerate(slides) if one], "swa_", swa, window),
    )
    return tuple(kind for kind in kinds if kind.layers)


def _mimo_v2(config: ConfigKeys) -> Shape:
    num_layers = config.size("num_hidden_layers")
    moe = moe_layers_of(config, listed_layers(config, num_layers), "moe_layer_freq")
    config.only("first_k_dense_replace", moe[0])
    return decoder(
        config,
        _mixers(config, num_layers),
        feed_forward(config, router_bias=True, moe=moe),
        tied=False,
        left_out=prediction_layers(config),
    )


_REQUIRED = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
_OPTIONAL = {**HEAD_DEFAULTS, "tie_word_embeddings": "false"}

FAMILIES = {
    "mimo": Family(Declared(required=_REQUIRED, optional={**_OPTIONAL, "use_sliding_window": "false"}), _mimo),
    "mimo_v2_flash": Family(
        Declared(
            required=(
                *_REQUIRED,
                "expert_size",
                "num_experts",
                "top_k",
                "moe_layer_freq",
                "hybrid_layer_pattern",
                "sliding_window",
                "v_head_dim",
                "swa_num_attention_heads",
                "swa_num_key_value_heads",
                "swa_head_dim",
                "swa_v_head_dim",
                "add_swa_attention_sink_bias",
                "add_full_attention_sink_bias",
            ),
            nullable=("shared_experts",),
            optional={**_OPTIONAL, "attention_bias": "false"},
        ),
        _mimo_v2,
    ),
}
