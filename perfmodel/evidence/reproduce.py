"""The published figures recomputed in three columns: datasheet peaks, independent evidence, and calibrated.

- *datasheet*: the paper's own machine (PCIe 4 x16) with every rate at its peak and every overhead at zero.
- *evidence*: every constant measured or derived elsewhere, nothing fitted to the paper. The link is CXL 2.0 x16,
  because no reading of MoNDE reaches the published rate over PCIe 4.
- *calibrated*: the evidence with few constants fitted to the rows marked ``fit``.

All columns share the policies and their readings.
"""

import csv
import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from perfmodel.errors import PlacementError, PolicyError
from perfmodel.evaluate import Evaluation, HitRates, Run, make_replay, plan_run
from perfmodel.evidence.calibrate import Fit, calibrate, fitted_system
from perfmodel.evidence.figures import (
    OUTPUT,
    PROMPT,
    RANGE_OUTPUTS,
    Figure,
    Interval,
    error,
    geometric_mean_error,
    load_figures,
)
from perfmodel.hardware import Source, System, load_system, write_overlay
from perfmodel.model import MoEModel
from perfmodel.paths import replace_when_done
from perfmodel.point import dram_efficiency, hardware_point
from perfmodel.policies import ABLATIONS
from perfmodel.routing import Replay, RoutingTrace
from perfmodel.routing.synthetic import MIXTRAL_SKEW, generate

MODELS = ("mixtral-8x7b", "mixtral-8x22b")
COLUMNS = ("datasheet", "evidence", "calibrated")
DATASHEET_SYSTEM, EVIDENCE_SYSTEM = "h100-cxl-ndp", "h100-cxl2-ndp"
BUNDLED_TRACE = "tiny-mixtral-32l-mini"
#: The constants that are fitted, and nothing else.
FITTED_KEYS = ("gpu.memory_efficiency", "ndp.dram_efficiency", "link.bandwidth_gb_per_s")
_CITATION = "fitted to the rows marked fit of arXiv 2512.04476"

#: Readings of the systems whose effect on the error is reported: what stands in for each system's default.
READINGS: dict[str, dict[str, str]] = {
    "as reported": {},
    "GPU and NDP in turn (overlap=sum)": {"context-aware": "context-aware:overlap=sum"},
    "importance from counts alone (alpha=1)": {"context-aware": "context-aware:alpha=1"},
    "importance from weights alone (alpha=0)": {"context-aware": "context-aware:alpha=0"},
    "importance by min-max": {"context-aware": "context-aware:norm=min-max"},
    "uniform bits": {"context-aware": "context-aware:selector=uniform"},
    "placed by the other sequences (static)": {"context-aware": "static"},
    "MoNDE keeps the last copied expert": {"monde": "monde:resident=1"},
    "MoNDE by its balance rule": {"monde": "monde:reading=balance"},
    "HOBBIT by its thresholds (split=gates)": {"hobbit": "hobbit:split=gates"},
    "HOBBIT caches one expert a layer": {"hobbit": "hobbit:cache_high=1"},
}
#: Scales of quantised weights in the what-if beside the near-data rows: FP16, one for 64 weights [bit a weight].
GROUP_SCALE_BITS = 0.25
#: Generated traces beside the recording, from no variation between sequences to much: the hit rate rises with it.
CONCENTRATIONS = {"sequences alike": math.inf, "Mixtral's skew": None, "sequences very different": 10.0}
#: Other readings of each baseline that its own authors could have chosen on this machine.
OWN_READINGS: dict[str, tuple[str, ...]] = {
    "monde": ("monde", "monde:reading=balance", "monde:reading=all-ndp", "monde:resident={gpu_experts}"),
    "hobbit": (
        "hobbit",
        "hobbit:split=gates",
        "hobbit:cache_high={gpu_experts}",
        "hobbit:cache_high={gpu_experts},prefetch_accuracy=0.96",
    ),
}


def policy_text(base: str, bits: float | None = None, options: str = "") -> str:
    """A policy with mean bits and further options added to its own."""
    name, _, own = base.partition(":")
    parts = [part for part in (f"mean_bits={bits:g}" if bits is not None else "", own, options) if part]
    return f"{name}:{','.join(parts)}" if parts else name


