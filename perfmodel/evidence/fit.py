"""Constants fitted to measured rows: values, how well the rows determine them, and the error on rows not seen.

A fit is refused when the rows cannot carry it: too few rows a constant, a constant that too few rows depend on, or
constants that change the predictions in the same way. What a fit is worth is its error on sources it has not seen:
see `leave_one_out`, and `perfmodel.evidence.skill` for constants that do not earn their place.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from perfmodel.errors import SpecError
from perfmodel.evidence.robust import ROBUST_SCALE, Floats, Posed, Predict

#: Fewest rows for every fitted constant, and fewest rows that must depend on each of them.
MIN_ROWS_PER_CONSTANT = 5
#: Largest condition number of the derivatives with columns of length one. Above 30, least squares cannot tell the
#: constants apart (D. Belsley, E. Kuh, R. Welsch, Regression Diagnostics, 1980, chapter 3).
MAX_CONDITION = 30.0
#: A row depends on a constant when a factor of two in it moves the row's prediction by more than this, in ln.
DEPENDS = 0.01
#: A constant closer to its bound than this, in ln, lies on it.
_ON_BOUND = 1e-3

By = Literal["source", "machine"]


@dataclass(frozen=True)
class Constant:
    """A positive constant that may be fitted.

    start : where a fit begins. low, high : bounds from physics, all in ``unit``.
    absent : the value wherever the constant is not fitted, by default the start: what is known without the rows, or a
    value that does nothing. Neither may come from an earlier fit to the same rows. Otherwise a row has been seen by
    the prediction that is said not to have seen it, and no constant can improve on its own absence.
    """

    name: str
    start: float
    low: float
    high: float
    unit: str = "1"
    absent: float | None = None

    def __post_init__(self) -> None:
        """Refuse bounds that leave no room; `SpecError`."""
        if not (0.0 < self.low <= self.start <= self.high < math.inf and self.high > 1.001 * self.low):
            raise SpecError(
                f"constant {self.name}: found start {self.start:g} in {self.low:g} to {self.high:g} {self.unit},"
                " allowed: 0 < low <= start <= high, finite, and high above low"
            )
        if self.absent is not None and not 0.0 < self.absent < math.inf:
            raise SpecError(f"constant {self.name}: found absent {self.absent:g}, allowed: positive and finite")


@dataclass(frozen=True, eq=False)
class Problem:
    """Measured rows, and a model of them.

    constants : P of them. predict : log constants [N, P] -> log predictions [N, R].
    target : ln of the measured values [R].
    source, machine, classes : labels of the rows [R]; rows of one source are not independent of each other.
    prior : optional width, in ln, of a weak prior around each constant's start [P]; inf says nothing. A constant that
    is one width away weighs as much as one row that is ROBUST_SCALE off.
    weights : optional positive weights of the rows [R], by default equal; see `source_weights`.
    """

    constants: tuple[Constant, ...]
    predict: Predict
    target: Floats
    source: Sequence[str]
    machine: Sequence[str]
    classes: Sequence[Any]
    prior: Floats | None = None
    weights: Floats | None = None

    def __post_init__(self) -> None:
        """Refuse rows that do not fit together; `SpecError`."""
        names = [c.name for c in self.constants]
        if not names or len(set(names)) < len(names):
            raise SpecError(f"fit: found constants {names}, allowed: one or more, each once")
        if len(self.target) == 0 or not np.isfinite(self.target).all():
            raise SpecError("fit: found no rows, or measured values that are not positive and finite")
        for what, found, most in (
            ("sources", self.source, self.rows),
            ("machines", self.machine, self.rows),
            ("classes", self.classes, self.rows),
            ("weights", self.weights, self.rows),
            ("prior widths", self.prior, len(names)),
        ):
            if found is not None and len(found) != most:
                raise SpecError(f"fit: found {len(found)} {what}, allowed: {most}")
        for what, given in (("weights", self.weights), ("prior widths", self.prior)):
            if given is not None and not np.all(np.asarray(given) > 0.0):
                raise SpecError(f"fit: found {what} that are not positive, allowed: positive numbers")

    @property
    def rows(self) -> int:
        """Rows R."""
        return len(self.target)

    @cached_property
    def start(self) -> Floats:
        """Logarithms of the starts [P]."""
        return np.log([c.start for c in self.constants])

    @cached_property
    def absent(self) -> Floats:
        """Logarithms of the values of constants that are not fitted [P]."""
        return np.log([c.start if c.absent is None else c.absent for c in self.constants])

    @cached_property
    def bounds(self) -> tuple[Floats, Floats]:
        """Logarithms of the bounds, two times [P]."""
        return np.log([c.low for c in self.constants]), np.log([c.high for c in self.constants])

    @cached_property
    def depends(self) -> NDArray[np.bool_]:
        """Whether a row depends on a constant [R, P]: a factor of two in it, either way from its start and within its
        bounds, moves the prediction by more than DEPENDS."""
        size, reach = len(self.constants), math.log(2.0) * np.eye(len(self.constants))
        places = np.clip(self.start + np.concatenate([0.0 * reach, reach, -reach]), *self.bounds)
        found = self.predict(places).reshape(3, size, self.rows)
        return np.asarray((np.abs(found[1:] - found[0]).max(axis=0) > DEPENDS).T)

    def positions(self, names: Sequence[str]) -> NDArray[np.bool_]:
        """Which constants are named [P]; `SpecError` for an unknown name."""
        known = [c.name for c in self.constants]
        for name in names:
            if name not in known:
                raise SpecError(f"fit: found constant {name!r}, allowed: {', '.join(known)}")
        return np.array([name in names for name in known])

    def with_target(self, target: Floats) -> Problem:
        """The same rows with other measured values (logarithms [R])."""
        return replace(self, target=target)


def source_weights(source: Sequence[str], power: float = 1.0) -> Floats:
    """Weights of rows with mean 1: n^-power for a row of a source with n rows.

    At 1 every source weighs the same, at 0 every row does, and 0.5 lies between.
    """
    _, at, counts = np.unique(np.asarray(source), return_inverse=True, return_counts=True)
    weights = counts[at] ** -float(power)
    return np.asarray(weights / weights.mean())


@dataclass(frozen=True, eq=False)
class Fit:
    """Fitted constants.

    constants : all of the problem. logs : logarithms of their values [P]. fitted : which were fitted [P]; the others
    are absent. kept : rows that were fitted to [R].
    residuals : ln(predicted / measured) of every row [R], kept or not.
    standard_errors : relative standard error of each constant [P], in ln; nan where it is not fitted or on a bound.
    The larger of two: with rows independent, and with the rows of a source moving together (a sum over sources of
    the squared sums of their scores), because the second is too small for a constant that one source determines.
    correlations : of the estimates, with rows independent and alike [P, P]; nan where there is no standard error.
    condition : condition number of the derivatives with columns of length one. on_bound : constants on a bound [P].
    rows : kept rows that depend on each constant [P].
    """

    constants: tuple[Constant, ...]
    logs: Floats
    fitted: NDArray[np.bool_]
    kept: NDArray[np.bool_]
    residuals: Floats
    standard_errors: Floats
    correlations: Floats
    condition: float
    on_bound: NDArray[np.bool_]
    rows: NDArray[np.int64]

    @property
    def values(self) -> dict[str, float]:
        """Values of all constants by name, in their units."""
        return {c.name: float(v) for c, v in zip(self.constants, np.exp(self.logs), strict=True)}


def fit(
    problem: Problem,
    keep: ArrayLike | None = None,
    *,
    without: Sequence[str] = (),
    start: Floats | None = None,
    max_condition: float = MAX_CONDITION,
) -> Fit:
    """Fit constants to rows by robust least squares of ln(predicted / measured).

    Parameters
    ----------
    keep : rows to fit to, bool [R]; by default all. The residuals of the others are computed too.
    without : names of constants that are absent.
    start : logarithms to begin at [P] instead of the constants' own starts.

    Raises
    ------
    SpecError : the rows cannot carry the constants: fewer than MIN_ROWS_PER_CONSTANT rows a constant, a constant that
    fewer rows than that depend on, or a condition number above ``max_condition``.
    """
    kept = _mask(problem, keep)
    free = ~problem.positions(without)
    rows = problem.depends[kept].sum(axis=0)
    _check_rows(problem, int(kept.sum()), free, rows)
    posed = _pose(problem, kept, free)
    begin = problem.start[free]
    _check_condition(problem, posed.slopes(_inside(posed, begin))[1], np.flatnonzero(free), max_condition)
    best = posed.solve(begin if start is None else start[free])

    logs = problem.absent.copy()
    logs[free] = best
    on_bound = free & _near_bound(problem, logs)
    errors, slopes = posed.slopes(_inside(posed, best))
    inner = ~on_bound[free]
    condition = _check_condition(problem, slopes[:, inner], np.flatnonzero(free & ~on_bound), max_condition)
    variances, inverse = _variances(
        errors, slopes[:, inner], posed, np.asarray(problem.source)[kept], (1.0 / posed.width**2)[inner]
    )
    spread = np.sqrt(np.diag(inverse))
    size = len(problem.constants)
    place = np.flatnonzero(free & ~on_bound)
    standard, correlations = np.full(size, np.nan), np.full((size, size), np.nan)
    standard[place] = np.sqrt(variances)
    correlations[np.ix_(place, place)] = inverse / np.outer(spread, spread)
    residuals = problem.predict(logs[None, :])[0] - problem.target
    return Fit(
        problem.constants, logs, free, kept, residuals, standard, correlations, condition, on_bound,
        np.asarray(rows, dtype=np.int64),
    )  # fmt: skip


def fits_without(
    problem: Problem,
    by: By = "source",
    *,
    without: Sequence[str] = (),
    keep: ArrayLike | None = None,
    start: Floats | None = None,
) -> dict[str, Floats]:
    """Logarithms of the constants [P] of the fits that have seen no row of a group, by the label of the group.

    Every fit begins at the constants' starts. Beginning at the fit to all rows would be faster, but what the group
    alone says about a constant would then leak into its own prediction wherever the other rows leave that constant
    open; for the same reason a constant that fewer than MIN_ROWS_PER_CONSTANT other rows depend on is absent.

    Parameters
    ----------
    by : what a group is: a source or a machine. without : names of constants that are absent.
    keep : rows that may be fitted to, bool [R]; by default all.
    start : logarithms to begin at [P] instead, from a fit that has not seen the rows in question.
    """
    labels = np.asarray(problem.source if by == "source" else problem.machine)
    kept, allowed = _mask(problem, keep), ~problem.positions(without)
    found = {}
    for label in np.unique(labels):
        seen = kept & (labels != label)
        free = allowed & (problem.depends[seen].sum(axis=0) >= MIN_ROWS_PER_CONSTANT)
        logs = problem.absent.copy()
        if free.any():
            posed = _pose(problem, seen, free)
            logs[free] = posed.solve((problem.start if start is None else start)[free], quick=True)
        found[str(label)] = logs
    return found


def leave_one_out(
    problem: Problem,
    by: By = "source",
    *,
    without: Sequence[str] = (),
    keep: ArrayLike | None = None,
    start: Floats | None = None,
) -> Floats:
    """ln(predicted / measured) of every row [R] from a fit that has seen no row of its group, see `fits_without`.

    keep : rows that may be fitted to, bool [R]; by default all. The others are predicted without their group too.
    """
    return left_out_residuals(problem, fits_without(problem, by, without=without, keep=keep, start=start), by)


def left_out_residuals(problem: Problem, fits: Mapping[str, Floats], by: By = "source") -> Floats:
    """ln(predicted / measured) of every row [R] by the constants of its group, as `fits_without` finds them."""
    labels = np.asarray(problem.source if by == "source" else problem.machine)
    residuals = np.empty(problem.rows)
    for label in np.unique(labels):
        out = labels == label
        residuals[out] = (problem.predict(fits[str(label)][None, :])[0] - problem.target)[out]
    return residuals


def _mask(problem: Problem, keep: ArrayLike | None) -> NDArray[np.bool_]:
    kept = np.ones(problem.rows, dtype=bool) if keep is None else np.asarray(keep)
    if kept.dtype != bool or kept.shape != (problem.rows,) or not kept.any():
        raise SpecError(f"fit: the rows to keep must be {problem.rows} booleans, one or more of them true")
    return kept


def _pose(problem: Problem, kept: NDArray[np.bool_], free: NDArray[np.bool_]) -> Posed:
    """The least-squares question in the free constants alone, on the kept rows alone."""

    def predict(logs: Floats) -> Floats:
        places = np.tile(problem.absent, (len(logs), 1))
        places[:, free] = logs
        return problem.predict(places)[:, kept]

    weights = np.ones(problem.rows) if problem.weights is None else np.asarray(problem.weights, dtype=np.float64)
    width = np.full(len(problem.constants), np.inf) if problem.prior is None else np.asarray(problem.prior)
    low, high = problem.bounds
    return Posed(
        predict, problem.target[kept], weights[kept], low[free], high[free], problem.start[free], width[free]
    )  # fmt: skip


def _inside(posed: Posed, logs: Floats) -> Floats:
    """Where derivatives can be taken: not beyond a bound."""
    return np.clip(logs, posed.low, posed.high - 1e-5)


def _near_bound(problem: Problem, logs: Floats) -> NDArray[np.bool_]:
    low, high = problem.bounds
    return np.asarray((logs - low < _ON_BOUND) | (high - logs < _ON_BOUND))


def _check_rows(problem: Problem, kept: int, free: NDArray[np.bool_], rows: NDArray[np.int64]) -> None:
    count = int(free.sum())
    if count == 0:
        raise SpecError("fit: found no constant to fit, allowed: one or more")
    if kept < MIN_ROWS_PER_CONSTANT * count:
        raise SpecError(
            f"fit: found {kept} rows for {count} constants, allowed: {MIN_ROWS_PER_CONSTANT} or more rows a constant"
        )
    for i in np.flatnonzero(free):
        if rows[i] < MIN_ROWS_PER_CONSTANT:
            found = "no row depends" if rows[i] == 0 else f"only {rows[i]} rows depend"
            raise SpecError(
                f"fit: {found} on constant {problem.constants[i].name}, allowed: {MIN_ROWS_PER_CONSTANT} or more"
            )


def _check_condition(problem: Problem, slopes: Floats, places: NDArray[np.intp], most: float) -> float:
    """Condition number of the derivatives [R + P, p] of the constants at ``places`` [p]; `SpecError` above ``most``."""
    lengths = np.sqrt((slopes**2).sum(axis=0))
    if len(places) == 0:
        return 1.0
    names = [problem.constants[i].name for i in places]
    if not lengths.all():
        name = names[int(np.argmin(lengths))]
        raise SpecError(f"fit: no row depends on constant {name} near the values that fit best; fit without it")
    _, sizes, directions = np.linalg.svd(slopes / lengths)
    condition = math.inf if sizes[-1] == 0.0 else float(sizes[0] / sizes[-1])
    if condition > most:
        pair = [names[i] for i in np.sort(np.argsort(-np.abs(directions[-1]), kind="stable")[:2])]
        raise SpecError(
            f"fit: the rows cannot tell constants {' and '.join(pair)} apart (condition number {condition:.3g},"
            f" allowed: up to {most:g}); fit one of them"
        )
    return condition


def _variances(
    errors: Floats, slopes: Floats, posed: Posed, source: NDArray[Any], tightness: Floats
) -> tuple[Floats, Floats]:
    """Variances of the estimates [p], and the inverse [p, p] of what the rows say of them.

    For residuals r with influence psi = r / sqrt(1 + (r / s)^2): the inverse of mean(psi') J'WJ on both sides of the
    covariance of the scores J'W psi (P. Huber, Robust Statistics, 1981, section 7.6), once with the rows independent
    and once with the rows of a source moving together; the larger one counts. ``tightness`` is 1 / width^2 of priors.
    """
    count, size = len(posed.target), slopes.shape[1]
    if size == 0:
        return np.zeros(0), np.zeros((0, 0))
    rows, weights = slopes[:count], posed.weights
    squares = 1.0 + (errors[:count] / ROBUST_SCALE) ** 2
    influence = errors[:count] / np.sqrt(squares)
    prior = ROBUST_SCALE**2 * np.diag(tightness)
    slope = float(np.average(squares**-1.5, weights=weights))
    inverse = np.asarray(np.linalg.inv(slope * (rows.T * weights) @ rows + prior), dtype=np.float64)
    variance = float(np.average(influence**2, weights=weights)) * count / (count - size)
    apart = variance * (rows.T * weights**2) @ rows
    _, at = np.unique(source, return_inverse=True)
    groups = int(at.max()) + 1
    sums = np.zeros((groups, size))
    np.add.at(sums, at, rows * (weights * influence)[:, None])
    together = sums.T @ sums * (groups / max(groups - 1, 1))
    both = [np.diag(inverse @ (scores + ROBUST_SCALE**2 * prior) @ inverse) for scores in (apart, together)]
    return np.asarray(np.maximum(*both), dtype=np.float64), inverse
