"""Finding a checkpoint: a folder, or an id in the local Hugging Face cache."""

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perfmodel.errors import PerfModelError
from perfmodel.record.libraries import TOLD_OFFLINE, import_transformers
from perfmodel.routing.npz import one_line, shown

#: "name" or "owner/name", as the Hugging Face Hub spells it.
_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[\w.-]{1,96})?", re.ASCII)
#: What is downloaded: weights as safetensors and small texts, no code and no pickles.
_FILES = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "model.safetensors.index.json",
    "model*.safetensors",
]


@dataclass(frozen=True)
class Found:
    """A checkpoint on this machine.

    folder : where its files lie
    name : of the model: the folder's name, or the id
    revision : commit of the files where they lie in the Hugging Face cache, otherwise None
    """

    folder: Path
    name: str
    revision: str | None


def find_checkpoint(model: str | Path, *, download: bool = False) -> Found:
    """The checkpoint that a folder or an id names.

    A folder that exists comes before an id. Files are fetched from the Hugging Face Hub only with ``download``, and
    then only those that are missing or newer there; without it nothing is looked up elsewhere.

    Raises :class:`PerfModelError` for what is neither, for an id that is not in the local cache, and for a download
    that fails or that the environment forbids (``HF_HUB_OFFLINE``).
    """
    given: object = model
    if not isinstance(given, str | os.PathLike) or not os.fspath(given):
        raise PerfModelError(f"model: found {shown(model)}, allowed: a checkpoint's folder, or its id")
    text = os.fsdecode(model)
    name = one_line(text)
    try:
        folder = Path(text)
        there, other = folder.is_dir(), folder.exists()
    except (OSError, ValueError):  # too long, or a byte zero
        there, other = False, False
    if there:
        if download:
            raise PerfModelError(f"download: of no use with {name}, which is a folder here")
        return _in_cache(folder)
    if other:
        raise PerfModelError(f"{name}: is no folder; allowed: a checkpoint's folder, or its id")
    if not _ID.fullmatch(text) or ".." in text or "--" in text:
        raise PerfModelError(f"{name}: no such folder, and no id such as owner/name")
    return _in_cache(_snapshot(text, download))


def _in_cache(folder: Path) -> Found:
    """What the folder is called; one in the cache, ``models--owner--name/snapshots/commit``, after its id."""
    whole = folder.absolute()
    owner = whole.parent.parent.name
    if whole.parent.name == "snapshots" and owner.startswith("models--"):
        return Found(folder, owner.removeprefix("models--").replace("--", "/"), whole.name)
    name = folder.resolve().name or "model"
    return Found(folder, name[:200] if name.isprintable() else ascii(name)[:200], None)


def _snapshot(model: str, download: bool) -> Path:
    import_transformers()  # brings the library of the Hub, and says how to install both
    import huggingface_hub as hub

    try:
        with _online(hub) if download else contextlib.nullcontext():
            return Path(hub.snapshot_download(model, local_files_only=not download, allow_patterns=_FILES))
    except PerfModelError:
        raise
    except Exception as error:  # of the network, of the disk, of the Hub's answers
        if download:
            raise PerfModelError(f"{model}: cannot be downloaded ({one_line(error)})") from error
        cache = one_line(hub.constants.HF_HUB_CACHE)
        raise PerfModelError(
            f"{model}: no such folder, and not whole in the local cache ({cache}); allowed: --download, or a folder"
        ) from error


@contextlib.contextmanager
def _online(hub: Any) -> Iterator[None]:
    """Connections to the Hub inside the block; this package is offline otherwise."""
    if TOLD_OFFLINE:
        raise PerfModelError("download: found HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE set, allowed where neither is")
    before = hub.constants.HF_HUB_OFFLINE
    hub.constants.HF_HUB_OFFLINE = False
    try:
        yield
    finally:
        hub.constants.HF_HUB_OFFLINE = before
