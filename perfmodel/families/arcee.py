"""Trinity (Arcee AI, December 2025): gated attention, mostly with a window, and shared beside routed experts."""

from perfmodel.families.attention import FULL, HEAD_DEFAULTS, SLIDING, by_window, grouped_query, heads_of, linear
from perfmodel.families.feed_forward import count_and_top_k, decoder, dense_and_moe, gated, moe_layers_of
from perfmodel.families.keys import ConfigKeys, Declared
from perfmodel.families.network import Attention, Experts, FeedForward, Shape, Tensor
from perfmodel.families.registry import Family


def _windows(config: ConfigKeys, num_layers: int) -> list[int | None]:
    """The window of each layer: none where ``layer_types`` says so, or in every ``global_attn_every_n_layers``-th."""
    listed = config.kinds("layer_types", num_layers, FULL, SLIDING) if config.has("layer_types") else None
    kinds = listed
    if config.has("global_attn_every_n_layers"):
        every = config.size("global_attn_every_n_layers")
        kinds = [SLIDING if (layer + 1) % every else FULL for layer in range(num_layers)]
    if kinds is None:
        raise config.error("layer_types", "the kind of each layer, or global_attn_every_n_layers")
    if listed is not None and listed != kinds:
        raise config.error("global_attn_every_n_layers", f"the interval at which layer_types has {FULL}")
    window = config.size("sliding_window")
    return [window if kind == SLIDING else None for kind in kinds]


def _attention(config: ConfigKeys, num_layers: int) -> tuple[Attention, ...]:
    """Grouped-query attention whose output a projection of its own gates, with norms before and after it."""
    hidden = config.size("hidden_size")
    heads, kv_heads, head_dim = heads_of(config)
    config.only("attention_bias", False)
    tensors = (
        *grouped_query(hidden, heads, kv_heads, head_dim, norms="head"),
        *linear("self_attn.gate_proj", hidden, heads * head_dim),
    )
    return by_window(_windows(config, num_layers), tensors, heads, kv_heads, head_dim, norm_params=2 * hidden)


def _networks(config: ConfigKeys, num_layers: int) -> tuple[FeedForward, ...]:
    hidden, width = config.size("hidden_size"), config.size("expert_size")
    count, top_k = count_and_top_k(config)
    for groups in ("num_expert_groups", "num_limited_groups"):  # beside n_group and topk_group, and not used
        config.only(groups, 1)
    first = config.size("num_dense_layers", least=0)
    shared = config.size("shared_experts", least=0) if config.has("shared_experts") else 0
    return dense_and_moe(
        num_layers,
        moe_layers_of(config, range(first, num_layers), "num_dense_layers"),
        norm_params=2 * hidden,
        dense=gated("mlp", hidden, config.size("intermediate_size")),
        experts=Experts(count=count, top_k=top_k, size=width, tensors=gated("mlp.experts", hidden, width)),
        router=(*linear("mlp.router.gate", hidden, count), Tensor("mlp.expert_bias", (count,))),
        shared=gated("mlp.shared_experts", hidden, shared * width) if shared else (),
    )


def _afmoe(config: ConfigKeys) -> Shape:
    num_layers = config.size("num_hidden_layers")
    return decoder(config, _attention(config, num_layers), _networks(config, num_layers), tied=False)


FAMILIES = {
    "afmoe": Family(
        Declared(
            required=(
                "hidden_size",
                "intermediate_size",
                "expert_size",
                "num_hidden_layers",
                "num_attention_heads",
                "num_experts",
                "top_k",
                "num_dense_layers",
                "sliding_window",
                "vocab_size",
            ),
            nullable=("shared_experts",),
            optional={**HEAD_DEFAULTS, "tie_word_embeddings": "false"},
        ),
        _afmoe,
    ),
}
