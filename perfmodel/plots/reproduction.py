"""Figures of a reproduction: what was published beside what is computed, and where the computed comes from."""

import math

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from perfmodel.evidence.bench import MODELS
from perfmodel.evidence.explore import Outcome
from perfmodel.evidence.figures import Figure as Published
from perfmodel.evidence.reproduce import Reproduction
from perfmodel.plots.canvas import canvas
from perfmodel.plots.drawing import beside, diamonds, leave_room, legend, name_rows, token_panel, too_small
from perfmodel.plots.speedups import speedups
from perfmodel.plots.style import BLACK, BLUE, COLUMN, COLUMN_LOOKS, GREY, ORANGE, PAGE, SKY, Look
from perfmodel.plots.words import caption, model_name, number, plain, provenance, system_name
from perfmodel.run import Evaluation

#: Own placement and its controls, by the names of ``evaluate.HitRates``.
HIT_RATES = {
    "own": "own placement\n(by the prompt)",
    "oracle": "oracle\n(by its own decode)",
    "uniform": "uniform (K / E)",
    "other_sequence": "another sequence\n(by its prompt)",
    "static": "static (by the\nothers' decode)",
}


def reproduction_figures(result: Reproduction) -> dict[str, Figure]:
    """All figures of a reproduction by name.

    ``speedups``, ``throughput`` [tok/s], ``breakdown`` [ms], ``hit_rate`` [%], ``quality`` [%] and
    ``error_by_reading`` [%]; the last one shows the default reading alone where the result was made without exploring.
    """
    return {
        "speedups": speedups(result),
        "throughput": _throughput(result),
        "breakdown": _breakdown(result),
        "hit_rate": _hit_rate(result),
        "quality": _quality(result),
        "error_by_reading": _error_by_reading(result),
    }


def _systems_of(result: Reproduction, column: str, model: str) -> dict[str, Evaluation]:
    return {system: e for (m, system), e in result.evaluations[column].items() if m == model}


def _published_rates(result: Reproduction, model: str) -> dict[str, Published]:
    """Published decode rates by the name that the system has in the evaluations."""
    figures = [row.figure for row in result.rows if row.figure.kind == "rate" and row.figure.model == model]
    return {system_name(f.system) + ("" if f.bits is None else f" {f.bits:g}-bit"): f for f in figures}


def _throughput(result: Reproduction) -> Figure:
    slot = 0.27
    with canvas(1, len(MODELS), (PAGE, 3.0), sharey=True) as (figure, grid):
        for axes, model in zip(grid[0], MODELS, strict=True):
            highest = 0.0
            for i, column in enumerate(("evidence", "calibrated")):
                evaluations = _systems_of(result, column, model)
                names = list(evaluations)
                rates = [e.decode_tok_per_s for e in evaluations.values()]
                y = np.arange(len(rates)) + i * slot
                axes.barh(y, rates, slot * 0.92, **COLUMN_LOOKS[column].options())
                for place, rate in zip(y, rates, strict=True):
                    beside(axes, rate, place, number(rate))
                highest = max(highest, *rates)
            published = _published_rates(result, model)
            marks = [
                (published[n].value[0], y - slot, published[n].mark) for y, n in enumerate(names) if n in published
            ]
            for rate, place, _ in marks:
                beside(axes, rate, place, f" {rate:g}")
            diamonds(axes, marks)
            name_rows(axes, names)
            axes.set_title(model_name(model) + ("" if marks else " (no rate published)"), loc="left")
            leave_room(axes, max([highest, *(rate for rate, _, _ in marks)]), 0.14)
            axes.set_xlabel("decode rate (tok/s)")
        legend(figure, *grid[0])
        caption(figure, provenance(result, "published", "evidence", "calibrated"))
    return figure


def _breakdown(result: Reproduction) -> Figure:
    with canvas(len(MODELS), 2, (PAGE, 2.9)) as (figure, grid):
        for panels, model in zip(grid, MODELS, strict=True):
            systems = _systems_of(result, "calibrated", model)
            ours = [name for name in systems if name.startswith("context-aware")]
            # Baselines wait for the link ten times as long, so they get an axis of their own.
            for axes, names in zip(panels, (ours, [n for n in systems if n not in ours]), strict=True):
                token_panel(axes, [systems[n] for n in names], " ms")
                name_rows(axes, names)
                axes.set_title(model_name(model), loc="left")
        for axes in grid[0]:
            axes.set_xlabel("")
        legend(figure, *grid.flat)
        caption(
            figure,
            "Every panel has its own time axis. Work hidden behind other work is not on the critical path.",
            too_small(list(result.evaluations["calibrated"].values())),
            provenance(result, "calibrated"),
        )
    return figure


def _hit_rate(result: Reproduction) -> Figure:
    with canvas(1, 1, (COLUMN, 3.1)) as (figure, grid):
        axes = grid[0, 0]
        for i, (model, colour, hatch) in enumerate(zip(MODELS, (BLUE, ORANGE), ("", "////"), strict=True)):
            rates = [getattr(result.hit_rates[model], name) for name in HIT_RATES]
            percent = [math.nan if rate is None else 100 * rate for rate in rates]
            y = np.arange(len(percent)) + (i - 0.5) * 0.36
            axes.barh(y, percent, 0.33, **Look(model_name(model), colour, hatch).options())
            for place, value in zip(y, percent, strict=True):
                if math.isnan(value):
                    beside(axes, 0, place, "not available")
                else:
                    beside(axes, value, place, f"{value:.1f}")
        name_rows(axes, list(HIT_RATES.values()))
        axes.axhline(0.5, color=BLACK, linewidth=0.6, linestyle=":")
        axes.set_xlim(0, 100)
        axes.set_xlabel("hit rate (%)")
        legend(figure, axes)
        caption(
            figure,
            "Share of decode picks whose expert is on the GPU: own placement and four controls.",
            provenance(result),
        )
    return figure


