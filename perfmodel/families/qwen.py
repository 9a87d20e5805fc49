"""Qwen2 and Qwen1.5-MoE (Alibaba, arXiv:2407.10671), Qwen3 (arXiv:2505.09388) and the text part of Qwen3-VL."""

from perfmodel.families.attention import HEAD_DEFAULTS, by_window, grouped_query, heads_of, linear, windows_of
from perfmodel.families.feed_forward import count_and_top_k, decoder, dense_and_moe, gated, moe_layers_of
from perfmodel.families.keys import ConfigKeys, Declared
from perfmodel.families.network import Attention, Experts, FeedForward, Shape, Tensors
from perfmodel.families.registry import Family, Wrapper

#: Required keys of every Qwen network, and those of the ones with experts.
SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
EXPERT_SIZES = ("num_experts", "top_k", "expert_size")
#: Which layers have experts where the family may have dense ones among them.
SPARSE_KEYS = ("decoder_sparse_step",)
SPARSE_DEFAULTS = {"mlp_only_layers": "no layer is dense by this list"}
_TIED = {"tie_word_embeddings": "false"}
_SLIDES = {"use_sliding_window": "false"}
_BIAS = {"attention_bias": "false"}


def sparse_layers(config: ConfigKeys, num_layers: int) -> tuple[int, ...]:
    """Layer i has experts iff it is not in ``mlp_only_layers`` and ``(i + 1) % decoder_sparse_step`` is 0."""
    step = config.size("decoder_sparse_step")
    allowed = f"a list of layer indices from 0 to {num_layers - 1}"
    if not config.has("mlp_only_layers"):
        config.take("mlp_only_layers", [])
    dense = config.sequence("mlp_only_layers", allowed)
    if any(type(layer) is not int or not 0 <= layer < num_layers for layer in dense):
        raise config.error("mlp_only_layers", allowed)
    without = set(dense)
    moe = [layer for layer in range(num_layers) if layer not in without and (layer + 1) % step == 0]
    return moe_layers_of(config, moe, "decoder_sparse_step", "mlp_only_layers")


def experts_of(config: ConfigKeys, moe: tuple[int, ...], *, shared: bool) -> tuple[FeedForward, ...]:
    """Experts of their own width in the layers ``moe``, dense networks in the others.

    shared : whether a shared expert of its own width runs beside them, scaled by a gate of one output.
    """
    hidden, num_layers = config.size("hidden_size"), config.size("num_hidden_layers")
    count, top_k = count_and_top_k(config)
    width = config.size("expert_size")
    beside: Tensors = ()
    if shared:
        beside = gated("mlp.shared_expert", hidden, config.size("shared_expert_intermediate_size"))
        beside += linear("mlp.shared_expert_gate", hidden, 1)
    return dense_and_moe(
        num_layers,
        moe,
        norm_params=hidden,
        dense=gated("mlp", hidden, config.size("intermediate_size")) if len(moe) < num_layers else (),
        experts=Experts(count=count, top_k=top_k, size=width, tensors=gated("mlp.experts", hidden, width)),
        router=linear("mlp.gate", hidden, count),
        shared=beside,
    )


def dense_layers(config: ConfigKeys) -> tuple[FeedForward, ...]:
    """A gated network of width ``intermediate_size`` in every layer."""
    hidden = config.size("hidden_size")
    dense = gated("mlp", hidden, config.size("intermediate_size"))
    layers = tuple(range(config.size("num_hidden_layers")))
    return (FeedForward(name="dense", layers=layers, norm_params=hidden, dense=dense),)


def _windows(config: ConfigKeys, *, by_depth: bool) -> list[int | None]:
    """Windows of the layers. Which of them slide is agreed on for the dense networks alone (``max_window_layers``)."""
    slides = config.flag("use_sliding_window", default=False)
    if slides and not by_depth and not config.has("layer_types"):
        raise config.error("layer_types", "the kind of each layer, because use_sliding_window is true")
    return windows_of(config, config.size("num_hidden_layers"), switched=True)


