"""Figures of a reproduction and of a comparison, ready for a two-column paper.

Colours are Okabe and Ito's, which colour-blind readers can tell apart; hatches and markers carry the same
distinction in grey. Every figure has a caption that says where its numbers come from.
"""

import functools
import math
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import findfont, get_font
from numpy.typing import NDArray

from perfmodel import __version__
from perfmodel.errors import PerfModelError
from perfmodel.evaluate import Evaluation, HitRates
from perfmodel.evidence.figures import OUTPUT, PROMPT, RANGE_OUTPUTS
from perfmodel.evidence.figures import Figure as Published
from perfmodel.evidence.reproduce import MODELS, Outcome, Reproduction, Row
from perfmodel.paths import replace_when_done

#: Widths of one column and of the whole page [inch]; PNG resolution [dot/inch].
COLUMN, PAGE, DPI = 3.4, 7.0, 200
SUFFIXES = (".png", ".svg", ".pdf")
#: More rows than this make no readable figure.
MOST_EVALUATIONS = 40

_BLACK, _ORANGE, _SKY, _GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
_YELLOW, _BLUE, _RED, _PURPLE = "#F0E442", "#0072B2", "#D55E00", "#CC79A7"
_LIGHT, _GREY = "#E3E3E3", "#8C8C8C"


class Look(NamedTuple):
    """How one series is drawn."""

    label: str
    colour: str
    hatch: str


_COLUMNS = {
    "datasheet": Look("datasheet peaks", _LIGHT, "////"),
    "evidence": Look("independent evidence", _SKY, ""),
    "calibrated": Look("calibrated", _BLUE, ""),
}
#: The parts of ``evaluate.PARTS``, in the order of the stack.
_PARTS = {
    "attention": Look("attention", _BLUE, ""),
    "router": Look("router", _YELLOW, ""),
    "dense": Look("dense layers", _PURPLE, "xxxx"),
    "experts_gpu": Look("experts on GPU", _SKY, ""),
    "link": Look("link", _LIGHT, ""),
    "ndp": Look("experts near data", _ORANGE, "\\\\\\\\"),
    "head": Look("LM head", _BLACK, ""),
    "overhead": Look("layer overhead", _RED, "----"),
}
_STAGES = {
    "ttft": Look("prefill (TTFT)", _GREEN, "xxxx"),
    "migration": Look("migration", _BLACK, ""),
    "decode": Look("decode", _SKY, ""),
}
_MEMORY = {
    "other_weights": Look("other weights", _BLUE, ""),
    "experts": Look("experts", _SKY, ""),
    "replicas": Look("replicas", _YELLOW, ""),
    "kv_cache": Look("KV cache", _GREEN, "xxxx"),
    "buffers": Look("copy buffers", _RED, "----"),
}
_SYSTEM_NAMES = {"monde": "MoNDE", "hobbit": "HOBBIT"}
_MODEL_NAMES = {"mixtral-8x7b": "Mixtral 8x7B", "mixtral-8x22b": "Mixtral 8x22B"}
_HIT_RATES = {
    "own": "own placement\n(by the prompt)",
    "oracle": "oracle\n(by its own decode)",
    "uniform": "uniform (K / E)",
    "other_sequence": "another sequence\n(by its prompt)",
    "static": "static (by the\nothers' decode)",
}
_SOURCES = {
    "recorded": "recorded",
    "synthetic": "SYNTHETIC, not a recording",
    "from-counts": "SYNTHETIC, drawn from counts",
}

_STYLE: Any = {
    "font.family": ["DejaVu Sans"],
    "font.size": 7.0,
    "axes.labelsize": 7.5,
    "axes.titlesize": 8.0,
    "xtick.labelsize": 7.0,
    "ytick.labelsize": 7.0,
    "legend.fontsize": 7.0,
    "legend.frameon": False,
    "legend.handlelength": 1.6,
    "legend.columnspacing": 1.2,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.facecolor": "white",
    "figure.facecolor": "white",
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.5,
    "grid.linestyle": "-",
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "patch.linewidth": 0.5,
    "hatch.linewidth": 0.5,
    "text.usetex": False,
    "text.parse_math": False,  # a dollar sign in somebody's model name is no formula
    "savefig.facecolor": "auto",
    "savefig.bbox": None,
    "svg.fonttype": "path",
    "svg.hashsalt": "perfmodel",
    "pdf.fonttype": 42,
}


