"""What the figures of a survey share: looks of series, lines with their intervals, axes, and what the caption says."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator
from numpy.typing import ArrayLike, NDArray

from perfmodel.plots.style import BLACK, GREY, LINES, Line
from perfmodel.plots.words import routing
from perfmodel.routing.statistics import Contents, Estimate, Survey
from perfmodel.routing.statistics.results import Scope

#: Phases in the order in which they are drawn, and how.
SCOPES: dict[Scope, Line] = {"prefill": LINES[1], "decode": LINES[0]}
#: How a line is drawn that no recording is needed for.
REFERENCE: Mapping[str, Any] = {"color": GREY, "linewidth": 0.9, "linestyle": (0, (2, 2)), "zorder": 1}
#: More points than this are drawn without markers.
_MOST_MARKERS = 16


def drawn_scopes(found: Iterable[Scope]) -> list[Scope]:
    """The phases that a recording has."""
    present = set(found)
    return [scope for scope in SCOPES if scope in present]


def band(axes: Axes, x: ArrayLike, estimate: Estimate, look: Line, label: str) -> None:
    """A line through the values, and its interval as a band where there is one."""
    places = np.asarray(x, dtype=np.float64)
    options = look.options(3.0)
    if len(places) > _MOST_MARKERS:
        options |= {"marker": "", "linewidth": 1.3}
    known = np.isfinite(estimate.low) & np.isfinite(estimate.high)
    if known.any():
        axes.fill_between(
            places, estimate.low, estimate.high, where=known.tolist(), color=look.colour, alpha=0.22, linewidth=0,
            zorder=2,
        )  # fmt: skip
        if known.sum() == 1:  # one point has no width that could be filled
            axes.vlines(places[known], estimate.low[known], estimate.high[known], color=look.colour, zorder=2)
    axes.plot(places, estimate.value, label=label, zorder=3, **options)


def without_interval(values: NDArray[np.float64]) -> Estimate:
    """Values whose interval is not known."""
    unknown = np.full(values.shape, np.nan)
    return Estimate(values, unknown, unknown)


def layer_axis(axes: Axes) -> None:
    """Numbers of layers across."""
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True, min_n_ticks=1))
    axes.set_xlabel("layer of the model")
    axes.grid(axis="y")


def doubling_axis(axes: Axes, values: NDArray[np.int64]) -> None:
    """A logarithmic axis across whose ticks are the values themselves, as many as there is room for."""
    axes.set_xscale("log", base=2)
    step = math.ceil(len(values) / 9)
    axes.xaxis.set_major_locator(FixedLocator(values[::step].tolist()))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.grid(axis="y")


def share_axis(axes: Axes, low: float | None = 0.0, high: float | None = None) -> None:
    """Shares upwards, from zero unless said otherwise."""
    axes.set_ylim(bottom=low, top=high)
    axes.locator_params(axis="y", nbins=6)


def reach(*estimates: Estimate) -> tuple[float, float]:
    """Ends of an axis that shows all values and intervals."""
    every = np.concatenate([np.ravel(one) for estimate in estimates for one in estimate])
    known = every[np.isfinite(every)]
    if not len(known):
        return 0.0, 1.0
    low, high = float(known.min()), float(known.max())
    room = 0.06 * (high - low) or 0.02
    return low - room, high + room


def side_legend(axes: Axes, columns: int = 3) -> None:
    """A legend above one panel, in place of a title."""
    axes.legend(
        loc="lower left", bbox_to_anchor=(0, 1), ncols=columns, borderaxespad=0.2, handlelength=1.8, columnspacing=1.0
    )


def title(axes: Axes, words: str) -> None:
    """What one panel shows."""
    axes.set_title(words, loc="left")


def counted(count: int, thing: str) -> str:
    """A count and its noun: ``1 sequence``, ``2 sequences``."""
    return f"{count:,} {thing}{'' if count == 1 else 's'}"


def contents_words(contents: Contents) -> list[str]:
    """What was surveyed."""
    phases = {"prefill": contents.prefill_tokens, "decode": contents.decode_tokens}
    rows = " and ".join(f"{count:,} {phase}" for phase, count in phases.items() if count)
    sequences = counted(contents.sequences, "sequence")
    return [
        f"Routing: {routing(contents.model, contents.source)}, {sequences} with {rows} tokens,"
        f" {counted(len(contents.layer_index), 'layer')} of {contents.num_experts} experts, top-{contents.top_k}."
    ]


def interval_words(survey: Survey) -> str:
    """What the bands are; nothing where there are none."""
    if survey.contents.sequences < 2:
        return "One sequence, so no intervals."
    if survey.resamples < 2:
        return "No intervals, since sequences were not resampled."
    return f"Bands: 95 % intervals from {survey.resamples:,} resamples of the sequences."


def reference_words(survey: Survey) -> str:
    """What stands in for prefill where none was recorded."""
    if survey.reference == "prefill":
        return ""
    return "No prefill was recorded: the first half of each sequence stands in for it, the second half for its decode."


def marked(axes: Axes, x: float, words: str) -> None:
    """A vertical line with a word above it, to the right of the panel's title."""
    axes.axvline(x, color=BLACK, linewidth=0.8, zorder=3)
    low, high = axes.get_xlim()
    beside = max(x, low + 0.1 * (high - low))
    axes.annotate(
        words, (beside, 1.0), (0, 3), xycoords=("data", "axes fraction"), textcoords="offset points", ha="left",
        va="bottom",
    )  # fmt: skip
