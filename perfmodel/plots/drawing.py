"""Value labels, bars, axes and legends that the figures share."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from perfmodel.plots.style import BLACK, COLUMN, GREY, PART_LOOKS, Look
from perfmodel.plots.words import number, plain
from perfmodel.run import Evaluation


def beside(axes: Axes, x: float, y: float, text: str) -> None:
    """A value label; the layout need not make room for it, because the axis limits do."""
    note = axes.annotate(text, (x, y), (2, 0), textcoords="offset points", ha="left", va="center")
    note.set_in_layout(False)


def stack(axes: Axes, series: Mapping[str, Sequence[float]], looks: Mapping[str, Look]) -> NDArray[np.float64]:
    """Horizontal stacked bars, one row an entry of the series; returns the row totals. Empty series are left out."""
    left = np.zeros(max(len(values) for values in series.values()))
    for name, values in series.items():
        widths = np.asarray(values, dtype=np.float64)
        if widths.any():
            look = looks.get(name, Look(plain(name), GREY))
            axes.barh(np.arange(len(widths)), widths, 0.62, left=left, **look.options())
            left = left + widths
    return left


def name_rows(axes: Axes, labels: Sequence[str]) -> None:
    """Name the rows of horizontal bars, the first on top."""
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x")


def leave_room(axes: Axes, highest: float, share: float) -> None:
    """Let the x axis start at zero and end a share beyond the highest value, for labels."""
    axes.set_xlim(0, (highest if highest > 0 else 1.0) * (1 + share))
    axes.locator_params(axis="x", nbins=5)


def diamonds(axes: Axes, points: Sequence[tuple[float, float, str]]) -> None:
    """Published values at (x, y, mark): filled where printed in the paper, hollow where read from a summary."""
    for mark, fill, label in (("printed", BLACK, "published"), ("secondary", "white", "published (from a summary)")):
        places = [(x, y) for x, y, m in points if m == mark]
        if places:
            x, y = zip(*places, strict=True)
            axes.plot(x, y, "D", color=BLACK, markerfacecolor=fill, markersize=4.5, zorder=5, label=label)


def handles(*panels: Axes) -> dict[str, Any]:
    """What a legend shows, by its label; series of the same label are shown once."""
    found: dict[str, Any] = {}
    for axes in panels:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    return found


def legend(figure: Figure, *panels: Axes) -> None:
    """One legend above the panels: published before computed, then as drawn."""
    found = handles(*panels)
    names = sorted(found, key=lambda name: not name.startswith("published"))
    columns = 7 if figure.get_figwidth() > COLUMN else 2
    figure.legend([found[n] for n in names], names, loc="outside upper center", ncols=columns)


def token_panel(axes: Axes, evaluations: Sequence[Evaluation], unit: str = "") -> None:
    """Where the time of a mean output token goes [ms], one row an evaluation."""
    totals = stack(axes, {p: [e.breakdown_s[p] * 1e3 for e in evaluations] for p in PART_LOOKS}, PART_LOOKS)
    for y, total in enumerate(totals):
        beside(axes, total, y, f"{number(total)}{unit}")
    leave_room(axes, float(totals.max(initial=0.0)), 0.22)
    axes.set_xlabel("critical path of a mean output token (ms)")


def too_small(evaluations: Sequence[Evaluation]) -> str:
    """Names the parts of a token that are there but too short for the eye."""
    shares = {look.label: max(e.breakdown_s[p] / e.tpot_mean_s for e in evaluations) for p, look in PART_LOOKS.items()}
    names = [label for label, share in shares.items() if 0 < share < 0.004]
    return f"Too small to see: {', '.join(names)}." if names else ""
