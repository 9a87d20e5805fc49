"""Points drawn from ranges: Sobol sequences and Latin hypercubes."""

import math
import warnings
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from perfmodel.errors import PerfModelError
from perfmodel.hardware.base import shown, suggestion
from perfmodel.scenario import numbers
from perfmodel.sweeps.axes import Range

METHODS = ("sobol", "lhs")
#: Numbers that are drawn at once, over all axes: about 2 GB while they are drawn.
MOST_NUMBERS = 1 << 26
_FORM = "allowed METHOD:N[:SEED] with METHOD sobol or lhs, such as sobol:1024"


class Sample(NamedTuple):
    """How to draw points: ``sobol`` (scrambled Sobol sequence) or ``lhs`` (Latin hypercube), how many, which seed."""

    method: Literal["sobol", "lhs"]
    n: int
    seed: int = 0

    @classmethod
    def of(cls, given: object) -> "Sample":
        """From ``"sobol:1024"``, ``"lhs:1000:7"``, or a table with method, n and seed.

        Raises
        ------
        PerfModelError : anything else.
        """
        if isinstance(given, Sample):
            table: Mapping[Any, Any] = given._asdict()
        elif isinstance(given, str):
            parts = given.split(":")
            if not 2 <= len(parts) <= 3 or not all(part.isascii() and part.isdigit() for part in parts[1:]):
                raise PerfModelError(f"sample: found {shown(given)}, {_FORM}")
            table = dict(zip(("method", "n", "seed"), (parts[0], *map(_whole, parts[1:])), strict=False))
        elif isinstance(given, Mapping):
            table = given
        else:
            raise PerfModelError(f"sample: found {shown(given)}, {_FORM}")
        for key in table:
            if key not in cls._fields:
                close = suggestion(str(key), cls._fields)
                raise PerfModelError(f"sample: unknown key {shown(key)}{close}; allowed: {', '.join(cls._fields)}")
        method, n, seed = table.get("method", "sobol"), table.get("n"), table.get("seed", 0)
        if not isinstance(method, str) or method not in METHODS:
            raise PerfModelError(f"sample: method: found {shown(method)}, allowed {' | '.join(METHODS)}")
        count, start = numbers.whole(n), numbers.whole(seed)
        if count is None or not 1 <= count <= MOST_NUMBERS:
            raise PerfModelError(
                f"sample: n: found {shown(numbers.plain(n))}, allowed a whole number from 1 to {MOST_NUMBERS}"
                " (samples are held in memory, a grid is not)"
            )
        if start is None or not 0 <= start < 2**63:
            raise PerfModelError(
                f"sample: seed: found {shown(numbers.plain(seed))}, allowed a whole number from 0 to 2^63 - 1"
            )
        return cls("sobol" if method == "sobol" else "lhs", count, start)


def _whole(digits: str) -> int:
    return int(digits) if len(digits) < 20 else 2**64


def draw(sample: Sample, ranges: Mapping[str, tuple[Range, bool]]) -> tuple[dict[str, NDArray[Any]], tuple[str, ...]]:
    """Values of every axis at the sampled points, each [n], and notes.

    ranges : by axis, where to draw from, and whether values must be whole. Whole numbers of a range, both ends
    included, are all equally likely (in a log range: as likely as their share of the logarithm).

    Raises
    ------
    PerfModelError : more than `MOST_NUMBERS` numbers in all, which are held in memory.
    """
    if sample.n * len(ranges) > MOST_NUMBERS:
        raise PerfModelError(
            f"sample: {sample.n:,} points of {len(ranges)} axes; samples are held in memory, allowed at most"
            f" {MOST_NUMBERS // len(ranges):,} points of so many axes: draw fewer, or use a grid (start:stop:count)"
        )
    from scipy.stats import qmc

    generator = np.random.default_rng(sample.seed)
    notes = [f"{sample.n} points sampled by {sample.method} with seed {sample.seed}"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # SciPy's remark on numbers that are no power of two is a note here
        kind = qmc.Sobol if sample.method == "sobol" else qmc.LatinHypercube
        unit = kind(len(ranges), seed=generator).random(sample.n)
    if sample.method == "sobol" and sample.n & (sample.n - 1):
        notes.append(f"a Sobol sequence is balanced only for powers of two, and {sample.n} is none")
    found = {name: scaled(unit[:, i], *how) for i, (name, how) in enumerate(ranges.items())}
    return found, tuple(notes)


def scaled(unit: NDArray[np.float64], span: Range, whole: bool) -> NDArray[Any]:
    """Values of a range for numbers from 0 to 1 (see `draw`)."""
    low, high = span.low, span.high + 1 if whole else span.high
    values = low * np.exp(unit * math.log(high / low)) if span.log else low + unit * (high - low)
    if whole:
        # The last bits may lift a value to the number after the last.
        return np.clip(np.floor(values), low, span.high).astype(np.int64)
    return np.clip(values, low, high)
