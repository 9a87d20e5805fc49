"""Bit widths of near-data experts: loss tables, and the selector that spends a bit budget on them."""

import math
import os
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from perfmodel.errors import PolicyError, TraceError
from perfmodel.kernels.selector import select_prefix
from perfmodel.paths import data_folder
from perfmodel.routing.npz import npz_keys, read_npz, shown

BITS = (1, 2, 3, 4)
"""Bit widths the selector chooses from; the last axis of every loss array is in this order."""


def bit_budget(num_experts: int, mean_bits: float) -> int:
    """One-bit increments above 1 bit that a mean of ``mean_bits`` allows ``num_experts`` experts [bit].

    Equation: ``floor(num_experts * (mean_bits - 1) + 1e-9)``; the small term undoes rounding, as in 2.3 - 1.

    Raises PolicyError when ``mean_bits`` is not a number from 1 to 4.

    >>> bit_budget(6, 2.5)
    9
    """
    given: Any = mean_bits
    is_number = isinstance(given, Real) and not isinstance(given, bool)
    if not is_number or not 1 <= given <= 4:
        raise PolicyError(f"mean_bits is {shown(given)}; it must be a number from 1 to 4")
    return math.floor(num_experts * (float(mean_bits) - 1) + 1e-9)


def select_bitwidths(importance: ArrayLike, losses: ArrayLike, mean_bits: float) -> NDArray[np.int8]:
    """Bit width of each near-data expert under a mean budget, chosen for each layer on its own.

    Experts are ordered by decreasing importance (ties: lower index first). Of all assignments whose bits do
    not increase along that order and whose increments above 1 bit sum to `bit_budget` exactly, the one with
    the smallest summed loss is taken (ties: fewest experts at 4 bits, then fewest at 3).

    To weigh each expert's loss by its importance, pass ``losses * importance[..., None]``.

    Parameters
    ----------
    importance : finite numbers [..., E]; usually [sequences, layers, experts on the near-data device]
    losses : finite numbers, not negative [..., E, 4]; output error of each expert at 1, 2, 3 and 4 bits.
        Leading axes broadcast against those of ``importance``.
    mean_bits : mean bits per expert, 1 to 4 [bit]

    Returns
    -------
    int8 [..., E] : 1, 2, 3 or 4 for each expert, in the caller's order; empty when E is 0

    Raises
    ------
    PolicyError : when shapes do not match, or a number is missing, infinite or out of range

    References
    ----------
    Fan et al., "Context-Aware Mixture-of-Experts Inference on CXL-Enabled GPU-NDP Systems", arXiv:2512.04476.

    >>> select_bitwidths([0.1, 0.9], [[2, 1.5, 1, 0.5], [8, 4, 2, 1]], 2.0).tolist()
    [1, 3]
    """
    rank = _finite(importance, "importance", PolicyError)
    loss = _finite(losses, "losses", PolicyError)
    if rank.ndim < 1 or loss.ndim < 2 or loss.shape[-2:] != (rank.shape[-1], len(BITS)):
        raise PolicyError(
            f"importance has shape {list(rank.shape)} and losses {list(loss.shape)}; "
            "they must be [..., experts] and [..., experts, 4]"
        )
    _not_negative(loss, "losses", PolicyError)
    num_experts = rank.shape[-1]
    bit_budget(num_experts, mean_bits)  # refuses a bad mean where there is nothing to choose as well
    try:
        lead = np.broadcast_shapes(rank.shape[:-1], loss.shape[:-2])
    except ValueError:
        raise PolicyError(
            f"the leading axes of importance {list(rank.shape)} and losses {list(loss.shape)} do not match"
        ) from None
    if num_experts == 0 or 0 in lead:
        return np.empty((*lead, num_experts), dtype=np.int8)

    rank = np.broadcast_to(rank, (*lead, num_experts)).reshape(-1, num_experts)
    loss = np.broadcast_to(loss, (*lead, num_experts, len(BITS))).reshape(-1, num_experts, len(BITS))
    order = np.argsort(-rank, axis=1, kind="stable")
    ordered = np.take_along_axis(loss, order[:, :, None], axis=1)
    bits = np.empty(order.shape, dtype=np.int8)
    np.put_along_axis(bits, order, bits_by_rank(ordered, mean_bits), axis=1)
    return bits.reshape(*lead, num_experts)


