"""Rules that assign bit widths, held against the optimum of each objective and against uniform bits in decode."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from numpy.typing import NDArray

from perfmodel.losses.comparison import Comparison
from perfmodel.losses.heldout import HeldOut, Prediction
from perfmodel.losses.rules import RULES, UNIFORM
from perfmodel.plots.style import BLACK, GREY, LINES, PAGE, Line
from perfmodel.plots.sweep.labels import log_axis
from perfmodel.plots.sweep.page import legend_above, page
from perfmodel.plots.words import plain, routing

#: Panels that can be read: numbers of GPU experts across, means down.
_MOST_ACROSS, _MOST_DOWN = 3, 3
#: Height of a rule [inch], which holds a mark of every objective; of what surrounds the panels of one row; of the
#: title of a block; and of the panels on text.
_ROW, _AROUND, _TITLE = 0.28, 0.5, 0.18
_TEXT_HEIGHT = 2.4
_LEAST = "least possible"
#: Width of the legend beside the panels on text, over that of a panel.
_BESIDE = 0.3
#: How the assignments tried on text are marked, by rule.
_MARKS = {
    UNIFORM: "X", "random": "*", "prefix": "o", "optimum": "s", "floor prefix": "v", "floor optimum": "^",
    "model prefix": "P", "model optimum": "D",
}  # fmt: skip


class _Figure(NamedTuple):
    """One of the two figures of every assignment."""

    field: str
    title: str
    label: str


_RATIO = _Figure(
    "ratio", "Loss over the optimum of the same objective, with one budget a layer", "loss / optimum (×, log)"
)
_DECODE = _Figure(
    "decode_vs_uniform", "What the same assignments lose in decode, over uniform bits", "decode loss / uniform (×, log)"
)


def assignments_figure(found: Comparison, tried: HeldOut | None = None) -> Figure:
    """Every rule under every objective, one column of panels a number of GPU experts and one row a mean.

    Above: loss over the optimum of the same objective with one budget a layer. Below: what the same assignments lose
    in the decode steps, over uniform bits, with the least that any assignment can lose. With ``tried``, the held-out
    loss of the quantised model against the summed loss. At most three means and three numbers of GPU experts.
    """
    across, down = found.gpu_experts[:_MOST_ACROSS], found.means[:_MOST_DOWN]
    figures = [_RATIO, *([_DECODE] if _has_decode(found) else [])]
    looks = dict(zip(found.objectives, LINES, strict=False))
    heights = [
        height for _ in figures for height in (_TITLE, *(_ROW * len(_rules(found, mean)) + _AROUND for mean in down))
    ]
    total = sum(heights) + (_TEXT_HEIGHT if tried is not None else 0.0)
    names = [*found.objectives, *([_LEAST] if len(figures) > 1 else [])]
    with page(1, 1, (PAGE, total), _sentences(found, tried, across, down), names) as (figure, grid):
        grid[0, 0].remove()
        ratios = [sum(heights), _TEXT_HEIGHT] if tried else [1]
        outer = figure.add_gridspec(len(ratios), 1, height_ratios=ratios)
        panels = outer[0].subgridspec(len(heights), len(across), height_ratios=heights)
        for block, kind in enumerate(figures):
            first = block * (len(down) + 1)
            _title(figure.add_subplot(panels[first, :]), kind.title)
            limits = _limits(found, kind, across, down)
            for i, mean in enumerate(down):
                for j, count in enumerate(across):
                    axes = figure.add_subplot(panels[first + 1 + i, j])
                    _panel(axes, found, kind, (count, mean), looks)
                    log_axis(axes, "x", *limits, most=5)
                    axes.set_title(f"{count} on GPU, {mean:g} bits", loc="left")
                    axes.tick_params(labelleft=not j)
                    if mean == down[-1]:
                        axes.set_xlabel(kind.label)
        if tried is not None:
            counts = tried.gpu_experts[:_MOST_ACROSS]
            below = outer[1].subgridspec(1, len(counts) + 1, width_ratios=[*[1.0] * len(counts), _BESIDE])
            for j, count in enumerate(counts):
                _text(figure.add_subplot(below[j]), tried, count, looks, first=not j)
            _marks(figure.add_subplot(below[len(counts)]), tried)
        entries = {name: Line2D([], [], **_dots(look)) for name, look in looks.items()}
        if len(figures) > 1:
            entries[_LEAST] = Line2D([], [], color=BLACK, marker="|", markersize=9, markeredgewidth=1.4, linestyle="")
        legend_above(figure, entries)
    return figure


def _title(axes: Axes, words: str) -> None:
    """The title of a block of panels, in a place of its own."""
    axes.set_axis_off()
    axes.text(0.0, 0.0, words, transform=axes.transAxes, fontsize=8, fontweight="bold", va="bottom")


def _rules(found: Comparison, mean: float) -> list[str]:
    """The rules that leave something to choose at a mean."""
    present = {rule for one in found.settings if one.mean_bits == mean for rule in one.assignments}
    return [rule for rule in found.rules if rule in present]


def _has_decode(found: Comparison) -> bool:
    return any(one.assignments[UNIFORM].decode_vs_uniform is not None for one in found.settings)


def _dots(look: Line) -> dict[str, Any]:
    return {**look.options(3.4), "linestyle": ""}


def _values(found: Comparison, kind: _Figure, count: int, mean: float, objective: str) -> NDArray[np.float64]:
    """A figure of every rule in order; NaN where there is none, or where it is 0."""
    setting = found.setting(count, mean, objective).assignments
    values = [getattr(setting[rule], kind.field) if rule in setting else None for rule in _rules(found, mean)]
    return np.array([value or np.nan for value in values])


def _hindsight(found: Comparison, count: int, mean: float) -> dict[str, float]:
    setting = found.setting(count, mean, found.objectives[0])
    least = {"optimum": setting.hindsight, "model optimum": setting.hindsight_model}
    return {rule: value for rule, value in least.items() if value and rule in found.rules}


def _limits(found: Comparison, kind: _Figure, across: list[int], down: list[float]) -> tuple[float, float]:
    """One range for all panels of a figure, with 1 in it."""
    values = [1.0]
    for count in across:
        for mean in down:
            for objective in found.objectives:
                known = _values(found, kind, count, mean, objective)
                values += known[~np.isnan(known)].tolist()
            if kind is _DECODE:
                values += _hindsight(found, count, mean).values()
    low, high = min(values), max(values)
    room = (high / low) ** 0.06 * 1.02
    return low / room, high * room


def _panel(axes: Axes, found: Comparison, kind: _Figure, setting: tuple[int, float], looks: dict[str, Line]) -> None:
    rules = _rules(found, setting[1])
    axes.axvline(1.0, color=GREY, linewidth=0.8, zorder=1)
    places = np.arange(len(rules), dtype=np.float64)
    steps = np.linspace(-0.33, 0.33, len(looks)) if len(looks) > 1 else np.zeros(1)
    for step, (objective, look) in zip(steps, looks.items(), strict=True):
        axes.plot(_values(found, kind, *setting, objective), places + step, **_dots(look), zorder=3)
    if kind is _DECODE:
        for rule, value in _hindsight(found, *setting).items():
            axes.plot(value, rules.index(rule), "|", color=BLACK, markersize=9, markeredgewidth=1.4, zorder=2)
    axes.set_yticks(places, rules)
    axes.set_ylim(len(rules) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x")


def _text(axes: Axes, tried: HeldOut, count: int, looks: dict[str, Line], *, first: bool) -> None:
    """What quantisation adds to the held-out loss against the summed loss; objectives by colour, rules by mark."""
    rows = [one for one in _marked(tried, count) if one[0].added.nats > 0]
    uniform = [one for one, _, rule in rows if rule == UNIFORM]
    axes.plot(
        [one.summed_loss for one in uniform],
        [one.added.nats for one in uniform],
        color=GREY,
        linestyle=":",
        linewidth=1.0,
    )
    for one, objective, rule in rows:
        colour = BLACK if rule == UNIFORM else looks[objective].colour
        axes.errorbar(
            one.summed_loss, one.added.nats, yerr=one.added.error, fmt=_MARKS[rule], color=colour,
            markeredgecolor=BLACK, markeredgewidth=0.5, markersize=4.5, elinewidth=0.8, zorder=3,
        )  # fmt: skip
        if rule == UNIFORM:
            label = axes.annotate(
                f"{one.mean_bits:g} bit{'s' * (one.mean_bits != 1)}",
                (one.summed_loss, one.added.nats),
                (6, -2),
                textcoords="offset points",
                va="top",
            )
            label.set_in_layout(False)
    every = [one for number in tried.gpu_experts for one, *_ in _marked(tried, number) if one.added.nats > 0]
    for which, values in (("x", [one.summed_loss for one in every]), ("y", [one.added.nats for one in every])):
        if values and min(values) > 0:
            log_axis(axes, "x" if which == "x" else "y", min(values) / 2, max(values) * 1.6, most=5)
    axes.set_title(f"{count} on GPU, text", loc="left")
    axes.set_xlabel("summed loss (MSE, log)")
    axes.set_ylabel("added held-out loss (nat/token, log)" if first else "")
    axes.tick_params(labelleft=first)
    axes.grid(axis="y")


def _marks(axes: Axes, tried: HeldOut) -> None:
    """The legend of the rules tried on text, beside the panels."""
    axes.set_axis_off()
    used = {rule for count in tried.gpu_experts for _, _, rule in _marked(tried, count)}
    handles = [
        Line2D([], [], marker=mark, color="white", markeredgecolor=BLACK, markersize=4.5, linestyle="", label=rule)
        for rule, mark in _MARKS.items()
        if rule in used
    ]
    axes.legend(handles=handles, loc="center left", bbox_to_anchor=(0, 0.5), handlelength=1.2, borderaxespad=0)


def _marked(tried: HeldOut, count: int) -> Iterator[tuple[Prediction, str, str]]:
    """Different assignments with so many experts on the GPU, their objectives and rules."""
    for one in tried.rows:
        objective, _, rule = one.assignment.rpartition(", ")
        if rule in _MARKS and one.gpu_experts == count and one.same_as is None:
            yield one, objective, rule


def _sentences(found: Comparison, tried: HeldOut | None, across: list[int], down: list[float]) -> list[str]:
    kinds = {"random": RULES["random"], "prefix": RULES["prefix"], "optimum": RULES["optimum"]}
    left_out = len(found.gpu_experts) - len(across), len(found.means) - len(down)
    return [
        f"Loss table {plain(found.table)} ({found.table_source}). Routing: {routing(found.trace, found.trace_source)},"
        f" {found.sequences} sequences.",
        *(f"{name[0].upper()}{name[1:]}: {kind.meaning}." for name, kind in kinds.items()),
        f"Floor: no expert below {found.min_bits} bits." if "floor prefix" in found.rules else "",
        "Model: one budget for all layers.",
        f"Left out: {left_out[0]} numbers of GPU experts, {left_out[1]} means." if any(left_out) else "",
        "" if tried is None else _text_words(tried),
    ]


def _text_words(tried: HeldOut) -> str:
    below = sum(one.added.nats <= 0 for count in tried.gpu_experts for one, *_ in _marked(tried, count))
    return (
        f"Bottom: checkpoint '{plain(tried.checkpoint)}', experts quantised by {tried.quantised.words}, over its loss"
        f" of {tried.rows[0].nats:.3f} nat/token at the stored precision; {tried.tokens} tokens; colours as above;"
        " bars: standard error"
        f"{f'; {below} assignments that add nothing are left out' if below else ''}."
    )
