"""One large array of weights: far more than the caches hold, so that every expert is read from memory, as in decoding.

All experiments look at the same bytes in their own way; reading on where the last one stopped keeps them cold.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from perfmodel.errors import PerfModelError

GB = 1e9
#: Default bound of the memory [byte], and share of the free memory that it may be.
DEFAULT_BYTES, DEFAULT_SHARE = 2 * 10**9, 0.25
#: The pool over the last cache: what is enough, and what it takes at least to read from memory.
_ENOUGH, _LEAST = 16, 2
_SMALLEST, _WORTH = 32 * 2**20, 512 * 2**20
#: What of the bound is left for everything beside the pool.
_SHARE = 0.8
_TILE = 1 << 20


class Shape(NamedTuple):
    """One matrix of an expert.

    model : whose. rows, cols : outputs and inputs, after scaling. factor : by which the larger side was divided.
    """

    model: str
    rows: int
    cols: int
    factor: int = 1

    @property
    def params(self) -> int:
        """Its weights [1]."""
        return self.rows * self.cols


#: First matrices of experts: intermediate size x hidden size.
SHAPES = (
    Shape("Mixtral-8x7B", 14336, 4096),
    Shape("DeepSeek-V2-Lite", 1408, 2048),
    Shape("DeepSeek-V3", 2048, 7168),
    Shape("Qwen3-30B-A3B", 768, 2048),
)


def scaled(shape: Shape, most_bytes: float) -> Shape:
    """The shape with its larger side halved until it takes at most so much in 32 bits."""
    rows, cols, factor = shape.rows, shape.cols, 1
    while 4 * rows * cols > most_bytes and max(rows, cols) >= 256:
        if rows >= cols:
            rows //= 2
        else:
            cols //= 2
        factor *= 2
    return Shape(shape.model, rows, cols, factor)


def pool_bytes(memory_gb: float | None, cache_bytes: int, free_bytes: int) -> int:
    """Size of the pool within the memory that is allowed [byte].

    Raises PerfModelError where that is more than is free, or too little to read anything from memory.
    """
    bound = min(DEFAULT_BYTES, DEFAULT_SHARE * free_bytes) if memory_gb is None else memory_gb * GB
    least = max(_LEAST * cache_bytes, _SMALLEST)
    if memory_gb is not None and bound > free_bytes:
        raise PerfModelError(f"--memory-gb: found {memory_gb:g}, allowed at most the {free_bytes / GB:.3g} GB now free")
    if bound * _SHARE < least:
        found = f"{memory_gb:g}" if memory_gb is not None else f"{bound / GB:.3g} (a quarter of what is free)"
        raise PerfModelError(
            f"--memory-gb: found {found}, allowed at least {least / _SHARE / GB:.3g}:"
            f" the last caches hold {cache_bytes / 2**20:.4g} MiB, and experts are to come from memory"
        )
    enough = max(_ENOUGH * cache_bytes, _WORTH)
    return int(min(bound * _SHARE, enough)) // 4096 * 4096


def make_pool(size: int) -> NDArray[np.uint8]:
    """Random numbers in 32 bits, between -1 and 1, as bytes; the same few over and over, written to every page."""
    pool = np.empty(size // 4, dtype=np.float32)
    tile = np.random.default_rng(0).uniform(-1, 1, min(_TILE, pool.size)).astype(np.float32)
    for start in range(0, pool.size, tile.size):
        part = pool[start : start + tile.size]
        part[:] = tile[: part.size]
    pool.flags.writeable = False
    return pool.view(np.uint8)


def matrices(pool: NDArray[np.uint8], rows: int, cols: int, dtype: Any) -> NDArray[Any]:
    """As many matrices as the pool holds, one behind the other [E, rows, cols]."""
    each = rows * cols * np.dtype(dtype).itemsize
    count = pool.size // each
    found: NDArray[Any] = pool[: count * each].view(dtype).reshape(count, rows, cols)
    return found
