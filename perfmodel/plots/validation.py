"""Predicted against measured, and what is left of it by batch, bytes a kernel reads and offloaded share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from perfmodel.evidence.alternatives import alternatives
from perfmodel.evidence.cases import DOCUMENTED, engine_class, kernel_bytes
from perfmodel.evidence.described import residency
from perfmodel.evidence.errors import CLOSE, NEAR
from perfmodel.plots.drawing import handles
from perfmodel.plots.style import BLACK, BLUE, GREEN, ORANGE, PAGE, PURPLE
from perfmodel.plots.sweep.labels import log_axis
from perfmodel.plots.sweep.page import legend_above, page
from perfmodel.plots.words import number

if TYPE_CHECKING:
    from perfmodel.evidence.validation import Row, Validation

#: Where the experts are, by colour; the kind of engine, by marker.
_COLOURS = {"resident": BLUE, "cpu": ORANGE, "cached": GREEN, "fetched": PURPLE}
_WORDS = {
    "resident": "all experts on the GPU",
    "cpu": "some run on the CPU",
    "cached": "cached, misses on the CPU",
    "fetched": "some are fetched",
}
_MARKERS = {"graph engine": "o", "eager engine": "s", DOCUMENTED: "^"}
#: Shades of the bands, the outer one first.
_BANDS = ((NEAR, "#EDEDED"), (CLOSE, "#D6D6D6"))
_TICKS = (1 / 4, 1 / 2, 1 / 1.5, 1.0, 1.5, 2.0, 4.0)


def validation_figures(found: Validation) -> dict[str, Figure]:
    """Figures of a validation, by name.

    ``validation_parity``: predicted against measured tokens per second, decode and prefill apart.
    ``validation_residuals``: predicted over measured of decode rows against batch, bytes that a grouped kernel reads,
    and share of the experts that are not on the GPU. Every prediction is by a fit without the row's source.
    """
    return {"validation_parity": _parity(found), "validation_residuals": _residuals(found)}


def _parity(found: Validation) -> Figure:
    quantities = found.quantities
    entries = _entries(found.rows)
    with page(1, len(quantities), (PAGE, 3.5), _about(found, quantities), entries) as (figure, grid):
        for axes, quantity in zip(grid.flat, quantities, strict=True):
            rows = [row for row in found.rows if row.quantity == quantity]
            every = [value for row in rows for value in (row.measured, row.held_out)]
            low, high = min(every) / 1.5, max(every) * 1.5
            for factor, shade in _BANDS:
                ends = np.array([low, high])
                axes.fill_between(ends, ends / factor, ends * factor, color=shade, linewidth=0, zorder=0,
                                  label=f"within {factor:g}x")  # fmt: skip
            axes.plot([low, high], [low, high], color=BLACK, linewidth=0.7, zorder=1)
            _points(axes, rows, [row.measured for row in rows], [row.held_out for row in rows])
            log_axis(axes, "x", low, high, 6)
            log_axis(axes, "y", low, high, 6)
            axes.set_aspect("equal")
            axes.set_title(f"{quantity}, {len(rows)} rows", loc="left")
            axes.set_xlabel(f"measured {quantity} rate (tok/s, log)")
            axes.set_ylabel(f"predicted {quantity} rate (tok/s, log)")
        _legend(figure, entries, *grid.flat)
    return figure


def _residuals(found: Validation) -> Figure:
    rows = [row for row in found.rows if row.quantity == "decode"]
    ratios = [row.ratio for row in rows]
    low, high = min(*ratios, 0.5) / 1.15, max(*ratios, 2.0) * 1.15
    entries = _entries(rows)
    panels = (
        ("batch (tokens of a step, log)", [row.run.batch or 1.0 for row in rows], True),
        ("bytes that a grouped expert kernel reads (MB, log)", [kernel_bytes(row.run) / 1e6 for row in rows], True),
        (
            "share of the experts not on the GPU (%)",
            [100.0 * (1.0 - (row.run.gpu_experts or 0.0)) for row in rows],
            False,
        ),
    )
    with page(1, 3, (PAGE, 2.6), _about(found, ("decode",)), entries, sharey=True) as (figure, grid):
        for axes, (label, values, log) in zip(grid.flat, panels, strict=True):
            for factor, shade in _BANDS:
                axes.axhspan(1.0 / factor, factor, color=shade, linewidth=0, zorder=0, label=f"within {factor:g}x")
            axes.axhline(1.0, color=BLACK, linewidth=0.7, zorder=1)
            _points(axes, rows, values, ratios)
            if log:
                log_axis(axes, "x", min(values) / 1.3, max(values) * 1.3, 5)
            else:
                axes.set_xlim(-4, 104)
            axes.set_xlabel(label)
        log_axis(grid[0, 0], "y", low, high)
        ticks = [tick for tick in _TICKS if low <= tick <= high]
        grid[0, 0].set_yticks(ticks, [f"{tick:.2g}" for tick in ticks])
        grid[0, 0].set_ylabel("predicted over measured rate (log)")
        _legend(figure, entries, *grid.flat)
    return figure


def _points(axes: Axes, rows: Sequence[Row], x: Sequence[float], y: Sequence[float]) -> None:
    """Points by residency and kind of engine; a series is drawn only where it has points."""
    labels = [(residency(row.run), engine_class(row.run)) for row in rows]
    for where, colour in _COLOURS.items():
        for kind, marker in _MARKERS.items():
            at = [i for i, label in enumerate(labels) if label == (where, kind)]
            if at:
                axes.plot(
                    [x[i] for i in at], [y[i] for i in at], marker, color=colour, markersize=4.0, alpha=0.85,
                    markeredgecolor=BLACK, markeredgewidth=0.4, linestyle="none", label=_label(where, kind), zorder=3,
                )  # fmt: skip


def _label(where: str, kind: str) -> str:
    return f"{_WORDS[where]}, {kind}"


def _entries(rows: Sequence[Row]) -> list[str]:
    """Labels of the legend, in its order."""
    seen = {(residency(row.run), engine_class(row.run)) for row in rows}
    return [
        *(_label(where, kind) for where in _COLOURS for kind in _MARKERS if (where, kind) in seen),
        *(f"within {factor:g}x" for factor, _ in reversed(_BANDS)),
    ]


def _legend(figure: Figure, entries: Sequence[str], *panels: Axes) -> None:
    drawn: dict[str, Any] = handles(*panels)
    legend_above(figure, {label: drawn[label] for label in entries})


def _about(found: Validation, quantities: Sequence[str]) -> list[str]:
    """What is drawn, and what it rests on."""
    fitted = ", ".join(f"{name} = {number(value)}" for name, value in found.fit.values.items())
    others = alternatives(found)
    words = []
    for quantity in quantities:
        every = others.errors(quantity, others.general, others.documented)
        general = others.errors(quantity, others.general) or every
        if general is None or every is None:
            continue
        text = (
            f"{quantity}: {general.rows} rows of {general.sources} sources, median error"
            f" {100 * general.by_row.median:.0f} %, within 1.5x {100 * general.by_row.within_near:.0f} %"
            f" ({100 * general.by_source.within_near:.0f} % with sources alike)"
        )
        if general.rows < every.rows:
            text += (
                f"; with the documented machines {every.rows} rows, {100 * every.by_row.median:.0f} %,"
                f" {100 * every.by_row.within_near:.0f} % ({100 * every.by_source.within_near:.0f} %)"
            )
        words.append(f"{text}.".capitalize())
    return [
        "Every point is a published measurement, predicted by a fit that has not seen its source (repository).",
        *words,
        f"Fitted to all rows: {fitted}. Documented machines: constants from their own hardware rows and the"
        " compute part of their steps; nothing is fitted to their speeds.",
    ]