@contextmanager
def _canvas(
    rows: int, columns: int, size: tuple[float, float], **options: Any
) -> Iterator[tuple[Figure, NDArray[Any]]]:
    """A figure and its axes [rows, columns], to be drawn on inside the block; its layout is settled at the end."""
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=size, dpi=DPI, layout="constrained")
        FigureCanvasAgg(figure)
        yield figure, figure.subplots(rows, columns, squeeze=False, **options)
        engine = figure.get_layout_engine()
        if engine is not None:
            # Once is enough for all formats: every save would repeat it.
            engine.execute(figure)
            figure.set_layout_engine("none")


def save(figure: Figure, path: str | Path) -> None:
    """Write a figure to .png (200 dpi), .svg or .pdf, complete or not at all; equal figures give equal files.

    Raises
    ------
    PerfModelError : another suffix, or the file cannot be written.
    """
    target = Path(path)
    kind = target.suffix.lower()
    if kind not in SUFFIXES:
        found = f"the suffix {kind!r}" if kind else "no suffix"
        raise PerfModelError(f"figure {target}: {found} names no format; allowed: {', '.join(SUFFIXES)}")
    how: dict[str, dict[str, Any]] = {
        ".png": {"dpi": DPI, "pil_kwargs": {"compress_level": 2}},
        ".svg": {"metadata": {"Date": None}},
        ".pdf": {"metadata": {"CreationDate": None}},
    }
    try:
        with matplotlib.rc_context(_STYLE), replace_when_done(target) as temporary:
            figure.savefig(temporary, format=kind[1:], **how[kind])
    except OSError as error:
        raise PerfModelError(f"figure {target}: cannot be written ({error.strerror or error})") from error


# Words


def _number(value: float) -> str:
    """Three significant digits, never an exponent."""
    if value == 0:
        return "0"
    return f"{value:.{min(max(0, 2 - math.floor(math.log10(abs(value)))), 4)}f}" if math.isfinite(value) else "-"


@functools.cache
def _glyphs() -> Mapping[int, int]:
    return get_font(findfont(_STYLE["font.family"][0])).get_charmap()


def _plain(text: object, most: int = 60) -> str:
    """Somebody's name in one line of characters that the font has."""
    shown = "".join(c if c.isprintable() and ord(c) in _glyphs() else "?" for c in str(text))
    return shown if len(shown) <= most else f"{shown[: most - 1]}…"


def _model(name: str) -> str:
    return _MODEL_NAMES.get(name, _plain(name))


def _routing(model: object, source: object) -> str:
    return f"{_plain(model)} ({_SOURCES.get(str(source), f'source {_plain(source)}')})"


def _folded(text: str, width: int) -> str:
    """A label in lines of at most ``width`` characters, broken after colons and commas where it can be."""
    lines = [""]
    for piece in re.findall(r"[^:,]*[:,]|[^:,]+", text):
        for part in [piece] if len(piece) <= width else textwrap.wrap(piece, width):
            if len(lines[-1]) + len(part) > width:
                lines.append("")
            lines[-1] += part
    return "\n".join(line for line in lines if line)


def _caption(figure: Figure, *sentences: str) -> None:
    text = " ".join(s for s in (*sentences, f"perfmodel {__version__}.") if s)
    lines = textwrap.wrap(text, int(figure.get_figwidth() * 18.5 - 2), break_on_hyphens=False)
    figure.supxlabel("\n".join(lines), fontsize=7, color="#404040", x=0.01, ha="left")


