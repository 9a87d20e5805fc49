"""Half-built tables on disk: what is finished is kept, so that a killed build goes on where it stopped.

Beside the output lies ``.NAME.perfmodel-partial.npz`` with everything so far. It is replaced as a whole, at most once
in some seconds, and what it holds is on the disk before it gets its name.
"""

import functools
import hashlib
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfmodel import __version__
from perfmodel.bitwidth import LossTable
from perfmodel.errors import PerfModelError, TraceError
from perfmodel.losses.expert import ExpertLosses
from perfmodel.paths import replace_when_done
from perfmodel.routing.npz import one_line, read_npz, shown

#: In the metadata of every table that is built here.
MARK = "perfmodel_version"
#: Least time between two writings of what is done [s].
_EVERY_S = 2.0
_MODULES = ("calibration", "checkpoint", "expert", "gptq", "grids", "shards")


class Partial:
    """Numbers of the experts that are done; on disk where there is an output.

    Parameters
    ----------
    output : file of the finished table, or None to keep everything in memory
    identity : plain values; whatever the numbers depend on
    shape : layers, experts, widths
    resume : go on with what is there, if anything is. overwrite : throw it away.

    Raises
    ------
    PerfModelError : something is there and neither is asked for; or it is damaged, or was made from something else
    """

    def __init__(
        self,
        output: Path | None,
        identity: Mapping[str, Any],
        shape: tuple[int, int, int],
        *,
        resume: bool,
        overwrite: bool,
    ) -> None:
        self.file = None if output is None else output.with_name(f".{output.stem}.perfmodel-partial.npz")
        self.identity = dict(identity)
        self.arrays: dict[str, NDArray[Any]] = {
            "losses": np.zeros(shape),
            "nearest": np.zeros(shape),
            "output_variance": np.zeros(shape[:2]),
            "rows": np.zeros(shape[:2], np.int64),
            "borrowed": np.zeros(shape[:2], np.bool_),
            "done": np.zeros(shape[:2], np.bool_),
        }
        self._written = time.monotonic()
        self._changed = False
        if self.file is not None and os.path.lexists(self.file) and not overwrite:
            found = self._read(self.file, str(output))
            if not resume:
                done = f"{int(found['done'].sum())} of {found['done'].size} experts"
                raise PerfModelError(
                    f"{one_line(output)}: an unfinished build of it is there ({done});"
                    " go on with --resume, or begin anew with --overwrite"
                )
            self.arrays = found

    @property
    def done(self) -> NDArray[np.bool_]:
        """Which experts are done [layers, experts]."""
        return self.arrays["done"]

    def record(self, layer: int, expert: int, found: ExpertLosses, borrowed: bool) -> None:
        """Keep the numbers of one expert."""
        place = (layer, expert)
        values = (found.losses, found.nearest, found.output_variance, found.rows, borrowed, True)
        for name, value in zip(self.arrays, values, strict=True):
            self.arrays[name][place] = value
        self._changed = True
        if time.monotonic() - self._written >= _EVERY_S:
            self.flush()

    def flush(self) -> None:
        """Put everything so far on the disk."""
        if self.file is not None and self._changed:
            write_npz(self.file, {**self.arrays, "identity": np.array(json.dumps(self.identity))})
            self._changed, self._written = False, time.monotonic()

    def discard(self) -> None:
        """Remove the file: the table is finished."""
        if self.file is not None:
            self.file.unlink(missing_ok=True)

    def _read(self, file: Path, output: str) -> dict[str, NDArray[Any]]:
        anew = "begin anew with --overwrite"
        try:
            found = {name: np.array(array) for name, array in read_npz(file, [*self.arrays, "identity"]).items()}
            identity = json.loads(str(found.pop("identity").item()))
            if not isinstance(identity, dict):
                raise ValueError("no table of what it was made from")
        except (TraceError, ValueError, KeyError, RecursionError) as error:
            raise PerfModelError(
                f"{one_line(output)}: its unfinished build is damaged ({one_line(error)}); {anew}"
            ) from None
        other = _differences(identity, self.identity)
        if other:
            raise PerfModelError(f"{one_line(output)}: its unfinished build is of something else ({other}); {anew}")
        for name, array in self.arrays.items():
            if name not in found or found[name].shape != array.shape or found[name].dtype != array.dtype:
                raise PerfModelError(f"{one_line(output)}: its unfinished build is damaged (array {name}); {anew}")
        return found


