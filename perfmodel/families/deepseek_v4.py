"""DeepSeek-V4 (DeepSeek, 2026): compressed attention beside a short window, and several residual streams.

Every layer keeps the latest ``sliding_window`` tokens. Layers of ratio 4 also keep one entry for 4 tokens, of which an
indexer picks ``index_topk``; layers of ratio 128 keep one for 128 tokens, and read them all.
"""

import math

from perfmodel.families.attention import SLIDING, linear
from perfmodel.families.feed_forward import count_and_top_k, decoder, prediction_layers
from perfmodel.families.keys import ConfigKeys, Declared
from perfmodel.families.network import Attention, Cache, Experts, FeedForward, Shape, Tensor, Tensors
from perfmodel.families.registry import Family

_RATIOS = (0, 4, 128)
#: What Transformers calls the layers that compress, with the ratios that are known.
_NAMED = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128}


def _bare(name: str, *shape: int) -> Tensor:
    """Parameters that are no weight of a linear map, though they form a table: quantisation leaves them alone."""
    return Tensor(name, (math.prod(shape),))


def _mlp(prefix: str, hidden: int, width: int) -> Tensors:
    """A gated network as the checkpoints name it."""
    return (
        *linear(f"{prefix}.w1", hidden, width),
        *linear(f"{prefix}.w3", hidden, width),
        *linear(f"{prefix}.w2", width, hidden),
    )


def _streams(config: ConfigKeys) -> Tensors:
    """Manifold-constrained hyper-connections (arXiv:2512.24880): mixing of the residual streams around both halves."""
    hidden, streams = config.size("hidden_size"), config.size("hc_mult")
    ways = streams * (streams + 2)
    return tuple(
        tensor
        for half in ("hc_attn", "hc_ffn")
        for tensor in (
            _bare(f"{half}_fn", ways, streams * hidden),
            _bare(f"{half}_base", ways),
            _bare(f"{half}_scale", 3),
        )
    )


def _compressor(prefix: str, hidden: int, ratio: int, size: int) -> Tensors:
    # Groups of four overlap with the group before, so each token makes two contributions.
    outputs = size * (2 if ratio == 4 else 1)
    return (
        _bare(f"{prefix}.ape", ratio, outputs),
        *linear(f"{prefix}.wkv", hidden, outputs),
        *linear(f"{prefix}.wgate", hidden, outputs),
        Tensor(f"{prefix}.norm", (size,)),
    )