def _provenance(result: Reproduction, *columns: str) -> str:
    """Where the numbers of the named columns come from."""
    routing = _routing(result.trace.metadata.get("model"), result.trace.metadata.get("source"))
    words = [
        f"Prompt {PROMPT}, output {OUTPUT} tokens, batch 1.",
        f"Routing: {routing}, cycled or cut to each model's layers and to these lengths.",
    ]
    said = {name: _plain(system.name) for name, system in result.systems.items()}
    if "published" in columns:
        words.append("Published: arXiv 2512.04476.")
    if "datasheet" in columns:
        words.append(f"Datasheet: {said['datasheet']} at its peaks.")
    if "evidence" in columns:
        words.append(f"Evidence: {said['evidence']}, nothing fitted.")
    if "calibrated" in columns:
        fitted = ", ".join(f"{c['name']} = {_number(c['value'])}" for c in result.fitted())
        start = "the same" if "evidence" in columns else said["calibrated"]
        words.append(f"Calibrated: {start} with {fitted}, fitted to {len(result.fit_errors)} published figures.")
    return " ".join(words)


# Drawing


def _beside(axes: Axes, x: float, y: float, text: str, **options: Any) -> None:
    """A value label; the layout need not make room for it, because the axis limits do."""
    where = {"ha": "left", "va": "center", **options}
    axes.annotate(text, (x, y), (2, 0), textcoords="offset points", **where).set_in_layout(False)


def _above(axes: Axes, x: float, y: float, text: str, *, below: bool = False) -> None:
    box = {"boxstyle": "square,pad=0.08", "facecolor": "white", "edgecolor": "none"}
    note = axes.annotate(
        text,
        (x, y),
        (0, -2 if below else 2),
        textcoords="offset points",
        ha="center",
        va="top" if below else "bottom",
        bbox=box,
        zorder=4,
    )
    note.set_in_layout(False)


def _look(look: Look) -> dict[str, Any]:
    return {"color": look.colour, "hatch": look.hatch, "edgecolor": _BLACK, "linewidth": 0.5, "label": look.label}


def _stack(axes: Axes, series: Mapping[str, Sequence[float]], looks: Mapping[str, Look]) -> NDArray[np.float64]:
    """Horizontal stacked bars, one row an entry of the series; returns the row totals. Empty series are left out."""
    left = np.zeros(max(len(values) for values in series.values()))
    for name, values in series.items():
        widths = np.asarray(values, dtype=np.float64)
        if widths.any():
            look = looks.get(name, Look(_plain(name), _GREY, ""))
            axes.barh(np.arange(len(widths)), widths, 0.62, left=left, **_look(look))
            left = left + widths
    return left


def _rows(axes: Axes, labels: Sequence[str]) -> None:
    """Name the rows of horizontal bars, the first on top."""
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x")


def _room(axes: Axes, highest: float, share: float) -> None:
    """Let the x axis start at zero and end a share beyond the highest value, for labels."""
    axes.set_xlim(0, (highest if highest > 0 else 1.0) * (1 + share))
    axes.locator_params(axis="x", nbins=5)


def _legend(figure: Figure, handles: Mapping[str, Any]) -> None:
    """One legend above the panels: published before computed, then as drawn."""
    names = sorted(handles, key=lambda name: not name.startswith("published"))
    columns = 7 if figure.get_figwidth() > COLUMN else 2
    figure.legend([handles[n] for n in names], names, loc="outside upper center", ncols=columns)


def _handles(*panels: Axes) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for axes in panels:
        handles, labels = axes.get_legend_handles_labels()
        found |= {label: found.get(label, handle) for label, handle in zip(labels, handles, strict=True)}
    return found


# Published figures beside the computed columns


def _diamonds(axes: Axes, points: Sequence[tuple[float, float, str]]) -> None:
    """Published values at (x, y): filled where printed in the paper, hollow where read from a summary."""
    for mark, fill, label in (("printed", _BLACK, "published"), ("secondary", "white", "published (from a summary)")):
        x, y = [p[0] for p in points if p[2] == mark], [p[1] for p in points if p[2] == mark]
        if x:
            axes.plot(x, y, "D", color=_BLACK, markerfacecolor=fill, markersize=4.5, zorder=5, label=label)


