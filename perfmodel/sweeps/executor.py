"""Blocks of a sweep to arrays: how large a block may be, and which of them are in work at once.

What a block holds follows from the request and its place alone, so neither the size of blocks nor the number of
threads changes a bit of the result.
"""

import itertools
import math
import os
from collections import deque
from collections.abc import Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from perfmodel.evaluation import metric
from perfmodel.sweeps.design import HARDWARE, Block
from perfmodel.sweeps.request import Priced, Request

#: Blocks with their results, as they are done; to be closed by whoever stops early.
Results = Generator[tuple[Block, Priced], None, None]

#: A block this large costs little beside its points; larger ones only fill memory.
_MOST_POINTS = 2**20
#: Points whose every token is summed take far longer each, and progress should still be seen.
_MOST_POINTS_BY_TOKENS = 2**14
_FEWEST_POINTS = 2**10
#: Plans take longer than points, and all plans of a block are lost when it is interrupted.
_MOST_PLANS = 2**8
#: Blocks a thread, so that all threads finish together.
_BLOCKS_A_THREAD = 4
#: Arrays of a block beside its results: every varying value before, while and after it is put in order.
_COPIES = 4


class Schedule(NamedTuple):
    """How a sweep is worked on.

    points_per_block : about this many. in_flight : blocks whose arrays are alive at once. threads : that compute.
    """

    points_per_block: int
    in_flight: int
    threads: int


def cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def plan_schedule(
    request: Request, threads: int | None, memory_gb: float, points_per_block: int | None = None
) -> Schedule:
    """Blocks and threads within a memory budget.

    Parameters
    ----------
    threads : at most this many; by default one a core.
    memory_gb : for arrays in work [gb]; libraries, plans and a result kept in memory come on top.
    points_per_block : of a sweep that goes on; then only the number of threads follows from the budget.
    """
    wanted = cores() if threads is None else threads
    budget = memory_gb * 1e9
    point = _bytes_per_point(request)
    if points_per_block is None:
        # One block more than threads: the one that is being written.
        fits = int(budget / (point * (wanted + 1)))
        even = -(-request.design.size // (_BLOCKS_A_THREAD * wanted)) if wanted > 1 else request.design.size
        by_tokens = any(metric(name).family in ("percentile", "prefill") for name in request.metrics)
        most = _MOST_POINTS_BY_TOKENS if by_tokens else _MOST_POINTS
        one_plan = math.prod(dim.size for dim in request.design.dims if dim.group == HARDWARE)
        points_per_block = min(max(min(fits, even, most), _FEWEST_POINTS), _MOST_PLANS * one_plan)
    in_flight = max(min(int(budget / (point * points_per_block)), wanted + 1), 1)
    return Schedule(points_per_block, in_flight, min(wanted, in_flight))


def _bytes_per_point(request: Request) -> int:
    axes = sum(len(dim.axes) for dim in request.design.dims)
    return 8 * (_COPIES * axes + 3 * len(request.metrics) + 2)


def priced_in_threads(request: Request, blocks: Iterable[Block], schedule: Schedule) -> Results:
    """Blocks with their results, in order; at most ``schedule.in_flight`` are computed or waiting to be taken."""
    if schedule.threads == 1:
        for block in blocks:
            yield block, request.price(block)
        return
    waiting = iter(blocks)
    running: deque[tuple[Block, Future[Priced]]] = deque()
    with ThreadPoolExecutor(schedule.threads, thread_name_prefix="perfmodel-sweep") as pool:
        try:
            while True:
                for block in itertools.islice(waiting, schedule.in_flight - len(running)):
                    running.append((block, pool.submit(request.price, block)))
                if not running:
                    return
                block, future = running.popleft()
                yield block, future.result()
        finally:
            for _, future in running:
                future.cancel()
