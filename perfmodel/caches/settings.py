"""A cache and its rule."""

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from perfmodel.errors import PolicyError

CacheRule = Literal["lru", "lfu", "weighted", "recent-score", "activation", "belady"]
Scope = Literal["layer", "global"]

#: All rules, in the order of their numbers in the kernels.
RULES: tuple[CacheRule, ...] = get_args(CacheRule)
_LARGEST = 1e15  # whole numbers up to here are exact


@dataclass(frozen=True)
class ExpertCache:
    """A cache and its rule.

    Parameters
    ----------
    capacity : what it holds, in the unit of the sizes: experts by default, or bytes. Of every layer, or of all layers
        together in ``scope`` "global". A fraction of a unit is not used.
    rule : which resident is evicted, see the module.
    capacity_low : capacity of a pool for copies at low precision; None puts both precisions into one pool.
    high_size, low_size : > 0, what a copy takes; a fraction of a unit takes it whole.
    protected : nothing that serves the current step of the layer is evicted.
    persistent : the cache lives on from one sequence to the next; else each starts anew.
    weights : 0 to 1, w1 to w4 of rule "weighted"
    smoothing : 0 to 1, a of rule "recent-score"

    Raises
    ------
    PolicyError : for values outside these ranges
    """

    capacity: float
    rule: CacheRule = "lru"
    scope: Scope = "layer"
    capacity_low: float | None = None
    high_size: float = 1
    low_size: float = 1
    protected: bool = True
    persistent: bool = False
    weights: tuple[float, float, float, float] = (0.25, 0.25, 0.25, 0.25)
    smoothing: float = 0.5

    def __post_init__(self) -> None:
        for name, allowed in (("rule", RULES), ("scope", get_args(Scope))):
            if getattr(self, name) not in allowed:
                raise PolicyError(f"cache: {name} is {getattr(self, name)!r}, expected one of {', '.join(allowed)}")
        for name, lowest in (("capacity", 0), ("capacity_low", 0), ("high_size", 1e-9), ("low_size", 1e-9)):
            value = getattr(self, name)
            if value is None and name == "capacity_low":
                continue
            if not _is_number(value) or not lowest <= value <= _LARGEST:
                raise PolicyError(f"cache: {name} is {value!r}, expected a number {'>= 0' if lowest == 0 else '> 0'}")
        if [_is_number(value) and 0 <= value <= 1 for value in self.weights] != [True] * 4:
            raise PolicyError(f"cache: weights are {self.weights!r}, expected four numbers from 0 to 1")
        if not _is_number(self.smoothing) or not 0 <= self.smoothing <= 1:
            raise PolicyError(f"cache: smoothing is {self.smoothing!r}, expected 0 to 1")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
