"""Intervals of predictions from the residuals of their class, and whether they cover what they say.

**Interval.** Residuals r = ln(predicted / measured) come from fits that had not seen the source of the row. The rows
of a source share its machine and its way of measuring, so they are not independent: every source has one vote, spread
equally over its rows, and the interval lies between two weighted quantiles of the residuals
(`errors.weighted_quantile`): 10 % and 90 % for an interval of 80 %. The middle of one vote must lie within the tail
that is cut off, which takes 5 sources at 80 %.

With few sources such an interval holds less of a new source than it says: of K sources with one row each,
(K - 1) / (K + 1) of the level remains. Sources with many rows lose less. A share for the unknown source would make up
for it (R. Dunn, L. Wasserman, A. Ramdas, Distribution-free prediction sets for two-layer hierarchical models, 2023),
but held 94 % and more of the held-out rows here, which tells too little.

**Classes.** A row belongs to a path of classes, the most specific first, such as engine kind with residency, then
residency. The first class of the path with enough rows and sources gives the interval; the last resort is all rows. A
class needs so many sources that a whole vote lies within a tail after one source is left out, 11 at 80 %: what is
tried on held-out rows is then what is used. Smaller classes did not earn their place: with 5 sources allowed, intervals
by residency had a worse interval score on held-out rows than one interval for all (width + misses / tail in ln;
T. Gneiting, A. Raftery, Strictly proper scoring rules, 2007).

**One machine.** Rows of a machine that is documented completely, to whose speeds nothing was fitted, have an interval
of their own, from their residuals alone: `own_interval`. It holds for that machine. They are in no other class, and not
in the coverage: a single machine cannot be left out of itself.

**Coverage.** Every source is left out in turn: an interval from the others is tried on its rows. (Residuals of the
others come from fits that saw it; with many sources that is a small effect, and a fit without two sources for every
pair would be needed to remove it.) The sources that are tried are the ones that the intervals of the others come from,
so the share of all rows that is covered scatters less than that of new rows would, and a test of it finds intervals
that are wrong for their kind of data, such as rows taken for independent, rather than a thin sample.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from perfmodel.errors import SpecError
from perfmodel.evidence.errors import Floats, equal_sources, weighted_quantile

#: Share of measured values that an interval is to hold.
LEVEL = 0.8
#: A class with fewer rows takes its parent's interval, and so does one with too few sources (`class_sources`).
MIN_ROWS = 10
#: The class of all rows.
ALL = "all"

#: The classes of a row, the most specific first; the class of all rows is understood.
Path = tuple[str, ...]


class Interval(NamedTuple):
    """A multiplicative band: the measured value lies in prediction * low to prediction * high at ``level``.

    rows, sources : what it was built from. name : the class that it belongs to.
    """

    low: float
    high: float
    level: float
    rows: int
    sources: int
    name: str


@dataclass(frozen=True)
class Intervals:
    """Intervals of all classes that have enough rows and sources, by name; the class of all rows is always there."""

    by_name: dict[str, Interval]

    def of(self, path: Path) -> Interval:
        """The interval of a row with these classes, the most specific first."""
        for name in (*path, ALL):
            if name in self.by_name:
                return self.by_name[name]
        raise SpecError(f"intervals: found neither {' nor '.join((*path, ALL))}")


def interval(residuals: ArrayLike, source: Sequence[str], level: float = LEVEL, name: str = ALL) -> Interval:
    """The interval of one class from residuals ln(predicted / measured) [R] and sources [R].

    Raises
    ------
    SpecError : too few sources for the level, or a level that is not between 0 and 1.
    """
    found = np.asarray(residuals, dtype=np.float64)
    if not 0.0 < level < 1.0:
        raise SpecError(f"intervals: found level {level:g}, allowed: above 0, below 1")
    if len(found) != len(source) or not np.isfinite(found).all():
        raise SpecError(f"intervals: found {len(found)} residuals of {len(source)} rows, allowed: a finite one each")
    sources, fewest = len(set(source)), fewest_sources(level)
    if sources < fewest:
        raise SpecError(
            f"intervals: found {len(found)} rows of {sources} sources in class {name}, allowed: {fewest} or more"
            f" sources for an interval of {100 * level:g} %"
        )
    return _between(found, equal_sources(source), level, sources, name)


def fewest_sources(level: float = LEVEL) -> int:
    """Fewest sources of an interval: the middle of one vote, 1 / (2 K), lies within a tail, (1 - level) / 2."""
    return math.ceil(1.0 / (1.0 - level) - 1e-9)


def class_sources(level: float = LEVEL) -> int:
    """Fewest sources of a class of its own: without one of them, a whole vote, 1 / (K - 1), lies within a tail."""
    return math.ceil(2.0 / (1.0 - level) - 1e-9) + 1


def own_interval(residuals: ArrayLike, name: str, level: float = LEVEL) -> Interval:
    """The interval of one machine of one source, from its own rows; SpecError for fewer than `MIN_ROWS`."""
    found = np.asarray(residuals, dtype=np.float64)
    if len(found) < MIN_ROWS or not np.isfinite(found).all():
        raise SpecError(
            f"intervals: found {len(found)} residuals of {name}, allowed: {MIN_ROWS} or more, all of them finite"
        )
    return _between(found, np.ones(len(found)), level, 1, name)


def _between(residuals: Floats, weights: Floats, level: float, sources: int, name: str) -> Interval:
    tail = (1.0 - level) / 2.0
    low, high = (weighted_quantile(residuals, weights, place) for place in (tail, 1.0 - tail))
    # A prediction that is too high (r > 0) has its measured value below it.
    return Interval(math.exp(-high), math.exp(-low), level, len(residuals), sources, name)


def build_intervals(
    residuals: ArrayLike, source: Sequence[str], classes: Sequence[Path], level: float = LEVEL
) -> Intervals:
    """The intervals of all classes with enough rows and sources, from leave-one-source-out residuals.

    Parameters
    ----------
    residuals, source : ln(predicted / measured) and the sources of the rows [R].
    classes : the path of classes of every row [R], the most specific first.

    Raises
    ------
    SpecError : too few sources altogether, or lengths that differ.
    """
    found, labels = np.asarray(residuals, dtype=np.float64), np.asarray(source)
    if not len(found) == len(labels) == len(classes):
        raise SpecError(
            f"intervals: found {len(found)} residuals, {len(labels)} sources and {len(classes)} classes,"
            " allowed: one of each a row"
        )
    return _build(found, labels, classes, level, class_sources(level))


def _build(found: Floats, labels: NDArray[Any], classes: Sequence[Path], level: float, fewest: int) -> Intervals:
    members: dict[str, list[int]] = {}
    for row, path in enumerate(classes):
        for name in dict.fromkeys(path):
            members.setdefault(name, []).append(row)
    by_name = {ALL: interval(found, labels.tolist(), level)}
    for name, rows in sorted(members.items()):
        here = labels[rows].tolist()
        if name != ALL and len(rows) >= MIN_ROWS and len(set(here)) >= fewest:
            by_name[name] = interval(found[rows], here, level, name)
    return Intervals(by_name)


class Coverage(NamedTuple):
    """Held-out rows that their intervals hold, against the level that the intervals claim.

    inside : bool [R]. share : of rows. share_by_source : mean over sources of the share of their rows.
    p_rows, p_effective, p_sources : two-sided binomial tests of the level, on three numbers of observations.

    - Over rows: every row is an observation. Rows of a source lie inside or outside together, so this test rejects a
      correct interval too often; a large p is strong evidence, a small one is not.
    - Effective: the share of rows, on as many independent observations as the rows amount to, ``effective`` =
      R^2 / sum over sources of n (1 + (n - 1) rho). rho is the intraclass correlation of the ranks of |r - median|,
      because what puts a row outside is the size of its residual, whether its source is shifted or just noisy. Within
      15 % of the truth in simulations, also with one source of half of the rows. This is the test to go by.
    - Over sources: every source is one observation, whose value is the share of its rows inside. Shares scatter less
      than the yes or no that the test assumes, so this one rejects too rarely; a small p is strong evidence.

    The last two round to whole observations.
    """

    level: float
    rows: int
    sources: int
    inside: NDArray[np.bool_]
    share: float
    share_by_source: float
    effective: float
    p_rows: float
    p_effective: float
    p_sources: float


def coverage(residuals: ArrayLike, source: Sequence[str], classes: Sequence[Path], level: float = LEVEL) -> Coverage:
    """Coverage of every source by intervals that were built without it; see the module for what is held out.

    Raises
    ------
    SpecError : too few sources to leave one out, or lengths that differ.
    """
    found, labels = np.asarray(residuals, dtype=np.float64), np.asarray(source)
    if not len(found) == len(labels) == len(classes):
        raise SpecError(
            f"coverage: found {len(found)} residuals, {len(labels)} sources and {len(classes)} classes,"
            " allowed: one of each a row"
        )
    inside = np.zeros(len(found), dtype=bool)
    for label in np.unique(labels):
        out = labels == label
        others = [i for i in range(len(found)) if not out[i]]
        # The classes of these rows have one source less here.
        rest = [classes[i] for i in others]
        built = _build(found[others], labels[others], rest, level, class_sources(level) - 1)
        for row in np.flatnonzero(out).tolist():
            band = built.of(classes[row])
            inside[row] = band.low <= math.exp(-found[row]) <= band.high
    return _tested(inside, effective_rows(found, labels), labels, level)


def effective_rows(residuals: Floats, source: ArrayLike) -> float:
    """How many independent rows [1] rows amount to whose sources have something in common; see `Coverage`.

    The correlation is that of a one-way analysis of variance, kept between 0 and 1; rows of a single source are one.
    """
    _, at, counts = np.unique(np.asarray(source), return_inverse=True, return_counts=True)
    rows, sources = len(residuals), len(counts)
    size = np.abs(residuals - np.median(residuals))
    # Equal sizes share a rank, so that their order does not matter.
    _, place, ties = np.unique(size, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(ties) - (ties - 1) / 2.0)[place]
    correlation = 1.0 if sources == 1 else 0.0
    if 1 < sources < rows:
        means = np.bincount(at, weights=ranks) / counts
        between = float((counts * (means - ranks.mean()) ** 2).sum()) / (sources - 1)
        within = float(((ranks - means[at]) ** 2).sum()) / (rows - sources)
        usual = (rows - float((counts**2).sum()) / rows) / (sources - 1)
        total = between + (usual - 1.0) * within
        correlation = min(max((between - within) / total, 0.0), 1.0) if total > 0.0 else 1.0
    return rows**2 / float((counts * (1.0 + (counts - 1) * correlation)).sum())


def _tested(inside: NDArray[np.bool_], effective: float, labels: NDArray[Any], level: float) -> Coverage:
    from scipy.stats import binomtest

    _, at, counts = np.unique(labels, return_inverse=True, return_counts=True)
    rows, sources = len(inside), len(counts)
    share, by_source = float(inside.mean()), float((np.bincount(at, weights=inside) / counts).mean())

    def p(part: float, observations: int) -> float:
        return float(binomtest(round(part * observations), observations, level).pvalue)

    return Coverage(
        level, rows, sources, inside, share, by_source, effective,
        p(share, rows), p(share, max(round(effective), 1)), p(by_source, sources),
    )  # fmt: skip
