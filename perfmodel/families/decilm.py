"""Llama-Nemotron (NVIDIA, arXiv:2505.00949): Llama with layers that an architecture search pruned one by one."""

import math
from collections.abc import Hashable, Mapping
from typing import NamedTuple, TypeVar

from perfmodel.families.attention import grouped_query, kv_cache
from perfmodel.families.feed_forward import decoder, gated
from perfmodel.families.keys import ConfigKeys, Declared
from perfmodel.families.network import Attention, FeedForward, Shape
from perfmodel.families.registry import Family

_Value = TypeVar("_Value", bound=Hashable)

_WIDTH_STEP = 256  # widths are rounded up to a multiple of it
_WIDEST = 10**7
#: What a block can hold instead of, or on top of, plain attention and a plain network, and is not counted here.
_NOT_READ = (
    "replace_with_linear",
    "sparsify",
    "num_sink_tokens",
    "unshifted_sink",
    "use_prefill_window_in_sink_attention",
)


class _AttentionBlock(NamedTuple):
    """Attention of one layer; without heads there is none."""

    kv_heads: int
    window: int | None


def _part(config: ConfigKeys, block: object, index: int, name: str, nullable: tuple[str, ...]) -> ConfigKeys:
    """The object that describes one half of a layer; refused where it asks for what is not counted."""
    values = block.get(name) if isinstance(block, Mapping) else None
    if not isinstance(values, Mapping):
        raise config.error("block_configs", f"a list of objects, each with {name!r}; entry {index} has none")
    part = ConfigKeys(values, f"{config.where}: block_configs[{index}].{name}", Declared(("no_op",), nullable))
    part.check_declared()
    for key in _NOT_READ:
        part.only(key, False)
    config.tables.append(part)
    return part


def _attention_block(part: ConfigKeys, heads: int) -> _AttentionBlock:
    if part.flag("no_op"):
        return _AttentionBlock(0, None)
    each = part.size("n_heads_in_group")
    if heads % each:
        raise part.error("n_heads_in_group", f"a divisor of num_attention_heads, {heads}")
    return _AttentionBlock(heads // each, part.size_or_none("window_length"))


def _width(part: ConfigKeys, hidden: int) -> int:
    """Width of a gated network with ``ffn_mult * hidden`` times two thirds, rounded up; 0 where there is none."""
    if part.flag("no_op"):
        return 0
    factor = part.values.get("ffn_mult")
    part.has("ffn_mult")
    allowed = f"a number above 0 that makes the network at most {_WIDEST} wide"
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not 0 < factor <= 1.5 * _WIDEST / hidden:
        raise part.error("ffn_mult", allowed)
    return max(math.ceil(int(2 * factor * hidden / 3) / _WIDTH_STEP), 1) * _WIDTH_STEP


Value = TypeVar("Value", bound=Hashable)


def _grouped(values: list[_Value]) -> dict[_Value, tuple[int, ...]]:
    """The layers of each value, in the order in which the values first occur."""
    layers: dict[_Value, list[int]] = {}
    for layer, value in enumerate(values):
        layers.setdefault(value, []).append(layer)
    return {value: tuple(found) for value, found in layers.items()}


def _attention(config: ConfigKeys, block: _AttentionBlock, layers: tuple[int, ...], head_dim: int) -> Attention:
    if not block.kv_heads:
        return Attention(name="none", layers=layers, tensors=(), norm_params=0)
    hidden, heads = config.size("hidden_size"), config.size("num_attention_heads")
    bias = config.flag("attention_bias", default=False)
    return Attention(
        name="full" if block.window is None else "sliding",
        layers=layers,
        tensors=grouped_query(hidden, heads, block.kv_heads, head_dim, bias=bias, output_bias=bias),
        norm_params=hidden,
        caches=kv_cache(heads, block.kv_heads, head_dim, block.window),
    )


def _feed_forward(config: ConfigKeys, width: int, layers: tuple[int, ...]) -> FeedForward:
    if not width:
        return FeedForward(name="none", layers=layers, norm_params=0)
    hidden = config.size("hidden_size")
    dense = gated("mlp", hidden, width, bias=config.flag("mlp_bias", default=False))
    return FeedForward(name="dense", layers=layers, norm_params=hidden, dense=dense)


def _nemotron_nas(config: ConfigKeys) -> Shape:
    hidden, num_layers = config.size("hidden_size"), config.size("num_hidden_layers")
    heads = config.size("num_attention_heads")
    if not config.has("head_dim") and hidden % heads:
        raise config.error("head_dim", f"an integer, because hidden_size {hidden} is no multiple of {heads} heads")
    head_dim = config.size("head_dim", default=hidden // heads)
    allowed = f"a list of {num_layers} objects, one for each layer"
    blocks = config.sequence("block_configs", allowed)
    if len(blocks) != num_layers:
        raise config.error("block_configs", allowed)
    mixers: list[_AttentionBlock] = []
    widths: list[int] = []
    for index, block in enumerate(blocks):
        part = _part(config, block, index, "attention", ("n_heads_in_group", "window_length"))
        mixers.append(_attention_block(part, heads))
        widths.append(_width(_part(config, block, index, "ffn", ("ffn_mult",)), hidden))
    return decoder(
        config,
        tuple(_attention(config, mixer, layers, head_dim) for mixer, layers in _grouped(mixers).items()),
        tuple(_feed_forward(config, width, layers) for width, layers in _grouped(widths).items()),
        tied=False,
    )


FAMILIES = {
    "nemotron-nas": Family(
        Declared(
            required=("hidden_size", "num_hidden_layers", "num_attention_heads", "block_configs", "vocab_size"),
            optional={
                "head_dim": "hidden_size / num_attention_heads",
                "attention_bias": "false",
                "mlp_bias": "false",
                "tie_word_embeddings": "false",
            },
        ),
        _nemotron_nas,
    ),
}
