"""Compile policy: the disk cache is used and cannot go stale, and nothing global changes."""

import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import numba
import numpy as np
import pytest
from numpy.testing import assert_array_equal

import perfmodel
from perfmodel.kernels import _jit, knapsack, link, systolic

PACKAGE = Path(perfmodel.__file__).parent


def _run(code: str, root: Path, **environment: str) -> str:
    """What a fresh interpreter prints when it runs ``code`` against the package in ``root``."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("NUMBA_")}
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env={**kept, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1", **environment},
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A copy of the package with two more kernels, one a ufunc and one a loop, that share a helper file."""
    root = tmp_path / "source"
    (root / "perfmodel" / "kernels").mkdir(parents=True)
    for name in ("__init__.py", "kernels/__init__.py", "kernels/_jit.py"):
        shutil.copy(PACKAGE / name, root / "perfmodel" / name)
    kernels = root / "perfmodel" / "kernels"
    (kernels / "helper.py").write_text(
        "from perfmodel.kernels._jit import scalar\n\n@scalar\ndef _grow1(x):\n    return 10.0 * x\n"
    )
    (kernels / "user.py").write_text(
        "from perfmodel.kernels._jit import loop, ufunc\n"
        "from perfmodel.kernels.helper import _grow1\n\n"
        "@ufunc(1)\ndef grow(x):\n    return _grow1(x)\n\n"
        "@loop('float64(float64[::1])')\ndef total(values):\n"
        "    result = 0.0\n    for value in values:\n        result += _grow1(value)\n    return result\n"
    )
    return root


USE = """
import numpy as np
from perfmodel.kernels import user
print(float(user.grow(2.0)), user.total(np.ones(3)), sum(user.total.compiled.stats.cache_hits.values()))
"""


def _compiled_files(cache: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in sorted(cache.rglob("*.nbc"))}


