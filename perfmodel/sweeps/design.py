"""Which points a sweep has: dimensions of axes, and the blocks it is computed in."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from perfmodel.errors import PerfModelError

#: Dimensions that NumPy's broadcasting can tell apart.
MOST_DIMS = 32
#: Points of one sweep: days of work, and terabytes on disk.
MOST_POINTS = 10**12
POLICY, PLAN, HARDWARE = 0, 1, 2  #: groups of dimensions, from the outermost to the innermost


class Dim(NamedTuple):
    """One dimension: an axis, or several that vary together.

    name : of the dataset's dimension. axes : values by full axis name, each [size]. group : `POLICY`, `PLAN` where an
    axis may change a plan, or `HARDWARE`. numbered : whether the points are only numbered (a case, a sample).
    """

    name: str
    axes: Mapping[str, NDArray[Any]]
    group: int
    numbered: bool = False

    @property
    def size(self) -> int:
        """Number of positions."""
        return len(next(iter(self.axes.values())))


@dataclass(frozen=True)
class Block:
    """A rectangle of points that is computed at once: its number, and a slice for every dimension."""

    index: int
    slices: tuple[slice, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Points along every dimension."""
        return tuple(int(one.stop - one.start) for one in self.slices)

    @property
    def size(self) -> int:
        """Number of points."""
        return int(np.prod(self.shape, dtype=np.int64))


class Blocks(Sequence[Block]):
    """All blocks of a design in C order, made when they are asked for."""

    def __init__(self, shape: tuple[int, ...], chunks: tuple[int, ...]) -> None:
        self.shape, self.chunks = shape, chunks
        self._counts = tuple(-(-size // chunk) for size, chunk in zip(shape, chunks, strict=True))

    def __len__(self) -> int:
        return int(np.prod(self._counts, dtype=np.int64))

    @overload
    def __getitem__(self, index: int) -> Block: ...
    @overload
    def __getitem__(self, index: slice) -> list[Block]: ...
    def __getitem__(self, index: int | slice) -> Block | list[Block]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        number = range(len(self))[index]
        place = np.unravel_index(number, self._counts) if self._counts else ()
        slices = tuple(
            slice(int(i) * chunk, min((int(i) + 1) * chunk, size))
            for i, chunk, size in zip(place, self.chunks, self.shape, strict=True)
        )
        return Block(number, slices)


@dataclass(frozen=True, eq=False)
class Design:
    """The points of a sweep: every combination of positions along its dimensions.

    dims : from the outermost to the innermost: the policy, what changes plans, then hardware.
    notes : what should be known about how the points were chosen.
    """

    dims: tuple[Dim, ...]
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, dims: Iterable[Dim], notes: Iterable[str] = ()) -> "Design":
        """A design with its dimensions sorted by group; within a group they keep their order.

        Raises
        ------
        PerfModelError : more than `MOST_DIMS` dimensions, or more than `MOST_POINTS` points.
        """
        dims = tuple(dims)
        if len(dims) > MOST_DIMS:
            raise PerfModelError(
                f"axes: {len(dims)} dimensions; allowed at most {MOST_DIMS}: zip axes that vary together, list the"
                " points as cases, draw samples, or vary fewer axes"
            )
        check_points(dim.size for dim in dims)
        return cls(tuple(sorted(dims, key=lambda dim: dim.group)), tuple(notes))

    @property
    def shape(self) -> tuple[int, ...]:
        """Points along every dimension."""
        return tuple(dim.size for dim in self.dims)

    @property
    def size(self) -> int:
        """Number of points."""
        size = 1
        for dim in self.dims:
            size *= dim.size
        return size

    @property
    def axes(self) -> dict[str, NDArray[Any]]:
        """Values of every axis along its dimension."""
        return {name: values for dim in self.dims for name, values in dim.axes.items()}

    def chunks(self, points_per_block: int) -> tuple[int, ...]:
        """Shape of the blocks: about so many points (never more), whole inner dimensions, then a part of one."""
        left = max(1, int(points_per_block))
        found: list[int] = []
        for size in reversed(self.shape):
            most = min(size, left)
            pieces = -(-size // most)
            found.append(-(-size // pieces))  # pieces of nearly equal size
            left = left // size if most == size else 1
        return tuple(reversed(found))

    def blocks(self, points_per_block: int) -> Blocks:
        """The blocks of a regular grid of `chunks`; each is contiguous in C order, together they are all points."""
        return Blocks(self.shape, self.chunks(points_per_block))

    def within(self, block: Block) -> list[dict[str, NDArray[Any]]]:
        """Values of the axes in a block, one table a dimension."""
        return [
            {name: values[part] for name, values in dim.axes.items()}
            for dim, part in zip(self.dims, block.slices, strict=True)
        ]


def check_points(sizes: Iterable[int]) -> None:
    """Refuse more points than `MOST_POINTS`, from the number of values along every dimension."""
    points = math.prod(sizes)
    if points > MOST_POINTS:
        raise PerfModelError(
            f"axes: {points:.3g} points; allowed at most {MOST_POINTS:.0e}: give fewer values, zip axes that vary"
            " together, or draw samples"
        )
