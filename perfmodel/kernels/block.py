"""Blocks of hardware points: the innermost loop of every kernel runs over the points of one block.

A block holds a fixed number of points, so that a loop over it compiles to vector instructions, and it is small enough
for everything priced on it to stay in the first caches. A last block that is not full repeats its last point. Every
point is computed by the same operations in the same order wherever it stands, so how points are cut into blocks,
chunks or processes changes no bit.

Arrays
------
base : float64 [POINT_SIZE], places : int64 [V], values : float64 [V, N]: hardware points that differ in V places.
p : float64 [POINT_SIZE, BLOCK], the points of one block, one place a row.
r : float64 [RECIPROCALS, BLOCK], reciprocals of their rates, because a division costs as much as many products.
"""

# The compiler infers the types of kernels.
# mypy: allow-untyped-defs

from perfmodel.kernels._jit import scalar
from perfmodel.kernels.point import (
    CPU_BANDWIDTH,
    CPU_FLOPS,
    CPU_PACK,
    CPU_VECTOR_FLOPS,
    EXPERT_BANDWIDTH,
    GPU_BANDWIDTH,
    GPU_FLOPS,
    LINK_BANDWIDTH,
    NDP_BANDWIDTH,
    NDP_CLOCK,
)

BLOCK = 64

# Rows of r.
(
    PER_FLOP,
    PER_GPU_BYTE,
    PER_LINK_BYTE,
    PER_NDP_BYTE,
    PER_CYCLE,
    PER_CPU_FLOP,
    PER_CPU_VECTOR_FLOP,
    PER_CPU_BYTE,
    PER_EXPERT_BYTE,
    PER_PACK_BYTE,  # 0 where nothing is repacked
) = range(10)
RECIPROCALS = 10


@scalar
def _fill_block(base, p, r):
    """Give every point of the block the values that all points share."""
    for i in range(p.shape[0]):
        for b in range(BLOCK):
            p[i, b] = base[i]
    for row in range(RECIPROCALS):
        _reciprocal(p, row, r)


@scalar
def _reciprocal(p, row, r):
    rate = GPU_FLOPS
    if row == PER_GPU_BYTE:
        rate = GPU_BANDWIDTH
    elif row == PER_LINK_BYTE:
        rate = LINK_BANDWIDTH
    elif row == PER_NDP_BYTE:
        rate = NDP_BANDWIDTH
    elif row == PER_CYCLE:
        rate = NDP_CLOCK
    elif row == PER_CPU_FLOP:
        rate = CPU_FLOPS
    elif row == PER_CPU_VECTOR_FLOP:
        rate = CPU_VECTOR_FLOPS
    elif row == PER_CPU_BYTE:
        rate = CPU_BANDWIDTH
    elif row == PER_EXPERT_BYTE:
        rate = EXPERT_BANDWIDTH
    elif row == PER_PACK_BYTE:
        rate = CPU_PACK
    for b in range(BLOCK):
        r[row, b] = 1.0 / p[rate, b]
    if row == PER_PACK_BYTE:
        for b in range(BLOCK):
            r[row, b] = 0.0 if p[rate, b] == 0.0 else r[row, b]


@scalar
def _load_block(places, values, start, p, r):
    """Load the points from ``start`` on into the block; returns how many there are."""
    count = min(BLOCK, values.shape[1] - start)
    for v in range(places.shape[0]):
        place = places[v]
        for b in range(count):
            p[place, b] = values[v, start + b]
        for b in range(count, BLOCK):
            p[place, b] = values[v, start + count - 1]
        if place == GPU_FLOPS:
            _reciprocal(p, PER_FLOP, r)
        elif place == GPU_BANDWIDTH:
            _reciprocal(p, PER_GPU_BYTE, r)
        elif place == LINK_BANDWIDTH:
            _reciprocal(p, PER_LINK_BYTE, r)
        elif place == NDP_BANDWIDTH:
            _reciprocal(p, PER_NDP_BYTE, r)
        elif place == NDP_CLOCK:
            _reciprocal(p, PER_CYCLE, r)
        elif place == CPU_FLOPS:
            _reciprocal(p, PER_CPU_FLOP, r)
        elif place == CPU_VECTOR_FLOPS:
            _reciprocal(p, PER_CPU_VECTOR_FLOP, r)
        elif place == CPU_BANDWIDTH:
            _reciprocal(p, PER_CPU_BYTE, r)
        elif place == EXPERT_BANDWIDTH:
            _reciprocal(p, PER_EXPERT_BYTE, r)
        elif place == CPU_PACK:
            _reciprocal(p, PER_PACK_BYTE, r)
    return count
