"""dots.llm1 (rednote-hilab, arXiv:2506.05767)."""

from perfmodel.families.attention import HEAD_DEFAULTS, by_window, grouped_query, heads_of, windows_of
from perfmodel.families.deepseek import MOE_KEYS, OPTIONAL, feed_forward
from perfmodel.families.feed_forward import decoder
from perfmodel.families.keys import ConfigKeys, Declared
from perfmodel.families.network import Shape
from perfmodel.families.registry import Family


def _dots(config: ConfigKeys) -> Shape:
    hidden, num_layers = config.size("hidden_size"), config.size("num_hidden_layers")
    heads, kv_heads, head_dim = heads_of(config)
    bias = config.flag("attention_bias", default=False)
    tensors = grouped_query(hidden, heads, kv_heads, head_dim, bias=bias, output_bias=bias, norms="head")
    # A window is not behind a switch here: it counts where it is not null.
    if config.has("sliding_window") and not config.has("layer_types"):
        window, first = config.size("sliding_window"), config.size("max_window_layers", least=0)
        windows = [window if layer >= first else None for layer in range(num_layers)]
    else:
        windows = windows_of(config, num_layers)
    return decoder(
        config,
        by_window(windows, tensors, heads, kv_heads, head_dim, norm_params=hidden),
        feed_forward(config, router_bias=True),
        tied=False,
    )


FAMILIES = {
    "dots1": Family(
        Declared(
            required=MOE_KEYS,
            nullable=("shared_experts",),
            optional={**HEAD_DEFAULTS, **OPTIONAL, "sliding_window": "none"},
        ),
        _dots,
    ),
}
