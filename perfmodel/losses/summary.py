"""What a loss table shows: how losses fall with bits, how unlike experts are, and which experts break the order."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from perfmodel.bitwidth import LossTable
from perfmodel.bitwidth.checks import finite, not_negative
from perfmodel.bitwidth.table import table_file
from perfmodel.errors import TraceError
from perfmodel.routing.npz import read_npz

Floats = NDArray[np.float64]

#: An expert measured on fewer rows than this is named: its mean squared error may be off by a quarter and more.
FEW_ROWS = 32
#: Differences of losses below this share of the largest are rounding.
_ROUNDING = 1e-12


class Width(NamedTuple):
    """One bit width of a table, over all its experts; None where zeros or a missing array leave nothing to say.

    bits : the width [bit]
    mean_loss : mean over all experts, in the table's unit (squared output)
    noise : mean loss over the mean variance of the unquantised output [1]
    fall_of_means, fall_geometric : factor by which an added bit lowers the loss, from the next narrower width on:
        of the means, and the geometric mean over experts [1]
    worst_over_best, worst_over_best_mean, worst_over_best_max : largest loss of a layer over its smallest:
        geometric mean, mean and maximum over layers [1]
    worst_layer : the layer with that maximum, counted from 0
    layers_ratio : largest mean loss of a layer over the smallest [1]
    cv_experts : standard deviation over mean of the losses of one layer, mean over layers [1]
    cv_layers : the same of the layers' mean losses [1]
    over_rtn_geometric, over_rtn_of_means : this loss over that of round-to-nearest [1]
    """

    bits: int
    mean_loss: float
    noise: float | None
    fall_of_means: float | None
    fall_geometric: float | None
    worst_over_best: float | None
    worst_over_best_mean: float | None
    worst_over_best_max: float | None
    worst_layer: int | None
    layers_ratio: float | None
    cv_experts: float | None
    cv_layers: float | None
    over_rtn_geometric: float | None
    over_rtn_of_means: float | None


class Breaker(NamedTuple):
    """An expert whose loss rises from one width to the next.

    layer, expert : counted from 0
    from_bits, to_bits : the widths [bit]
    factor : loss at the wider over the loss at the narrower [1]; None where that was 0
    """

    layer: int
    expert: int
    from_bits: int
    to_bits: int
    factor: float | None


class Scarce(NamedTuple):
    """An expert measured on few rows, or on rows that the router sends to others; counted from 0."""

    layer: int
    expert: int
    rows: int | None
    borrowed: bool


class Extras(NamedTuple):
    """What a table's file holds beside the table; None for what it does not.

    rtn : losses of rounding to nearest, float64 [layers, experts, widths]
    borrowed : bool [layers, experts], experts that were measured on rows of the whole layer for want of their own
    """

    rtn: Floats | None = None
    borrowed: NDArray[np.bool_] | None = None


@dataclass(frozen=True, eq=False)
class LossSummary:
    """What `summarise` found.

    table : the loss table
    rtn : losses of rounding to nearest, float64 [layers, experts, widths]; None where the file has none
    widths : one entry a width
    breakers : experts whose loss rises with bits, by layer, expert and width
    diminishing, rtn_diminishing : experts each of whose added bits gains no more than the one before; None with
        fewer than three widths
    scarce : experts measured on fewer than ``FEW_ROWS`` rows, or on borrowed ones
    """

    table: LossTable
    rtn: Floats | None
    widths: tuple[Width, ...]
    breakers: tuple[Breaker, ...]
    diminishing: int | None
    rtn_diminishing: int | None
    scarce: tuple[Scarce, ...]

    @property
    def num_experts(self) -> int:
        """Experts of all layers together."""
        return self.table.num_layers * self.table.num_experts

    @property
    def monotone(self) -> int:
        """Experts whose loss never rises with bits."""
        return self.num_experts - len({(one.layer, one.expert) for one in self.breakers})

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values."""
        rows = self.table.n_tokens
        return {
            "table": self.table.name,
            "source": self.table.source,
            "content_hash": self.table.content_hash(),
            "layers": self.table.num_layers,
            "experts": self.table.num_experts,
            "bits": list(self.table.bits),
            "info": _plain(dict(self.table.info)),
            "rows": None if rows is None else row_range(rows),
            "widths": [one._asdict() for one in self.widths],
            "experts_in_all": self.num_experts,
            "monotone": self.monotone,
            "breakers": [one._asdict() for one in self.breakers],
            "diminishing": self.diminishing,
            "rtn_diminishing": self.rtn_diminishing,
            "scarce": [one._asdict() for one in self.scarce],
            "notes": list(self.table.notes),
        }


