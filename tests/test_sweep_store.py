"""Sweeps on disk: killed at any moment and resumed, guarded against other inputs and other writers, small in memory."""

import errno
import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr

from perfmodel.errors import PerfModelError
from perfmodel.sweeps import lock, store
from perfmodel.sweeps.api import run_sweep
from perfmodel.sweeps.dataset import MANIFEST, open_dataset
from perfmodel.sweeps.request import Request

SMALLEST = 0.001  # memory in gb, for many small blocks
AXES = {"gpu_experts": [2, 8], "link.bandwidth_gb_per_s": "16:64:50", "link.latency_us": "0.1:10:101:log"}
COMMON = {"policy": ["monde", "context-aware:mean_bits=3"], "prompt": 8, "output": 8}


def request_of(**changes: Any) -> Request:
    """Two policies, for one of which half of the plans do not fit; a dozen blocks in the smallest memory."""
    return Request.of(**{**COMMON, "axes": AXES, **changes})


#: Runs the sweep above in another process, which kills itself as ``moment`` says.
CHILD = f"""
import os, signal, sys
from pathlib import Path
from perfmodel.sweeps import store
from perfmodel.sweeps.api import run_sweep
from perfmodel.sweeps.request import Request

out, moment, number = sys.argv[1], sys.argv[2], int(sys.argv[3])
request = Request.of(axes={AXES!r}, **{COMMON!r})
die = lambda: os.kill(os.getpid(), signal.SIGKILL)
calls = 0

def count():
    global calls
    calls += 1
    return calls > number

def progress(done, total):
    if moment == "between" and done and count():
        die()

flush = store._flush
def killing(path):
    if moment == "journal" and path.name.startswith("c.") and count():
        die()  # the chunk is there, its line is not
    if moment == "chunk" and path.name.startswith("c.") and count():
        path.write_bytes(path.read_bytes()[:20])
        (path.parent / "c.0.abc.partial").write_bytes(b"half")
        die()
    if moment == "manifest" and path.suffix == ".json" and count():
        die()
    flush(path)
store._flush = killing

close = store.Store.close
def closing(self, infeasible):
    if moment == "close":
        die()
    close(self, infeasible)
store.Store.close = closing

run_sweep(request, out=out, memory_gb={SMALLEST}, threads=2, resume="resume" in sys.argv, progress=progress)
"""


def child(out: Path, moment: str, number: int = 0, *more: str) -> "subprocess.CompletedProcess[str]":
    """Run the sweep in a process of its own."""
    command = [sys.executable, "-c", CHILD, str(out), moment, str(number), *more]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def expected() -> xr.Dataset:
    """The sweep without any interruption."""
    return run_sweep(request_of(), threads=1, progress=False)


