"""Checked access to the keys of one config, which remembers what was read and which defaults were taken."""

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from perfmodel.errors import ModelConfigError
from perfmodel.families.aliases import HARMLESS, spellings

# Far above any published model, yet low enough that no product overflows a float and no tuple is huge.
_MOST_LAYERS = 10_000
_LARGEST = {
    "num_hidden_layers": _MOST_LAYERS,
    "num_layers": _MOST_LAYERS,
    "num_decoder_layers": _MOST_LAYERS,
    "encoder_layers": _MOST_LAYERS,
    "decoder_layers": _MOST_LAYERS,
    "vocab_size": 10**8,
    "num_experts": 65_534,
    "top_k": 65_534,
}
_LARGEST_SIZE = 10**7
_DEEPEST = 8  # levels of objects in objects that are searched for keys; real configs have three

_LOOKS_LIKE_MOE = re.compile(
    r"expert|moe|rout(er|ed|ing)|(^|_)n_group$|topk_group|mlp_only_layers|sparse_step|first_k_dense"
    r"|mlp_layer_types|dense_layers|per_layer_config",
    re.IGNORECASE,
)
#: Keys that may say how weights are stored, where nothing else does.
_QUANTISATION = re.compile(r"^quanti[sz]|^quant_|^quantizer", re.IGNORECASE)
#: A switch that is off where the network has experts contradicts it.
_SWITCH = re.compile(r"^(use|is|enable|with|has)_.*(moe|expert)", re.IGNORECASE)
#: Parts of a config that say nothing about the shape of the language model; some say how it is stored.
_ELSEWHERE = re.compile(
    r"vision|audio|speech|image|video|quantization_config|compression_config|expert_dtype", re.IGNORECASE
)


def one_line(value: object, limit: int = 60) -> str:
    """A value as it is shown in an error message: on one line, printable, and short."""
    try:
        text = repr(value)
    except Exception:  # an integer of thousands of digits, lists in lists in lists, or whatever an object does
        text = f"a {type(value).__name__} too large to show"
    text = " ".join(text.split())
    return text if len(text) <= limit else text[: limit - 3] + "..."


@dataclass(frozen=True)
class Declared:
    """What a family's configs hold.

    required : fields that every config has, and not null; a reader never fills in a missing size, because class
        defaults differ between library versions and from the released models.
    nullable : fields that every config has and that may be null, which stands for "none".
    optional : fields that may be absent or null, with the default that is then taken, as its documentation says it.
    """

    required: tuple[str, ...]
    nullable: tuple[str, ...] = ()
    optional: Mapping[str, str] = ()  # type: ignore[assignment]


