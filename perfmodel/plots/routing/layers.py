"""What differs from layer to layer: skew, similarity of the phases, the next layer; and weights by rank."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from perfmodel.plots.routing.frame import (
    REFERENCE,
    SCOPES,
    band,
    contents_words,
    drawn_scopes,
    interval_words,
    layer_axis,
    reach,
    reference_words,
    share_axis,
    side_legend,
)
from perfmodel.plots.style import COLUMN, LINES, PAGE, SKY, Look
from perfmodel.plots.sweep.page import page
from perfmodel.routing.statistics import NextLayer, Similarity, Survey

_HEIGHT = 2.1


def layers_figure(survey: Survey) -> Figure:
    """One panel for each statistic that the recording has: skew, similarity, the next layer, weights by rank."""
    panels: list[Callable[[Axes], None]] = [lambda axes: _skew(axes, survey)]
    words = ["Top half: share of the picks that the more picked half of a layer's experts gets."]
    if (similarity := survey.similarity) is not None:
        panels.append(lambda axes: _similarity(axes, survey, similarity))
        words += [
            "Cosine: counts of picks of decode with those of prefill, mean over sequences.",
            reference_words(survey),
        ]
    if (following := survey.next_layer) is not None:
        panels.append(lambda axes: _next_layer(axes, survey, following))
        words.append(
            "Next layer: share of its picks found by a table of pairs from the layer before, learned on even sequences"
            " and tried on odd ones, with the table held fixed; popular: its most picked experts, whatever the token"
            " picked."
        )
    if survey.weights is not None and survey.contents.top_k > 1:
        panels.append(lambda axes: _weights(axes, survey))
        words.append("Gate weight: share of a token's weight by rank; bars from the least to the largest layer.")
    columns = min(len(panels), 2)
    rows = -(-len(panels) // columns)
    words += [interval_words(survey), *contents_words(survey.contents)]
    with page(rows, columns, (COLUMN if columns == 1 else PAGE, _HEIGHT * rows), words) as (figure, grid):
        for i, axes in enumerate(grid.flat):
            axes.set_visible(i < len(panels))
            if i < len(panels):
                panels[i](axes)
    return figure


def _skew(axes: Axes, survey: Survey) -> None:
    experts = survey.contents.num_experts
    shown = [survey.skew[scope].top_half.layers for scope in drawn_scopes(survey.skew)]
    for scope in drawn_scopes(survey.skew):
        band(axes, survey.contents.layer_index, survey.skew[scope].top_half.layers, SCOPES[scope], scope)
    axes.axhline((experts // 2) / experts, label="even", **REFERENCE)
    layer_axis(axes)
    share_axis(axes, min(reach(*shown)[0], experts // 2 / experts - 0.01), reach(*shown)[1])
    axes.set_ylabel(f"share of the top {experts // 2}")
    side_legend(axes, 3)


def _similarity(axes: Axes, survey: Survey, found: Similarity) -> None:
    series = {"own prefill": found.cosine, "another's": found.other_sequence, "equal counts": found.uniform}
    if survey.reference != "prefill":
        series = {"own first half": found.cosine, "another's": found.other_sequence, "equal counts": found.uniform}
    for (name, one), look in zip(series.items(), LINES, strict=False):
        if np.isfinite(one.layers.value).any():
            band(axes, survey.contents.layer_index, one.layers, look, name)
    layer_axis(axes)
    share_axis(axes, *reach(*(one.layers for one in series.values())))
    axes.set_ylabel("cosine with decode")
    side_legend(axes, 3)


def _next_layer(axes: Axes, survey: Survey, found: NextLayer) -> None:
    layers = survey.contents.layer_index[1:]
    band(axes, layers, found.recall.layers, LINES[0], "table of pairs")
    band(axes, layers, found.popular.layers, LINES[1], "popular")
    chance = survey.contents.top_k / survey.contents.num_experts
    axes.axhline(chance, label="even", **REFERENCE)
    layer_axis(axes)
    share_axis(axes, 0.0, reach(found.recall.layers, found.popular.layers)[1])
    axes.set_ylabel("next layer's picks found")
    side_legend(axes, 3)


def _weights(axes: Axes, survey: Survey) -> None:
    assert survey.weights is not None  # the caller looked
    overall, layers = survey.weights.overall.value, survey.weights.layers.value
    ranks = np.arange(1, len(overall) + 1)
    below, above = overall - np.nanmin(layers, axis=0), np.nanmax(layers, axis=0) - overall
    axes.bar(ranks, overall, 0.66, **Look("", SKY).options())
    axes.errorbar(
        ranks, overall, yerr=np.maximum([below, above], 0.0), fmt="none", ecolor="black", elinewidth=0.8, capsize=2
    )
    axes.axhline(1 / len(overall), **REFERENCE)
    axes.set_xticks(ranks)
    axes.set_xlabel("rank of a pick by its weight")
    axes.set_ylabel("share of the gate weight")
    axes.grid(axis="y")
    share_axis(axes)
