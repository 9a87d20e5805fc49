"""Granite MoE (IBM, Granite 3.0 report of 2024), and Granite 4.0 with state-space layers."""

from perfmodel.families.attention import HEAD_DEFAULTS, grouped_query, heads_of, kv_cache, linear
from perfmodel.families.feed_forward import count_and_top_k, decoder, dense_and_moe, gated
from perfmodel.families.keys import ConfigKeys, Declared
from perfmodel.families.mamba import mamba_2
from perfmodel.families.network import Attention, Experts, FeedForward, Shape
from perfmodel.families.registry import Family

# Checkpoints hold gate and up projection as one tensor, input_linear.
_NAMES = ("input_linear.gate", "input_linear.up", "output_linear")


def _full(config: ConfigKeys, layers: tuple[int, ...]) -> Attention:
    hidden = config.size("hidden_size")
    heads, kv_heads, head_dim = heads_of(config)
    bias = config.flag("attention_bias", default=False)
    return Attention(
        name="full",
        layers=layers,
        tensors=grouped_query(hidden, heads, kv_heads, head_dim, bias=bias, output_bias=bias),
        norm_params=hidden,
        caches=kv_cache(heads, kv_heads, head_dim, None),
    )


def _networks(config: ConfigKeys, *, shared: int) -> tuple[FeedForward, ...]:
    """Experts of the width ``intermediate_size`` and a network of the width ``shared`` beside them in every layer."""
    hidden, width = config.size("hidden_size"), config.size("intermediate_size")
    count, top_k = count_and_top_k(config)
    at = "block_sparse_moe"
    return dense_and_moe(
        config.size("num_hidden_layers"),
        tuple(range(config.size("num_hidden_layers"))),
        norm_params=hidden,
        experts=Experts(count=count, top_k=top_k, size=width, tensors=gated(at, hidden, width, names=_NAMES)),
        router=linear(f"{at}.router.layer", hidden, count),
        shared=gated("shared_mlp", hidden, shared, names=_NAMES) if shared else (),
    )


def _granite(config: ConfigKeys) -> Shape:
    every = tuple(range(config.size("num_hidden_layers")))
    return decoder(config, (_full(config, every),), _networks(config, shared=0), tied=False)


def _granite_shared(config: ConfigKeys) -> Shape:
    every = tuple(range(config.size("num_hidden_layers")))
    shared = config.size("shared_intermediate_size", least=0)
    return decoder(config, (_full(config, every),), _networks(config, shared=shared), tied=False)


def _granite_hybrid(config: ConfigKeys) -> Shape:
    hidden, num_layers = config.size("hidden_size"), config.size("num_hidden_layers")
    kinds = config.kinds("layer_types", num_layers, "mamba", "attention")
    mamba = mamba_2(
        "mamba",
        hidden,
        tuple(layer for layer, kind in enumerate(kinds) if kind == "mamba"),
        heads=config.size("mamba_n_heads"),
        head_dim=config.size("mamba_d_head"),
        groups=config.size("mamba_n_groups"),
        state=config.size("mamba_d_state"),
        kernel=config.size("mamba_d_conv"),
        bias=config.flag("mamba_proj_bias", default=False),
        convolution_bias=config.flag("mamba_conv_bias", default=True),
    )
    width = config.size("mamba_n_heads") * config.size("mamba_d_head")
    if width != config.size("mamba_expand") * hidden:
        raise config.error("mamba_expand", f"a value that makes {width}, the width of mamba_n_heads, of hidden_size")
    full = _full(config, tuple(layer for layer, kind in enumerate(kinds) if kind == "attention"))
    shared = config.size("shared_intermediate_size")
    if config.size("num_experts", least=0) == 0:  # the dense ones of the family have the network beside the experts
        config.size("top_k", least=0)
        dense = gated("shared_mlp", hidden, shared, names=_NAMES)
        every = tuple(range(num_layers))
        networks: tuple[FeedForward, ...] = (FeedForward(name="dense", layers=every, norm_params=hidden, dense=dense),)
    else:
        networks = _networks(config, shared=shared)
    return decoder(config, tuple(kind for kind in (mamba, full) if kind.layers), networks, tied=False)


_REQUIRED = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_experts",
    "top_k",
    "vocab_size",
)
_OPTIONAL = {**HEAD_DEFAULTS, "attention_bias": "false", "tie_word_embeddings": "false"}

FAMILIES = {
    "granitemoe": Family(Declared(required=_REQUIRED, optional=_OPTIONAL), _granite),
    "granitemoeshared": Family(
        Declared(required=(*_REQUIRED, "shared_intermediate_size"), optional=_OPTIONAL), _granite_shared
    ),
    "granitemoehybrid": Family(
        Declared(
            required=(
                *_REQUIRED,
                "shared_intermediate_size",
                "layer_types",
                "mamba_n_heads",
                "mamba_d_head",
                "mamba_n_groups",
                "mamba_d_state",
                "mamba_d_conv",
                "mamba_expand",
            ),
            optional={**_OPTIONAL, "mamba_conv_bias": "true", "mamba_proj_bias": "false"},
        ),
        _granite_hybrid,
    ),
}
