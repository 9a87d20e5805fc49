"""The published figures recomputed in three columns: datasheet peaks, evidence with nothing fitted, and calibrated.

- *datasheet*: the paper's own machine (PCIe 4 x16) with every rate at its peak and every overhead at zero.
- *evidence*: every constant measured, derived or assumed elsewhere, none fitted to the paper. Four choices were made
  with the paper in view: the link (CXL 2.0 x16), the row-by-row layout of the DRAM, arrays that speed up as 16 / bits,
  and the reading of MoNDE.
- *calibrated*: the evidence with few constants fitted to the rows marked ``fit``.

All columns share the policies and their readings.
"""

import csv
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from perfmodel.errors import PolicyError
from perfmodel.evidence.bench import MODELS, Bench, Case, policy_text, predictor
from perfmodel.evidence.calibrate import Fit, calibrate, fitted_system
from perfmodel.evidence.context import QualityContext, quality_context
from perfmodel.evidence.explore import (
    FITTED_KEYS,
    Outcome,
    OwnBest,
    ndp_reduction,
    own_best,
    tried_machines,
    tried_readings,
    tried_traces,
)
from perfmodel.evidence.figures import (
    OUTPUT,
    RANGE_OUTPUTS,
    Figure,
    Interval,
    error,
    geometric_mean_error,
    load_figures,
)
from perfmodel.hardware import Source, System, load_system, write_overlay
from perfmodel.paths import replace_when_done
from perfmodel.point import dram_efficiency
from perfmodel.policies import ABLATIONS
from perfmodel.routing import RoutingTrace
from perfmodel.run import Evaluation, HitRates

COLUMNS = ("datasheet", "evidence", "calibrated")
DATASHEET_SYSTEM, EVIDENCE_SYSTEM = "h100-cxl-ndp", "h100-cxl2-ndp"
BUNDLED_TRACE = "tiny-mixtral-32l-mini"
_CITATION = "fitted to the rows marked fit of arXiv 2512.04476"


@dataclass(frozen=True)
class Row:
    """One published figure with what each column makes of it."""

    figure: Figure
    columns: Mapping[str, Interval]

    @property
    def errors(self) -> dict[str, float]:
        """``|ln(computed / published)|`` of every column; 0 where two ranges overlap."""
        return {name: error(interval, self.figure) for name, interval in self.columns.items()}

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; ``error`` is the calibrated column's."""

        def shown(interval: Interval) -> float | list[float]:
            return list(interval) if self.figure.kind == "range" else interval.low

        value = list(self.figure.value) if self.figure.kind == "range" else self.figure.value[0]
        return {
            "id": self.figure.id,
            "model": self.figure.model,
            "system": self.figure.system,
            "baseline": self.figure.baseline,
            "mean_bits": self.figure.bits,
            "kind": self.figure.kind,
            "mark": self.figure.mark,
            "fit": self.figure.fit,
            "published": value,
            **{name: shown(interval) for name, interval in self.columns.items()},
            "error": self.errors.get("calibrated"),
            "errors": self.errors,
            "overlaps": {name: e == 0.0 for name, e in self.errors.items()} if self.figure.kind == "range" else None,
        }


def _compute(figure: Figure, price: Callable[[Case], Evaluation]) -> Interval:
    """One figure from evaluations at one set of constants."""
    values = []
    for model in figure.models:
        ours = policy_text(figure.system, figure.bits)
        if figure.kind == "rate":
            values.append(price(Case(model, ours, OUTPUT)).decode_tok_per_s)
        elif figure.kind == "ndp-latency":
            full = price(Case(model, policy_text(figure.system, None, ABLATIONS["placement only"]), OUTPUT))
            values.append(full.ndp_side_s / price(Case(model, ours, OUTPUT)).ndp_side_s)
        elif figure.baseline is not None:
            for output in RANGE_OUTPUTS if figure.kind == "range" else (OUTPUT,):
                one, other = price(Case(model, ours, output)), price(Case(model, figure.baseline, output))
                if figure.kind == "range" and one.end_to_end_s and other.end_to_end_s:
                    values.append(other.end_to_end_s / one.end_to_end_s)
                else:
                    values.append(one.decode_tok_per_s / other.decode_tok_per_s)
    if figure.kind == "range":
        return Interval(min(values), max(values))
    mean = float(np.mean(values))
    return Interval(mean, mean)


