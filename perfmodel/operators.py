"""What every token passes on the GPU whatever the experts do, as rows for ``kernels/front.py``."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from perfmodel.families import Cache, Tensors, params_of
from perfmodel.kernels.cpu import ACTIVATION_BYTES
from perfmodel.model import MoEModel
from perfmodel.model.cache import state_bytes

#: Kernel launches of one operator on the GPU (assumed: fused attention, unfused gate and up projections).
ATTENTION_LAUNCHES, ROUTER_LAUNCHES, DENSE_LAUNCHES, HEAD_LAUNCHES = 5, 2, 3, 2


def attention_rows(model: MoEModel) -> NDArray[np.float64]:
    """Every kind of attention and each of its caches as rows of ``kernels/front.py`` [A, ATTENTION_SIZE].

    The first cache of a kind carries the weights and launches of its layers, and the constant state, which a step
    reads and writes. Sparse attention reads no more than the entries it picks; of a cache of compressed entries a
    token of context is a fraction.

    Raises
    ------
    ModelConfigError : the network has an encoder or uneven experts; such networks are counted, and not priced.
    """
    model.with_experts()
    rows = []
    for kind in model.attention:
        flops = 2.0 * kind.params + 4.0 * kind.recurrent_elements
        moved = kind.params * model.storage.attention.bits / 8 + 2.0 * state_bytes(kind)
        launches = float(ATTENTION_LAUNCHES) if kind.tensors else 0.0
        for cache in kind.caches or (None,):
            row = (float(len(kind.layers)), *_seen(cache, model.cached_bits), launches)
            rows.append((row[0], row[1], flops, moved, *row[2:]))
            flops = moved = launches = 0.0
    return np.array(rows, dtype=np.float64)


def _seen(cache: Cache | None, bits: float) -> tuple[float, float, float]:
    """Most tokens of context that count, and the work [flop] and traffic [byte] of each."""
    if cache is None:
        return 0.0, 0.0, 0.0
    window = np.inf if cache.window is None else float(cache.window)
    if cache.read_entries is not None:
        window = min(window, float(cache.read_entries * cache.tokens_per_entry))
    each = 1.0 / cache.tokens_per_entry
    return window, cache.flops_per_entry * each, cache.elements * each * bits / 8


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
    """Router, dense networks, LM head, and last the shared experts of one MoE layer.

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
        Operator("experts_gpu", 1, shared / model.num_moe_layers, stored.shared.bits, DENSE_LAUNCHES),
    )


def _mean(networks: list[tuple[int, Tensors]]) -> tuple[float, int]:
    """Mean parameters of the layers that have such a network, and how many layers that are."""
    layers = sum(count for count, tensors in networks if tensors)
    total = sum(count * params_of(tensors) for count, tensors in networks)
    return (total / layers if layers else 0.0), layers
