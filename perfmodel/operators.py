"""What every token passes on the GPU whatever the experts do, as rows for ``kernels/front.py``."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from perfmodel.kernels.replay import ACTIVATION_BYTES
from perfmodel.model import MoEModel

#: Kernel launches of one operator on the GPU (assumed: fused attention, unfused gate and up projections).
ATTENTION_LAUNCHES, ROUTER_LAUNCHES, DENSE_LAUNCHES, HEAD_LAUNCHES = 5, 2, 3, 2


def attention_rows(model: MoEModel) -> NDArray[np.float64]:
    """Every kind of attention as a row of ``kernels/front.py`` [A, ATTENTION_SIZE]."""
    return np.array(
        [
            (
                len(kind.layers),
                np.inf if kind.window is None else kind.window,
                2.0 * kind.params,
                kind.params * model.bits / 8,
                kind.context_flops_per_token,
                kind.kv_elements_per_token * ACTIVATION_BYTES,
                ATTENTION_LAUNCHES,
            )
            for kind in model.attention
        ],
        dtype=np.float64,
    )


class Operator(NamedTuple):
    """A GPU operator that every token passes, whatever the experts do.

    part : the part of the breakdown it belongs to. repeats : occurrences a token [1]. params : weights it reads
    [1]. launches : kernel launches of one occurrence [1].
    """

    part: str
    repeats: int
    params: float
    launches: int

    def row(self, model: MoEModel, tokens: float) -> tuple[float, float, float, float]:
        """The operator over ``tokens`` as a row of ``kernels/front.py``."""
        if self.params == 0:
            return (0.0, 0.0, 0.0, 0.0)
        moved = self.params * model.bits / 8 + 2.0 * tokens * model.hidden_size * ACTIVATION_BYTES
        return (float(self.repeats), 2.0 * tokens * self.params, moved, float(self.launches))


def operators(model: MoEModel) -> tuple[Operator, ...]:
    """Router, dense layers, LM head, and last the shared experts of one MoE layer."""
    return (
        Operator("router", len(model.moe_layers), model.router_params, ROUTER_LAUNCHES),
        Operator("dense", model.num_dense_layers, model.dense_ffn_params, DENSE_LAUNCHES),
        Operator("head", 1, model.head_params, HEAD_LAUNCHES),
        Operator("experts_gpu", 1, model.shared_expert_params, DENSE_LAUNCHES),
    )
