"""Phi-3.5-MoE and SlimMoE (Microsoft, arXiv:2404.14219 and arXiv:2506.18349), and Phi-3 as a dense control."""

from perfmodel.families.attention import HEAD_DEFAULTS, by_window, grouped_query, heads_of, linear, windows_of
from perfmodel.families.feed_forward import count_and_top_k, decoder, dense_and_moe
from perfmodel.families.keys import ConfigKeys, Declared
from perfmodel.families.mixtral import ROUTER, expert_tensors
from perfmodel.families.network import Experts, FeedForward, Shape
from perfmodel.families.registry import Family

_REQUIRED = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
_OPTIONAL = {**HEAD_DEFAULTS, "sliding_window": "none", "tie_word_embeddings": "false"}


def _phimoe(config: ConfigKeys) -> Shape:
    hidden, num_layers = config.size("hidden_size"), config.size("num_hidden_layers")
    count, top_k = count_and_top_k(config)
    width = config.size("intermediate_size")
    heads, kv_heads, head_dim = heads_of(config)
    bias = config.flag("attention_bias", default=False)
    tensors = grouped_query(hidden, heads, kv_heads, head_dim, bias=bias, output_bias=bias)
    norm = 2 * hidden  # layer norms: a weight and a bias
    return decoder(
        config,
        by_window(windows_of(config, num_layers), tensors, heads, kv_heads, head_dim, norm_params=norm),
        dense_and_moe(
            num_layers,
            tuple(range(num_layers)),
            norm_params=norm,
            experts=Experts(count=count, top_k=top_k, size=width, tensors=expert_tensors(hidden, width)),
            router=linear(ROUTER, hidden, count),
        ),
        tied=False,
        final_norm_params=norm,
        head_bias=config.flag("lm_head_bias", default=False),
    )


def _phi3(config: ConfigKeys) -> Shape:
    hidden, num_layers = config.size("hidden_size"), config.size("num_hidden_layers")
    width = config.size("intermediate_size")
    heads, kv_heads, head_dim = heads_of(config)
    # Queries, keys and values come from one matrix, and so do gate and up.
    tensors = (
        *linear("self_attn.qkv_proj", hidden, (heads + 2 * kv_heads) * head_dim),
        *linear("self_attn.o_proj", heads * head_dim, hidden),
    )
    dense = (*linear("mlp.gate_up_proj", hidden, 2 * width), *linear("mlp.down_proj", width, hidden))
    return decoder(
        config,
        by_window(windows_of(config, num_layers), tensors, heads, kv_heads, head_dim, norm_params=hidden),
        (FeedForward(name="dense", layers=tuple(range(num_layers)), norm_params=hidden, dense=dense),),
        tied=False,
    )


FAMILIES = {
    "phi3": Family(Declared(required=_REQUIRED, optional=_OPTIONAL), _phi3),
    "phimoe": Family(
        Declared(
            required=(*_REQUIRED, "num_experts", "top_k"),
            optional={**_OPTIONAL, "attention_bias": "false", "lm_head_bias": "false"},
        ),
        _phimoe,
    ),
}
