"""Shares of the variance of a metric that come from each number when all of them vary at once (Sobol indices)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from perfmodel.errors import PerfModelError
from perfmodel.evaluation import metric as find_metric
from perfmodel.plots.drawing import handles, name_rows
from perfmodel.plots.style import BLACK, COLUMN, ORANGE, PAGE, SKY, Look
from perfmodel.plots.sweep.labels import metric_words, names_of, unit_words
from perfmodel.plots.sweep.origin import origin_words
from perfmodel.plots.sweep.page import legend_above, page, panel_titles
from perfmodel.plots.sweep.selection import Sweep
from perfmodel.plots.words import plain

if TYPE_CHECKING:
    import xarray

_MOST_ROWS, _MOST_PANELS = 14, 4
_SHARES = {"first": Look("alone (first order)", SKY), "total": Look("with interactions (total)", ORANGE, "////")}


def sobol_figure(dataset: xarray.Dataset, *, policy: str | Sequence[str] | None = None) -> Figure:
    """First-order and total share of the variance by number, with 95 % intervals; one panel a policy.

    Parameters
    ----------
    dataset : from ``answers.sobol_indices``.
    policy : policies to draw, at most four; by default all.

    Raises
    ------
    PerfModelError : an unknown policy (with close matches), or no policy whose metric varies.
    """
    whole = Sweep(dataset)
    shown = whole.chosen(policy, _MOST_PANELS)
    kind = find_metric(str(dataset.attrs["metric"]))
    shares = {
        (share, one): np.array([whole.values(f"{share}{end}", one, ["key"]) for end in ("", "_low", "_high")])
        for share in _SHARES
        for one in shown
    }
    totals = np.array([shares["total", one][0] for one in shown])
    if not np.isfinite(totals).any():
        raise PerfModelError(f"plot: {kind.name} does not vary within these ranges")
    rows = np.argsort(-np.nan_to_num(totals).max(axis=0), kind="stable")[:_MOST_ROWS]
    names = names_of(whole)
    constant = [names[one] for one, total in zip(shown, totals, strict=True) if np.isnan(total).any()]
    hidden = totals.shape[1] - len(rows)
    sentences = [
        f"Shares of the variance of the {metric_words(kind)} when all numbers vary over their ranges at once.",
        f"Lines: 95 % intervals of {dataset.attrs['n']} base samples.",
        f"Does not vary: {', '.join(constant)}." if constant else "",
        f"{hidden} smaller ones are not shown." if hidden else "",
        origin_words(whole),
    ]
    titles, more = panel_titles([names[one] for one in shown], len(shown))
    size = (PAGE if len(shown) > 1 else COLUMN, 0.75 + 0.3 * len(rows) + more)
    entries = [look.label for look in _SHARES.values()]
    with page(1, len(shown), size, sentences, entries, sharey=True) as (figure, grid):
        for one, axes, title in zip(shown, grid[0], titles, strict=True):
            _draw(axes, {share: shares[share, one][:, rows] for share in _SHARES})
            axes.set_title(title, loc="left")
            axes.set_xlabel("share of the variance (%)")
            name_rows(axes, [_row_name(dataset, int(row)) for row in rows])
        legend_above(figure, handles(grid[0, 0]))
    return figure


def _draw(axes: Axes, shares: dict[str, NDArray[np.float64]]) -> None:
    """Two bars a number, each with its interval."""
    highest = 100.0
    for (share, found), shift in zip(shares.items(), (-0.19, 0.19), strict=True):
        value, low, high = 100 * np.nan_to_num(found)
        ends: Any = np.maximum([value - low, high - value], 0.0)
        axes.barh(
            np.arange(len(value)) + shift, value, 0.36, xerr=ends, **_SHARES[share].options(),
            error_kw={"elinewidth": 0.8, "ecolor": BLACK, "capsize": 1.5, "capthick": 0.8},
        )  # fmt: skip
        highest = max(highest, float(high.max()))
    axes.axvline(0.0, color=BLACK, linewidth=0.6)
    lowest = min(0.0, *(float(100 * np.nan_to_num(found).min()) for found in shares.values()))
    axes.set_xlim(1.05 * lowest, 1.03 * highest)


def _row_name(dataset: xarray.Dataset, row: int) -> str:
    """A key as in the spec, and its range below."""
    low, high = (f"{float(value):.4g}" for value in dataset["range"].values[row])
    unit = str(dataset["unit"].values[row])
    how = ", log" if bool(dataset["log"].values[row]) else ""
    ends = f"{low} to {high}" + (f" {unit_words(unit)}" if unit not in ("", "1") else "")
    return f"{plain(str(dataset['key'].values[row]))}\n{ends}{how}"
