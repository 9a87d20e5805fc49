"""Dense decoders, as controls: Llama (Meta, arXiv:2407.21783) and Mistral (arXiv:2310.06825)."""

from perfmodel.families.attention import HEAD_DEFAULTS, by_window, grouped_query, heads_of, windows_of
from perfmodel.families.feed_forward import decoder, gated
from perfmodel.families.keys import ConfigKeys, Declared
from perfmodel.families.network import FeedForward, Shape
from perfmodel.families.registry import Family

_REQUIRED = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")


def _dense(config: ConfigKeys, windows: list[int | None], *, bias: bool = False, mlp_bias: bool = False) -> Shape:
    hidden, num_layers = config.size("hidden_size"), config.size("num_hidden_layers")
    heads, kv_heads, head_dim = heads_of(config)
    tensors = grouped_query(hidden, heads, kv_heads, head_dim, bias=bias, output_bias=bias)
    dense = gated("mlp", hidden, config.size("intermediate_size"), bias=mlp_bias)
    return decoder(
        config,
        by_window(windows, tensors, heads, kv_heads, head_dim, norm_params=hidden),
        (FeedForward(name="dense", layers=tuple(range(num_layers)), norm_params=hidden, dense=dense),),
        tied=False,
    )


def _llama(config: ConfigKeys) -> Shape:
    full: list[int | None] = [None] * config.size("num_hidden_layers")
    bias = config.flag("attention_bias", default=False)
    return _dense(config, full, bias=bias, mlp_bias=config.flag("mlp_bias", default=False))


def _mistral(config: ConfigKeys) -> Shape:
    return _dense(config, windows_of(config, config.size("num_hidden_layers")))


FAMILIES = {
    "llama": Family(
        Declared(
            required=_REQUIRED,
            optional={
                **HEAD_DEFAULTS,
                "attention_bias": "false",
                "mlp_bias": "false",
                "tie_word_embeddings": "false",
            },
        ),
        _llama,
    ),
    "mistral": Family(
        Declared(
            required=_REQUIRED,
            nullable=("sliding_window",),
            optional={**HEAD_DEFAULTS, "tie_word_embeddings": "false"},
        ),
        _mistral,
    ),
}
