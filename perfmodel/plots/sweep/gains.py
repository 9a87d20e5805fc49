"""Ratios of a metric over a baseline policy."""

import numpy as np
from numpy.typing import NDArray

from perfmodel.evaluation import Metric
from perfmodel.plots.sweep.labels import metric_words

#: Units of metrics whose gain is a speed-up.
_TIMES = ("s", "token/s")
#: Letters of a name that fit in the label of an axis.
_SHORT = 14


def gain(metric: Metric, ours: NDArray[np.float64], baseline: NDArray[np.float64]) -> NDArray[np.float64]:
    """How many times better ours is; NaN where either is missing or the baseline has nothing to compare with."""
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = baseline / ours if metric.better == "lower" else ours / baseline
    return np.where(np.isfinite(ratio) & (ratio > 0), ratio, np.nan)


def gain_words(metric: Metric) -> str:
    """What the ratio of a metric is called."""
    return "speed-up" if metric.unit in _TIMES else "gain"


def gain_label(metric: Metric, baseline: str) -> str:
    """The label of an axis of ratios; a baseline of many words is named elsewhere."""
    return f"{gain_words(metric)} over {baseline if len(baseline) <= _SHORT else 'the baseline'} (×)"


def gain_sentence(metric: Metric, baseline: str) -> str:
    """What the ratio is, for the caption."""
    base = f"of the baseline ({baseline})"
    above = f"{base} over that of the policy" if metric.better == "lower" else f"of the policy over that {base}"
    return f"{gain_words(metric).capitalize()}: {metric_words(metric)} {above}."
