"""Hypothesis strategies for small models, traces, systems and policies.

Sizes are small, so that the plain loops stay fast; rates span what real parts span, so that every side of a layer
(link, GPU, near-data arrays, near-data memory) is the slow one in some example.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from perfmodel.families import Attention, Cache, Experts, FeedForward, Tensor
from perfmodel.hardware import System, load_system
from perfmodel.model import MoEModel
from perfmodel.routing import RoutingTrace
from perfmodel.storage import Format, Storage

NDP_SYSTEM = load_system("h100-cxl-ndp")

PLACED, NEAR, GPU_ONLY = ("context-aware", "static"), ("monde",), ("hobbit",)
EVERY_POLICY = (*PLACED, *NEAR, *GPU_ONLY)


@functools.cache
def mixtral(name: str = "mixtral-8x7b") -> MoEModel:
    """A bundled model."""
    return MoEModel.from_config(name)


@functools.cache
def recording() -> RoutingTrace:
    """The bundled recording: 6 ragged sequences, 32 layers, 2 of 8 experts."""
    return RoutingTrace.load("tiny-mixtral-32l-mini")


def attention_kind(
    layers: Sequence[int],
    params: int = 1024,
    kv_elements: int = 32,
    context_flops: int = 64,
    window: int | None = None,
) -> Attention:
    """Attention of one tensor and one cache."""
    return Attention(
        name="full" if window is None else "sliding",
        layers=tuple(layers),
        tensors=(Tensor("self_attn", (params,)),),
        norm_params=4,
        caches=(Cache(name="keys and values", elements=kv_elements, flops_per_entry=context_flops, window=window),),
    )


def matrices(*shapes: tuple[int, int]) -> tuple[Tensor, ...]:
    """The matrices of a network, by inputs and outputs."""
    return tuple(Tensor(f"{number}", (outputs, inputs)) for number, (inputs, outputs) in enumerate(shapes))


def plain_model(**changes: Any) -> MoEModel:
    """A fixed small network with one kind of attention, with some values changed.

    ``num_layers``, ``moe_layers``, ``num_experts``, ``top_k``, ``expert_size``, ``expert_matrices``, ``router_params``,
    ``shared_params``, ``dense_params``, ``bits`` and ``expert_bits`` say what the parts are made of.
    """
    num_layers = changes.pop("num_layers", 3)
    moe = tuple(changes.pop("moe_layers", range(num_layers)))
    hidden = changes.get("hidden_size", 16)
    width = changes.pop("expert_size", 24)
    shapes = changes.pop("expert_matrices", ((hidden, width), (hidden, width), (width, hidden)))
    experts = Experts(
        count=changes.pop("num_experts", 4), top_k=changes.pop("top_k", 2), size=width, tensors=matrices(*shapes)
    )
    router, shared = changes.pop("router_params", 64), changes.pop("shared_params", 0)
    dense = changes.pop("dense_params", 0)
    bits, expert_bits = changes.pop("bits", 16.0), changes.pop("expert_bits", 16.0)
    others = tuple(sorted(set(range(num_layers)) - set(moe)))
    kinds = [
        FeedForward(
            name="moe",
            layers=moe,
            norm_params=0,
            router=(Tensor("router", (router,)),) if router else (),
            shared=(Tensor("shared", (shared,)),) if shared else (),
            experts=experts,
        )
    ]
    if others:
        tensors = (Tensor("dense", (dense,)),) if dense else ()
        kinds.append(FeedForward(name="dense", layers=others, norm_params=0, dense=tensors))
    vocab = changes.get("vocab_size", 50)
    values: dict[str, Any] = {
        "name": "plain",
        "family": "mixtral",
        "hidden_size": hidden,
        "num_layers": num_layers,
        "attention": (attention_kind(range(num_layers)),),
        "feed_forward": tuple(kinds),
        "vocab_size": vocab,
        "embedding": (Tensor("embed", (vocab, hidden)),),
        "head": (Tensor("head", (vocab, hidden)),),
        "final_norm_params": 16,
        "tied_embeddings": False,
        "storage": dataclasses.replace(Storage.uniform(bits), expert=Format("test", expert_bits)),
    }
    return MoEModel(**{**values, **changes})


def spread_floats(low: float, high: float) -> st.SearchStrategy[float]:
    """Positive numbers spread evenly over orders of magnitude."""
    return st.floats(math.log(low), math.log(high)).map(lambda x: float(np.exp(x)))


def zero_or(values: st.SearchStrategy[float]) -> st.SearchStrategy[float]:
    """Zero half of the time: a cost that is switched off."""
    return st.one_of(st.just(0.0), values)


@st.composite
def models(draw: st.DrawFn, max_experts: int = 6, expert_bits: Sequence[float] = (16.0, 8.0, 4.25)) -> MoEModel:
    """Small networks: dense layers, shared experts, gated or plain experts, biases, and mixers of every sort."""
    hidden, size = draw(st.integers(4, 40)), draw(st.integers(3, 40))
    num_layers = draw(st.integers(1, 4))
    moe_layers = tuple(sorted(draw(st.sets(st.integers(0, num_layers - 1), min_size=1))))
    others = tuple(sorted(set(range(num_layers)) - set(moe_layers)))
    experts = draw(st.integers(1, max_experts))
    gate_and_up = draw(st.integers(1, 2))
    bias = (Tensor("bias", (size * gate_and_up + hidden,)),) if draw(st.booleans()) else ()
    mixers = [draw(_mixers(hidden)) for _ in range(draw(st.integers(1, 2)))]
    of_layer = [draw(st.integers(0, len(mixers) - 1)) for _ in range(num_layers)]
    attention = tuple(
        dataclasses.replace(kind, layers=tuple(i for i, one in enumerate(of_layer) if one == number))
        for number, kind in enumerate(mixers)
        if number in of_layer
    )
    shared = draw(st.sampled_from([0, 3 * hidden * size, 5 * hidden * size + hidden]))
    router = draw(st.sampled_from([0, hidden * experts]))
    beside = draw(st.sampled_from([0, 0, hidden * size]))
    kinds = [
        FeedForward(
            name="moe",
            layers=moe_layers,
            norm_params=hidden,
            dense=(Tensor("beside", (beside,)),) if beside else (),
            shared=(Tensor("shared", (shared,)),) if shared else (),
            router=(Tensor("router", (router,)),) if router else (),
            experts=Experts(
                count=experts,
                top_k=draw(st.integers(1, min(4, experts))),
                size=size,
                tensors=(*matrices(*[(hidden, size)] * gate_and_up, (size, hidden)), *bias),
            ),
        )
    ]
    if others:
        # As large as the network beside the experts, where there is one: prices take the mean over layers.
        dense = beside or 3 * hidden * size * 2
        tensors = (Tensor("dense", (dense,)),)
        kinds.append(FeedForward(name="dense", layers=others, norm_params=hidden, dense=tensors))
    vocab = draw(st.integers(1, 300))
    rest = Storage.uniform(draw(st.sampled_from([16.0, 32.0])))
    return MoEModel(
        name="small",
        family="mixtral",
        hidden_size=hidden,
        num_layers=num_layers,
        attention=attention,
        feed_forward=tuple(kinds),
        vocab_size=vocab,
        embedding=(Tensor("embed", (vocab, hidden)),),
        head=(Tensor("head", (vocab, hidden)),),
        final_norm_params=hidden,
        tied_embeddings=draw(st.booleans()),
        storage=dataclasses.replace(rest, expert=Format("test", draw(st.sampled_from(expert_bits)))),
    )


@st.composite
def _mixers(draw: st.DrawFn, hidden: int) -> Attention:
    """Grouped-query, latent, sparse, compressed or linear attention, with or without a window."""
    heads, head_dim = draw(st.integers(1, 4)), draw(st.integers(2, 16))
    window = draw(st.one_of(st.none(), st.integers(1, 12)))
    picked = draw(st.one_of(st.none(), st.integers(1, 12)))
    latent, rope = draw(st.integers(4, 32)), draw(st.integers(2, 8))
    kv_heads = draw(st.sampled_from([d for d in range(1, heads + 1) if heads % d == 0]))
    keys = Cache(
        name="keys and values", elements=2 * kv_heads * head_dim, flops_per_entry=4 * heads * head_dim, window=window
    )
    compressed = Cache(
        name="latent",
        elements=latent + rope,
        flops_per_entry=2 * heads * (2 * latent + rope),
        tokens_per_entry=draw(st.sampled_from([1, 1, 4])),
        read_entries=picked,
        expanded_elements=heads * (2 * latent + rope),
    )
    caches = draw(st.sampled_from([(keys,), (compressed,), (compressed, keys), ()]))
    return Attention(
        name="drawn",
        layers=(0,),
        tensors=(Tensor("projections", (2 * hidden * heads * head_dim + hidden * latent,)),),
        norm_params=hidden,
        caches=caches,
        recurrent_elements=0 if caches else draw(st.integers(1, 500)),
        convolution_elements=0 if caches else draw(st.integers(0, 50)),
    )


def small_trace(
    model: MoEModel,
    lengths: Sequence[tuple[int, int]],
    *,
    seed: int = 0,
    weights: bool = True,
    unassigned: float = 0.0,
) -> RoutingTrace:
    """Random skewed routing for a model; ``lengths`` gives prefill and decode rows of every sequence."""
    rng = np.random.default_rng(seed)
    tokens = sum(prompt + output for prompt, output in lengths)
    shape = (tokens, len(model.moe_layers), model.num_experts)
    liking = rng.normal(size=(1, *shape[1:])) + rng.gumbel(size=shape)
    ids = np.argsort(-liking, axis=-1)[..., : model.top_k].astype(np.int64)
    gates = rng.random(ids.shape).astype(np.float32)
    # Coarse weights tie often; some tokens have no weight at all.
    gates[rng.random(gates.shape) < 0.5] = 0.5
    gates[rng.random(gates.shape[:2]) < 0.05] = 0.0
    missing = rng.random(ids.shape) < unassigned
    missing[:, 0, 0] = False
    ids[missing] = -1
    return RoutingTrace(
        topk_ids=ids,
        topk_weights=gates if weights else None,
        sequence_offsets=np.cumsum([0, *(prompt + output for prompt, output in lengths)]),
        prompt_len=np.array([prompt for prompt, _ in lengths]),
        layer_index=np.array(model.moe_layers),
        num_experts=model.num_experts,
        metadata={"model": "small", "source": "synthetic"},
    )


@st.composite
def traces(
    draw: st.DrawFn, model: MoEModel, min_sequences: int = 1, prefill: bool | None = None, max_decode: int = 8
) -> RoutingTrace:
    """Ragged sequences, with and without weights, unassigned picks and prefill."""
    count = draw(st.integers(min_sequences, 3))
    with_prefill = draw(st.booleans()) or draw(st.booleans()) if prefill is None else prefill
    prompts = [draw(st.integers(1, 8)) if with_prefill else 0 for _ in range(count)]
    return small_trace(
        model,
        [(prompt, draw(st.integers(1, max_decode))) for prompt in prompts],
        seed=draw(st.integers(0, 2**32 - 1)),
        weights=draw(st.booleans()),
        unassigned=draw(st.sampled_from([0.0, 0.0, 0.3])),
    )


@st.composite
def system_values(draw: st.DrawFn) -> dict[str, float | str]:
    """Values for every kind of constant of `NDP_SYSTEM`; memories are large enough for every small model."""
    values: dict[str, float | str] = {
        "gpu.memory_bandwidth_gb_per_s": draw(spread_floats(50.0, 5000.0)),
        "gpu.memory_efficiency": draw(st.floats(0.2, 1.0)),
        "gpu.peak_tflop_per_s.fp16": draw(spread_floats(0.05, 1000.0)),
        "gpu.compute_efficiency": draw(st.floats(0.2, 1.0)),
        "gpu.memory_n_half_kb": draw(zero_or(spread_floats(0.1, 500.0))),
        "gpu.launch_overhead_us": draw(zero_or(spread_floats(0.001, 5.0))),
        "link.bandwidth_gb_per_s": draw(spread_floats(1.0, 900.0)),
        "link.efficiency": draw(st.floats(0.2, 1.0)),
        "link.latency_us": draw(zero_or(spread_floats(0.001, 5.0))),
        "link.n_half_kb": draw(zero_or(spread_floats(0.1, 500.0))),
        "ndp.dram_bandwidth_gb_per_s": draw(spread_floats(1.0, 1000.0)),
        "ndp.arrays": draw(st.integers(1, 64)),
        "ndp.rows": draw(st.integers(1, 8)),
        "ndp.cols": draw(st.integers(1, 8)),
        "ndp.clock_ghz": draw(spread_floats(0.05, 5.0)),
        "ndp.dataflow": draw(st.sampled_from(["os", "ws", "is"])),
        "ndp.scale_bits_per_weight": draw(st.sampled_from([0.0, 0.25, 1.0])),
        "ndp.precision_scaling": draw(st.sampled_from(["none", "linear", "native"])),
    }
    if draw(st.booleans()):
        values["ndp.dram_efficiency"] = draw(st.floats(0.1, 1.0))
    else:
        values["ndp.mapping"] = draw(st.sampled_from(["row-by-row", "bank-group-interleaved"]))
    if draw(st.booleans()):
        values["gpu.layer_overhead_us"] = draw(zero_or(spread_floats(0.01, 50.0)))
    if values["ndp.precision_scaling"] == "native":
        widths = sorted(draw(st.sets(st.sampled_from([2, 4, 8]), min_size=1)))
        # Rates fall as widths grow, down to 1 for what is wider than every entry.
        rates = sorted((draw(st.floats(1.0, 8.0)) for _ in widths), reverse=True)
        values |= {f"ndp.native_rate_by_bits.{width}": rate for width, rate in zip(widths, rates, strict=True)}
    return values


@st.composite
def systems(draw: st.DrawFn) -> System:
    """GPU, link and near-data device with random constants."""
    return NDP_SYSTEM.with_values(draw(system_values()))


@st.composite
def policy_texts(draw: st.DrawFn, model: MoEModel, names: Sequence[str] = EVERY_POLICY) -> str:
    """Policies with every option set, as the command line reads them."""
    name = draw(st.sampled_from(names))
    options: dict[str, Any]
    count = st.integers(0, model.num_experts)
    prefill = draw(st.sampled_from(["ndp", "fetch", "balanced"]))
    if name in PLACED:
        selector = draw(st.sampled_from(["prefix", "optimum", "uniform", "full"]))
        bits = draw(st.sampled_from([1, 2, 3, 4]) if selector == "uniform" else st.sampled_from([1, 1.5, 2.25, 3, 4]))
        options = {
            "mean_bits": bits,
            "gpu_experts": draw(count),
            "selector": selector,
            "objective": draw(st.sampled_from(["plain", "plain", "importance", "use"])),
            "scope": draw(st.sampled_from(["layer", "model"])),
            "min_bits": draw(st.integers(1, int(bits))),
            "budget": draw(st.sampled_from(["exact", "at-most"])),
            "alpha": draw(st.sampled_from([0, 0.25, 0.5, 1])),
            "norm": draw(st.sampled_from(["sum", "min-max"])),
            "overlap": draw(st.sampled_from(["max", "sum"])),
            "prefill": prefill,
        }
    elif name == "monde":
        reading = draw(st.sampled_from(["one", "balance", "all-ndp"]))
        options = {
            "reading": reading,
            "resident": draw(count) if reading == "one" else 0,
            "rounding": draw(st.sampled_from(["nearest", "floor", "ceil"])),
            "prefill": prefill,
        }
    else:
        t1 = draw(st.sampled_from([0, 0.3, 0.6]))
        splits = ["published", "gates"]
        options = {
            "split": draw(st.sampled_from(splits)),
            "t1": t1,
            "t2": draw(st.sampled_from([t1, 0.9, 1])),
            "low_bits": draw(st.sampled_from([2, 4, 16])),
            "cache_high": draw(count),
            "cache_low": draw(count),
            "prefetch_accuracy": draw(st.sampled_from([0, 0.3, 0.9, 1])),
        }
    return f"{name}:" + ",".join(f"{key}={value}" for key, value in options.items())


def without_chance(text: str) -> str:
    """A policy without drawn predictions, which depend on the whole trace."""
    return re.sub("prefetch_accuracy=[^,]+", "prefetch_accuracy=0", text)


def decode_rows(trace: RoutingTrace, sequence: int) -> tuple[NDArray[Any], NDArray[np.bool_], NDArray[Any] | None]:
    """Ids, which of them are assigned, and weights of one sequence's decode steps."""
    rows = trace.decode_slice(sequence)
    ids = trace.topk_ids[rows].astype(np.int64)
    weights = None if trace.topk_weights is None else trace.topk_weights[rows]
    return ids, ids != trace.unassigned, weights