def _differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    now = json.loads(json.dumps(here))
    names = [name for name in {**there, **now} if there.get(name) != now.get(name)]
    if "program" in names:
        return "the program changed"
    return ", ".join(
        f"the contents of {name} changed"
        if name in ("checkpoint", "calibration", "held_out") and there.get(name) and now.get(name)
        else f"{name} {shown(there.get(name))} there, {shown(now.get(name))} here"
        for name in names
    )


@functools.cache
def program_hash() -> str:
    """SHA-256 of the source and the libraries that decide the numbers of a table."""
    import numba
    import scipy

    digest = hashlib.sha256(f"{__version__} {np.__version__} {scipy.__version__} {numba.__version__}".encode())
    package = Path(__file__).resolve().parent.parent
    for name in (*(f"losses/{module}" for module in _MODULES), "kernels/quantise", "kernels/_jit"):
        digest.update((package / f"{name}.py").read_bytes())
    return digest.hexdigest()


def write_npz(path: Path, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Put an ``.npz`` file in place of another as a whole, when it is on the disk. The same arrays give the same bytes.

    Raises PerfModelError when it cannot be written.
    """
    try:
        with replace_when_done(path) as temporary, temporary.open("wb") as stream:
            np.savez_compressed(stream, **arrays)  # type: ignore[arg-type]  # no array is called allow_pickle
            stream.flush()
            os.fsync(stream.fileno())
    except OSError as error:
        raise PerfModelError(f"{one_line(path)}: cannot be written ({one_line(error.strerror or error)})") from None


def check_output(output: Any, inputs: tuple[Path, ...], *, overwrite: bool) -> Path:
    """The file of a table, refused before any work is done where it cannot be written or holds something else.

    inputs : files that it must not replace

    Raises PerfModelError for another ending than ``.npz``, a place that cannot be written, an input, or what is there
    and is no table that was built here (unless ``overwrite``).
    """
    if not isinstance(output, str | os.PathLike) or not os.fspath(output):
        raise PerfModelError(f"output: found {shown(output)}; allowed: a file name that ends in .npz")
    path = Path(os.fsdecode(output))
    where = one_line(path)
    if path.suffix != ".npz" or path.stem.startswith(".perfmodel-"):
        raise PerfModelError(f"output {where}: unknown kind of file; allowed: a name that ends in .npz")
    try:
        target = path.resolve()
        nearest = next(folder for folder in target.parents if folder.exists())
        if not nearest.is_dir() or not os.access(nearest, os.W_OK):
            raise PerfModelError(f"output {where}: {one_line(nearest)} is not a folder that can be written")
        if target.is_symlink() or (target.exists() and not target.is_file()):
            raise PerfModelError(f"output {where}: is there and is no regular file; allowed: another name")
        if any(target == file.resolve() for file in inputs):
            raise PerfModelError(f"output {where}: is what the table is made from; allowed: another name")
        if target.exists() and not overwrite and not _built_here(target):
            raise PerfModelError(
                f"output {where}: exists and is no loss table that perfmodel built; it is left alone, choose another"
                " output or give --overwrite"
            )
    except (OSError, ValueError, RuntimeError) as error:
        if isinstance(error, PerfModelError):
            raise
        reason = getattr(error, "strerror", None) or error
        raise PerfModelError(f"output {where}: not a usable name ({one_line(reason)})") from None
    return target


def _built_here(path: Path) -> bool:
    try:
        return MARK in LossTable.load(path).info
    except TraceError:
        return False
