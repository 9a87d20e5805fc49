"""Which experiments constants may rest on, and what about a result cannot be true.

Where other programs use the machine, threads wait for each other, and a fit to such times says nothing of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from perfmodel.measure.check import CheckRow, median_error
from perfmodel.measure.cpu import LARGE_TOKENS, SMALL, Row
from perfmodel.measure.overlay import KERNELS, Fits, expert_rows

#: Share of the products on some number of threads that a fit needs undisturbed [1].
_ENOUGH = 0.5
#: Median errors of a fit and of the check from which on a result is doubted [1].
_MOST_ERROR = 0.25
#: More threads are slower by synchronising, but not by more than this [1].
_LEAST_GAIN = 0.8
#: Few tokens run no faster than a large product, within this [1].
_MOST_VECTOR = 1.1


def undisturbed(rows: Sequence[Row]) -> list[Row]:
    """The calm rows on the most threads for which enough of them are calm, and on fewer; all rows where none are."""
    for threads in sorted({row.threads for row in rows}, reverse=True):
        if _enough([row for row in rows if row.threads == threads]):
            return [row for row in rows if row.threads <= threads and row.timing.calm]
    return list(rows)


def _enough(rows: Sequence[Row]) -> bool:
    """Whether calm rows on one number of threads are all that is needed for every constant."""
    measured = [row for row in rows if row.kernel == "read" or row.tokens == LARGE_TOKENS]
    if not all(row.timing.calm for row in measured):
        return False
    for kernels in KERNELS:
        products = expert_rows(rows, kernels)
        calm = [row for row in products if row.timing.calm]
        tokens = {row.tokens for row in calm}
        # Products of one token tell the rate of memory, those of many the rate of arithmetic.
        many = max(row.tokens for row in products)
        if len(calm) < _ENOUGH * len(products) or 1 not in tokens or max(tokens) < many / 2:
            return False
    return True


def find_doubts(rows: Sequence[Row], fits: Fits, kernels: str, check: Sequence[CheckRow]) -> list[str]:
    """What speaks against a result, each in a few words; empty for one that holds together.

    rows : that the fits rest on. kernels : whose fit is to be written, beside that of 32 bits which it builds on.
    """
    doubts = []
    used = {"blas": fits.blas, kernels: getattr(fits, kernels)}
    for name, fit in used.items():
        if not fit.median_error <= _MOST_ERROR:
            what = "in 32 bits" if name == "blas" else "with 8 and 4 bits"
            doubts.append(f"fitted times {what} are {100 * fit.median_error:.0f} % off at the median")
    gain = _gain(rows)
    most, fewest = max(row.threads for row in rows), min(row.threads for row in rows)
    if gain is not None and gain < _LEAST_GAIN:
        doubts.append(f"products on {most} threads run at {gain:.2g} times their rate on {fewest}")
    large = next(row for row in rows if row.tokens == LARGE_TOKENS and row.threads == most)
    vector = used[kernels].vector_flops_per_s / (large.gflop_per_s * 1e9)
    if vector > _MOST_VECTOR:
        doubts.append(f"few tokens run at {vector:.2g} times the rate of a large product")
    error = median_error(check)
    if error is not None and error > _MOST_ERROR:
        doubts.append(f"the check is {100 * error:.0f} % off at the median")
    return doubts


def _gain(rows: Sequence[Row]) -> float | None:
    """Median rate of the products on the most threads over that on the fewest [1]; None without both."""
    most, fewest = max(row.threads for row in rows), min(row.threads for row in rows)
    products = [row for row in rows if row.kernel != "read" and row.shape != SMALL]
    times = {(row.kernel, row.shape, row.tokens, row.threads): row.timing.seconds for row in products}
    gains = [
        times[kernel, shape, tokens, fewest] / seconds
        for (kernel, shape, tokens, threads), seconds in times.items()
        if threads == most > fewest and (kernel, shape, tokens, fewest) in times
    ]
    return float(np.median(gains)) if gains else None
