"""One writer for one output: a lock that the system takes back when its holder dies."""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from perfmodel.errors import PerfModelError


@contextlib.contextmanager
def claim(path: Path) -> Iterator[None]:
    """Hold an output against every other process; the hold ends with this process, however it ends.

    Raises
    ------
    PerfModelError : another process holds it, or its folder cannot be written.
    """
    target = path.resolve()
    lock = target.with_name(f".{target.name}.lock")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle = _lock(lock)
    except BlockingIOError:
        raise PerfModelError(f"{path}: another process is writing this sweep; wait for it, or use another -o") from None
    except (OSError, ValueError) as error:
        raise PerfModelError(f"{path}: cannot be written ({_reason(error)})") from None
    try:
        yield
    finally:
        # Removed while still held: whoever waits for this very file notices that it is gone (see `_lock`).
        with contextlib.suppress(OSError):
            lock.unlink()
        os.close(handle)


def _lock(lock: Path) -> int:
    while True:
        handle = os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            if sys.platform == "win32":
                import msvcrt

                try:
                    msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
                except OSError as error:
                    raise BlockingIOError(*error.args) from None
            else:
                import fcntl

                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with contextlib.suppress(FileNotFoundError):
                if lock.stat().st_ino == os.fstat(handle).st_ino:
                    return handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)  # the holder removed this file when it was done; take the one that has the name now


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
