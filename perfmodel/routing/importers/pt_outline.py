"""What a ``.pt`` file of ``torch.save`` holds, told without torch and without running anything in it.

Such a file is a zip archive: a pickle that builds tables, lists and numbers, and beside it the bytes of the tensors.
Here the pickle's few harmless instructions are followed with stand-ins for the tensors; everything else is refused, and
so are tensors that do not lie within their bytes, which torch's own loader does not check.
"""

import math
import pickletools
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np

from perfmodel.errors import TraceError
from perfmodel.routing.importers.files import check_file, reason
from perfmodel.routing.npz import one_line, open_archive, shown

#: Largest pickle [byte]: the vocabulary ids and positions of some two million tokens.
LARGEST_PICKLE = 2**24
DEEPEST = 50
#: NumPy's type for every storage type, and the bytes that one number takes in the file.
_STORAGES = {
    "DoubleStorage": ("f8", 8),
    "FloatStorage": ("f4", 4),
    "HalfStorage": ("f2", 2),
    "BFloat16Storage": ("f4", 2),
    "LongStorage": ("i8", 8),
    "IntStorage": ("i4", 4),
    "ShortStorage": ("i2", 2),
    "CharStorage": ("i1", 1),
    "ByteStorage": ("u1", 1),
    "BoolStorage": ("?", 1),
}
_REBUILD, _TABLE = ("torch._utils", "_rebuild_tensor_v2"), ("collections", "OrderedDict")


