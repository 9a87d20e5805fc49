"""Places for ``.npz`` files, refused before the work on them where they cannot be written."""

import errno
import os
import tempfile
from pathlib import Path
from typing import Any

from perfmodel.errors import PerfModelError
from perfmodel.routing.npz import one_line, shown

#: Where unfinished work on a file lies, by the stem of its name.
PARTIAL = ".{stem}.perfmodel-partial.npz"


def check_place(output: Any, inputs: tuple[Path, ...] = ()) -> Path:
    """The ``.npz`` file that an output is or becomes, links followed; something regular may be there.

    A temporary file is made in its folder, or in the nearest one that exists, and removed again: nothing else tells
    whether a place can be written.

    inputs : files that it must not replace

    Raises PerfModelError for another ending, a place that cannot be written, a name too long for the temporary files
    beside it, an input, and what is no regular file.
    """
    if not isinstance(output, str | os.PathLike) or not os.fspath(output):
        raise PerfModelError(f"output: found {shown(output)}; allowed: a file name that ends in .npz")
    path = Path(os.fsdecode(output))
    where = f"output {one_line(path)}"
    if path.suffix != ".npz" or path.stem.startswith(".perfmodel-"):
        raise PerfModelError(f"{where}: unknown kind of file; allowed: a name that ends in .npz")
    try:
        target = path.resolve()
        nearest = next(folder for folder in target.parents if folder.exists())
        if not nearest.is_dir() or not os.access(nearest, os.W_OK):
            raise PerfModelError(f"{where}: {one_line(nearest)} is not a folder that can be written")
        if target.is_symlink() or (target.exists() and not target.is_file()):
            raise PerfModelError(f"{where}: is there and is no regular file; allowed: another name")
        if any(target == file.resolve() for file in inputs):
            raise PerfModelError(f"{where}: is what the table is made from; allowed: another name")
    except (OSError, ValueError, RuntimeError) as error:
        if isinstance(error, PerfModelError):
            raise
        reason = getattr(error, "strerror", None) or error
        raise PerfModelError(f"{where}: not a usable name ({one_line(reason)})") from None
    _probe(nearest, target.stem, where)
    return target


def _probe(folder: Path, stem: str, where: str) -> None:
    """Make the longest of the names that are written before the file gets its own (`paths.replace_when_done`)."""
    partial = Path(PARTIAL.format(stem=stem))
    try:
        handle, name = tempfile.mkstemp(dir=folder, prefix=f".{partial.stem}-", suffix=partial.suffix)
    except OSError as error:
        shorter = "; allowed: a shorter name" if error.errno == errno.ENAMETOOLONG else ""
        raise PerfModelError(f"{where}: cannot be written ({one_line(error.strerror or error)}){shorter}") from None
    os.close(handle)
    Path(name).unlink()
