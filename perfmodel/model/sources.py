"""Where a model's config comes from: a bundled name, a file, or a folder."""

import difflib
import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path

from perfmodel.errors import ModelConfigError
from perfmodel.families import one_line

_BUNDLED = Path(__file__).resolve().parent.parent / "shapes"
_LARGEST_FILE_BYTES = 16 * 2**20
_DEEPEST = 100  # levels of objects in objects


def bundled_models() -> tuple[str, ...]:
    """Names of the models whose shape comes with the package."""
    return tuple(sorted(path.stem for path in _BUNDLED.glob("*.json")))


def plain(path: object) -> str:
    """A path as one short printable line, also when its name holds line breaks or bytes that are no text."""
    text = str(path)
    text = text if text.isprintable() else repr(text)[1:-1]
    return text if len(text) <= 300 else f"{text[:297]}..."


def find(source: object) -> Path:
    """The file that a name, a file or a folder stands for.

    Raises
    ------
    ModelConfigError : there is no such thing, or it cannot be opened.
    """
    allowed = "a config.json, a folder that holds one, a GGUF file, or a bundled name: " + ", ".join(bundled_models())
    if not isinstance(source, str | os.PathLike):
        raise ModelConfigError(f"model config: found {one_line(source)}; allowed: {allowed}, or a mapping")
    text = os.fspath(source)
    if isinstance(source, str) and source in bundled_models():
        return _BUNDLED / f"{source}.json"
    if not isinstance(text, str) or not text.strip():
        raise ModelConfigError(f"model config: found {one_line(source)}; allowed: {allowed}")
    try:
        path = Path(text)
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            path = path / "config.json"
            if not path.exists():
                raise ModelConfigError(f"{plain(text)}: the folder holds no config.json; allowed: {allowed}")
            mode = path.stat().st_mode
    except FileNotFoundError:
        close = difflib.get_close_matches(text, bundled_models(), n=1, cutoff=0.5)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise ModelConfigError(f"{plain(text)}: no such file or model{hint}; allowed: {allowed}") from None
    except (OSError, ValueError) as error:
        if isinstance(error, ModelConfigError):
            raise
        raise ModelConfigError(f"{plain(text)}: cannot be opened: {_reason(error)}; allowed: {allowed}") from None
    if not stat.S_ISREG(mode):
        raise ModelConfigError(f"{plain(path)}: is not a regular file; allowed: {allowed}")
    return path


def is_gguf(path: Path) -> bool:
    """Whether a file is GGUF, by its name or its first bytes; what cannot be read is left to the reader of configs."""
    try:
        if path.suffix.lower() == ".gguf":
            return True
        with path.open("rb") as file:
            return file.read(4) == b"GGUF"
    except OSError:
        return False


def _reason(error: Exception) -> str:
    """What an exception says, on one line."""
    return " ".join(str(getattr(error, "strerror", None) or error).split())


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """An object of a JSON file; a key that comes twice is refused, for readers differ on which counts."""
    values = dict(pairs)
    if len(values) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"key {one_line(twice)} occurs twice in one object")
    return values


def read_json(path: Path) -> Mapping[str, object]:
    """The object in a JSON file.

    Raises
    ------
    ModelConfigError : it cannot be read, or holds anything else.
    """
    where = plain(path)
    try:
        with path.open("rb") as file:
            content = file.read(_LARGEST_FILE_BYTES + 1)
        if len(content) > _LARGEST_FILE_BYTES:
            raise ModelConfigError(f"{where}: larger than 16 MiB; allowed: a config.json, which has a few KiB")
        values = json.loads(content.decode("utf-8-sig"), object_pairs_hook=_unique)
    except OSError as error:
        raise ModelConfigError(f"{where}: cannot be read: {_reason(error)}; allowed: a readable config.json") from None
    except UnicodeDecodeError as error:
        raise ModelConfigError(f"{where}: byte {error.start} is not UTF-8 text; allowed: a JSON object") from None
    except RecursionError:
        raise ModelConfigError(f"{where}: nested too deeply; allowed: a JSON object") from None
    except ValueError as error:
        if isinstance(error, ModelConfigError):
            raise
        raise ModelConfigError(f"{where}: not valid JSON: {_reason(error)}; allowed: a JSON object") from None
    if not isinstance(values, dict):
        raise ModelConfigError(f"{where}: found {one_line(values)}; allowed: a JSON object")
    return plain_values(values)


def name_of(path: Path) -> str:
    """The file's name; for a ``config.json`` that of its folder or of its entry in the Hugging Face cache."""
    if path.name != "config.json":
        return path.stem
    parents = path.absolute().parents
    cached = [folder.name for folder in parents if folder.name.startswith("models--")]
    return cached[0].removeprefix("models--").replace("--", "/") if cached else parents[0].name


class _Unknown:
    """Stands for a value that JSON does not have; equal to nothing but itself."""

    def __init__(self, value: object) -> None:
        self._text = one_line(value)

    def __repr__(self) -> str:
        return self._text


def plain_values(values: Mapping[str, object]) -> dict[str, object]:
    """A parsed config with values of JSON alone; others, such as arrays, become ones that no reader takes.

    Raises
    ------
    ModelConfigError : nested too deeply.
    """

    def plain_value(value: object, depth: int) -> object:
        if depth > _DEEPEST:
            raise ModelConfigError("config: nested too deeply; allowed: the objects of a config.json")
        if value is None or type(value) in (bool, int, float, str):
            return value
        if isinstance(value, Mapping):
            return {
                key if isinstance(key, str) else one_line(key): plain_value(one, depth + 1)
                for key, one in value.items()
            }
        if isinstance(value, list | tuple):
            return [plain_value(one, depth + 1) for one in value]
        return _Unknown(value)

    return {str(key): plain_value(value, 1) for key, value in values.items()}
