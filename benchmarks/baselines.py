"""What one would write first: a compiled loop over every pick, and a NumPy loop over every token.

Both price one hardware point of a plan without copies issued ahead, straight from the formulas of one operator each,
and share no code with the kernels that price states.
"""

# The compiler infers the types of the loop.
# mypy: allow-untyped-defs

from typing import Any

import numba
import numpy as np

from perfmodel import Run
from perfmodel.kernels import link, roofline, systolic
from perfmodel.kernels import point as place
from perfmodel.operators import attention_rows, operators
from perfmodel.policies import Executor

ACTIVATION_BYTES = 2.0


@numba.njit(nogil=True, error_model="numpy")
def picks_loop(picks, contexts, gpu_s, ndp_s, shared_s, overlapped, attention, point):
    """Sum over all decode steps by visiting every pick [s]."""
    total = 0.0
    tokens, layers, width = picks.shape
    for t in range(tokens):
        token = 0.0
        for layer in range(layers):
            gpu, ndp = shared_s, 0.0
            for j in range(width):
                work = picks[t, layer, j]
                gpu += gpu_s[work]
                ndp += ndp_s[work]
            token += max(gpu, ndp) if overlapped else gpu + ndp
        for a in range(attention.shape[0]):
            kind = attention[a]
            seen = min(contexts[t], kind[1])
            compute_s = (kind[2] + kind[4] * seen) / point[place.GPU_FLOPS]
            memory_s = (kind[3] + kind[5] * seen + point[place.GPU_N_HALF]) / point[place.GPU_BANDWIDTH]
            token += kind[0] * (max(compute_s, memory_s) + kind[6] * point[place.LAUNCH_OVERHEAD])
        total += token
    return total


class Baseline:
    """One plan, ready to be priced point by point."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.attention = attention_rows(run.model)
        self.operators = [op.row(run.model, 1.0) for op in operators(run.model)]
        self.overlapped = run.plan.overlap == "max"

    def _classes(self, point: Any) -> tuple[Any, Any]:
        """Time of one pick of every class on the GPU side (copy included) and on the near-data side [s]."""
        model, classes = self.run.model, self.run.plan.classes
        gpu, ndp = np.zeros(len(classes)), np.zeros(len(classes))
        activations = model.hidden_size * ACTIVATION_BYTES
        wire = (point[place.LINK_BANDWIDTH], point[place.LINK_LATENCY], point[place.LINK_N_HALF])
        for i, work in enumerate(classes):
            weights = model.expert_params * work.bits / 8
            if work.executor == Executor.NDP:
                stored = work.bits + work.quantised * point[place.NDP_SCALE_BITS]
                rate = 16.0 / work.bits if point[place.NDP_SCALING] == place.SCALING_LINEAR else 1.0
                arrays = point[[place.NDP_ROWS, place.NDP_COLS, place.NDP_ARRAYS, place.NDP_CLOCK, place.NDP_DATAFLOW]]
                for k, n in model.expert_matrices:
                    ndp[i] += systolic.gemm_time(1.0, k, n, stored, *arrays, rate, point[place.NDP_BANDWIDTH])
                ndp[i] += 2 * link.transfer_time(activations, *wire)
            elif work.executor != Executor.SKIP:
                gpu[i] = self._gpu(point, 2.0 * model.expert_params, weights + 2 * activations, 3, 1)
                if work.executor == Executor.FETCH:
                    gpu[i] += link.transfer_time(weights, *wire)
        return gpu, ndp

    def _gpu(self, point: Any, flops: float, moved: float, launches: float, repeats: float) -> float:
        rates = (point[place.GPU_FLOPS], point[place.GPU_BANDWIDTH])
        n_half, launch = point[place.GPU_N_HALF], point[place.LAUNCH_OVERHEAD]
        # An expert is several kernels, each with its own small-transfer penalty and launch.
        return repeats * float(roofline.roofline_time(flops, moved, *rates, launches * n_half, launches * launch))

    def _around(self, point: Any) -> tuple[float, float]:
        """Router, dense layers, head and overheads of a token; and the shared experts of one layer [s]."""
        times = [
            repeats * float(
                roofline.roofline_time(
                    flops, moved, point[place.GPU_FLOPS], point[place.GPU_BANDWIDTH], point[place.GPU_N_HALF],
                    launches * point[place.LAUNCH_OVERHEAD],
                )
            )
            if moved
            else 0.0
            for repeats, flops, moved, launches in self.operators
        ]  # fmt: skip
        return sum(times[:3]) + self.run.model.num_layers * float(point[place.LAYER_OVERHEAD]), times[3]

    def by_picks(self, point: Any) -> float:
        """Mean time per output token by the compiled loop over picks [s]."""
        gpu, ndp = self._classes(point)
        around, shared = self._around(point)
        picks, contexts = self.run.plan.picks, self.run.contexts
        total = picks_loop(picks, contexts, gpu, ndp, shared, self.overlapped, self.attention, point)
        return around + float(total) / len(contexts)

    def by_tokens(self, point: Any) -> float:
        """The same with NumPy, one token after another [s]."""
        gpu, ndp = self._classes(point)
        around, shared = self._around(point)
        total = 0.0
        for picks, context in zip(self.run.plan.picks, self.run.contexts, strict=True):
            gpu_side, ndp_side = shared + gpu[picks].sum(axis=1), ndp[picks].sum(axis=1)
            layers = np.maximum(gpu_side, ndp_side) if self.overlapped else gpu_side + ndp_side
            total += float(layers.sum())
            for repeats, window, flops, moved, flops_each, moved_each, launches in self.attention:
                seen = min(float(context), window)
                total += repeats * float(
                    roofline.roofline_time(
                        flops + flops_each * seen, moved + moved_each * seen, point[place.GPU_FLOPS],
                        point[place.GPU_BANDWIDTH], point[place.GPU_N_HALF], launches * point[place.LAUNCH_OVERHEAD],
                    )
                )  # fmt: skip
        return around + total / len(self.run.contexts)
