"""Blocks of a sweep on a Dask cluster: the same numbers as in one process.

A block is a pure function of the request and of its place in the design, so whatever a lost worker was doing is done
again elsewhere. The request itself is the result of a task, not data that lives on one worker: a worker that comes
back gets it anew. The process that asked writes the results.
"""

import asyncio
import contextlib
import functools
import gc
import itertools
import logging
import math
import pickle
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from perfmodel.errors import PerfModelError
from perfmodel.progress import tell
from perfmodel.sweeps.design import Block
from perfmodel.sweeps.executor import Results, Schedule
from perfmodel.sweeps.identity import VERSIONS, program_hash
from perfmodel.sweeps.request import Priced, Request

#: Where a cluster of this machine's own is asked for.
LOCAL = "local"
#: Seconds that a scheduler has to answer.
_PATIENCE_S = 4.0
#: Seconds that a scheduler may be without workers.
_LONGEST_ALONE_S = 60.0
#: Seconds between two looks at the workers, and at the blocks.
_ASK_EVERY_S, _LOOK_EVERY_S = 1.0, 0.005


def available() -> None:
    """Refuse where Dask is not installed."""
    try:
        import distributed  # noqa: F401
    except ImportError as error:
        raise PerfModelError(
            f"dask: not installed ({error}); install it with pip install 'perfmodel[cluster]'"
        ) from None


def priced_on_cluster(request: Request, blocks: Iterable[Block], where: str, schedule: Schedule) -> Results:
    """Blocks with their results, in the order in which they are done.

    Parameters
    ----------
    where : `LOCAL` for worker processes on this machine, or the address of a scheduler.
    schedule : how many worker processes a cluster on this machine has, and how many blocks are handed out at once,
        since all memory is of this machine then. Elsewhere two blocks a worker thread are handed out.

    Raises
    ------
    PerfModelError : Dask is missing, nothing answers at the address, no worker comes, or the cluster died.
    """
    available()
    try:
        with _client(where, schedule.threads) as client:
            yield from _stream(client, request, blocks, _Crew(client, where, schedule))
    except ImportError as error:
        raise PerfModelError(f"dask: a worker lacks what it needs ({_first_line(error)})") from None
    except Exception as error:
        if type(error).__module__.partition(".")[0] not in ("distributed", "concurrent", "asyncio", "tornado"):
            raise
        raise PerfModelError(f"dask: the cluster gave up ({_first_line(error)})") from None


class _Crew:
    """The workers of a cluster, asked for now and then: how many blocks they may have, and whether there are any."""

    def __init__(self, client: Any, where: str, schedule: Schedule) -> None:
        self._client, self._where = client, where
        self._most = schedule.in_flight if where == LOCAL else None
        self._asked = -math.inf
        self._threads = 0
        self._alone_since: float | None = None

    def room(self) -> int:
        """Most blocks to hand out; PerfModelError when there is no worker for too long."""
        now = time.monotonic()
        if now - self._asked >= _ASK_EVERY_S:
            self._asked = now
            try:
                self._threads = sum(self._client.nthreads().values())
            except OSError as error:
                raise PerfModelError(f"dask: the cluster gave up ({_first_line(error)})") from None
            self._check_alone(now)
        return self._most or max(2 * self._threads, 1)

    def _check_alone(self, now: float) -> None:
        if self._threads:
            self._alone_since = None
        elif self._alone_since is None:
            self._alone_since = now
            tell(f"dask {self._where}: the scheduler has no workers; waiting up to {_LONGEST_ALONE_S:g} s for one")
        elif now - self._alone_since >= _LONGEST_ALONE_S:
            raise PerfModelError(
                f"dask {self._where}: the scheduler had no workers for {_LONGEST_ALONE_S:g} s; start some with"
                f" dask worker {self._where}"
            )


