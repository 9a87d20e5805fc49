"""Names of modules as quantisation configs write them: full paths, globs, and regular expressions.

Configs name modules from the root of the network, and roots differ: ``model.layers.3.``, ``backbone.layers.3.``,
``model.language_model.layers.3.``, ``decoder.block.3.`` are the same layer. So plain names are compared from the layer
on, and wildcards are tried against each of these spellings.

- A plain name stands for the module and everything inside. Without a layer it stands for every place where it occurs
  as whole components: ``mlp.gate`` for the router of each layer, and not for ``mlp.gate_proj``.
- A name with ``*``, ``?`` or ``[`` is a glob, as ModelOpt writes them; it too stands for everything inside.
- ``re:`` starts a regular expression that must match from the start of the path, as in compressed-tensors. A name with
  other signs of regular expressions must match up to the end of a component, as in Transformers.
"""

import fnmatch
import re
import time
import warnings
from collections.abc import Callable, Iterable, Iterator

from perfmodel.errors import ModelConfigError
from perfmodel.families import one_line
from perfmodel.storage.steps import most_steps

_LONGEST = 500  # characters of one pattern
_MOST_WILDCARDS = 2000  # patterns of one list that are no plain names; real lists have a few hundred
_MOST_STEPS = 3e7  # of one match; real patterns need a hundredth
MOST_SECONDS = 3.0  # of the thread for one list; real lists take under 0.1, and collecting garbage may come on top

_ROOTS = (
    "",
    "model.",
    "language_model.",
    "model.language_model.",
    "language_model.model.",
    "backbone.",
    "transformer.",
)
_ROOT = re.compile(r"(?:(?:model|language_model|language|backbone|transformer)\.)*")
_IN_LAYER = re.compile(_ROOT.pattern + r"(?:(encoder|decoder)\.)?(?:layers|blocks?|h)\.(\d{1,8})(?:\.(.*))?", re.DOTALL)
_WILDCARD = re.compile(r"[*?\[]")
_EXPRESSION = re.compile(r"[\\()|+^${]")
_EXPERT = re.compile(r"(^|\.)experts\.(\d{1,8})(?=\.|$)")

Match = Callable[[str], object]


def paths(names: Iterable[str], layer: int | None, stack: str) -> Iterator[str]:
    """The full names of a module that is called ``names`` within its layer."""
    for name in names:
        if layer is None:
            yield from (root + name for root in _ROOTS)
        elif stack:
            yield from (
                f"{root}{stack}.{kind}.{layer}.{name}" for root in ("", "model.") for kind in ("layers", "block")
            )
        else:
            yield from (f"{root}layers.{layer}.{name}" for root in _ROOTS)
            yield from (f"{kind}.{layer}.{name}" for kind in ("model.decoder.layers", "transformer.blocks"))


def with_index(name: str, expert: int) -> tuple[str, ...]:
    """A module of routed experts with the index of one, and without."""
    indexed = re.sub(r"(^|\.)experts(?=\.|$)", rf"\g<1>experts.{expert}", name, count=1)
    return (name,) if indexed == name else (indexed, name)


class _PlainNames:
    """Names without wildcards, looked up by their components."""

    def __init__(self) -> None:
        self.layers: set[int] = set()
        self._longest = 0
        # Stack, layer, components -> the experts named, None for all.
        self._names: dict[tuple[str, int | None, tuple[str, ...]], set[int] | None] = {}

    def add(self, text: str) -> None:
        text = text.removesuffix(".weight")
        inside = _IN_LAYER.fullmatch(text)
        if inside is not None:
            stack, layer, rest = inside[1] or "", int(inside[2]), inside[3] or ""
            self.layers.add(layer)
        else:
            stack, layer, rest = "", None, _ROOT.sub("", text, count=1) or text
        index = _EXPERT.search(rest)
        if index is not None:
            rest = rest[: index.start(2) - 1] + rest[index.end(2) :]
        parts = tuple(rest.split(".")) if rest else ()
        self._longest = max(self._longest, len(parts))
        key = (stack, layer, parts)
        if index is None:
            self._names[key] = None
        else:
            named = self._names.setdefault(key, set())
            if named is not None:
                named.add(int(index[2]))

    def experts(self, name: str, layer: int | None, stack: str) -> set[int] | None:
        """Which experts of a module are named: None for all of them, or for the module itself."""
        parts = tuple(name.split("."))
        ends = range(min(len(parts), self._longest) + 1)
        keys = [
            ("", None, parts[start : start + length]) for start in range(len(parts)) for length in ends if length
        ] + [
            (one, layer, parts[:length])
            for one in ((stack,) if stack else ("", "decoder"))
            for length in ends
            if layer is not None
        ]
        found: set[int] = set()
        for key in keys:
            named = self._names.get(key, found)
            if named is None:
                return None
            found = found | named
        return found


