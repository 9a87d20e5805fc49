"""Mixtral (Mistral AI, arXiv:2401.04088), and families whose experts have the width ``intermediate_size``."""

from perfmodel.families.attention import HEAD_DEFAULTS, by_window, grouped_query, heads_of, linear, windows_of
from perfmodel.families.feed_forward import count_and_top_k, decoder, dense_and_moe
from perfmodel.families.keys import ConfigKeys, Declared
from perfmodel.families.network import Experts, Shape, Tensors
from perfmodel.families.registry import Family

_REQUIRED = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_experts",
    "top_k",
    "vocab_size",
)


#: Name of the router.
ROUTER = "block_sparse_moe.gate"


def expert_tensors(hidden: int, width: int) -> Tensors:
    """Matrices of an expert as Mixtral's checkpoints name them: gate, up, down."""
    at = "block_sparse_moe.experts"
    return (
        *linear(f"{at}.w1", hidden, width),
        *linear(f"{at}.w3", hidden, width),
        *linear(f"{at}.w2", width, hidden),
    )


def _mixtral(config: ConfigKeys) -> Shape:
    hidden, num_layers = config.size("hidden_size"), config.size("num_hidden_layers")
    count, top_k = count_and_top_k(config)
    width = config.size("intermediate_size")
    heads, kv_heads, head_dim = heads_of(config)
    windows = windows_of(config, num_layers)
    tensors = grouped_query(hidden, heads, kv_heads, head_dim)
    return decoder(
        config,
        by_window(windows, tensors, heads, kv_heads, head_dim, norm_params=hidden),
        dense_and_moe(
            num_layers,
            tuple(range(num_layers)),
            norm_params=hidden,
            experts=Experts(count=count, top_k=top_k, size=width, tensors=expert_tensors(hidden, width)),
            router=linear(ROUTER, hidden, count),
        ),
        tied=False,
    )


FAMILIES = {
    "mixtral": Family(
        Declared(
            required=_REQUIRED,
            optional={**HEAD_DEFAULTS, "sliding_window": "none", "tie_word_embeddings": "false"},
        ),
        _mixtral,
    ),
}
