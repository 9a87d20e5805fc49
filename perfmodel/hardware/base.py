"""What every spec shares: strict validation with readable errors, and a source for each number."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterable, Iterator, Mapping
from numbers import Integral, Real
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, NoReturn, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from perfmodel.errors import SpecError

SourceKind = Literal["datasheet", "published", "measured", "derived", "calibrated", "assumed"]

SOURCE_KINDS: tuple[SourceKind, ...] = (
    "datasheet",
    "published",
    "measured",
    "derived",
    "calibrated",
    "assumed",
)
"""Kinds of source, from the strongest to the weakest."""

V = TypeVar("V")


class ReadOnlyDict(dict[str, V]):
    """A table of a frozen spec: reads like a ``dict``, can be hashed and pickled, refuses changes."""

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise TypeError("a table of a spec is read-only; use with_values() for a changed copy")

    __setitem__ = __delitem__ = update = pop = popitem = clear = setdefault = __ior__ = _refuse

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))

    def __reduce__(self) -> tuple[type[Self], tuple[dict[str, V]]]:
        return type(self), (dict(self),)


# The validator keeps the annotation a plain ``dict``, so schemas and type checkers see nothing unusual.
Frozen = AfterValidator(ReadOnlyDict)


def number(unit: str, low: float, high: float, text: str, default: Any = ...) -> Any:
    """Field for a number in ``unit`` from ``low`` to ``high``, both included; no default means required."""
    return Field(default, ge=low, le=high, description=f"{text} [{unit}]", json_schema_extra={"unit": unit})


def shown(value: object) -> str:
    """``value`` for an error message: one line, never long, whatever it is."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, dict):
        return f"a table of {len(value)} entries"
    if isinstance(value, (list, tuple, set)):
        return f"a list of {len(value)} entries"
    try:
        text = ascii(value)
    except (ValueError, RecursionError):
        text = f"a {type(value).__name__}"
    return text if len(text) <= 60 else text[:57] + "..."


def suggestion(word: str, known: Iterable[str]) -> str:
    """``" (did you mean 'x'?)"`` for the known words closest to ``word``, or an empty string."""
    names = list(known) if 1 < len(word) <= 200 else []
    leaves = {name: name.rpartition(".")[2] for name in names}
    # A dotted name may also be meant by its last part alone.
    near = difflib.get_close_matches(word.rpartition(".")[2], dict.fromkeys(leaves.values()), n=3, cutoff=0.6)
    close = [name for name in names if word in name]
    close += difflib.get_close_matches(word, names, n=3, cutoff=0.6)
    close += [name for leaf in near for name in names if leaves[name] == leaf]
    found = list(dict.fromkeys(close))[:3]
    return f" (did you mean {' or '.join(map(repr, found))}?)" if found else ""


def flatten(table: Any, is_leaf: Any, depth: int = 4) -> Any:
    """Turn nested tables into one table with dotted keys; anything that is not a table is left alone.

    TOML reads ``gpu.memory_efficiency = 0.4`` as nested tables and ``"gpu.memory_efficiency" = 0.4`` as one
    key. People write both, so both mean the same here.
    """
    if not isinstance(table, dict):
        return table
    flat: dict[Any, Any] = {}
    for key, value in table.items():
        if depth > 1 and isinstance(value, dict) and value and not is_leaf(value):
            entries = {f"{key}.{rest}": inner for rest, inner in flatten(value, is_leaf, depth - 1).items()}
        else:
            entries = {key: value}
        twice = [shown(key) for key in entries if key in flat]
        if twice:
            raise ValueError(f"{twice[0]} is given twice, once as a dotted key and once as a table")
        flat |= entries
    return flat


def _allowed(schema: Mapping[str, Any]) -> str:
    """The range a JSON schema states for a number or a table of numbers, or an empty string."""
    for part in _number_schemas(schema):
        whole = "a whole number " if part.get("type") == "integer" else ""
        unit = schema.get("unit", "1")
        return f"{whole}{part['minimum']:.9g} to {part['maximum']:.9g}{'' if unit == '1' else ' ' + unit}"
    return ""


