"""How often every expert of every layer is picked, in colour: one panel a phase, and how the phases differ."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import QuadMesh
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator
from numpy.typing import NDArray

from perfmodel.plots.style import COLUMN, PAGE
from perfmodel.plots.sweep.page import page

Floats = NDArray[np.float64]
#: Up to here every cell is drawn as a shape; more cells become an image.
_MOST_SHAPES = 4000
#: Height of a layer, and of the least and tallest panel [inch].
_LAYER, _LEAST, _MOST = 0.06, 1.3, 3.4
#: Cells beyond this quantile get the last colour, so that the others keep some.
_QUANTILE = 0.995
_MISSING = "#D0D0D0"


def experts_figure(shares: Mapping[str, Floats], layer_index: NDArray[np.int64], sentences: Sequence[str]) -> Figure:
    """Shares of the picks of a layer [L, E] over an equal share [×], one panel a name.

    Where both ``prefill`` and ``decode`` are there, a third panel shows by how much decode differs. Layers without a
    pick are grey.
    """
    layers, experts = next(iter(shares.values())).shape
    relative: dict[str, Floats] = {name: np.asarray(experts * one, np.float64) for name, one in shares.items()}
    phases = "prefill" in relative and "decode" in relative
    height = float(np.clip(_LAYER * layers, _LEAST, _MOST))
    columns = len(relative) + phases
    missing = any(np.isnan(one).any() for one in relative.values())
    words = [
        "Colour: picks of an expert over an equal share of the layer's picks; 1 where all experts are picked alike.",
        "Right: decode less prefill, in the same unit." if phases else "",
        "Grey: no picks." if missing else "",
        *sentences,
    ]
    with page(1, columns, (COLUMN if columns == 1 else PAGE, height + 0.5), words, sharey=True) as (figure, grid):
        panels = list(grid[0])
        norm = _norm(list(relative.values()))
        for axes, (name, cells) in zip(panels, relative.items(), strict=False):
            image = _heat_map(axes, cells, layer_index, norm, "cividis")
            axes.set_title(name if columns > 1 else "", loc="left")
        _bar(figure, image, panels[: len(relative)], "share over an equal share (×)", relative.values())
        if phases:
            shift: Floats = np.asarray(relative["decode"] - relative["prefill"], np.float64)
            most = _norm([np.abs(shift)]).vmax or 1.0
            image = _heat_map(panels[-1], shift, layer_index, Normalize(-most, most), "PuOr_r")
            panels[-1].set_title("decode − prefill", loc="left")
            _bar(figure, image, panels[-1:], "difference (×)", [shift])
        panels[0].set_ylabel("layer of the model")
        for axes in panels[1:]:
            axes.tick_params(left=False)
    return figure


def order_figure(order: NDArray[np.int64], layer_index: NDArray[np.int64], sentences: Sequence[str]) -> Figure:
    """Place of every expert in the order of use of its layer, 1 for the most used; ``order`` is [L, E], experts."""
    layers, experts = order.shape
    places: Floats = np.argsort(order, axis=1).astype(np.float64) + 1.0
    height = float(np.clip(_LAYER * layers, _LEAST, _MOST))
    words = [
        "Colour: place of an expert among those of its layer, 1 for the most used; only the order is known.",
        *sentences,
    ]
    with page(1, 1, (COLUMN, height + 0.5), words) as (figure, grid):
        image = _heat_map(grid[0, 0], places, layer_index, Normalize(1.0, float(experts)), "cividis_r")
        _bar(figure, image, [grid[0, 0]], "place in the order of use", [places])
        grid[0, 0].set_ylabel("layer of the model")
    return figure


def _norm(tables: Sequence[Floats]) -> Normalize:
    """Colours between two quantiles of the values; those beyond get the last colour on their side."""
    known = np.concatenate([one[np.isfinite(one)] for one in tables])
    low, high = np.quantile(known, [1 - _QUANTILE, _QUANTILE]).tolist() if len(known) else (0.0, 1.0)
    return Normalize(low, high) if high - low > 1e-9 else Normalize(low - 0.1, high + 0.1)


def _heat_map(axes: Axes, cells: Floats, layer_index: NDArray[np.int64], norm: Normalize, colours: str) -> QuadMesh:
    layers, experts = cells.shape
    shades = matplotlib.colormaps[colours].with_extremes(bad=_MISSING)
    image = axes.pcolormesh(
        np.arange(experts + 1) - 0.5, np.arange(layers + 1) - 0.5, np.ma.masked_invalid(cells), norm=norm, cmap=shades,
        rasterized=cells.size > _MOST_SHAPES, edgecolors="face", linewidth=0.1,
    )  # fmt: skip
    axes.set_xlim(-0.5, experts - 0.5)
    axes.set_ylim(layers - 0.5, -0.5)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(7, integer=True, min_n_ticks=1))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda at, _: _layer(at, layer_index)))
    axes.set_xlabel("expert")
    for spine in axes.spines.values():
        spine.set_visible(False)
    return image


def _layer(at: float, layer_index: NDArray[np.int64]) -> str:
    """The model's number of the layer in a row."""
    row = round(at)
    return str(layer_index[row]) if 0 <= row < len(layer_index) else ""


def _bar(figure: Figure, image: QuadMesh, panels: Sequence[Axes], label: str, tables: Iterable[Floats]) -> None:
    """The scale of the colours, pointed where cells lie beyond it."""
    low, high = image.get_clim()
    known = np.concatenate([one[np.isfinite(one)] for one in tables])
    below, above = bool((known < (low or 0.0)).any()), bool((known > (high or 0.0)).any())
    extend = {(True, True): "both", (True, False): "min", (False, True): "max", (False, False): "neither"}[below, above]
    bar = figure.colorbar(image, ax=list(panels), pad=0.02, aspect=22, extend=extend)
    bar.outline.set_linewidth(0.5)
    bar.ax.yaxis.set_major_locator(MaxNLocator(6, integer=bool((known == np.round(known)).all())))
    bar.set_label(label)