def _published_marks(axes: Axes, places: Sequence[float], end: float, figures: Sequence[Published]) -> None:
    """Published values in their slots, and across the ``end`` that the computed bars take up."""
    ranges = [(x, *f.value) for x, f in zip(places, figures, strict=True) if len(f.value) == 2]
    for x, f in zip(places, figures, strict=True):
        if len(f.value) == 2:
            axes.fill_between([x, x + end], *f.value, color="#BDBDBD", alpha=0.55, linewidth=0, zorder=1)
            _above(axes, x, f.value[0], f"{f.value[0]:g}", below=True)
        else:
            axes.plot([x, x + end], f.value * 2, color=_BLACK, linewidth=0.7, linestyle=":", zorder=3)
        _above(axes, x, f.value[-1] * 1.06, f"{f.value[-1]:g}")
    _diamonds(axes, [(x, f.value[0], f.mark) for x, f in zip(places, figures, strict=True) if len(f.value) == 1])
    if ranges:
        middle = [(low + high) / 2 for _, low, high in ranges]
        half = [(high - low) / 2 for _, low, high in ranges]
        axes.errorbar(
            [x for x, _, _ in ranges], middle, half, fmt="none", ecolor=_BLACK, elinewidth=1.6, capsize=4,
            capthick=1.2, label="published range",
        )  # fmt: skip


def _group_label(figure: Published) -> str:
    what = "end to end" if figure.kind == "range" else "decode"
    base = _SYSTEM_NAMES.get(str(figure.baseline), str(figure.baseline))
    return f"{figure.bits:g}-bit over {base}\n{what}{' *' if figure.fit else ''}"


def _speedup_panel(axes: Axes, rows: Sequence[Row]) -> None:
    slot = 0.22
    groups = np.arange(len(rows))
    figures = [row.figure for row in rows]
    for column, look in _COLUMNS.items():
        x = groups + (list(_COLUMNS).index(column) - 0.5) * slot
        low = np.array([row.columns[column].low for row in rows])
        high = np.array([row.columns[column].high for row in rows])
        bottom = np.where(high > low, low, 1.0)
        axes.bar(x, high - bottom, slot * 0.9, bottom=bottom, zorder=2, **_look(look))
        for place, least, most in zip(x, low, high, strict=True):
            _above(axes, place, max(most, 1.0), _number(most))
            if most > least:
                _above(axes, place, least, _number(least), below=True)
    _published_marks(axes, [float(x) for x in groups - 1.5 * slot], 3.45 * slot, figures)
    axes.set_xticks(groups, [_group_label(figure) for figure in figures])
    axes.tick_params(axis="x", length=0)
    axes.set_xlim(-0.55, len(rows) - 0.45)
    axes.grid(axis="y")


def _speedups(result: Reproduction) -> Figure:
    order = {"monde": 0, "hobbit": 1}
    with _canvas(len(MODELS), 1, (PAGE, 4.6), sharey=True) as (figure, grid):
        values = [1.0]
        for axes, model in zip(grid[:, 0], MODELS, strict=True):
            rows = [r for r in result.rows if r.figure.model == model and r.figure.baseline is not None]
            rows.sort(
                key=lambda r: (order.get(str(r.figure.baseline), 2), r.figure.kind == "range", -(r.figure.bits or 16))
            )
            _speedup_panel(axes, rows)
            axes.set_title(_model(model), loc="left")
            axes.set_ylabel("speed-up (×, log)")
            values += [v for r in rows for i in (*r.columns.values(), r.figure.value) for v in (i[0], i[-1])]
        least, most = min(values), max(values)
        _log_axis(grid[0, 0], least / 1.05 if least < 1 else 1.0, most * 1.7)
        _legend(figure, _handles(grid[0, 0]))
        _caption(
            figure,
            "Speed-up of context-aware placement over each baseline. Floating bars (computed) and grey bands"
            f" (published) are ranges over outputs of {RANGE_OUTPUTS[0]} to {RANGE_OUTPUTS[-1]} tokens.",
            "* used in the fit.",
            _provenance(result, "published", "datasheet", "evidence", "calibrated"),
        )
    return figure