def with_given_ndp_rate(system: System) -> System:
    """The system with the efficiency of its near-data DRAM as a number instead of a derivation, so it can be fitted."""
    if system.ndp is None or system.ndp.dram_efficiency is not None:
        return system
    source = "derived from DRAM timings and mapping, as in the ndp spec"
    return system.with_values({"ndp.dram_efficiency": dram_efficiency(system.ndp)}, source="derived", citation=source)


@dataclass(frozen=True)
class Reproduction:
    """Everything `reproduce` finds; plots, tables and files are made from it."""

    rows: tuple[Row, ...]
    systems: Mapping[str, System]
    fit: Fit
    evidence_geomean_error: float
    evaluations: Mapping[str, Mapping[tuple[str, str], Evaluation]]
    hit_rates: Mapping[str, HitRates]
    readings: tuple[Outcome, ...]
    traces: tuple[Outcome, ...]
    machines: tuple[Outcome, ...]
    own_best: tuple[OwnBest, ...]
    ndp_reduction: Mapping[str, Mapping[str, float]]
    quality: QualityContext
    trace: RoutingTrace
    base: str
    notes: tuple[str, ...]

    @property
    def fit_errors(self) -> list[float]:
        """Calibrated errors of the fitted rows."""
        return [row.errors["calibrated"] for row in self.rows if row.figure.fit]

    @property
    def geomean_error(self) -> float:
        """Geometric-mean error of the calibrated column over the fitted rows."""
        return geometric_mean_error(self.fit_errors)

    def constants(self) -> list[dict[str, Any]]:
        """Every hardware constant of the calibrated column with its origin."""
        return [
            {
                "name": constant.key,
                "value": constant.value,
                "unit": constant.unit,
                "origin": constant.source,
                "citation": constant.citation,
                "fitted": constant.key in self.fit.keys,
            }
            for constant in self.systems["calibrated"].constants()
        ]

    def fitted(self) -> list[dict[str, Any]]:
        """The fitted constants with where they started and what they mean in absolute terms."""
        system, start = self.systems["calibrated"], self.systems["evidence"]
        units = {c.key: c.unit for c in system.constants()}
        return [
            {"name": key, "value": value, "unit": units[key], "evidence": start.get(key)}
            for key, value in zip(self.fit.keys, self.fit.values, strict=True)
        ]

    def to_dict(self) -> dict[str, Any]:
        """The whole result as plain values for JSON."""
        metadata = self.trace.metadata
        return {
            "rows": [row.to_dict() for row in self.rows],
            "systems": {name: system.name for name, system in self.systems.items()},
            "constants": self.constants(),
            "fitted": self.fitted(),
            "fit_rows": [row.figure.id for row in self.rows if row.figure.fit],
            "geomean_error": self.geomean_error,
            "max_error": max(self.fit_errors),
            "evidence_geomean_error": self.evidence_geomean_error,
            "leave_one_out_geomean_error": self.fit.leave_one_out_geomean_error,
            "hit_rate": {model: rates.own for model, rates in self.hit_rates.items()},
            "hit_rate_controls": {model: rates._asdict() for model, rates in self.hit_rates.items()},
            "readings": [outcome._asdict() for outcome in self.readings],
            "traces": [outcome._asdict() for outcome in self.traces],
            "machines": [outcome._asdict() for outcome in self.machines],
            "own_best": [best._asdict() for best in self.own_best],
            "ndp_latency_reduction": {k: dict(v) for k, v in self.ndp_reduction.items()},
            "quality": self.quality.to_dict(),
            "trace": {
                "model": metadata.get("model"),
                "source": metadata.get("source"),
                "sequences": self.trace.num_sequences,
                "tokens": self.trace.num_tokens,
                "layers": self.trace.num_layers,
                "content_hash": self.trace.content_hash(),
            },
            "notes": list(self.notes),
        }


