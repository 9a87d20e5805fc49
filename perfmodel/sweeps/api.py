"""Sweeps from start to result: blocks priced here or on a cluster, kept in memory or written as they are done."""

import contextlib
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from perfmodel.errors import PerfModelError
from perfmodel.hardware.base import shown
from perfmodel.sweeps import cluster, progress
from perfmodel.sweeps.dataset import check_output, finish, open_dataset, save, template
from perfmodel.sweeps.design import Block
from perfmodel.sweeps.executor import Results, Schedule, check_result_fits, cores, plan_schedule, priced_in_threads
from perfmodel.sweeps.lock import claim
from perfmodel.sweeps.request import DEFAULT_METRICS, DTypeName, Request
from perfmodel.sweeps.store import open_store

if TYPE_CHECKING:
    import xarray as xr

_STREAMED = ".zarr"


def sweep(
    model: Any = None,
    system: Any = None,
    trace: Any = None,
    policy: Any = None,
    axes: Mapping[str, Any] | None = None,
    *,
    zip: Any = (),  # noqa: A002
    cases: Any = None,
    sample: Any = None,
    metrics: str | Sequence[str] = DEFAULT_METRICS,
    prompt: int | None = None,
    output: int | None = None,
    layers: Literal["cycle"] | None = None,
    losses: Any = None,
    dtype: DTypeName = "float64",
    out: str | os.PathLike[str] | None = None,
    resume: bool = False,
    overwrite: bool = False,
    dask: Any = None,
    threads: int | None = None,
    memory_gb: float = 1.0,
    progress: bool | Callable[[int, int], None] | None = None,
) -> "xr.Dataset":
    """Price every combination of axis values: many what-ifs at once, as a labelled dataset.

    Parameters
    ----------
    model, system, trace, policy, prompt, output, layers, losses : what is priced, as in ``Scenario.of``; by default
        the published models and policies.
    axes : values by axis: a list, or a text such as ``"16:128:8"`` (start:stop:count, both ends included) or
        ``"1:1000:31:log"``. Axes are dotted names: any number of the system spec (``link.bandwidth_gb_per_s``), any
        option of a policy (``policy.mean_bits``), ``workload.prompt``, ``workload.output``, ``policy``, ``model``,
        ``trace``, ``system`` and ``loss``.
    zip : axes that vary together instead of being combined: ``"a,b"``, or several such groups.
    cases : a table of points: a .csv or .parquet file, a DataFrame, or columns by axis.
    sample : ``"sobol:1024"`` or ``"lhs:1000:seed"``: points drawn from axes given as ``"low:high[:log]"``.
    metrics : names of ``evaluation.METRICS``. dtype : of the result, ``"float64"`` or ``"float32"``.
    out, resume, overwrite, dask, threads, memory_gb, progress : as in `run_sweep`.

    Returns
    -------
    A dataset with one dimension an axis, units in the attributes, and provenance.

    Raises
    ------
    PerfModelError : anything unknown, out of range or contradictory; or no point at all can be priced.
    """
    request = Request.of(
        model, system, trace, policy, axes, zip=zip, cases=cases, sample=sample, metrics=metrics, prompt=prompt,
        output=output, layers=layers, losses=losses, dtype=dtype,
    )  # fmt: skip
    return run_sweep(
        request, out=out, resume=resume, overwrite=overwrite, dask=dask, threads=threads, memory_gb=memory_gb,
        progress=progress,
    )  # fmt: skip


def run_sweep(
    request: Request | str | os.PathLike[str],
    *,
    out: str | os.PathLike[str] | None = None,
    resume: bool = False,
    overwrite: bool = False,
    dask: Any = None,
    threads: int | None = None,
    memory_gb: float = 1.0,
    progress: bool | Callable[[int, int], None] | None = None,
) -> "xr.Dataset":
    """Run a sweep that is described by a request, or by the path of its TOML file.

    Neither threads, memory, cluster nor interruptions change a bit of the result.

    Parameters
    ----------
    out : file to write: .zarr, .nc, .csv or .parquet. A .zarr output is written block by block, may be larger than
        memory, and keeps what is finished when the process dies; the dataset returned is then read from it on demand.
    resume : go on with an unfinished .zarr output. overwrite : throw an unfinished one away.
    dask : True for worker processes on this machine, or the address of a scheduler. A script that asks for worker
        processes needs the usual ``if __name__ == "__main__":``.
    threads : that compute, or worker processes on this machine; by default one a core.
    memory_gb : for blocks in work [gb]; libraries, plans and a result kept in memory come on top.
    progress : None for a bar where standard error is a terminal, True for a bar, False for none; or a function that
        is called with the points that are done and all points.

    Raises
    ------
    PerfModelError : bad arguments; an output that is in use, unfinished, of another sweep, or no sweep at all.
    """
    asked = Request.load(request) if isinstance(request, str | os.PathLike) else request
    if not isinstance(asked, Request):
        raise PerfModelError(f"sweep: found {shown(request)}, allowed a Request, or the path of a sweep file")
    target = _checked_output(out, resume, overwrite)
    engine = _engine(dask, threads, memory_gb)
    if target is not None and target.suffix == _STREAMED:
        return _to_store(asked, target, engine, progress, resume=resume, overwrite=overwrite)
    check_result_fits(asked)
    dataset = _in_memory(asked, engine, progress)
    if target is not None:
        save(dataset, target)
    return dataset


