"""DeepSeek-V2 (arXiv:2405.04434) and V3 (arXiv:2412.19437), and families built like them."""

from perfmodel.families.attention import latent, linear
from perfmodel.families.feed_forward import count_and_top_k, decoder, dense_and_moe, gated, moe_layers_of
from perfmodel.families.keys import ConfigKeys, Declared
from perfmodel.families.network import Attention, Experts, FeedForward, Shape, Tensor
from perfmodel.families.registry import Family

_REQUIRED = (
    "hidden_size",
    "intermediate_size",
    "expert_size",
    "num_hidden_layers",
    "num_attention_heads",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "num_experts",
    "top_k",
    "first_k_dense_replace",
    "vocab_size",
)
_NULLABLE = ("q_lora_rank", "shared_experts")
_OPTIONAL = {"moe_layer_freq": "1", "attention_bias": "false", "tie_word_embeddings": "false"}


def layers_after_first(config: ConfigKeys, num_layers: int) -> tuple[int, ...]:
    """MoE layers: from ``first_k_dense_replace`` on, those whose index is a multiple of ``moe_layer_freq``.

    A list as ``moe_layer_freq`` has a 1 for each MoE layer instead.
    """
    first = config.size("first_k_dense_replace", least=0)
    if isinstance(config.values.get("moe_layer_freq"), list | tuple):
        flags = config.sizes("moe_layer_freq", num_layers)
        if any(flag > 1 for flag in flags):
            raise config.error("moe_layer_freq", f"a list of {num_layers} numbers, each 0 or 1")
        moe = [layer for layer in range(first, num_layers) if flags[layer]]
    else:
        step = config.size("moe_layer_freq", default=1)
        moe = [layer for layer in range(first, num_layers) if layer % step == 0]
    return moe_layers_of(config, moe, "first_k_dense_replace", "moe_layer_freq")


def feed_forward(config: ConfigKeys, *, router_bias: bool) -> tuple[FeedForward, ...]:
    """Dense layers first, then experts of one width with shared ones of the same width beside them."""
    hidden, num_layers = config.size("hidden_size"), config.size("num_hidden_layers")
    count, top_k = count_and_top_k(config)
    width = config.size("expert_size")
    moe = layers_after_first(config, num_layers)
    shared = config.size("shared_experts", least=0) if config.has("shared_experts") else 0
    router = linear("mlp.gate", hidden, count)
    if router_bias:
        router += (Tensor("mlp.gate.e_score_correction_bias", (count,)),)
    return dense_and_moe(
        num_layers,
        moe,
        norm_params=hidden,
        dense=gated("mlp", hidden, config.size("intermediate_size")),
        experts=Experts(count=count, top_k=top_k, size=width, tensors=gated("mlp.experts", hidden, width)),
        router=router,
        shared=gated("mlp.shared_experts", hidden, shared * width) if shared else (),
    )


def _attention(config: ConfigKeys) -> tuple[Attention, ...]:
    layers = tuple(range(config.size("num_hidden_layers")))
    bias = config.flag("attention_bias", default=False)
    return (latent(config, layers, bias=bias, norm_params=config.size("hidden_size")),)


def _deepseek_v2(config: ConfigKeys) -> Shape:
    return decoder(config, _attention(config), feed_forward(config, router_bias=False), tied=False)


def _deepseek_v3(config: ConfigKeys) -> Shape:
    # Auxiliary-loss-free balancing adds one correction per expert to the scores (topk_method "noaux_tc").
    return decoder(config, _attention(config), feed_forward(config, router_bias=True), tied=False)


_DECLARED = Declared(required=_REQUIRED, nullable=_NULLABLE, optional=_OPTIONAL)

FAMILIES = {
    "deepseek_v2": Family(_DECLARED, _deepseek_v2),
    "deepseek_v3": Family(_DECLARED, _deepseek_v3),
}
