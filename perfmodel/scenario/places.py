"""Parts of arrays that broadcast against each other."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray


def extent(place: tuple[Any, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    """Size of a place of a shape; a place is a slice or an index array for every dimension."""
    return tuple(len(range(n)[p]) if isinstance(p, slice) else len(p) for p, n in zip(place, shape, strict=True))


def part_of(array: NDArray[np.float64], place: tuple[Any, ...], ndim: int) -> NDArray[np.float64]:
    """The part of a broadcastable array at a place of the full shape, still broadcastable."""
    whole = array.reshape((1,) * (ndim - array.ndim) + array.shape)
    return whole[tuple(p if n > 1 else slice(None) for p, n in zip(place, whole.shape, strict=True))]


def distinct_places(
    planned: Mapping[str, NDArray[np.float64]], shape: tuple[int, ...]
) -> Iterator[tuple[tuple[Any, ...], dict[str, float]]]:
    """Every distinct combination of plan values with where it holds: at most one dimension by index, others sliced."""
    ndim = len(shape)
    whole = {key: array.reshape((1,) * (ndim - array.ndim) + array.shape) for key, array in planned.items()}
    along = [d for d in range(ndim) if any(array.shape[d] > 1 for array in whole.values())]
    if len(along) == 1:
        rows = np.stack(
            [np.broadcast_to(array, _only(along[0], shape)).reshape(-1) for array in whole.values()], axis=1
        )
        distinct, inverse = np.unique(rows, axis=0, return_inverse=True)
        for number, row in enumerate(distinct.tolist()):
            place: list[Any] = [slice(None)] * ndim
            place[along[0]] = np.flatnonzero(inverse.reshape(-1) == number)
            yield tuple(place), dict(zip(whole, row, strict=True))
        return
    for index in np.ndindex(*(shape[d] for d in along)):
        place = [slice(None)] * ndim
        for d, i in zip(along, index, strict=True):
            place[d] = slice(i, i + 1)
        values = {key: part_of(array, tuple(place), ndim).item() for key, array in whole.items()}
        yield tuple(place), values


def _only(along: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(n if d == along else 1 for d, n in enumerate(shape))
