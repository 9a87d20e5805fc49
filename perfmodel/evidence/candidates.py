"""Constants that could be fitted beside the shared ones, and whether they would earn their place.

Each is tried alone on top of the fitted constants, on sources that the fit has not seen: as the profiles have it, which
is the model as it is; at its own start, which is what is known of it without any run; and fitted. Fitting must lower
the error against the better of the other two.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from perfmodel.evidence.cases import mixtral_question
from perfmodel.evidence.constants import make_problem
from perfmodel.evidence.fit import Problem, fit, leave_one_out
from perfmodel.evidence.predict import Predicted
from perfmodel.evidence.robust import Floats
from perfmodel.evidence.skill import MIN_IMPROVEMENT, error_by_source, held_out_error
from perfmodel.evidence.validation import CONSTANTS

#: Constants to try; those that are fitted anyway are left out.
CANDIDATES = (
    "kernel_us",
    "memory_efficiency",
    "expert_efficiency",
    "attention_kernels",
    "recurrent_kernels",
    "expert_kernels",
    "round_trip_us",
    "vllm.memory_efficiency",
    "vllm.step_us",
    "vllm.sequence_us",
)


class Gain(NamedTuple):
    """What a source gains by a constant: its part of all that is gained and lost together [1], and its rows."""

    source: str
    part: float
    rows: int


class Tried(NamedTuple):
    """A constant that was tried.

    Errors are those of `perfmodel.evidence.skill.held_out_error`. error_now : with the value that every profile has.
    error_start : with ``start``, what is known of it without a run. error : with the constant fitted.
    rejected : whether it does not earn its place. message : why, in a sentence.
    value : as fitted to all rows, in the unit of the constant. gains : the three sources that gain most by it. question
    : error of the four-batch question with it, see `perfmodel.evidence.cases.mixtral_question`. The last three are
    given only where it is not rejected.
    """

    name: str
    start: float
    error_now: float
    error_start: float
    error: float
    rejected: bool
    message: str
    value: float | None = None
    gains: tuple[Gain, ...] = ()
    question: tuple[float, ...] = ()


def rejected_constants(
    rows: Sequence[Predicted], names: Sequence[str] = CANDIDATES, report: Callable[[int, int], None] | None = None
) -> tuple[Tried, ...]:
    """Try constants one by one on top of the fitted ones; about three seconds each with the bundled rows.

    Parameters
    ----------
    rows : runs that count, ready to be priced. report : called with how many are done and how many there are.

    Raises
    ------
    SpecError : a name is no constant of an engine.
    """
    chosen = [name for name in names if name not in CONSTANTS]
    now = leave_one_out(make_problem(rows, CONSTANTS))

    def tried() -> Iterator[Tried]:
        for at, name in enumerate(chosen):
            yield _try(rows, name, now)
            if report is not None:
                report(at + 1, len(chosen))

    return tuple(tried())


def _try(rows: Sequence[Predicted], name: str, now: Floats) -> Tried:
    """One constant. now : residuals of the rows without it [R]."""
    problem = make_problem(rows, (*CONSTANTS, name))
    at_start, fitted = leave_one_out(problem, without=[name]), leave_one_out(problem)
    error_now, error_start, error = (held_out_error(one, problem.source) for one in (now, at_start, fitted))
    before = min(error_now, error_start)
    start = problem.constants[-1].start
    if error > (1.0 - MIN_IMPROVEMENT) * before:
        message = (
            f"constant {name} does not lower the error on unseen sources: {100 * error:.2f} % fitted,"
            f" {100 * before:.2f} % without: rejected"
        )
        return Tried(name, start, error_now, error_start, error, True, message)
    message = (
        f"constant {name} would lower the error on unseen sources to {100 * error:.2f} % from {100 * before:.2f} %"
    )
    values = fit(problem).values
    gains = _gains(problem, now if error_now <= error_start else at_start, fitted)
    question = mixtral_question({key.rpartition(".")[2]: value for key, value in values.items()}).errors
    return Tried(name, start, error_now, error_start, error, False, message, values[name], gains, question)


def _gains(problem: Problem, before: Floats, after: Floats) -> tuple[Gain, ...]:
    """The sources that gain most, as parts of what all of them gain and lose together."""
    gained = error_by_source(before, problem.source) - error_by_source(after, problem.source)
    sources, counts = np.unique(problem.source, return_counts=True)
    order = np.argsort(-gained)[:3]
    return tuple(
        Gain(str(sources[i]), float(gained[i] / gained.sum()), int(counts[i])) for i in order if gained[i] > 0.0
    )
