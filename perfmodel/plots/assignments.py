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
#: Height of a rule [inch], and of what surrounds the panels of one row.
_ROW, _AROUND = 0.19, 0.55
_TEXT_HEIGHT = 2.4
_LEAST = "least possible"
#: How the assignments tried on text are marked, by rule.
_MARKS = {UNIFORM: "X", "prefix": "o", "optimum": "s", "floor optimum": "^", "model optimum": "D"}


class _Figure(NamedTuple):
    """One of the two figures of every assignment."""

    field: str
    label: str


_RATIO = _Figure("ratio", "loss / optimum of the objective, one budget a layer (×, log)")
_DECODE = _Figure("decode_vs_uniform", "decode loss / uniform bits (×, log)")


def assignments_figure(found: Comparison, tried: HeldOut | None = None) -> Figure:
    """Every rule under every objective, one column of panels a number of GPU experts and one row a mean.

    Above: loss over the optimum of the same objective with one budget a layer. Below: what the same assignments lose
    in the decode steps, over uniform bits, with the least that any assignment can lose. With ``tried``, the held-out
    loss of the quantised model against the summed loss. At most three means and three numbers of GPU experts.
    """
    across, down = found.gpu_experts[:_MOST_ACROSS], found.means[:_MOST_DOWN]
    figures = [_RATIO, *([_DECODE] if _has_decode(found) else [])]
    looks = dict(zip(found.objectives, LINES, strict=False))
    rows = [(figure, mean) for figure in figures for mean in down]
    height = len(rows) * (_ROW * len(found.rules) + _AROUND)
    total = height + (_TEXT_HEIGHT if tried is not None else 0.0)
    names = [*found.objectives, *([_LEAST] if len(figures) > 1 else [])]
    with page(1, 1, (PAGE, total), _sentences(found, tried, across, down), names) as (figure, grid):
        grid[0, 0].remove()
        outer = figure.add_gridspec(2 if tried else 1, 1, height_ratios=[height, _TEXT_HEIGHT] if tried else [1])
        panels = outer[0].subgridspec(len(rows), len(across))
        for i, (kind, mean) in enumerate(rows):
            limits = _limits(found, kind, across, down)
            for j, count in enumerate(across):
                axes = figure.add_subplot(panels[i, j])
                _panel(axes, found, kind, (count, mean), looks)
                log_axis(axes, "x", *limits, most=5)
                axes.set_title(f"{count} on GPU, {mean:g} bits", loc="left")
                axes.tick_params(labelleft=not j)
                if mean == down[-1]:
                    axes.set_xlabel(kind.label)
        if tried is not None:
            _text(figure.add_subplot(outer[1]), tried, looks)
        entries = {name: Line2D([], [], **_dots(look)) for name, look in looks.items()}
        if len(figures) > 1:
            entries[_LEAST] = Line2D([], [], color=BLACK, marker="|", markersize=9, markeredgewidth=1.4, linestyle="")
        legend_above(figure, entries)
    return figure


def _has_decode(found: Comparison) -> bool:
    return any(one.assignments[UNIFORM].decode_vs_uniform is not None for one in found.settings)


def _dots(look: Line) -> dict[str, Any]:
    return {**look.options(3.4), "linestyle": ""}


def _values(found: Comparison, kind: _Figure, count: int, mean: float, objective: str) -> NDArray[np.float64]:
    """A figure of every rule in order; NaN where there is none, or where it is 0."""
    setting = found.setting(count, mean, objective).assignments
    values = [getattr(setting[rule], kind.field) if rule in setting else None for rule in found.rules]
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
    rules = found.rules
    axes.axvline(1.0, color=GREY, linewidth=0.8, zorder=1)
    places = np.arange(len(rules), dtype=np.float64)
    steps = np.linspace(-0.24, 0.24, len(looks)) if len(looks) > 1 else np.zeros(1)
    for step, (objective, look) in zip(steps, looks.items(), strict=True):
        axes.plot(_values(found, kind, *setting, objective), places + step, **_dots(look), zorder=3)
    if kind is _DECODE:
        for rule, value in _hindsight(found, *setting).items():
            axes.plot(value, rules.index(rule), "|", color=BLACK, markersize=9, markeredgewidth=1.4, zorder=2)
    axes.set_yticks(places, rules)
    axes.set_ylim(len(rules) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x")


def _text(axes: Axes, tried: HeldOut, looks: dict[str, Line]) -> None:
    """What quantisation adds to the held-out loss against the summed loss; objectives by colour, rules by mark."""
    rows = [one for one in _marked(tried) if one[0].added.nats > 0]
    uniform = [one for one, _, rule in rows if rule == UNIFORM]
    axes.plot(
        [one.summed_loss for one in uniform],
        [one.added.nats for one in uniform],
        color=GREY,
        linestyle=":",
        linewidth=1.0,
    )
    for rule, mark in _MARKS.items():
        axes.plot([], [], mark, color="white", markeredgecolor=BLACK, markersize=4.5, label=rule)
    for one, objective, rule in rows:
        colour = BLACK if rule == UNIFORM else looks[objective].colour
        axes.plot(
            one.summed_loss, one.added.nats, _MARKS[rule], color=colour, markeredgecolor=BLACK, markeredgewidth=0.5,
            markersize=5, zorder=3,
        )  # fmt: skip
        if rule == UNIFORM:
            label = axes.annotate(
                f"{one.mean_bits:g} bits",
                (one.summed_loss, one.added.nats),
                (6, -2),
                textcoords="offset points",
                va="top",
            )
            label.set_in_layout(False)
    for which, values in (("x", [one.summed_loss for one, *_ in rows]), ("y", [one.added.nats for one, *_ in rows])):
        if values and min(values) > 0:
            log_axis(axes, "x" if which == "x" else "y", min(values) / 2, max(values) * 1.6)
    axes.set_xlabel("summed loss of all experts (MSE, log)")
    axes.set_ylabel("added held-out loss (nat/token, log)")
    axes.grid(axis="y")
    axes.legend(loc="upper left", handlelength=1.2)


def _marked(tried: HeldOut) -> Iterator[tuple[Prediction, str, str]]:
    for one in tried.rows:
        objective, _, rule = one.assignment.rpartition(", ")
        if rule in _MARKS:
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
    below = sum(one.added.nats <= 0 for one, *_ in _marked(tried))
    return (
        f"Bottom: {plain(tried.checkpoint)}, all experts quantised by {tried.method}, over its loss of"
        f" {tried.rows[0].nats:.3f} nat/token at the stored precision; {tried.tokens} tokens; colours as above"
        f"{f'; {below} assignments that add nothing are left out' if below else ''}."
    )
