"""Which numbers make up the variance of a prediction when all of them vary at once (Sobol indices)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from perfmodel.answers.provenance import described_by
from perfmodel.answers.ranges import Spread, given, table_of_ends
from perfmodel.errors import PerfModelError
from perfmodel.evaluation import metric as find_metric
from perfmodel.hardware.base import shown

if TYPE_CHECKING:
    import xarray as xr

    from perfmodel.scenario import Scenario

#: Resamples behind a confidence interval.
_RESAMPLES = 200


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
    ranges: Mapping[str, Sequence[Any]],
    n: int = 1024,
    seed: int = 0,
    metric: str = "tpot_mean_s",
) -> xr.Dataset:
    """Shares of a metric's variance that come from each axis, when all of them vary at once.

    Parameters
    ----------
    scenario : what is priced, for every one of its policies.
    ranges : by axis of numbers its low and high end, with ``"log"`` as a third entry for even spread over orders of
        magnitude. Whole numbers are drawn evenly, both ends included.
    n : base samples, a power of two; ``n * (axes + 2)`` points are priced for every policy.
    seed : of the samples and of the confidence intervals.

    Returns
    -------
    Data set with dimensions ``policy`` and ``key``: ``first``, the share of each axis alone, and ``total``, with all
    its interactions; ``first_low`` to ``total_high``, their 95 % bootstrap intervals; ``mean`` and ``variance`` of
    the metric by policy. A metric that does not vary has no shares (NaN).

    Raises
    ------
    PerfModelError : unknown axis or metric, a bad range, n or seed, or samples where a policy has no value.

    References
    ----------
    Saltelli et al., Computer Physics Communications 181 (2010) 259-270, table 2 (b) and (f).
    """
    from scipy.stats import qmc

    wanted = find_metric(metric)
    _check_counts(n, seed)
    drawn = [_drawn(scenario, key, ends) for key, ends in table_of_ends("ranges", ranges).items()]
    names = [one.spread.axis.name for one in drawn]
    if len(set(names)) < len(names):
        raise PerfModelError(f"ranges: {next(name for name in names if names.count(name) > 1)} is given twice")
    unit = qmc.Sobol(2 * len(drawn), seed=np.random.default_rng(seed), bits=64).random(int(n)).T
    a, b = unit[: len(drawn)], unit[len(drawn) :]
    sets = [a, b, *(np.concatenate((a[:i], b[i : i + 1], a[i + 1 :])) for i in range(len(drawn)))]
    everything = np.concatenate(sets, axis=1)
    columns = {name: one.at(row) for name, one, row in zip(names, drawn, everything, strict=True)}
    values = np.stack([_many(scenario, label, drawn, columns, wanted.name) for label in scenario.labels])
    values = values.reshape(len(scenario.labels), -1, int(n))
    samples = _Samples(values[:, 0], values[:, 1], np.moveaxis(values[:, 2:], 1, 0))
    return _dataset(scenario, wanted.name, drawn, samples, int(n), int(seed))


def _check_counts(n: object, seed: object) -> None:
    if not _is_whole(n) or not 16 <= n <= 2**20 or n & (n - 1):  # type: ignore[operator]
        raise PerfModelError(f"sobol: n: found {shown(n)}, allowed a power of two from 16 to 2^20")
    if not _is_whole(seed) or not 0 <= seed < 2**63:  # type: ignore[operator]
        raise PerfModelError(f"sobol: seed: found {shown(seed)}, allowed a whole number from 0")


def _is_whole(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


class _Drawn(NamedTuple):
    """An axis that is drawn at random, evenly or evenly in its logarithm."""

    spread: Spread
    log: bool

    def at(self, unit: NDArray[np.float64]) -> NDArray[np.float64]:
        """Values for numbers from 0 to 1."""
        low, high = self.spread.low, self.spread.high
        if self.spread.axis.whole:
            high += 1.0  # every whole number has a share of the same width
        values = low * (high / low) ** unit if self.log else low + (high - low) * unit
        values = np.floor(values) if self.spread.axis.whole else values
        return np.asarray(np.clip(values, self.spread.low, self.spread.high))


def _drawn(scenario: Scenario, key: str, ends: Sequence[Any]) -> _Drawn:
    listed = list(ends) if isinstance(ends, tuple | list) else []
    log = len(listed) == 3 and listed[2] == "log"
    if len(listed) != 2 + log:
        raise PerfModelError(
            f"range of {shown(key)}: found {shown(ends)}, allowed low and high, and 'log' for log scale"
        )
    spread = given(scenario, key, listed[:2])
    if spread.low == spread.high or (log and spread.low <= 0):
        raise PerfModelError(
            f"range of {spread.axis.name}: found {spread.low:g} to {spread.high:g}, allowed low below high"
            + (", both above 0" if log else "")
        )
    return _Drawn(spread, log)


def _many(
    scenario: Scenario, label: str, drawn: Sequence[_Drawn], columns: Mapping[str, NDArray[np.float64]], metric: str
) -> NDArray[np.float64]:
    """The metric at many points of several axes at once [points]; one plan for each distinct plan setting."""
    hardware = {one.spread.axis.name: columns[one.spread.axis.name] for one in drawn if _is_hardware(one)}
    planned = [one for one in drawn if not _is_hardware(one)]
    count = len(next(iter(columns.values())))
    rows = np.stack([columns[one.spread.axis.name] for one in planned], axis=1) if planned else np.zeros((count, 0))
    distinct, inverse, sizes = np.unique(rows, axis=0, return_inverse=True, return_counts=True)
    groups = np.split(np.argsort(inverse.reshape(-1), kind="stable"), np.cumsum(sizes)[:-1])
    found = np.empty(count)
    refused: dict[str, int] = {}
    for here, row in zip(groups, distinct.tolist(), strict=True):
        settings = {
            one.spread.axis.name: int(value) if one.spread.axis.whole else value
            for one, value in zip(planned, row, strict=True)
        }
        part = {name: values[here] for name, values in hardware.items()}
        found[here] = scenario.prices(label, settings, part, (metric,), infeasible=refused)[metric]
    if np.isnan(found).any():
        why = f": {next(iter(refused))}" if refused else ""
        raise PerfModelError(
            f"sobol: {label} has no value of {metric} at {int(np.isnan(found).sum())} of {count} samples{why};"
            " narrow the ranges"
        )
    return found


def _is_hardware(one: _Drawn) -> bool:
    return one.spread.axis.kind == "hardware"


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


def _dataset(
    scenario: Scenario, metric: str, drawn: Sequence[_Drawn], samples: _Samples, n: int, seed: int
) -> xr.Dataset:
    import xarray as xr

    first, total = samples.shares()
    found = {"first": first, "total": total, **_intervals(samples, seed)}
    names = {"first": "share of the variance, alone", "total": "share of the variance, with interactions"}
    data: dict[str, Any] = {
        name: (("policy", "key"), values, {"units": "1", "long_name": names[name.partition("_")[0]]})
        for name, values in found.items()
    }
    both = np.concatenate((samples.a, samples.b), axis=1)
    unit = find_metric(metric).unit
    data["mean"] = ("policy", both.mean(axis=1), {"units": unit, "long_name": f"mean of {metric}"})
    data["variance"] = ("policy", both.var(axis=1), {"units": f"{unit}^2", "long_name": f"variance of {metric}"})
    data["range"] = (("key", "end"), np.array([[one.spread.low, one.spread.high] for one in drawn]))
    return xr.Dataset(
        data,
        coords={
            "policy": np.array(scenario.labels, dtype=object),
            "key": np.array([one.spread.axis.name for one in drawn], dtype=object),
            "end": np.array(["low", "high"], dtype=object),
            "unit": ("key", np.array([one.spread.axis.unit for one in drawn], dtype=object)),
            "log": ("key", np.array([one.log for one in drawn])),
        },
        attrs={
            **described_by(scenario, "sobol", scenario.labels, [one.spread.axis.name for one in drawn]),
            "metric": metric,
            "n": n,
            "seed": seed,
        },
    )
