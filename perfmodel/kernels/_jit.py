"""The one place with compile policy.

Three decorators cover every kernel:

- ``scalar``: a helper for other kernels; compiled for whatever calls it.
- ``ufunc``: an elementwise float64 function that broadcasts like a NumPy ufunc.
- ``loop``: a loop over arrays with an explicit signature, releasing the GIL.

Nothing is compiled or loaded at import: a ``ufunc`` or ``loop`` is built when it is first called, so that a
command that needs two kernels does not wait for twenty.

Compiled code is cached on disk in a folder named after a hash of *all* files in this package. Numba's own
cache looks only at the file of the decorated function and so misses a change in an imported helper
(numba issue 1833); a folder keyed by the content of the whole package cannot go stale.

Division follows NumPy (inf and nan, no exception), and ``fastmath`` stays off because it breaks nan checks.
``NUMBA_DISABLE_JIT=1`` runs every kernel as plain Python, slowly, for debugging.
"""

import functools
import hashlib
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numba as _numba
import numpy as np
from numba.core.registry import cpu_target
from numba.extending import typeof_impl

# Numba's annotations leave out its configuration and its decorators.
numba: Any = _numba
_HERE = Path(__file__).resolve().parent
# Guards numba.config.CACHE_DIR, which is global, while a kernel is built. Building one may build another.
_BUILDING = threading.RLock()


def content_key(folder: Path = _HERE) -> str:
    """Hash of every source file of the kernels and of the versions that compile them."""
    digest = hashlib.sha256(f"{numba.__version__} {np.__version__} {sys.version}".encode())
    for path in sorted(folder.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _user_id() -> int:
    return os.getuid() if hasattr(os, "getuid") else 0


def _base_folders() -> Iterator[Path]:
    chosen = os.environ.get("NUMBA_CACHE_DIR")
    if chosen:
        yield Path(chosen)
        return
    home = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if home.is_absolute():  # the specification says to ignore a relative one
        yield home
    else:
        with suppress(RuntimeError):  # an account without a home folder
            yield Path.home() / ".cache"
    private = _private_temporary_folder()
    if private is not None:
        yield private


def _private_temporary_folder() -> Path | None:
    """A folder of ours in the shared temporary one; loading a cache runs code, so it must be our own."""
    with suppress(OSError):
        folder = Path(tempfile.gettempdir()) / f"cache-{_user_id()}"
        folder.mkdir(exist_ok=True, mode=0o700)
        if not hasattr(os, "getuid") or folder.lstat().st_uid == _user_id():
            return folder
    return None


def cache_folder() -> Path | None:
    """Folder for compiled kernels, or None when no place is writable (then every process compiles)."""
    for base in _base_folders():
        folder = base / "perfmodel" / f"kernels-{content_key()}"
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                return folder
    return None


_find_folder = functools.cache(cache_folder)


@contextmanager
def _own_cache() -> Iterator[bool]:
    """Point Numba at our folder while a function is decorated; the caller's own setting is restored."""
    folder = _find_folder()
    if folder is None:
        yield False
        return
    with _BUILDING:
        before = numba.config.CACHE_DIR
        numba.config.CACHE_DIR = str(folder)
        try:
            yield True
        finally:
            numba.config.CACHE_DIR = before


def _is_interrupt(error: BaseException | None) -> bool:
    """Whether an interrupt is behind an error: compiled code that makes its results does not look for exceptions."""
    while isinstance(error, SystemError):
        error = error.__cause__ or error.__context__
    return isinstance(error, KeyboardInterrupt)


class Kernel:
    """A function that is compiled, or loaded from the disk cache, when it is first called.

    It pickles by name, and other compiled functions may call it.
    """

    def __init__(self, function: Callable[..., Any], build: Callable[[], Any]) -> None:
        functools.update_wrapper(self, function)
        self._build = build
        self._compiled: Any = None

    @property
    def compiled(self) -> Any:
        """The Numba object behind this kernel."""
        with _BUILDING:
            if self._compiled is None:
                self._compiled = self._build()
            return self._compiled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            # Not through the property: after the first call no lock is taken.
            return (self._compiled or self.compiled)(*args, **kwargs)
        except SystemError as error:
            if _is_interrupt(error):
                raise KeyboardInterrupt from None
            raise

    def __repr__(self) -> str:
        return f"<kernel {self.__module__}.{self.__qualname__}>"  # type: ignore[attr-defined]

    def __reduce__(self) -> str:
        return self.__qualname__  # type: ignore[attr-defined]


@typeof_impl.register(Kernel)
def _typeof_kernel(kernel: Kernel, context: Any) -> Any:
    """Let compiled code call a kernel by the type of the Numba object behind it."""
    return cpu_target.typing_context.resolve_value_type(kernel.compiled)


def scalar(function: Callable[..., Any]) -> Any:
    """Compile a helper for use inside other kernels, as if it were written there.

    A call hands over every array in seven pieces, which would cost more than what a helper does with them.
    """
    return numba.njit(nogil=True, error_model="numpy", forceinline=True)(function)


def ufunc(num_inputs: int) -> Callable[[Callable[..., Any]], Kernel]:
    """Compile an elementwise function of ``num_inputs`` float64 arguments to a broadcasting ufunc."""
    signature = f"float64({', '.join(['float64'] * num_inputs)})"

    def decorate(function: Callable[..., Any]) -> Kernel:
        def build() -> Any:
            if numba.config.DISABLE_JIT:
                return np.vectorize(function, otypes=[np.float64])
            with _own_cache() as cache:
                return numba.vectorize([signature], target="cpu", cache=cache)(function)

        return Kernel(function, build)

    return decorate


def read_only(array_type: Any) -> Any:
    """The type of an array argument that a kernel only reads, so that callers may pass read-only arrays.

    A plain ``float64[::1]`` in a signature refuses those; this accepts both kinds.
    """
    return array_type.copy(readonly=True)


def loop(signature: Any) -> Callable[[Callable[..., Any]], Kernel]:
    """Compile a loop over arrays for the given signature(s): strings or Numba signatures, one or a list."""

    def decorate(function: Callable[..., Any]) -> Kernel:
        def build() -> Any:
            with _own_cache() as cache:
                return numba.njit(signature, nogil=True, error_model="numpy", cache=cache)(function)

        return Kernel(function, build)

    return decorate
