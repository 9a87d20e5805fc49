"""Sweeps on disk: killed at any moment and resumed, guarded against other inputs and other writers, small in memory."""

import errno
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr
import zarr

from perfmodel.errors import PerfModelError
from perfmodel.sweeps import folder, identity, lock, store
from perfmodel.sweeps.api import run_sweep
from perfmodel.sweeps.dataset import open_dataset, save
from perfmodel.sweeps.folder import MANIFEST
from perfmodel.sweeps.outputs import SUFFIXES
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
from perfmodel.sweeps import folder, store
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

flush = store.flush
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
store.flush = folder.flush = killing

rename = Path.rename
def renaming(path, target):
    if moment == "rename" and path.name == ".a.perfmodel-new.zarr":
        die()
    return rename(path, target)
Path.rename = renaming

close = store.Store.close
def closing(self):
    if moment == "close":
        die()
    close(self)
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


ORDERED: dict[str, Any] = {
    "axes": {"ndp.rows": [8, 4], "ndp.cols": [2, 4], "link.latency_us": [2.0, 1.0], "gpu_experts": [2, 4]},
    "zip": "ndp.rows,ndp.cols",
    "metrics": ["ttft_s", "tpot_mean_s", "decode_s"],
}


@pytest.mark.parametrize("kind", ["grid", "cases", "sample", "one policy"])
def test_variables_keep_their_order_and_types(kind: str, tmp_path: Path) -> None:
    changes = dict(ORDERED)
    if kind == "cases":
        changes |= {"cases": {"ndp.clock_ghz": [1.0, 2.0], "gpu_experts": ["auto", 4], "alpha": [0, 1]}}
        changes["axes"] = {name: values for name, values in ORDERED["axes"].items() if name != "gpu_experts"}
    if kind == "sample":
        changes |= {"axes": {"ndp.rows": "2:8", "link.latency_us": "1:2", "ndp.cols": "2:4"}, "sample": "lhs:3"}
        changes.pop("zip")
    if kind == "one policy":
        changes |= {"policy": "context-aware:mean_bits=3"}
    request = request_of(**changes)
    expected = run_sweep(request, progress=False)
    streamed = run_sweep(request, out=tmp_path / "streamed.zarr", progress=False)
    save(expected, tmp_path / "saved.zarr")
    save(expected, tmp_path / "saved.nc")
    saved = [open_dataset(tmp_path / name) for name in ("streamed.zarr", "saved.zarr", "saved.nc")]
    for found in (streamed, *saved, xr.open_zarr(tmp_path / "streamed.zarr", chunks=None)):
        assert found.identical(expected)
        assert list(found.variables) == list(expected.variables)
        assert list(found.data_vars) == ORDERED["metrics"]
        assert list(found.coords) == list(expected.coords)
        assert list(found.sizes) == list(expected.sizes)
    for found in (streamed, *saved):
        assert {name: one.dtype for name, one in found.variables.items()} == {
            name: one.dtype for name, one in expected.variables.items()
        }
        assert {name: type(value) for name, value in found.attrs.items()} == {
            name: type(value) for name, value in expected.attrs.items()
        }


@pytest.mark.parametrize(
    "changes",
    [
        {"axes": {"gpu_experts": [0]}},
        {"axes": {}, "cases": {"gpu_experts": [0]}},
        {"axes": {"link.latency_us": "1:2"}, "sample": "lhs:1"},
        {"axes": {"link.latency_us": [0.0], "policy.gpu_experts": [0]}, "zip": "link.latency_us,policy.gpu_experts"},
    ],
)
def test_coordinates_that_are_all_zero(changes: dict[str, Any], tmp_path: Path) -> None:
    request = request_of(**changes)
    expected = run_sweep(request, progress=False)
    assert run_sweep(request, out=tmp_path / "a.zarr", progress=False).identical(expected)
    assert open_dataset(tmp_path / "a.zarr").identical(expected)


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


