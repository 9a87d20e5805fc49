"""Conditions on points in words, such as ``tpot_p99_s < 0.05 and policy.gpu_experts <= 4``.

The text is parsed and only the forms below are understood; nothing of it is ever run as a program. Each comparison
also says how far a point is from meeting it, so that a condition that no point meets can be explained.
"""

from __future__ import annotations

import ast
import functools
import operator
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from perfmodel.answers.targets import in_other_units, unit_is_missing
from perfmodel.errors import PerfModelError
from perfmodel.hardware.base import shown, suggestion
from perfmodel.scenario.axis import matching

_ALLOWED = "comparisons (< <= > >= == != in) of metrics, axes, numbers and quoted words, joined by and, or, not, ()"
_MAX_LENGTH = 2000
_ORDER: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: lambda a, b: _equal(a, b),
    ast.NotEq: lambda a, b: ~_equal(a, b),
}
_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_NAME = re.compile(r"'[^']*'|\"[^\"]*\"|(?<![A-Za-z0-9_.])[A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z0-9_]+)*")


class Verdict(NamedTuple):
    """For every point: whether the condition holds, and by which share of the bound it is missed (0 where it holds)."""

    holds: NDArray[np.bool_]
    miss: NDArray[np.float64]


class _Meant(NamedTuple):
    """What a name stands for: a metric or axis, the size of the unit it is written in, and how it is written."""

    name: str
    unit: float
    written: str


Read = Callable[[str], NDArray[Any]]
#: Relative difference up to which numbers are equal, and digits that tables print: a value that is printed as the
#: number it is compared with is equal to it, too.
_EQUAL, _PRINTED = 1e-9, 6


