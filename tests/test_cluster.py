"""Sweeps on Dask: the same bits as in one process, also when workers are killed; and what is refused."""

import dataclasses
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import xarray as xr
from distributed import LocalCluster

from perfmodel.errors import PerfModelError
from perfmodel.sweeps import cluster, identity
from perfmodel.sweeps.api import run_sweep
from perfmodel.sweeps.executor import Schedule
from perfmodel.sweeps.request import Request

AXES = {"gpu_experts": [2, 8], "link.bandwidth_gb_per_s": "16:64:50", "link.latency_us": "0.1:10:401:log"}
SMALLEST = 0.001  # memory in gb, for many small blocks
SCHEDULE = Schedule(1000, 3, 2)


def local_cluster(workers: int) -> Any:
    """A cluster that is not the sweep's own."""
    return LocalCluster(
        n_workers=workers, threads_per_worker=1, dashboard_address="localhost:0", silence_logs=logging.CRITICAL + 1
    )


@pytest.fixture(scope="module")
def request_() -> Request:
    """Two policies, for one of which half of the plans do not fit; dozens of blocks in the smallest memory."""
    return Request.of(policy=["monde", "context-aware:mean_bits=3"], prompt=8, output=8, axes=AXES)


@pytest.fixture(scope="module")
def expected(request_: Request) -> xr.Dataset:
    """The sweep in one process."""
    return run_sweep(request_, threads=1, progress=False)


@pytest.fixture(scope="module")
def workers() -> Iterator[Any]:
    """Two worker processes."""
    with local_cluster(2) as found:
        yield found


def test_worker_processes_here(request_: Request, expected: xr.Dataset, capfd: pytest.CaptureFixture[str]) -> None:
    found = run_sweep(request_, dask=True, threads=2, memory_gb=SMALLEST, progress=False)
    assert found.identical(expected)
    assert capfd.readouterr() == ("", "")