def _log_axis(axes: Axes, low: float, high: float) -> None:
    axes.set_yscale("log")
    axes.minorticks_off()
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [m * 10.0**p for p in powers for m in (1, 2, 5) if low <= m * 10.0**p <= high]
    axes.set_yticks(ticks, [f"{t:g}" for t in ticks])
    axes.set_ylim(low, high)


def _published_rate(result: Reproduction, model: str, system: str) -> Published | None:
    for row in result.rows:
        f = row.figure
        named = _SYSTEM_NAMES.get(f.system, f.system) + (f" {f.bits:g}-bit" if f.bits is not None else "")
        if f.kind == "rate" and f.model == model and named == system:
            return f
    return None


def _systems_of(result: Reproduction, column: str, model: str) -> dict[str, Evaluation]:
    return {system: e for (m, system), e in result.evaluations[column].items() if m == model}


def _throughput(result: Reproduction) -> Figure:
    shown = ("evidence", "calibrated")
    slot = 0.27
    with _canvas(1, len(MODELS), (PAGE, 3.0), sharey=True) as (figure, grid):
        for axes, model in zip(grid[0], MODELS, strict=True):
            systems = list(_systems_of(result, shown[0], model))
            known = {y: f for y, s in enumerate(systems) if (f := _published_rate(result, model, s)) is not None}
            highest = max((f.value[0] for f in known.values()), default=0.0)
            for i, column in enumerate(shown):
                y = np.arange(len(systems)) + i * slot
                rates = [e.decode_tok_per_s for e in _systems_of(result, column, model).values()]
                axes.barh(y, rates, slot * 0.92, **_look(_COLUMNS[column]))
                highest = max(highest, *rates)
                for place, rate in zip(y, rates, strict=True):
                    _beside(axes, rate, place, _number(rate))
            marks = [(f.value[0], row - slot, f.mark) for row, f in known.items()]
            for rate, place, _ in marks:
                _beside(axes, rate, place, f" {rate:g}")
            _diamonds(axes, marks)
            _rows(axes, systems)
            axes.set_title(_model(model) + ("" if known else " (no rate published)"), loc="left")
            _room(axes, highest, 0.14)
            axes.set_xlabel("decode rate (tok/s)")
        _legend(figure, _handles(*grid[0]))
        _caption(figure, _provenance(result, "published", "evidence", "calibrated"))
    return figure


def _breakdown(result: Reproduction) -> Figure:
    with _canvas(len(MODELS), 2, (PAGE, 2.9)) as (figure, grid):
        for panels, model in zip(grid, MODELS, strict=True):
            systems = _systems_of(result, "calibrated", model)
            ours = [name for name in systems if name.startswith("context-aware")]
            # Baselines wait for the link ten times as long, so they get an axis of their own.
            for axes, names in zip(panels, (ours, [n for n in systems if n not in ours]), strict=True):
                _draw_tokens(axes, [systems[n] for n in names], " ms")
                _rows(axes, names)
                axes.set_title(_model(model), loc="left")
        for axes in grid[0]:
            axes.set_xlabel("")
        _legend(figure, _handles(*grid.flat))
        _caption(
            figure,
            "Every panel has its own time axis. Work hidden behind other work is not on the critical path.",
            _too_small(list(result.evaluations["calibrated"].values())),
            _provenance(result, "calibrated"),
        )
    return figure


def _too_small(evaluations: Sequence[Evaluation]) -> str:
    """Names the parts of a token that are there but too short for the eye."""
    shares = {p: max(e.breakdown_s[p] / e.tpot_mean_s for e in evaluations) for p in _PARTS}
    names = [_PARTS[p].label for p, share in shares.items() if 0 < share < 0.004]
    return f"Too small to see: {', '.join(names)}." if names else ""


