"""Predicted against measured: every row that counts, by fits that have not seen its source, and what follows.

The constants that all engines share are fitted to every row that counts; each row is then judged by a fit without its
source. Rows of machines that are documented completely rest on that machine's own benchmarks, and nothing is fitted
to them. From the residuals come the errors by engine, machine, residency and batch, and the intervals of predictions
(`perfmodel.evidence.uncertainty` says which classes there are). The documented machines have intervals of their own.
"""

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from perfmodel.errors import SpecError
from perfmodel.evidence.constants import make_problem
from perfmodel.evidence.described import engine_of, machine_class, profile_of, residency
from perfmodel.evidence.errors import Errors, Group, error_table, errors
from perfmodel.evidence.fit import Fit, Problem, fit, fits_without, leave_one_out, left_out_residuals
from perfmodel.evidence.intervals import (
    ALL,
    LEVEL,
    MIN_ROWS,
    Coverage,
    Intervals,
    build_intervals,
    coverage,
    own_interval,
)
from perfmodel.evidence.measured import QUANTITIES, MeasuredRun, Quantity, counting, load_measured, missing_field
from perfmodel.evidence.predict import Predicted, predicted
from perfmodel.evidence.uncertainty import BUNDLED, NO_ENGINE, Bundled, bundled_text, class_path, own_class
from perfmodel.paths import replace_when_done

#: The fitted constants, which all engines share. The others are known from benchmarks of hardware or assumed; fitting
#: them too does not lower the error on sources that a fit has not seen.
CONSTANTS = (
    "memory_n_half_kb",
    "cpu_efficiency",
)
#: A coverage with a smaller probability than this contradicts the level that its intervals claim.
SIGNIFICANT = 0.05
#: Profiles whose constants are benchmarks of one machine, and its GPU.
DOCUMENTED = {"gpu-offloading": "gh200", "llama-cpp-expert-cache": "rtx-5070"}
#: Rows that are off by more than this factor need a physical reason.
WORST_FACTOR = 4.0
#: What it is in rows that are off by more, from the rows themselves and their sources.
REASONS: Mapping[str, str] = {
    "N325": "An early build of the engine imp on a model whose token mixing is mostly recurrent. On the same card at"
    " the same bits llama.cpp reads the prompt 2.2 times and decodes 2.5 times as fast (N324), while the same build is"
    " ahead of it on Qwen3-30B-A3B, which has no recurrent layers (N322, N323): its recurrent layers were not ready.",
}

#: Fits that a row is predicted by, see `Row`.
By = Literal["in_sample", "held_out", "other_machines"]


class Row(NamedTuple):
    """A measured row and its prediction.

    quantity : ``decode`` or ``prefill``. measured, in_sample, held_out, other_machines : tokens per second as measured,
    by the fit to all rows, by the fit without the row's source, and by the one without its machine [token/s]. fitted :
    whether a shared constant depends on the row's kind, so that it is part of the fit.
    """

    run: MeasuredRun
    quantity: str
    measured: float
    in_sample: float
    held_out: float
    other_machines: float
    fitted: bool

    @property
    def ratio(self) -> float:
        """Predicted over measured, without the row's source [1]."""
        return self.held_out / self.measured


