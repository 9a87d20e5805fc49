"""Which numbers make up the variance of a prediction when all of them vary at once (Sobol indices)."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from perfmodel.answers.curve import checked_scenario
from perfmodel.answers.provenance import described_by
from perfmodel.answers.ranges import Spread, given, table_of_ends
from perfmodel.errors import PerfModelError
from perfmodel.evaluation import metric as find_metric
from perfmodel.hardware.base import shown
from perfmodel.scenario.numbers import plain, whole
from perfmodel.scenario.tables import fill_prices
from perfmodel.sweeps.samples import scaled

if TYPE_CHECKING:
    import xarray as xr

    from perfmodel.scenario import Scenario

#: Resamples behind a confidence interval.
_RESAMPLES = 200
#: Intervals wider than this are remarked upon.
_WIDE = 0.1
#: Shares closer than this to a bound count as inside.
_NEARLY = 0.005


class _Samples(NamedTuple):
    """The metric at two independent sets of n points, and at the first with one axis after another from the second.

    a, b : [policies, n]. mixed : [axes, policies, n].
    """

    a: NDArray[np.float64]
    b: NDArray[np.float64]
    mixed: NDArray[np.float64]

    def shares(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """First-order and total indices [policies, axes]; NaN for a metric that does not vary."""
        mean = np.stack((self.a, self.b)).mean(axis=(0, 2))[:, None]
        a, b, mixed = self.a - mean, self.b - mean, self.mixed - mean
        variance = np.stack((a, b)).var(axis=(0, 2))
        variance[variance == 0.0] = np.nan
        first = (b * (mixed - a)).mean(axis=-1) / variance
        total = 0.5 * ((a - mixed) ** 2).mean(axis=-1) / variance
        return first.T, total.T


def sobol_indices(
    scenario: Scenario,
    ranges: Mapping[str, str | Sequence[Any]],
    n: int = 1024,
    seed: int = 0,
    metric: str = "tpot_mean_s",
) -> xr.Dataset:
    """Shares of a metric's variance that come from each axis, when all of them vary at once.

    Parameters
    ----------
    scenario : what is priced, for every one of its policies.
    ranges : by axis of numbers its low and high end, with ``"log"`` as a third entry for even spread over orders of
        magnitude, or a text such as ``"16:128:log"``. Whole numbers are drawn evenly, both ends included.
    n : base samples, a power of two; ``n * (axes + 2)`` points are priced for every policy.
    seed : of the samples and of the confidence intervals.

    Returns
    -------
    Data set with dimensions ``policy`` and ``key``: ``first``, the share of each axis alone, and ``total``, with all
    its interactions; ``first_low`` to ``total_high``, their 95 % bootstrap intervals; ``mean`` and ``variance`` of
    the metric by policy. A metric that does not vary has no shares (NaN). The notes say where the shares are less sure
    than they look.

    Raises
    ------
    PerfModelError : unknown axis or metric, a bad range, n or seed, or samples where a policy has no value.

    References
    ----------
    Saltelli et al., Computer Physics Communications 181 (2010) 259-270, table 2 (b) and (f).
    """
    from scipy.stats import qmc

    wanted = find_metric(metric)
    n, seed = _check_counts(n, seed)
    checked_scenario(scenario)
    drawn = [_drawn(scenario, key, ends) for key, ends in table_of_ends("ranges", ranges).items()]
    names = [one.axis.name for one in drawn]
    if len(set(names)) < len(names):
        raise PerfModelError(f"ranges: {next(name for name in names if names.count(name) > 1)} is given twice")
    scenario.check_varied(names)
    unit = qmc.Sobol(2 * len(drawn), seed=np.random.default_rng(seed), bits=64).random(n).T
    a, b = unit[: len(drawn)], unit[len(drawn) :]
    sets = [a, b, *(np.concatenate((a[:i], b[i : i + 1], a[i + 1 :])) for i in range(len(drawn)))]
    everything = np.concatenate(sets, axis=1)
    columns = {
        one.axis.name: scaled(row, one.range, one.axis.whole) for one, row in zip(drawn, everything, strict=True)
    }
    values = np.stack([_many(scenario, label, columns, wanted.name) for label in scenario.labels])
    values = values.reshape(len(scenario.labels), -1, n)
    samples = _Samples(values[:, 0], values[:, 1], np.moveaxis(values[:, 2:], 1, 0))
    return _dataset(scenario, wanted.name, drawn, samples, n, seed)


def _check_counts(n: object, seed: object) -> tuple[int, int]:
    count, start = whole(n), whole(seed)
    if count is None or not 16 <= count <= 2**20 or count & (count - 1):
        raise PerfModelError(f"sobol: n: found {shown(plain(n))}, allowed a power of two from 16 to 2^20")
    if start is None or not 0 <= start < 2**63:
        raise PerfModelError(f"sobol: seed: found {shown(plain(seed))}, allowed a whole number from 0")
    return count, start


def _drawn(scenario: Scenario, key: str, ends: object) -> Spread:
    spread = given(scenario, key, ends)
    if spread.range.low == spread.range.high:
        low, high, _ = spread.range
        raise PerfModelError(f"range of {spread.axis.name}: found {low:g} to {high:g}, allowed low below high")
    return spread


def _many(scenario: Scenario, label: str, columns: Mapping[str, NDArray[Any]], metric: str) -> NDArray[np.float64]:
    """The metric at many points of several axes at once [points]."""
    found = {metric: np.empty(len(next(iter(columns.values()))))}
    refused: dict[str, int] = {}
    fill_prices(scenario, scenario.policy(label), [columns], found, refused)
    missing = int(np.isnan(found[metric]).sum())
    if missing:
        why = f": {next(iter(refused))}" if refused else ""
        raise PerfModelError(
            f"sobol: {label} has no value of {metric} at {missing} of {len(found[metric])} samples{why};"
            " narrow the ranges"
        )
    return found[metric]


def _intervals(samples: _Samples, seed: int) -> dict[str, NDArray[np.float64]]:
    """Percentiles of the indices over resampled base points, reproducible by seed."""
    rng = np.random.default_rng([seed, 1])
    n = samples.a.shape[1]
    picks = (rng.integers(0, n, n) for _ in range(_RESAMPLES))
    resampled = [_Samples(samples.a[:, i], samples.b[:, i], samples.mixed[..., i]).shares() for i in picks]
    return {
        f"{name}_{end}": np.percentile([one[place] for one in resampled], q, axis=0)
        for place, name in enumerate(("first", "total"))
        for end, q in (("low", 2.5), ("high", 97.5))
    }


def _sampling_notes(found: Mapping[str, NDArray[np.float64]], n: int) -> list[str]:
    """What the size of the sample does to the shares."""
    lowest, highest = (np.stack([found[f"{name}_{end}"] for name in ("first", "total")]) for end in ("low", "high"))
    outside = bool((lowest < -_NEARLY).any() or (highest > 1.0 + _NEARLY).any())
    widths = highest - lowest
    if np.isnan(widths).all():
        return []
    notes = []
    above = found["first"] > found["total"] + _NEARLY
    if outside or above.any():
        what = ["intervals reach beyond 0 or 1"] if outside else []
        what += ["a share alone is above the one with interactions"] if above.any() else []
        notes.append(f"{' and '.join(what)}: an error of sampling, which more base samples (--n) make smaller")
    widest = float(np.nanmax(widths))
    if widest > _WIDE:
        # The width of an interval falls with the square root of the samples.
        better = min(2**20, 2 ** math.ceil(math.log2(n * (widest / _WIDE) ** 2)))
        advice = f"; --n {better} would make it about {_WIDE:g}" if better > n else ""
        notes.append(f"the widest 95 % interval spans {widest:.2g} of the variance{advice}")
    return notes


def _dataset(
    scenario: Scenario, metric: str, drawn: Sequence[Spread], samples: _Samples, n: int, seed: int
) -> xr.Dataset:
    import xarray as xr

    first, total = samples.shares()
    found = {"first": first, "total": total, **_intervals(samples, seed)}
    names = {"first": "share of the variance, alone", "total": "share of the variance, with interactions"}
    data: dict[str, Any] = {
        name: (("policy", "key"), values, {"units": "1", "long_name": names[name.partition("_")[0]]})
        for name, values in found.items()
    }
    described = described_by(scenario, "sobol", metric, scenario.labels, [one.axis.name for one in drawn])
    described["notes"] = json.dumps([*_sampling_notes(found, n), *json.loads(described["notes"])])
    both = np.concatenate((samples.a, samples.b), axis=1)
    unit = find_metric(metric).unit
    data["mean"] = ("policy", both.mean(axis=1), {"units": unit, "long_name": f"mean of {metric}"})
    data["variance"] = ("policy", both.var(axis=1), {"units": f"{unit}^2", "long_name": f"variance of {metric}"})
    data["range"] = (("key", "end"), np.array([one.range[:2] for one in drawn]))
    return xr.Dataset(
        data,
        coords={
            "policy": np.array(scenario.labels, dtype=object),
            "key": np.array([one.axis.name for one in drawn], dtype=object),
            "end": np.array(["low", "high"], dtype=object),
            "unit": ("key", np.array([one.axis.unit for one in drawn], dtype=object)),
            "log": ("key", np.array([one.range.log for one in drawn])),
        },
        attrs={
            **described,
            "metric": metric,
            "n": n,
            "seed": seed,
        },
    )
