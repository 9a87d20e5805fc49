"""PyTorch and Transformers, imported late, quietly and offline."""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

from perfmodel.errors import PerfModelError

_OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
_TRUE = {"1", "ON", "YES", "TRUE"}
#: Whether the environment forbids connections to the Hugging Face Hub, as it was before this package went offline.
TOLD_OFFLINE = any(os.environ.get(name, "").upper() in _TRUE for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))
_INSTALL = "pip install 'perfmodel[record]'"
#: Oldest major version of Transformers.
_LEAST = 5


def import_torch() -> Any:
    """The module ``torch``. Raises :class:`PerfModelError` where the extra ``record`` is not installed."""
    with _installed():
        import torch
    return torch


def import_transformers() -> Any:
    """The module ``transformers``, told to stay offline.

    Raises :class:`PerfModelError` where it is not installed, or is older than version 5, which keeps experts otherwise.
    """
    os.environ.update(_OFFLINE)
    with _installed():
        import torch  # noqa: F401  # Transformers alone imports without it, and then lacks every model
        import transformers
    if int(transformers.__version__.partition(".")[0]) < _LEAST:
        raise PerfModelError(
            f"running a model needs transformers {_LEAST} or later, found {transformers.__version__}: {_INSTALL}"
        )
    return transformers


@contextlib.contextmanager
def _installed() -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        missing = error.name or str(error)
        raise PerfModelError(f"running a model needs {missing}: {_INSTALL}") from error


@contextlib.contextmanager
def quiet(transformers: Any) -> Iterator[None]:
    """No remarks and no progress bars of Transformers inside the block; as before after it."""
    logging = transformers.utils.logging
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
