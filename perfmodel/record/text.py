"""Text for a model: files read, tokenised with the checkpoint's own tokenizer, and cut into windows."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfmodel.errors import PerfModelError
from perfmodel.record.libraries import import_transformers
from perfmodel.record.options import at_least
from perfmodel.routing.npz import one_line

#: Tokens of one window.
SEQUENCE = 512
#: Tokens taken from all files together.
TOKENS = 16_384


@dataclass(frozen=True)
class Text:
    """One tokenised file.

    name : of the file, without its folder
    sha256 : of its bytes
    ids : token ids, int64 [tokens]
    """

    name: str
    sha256: str
    ids: NDArray[np.int64]


def read_texts(folder: str | Path, files: Sequence[str | Path], vocab_size: int) -> tuple[Text, ...]:
    """Every file, tokenised on its own as the checkpoint's ``tokenizer.json`` does by default.

    Marks such as a begin-of-sequence token are those that the tokenizer itself adds. Raises
    :class:`PerfModelError` for a file that is missing, empty or no UTF-8 text, and for a tokenizer that is
    missing or has ids from ``vocab_size`` on.
    """
    if not files:
        raise PerfModelError("text: found no file, allowed: one or more text files")
    tokenizer = load_tokenizer(Path(folder))
    texts = []
    for file in files:
        content = read_content(file)
        try:
            text = content.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise PerfModelError(f"{one_line(file)}: is no UTF-8 text ({error.reason} at byte {error.start})") from None
        ids = np.asarray(tokenizer.encode(text).ids, np.int64)
        if ids.size < 2:
            raise PerfModelError(f"{one_line(file)}: holds {ids.size} tokens, allowed: two or more")
        if ids.max() >= vocab_size:
            raise PerfModelError(
                f"{one_line(folder)}: tokenizer.json has token {ids.max()}, but the model's vocab_size is {vocab_size}"
            )
        texts.append(Text(Path(file).name, hashlib.sha256(content).hexdigest(), ids))
    return tuple(texts)


def cut(texts: Sequence[Text], sequence: int = SEQUENCE, tokens: int | None = None) -> list[NDArray[np.int64]]:
    """Windows of ``sequence`` tokens that neither overlap nor cross files, in a fixed order.

    The first window of every file comes first, then the second of every file, and so on, so that files count
    alike until the shorter ones end. A file's last window may be shorter; one of a single token is left out,
    since nothing in it is predicted. With ``tokens`` the windows stop there; the last one is cut to fit.
    """
    at_least(sequence, 2, "sequence")
    pieces = [[text.ids[start : start + sequence] for start in range(0, text.ids.size, sequence)] for text in texts]
    dealt = [file[turn] for turn in range(max(map(len, pieces))) for file in pieces if turn < len(file)]
    left = sum(text.ids.size for text in texts) if tokens is None else at_least(tokens, 2, "tokens")
    windows = []
    for window in dealt:
        piece = window[:left]
        if piece.size > 1:
            windows.append(piece)
            left -= piece.size
    return windows


def batches(windows: Sequence[NDArray[np.int64]], tokens: int = 4096) -> list[NDArray[np.int64]]:
    """Neighbouring windows of equal length stacked, [windows, tokens], so that nothing is ever padded.

    tokens : of one batch at most, if a single window is not longer already
    """
    stacked: list[list[NDArray[np.int64]]] = []
    for window in windows:
        last = stacked[-1] if stacked else []
        if last and last[0].size == window.size and (len(last) + 1) * window.size <= tokens:
            last.append(window)
        else:
            stacked.append([window])
    return [np.stack(group) for group in stacked]


def check_sequence(sequence: int, positions: int | None) -> None:
    """Refuse windows of one token, where nothing is predicted, or of more than the model reads at once."""
    at_least(sequence, 2, "sequence")
    if positions is not None and sequence > positions:
        raise PerfModelError(f"sequence: found {sequence} tokens, allowed: 2 to {positions} for this checkpoint")


def read_content(file: str | Path) -> bytes:
    """The bytes of a regular file. Raises :class:`PerfModelError` where there is none or it cannot be read."""
    path = Path(file)
    if not path.is_file():
        found = "is a folder" if path.is_dir() else "is no regular file" if path.exists() else "no such file"
        raise PerfModelError(f"{one_line(file)}: {found}, expected a text file")
    try:
        return path.read_bytes()
    except OSError as error:
        raise PerfModelError(f"{one_line(file)}: cannot be read ({one_line(error.strerror or error)})") from None


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of a checkpoint, from its ``tokenizer.json``, that neither cuts nor pads.

    Raises :class:`PerfModelError` where that file is missing or damaged.
    """
    import_transformers()  # brings the tokenizers library, and says how to install both
    from tokenizers import Tokenizer

    file = folder / "tokenizer.json"
    if not file.is_file():
        raise PerfModelError(f"{one_line(file)}: no such file; the checkpoint's folder must hold its tokenizer.json")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise PerfModelError(f"{one_line(file)}: cannot be read as a tokenizer ({one_line(error)})") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