def _number_schemas(schema: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The schemas in a field's schema that state a range: of a number, an optional one, or those in a table."""
    for part in (schema, *schema.get("anyOf", ())):
        for one in (part, part.get("additionalProperties")):
            if isinstance(one, Mapping) and "maximum" in one:
                yield one


_PLAIN_WORDS = {
    "string_pattern_mismatch": "one word of letters, digits and . _ + -",
    "string_type": "text",
    "dict_type": "a table",
    "model_type": "a table",
}


def _sentence(error: Mapping[str, Any], model: type[BaseModel]) -> str:
    where, kind = error["loc"], error["type"]
    head = str(where[0]) if where else ""
    key = ".".join(str(part) for part in where if part != "[key]")
    key = key if key.isprintable() and len(key) <= 120 else shown(key)
    if kind == "extra_forbidden":
        known = list(model.model_fields)
        close = suggestion(str(where[-1]), known)
        return f"unknown key '{key}'{close}; allowed keys: {', '.join(known)}"
    if kind == "missing":
        return f"key '{key}' is missing"
    if kind == "value_error":
        return f"{f'key {key!r}: ' if key else ''}{error['ctx']['error']}"
    found = shown(error["input"])
    if "[key]" in where:
        return f"key '{key}' is not known; allowed: {error['ctx']['expected']}"
    if kind == "literal_error":
        return f"key '{key}' is {found}; allowed: {error['ctx']['expected']}"
    if kind in {"greater_than_equal", "less_than_equal", "finite_number", "float_type", "int_type"}:
        allowed = _allowed(_properties(model).get(head, {}))
        if allowed:
            out = " is out of the plausible range" if kind.endswith("than_equal") else " is not accepted"
            return f"key '{key}' = {found}{out}; allowed: {allowed}"
    if kind in _PLAIN_WORDS:
        return f"key '{key}' is {found}; allowed: {_PLAIN_WORDS[kind]}"
    return f"key '{key}' is {found}; {error['msg'][:1].lower()}{error['msg'][1:]}"


def readable(error: ValidationError, model: type[BaseModel]) -> str:
    """All complaints of a pydantic error in one line (the first four, and how many more)."""
    found = error.errors(include_url=False)
    # An unknown key is usually a misspelt one, which explains the "missing" that comes with it.
    found.sort(key=lambda one: one["type"] != "extra_forbidden")
    text = "; ".join(_sentence(one, model) for one in found[:4])
    return text if len(found) <= 4 else f"{text}; and {len(found) - 4} more"


class Strict(BaseModel):
    """Frozen pydantic model without unknown keys, type coercion, NaN or infinity; errors are `SpecError`."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    def __init__(self, /, **data: Any) -> None:
        try:
            super().__init__(**data)
        except ValidationError as error:
            name = data.get("name")
            called = f" {shown(name)}" if isinstance(name, str) else ""
            message = f"{self.label()}{called}: {readable(error, type(self))}"
            raise SpecError(message) from None

    @classmethod
    def label(cls) -> str:
        """What this is called in error messages."""
        kind = cls.model_fields.get("kind")
        return f"{kind.default} spec" if kind is not None else cls.__name__.lower()


class Source(Strict):
    """Where a number comes from.

    ``source`` is one of `SOURCE_KINDS`; ``citation`` says in a sentence where it can be looked up.
    """

    source: SourceKind = Field(description="kind of source, strongest first")
    citation: str = Field(min_length=3, description="where the number can be looked up")


@functools.cache
def _properties(model: type[BaseModel]) -> Mapping[str, Any]:
    """Schemas of a model's fields; made once, because making them is slow."""
    properties: Mapping[str, Any] = model.model_json_schema().get("properties", {})
    return properties


DEFAULT_SOURCE = Source(source="assumed", citation="default of the spec format; the file gives no value")

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._+-]*$", max_length=80)]
Sources = Annotated[dict[str, Source], Frozen]
_TEXT_KEYS = frozenset({"kind", "name", "description", "sources"})


def clean_value(key: str, value: object) -> int | float | str:
    """``value`` of an override as a plain number or word (NumPy scalars become Python ones)."""
    if isinstance(value, str):
        return value
    if not isinstance(value, bool):
        try:
            if isinstance(value, Integral):
                return int(value)
            if isinstance(value, Real):
                return float(value)
        except (OverflowError, ValueError):
            pass
    raise SpecError(f"key {shown(key)} is {shown(value)}; allowed: a number, or a word for a choice")


