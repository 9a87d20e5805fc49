"""Constants that could be fitted beside the shared ones, and whether they would earn their place.

Each is tried alone on top of the fitted constants. Two errors decide, both on sources that the fit has not seen: the
constant must lower the error against itself unfitted (`perfmodel.evidence.skill.drop_useless`), and also against the
constants as they are, where every engine keeps the value of its own profile.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from perfmodel.evidence.constants import make_problem
from perfmodel.evidence.fit import leave_one_out
from perfmodel.evidence.predict import Predicted
from perfmodel.evidence.skill import MIN_IMPROVEMENT, drop_useless, held_out_error
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


class Tried(NamedTuple):
    """A constant that was tried.

    error : see `perfmodel.evidence.skill.held_out_error`, with the constant fitted; error_now : with the fitted
    constants alone. rejected : whether it does not earn its place. message : why, in a sentence.
    """

    name: str
    error: float
    error_now: float
    rejected: bool
    message: str


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
    sources = [row.run.source for row in rows]
    chosen = [name for name in names if name not in CONSTANTS]
    now = held_out_error(leave_one_out(make_problem(rows, CONSTANTS)), sources)

    def tried() -> Iterator[Tried]:
        for at, name in enumerate(chosen):
            problem = make_problem(rows, (*CONSTANTS, name))
            gone = drop_useless(problem, [name])
            error = gone[0].error_with if gone else held_out_error(leave_one_out(problem), sources)
            if report is not None:
                report(at + 1, len(chosen))
            if gone:
                yield Tried(name, error, now, True, str(gone[0]))
            elif error > (1.0 - MIN_IMPROVEMENT) * now:
                yield Tried(
                    name, error, now, True,
                    f"constant {name} is no better fitted ({100 * error:.2f} %) than as its profiles have it"
                    f" ({100 * now:.2f} %): rejected",
                )  # fmt: skip
            else:
                yield Tried(
                    name, error, now, False,
                    f"constant {name} would lower the error on unseen sources to {100 * error:.2f} % from"
                    f" {100 * now:.2f} %",
                )  # fmt: skip

    return tuple(tried())