def _hit_rate(result: Reproduction) -> Figure:
    looks = dict(zip(MODELS, (Look("", _BLUE, ""), Look("", _ORANGE, "////")), strict=True))
    with _canvas(1, 1, (COLUMN, 3.1)) as (figure, grid):
        axes = grid[0, 0]
        rows = np.arange(len(_HIT_RATES))
        for i, model in enumerate(MODELS):
            rates: HitRates = result.hit_rates[model]
            values = [getattr(rates, name) for name in _HIT_RATES]
            y = rows + (i - 0.5) * 0.36
            look = looks[model]._replace(label=_model(model))
            axes.barh(y, [math.nan if v is None else 100 * v for v in values], 0.33, **_look(look))
            for place, value in zip(y, values, strict=True):
                _beside(
                    axes,
                    0 if value is None else 100 * value,
                    place,
                    "not available" if value is None else f"{100 * value:.1f}",
                )
        _rows(axes, list(_HIT_RATES.values()))
        axes.axhline(0.5, color=_BLACK, linewidth=0.6, linestyle=":")
        axes.set_xlim(0, 100)
        axes.set_xlabel("hit rate (%)")
        _legend(figure, _handles(axes))
        _caption(
            figure,
            "Share of decode picks whose expert is on the GPU: own placement and four controls.",
            _provenance(result),
        )
    return figure


def _outcomes(result: Reproduction) -> list[tuple[str, list[Outcome]]]:
    """Readings from the smallest refitted error on, and traces, each under its heading."""
    readings = sorted(result.readings, key=lambda o: o.geomean_error)
    if not readings:
        rates = {model: rate.own for model, rate in result.hit_rates.items()}
        readings = [Outcome("as reported", result.evidence_geomean_error, result.geomean_error, rates, {})]
    groups = [("readings", readings), ("routing traces", list(result.traces))]
    return [group for group in groups if group[1]]


def _error_by_reading(result: Reproduction) -> Figure:
    groups = _outcomes(result)
    count = sum(len(group) for _, group in groups)
    with _canvas(1, 1, (PAGE, 1.5 + 0.17 * (count + len(groups)))) as (figure, grid):
        axes = grid[0, 0]
        y, places, outcomes = 0.0, [], []
        right = axes.get_yaxis_transform()
        for i, (heading, group) in enumerate(groups):
            note = axes.text(-0.01, y, heading, transform=right, ha="right", va="center", fontweight="bold")
            note.set_in_layout(False)
            if i == 0:
                sizes = " / ".join(_model(m).split()[-1] for m in MODELS)
                axes.text(1.01, y - 0.2, f"hit rate (%)\n{sizes}", transform=right, va="center", fontweight="bold")
            for outcome in group:
                y += 1
                places.append(y)
                outcomes.append(outcome)
                rates = " / ".join(_number(100 * outcome.hit_rate.get(m, math.nan)) for m in MODELS)
                axes.text(1.01, y, rates, transform=right, va="center")
            y += 1
        before = [100 * o.evidence_geomean_error for o in outcomes]
        after = [100 * o.geomean_error for o in outcomes]
        for value, colour, label in (
            (result.evidence_geomean_error, _SKY, "evidence as reported"),
            (result.geomean_error, _BLUE, "refitted as reported"),
        ):
            axes.axvline(100 * value, color=colour, linewidth=1.0, linestyle="--", zorder=1, label=label)
        axes.hlines(places, before, after, color=_GREY, linewidth=1.0, zorder=2)
        axes.plot(
            before, places, "o", color=_BLACK, markerfacecolor=_SKY, markersize=5, zorder=3, label="evidence alone"
        )
        axes.plot(after, places, "s", color=_BLACK, markerfacecolor=_BLUE, markersize=4.5, zorder=3, label="refitted")
        axes.set_yticks(places, [_plain(o.name).replace("(synthetic)", "(SYNTHETIC)") for o in outcomes])
        axes.set_ylim(y - 0.4, -0.8)
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="x")
        _room(axes, max(before + after), 0.06)
        axes.set_xlabel(f"geometric-mean error over the {len(result.fit_errors)} fitted figures (%)")
        _legend(figure, _handles(axes))
        left_out = result.fit.leave_one_out_geomean_error
        _caption(
            figure,
            "Refitted: the same constants fitted anew under each reading or trace.",
            "" if left_out is None else f"Leave-one-out error as reported: {100 * left_out:.1f} %.",
            _provenance(result, "published", "evidence", "calibrated"),
        )
    return figure