def row_range(rows: NDArray[np.int64]) -> dict[str, float]:
    """Fewest, median and most rows that an expert was measured on."""
    return {"min": int(rows.min()), "median": float(np.median(rows)), "max": int(rows.max())}


def load_extras(path_or_name: str | os.PathLike[str], table: LossTable) -> Extras:
    """``losses_rtn`` and ``borrowed`` of the table's file.

    Raises TraceError when an array has another shape than the table, or holds what it must not.
    """
    path = table_file(path_or_name)
    found = read_npz(path, ["losses_rtn", "borrowed"])
    rtn = borrowed = None
    if "losses_rtn" in found:
        where = f"{path}: losses_rtn"
        rtn = finite(found["losses_rtn"], where, TraceError)
        _check_shape(rtn, where, table.losses.shape)
        not_negative(rtn, where, TraceError)
    if "borrowed" in found:
        borrowed = found["borrowed"]
        if borrowed.dtype != np.bool_:
            raise TraceError(f"{path}: borrowed holds values of type {borrowed.dtype}; they must be true or false")
        _check_shape(borrowed, f"{path}: borrowed", table.losses.shape[:2])
    return Extras(rtn, borrowed)


def _check_shape(array: NDArray[Any], where: str, shape: tuple[int, ...]) -> None:
    if array.shape != shape:
        raise TraceError(f"{where} has shape {list(array.shape)}; it must be {list(shape)}, as losses have")


def summarise(table: LossTable, extras: Extras | None = None) -> LossSummary:
    """How losses fall with bits, how unlike experts and layers are, and which experts break the order.

    table : any loss table. extras : what else its file holds (`load_extras`).

    A factor by which an added bit lowers the loss is, from width a to width b, ``(loss_a / loss_b) ** (1 / (b - a))``.
    Ratios leave out experts and layers in which they would divide by zero.

    >>> found = summarise(LossTable.assumed(2, 4))
    >>> found.monotone, found.diminishing, found.widths[1].fall_of_means
    (8, 8, 4.0)
    """
    rtn, borrowed = extras or Extras()
    # A common power of two keeps sums of enormous losses finite and changes no ratio.
    given = [array for array in (table.losses, rtn, table.output_variance) if array is not None]
    _, exponent = np.frexp(max(array.max() for array in given))
    losses = np.ldexp(table.losses, -exponent)
    nearest = None if rtn is None else np.ldexp(rtn, -exponent)
    variance = None if table.output_variance is None else np.ldexp(table.output_variance, -exponent).mean()
    return LossSummary(
        table=table,
        rtn=rtn,
        widths=tuple(
            _width(table.bits, losses, nearest, variance, i)._replace(
                mean_loss=float(np.ldexp(losses[..., i].mean(), exponent))
            )
            for i in range(len(table.bits))
        ),
        breakers=tuple(_breakers(table)),
        diminishing=_diminishing(losses, table.bits),
        rtn_diminishing=None if nearest is None else _diminishing(nearest, table.bits),
        scarce=tuple(_scarce(table.n_tokens, borrowed)),
    )


def _breakers(table: LossTable) -> Iterator[Breaker]:
    for layer, expert, i in np.argwhere(np.diff(table.losses, axis=2) > 0).tolist():
        before, after = table.losses[layer, expert, i : i + 2]
        yield Breaker(layer, expert, table.bits[i], table.bits[i + 1], _one_ratio(after, before))


