"""How the errors of the validation depend on what was decided before anything was predicted.

Three decisions. Most rows are of two documented machines, whose profiles are benchmarks of those machines: here they
are told apart, and predicted with the default profile of their kind too, as a machine that nobody knows would be. Some
rows are excluded for a reason that they state: here they are predicted beside the others, by fits that have seen
neither them nor their source. And each fitted constant rests on some sources: here is what it would be without one.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from perfmodel.errors import SpecError
from perfmodel.evidence.constants import make_problem
from perfmodel.evidence.described import profile_of
from perfmodel.evidence.errors import Errors, errors
from perfmodel.evidence.measured import QUANTITIES, MeasuredRun, Quantity, missing_field
from perfmodel.evidence.predict import Predicted, predicted
from perfmodel.evidence.validation import CONSTANTS, Row, Validation, is_documented

#: The default profiles of the kinds that the documented engines are of.
DEFAULTS = {"gpu-offloading": "vllm", "llama-cpp-expert-cache": "llama-cpp-cuda"}
#: Keys that exclude a row, by quantity.
_EXCLUDES = {one: ("excluded_because", f"{one}_excluded_because") for one in QUANTITIES}


class Judged(NamedTuple):
    """A measured rate and its prediction by a fit that has not seen its source [token/s].

    quantity : ``decode`` or ``prefill``. reason : why the row does not count; empty where it does.
    """

    run: MeasuredRun
    quantity: str
    measured: float
    predicted: float
    reason: str = ""

    @property
    def ratio(self) -> float:
        """Predicted over measured [1]."""
        return self.predicted / self.measured


@dataclass(frozen=True, eq=False)
class Alternatives:
    """Rows of a validation as they are, and as they would be.

    general, documented : rows that count, of all other machines and of the documented ones. defaults : the latter under
    the default profile of their kind, as of a machine without any benchmark; defaults_read : the same with the rate at
    which its CPU reads experts, where the run states it. excluded : rows that would count but for a reason that they
    state.
    """

    general: tuple[Judged, ...]
    documented: tuple[Judged, ...]
    defaults: tuple[Judged, ...]
    defaults_read: tuple[Judged, ...]
    excluded: tuple[Judged, ...]

    def errors(self, quantity: str, *groups: Sequence[Judged]) -> Errors | None:
        """Errors over the rows of a quantity in some of the groups together; None where they have none."""
        rows = [row for group in groups for row in group if row.quantity == quantity]
        if not rows:
            return None
        return errors([float(np.log(row.ratio)) for row in rows], [row.run.source for row in rows])

    @property
    def general_excluded(self) -> tuple[Judged, ...]:
        """The excluded rows that are not of a documented machine."""
        return tuple(row for row in self.excluded if not is_documented(row.run))


@functools.lru_cache(maxsize=4)
def alternatives(found: Validation) -> Alternatives:
    """The rows of a validation apart, under default profiles, and with those that are excluded."""
    rows = [(row, is_documented(row.run)) for row in found.rows]
    documented = [row for row, own in rows if own]
    swapped = [(replace(row.run, engine=DEFAULTS[profile_of(row.run)]), row.quantity, "") for row in documented]
    # What its CPU reads experts at is a benchmark of the machine too, and only stated where somebody ran it.
    unknown = [(replace(run, expert_read_gb_per_s=None), quantity, "") for run, quantity, _ in swapped]
    return Alternatives(
        tuple(_judged(row) for row, own in rows if not own),
        tuple(map(_judged, documented)),
        _by_left_out(found, unknown),
        _by_left_out(found, swapped),
        _by_left_out(found, _excluded(found)),
    )


def _judged(row: Row) -> Judged:
    return Judged(row.run, row.quantity, row.measured, row.held_out)


def _excluded(found: Validation) -> list[tuple[MeasuredRun, str, str]]:
    """Runs that would count on a quantity but for a key that excludes them, and what it says."""
    asked: list[tuple[MeasuredRun, str, str]] = []
    for quantity in found.quantities:
        for run, field in found.missing[quantity]:
            if field in _EXCLUDES[quantity]:
                back = _counted(run, quantity)
                if missing_field(back, quantity) is None:
                    asked.append((back, quantity, str(getattr(run, field))))
    return asked


def _counted(run: MeasuredRun, quantity: Quantity) -> MeasuredRun:
    """The run without the keys that exclude it on a quantity."""
    if quantity == "decode":
        return replace(run, excluded_because=None, decode_excluded_because=None)
    return replace(run, excluded_because=None, prefill_excluded_because=None)


def _by_left_out(found: Validation, asked: Sequence[tuple[MeasuredRun, str, str]]) -> tuple[Judged, ...]:
    """Runs predicted by the fit without their source; by the fit to all rows where none is of it."""
    ready: list[tuple[Predicted, str]] = []
    for run, quantity, reason in asked:
        try:
            ready += [(one, reason) for one in predicted([run], quantity)]
        except SpecError:
            # An excluded row may state what no step of the model can have: a reason to exclude it, not to stop here.
            if not reason:
                raise
    if not ready:
        return ()
    problem = make_problem([row for row, _ in ready], CONSTANTS)
    logs = {source: problem.predict(one[None, :])[0] for source, one in found.without_source.items()}
    every = problem.predict(found.fit.logs[None, :])[0]
    return tuple(
        Judged(row.run, row.quantity, row.measured, float(np.exp(logs.get(row.run.source, every)[at])), reason)
        for at, (row, reason) in enumerate(ready)
    )


class Range(NamedTuple):
    """What a fitted constant would be without one source.

    low, high : over the sources, and without which it is so. sources : those whose absence moves it by 1 % or more.
    """

    name: str
    low: float
    low_without: str
    high: float
    high_without: str
    sources: int


def constant_ranges(found: Validation) -> tuple[Range, ...]:
    """The range of every fitted constant over the fits without one source."""
    ranges = []
    for at, one in enumerate(found.fit.constants):
        values = {source: float(np.exp(logs[at])) for source, logs in found.without_source.items()}
        low, high = min(values, key=values.__getitem__), max(values, key=values.__getitem__)
        moved = sum(abs(value / found.fit.values[one.name] - 1.0) >= 1e-2 for value in values.values())
        ranges.append(Range(one.name, values[low], low, values[high], high, moved))
    return tuple(ranges)
