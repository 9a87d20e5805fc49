"""Timing many small pieces of work fairly, on a machine that does other things too.

All pieces take turns, round by round, so that a disturbance hits all of them. Where the system tells how long threads
waited for a processor (Linux), a pass in which they did is one that another program disturbed, and does not count. Work
on one thread is timed by that thread's own clock, which stands still while another program runs.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import NamedTuple

import numpy as np

from perfmodel.progress import Report

#: Work is repeated within one pass until that takes about so long, far more than a reading of the clock [s].
PASS_S = 0.002
#: Fewest passes, to which the time limit gives way; undisturbed ones that are enough; and most of any kind.
FEWEST, ENOUGH, MOST = 3, 11, 1000
#: With less than one pass each nothing is known; with more, so much of the time is the end [1].
_PATIENCE = 1.5
#: A pass is disturbed when its threads waited longer than this share of its time [1].
QUIET = 0.02
#: Coarsest clock that can time a pass [s].
_FINE_S = 1e-5


class Case(NamedTuple):
    """A piece of work to be timed.

    name : what it is. work : does it as often as it is told. limits : what holds meanwhile, such as a number of
    threads. least_s : shortest pass [s]; work with a cost of its own per pass takes longer ones. threads : that work
    at the same time.
    """

    name: str
    work: Callable[[int], object]
    limits: Callable[[], AbstractContextManager[object]] = nullcontext
    least_s: float = PASS_S
    threads: int = 1


class Timing(NamedTuple):
    """Times of one piece of work.

    seconds : median over the passes of the time of one piece [s]. spread : interquartile range over the median [1];
    None of a single pass. passes : how many counted. repeats : pieces in each. calm : whether those that counted were
    undisturbed.
    """

    seconds: float
    spread: float | None
    passes: int
    repeats: int
    calm: bool = True


class Pass(NamedTuple):
    """Time of a pass, and how long its threads waited for a processor meanwhile [s]."""

    seconds: float
    waited: float

    @property
    def quiet(self) -> bool:
        """Whether no other program was in the way."""
        return self.waited <= QUIET * self.seconds


def summary(passes: Sequence[Pass], repeats: int = 1) -> Timing:
    """Median and spread, per piece of work, of the passes that nothing disturbed; without any, of the fastest one.

    Other programs only ever add to a time.
    """
    quiet = [one.seconds for one in passes if one.quiet]
    kept = quiet or [min(one.seconds for one in passes)]
    low, middle, high = np.quantile(np.array(kept), [0.25, 0.5, 0.75])
    spread = float((high - low) / middle) if len(kept) > 1 else None
    return Timing(float(middle) / repeats, spread, len(kept), repeats, bool(quiet))


def waited() -> float:
    """How long the threads of this process have waited for a processor so far [s]; 0 where the system does not say."""
    total = 0
    with contextlib.suppress(OSError):
        for task in Path("/proc/self/task").iterdir():
            with contextlib.suppress(OSError, ValueError, IndexError):
                total += int((task / "schedstat").read_text(encoding="ascii").split()[1])
    return total * 1e-9


def thread_clock() -> Callable[[], float]:
    """Clock of the calling thread, or of the wall where that of a thread is coarse."""
    fine = time.get_clock_info("thread_time").resolution <= _FINE_S
    return time.thread_time if fine else time.perf_counter


def time_cases(
    cases: Sequence[Case],
    seconds: float,
    clock: Callable[[], float],
    report: Report | None = None,
    *,
    own_clock: Callable[[], float] | None = None,
    waits: Callable[[], float] = waited,
) -> list[Timing]:
    """Time all cases within about ``seconds``, which give way to the fewest passes, but not by more than a half.

    Every case runs twice before it counts: what is compiled, loaded or woken up at first is not part of the times, and
    the second run tells how many pieces fill a pass. Then all cases take turns until the time is over, or each has
    enough undisturbed passes.

    clock : of the wall [s]. own_clock : of the calling thread, which does the work of cases with one thread; the same
    by default [s]. waits : see `waited`.
    """

    own = clock if own_clock is None else own_clock

    def timed(case: Case, repeats: int) -> Pass:
        if case.threads == 1:
            return alone(case, repeats)
        before, begin = waits(), clock()
        case.work(repeats)
        end = clock()
        return Pass(max(end - begin, 1e-9), max(waits() - before, 0.0))

    def alone(case: Case, repeats: int) -> Pass:
        begin = own()
        case.work(repeats)
        return Pass(max(own() - begin, 1e-9), 0.0)

    start = clock()
    repeats = []
    for done, case in enumerate(cases):
        with case.limits():
            case.work(1)
            one = timed(case, 1).seconds
            if one < case.least_s:  # a single piece is too short to tell how many there should be
                few = max(1, math.ceil(min(case.least_s / one, 1000.0) / 4))
                one = timed(case, few).seconds / few
        repeats.append(max(1, math.ceil(min(case.least_s / one, 1e5))))
        if report is not None:
            report(_per_mille(clock() - start, seconds, done / (len(cases) * (FEWEST + 2))), 1000)
    passes: list[list[Pass]] = [[] for _ in cases]
    for turn in range(MOST):
        missing = [max(ENOUGH - sum(one.quiet for one in found), 0) for found in passes]
        if turn >= FEWEST and (not any(missing) or clock() - start > seconds):
            break
        for place, case in enumerate(cases):
            if missing[place] == 0 or (turn > 0 and clock() - start > _PATIENCE * seconds):
                continue
            with case.limits():
                passes[place].append(timed(case, repeats[place]))
            if report is not None:
                share = min((turn + place / len(cases) + 2) / (FEWEST + 2), 1.0)
                report(_per_mille(clock() - start, seconds, share), 1000)
    return [summary(found, repeat) for found, repeat in zip(passes, repeats, strict=True)]


def _per_mille(spent: float, seconds: float, share: float) -> int:
    """How far it is: what is spent of the time, unless the fewest passes take longer."""
    return int(1000 * min(spent / seconds, share))
