"""Many numbers of one line of text at once, and which layer a file of one layer is of."""

import contextlib
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from perfmodel.errors import TraceError
from perfmodel.routing.importers.base import ImportOptions
from perfmodel.routing.importers.files import integer, real
from perfmodel.routing.npz import one_line

_LAYER = re.compile(r"(?:^|[^a-z0-9])layer_?([0-9]{1,5})(?![0-9])", re.IGNORECASE)
_LAST = re.compile(r"([0-9]{1,5})$")


def integers(columns: Sequence[str], where: str, first: int = 1) -> NDArray[np.int64]:
    """Whole numbers >= 0 in plain digits; TraceError with the column, counted from ``first``."""
    if all(map(str.isdecimal, columns)) and max(map(len, columns)) < 10 and "".join(columns).isascii():
        return np.array(list(map(int, columns)), np.int64)
    return np.array([integer(text, f"{where}, column {i}") for i, text in enumerate(columns, first)], np.int64)


def reals(columns: Sequence[str], where: str, first: int = 1) -> NDArray[np.float32]:
    """Finite decimal numbers within float32; TraceError with the column, counted from ``first``."""
    values = None
    # Without letters and underscores, which float() also takes, only plain decimals are left.
    if set("".join(columns)) <= set("0123456789.") and max(map(len, columns)) < 30:
        with contextlib.suppress(ValueError):
            values = np.array(list(map(float, columns)), np.float64)
    if values is None:
        values = np.array([real(text, f"{where}, column {i}") for i, text in enumerate(columns, first)], np.float64)
    over = np.flatnonzero(np.abs(values) > np.finfo(np.float32).max)
    if len(over):
        raise TraceError(f"{where}, column {first + over[0]} is {columns[over[0]]}, expected a float32 number")
    return values.astype(np.float32)


def by_layer(files: Sequence[Path], options: ImportOptions) -> dict[int, list[Path]]:
    """The files of each layer, layers ascending, files of a layer in the order given.

    ``--layers`` names the layer of each file; otherwise the file's own name does, by ``layer`` and a number or by
    the number that it ends in, as in ``expert_weights_7.txt``.
    """
    if options.layers is not None:
        if len(options.layers) != len(files):
            raise TraceError(
                f"{one_line(files[0])}: --layers names {len(options.layers)} layers; allowed: one for each of "
                f"{len(files)} files"
            )
        named = list(options.layers)
    else:
        named = [_layer_in_name(path) for path in files]
    found: dict[int, list[Path]] = {}
    for layer, path in sorted(zip(named, files, strict=True), key=lambda item: item[0]):
        found.setdefault(layer, []).append(path)
    return found


def _layer_in_name(path: Path) -> int:
    found = _LAYER.search(path.stem) or _LAST.search(path.stem)
    if found is None:
        raise TraceError(f"{one_line(path)}: its name tells no layer, as in name_layer7 or name_7; --layers says it")
    return int(found[1])