def reproduction_figures(result: Reproduction) -> dict[str, Figure]:
    """All figures of a reproduction by name.

    ``speedups``, ``throughput`` [tok/s], ``breakdown`` [ms], ``hit_rate`` [%] and ``error_by_reading`` [%]; the
    last one shows the default reading alone where the result was made without exploring.
    """
    return {
        "speedups": _speedups(result),
        "throughput": _throughput(result),
        "breakdown": _breakdown(result),
        "hit_rate": _hit_rate(result),
        "error_by_reading": _error_by_reading(result),
    }


# Comparison of evaluations


def _short_policies(policies: Sequence[str]) -> list[str]:
    """Policies by name, with only those options that tell them from others of the same name."""
    split = [(name, options.split(",")) for name, _, options in (p.partition(":") for p in policies)]
    short = []
    for name, options in split:
        others = [set(o) for n, o in split if n == name]
        kept = [option for option in options if option and not all(option in other for other in others)]
        short.append(f"{name}:{','.join(kept)}" if kept else name)
    return short


def _row_labels(evaluations: Sequence[Evaluation], labels: Sequence[str] | None) -> list[str]:
    """Labels or short policies, with the model and the system where they differ."""
    parts = [list(labels) if labels is not None else _short_policies([e.policy for e in evaluations])]
    columns = ([_model(e.model) for e in evaluations], [e.system for e in evaluations])
    parts += [names for names in columns if len(set(names)) > 1]
    return ["\n".join(_folded(_plain(text, 80), 22) for text in row) for row in zip(*parts, strict=True)]


def _draw_rates(axes: Axes, evaluations: Sequence[Evaluation]) -> None:
    rates = [e.decode_tok_per_s for e in evaluations]
    axes.barh(np.arange(len(rates)), rates, 0.62, **_look(Look("", _BLUE, "")))
    for y, rate in enumerate(rates):
        _beside(axes, rate, y, f"{_number(rate)} ({_number(rate / rates[0])}×)" if y else f"{_number(rate)} (baseline)")
    _room(axes, max(rates), 0.5)
    axes.set_xlabel("decode rate (tok/s), × over the first")


def _draw_tokens(axes: Axes, evaluations: Sequence[Evaluation], unit: str = "") -> None:
    totals = _stack(axes, {p: [e.breakdown_s[p] * 1e3 for e in evaluations] for p in _PARTS}, _PARTS)
    for y, total in enumerate(totals):
        _beside(axes, total, y, f"{_number(total)}{unit}")
    _room(axes, float(totals.max(initial=0.0)), 0.22)
    axes.set_xlabel("critical path of a mean output token (ms)")


def _draw_end_to_end(axes: Axes, evaluations: Sequence[Evaluation]) -> None:
    known = [e.ttft_s is not None for e in evaluations]
    axes.set_xlabel("end to end, mean sequence (s)")
    if not any(known):
        axes.set_xticks([])
        axes.text(0.5, 0.5, "no prefill in the trace", transform=axes.transAxes, ha="center", va="center")
        return
    times = {
        "ttft": [e.ttft_s or 0.0 for e in evaluations],
        "migration": [e.migration_s if k else 0.0 for e, k in zip(evaluations, known, strict=True)],
        "decode": [e.decode_s if k else 0.0 for e, k in zip(evaluations, known, strict=True)],
    }
    totals = _stack(axes, times, _STAGES)
    for y, (total, there) in enumerate(zip(totals, known, strict=True)):
        _beside(axes, total, y, _number(total) if there else "no prefill in the trace")
    _room(axes, float(totals.max()), 0.2)


