"""An interrupt (Ctrl-C) that arrives where it would do harm or be lost waits until that is over.

Compiled code that makes its results calls Python functions and does not look whether they raise: an interrupt inside
one ends as a `SystemError` or as a crash of the process. What is raised in a callback of the interpreter or of the
compiler is printed and dropped.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_KERNELS = "perfmodel.kernels._jit"
#: Callbacks that cannot raise, by module and name; every ``__del__`` is one too.
_CALLBACKS = (
    ("importlib._bootstrap", "cb"),
    ("llvmlite.binding.executionengine", "_raw_object_cache_notify"),
    ("llvmlite.binding.executionengine", "_raw_object_cache_getbuffer"),
)
#: How long until it is tried again [s]. Results are made, and callbacks are over, in far less than a millisecond.
_AGAIN_S = 0.002


@contextmanager
def safe_interrupts() -> Iterator[None]:
    """Raise `KeyboardInterrupt` where that is safe. A caller's own handler and other threads are left alone.

    An error that follows an interrupt is one: libraries turn what interrupts their import into errors of their own.
    """
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    raised = False

    def interrupt(_: int, frame: FrameType | None) -> None:
        nonlocal raised
        if not _must_wait(frame):
            raised = True
            raise KeyboardInterrupt
        again = threading.Timer(_AGAIN_S, signal.raise_signal, [signal.SIGINT])
        again.daemon = True
        again.start()

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    except Exception:
        if raised:
            raise KeyboardInterrupt from None
        raise
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _must_wait(frame: FrameType | None) -> bool:
    """Whether a callback runs now, or something that a kernel called; what builds a kernel may be interrupted."""
    inner = None
    while frame is not None:
        module, name = frame.f_globals.get("__name__"), frame.f_code.co_name
        if name == "__del__" or (module, name) in _CALLBACKS:
            return True
        if (module, name) == (_KERNELS, "__call__"):
            return inner is not None and inner.f_globals.get("__name__") != _KERNELS
        inner, frame = frame, frame.f_back
    return False
