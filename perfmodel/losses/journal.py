"""Half-built tables on disk: what is finished is kept, so that a killed build goes on where it stopped.

Beside the output lies ``.NAME.perfmodel-partial.npz`` with everything so far. It is replaced as a whole, at most once
in some seconds, and what it holds is on the disk before it gets its name.
"""

import functools
import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfmodel import __version__
from perfmodel.bitwidth import LossTable
from perfmodel.errors import PerfModelError, TraceError
from perfmodel.losses.expert import ExpertLosses
from perfmodel.losses.options import OPTIONS
from perfmodel.losses.outputs import partial_file
from perfmodel.paths import replace_when_done
from perfmodel.routing.npz import one_line, read_npz, shown

#: Least time between two writings of what is done [s].
_EVERY_S = 2.0
#: What an unfinished build holds beside its numbers: what it was made from (JSON), and the hash of everything.
_TEXTS = ("identity", "sha256")
_MODULES = ("calibration", "checkpoint", "expert", "gptq", "grids", "shards")


class Partial:
    """Numbers of the experts that are done; on disk where there is an output.

    Parameters
    ----------
    output : file of the finished table, or None to keep everything in memory
    identity : plain values; whatever the numbers depend on, but for the weights
    shape : layers, experts, widths
    rows : how many rows every expert is measured on [layers, experts]
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
        rows: NDArray[np.int64],
        *,
        resume: bool,
        overwrite: bool,
    ) -> None:
        self.output = output
        self.file = None if output is None else partial_file(output)
        self.identity = dict(identity)
        self._rows = rows
        self.arrays: dict[str, NDArray[Any]] = {
            "losses": np.zeros(shape),
            "nearest": np.zeros(shape),
            "output_variance": np.zeros(shape[:2]),
            "rows": np.zeros(shape[:2], np.int64),
            "borrowed": np.zeros(shape[:2], np.bool_),
            "weights": np.zeros((*shape[:2], 32), np.uint8),
            "done": np.zeros(shape[:2], np.bool_),
        }
        self._written = time.monotonic()
        self._changed = False
        if self.file is not None and self.file.is_dir():
            raise PerfModelError(f"{one_line(output)}: {self.file.name} beside it is a folder; allowed: another output")
        if self.file is not None and self.file.is_symlink() and not self.file.exists() and not overwrite:
            raise PerfModelError(
                f"{one_line(output)}: {self.file.name} beside it is a link to a file that does not exist; remove the"
                " link, or begin anew with --overwrite"
            )
        if self.file is not None and self.file.exists() and not overwrite:
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

    def record(self, layer: int, expert: int, found: ExpertLosses, borrowed: bool, weights: bytes) -> None:
        """Keep the numbers of one expert, and the hash of its weights."""
        place = (layer, expert)
        values = (
            found.losses, found.nearest, found.output_variance, found.rows, borrowed,
            np.frombuffer(weights, np.uint8), True,
        )  # fmt: skip
        for name, value in zip(self.arrays, values, strict=True):
            self.arrays[name][place] = value
        self._changed = True
        if time.monotonic() - self._written >= _EVERY_S:
            self.flush()

    def check_weights(self, expert_hash: Callable[[int, int], bytes]) -> None:
        """Refuse to go on where the weights of an expert that is done are others by now; all of them are looked at."""
        for layer, expert in np.argwhere(self.done).tolist():
            if self.arrays["weights"][layer, expert].tobytes() != expert_hash(layer, expert):
                raise PerfModelError(
                    f"{one_line(self.output)}: its unfinished build is of something else (the contents of checkpoint"
                    f" changed: row {layer} of its layers, expert {expert}); begin anew with --overwrite"
                )

    def weights_hash(self) -> str:
        """SHA-256 of the weights that the numbers were made from, all experts together."""
        return hashlib.sha256(self.arrays["weights"].tobytes()).hexdigest()

    def kept(self) -> str:
        """How to go on after a failure, for its message; empty where nothing is done."""
        done = int(self.done.sum())
        if self.file is None or not done:
            return ""
        return (
            f"; {done} of {self.done.size} experts are done and kept: go on with --resume when this is mended, or begin"
            " anew with --overwrite"
        )

    def flush(self) -> None:
        """Put everything so far on the disk."""
        if self.file is not None and self._changed:
            text = json.dumps(self.identity)
            stored = {"identity": np.array(text), "sha256": np.array(_content_hash(self.arrays, text))}
            write_npz(self.file, {**self.arrays, **stored})
            self._changed, self._written = False, time.monotonic()

    def discard(self) -> None:
        """Remove the file: the table is finished."""
        if self.file is not None:
            self.file.unlink(missing_ok=True)

    def _read(self, file: Path, output: str) -> dict[str, NDArray[Any]]:
        anew = "begin anew with --overwrite"
        if self.output is not None and self.output.exists():
            anew += ", which also replaces the finished table that is there"
        try:
            found = {name: np.array(array) for name, array in read_npz(file, [*self.arrays, *_TEXTS]).items()}
            text, digest = (_text(found, name) for name in _TEXTS)
            identity = json.loads(text)
            if not isinstance(identity, dict):
                raise ValueError("identity does not say what it was made from")
            other = differences(identity, self.identity)
            if not other:
                self._check(found)
                if digest != _content_hash(self.arrays | found, text):
                    raise ValueError("its numbers are not those that were written")
        except (TraceError, ValueError, RecursionError) as error:
            raise PerfModelError(
                f"{one_line(output)}: its unfinished build is damaged ({one_line(error)}); {anew}"
            ) from None
        if other:
            raise PerfModelError(f"{one_line(output)}: its unfinished build is of something else ({other}); {anew}")
        return found

    def _check(self, found: Mapping[str, NDArray[Any]]) -> None:
        """Raise ValueError for arrays that no unfinished build of this could hold."""
        for name, array in self.arrays.items():
            if name not in found:
                raise ValueError(f"array {name} is missing")
            if found[name].shape != array.shape or found[name].dtype != array.dtype:
                raise ValueError(f"array {name}")
        done = found["done"]
        for name, array in self.arrays.items():
            if array.dtype == np.float64 and not _are_losses(found[name][done]):
                raise ValueError(f"array {name}")
        if (found["rows"] != self._rows)[done].any():
            raise ValueError("array rows")


def _text(found: dict[str, NDArray[Any]], name: str) -> str:
    """Take a text out of what was read."""
    if name not in found:
        raise ValueError(f"array {name} is missing")
    if found[name].size != 1:
        raise ValueError(f"array {name}")
    return str(found.pop(name).item())


def _content_hash(arrays: Mapping[str, NDArray[Any]], identity: str) -> str:
    """SHA-256 of all numbers of an unfinished build, and of what they were made from."""
    digest = hashlib.sha256(identity.encode())
    for name, array in arrays.items():
        digest.update(f" {name} {array.dtype.str} {array.shape} ".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def _are_losses(values: NDArray[np.float64]) -> bool:
    return bool(np.isfinite(values).all() and (values >= 0).all())


def made_from(table: LossTable) -> dict[str, Any]:
    """What a finished table was made from, the weights too, as far as its metadata says it."""
    hashes = table.info.get("sha256")
    options = {name: table.info[name] for name in OPTIONS if name in table.info}
    return {**options, "bits": list(table.bits), **(hashes if isinstance(hashes, dict) else {})}


def differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    """What a build was made from and another one is made from, where they differ; empty where they do not."""
    now = json.loads(json.dumps(here))
    names = [name for name in {**there, **now} if there.get(name) != now.get(name)]
    if "program" in names:
        return "the program changed"
    return ", ".join(
        _contents(name.replace("_", "-"), there.get(name), now.get(name))
        if name in ("checkpoint", "calibration", "held_out")
        else f"{name.replace('_', ' ')} {_short(there.get(name))} there, {_short(now.get(name))} here"
        for name in names
    )


def _contents(name: str, there: Any, here: Any) -> str:
    return f"the contents of {name} changed" if there and here else f"{name} {'here' if here else 'there'} only"


def _short(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else shown(value)


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
