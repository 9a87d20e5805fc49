"""A calibration: constants that earn their place, fitted to the rows that may be seen, and the errors that count."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from perfmodel.errors import NoAnswerError, SpecError
from perfmodel.evidence.errors import Errors, errors
from perfmodel.evidence.fit import MIN_ROWS_PER_CONSTANT, By, Fit, Problem, fit, leave_one_out
from perfmodel.evidence.skill import Rejected, drop_useless

if TYPE_CHECKING:
    from perfmodel.evidence.robust import Floats


class Unjudged(NamedTuple):
    """A fitted constant that no fit without a source, or without a machine, could show to help or not."""

    name: str
    by: By

    def __str__(self) -> str:
        return (
            f"constant {self.name} cannot be judged on unseen {self.by}s: without any one of the {self.by}s that depend"
            f" on it, fewer than {MIN_ROWS_PER_CONSTANT} rows do; fitted to all rows, and no error on unseen {self.by}s"
        )


@dataclass(frozen=True, eq=False)
class Calibration:
    """A fit and what it is worth.

    fit : the constants that were not rejected, fitted to all rows that may be seen. rejected : the others.
    unjudged : those of ``fit`` that are absent from every prediction of an unseen source (or machine) that depends on
    them. They were not rejected, because they were never tried.
    in_sample : error on the rows that were fitted to. unseen_source, unseen_machine : error on the same rows, each
    predicted by a fit without its source or machine; None where there is only one, or a constant is unjudged.
    held_out : error of ``fit`` on the rows that it may not see; None where there are none.
    residuals : ln(predicted / measured) of every row [R], from fits without its source; of rows held out, and wherever
    ``unseen_source`` is None, from ``fit``.
    """

    fit: Fit
    rejected: tuple[Rejected, ...]
    unjudged: tuple[Unjudged, ...]
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
    reject : whether a constant must lower the leave-one-source-out error. With one source none can, so none is asked;
    nor is a constant that the fits without a source never try.

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

    untried: dict[By, list[str] | None] = {by: _untried(problem, by, kept) for by in ("source", "machine")}
    rejected: list[Rejected] = []
    if reject and untried["source"] is not None:
        asked = [c.name for c in problem.constants if c.name not in untried["source"]]
        rejected = drop_useless(problem, asked, keep=kept)
    names = [one.name for one in rejected]
    unjudged = [Unjudged(name, by) for by, open_ in untried.items() for name in open_ or () if name not in names]

    def unseen(by: By) -> Floats | None:
        if untried[by] is None or any(one.by == by for one in unjudged):
            return None
        return leave_one_out(problem, by, without=names, keep=kept)

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
        unjudged=tuple(unjudged),
        in_sample=error(found.residuals, kept),
        unseen_source=None if by_source is None else error(by_source, kept),
        unseen_machine=None if by_machine is None else error(by_machine, kept),
        held_out=None if kept.all() else error(found.residuals, ~kept),
        residuals=residuals,
    )


def _untried(problem: Problem, by: By, kept: NDArray[np.bool_]) -> list[str] | None:
    """Constants that no fit without a source (or machine) has where it predicts a row there that depends on them.

    Fewer than MIN_ROWS_PER_CONSTANT other rows depend on them (see `perfmodel.evidence.fit.leave_one_out`), so that
    the error on unseen sources is the same with and without them. None where there is one source only.
    ``kept`` are the rows that may be fitted to, bool [R].
    """
    labels = np.asarray(problem.source if by == "source" else problem.machine)
    groups = np.unique(labels[kept])
    if len(groups) < 2:
        return None
    depends = problem.depends & kept[:, None]
    tried = np.zeros(len(problem.constants), dtype=bool)
    for group in groups:
        out = labels == group
        tried |= depends[out].any(axis=0) & (depends[~out].sum(axis=0) >= MIN_ROWS_PER_CONSTANT)
    return [c.name for c, one in zip(problem.constants, tried, strict=True) if not one]


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
        names = ", ".join(c.name for c, fitted in zip(fit.constants, fit.fitted, strict=True) if fitted)
        raise SpecError(f"calibrate: no fitted constant belongs to the engine {profile}; fitted: {names}")
    return shared | own