class Limits(NamedTuple):
    """Smallest and largest allowed value of a number in the unit of its spec file, and whether it must be whole."""

    low: float
    high: float
    whole: bool
    unit: str


class Constant(NamedTuple):
    """One number a result rests on, in the unit of its spec file."""

    key: str
    value: float
    unit: str
    source: SourceKind
    citation: str


class Choice(NamedTuple):
    """One word a result rests on: a mode, or the name of a part.

    ``source`` and ``citation`` are empty where the file gives none, as words need no source.
    """

    key: str
    value: str
    source: SourceKind | Literal[""]
    citation: str


class Spec(Strict):
    """Base of all device specs: a name, a description, numbers, and one source for every number.

    ``sources`` has one entry per numeric key. A table of numbers may have one entry for the whole table or
    one per dotted key (``"peak_tflop_per_s.fp16"``). A number without a source and a source without a number
    are both refused; keys that are words (such as ``dataflow``) may have a source but need none.
    """

    kind: str
    name: Name
    description: str = Field(max_length=2000, description="what this is, in a sentence")
    sources: Sources = Field(description="source and citation of every number in this file")

    # Keys that hold another spec, which brings its own sources.
    parts: ClassVar[tuple[str, ...]] = ()

    @field_validator("sources", mode="before")
    @classmethod
    def _flat_sources(cls, value: Any) -> Any:
        return flatten(value, lambda entry: "source" in entry or "citation" in entry)

    @model_validator(mode="after")
    def _every_number_has_a_source(self) -> Self:
        own = dict(self._own_items())
        numbers = [key for key, value in own.items() if not isinstance(value, str)]
        given = [key for key in numbers if key.partition(".")[0] in self.model_fields_set]
        bare = [key for key in given if self._own_source(key) is None]
        if bare:
            raise ValueError(f"no entry in [sources] for {', '.join(bare)}; every number needs one")
        present = {key for key in own if key.partition(".")[0] in self.model_fields_set}
        present |= {key.partition(".")[0] for key in present}
        present |= {part for part in self.parts if getattr(self, part) is not None}
        extra = [key for key in self.sources if key not in present]
        if extra:
            keys = ", ".join(shown(key) + suggestion(key, present) for key in extra[:4])
            raise ValueError(f"[sources] names keys that the spec does not give: {keys}")
        return self

    def _own_items(self) -> Iterator[tuple[str, int | float | str]]:
        for key in type(self).model_fields:
            value = getattr(self, key)
            if key in _TEXT_KEYS or key in self.parts or value is None:
                continue
            if isinstance(value, dict):
                for entry, inner in value.items():
                    yield f"{key}.{entry}", inner
            else:
                yield key, value

    def _own_source(self, key: str) -> Source | None:
        return self.sources.get(key) or self.sources.get(key.partition(".")[0])

    def items(self) -> Iterator[tuple[str, int | float | str]]:
        """Dotted key and value of every number and choice, in the units of the file, parts included."""
        yield from self._own_items()
        for part in self.parts:
            inner = getattr(self, part)
            if inner is not None:
                for key, value in inner.items():
                    yield f"{part}.{key}", value

    def numeric_keys(self) -> tuple[str, ...]:
        """Dotted keys of all numbers this spec holds."""
        return tuple(key for key, value in self.items() if not isinstance(value, str))

    def constants(self) -> tuple[Constant, ...]:
        """Every number with unit, source and citation."""
        return tuple(
            Constant(key, float(value), self.unit_of(key), source.source, source.citation)
            for key, value in self.items()
            if not isinstance(value, str)
            for source in (self.source_of(key),)
        )

    def choices(self) -> tuple[Choice, ...]:
        """Every word (such as ``dataflow``) and the name of every part, with its source where one is given."""
        found: list[Choice] = []
        words = [(key, value) for key, value in self._own_items() if isinstance(value, str)]
        inner = [(part, spec) for part in self.parts if (spec := getattr(self, part)) is not None]
        for key, value in (*words, *((part, spec.name) for part, spec in inner)):
            source = self._own_source(key)
            found.append(Choice(key, value, source.source if source else "", source.citation if source else ""))
        for part, spec in inner:
            found += (choice._replace(key=f"{part}.{choice.key}") for choice in spec.choices())
        return tuple(found)

    def settable_keys(self) -> tuple[str, ...]:
        """Dotted keys that `with_values` accepts: all values, and optional keys that are not given."""
        unset = [
            key
            for key, field in type(self).model_fields.items()
            if getattr(self, key) is None and "dict" not in str(field.annotation)
        ]
        return (*(key for key, _ in self.items()), *unset)

    def _split(self, key: str) -> tuple[Spec, str]:
        """The spec that holds ``key`` (this one or a part) and the key inside it."""
        head, _, rest = key.partition(".")
        inner = getattr(self, head) if head in self.parts else None
        return (inner, rest) if isinstance(inner, Spec) and rest else (self, key)

    def source_of(self, key: str) -> Source:
        """Source of the number at a dotted key; an unset key with a default is ``assumed``."""
        spec, inner = self._split(key)
        if spec is not self:
            return spec.source_of(inner)
        return self._own_source(key) or DEFAULT_SOURCE

    def unit_of(self, key: str) -> str:
        """Unit of the number at a dotted key as in the file (``"GB/s"``; ``"1"`` for a pure number)."""
        spec, inner = self._split(key)
        if spec is not self:
            return spec.unit_of(inner)
        extra = type(self).model_fields[key.partition(".")[0]].json_schema_extra
        return str(extra.get("unit", "1")) if isinstance(extra, dict) else "1"

    def limits_of(self, key: str) -> Limits:
        """Allowed range of the number at a dotted key; `SpecError` for a key that holds no number."""
        spec, inner = self._split(key)
        if spec is not self:
            return spec.limits_of(inner)
        for part in _number_schemas(_properties(type(self)).get(key.partition(".")[0], {})):
            if key in self.settable_keys():
                whole = part.get("type") == "integer"
                return Limits(float(part["minimum"]), float(part["maximum"]), whole, self.unit_of(key))
        if key in self.settable_keys():
            raise SpecError(f"{self.label()} {self.name!r}: {shown(key)} is not a number")
        raise SpecError(self.no_such_key(key))

    def _make_room(self, data: dict[str, Any], changed: Mapping[str, Any]) -> None:
        """Hook: drop from ``data`` the keys that the ``changed`` ones replace."""

    def with_values(self, values: Mapping[str, Any], sources: Mapping[str, Source]) -> Self:
        """Validated copy with ``values`` at dotted keys, each with its entry of ``sources``.

        Raises `SpecError` for an unknown key (with close matches), a value that is not allowed, or a value
        without a source.
        """
        bare = [shown(key) for key in values if key not in sources]
        if bare:
            raise SpecError(f"{self.label()} {self.name!r}: no source for {', '.join(bare[:4])}")
        data = {key: getattr(self, key) for key in self.model_fields_set}
        own_sources = dict(self.sources)
        inner: dict[str, dict[str, Any]] = {}
        for key, raw in values.items():
            value = raw if isinstance(raw, Spec) else clean_value(key, raw)
            head, _, rest = key.partition(".")
            field = None if head in _TEXT_KEYS else type(self).model_fields.get(head)
            if rest and head in self.parts and isinstance(getattr(self, head), Spec):
                inner.setdefault(head, {})[rest] = value
                continue
            table = field is not None and "dict" in str(field.annotation)
            if field is None or bool(rest) != table:
                raise SpecError(self.no_such_key(key))
            if isinstance(value, float) and value.is_integer() and field.annotation in (int, int | None):
                value = int(value)  # a sweep hands over 64.0 for a count
            data[head] = {**(data.get(head) or {}), rest: value} if rest else value
            own_sources[key] = sources[key]
        for part, changes in inner.items():
            part_sources = {key: sources[f"{part}.{key}"] for key in changes}
            data[part] = getattr(self, part).with_values(changes, part_sources)
        self._make_room(data, values)
        kept = {key: value for key, value in own_sources.items() if data.get(key.partition(".")[0]) is not None}
        return type(self)(**{**data, "sources": kept})

    def no_such_key(self, key: str) -> str:
        """Message for a key that does not exist, with close matches and the keys that do."""
        keys = self.settable_keys()
        own = [one for one in keys if one.partition(".")[0] not in self.parts]
        own += [f"{part}.*" for part in self.parts if getattr(self, part) is not None]
        allowed = f"{suggestion(key, keys)}; allowed: {', '.join(own)}"
        return f"{self.label()} {self.name!r} has no key {shown(key)}{allowed}"