def _attention(config: ConfigKeys, ratio: int, layers: tuple[int, ...]) -> Attention:
    hidden, heads, size = config.size("hidden_size"), config.size("num_attention_heads"), config.size("head_dim")
    rank, groups, out_rank = config.size("q_lora_rank"), config.size("o_groups"), config.size("o_lora_rank")
    if config.size("num_key_value_heads") != 1:
        raise config.error("num_key_value_heads", "1, for all heads read one key that is also the value")
    if (heads * size) % groups:
        raise config.error("o_groups", f"a divisor of num_attention_heads * head_dim, {heads * size}")
    at = "attn"
    tensors: Tensors = (
        *linear(f"{at}.wq_a", hidden, rank),
        Tensor(f"{at}.q_norm", (rank,)),
        *linear(f"{at}.wq_b", rank, heads * size),
        *linear(f"{at}.wkv", hidden, size),
        Tensor(f"{at}.kv_norm", (size,)),
        *linear(f"{at}.wo_a", heads * size // groups, groups * out_rank),
        *linear(f"{at}.wo_b", groups * out_rank, hidden),
        Tensor(f"{at}.attn_sink", (heads,)),
        *_streams(config),
    )
    work = 4 * heads * size
    window = config.size("sliding_window")
    caches = [Cache(name="keys and values", elements=size, flops_per_entry=work, window=window)]
    if ratio:
        tensors += _compressor(f"{at}.compressor", hidden, ratio, size)
        picked = config.size("index_topk") if ratio == 4 else None
        caches.append(
            Cache(name="compressed", elements=size, flops_per_entry=work, tokens_per_entry=ratio, read_entries=picked)
        )
    if ratio == 4:
        index_heads, index_size = config.size("index_n_heads"), config.size("index_head_dim")
        inside = f"{at}.indexer"
        tensors += (
            *_compressor(f"{inside}.compressor", hidden, ratio, index_size),
            *linear(f"{inside}.wq_b", rank, index_heads * index_size),
            *linear(f"{inside}.weights_proj", hidden, index_heads),
        )
        caches.append(
            Cache(
                name="index keys",
                elements=index_size,
                flops_per_entry=2 * index_heads * index_size,
                tokens_per_entry=ratio,
            )
        )
    name = "sliding" if not ratio else f"compressed {ratio}"
    return Attention(name=name, layers=layers, tensors=tensors, norm_params=hidden, caches=tuple(caches))


def _listed_ratios(config: ConfigKeys, num_layers: int) -> list[int]:
    """Published files: a ratio for each layer; entries beyond them belong to layers for multi-token prediction."""
    allowed = f"a list of at least {num_layers} entries, each one of {', '.join(map(str, _RATIOS))}"
    found = config.sequence("compress_ratios", allowed)
    known = [ratio for ratio in found if type(ratio) is int and ratio in _RATIOS]
    if len(found) < num_layers or len(known) != len(found):
        raise config.error("compress_ratios", allowed)
    return known[:num_layers]


def _named_ratios(config: ConfigKeys, num_layers: int) -> list[int]:
    """Files that Transformers wrote: a name for each layer, and beside them the ratio of each name."""
    kinds = config.kinds("layer_types", num_layers, SLIDING, *_NAMED)
    if config.has("compress_rates") or not config.has("compress_ratios"):
        rates = config.table("compress_rates")
        for kind, ratio in _NAMED.items():
            if kind in kinds and rates.size(kind) != ratio:
                raise rates.error(kind, f"{ratio}, for another compression is not known")
    return [_NAMED.get(kind, 0) for kind in kinds]


def _ratios(config: ConfigKeys, num_layers: int) -> list[int]:
    """The compression of every layer."""
    if not config.has("layer_types"):
        return _listed_ratios(config, num_layers)
    named = _named_ratios(config, num_layers)
    if config.has("compress_ratios") and _listed_ratios(config, num_layers) != named:
        raise config.error("layer_types", "the kinds of layers that compress_ratios says")
    return named


def _hash_layers(config: ConfigKeys, num_layers: int) -> int:
    """How many of the first layers look their experts up by token: a number, or a list that Transformers wrote."""
    if not config.has("mlp_layer_types"):
        hashed = config.size("num_hash_layers", least=0)
        if hashed > num_layers:
            raise config.error("num_hash_layers", f"at most the number of layers, {num_layers}")
        return hashed
    kinds = config.kinds("mlp_layer_types", num_layers, "hash_moe", "moe")
    hashed = kinds.count("hash_moe")
    if "hash_moe" in kinds[hashed:]:
        raise config.error("mlp_layer_types", "hash_moe in none but the first layers")
    config.only("num_hash_layers", hashed)
    return hashed


def _deepseek_v4(config: ConfigKeys) -> Shape:
    hidden, num_layers = config.size("hidden_size"), config.size("num_hidden_layers")
    count, top_k = count_and_top_k(config)
    width = config.size("expert_size")
    shared = config.size("shared_experts", least=0) if config.has("shared_experts") else 0
    config.only("attention_bias", False)
    config.only("mlp_bias", False)
    if not config.has("expert_dtype"):  # how the experts are stored, which goes with the quantization_config
        config.take("expert_dtype", "none")
    hashed = _hash_layers(config, num_layers)
    ratios = _ratios(config, num_layers)
    attention = tuple(
        _attention(config, ratio, tuple(layer for layer, one in enumerate(ratios) if one == ratio))
        for ratio in dict.fromkeys(ratios)
    )
    # The first layers look their experts up by token and have no correction of scores.
    correction = (Tensor("ffn.gate.bias", (count,)),)
    kinds = tuple(
        FeedForward(
            name="moe",
            layers=tuple(layers),
            norm_params=hidden,
            shared=_mlp("ffn.shared_experts", hidden, shared * width) if shared else (),
            router=linear("ffn.gate", hidden, count) + extra,
            experts=Experts(count=count, top_k=top_k, size=width, tensors=_mlp("ffn.experts", hidden, width)),
        )
        for layers, extra in ((range(hashed), ()), (range(hashed, num_layers), correction))
        if layers
    )
    streams = config.size("hc_mult")
    left_out = [
        *prediction_layers(config),
        "mixing of the residual streams counted with attention and the last norm (hc_mult)",
        "groups of tokens that are not complete yet left out of the compressed cache (compress_ratios)",
    ]
    if hashed:
        left_out.append(f"tables from token to experts left out, which are no parameters ({hashed} hash layers)")
    return decoder(
        config,
        attention,
        kinds,
        tied=False,
        embedding_name="embed",
        head_name="head",
        final_norm_params=hidden + streams * streams * hidden + streams + 1,  # the last norm, and joining the streams
        left_out=tuple(left_out),
    )


_DECLARED = Declared(
    required=(
        "hidden_size",
        "expert_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "num_experts",
        "top_k",
        "q_lora_rank",
        "o_lora_rank",
        "o_groups",
        "index_n_heads",
        "index_head_dim",
        "index_topk",
        "sliding_window",
        "hc_mult",
        "vocab_size",
    ),
    nullable=("shared_experts",),
    optional={"tie_word_embeddings": "false", "expert_dtype": "none: as the quantization_config says"},
)

FAMILIES = {
    "deepseek_v4": Family(_DECLARED, _deepseek_v4),
    "deepseek_ref": Family(_DECLARED, _deepseek_v4),
}
