"""What a model is asked: prompts from a file, or given in Python."""

import difflib
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perfmodel.errors import PerfModelError
from perfmodel.record.text import read_content
from perfmodel.routing.importers.files import parse_json, read_lines
from perfmodel.routing.npz import one_line, shown

#: Longest line of a file of prompts, and its largest size [byte].
LONGEST, LARGEST = 2**24, 2**30
_KEYS = ("prompt", "messages", "label")
_MESSAGE = ("role", "content")


@dataclass(frozen=True)
class Prompt:
    """One prompt, checked when made.

    text : what the model reads, as it is; or None where there are messages
    messages : role and content of every message of a conversation, which the checkpoint's chat template makes a text
        of, with an answer begun; or None
    label : one line, such as its domain, kept with the sequence; or None
    where : for messages of errors

    Raises :class:`PerfModelError` for both or neither of text and messages, and for what is no text.
    """

    text: str | None = None
    messages: tuple[tuple[str, str], ...] | None = None
    label: str | None = None
    where: str = "prompt"

    def __post_init__(self) -> None:
        if (self.text is None) == (self.messages is None):
            raise PerfModelError(f"{self.where}: found both or neither of prompt and messages, allowed: one of them")
        parts = [self.text] if self.messages is None else [part for message in self.messages for part in message]
        if not parts:
            raise PerfModelError(f"{self.where}: messages is empty, allowed: one message or more")
        for part in parts:
            _check_text(part, self.where)
        label: object = self.label
        if label is None:
            return
        if not isinstance(label, str) or not label.strip() or not label.isprintable() or len(label) > 200:
            raise PerfModelError(f"{self.where}: label is {shown(label)}, allowed: a line of 1 to 200 letters")


@dataclass(frozen=True)
class Prompts:
    """Prompts in order, and where they are from.

    items : one or more
    name, sha256 : of the file, or None
    """

    items: tuple[Prompt, ...]
    name: str | None = None
    sha256: str | None = None


def read_prompts(file: str | Path) -> Prompts:
    """The prompts in a file: one a line; or, where its name ends in ``.jsonl``, one JSON object a line.

    An object has ``prompt`` (text) or ``messages`` (objects with ``role`` and ``content``), and may have a
    ``label``. Lines of blanks are left out. Raises :class:`PerfModelError`, with the line, for anything else.
    """
    path, name = Path(file), one_line(file)
    as_json = path.suffix == ".jsonl"
    items = []
    for number, line in read_lines(path, longest=LONGEST, most=LARGEST):
        if line.strip():
            where = f"{name}: line {number}"
            items.append(_record(parse_json(line, where), where) if as_json else Prompt(line, where=where))
    if not items:
        raise PerfModelError(f"{name}: holds no prompt, allowed: one or more")
    return Prompts(tuple(items), path.name, hashlib.sha256(read_content(path)).hexdigest())


def as_prompts(given: str | Path | Sequence[str | Prompt]) -> Prompts:
    """Prompts from what a caller gave: a file, or texts and prompts."""
    if isinstance(given, str | Path):
        return read_prompts(given)
    found: object = given
    if not isinstance(found, list | tuple) or not all(isinstance(one, str | Prompt) for one in found):
        raise PerfModelError(f"prompts: found {shown(given)}, allowed: a file, or a list of texts")
    if not found:
        raise PerfModelError("prompts: found none, allowed: one or more")
    return Prompts(
        tuple(Prompt(one, where=f"prompt {i}") if isinstance(one, str) else one for i, one in enumerate(found))
    )


def labels_of(prompts: Prompts) -> tuple[str, ...] | None:
    """One label a prompt; "-" for one that has none, and None where no prompt has one."""
    if all(prompt.label is None for prompt in prompts.items):
        return None
    return tuple("-" if prompt.label is None else prompt.label for prompt in prompts.items)


def _record(record: Any, where: str) -> Prompt:
    _check_keys(record, where, _KEYS, needed=())
    messages = record.get("messages")
    if messages is not None:
        if not isinstance(messages, list):
            raise PerfModelError(f"{where}: messages is {shown(messages)}, allowed: a list of objects")
        for message in messages:
            _check_keys(message, f"{where}: a message", _MESSAGE, needed=_MESSAGE)
        messages = tuple((message["role"], message["content"]) for message in messages)
    return Prompt(record.get("prompt"), messages, record.get("label"), where)


def _check_keys(record: Any, where: str, allowed: tuple[str, ...], needed: tuple[str, ...]) -> None:
    if not isinstance(record, dict):
        raise PerfModelError(f"{where} is {shown(record)}, allowed: an object with {', '.join(allowed)}")
    for key in record:
        if key not in allowed:
            near = difflib.get_close_matches(key[:80], allowed, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise PerfModelError(f"{where} has key {shown(key)}{hint}; allowed: {', '.join(allowed)}")
    if missing := [key for key in needed if key not in record]:
        raise PerfModelError(f"{where} lacks {', '.join(missing)}; allowed: {', '.join(allowed)}")


def _check_text(text: object, where: str) -> None:
    if not isinstance(text, str) or not text:
        raise PerfModelError(f"{where}: found {shown(text)}, allowed: a text that is not empty")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PerfModelError(f"{where}: letter {error.start} is a lone surrogate, which no text has") from None
