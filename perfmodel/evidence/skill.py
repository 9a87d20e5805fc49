"""Whether a model has learned anything: constants that do not earn their place, and targets that mean nothing."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from perfmodel.errors import SpecError
from perfmodel.evidence.fit import By, Problem, leave_one_out
from perfmodel.evidence.robust import Floats

#: An extra constant must lower the leave-one-source-out error by this share of it.
MIN_IMPROVEMENT = 0.01
#: An error beyond this factor counts as this factor, so that no single row decides about a constant.
CAP = 4.0


class Rejected(NamedTuple):
    """A constant that does not improve predictions of unseen sources.

    error_with, error_without : see `held_out_error`.
    """

    name: str
    error_with: float
    error_without: float

    def __str__(self) -> str:
        errors = f"{100 * self.error_with:.2f} % with, {100 * self.error_without:.2f} % without"
        small = f", less than {100 * MIN_IMPROVEMENT:g} % of it" if self.error_with < self.error_without else ""
        return f"constant {self.name} does not improve the leave-one-source-out error ({errors}{small}): rejected"


def held_out_error(residuals: Floats, source: Sequence[str]) -> float:
    """One number for residuals ln(predicted / measured) [R], as a share: exp(e) - 1.

    e is the mean of two means of min(|r|, ln CAP): over rows, and over sources of their rows' mean. A mean, because
    every row moves it: a constant that matters to a tenth of the rows can leave a median where it is. Capped, because
    of outliers. Half over sources, because a source with many rows would decide alone.
    """
    return math.expm1(float(error_by_source(residuals, source).sum()))


def error_by_source(residuals: Floats, source: Sequence[str]) -> Floats:
    """What every source adds to e of `held_out_error`, the sources in sorted order [S]."""
    _, at, counts = np.unique(np.asarray(source), return_inverse=True, return_counts=True)
    shares = 0.5 / len(at) + 0.5 / (counts[at] * len(counts))
    sizes = np.minimum(np.abs(residuals), math.log(CAP))
    return np.asarray(np.bincount(at, weights=shares * sizes), dtype=np.float64)


def _improves(present: Floats, absent: Floats) -> bool:
    """Whether errors by source are lower with a constant than without it, by MIN_IMPROVEMENT of them."""
    return float((absent - present).sum()) > MIN_IMPROVEMENT * float(absent.sum())


def drop_useless(
    problem: Problem, candidates: Sequence[str], *, without: Sequence[str] = (), keep: ArrayLike | None = None
) -> list[Rejected]:
    """The candidates that do not improve the leave-one-source-out error, in the order in which they were rejected.

    Starting with all constants, a candidate is useless when fitting it does not lower `held_out_error` by
    MIN_IMPROVEMENT of it. (In simulations one constant in seven that means nothing was kept by chance.) The useless one
    whose absence costs least is rejected and absent from then on, and so on with the others. A constant that one source
    alone depends on is always rejected: no unseen source says that it helps.

    Parameters
    ----------
    candidates : names of constants that must earn their place. without : names that are absent anyway.
    keep : rows that may be fitted to and count, bool [R]; by default all.
    """
    problem.positions([*candidates, *without])
    kept = np.ones(problem.rows, dtype=bool) if keep is None else np.asarray(keep)
    sources = np.asarray(problem.source)[kept].tolist()
    absent = list(dict.fromkeys(without))
    asked = [name for name in dict.fromkeys(candidates) if name not in absent]
    rejected: list[Rejected] = []

    def errors(names: list[str]) -> Floats:
        return error_by_source(leave_one_out(problem, without=names, keep=kept)[kept], sources)

    present = errors(absent) if asked else np.zeros(0)
    while asked:
        trials = {name: errors([*absent, name]) for name in asked}
        useless = [name for name in asked if not _improves(present, trials[name])]
        if not useless:
            break
        least = min(useless, key=lambda name: float(trials[name].sum()))
        ends = (math.expm1(float(found.sum())) for found in (present, trials[least]))
        rejected.append(Rejected(least, *ends))
        absent.append(least)
        asked.remove(least)
        present = trials[least]
    return rejected


def skill(problem: Problem, by: By = "source") -> float:
    """1 - error(model) / error(best constant): 1 is perfect, 0 no better than knowing nothing about a row.

    Both errors are means of |ln(predicted / measured)| on groups not seen: the model's from `leave_one_out`; the
    constant is the median of the measured values of the other groups. A median fitted to all rows would have seen
    the row that it predicts, which the model has not.
    """
    labels = np.asarray(problem.source if by == "source" else problem.machine)
    if len(set(labels.tolist())) < 2:
        raise SpecError(f"fit: found one {by}, allowed: two or more to leave one out")
    constant = np.empty(problem.rows)
    for label in np.unique(labels):
        out = labels == label
        constant[out] = np.median(problem.target[~out])
    nothing = float(np.abs(constant - problem.target).mean())
    if nothing == 0.0:
        raise SpecError("fit: all measured values are equal, so no model can be better than a constant")
    return 1.0 - float(np.abs(leave_one_out(problem, by)).mean()) / nothing


def shuffled_skill(problem: Problem, seed: int, repeats: int, by: By = "source") -> Floats:
    """`skill` [repeats] when the measured values are permuted among the rows.

    The rows' descriptions and groups stay where they are, so nothing that a row says about itself has to do with its
    target any more. The constants are fitted to the permuted targets of the other groups, and judged on a group's own.
    A skill clearly above 0 would mean that the machinery flatters itself, such as by a fit that has seen its group.
    """
    generator = np.random.default_rng(seed)
    return np.array([
        skill(problem.with_target(generator.permutation(problem.target)), by) for _ in range(repeats)
    ])  # fmt: skip
