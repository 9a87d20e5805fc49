"""What a comparison of assignments is asked for, checked against the table and the trace."""

from collections.abc import Sequence
from typing import Any, get_args

import numpy as np

from perfmodel.bitwidth import BUDGETS
from perfmodel.errors import PolicyError
from perfmodel.placement import Norm
from perfmodel.routing.npz import shown


def checked_gpu_experts(given: Sequence[Any] | None, experts: int) -> tuple[int, ...]:
    """Numbers of experts on the GPU, each once; by default 0, a quarter and a half of all."""
    if given is None:
        return tuple(dict.fromkeys((0, experts // 4, experts // 2)))
    for count in _several("gpu_experts", given):
        if not _whole(count) or not 0 <= count < experts:
            raise PolicyError(f"gpu_experts is {shown(count)}; it must be a whole number from 0 to {experts - 1}")
    return tuple(dict.fromkeys(int(count) for count in given))


def checked_means(given: Sequence[Any] | None, bits: tuple[int, ...]) -> tuple[float, ...]:
    """Mean bits, each once; by default 2 and 3 where the table spans them, else a width from its middle."""
    if given is None:
        return tuple(mean for mean in (2.0, 3.0) if bits[0] <= mean <= bits[-1]) or (float(bits[len(bits) // 2]),)
    for mean in _several("mean_bits", given):
        if not _number(mean) or not bits[0] <= mean <= bits[-1]:
            raise PolicyError(f"mean_bits is {shown(mean)}; the table allows a number from {bits[0]} to {bits[-1]}")
    return tuple(dict.fromkeys(float(mean) for mean in given))


def check_rest(alpha: Any, norm: Any, min_bits: Any, budget: Any, seed: Any, bits: tuple[int, ...]) -> None:
    """Refuse a floor that no width reaches, unknown words, and what no generator can start from."""
    if not _number(alpha) or not 0 <= alpha <= 1:
        raise PolicyError(f"alpha is {shown(alpha)}; it must be a number from 0 to 1")
    if not _whole(min_bits) or not 1 <= min_bits <= bits[-1]:
        raise PolicyError(f"min_bits is {shown(min_bits)}; it must be a whole number from 1 to {bits[-1]}")
    if budget not in (None, *BUDGETS):
        raise PolicyError(f"budget is {shown(budget)}; it must be {' or '.join(map(repr, BUDGETS))}")
    if norm not in get_args(Norm):
        raise PolicyError(f"norm is {shown(norm)}; it must be {' or '.join(map(repr, get_args(Norm)))}")
    if not _whole(seed) or not 0 <= seed < 2**63:
        raise PolicyError(f"seed is {shown(seed)}; it must be a whole number from 0 to 2**63 - 1")


def _several(name: str, given: Any) -> Any:
    if not isinstance(given, Sequence) or isinstance(given, str) or not given:
        raise PolicyError(f"{name} is {shown(given)}; it must be a list of at least one number")
    return given


def _number(value: Any) -> bool:
    return isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)


def _whole(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)