class Case(NamedTuple):
    """One evaluation that figures need."""

    model: str
    policy: str
    output: int


class Bench:
    """Plans and prices cases on one trace, each plan once."""

    def __init__(self, trace: RoutingTrace, system: System) -> None:
        self.trace, self.system = trace, system
        self.models = {name: MoEModel.from_config(name) for name in MODELS}
        self._replays: dict[tuple[str, int], Replay] = {}
        self._runs: dict[Case, Run] = {}

    def branch(self) -> "Bench":
        """A bench that shares what is planned so far and forgets its own plans when it is dropped."""
        other = Bench(self.trace, self.system)
        other._replays, other._runs = dict(self._replays), dict(self._runs)
        return other

    def run(self, case: Case) -> Run:
        """The plan of a case. A trace with other layers is cycled, and its notes say so."""
        if case not in self._runs:
            model = self.models[case.model]
            key = (case.model, case.output)
            if key not in self._replays:
                self._replays[key] = make_replay(model, self.trace, PROMPT, case.output, "cycle")
            self._runs[case] = plan_run(model, self.system, self._replays[key], case.policy)
        return self._runs[case]


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


def _predictor(
    bench: Bench, figures: tuple[Figure, ...], readings: Mapping[str, str]
) -> Callable[[NDArray[np.float64]], NDArray[np.float64]]:
    """Logarithms of the fitted figures at hardware points, from mean token times alone."""

    def predict(points: NDArray[np.float64]) -> NDArray[np.float64]:
        @functools.cache
        def log_rate(model: str, name: str, bits: float | None) -> NDArray[np.float64]:
            case = Case(model, policy_text(readings.get(name, name), bits), OUTPUT)
            return -np.log(bench.run(case).mean_token_s(points))

        columns = []
        for figure in figures:
            value = log_rate(figure.model, figure.system, figure.bits)
            if figure.baseline is not None:
                value = value - log_rate(figure.model, figure.baseline, None)
            columns.append(value)
        return np.stack(columns, axis=1)

    return predict


def with_given_ndp_rate(system: System) -> System:
    """The system with the efficiency of its near-data DRAM as a number instead of a derivation, so it can be fitted."""
    if system.ndp is None or system.ndp.dram_efficiency is not None:
        return system
    source = "derived from DRAM timings and mapping, as in the ndp spec"
    return system.with_values({"ndp.dram_efficiency": dram_efficiency(system.ndp)}, source="derived", citation=source)


class Outcome(NamedTuple):
    """Errors of one reading or trace: with the evidence alone, and with the constants fitted anew."""

    name: str
    evidence_geomean_error: float
    geomean_error: float
    hit_rate: dict[str, float]
    values: dict[str, float]


class OwnBest(NamedTuple):
    """A baseline at its own fastest reading on the same machine, and the speed-up that is left over it."""

    model: str
    baseline: str
    reading: str
    tok_per_s: float
    default_tok_per_s: float
    gains: dict[str, float]


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
    own_best: tuple[OwnBest, ...]
    ndp_reduction: Mapping[str, Mapping[str, float]]
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
            "own_best": [best._asdict() for best in self.own_best],
            "ndp_latency_reduction": {k: dict(v) for k, v in self.ndp_reduction.items()},
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


def _outcome(
    name: str,
    bench: Bench,
    figures: tuple[Figure, ...],
    evidence: System,
    readings: Mapping[str, str],
    near: tuple[float, ...],
) -> Outcome:
    predict = _predictor(bench, figures, readings)
    published = [figure.value[0] for figure in figures]
    plain = predict(hardware_point(evidence)[None, :])[0] - np.log(published)
    fit = calibrate(evidence, FITTED_KEYS, predict, published, leave_one_out=False, start=near)
    rates = {}
    for model in MODELS:
        case = Case(model, policy_text(readings.get("context-aware", "context-aware"), 3), OUTPUT)
        rate = bench.run(case).hit_rates
        rates[model] = rate.own if rate is not None else math.nan
    return Outcome(
        name, geometric_mean_error([abs(float(r)) for r in plain]), fit.geomean_error, rates, fit.overrides()
    )