def _qwen2_attention(config: ConfigKeys, *, bias: bool, by_depth: bool) -> tuple[Attention, ...]:
    hidden = config.size("hidden_size")
    heads, kv_heads, head_dim = heads_of(config)
    tensors = grouped_query(hidden, heads, kv_heads, head_dim, bias=bias)
    return by_window(_windows(config, by_depth=by_depth), tensors, heads, kv_heads, head_dim, norm_params=hidden)


def _qwen3_attention(config: ConfigKeys, windows: list[int | None]) -> tuple[Attention, ...]:
    hidden = config.size("hidden_size")
    heads, kv_heads, head_dim = heads_of(config)
    bias = config.flag("attention_bias", default=False)
    tensors = grouped_query(hidden, heads, kv_heads, head_dim, bias=bias, output_bias=bias, norms="head")
    return by_window(windows, tensors, heads, kv_heads, head_dim, norm_params=hidden)


def _qwen2(config: ConfigKeys) -> Shape:
    attention = _qwen2_attention(config, bias=True, by_depth=True)
    return decoder(config, attention, dense_layers(config), tied=False)


def _qwen2_moe(config: ConfigKeys) -> Shape:
    # Queries, keys and values have biases unless the key says otherwise; published files leave it out.
    attention = _qwen2_attention(config, bias=config.flag("qkv_bias", default=True), by_depth=False)
    moe = sparse_layers(config, config.size("num_hidden_layers"))
    return decoder(config, attention, experts_of(config, moe, shared=True), tied=False)


def _qwen3(config: ConfigKeys) -> Shape:
    attention = _qwen3_attention(config, _windows(config, by_depth=True))
    return decoder(config, attention, dense_layers(config), tied=False)


def _qwen3_moe(config: ConfigKeys) -> Shape:
    attention = _qwen3_attention(config, _windows(config, by_depth=False))
    moe = sparse_layers(config, config.size("num_hidden_layers"))
    return decoder(config, attention, experts_of(config, moe, shared=False), tied=False)


def _qwen3_vl(config: ConfigKeys) -> Shape:
    attention = _qwen3_attention(config, [None] * config.size("num_hidden_layers"))
    return decoder(config, attention, dense_layers(config), tied=False)


def _qwen3_vl_moe(config: ConfigKeys) -> Shape:
    attention = _qwen3_attention(config, [None] * config.size("num_hidden_layers"))
    moe = sparse_layers(config, config.size("num_hidden_layers"))
    return decoder(config, attention, experts_of(config, moe, shared=False), tied=False)


_DENSE = (*SIZES, "intermediate_size")
_MOE = (*SIZES, *EXPERT_SIZES, *SPARSE_KEYS)

FAMILIES: dict[str, Family | Wrapper] = {
    "qwen2": Family(Declared(required=_DENSE, optional={**HEAD_DEFAULTS, **_SLIDES, **_TIED}), _qwen2),
    "qwen2_moe": Family(
        Declared(
            required=(*_MOE, "shared_expert_intermediate_size"),
            optional={**HEAD_DEFAULTS, **_SLIDES, **SPARSE_DEFAULTS, "qkv_bias": "true", **_TIED},
        ),
        _qwen2_moe,
    ),
    "qwen3": Family(Declared(required=_DENSE, optional={**HEAD_DEFAULTS, **_BIAS, **_SLIDES, **_TIED}), _qwen3),
    "qwen3_moe": Family(
        Declared(required=_MOE, optional={**HEAD_DEFAULTS, **_BIAS, **_SLIDES, **SPARSE_DEFAULTS, **_TIED}), _qwen3_moe
    ),
    # The flag of tied embeddings stands outside, in the config of the whole, whose default is false.
    "qwen3_vl": Wrapper("text_config", "qwen3_vl_text"),
    "qwen3_vl_text": Family(Declared(required=_DENSE, optional={**HEAD_DEFAULTS, **_BIAS, **_TIED}), _qwen3_vl),
    "qwen3_vl_moe": Wrapper("text_config", "qwen3_vl_moe_text"),
    "qwen3_vl_moe_text": Family(
        Declared(required=_MOE, optional={**HEAD_DEFAULTS, **_BIAS, **SPARSE_DEFAULTS, **_TIED}), _qwen3_vl_moe
    ),
}
