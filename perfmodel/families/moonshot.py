"""Kimi (Moonshot AI): K2 (arXiv:2507.20534), Kimi Linear (arXiv:2510.26692) and K3 (arXiv:2607.24653).

K2 is built like DeepSeek-V3. Kimi Linear has Kimi delta attention in most layers, which keeps a constant state, and
latent attention in the others. K3 adds experts that work on a narrower vector, gates of full rank, a gate on the output
of latent attention, and attention over the outputs of earlier blocks of layers.
"""

import dataclasses

from perfmodel.families.attention import latent, linear
from perfmodel.families.deepseek import LATENT, LATENT_KEYS, MOE_KEYS, deepseek_v3, layers_after_first
from perfmodel.families.feed_forward import count_and_top_k, decoder, dense_and_moe, gated, prediction_layers
from perfmodel.families.keys import ConfigKeys, Declared
from perfmodel.families.network import Attention, Experts, FeedForward, Shape, Tensor, Tensors
from perfmodel.families.registry import Family, Wrapper


def _delta(config: ConfigKeys, linears: ConfigKeys, layers: tuple[int, ...], norm_params: int) -> Attention:
    """Kimi delta attention: a delta rule with a decay for each channel, behind short convolutions."""
    hidden = config.size("hidden_size")
    heads, size = linears.size("num_heads"), linears.size("head_dim")
    kernel = linears.size("short_conv_kernel_size")
    width = heads * size
    at = "self_attn"
    gate: Tensors
    if _full_rank_gate(config, linears):
        gate = linear(f"{at}.g_proj", hidden, width)
    else:
        gate = (*linear(f"{at}.g_a_proj", hidden, size), *linear(f"{at}.g_b_proj", size, width))
    tensors = (
        *(tensor for one in "qkv" for tensor in linear(f"{at}.{one}_proj", hidden, width)),
        *(Tensor(f"{at}.{one}_conv1d", (width, 1, kernel)) for one in "qkv"),
        *linear(f"{at}.f_a_proj", hidden, size),
        *linear(f"{at}.f_b_proj", size, width),
        Tensor(f"{at}.dt_bias", (width,)),
        Tensor(f"{at}.A_log", (1, 1, heads, 1)),
        *linear(f"{at}.b_proj", hidden, heads),
        *gate,
        Tensor(f"{at}.o_norm", (size,)),
        *linear(f"{at}.o_proj", width, hidden),
    )
    return Attention(
        name="linear",
        layers=layers,
        tensors=tensors,
        norm_params=norm_params,
        recurrent_elements=heads * size * size,
        convolution_elements=3 * width * (kernel - 1),
    )


def _full_rank_gate(config: ConfigKeys, linears: ConfigKeys) -> bool:
    if linears.has("use_full_rank_gate"):
        return linears.flag("use_full_rank_gate")
    config.take("use_full_rank_gate", False)
    return False


def _latent(config: ConfigKeys, layers: tuple[int, ...], norm_params: int) -> Attention:
    kind = latent(config, layers, bias=False, norm_params=norm_params)
    if not config.flag("mla_use_output_gate", default=False):
        return kind
    width = config.size("num_attention_heads") * config.size("v_head_dim")
    gate = linear("self_attn.g_proj", config.size("hidden_size"), width)
    return dataclasses.replace(kind, tensors=kind.tensors + gate)


