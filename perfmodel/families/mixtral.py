"""Mixtral (Mistral AI, arXiv:2401.04088), and families whose experts have the width ``intermediate_size``."""

from perfmodel.families.attention import HEAD_DEFAULTS, by_window, grouped_query, heads_of, linear, windows_of
from perfmodel.families.feed_forward import UNIFORM_KEYS, uniform
from perfmodel.families.keys import ConfigKeys, Declared
from perfmodel.families.network import Shape, Tensors
from perfmodel.families.registry import Family

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
    heads, kv_heads, head_dim = heads_of(config)
    tensors = grouped_query(hidden, heads, kv_heads, head_dim)
    attention = by_window(windows_of(config, num_layers), tensors, heads, kv_heads, head_dim, norm_params=hidden)
    return uniform(config, attention, expert=expert_tensors, router=ROUTER)


FAMILIES = {
    "mixtral": Family(
        Declared(
            required=UNIFORM_KEYS,
            optional={**HEAD_DEFAULTS, "sliding_window": "none", "tie_word_embeddings": "false"},
        ),
        _mixtral,
    ),
}
