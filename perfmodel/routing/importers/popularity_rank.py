"""Lists of experts from the most to the least used, as Fiddler places them: lines ``layer,expert`` without a header.

Every expert of every layer is in the list once. How often it was used is not: only an order can be had from it.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from perfmodel.errors import TraceError
from perfmodel.routing.importers.base import Format, Imported, ImportOptions
from perfmodel.routing.importers.canonical import only
from perfmodel.routing.importers.counts import profile_of
from perfmodel.routing.importers.files import columns, integer, read_lines
from perfmodel.routing.importers.probe import Probe
from perfmodel.routing.npz import one_line

NAME = "popularity-rank"
#: More experts than any model has, and few enough to be read at once.
_MOST_LINES = 200_000
_LAYERS, _EXPERTS = 10_000, 65_534


def recognise(probe: Probe) -> str | None:
    """Two whole numbers on every line, no pair of them twice, and all pairs if the whole file can be seen."""
    if probe.kind != "text" or not probe.lines:
        return None
    pairs: list[tuple[int, int]] = []
    for line in probe.lines:
        layer, comma, expert = line.partition(",")
        if not comma or not all(one.isascii() and one.isdigit() and len(one) < 6 for one in (layer, expert)):
            return None
        pairs.append((int(layer), int(expert)))
    layers, experts = {pair[0] for pair in pairs}, {pair[1] for pair in pairs}
    whole = probe.size <= len(probe.head)
    complete = len(pairs) == len(layers) * len(experts) and max(experts) == len(experts) - 1
    if len(set(pairs)) != len(pairs) or (whole and not complete) or len(experts) < 2:
        return None
    return (
        f"lines of layer,expert: each of {len(layers)} x {len(experts)} pairs once"
        if whole
        else ("lines of layer,expert, no pair twice")
    )


def read(files: Sequence[Path], options: ImportOptions) -> Imported:
    """One file."""
    path = only(files)
    return from_pairs(_pairs(path), options, files)


def _pairs(path: Path) -> Iterable[tuple[int, int]]:
    for number, line in read_lines(path, longest=256):
        where = f"{one_line(path)}: line {number}"
        parts = columns(line, ",", where)
        if len(parts) != 2:
            raise TraceError(f"{where}: {len(parts)} columns; allowed: 2, layer and expert")
        if number > _MOST_LINES:
            raise TraceError(f"{where}: more lines than the experts of any model; allowed: {_MOST_LINES}")
        yield integer(parts[0], f"{where}: layer", 0, _LAYERS), integer(parts[1], f"{where}: expert", 0, _EXPERTS)


def from_pairs(pairs: Iterable[tuple[int, int]], options: ImportOptions, files: Sequence[Path] = ()) -> Imported:
    """A profile from (layer, expert), the most used first; ``files`` says where they are from."""
    where = one_line(files[0]) if files else NAME
    table: dict[tuple[int, int], int] = {}
    for place, pair in enumerate(pairs, start=1):
        if pair in table:
            raise TraceError(f"{where}: layer {pair[0]}, expert {pair[1]} is both number {table[pair]} and {place}")
        table[pair] = place
    layers = sorted({layer for layer, _ in table})
    experts = 1 + max((expert for _, expert in table), default=-1)
    # The product first: a lone large id must not make a large table.
    if len(table) != len(layers) * experts or not table:
        raise TraceError(
            f"{where}: {len(table)} pairs of {len(layers)} layers and experts 0..{experts - 1}; "
            f"expected each of the {len(layers) * experts} pairs once"
        )
    # The larger, the more popular, and all above zero.
    counts: NDArray[np.float64] = np.zeros((len(layers), experts))
    rows = {layer: row for row, layer in enumerate(layers)}
    for (layer, expert), place in table.items():
        counts[rows[layer], expert] = len(table) + 1 - place
    return profile_of(NAME, files, options, counts, layers=layers, scale="ranks")


FORMAT = Format(
    name=NAME,
    summary="lines of layer,expert from the most to the least used (Fiddler): an order, and no counts",
    gives="profile",
    takes=frozenset({"num_experts", "top_k"}),
    files="text without a header: lines layer,expert, the most used pair first",
    recognise=recognise,
    read=read,
)