def _scarce(rows: NDArray[np.int64] | None, borrowed: NDArray[np.bool_] | None) -> Iterator[Scarce]:
    few = [rows < FEW_ROWS] if rows is not None else []
    taken = [borrowed] if borrowed is not None else []
    for layer, expert in np.argwhere(np.logical_or.reduce(few + taken)).tolist() if few + taken else ():
        count = None if rows is None else int(rows[layer, expert])
        yield Scarce(layer, expert, count, borrowed is not None and bool(borrowed[layer, expert]))


def _width(bits: tuple[int, ...], table: Floats, rtn: Floats | None, variance: Any, i: int) -> Width:
    losses = table[..., i]
    by_layer = losses.mean(axis=1)
    spread = _ratios(losses.max(axis=1), losses.min(axis=1))
    fall_of_means = fall_geometric = None
    if i:
        before, step = table[..., i - 1], bits[i] - bits[i - 1]
        fall_of_means = _one_ratio(before.mean(), losses.mean(), 1 / step)
        fall_geometric = _geometric(_ratios(before, losses), 1 / step)
    return Width(
        bits=bits[i],
        mean_loss=float(losses.mean()),
        noise=None if variance is None else _one_ratio(losses.mean(), variance),
        fall_of_means=fall_of_means,
        fall_geometric=fall_geometric,
        worst_over_best=_geometric(spread),
        worst_over_best_mean=_known(spread, np.nanmean),
        worst_over_best_max=_known(spread, np.nanmax),
        worst_layer=None if np.isnan(spread).all() else int(np.nanargmax(spread)),
        layers_ratio=_one_ratio(by_layer.max(), by_layer.min()),
        cv_experts=_known(_ratios(losses.std(axis=1), by_layer, zero=True), np.nanmean),
        cv_layers=_one_ratio(by_layer.std(), by_layer.mean()),
        over_rtn_geometric=None if rtn is None else _geometric(_ratios(losses, rtn[..., i])),
        over_rtn_of_means=None if rtn is None else _one_ratio(losses.mean(), rtn[..., i].mean()),
    )


def _diminishing(losses: Floats, bits: tuple[int, ...]) -> int | None:
    """Experts whose gain a bit never grows from one width to the next, beyond rounding."""
    if len(bits) < 3:
        return None
    gains = -np.diff(losses, axis=2) / np.diff(bits)
    rounding = _ROUNDING * losses.max(axis=2, keepdims=True)
    return int((np.diff(gains, axis=2) <= rounding).all(axis=2).sum())


def _ratios(above: Floats, below: Floats, *, zero: bool = False) -> Floats:
    """Quotients, NaN where the divisor is 0, or where the dividend is and ``zero`` does not let it count."""
    usable = (below > 0) & ((above > 0) | zero)
    with np.errstate(over="ignore"):
        found = np.divide(above, below, out=np.full(above.shape, np.nan), where=usable)
    return np.where(np.isfinite(found), found, np.nan)


def _one_ratio(above: Any, below: Any, power: float = 1.0) -> float | None:
    """One quotient to a power, None where the divisor is 0 or the quotient too large for a number."""
    with np.errstate(over="ignore"):
        found = np.float64(above) / below if below > 0 else np.nan
        return float(found**power) if np.isfinite(found) else None


def _geometric(ratios: Floats, power: float = 1.0) -> float | None:
    known = ratios[~np.isnan(ratios)]
    return float(np.exp(power * np.log(known).mean())) if len(known) else None


def _known(values: Floats, take: Any) -> float | None:
    """A statistic of the values that are not NaN, None where there are none."""
    return None if np.isnan(values).all() else float(take(values))


def _plain(value: Any, depth: int = 8) -> Any:
    """Metadata of somebody's file as JSON can hold it: no infinities, and not endlessly deep."""
    if isinstance(value, float) and not np.isfinite(value):
        return None
    if isinstance(value, dict | list) and depth == 0:
        return "..."
    if isinstance(value, dict):
        return {str(key): _plain(one, depth - 1) for key, one in value.items()}
    return [_plain(one, depth - 1) for one in value] if isinstance(value, list) else value
