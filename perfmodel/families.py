"""From the keys of a Hugging Face ``config.json`` to the shape of a network, one small reader per family.

To add a family, write a function that takes a `ConfigKeys` and returns a `Shape`, and enter it in `FAMILIES`
under its ``model_type``. A reader never fills in a missing size: class defaults differ between library
versions and from the released models, so a size that is not in the file is refused. A flag that is not in
it is off.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from perfmodel.errors import ModelConfigError

_EXPERT_COUNT = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_TOP_K = ("num_experts_per_tok", "experts_per_token")

# Far above any published model, yet low enough that no product overflows a float and no tuple is huge.
_LARGEST = {"num_hidden_layers": 10_000, "vocab_size": 10**8} | dict.fromkeys((*_EXPERT_COUNT, *_TOP_K), 65_534)
_LARGEST_SIZE = 10**7

_WINDOWED = {"full_attention": False, "sliding_attention": True}


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionKind:
    """One kind of attention layer and the layers that have it. All numbers are for one layer.

    Attributes:
        layers: Indices of the layers of this kind, ascending.
        window: Latest tokens that a query sees [token], or None for the whole context.
        params: Parameters of query, key, value and output projections with their biases, norms, sinks [1].
        kv_elements_per_token: Numbers cached for one token [1]. Grouped-query attention caches
            ``2 * kv_heads * head_dim``; latent attention caches ``kv_lora_rank + qk_rope_head_dim``.
        context_flops_per_token: Work of one query on one token of context, scores and values [flop]:
            ``2 * heads * (head_dim + head_dim)``. Latent attention computed on the latent (absorbed
            projections): ``2 * heads * (kv_lora_rank + qk_rope_head_dim + kv_lora_rank)``.
        expanded_kv_elements_per_token: What an engine caches that unpacks the latent to keys and values [1],
            ``heads * (qk_nope_head_dim + qk_rope_head_dim + v_head_dim)``; None where there is no latent.
    """

    layers: tuple[int, ...]
    window: int | None
    params: int
    kv_elements_per_token: int
    context_flops_per_token: int
    expanded_kv_elements_per_token: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What a family reader finds out: the sizes of a network, in parameters unless stated otherwise.

    Attributes:
        hidden_size: Width of the residual stream, d.
        num_layers: Decoder layers, L. Layers for multi-token prediction are not part of the network.
        moe_layers: Indices of the layers that have routed experts, ascending.
        num_experts: Routed experts of one such layer, E.
        top_k: Routed experts that one token visits, k.
        expert_size: Inner width of one routed expert, d_ff.
        expert_params: Parameters of one routed expert, biases included.
        expert_matrices: Input and output size of each matrix of one expert, in the order in which they run.
        shared_expert_params: Experts that every token visits, per MoE layer, with their gate.
        router_params: Router of one MoE layer.
        dense_ffn_params: Feed-forward network of one layer without experts; 0 where there is no such layer.
        attention: The kinds of attention; together their ``layers`` name each layer once.
        vocab_size: Rows of the embedding table, V.
        norm_params: All norms of the residual stream, the last one included.
        tied_embeddings: Whether the head is the embedding table.
    """

    hidden_size: int
    num_layers: int
    moe_layers: tuple[int, ...]
    num_experts: int
    top_k: int
    expert_size: int
    expert_params: int
    expert_matrices: tuple[tuple[int, int], ...]
    shared_expert_params: int
    router_params: int
    dense_ffn_params: int
    attention: tuple[AttentionKind, ...]
    vocab_size: int
    norm_params: int
    tied_embeddings: bool


