"""What every token passes on the GPU whatever the experts do, as rows for ``kernels/front.py``."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from perfmodel.families import Cache, Tensors, params_of
from perfmodel.kernels import front
from perfmodel.kernels.cpu import ACTIVATION_BYTES
from perfmodel.kernels.roofline import causal_pairs
from perfmodel.model import MoEModel
from perfmodel.model.cache import state_bytes

#: Kernel launches of one operator on the GPU (assumed: fused attention, unfused gate and up projections).
ATTENTION_LAUNCHES, ROUTER_LAUNCHES, DENSE_LAUNCHES, HEAD_LAUNCHES = 5, 2, 3, 2


def attention_rows(model: MoEModel, tokens: float = 1.0, sequences: float = 1.0) -> NDArray[np.float64]:
    """Every kind of attention and each of its caches as rows of ``kernels/front.py`` [A, ATTENTION_SIZE].

    The first cache of a kind carries the weights and launches of its layers, and the constant state, which a step
    reads and writes. Sparse attention reads no more than the entries it picks; of a cache of compressed entries a
    token of context is a fraction.

    tokens : new tokens of the step, each of which attends to the context. sequences : sequences they belong to, each
        with a cache and a state of its own: weights are read once, caches and states once for each sequence.

    Raises
    ------
    ModelConfigError : the network has an encoder or uneven experts; such networks are counted, and not priced.
    """
    if model.num_moe_layers or model.encoder_layers:
        model.with_experts()
    rows = []
    for kind in model.attention:
        flops = tokens * (2.0 * kind.params + 4.0 * kind.recurrent_elements)
        moved = kind.params * model.storage.attention.bits / 8 + sequences * (2.0 * state_bytes(kind))
        launches = float(ATTENTION_LAUNCHES) if kind.tensors else 0.0
        for cache in kind.caches or (None,):
            window, work, traffic = _seen(cache, model.cached_bits)
            layers = float(len(kind.layers))
            rows.append((layers, window, flops, moved, tokens * work, sequences * traffic, launches))
            flops = moved = launches = 0.0
    return np.array(rows, dtype=np.float64)


def prefill_attention_rows(model: MoEModel, prompts: NDArray[np.int64], passes: int) -> NDArray[np.float64]:
    """The mean pass of a prefill of prompts that follow one another, as rows for a prompt of one token.

    Every pass reads the weights, and the caches and states of the prompts it reaches: of the tokens before it as many
    as the window holds, and its own. It starts a p/m-th further in a prompt of p tokens in m passes.

    prompts : int64 [B], tokens of each. passes : of equal length, over all of them.
    """
    weights, state = attention_rows(model, 1.0, 0.0), attention_rows(model, 0.0, 1.0)
    reached = np.maximum(-(-prompts * passes // max(1, int(prompts.sum()))), 1)
    rows = weights.copy()
    for row, own in zip(rows, state, strict=True):
        window = row[front.WINDOW]
        pairs = float(causal_pairs(prompts.astype(np.float64), window).sum())
        read = float(prompts.sum())
        for prompt, count in zip(prompts.tolist(), reached.tolist(), strict=True):
            read += float(np.minimum(np.arange(count) * (prompt / count), window).sum())
        flops = row[front.WEIGHT_FLOPS] * float(prompts.sum()) + row[front.CONTEXT_FLOPS] * pairs
        row[front.WEIGHT_FLOPS] = flops / passes
        kept = (own[front.WEIGHT_BYTES] - row[front.WEIGHT_BYTES]) * float(reached.sum())
        row[front.WEIGHT_BYTES] += (kept + own[front.CONTEXT_BYTES] * read) / passes
    rows[:, [front.CONTEXT_FLOPS, front.CONTEXT_BYTES]] = 0.0
    return rows


def _seen(cache: Cache | None, bits: float) -> tuple[float, float, float]:
    """Most tokens of context that count, and the work [flop] and traffic [byte] of each."""
    if cache is None:
        return 0.0, 0.0, 0.0
    window = np.inf if cache.window is None else float(cache.window)
    if cache.read_entries is not None:
        window = min(window, float(cache.read_entries * cache.tokens_per_entry))
    each = 1.0 / cache.tokens_per_entry
    return window, cache.flops_per_entry * each, cache.elements * each * bits / 8


def fixed_counts(
    model: MoEModel, tokens: float = 1.0, passes: float = 1.0, sequences: float = 1.0
) -> NDArray[np.float64]:
    """How often passes of so many tokens each pay fixed times, as ``counts`` of ``kernels/front.py`` [COUNTS].

    sequences : that get a token out of all passes together.
    """
    counts = np.zeros(front.COUNTS)
    counts[front.LAYERS_COUNT] = model.num_layers
    for mixer in model.attention:
        recurrent = mixer.recurrent_elements > 0 or mixer.convolution_elements > 0
        counts[front.RECURRENT_COUNT if recurrent else front.ATTENTION_COUNT] += len(mixer.layers)
    counts[front.EXPERTS_COUNT] = model.num_moe_layers
    with_experts = [(len(kind.layers), kind.experts) for kind in model.feed_forward if kind.experts is not None]
    counts[front.MATRIX_COUNT] = sum(layers * len(experts.matrices) for layers, experts in with_experts)
    counts[front.DENSE_COUNT] = model.num_dense_layers
    counts[front.STEP_COUNT] = 1.0
    # After attention and after the experts or the dense network.
    counts[front.REDUCED_COUNT] = 2.0 * model.num_layers * tokens * model.hidden_size * ACTIVATION_BYTES
    counts *= passes
    counts[front.SEQUENCE_COUNT] = sequences
    counts[front.TOKENS_COUNT] = tokens
    return counts


class Operator(NamedTuple):
    """A GPU operator that every token passes, whatever the experts do.

    part : the part of the breakdown it belongs to. repeats : occurrences a token [1]. params : weights it reads
    [1]. bits : their stored bits [bit]. launches : kernel launches of one occurrence [1].
    """

    part: str
    repeats: int
    params: float
    bits: float
    launches: int

    def row(self, model: MoEModel, tokens: float) -> tuple[float, float, float, float]:
        """The operator over ``tokens`` as a row of ``kernels/front.py``."""
        if self.params == 0:
            return (0.0, 0.0, 0.0, 0.0)
        moved = self.params * self.bits / 8 + 2.0 * tokens * model.hidden_size * ACTIVATION_BYTES
        return (float(self.repeats), 2.0 * tokens * self.params, moved, float(self.launches))


def operators(model: MoEModel) -> tuple[Operator, ...]:
    """Router, dense networks, LM head, and last the shared experts of one MoE layer, of which a dense network has none.

    Where layers differ in size, every one is taken to have their mean: work and traffic are proportional to it.
    """
    stored = model.storage
    router, routed = _mean([(len(kind.layers), kind.router) for kind in model.feed_forward])
    dense, layers = _mean([(len(kind.layers), kind.dense) for kind in model.feed_forward])
    shared = sum(len(kind.layers) * params_of(kind.shared) for kind in model.feed_forward)
    return (
        Operator("router", routed, router, stored.router.bits, ROUTER_LAUNCHES),
        Operator("dense", layers, dense, stored.dense.bits, DENSE_LAUNCHES),
        Operator("head", 1, model.head_params, stored.head.bits, HEAD_LAUNCHES),
        Operator("experts_gpu", 1, shared / max(1, model.num_moe_layers), stored.shared.bits, DENSE_LAUNCHES),
    )


def operator_rows(model: MoEModel, tokens: float, last: float) -> NDArray[np.float64]:
    """The same as rows of ``kernels/front.py`` [4, OPERATOR_SIZE], in one pass of so many tokens.

    last : tokens that the head runs for, which is one of each prompt in a prefill [1].
    """
    *trunk, head, shared = operators(model)
    rows = [op.row(model, tokens) for op in trunk]
    return np.array([*rows, head.row(model, last), shared.row(model, tokens)], dtype=np.float64)


def _mean(networks: list[tuple[int, Tensors]]) -> tuple[float, int]:
    """Mean parameters of the layers that have such a network, and how many layers that are."""
    layers = sum(count for count, tensors in networks if tensors)
    total = sum(count * params_of(tensors) for count, tensors in networks)
    return (total / layers if layers else 0.0), layers
