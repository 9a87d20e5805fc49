"""Where a prefill runs experts that live in host memory: on the CPU, or on the GPU after a copy."""

from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from perfmodel.caches import NO_EXPERT
from perfmodel.policies.base import ClassTable, Executor, PlanInputs, WorkClass, prefill_counts
from perfmodel.policies.costs import expert_costs
from perfmodel.routing import statistics

HostPrefill = Literal["fetch", "cpu", "threshold", "each", "faster"]

#: Tokens from which a dense layer is copied to the GPU in llama.cpp; of a MoE layer E / k times as many, so that an
#: expert gets as many on average.
DENSE_THRESHOLD = 32


class Prefill(NamedTuple):
    """Class and token count of every expert in the prefill [S, L, E], or None when the trace holds no prefill."""

    classes: NDArray[np.uint8] | None
    tokens: NDArray[np.int64] | None


def prefill_copies(
    inputs: PlanInputs,
    mode: HostPrefill,
    *,
    bits: float,
    hot: NDArray[np.bool_] | None = None,
    threshold: float | None = None,
) -> NDArray[np.bool_] | None:
    """Which experts the prefill copies to the GPU [S, L, E], or None when the trace holds no prefill.

    Parameters as in `host_prefill`.
    """
    tokens = prefill_counts(inputs)
    if tokens is None:
        return None
    cold = tokens > 0 if hot is None else (tokens > 0) & ~hot
    if mode == "cpu":
        return np.zeros_like(cold)
    if mode == "threshold":
        least = DENSE_THRESHOLD * inputs.model.num_experts / inputs.model.top_k if threshold is None else threshold
        return np.asarray(cold & (inputs.replay.trace.prompt_len >= least)[:, None, None])
    if mode == "fetch":
        return cold
    counts, place = np.unique(tokens, return_inverse=True)
    costs = expert_costs(inputs.model, inputs.system, counts, bits)
    on_gpu, on_cpu = (
        np.where(cold, seconds[place.reshape(tokens.shape)], 0.0)
        for seconds in (costs.copy_s + costs.gpu_s, costs.cpu_s)
    )
    if mode == "faster":
        on_gpu, on_cpu = (side.sum(axis=-1, keepdims=True) for side in (on_gpu, on_cpu))
    return np.asarray(cold & (on_gpu < on_cpu))


def by_falling_use(copied: NDArray[np.int64]) -> NDArray[np.uint16]:
    """Experts of every layer that a prefill copied, most tokens first, then NO_EXPERT [S, L, E].

    copied : tokens of the experts that it copied, 0 for the others [S, L, E]. What caches start with that it filled.
    """
    order = statistics.ranked_experts(copied)
    return np.where(np.take_along_axis(copied, order, axis=-1) > 0, order, NO_EXPERT).astype(np.uint16)


def host_prefill(
    inputs: PlanInputs,
    table: ClassTable,
    mode: HostPrefill,
    *,
    bits: float,
    hot: NDArray[np.bool_] | None = None,
    threshold: float | None = None,
) -> Prefill:
    """Class and token count of every expert in the prefill, as fields of a plan.

    Parameters
    ----------
    mode : ``fetch`` copies every selected expert that is not resident, ``cpu`` runs it on the host. ``threshold``
        copies for prompts of at least so many tokens. ``each`` does for every expert what takes less time, a copy with
        the GPU's computing or the CPU. ``faster`` does the same for all experts of a layer together.
    bits : stored bits of the experts [bit].
    hot : bool [S, L, E], experts resident before the prompt; None for none.
    threshold : tokens [1], of ``threshold``; None for ``DENSE_THRESHOLD * E / k``.
    """
    tokens, copied = prefill_counts(inputs), prefill_copies(inputs, mode, bits=bits, hot=hot, threshold=threshold)
    if tokens is None or copied is None:
        return Prefill(None, None)
    here = np.zeros(tokens.shape, np.bool_) if hot is None else hot
    classes = np.zeros(tokens.shape, np.uint8)
    for executor, where in ((Executor.GPU, here), (Executor.FETCH, copied), (Executor.CPU, ~here & ~copied)):
        used = where & (tokens > 0)
        if used.any():
            classes[used] = table.number(WorkClass(executor, bits))
    return Prefill(classes, tokens)
