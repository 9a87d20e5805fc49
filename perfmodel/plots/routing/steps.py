"""Which experts one sequence picks, step by step: a step x expert map of some layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from perfmodel.plots.routing.frame import marked
from perfmodel.plots.style import PAGE
from perfmodel.plots.sweep.page import page
from perfmodel.plots.words import plain
from perfmodel.routing.blocks import NO_EXPERT, TraceFile
from perfmodel.routing.checks import as_count

#: Rows across, and how many of them are prefill where there is more than fits.
MOST_ROWS, MOST_PREFILL = 256, 64
#: Layers down.
MOST_LAYERS = 3
#: Height of an expert, and of the least and tallest panel [inch].
_EXPERT, _LEAST, _MOST = 0.022, 0.75, 1.8


class Steps(NamedTuple):
    """Rows of one sequence that follow one another.

    name : of the sequence; first : position of the first row in its sequence; prompt : prefill rows of the sequence
    ids : integer [rows, layers, k], -1 where unassigned; weights : [rows, layers, k] or None
    layers : [layers], numbers in the model; num_experts : of a layer
    """

    name: str
    first: int
    prompt: int
    ids: NDArray[np.int64]
    weights: NDArray[np.float64] | None
    layers: NDArray[np.int64]
    num_experts: int

    def shown(self) -> NDArray[np.int64]:
        """Which of the layers are drawn: the first, the middle one and the last."""
        count = min(len(self.layers), MOST_LAYERS)
        return np.unique(np.linspace(0, len(self.layers) - 1, count).round().astype(np.int64))


def read_steps(trace: TraceFile, sequence: int | None = None) -> Steps:
    """The rows of one sequence that are drawn: the end of its prefill, and what follows, 256 in all.

    sequence : by default the first that has both phases, else the first. Only blocks up to these rows are read.

    Raises
    ------
    TraceError : there is no such sequence, or the file cannot be read any more.
    """
    lengths, prompts = trace.sequence_lengths, trace.prompt_len
    if sequence is None:
        both = np.flatnonzero((prompts > 0) & (prompts < lengths))
        sequence = int(both[0]) if len(both) else 0
    sequence = as_count("sequence", sequence, 0, trace.num_sequences - 1)
    prompt, base = int(prompts[sequence]), int(trace.sequence_offsets[sequence])
    first, stop = _window(prompt, int(lengths[sequence]))
    ids, weights = [], []
    for block in trace.blocks(weights=True):
        low, high = max(base + first, block.start), min(base + stop, block.start + len(block.ids))
        if low < high:
            rows = slice(low - block.start, high - block.start)
            ids.append(block.ids[rows].astype(np.int64))
            if block.weights is not None:
                weights.append(block.weights[rows].astype(np.float64))
        if high == base + stop:
            break
    picks = np.concatenate(ids)
    picks[picks == NO_EXPERT] = -1
    return Steps(
        name=str(sequence) if trace.labels is None else f"{sequence} ({plain(trace.labels[sequence], 30)})",
        first=first,
        prompt=prompt,
        ids=picks,
        weights=np.concatenate(weights) if weights else None,
        layers=trace.layer_index,
        num_experts=trace.num_experts,
    )


def _window(prompt: int, rows: int) -> tuple[int, int]:
    """First and last + 1 of the rows of a sequence that are drawn."""
    if rows <= MOST_ROWS:
        return 0, rows
    decode = rows - prompt
    before = min(prompt, max(MOST_PREFILL, MOST_ROWS - decode)) if decode else MOST_ROWS
    first = prompt - before
    return first, min(rows, first + MOST_ROWS)


def steps_figure(steps: Steps, sentences: Sequence[str]) -> Figure:
    """Experts upwards and rows of the sequence across, one panel a layer; colour is the share of the gate weight.

    A line marks where decode begins. Three layers at most, 256 rows at most.
    """
    chosen = steps.shown()
    height = float(np.clip(_EXPERT * steps.num_experts, _LEAST, _MOST))
    rows = len(steps.ids)
    words = [
        f"Sequence {steps.name}, tokens {steps.first} to {steps.first + rows - 1}.",
        "A mark is a pick; darker is a larger share of the token's gate weight."
        if steps.weights is not None
        else "A mark is a pick.",
        *sentences,
    ]
    with page(len(chosen), 1, (PAGE, (height + 0.25) * len(chosen) + 0.3), words) as (figure, grid):
        for axes, layer in zip(grid[:, 0], chosen.tolist(), strict=True):
            _panel(axes, steps, layer)
            axes.set_title(f"layer {steps.layers[layer]}", loc="left")
            axes.set_ylabel("expert")
            axes.tick_params(labelbottom=layer == chosen[-1])
        grid[-1, 0].set_xlabel("token of the sequence")
    return figure


def _panel(axes: Axes, steps: Steps, layer: int) -> None:
    ids = steps.ids[:, layer]
    rows, top_k = ids.shape
    cells = np.full((steps.num_experts, rows), np.nan)
    if steps.weights is None:
        shares = np.ones(ids.shape)
    else:
        weights = steps.weights[:, layer]
        total = weights.sum(axis=1, keepdims=True)
        shares = np.divide(weights, total, out=np.zeros_like(weights), where=total > 0)
    picked = ids >= 0
    places = np.nonzero(picked)
    cells[ids[picked], places[0]] = shares[picked]
    # The lightest colours are left out, so that a pick of little weight shows on white.
    norm = Normalize(-0.35, 1.0 if steps.weights is None else max(1.6 / top_k, float(np.nanquantile(cells, 0.98))))
    axes.pcolormesh(
        np.arange(rows + 1) + steps.first - 0.5, np.arange(steps.num_experts + 1) - 0.5, np.ma.masked_invalid(cells),
        norm=norm, cmap=matplotlib.colormaps["Blues"], rasterized=True,
    )  # fmt: skip
    axes.set_xlim(steps.first - 0.5, steps.first + rows - 0.5)
    if 0 < steps.prompt - steps.first < rows:
        marked(axes, steps.prompt - 0.5, "decode")
    axes.set_ylim(steps.num_experts - 0.5, -0.5)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(9 if axis is axes.xaxis else 5, integer=True, min_n_ticks=1))