@dataclass(frozen=True, eq=False)
class Validation:
    """The validation on measured rows.

    rows : those that count, in the order of the file, decode before prefill. missing : the other runs by quantity, with
    the field that keeps each from counting. fit : of the shared constants. fitted_rows : rows that one of them depends
    on, those of other files included. intervals, coverage : of predictions, from
    the decode rows; prefill_intervals, prefill_coverage : from those of prefills. The coverage is of the rows of
    engines with shared constants: a documented machine cannot be left out of its own interval.
    without_source : logarithms of the constants [P] of the fits that have seen no row of a source, by source.
    """

    rows: tuple[Row, ...]
    missing: Mapping[str, tuple[tuple[MeasuredRun, str], ...]]
    fit: Fit
    fitted_rows: int
    intervals: Intervals
    coverage: Coverage
    prefill_intervals: Intervals
    prefill_coverage: Coverage
    without_source: Mapping[str, NDArray[np.float64]]

    @property
    def quantities(self) -> tuple[Quantity, ...]:
        """The quantities that some row is of."""
        return tuple(one for one in QUANTITIES if any(row.quantity == one for row in self.rows))

    def residuals(self, quantity: str, by: By = "held_out") -> tuple[NDArray[np.float64], list[str]]:
        """ln(predicted / measured) of the rows of a quantity by one of the fits, and their sources."""
        rows = [row for row in self.rows if row.quantity == quantity]
        found = [np.log(getattr(row, by) / row.measured) for row in rows]
        return np.array(found, dtype=np.float64), [row.run.source for row in rows]

    def errors(self, quantity: str, by: By = "held_out") -> Errors:
        """Errors over the rows of a quantity by one of the fits, see `Row`."""
        return errors(*self.residuals(quantity, by))

    def errors_of(self, rows: Sequence[Row]) -> Errors | None:
        """Errors of some rows by fits without their sources; None of no rows."""
        if not rows:
            return None
        return errors([float(np.log(row.ratio)) for row in rows], [row.run.source for row in rows])

    def groups(self, quantity: str) -> list[Group]:
        """Errors by engine, machine, residency and batch, of fits without the source of each row."""
        residuals, sources = self.residuals(quantity)
        runs = [row.run for row in self.rows if row.quantity == quantity]
        labels: dict[str, Sequence[str | None]] = {
            "engine": [run.engine for run in runs],
            "machine": [machine_class(run) for run in runs],
            "residency": [residency(run) for run in runs],
            "batch": [_batch_class(run) for run in runs],
        }
        return error_table(residuals, sources, labels)

    def to_bundle(self) -> Bundled:
        """The intervals that predictions carry, and how many rows they rest on by residency.

        Those of prefills are left out where they do not hold what they say of held-out rows.
        """
        runs = [row.run for row in self.rows if row.quantity == "decode"]
        groups = {ALL: [run for run in runs if not is_documented(run)], NO_ENGINE: runs}
        for run in runs:
            if is_documented(run):
                groups.setdefault(_own(run), []).append(run)
        rows = {name: dict(Counter(residency(run) for run in group)) for name, group in groups.items()}
        found = {"decode": self.intervals}
        if self.prefill_coverage.p_effective >= SIGNIFICANT:
            found["prefill"] = self.prefill_intervals
        return Bundled(found, rows)

    @property
    def far_off(self) -> list[Row]:
        """Rows that are off by more than WORST_FACTOR."""
        return [row for row in self.rows if not 1.0 / WORST_FACTOR <= row.ratio <= WORST_FACTOR]


def _batch_class(run: MeasuredRun) -> str:
    batch = run.batch or 1.0
    return "1" if batch == 1 else "2-8" if batch <= 8 else "9-32" if batch <= 32 else "above 32"


def is_documented(run: MeasuredRun) -> bool:
    """Whether the run is of a machine and an engine whose constants are benchmarks of its own."""
    return DOCUMENTED.get(profile_of(run)) == run.gpu


def _own(run: MeasuredRun) -> str:
    """The class of the run's own machine."""
    return own_class(engine_of(run).name, machine_class(run))


