"""The precision in which a checkpoint stores each class of tensors."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from perfmodel.errors import ModelConfigError
from perfmodel.families import one_line
from perfmodel.storage.formats import BFLOAT16, Format, format_named, mixed


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """The stored precision of every class of tensors.

    embedding, head : the tables at both ends. attention : mixers with their biases and norms of queries and keys.
    dense : feed-forward networks that every token passes. shared : shared experts. router : routers. expert : routed
    experts. norm : norms of the residual stream.
    notes : sentences on defaults taken while reading it.

    Raises
    ------
    ModelConfigError : a class is not a `Format`.
    """

    embedding: Format = BFLOAT16
    head: Format = BFLOAT16
    attention: Format = BFLOAT16
    dense: Format = BFLOAT16
    shared: Format = BFLOAT16
    router: Format = BFLOAT16
    expert: Format = BFLOAT16
    norm: Format = BFLOAT16
    notes: tuple[str, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        for name in CLASSES:
            found: object = getattr(self, name)
            if not isinstance(found, Format):
                raise ModelConfigError(f"storage: {name} is {one_line(found)}; allowed: a Format (see format_named)")

    @classmethod
    def uniform(cls, stored: Format | str | float) -> "Storage":
        """The same format for every class: a `Format`, the name of one, or a number of bits a weight [bit]."""
        return of_classes(dict.fromkeys(CLASSES, as_format(stored)))

    def by_class(self) -> dict[str, Format]:
        """The formats by class."""
        return {name: getattr(self, name) for name in CLASSES}

    def override(self, choices: str | Iterable[str]) -> "Storage":
        """Other formats for some classes.

        choices : texts ``CLASS=FORMAT``, such as ``expert=q4_k`` or ``all=q8_0``, applied in this order.

        Raises
        ------
        ModelConfigError : a text is not of this form, or names an unknown class or format.
        """
        formats = self.by_class()
        for choice in (choices,) if isinstance(choices, str) else choices:
            text: object = choice
            name, equals, wanted = text.partition("=") if isinstance(text, str) else ("", "", "")
            name = name.strip().lower()
            if not equals or name not in (*CLASSES, "all"):
                raise ModelConfigError(
                    f"storage: found {one_line(text)}; allowed: CLASS=FORMAT with one of the classes "
                    f"{', '.join(CLASSES)}, or all"
                )
            stored = format_named(wanted)
            formats |= dict.fromkeys(CLASSES, stored) if name == "all" else {name: stored}
        return of_classes(formats, self.notes)

    def upcast(self, supports: Iterable[str], to: Format | str = BFLOAT16) -> "Storage":
        """What an engine keeps in memory that has no kernels for some formats and unpacks them at load.

        supports : names of the formats it computes on; ``int4`` stands for ``int4_g128`` and the like too. Formats of
            16 bits and more are never changed.
        to : what the others are unpacked to.
        """
        names = (supports,) if isinstance(supports, str) else tuple(supports)
        target = as_format(to)

        def kept(part: Format) -> bool:
            return part.bits >= 16 or any(part.name == name or part.name.startswith(f"{name}_") for name in names)

        def unpacked(stored: Format) -> Format:
            parts = stored.parts or ((stored, 1.0),)
            if all(kept(part) for part, _ in parts):
                return stored
            return mixed([(part if kept(part) else target, share) for part, share in parts])

        return of_classes({name: unpacked(stored) for name, stored in self.by_class().items()}, self.notes)


#: The classes of tensors.
CLASSES = tuple(one.name for one in fields(Storage) if one.name != "notes")


def as_format(stored: Format | str | float) -> Format:
    """A format, the one of that name, or an unnamed one of so many bits."""
    if isinstance(stored, Format):
        return stored
    if isinstance(stored, str):
        return format_named(stored)
    if isinstance(stored, bool) or not isinstance(stored, int | float):
        raise ModelConfigError(f"format: found {one_line(stored)}; allowed: a Format, its name, or a number of bits")
    return Format(f"{stored:g}-bit", float(stored))


def of_classes(formats: Mapping[str, Format], notes: Iterable[str] = ()) -> Storage:
    """The storage with a format for each class."""
    values: dict[str, Any] = {**formats, "notes": tuple(notes)}
    return Storage(**values)
