"""Blocks of a sweep on a Dask cluster: the same numbers as in one process.

A block is a pure function of the request and of its place in the design, so whatever a lost worker was doing is done
again elsewhere. The request itself is the result of a task, not data that lives on one worker: a worker that comes
back gets it anew. The process that asked writes the results.
"""

import asyncio
import contextlib
import itertools
import logging
import pickle
import warnings
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from perfmodel import __version__
from perfmodel.errors import PerfModelError
from perfmodel.sweeps.design import Block
from perfmodel.sweeps.executor import Results
from perfmodel.sweeps.request import Priced, Request

#: Where a cluster of this machine's own is asked for.
LOCAL = "local"
#: Seconds that a scheduler has to answer.
_PATIENCE_S = 4.0


def available() -> None:
    """Refuse where Dask is not installed."""
    try:
        import distributed  # noqa: F401
    except ImportError as error:
        raise PerfModelError(
            f"dask: not installed ({error}); install it with pip install 'perfmodel[cluster]'"
        ) from None


def priced_on_cluster(
    request: Request, blocks: Iterable[Block], where: str, workers: int, in_flight: int | None = None
) -> Results:
    """Blocks with their results, in the order in which they are done.

    Parameters
    ----------
    where : `LOCAL` for worker processes on this machine, or the address of a scheduler.
    workers : worker processes of a local cluster, one block at a time each.
    in_flight : most blocks handed out at once; by default two a worker thread.

    Raises
    ------
    PerfModelError : Dask is missing, nothing answers at the address, or the cluster died.
    """
    available()
    try:
        with _client(where, workers) as client:
            limit = in_flight or max(2 * sum(client.nthreads().values()), 2)
            yield from _stream(client, request, blocks, limit)
    except ImportError as error:
        raise PerfModelError(f"dask: a worker lacks what it needs ({_first_line(error)})") from None
    except Exception as error:
        if type(error).__module__.partition(".")[0] not in ("distributed", "concurrent", "asyncio", "tornado"):
            raise
        raise PerfModelError(f"dask: the cluster gave up ({_first_line(error)})") from None


def _stream(client: Any, request: Request, blocks: Iterable[Block], limit: int) -> Results:
    import distributed

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the size of the request
        shared = client.submit(pickle.loads, pickle.dumps(request), pure=False)
    waiting = iter(blocks)
    handed_out: dict[str, Block] = {}

    def hand_out(most: int) -> list[Any]:
        futures = []
        for block in itertools.islice(waiting, most):
            future = client.submit(_price, shared, block, __version__, pure=False)
            handed_out[future.key] = block
            futures.append(future)
        return futures

    finished = _untyped(distributed).as_completed(hand_out(limit), loop=client.loop)
    for future in finished:
        priced = future.result()
        block = handed_out.pop(future.key)
        future.release()  # or its worker would keep the arrays
        for following in hand_out(1):
            finished.add(following)
        yield block, priced


def _price(request: Request, block: Block, version: str) -> Priced:
    if version != __version__:
        raise PerfModelError(f"dask: a worker has perfmodel {__version__}, and the sweep is of perfmodel {version}")
    return request.price(block)


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
    loggers = [logging.getLogger(name) for name in ("distributed", "tornado", "asyncio")]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
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