def _draw_memory(axes: Axes, evaluations: Sequence[Evaluation], capacity: Mapping[str, float]) -> None:
    memory = [e.memory_bytes["gpu"] for e in evaluations]
    uses = dict.fromkeys(use for one in memory for use in one if use != "total")
    totals = _stack(axes, {use: [one.get(use, 0.0) / 1e9 for one in memory] for use in uses}, _MEMORY)
    limits = {y: capacity[e.system] / 1e9 for y, e in enumerate(evaluations) if e.system in capacity}
    highest = max(float(totals.max()), *limits.values(), 0.0)
    if limits:
        axes.plot(list(limits.values()), list(limits), "|", color=_RED, ms=13, mew=1.8, label="capacity")
    for y, total in enumerate(totals):
        end = limits.get(y, 0.0)
        # A label that would run into the mark of the capacity goes behind it.
        x = end + 0.01 * highest if total <= end < total + 0.2 * highest else total
        _beside(axes, x, y, _number(total))
    _room(axes, highest, 0.2)
    axes.set_xlabel("GPU memory (GB)")


def comparison_figure(
    evaluations: Sequence[Evaluation],
    *,
    labels: Sequence[str] | None = None,
    gpu_capacity_bytes: Mapping[str, float] | None = None,
) -> Figure:
    """Evaluations side by side; the first is the baseline of the speed-ups.

    Panels: decode rate [tok/s], critical path of a mean token [ms], end-to-end time [s], GPU memory [GB].

    Parameters
    ----------
    evaluations : one row each, from top to bottom; 1 to 40.
    labels : names of the rows; by default the policies with the options in which they differ.
    gpu_capacity_bytes : memory of the GPU by system name [byte], to be marked; systems not named have no mark.

    Raises
    ------
    PerfModelError : no evaluation, too many to read, or another number of labels.
    """
    if not 1 <= len(evaluations) <= MOST_EVALUATIONS:
        raise PerfModelError(
            f"a comparison figure shows 1 to {MOST_EVALUATIONS} evaluations, and {len(evaluations)} were given"
        )
    if labels is not None and len(labels) != len(evaluations):
        raise PerfModelError(f"a comparison figure of {len(evaluations)} evaluations got {len(labels)} labels")
    names = _row_labels(evaluations, labels)
    lines = max(1.7, *(name.count("\n") + 1.6 for name in names)) * len(names)
    draw: tuple[Callable[[Axes], None], ...] = (
        lambda axes: _draw_rates(axes, evaluations),
        lambda axes: _draw_tokens(axes, evaluations),
        lambda axes: _draw_end_to_end(axes, evaluations),
        lambda axes: _draw_memory(axes, evaluations, gpu_capacity_bytes or {}),
    )
    with _canvas(2, 2, (PAGE, 2.6 + 2 * 0.125 * lines), sharey=True) as (figure, grid):
        for axes, panel in zip(grid.flat, draw, strict=True):
            panel(axes)
            _rows(axes, names)
            handles = {name: handle for name, handle in _handles(axes).items() if name}
            if handles:
                axes.legend(
                    list(handles.values()), list(handles), loc="lower left", bbox_to_anchor=(0, 1), ncols=3,
                    borderaxespad=0.2, handlelength=1.2, columnspacing=0.8,
                )  # fmt: skip
        _caption(figure, *_comparison_words(evaluations), _too_small(evaluations))
    return figure


def _comparison_words(evaluations: Sequence[Evaluation]) -> list[str]:
    def among(values: Sequence[str]) -> str:
        distinct = list(dict.fromkeys(values))
        return ", ".join(distinct[:4]) + (f" and {len(distinct) - 4} more" if len(distinct) > 4 else "")

    lengths = [f"{_number(e.prompt_tokens)} + {_number(e.output_tokens)}" for e in evaluations]
    return [
        f"Model: {among([_model(e.model) for e in evaluations])}.",
        f"System: {among([_plain(e.system) for e in evaluations])}.",
        f"Routing: {among([_routing(e.trace, e.trace_source) for e in evaluations])}.",
        f"Prompt + output: {among(lengths)} tokens, mean over sequences.",
        f"Weakest source among the hardware constants: {among([_plain(e.weakest_source) for e in evaluations])}.",
    ]


__all__ = ["SUFFIXES", "comparison_figure", "reproduction_figures", "save"]
