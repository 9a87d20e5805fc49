"""The assignments that are tried on text, for all sequences alike."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from perfmodel.bitwidth import LossTable, Objective
from perfmodel.errors import PerfModelError
from perfmodel.losses.assignments import sequence_importance
from perfmodel.losses.comparison import Comparison
from perfmodel.losses.rules import RULES, UNIFORM, NearData, allowed, choose, near_data, spent_bits
from perfmodel.routing import RoutingTrace
from perfmodel.routing.npz import shown

#: The checkpoint as it is.
STORED = "stored precision"


class Try(NamedTuple):
    """An assignment to be tried: near-data experts, and widths [L, E] with 0 for the stored precision."""

    near: NearData | None
    gpu_experts: int | None
    name: str
    mean_bits: float | None
    bits: NDArray[np.int64]


def checked_counts(found: Comparison, asked: Sequence[int] | None) -> tuple[int, ...]:
    """Numbers of experts on the GPU that are tried."""
    if asked is None:
        return (0,) if 0 in found.gpu_experts else tuple(found.gpu_experts)
    wrong = [count for count in asked if count not in found.gpu_experts]
    if wrong or not asked:
        allowed = ", ".join(map(str, found.gpu_experts))
        raise PerfModelError(f"gpu_experts: found {shown(list(asked))}; allowed: one or more of {allowed}")
    return tuple(dict.fromkeys(asked))


def tries(found: Comparison, table: LossTable, trace: RoutingTrace, counts: Sequence[int]) -> Iterator[Try]:
    """The stored precision, and every assignment with the mean importance of the sequences."""
    if trace.num_experts_inferred:
        trace = trace.with_num_experts(table.num_experts)
    values, use, _ = sequence_importance(trace, found.alpha, found.norm)
    importance, total = values.mean(axis=0, keepdims=True), use.sum(axis=0, keepdims=True)
    yield Try(None, None, STORED, None, np.zeros(importance.shape[1:], np.int64))
    for count in counts:
        near = near_data(table, importance, total, total, count, np.random.default_rng([found.seed, count]))

        def of(name: str, mean: float, assigned: Any, near: NearData = near, count: int = count) -> Try:
            bits = np.zeros(importance.shape, np.int64)
            np.put_along_axis(bits, near.experts, np.asarray(assigned, np.int64), axis=-1)
            return Try(near, count, name, mean, bits[0])

        for width in table.bits:
            yield of(UNIFORM, float(width), width)
        for mean in found.means:
            spent = spent_bits(mean, near.experts.shape[-1], table.bits)
            for objective in found.objectives:
                weights = near.weights(cast(Objective, objective))
                for name, rule in RULES.items():
                    if allowed(rule, table.bits, found.min_bits, spent):
                        bits = choose(rule, near, weights, spent, found.budget, found.min_bits)
                        yield of(f"{objective}, {name}", mean, bits)