@pytest.mark.parametrize("complete", [True, False])
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("program", "the program changed: its source code"),
        ("numpy", r"numpy version .* there, 0\.0\.0 here"),
        ("losses", "the contents of the bundled loss table changed"),
    ],
)
def test_another_program_does_not_resume(
    name: str, words: str, complete: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "a.zarr"
    _make(out, complete)
    if name == "numpy":
        monkeypatch.setitem(identity.VERSIONS, "numpy", "0.0.0")
    else:
        monkeypatch.setattr(identity, "program_hash" if name == "program" else "_default_losses", lambda: "another")
    with pytest.raises(PerfModelError, match=words):
        run_sweep(request_of(), out=out, resume=True, progress=False)


def test_every_source_file_counts(tmp_path: Path) -> None:
    package = Path(identity.__file__).parent.parent
    digest = hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        digest.update(file.relative_to(package).as_posix().encode() + b"\0" + file.read_bytes() + b"\0")
    assert identity.program_hash() == digest.hexdigest()
    shutil.copytree(package, tmp_path / "perfmodel", ignore=shutil.ignore_patterns("__pycache__"))
    kernel = tmp_path / "perfmodel" / "kernels" / "point.py"
    kernel.write_text(kernel.read_text() + "\n")
    script = "from perfmodel.sweeps.identity import program_hash; print(program_hash())"
    other = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert other.stdout.strip() not in ("", digest.hexdigest())


def test_changed_contents_are_not_resumed(tmp_path: Path) -> None:
    out = tmp_path / "a.zarr"
    _make(out, complete=False)
    manifest = json.loads((out / MANIFEST).read_text())
    (out / MANIFEST).write_text(json.dumps({**manifest, "key": "other"}))
    with pytest.raises(PerfModelError, match="other contents"):
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
    aside = tmp_path / ".a.perfmodel-previous.zarr"
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


def attacks(folder: Path) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Every file of a folder truncated, emptied and removed, one after another; the folder is whole in between."""
    for file in sorted(one for one in folder.rglob("*") if one.is_file()):
        content = file.read_bytes()
        ways: dict[str, Callable[[], Any]] = {
            "truncated": lambda file=file, content=content: file.write_bytes(content[: len(content) // 2]),
            "emptied": lambda file=file: file.write_bytes(b""),
            "removed": file.unlink,
        }
        for name, attack in ways.items():
            attack()
            yield f"{file.relative_to(folder)} {name}", attack
            file.write_bytes(content)


@pytest.mark.parametrize("how", ["streamed", "saved"])
def test_every_damage_of_a_complete_sweep_is_named(
    how: str, tmp_path: Path, expected: xr.Dataset, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "a.zarr"
    if how == "streamed":
        _make(out, complete=True)
    else:
        save(expected, out)
    count = 0
    for what, _ in attacks(out):
        count += 1
        with pytest.raises(PerfModelError) as caught:
            open_dataset(out)
        assert str(caught.value).startswith(f"{out}: "), what
        assert "damaged" in str(caught.value), what
        assert "\n" not in str(caught.value), what
    assert count >= 3 * 12
    assert capfd.readouterr() == ("", "")
    assert open_dataset(out).identical(expected)


def test_every_damage_of_an_unfinished_sweep_is_named_or_mended(tmp_path: Path, expected: xr.Dataset) -> None:
    out, copy = tmp_path / "a.zarr", tmp_path / "copy.zarr"
    _make(out, complete=False)
    mended = set()
    for what, _ in attacks(out):
        shutil.copytree(out, copy)
        file = what.split()[0]
        if file == store.JOURNAL or file.startswith("tpot_mean_s/c."):
            assert run_sweep(request_of(), out=copy, resume=True, progress=False).identical(expected), what
            mended.add(file)
        else:
            with pytest.raises(PerfModelError, match=r"^[^\n]*damaged[^\n]*$"):
                run_sweep(request_of(), out=copy, resume=True, progress=False)
        shutil.rmtree(copy)
    assert len(mended) == 2


@pytest.mark.parametrize("complete", [True, False])
def test_other_files_in_the_folder_do_not_matter(
    complete: bool, tmp_path: Path, expected: xr.Dataset, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "a.zarr"
    _make(out, complete)
    (out / "notes.txt").write_text("mine")
    (out / "tpot_mean_s" / ".DS_Store").write_bytes(b"\0")
    (out / "broken").mkdir()
    (out / "broken" / "zarr.json").write_text("{")
    # Warnings are errors here.
    assert len(list(zarr.open_group(str(out), mode="r").arrays())) == len(expected.variables)
    assert list(xr.open_zarr(out, chunks=None).variables) == list(expected.variables)
    assert run_sweep(request_of(), out=out, resume=True, progress=False).identical(expected)
    assert open_dataset(out).identical(expected)
    assert capfd.readouterr() == ("", "")


def test_a_finished_sweep_with_other_files_in_its_folder_is_not_replaced(tmp_path: Path, expected: xr.Dataset) -> None:
    out = tmp_path / "a.zarr"
    _make(out, True)
    (out / "notes.txt").write_text("mine")
    for action in (lambda: run_sweep(request_of(output=9), out=out, progress=False), lambda: save(expected, out)):
        with pytest.raises(PerfModelError, match=r"holds 'notes\.txt'"):
            action()
    assert (out / "notes.txt").read_text() == "mine"
    assert open_dataset(out).identical(expected)
    assert [one.name for one in tmp_path.iterdir()] == ["a.zarr"]


@pytest.mark.parametrize("how", ["removed", "moved", "replaced"])
@pytest.mark.parametrize("finished", [0, 2])
def test_a_folder_that_goes_away_is_not_made_again(
    how: str, finished: int, tmp_path: Path, expected: xr.Dataset
) -> None:
    out, calls = tmp_path / "a.zarr", []
    _make(out, complete=True)

    def away(done: int, _: int) -> None:
        calls.append(done)
        if len(calls) == finished + 1:
            if how == "removed":
                shutil.rmtree(out)
                return
            out.rename(tmp_path / "moved.zarr")
            if how == "replaced":
                out.mkdir()
                (out / "thesis.txt").write_text("years of work")

    with pytest.raises(PerfModelError, match=r"a\.zarr: was removed, moved or replaced .*nothing more is written") as e:
        run_sweep(request_of(output=9), out=out, memory_gb=SMALLEST, threads=1, progress=away)
    assert "kept" not in str(e.value)
    assert len(calls) == finished + 1
    if how == "replaced":
        assert [one.name for one in out.iterdir()] == ["thesis.txt"]
    else:
        # The sweep that was there before has its place again, at once or when it is opened.
        assert open_dataset(out).identical(expected)
    if how == "moved" and finished:
        shutil.rmtree(out)
        (tmp_path / "moved.zarr").rename(out)
        request = request_of(output=9)
        assert run_sweep(request, out=out, resume=True).identical(run_sweep(request, progress=False))


@pytest.mark.parametrize("before", ["nothing", "complete"])
def test_a_disk_that_is_full_from_the_start(
    before: str, tmp_path: Path, expected: xr.Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "a.zarr"
    if before == "complete":
        _make(out, complete=True)

    def full(_: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for place in (folder, store):  # while the store is made, and at its first block
        with monkeypatch.context() as patch:
            patch.setattr(place, "flush", full)
            with pytest.raises(PerfModelError, match=r"No space left on device\); nothing was (changed|finished)"):
                run_sweep(request_of(output=9), out=out, progress=False)
        assert [one.name for one in tmp_path.iterdir()] == ["a.zarr"] * (before == "complete")
    if before == "complete":
        assert open_dataset(out).identical(expected)


class _Killed(BaseException):
    """Stands for the death of the process: nothing is put right after it."""


@pytest.mark.parametrize("how", ["refused", "killed"])
@pytest.mark.parametrize("writer", ["sweep", "save"])
def test_a_rename_that_fails_loses_nothing(
    writer: str, how: str, tmp_path: Path, expected: xr.Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, rename, calls = tmp_path / "a.zarr", Path.rename, []
    save(expected, out)
    other = request_of(output=9)
    result = run_sweep(other, progress=False)

    def failing(path: Path, target: Path) -> Path:
        calls.append(path)
        if len(calls) == 2:
            raise OSError(errno.EACCES, os.strerror(errno.EACCES))
        if how == "killed" and len(calls) > 2:
            raise _Killed  # nothing comes after the death of a process
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", failing)
        with pytest.raises((PerfModelError, _Killed)) as caught:
            save(result, out) if writer == "save" else run_sweep(other, out=out, progress=False)
    if how == "refused":
        assert "cannot be written (Permission denied)" in str(caught.value)
        assert [one.name for one in tmp_path.iterdir()] == ["a.zarr"]
    else:
        assert not out.exists()
    assert open_dataset(out).identical(expected)
    # And the next one finds its place clean.
    assert run_sweep(other, out=out, progress=False).identical(result)
    assert [one.name for one in tmp_path.iterdir()] == ["a.zarr"]


def test_a_process_that_dies_between_two_renames_loses_nothing(tmp_path: Path, expected: xr.Dataset) -> None:
    out = tmp_path / "a.zarr"
    save(expected, out)
    assert child(out, "rename").returncode == -signal.SIGKILL
    assert not out.exists()
    assert open_dataset(out).identical(expected)


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("kind", ["sweep", "zarr 2", "zarr 3"])
def test_nothing_is_put_into_a_zarr_folder(suffix: str, kind: str, tmp_path: Path, expected: xr.Dataset) -> None:
    outer = tmp_path / "outer.zarr"
    if kind == "sweep":
        save(expected, outer)
    else:
        xr.Dataset({"x": ("n", [1.0])}).to_zarr(outer, zarr_format=int(kind[-1]), consolidated=False)
    inner = outer / "deep" / f"inner{suffix}"
    for action in (lambda: run_sweep(request_of(), out=inner, progress=False), lambda: save(expected, inner)):
        with pytest.raises(PerfModelError, match=r"lies inside the Zarr folder .*outer\.zarr"):
            action()
    assert not inner.parent.exists()


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_links_are_followed(suffix: str, tmp_path: Path, expected: xr.Dataset) -> None:
    link, place = tmp_path / f"link{suffix}", tmp_path / "elsewhere" / "data"
    place.parent.mkdir()
    link.symlink_to(place)
    for request in (request_of(output=9), request_of()):
        found = run_sweep(request, out=link, memory_gb=SMALLEST, progress=False)
        assert link.is_symlink()
        assert place.is_dir() == (suffix == ".zarr")
        assert found.identical(run_sweep(request, progress=False))
    if suffix in (".nc", ".zarr"):
        assert open_dataset(link).identical(expected)
    assert [one.name for one in place.parent.iterdir()] == ["data"]


def test_links_that_cannot_be_written_are_refused_first(tmp_path: Path, priced: list[int]) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "thesis.txt").write_text("years of work")
    for suffix in SUFFIXES:
        link, loop = tmp_path / f"link{suffix}", tmp_path / f"loop{suffix}"
        link.symlink_to(tmp_path / "folder")
        loop.symlink_to(loop)
        for path in (link, loop):
            with pytest.raises(PerfModelError) as caught:
                run_sweep(request_of(), out=path, progress=False)
            assert str(path) in str(caught.value)
    assert priced == []
    assert [one.name for one in (tmp_path / "folder").iterdir()] == ["thesis.txt"]


def test_inputs_that_do_not_fit_leave_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bad: list[tuple[dict[str, Any], str]] = [
        ({"axes": {"model": ["mixtral-8x7b", "mixtral-8x22b"]}}, r"model=mixtral-8x22b: .*layers='cycle'"),
        ({"axes": {"output": [8, 10**9]}}, r"workload\.output=1000000000: .*too long"),
        ({"axes": {}, "cases": {"prompt": [8, 10**9, 8], "output": [8, 8, 9]}}, "too long"),
    ]
    for changes, words in bad:
        base = {"prompt": None, "output": None}
        with pytest.raises(PerfModelError, match=words):
            run_sweep(request_of(**{**base, **changes}), out=tmp_path / "deep" / "a.zarr", progress=False)
        assert list(tmp_path.iterdir()) == []
    # And what is only noticed by the first block.
    _make(tmp_path / "a.zarr", complete=True)

    def refuse(*_: Any) -> Any:
        raise PerfModelError("block: bad input")

    monkeypatch.setattr(Request, "price", refuse)
    with pytest.raises(PerfModelError, match="bad input"):
        run_sweep(request_of(output=9), out=tmp_path / "a.zarr", progress=False)
    assert [one.name for one in tmp_path.iterdir()] == ["a.zarr"]
    open_dataset(tmp_path / "a.zarr")


#: Saves a sweep under each of the given names where no file may be larger than a limit.
FULL = """
import resource, sys
from perfmodel.cli import main

run = ["sweep", "--policy", "monde", "--prompt", "8", "--output", "8", "--quiet"]
assert main(run) == 0  # kernels are compiled without the limit
print("---", file=sys.stderr)
for out in sys.argv[1:]:
    for limit in (0, 2000, 9000):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        assert main([*run, "--axis", "link.latency_us=0.1:10:5000", "-o", out]) == 2
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs a limit on the size of files")
def test_files_that_do_not_fit(tmp_path: Path) -> None:
    names = [str(tmp_path / f"a{suffix}") for suffix in SUFFIXES]
    command = [sys.executable, "-c", FULL, *names]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    lines = found.stderr.partition("---\n")[2].splitlines()
    assert len(lines) == 3 * len(SUFFIXES), found.stderr
    for line, name in zip(lines, [name for name in names for _ in range(3)], strict=True):
        assert line.startswith(f"perfmodel: error: {name}: cannot be written (File too large)")
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_keeps_what_is_finished(
    tmp_path: Path, expected: xr.Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, calls = tmp_path / "a.zarr", []
    flush = store.flush

    def full(file: Path) -> None:
        calls.append(file)
        if len(calls) == 5:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        flush(file)

    with monkeypatch.context() as patch:
        patch.setattr(store, "flush", full)
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
