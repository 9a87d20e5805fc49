"""Rooflines of the GPU and of the near-data device, with the operators of the model on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from perfmodel.errors import PerfModelError
from perfmodel.plots.style import BLACK, BLUE, COLUMN, GREY, ORANGE, PAGE
from perfmodel.plots.sweep.labels import fixed_words, log_axis
from perfmodel.plots.sweep.origin import origin_words
from perfmodel.plots.sweep.page import legend_above, page, settle
from perfmodel.plots.sweep.placing import number_marks
from perfmodel.plots.sweep.roofs import Mark, Panel, Roof, gpu_panel, ndp_panel
from perfmodel.plots.sweep.selection import Sweep, settings_of
from perfmodel.sweeps.dataset import scenario_of

if TYPE_CHECKING:
    import xarray

#: Dashes of the roofs of one unit.
_DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1, 1.2)), (0, (6, 1.5, 1, 1.5)))
_COLOURS = {"gpu": BLUE, "link": GREY, "ndp": ORANGE}
#: How the marks are drawn: decode filled, prefill hollow.
_PHASES: dict[str, dict[str, Any]] = {
    "decode": {"marker": "o", "markerfacecolor": BLACK},
    "prefill": {"marker": "s", "markerfacecolor": "white"},
}


def roofline_figure(dataset: xarray.Dataset, *, at: Mapping[str, Any] | None = None) -> Figure:
    """Rate [TFLOP/s] over arithmetic intensity [FLOP/byte]: what the system could reach, and what operators reach.

    One panel for the GPU with the link that feeds it, one for the near-data device. The operators are those of one
    layer (and the LM head), for one decode token at the mean context and for a mean prompt; experts appear at every
    width at which a policy of the sweep runs them. A mark lies below its roof by what fixed costs and half-filled
    arrays take.

    Parameters
    ----------
    dataset : a sweep whose inputs have names or paths.
    at : values of the axes; by default those nearest the scenario's own, as the caption says.

    Raises
    ------
    PerfModelError : unknown names (with close matches), no feasible plan at this point, or inputs that are gone.
    """
    whole = Sweep(dataset)
    _, fixed = whole.fix(at)
    scenario = scenario_of(dataset)
    settings = settings_of(scenario, fixed)
    runs, reasons = [], []
    for one in whole.policies:
        try:
            runs.append(scenario.run(one, settings))
        except PerfModelError as error:
            reasons.append(str(error))
    if not runs:
        raise PerfModelError(f"plot: no feasible plan at this point: {reasons[0]}")
    panels = [
        panel._replace(marks=tuple(sorted(panel.marks, key=lambda mark: (mark.intensity, mark.rate))))
        for panel in (gpu_panel(runs), ndp_panel(runs))
        if panel is not None
    ]
    firsts = [1 + sum(len(panel.marks) for panel in panels[:i]) for i in range(len(panels))]
    context, prompt = float(np.mean(runs[0].contexts)), float(runs[0].plan.prompt_tokens.mean())
    has_prefill = any(mark.phase == "prefill" for panel in panels for mark in panel.marks)
    sentences = [
        *(_key(panel, first) for panel, first in zip(panels, firsts, strict=True)),
        f"Decode: one token, {context:.4g} tokens of context.",
        f"Prefill: {prompt:.4g} prompt tokens, spread evenly over the experts." if has_prefill else "",
        "Roofs: rates after derating. FLOP of an expert count its weights once a token, whatever their width.",
        fixed_words(fixed),
        origin_words(whole, fixed),
    ]
    entries = ["decode", *(["prefill"] if has_prefill else []), *(roof.name for p in panels for roof in p.roofs)]
    width = PAGE if len(panels) > 1 else COLUMN
    with page(1, len(panels), (width, 2.7), sentences, entries) as (figure, grid):
        for axes, panel in zip(grid[0], panels, strict=True):
            axes.set_title(panel.title, loc="left")
            _draw(axes, panel.roofs, panel.marks)
        grid[0, 0].set_ylabel("rate (TFLOP/s, log)")
        shown: dict[str, Any] = {
            phase: Line2D([], [], linestyle="none", color=BLACK, markersize=4, **look)
            for phase, look in _PHASES.items()
            if phase in entries
        }
        for panel in panels:
            for roof, style in zip(panel.roofs, _styles(panel.roofs), strict=True):
                shown[roof.name] = Line2D([], [], **style)
        legend_above(figure, shown)
        settle(figure)
        for axes, panel, first in zip(grid[0], panels, firsts, strict=True):
            _number(axes, panel, first)
    return figure


def _styles(roofs: Sequence[Roof]) -> list[dict[str, Any]]:
    """How each roof is drawn: a colour for its unit, and dashes where a unit has several."""
    found: list[dict[str, Any]] = []
    for roof in roofs:
        before = sum(one["color"] == _COLOURS[roof.unit] for one in found)
        dashes = "--" if roof.unit == "link" else _DASHES[before % len(_DASHES)]
        found.append({"color": _COLOURS[roof.unit], "linestyle": dashes, "linewidth": 1.3})
    return found


def _draw(axes: Axes, roofs: Sequence[Roof], marks: Sequence[Mark]) -> None:
    ridges = [roof.flops_per_s / roof.bytes_per_s for roof in roofs if np.isfinite(roof.flops_per_s)]
    right = max([*(mark.intensity for mark in marks), *ridges]) * 6
    for roof, style in zip(roofs, _styles(roofs), strict=True):
        x = np.array([1e-9, min(roof.flops_per_s / roof.bytes_per_s, right), right])  # straight between these
        axes.plot(x, roof.at(x) / 1e12, zorder=2, **style)
    for mark in marks:
        axes.plot(
            mark.intensity, mark.rate / 1e12, color=BLACK, markersize=4, markeredgewidth=0.8, zorder=4,
            linestyle="none", **_PHASES[mark.phase],
        )  # fmt: skip
    highest = max(roof.flops_per_s for roof in roofs if np.isfinite(roof.flops_per_s)) / 1e12
    log_axis(axes, "x", min(mark.intensity for mark in marks) / 3, right, 7)
    log_axis(axes, "y", min(mark.rate for mark in marks) / 4e12, highest * 3, 8)
    axes.set_xlabel("arithmetic intensity (FLOP/byte, log)")
    axes.grid()


def _number(axes: Axes, panel: Panel, first: int) -> None:
    """Number the marks of a panel from ``first`` on, in their order."""
    low, high = axes.get_xlim()
    x = np.geomspace(low, high, 400)
    curves = [np.column_stack([x, roof.at(x) / 1e12]) for roof in panel.roofs]
    places = [(mark.intensity, mark.rate / 1e12) for mark in panel.marks]
    number_marks(axes, places, range(first, first + len(places)), curves)


def _key(panel: Panel, first: int) -> str:
    """What the numbers of a panel stand for."""
    groups = {
        phase: [f"{i}\u00a0{mark.name}" for i, mark in enumerate(panel.marks, first) if mark.phase == phase]
        for phase in _PHASES
    }
    parts = [f"{phase}: {', '.join(names)}" for phase, names in groups.items() if names]
    return f"{panel.title.partition(':')[0]}, {'; '.join(parts)}."
