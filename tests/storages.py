"""A small network of every class of tensors, and configs of it, for the tests of stored precision."""

from typing import Any

from perfmodel.families import Attention, ConfigKeys, Experts, FeedForward, Shape, Tensor
from perfmodel.storage import Storage, read_storage

HIDDEN, WIDTH, EXPERTS, LAYERS, VOCAB = 256, 384, 8, 12, 1000


def matrix(name: str, rows: int, columns: int) -> Tensor:
    return Tensor(name, (rows, columns))


def network(**changes: Any) -> Shape:
    """Twelve layers, the first dense; every class has a matrix, and attention a bias, a norm and a convolution."""
    gated = ("gate_proj", WIDTH, HIDDEN), ("up_proj", WIDTH, HIDDEN), ("down_proj", HIDDEN, WIDTH)
    values: dict[str, Any] = {
        "hidden_size": HIDDEN,
        "num_layers": LAYERS,
        "attention": (
            Attention(
                name="full",
                layers=tuple(range(LAYERS)),
                tensors=(
                    matrix("self_attn.q_proj", HIDDEN, HIDDEN),
                    Tensor("self_attn.q_proj.bias", (HIDDEN,)),
                    matrix("self_attn.o_proj", HIDDEN, HIDDEN),
                    Tensor("self_attn.q_norm", (64,)),
                    Tensor("self_attn.conv1d", (HIDDEN, 1, 4)),
                ),
                norm_params=HIDDEN,
            ),
        ),
        "feed_forward": (
            FeedForward(
                name="dense",
                layers=(0,),
                norm_params=HIDDEN,
                dense=tuple(matrix(f"mlp.{name}", *sizes) for name, *sizes in gated),
            ),
            FeedForward(
                name="moe",
                layers=tuple(range(1, LAYERS)),
                norm_params=HIDDEN,
                shared=tuple(matrix(f"mlp.shared_experts.{name}", *sizes) for name, *sizes in gated),
                router=(matrix("mlp.gate", EXPERTS, HIDDEN), Tensor("mlp.gate.e_score_correction_bias", (EXPERTS,))),
                experts=Experts(
                    count=EXPERTS,
                    top_k=2,
                    size=WIDTH,
                    tensors=tuple(matrix(f"mlp.experts.{name}", *sizes) for name, *sizes in gated),
                ),
            ),
        ),
        "vocab_size": VOCAB,
        "embedding": (matrix("embed_tokens", VOCAB, HIDDEN),),
        "head": (matrix("lm_head", VOCAB, HIDDEN),),
        "final_norm_params": HIDDEN,
        "tied_embeddings": False,
    }
    return Shape(**{**values, **changes})


def keys(quantization: object = None, **other: object) -> ConfigKeys:
    """A config with a quantisation config."""
    values = {"dtype": "bfloat16", **other}
    if quantization is not None:
        values["quantization_config"] = quantization
    return ConfigKeys(values, "config")


def stored(quantization: object, shape: Shape | None = None, beside: object = None, **other: object) -> Storage:
    """What is read from a quantisation config of the small network."""
    neighbour = None if beside is None else ConfigKeys({"quantization": beside}, "hf_quant_config.json")
    return read_storage(keys(quantization, **other), shape or network(), neighbour)
