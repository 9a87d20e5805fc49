"""Where a function of one number changes its sign, without pretending that it is smooth.

A prediction as a function of one axis may be continuous (a bandwidth), stepwise (a mean bit width that a search turns
into whole bits), defined at whole numbers only, equal to its target over a whole stretch, or without a value where a
plan does not fit. So the range is cut into *stretches* of one state each: below zero, zero, above zero, no value. The
cuts are found on a grid and then closed in on with the function itself.
"""

import itertools
import math
from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from perfmodel.errors import PerfModelError

#: Relative difference up to which a continuous function counts as equal to its target at a cut.
EXACT = 1e-9
#: Relative difference that the last bits of a sum can make; closer values are the same value.
SAME = 1e-12
#: Relative width up to which a stretch of zero is the place of a crossing.
_PLACE = 1e-5
#: Ranges that span more than this factor are scanned by factors, others by equal steps.
_LOG_SPAN = 16.0
#: From zero on, factors start this far below the end of the range.
_NEAR_ZERO = 1e-9

Function = Callable[[NDArray[np.float64]], NDArray[np.float64]]
Kind = Literal["exact", "step"]


class Domain(NamedTuple):
    """The range of one axis, ends included, and how many values of it are scanned first.

    scan : points of the grid; a range of whole numbers with no more values than this is looked at value by value.
    whole : only whole numbers count.
    """

    low: float
    high: float
    whole: bool
    scan: int

    @property
    def exhaustive(self) -> bool:
        """Whether the scan sees every value there is."""
        return self.low == self.high or (self.whole and self.high - self.low < self.scan)

    def grid(self, also: Iterable[float] = ()) -> NDArray[np.float64]:
        """The values that are scanned, rising, with further ones that must be among them."""
        low, high = self.low, self.high
        if self.exhaustive:
            return np.arange(low, high + 1.0) if self.whole else np.array([low])
        if low > 0 and high / low > _LOG_SPAN:
            values = np.geomspace(low, high, self.scan)
        elif low == 0.0:
            values = np.concatenate(([0.0], np.geomspace(1.0 if self.whole else high * _NEAR_ZERO, high, self.scan)))
        else:
            values = np.linspace(low, high, self.scan)
        values = np.concatenate((values, [low, high], [v for v in also if low <= v <= high]))
        values = np.clip(np.rint(values) if self.whole else values, low, high)
        return np.asarray(np.unique(values), dtype=np.float64)


class Stretch(NamedTuple):
    """Neighbouring values of one state, ends included.

    state : -1 below zero, 0 the same, 1 above, None where the function has no value.
    cut : how the stretch ends: ``exact`` where the function passes through zero and ``high`` is that place,
        ``step`` where it jumps and ``high`` is the last value before the jump. The last stretch ends ``exact``.
    """

    low: float
    high: float
    state: int | None
    cut: Kind


def state_of(value: float) -> int | None:
    """Side of zero, as in `Stretch`."""
    if math.isnan(value):
        return None
    return 0 if abs(value) <= SAME else int(math.copysign(1, value))


def stretches(function: Function, domain: Domain, also: Iterable[float] = ()) -> list[Stretch]:
    """Cut a range at every change of sign that the grid can see.

    Parameters
    ----------
    function : relative difference to what is looked for, at an array of values; NaN where there is none.
    domain : the range to scan.
    also : values to add to the grid.

    Returns
    -------
    Stretches from ``domain.low`` to ``domain.high``. Two changes within one step of the grid are seen if the function
    has a smooth turning point there, and missed otherwise.
    """
    if not domain.low <= domain.high:
        raise PerfModelError(f"range: found {domain.low:g} to {domain.high:g}, allowed a low end below the high end")
    grid = domain.grid(also)
    values = np.asarray(function(grid), dtype=np.float64)
    if not domain.whole:
        grid, values = _with_turning_points(function, grid, values)
    points = [(float(x), state_of(float(v))) for x, v in zip(grid, values, strict=True)]
    cuts: list[_Cut] = []
    for left, right in itertools.pairwise(points):
        cuts += _cuts(function, domain, left, right)
    return _joined(points[0], cuts, points[-1])


class _Cut(NamedTuple):
    """Between the last value of one state and the first of another; the same value where zero is passed."""

    left: float
    right: float
    before: int | None
    after: int | None
    kind: Kind


_Point = tuple[float, int | None]


