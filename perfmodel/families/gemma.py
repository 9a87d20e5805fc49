"""Gemma 2 (arXiv:2408.00118), Gemma 3 (arXiv:2503.19786) and Gemma 4 (Google, 2026), whose larger one has experts.

All have norms before and after both halves of a layer, tied embeddings, and layers that slide among those that do not.
"""

from collections.abc import Callable, Sequence

from perfmodel.families.attention import (
    FULL,
    HEAD_DEFAULTS,
    SLIDING,
    by_window,
    grouped_query,
    heads_of,
    kv_cache,
    linear,
    windows_of,
)
from perfmodel.families.feed_forward import count_and_top_k, decoder, dense_and_moe, gated
from perfmodel.families.keys import ConfigKeys, Declared
from perfmodel.families.network import Attention, Experts, FeedForward, Shape, Tensor, Tensors
from perfmodel.families.registry import Family, Wrapper

_REQUIRED = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")


def _every(config: ConfigKeys, num_layers: int, interval: int) -> list[int | None]:
    """Windows where every ``interval``-th layer sees the whole context, and the others slide."""
    window = config.size("sliding_window")
    return [window if (layer + 1) % interval else None for layer in range(num_layers)]


def _gemma2_windows(config: ConfigKeys, num_layers: int) -> list[int | None]:
    if config.has("layer_types"):
        return windows_of(config, num_layers)
    config.take("layer_types", "none")
    return _every(config, num_layers, 2)


def _gemma3_windows(config: ConfigKeys, num_layers: int) -> list[int | None]:
    config.only("use_bidirectional_attention", False)
    if config.has("layer_types"):
        return windows_of(config, num_layers)
    if not config.has("sliding_window_pattern"):
        raise config.error("layer_types", "the kind of each layer, or sliding_window_pattern")
    return _every(config, num_layers, config.size("sliding_window_pattern"))


def _dense(
    config: ConfigKeys, windows_of_layers: Callable[[ConfigKeys, int], list[int | None]], *, normed: bool
) -> Shape:
    """A dense network; ``normed`` if queries and keys have norms."""
    hidden, num_layers = config.size("hidden_size"), config.size("num_hidden_layers")
    heads, kv_heads, head_dim = heads_of(config)
    bias = config.flag("attention_bias", default=False)
    tensors = grouped_query(
        hidden, heads, kv_heads, head_dim, bias=bias, output_bias=bias, norms="head" if normed else "none"
    )
    windows = windows_of_layers(config, num_layers)
    dense = gated("mlp", hidden, config.size("intermediate_size"))
    return decoder(
        config,
        by_window(windows, tensors, heads, kv_heads, head_dim, norm_params=2 * hidden),
        (FeedForward(name="dense", layers=tuple(range(num_layers)), norm_params=2 * hidden, dense=dense),),
        tied=True,
    )


def _gemma2(config: ConfigKeys) -> Shape:
    return _dense(config, _gemma2_windows, normed=False)


def _gemma3(config: ConfigKeys) -> Shape:
    return _dense(config, _gemma3_windows, normed=True)


def _per_layer(config: ConfigKeys, full: Sequence[int], kv_heads: int, head_dim: int) -> tuple[int, int]:
    """Files that Transformers wrote: an object for each layer that differs, under the layer's number as a text."""
    table = config.table("per_layer_config")
    found = {}
    for key in table.values:
        name = str(key)
        layer = int(name) if name.isascii() and name.isdecimal() and len(name) < 6 else -1
        if layer not in full or layer in found:
            raise table.error(key, "one entry for each layer that sees the whole context, and none for others")
        entry = table.table(key)
        for other in entry.values:
            if other not in ("head_dim", "num_key_value_heads"):
                raise entry.error(other, "no key but head_dim and num_key_value_heads")
        found[layer] = (
            entry.size("num_key_value_heads") if entry.has("num_key_value_heads") else kv_heads,
            entry.size("head_dim") if entry.has("head_dim") else head_dim,
        )
    sizes = {found.get(layer, (kv_heads, head_dim)) for layer in full}
    if len(sizes) != 1:
        raise config.error("per_layer_config", "the same sizes for all layers that see the whole context")
    return sizes.pop()


def _full_heads(config: ConfigKeys, full: Sequence[int], *, keys_are_values: bool) -> tuple[int, int]:
    """Key-value heads, and the size of a head, in layers that see the whole context."""
    heads, kv_heads, head_dim = heads_of(config)
    written = _per_layer(config, full, kv_heads, head_dim) if config.has("per_layer_config") else None
    if written is not None and not config.has("global_head_dim"):
        groups, size = written
        if keys_are_values:
            config.only("num_global_key_value_heads", groups)
    else:
        groups, size = kv_heads, config.size("global_head_dim")
        if "num_global_key_value_heads" not in config.values:
            raise config.error("num_global_key_value_heads", "a value, or null for none")
        if not config.has("num_global_key_value_heads"):
            config.take("num_global_key_value_heads", "none")
        elif keys_are_values:
            groups = config.size("num_global_key_value_heads")
    if written not in (None, (groups, size)):
        raise config.error("per_layer_config", "what global_head_dim and num_global_key_value_heads say")
    if heads % groups:
        key = "num_global_key_value_heads" if written is None else "per_layer_config"
        raise config.error(key, f"key-value heads that divide num_attention_heads, {heads}")
    return groups, size


