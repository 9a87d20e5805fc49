"""The sliding window of each layer."""

from perfmodel.model.gguf.architectures import WINDOWS, WITHOUT_WINDOWS, Windows
from perfmodel.model.gguf.metadata import Metadata

_WINDOW, _PATTERN = "attention.sliding_window", "attention.sliding_window_pattern"


def windows_of(metadata: Metadata, num_layers: int) -> tuple[list[int | None], list[str]]:
    """The window of each layer, or None for the whole context [token]; and sentences on how that was read.

    Raises
    ------
    ModelConfigError : the file gives a window, and neither it nor the engine says which layers have it.
    """
    known = WINDOWS.get(metadata.arch)
    notes: list[str] = []
    everywhere: list[int | None] = [None] * num_layers
    if metadata.has(_WINDOW):
        window = metadata.size(_WINDOW, least=0)
    elif known is not None and known.window is not None:
        window = known.window
        notes.append(f"default taken: {metadata.key(_WINDOW)} = {window} (built into llama.cpp)")
    else:
        return everywhere, notes
    if not window:
        return everywhere, notes
    if metadata.arch in WITHOUT_WINDOWS:
        notes.append(f"{metadata.key(_WINDOW)} {window} is not used, as llama.cpp gives every layer the whole context")
        return everywhere, notes
    if isinstance(metadata.get(_PATTERN), tuple):
        slides = metadata.truths(_PATTERN, num_layers)
    elif metadata.has(_PATTERN):
        period = metadata.size(_PATTERN)
        slides = _periodic(Windows(period, known.full_first if known else False), num_layers)
    elif known is not None:
        slides = _periodic(known, num_layers)
        place = "first" if known.full_first else "last"
        notes.append(
            f"of every {known.period} layers the {place} sees the whole context, the others {window} tokens "
            f"(built into llama.cpp for {metadata.arch})"
        )
    elif metadata.has("context_length") and window >= metadata.size("context_length"):
        notes.append(f"{metadata.key(_WINDOW)} {window} is read as none, for the context is no longer")
        return everywhere, notes
    else:
        raise metadata.error(
            _WINDOW, f"none, for which layers have it is not known for {metadata.arch} without {_PATTERN}"
        )
    return [window if slide else None for slide in slides], notes


def _periodic(windows: Windows, num_layers: int) -> list[bool]:
    full = 0 if windows.full_first else windows.period - 1
    return [layer % windows.period != full for layer in range(num_layers)]
