"""Encoder-decoders with experts: Switch (Google, arXiv:2101.03961) and NLLB-MoE (Meta, arXiv:2207.04672).

Both have an encoder, whose layers come first and keep no cache, and a decoder, whose layers attend to themselves and to
the encoder. One embedding table serves both. How many experts a token visits is no key: it is the routing itself.
"""

import dataclasses
from typing import TypeVar

from perfmodel.families.attention import grouped_query, kv_cache, linear
from perfmodel.families.feed_forward import check_top_k, dense_and_moe, plain
from perfmodel.families.keys import ConfigKeys, Declared
from perfmodel.families.network import Attention, Experts, FeedForward, Shape, Tensor, Tensors
from perfmodel.families.registry import Family

_Kind = TypeVar("_Kind", Attention, FeedForward)

_ROUTER_TYPES = ("float32", "float16", "bfloat16")


def _placed(kinds: tuple[_Kind, ...], first: int) -> tuple[_Kind, ...]:
    """The kinds of a stack whose layers count from ``first`` on."""
    return tuple(
        dataclasses.replace(kind, layers=tuple(first + layer for layer in kind.layers)) for kind in kinds if kind.layers
    )


def _shape(
    config: ConfigKeys,
    layers: tuple[int, int],
    attention: tuple[tuple[Attention, ...], tuple[Attention, ...]],
    feed_forward: tuple[tuple[FeedForward, ...], tuple[FeedForward, ...]],
    *,
    norm: int,
    embedding: str,
    routing: str,
) -> Shape:
    """Encoder and decoder, in this order in every pair, as one network."""
    hidden, vocab = config.size("hidden_size"), config.size("vocab_size")
    encoder_layers, decoder_layers = layers
    return Shape(
        hidden_size=hidden,
        num_layers=encoder_layers + decoder_layers,
        encoder_layers=encoder_layers,
        attention=(*_placed(attention[0], 0), *_placed(attention[1], encoder_layers)),
        feed_forward=(*_placed(feed_forward[0], 0), *_placed(feed_forward[1], encoder_layers)),
        vocab_size=vocab,
        embedding=(Tensor(embedding, (vocab, hidden)),),
        head=linear("lm_head", hidden, vocab),
        final_norm_params=2 * norm,
        tied_embeddings=config.flag("tie_word_embeddings", default=True),
        left_out=(routing,),
    )


def _feed_forward(
    config: ConfigKeys,
    num_layers: int,
    moe: tuple[int, ...],
    *,
    norm: int,
    top_k: int,
    at: str,
    names: tuple[str, str],
    width: int,
    bias: bool,
) -> tuple[FeedForward, ...]:
    """Plain networks of two matrices, one a layer or as the experts of the layers ``moe``."""
    hidden, count = config.size("hidden_size"), config.size("num_experts")
    check_top_k(config, count, top_k)
    dense = plain(at, hidden, width, bias=bias, names=names)
    if not moe:
        return (FeedForward(name="dense", layers=tuple(range(num_layers)), norm_params=norm, dense=dense),)
    tensors = plain(f"{at}.experts", hidden, width, bias=bias, names=names)
    router_bias = config.flag("router_bias", default=False)
    return dense_and_moe(
        num_layers,
        moe,
        norm_params=norm,
        dense=dense,
        experts=Experts(count=count, top_k=top_k, size=width, tensors=tensors),
        router=linear(f"{at}.router.classifier", hidden, count, bias=router_bias),
    )


def _read_router(config: ConfigKeys) -> None:
    """The keys of the router that change no size, checked so that none of them hides one that does."""
    config.only("router_dtype", *_ROUTER_TYPES)
    config.only("router_ignore_padding_tokens", True, False)


# --- Switch -----------------------------------------------------------------------------------------------------------


def _switch_moe_layers(config: ConfigKeys, num_layers: int, which: str) -> tuple[int, ...]:
    """Layer i has experts iff ``i % step`` is 1 (or the step is 1), where the step is layers over MoE layers."""
    field, said = f"num_sparse_{which}_layers", f"{which}_sparse_step"
    count = config.size(field)
    if count > num_layers:
        raise config.error(field, f"at most the number of layers, {num_layers}")
    step = num_layers // count
    moe = tuple(layer for layer in range(num_layers) if step == 1 or layer % step == 1)
    if len(moe) != count:
        raise config.error(field, f"a number of MoE layers that can be spread evenly over {num_layers} layers")
    if config.has(said) and config.size(said) != step:
        raise config.error(said, f"{step}, which is {num_layers} layers over {field}")
    return moe


def _t5_attention(config: ConfigKeys, at: str) -> Tensors:
    hidden, heads, head_dim = config.size("hidden_size"), config.size("num_heads"), config.size("d_kv")
    return (
        *linear(f"{at}.q", hidden, heads * head_dim),
        *linear(f"{at}.k", hidden, heads * head_dim),
        *linear(f"{at}.v", hidden, heads * head_dim),
        *linear(f"{at}.o", heads * head_dim, hidden),
    )


