"""Prompts and answers as text beside a trace, whose metadata is bounded."""

import json
from collections.abc import Sequence
from typing import Any

from perfmodel.errors import PerfModelError
from perfmodel.routing.checks import MAX_METADATA

#: Letters that are left for everything else in the metadata.
REST = 2**16
#: Letters of the table around one prompt and its answer, and fewest that are left for an answer.
_AROUND, _LEAST = len(json.dumps({"prompt": "", "answer": ""})) + 2, 64


def check_prompts(prompts: Sequence[str]) -> None:
    """Refuse prompts that leave no room for answers, before anything runs."""
    needed = sum(_letters(text) + _AROUND + _LEAST for text in prompts)
    if needed > MAX_METADATA - REST:
        raise PerfModelError(
            f"keep_text: the prompts need {needed:,} letters of metadata; allowed: {MAX_METADATA - REST:,}; record "
            "them in several parts, or without their text"
        )


def kept_texts(prompts: Sequence[str], answers: Sequence[str]) -> dict[str, Any]:
    """Entries of the metadata: every prompt with its answer, and how many answers were cut to fit.

    The longest answers are cut, all to one length in letters of JSON, where one letter may take several.
    """
    lengths = [_letters(text) for text in answers]
    room = MAX_METADATA - REST - sum(_letters(text) + _AROUND for text in prompts)
    longest = _longest(lengths, room)
    kept = [text if size <= longest else _cut(text, longest) for text, size in zip(answers, lengths, strict=True)]
    cut = sum(size > longest for size in lengths)
    texts = [{"prompt": asked, "answer": drawn} for asked, drawn in zip(prompts, kept, strict=True)]
    return {"texts": texts, "texts_cut": cut} if cut else {"texts": texts}


def _letters(text: str) -> int:
    """Letters of a text in JSON, without its quotes."""
    return len(json.dumps(text)) - 2


def _longest(lengths: Sequence[int], room: int) -> int:
    """The largest length to which all may be cut so that they take no more than ``room``."""
    left = room
    for count, length in zip(range(len(lengths), 0, -1), sorted(lengths), strict=True):
        if length * count > left:
            return left // count
        left -= length
    return max(lengths, default=0)


def _cut(text: str, longest: int) -> str:
    """The start of a text that takes at most so many letters in JSON."""
    low, high = 0, min(len(text), longest)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if _letters(text[:middle]) <= longest else (low, middle - 1)
    return text[:low]