def one_line(value: object, limit: int = 60) -> str:
    """A value as it is shown in an error message: on one line, printable, and short."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits, or lists in lists in lists ...
        text = f"a {type(value).__name__} too large to show"
    text = " ".join(text.split())
    return text if len(text) <= limit else text[: limit - 3] + "..."


class ConfigKeys:
    """Checked access to the keys of one config; errors name file, key, value found and what is allowed."""

    def __init__(self, values: Mapping[str, object], where: str) -> None:
        self.values = values
        self.where = where

    def error(self, key: str, allowed: str) -> ModelConfigError:
        """The error for a key that is missing or has a value that is not allowed."""
        found = f"is {one_line(self.values[key])}" if key in self.values else "is missing"
        return ModelConfigError(f"{self.where}: key {key!r} {found}; allowed: {allowed}")

    def has(self, key: str) -> bool:
        """Whether the key is there and not null."""
        return self.values.get(key) is not None

    def size(self, *keys: str, least: int = 1) -> int:
        """An integer from ``least`` up, under any of several spellings, which must not disagree."""
        spelling = f" (also spelled {', '.join(keys[1:])})" if len(keys) > 1 else ""
        first: int | None = None
        spelt = [key for key in keys if self.has(key)] or [key for key in keys if key in self.values] or keys[:1]
        for key in spelt:
            largest = _LARGEST.get(key, _LARGEST_SIZE)
            value = self.values.get(key)
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= largest:
                raise self.error(key, f"an integer from {least} to {largest}{spelling}")
            if first is not None and value != first:
                raise self.error(key, f"{first}, as another spelling of the same key says")
            first = value
        return first if first is not None else least  # the loop ran at least once

    def size_or(self, key: str, otherwise: int, least: int = 1) -> int:
        """An integer from ``least`` up, or ``otherwise`` where the key is absent or null."""
        return self.size(key, least=least) if self.has(key) else otherwise

    def flag(self, key: str) -> bool:
        """True or false; off where the key is absent or null."""
        value = self.values.get(key)
        if value is None:
            return False
        if not isinstance(value, bool):
            raise self.error(key, "true or false")
        return value

    def choice(self, key: str, *choices: str) -> str:
        """One of the texts given."""
        value = self.values.get(key)
        if not isinstance(value, str) or value not in choices:
            raise self.error(key, f"one of {', '.join(choices)}")
        return value

    def sequence(self, key: str, allowed: str) -> Sequence[object]:
        """A list; empty where the key is absent or null."""
        value = self.values.get(key)
        if value is None:
            return ()
        if not isinstance(value, list | tuple):
            raise self.error(key, allowed)
        return value


def _experts_and_top_k(config: ConfigKeys) -> tuple[int, int]:
    num_experts = config.size(*_EXPERT_COUNT)
    top_k = config.size(*_TOP_K)
    if top_k > num_experts:
        key = next(key for key in _TOP_K if key in config.values)
        raise config.error(key, f"at most the number of experts, {num_experts}")
    return num_experts, top_k


def _heads(config: ConfigKeys) -> tuple[int, int, int]:
    """Query heads, key-value heads and the size of one head."""
    heads = config.size("num_attention_heads")
    if "num_key_value_heads" not in config.values:
        raise config.error("num_key_value_heads", "a divisor of num_attention_heads, or null for as many heads")
    kv_heads = config.size_or("num_key_value_heads", heads)
    if heads % kv_heads:
        raise config.error("num_key_value_heads", f"a divisor of num_attention_heads, {heads}")
    hidden = config.size("hidden_size")
    if not config.has("head_dim") and hidden % heads:
        raise config.error("head_dim", f"an integer, because hidden_size {hidden} is no multiple of {heads} heads")
    return heads, kv_heads, config.size_or("head_dim", hidden // heads)


def _windows(config: ConfigKeys, num_layers: int, switched: bool = False) -> list[int | None]:
    """The window of each layer, from ``layer_types`` if the config has it, else the same for all layers.

    With ``switched`` the window counts only where ``use_sliding_window`` is true, and from layer
    ``max_window_layers`` on.
    """
    if switched and not config.flag("use_sliding_window"):
        return [None] * num_layers
    if config.has("layer_types"):
        allowed = f"a list of {num_layers} entries, each 'full_attention' or 'sliding_attention'"
        kinds = config.sequence("layer_types", allowed)
        known = [kind for kind in kinds if isinstance(kind, str) and kind in _WINDOWED]
        if len(kinds) != num_layers or len(known) != num_layers:
            raise config.error("layer_types", allowed)
        slides = [_WINDOWED[kind] for kind in known]
        if not any(slides):
            return [None] * num_layers
        window = config.size("sliding_window")
        return [window if slide else None for slide in slides]
    if not config.has("sliding_window"):
        return [None] * num_layers
    window = config.size("sliding_window")
    first = config.size("max_window_layers", least=0) if switched else 0
    return [window if layer >= first else None for layer in range(num_layers)]


def _by_window(windows: Sequence[int | None], params: int, kv_elements: int, flops: int) -> tuple[AttentionKind, ...]:
    """One kind of attention for each different window, in the order in which they first occur."""
    return tuple(
        AttentionKind(
            layers=tuple(layer for layer, other in enumerate(windows) if other == window),
            window=window,
            params=params,
            kv_elements_per_token=kv_elements,
            context_flops_per_token=flops,
        )
        for window in dict.fromkeys(windows)
    )


def _grouped_query(
    config: ConfigKeys,
    windows: Sequence[int | None],
    *,
    bias: bool = False,
    extra: Callable[[int, int, int], int],
) -> tuple[AttentionKind, ...]:
    """Grouped-query attention; ``extra(heads, kv_heads, head_dim)`` counts norms and sinks."""
    heads, kv_heads, head_dim = _heads(config)
    hidden = config.size("hidden_size")
    query, key = heads * head_dim, kv_heads * head_dim
    params = 2 * hidden * (query + key) + extra(heads, kv_heads, head_dim)
    if bias:
        params += query + 2 * key + hidden
    return _by_window(windows, params, 2 * key, 4 * query)


def _latent(config: ConfigKeys, num_layers: int) -> tuple[AttentionKind, ...]:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1)."""
    hidden, heads = config.size("hidden_size"), config.size("num_attention_heads")
    latent = config.size("kv_lora_rank")
    nope, rope = config.size("qk_nope_head_dim"), config.size("qk_rope_head_dim")
    value = config.size("v_head_dim")
    bias = config.flag("attention_bias")
    if "q_lora_rank" not in config.values:
        raise config.error("q_lora_rank", "an integer, or null for a plain query projection")
    query_rank = config.size_or("q_lora_rank", 0)
    if query_rank:
        query = query_rank * (hidden + 1 + heads * (nope + rope)) + query_rank * bias
    else:
        query = hidden * heads * (nope + rope)
    compressed = latent + rope
    params = query + hidden * compressed + latent + latent * heads * (nope + value) + heads * value * hidden
    params += bias * (compressed + hidden)
    return (
        AttentionKind(
            layers=tuple(range(num_layers)),
            window=None,
            params=params,
            kv_elements_per_token=compressed,
            context_flops_per_token=2 * heads * (compressed + latent),
            expanded_kv_elements_per_token=heads * (nope + rope + value),
        ),
    )


