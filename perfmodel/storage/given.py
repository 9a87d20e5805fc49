"""Checked access to the tables of a quantisation config."""

import re
from collections.abc import Iterable, Mapping, Sequence

from perfmodel.errors import ModelConfigError
from perfmodel.families import ConfigKeys, one_line

_CHANGES_SIZES = re.compile(
    r"bits|group|block|scale|zero|dtype|layer|module|head|embed|dynamic|quant|pack|format|ignore|exclude|skip|target"
    r"|strategy|spars|rank|codebook|convert|expert|axis|lora|svd",
    re.IGNORECASE,
)
_MOST_NAMES = 200_000
#: Keys of any kind that say how a file was made, or what a runtime does with it, and nothing about its size.
_ANY_KIND = ("quant_method", "producer", "kv_cache_scheme", "kv_cache_quant_algo", "dequantize")


def check_known(table: ConfigKeys, kind: str, known: Iterable[str]) -> None:
    """Refuse keys that may change sizes and that this kind of quantisation is not known to have."""
    names = (*known, *_ANY_KIND)
    for key, value in table.values.items():
        if key not in names and value and _CHANGES_SIZES.search(str(key)):
            raise ModelConfigError(
                f"{table.where}: key {one_line(key)} is {one_line(value)}: it may change sizes, and is not known for "
                f"{kind}; allowed: {', '.join(sorted(set(names)))}"
            )


def whole(table: ConfigKeys, key: str, allowed: Sequence[int] | range, default: int | None = None) -> int:
    """An integer of those allowed; the default where the key is absent or null, if there is one."""
    value = table.values.get(key)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value not in allowed:
        said = f"{allowed[0]} to {allowed[-1]}" if isinstance(allowed, range) else ", ".join(map(str, allowed))
        raise table.error(key, f"an integer, {said}")
    return value


def flag(table: ConfigKeys, key: str, default: bool) -> bool:
    """True or false; the default where the key is absent or null."""
    value = table.values.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise table.error(key, "true or false")
    return value


def text(table: ConfigKeys, key: str, choices: Iterable[str], default: str | None = None) -> str:
    """One of the texts given, in lower case; the default where the key is absent or null, if there is one."""
    value = table.values.get(key)
    if value is None and default is not None:
        return default
    if not isinstance(value, str) or value.lower() not in choices:
        raise table.error(key, f"one of {', '.join(choices)}")
    return value.lower()


def names(table: ConfigKeys, *keys: str) -> list[str]:
    """The texts of one or several lists; none where a key is absent or null."""
    found: list[str] = []
    for key in keys:
        value = table.values.get(key)
        if value is None:
            continue
        if not isinstance(value, list | tuple) or not all(isinstance(one, str) for one in value):
            raise table.error(key, "a list of names of modules")
        found += value
    if len(found) > _MOST_NAMES:
        raise table.error(keys[0], f"at most {_MOST_NAMES} names")
    return found


def tables(table: ConfigKeys, key: str, most: int = _MOST_NAMES) -> dict[str, ConfigKeys]:
    """The objects of an object; none where the key is absent or null."""
    value = table.values.get(key)
    if value is None:
        return {}
    if not isinstance(value, Mapping) or not all(
        isinstance(name, str) and isinstance(one, Mapping) for name, one in value.items()
    ):
        raise table.error(key, "an object of objects")
    if len(value) > most:
        raise table.error(key, f"at most {most} entries")
    return {name: ConfigKeys(one, f"{table.where}: {key}: {one_line(name)}") for name, one in value.items()}


def inner(table: ConfigKeys, key: str) -> ConfigKeys | None:
    """The object under a key; None where the key is absent or null."""
    value = table.values.get(key)
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise table.error(key, "an object, or null")
    return ConfigKeys(value, f"{table.where}: {key}")
