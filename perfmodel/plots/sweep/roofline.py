"""Rooflines of the GPU and of the near-data device, with the operators of the model on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Annotation

from perfmodel.errors import PerfModelError
from perfmodel.plots.canvas import lay_out
from perfmodel.plots.style import BLACK, BLUE, COLUMN, GREY, ORANGE, PAGE
from perfmodel.plots.sweep.labels import fixed_words, log_axis
from perfmodel.plots.sweep.origin import origin_words
from perfmodel.plots.sweep.page import legend_above, page
from perfmodel.plots.sweep.placing import SIDES, Side, fits, name_marks, spread_out, together
from perfmodel.plots.sweep.roofs import Mark, Roof, gpu_panel, ndp_panel
from perfmodel.plots.sweep.selection import Sweep, settings_of
from perfmodel.sweeps.dataset import scenario_of

if TYPE_CHECKING:
    import xarray

#: Width of a character of a name [1/72 inch].
_CHARACTER = 3.9
#: How often the y axis may grow by a factor of two to make room for names.
_GROWTHS = 12
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
    at : values of the axes; by default the first value, which the caption then names.

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
    panels = [panel for panel in (gpu_panel(runs), ndp_panel(runs)) if panel is not None]
    context, prompt = float(np.mean(runs[0].contexts)), float(runs[0].plan.prompt_tokens.mean())
    has_prefill = any(mark.phase == "prefill" for panel in panels for mark in panel.marks)
    sentences = [
        f"Decode: one token, {context:.4g} tokens of context.",
        f"Prefill: {prompt:.4g} prompt tokens, spread evenly over the experts." if has_prefill else "",
        "Roofs: rates after derating. FLOP of an expert count its weights once a token, whatever their width.",
        fixed_words(fixed),
        origin_words(whole, fixed),
    ]
    roofs = [roof for panel in panels for roof in panel.roofs if roof.slope]
    entries = ["decode", *(["prefill"] if has_prefill else []), *(roof.slope for roof in roofs)]
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
        shown |= {roof.slope: Line2D([], [], color=_COLOURS[roof.unit], linestyle=_dashes(roof)) for roof in roofs}
        legend_above(figure, shown)
        ceilings = [_ceilings(axes, panel.roofs) for axes, panel in zip(grid[0], panels, strict=True)]
        lay_out(figure)
        for axes, panel, notes in zip(grid[0], panels, ceilings, strict=True):
            spread_out(notes)
            _make_room(axes, [mark for mark in panel.marks if not _below(panel.roofs, mark)])
            _name(axes, panel.roofs, panel.marks)
    return figure


def _dashes(roof: Roof) -> Literal["-", "--"]:
    return "--" if roof.unit == "link" else "-"


def _draw(axes: Axes, roofs: Sequence[Roof], marks: Sequence[Mark]) -> None:
    ridges = [roof.flops_per_s / roof.bytes_per_s for roof in roofs if np.isfinite(roof.flops_per_s)]
    right = max([*(mark.intensity for mark in marks), *ridges]) * 6
    for roof in roofs:
        x = np.array([1e-9, min(roof.flops_per_s / roof.bytes_per_s, right), right])  # straight between these
        axes.plot(x, roof.at(x) / 1e12, color=_COLOURS[roof.unit], linewidth=1.3, linestyle=_dashes(roof), zorder=2)
    for mark in marks:
        axes.plot(
            mark.intensity, mark.rate / 1e12, color=BLACK, markersize=4, markeredgewidth=0.8, zorder=4,
            linestyle="none", **_PHASES[mark.phase],
        )  # fmt: skip
    highest = max(roof.flops_per_s for roof in roofs if np.isfinite(roof.flops_per_s)) / 1e12
    log_axis(axes, "x", min(mark.intensity for mark in marks) / 5, right, 7)
    log_axis(axes, "y", min(mark.rate for mark in marks) / 2e13, highest * 3, 8)
    axes.set_xlabel("arithmetic intensity (FLOP/byte, log)")
    axes.grid()


def _below(roofs: Sequence[Roof], mark: Mark) -> bool:
    """Whether the name of a mark goes below it: of what is copied over the link, elsewhere of the decode phase."""
    return mark.copied if any(roof.unit == "link" for roof in roofs) else mark.phase == "decode"


def _make_room(axes: Axes, marks: Sequence[Mark]) -> None:
    """Start the x axis so far left that the names of these marks fit between it and their marks."""
    low, high = np.log10(axes.get_xlim())
    width = axes.get_window_extent().width / axes.get_figure(root=True).dpi * 72  # type: ignore[union-attr]
    for mark in marks:
        share = (len(mark.name) * _CHARACTER + 14) / width
        low = min(low, (np.log10(mark.intensity) - share * high) / (1 - share))
    log_axis(axes, "x", float(10**low), float(10**high), 7)


def _ceilings(axes: Axes, roofs: Sequence[Roof]) -> list[Annotation]:
    """The highest rates, named at the right edge, from the lowest to the highest."""
    named = sorted((roof for roof in roofs if roof.ceiling), key=lambda roof: roof.flops_per_s)
    return [
        axes.annotate(
            roof.ceiling, (1, roof.flops_per_s / 1e12), (3, 0), xycoords=axes.get_yaxis_transform(),
            textcoords="offset points", va="center",
        )
        for roof in named
    ]  # fmt: skip


def _name(axes: Axes, roofs: Sequence[Roof], marks: Sequence[Mark]) -> None:
    """Name the marks; those that lie on each other share a place. The y axis grows until all names fit."""
    sides: dict[Side, tuple[list[tuple[float, float]], list[str]]] = {}
    for _ in range(_GROWTHS):
        for side in SIDES:
            chosen = [mark for mark in marks if _below(roofs, mark) == (side == "below")]
            places = [(mark.intensity, mark.rate / 1e12) for mark in chosen]
            groups = together(axes, places)
            names = ["\n".join(dict.fromkeys(chosen[i].name for i in group)) for group in groups]
            sides[side] = ([places[group[0]] for group in groups], names)
        low, high = axes.get_ylim()
        fit = {side: fits(axes, *found, side) for side, found in sides.items()}
        if all(fit.values()):
            break
        log_axis(axes, "y", low if fit["below"] else low / 2, high if fit["above"] else high * 2, 8)
    for side, (places, names) in sides.items():
        name_marks(axes, places, names, side)
