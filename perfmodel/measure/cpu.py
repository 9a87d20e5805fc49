"""Experiments on the processor: reading memory, and products of expert matrices that lie in memory.

In 32 bits the products are NumPy's, that is the BLAS library's. With weights of 8 and 4 bits they are those of
`perfmodel.kernels.stream`, for one token.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from perfmodel.measure.pool import SHAPES, Shape, matrices, scaled
from perfmodel.measure.timing import Case, Timing

#: Tokens of an expert that products are measured at; 1 is a product with a vector.
TOKENS = (1, 2, 4, 8, 16, 32, 64)
#: Small matrices, whose times tell what a product costs beside its weights.
SMALL = Shape("small", 512, 256)
SMALL_TOKENS = (1, 8)
#: A product that is all arithmetic; its matrix is used again and again.
LARGE, LARGE_TOKENS = Shape("large", 2048, 2048), 512
#: Largest matrix [byte], and what of it a second of time allows.
_LARGEST, _PER_SECOND = 16 * 2**20, 2**20
#: Passes of work that is given out to threads anew take longer, so that this does not count [s].
_LONG_S = 0.008

#: Limits the threads of the BLAS library.
Limit = Callable[[int], AbstractContextManager[object]]


class Row(NamedTuple):
    """One experiment and what came of it.

    kernel : "read", "blas", "int8" or "int4". shape : of the matrix. bits : stored, of a weight, scales included.
    tokens : rows of the other factor; 0 where there is none. threads : at work. timing : of one product, or of reading
    the whole pool.
    """

    kernel: str
    shape: Shape
    bits: float
    tokens: int
    threads: int
    timing: Timing

    @property
    def weight_bytes(self) -> float:
        """Stored size of the matrix [byte]."""
        return self.shape.params * self.bits / 8

    @property
    def gb_per_s(self) -> float:
        """Rate at which the weights were read [GB/s]."""
        return self.weight_bytes / self.timing.seconds / 1e9

    @property
    def gflop_per_s(self) -> float:
        """Rate of the arithmetic [GFLOP/s]."""
        return 2.0 * self.tokens * self.shape.params / self.timing.seconds / 1e9


class Experiment(NamedTuple):
    """A row to be, and its work."""

    row: Row
    case: Case


_UNTIMED = Timing(0.0, 0.0, 0, 0)


def shapes_for(seconds: float, pool_size: int) -> tuple[Shape, ...]:
    """The expert matrices, scaled down to what the memory and the time allow."""
    most = min(_LARGEST, pool_size / 4, max(2**20, seconds * _PER_SECOND))
    return tuple(scaled(shape, most) for shape in SHAPES)


def experiments(
    pool: NDArray[np.uint8], shapes: Sequence[Shape], threads: Sequence[int], executor: Executor, limit: Limit
) -> list[Experiment]:
    """All experiments, always in the same order.

    executor : runs compiled kernels, at least as many at a time as the most ``threads``.
    """
    found = []
    for count in threads:
        found.append(_read(pool, count, executor))
        for shape in (*shapes, SMALL):
            weights = matrices(pool, shape.rows, shape.cols, np.float32)
            several = SMALL_TOKENS if shape is SMALL else TOKENS
            found += [_blas(weights, shape, tokens, count, limit) for tokens in several]
        large = matrices(pool[: 4 * LARGE.params], LARGE.rows, LARGE.cols, np.float32)
        found.append(_blas(large, LARGE, LARGE_TOKENS, count, limit))
        found += [_quantised(pool, shape, bits, count, executor) for bits, shape in itertools.product((8, 4), shapes)]
    return found


def _read(pool: NDArray[np.uint8], threads: int, executor: Executor) -> Experiment:
    from perfmodel.kernels.stream import read_words

    parts = np.array_split(pool.view(np.uint64), threads)

    def work(repeats: int) -> None:
        for _ in range(repeats):
            _share(executor, read_words, parts)

    shape = Shape("memory", 1, pool.size)
    case = Case(_name("read", shape, 0, threads), work, threads=threads)
    return Experiment(Row("read", shape, 8.0, 0, threads, _UNTIMED), case)


def _blas(weights: NDArray[np.float32], shape: Shape, tokens: int, threads: int, limit: Limit) -> Experiment:
    batch = np.ones((tokens, shape.cols), dtype=np.float32)
    out = np.empty((tokens, shape.rows), dtype=np.float32)
    turn = itertools.cycle([weights[e].T for e in range(len(weights))])

    def work(repeats: int) -> None:
        for _ in range(repeats):
            np.matmul(batch, next(turn), out=out)

    case = Case(_name("blas", shape, tokens, threads), work, lambda: limit(threads), threads=threads)
    return Experiment(Row("blas", shape, 32.0, tokens, threads, _UNTIMED), case)


def _quantised(pool: NDArray[np.uint8], shape: Shape, bits: int, threads: int, executor: Executor) -> Experiment:
    from perfmodel.kernels.stream import GROUP, SCALE_BITS, gemv_int4, gemv_int8

    stored = bits + SCALE_BITS / GROUP
    groups = shape.cols // GROUP
    count = int(pool.size / (shape.params * stored / 8))
    cut = count * shape.params * bits // 8
    kernel: Any = gemv_int8 if bits == 8 else gemv_int4
    weights = matrices(pool[:cut], shape.rows, shape.cols * bits // 8, np.int8 if bits == 8 else np.uint8)
    scales = matrices(pool[cut : cut + 4 * count * shape.rows * groups], shape.rows, groups, np.float32)
    token = np.arange(shape.cols, dtype=np.int64).astype(np.int8)
    token_scales = np.ones(groups, dtype=np.float32)
    out = np.empty((count, shape.rows), dtype=np.float32)
    edges = [shape.rows * part // threads for part in range(threads + 1)]
    next_matrix = 0

    def work(repeats: int) -> None:
        nonlocal next_matrix

        def part(low: int, high: int) -> None:
            kernel(weights, scales, token, token_scales, next_matrix, repeats, low, high, out)

        _share(executor, part, edges[:-1], edges[1:])
        next_matrix = (next_matrix + repeats) % count

    name = f"int{bits}"
    case = Case(_name(name, shape, 1, threads), work, least_s=_LONG_S, threads=threads)
    return Experiment(Row(name, shape, stored, 1, threads, _UNTIMED), case)


def _share(executor: Executor, work: Callable[..., object], *arguments: Sequence[Any]) -> None:
    """Do the parts of some work at the same time; a single one here."""
    if len(arguments[0]) == 1:
        work(*(one[0] for one in arguments))
    else:
        list(executor.map(work, *arguments))


def _name(kernel: str, shape: Shape, tokens: int, threads: int) -> str:
    return f"{kernel} {shape.model} {shape.rows}x{shape.cols}, {tokens} tokens, {threads} threads"
