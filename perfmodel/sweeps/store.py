"""Sweeps on disk: finished blocks are kept, so that a killed sweep goes on where it stopped.

A sweep is a Zarr folder (see ``folder.py``), cut into blocks, one Zarr chunk of every metric a block. Beside the
manifest there is a journal that gets a line after each block. A line is written only when the chunk files it speaks
of are on the disk, so what the journal lists is whole, whenever the process dies. The folder appears under its name
together with its manifest, and only one process at a time holds it.
"""

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from perfmodel.errors import PerfModelError, PlacementError
from perfmodel.hardware.files import path_text
from perfmodel.paths import replace_when_done
from perfmodel.sweeps import folder as folders
from perfmodel.sweeps.dataset import template
from perfmodel.sweeps.design import Block
from perfmodel.sweeps.folder import (
    FORMAT,
    MANIFEST,
    beside,
    discard,
    flush,
    in_words,
    put_back,
    put_in_place,
    read_manifest,
)
from perfmodel.sweeps.identity import differences, rests_on
from perfmodel.sweeps.provenance import closing_attributes
from perfmodel.sweeps.request import Priced, Request

JOURNAL = "perfmodel-blocks.jsonl"


class Store:
    """A sweep on disk, finished or not; build it with `open_store`, inside `claim`.

    path : the Zarr folder. request : what is computed. blocks : all of them, in order. done : the lines of the
    journal by number of block. complete : whether nothing is left to do. new : whether this process made it.
    """

    def __init__(self, path: Path, request: Request, manifest: Mapping[str, Any], *, new: bool = False) -> None:
        self.path, self.request, self.new = path, request, new
        self.points_per_block = int(manifest["points_per_block"])
        self.blocks: Sequence[Block] = request.design.blocks(self.points_per_block)
        self.complete = bool(manifest["complete"])
        self._manifest = dict(manifest)
        self.done: dict[int, dict[str, Any]] = {}
        if not self.complete:
            import zarr

            try:
                folders.check_sizes(path, manifest["bytes"])
                # By name, so that other files in the folder do not matter.
                self._arrays: dict[str, Any] = {
                    name: _every_chunk(zarr.open_array(str(path / name), mode="r+")) for name in request.metrics
                }
                json.loads((path / "zarr.json").read_text(encoding="utf-8"))
            except Exception as error:  # Zarr raises many kinds of errors when its files are changed
                what = " ".join(str(error).split())[:200] or type(error).__name__
                raise PerfModelError(f"{path_text(path)}: damaged ({what}); begin anew with --overwrite") from None
            self._read_journal()
            self._own = self._identity()

    @property
    def pending(self) -> Iterator[Block]:
        """Blocks that are not on the disk."""
        return iter(()) if self.complete else (block for block in self.blocks if block.index not in self.done)

    def write(self, block: Block, priced: Priced) -> None:
        """Put a block on the disk, and then its line into the journal.

        Raises
        ------
        PerfModelError : the disk is full or gone, or the folder was removed, moved or replaced meanwhile.
        """
        with self._in_words():
            size = 0
            for name, array in self._arrays.items():
                self._check_there()
                array[block.slices] = priced.values[name]
                chunk = self._chunk(name, array, block)
                flush(chunk)
                size += chunk.stat().st_size
            line = {"block": block.index, "bytes": size, "infeasible": priced.infeasible}
            self._check_there()
            with (self.path / JOURNAL).open("a", encoding="utf-8") as journal:
                journal.write(json.dumps(line) + "\n")
                journal.flush()
                os.fsync(journal.fileno())
        self.done[block.index] = line

    def close(self) -> None:
        """Mark the sweep as complete, with the attributes that only the whole of it can tell.

        Raises
        ------
        PlacementError : not a single point has a plan; the output is then what it was before.
        PerfModelError : as in `write`; or blocks were lost.
        """
        try:
            attributes = closing_attributes(self.request, self.infeasible)
        except PlacementError:
            self._undo()
            raise
        with self._in_words():
            self._check_there()
            names = list(template(self.request).variables)
            stated = folders.sizes(self.path, map(str, names))
            metadata = sum((self.path / name / "zarr.json").stat().st_size for name in self._arrays)
            chunks = sum(line["bytes"] for line in self.done.values())
            if sum(stated[name] for name in self._arrays) != metadata + chunks:
                raise PerfModelError(
                    f"{path_text(self.path)}: blocks were lost or changed while others were written; compute them"
                    " again with --resume"
                )
            folders.gather(self.path, map(str, names), attributes)
            self._manifest |= {"complete": True, "bytes": stated}
            folders.write_json(self.path / MANIFEST, self._manifest)
        self.complete = True
        with contextlib.suppress(OSError):  # what is left of the way here; the sweep itself is whole
            (self.path / JOURNAL).unlink()
            discard(beside(self.path, "previous"))

    def give_up(self) -> None:
        """Leave no store behind that this process made and that holds no block: the output is what it was before."""
        if self.new and not self.done and not self.complete:
            self._undo()

    @property
    def infeasible(self) -> dict[str, int]:
        """Number of points without a plan by reason; in the order of blocks, whatever the order they were done in."""
        return merged({number: line["infeasible"] for number, line in self.done.items()})

    def _undo(self) -> None:
        if self._is_there():
            discard(self.path)
        put_back(self.path)

    def _identity(self) -> tuple[int, ...]:
        """What tells this folder from another one of the same name."""
        own, manifest = self.path.stat(), (self.path / MANIFEST).stat()
        return own.st_dev, own.st_ino, manifest.st_ino, manifest.st_mtime_ns

    def _is_there(self) -> bool:
        try:
            return self._identity() == self._own
        except OSError:
            return False

    def _check_there(self) -> None:
        """Zarr makes folders that it does not find, so it must not be asked to write when this one is gone."""
        if not self._is_there():
            raise PerfModelError(
                f"{path_text(self.path)}: was removed, moved or replaced while it was written, so nothing more is"
                " written; if its folder still exists, move it back and go on with --resume"
            )

    def _in_words(self) -> Any:
        kept = "what is finished is kept, go on with --resume" if self.done or not self.new else "nothing was finished"
        return written(self.path, kept)

    def _read_journal(self) -> None:
        """Take over what is whole: complete lines, of blocks whose chunks are all there."""
        journal = self.path / JOURNAL
        lines = journal.read_bytes().splitlines(keepends=True) if journal.exists() else []
        for line in lines:
            try:
                entry = json.loads(line)
                block = self.blocks[entry["block"]]
                whole = line.endswith(b"\n") and isinstance(entry["infeasible"], dict) and entry["block"] >= 0
                if whole and entry["bytes"] == self._bytes(block):
                    self.done[block.index] = entry
            except (OSError, ValueError, KeyError, TypeError, IndexError):  # cut off in the middle, or lost
                continue
        # What the dead process was writing: half a line, and files under temporary names.
        with replace_when_done(journal) as temporary:
            temporary.write_text("".join(json.dumps(entry) + "\n" for entry in self.done.values()), encoding="utf-8")
        for name in self._arrays:
            for stray in (self.path / name).glob("*.partial"):
                stray.unlink()

    def _bytes(self, block: Block) -> int:
        return sum(self._chunk(name, array, block).stat().st_size for name, array in self._arrays.items())

    def _chunk(self, name: str, array: Any, block: Block) -> Path:
        """File of a block in the folder of a metric."""
        place = tuple(cut.start // size for cut, size in zip(block.slices, array.chunks, strict=True))
        return self.path / name / str(array.metadata.encode_chunk_key(place))


def open_store(
    path: Path, request: Request, points_per_block: Callable[[], int], *, resume: bool, overwrite: bool
) -> Store:
    """The store of a sweep: begun anew, taken up again, or (with ``resume``) found complete.

    Parameters
    ----------
    points_per_block : asked for a new store; one that goes on keeps its blocks.
    resume : go on with an unfinished sweep of the same request; begin where there is none.
    overwrite : throw away an unfinished sweep.

    A finished sweep is replaced like any output: it stays aside, as ``.NAME.perfmodel-previous.zarr``, until the new
    one is complete.

    Raises
    ------
    PerfModelError : the path holds something else than a sweep, an unfinished sweep without ``resume`` and
        ``overwrite``, with ``resume`` a sweep with other inputs; or the place cannot be written.
    """
    with written(path, "nothing was changed"):
        put_back(path)
        manifest = read_manifest(path, "; it is left alone, choose another output")
        if manifest is not None and resume:
            _check_same(path, manifest, request)
            return Store(path, request, manifest)
        if manifest is not None and not manifest["complete"] and not overwrite:
            raise PerfModelError(
                f"{path_text(path)}: holds an unfinished sweep; go on with --resume, or begin anew with --overwrite"
                " (in Python: resume=True, overwrite=True)"
            )
        fresh = beside(path, "new")
        try:
            stated = _create(fresh, request, points_per_block())
            if manifest is not None and not manifest["complete"]:
                discard(path)
            put_in_place(fresh, path)
        finally:
            discard(fresh)
        return Store(path, request, stated, new=True)


@contextlib.contextmanager
def written(path: Path, kept: str) -> Iterator[None]:
    """A disk that is full, or gone, in words, and what becomes of what was written before."""
    try:
        yield
    except OSError as error:
        raise PerfModelError(f"{path_text(path)}: cannot be written ({in_words(error)}); {kept}") from None


def merged(infeasible: Mapping[int, Mapping[str, int]]) -> dict[str, int]:
    """Counts of all blocks by reason, in the order of blocks."""
    found: dict[str, int] = {}
    for number in sorted(infeasible):
        for reason, count in infeasible[number].items():
            found[reason] = found.get(reason, 0) + count
    return found


def _create(folder: Path, request: Request, points_per_block: int) -> dict[str, Any]:
    """A store without results: coordinates, empty metrics, manifest, which is returned."""
    import zarr
    from zarr.codecs import BloscCodec

    discard(folder)
    frame = template(request)
    folders.write_arrays(frame.drop_vars(list(frame.data_vars)), folder)
    for name, variable in frame.data_vars.items():
        zarr.create_array(
            str(folder / str(name)),
            shape=variable.shape,
            chunks=request.design.chunks(points_per_block),
            dtype=request.dtype,
            fill_value=float("nan"),
            dimension_names=[str(dim) for dim in variable.dims],
            attributes=dict(variable.attrs),
            compressors=BloscCodec(cname="lz4", clevel=5, shuffle="shuffle"),
            chunk_key_encoding={"name": "default", "separator": "."},  # all chunks in one folder
        )
    folders.gather(folder, map(str, frame.variables))
    manifest = {
        "format": FORMAT,
        "key": request.key(),
        "request": request.to_dict(),
        "rests_on": rests_on(request.scenario, request.design),
        "points_per_block": points_per_block,
        "blocks": len(request.design.blocks(points_per_block)),
        "bytes": folders.sizes(folder, map(str, frame.coords)),
        "complete": False,
    }
    folders.write_json(folder / MANIFEST, manifest)
    return manifest


def _check_same(path: Path, manifest: Mapping[str, Any], request: Request) -> None:
    if manifest.get("key") == request.key():
        return
    differ = differences(
        (manifest.get("request"), manifest.get("rests_on")),
        (request.to_dict(), rests_on(request.scenario, request.design)),
    )
    more = f" and {len(differ) - 3} more" if len(differ) > 3 else ""
    raise PerfModelError(
        f"{path_text(path)}: is a sweep with other inputs ({'; '.join(differ[:3]) or 'other contents'}{more}); give the"
        " same ones, another output, or --overwrite without --resume"
    )


def _every_chunk(array: Any) -> Any:
    """The same array, written with one chunk for every block, also where no point could be priced."""
    return array.with_config({"write_empty_chunks": True})