def _gemma4_attention(config: ConfigKeys, num_layers: int) -> tuple[Attention, ...]:
    """Layers that see the whole context have heads of another size, and may use their keys as values."""
    hidden = config.size("hidden_size")
    heads, kv_heads, head_dim = heads_of(config)
    bias = config.flag("attention_bias", default=False)
    config.only("use_bidirectional_attention", "vision")
    kinds = config.kinds("layer_types", num_layers, FULL, SLIDING)
    if kinds[-1] != FULL:
        raise config.error("layer_types", f"a list whose last entry is {FULL}")
    keys_are_values = config.flag("attention_k_eq_v", default=False)
    found: list[Attention] = []
    for kind in dict.fromkeys(kinds):
        window, groups, size = None, kv_heads, head_dim
        if kind == SLIDING:
            window = config.size("sliding_window")
        else:
            full = [layer for layer, other in enumerate(kinds) if other == FULL]
            groups, size = _full_heads(config, full, keys_are_values=keys_are_values)
        tensors = grouped_query(hidden, heads, groups, size, bias=bias, output_bias=bias, norms="head")
        if keys_are_values and kind == FULL:
            # The same projection, but cached twice: keys are normed and rotated, values are not rotated.
            tensors = tuple(tensor for tensor in tensors if not tensor.name.startswith("self_attn.v_proj"))
        found.append(
            Attention(
                name="sliding" if kind == SLIDING else "full",
                layers=tuple(layer for layer, other in enumerate(kinds) if other == kind),
                tensors=tensors,
                norm_params=2 * hidden,
                caches=kv_cache(heads, groups, size, window),
            )
        )
    return tuple(found)


def _gemma4_feed_forward(config: ConfigKeys, num_layers: int) -> tuple[FeedForward, ...]:
    """A dense network in every layer, and with ``enable_moe_block`` experts beside it, with norms of their own."""
    hidden = config.size("hidden_size")
    layers = tuple(range(num_layers))
    scale = Tensor("layer_scalar", (1,))  # what the output of the layer is multiplied by
    dense = (*gated("mlp", hidden, config.size("intermediate_size")), scale)
    if not config.flag("enable_moe_block", default=False):
        return (FeedForward(name="dense", layers=layers, norm_params=2 * hidden, dense=dense),)
    count, top_k = count_and_top_k(config)
    width = config.size("expert_size")
    router: Tensors = (
        *linear("router.proj", hidden, count),
        Tensor("router.scale", (hidden,)),
        Tensor("router.per_expert_scale", (count,)),
    )
    return dense_and_moe(
        num_layers,
        layers,
        norm_params=5 * hidden,
        experts=Experts(count=count, top_k=top_k, size=width, tensors=gated("experts", hidden, width)),
        router=router,
        beside=dense,
    )


def _gemma4(config: ConfigKeys) -> Shape:
    # The small Gemma 4 networks have a table of embeddings for each layer, and layers that use the keys and values of
    # an earlier one, with networks of double width.
    config.only("hidden_size_per_layer_input", 0)
    config.only("num_kv_shared_layers", 0)
    num_layers = config.size("num_hidden_layers")
    return decoder(config, _gemma4_attention(config, num_layers), _gemma4_feed_forward(config, num_layers), tied=True)


_OPTIONAL = {**HEAD_DEFAULTS, "attention_bias": "false", "tie_word_embeddings": "true"}

FAMILIES: dict[str, Family | Wrapper] = {
    "gemma2": Family(
        Declared(
            required=(*_REQUIRED, "sliding_window"),
            optional={**_OPTIONAL, "layer_types": "every second layer slides, from the first"},
        ),
        _gemma2,
    ),
    "gemma3": Wrapper("text_config", "gemma3_text"),
    "gemma3_text": Family(Declared(required=(*_REQUIRED, "sliding_window"), optional=_OPTIONAL), _gemma3),
    "gemma4": Wrapper("text_config", "gemma4_text"),
    "gemma4_text": Family(
        Declared(
            required=(
                *_REQUIRED,
                "layer_types",
                "hidden_size_per_layer_input",
                "num_kv_shared_layers",
            ),
            optional={
                **_OPTIONAL,
                "num_global_key_value_heads": "none",
                "attention_k_eq_v": "false",
                "enable_moe_block": "false",
            },
        ),
        _gemma4,
    ),
}
