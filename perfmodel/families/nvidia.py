"""Nemotron-H (arXiv:2504.03624) and Nemotron 3 (NVIDIA, December 2025): every layer has one mixer or one network."""

from perfmodel.families.attention import HEAD_DEFAULTS, grouped_query, heads_of, kv_cache, linear
from perfmodel.families.feed_forward import count_and_top_k, decoder, plain, prediction_layers
from perfmodel.families.keys import ConfigKeys, Declared
from perfmodel.families.mamba import mamba_2
from perfmodel.families.network import Attention, Experts, FeedForward, Shape, Tensor, Tensors
from perfmodel.families.registry import Family

_MAMBA, _ATTENTION, _MOE, _DENSE = "M", "*", "E", "-"
_LETTERS = {
    "mamba": _MAMBA,
    "linear_attention": _MAMBA,
    "attention": _ATTENTION,
    "full_attention": _ATTENTION,
    "moe": _MOE,
    "mlp": _DENSE,
}
_MOST_LAYERS = 10_000
#: Fields that say something only where a layer has experts.
_OF_EXPERTS = (
    "num_experts",
    "top_k",
    "expert_size",
    "shared_experts",
    "expert_groups",
    "kept_groups",
    "moe_shared_expert_intermediate_size",
    "moe_latent_size",
)


def _letters(config: ConfigKeys) -> str:
    """The kind of every layer, a letter each, from a list of names, a text of letters, or both."""
    found: dict[str, str] = {}
    if config.has("layers_block_type"):
        allowed = f"a list of at most {_MOST_LAYERS} entries, each one of {', '.join(_LETTERS)}"
        names = config.sequence("layers_block_type", allowed)
        known = [_LETTERS[name] for name in names if isinstance(name, str) and name in _LETTERS]
        if not 0 < len(known) == len(names) <= _MOST_LAYERS:
            raise config.error("layers_block_type", allowed)
        found["layers_block_type"] = "".join(known)
    if config.has("hybrid_override_pattern") or not found:
        allowed = f"a text of at most {_MOST_LAYERS} letters, each M (Mamba-2), * (attention), E (experts) or - (dense)"
        text = config.values.get("hybrid_override_pattern")
        if not isinstance(text, str) or not 0 < len(text) <= _MOST_LAYERS or not set(text) <= set("M*E-"):
            raise config.error("hybrid_override_pattern", allowed)
        found["hybrid_override_pattern"] = text
    letters = next(iter(found.values()))
    if not set(letters) & {_MAMBA, _ATTENTION}:
        raise config.error(next(iter(found)), "at least one layer that mixes tokens, Mamba-2 or attention")
    if any(other != letters for other in found.values()):
        raise config.error("hybrid_override_pattern", "the layers that layers_block_type lists")
    if config.has("num_hidden_layers") and config.size("num_hidden_layers") != len(letters):
        raise config.error("num_hidden_layers", f"{len(letters)}, the layers that {next(iter(found))} lists")
    return letters


def _mixers(config: ConfigKeys, at: dict[str, tuple[int, ...]]) -> tuple[Attention, ...]:
    hidden = config.size("hidden_size")
    bias = config.flag("use_bias", default=False)
    config.only("mamba_proj_bias", bias)  # the same said twice
    config.only("sliding_window")
    mamba = mamba_2(
        "mixer",
        hidden,
        at[_MAMBA],
        heads=config.size("mamba_num_heads"),
        head_dim=config.size("mamba_head_dim"),
        groups=config.size("n_groups"),
        state=config.size("ssm_state_size"),
        kernel=config.size("conv_kernel"),
        bias=bias,
        convolution_bias=config.flag("use_conv_bias", default=True),
    )
    heads, kv_heads, head_dim = heads_of(config)
    bias = config.flag("attention_bias", default=False)
    full = Attention(
        name="full",
        layers=at[_ATTENTION],
        tensors=grouped_query(hidden, heads, kv_heads, head_dim, bias=bias, output_bias=bias, prefix="mixer"),
        norm_params=hidden,
        caches=kv_cache(heads, kv_heads, head_dim, None),
    )
    none = Attention(name="none", layers=tuple(sorted(at[_MOE] + at[_DENSE])), tensors=(), norm_params=0)
    return tuple(kind for kind in (mamba, full, none) if kind.layers)


def _moe(config: ConfigKeys, layers: tuple[int, ...]) -> FeedForward:
    """Experts of two matrices, which may work on a narrower latent than the model's width."""
    hidden = config.size("hidden_size")
    count, top_k = count_and_top_k(config)
    width = config.size("expert_size")
    config.only("mlp_bias", False)
    latent = config.size_or_none("moe_latent_size")
    if "moe_latent_size" not in config.values:
        config.take("moe_latent_size", "none")
    # One shared expert, whose width has a key of its own; what more than one would be, no checkpoint shows.
    config.only("shared_experts", 0, 1)
    shared = config.size("shared_experts", least=0)
    ends: Tensors = ()
    if latent is not None:
        ends = (
            *linear("mixer.fc1_latent_proj", hidden, latent),
            *linear("mixer.fc2_latent_proj", latent, hidden),
        )
    return FeedForward(
        name="moe",
        layers=layers,
        norm_params=hidden,
        dense=ends,
        shared=plain("mixer.shared_experts", hidden, config.size("moe_shared_expert_intermediate_size"))
        if shared
        else (),
        router=(*linear("mixer.gate", hidden, count), Tensor("mixer.gate.e_score_correction_bias", (count,))),
        experts=Experts(
            count=count,
            top_k=top_k,
            size=width,
            tensors=plain("mixer.experts", hidden if latent is None else latent, width),
        ),
    )


def _networks(config: ConfigKeys, at: dict[str, tuple[int, ...]]) -> tuple[FeedForward, ...]:
    hidden = config.size("hidden_size")
    kinds = []
    if at[_DENSE]:
        bias = config.flag("mlp_bias", default=False)
        dense = plain("mixer", hidden, config.size("intermediate_size"), bias=bias)
        kinds.append(FeedForward(name="dense", layers=at[_DENSE], norm_params=hidden, dense=dense))
    if at[_MOE]:
        kinds.append(_moe(config, at[_MOE]))
    else:
        for field in _OF_EXPERTS:  # Transformers writes them with its own values where no layer has experts
            config.has(field)
    without = tuple(sorted(at[_MAMBA] + at[_ATTENTION]))
    if without:
        kinds.append(FeedForward(name="none", layers=without, norm_params=0))
    return tuple(kinds)


def _nemotron_h(config: ConfigKeys) -> Shape:
    letters = _letters(config)
    at = {letter: tuple(layer for layer, other in enumerate(letters) if other == letter) for letter in "M*E-"}
    return decoder(
        config,
        _mixers(config, at),
        _networks(config, at),
        tied=False,
        num_layers=len(letters),
        embedding_name="backbone.embeddings",
        left_out=prediction_layers(config),
    )


FAMILIES = {
    "nemotron_h": Family(
        Declared(
            required=(
                "hidden_size",
                "num_attention_heads",
                "mamba_num_heads",
                "mamba_head_dim",
                "n_groups",
                "ssm_state_size",
                "conv_kernel",
                "vocab_size",
            ),
            optional={
                **HEAD_DEFAULTS,
                "attention_bias": "false",
                "mlp_bias": "false",
                "use_bias": "false",
                "use_conv_bias": "true",
                "moe_latent_size": "none",
                "tie_word_embeddings": "false",
            },
        ),
        _nemotron_h,
    ),
}