def _own_best(bench: Bench, system: System) -> tuple[OwnBest, ...]:
    found = []
    point = hardware_point(system)[None, :]

    def rate(case: Case) -> float:
        return float(1.0 / bench.run(case).mean_token_s(point)[0])

    for model in MODELS:
        hot = bench.run(Case(model, policy_text("context-aware", 3), OUTPUT)).plan.gpu_experts
        ours = {f"{bits:g}-bit": rate(Case(model, policy_text("context-aware", bits), OUTPUT)) for bits in (3.0, 2.0)}
        for baseline, readings in OWN_READINGS.items():
            rates: dict[str, float] = {}
            for text in readings:
                policy = text.format(gpu_experts=int(hot))
                try:
                    rates[policy] = rate(Case(model, policy, OUTPUT))
                except (PlacementError, PolicyError):
                    continue  # it does not fit in the GPU's memory, or the trace lacks what it needs
            best = max(rates, key=rates.__getitem__)
            gains = {name: one / rates[best] for name, one in ours.items()}
            found.append(OwnBest(model, baseline, best, rates[best], rates[baseline], gains))
    return tuple(found)


def _ndp_reduction(bench: Bench, system: System) -> dict[str, dict[str, float]]:
    """How much less time the near-data device works than at full precision, by mean bits.

    With uniform bits it is 16 / bits exactly; beside it what the selector's uneven bits make of it, and group scales.
    """
    scaled = system.with_values(
        {"ndp.scale_bits_per_weight": GROUP_SCALE_BITS}, citation="one FP16 scale for 64 weights"
    )
    result: dict[str, dict[str, float]] = {}
    for model in MODELS:
        full = bench.run(Case(model, policy_text("context-aware", None, ABLATIONS["placement only"]), OUTPUT))
        whole = full.price(system).ndp_side_s
        result[model] = {}
        for bits in (3.0, 2.0):
            uniform = bench.run(Case(model, policy_text("context-aware", bits, ABLATIONS["uniform bits"]), OUTPUT))
            selected = bench.run(Case(model, policy_text("context-aware", bits), OUTPUT))
            result[model] |= {
                f"{bits:g}-bit uniform": whole / uniform.price(system).ndp_side_s,
                f"{bits:g}-bit selected": whole / selected.price(system).ndp_side_s,
                f"{bits:g}-bit selected with group scales": whole / selected.price(scaled).ndp_side_s,
            }
    return result


def synthetic_trace(concentration: float | None = None) -> RoutingTrace:
    """A generated trace with Mixtral's published skew between experts (marked synthetic).

    concentration : how alike the sequences are; by default what goes with the published skew.
    """
    skew = MIXTRAL_SKEW if concentration is None else MIXTRAL_SKEW._replace(sequence_concentration=concentration)
    return generate(3, PROMPT, 128, 32, 8, 2, seed=0, **skew._asdict())


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
    predict = _predictor(bench, fit_figures, {})
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
    own_best: tuple[OwnBest, ...] = ()
    if explore:
        source = recording.metadata.get("source")
        explored = functools.partial(_outcome, figures=fit_figures, evidence=evidence, near=fit.values)
        tried = []
        for name, changed in READINGS.items():
            try:
                tried.append(explored(name, bench.branch(), readings=changed))
            except PolicyError as error:  # the trace lacks what this reading needs, such as routing weights
                notes.append(f"reading left out, {name}: {error}")
        readings = tuple(tried)
        traces = (
            readings[0]._replace(name=f"{recording.metadata.get('model')} ({source})"),
            *(
                explored(f"generated, {name} (synthetic)", Bench(synthetic_trace(value), evidence), readings={})
                for name, value in CONCENTRATIONS.items()
            ),
        )
        own_best = _own_best(bench.branch(), systems["calibrated"])
    return Reproduction(
        rows=rows,
        systems=systems,
        fit=fit,
        evidence_geomean_error=geometric_mean_error([r.errors["evidence"] for r in rows if r.figure.fit]),
        evaluations=evaluations,
        hit_rates=hit_rates,
        readings=readings,
        traces=traces,
        own_best=own_best,
        ndp_reduction=_ndp_reduction(bench, systems["calibrated"]),
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