def bits_by_rank(losses: NDArray[np.float64], mean_bits: float) -> NDArray[np.int8]:
    """What `select_bitwidths` chooses where experts are already in order of decreasing importance [B, E].

    losses : float64 [B, E, 4] of at least one expert, finite and not negative; not checked.
    """
    num_rows, num_experts = losses.shape[:2]
    counts = select_prefix(_scaled(losses), np.full(num_rows, bit_budget(num_experts, mean_bits), dtype=np.int64))
    # The first n4 experts in order get 4 bits, up to n4 + n3 get 3, up to n4 + n3 + n2 get 2.
    ends = np.cumsum(counts[:, :3], axis=1)
    position = np.arange(num_experts)
    bits = np.ones((num_rows, num_experts), dtype=np.int8)
    for end in ends.T:
        bits += position < end[:, None]
    return bits


@dataclass(frozen=True, eq=False)
class LossTable:
    """Output error of every expert at 1, 2, 3 and 4 bits.

    losses : float64 [layers, experts, 4], read-only, finite and not negative
    name : what a report calls it
    source : ``measured``, or ``assumed`` when it comes from a rule of thumb
    notes : sentences for the report on how the table was adapted
    """

    losses: NDArray[np.float64]
    name: str
    source: Literal["measured", "assumed"] = "measured"
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        losses = np.array(_checked_table(self.losses, self.name))
        if self.source not in ("measured", "assumed"):
            raise TraceError(f"{self.name}: source is {self.source!r}; it must be 'measured' or 'assumed'")
        losses.flags.writeable = False
        object.__setattr__(self, "losses", losses)

    @property
    def num_layers(self) -> int:
        """Number of layers [1]."""
        return int(self.losses.shape[0])

    @property
    def num_experts(self) -> int:
        """Number of experts of each layer [1]."""
        return int(self.losses.shape[1])

    @classmethod
    def load(cls, path_or_name: str | os.PathLike[str]) -> "LossTable":
        """Read the array ``losses`` of an ``.npz`` file, given by path or by the name of a bundled one.

        Anything that ends in ``.npz`` or holds a path separator is a path. Pickled data is never read.

        Raises TraceError when there is no such file, or it does not hold a valid table.
        """
        path = _find(path_or_name)
        return cls(_checked_table(_read_losses(path), str(path)), name=path.stem)

    @classmethod
    def assumed(cls, num_layers: int, num_experts: int) -> "LossTable":
        """The rule of thumb ``4 ** -bits``, equal for all experts: each bit halves the rounding step.

        Raises TraceError when a size is not a whole number of at least 1.
        """
        _check_sizes(num_layers, num_experts)
        row = np.power(4.0, -np.array(BITS, dtype=np.float64))
        losses = np.broadcast_to(row, (num_layers, num_experts, len(BITS)))
        return cls(losses, name="assumed", source="assumed", notes=("losses assumed to fall 4x per bit",))

    def for_model(self, num_layers: int, num_experts: int, *, assume: bool = False) -> "LossTable":
        """The table for a model of that many MoE layers and experts; layers are cut or cycled, with a note.

        Losses that rise with bits are kept, and a note says for how many experts they do.

        With another number of experts there is no honest mapping: that is an error, or the table of
        `LossTable.assumed` with a note when ``assume`` is true.

        Raises TraceError when the number of experts differs or a size is not a whole number of at least 1.
        """
        _check_sizes(num_layers, num_experts)
        if num_experts != self.num_experts:
            found = f"{self.name} has {self.num_experts} experts per layer, the model {num_experts}"
            if not assume:
                raise TraceError(f"loss table {found}; give a table of this model or use the assumed one")
            table = LossTable.assumed(num_layers, num_experts)
            notes = (*table.notes, f"loss table {found}, so it is not used")
            return LossTable(table.losses, table.name, table.source, notes)
        if num_layers == self.num_layers:
            return self._with_order_note()
        how = "cut" if num_layers < self.num_layers else "cycled"
        note = f"loss table {self.name} of {self.num_layers} layers is {how} to {num_layers} layers"
        losses = self.losses[np.arange(num_layers) % self.num_layers]
        return LossTable(losses, self.name, self.source, (*self.notes, note))._with_order_note()

    def _with_order_note(self) -> "LossTable":
        """The table, with a note where more bits make some expert worse: its last axis may be in another order."""
        rising = int((np.diff(self.losses, axis=2) > 0).any(axis=2).sum())
        count = self.num_layers * self.num_experts
        note = (
            f"loss table {self.name}: the loss of {rising} of {count} experts rises with bits somewhere;"
            " check the order of the last axis"
        )
        if not rising or note in self.notes:
            return self
        return LossTable(self.losses, self.name, self.source, (*self.notes, note))