def _switch_attention(config: ConfigKeys, num_layers: int, *, decodes: bool) -> tuple[Attention, ...]:
    """The first layer holds the table of position biases that all layers of its stack use."""
    hidden, heads, head_dim = config.size("hidden_size"), config.size("num_heads"), config.size("d_kv")
    tensors = _t5_attention(config, "layer.0.SelfAttention")
    kept = kv_cache(heads, heads, head_dim, None)
    every = Attention(name="encoder", layers=tuple(range(1, num_layers)), tensors=tensors, norm_params=hidden)
    if decodes:
        every = dataclasses.replace(
            every,
            name="decoder",
            tensors=(*tensors, *_t5_attention(config, "layer.1.EncDecAttention")),
            norm_params=2 * hidden,
            caches=(*kept, dataclasses.replace(kept[0], name="cross")),
        )
    table = Tensor(
        "layer.0.SelfAttention.relative_attention_bias", (config.size("relative_attention_num_buckets"), heads)
    )
    return dataclasses.replace(every, layers=(0,), tensors=(*every.tensors, table)), every


def _switch(config: ConfigKeys) -> Shape:
    hidden, width = config.size("hidden_size"), config.size("d_ff")
    layers = config.size("num_layers"), config.size("num_decoder_layers")
    _read_router(config)
    config.only("add_router_probs", True, False)
    # Gated activations need a third matrix, which Switch checkpoints do not have.
    config.only("is_gated_act", False)
    config.only("feed_forward_proj", "relu", "gelu")
    config.only("dense_act_fn", "relu", "gelu")

    def networks(num_layers: int, which: str, at: str) -> tuple[FeedForward, ...]:
        return _feed_forward(
            config,
            num_layers,
            _switch_moe_layers(config, num_layers, which),
            norm=hidden,
            top_k=1,
            at=at,
            names=("wi", "wo"),
            width=width,
            bias=False,
        )

    return _shape(
        config,
        layers,
        (_switch_attention(config, layers[0], decodes=False), _switch_attention(config, layers[1], decodes=True)),
        (networks(layers[0], "encoder", "layer.1.mlp"), networks(layers[1], "decoder", "layer.2.mlp")),
        norm=hidden,
        embedding="shared",
        routing="each token visits one expert, which is how Switch routes (no key says it)",
    )


# --- NLLB-MoE ---------------------------------------------------------------------------------------------------------


def _nllb_stack(config: ConfigKeys, which: str) -> tuple[int, tuple[Attention, ...], tuple[FeedForward, ...]]:
    """Layers, attention and networks of one stack. Layer i has experts iff ``(i + 1) % sparse_step`` is 0."""
    hidden, num_layers = config.size("hidden_size"), config.size(f"{which}_layers")
    heads = config.size(f"{which}_attention_heads")
    if hidden % heads:
        raise config.error(f"{which}_attention_heads", f"a divisor of the width, {hidden}")
    head_dim, norm = hidden // heads, 2 * hidden  # layer norms: a weight and a bias

    def attention(at: str) -> Tensors:
        found = grouped_query(hidden, heads, heads, head_dim, bias=True, output_bias=True, prefix=at)
        return tuple(Tensor(one.name.replace(".o_proj", ".out_proj"), one.shape) for one in found)

    mixer = Attention(name=which, layers=tuple(range(num_layers)), tensors=attention("self_attn"), norm_params=norm)
    if which == "decoder":
        kept = kv_cache(heads, heads, head_dim, None)
        mixer = dataclasses.replace(
            mixer,
            tensors=(*mixer.tensors, *attention("cross_attention")),
            norm_params=2 * norm,
            caches=(*kept, dataclasses.replace(kept[0], name="cross")),
        )
    step = config.size(f"{which}_sparse_step", least=0)
    networks = _feed_forward(
        config,
        num_layers,
        tuple(layer for layer in range(num_layers) if step and (layer + 1) % step == 0),
        norm=norm,
        top_k=2,
        at="ffn",
        names=("fc1", "fc2"),
        width=config.size(f"{which}_ffn_dim"),
        bias=True,
    )
    return num_layers, (mixer,), networks


def _nllb_moe(config: ConfigKeys) -> Shape:
    encoder_layers, encoder_attention, encoder_networks = _nllb_stack(config, "encoder")
    decoder_layers, decoder_attention, decoder_networks = _nllb_stack(config, "decoder")
    if config.has("num_hidden_layers") and config.size("num_hidden_layers") != encoder_layers:
        raise config.error("num_hidden_layers", f"encoder_layers, {encoder_layers}")
    _read_router(config)
    config.only("second_expert_policy", "all")  # with other policies a token may visit one expert
    return _shape(
        config,
        (encoder_layers, decoder_layers),
        (encoder_attention, decoder_attention),
        (encoder_networks, decoder_networks),
        norm=2 * config.size("hidden_size"),
        embedding="model.shared",
        routing="each token visits two experts, which is how NLLB-MoE routes (no key says it)",
    )


FAMILIES = {
    "nllb-moe": Family(
        Declared(
            required=(
                "hidden_size",
                "encoder_layers",
                "decoder_layers",
                "encoder_attention_heads",
                "decoder_attention_heads",
                "encoder_ffn_dim",
                "decoder_ffn_dim",
                "encoder_sparse_step",
                "decoder_sparse_step",
                "num_experts",
                "vocab_size",
            ),
            optional={"router_bias": "false", "tie_word_embeddings": "true"},
        ),
        _nllb_moe,
    ),
    "switch_transformers": Family(
        Declared(
            required=(
                "hidden_size",
                "num_layers",
                "num_decoder_layers",
                "num_sparse_encoder_layers",
                "num_sparse_decoder_layers",
                "num_heads",
                "d_kv",
                "d_ff",
                "relative_attention_num_buckets",
                "num_experts",
                "vocab_size",
            ),
            optional={"router_bias": "false", "tie_word_embeddings": "true"},
        ),
        _switch,
    ),
}