def _stream(client: Any, request: Request, blocks: Iterable[Block], crew: _Crew) -> Results:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the size of the request
        packed = client.submit(bytes, pickle.dumps(request), pure=False)
    program = {**VERSIONS, "program": program_hash()}
    waiting = iter(blocks)
    handed_out: dict[Any, Block] = {}
    while True:
        for block in itertools.islice(waiting, max(crew.room() - len(handed_out), 0)):
            handed_out[client.submit(_price, packed, block, program, pure=False)] = block
        if not handed_out:
            return
        # The state of a future is known here. Waiting for it would leave something that waits when the cluster dies.
        finished = [future for future in handed_out if future.done()]
        for future in finished:
            priced = future.result()
            block = handed_out.pop(future)
            future.release()  # or its worker would keep the arrays
            yield block, priced
        if not finished:
            time.sleep(_LOOK_EVERY_S)


def _price(packed: bytes, block: Block, program: Mapping[str, str]) -> Priced:
    """A block on a worker; nothing is unpacked that another program packed."""
    own = {**VERSIONS, "program": program_hash()}
    differ = [name for name in program if program[name] != own.get(name)]
    if differ == ["program"]:
        raise PerfModelError("dask: a worker has other source code of perfmodel than the one that asks")
    for name in differ:
        raise PerfModelError(f"dask: a worker has {name} {own.get(name)}, and the sweep is of {name} {program[name]}")
    return _unpacked(packed).price(block)


@functools.lru_cache(maxsize=1)
def _unpacked(packed: bytes) -> Request:
    """The request, once a worker, because it remembers its plans."""
    found: Request = pickle.loads(packed)
    return found


@contextlib.contextmanager
def _client(where: str, workers: int) -> Iterator[Any]:
    import distributed

    with contextlib.ExitStack() as stack:
        stack.enter_context(_silence())
        if where == LOCAL:
            address: Any = stack.enter_context(_workers_here(workers))
        else:
            _check(where)
            address = where
        yield stack.enter_context(_untyped(distributed).Client(address, set_as_default=False, timeout=_PATIENCE_S))


def _workers_here(workers: int) -> Any:
    """A cluster of worker processes on this machine."""
    import distributed

    try:
        # No dashboard, and any free port, since the usual one may be taken.
        return _untyped(distributed).LocalCluster(
            n_workers=workers,
            threads_per_worker=1,
            processes=True,
            dashboard_address="localhost:0",
            scheduler_kwargs={"dashboard": False},
            silence_logs=logging.CRITICAL + 1,
        )
    except (RuntimeError, OSError) as error:
        raise PerfModelError(
            f"dask: worker processes do not start ({_first_line(error)}); a script that asks for them runs its code"
            " under if __name__ == '__main__':"
        ) from None


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Losing a worker is dealt with, so Dask's own remarks about it are not for the user."""
    known = list(logging.Logger.manager.loggerDict)
    # Some of them have levels of their own.
    names = [name for name in known if name.partition(".")[0] in ("distributed", "tornado", "asyncio")]
    loggers = [logging.getLogger(name) for name in names]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        gc.collect()  # what the client left behind would have its say later
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)


def _check(address: str) -> None:
    """Refuse what is no scheduler before a client waits for it."""

    async def ask() -> dict[str, Any]:
        import distributed.core

        async with _untyped(distributed.core).rpc(address, timeout=_PATIENCE_S) as other:
            return dict(await other.identity())

    def answer() -> dict[str, Any]:
        return asyncio.run(asyncio.wait_for(ask(), _PATIENCE_S))

    try:
        # In a thread of its own, since a notebook already runs an event loop in this one.
        with ThreadPoolExecutor(1) as pool:
            kind = pool.submit(answer).result().get("type")
    except Exception as error:  # what answers there may be anything
        raise PerfModelError(
            f"dask {address}: no scheduler answers there ({_first_line(error)}); allowed host:port or"
            " tcp://host:port of a running dask scheduler, or no address for a cluster on this machine"
        ) from None
    if kind != "Scheduler":
        raise PerfModelError(f"dask {address}: found a {str(kind).lower()}, allowed the address of a scheduler")


def _untyped(module: Any) -> Any:
    """A module whose functions have no types."""
    return module


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:200]