def _checked_table(values: Any, where: str) -> NDArray[np.float64]:
    losses = _finite(values, f"{where}: losses", TraceError)
    if losses.ndim != 3 or losses.shape[2] != len(BITS) or 0 in losses.shape:
        shape = list(losses.shape)
        raise TraceError(f"{where}: losses has shape {shape}; it must be [layers, experts, 4], not empty")
    _not_negative(losses, f"{where}: losses", TraceError)
    return losses


def _check_sizes(num_layers: Any, num_experts: Any) -> None:
    for name, value in (("num_layers", num_layers), ("num_experts", num_experts)):
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or not 1 <= value <= 1_000_000:
            raise TraceError(f"{name} is {shown(value)}; it must be a whole number from 1 to 1000000")


def _finite(values: Any, name: str, error: type[PolicyError] | type[TraceError]) -> NDArray[np.float64]:
    """``values`` as float64, refusing everything that is not a finite real number."""
    try:
        array = np.asarray(values)
    except (ValueError, TypeError, OverflowError) as reason:
        raise error(f"{name} is not an array of numbers: {reason}") from None
    if array.dtype.kind not in "iuf" and array.size:
        raise error(f"{name} holds values of type {array.dtype}; they must be real numbers")
    if array.size == 0:
        return np.empty(array.shape)
    with np.errstate(over="ignore"):
        array = array.astype(np.float64)
    _refuse(array, ~np.isfinite(array), name, "finite", error)
    return array


def _not_negative(array: NDArray[np.float64], name: str, error: type[PolicyError] | type[TraceError]) -> None:
    _refuse(array, array < 0, name, "0 or more", error)


def _refuse(
    array: NDArray[np.float64],
    bad: NDArray[np.bool_],
    name: str,
    allowed: str,
    error: type[PolicyError] | type[TraceError],
) -> None:
    if bad.any():
        where = tuple(int(i) for i in np.argwhere(bad)[0])
        place = f"{name}{list(where)}" if where else name
        raise error(f"{place} is {array[where]}; it must be {allowed}")


def _scaled(losses: NDArray[np.float64]) -> NDArray[np.float64]:
    """Rows divided by a power of two: sums cannot overflow and the choice does not depend on the unit."""
    _, exponent = np.frexp(losses.max(axis=(1, 2)))
    return np.ascontiguousarray(np.ldexp(losses, -exponent[:, None, None]))


def _find(path_or_name: Any) -> Path:
    if not isinstance(path_or_name, str | os.PathLike):
        raise TraceError(f"a loss table is given by a path or a name, not by {shown(path_or_name)}")
    text = os.fspath(path_or_name)
    if not isinstance(text, str):
        raise TraceError(f"a loss table is given by a path or a name, not by {shown(path_or_name)}")
    if text.endswith(".npz") or "/" in text or os.sep in text or isinstance(path_or_name, os.PathLike):
        return Path(text)
    folder = data_folder("traces")
    bundled = {path.stem: path for path in sorted(folder.glob("*losses*.npz"))}
    if text not in bundled:
        raise TraceError(
            f"no bundled loss table {shown(text)}; there is {', '.join(bundled) or 'none'}; a file ends in .npz"
        )
    return bundled[text]


def _read_losses(path: Path) -> NDArray[Any]:
    arrays = read_npz(path, ["losses"])
    if "losses" not in arrays:
        raise TraceError(f"{path}: no array 'losses'; found {', '.join(npz_keys(path)[:10]) or 'nothing'}")
    return arrays["losses"]