def _cuts(function: Function, domain: Domain, left: _Point, right: _Point) -> list[_Cut]:
    """Changes of state between two values, one state after another."""
    (low, before), (high, after) = left, right
    if before == after:
        return []
    if domain.whole:
        return _close_in(function, domain, left, right)
    opposite = before is not None and after is not None and before * after < 0
    if not opposite:
        return _close_in(function, domain, left, right)
    from scipy.optimize import brentq

    try:
        root = float(brentq(lambda x: _at(function, x), low, high, xtol=5e-324, rtol=8.9e-16, maxiter=500, disp=False))
    except PerfModelError:
        raise
    except ValueError:  # no value somewhere on the way, so the two sides do not meet here
        return _close_in(function, domain, left, right)
    if abs(_at(function, root)) <= EXACT:
        middle = _PLACE * min(abs(root), high - low)
        beside = [state_of(_at(function, x)) for x in (max(low, root - middle), min(high, root + middle))]
        if 0 not in beside:
            return [_Cut(root, root, before, after, "exact")]
        # The same over a stretch, not at a place: its two ends are what counts.
        inside: _Point = (max(low, root - middle) if beside[0] == 0 else min(high, root + middle), 0)
        return [*_close_in(function, domain, left, inside), *_close_in(function, domain, inside, right)]
    return _close_in(function, domain, left, right)


def _close_in(function: Function, domain: Domain, left: _Point, right: _Point) -> list[_Cut]:
    """Halve down to neighbouring numbers; a third state on the way splits the search."""
    (low, before), (high, after) = left, right
    while True:
        middle = low + (high - low) / 2
        if domain.whole:
            middle = float(math.floor(middle))
        if not low < middle < high:
            break
        state = state_of(_at(function, middle))
        if state == before:
            low = middle
        elif state == after:
            high = middle
        else:
            inside = (middle, state)
            return [
                *_cuts(function, domain, (low, before), inside),
                *_cuts(function, domain, inside, (high, after)),
            ]
    passes = all(abs(_at(function, x)) <= EXACT for x in (low, high))
    if passes and not domain.whole and before is not None and after is not None:
        place = low if before == 0 else high
        return [_Cut(place, place, before, after, "exact")]
    return [_Cut(low, high, before, after, "step")]


def _joined(first: _Point, cuts: list[_Cut], last: _Point) -> list[Stretch]:
    """Stretches between cuts; a zero that is no wider than the last bits is one place."""
    found: list[Stretch] = []
    start = first[0]
    for cut in cuts:
        found.append(Stretch(start, cut.left, cut.before, cut.kind))
        start = cut.right
    found.append(Stretch(start, last[0], last[1], "exact"))
    for i, one in enumerate(found):
        if one.state != 0 or one.low == one.high or one.high - one.low > _PLACE * max(abs(one.low), abs(one.high)):
            continue
        place = first[0] if i == 0 else last[0] if i == len(found) - 1 else one.low + (one.high - one.low) / 2
        found[i] = Stretch(place, place, 0, one.cut)
        if i > 0 and found[i - 1].cut == "exact":
            found[i - 1] = found[i - 1]._replace(high=place)
        if i + 1 < len(found) and one.cut == "exact":
            found[i + 1] = found[i + 1]._replace(low=place)
    return [one for i, one in enumerate(found) if not _passed(found, i)]


def _passed(found: list[Stretch], i: int) -> bool:
    """Whether a stretch is only the place where the function goes from one side to the other."""
    if not 0 < i < len(found) - 1 or found[i].state != 0 or found[i].low != found[i].high:
        return False
    before, after = found[i - 1], found[i + 1]
    opposite = before.state is not None and after.state is not None and before.state * after.state < 0
    return opposite and before.cut == "exact" and before.high == after.low


def touches(found: list[Stretch], i: int) -> bool:
    """Whether a stretch is only a place where the function reaches zero and turns back."""
    if not 0 < i < len(found) - 1 or found[i].state != 0 or found[i].low != found[i].high:
        return False
    return found[i - 1].state == found[i + 1].state


def _at(function: Function, x: float) -> float:
    return float(np.asarray(function(np.array([x], dtype=np.float64)))[0])


def _with_turning_points(
    function: Function, grid: NDArray[np.float64], values: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Add the places between grid points where the function turns back just after, or just before, passing zero."""
    extra: list[float] = []
    for i in range(1, len(grid) - 1):
        here, beside = values[i], values[[i - 1, i + 1]]
        states = {state_of(float(v)) for v in (here, *beside)}
        if len(states) != 1 or states & {0, None}:
            continue
        closer = np.abs(beside) - abs(here)
        # Only a bend as large as the distance that is left can reach zero.
        if closer.min() >= 0 and closer.max() > abs(here):
            place = turning_point(function, float(grid[i - 1]), float(grid[i + 1]), float(np.sign(here)))
            extra.append(place)
    if not extra:
        return grid, values
    more = np.array(extra)
    order = np.argsort(np.concatenate((grid, more)), kind="stable")
    return (
        np.concatenate((grid, more))[order],
        np.concatenate((values, np.asarray(function(more), dtype=np.float64)))[order],
    )


def turning_point(function: Function, low: float, high: float, sign: float) -> float:
    """Where ``sign * function`` is smallest between two values."""
    from scipy.optimize import minimize_scalar

    found = minimize_scalar(
        lambda x: sign * _at(function, x), bounds=(low, high), method="bounded", options={"xatol": 1e-10 * (high - low)}
    )
    return float(found.x)
