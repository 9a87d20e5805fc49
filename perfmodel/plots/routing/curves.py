"""Reuse by lag, distinct experts, hit rates with their controls, caches, and drift along the output."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from perfmodel.plots.drawing import handles
from perfmodel.plots.routing.frame import (
    REFERENCE,
    SCOPES,
    band,
    contents_words,
    counted,
    doubling_axis,
    drawn_scopes,
    interval_words,
    layer_axis,
    reach,
    reference_words,
    share_axis,
    title,
    without_interval,
)
from perfmodel.plots.style import BLACK, COLUMN, GREY, LINES, PAGE
from perfmodel.plots.sweep.page import legend_above, page
from perfmodel.routing.statistics import Batches, CacheCurves, Drift, Estimate, HitRates, Survey

#: Height of a panel [inch].
_HEIGHT = 2.2
#: A placement and its controls: name in a survey, words, words where no prefill was recorded, look.
_PLACED = (
    ("own", "own prefill", "own first half", LINES[0]),
    ("other_sequence", "another's prefill", "another's", LINES[1]),
    ("static", "static", "static", LINES[2]),
    ("oracle", "oracle", "oracle", LINES[3]),
)
_LRU, _BELADY, _PLACED_BY = "LRU", "Belady", "placed by own prefill"
#: Fewer sequences than this give an interval of drift that spans nearly everything.
_LEAST_FOR_BAND = 3
_ANY, _SAME = "any positions", "same position"


def reuse_figure(survey: Survey) -> Figure:
    """Left: share of picks that an earlier token of a sequence made too, by lag. Right: at the first lag, by layer."""
    scopes = drawn_scopes(survey.reuse)
    words = [
        "Share of a token's picks that the token so many tokens before picked too, in the same layer and phase.",
        "Chance: two tokens of the sequence taken at random.",
        *_about(survey),
    ]
    dashes = (0, (3, 2))
    with page(1, 2, (PAGE, _HEIGHT), words, [*scopes, "chance"], sharey=True) as (figure, grid):
        left, right = grid[0]
        layers = survey.contents.layer_index
        for scope in scopes:
            one, look = survey.reuse[scope], SCOPES[scope]
            chance: dict[str, Any] = {"color": look.colour, "linewidth": 0.9, "linestyle": dashes, "zorder": 1}
            band(left, survey.lags, one.measured.overall, look, scope)
            left.axhline(float(one.chance.overall.value), **chance)
            band(right, layers, Estimate(*(values[:, 0] for values in one.measured.layers)), look, scope)
            right.plot(layers, one.chance.layers.value, **chance)
        doubling_axis(left, survey.lags)
        left.set_xlabel("lag (tokens, log)")
        left.set_ylabel("share of picks made again")
        layer_axis(right)
        share_axis(left)
        title(left, "all layers")
        title(right, f"lag {survey.lags[0]}")
        legend_above(figure, {**handles(left), "chance": Line2D([], [], color=BLACK, linewidth=0.9, linestyle=dashes)})
    return figure


def distinct_figure(survey: Survey) -> Figure:
    """Left: distinct experts in windows of a sequence. Right: in batches, at any and at the same output position."""
    experts, top_k = survey.contents.num_experts, survey.contents.top_k
    batches = survey.batches
    scopes = drawn_scopes(survey.distinct)
    words = [
        f"Mean number of distinct experts of a layer, of {experts}.",
        "Even: tokens that pick independently and all experts alike, E\u00a0(1\u00a0−\u00a0(1\u00a0−\u00a0k/E)ⁿ) in"
        " n tokens.",
        "" if batches is None else _batch_words(batches),
        *_about(survey),
    ]
    count = 1 if batches is None else 2
    width = COLUMN if count == 1 else PAGE
    names = [*scopes, "even", *([] if batches is None else [_ANY, _SAME])]
    with page(1, count, (width, _HEIGHT), words, names, sharey=True) as (figure, grid):
        left = grid[0, 0]
        for scope in scopes:
            band(left, survey.windows, survey.distinct[scope].overall, SCOPES[scope], scope)
        _independent(left, survey.windows, experts, top_k)
        left.set_xlabel("tokens of a sequence (log)")
        left.set_ylabel("distinct experts a layer")
        if batches is not None:
            right = grid[0, 1]
            right.fill_between(
                batches.sizes, batches.layers.min(axis=0), batches.layers.max(axis=0), color=GREY, alpha=0.3,
                linewidth=0,
            )  # fmt: skip
            right.plot(batches.sizes, batches.distinct, label=_ANY, **LINES[2].options(3.0))
            right.plot(batches.sizes, batches.aligned, label=_SAME, **LINES[3].options(3.0))
            _independent(right, batches.sizes, experts, top_k)
            right.set_xlabel("sequences in a batch (log)")
            title(left, "windows of a sequence")
            title(right, "steps of a batch")
        share_axis(left, 0.0, 1.03 * experts)
        drawn = handles(*grid[0])
        legend_above(figure, {name: drawn[name] for name in names})
    return figure


def _independent(axes: Axes, counts: NDArray[np.int64], experts: int, top_k: int) -> None:
    places = np.geomspace(counts.min(), counts.max(), 60)
    axes.plot(places, experts * (1 - (1 - top_k / experts) ** places), label="even", **REFERENCE)
    doubling_axis(axes, counts)


def _batch_words(batches: Batches) -> str:
    return (
        f"Batches are drawn from {counted(batches.sequences, 'sequence')} and their first {batches.steps} decode steps:"
        " each sequence at an output position of its own, as where they come and go, or all sequences at the same"
        " output position; grey: from the least to the largest layer, at any positions."
    )


def hit_rate_figure(survey: Survey, rates: HitRates) -> Figure:
    """Left: hit rate of decode by experts placed, with its controls. Right: with half of them placed, by layer."""
    contents = survey.contents
    half = contents.num_experts // 2
    halves = survey.reference != "prefill"
    shown = {name: (later if halves else words, look) for name, words, later, look in _PLACED}
    shown = {name: one for name, one in shown.items() if np.isfinite(getattr(rates, name).value).any()}
    words = [
        "Share of decode picks whose expert is among the K placed in its layer, by what they are placed by; every"
        f" sequence counts alike ({counted(rates.sequences, 'sequence')}).",
        "Static: by the decode of all others. Oracle: by its own decode.",
        reference_words(survey),
        *_about(survey),
    ]
    even = "K / E"
    with page(1, 2, (PAGE, _HEIGHT), words, [*(label for label, _ in shown.values()), even]) as (figure, grid):
        left, right = grid[0]
        for name, (label, look) in shown.items():
            band(left, rates.gpu_experts, getattr(rates, name), look, label)
            band(right, contents.layer_index, rates.layers[name], look, label)
        left.plot(rates.gpu_experts, rates.uniform, label=even, **REFERENCE)
        right.axhline(half / contents.num_experts, **REFERENCE)
        _counted(left, f"experts placed in a layer, K of {contents.num_experts}")
        layer_axis(right)
        low, high = reach(*(rates.layers[name] for name in shown))
        share_axis(right, min(low, half / contents.num_experts - 0.01), high)
        title(left, "all layers")
        title(right, f"K = {half}")
        legend_above(figure, handles(left))
    return figure


def cache_figure(survey: Survey, curves: CacheCurves) -> Figure:
    """Left: hit rate of LRU and of Belady's rule by capacity. Right: with half of the experts cached, by layer."""
    contents = survey.contents
    experts = contents.num_experts
    capacity, half = np.arange(1, experts + 1), max(experts // 2, 1)
    rates = survey.hit_rates if survey.reference == "prefill" else None
    words = [
        "Share of decode picks found in a cache of C experts a layer, empty when the decode of a sequence starts.",
        "Belady: the best that fetching on demand can do.",
        "" if rates is None else "Placed: C experts that are there from the start, every sequence counting alike"
        f" ({counted(rates.sequences, 'sequence')}).",
        *_about(survey),
    ]  # fmt: skip
    even = "C / E"
    names = [_BELADY, _LRU, *([] if rates is None else [_PLACED_BY]), even]
    with page(1, 2, (PAGE, _HEIGHT), words, names) as (figure, grid):
        left, right = grid[0]
        by_layer = []
        for name, overall, layers, look in (
            (_BELADY, curves.belady, curves.belady_layers, LINES[3]),
            (_LRU, curves.lru, curves.lru_layers, LINES[0]),
        ):
            band(left, capacity, overall, look, name)
            by_layer.append((name, without_interval(layers[:, half - 1]), look))
        if rates is not None:
            band(left, rates.gpu_experts, rates.own, LINES[2], _PLACED_BY)
            by_layer.append((_PLACED_BY, rates.layers["own"], LINES[2]))
        for name, estimate, look in by_layer:
            band(right, contents.layer_index, estimate, look, name)
        left.plot(capacity, capacity / experts, label=even, **REFERENCE)
        right.axhline(half / experts, **REFERENCE)
        _counted(left, f"experts cached in a layer, C of {experts}")
        layer_axis(right)
        low, high = reach(*(one for _, one, _ in by_layer))
        share_axis(right, min(low, half / experts - 0.01), high)
        title(left, "all layers")
        title(right, f"C = {half}")
        legend_above(figure, handles(left))
    return figure


def _counted(axes: Axes, label: str) -> None:
    """Experts across, a hit rate upwards."""
    axes.set_xlabel(label)
    axes.set_ylabel("decode hit rate")
    axes.xaxis.set_major_locator(MaxNLocator(9, integer=True, min_n_ticks=1))
    axes.grid(axis="y")
    share_axis(axes, 0.0, 1.0)


def drift_figure(survey: Survey, drift: Drift) -> Figure:
    """Similarity and hit rate of successive windows of the output; below, how many sequences are that long."""
    middle = drift.first_row + (drift.rows - 1) / 2
    half = survey.contents.num_experts // 2
    few = drift.sequences < _LEAST_FOR_BAND
    resampled = survey.contents.sequences > 1 and survey.resamples > 1
    cosine, hits = (
        Estimate(one.value, np.where(few, np.nan, one.low), np.where(few, np.nan, one.high))
        for one in (drift.cosine, drift.hit_rate)
    )
    words = [
        f"Windows of {drift.rows} output tokens against the whole {survey.reference} of their sequence: cosine of the"
        f" counts of picks (left), and share of the window's picks among the {half} experts most picked there (right).",
        "Bars: sequences that are long enough. Each window is over those, so where the bars fall, other sequences are"
        " compared.",
        "The sampling noise of so short windows is part of both.",
        reference_words(survey),
        interval_words(survey),
        f"No band over fewer than {_LEAST_FOR_BAND} sequences." if resampled and few.any() else "",
        *contents_words(survey.contents),
    ]
    with page(1, 1, (PAGE, _HEIGHT + 0.55), words) as (figure, grid):
        grid[0, 0].remove()
        places = figure.add_gridspec(2, 2, height_ratios=[4, 1])
        for column, (name, estimate, look) in enumerate((("cosine", cosine, LINES[0]), ("hit rate", hits, LINES[2]))):
            above = figure.add_subplot(places[0, column])
            below = figure.add_subplot(places[1, column], sharex=above)
            band(above, middle, estimate, look, name)
            low, high = reach(estimate)
            if name == "hit rate":
                chance = half / survey.contents.num_experts
                above.axhline(chance, **REFERENCE)
                low, high = min(low, chance - 0.01), max(high, chance + 0.01)
            above.set_ylabel(f"cosine with {survey.reference}" if name == "cosine" else f"{name}, K = {half}")
            above.set_ylim(low, high)
            above.locator_params(axis="y", nbins=6)
            above.tick_params(labelbottom=False)
            above.grid(axis="y")
            width = 0.8 * drift.rows
            below.bar(middle, drift.sequences, width, color=GREY)
            below.set_ylim(0, 1.15 * max(int(drift.sequences.max(initial=1)), 1))
            below.yaxis.set_major_locator(MaxNLocator(2, integer=True, min_n_ticks=1))
            below.xaxis.set_major_locator(MaxNLocator(8, integer=True, min_n_ticks=1))
            whole = "output" if survey.reference == "prefill" else "second half"
            below.set_xlabel(f"position in the {whole} (token)")
            below.set_ylabel("" if column else "seq.")
    return figure


def _about(survey: Survey) -> list[str]:
    return [interval_words(survey), *contents_words(survey.contents)]