def reproduce(*, trace: RoutingTrace | None = None, system: str | None = None, explore: bool = True) -> Reproduction:
    """Recompute every published figure.

    Parameters
    ----------
    trace : recorded routing with 8 experts and 2 picks; by default the bundled recording.
    system : name or path of a spec, used for the evidence column and, at its peaks, for the datasheet column; by
        default the paper's machine for the datasheet column and the same with CXL 2.0 x16 for the evidence.
    explore : also report how the error moves with readings and traces, and each baseline's own best reading.
    """
    recording = trace if trace is not None else RoutingTrace.load(BUNDLED_TRACE)
    base = system or EVIDENCE_SYSTEM
    evidence = with_given_ndp_rate(load_system(base))
    if evidence.ndp is None:
        raise PolicyError(f"system {evidence.name} has no near-data device, and the published figures are about one")
    peaks = load_system(system or DATASHEET_SYSTEM).at_peak()
    bench = Bench(recording, evidence)
    figures = load_figures()
    fit_figures = tuple(figure for figure in figures if figure.fit)
    predict = predictor(bench, fit_figures, {})
    fit = calibrate(evidence, FITTED_KEYS, predict, [f.value[0] for f in fit_figures])
    systems = {
        "datasheet": peaks,
        "evidence": evidence,
        "calibrated": fitted_system(evidence, fit.overrides(), _CITATION),
    }
    prices: dict[tuple[str, Case], Evaluation] = {}

    def price_in(column: str) -> Callable[[Case], Evaluation]:
        def price(case: Case) -> Evaluation:
            if (column, case) not in prices:
                prices[column, case] = bench.run(case).price(systems[column])
            return prices[column, case]

        return price

    rows = tuple(Row(figure, {column: _compute(figure, price_in(column)) for column in COLUMNS}) for figure in figures)
    bench.forget(unless=lambda case: case.output == OUTPUT)
    shown = {
        "context-aware 3-bit": policy_text("context-aware", 3.0),
        "context-aware 2-bit": policy_text("context-aware", 2.0),
    }
    shown |= {"MoNDE": "monde", "HOBBIT": "hobbit"}
    evaluations = {
        column: {
            (model, label): price_in(column)(Case(model, text, OUTPUT))
            for model in MODELS
            for label, text in shown.items()
        }
        for column in COLUMNS
    }
    hit_rates = {}
    for model in MODELS:
        rates = evaluations["evidence"][model, "context-aware 3-bit"].hit_rate
        assert rates is not None
        hit_rates[model] = rates
    notes = list(dict.fromkeys(n for e in evaluations["calibrated"].values() for n in e.notes))
    readings: tuple[Outcome, ...] = ()
    traces: tuple[Outcome, ...] = ()
    machines: tuple[Outcome, ...] = ()
    best: tuple[OwnBest, ...] = ()
    if explore:
        readings, left_out = tried_readings(bench, fit_figures, evidence, fit.values)
        notes += left_out
        recorded = readings[0]._replace(name=f"{recording.metadata.get('model')} ({recording.metadata.get('source')})")
        traces = (recorded, *tried_traces(fit_figures, evidence, fit.values))
        machines = tuple(tried_machines(bench, fit_figures, evidence, fit.values))
        best = own_best(bench, systems["calibrated"])
    return Reproduction(
        rows=rows,
        systems=systems,
        fit=fit,
        evidence_geomean_error=geometric_mean_error([r.errors["evidence"] for r in rows if r.figure.fit]),
        evaluations=evaluations,
        hit_rates=hit_rates,
        readings=readings,
        traces=traces,
        machines=machines,
        own_best=best,
        ndp_reduction=ndp_reduction(bench, systems["calibrated"]),
        quality=quality_context(bench),
        trace=recording,
        base=base,
        notes=tuple(notes),
    )


def write_csv(result: Reproduction, path: Path) -> None:
    """Every row of the reproduction as CSV; a range takes two columns, a point repeats its value."""
    header = ["id", "model", "system", "baseline", "mean_bits", "kind", "mark", "fit"]
    header += [f"{name}_{end}" for name in ("published", *COLUMNS) for end in ("low", "high")]
    header += [f"error_{name}" for name in COLUMNS]
    with replace_when_done(path) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(header)
        for row in result.rows:
            figure = row.figure
            identity = [
                figure.id,
                figure.model,
                figure.system,
                figure.baseline,
                figure.bits,
                figure.kind,
                figure.mark,
            ]
            values = [figure.value[0], figure.value[-1], *(v for name in COLUMNS for v in row.columns[name])]
            writer.writerow([*identity, figure.fit, *values, *(row.errors[name] for name in COLUMNS)])


def write_calibrated_system(result: Reproduction, path: Path) -> None:
    """The fitted constants as an overlay spec on the evidence system, loadable by path."""
    fitted = [row.figure.id for row in result.rows if row.figure.fit]
    citation = f"{_CITATION}: {', '.join(fitted)}; leave-one-out error {result.fit.leave_one_out_geomean_error:.3f}"
    sources = {key: Source(source="calibrated", citation=citation) for key in result.fit.keys}
    write_overlay(path, result.base, result.fit.overrides(), sources)