def test_second_process_loads_and_a_changed_helper_recompiles(copied: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    assert _run(USE, copied, NUMBA_CACHE_DIR=str(cache)) == "20.0 30.0 0"
    first = _compiled_files(cache)
    assert {path.name.split("-")[0] for path in first} == {"user.grow", "user.total"}

    assert _run(USE, copied, NUMBA_CACHE_DIR=str(cache)) == "20.0 30.0 1"
    assert _compiled_files(cache) == first

    helper = copied / "perfmodel" / "kernels" / "helper.py"
    helper.write_text(helper.read_text().replace("10.0", "20.0"))
    assert _run(USE, copied, NUMBA_CACHE_DIR=str(cache)) == "40.0 60.0 0"
    assert len(list((cache / "perfmodel").iterdir())) == 2


def test_a_changed_helper_changes_prices(tmp_path: Path) -> None:
    root, cache = tmp_path / "source", str(tmp_path / "cache")
    shutil.copytree(PACKAGE / "kernels", root / "perfmodel" / "kernels", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(PACKAGE / "__init__.py", root / "perfmodel")
    price = (
        "import numpy as np\n"
        "from perfmodel.kernels.price import copy_times\n"
        "print(copy_times(np.ones(56), np.arange(0), np.empty((0, 2)), 3.0)[1])\n"
    )
    assert _run(price, root, NUMBA_CACHE_DIR=cache) == _run(price, root, NUMBA_CACHE_DIR=cache) == "6.0"
    helper = root / "perfmodel" / "kernels" / "link.py"
    helper.write_text(helper.read_text().replace("return latency_s +", "return 100.0 * latency_s +"))
    assert _run(price, root, NUMBA_CACHE_DIR=cache) == "204.0"


def test_without_a_writable_folder_every_process_compiles(copied: Path, tmp_path: Path) -> None:
    blocked = tmp_path / "a file"
    blocked.write_text("")
    assert _run(USE, copied, NUMBA_CACHE_DIR=str(blocked)) == "20.0 30.0 0"
    assert not list(copied.rglob("*.nbc"))


def test_plain_python_gives_the_same(copied: Path) -> None:
    code = "from perfmodel.kernels import user; print(user.grow([1.0, 2.0]), user.total([3.0]))"
    assert _run(code, copied, NUMBA_DISABLE_JIT="1") == "[10. 20.] 30.0"


def test_importing_builds_nothing(copied: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    _run("from perfmodel.kernels import user; repr(user.grow)", copied, NUMBA_CACHE_DIR=str(cache))
    assert not cache.exists()


def test_key_covers_every_source_file(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\n")
    keys = [_jit.content_key(tmp_path)]
    (tmp_path / "b.py").write_text("")
    keys.append(_jit.content_key(tmp_path))
    (tmp_path / "b.py").write_text("y = 1\n")
    keys.append(_jit.content_key(tmp_path))
    (tmp_path / "a.py").write_text("")
    keys.append(_jit.content_key(tmp_path))
    assert len(set(keys)) == 4
    (tmp_path / "a.py").write_text("x = 1\n")
    (tmp_path / "b.py").write_text("")
    assert _jit.content_key(tmp_path) == keys[1]
    assert _jit.content_key() == _jit.content_key(PACKAGE / "kernels")


# --- where the cache lies ---


@pytest.fixture
def no_choice(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No cache folder is chosen, and the home folder is empty."""
    for name in ("NUMBA_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setattr(Path, "home", lambda: home)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return home


def test_folder_follows_the_environment(no_choice: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"kernels-{_jit.content_key()}"
    assert _jit.cache_folder() == no_choice / ".cache" / "perfmodel" / name
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert _jit.cache_folder() == tmp_path / "xdg" / "perfmodel" / name
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "numba"))
    assert _jit.cache_folder() == tmp_path / "numba" / "perfmodel" / name


def test_folder_falls_back_when_home_cannot_be_written(no_choice: Path, tmp_path: Path) -> None:
    no_choice.rmdir()
    no_choice.write_text("not a folder")
    folder = _jit.cache_folder()
    assert folder is not None
    assert folder.parent.parent.parent == tmp_path


def test_folder_without_a_home(no_choice: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError

    monkeypatch.setattr(Path, "home", homeless)
    folder = _jit.cache_folder()
    assert folder is not None
    assert folder.parent.parent.parent == tmp_path


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="folders have no owner here")
def test_somebody_elses_folder_is_not_trusted(no_choice: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_choice.rmdir()
    no_choice.write_text("not a folder")
    assert _jit.cache_folder() is not None
    monkeypatch.setattr(_jit, "_user_id", lambda: os.getuid() + 1)
    assert _jit.cache_folder() is None


# --- nothing global changes, and kernels behave like functions ---


def _fresh_kernel() -> _jit.Kernel:
    return _jit.Kernel(link.transfer_time.__wrapped__, link.transfer_time._build)


@pytest.mark.parametrize("setting", ["", "/nowhere/at/all"])
def test_the_callers_own_cache_setting_is_kept(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numba.config, "CACHE_DIR", setting)
    assert _fresh_kernel()(8.0, 2.0, 0.0, 0.0) == 4.0
    assert setting == numba.config.CACHE_DIR

    with pytest.raises(TypeError):
        _jit.loop("float64(float64, float64)")(lambda x: x)(1.0)
    assert setting == numba.config.CACHE_DIR


def test_threads_may_race_for_the_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numba.config, "CACHE_DIR", "/nowhere/at/all")
    kernels = [_fresh_kernel() for _ in range(3)]
    results: list[float] = []
    start = threading.Barrier(9)

    def call(kernel: _jit.Kernel) -> None:
        start.wait()
        results.append(float(kernel(8.0, 2.0, 0.0, 0.0)))

    threads = [threading.Thread(target=call, args=(kernel,)) for kernel in kernels for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [4.0] * 9
    assert numba.config.CACHE_DIR == "/nowhere/at/all"


def test_kernels_pickle_by_name() -> None:
    for kernel in (link.transfer_time, knapsack.merge_fronts):
        assert pickle.loads(pickle.dumps(kernel)) is kernel
    assert repr(link.transfer_time) == "<kernel perfmodel.kernels.link.transfer_time>"
    assert link.transfer_time.__name__ == "transfer_time"
    assert "[byte]" in (link.transfer_time.__doc__ or "")


def test_compiled_code_may_call_kernels() -> None:
    transfer, merge = link.transfer_time, knapsack.merge_fronts

    @numba.njit
    def own(values, fronts, last):  # type: ignore[no-untyped-def]
        return (
            transfer(values, 2.0, 0.5, 0.0),
            merge(fronts, last),
            systolic.gemm_cycles(1, 128, 37, 4, 4, 1),
        )

    seconds, front, cycles = own(np.array([0.0, 8.0]), np.array([[8.0, 4.0], [1.0, 0.5]]), 2)
    assert_array_equal(seconds, [0.0, 4.5])
    assert_array_equal(front, [9.0, 5.0, 4.5])
    assert cycles == 3520


def test_division_follows_numpy() -> None:
    @_jit.loop("float64(float64, float64)")
    def divide(x, y):  # type: ignore[no-untyped-def]
        return x / y

    assert divide(1.0, 0.0) == np.inf
    assert np.isnan(divide(0.0, 0.0))


def test_read_only_types_accept_both_kinds() -> None:
    @_jit.loop(numba.float64(_jit.read_only(numba.float64[::1])))
    def first(values):  # type: ignore[no-untyped-def]
        return values[0]

    values = np.array([3.0])
    assert first(values) == 3.0
    values.flags.writeable = False
    assert first(values) == 3.0


SLOW = """
import os, signal, sys, threading, time
import numba
import numpy as np
from perfmodel.kernels._jit import Kernel

def root_sum(n):
    result = 0.0
    for i in range(n):
        result += np.sqrt(i)
    return np.zeros(3), result

slow = Kernel(root_sum, lambda: numba.njit("Tuple((float64[::1], float64))(int64)", nogil=True)(root_sum))
slow(1)  # compiles
started = time.perf_counter()
slow(10_000_000)
rounds = int(10_000_000 * 0.6 / (time.perf_counter() - started))
signal.signal(signal.SIGINT, signal.default_int_handler)  # what starts in the background ignores it
thread = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
thread.start()
try:
    slow(rounds)
    time.sleep(5)
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.skipif(os.name == "nt", reason="signals")
def test_an_interrupt_while_compiled_code_runs_is_an_interrupt() -> None:
    """Compiled code that wraps up a tuple turns it into a SystemError."""
    assert _run(SLOW, PACKAGE.parent) == "interrupted"


def test_only_interrupts_are_taken_for_interrupts() -> None:
    def kernel(cause: BaseException) -> None:
        try:
            raise SystemError("a function returned a result with an exception set") from cause
        except SystemError as error:
            raise SystemError("so did what called it") from error

    made = _jit.Kernel(kernel, lambda: kernel)
    with pytest.raises(KeyboardInterrupt) as stop:
        made(KeyboardInterrupt())
    assert stop.value.__suppress_context__
    with pytest.raises(SystemError):
        made(ValueError())
