"""Where the bundled data lies, and how files are read and written safely."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def data_folder(name: str) -> Path:
    """Folder of bundled data: ``hardware_specs`` or ``traces``.

    A source checkout is looked at first, because an editable install may also hold an older copy.
    """
    source = _PACKAGE.parent / name
    if (_PACKAGE.parent / "pyproject.toml").is_file() and source.is_dir():
        return source
    return _PACKAGE / "_data" / name


@contextlib.contextmanager
def replace_when_done(path: str | Path) -> Iterator[Path]:
    """Yield a temporary sibling of ``path`` and rename it onto ``path`` only if the block succeeds."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.stem}-", suffix=target.suffix)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