def _kinds_of_layers(linears: ConfigKeys, num_layers: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Layers with latent and with delta attention. The config counts layers from 1."""
    found: list[tuple[int, ...]] = []
    for key in ("full_attn_layers", "kda_layers"):
        allowed = f"a list of layers, counted from 1 to {num_layers}"
        listed = [one for one in linears.sequence(key, allowed) if type(one) is int and 1 <= one <= num_layers]
        if key not in linears.values or len(listed) != len(linears.sequence(key, allowed)):
            raise linears.error(key, allowed)
        found.append(tuple(sorted(one - 1 for one in listed)))
    full, delta = found
    if sorted(full + delta) != list(range(num_layers)):
        raise linears.error("kda_layers", f"every layer from 1 to {num_layers} once, here or in full_attn_layers")
    return full, delta


def _feed_forward(config: ConfigKeys, norm_params: int) -> tuple[FeedForward, ...]:
    hidden, num_layers = config.size("hidden_size"), config.size("num_hidden_layers")
    count, top_k = count_and_top_k(config)
    width = config.size("expert_size")
    at = "block_sparse_moe"
    inner, around = hidden, ()
    if config.has("routed_expert_hidden_size"):
        inner = config.size("routed_expert_hidden_size")
        norm = (Tensor(f"{at}.routed_expert_norm", (inner,)),) if config.flag("latent_moe_use_norm") else ()
        around = (
            *linear(f"{at}.routed_expert_down_proj", hidden, inner),
            *norm,
            *linear(f"{at}.routed_expert_up_proj", inner, hidden),
        )
    else:
        config.only("latent_moe_use_norm", False)
        config.take("routed_expert_hidden_size", "none")
    shared = config.size("shared_experts", least=0) if config.has("shared_experts") else 0
    names = (("w1", inner, width), ("w3", inner, width), ("w2", width, inner))
    expert = tuple(one for name, inputs, outputs in names for one in linear(f"{at}.experts.{name}", inputs, outputs))
    return dense_and_moe(
        num_layers,
        layers_after_first(config, num_layers),
        norm_params=norm_params,
        dense=gated("mlp", hidden, config.size("intermediate_size")),
        experts=Experts(count=count, top_k=top_k, size=width, tensors=expert),
        router=(*linear(f"{at}.gate", hidden, count), Tensor(f"{at}.gate.e_score_correction_bias", (count,))),
        shared=gated(f"{at}.shared_experts", hidden, shared * width) if shared else (),
        beside=around,
    )


def _kimi_linear(config: ConfigKeys) -> Shape:
    hidden, num_layers = config.size("hidden_size"), config.size("num_hidden_layers")
    config.only("attention_bias", False)
    config.only("mlp_bias", False)
    config.only("tie_word_embeddings", False)  # the class of the family never ties them
    linears = config.table("linear_attn_config", "an object with the sizes of Kimi delta attention")
    full, delta = _kinds_of_layers(linears, num_layers)
    left_out = prediction_layers(config)
    norms = hidden
    if config.has("attn_res_block_size"):
        config.size("attn_res_block_size")
        # Attention residuals: before either half of a layer a norm and a query over the outputs of earlier blocks.
        norms += 2 * hidden
        left_out += ("attention over earlier blocks of layers counted with the norms (attn_res_block_size)",)
    else:
        config.take("attn_res_block_size", "none")
    attention = (
        *((_latent(config, full, norms),) if full else ()),
        *((_delta(config, linears, delta, norms),) if delta else ()),
    )
    return decoder(
        config,
        attention,
        _feed_forward(config, norms),
        tied=False,
        final_norm_params=norms,
        left_out=left_out,
    )


FAMILIES: dict[str, Family | Wrapper] = {
    "kimi_k2": Family(LATENT, deepseek_v3),
    "kimi_k25": Wrapper("text_config", "kimi_k2"),
    "kimi_vl": Wrapper("text_config", "deepseek_v3"),
    "kimi_linear": Family(
        Declared(
            required=(*MOE_KEYS, *LATENT_KEYS, "linear_attn_config"),
            nullable=("q_lora_rank", "shared_experts"),
            optional={
                "moe_layer_freq": "1",
                "tie_word_embeddings": "false",
                "mla_use_output_gate": "false",
                "use_full_rank_gate": "false",
                "routed_expert_hidden_size": "none",
                "attn_res_block_size": "none",
            },
        ),
        _kimi_linear,
    ),
    "kimi_k3": Wrapper("text_config", "kimi_linear"),
}