class Outline(NamedTuple):
    """Stands for a tensor: the shape and the type that it has as a NumPy array."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]


class _Kind(NamedTuple):
    dtype: np.dtype[Any]
    width: int


class _Storage(NamedTuple):
    dtype: np.dtype[Any]
    numbers: int


class _Mark:
    """Where the items of a list, tuple or table begin on the stack."""


def outline(path: Path) -> Any:
    """Tables, lists, tuples, texts and numbers as the file nests them, and an `Outline` for every tensor.

    Raises :class:`TraceError` for anything but a file that ``torch.save`` writes of these.
    """
    check_file(path)
    name = one_line(path)
    try:
        with open_archive(path) as archive:
            sizes = _members(archive, name)
            pickled = next(one for one in sizes if one.endswith("/data.pkl"))
            root = pickled.removesuffix("data.pkl")
            order = archive.read(root + "byteorder") if root + "byteorder" in sizes else b"little"
            if order != b"little":
                raise TraceError(f"{name}: byte order {shown(order[:20])}; allowed: little")
            data = archive.read(pickled)
        value = _Machine(name, {key.removeprefix(root): size for key, size in sizes.items()}).run(data)
        return nested(value, lambda leaf: leaf, name)
    except TraceError:
        raise
    except Exception as error:  # decoders may raise anything at all when fed with broken bytes
        raise TraceError(f"{name}: cannot be read as a .pt file ({reason(error)})") from None


def _members(archive: zipfile.ZipFile, name: str) -> dict[str, int]:
    found = archive.infolist()
    sizes = {one.filename: one.file_size for one in found}
    if len(sizes) != len(found):
        raise TraceError(f"{name}: holds two members of the same name")
    for one in found:
        if one.compress_type != zipfile.ZIP_STORED or one.file_size != one.compress_size:
            raise TraceError(f"{name}: {one_line(one.filename)} is compressed, which torch.save never does")
        archive.open(one).close()  # compares the two places where the name of a member stands
    roots = {one.partition("/")[0] for one in sizes}
    if len(roots) != 1 or sum(one.count("/") == 1 and one.endswith("/data.pkl") for one in sizes) != 1:
        raise TraceError(f"{name}: is no archive of torch.save (one folder with a data.pkl in it)")
    if any(one.endswith("/constants.pkl") for one in sizes):
        raise TraceError(f"{name}: holds a TorchScript program; allowed: tensors, tables, lists and numbers")
    pickled = next(size for one, size in sizes.items() if one.endswith("/data.pkl"))
    if pickled > LARGEST_PICKLE:
        raise TraceError(f"{name}: its data.pkl has {pickled:,} bytes; allowed: at most {LARGEST_PICKLE:,}")
    return sizes


def nested(value: Any, convert: Callable[[Any], Any], where: str) -> Any:
    """A copy of nested tables, lists and tuples with every leaf converted; what is shared is converted once.

    TraceError for keys that are neither text nor integers, and for what holds itself or is nested too deeply.
    """
    done: dict[int, Any] = {}
    open_now: set[int] = set()

    def copy(one: Any, depth: int) -> Any:
        if isinstance(one, Outline) or not isinstance(one, dict | list | tuple):
            return convert(one)
        if id(one) in done:
            return done[id(one)]
        if id(one) in open_now or depth > DEEPEST:
            raise TraceError(f"{where}: is nested more than {DEEPEST} deep, or holds itself")
        open_now.add(id(one))
        made: Any
        if isinstance(one, dict):
            if any(type(key) not in (str, int) for key in one):
                raise TraceError(f"{where}: a table has keys that are neither text nor integers")
            made = {key: copy(item, depth + 1) for key, item in one.items()}
        else:
            made = [copy(item, depth + 1) for item in one]
        open_now.remove(id(one))
        done[id(one)] = made
        return made

    return copy(value, 0)


class _Machine:
    """Follows the instructions of a pickle that ``torch.save`` may write."""

    def __init__(self, name: str, sizes: dict[str, int]) -> None:
        self.name, self.sizes = name, sizes
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def run(self, data: bytes) -> Any:
        for code, argument, position in pickletools.genops(data):
            at, value = position or 0, cast(Any, argument)
            if code.name == "STOP":
                if at + 1 != len(data):
                    raise self.refused(f"has {len(data) - at - 1} bytes after its end")
                return self.stack.pop()
            if code.name in _CONSTANTS:
                self.stack.append(_CONSTANTS[code.name])
            elif code.name in _PUSHED:
                self.stack.append(value)
            elif code.name in _MADE:
                self.stack.append(_MADE[code.name]())
            elif code.name in ("BINPUT", "LONG_BINPUT"):
                self.memo[value] = self.stack[-1]
            elif code.name in ("BINGET", "LONG_BINGET"):
                self.stack.append(self.memo[value])
            elif code.name == "GLOBAL":
                self.stack.append(self.known(value))
            elif code.name != "PROTO":
                step = getattr(self, f"_{code.name.lower()}", None)
                if step is None:
                    raise self.refused(f"holds the instruction {code.name}")
                step()
        raise self.refused("has no end")

    def refused(self, what: str) -> TraceError:
        return TraceError(f"{self.name}: its pickle {what}; allowed: tensors, tables, lists, texts and numbers")

    def known(self, argument: str) -> Any:
        module, _, attribute = argument.partition(" ")
        if module == "torch" and attribute in _STORAGES:
            name, width = _STORAGES[attribute]
            return _Kind(np.dtype(name), width)
        if (module, attribute) in (_REBUILD, _TABLE):
            return module, attribute
        raise self.refused(f"names {shown(f'{module}.{attribute}')}, which is not run")

    def items(self) -> list[Any]:
        """Everything above the last mark, which is taken off with it."""
        at = max(i for i, one in enumerate(self.stack) if isinstance(one, _Mark))
        found = self.stack[at + 1 :]
        del self.stack[at:]
        return found

    def take(self, count: int) -> list[Any]:
        found = self.stack[-count:]
        if len(found) < count or any(isinstance(one, _Mark) for one in found):
            raise self.refused("takes from an empty stack")
        del self.stack[-count:]
        return found

    def _tuple(self) -> None:
        self.stack.append(tuple(self.items()))

    def _tuple1(self) -> None:
        self.stack.append(tuple(self.take(1)))

    def _tuple2(self) -> None:
        self.stack.append(tuple(self.take(2)))

    def _tuple3(self) -> None:
        self.stack.append(tuple(self.take(3)))

    def _append(self) -> None:
        (item,) = self.take(1)
        self.top(list).append(item)

    def _appends(self) -> None:
        items = self.items()
        self.top(list).extend(items)

    def _setitem(self) -> None:
        key, value = self.take(2)
        self.top(dict)[key] = value

    def _setitems(self) -> None:
        items = self.items()
        self.top(dict).update(zip(items[::2], items[1::2], strict=True))

    def top(self, kind: type) -> Any:
        if not isinstance(self.stack[-1], kind):
            raise self.refused(f"fills a {type(self.stack[-1]).__name__} as a {kind.__name__}")
        return self.stack[-1]

    def _binpersid(self) -> None:
        (found,) = self.take(1)
        word, kind, key, _, count = found
        if word != "storage" or not isinstance(kind, _Kind) or type(key) is not str or type(count) is not int:
            raise self.refused("names bytes of an unknown kind")
        have = self.sizes.get(f"data/{key}")
        if count < 0 or have != count * kind.width:
            needed = f"{one_line(count)} numbers of {kind.width} bytes"
            raise TraceError(f"{self.name}: data/{one_line(key)} has {have or 'no'} bytes, for {needed}")
        self.stack.append(_Storage(kind.dtype, count))

    def _reduce(self) -> None:
        function, arguments = self.take(2)
        if function == _TABLE and arguments == ():
            self.stack.append({})
        elif function == _REBUILD and isinstance(arguments, tuple) and len(arguments) in (6, 7):
            self.stack.append(self.tensor(*arguments[:4]))
        else:
            raise self.refused("calls what is no function")

    def tensor(self, storage: Any, offset: Any, shape: Any, strides: Any) -> Outline:
        plain = isinstance(storage, _Storage) and isinstance(shape, tuple) and isinstance(strides, tuple)
        if not plain or len(shape) != len(strides) or len(shape) > 8:
            raise self.refused("makes a tensor of the wrong parts")
        if any(type(n) is not int or n < 0 for n in (offset, *shape, *strides)):
            raise self.refused("makes a tensor of negative size")
        last = offset + sum((n - 1) * step for n, step in zip(shape, strides, strict=True)) if 0 not in shape else -1
        if last >= storage.numbers or math.prod(shape) > storage.numbers:
            raise TraceError(
                f"{self.name}: a tensor of shape {one_line(shape)} does not fit its {storage.numbers} numbers"
            )
        return Outline(shape, storage.dtype)


_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_PUSHED = frozenset({"BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE"})
_MADE: dict[str, Callable[[], Any]] = {"EMPTY_DICT": dict, "EMPTY_LIST": list, "MARK": _Mark}
