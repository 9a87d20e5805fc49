"""The near-data experts of some sequences, and the rules that spend a bit budget on them."""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from perfmodel.bitwidth import (
    Budget,
    LossTable,
    Objective,
    Scope,
    assigned_loss,
    at_width,
    objective_weights,
    optimal_bitwidths,
    select_bitwidths,
)
from perfmodel.bitwidth.budget import increments
from perfmodel.routing import statistics

Floats = NDArray[np.float64]

#: Weights that know the decode steps in advance: no objective, but what any assignment can reach at best.
HINDSIGHT: Literal["hindsight"] = "hindsight"


class Rule(NamedTuple):
    """How a budget is spent.

    meaning : for people
    order : whose prefix rule, ``importance`` or ``random``; None for the optimum without any order
    scope : what shares a budget
    floored : whether every expert has at least the least width
    """

    meaning: str
    order: str | None
    scope: Scope = "layer"
    floored: bool = False


#: The rules that are compared, apart from ``uniform``, which gives every expert the mean.
RULES = {
    "random": Rule("prefix rule in a random order", "random"),
    "prefix": Rule("prefix rule in the order of importance", "importance"),
    "optimum": Rule("least sum in any order", None),
    "floor prefix": Rule("prefix rule with a least width", "importance", floored=True),
    "floor optimum": Rule("least sum with a least width", None, floored=True),
    "model prefix": Rule("prefix rule in each layer, one budget for the whole model", "importance", "model"),
    "model optimum": Rule("least sum with one budget for the whole model", None, "model"),
}
UNIFORM = "uniform"
#: What spent bits may be off by through rounding [bit].
_ROUNDING = 1e-9
#: Random orders drawn for every layer of every sequence.
RANDOM_ORDERS = 4


@dataclass(frozen=True, eq=False)
class NearData:
    """What is known of the near-data experts of some sequences; C of a layer, in the order of their numbers.

    losses [S, L, C, widths], variance and experts [S, L, C] have S = 1 where all sequences face the same experts.
    importance, use, decode : [S, L, C]; known before the decode steps, the latter being their picks.
    orders : [S, R, L, C], random numbers, for R random orders. experts : their numbers in the layer, rising.
    """

    losses: Floats
    importance: Floats
    use: Floats
    decode: Floats
    orders: Floats
    experts: NDArray[np.int64]
    variance: Floats | None
    bits: tuple[int, ...]

    @property
    def num_sequences(self) -> int:
        """Sequences S [1]."""
        return len(self.importance)

    def sequences(self, chosen: NDArray[np.int64]) -> "NearData":
        """The same of some of the sequences."""

        def of(array: NDArray[Any]) -> NDArray[Any]:
            return array if len(array) < self.num_sequences else array[chosen]

        return NearData(
            losses=of(self.losses),
            importance=of(self.importance),
            use=of(self.use),
            decode=of(self.decode),
            orders=of(self.orders),
            experts=of(self.experts),
            variance=None if self.variance is None else of(self.variance),
            bits=self.bits,
        )

    def weights(self, objective: Objective | Literal["hindsight"]) -> Floats | None:
        """Weight of every expert's loss under an objective [S, L, C]; None where all count alike."""
        if objective == "hindsight":
            return self.decode
        return objective_weights(objective, self.importance, self.use, self.variance)

    def loss(self, assigned: NDArray[np.int8] | float, weights: Floats | None) -> Floats:
        """Weighted loss of every layer [S, L] at assigned widths, or with all experts at one (mean) width."""
        if isinstance(assigned, float):
            mixed = at_width(self.losses, self.bits, assigned)
            found = (mixed if weights is None else mixed * weights).sum(axis=-1)
        else:
            found = assigned_loss(self.losses, assigned, bits=self.bits, weights=weights)
        return np.broadcast_to(found, self.importance.shape[:2])


def near_data(
    table: LossTable,
    importance: Floats,
    use: Floats,
    decode: Floats,
    gpu_experts: int,
    generator: np.random.Generator,
) -> NearData:
    """Take the ``gpu_experts`` most important experts of every layer away; importance, use and decode are [S, L, E]."""
    order = statistics.ranked_experts(importance)
    cold = np.sort(order[..., gpu_experts:], axis=-1)  # in the table's order, so that ties fall as in the selector
    row = np.arange(table.num_layers)[:, None]
    where = cold if gpu_experts else cold[:1]
    variance = table.output_variance
    return NearData(
        losses=table.losses[row, where],
        importance=np.take_along_axis(importance, cold, axis=-1),
        use=np.take_along_axis(use, cold, axis=-1),
        decode=np.take_along_axis(decode, cold, axis=-1),
        orders=generator.random((len(cold), RANDOM_ORDERS, *cold.shape[1:])),
        experts=where,
        variance=None if variance is None else variance[row, where],
        bits=table.bits,
    )


def choose(
    rule: Rule,
    near: NearData,
    weights: Floats | None,
    mean_bits: float,
    budget: Budget,
    min_bits: int,
    draw: int = 0,
) -> NDArray[np.int8]:
    """Bit widths that a rule gives [S, L, C], with S = 1 where they are the same for all sequences.

    draw : which of the random orders, for a rule that takes one.
    """
    floor = min_bits if rule.floored else None
    if rule.order is None:
        return optimal_bitwidths(
            near.losses, mean_bits, bits=near.bits, budget=budget, weights=weights, min_bits=floor, scope=rule.scope
        )
    rank = near.orders[:, draw] if rule.order == "random" else near.importance
    return select_bitwidths(
        rank, near.losses, mean_bits, bits=near.bits, budget=budget, weights=weights, min_bits=floor, scope=rule.scope
    )


def allowed(rule: Rule, bits: tuple[int, ...], min_bits: int, mean_bits: float) -> bool:
    """Whether a rule's floor leaves something to choose: above the lowest width and below the mean, where all of the
    budget would go into it; true without a floor.
    """
    floor = next(width for width in bits if width >= min_bits)
    return not rule.floored or bits[0] < floor < mean_bits


def spent_bits(mean_bits: float, experts: int, bits: tuple[int, ...]) -> float:
    """Mean width that whole increments above the lowest width can reach within ``mean_bits`` [bit]."""
    return bits[0] + increments(experts, mean_bits, bits[0]) / experts


def mix_exists(spent: float, experts: int, bits: tuple[int, ...]) -> bool:
    """Whether some of the experts at one width and the others at the next make up this mean [bit]."""
    upper = int(np.searchsorted(bits, spent - _ROUNDING))
    if upper in (0, len(bits)):
        return True
    wider = experts * (spent - bits[upper - 1]) / (bits[upper] - bits[upper - 1])
    return abs(wider - round(wider)) < experts * _ROUNDING


def rule_words(rule: str) -> str:
    """A rule for people: what the budget or the floor is, and the order."""
    group, _, order = rule.rpartition(" ")
    return f"{group}: {order}" if group else rule