class ConfigKeys:
    """The keys of one object of a config; errors name file, key, value found and what is allowed.

    Without ``declared`` (for tables inside, and for readers of single keys) nothing is declared.

    Attributes
    ----------
    values : the parsed object. where : what errors call it.
    read : keys that were asked for.
    defaults : the defaults taken, field to a text that says value and rule.
    """

    def __init__(self, values: Mapping[str, object], where: str, declared: Declared | None = None) -> None:
        self.values = values
        self.where = where
        self.declared = declared
        self.read: set[str] = set()
        self.defaults: dict[str, str] = {}
        self.tables: list[ConfigKeys] = []

    def error(self, key: str, allowed: str) -> ModelConfigError:
        """The error for a key that is missing or has a value that is not allowed."""
        found = f"is {one_line(self.values[key])}" if key in self.values else "is missing"
        return ModelConfigError(f"{self.where}: key {key!r} {found}; allowed: {allowed}")

    def check_declared(self) -> None:
        """Refuse a config that lacks a required key, before any is read."""
        assert self.declared is not None
        for field in self.declared.required:
            if not self.has(field):
                raise self.error(self.key(field), f"a value{self._also(field)}; it has no default")
        for field in self.declared.nullable:
            if not any(key in self.values for key in spellings(field)):
                raise self.error(self.key(field), f"a value, or null for none{self._also(field)}")
            if not self.has(field):
                self.defaults[field] = f"{self.key(field)} = none (null in the config)"

    def key(self, field: str) -> str:
        """The spelling of a field that this config uses; the first of the table where it uses none."""
        keys = spellings(field)
        return next(
            (key for key in keys if self.values.get(key) is not None),
            next((key for key in keys if key in self.values), keys[0]),
        )

    def has(self, field: str) -> bool:
        """Whether the field is there and not null, under any of its spellings."""
        self.read.update(spellings(field))
        return self.values.get(self.key(field)) is not None

    def _also(self, field: str) -> str:
        others = [key for key in spellings(field) if key != self.key(field)]
        return f" (also spelled {', '.join(others)})" if others else ""

    def _found(self, field: str) -> list[str]:
        """The spellings of a field that hold a value."""
        self.read.update(spellings(field))
        return [key for key in spellings(field) if self.values.get(key) is not None]

    def take(self, field: str, value: object) -> None:
        """Note that a default was taken for a field; the family must have declared it."""
        assert self.declared is not None, field
        rule = self.declared.optional[field]
        said = _as_json(value)
        self.defaults[field] = f"{self.key(field)} = {said}" + (f" ({rule})" if rule != said else "")

    def size(self, field: str, *, least: int = 1, default: int | None = None) -> int:
        """An integer from ``least`` up; the spellings of the field must not disagree.

        ``default`` is taken, and noted, where the field is absent or null.
        """
        largest = _LARGEST.get(field, _LARGEST_SIZE)
        allowed = f"an integer from {least} to {largest}{self._also(field)}"
        found = self._found(field)
        if not found:
            if default is None:
                raise self.error(self.key(field), allowed)
            self.take(field, default)
            return default
        sizes: list[int] = []
        for key in found:
            value = self.values[key]
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= largest:
                raise self.error(key, allowed)
            if sizes and value != sizes[0]:
                raise self.error(key, f"{sizes[0]}, as another spelling of the same key says")
            sizes.append(value)
        return sizes[0]

    def size_or_none(self, field: str) -> int | None:
        """An integer from 1 up, or None where the field is null or absent; for fields declared nullable."""
        return self.size(field) if self._found(field) else None

    def sizes(self, field: str, count: int, what: str = "layer", *, least: int = 0) -> list[int]:
        """One integer for each of ``count`` layers, from a list of that many or one integer for all."""
        found = self._found(field)
        largest = _LARGEST.get(field, _LARGEST_SIZE)
        allowed = f"an integer from {least} to {largest}, or a list of {count} of them, one for each {what}"
        allowed += self._also(field)
        each: list[list[int]] = []
        for key in found or [self.key(field)]:
            value = self.values.get(key)
            listed = list(value) if isinstance(value, list | tuple) else [value] * count
            whole = [one for one in listed if type(one) is int and least <= one <= largest]
            if len(listed) != count or len(whole) != count:
                raise self.error(key, allowed)
            if each and whole != each[0]:
                raise self.error(key, f"the same as {found[0]}, another spelling of it")
            each.append(whole)
        return each[0]

    def flag(self, field: str, *, default: bool | None = None) -> bool:
        """True or false. ``default`` is taken, and noted, where the field is absent or null."""
        found = self._found(field)
        if not found:
            if default is None:
                raise self.error(self.key(field), "true or false")
            self.take(field, default)
            return default
        values = [self.values[key] for key in found]
        for key, value in zip(found, values, strict=True):
            if not isinstance(value, bool):
                raise self.error(key, "true or false")
            if value != values[0]:
                raise self.error(key, f"{str(values[0]).lower()}, as another spelling of the same key says")
        return bool(values[0])

    def only(self, field: str, *values: object) -> None:
        """Refuse a value other than those given, because a reader cannot count it; absent and null are allowed."""
        for key in self._found(field):
            value = self.values[key]
            if not any(type(value) is type(one) and value == one for one in values):
                raise self.error(key, ", ".join([*map(_as_json, values), "null"]) + ", or no such key")

    def choice(self, field: str, *choices: str) -> str:
        """One of the texts given."""
        found = self._found(field)
        for key in found or [self.key(field)]:
            value = self.values.get(key)
            if not isinstance(value, str) or value not in choices or value != self.values[found[0]]:
                raise self.error(key, f"one of {', '.join(choices)}")
        return str(self.values[found[0]])

    def sequence(self, field: str, allowed: str) -> Sequence[object]:
        """A list; empty where the field is absent or null."""
        found = self._found(field)
        if not found:
            return ()
        value = self.values[found[0]]
        if not isinstance(value, list | tuple):
            raise self.error(found[0], allowed)
        for key in found[1:]:
            if self.values[key] != value:
                raise self.error(key, f"the same as {found[0]}, another spelling of it")
        return value

    def kinds(self, field: str, count: int, *choices: str) -> list[str]:
        """One of the texts given for each of ``count`` layers."""
        allowed = f"a list of {count} entries, each one of {', '.join(choices)}"
        values = self.sequence(field, allowed)
        known = [one for one in values if isinstance(one, str) and one in choices]
        if len(values) != count or len(known) != count:
            raise self.error(self.key(field), allowed)
        return known

    def table(self, field: str, allowed: str = "an object", declared: Declared | None = None) -> "ConfigKeys":
        """The object under a key, whose keys are watched like one's own."""
        self.read.update(spellings(field))
        key = self.key(field)
        values = self.values.get(key)
        if not isinstance(values, Mapping):
            raise self.error(key, allowed)
        inner = ConfigKeys(values, f"{self.where}: {key}", declared)
        self.tables.append(inner)
        if declared is not None:
            inner.check_declared()
        return inner

    def check_understood(self, family: str, has_experts: bool = True, depth: int = 0) -> None:
        """Refuse keys that speak of a mixture of experts and that the reader did not ask for."""
        for key, value in self.values.items():
            name = str(key)
            if key in self.read or name in HARMLESS or _ELSEWHERE.search(name):
                continue
            if _is_off(value) and not (value is False and has_experts and _SWITCH.search(name)):
                continue
            if _LOOKS_LIKE_MOE.search(name):
                raise ModelConfigError(
                    f"{self.where}: key {one_line(name)} is {one_line(value)}: it speaks of experts, and what it means "
                    f"with model_type {family!r} is not known; allowed: keys that this family has"
                )
            if isinstance(value, Mapping) and depth < _DEEPEST:
                ConfigKeys(value, f"{self.where}: {one_line(name)}").check_understood(family, has_experts, depth + 1)
        for table in self.tables:
            table.check_understood(family, has_experts)

    def check_spelling(self) -> None:
        """Refuse an unread key that is nearly one whose default was taken, or that speaks of quantisation."""
        taken = [key for field in self.defaults for key in spellings(field) if key not in self.values]
        for key, value in self.values.items():
            if key in self.read or _is_off(value):
                continue
            near = difflib.get_close_matches(key[:80], taken, n=1, cutoff=0.9)
            if not near and _QUANTISATION.search(key) and self.values.get("quantization_config") is None:
                near = ["quantization_config"]
            if near:
                raise self.error(key, f"no such key; the one that is read is {near[0]}, which is missing")


def _as_json(value: object, limit: int = 60) -> str:
    text = str(value).lower() if isinstance(value, bool | list) else str(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _is_off(value: object) -> bool:
    """Whether a value says that there is no such thing."""
    return value is None or (isinstance(value, bool | int | float | str | list | tuple | Mapping) and not value)
