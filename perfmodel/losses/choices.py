"""What a comparison of assignments is asked for, checked against the table and the trace."""

from collections.abc import Sequence
from typing import Any, get_args

import numpy as np

from perfmodel.bitwidth import BUDGETS, LossTable
from perfmodel.bitwidth.checks import as_float, choice, mean_within
from perfmodel.errors import PolicyError
from perfmodel.placement import Norm
from perfmodel.routing import RoutingTrace
from perfmodel.routing.npz import shown

#: Losses beyond this would overflow when sums over all sequences are squared.
_LARGEST = 1e120


def check_kinds(table: Any, trace: Any) -> None:
    """Refuse what is no loss table and no trace."""
    for name, given, kind in (("table", table, LossTable), ("trace", trace, RoutingTrace)):
        if not isinstance(given, kind):
            raise PolicyError(f"{name} is {shown(given)}; it must be a {kind.__name__}")


def check_size(table: LossTable) -> None:
    """Refuse losses that would overflow once they are weighted, added up and squared."""
    variance = table.output_variance
    known = np.ones(1) if variance is None else variance[variance > 0]
    largest, least = float(table.losses.max()), float(min(1.0, known.min(initial=1.0)))
    if largest > _LARGEST * least:
        over = "" if least == 1 else f" over output variances down to {least:.3g}"
        raise PolicyError(
            f"loss table {table.name!r} has losses up to {largest:.3g}{over}, too large to be compared;"
            " give them in a larger unit"
        )


def short_name(model: str) -> str:
    """A model's name without its owner's, as names are compared."""
    return model.rstrip("/").rpartition("/")[2].casefold()


def checked_gpu_experts(given: Sequence[Any] | None, experts: int) -> tuple[int, ...]:
    """Numbers of experts on the GPU, each once; by default 0, a quarter and a half of all."""
    if given is None:
        return tuple(dict.fromkeys((0, experts // 4, experts // 2)))
    return tuple(dict.fromkeys(_whole("gpu_experts", one, 0, experts - 1) for one in _several("gpu_experts", given)))


def checked_means(given: Sequence[Any] | None, bits: tuple[int, ...]) -> tuple[float, ...]:
    """Mean bits, each once; by default 2 and 3 where the table spans them, else a width from its middle."""
    if given is None:
        return tuple(mean for mean in (2.0, 3.0) if bits[0] <= mean <= bits[-1]) or (float(bits[len(bits) // 2]),)
    several = _several("mean_bits", given)
    wrong = [one for one in several if len(bits) == 1 and as_float(one) != bits[0]]
    if wrong:
        raise PolicyError(f"mean_bits is {shown(wrong[0])}; it must be {bits[0]}, the only width of the table")
    return tuple(dict.fromkeys(mean_within(one, bits) for one in several))


def check_rest(alpha: Any, norm: Any, min_bits: Any, budget: Any, seed: Any, bits: tuple[int, ...]) -> None:
    """Refuse a floor that no width reaches, unknown words, and what no generator can start from."""
    if not 0 <= as_float(alpha) <= 1:
        raise PolicyError(f"alpha is {shown(alpha)}; it must be a number from 0 to 1")
    _whole("min_bits", min_bits, 1, bits[-1])
    if budget is not None:
        choice("budget", budget, BUDGETS)
    choice("norm", norm, get_args(Norm))
    _whole("seed", seed, 0, 2**63 - 1)


def _several(name: str, given: Any) -> Any:
    if not isinstance(given, Sequence) or isinstance(given, str) or not given:
        raise PolicyError(f"{name} is {shown(given)}; it must be a list of at least one number")
    return given


def _whole(name: str, value: Any, least: int, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not least <= value <= most:
        range_ = str(least) if least == most else f"a whole number from {least} to {most}"
        raise PolicyError(f"{name} is {shown(value)}; it must be {range_}")
    return int(value)