@pytest.fixture
def priced(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of the blocks that are priced from here on."""
    numbers: list[int] = []
    price = Request.price

    def counted(self: Request, block: Any) -> Any:
        numbers.append(block.index)
        return price(self, block)

    monkeypatch.setattr(Request, "price", counted)
    return numbers


def chunks(out: Path) -> dict[str, int]:
    """Chunk files and when they were written."""
    return {file.name: file.stat().st_mtime_ns for file in (out / "tpot_mean_s").glob("c.*")}


def test_streamed_equals_memory(tmp_path: Path, expected: xr.Dataset) -> None:
    found = run_sweep(request_of(), out=tmp_path / "a.zarr", memory_gb=SMALLEST, progress=False)
    assert found.identical(expected)
    # Any other reader gets the same, and no remarks.
    assert xr.open_zarr(tmp_path / "a.zarr", chunks=None).identical(expected)
    assert len(chunks(tmp_path / "a.zarr")) == 12
    assert [one.name for one in tmp_path.iterdir()] == ["a.zarr"]


def test_float32(tmp_path: Path, expected: xr.Dataset) -> None:
    found = run_sweep(request_of(dtype="float32"), out=tmp_path / "a.zarr", progress=False)
    assert found["tpot_mean_s"].dtype == np.float32
    np.testing.assert_array_equal(found["tpot_mean_s"], expected["tpot_mean_s"].astype(np.float32))


@pytest.mark.parametrize(
    ("moment", "number", "kept"), [("between", 3, 4), ("journal", 5, 5), ("chunk", 0, 0), ("close", 0, 99)]
)
def test_killed_and_resumed(
    moment: str, number: int, kept: int, tmp_path: Path, expected: xr.Dataset, priced: list[int]
) -> None:
    out = tmp_path / "a.zarr"
    killed = child(out, moment, number)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    with pytest.raises(PerfModelError, match=r"unfinished sweep; finish it with .* --resume"):
        open_dataset(out)
    before = chunks(out)
    found = run_sweep(request_of(), out=out, resume=True, progress=False)
    assert found.identical(expected)
    # What was finished is neither priced nor written again; the rest is, once.
    blocks = len(chunks(out))
    kept = min(kept, blocks)
    assert sorted(priced) == list(range(kept, blocks))
    after = chunks(out)
    assert sum(after[name] == time for name, time in before.items() if name in after) == kept
    assert not list(out.rglob("*.partial"))
    assert [one.name for one in tmp_path.iterdir()] == ["a.zarr"]


def test_killed_twice(tmp_path: Path, expected: xr.Dataset) -> None:
    out = tmp_path / "a.zarr"
    for number, more in ((2, []), (3, ["resume"]), (0, ["resume"])):
        assert child(out, "between", number, *more).returncode == -signal.SIGKILL
    assert run_sweep(request_of(), out=out, resume=True, progress=False).identical(expected)


def test_killed_before_anything_is_there(tmp_path: Path, expected: xr.Dataset) -> None:
    out = tmp_path / "a.zarr"
    assert child(out, "manifest").returncode == -signal.SIGKILL
    assert not out.exists()
    assert run_sweep(request_of(), out=out, resume=True, progress=False).identical(expected)
    assert [one.name for one in tmp_path.iterdir()] == ["a.zarr"]


def test_a_torn_journal_and_lost_chunks_are_made_again(tmp_path: Path, expected: xr.Dataset, priced: list[int]) -> None:
    out = tmp_path / "a.zarr"
    child(out, "between", 5)
    journal = out / store.JOURNAL
    lines = journal.read_bytes().splitlines(keepends=True)
    assert len(lines) == 6
    # The last line is cut off, one is no JSON, one speaks of a block that is not, and a chunk is gone.
    journal.write_bytes(lines[0] + b"\0\0\0\n" + lines[2] + b'{"block": 99999, "infeasible": {}}\n7\n' + lines[4][:-1])
    next(iter(sorted((out / "tpot_mean_s").glob("c.0.0.0*")))).unlink()
    found = run_sweep(request_of(), out=out, resume=True, progress=False)
    assert found.identical(expected)
    assert sorted(priced) == [0, 1, *range(3, len(chunks(out)))]


def test_resuming_what_is_complete_or_missing(tmp_path: Path, expected: xr.Dataset, priced: list[int]) -> None:
    out = tmp_path / "new" / "a.zarr"
    assert run_sweep(request_of(), out=out, resume=True, progress=False).identical(expected)
    times = {file: file.stat().st_mtime_ns for file in out.rglob("*")}
    priced.clear()
    assert run_sweep(request_of(), out=out, resume=True, progress=False).identical(expected)
    assert priced == []
    assert {file: file.stat().st_mtime_ns for file in out.rglob("*")} == times


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"output": 9}, "scenario.output: 8 there, 9 here"),
        ({"metrics": ["decode_s"]}, 'metrics: ["tpot_mean_s"] there, ["decode_s"] here'),
        ({"dtype": "float32"}, 'dtype: "float64" there, "float32" here'),
        ({"axes": {**AXES, "link.latency_us": [1.0]}}, 'link.latency_us: "0.1:10:101:log" there, [1.0] here'),
    ],
)
@pytest.mark.parametrize("complete", [True, False])
def test_other_inputs_are_not_resumed(changes: dict[str, Any], words: str, complete: bool, tmp_path: Path) -> None:
    out = tmp_path / "a.zarr"
    _make(out, complete)
    before = chunks(out)
    with pytest.raises(PerfModelError) as caught:
        run_sweep(request_of(**changes), out=out, resume=True, progress=False)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert chunks(out) == before


def test_changed_contents_are_not_resumed(tmp_path: Path) -> None:
    out = tmp_path / "a.zarr"
    _make(out, complete=False)
    manifest = json.loads((out / MANIFEST).read_text())
    (out / MANIFEST).write_text(json.dumps({**manifest, "key": "other"}))
    with pytest.raises(PerfModelError, match="its files or versions differ"):
        run_sweep(request_of(), out=out, resume=True, progress=False)


def _make(out: Path, complete: bool) -> None:
    """The sweep, whole or broken off after two blocks."""

    def stop(done: int, _: int) -> None:
        if not complete and done:
            raise KeyboardInterrupt

    try:
        run_sweep(request_of(), out=out, memory_gb=SMALLEST, threads=1, progress=stop)
    except KeyboardInterrupt:
        assert not complete


def test_unfinished_is_not_begun_anew_by_accident(tmp_path: Path, expected: xr.Dataset, priced: list[int]) -> None:
    out = tmp_path / "a.zarr"
    _make(out, complete=False)
    with pytest.raises(PerfModelError, match="go on with --resume, or begin anew with --overwrite"):
        run_sweep(request_of(), out=out, progress=False)
    priced.clear()
    assert run_sweep(request_of(), out=out, overwrite=True, memory_gb=SMALLEST, progress=False).identical(expected)
    assert sorted(priced) == list(range(len(chunks(out))))


def test_a_complete_sweep_is_replaced_only_by_a_complete_one(tmp_path: Path, expected: xr.Dataset) -> None:
    out = tmp_path / "a.zarr"
    _make(out, complete=True)
    other = request_of(output=9)

    def stop(done: int, _: int) -> None:
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_sweep(other, out=out, memory_gb=SMALLEST, progress=stop)
    aside = tmp_path / ".a.previous.zarr"
    assert open_dataset(aside).identical(expected)
    found = run_sweep(other, out=out, resume=True, progress=False)
    assert found.identical(run_sweep(other, progress=False))
    assert [one.name for one in tmp_path.iterdir()] == ["a.zarr"]


@pytest.mark.parametrize("flag", [{}, {"resume": True}, {"overwrite": True}])
@pytest.mark.parametrize("kind", ["file", "folder", "zarr", "manifest"])
def test_anything_else_is_left_alone(kind: str, flag: dict[str, bool], tmp_path: Path) -> None:
    out = tmp_path / "a.zarr"
    if kind == "file":
        out.write_text("precious")
    elif kind == "zarr":
        xr.Dataset({"x": ("n", [1.0, 2.0])}).to_zarr(out, zarr_format=3, consolidated=False)
    else:
        out.mkdir()
        (out / ("notes.txt" if kind == "folder" else MANIFEST)).write_text("precious")
    before = sorted((file, file.read_bytes()) for file in tmp_path.rglob("*") if file.is_file())
    with pytest.raises(PerfModelError, match="left alone"):
        run_sweep(request_of(), out=out, progress=False, **flag)
    assert sorted((file, file.read_bytes()) for file in tmp_path.rglob("*") if file.is_file()) == before


def test_a_damaged_store_is_named(tmp_path: Path) -> None:
    out = tmp_path / "a.zarr"
    _make(out, complete=False)
    (out / "tpot_mean_s" / "zarr.json").write_text("{")
    with pytest.raises(PerfModelError, match=r"damaged .* --overwrite"):
        run_sweep(request_of(), out=out, resume=True, progress=False)


def test_a_full_disk_keeps_what_is_finished(
    tmp_path: Path, expected: xr.Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, calls = tmp_path / "a.zarr", []
    flush = store._flush

    def full(file: Path) -> None:
        calls.append(file)
        if len(calls) == 5:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        flush(file)

    with monkeypatch.context() as patch:
        patch.setattr(store, "_flush", full)
        with pytest.raises(PerfModelError, match=r"cannot be written \(No space left on device\); .* --resume"):
            run_sweep(request_of(), out=out, memory_gb=SMALLEST, progress=False)
    assert run_sweep(request_of(), out=out, resume=True, progress=False).identical(expected)


HOLDER = """
import sys
from pathlib import Path
from perfmodel.sweeps.lock import claim
with claim(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_second_process_is_refused_until_the_first_is_dead(tmp_path: Path, expected: xr.Dataset) -> None:
    out = tmp_path / "a.zarr"
    _make(out, complete=False)
    (tmp_path / "same").symlink_to(tmp_path)  # another name of the same output
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(out)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        before = chunks(out)
        for path in (out, tmp_path / "same" / "a.zarr"):
            with pytest.raises(PerfModelError, match="another process is writing this sweep"):
                run_sweep(request_of(), out=path, resume=True, progress=False)
        assert chunks(out) == before
        holder.kill()
    assert run_sweep(request_of(), out=out, resume=True, progress=False).identical(expected)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["a.zarr", "same"]


def test_a_lock_that_is_removed_meanwhile_is_taken_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The first holder removes its file after the second has opened it: the second must not hold a file without a name.
    out, opened = tmp_path / "a.zarr", os.open
    first = [True]

    def slow(path: Any, *more: Any) -> int:
        handle = opened(path, *more)
        if first:
            first.clear()
            Path(path).unlink()
        return handle

    monkeypatch.setattr(os, "open", slow)
    with lock.claim(out):
        assert (tmp_path / ".a.zarr.lock").exists()
        with pytest.raises(PerfModelError, match="another process"), lock.claim(out):
            pass
    assert list(tmp_path.iterdir()) == []


PEAK = textwrap.dedent("""
    import sys
    from perfmodel.sweeps.api import sweep
    count, out = sys.argv[1:]
    sweep(policy=["monde"], prompt=8, output=8, dtype="float32", out=out, memory_gb=0.05, threads=1, axes={
        "link.bandwidth_gb_per_s": "16:64:100", "link.latency_us": "0.1:10:100", "ndp.clock_ghz": f"0.5:2:{count}",
    })
    print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
""")


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs a system that tells the peak memory")
def test_memory_does_not_grow_with_the_points(tmp_path: Path) -> None:
    def peak(count: int) -> int:
        command = [sys.executable, "-c", PEAK, str(count), str(tmp_path / f"{count}.zarr")]
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    few, many = peak(100), peak(2500)  # 1 and 25 million points; results of 4 and 100 MB
    assert many - few < 40_000, (few, many)  # kilobytes
