"""Sweeps on disk: finished blocks are kept, so that a killed sweep goes on where it stopped.

A sweep is a Zarr folder with two files of its own. The manifest says what is computed and how it is cut into blocks,
one Zarr chunk of every metric a block; the journal gets a line after each block. A line is written only when the
chunk files it speaks of are on the disk, so what the journal lists is whole, whenever the process dies. The folder
appears under its name together with its manifest, and only one process at a time holds it.
"""

import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from perfmodel.errors import PerfModelError
from perfmodel.paths import replace_when_done
from perfmodel.sweeps.dataset import FORMAT, MANIFEST, consolidate, template
from perfmodel.sweeps.design import Block
from perfmodel.sweeps.provenance import closing_attributes
from perfmodel.sweeps.request import Priced, Request

JOURNAL = "perfmodel-blocks.jsonl"


class Store:
    """A sweep on disk, finished or not; build it with `open_store`, inside `claim`.

    path : the Zarr folder. request : what is computed. blocks : all of them, in order. done : the lines of the
    journal by number of block. complete : whether nothing is left to do.
    """

    def __init__(self, path: Path, request: Request, manifest: Mapping[str, Any]) -> None:
        self.path, self.request = path, request
        self.points_per_block = int(manifest["points_per_block"])
        self.blocks: Sequence[Block] = request.design.blocks(self.points_per_block)
        self.complete = bool(manifest["complete"])
        self._manifest = dict(manifest)
        self.done: dict[int, dict[str, Any]] = {}
        if not self.complete:
            import zarr

            try:
                group = zarr.open_group(str(path), mode="r+", use_consolidated=False)
                self._arrays: dict[str, Any] = {name: _every_chunk(group[name]) for name in request.metrics}
            except (OSError, ValueError, KeyError) as error:
                raise PerfModelError(f"{path}: damaged ({error}); begin anew with --overwrite") from None
            self._read_journal()

    @property
    def pending(self) -> Iterator[Block]:
        """Blocks that are not on the disk."""
        return iter(()) if self.complete else (block for block in self.blocks if block.index not in self.done)

    def write(self, block: Block, priced: Priced) -> None:
        """Put a block on the disk, and then its line into the journal."""
        for name, array in self._arrays.items():
            array[block.slices] = priced.values[name]
            _flush(self._chunk(array, block))
        line = {"block": block.index, "infeasible": priced.infeasible}
        with (self.path / JOURNAL).open("a", encoding="utf-8") as journal:
            journal.write(json.dumps(line) + "\n")
            journal.flush()
            os.fsync(journal.fileno())
        self.done[block.index] = line

    def close(self, infeasible: Mapping[str, int]) -> None:
        """Mark the sweep as complete, with the attributes that only the whole of it can tell.

        infeasible : number of points without a plan, by reason.

        Raises
        ------
        PerfModelError : not a single point has a plan; the output is then what it was before.
        """
        import zarr

        try:
            attributes = closing_attributes(self.request, infeasible)
        except PerfModelError:
            _discard(self.path)
            if _previous(self.path).exists():
                _previous(self.path).rename(self.path)
            raise

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the two files that are not Zarr's
            zarr.open_group(str(self.path), mode="r+", use_consolidated=False).attrs.update(attributes)
        consolidate(self.path)
        self._manifest["complete"] = True
        _write_manifest(self.path, self._manifest)
        self.complete = True
        (self.path / JOURNAL).unlink()
        _discard(_previous(self.path))

    def _read_journal(self) -> None:
        """Take over what is whole: complete lines, of blocks whose chunks are all there."""
        journal = self.path / JOURNAL
        lines = journal.read_bytes().splitlines(keepends=True) if journal.exists() else []
        for line in lines:
            try:
                entry = json.loads(line)
                block = self.blocks[entry["block"]]
                whole = line.endswith(b"\n") and isinstance(entry["infeasible"], dict)
            except (ValueError, KeyError, TypeError, IndexError):  # cut off in the middle
                continue
            if whole and all(self._chunk(array, block).is_file() for array in self._arrays.values()):
                self.done[block.index] = entry
        # What the dead process was writing: half a line, and files under temporary names.
        with replace_when_done(journal) as temporary:
            temporary.write_text("".join(json.dumps(entry) + "\n" for entry in self.done.values()), encoding="utf-8")
        for name in self._arrays:
            for stray in (self.path / name).glob("*.partial"):
                stray.unlink()

    def _chunk(self, array: Any, block: Block) -> Path:
        """File of a block in the folder of a metric."""
        place = tuple(cut.start // size for cut, size in zip(block.slices, array.chunks, strict=True))
        return self.path / str(array.basename) / str(array.metadata.encode_chunk_key(place))


def open_store(
    path: Path, request: Request, points_per_block: Callable[[], int], *, resume: bool, overwrite: bool
) -> Store:
    """The store of a sweep: begun anew, taken up again, or (with ``resume``) found complete.

    Parameters
    ----------
    points_per_block : asked for a new store; one that goes on keeps its blocks.
    resume : go on with an unfinished sweep of the same request; begin where there is none.
    overwrite : throw away an unfinished sweep.

    A finished sweep is replaced like any output: it stays aside, as ``.NAME.previous.zarr``, until the new one is
    complete.

    Raises
    ------
    PerfModelError : the path holds something else than a sweep, an unfinished sweep without ``resume`` and
        ``overwrite``, or with ``resume`` a sweep with other inputs.
    """
    manifest = read_manifest(path)
    if manifest is not None and resume:
        _check_same(path, manifest, request)
        return Store(path, request, manifest)
    if manifest is not None and not manifest["complete"] and not overwrite:
        raise PerfModelError(
            f"{path}: holds an unfinished sweep; go on with --resume, or begin anew with --overwrite (in Python:"
            " resume=True, overwrite=True)"
        )
    fresh = _create(path, request, points_per_block())
    if manifest is not None:
        if manifest["complete"]:
            _discard(_previous(path))
            path.rename(_previous(path))
        else:
            _discard(path)
    fresh.rename(path)
    found = read_manifest(path)
    assert found is not None  # it was written just now
    return Store(path, request, found)


def read_manifest(path: Path) -> dict[str, Any] | None:
    """The manifest of a sweep, or None where nothing is; PerfModelError where something else is."""
    if not os.path.lexists(path):
        return None
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        if manifest["format"] == FORMAT and manifest["points_per_block"] >= 1 and manifest["complete"] in (True, False):
            return dict(manifest)
    except (OSError, ValueError, KeyError, TypeError):
        pass
    raise PerfModelError(
        f"{path}: exists and is no sweep that this version of perfmodel wrote; it is left alone, choose another output"
    )


def _write_manifest(folder: Path, manifest: Mapping[str, Any]) -> None:
    with replace_when_done(folder / MANIFEST) as temporary:
        temporary.write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
        _flush(temporary)


def _create(path: Path, request: Request, points_per_block: int) -> Path:
    """A store without results under a temporary name: coordinates, empty metrics, manifest."""
    import zarr
    from zarr.codecs import BloscCodec

    folder = path.with_name(f".{path.name}.new")
    _discard(folder)
    frame = template(request)
    frame.drop_vars(list(frame.data_vars)).to_zarr(folder, mode="w", zarr_format=3, consolidated=False)
    group = zarr.open_group(str(folder), mode="r+", use_consolidated=False)
    for name, variable in frame.data_vars.items():
        group.create_array(
            str(name),
            shape=variable.shape,
            chunks=request.design.chunks(points_per_block),
            dtype=request.dtype,
            fill_value=float("nan"),
            dimension_names=[str(dim) for dim in variable.dims],
            attributes=dict(variable.attrs),
            compressors=BloscCodec(cname="lz4", clevel=5, shuffle="shuffle"),
            chunk_key_encoding={"name": "default", "separator": "."},  # all chunks in one folder
        )
    manifest = {
        "format": FORMAT,
        "key": request.key(),
        "request": request.to_dict(),
        "points_per_block": points_per_block,
        "blocks": len(request.design.blocks(points_per_block)),
        "complete": False,
    }
    _write_manifest(folder, manifest)
    return folder


def _check_same(path: Path, manifest: Mapping[str, Any], request: Request) -> None:
    if manifest.get("key") == request.key():
        return
    before, now = _flat(manifest.get("request")), _flat(json.loads(json.dumps(request.to_dict())))
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    what = "; ".join(
        f"{name or 'request'}: {_short(before.get(name))} there, {_short(now.get(name))} here" for name in names[:3]
    )
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    raise PerfModelError(
        f"{path}: is a sweep with other inputs ({what or 'its files or versions differ'}{more}); give the same ones,"
        " another output, or --overwrite without --resume"
    )


def _flat(value: Any, name: str = "") -> dict[str, Any]:
    """Nested tables as one, by dotted names."""
    if not isinstance(value, dict):
        return {name: value}
    found: dict[str, Any] = {}
    for key, inner in value.items():
        found |= _flat(inner, f"{name}.{key}" if name else str(key))
    return found


def _short(value: Any) -> str:
    text = "nothing" if value is None else json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _every_chunk(array: Any) -> Any:
    """The same array, written with one chunk for every block, also where no point could be priced."""
    return array.with_config({"write_empty_chunks": True})


def _flush(file: Path) -> None:
    """Wait until a file is on the disk."""
    handle = os.open(file, os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _previous(path: Path) -> Path:
    return path.with_name(f".{path.stem}.previous{path.suffix}")


def _discard(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)