def _shape(
    config: ConfigKeys,
    attention: tuple[AttentionKind, ...],
    *,
    expert_width: str,
    moe_layers: tuple[int, ...] | None = None,
    expert_bias: bool = False,
    shared_experts: int = 0,
    router_bias: bool = False,
) -> Shape:
    """The parts that all families share: gated experts of three matrices and pre-norm layers.

    ``expert_width`` is the key that holds the inner width of an expert. Shared experts are as wide as routed
    ones. A dense layer has the width ``intermediate_size``.
    """
    hidden, num_layers = config.size("hidden_size"), config.size("num_hidden_layers")
    num_experts, top_k = _experts_and_top_k(config)
    width = config.size(expert_width)
    if moe_layers is None:
        moe_layers = tuple(range(num_layers))
    dense_width = config.size("intermediate_size") if len(moe_layers) < num_layers else 0
    weights = 3 * hidden * width
    return Shape(
        hidden_size=hidden,
        num_layers=num_layers,
        moe_layers=moe_layers,
        num_experts=num_experts,
        top_k=top_k,
        expert_size=width,
        expert_params=weights + expert_bias * (2 * width + hidden),
        expert_matrices=((hidden, width), (hidden, width), (width, hidden)),
        shared_expert_params=shared_experts * weights,
        router_params=num_experts * (hidden + router_bias),
        dense_ffn_params=3 * hidden * dense_width,
        attention=attention,
        vocab_size=config.size("vocab_size"),
        norm_params=(2 * num_layers + 1) * hidden,
        tied_embeddings=config.flag("tie_word_embeddings"),
    )


def _some(config: ConfigKeys, layers: Sequence[int], keys: Sequence[str], num_layers: int) -> tuple[int, ...]:
    """The MoE layers, refused if there is none."""
    if not layers:
        found = ", ".join(f"{key} {one_line(config.values.get(key))}" for key in keys)
        raise ModelConfigError(
            f"{config.where}: no layer has experts: found {found} with num_hidden_layers {num_layers}; "
            "allowed: values that leave at least one MoE layer"
        )
    return tuple(layers)