class Condition:
    """A parsed condition.

    Parameters
    ----------
    text : the condition.
    names : metrics and axes that may occur, axes also by their last part (``mean_bits``), metrics also in other units
        (``tpot_ms``, ``gpu_memory_gb``).

    Raises
    ------
    PerfModelError : a form that is not understood, or an unknown name (with close matches).
    """

    def __init__(self, text: object, names: Sequence[str]) -> None:
        if not isinstance(text, str) or not 0 < len(text.strip()) <= _MAX_LENGTH:
            raise PerfModelError(f"condition: found {shown(text)}, allowed {_ALLOWED}")
        self.text = " ".join(text.split())
        self._known = dict.fromkeys(names)
        self._names: dict[str, _Meant] = {}
        plain = _NAME.sub(self._stand_in, text.strip())
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # odd escapes and the like are not this reader's concern
                self._tree = ast.parse(plain, mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            raise PerfModelError(f"condition {shown(text)}: cannot be read, allowed {_ALLOWED}") from None
        self._check(self._tree, truth=True)

    def _stand_in(self, match: re.Match[str]) -> str:
        """A plain name for a dotted one, as a part such as ``dram.2`` is no name to the parser."""
        word = match[0]
        if word[0] in "'\"" or word in ("and", "or", "not", "in"):
            return word
        name = f"_{len(self._names)}"
        self._names[name] = self._meaning(word)
        return name

    def _meaning(self, word: str) -> _Meant:
        found = matching(word, self._known)
        if found is not None:
            return _Meant(found, 1.0, found)
        other = in_other_units(word)
        if other is not None and other[0] in self._known:
            return _Meant(*other, word)
        known = sorted(self._known)
        missing = unit_is_missing(word, known)
        if missing:
            raise PerfModelError(f"condition: {shown(word)} {missing}")
        close = suggestion(word, known)
        raise PerfModelError(f"condition: unknown name {shown(word)}{close}, allowed {', '.join(known)}")

    @property
    def names(self) -> tuple[str, ...]:
        """Metrics and axes that occur, each once."""
        return tuple(dict.fromkeys(one.name for one in self._names.values()))

    @property
    def comparisons(self) -> tuple[str, ...]:
        """The single comparisons, if they are joined by ``and`` alone; else the whole condition."""
        parts = self._conjuncts()
        return tuple(self._text(part) for part in parts) if len(parts) > 1 else (self.text,)

    def _conjuncts(self) -> list[ast.expr]:
        return _conjuncts(self._tree)

    def _text(self, node: ast.expr) -> str:
        def written(match: re.Match[str]) -> str:
            return self._names[match[0]].written if match[0] in self._names else match[0]

        return re.sub(r"\b_[0-9]+\b", written, ast.unparse(node))

    def _refuse(self, node: ast.expr) -> None:
        raise PerfModelError(f"condition: {shown(self._text(node))} is not understood, allowed {_ALLOWED}")

    def _check(self, node: ast.expr, truth: bool, depth: int = 0) -> None:
        """Refuse every form but the allowed ones; ``truth`` where a yes or no is due, else a value."""
        if depth > 60:
            raise PerfModelError("condition: nested too deeply")
        inner: list[tuple[ast.expr, bool]] = []
        match node:
            case ast.BoolOp() if truth:
                inner = [(value, True) for value in node.values]
            case ast.UnaryOp(op=ast.Not()) if truth:
                inner = [(node.operand, True)]
            case ast.Compare() if truth and any(isinstance(one, ast.Name) for one in ast.walk(node)):
                inner = [(node.left, False)]
                for op, value in zip(node.ops, node.comparators, strict=True):
                    if isinstance(op, ast.In) and isinstance(value, ast.Tuple | ast.List):
                        inner += [(item, False) for item in value.elts]
                    elif type(op) in _ORDER:
                        inner.append((value, False))
                    else:
                        self._refuse(node)
            case ast.UnaryOp(op=ast.USub() | ast.UAdd()) if not truth:
                inner = [(node.operand, False)]
            case ast.BinOp() if not truth and type(node.op) in _ARITHMETIC:
                inner = [(node.left, False), (node.right, False)]
            case ast.Name() if not truth and node.id in self._names:
                pass
            case ast.Constant() if not truth and type(node.value) in (int, float, str):
                pass
            case _:
                self._refuse(node)
        for child, wants_truth in inner:
            self._check(child, wants_truth, depth + 1)

    def __call__(self, read: Read) -> Verdict:
        """Judge all points; ``read`` gives the values of a name. A point without a value meets nothing."""
        return self._judge(self._conjuncts(), read)

    def each(self, read: Read) -> tuple[Verdict, ...]:
        """The verdict on each of `comparisons`."""
        return tuple(self._judge([part], read) for part in self._conjuncts())

    def _judge(self, parts: list[ast.expr], read: Read) -> Verdict:
        cache = {name: read(name) for name in self.names}
        verdicts = [self._truth(part, cache) for part in parts]
        holds = functools.reduce(np.logical_and, [v.holds for v in verdicts])
        miss = functools.reduce(np.maximum, [v.miss for v in verdicts])
        for values in cache.values():
            if values.dtype.kind == "f":
                unknown = np.isnan(values)
                holds, miss = holds & ~unknown, np.where(unknown, np.inf, miss)
        return Verdict(holds, miss)

    def _truth(self, node: ast.expr, cache: dict[str, NDArray[Any]]) -> Verdict:
        if isinstance(node, ast.BoolOp):
            parts = [self._truth(value, cache) for value in node.values]
            if isinstance(node.op, ast.And):
                both = functools.reduce(np.logical_and, [p.holds for p in parts])
                return Verdict(both, functools.reduce(np.maximum, [p.miss for p in parts]))
            either = functools.reduce(np.logical_or, [p.holds for p in parts])
            return Verdict(either, functools.reduce(np.minimum, [p.miss for p in parts]))
        if isinstance(node, ast.UnaryOp):
            inner = self._truth(node.operand, cache)
            return Verdict(~inner.holds, np.where(inner.holds, np.inf, 0.0))
        assert isinstance(node, ast.Compare)  # checked before
        left = node.left
        found: list[Verdict] = []
        for op, right in zip(node.ops, node.comparators, strict=True):
            found.append(self._compare(op, left, right, cache))
            left = right
        holds = functools.reduce(np.logical_and, [v.holds for v in found])
        return Verdict(holds, functools.reduce(np.maximum, [v.miss for v in found]))

    def _compare(self, op: ast.cmpop, left: ast.expr, right: ast.expr, cache: dict[str, NDArray[Any]]) -> Verdict:
        a = self._value(left, cache)
        if isinstance(op, ast.In) and isinstance(right, ast.Tuple | ast.List):
            among = [self._same_kind(a, self._value(item, cache), left) for item in right.elts]
            holds = (
                functools.reduce(np.logical_or, [_equal(a, b) for a, b in among])
                if among
                else np.zeros(np.shape(a), np.bool_)
            )
            return Verdict(holds, np.where(holds, 0.0, np.inf))
        a, b = self._same_kind(a, self._value(right, cache), left)
        words = a.dtype.kind != "f"
        if words and not isinstance(op, ast.Eq | ast.NotEq):
            raise PerfModelError(f"condition: {shown(self._text(left))} holds words, allowed == != in")
        holds = np.asarray(_ORDER[type(op)](a, b), dtype=np.bool_)
        if words:
            return Verdict(holds, np.where(holds, 0.0, np.inf))
        with np.errstate(invalid="ignore", divide="ignore"):
            scale = np.maximum(np.maximum(np.abs(b), np.abs(a) * 1e-12), 1e-300)
            # A bound that must not be touched is missed by something, however little.
            miss = np.where(holds, 0.0, np.maximum(np.abs(a - b) / scale, 1e-15))
        return Verdict(holds, miss)

    def _same_kind(self, a: NDArray[Any], b: NDArray[Any], node: ast.expr) -> tuple[NDArray[Any], NDArray[Any]]:
        if (a.dtype.kind == "f") != (b.dtype.kind == "f"):
            raise PerfModelError(f"condition: {shown(self._text(node))} is compared with another kind of value")
        return a, b

    def _value(self, node: ast.expr, cache: dict[str, NDArray[Any]]) -> NDArray[Any]:
        if isinstance(node, ast.Name):
            meant = self._names[node.id]
            found = cache[meant.name]
            return found if meant.unit == 1.0 else found / meant.unit
        if isinstance(node, ast.Constant):
            return np.asarray(node.value if isinstance(node.value, str) else _number(node.value))
        operands = [node.operand] if isinstance(node, ast.UnaryOp) else [node.left, node.right]  # type: ignore[attr-defined]
        values = [self._value(one, cache) for one in operands]
        if any(value.dtype.kind != "f" for value in values):
            raise PerfModelError(f"condition: {shown(self._text(node))} calculates with words")
        with np.errstate(all="ignore"):
            if isinstance(node, ast.UnaryOp):
                return np.asarray(-values[0] if isinstance(node.op, ast.USub) else values[0])
            assert isinstance(node, ast.BinOp)
            return np.asarray(_ARITHMETIC[type(node.op)](*values))


def joined(texts: Sequence[object], names: Sequence[str]) -> Condition:
    """One condition from several that must all hold; each is read on its own first, as in `Condition`."""
    for text in texts:
        Condition(text, names)
    return Condition(texts[0] if len(texts) == 1 else " and ".join(f"({text})" for text in texts), names)


def _conjuncts(tree: ast.expr) -> list[ast.expr]:
    """What is joined by ``and``, in parentheses too."""
    if isinstance(tree, ast.BoolOp) and isinstance(tree.op, ast.And):
        return [part for value in tree.values for part in _conjuncts(value)]
    return [tree]


def _equal(a: NDArray[Any], b: NDArray[Any]) -> NDArray[np.bool_]:
    """Whether values are equal: words and whole numbers exactly, others within `_EQUAL`, or as they are printed."""
    if a.dtype.kind != "f":
        return np.asarray(a == b, dtype=np.bool_)
    with np.errstate(all="ignore"):
        apart, size = np.abs(a - b), np.maximum(np.abs(a), np.abs(b))
        digit = 10.0 ** (np.floor(np.log10(np.where(size > 0.0, size, 1.0))) - _PRINTED + 1)
        printed = np.abs(b / digit - np.rint(b / digit)) <= 1e-6  # b has no more digits than a table
        close = (apart <= _EQUAL * size) | (printed & (apart <= 0.5 * digit * (1 + 1e-6)))
        whole = (a == np.rint(a)) & (b == np.rint(b))
    return np.asarray((a == b) | (close & ~whole), dtype=np.bool_)


def _number(value: Any) -> float:
    try:
        return float(value)
    except OverflowError:
        raise PerfModelError("condition: a number is too large") from None
