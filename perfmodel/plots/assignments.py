"""Rules that assign bit widths, held against the optimum of each objective and against uniform bits in decode."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from perfmodel.losses.comparison import Comparison
from perfmodel.losses.heldout import Difference, HeldOut
from perfmodel.losses.rules import RULES, UNIFORM, rule_words
from perfmodel.plots.style import BLACK, GREY, LINES, PAGE, Line
from perfmodel.plots.sweep.labels import log_axis
from perfmodel.plots.sweep.page import legend_above, page
from perfmodel.plots.words import plain, routing

#: Panels that can be read: numbers of GPU experts across, means down.
_MOST_ACROSS, _MOST_DOWN = 3, 3
#: Height of a rule [inch], which holds a mark of every objective; of what surrounds the panels of one row; of the
#: title of a block.
_ROW, _AROUND, _TITLE = 0.28, 0.5, 0.18
_LEAST = "least possible"
#: Differences on text by objective and rule.
_Rows = dict[tuple[str, str], Difference]


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
    loss of the quantised model over that of uniform bits. At most three means and three numbers of GPU experts.
    """
    across, down = found.gpu_experts[:_MOST_ACROSS], found.means[:_MOST_DOWN]
    figures = [_RATIO, *([_DECODE] if _has_decode(found) else [])]
    looks = dict(zip(found.objectives, LINES, strict=False))
    heights = [
        height for _ in figures for height in (_TITLE, *(_ROW * len(_rules(found, mean)) + _AROUND for mean in down))
    ]
    on_text = _text_rules(tried, down)
    text_heights = [_TITLE, *(_ROW * len(rules) + _AROUND for rules in on_text.values())] if on_text else []
    total = sum(heights) + sum(text_heights)
    names = [*found.objectives, *([_LEAST] if len(figures) > 1 else [])]
    with page(1, 1, (PAGE, total), _sentences(found, tried, across, down), names) as (figure, grid):
        grid[0, 0].remove()
        ratios = [sum(heights), sum(text_heights)] if on_text else [1]
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
        if tried is not None and on_text:
            counts = tried.gpu_experts[:_MOST_ACROSS]
            below = outer[1].subgridspec(len(text_heights), len(counts), height_ratios=text_heights)
            _title(figure.add_subplot(below[0, :]), "Held-out loss of the quantised model, over that of uniform bits")
            for i, (mean, rules) in enumerate(on_text.items()):
                for j, count in enumerate(counts):
                    axes = figure.add_subplot(below[1 + i, j])
                    _text(axes, _text_rows(tried, count, mean), rules, looks)
                    axes.set_xlim(*_text_limits(tried, on_text))
                    axes.set_title(f"{count} on GPU, {mean:g} bits, text", loc="left")
                    axes.tick_params(labelleft=not j)
                    if mean == list(on_text)[-1]:
                        axes.set_xlabel("over uniform bits (nat/token)")
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
    axes.set_yticks(places, [rule_words(rule) for rule in rules])
    axes.set_ylim(len(rules) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x")


def _text(axes: Axes, rows: _Rows, rules: list[str], looks: dict[str, Line]) -> None:
    """Held-out losses over that of uniform bits; rules from above, objectives by colour and mark."""
    axes.axvline(0.0, color=GREY, linewidth=0.8, zorder=1)
    steps = dict(zip(looks, np.linspace(-0.33, 0.33, len(looks)) if len(looks) > 1 else [0.0], strict=True))
    for (objective, rule), found in rows.items():
        axes.errorbar(
            found.nats, rules.index(rule) + steps[objective], xerr=found.error, elinewidth=0.8, zorder=3,
            **_dots(looks[objective]),
        )  # fmt: skip
    axes.set_yticks(range(len(rules)), [rule_words(rule) for rule in rules])
    axes.set_ylim(len(rules) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.grid(axis="x")


def _text_rows(tried: HeldOut | None, count: int, mean: float) -> _Rows:
    """Different assignments beside uniform bits, by objective and rule; none where the mean is no width."""
    found: _Rows = {}
    for one in () if tried is None else tried.rows:
        objective, comma, rule = one.assignment.rpartition(", ")
        if comma and one.over_uniform and one.same_as is None and (one.gpu_experts, one.mean_bits) == (count, mean):
            found[objective, rule] = one.over_uniform
    return found


def _text_rules(tried: HeldOut | None, means: list[float]) -> dict[float, list[str]]:
    """The rules that have a row, by mean; without means that have none."""
    counts = () if tried is None else tried.gpu_experts[:_MOST_ACROSS]
    every = {mean: {rule for count in counts for _, rule in _text_rows(tried, count, mean)} for mean in means}
    return {mean: [rule for rule in RULES if rule in used] for mean, used in every.items() if used}


def _text_limits(tried: HeldOut, means: Iterable[float]) -> tuple[float, float]:
    """One range for all panels on text, with 0 in it."""
    counts = tried.gpu_experts[:_MOST_ACROSS]
    every = [one for mean in means for count in counts for one in _text_rows(tried, count, mean).values()]
    low = min(0.0, *(one.nats - (one.error or 0.0) for one in every))
    high = max(0.0, *(one.nats + (one.error or 0.0) for one in every))
    room = 0.06 * (high - low) or 0.01
    return low - room, high + room


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
        "" if tried is None else _text_words(tried, [mean for mean in down if not _text_rules(tried, [mean])]),
    ]


def _text_words(tried: HeldOut, missing: list[float]) -> str:
    without = ", ".join(f"{mean:g}" for mean in missing)
    return (
        f"Bottom: checkpoint '{plain(tried.checkpoint)}', experts quantised by {tried.quantised.words}, whose loss is"
        f" {tried.rows[0].nats:.3f} nat/token at the stored precision; {tried.tokens} tokens; colours as above; bars:"
        " standard error; equal assignments are drawn once."
        f"{f' Nothing to set beside uniform bits at {without} bits.' if without else ''}"
    )
