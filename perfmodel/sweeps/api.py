"""Sweeps from start to result: blocks priced here or on a cluster, kept in memory or written as they are done."""

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from perfmodel import progress
from perfmodel.errors import PerfModelError
from perfmodel.hardware.base import shown
from perfmodel.hardware.files import path_text
from perfmodel.routing.replay import BatchOf
from perfmodel.scenario.numbers import plain, real, whole
from perfmodel.sweeps import cluster
from perfmodel.sweeps.check import check_disk, check_inputs, check_memory
from perfmodel.sweeps.dataset import finish, open_dataset, save, template
from perfmodel.sweeps.design import Block
from perfmodel.sweeps.executor import Results, Schedule, plan_schedule, priced_in_threads
from perfmodel.sweeps.lock import claim
from perfmodel.sweeps.outputs import NETCDF, ZARR, check_output
from perfmodel.sweeps.request import DEFAULT_METRICS, DTypeName, Request
from perfmodel.sweeps.store import merged, open_store

if TYPE_CHECKING:
    import xarray as xr


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
    batch: int = 1,
    batch_of: BatchOf = "sequences",
    micro_batch: int | None = None,
    layers: Literal["cycle"] | None = None,
    losses: Any = None,
    engine: Any = None,
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
    model, system, trace : names, paths or objects; by default mixtral-8x7b, h100-cxl2-ndp and the bundled recording.
    policy : one or several, as texts or objects; by default the published systems that run on the system.
    prompt, output : tokens of every sequence [1]; by default the recorded lengths.
    batch, batch_of, micro_batch : tokens of a decode step, and of a pass of the prefill, as in ``evaluate``.
    engine : inference engine of every system, by name, path or object; ``none`` for no engine, None for its own.
    layers : ``"cycle"`` to replay a trace that has another number of layers.
    losses : loss table: a path or an object; by default the bundled one. As an axis it is called ``loss``.
    axes : values by axis: a list, or a text such as ``"16:128:8"`` (start:stop:count, both ends included) or
        ``"1:1000:31:log"``. Axes are dotted names: any number of the system spec (``link.bandwidth_gb_per_s``), any
        option of a policy (``policy.mean_bits``), ``workload.prompt``, ``workload.output``, ``workload.batch``,
        ``workload.micro_batch``, ``policy``, ``model``, ``trace``, ``system`` and ``loss``.
    zip : axes that vary together instead of being combined: ``"a,b"``, or several such groups.
    cases : a table of points: a .csv or .parquet file, a DataFrame, or columns by axis.
    sample : ``"sobol:1024"`` or ``"lhs:1000:seed"``: points drawn from axes given as ``"low:high[:log]"``.
    metrics : names of ``evaluation.METRICS``. dtype : of the result, ``"float64"`` or ``"float32"``.
    out : file to write: .zarr, .nc, .csv or .parquet. A .zarr output is written block by block, may be larger than
        memory, and keeps what is finished when the process dies; the dataset returned is then read from it on demand.
    resume : go on with an unfinished .zarr output. overwrite : throw an unfinished one away.
    dask : True for worker processes on this machine, or the address of a scheduler.
    threads : that compute, or worker processes on this machine; by default one a core.
    memory_gb : for blocks in work [gb]; libraries, plans and a result kept in memory come on top.
    progress : None for a bar where standard error is a terminal, True for a bar, False for none; or a function that
        is called with the points that are done and all points.

    Returns
    -------
    A dataset with one dimension an axis, ``policy`` among them, units in the attributes, and provenance.

    Raises
    ------
    PerfModelError : anything unknown, out of range or contradictory; or no point at all can be priced.
    """
    request = Request.of(
        model, system, trace, policy, axes, zip=zip, cases=cases, sample=sample, metrics=metrics, prompt=prompt,
        output=output, batch=batch, batch_of=batch_of, micro_batch=micro_batch, layers=layers, losses=losses,
        engine=engine, dtype=dtype,
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
    path = _checked_output(out, resume, overwrite)
    _check_progress(progress)
    engine = _engine(dask, threads, memory_gb)
    streamed = path is not None and path.suffix == ZARR
    check_memory(asked, 0 if streamed else 2 if path is not None and path.suffix == NETCDF else 1)
    if path is not None and streamed:
        check_disk(asked, path)
    check_inputs(asked)
    if path is not None and streamed:
        _to_store(asked, path.resolve(), engine, progress, resume=resume, overwrite=overwrite)
        return open_dataset(path)
    dataset = _in_memory(asked, engine, progress)
    if path is not None:
        save(dataset, path)
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
        return cluster.priced_on_cluster(request, blocks, self.where, schedule)


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
    return finish(dataset, request, merged(infeasible))


def _to_store(request: Request, path: Path, engine: _Engine, show: Any, *, resume: bool, overwrite: bool) -> None:
    with claim(path):
        store = open_store(
            path, request, lambda: engine.schedule(request).points_per_block, resume=resume, overwrite=overwrite
        )
        if store.complete:
            return
        schedule = engine.schedule(request, store.points_per_block)
        done = sum(store.blocks[number].size for number in store.done)
        try:
            with (
                _reporting(show, done, request.design.size) as report,
                contextlib.closing(engine.priced(request, store.pending, schedule)) as results,
            ):
                for block, priced in results:
                    store.write(block, priced)
                    report(block.size)
            store.close()
        except BaseException:
            store.give_up()
            raise


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


def _check_progress(given: object) -> None:
    if not (given is None or isinstance(given, bool) or progress.is_report(given)):
        raise PerfModelError(f"progress: found {shown(given)}, allowed None, True, False or a function")


def _checked_output(out: Any, resume: bool, overwrite: bool) -> Path | None:
    """Where to write, checked before any work is done."""
    for name, flag in (("resume", resume), ("overwrite", overwrite)):
        if not isinstance(flag, bool | np.bool_):
            raise PerfModelError(f"{name}: found {shown(flag)}, allowed True or False")
    if resume and overwrite:
        raise PerfModelError("sweep: resume and overwrite exclude each other; give one of them")
    word = "resume" if resume else "overwrite"
    if out is None:
        if resume or overwrite:
            raise PerfModelError(f"sweep: {word} needs an output to {word}; give a .zarr output")
        return None
    path = check_output(out)
    if (resume or overwrite) and path.suffix != ZARR:
        raise PerfModelError(f"{path_text(path)}: {word} is for .zarr outputs, which are written block by block")
    return path


def _engine(dask: Any, threads: Any, memory_gb: Any) -> _Engine:
    count, budget = whole(threads), real(memory_gb)
    if threads is not None and (count is None or not 1 <= count <= 1024):
        raise PerfModelError(f"threads: found {shown(plain(threads))}, allowed a whole number from 1 to 1024")
    if budget is None or not 0.001 <= budget <= 1e6:
        raise PerfModelError(f"memory_gb: found {shown(plain(memory_gb))}, allowed a number from 0.001 to 1e6")
    if dask is None or dask is False:
        return _Engine(count, budget, None)
    where = cluster.LOCAL if dask is True else dask
    if not isinstance(where, str):
        raise PerfModelError(f"dask: found {shown(dask)}, allowed True, or the address of a scheduler")
    cluster.available()
    return _Engine(count, budget, where)
