"""The compiled bitwidth search against brute force over all prefix splits; print the ratio."""

import time

import numpy as np

from perfmodel import reference
from perfmodel.kernels.selector import select_prefix


def main() -> None:
    """Print searches a second and the ratio."""
    rng = np.random.default_rng(0)
    print("experts   search/s   brute force/s   ratio")
    for experts in (4, 6, 8, 16):
        losses = np.sort(rng.random((256, experts, 4)), axis=-1)[..., ::-1].copy()
        budget = np.full(256, 2 * experts - experts // 2, dtype=np.int64)
        select_prefix(losses, budget)
        start = time.perf_counter()
        fast = select_prefix(losses, budget)
        middle = time.perf_counter()
        few = 4
        slow = reference.select_prefix(losses[:few], budget[:few])
        end = time.perf_counter()
        assert np.array_equal(fast[:few], slow)
        rates = 256 / (middle - start), few / (end - middle)
        print(f"{experts:7d} {rates[0]:10,.0f} {rates[1]:15,.0f} {rates[0] / rates[1]:7,.0f}")


if __name__ == "__main__":
    main()
