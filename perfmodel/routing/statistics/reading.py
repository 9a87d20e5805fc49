"""Every routing statistic of a trace at once, read block by block, so that a trace may be larger than memory."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from perfmodel.errors import TraceError
from perfmodel.progress import Report, check_report
from perfmodel.routing.blocks import Block, TraceFile, open_trace
from perfmodel.routing.checks import as_count
from perfmodel.routing.npz import shown
from perfmodel.routing.statistics.intervals import MAX_RESAMPLES, Bootstrap
from perfmodel.routing.statistics.report import Statistics
from perfmodel.routing.statistics.results import Survey
from perfmodel.routing.statistics.tables import First, Second, make_plan
from perfmodel.routing.trace import RoutingTrace

LAGS = (1, 2, 4, 8, 16, 32)
WINDOWS = (2, 8, 32, 128)
BATCHES = (1, 2, 4, 8, 16, 32, 64)
MAX_LAG = 64
MAX_WINDOW = 2**40
MAX_SEED = 2**63 - 1


def survey(
    source: str | Path | RoutingTrace | TraceFile,
    *,
    lags: Iterable[int] = LAGS,
    windows: Iterable[int] = WINDOWS,
    batches: Iterable[int] = BATCHES,
    min_decode: int = 16,
    resamples: int = 1000,
    seed: int = 0,
    report: Report | None = None,
) -> Survey:
    """Find every routing statistic of a trace.

    Rows are read block by block, twice after they were checked, so a trace may be larger than memory.

    Parameters
    ----------
    source : what :func:`perfmodel.routing.blocks.open_trace` takes
    lags : distances of rows whose reuse is measured, 1 to 64
    windows : rows of the windows in which distinct experts are counted
    batches : sequences that are decoded together, 1 to 64; more than there are is left out
    min_decode : decode rows that a sequence needs to be compared with its prefill: with fewer, whatever it picked
        looks like what it prefers
    resamples : draws of sequences behind each interval, at most 10,000; with fewer than two there are no intervals
    seed : of those draws, of the batches, and of the groups that very many sequences are put in
    report : called with the rows read, in all passes together, and how many that will be

    Raises :class:`TraceError` for a trace or a number that is not allowed.
    """
    check_report("report", report)
    chosen = counts("lags", lags, MAX_LAG), counts("windows", windows, MAX_WINDOW), counts("batches", batches, 64)
    min_decode = as_count("min_decode", min_decode, 1, None)
    resamples = as_count("resamples", resamples, 0, MAX_RESAMPLES)
    seed = as_count("seed", seed, 0, MAX_SEED)
    rows = _Rows(report)
    file = open_trace(source, report=rows.checked)
    plan = make_plan(file, chosen[0], chosen[1], min_decode, seed)
    first = First(plan)
    for block in file.blocks(weights=True):
        first.add(block)
        rows.read(block, file)
    second = Second(plan, first)
    if first.added or plan.drift_windows or plan.with_pairs:
        for block in file.blocks():
            second.add(block)
            rows.read(block, file)
    else:  # nothing needs another look
        rows.tell(3 * file.num_tokens, file)
    return Statistics(first, second, Bootstrap(plan.groups, resamples, seed), resamples).survey(
        chosen[2], min_decode, seed
    )


def counts(name: str, values: Iterable[int], highest: int) -> NDArray[np.int64]:
    """Distinct numbers from 1 on, in rising order; raises :class:`TraceError` for others, which names them."""
    try:
        listed = list(values)
    except TypeError as error:
        raise TraceError(f"{name} is {shown(values)}, expected a list of integers >= 1") from error
    if not listed or len(listed) > 1000:
        raise TraceError(f"{name} has {len(listed)} entries, expected 1 to 1000")
    return np.array(sorted({as_count(name, one, 1, highest) for one in listed}), np.int64)


class _Rows:
    """Tells how many rows were read: by the check, where there is one, and by the two passes after it."""

    def __init__(self, report: Report | None) -> None:
        self._report = report
        self._check = self._done = 0

    def checked(self, done: int, rows: int) -> None:
        """Rows of the check, and all rows of the trace."""
        self._check, self._done = rows, done
        if self._report is not None:
            self._report(done, 3 * rows)

    def read(self, block: Block, file: TraceFile) -> None:
        """A block more."""
        self._done += len(block.ids)
        self.tell(self._done, file)

    def tell(self, done: int, file: TraceFile) -> None:
        """So many rows, at most all that there are."""
        total = self._check + 2 * file.num_tokens
        if self._report is not None:
            self._report(min(done, total), total)
