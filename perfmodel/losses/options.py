"""The options of a build, checked."""

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal, get_args

from perfmodel.bitwidth.checks import WIDEST
from perfmodel.errors import PerfModelError
from perfmodel.losses.expert import Rounding
from perfmodel.losses.gptq import Damping, Order
from perfmodel.record.options import is_whole
from perfmodel.routing.npz import shown

Method = Literal["gptq", "rtn"]

METHODS: tuple[Method, ...] = get_args(Method)
ORDERS: tuple[Order, ...] = get_args(Order)
DEFAULT_FOLDS = 4
#: Names of the options that `BuildOptions.described` has, where they count.
OPTIONS = ("method", "group_size", "damping", "order", "folds")
#: Options that say nothing where weights are rounded to nearest.
_OF_GPTQ = ("damping", "order", "folds")


@dataclass(frozen=True)
class BuildOptions:
    """How a table is built; `checked` makes one.

    method : ``"gptq"``, or ``"rtn"`` for rounding to nearest alone
    bits : widths, rising [bit]
    group_size : columns that share a grid; all columns of a row where None
    damping, order : of GPTQ, see `perfmodel.losses.gptq.moments`
    folds : into how many parts the rows of an expert are dealt; None where other rows are held out, or none need be
    """

    method: Method
    bits: tuple[int, ...]
    group_size: int | None
    damping: Damping
    order: Order
    folds: int | None

    @property
    def rounding(self) -> Rounding:
        """What the weights of an expert need to know of it."""
        return Rounding(self.bits, self.group_size, self.damping, self.order)

    def described(self) -> dict[str, Any]:
        """The options that count, as plain values."""
        found: dict[str, Any] = {"method": self.method, "group_size": self.group_size}
        if self.method == "gptq":
            found |= {"damping": self.damping, "order": self.order}
        return found if self.folds is None else {**found, "folds": self.folds}


def checked(
    *,
    method: Any,
    bits: Any,
    group_size: Any,
    damping: Any,
    order: Any,
    folds: Any,
    has_held_out: bool,
    widest: int,
) -> BuildOptions:
    """Options from what a caller gave; None stands for not given.

    has_held_out : whether rows are given to measure on; widest : the most columns of a matrix

    Raises PerfModelError for a value that is not allowed, or that would be of no use.
    """
    _check_choice("method", method, METHODS)
    given = {"damping": damping, "order": order, "folds": folds}
    if method == "rtn" and any(given[name] is not None for name in _OF_GPTQ):
        names = ", ".join(name for name in _OF_GPTQ if given[name] is not None)
        raise PerfModelError(f"{names}: of no use with method rtn, which rounds to nearest; allowed with gptq")
    if folds is not None and has_held_out:
        raise PerfModelError("folds: of no use where other rows are held out; allowed: one of the two")
    chosen: Any = "natural" if order is None else order
    _check_choice("order", chosen, ORDERS)
    if group_size is not None:
        group_size = _within("group size", group_size, 2, widest, "columns of the widest matrix")
    crossed = method == "gptq" and not has_held_out
    return BuildOptions(
        method=method,
        bits=_checked_bits(bits),
        group_size=group_size,
        damping=_checked_damping("auto" if damping is None else damping),
        order=chosen,
        folds=_within("folds", DEFAULT_FOLDS if folds is None else folds, 2, 1000, "folds") if crossed else None,
    )


def _check_choice(name: str, value: Any, allowed: Sequence[str]) -> None:
    if not isinstance(value, str) or value not in allowed:
        raise PerfModelError(f"{name}: found {shown(value)}; allowed: {', '.join(allowed)}")


def _within(name: str, value: Any, least: int, most: int, unit: str) -> int:
    if not is_whole(value) or not least <= value <= most:
        raise PerfModelError(f"{name}: found {shown(value)}; allowed: a whole number from {least} to {most}, {unit}")
    return int(value)


def _checked_bits(bits: Any) -> tuple[int, ...]:
    allowed = f"whole numbers from 1 to {WIDEST}, rising, such as 1,2,3,4"
    try:
        found = tuple(bits) if not isinstance(bits, str | bytes) else ()
    except TypeError:
        found = ()
    whole = all(map(is_whole, found))
    if not found or not whole or found[0] < 1 or found[-1] > WIDEST or list(found) != sorted(set(found)):
        raise PerfModelError(f"bits: found {shown(bits)}; allowed: {allowed}")
    return tuple(int(width) for width in found)


def _checked_damping(damping: Any) -> Damping:
    if isinstance(damping, str) and damping == "auto":
        return "auto"
    is_number = isinstance(damping, Real) and not isinstance(damping, bool)
    if not is_number or not 0 < damping <= 1e6:
        raise PerfModelError(
            f"damping: found {shown(damping)}; allowed: auto, or a number above 0 and at most 1e6, the share of the"
            " mean square of an input"
        )
    return float(damping)
