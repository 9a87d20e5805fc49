"""Prompts as token ids: with the checkpoint's own tokenizer, and its chat template for conversations."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfmodel.errors import PerfModelError
from perfmodel.record.libraries import import_transformers
from perfmodel.record.prompts import Prompt
from perfmodel.record.text import load_tokenizer
from perfmodel.routing.importers.files import LARGEST_JSON, read_bytes
from perfmodel.routing.npz import one_line, shown

_CONFIG, _TEMPLATE = "tokenizer_config.json", "chat_template.jinja"


class Reader:
    """Turns prompts into token ids, and tokens back into text.

    folder : of the checkpoint, with its ``tokenizer.json``
    vocab_size : of the model; token ids lie below

    Raises :class:`PerfModelError` for a tokenizer that is missing or damaged.
    """

    def __init__(self, folder: Path, vocab_size: int) -> None:
        self._folder, self._vocab_size = folder, vocab_size
        self._tokenizer = load_tokenizer(folder)
        self._chat: tuple[str, dict[str, str]] | None = None

    def encode(self, prompts: Sequence[Prompt], most: int | None) -> list[NDArray[np.int64]]:
        """Token ids of every prompt, each at least one and at most ``most``.

        A text gets the marks that the tokenizer itself adds, a conversation those that its template writes. Raises
        :class:`PerfModelError`, with the prompt's place, for another number of tokens, for ids from the vocabulary's
        size on, and for a conversation where there is no template or that its template refuses.
        """
        return [self._encode(prompt, most) for prompt in prompts]

    def decode(self, tokens: NDArray[np.int64]) -> str:
        """The text of tokens, marks included."""
        text: str = self._tokenizer.decode(tokens.tolist(), skip_special_tokens=False)
        return text

    def _encode(self, prompt: Prompt, most: int | None) -> NDArray[np.int64]:
        if prompt.text is not None:
            found = self._tokenizer.encode(prompt.text)
        else:
            found = self._tokenizer.encode(self._conversation(prompt), add_special_tokens=False)
        ids = np.array(found.ids, np.int64)
        if not ids.size:
            raise PerfModelError(f"{prompt.where}: holds no token, allowed: one or more")
        if most is not None and ids.size > most:
            raise PerfModelError(
                f"{prompt.where}: has {ids.size} tokens; allowed: {most}, what the model reads less the new ones"
            )
        if ids.max() >= self._vocab_size:
            raise PerfModelError(
                f"{one_line(self._folder)}: tokenizer.json has token {ids.max()}, but the model's vocab_size is"
                f" {self._vocab_size}"
            )
        return ids

    def _conversation(self, prompt: Prompt) -> str:
        """A conversation as its template writes it, with an answer begun. Templates run in a sandbox."""
        import_transformers()
        from transformers.utils import chat_template_utils

        if self._chat is None:
            self._chat = _read_template(self._folder, prompt.where)
        template, marks = self._chat
        messages = [{"role": role, "content": content} for role, content in prompt.messages or ()]
        render: Any = chat_template_utils.render_jinja_template  # says that it returns a text, and returns a pair
        try:
            texts, _ = render([messages], chat_template=template, add_generation_prompt=True, **marks)
        except Exception as error:  # a template may raise anything
            raise PerfModelError(f"{prompt.where}: the chat template refuses it ({one_line(error)})") from error
        return str(texts[0])


def _read_template(folder: Path, where: str) -> tuple[str, dict[str, str]]:
    """The chat template of a checkpoint, and the marks that it may write, by name."""
    config = _read_config(folder / _CONFIG)
    file = folder / _TEMPLATE
    try:
        template = file.read_text(encoding="utf-8") if file.is_file() else config.get("chat_template")
    except (OSError, UnicodeDecodeError) as error:
        raise PerfModelError(f"{one_line(file)}: cannot be read ({one_line(error)})") from None
    if isinstance(template, list):  # several, by name
        named = {one.get("name"): one.get("template") for one in template if isinstance(one, dict)}
        template = named.get("default")
    if not isinstance(template, str):
        raise PerfModelError(
            f"{where}: is a conversation, but {one_line(folder)} has no chat template; allowed there: prompt"
        )
    marks = {name: _mark(value) for name, value in config.items() if name.endswith("_token")}
    return template, {name: mark for name, mark in marks.items() if mark is not None}


def _read_config(file: Path) -> dict[str, Any]:
    """What a tokenizer's config says; nothing where there is none."""
    if not file.is_file():
        return {}
    try:
        # By Python's own reader: these files often hold a length of 31 digits, which means no limit.
        config = json.loads(read_bytes(file, LARGEST_JSON))
    except (ValueError, RecursionError) as error:
        if isinstance(error, PerfModelError):
            raise
        raise PerfModelError(f"{one_line(file)}: is no JSON ({one_line(error)})") from None
    if not isinstance(config, dict):
        raise PerfModelError(f"{one_line(file)}: is {shown(config)}, allowed: an object")
    return config


def _mark(value: Any) -> str | None:
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None