def _mixtral(config: ConfigKeys) -> Shape:
    windows = _windows(config, config.size("num_hidden_layers"))
    attention = _grouped_query(config, windows, extra=lambda *_: 0)
    return _shape(config, attention, expert_width="intermediate_size")


def _qwen3_moe(config: ConfigKeys) -> Shape:
    num_layers = config.size("num_hidden_layers")
    step = config.size("decoder_sparse_step")
    allowed = f"a list of layer indices from 0 to {num_layers - 1}"
    dense = config.sequence("mlp_only_layers", allowed)
    for layer in dense:
        if isinstance(layer, bool) or not isinstance(layer, int) or not 0 <= layer < num_layers:
            raise config.error("mlp_only_layers", allowed)
    without = set(dense)
    keys = ("decoder_sparse_step", "mlp_only_layers")
    moe = [layer for layer in range(num_layers) if layer not in without and (layer + 1) % step == 0]
    return _shape(
        config,
        _grouped_query(
            config,
            _windows(config, num_layers, switched=True),
            bias=config.flag("attention_bias"),
            extra=lambda heads, kv_heads, head_dim: 2 * head_dim,  # one norm for all query heads, one for keys
        ),
        expert_width="moe_intermediate_size",
        moe_layers=_some(config, moe, keys, num_layers),
    )


def _deepseek(config: ConfigKeys, router_bias: bool) -> Shape:
    num_layers = config.size("num_hidden_layers")
    first = config.size("first_k_dense_replace", least=0)
    step = config.size_or("moe_layer_freq", 1)
    moe = [layer for layer in range(first, num_layers) if layer % step == 0]
    if "n_shared_experts" not in config.values:
        raise config.error("n_shared_experts", "an integer, or null for none")
    return _shape(
        config,
        _latent(config, num_layers),
        expert_width="moe_intermediate_size",
        moe_layers=_some(config, moe, ("first_k_dense_replace", "moe_layer_freq"), num_layers),
        shared_experts=config.size_or("n_shared_experts", 0, least=0),
        router_bias=router_bias,
    )


def _deepseek_v2(config: ConfigKeys) -> Shape:
    return _deepseek(config, router_bias=False)


def _deepseek_v3(config: ConfigKeys) -> Shape:
    # Auxiliary-loss-free balancing adds one correction per expert to the scores (topk_method "noaux_tc").
    return _deepseek(config, router_bias=True)


def _gpt_oss(config: ConfigKeys) -> Shape:
    num_layers = config.size("num_hidden_layers")
    if not config.has("layer_types"):
        raise config.error("layer_types", f"a list of {num_layers} entries")
    attention = _grouped_query(
        config,
        _windows(config, num_layers),
        bias=config.flag("attention_bias"),
        extra=lambda heads, kv_heads, head_dim: heads,  # one learned sink per query head
    )
    return _shape(config, attention, expert_width="intermediate_size", expert_bias=True, router_bias=True)


def _olmoe(config: ConfigKeys) -> Shape:
    attention = _grouped_query(
        config,
        _windows(config, config.size("num_hidden_layers")),
        bias=config.flag("attention_bias"),
        extra=lambda heads, kv_heads, head_dim: (heads + kv_heads) * head_dim,  # norms over whole projections
    )
    return _shape(config, attention, expert_width="intermediate_size")


FAMILIES: dict[str, Callable[[ConfigKeys], Shape]] = {
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
    "gpt_oss": _gpt_oss,
    "mixtral": _mixtral,
    "olmoe": _olmoe,
    "qwen3_moe": _qwen3_moe,
}
"""The reader of each supported ``model_type``."""


def read_shape(config: ConfigKeys) -> Shape:
    """The shape that a config describes, by the reader of its ``model_type``.

    Raises:
        ModelConfigError: The family is unknown, the model is dense, or a key is missing or impossible.
    """
    family = config.values.get("model_type")
    supported = ", ".join(FAMILIES)
    if not isinstance(family, str):
        raise config.error("model_type", f"one of {supported}")
    if family in FAMILIES:
        return FAMILIES[family](config)
    nested = [part for part in config.values.values() if isinstance(part, Mapping)]
    if not any("expert" in str(key) or "moe" in str(key) for part in (config.values, *nested) for key in part):
        raise ModelConfigError(
            f"{config.where}: key 'model_type' is {one_line(family)} and no key speaks of experts, so "
            f"this is a dense model; allowed: a mixture of experts of one of the families {supported}"
        )
    raise config.error("model_type", f"one of {supported}")