class Patterns:
    """Which modules a list of names in a config stands for.

    Raises
    ------
    ModelConfigError : a name is too long, is no regular expression, or could take too long to match.
    """

    def __init__(self, names: Iterable[str], where: str) -> None:
        self.where = where
        self.empty = True
        self._plain = _PlainNames()
        self._of_layer: dict[int, list[Match]] = {}
        self._general: list[tuple[str, Match]] = []
        self._wildcards = 0
        self.seconds = 0.0
        for name in names:
            self.empty = False
            self._add(name)
        self._digits = any(any(sign.isdigit() for sign in text) for text, _ in self._general)

    def _add(self, name: str) -> None:
        if not 0 < len(name) <= _LONGEST:
            raise ModelConfigError(
                f"{self.where}: found {one_line(name)}; allowed: names of modules of 1 to {_LONGEST} characters"
            )
        expression = name.startswith("re:") or _EXPRESSION.search(name)
        if not expression and not _WILDCARD.search(name):
            self._plain.add(name)
            return
        self._wildcards += 1
        if self._wildcards > _MOST_WILDCARDS:
            raise ModelConfigError(f"{self.where}: more than {_MOST_WILDCARDS} patterns; allowed: up to that many")
        if name.startswith("re:"):
            self._general.append((name, self._compiled(name.removeprefix("re:"), name)))
        elif expression:
            self._general.append((name, self._compiled(rf"(?:{name})(?:\.|$)", name)))
        else:
            self._add_glob(name)

    def _add_glob(self, name: str) -> None:
        glob = re.sub(r"\*+", "*", name.removesuffix(".weight"))
        inside = _IN_LAYER.fullmatch(glob)
        if inside is not None and inside[3] and not inside[1]:
            self._of_layer.setdefault(int(inside[2]), []).append(_glob(inside[3]))
        else:
            self._general.append((name, _glob(glob)))

    def _compiled(self, expression: str, name: str) -> Match:
        allowed = "a regular expression with few wildcards and no repeated groups, for it must match quickly"
        steps = most_steps(expression)
        if steps is None or steps > _MOST_STEPS:
            raise ModelConfigError(f"{self.where}: found {one_line(name)}; allowed: {allowed}")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                return re.compile(expression).match
        except (re.error, OverflowError, RecursionError, Warning) as error:
            raise ModelConfigError(
                f"{self.where}: found {one_line(name)}, which is no regular expression: {one_line(str(error))}; "
                f"allowed: {allowed}"
            ) from None

    def same_for(self, layer: int | None) -> object:
        """A key that is equal for layers that no name can tell apart.

        Wildcards without digits see a layer only by the number of its digits.
        """
        if layer is None or self._digits or layer in self._plain.layers or layer in self._of_layer:
            return layer, True
        return len(str(layer)), False

    def share(self, name: str, layer: int | None, copies: int = 1, stack: str = "") -> float:
        """The part of a module's copies (routed experts) that is named, 0 to 1."""
        if self.empty:
            return 0.0
        return self._named(name, layer, copies, stack) / copies

    def _named(self, name: str, layer: int | None, copies: int, stack: str) -> int:
        named = self._plain.experts(name, layer, stack)
        if named is None:
            return copies
        hit = {index for index in named if index < copies}
        first = with_index(name, 0)
        globs = self._of_layer.get(layer, ()) if layer is not None and not stack else ()
        if any(match(f"{one}.weight") for match in globs for one in first):
            return copies
        for text, match in self._general:
            if copies > 1 and re.search(r"expert.*\d", text):
                hit |= {index for index in range(copies) if self._hits(text, match, name, index, layer, stack)}
            elif self._hits(text, match, name, 0, layer, stack):
                return copies
        return len(hit)

    def _hits(self, text: str, match: Match, name: str, expert: int, layer: int | None, stack: str) -> bool:
        """Whether a wildcard matches any path of a module."""
        before = time.thread_time() - self.seconds
        suffix = "" if text.startswith("re:") or _EXPRESSION.search(text) else ".weight"
        for path in paths(with_index(name, expert), layer, stack):
            hit = match(path + suffix)
            self.seconds = time.thread_time() - before
            if self.seconds > MOST_SECONDS:
                raise ModelConfigError(
                    f"{self.where}: matching {one_line(text)} takes too long; allowed: names, or few patterns"
                )
            if hit:
                return True
        return False


def _glob(glob: str) -> Match:
    """A test of whether a path with ``.weight`` at its end matches a glob, or lies inside what does."""
    if not glob.endswith("*"):
        glob += ".*"
    if not _WILDCARD.search(glob[:-1]):
        head = glob[:-1]
        return lambda path: path.startswith(head)
    return re.compile(fnmatch.translate(glob)).match
