"""A first, cheap look at a file of unknown layout."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from perfmodel.errors import TraceError
from perfmodel.routing.importers.arrays import npy_declared, read_npy, read_safetensors, safetensors_declared
from perfmodel.routing.importers.files import LARGEST_JSON, check_file, parse_json, read_json, read_lines, reason
from perfmodel.routing.importers.pt_outline import Outline, outline
from perfmodel.routing.npz import declared, npz_keys, one_line, open_archive, read_npz

#: Bytes that are looked at before anything else is read.
HEAD = 2**16
#: Bytes that the first member's name of an archive lies in.
_FIRST_NAME = 1024

Kind = Literal["folder", "npz", "npy", "pt", "safetensors", "gguf", "json", "jsonl", "text", "pickle", "binary"]


@dataclass(frozen=True)
class Probe:
    """A file or folder, its first bytes, and what can be told from them without reading on.

    Everything else is read when it is first asked for, once, and checked as its reader checks it: a file whose first
    bytes promise what the rest does not keep raises TraceError.

    path : the file or folder
    size : bytes; 0 for a folder
    head : up to `HEAD` first bytes; none of a folder
    """

    path: Path
    size: int
    head: bytes

    @classmethod
    def of(cls, path: str | Path) -> "Probe":
        """Look at a path; TraceError for what is neither a folder nor a regular file with something in it."""
        place = Path(path)
        try:
            if place.is_dir():
                return cls(place, 0, b"")
            size = check_file(place)
            with place.open("rb") as file:
                return cls(place, size, file.read(HEAD))
        except (OSError, ValueError) as error:
            if isinstance(error, TraceError):
                raise
            raise TraceError(f"{one_line(place)}: cannot be read ({reason(error)})") from None

    @cached_property
    def kind(self) -> Kind:
        """What sort of file it is, by its first bytes; of a zip archive, by what it holds."""
        if not self.size:
            return "folder"
        if self.head.startswith((b"PK\x03\x04", b"PK\x05\x06")):
            return self._zip_kind()
        for magic, kind in _MAGIC:
            if self.head.startswith(magic):
                return kind
        if self.size > 9 and self.head[8:9] == b"{" and int.from_bytes(self.head[:8], "little") <= self.size - 8:
            return "safetensors"
        if b"\0" in self.head:
            return "binary"
        return self._text_kind()

    @cached_property
    def lines(self) -> tuple[str, ...]:
        """The lines that lie wholly in the first bytes, without line breaks; none of what is no text."""
        whole = self.head if self.size <= HEAD else self.head[: self.head.rfind(b"\n") + 1]
        try:
            return tuple(whole.decode("utf-8-sig").splitlines()) if b"\0" not in whole else ()
        except UnicodeDecodeError:
            return ()

    @cached_property
    def document(self) -> Any:
        """The document of a JSON file, or the `outline` of a ``.pt`` file, which needs no torch; None of others."""
        if self.kind == "json":
            return read_json(self.path)
        return outline(self.path) if self.kind == "pt" else None

    @cached_property
    def first(self) -> Any:
        """The first line of a file of JSON lines, as a document; None of other files."""
        if self.kind != "jsonl":
            return None
        lines = read_lines(self.path, longest=LARGEST_JSON)
        number, text = next(pair for pair in lines if pair[1].strip())
        return parse_json(text, f"{one_line(self.path)}: line {number}")

    @cached_property
    def shapes(self) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]]]:
        """Shape and type of every array, by name; of a ``.pt`` file those on its top level.

        The array of a ``.npy`` file, and of a ``.pt`` file that is one tensor, has the name "". A tensor of a type
        that NumPy lacks counts as bytes. Files of other kinds have none.
        """
        if self.kind == "npz":
            return declared(self.path, npz_keys(self.path))
        if self.kind == "npy":
            return {"": npy_declared(self.path)}
        if self.kind == "safetensors":
            return {name: (one.shape, one.numpy_dtype) for name, one in safetensors_declared(self.path).items()}
        if self.kind == "pt":
            items = self.document.items() if isinstance(self.document, dict) else [("", self.document)]
            return {str(name): (one.shape, one.dtype) for name, one in items if isinstance(one, Outline)}
        return {}

    def array(self, name: str = "") -> NDArray[Any]:
        """The numbers of one array of `shapes`; read anew each time, so that a probe holds no more than it must."""
        if name not in self.shapes:
            raise TraceError(f"{one_line(self.path)}: holds no array {name!r}")
        if self.kind == "npz":
            return read_npz(self.path, [name])[name]
        if self.kind == "npy":
            return read_npy(self.path)
        if self.kind == "safetensors":
            return read_safetensors(self.path, [name])[name]
        from perfmodel.routing.importers.pt import read_pt  # imported here, because it looks at files through probes

        found = read_pt(self.path)
        return np.asarray(found[name] if name else found)

    def _zip_kind(self) -> Kind:
        try:
            with open_archive(self.path) as archive:
                names = archive.namelist()
        except Exception:  # a damaged list of contents; the reader of such files says what is wrong with it
            return "pt" if b"/data.pkl" in self.head[:_FIRST_NAME] else "npz"
        return "pt" if any(name == "data.pkl" or name.endswith("/data.pkl") for name in names) else "npz"

    def _text_kind(self) -> Kind:
        start = self.head.removeprefix(b"\xef\xbb\xbf").lstrip()
        if start[:1] not in (b"{", b"["):
            return "text" if self.lines or self.size > HEAD else "binary"
        # An object on the first line and another below it: one JSON text a line.
        first, _, rest = start.partition(b"\n")
        if self.size > HEAD and (not rest or rest.isspace()):
            first, rest = self._around_first_line_break()
        one_each = first.rstrip().endswith(b"}") and rest.lstrip()[:1] == b"{"
        return "jsonl" if start[:1] == b"{" and one_each else "json"

    def _around_first_line_break(self) -> tuple[bytes, bytes]:
        """The last bytes before the first line break, and the first ones after it; a block is held at a time."""
        before = b""
        try:
            with self.path.open("rb") as file:
                while block := file.read(2**20):
                    before, found, after = (before[-HEAD:] + block).partition(b"\n")
                    if found:
                        return before, after or file.read(HEAD)
        except OSError as error:
            raise TraceError(f"{one_line(self.path)}: cannot be read ({reason(error)})") from None
        return before, b""


_MAGIC: tuple[tuple[bytes, Kind], ...] = (
    (b"\x93NUMPY", "npy"),
    (b"GGUF", "gguf"),
    (b"FUGG", "gguf"),  # of a machine of the other byte order; its reader says so
    *((bytes([0x80, protocol]), "pickle") for protocol in range(2, 6)),  # also .pt files of torch before 1.6
)
