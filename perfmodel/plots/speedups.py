"""Published speed-ups beside the computed ones."""

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from perfmodel.evidence.bench import MODELS
from perfmodel.evidence.figures import RANGE_OUTPUTS
from perfmodel.evidence.figures import Figure as Published
from perfmodel.evidence.reproduce import Reproduction, Row
from perfmodel.plots.canvas import canvas
from perfmodel.plots.drawing import diamonds, legend
from perfmodel.plots.style import BLACK, COLUMN_LOOKS, PAGE
from perfmodel.plots.words import caption, model_name, number, provenance, system_name

#: Bars of a group are this far apart; the groups are 1 apart.
_SLOT = 0.22


def _above(axes: Axes, x: float, y: float, text: str, *, below: bool = False) -> None:
    """A value label on white, over or under a bar."""
    note = axes.annotate(
        text,
        (x, y),
        (0, -2 if below else 2),
        textcoords="offset points",
        ha="center",
        va="top" if below else "bottom",
        bbox={"boxstyle": "square,pad=0.08", "facecolor": "white", "edgecolor": "none"},
        zorder=4,
    )
    note.set_in_layout(False)


def _published_marks(axes: Axes, places: Sequence[float], figures: Sequence[Published]) -> None:
    """Published values in their slots, and across the slots of the computed bars."""
    across = 3.45 * _SLOT
    gains, ranges = [], []
    for place, figure in zip(places, figures, strict=True):
        low, high = figure.value[0], figure.value[-1]
        if len(figure.value) == 2:
            ranges.append((place, (low + high) / 2, (high - low) / 2))
            axes.fill_between([place, place + across], low, high, color="#BDBDBD", alpha=0.55, linewidth=0, zorder=1)
            _above(axes, place, low, f"{low:g}", below=True)
        else:
            gains.append((place, low, figure.mark))
            axes.plot([place, place + across], [low, low], color=BLACK, linewidth=0.7, linestyle=":", zorder=3)
        _above(axes, place, high * 1.06, f"{high:g}")
    diamonds(axes, gains)
    if ranges:
        x, middle, half = zip(*ranges, strict=True)
        axes.errorbar(
            x, middle, half, fmt="none", ecolor=BLACK, elinewidth=1.6, capsize=4, capthick=1.2, label="published range"
        )


def _group_label(figure: Published) -> str:
    what = "end to end" if figure.kind == "range" else "decode"
    return f"{figure.bits:g}-bit over {system_name(str(figure.baseline))}\n{what}{' *' if figure.fit else ''}"


def _panel(axes: Axes, rows: Sequence[Row]) -> None:
    groups = np.arange(len(rows))
    for i, (column, look) in enumerate(COLUMN_LOOKS.items()):
        x = groups + (i - 0.5) * _SLOT
        low = np.array([row.columns[column].low for row in rows])
        high = np.array([row.columns[column].high for row in rows])
        # A range floats; a single value stands on 1, where there is no gain.
        bottom = np.where(high > low, low, 1.0)
        axes.bar(x, high - bottom, _SLOT * 0.9, bottom=bottom, zorder=2, **look.options())
        for place, least, most in zip(x, low, high, strict=True):
            _above(axes, place, max(most, 1.0), number(most))
            if most > least:
                _above(axes, place, least, number(least), below=True)
    figures = [row.figure for row in rows]
    _published_marks(axes, [float(x) for x in groups - 1.5 * _SLOT], figures)
    axes.set_xticks(groups, [_group_label(figure) for figure in figures])
    axes.tick_params(axis="x", length=0)
    axes.set_xlim(-0.55, len(rows) - 0.45)
    axes.grid(axis="y")


def _log_axis(axes: Axes, low: float, high: float) -> None:
    axes.set_yscale("log")
    axes.minorticks_off()
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [m * 10.0**p for p in powers for m in (1, 2, 5) if low <= m * 10.0**p <= high]
    axes.set_yticks(ticks, [f"{t:g}" for t in ticks])
    axes.set_ylim(low, high)


def _place(row: Row) -> tuple[int, bool, float]:
    """Sorts by the baseline, decode before end to end, many bits before few."""
    figure = row.figure
    return {"monde": 0, "hobbit": 1}.get(str(figure.baseline), 2), figure.kind == "range", -(figure.bits or 16)


def speedups(result: Reproduction) -> Figure:
    """Speed-ups over each baseline, one panel a model, on a logarithmic axis."""
    rows = sorted((row for row in result.rows if row.figure.baseline is not None), key=_place)
    with canvas(len(MODELS), 1, (PAGE, 4.6), sharey=True) as (figure, grid):
        for axes, model in zip(grid[:, 0], MODELS, strict=True):
            _panel(axes, [row for row in rows if row.figure.model == model])
            axes.set_title(model_name(model), loc="left")
            axes.set_ylabel("speed-up (×, log)")
        values = [v for row in rows for shown in (*row.columns.values(), row.figure.value) for v in shown]
        least = min(values)
        _log_axis(grid[0, 0], least / 1.05 if least < 1 else 1.0, max(1.0, *values) * 1.7)
        legend(figure, grid[0, 0])
        caption(
            figure,
            "Speed-up of context-aware placement over each baseline. Floating bars (computed) and grey bands"
            f" (published) are ranges over outputs of {RANGE_OUTPUTS[0]} to {RANGE_OUTPUTS[-1]} tokens.",
            "* used in the fit.",
            provenance(result, "published", "datasheet", "evidence", "calibrated"),
        )
    return figure