def _quality(result: Reproduction) -> Figure:
    context = result.quality
    names = [row.name for row in context.rows]
    with canvas(1, 2, (PAGE, 2.2), sharey=True) as (figure, grid):
        computed, published = grid[0]
        noise = [math.nan if row.quant_noise is None else 100 * row.quant_noise for row in context.rows]
        computed.barh(np.arange(len(noise)), noise, 0.62, **Look("computed", BLUE).options())
        for y, value in enumerate(noise):
            beside(computed, 0 if math.isnan(value) else value, y, "unknown" if math.isnan(value) else number(value))
        leave_room(computed, max((value for value in noise if value > 0), default=0.0), 0.14)
        computed.set_xlabel("computed noise: quantisation loss over output variance (%)")
        accuracies = [row.published_accuracy_percent for row in context.rows]
        diamonds(published, [(value, y, context.mark) for y, value in enumerate(accuracies)])
        for y, value in enumerate(accuracies):
            beside(published, value, y, f" {value:.2f}")
        low, high = min(accuracies), max(accuracies)
        published.set_xlim(low - 0.1 * (high - low), high + 0.25 * (high - low))
        published.set_xlabel("published, as context: accuracy (%)")
        for axes in grid[0]:
            name_rows(axes, names)
        legend(figure, *grid[0])
        caption(figure, context.sentence, provenance(result))
    return figure


def _error_rows(result: Reproduction) -> list[str | Outcome]:
    """Readings from the smallest refitted error on, then traces, each kind after its heading."""
    readings = sorted(result.readings, key=lambda o: o.geomean_error)
    if not readings:
        rates = {model: rate.own for model, rate in result.hit_rates.items()}
        readings = [Outcome("as reported", result.evidence_geomean_error, result.geomean_error, rates, {})]
    rows: list[str | Outcome] = ["readings", *readings]
    if result.traces:
        rows += ["routing traces", *result.traces]
    if result.machines:
        rows += ["other evidence", *result.machines]
    return rows


def _draw_errors(axes: Axes, places: list[int], outcomes: list[Outcome]) -> None:
    """Errors [%] before and after a new fit, joined by a line."""
    before = [100 * o.evidence_geomean_error for o in outcomes]
    after = [100 * o.geomean_error for o in outcomes]
    axes.hlines(places, before, after, color=GREY, linewidth=1.0, zorder=2)
    for errors, marker, size, colour, label in (
        (before, "o", 5, SKY, "evidence alone"),
        (after, "s", 4.5, BLUE, "refitted"),
    ):
        axes.plot(errors, places, marker, color=BLACK, markerfacecolor=colour, markersize=size, zorder=3, label=label)
    axes.set_xscale("log")
    axes.set_xlim(0.8 * min(before + after), 1.2 * max(before + after))
    axes.set_xticks([tick for tick in (1, 2, 5, 10, 20, 50, 100, 200, 500) if tick < 1.2 * max(before + after)])
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_locator(NullLocator())


def _error_by_reading(result: Reproduction) -> Figure:
    rows = _error_rows(result)
    outcomes = {y: row for y, row in enumerate(rows) if isinstance(row, Outcome)}
    with canvas(1, 1, (PAGE, 1.5 + 0.17 * len(rows))) as (figure, grid):
        axes = grid[0, 0]
        margin = axes.get_yaxis_transform()
        for y, row in enumerate(rows):
            if isinstance(row, Outcome):
                rates = " / ".join(number(100 * row.hit_rate.get(m, math.nan)) for m in MODELS)
                axes.text(1.01, y, rates, transform=margin, va="center")
                continue
            heading = axes.text(-0.01, y, row, transform=margin, ha="right", va="center", fontweight="bold")
            heading.set_in_layout(False)
            if y == 0:
                sizes = " / ".join(model_name(m).split()[-1] for m in MODELS)
                axes.text(1.01, y - 0.2, f"hit rate (%)\n{sizes}", transform=margin, va="center", fontweight="bold")
        for error, colour, label in (
            (result.evidence_geomean_error, SKY, "evidence as reported"),
            (result.geomean_error, BLUE, "refitted as reported"),
        ):
            axes.axvline(100 * error, color=colour, linewidth=1.0, linestyle="--", zorder=1, label=label)
        _draw_errors(axes, list(outcomes), list(outcomes.values()))
        axes.set_yticks(
            list(outcomes), [plain(o.name).replace("(synthetic)", "(SYNTHETIC)") for o in outcomes.values()]
        )
        axes.set_ylim(len(rows) - 0.4, -0.8)
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="x")
        axes.set_xlabel(f"geometric-mean error over the {len(result.fit_errors)} fitted figures (%, log)")
        legend(figure, axes)
        left_out = result.fit.leave_one_out_geomean_error
        caption(
            figure,
            "Refitted: the same constants fitted anew under each reading, trace or machine.",
            "" if left_out is None else f"Leave-one-out error as reported: {100 * left_out:.1f} %.",
            provenance(result, "published", "evidence", "calibrated"),
        )
    return figure