def test_killed_workers(
    request_: Request, expected: xr.Dataset, workers: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    killed: list[int] = []

    def kill(done: int, total: int) -> None:
        # First one of the workers, and later every one, with all that they hold.
        if done and not killed:
            some = [workers.workers[0]]
        elif done > total / 2 and len(killed) == 1:
            some = list(workers.workers.values())
        else:
            return
        for nanny in some:
            os.kill(nanny.pid, signal.SIGKILL)
            killed.append(nanny.pid)

    out = tmp_path / "a.zarr"
    found = run_sweep(request_, dask=workers.scheduler_address, out=out, memory_gb=SMALLEST, progress=kill)
    assert len(killed) == 3
    assert found.identical(expected)
    out_text, err_text = capfd.readouterr()
    # A busy machine is slow to start the next worker, and the sweep may say that it waits for one.
    remarks = ("unresponsive", "waiting up to")
    said = [line for line in err_text.splitlines() if not any(one in line for one in remarks)]
    assert (out_text, said) == ("", [])


def test_interrupted_and_resumed_elsewhere(
    request_: Request, expected: xr.Dataset, workers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(done: int, total: int) -> None:
        if done > total / 2:
            raise KeyboardInterrupt

    out = tmp_path / "a.zarr"
    with pytest.raises(KeyboardInterrupt):
        run_sweep(request_, dask=workers.scheduler_address, out=out, memory_gb=SMALLEST, progress=stop)
    priced: list[int] = []
    price = Request.price

    def counted(self: Request, block: Any) -> Any:
        priced.append(block.size)
        return price(self, block)

    monkeypatch.setattr(Request, "price", counted)
    assert run_sweep(request_, out=out, resume=True, progress=False).identical(expected)
    assert 0 < sum(priced) < request_.design.size / 2


def test_at_most_so_many_blocks_are_handed_out(request_: Request, workers: Any) -> None:
    blocks = iter(request_.design.blocks(1000))
    taken = 0

    def counted() -> Iterator[Any]:
        nonlocal taken
        for block in blocks:
            taken += 1
            yield block

    results = cluster.priced_on_cluster(request_, counted(), workers.scheduler_address, SCHEDULE)
    for done, _ in enumerate(results, start=1):
        assert taken <= done + 2 * 2  # two a worker thread
    assert taken == len(request_.design.blocks(1000))


def test_errors_of_a_block_come_back(request_: Request, workers: Any) -> None:
    outside = dataclasses.replace(request_.design.blocks(1000)[0], slices=(slice(0, 1),))
    with pytest.raises(ValueError, match="zip") as caught:
        list(cluster.priced_on_cluster(request_, [outside], workers.scheduler_address, SCHEDULE))
    assert not isinstance(caught.value, PerfModelError)


@pytest.mark.parametrize("name", ["perfmodel", "numba", "numpy", "program"])
def test_workers_with_another_program(request_: Request, name: str) -> None:
    block = request_.design.blocks(1000)[0]
    own = {**identity.VERSIONS, "program": identity.program_hash()}
    words = "other source code" if name == "program" else rf"a worker has {name} .*, and the sweep is of {name} 0\.0\.0"
    with pytest.raises(PerfModelError, match=words):
        cluster._price(b"packed by another program", block, {**own, name: "0.0.0"})
    assert cluster._price(pickle.dumps(request_), block, own).values["tpot_mean_s"].shape == block.shape


def test_a_cluster_that_dies(request_: Request, tmp_path: Path, expected: xr.Dataset) -> None:
    out = tmp_path / "a.zarr"
    with local_cluster(1) as own:

        def close(done: int, _: int) -> None:
            if done:
                own.close()

        with pytest.raises(PerfModelError, match="dask: the cluster gave up"):
            run_sweep(request_, dask=own.scheduler_address, out=out, memory_gb=SMALLEST, progress=close)
    assert run_sweep(request_, out=out, resume=True, progress=False).identical(expected)


def test_a_scheduler_that_is_killed(tmp_path: Path, expected: xr.Dataset, request_: Request) -> None:
    out = tmp_path / "a.zarr"
    found = subprocess.run(
        [sys.executable, "-c", KILLED_SCHEDULER, str(out)], capture_output=True, text=True, check=False
    )
    assert found.returncode == 2, found.stderr
    assert found.stderr.startswith("perfmodel: error: dask: the cluster gave up (")
    assert found.stderr.count("\n") == 1
    assert run_sweep(request_, out=out, resume=True, progress=False).identical(expected)


#: Runs the sweep above on a scheduler in another process, which is killed after the first block.
KILLED_SCHEDULER = f"""
import subprocess, sys
from perfmodel.cli.base import say
from perfmodel.sweeps.api import run_sweep
from perfmodel.sweeps.request import Request

if __name__ == "__main__":
    quiet = dict(stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    options = ["--no-dashboard", "--host", "127.0.0.1"]
    command = [sys.executable, "-m", "distributed.cli.dask_scheduler", "--port", "0", *options]
    scheduler = subprocess.Popen(command, **quiet)
    address = next(line.split()[-1] for line in scheduler.stderr if "Scheduler at:" in line)
    command = [sys.executable, "-m", "distributed.cli.dask_worker", address, "--no-nanny", "--nthreads", "2", *options]
    worker = subprocess.Popen(command, **quiet)
    request = Request.of(policy=["monde", "context-aware:mean_bits=3"], prompt=8, output=8, axes={AXES!r})
    kill = lambda done, _: scheduler.kill() if done else None
    try:
        run_sweep(request, dask=address, out=sys.argv[1], memory_gb={SMALLEST}, progress=kill)
    except ValueError as error:
        say(f"perfmodel: error: {{error}}")
        sys.exit(2)
    finally:
        for process in (worker, scheduler):
            process.kill()
            process.communicate()
"""


def test_a_scheduler_without_workers(
    request_: Request, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cluster, "_LONGEST_ALONE_S", 0.2)
    monkeypatch.setattr(cluster, "_ASK_EVERY_S", 0.05)
    with local_cluster(0) as alone:
        address = alone.scheduler_address
        with pytest.raises(PerfModelError, match=r"had no workers for 0\.2 s; start some with dask worker tcp://"):
            run_sweep(request_, dask=address, out=tmp_path / "a.zarr", progress=False)
    assert capfd.readouterr().err == f"dask {address}: the scheduler has no workers; waiting up to 0.2 s for one\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "address",
    ["nonsense", "", "127.0.0.1", "foo://127.0.0.1:1", "tls://127.0.0.1:1", "tcp://[::1", "tcp://127.0.0.1:x"],
)
def test_bad_addresses(address: str, request_: Request) -> None:
    with pytest.raises(PerfModelError, match="no scheduler answers there") as caught:
        run_sweep(request_, dask=address, progress=False)
    assert "\n" not in str(caught.value)


def test_nothing_or_something_else_listens(request_: Request, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "_PATIENCE_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        def answer() -> None:
            other, _ = server.accept()
            other.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            other.close()

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(PerfModelError, match="no scheduler answers there"):
            run_sweep(request_, dask=f"tcp://127.0.0.1:{port}", progress=False)
        thread.join()
    with pytest.raises(PerfModelError, match="no scheduler answers there"):
        run_sweep(request_, dask=f"127.0.0.1:{port}", progress=False)


def test_a_worker_is_no_scheduler(request_: Request, workers: Any) -> None:
    address = next(iter(workers.workers.values())).worker_address
    with pytest.raises(PerfModelError, match="found a worker, allowed the address of a scheduler"):
        run_sweep(request_, dask=address, progress=False)


def test_without_dask(request_: Request, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(PerfModelError, match=r"dask: not installed .* pip install 'perfmodel\[cluster\]'"):
        run_sweep(request_, dask=True, progress=False)