def _intervals(made: Sequence[Row], rows: Sequence[Predicted], quantity: str) -> tuple[Intervals, Coverage]:
    """Intervals of a quantity: of engines with shared constants, of each documented machine, and without an engine."""
    pairs = [(row, one) for row, one in zip(made, rows, strict=True) if row.quantity == quantity]
    paths = [(_own(row.run), *class_path(engine_of(row.run), residency(row.run))) for row, _ in pairs]
    residuals = np.array([np.log(row.ratio) for row, _ in pairs])
    sources = [row.run.source for row, _ in pairs]
    shared = [i for i, (row, _) in enumerate(pairs) if not is_documented(row.run)]
    general = residuals[shared], [sources[i] for i in shared], [paths[i][1:] for i in shared]
    by_name = dict(build_intervals(*general).by_name)
    machines = {paths[i][0] for i in set(range(len(pairs))) - set(shared)}
    for name in sorted(machines):
        if sum(path[0] == name for path in paths) < MIN_ROWS:
            continue
        by_name[name] = own_interval([r for r, path in zip(residuals, paths, strict=True) if path[0] == name], name)
    # Nothing is fitted without an engine, so that all rows are alike there.
    bare = np.log([one._replace(system=one.system.with_engine(None)).rate() / one.measured for _, one in pairs])
    without = [class_path(None, residency(row.run)) for row, _ in pairs]
    others = build_intervals(bare, sources, [path[:-1] for path in without]).by_name
    by_name |= others | {ALL: by_name[ALL], NO_ENGINE: others[ALL]._replace(name=NO_ENGINE)}
    return Intervals(by_name), coverage(*general)


def write_intervals(validation: Validation | None = None, path: str | os.PathLike[str] | None = None) -> Path:
    """Write the intervals that predictions carry; by default the bundled file anew, from the bundled runs."""
    found = validate() if validation is None else validation
    target = Path(__file__).with_name(BUNDLED) if path is None else Path(path)
    with replace_when_done(target) as temporary:
        Path(temporary).write_text(bundled_text(found.to_bundle(), LEVEL), encoding="utf-8")
    return target


def problem_of(runs: Sequence[MeasuredRun]) -> tuple[tuple[Predicted, ...], Problem]:
    """The rows that count, decode before prefill, and the fit of the shared constants to them."""
    rows = tuple(row for one in QUANTITIES for row in predicted(counting(runs, one), one))
    return rows, make_problem(rows, CONSTANTS)


def validate(evidence: str | os.PathLike[str] | None = None) -> Validation:
    """Predict every measured row that counts, with and without its source.

    evidence : a file of measured runs, see `perfmodel.evidence.measured`; by default the bundled one. The bundled runs
        are fitted to as well, and give the intervals too; where an id is in both, the file's run counts. The rows of
        the result are those of the file alone, each predicted without any run of its source.

    Raises
    ------
    SpecError : the file is not one of measured runs, or its rows cannot carry the constants.
    """
    runs = load_measured(evidence)
    asked = {run.id for run in runs}
    beside = () if evidence is None else tuple(run for run in load_measured() if run.id not in asked)
    if not any(counting(runs, one) for one in QUANTITIES):
        fields = Counter(missing_field(run, "decode") for run in runs).most_common(1)[0][0]
        raise SpecError(f"{evidence or 'evidence'}: no run counts (most lack {fields}), allowed: one or more that do")
    rows, problem = problem_of((*runs, *beside))
    found = fit(problem)
    without = fits_without(problem)
    left_out, others = left_out_residuals(problem, without), leave_one_out(problem, by="machine")
    depends = np.asarray(problem.depends.any(axis=1))
    every = tuple(
        Row(
            one.run,
            one.quantity,
            one.measured,
            one.measured * float(np.exp(seen)),
            one.measured * float(np.exp(out)),
            one.measured * float(np.exp(other)),
            bool(dep),
        )
        for one, seen, out, other, dep in zip(rows, found.residuals, left_out, others, depends, strict=True)
    )
    return Validation(
        tuple(row for row in every if row.run.id in asked),
        {one: _missing(runs, one) for one in QUANTITIES},
        found,
        int(depends.sum()),
        *_intervals(every, rows, "decode"),
        *_intervals(every, rows, "prefill"),
        without_source=without,
    )


def _missing(runs: Sequence[MeasuredRun], quantity: Quantity) -> tuple[tuple[MeasuredRun, str], ...]:
    found = ((run, missing_field(run, quantity)) for run in runs)
    return tuple((run, field) for run, field in found if field is not None)
