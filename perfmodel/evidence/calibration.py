"""A calibration: constants that earn their place, fitted to the rows that may be seen, and the errors that count."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from perfmodel.errors import NoAnswerError, SpecError
from perfmodel.evidence.errors import Errors, errors
from perfmodel.evidence.fit import By, Fit, Problem, fit, leave_one_out
from perfmodel.evidence.skill import Rejected, drop_useless

if TYPE_CHECKING:
    from perfmodel.evidence.robust import Floats


@dataclass(frozen=True, eq=False)
class Calibration:
    """A fit and what it is worth.

    fit : the constants that were not rejected, fitted to all rows that may be seen. rejected : the others.
    in_sample : error on the rows that were fitted to. unseen_source, unseen_machine : error on the same rows, each
    predicted by a fit without its source or machine; None where there is only one.
    held_out : error of ``fit`` on the rows that it may not see; None where there are none.
    residuals : ln(predicted / measured) of every row [R], from fits without its source; of rows held out from ``fit``.
    """

    fit: Fit
    rejected: tuple[Rejected, ...]
    in_sample: Errors
    unseen_source: Errors | None
    unseen_machine: Errors | None
    held_out: Errors | None
    residuals: Floats


def calibrate_problem(problem: Problem, out: NDArray[np.bool_] | None = None, *, reject: bool = True) -> Calibration:
    """Fit the constants of a problem, reject those that do not help on unseen sources, and measure the errors.

    Parameters
    ----------
    out : rows that the fit may not see, bool [R]; by default none.
    reject : whether a constant must lower the leave-one-source-out error. With one source none can, so none is asked.

    Raises
    ------
    SpecError : the rows cannot carry the constants; see `perfmodel.evidence.fit.fit`. It is asked of all constants,
    before any is rejected.
    NoAnswerError : every constant was rejected.
    """
    kept = np.ones(problem.rows, dtype=bool) if out is None else ~out
    found = fit(problem, kept)
    sources = np.asarray(problem.source)

    def error(residuals: Floats, rows: NDArray[np.bool_]) -> Errors:
        one = errors(residuals[rows], sources[rows].tolist())
        worst = int(np.flatnonzero(rows)[one.worst])
        return Errors(one.rows, one.sources, one.by_row, one.by_source, worst, one.worst_factor)

    def unseen(by: By) -> Floats | None:
        labels = np.asarray(problem.source if by == "source" else problem.machine)[kept]
        return leave_one_out(problem, by, without=names, keep=kept) if len(np.unique(labels)) > 1 else None

    rejected: list[Rejected] = []
    if reject and len(np.unique(sources[kept])) > 1:
        rejected = drop_useless(problem, [c.name for c in problem.constants], keep=kept)
    names = [one.name for one in rejected]
    if names:
        if len(names) == len(problem.constants):
            raise NoAnswerError(
                f"calibrate: no constant improves the error on unseen sources; {rejected[-1]}",
                {"rejected": [{**one._asdict(), "message": str(one)} for one in rejected]},
            )
        found = fit(problem, kept, without=names)
    by_source, by_machine = unseen("source"), unseen("machine")
    residuals = found.residuals if by_source is None else np.where(kept, by_source, found.residuals)
    return Calibration(
        fit=found,
        rejected=tuple(rejected),
        in_sample=error(found.residuals, kept),
        unseen_source=None if by_source is None else error(by_source, kept),
        unseen_machine=None if by_machine is None else error(by_machine, kept),
        held_out=None if kept.all() else error(found.residuals, ~kept),
        residuals=residuals,
    )


def engine_values(fit: Fit, profile: str) -> dict[str, float]:
    """Fitted values that belong to an engine's profile, by key of a system.

    A constant named ``PROFILE.KEY`` belongs to that profile alone and wins over a shared one named ``KEY``.

    Raises
    ------
    SpecError : no fitted constant belongs to it.
    """
    shared: dict[str, float] = {}
    own: dict[str, float] = {}
    for constant, fitted in zip(fit.constants, fit.fitted, strict=True):
        only, _, key = constant.name.rpartition(".")
        if fitted and only in ("", profile):
            (own if only else shared)[f"engine.{key}"] = fit.values[constant.name]
    if not shared | own:
        raise SpecError(f"calibrate: no fitted constant belongs to the engine {profile}")
    return shared | own