class _Engine:
    """What prices blocks: threads of this process, or a cluster."""

    def __init__(self, threads: int | None, memory_gb: float, where: str | None) -> None:
        self.threads, self.memory_gb, self.where = threads, memory_gb, where

    def schedule(self, request: Request, points_per_block: int | None = None) -> Schedule:
        return plan_schedule(request, self.threads, self.memory_gb, points_per_block)

    def priced(self, request: Request, blocks: Iterable[Block], schedule: Schedule) -> Results:
        if self.where is None:
            return priced_in_threads(request, blocks, schedule)
        return cluster.priced_on_cluster(request, blocks, self.where, self.threads or cores())


def _in_memory(request: Request, engine: _Engine, show: Any) -> "xr.Dataset":
    schedule = engine.schedule(request)
    shape, size = request.design.shape, request.design.size
    arrays = {name: np.empty(shape, dtype=request.dtype) for name in request.metrics}
    infeasible: dict[int, dict[str, int]] = {}
    blocks = request.design.blocks(schedule.points_per_block)
    with _reporting(show, 0, size) as report, contextlib.closing(engine.priced(request, blocks, schedule)) as results:
        for block, priced in results:
            for name, array in arrays.items():
                array[block.slices] = priced.values[name]
            infeasible[block.index] = priced.infeasible
            report(block.size)
    dataset = template(request)
    for name, array in arrays.items():
        dataset[name] = dataset[name].copy(data=array)
    return finish(dataset, request, _merged(infeasible))


def _to_store(
    request: Request, path: Path, engine: _Engine, show: Any, *, resume: bool, overwrite: bool
) -> "xr.Dataset":
    with claim(path):
        with _written(path):
            store = open_store(
                path, request, lambda: engine.schedule(request).points_per_block, resume=resume, overwrite=overwrite
            )
        if not store.complete:
            schedule = engine.schedule(request, store.points_per_block)
            done = sum(store.blocks[number].size for number in store.done)
            with (
                _reporting(show, done, request.design.size) as report,
                contextlib.closing(engine.priced(request, store.pending, schedule)) as results,
            ):
                for block, priced in results:
                    with _written(path):
                        store.write(block, priced)
                    report(block.size)
            with _written(path):
                store.close(_merged({number: line["infeasible"] for number, line in store.done.items()}))
    return open_dataset(path)


@contextlib.contextmanager
def _written(path: Path) -> Iterator[None]:
    """A disk that is full, or gone, in words."""
    try:
        yield
    except OSError as error:
        raise PerfModelError(
            f"{path}: cannot be written ({error.strerror or error}); what is finished is kept, go on with --resume"
        ) from None


def _merged(infeasible: Mapping[int, Mapping[str, int]]) -> dict[str, int]:
    """Counts of all blocks by reason; in the order of blocks, whatever the order in which they were done."""
    found: dict[str, int] = {}
    for number in sorted(infeasible):
        for reason, count in infeasible[number].items():
            found[reason] = found.get(reason, 0) + count
    return found


@contextlib.contextmanager
def _reporting(show: Any, done: int, total: int) -> Iterator[Callable[[int], None]]:
    """A function that is told the size of every finished block, and passes on how far the sweep is."""
    with contextlib.ExitStack() as stack:
        if show is None or isinstance(show, bool):
            visible = progress.watched() if show is None else show
            report = stack.enter_context(progress.bar("sweep")) if visible else None
        else:
            report = show
        so_far = done

        def advance(points: int) -> None:
            nonlocal so_far
            so_far += points
            if report is not None:
                report(so_far, total)

        advance(0)
        yield advance


def _checked_output(out: Any, resume: bool, overwrite: bool) -> Path | None:
    """Where to write, checked before any work is done."""
    if resume and overwrite:
        raise PerfModelError("sweep: resume and overwrite exclude each other; give one of them")
    word = "resume" if resume else "overwrite"
    if out is None:
        if resume or overwrite:
            raise PerfModelError(f"sweep: {word} needs an output to {word}; give a .zarr output")
        return None
    path = check_output(out)
    if (resume or overwrite) and path.suffix != _STREAMED:
        raise PerfModelError(f"{path}: {word} is for .zarr outputs, which are written block by block")
    try:
        target = path.resolve()
        nearest = next(folder for folder in target.parents if folder.exists())
        if not nearest.is_dir() or not os.access(nearest, os.W_OK):
            raise PerfModelError(f"{path}: {nearest} is not a folder that can be written")
        if path.suffix != _STREAMED and target.is_dir():
            raise PerfModelError(f"{path}: is a folder; give the name of a file")
    except (OSError, ValueError, RuntimeError) as error:
        if isinstance(error, PerfModelError):
            raise
        raise PerfModelError(f"{path}: not a usable name ({getattr(error, 'strerror', None) or error})") from None
    return target


def _engine(dask: Any, threads: Any, memory_gb: Any) -> _Engine:
    if threads is not None and (isinstance(threads, bool) or not isinstance(threads, int) or not 1 <= threads <= 1024):
        raise PerfModelError(f"threads: found {shown(threads)}, allowed a whole number from 1 to 1024")
    number = isinstance(memory_gb, int | float) and not isinstance(memory_gb, bool)
    if not number or not math.isfinite(memory_gb) or not 0.001 <= memory_gb <= 1e6:
        raise PerfModelError(f"memory_gb: found {shown(memory_gb)}, allowed a number from 0.001 to 1e6")
    if dask is None or dask is False:
        return _Engine(threads, float(memory_gb), None)
    where = cluster.LOCAL if dask is True else dask
    if not isinstance(where, str):
        raise PerfModelError(f"dask: found {shown(dask)}, allowed True, or the address of a scheduler")
    cluster.available()
    return _Engine(threads, float(memory_gb), where)
