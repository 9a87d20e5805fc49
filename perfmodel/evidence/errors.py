"""How far predictions are from measured values: statistics of residuals, over all rows and by group.

A residual is ln(predicted / measured). Every statistic is given twice: with every row weighing the same, and with
every source weighing the same, because one source with many rows would otherwise speak for all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from perfmodel.errors import SpecError

Floats = NDArray[np.float64]

#: The factors within which predictions are counted, either way.
CLOSE, NEAR = 1.25, 1.5


class Statistics(NamedTuple):
    """Error of some predictions, all as shares: 0.2 is 20 %.

    median, p90 : of the absolute percentage error |predicted / measured - 1|. bias : median of predicted / measured,
    less 1. within_close, within_near : rows with predicted / measured within a factor of CLOSE or NEAR, either way.
    """

    median: float
    p90: float
    bias: float
    within_close: float
    within_near: float


@dataclass(frozen=True)
class Errors:
    """Error of some rows.

    rows, sources : how many. by_row : every row weighs the same. by_source : every source does.
    worst : position of the row that is off by the largest factor, and worst_factor that factor, 1 or above.
    """

    rows: int
    sources: int
    by_row: Statistics
    by_source: Statistics
    worst: int
    worst_factor: float


class Group(NamedTuple):
    """Error of the rows with one value of a property, such as of one engine."""

    property: str
    value: str
    errors: Errors


def weighted_quantile(values: ArrayLike, weights: ArrayLike, level: float) -> float:
    """Quantile of values with positive weights, linear between them.

    The sorted value k stands at the middle of its weight, scaled so that the lowest stands at 0 and the highest at 1.
    With equal weights that is NumPy's default, (k - 1) / (n - 1).
    """
    found, heavy = np.asarray(values, dtype=np.float64), np.asarray(weights, dtype=np.float64)
    order = np.argsort(found, kind="stable")
    found, heavy = found[order], heavy[order]
    middle = np.cumsum(heavy) - heavy / 2.0
    length = middle[-1] - middle[0]
    if length == 0.0:  # a single value
        return float(found[0])
    return float(np.interp(level, (middle - middle[0]) / length, found))


def equal_sources(source: ArrayLike) -> Floats:
    """Weights of rows that sum to 1, the same for every source and shared equally by its rows."""
    _, at, counts = np.unique(np.asarray(source), return_inverse=True, return_counts=True)
    return np.asarray(1.0 / (counts[at] * len(counts)))


def statistics(residuals: Floats, weights: Floats) -> Statistics:
    """Statistics of residuals ln(predicted / measured) with weights that sum to 1."""
    percentage, factors = np.abs(np.expm1(residuals)), np.abs(residuals)
    # A prediction at exactly a factor counts as within it, whatever its logarithm is rounded to.
    close, near = (float(weights[factors <= math.log(factor) + 1e-12].sum()) for factor in (CLOSE, NEAR))
    return Statistics(
        weighted_quantile(percentage, weights, 0.5),
        weighted_quantile(percentage, weights, 0.9),
        math.expm1(weighted_quantile(residuals, weights, 0.5)),
        min(close, 1.0),
        min(near, 1.0),
    )


def errors(residuals: ArrayLike, source: Sequence[str]) -> Errors:
    """Error of rows with residuals ln(predicted / measured) [R] and sources [R]; `SpecError` without rows."""
    found = np.asarray(residuals, dtype=np.float64)
    if found.ndim != 1 or len(found) == 0 or len(found) != len(source) or not np.isfinite(found).all():
        raise SpecError(
            f"errors: found {found.size} residuals of {len(source)} rows, allowed: one finite number for each of one"
            " or more rows"
        )
    worst = int(np.argmax(np.abs(found)))
    return Errors(
        rows=len(found),
        sources=len(set(source)),
        by_row=statistics(found, np.full(len(found), 1.0 / len(found))),
        by_source=statistics(found, equal_sources(source)),
        worst=worst,
        worst_factor=math.exp(abs(float(found[worst]))),
    )


def error_table(residuals: ArrayLike, source: Sequence[str], properties: Mapping[str, Sequence[Any]]) -> list[Group]:
    """Error by group.

    properties : labels of the rows [R] by property, such as engine, machine class, residency and batch; a row with the
    label None belongs to no group. Groups come in the order of the properties, each with its labels in sorted order.
    ``worst`` of a group is a position among all rows.
    """
    found, sources = np.asarray(residuals, dtype=np.float64), np.asarray(source)
    groups = []
    for name, labels in properties.items():
        if len(labels) != len(found):
            raise SpecError(f"errors: found {len(labels)} labels of {name}, allowed: {len(found)}")
        for value in sorted({label for label in labels if label is not None}):
            rows = np.flatnonzero([label == value for label in labels])
            one = errors(found[rows], sources[rows].tolist())
            here = Errors(one.rows, one.sources, one.by_row, one.by_source, int(rows[one.worst]), one.worst_factor)
            groups.append(Group(name, str(value), here))
    return groups
