"""What the routing of a trace looks like, as text for people and as plain values for JSON."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from perfmodel import __version__
from perfmodel.reports import table

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from perfmodel.routing.statistics import CacheCurves, Drift, Estimate, HitRates, Layered, Survey
    from perfmodel.routing.statistics.results import Scope

#: Windows of the output and capacities of a cache that are printed; all are in the JSON document.
_MOST_ROWS = 8


def survey_data(survey: Survey) -> dict[str, Any]:
    """A survey for JSON: what was surveyed comes first, as every command on traces names it."""
    found = survey.as_dict()
    contents = found.pop("contents")
    counts = {"tokens": survey.contents.tokens, "layers": len(survey.contents.layer_index)}
    return {"perfmodel": __version__, "kind": "trace", **contents, **counts, **found}


def survey_text(survey: Survey) -> str:
    """What ``trace stats`` prints of a trace: tables over all layers, then one row a layer, then notes."""
    contents = survey.contents
    phases = {"prefill": contents.prefill_tokens, "decode": contents.decode_tokens}
    parts = [
        f"{contents.model} ({contents.source}): {_counted(contents.sequences, 'sequence')},"
        f" {_counted(contents.tokens, 'token')} ({', '.join(f'{count:,} {phase}' for phase, count in phases.items())}),"
        f" {_counted(len(contents.layer_index), 'layer')} x {contents.num_experts} experts, top-{contents.top_k}",
        _intervals(survey),
        *_skew(survey),
        *_reuse(survey),
        *_distinct(survey),
    ]
    if survey.weights is not None and contents.top_k > 1:
        ranks = " ".join(decimal(value) for value in survey.weights.overall.value)
        parts += ["", f"Share of a token's gate weight by rank, largest first: {ranks}"]
    parts += _next_layer(survey)
    parts += _similarity(survey)
    if survey.hit_rates is not None:
        parts += _hit_rates(survey, survey.hit_rates)
    if survey.drift is not None:
        parts += _drift(survey, survey.drift)
    if survey.cache is not None:
        parts += _cache(survey, survey.cache)
    parts += _by_layer(survey)
    notes = [f"note: {note}" for note in survey.notes]
    return "\n".join([*parts, *([""] if notes else []), *notes])


def _scopes(found: Iterable[str]) -> list[Scope]:
    """Scopes that are printed; where all rows are of one phase, that phase says everything."""
    present = set(found)
    scopes: tuple[Scope, ...] = ("all", "prefill", "decode") if len(present) == 3 else ("prefill", "decode")
    return [scope for scope in scopes if scope in present]


def _intervals(survey: Survey) -> str:
    if survey.contents.sequences < 2:
        return "one sequence, so no intervals"
    if survey.resamples < 2:
        return "no intervals without resamples"
    grouped = f", in {survey.groups:,} random groups" if survey.groups < survey.contents.sequences else ""
    return (
        f"[low, high]: 95 % intervals from {survey.resamples:,} resamples of the sequences{grouped}, seed {survey.seed}"
    )


def _skew(survey: Survey) -> list[str]:
    experts = survey.contents.num_experts
    scopes = _scopes(survey.skew)
    rows = []
    half = "most picked expert" if experts // 2 == 1 else f"{experts // 2} most picked experts"
    for label, name in (
        (f"share of the {half}", "top_half"),
        ("Gini coefficient", "gini"),
        ("entropy over log E", "entropy"),
    ):
        found = [getattr(survey.skew[scope], name) for scope in scopes]
        rows.append([label, *(_interval(one.overall) for one in found), _range(found[0])])
    return ["", "Skew, mean of layers", table(("", *scopes, f"layers ({scopes[0]})"), rows)]


def _reuse(survey: Survey) -> list[str]:
    scopes = _scopes(survey.reuse)
    rows = [
        [
            f"{_counted(lag, 'token')} before",
            *(_interval(survey.reuse[scope].measured.overall, i) for scope in scopes),
            _range(survey.reuse[scopes[0]].measured, i),
        ]
        for i, lag in enumerate(survey.lags)
    ]
    chance = [survey.reuse[scope].chance for scope in scopes]
    rows.append(["any two tokens (chance)", *(_interval(one.overall) for one in chance), _range(chance[0])])
    return ["", "Share of a token's picks made again", table(("", *scopes, f"layers ({scopes[0]})"), rows)]


def _distinct(survey: Survey) -> list[str]:
    contents, parts = survey.contents, []
    experts, top_k = contents.num_experts, contents.top_k

    def even(count: float) -> str:
        return f"{experts * (1 - (1 - top_k / experts) ** float(count)):.2f}"

    scopes = _scopes(survey.distinct)
    rows = [
        [
            f"{_counted(rows, 'token')} in a row",
            *(_interval(survey.distinct[scope].overall, i, 2) for scope in scopes),
            even(rows),
        ]
        for i, rows in enumerate(survey.windows)
    ]
    parts += ["", f"Distinct experts a layer, of {experts}", table(("", *scopes, "even picks"), rows)]
    if survey.batches is not None:
        one = survey.batches
        shown = [
            [_counted(size, "sequence"), f"{value:.2f}", f"{low:.2f} - {high:.2f}", f"{aligned:.2f}", even(size)]
            for size, value, low, high, aligned in zip(
                one.sizes, one.distinct, one.layers.min(axis=0), one.layers.max(axis=0), one.aligned, strict=True
            )
        ]
        title = (
            f"Distinct experts a layer in a decode step of a batch, drawn from {_counted(one.sequences, 'sequence')}"
        )
        header = ("", "any positions", "layers", "same output position", "even picks")
        parts += ["", title, table(header, shown)]
    return parts


def _next_layer(survey: Survey) -> list[str]:
    found = survey.next_layer
    if found is None:
        return []
    contents = survey.contents
    rows = [
        ["table of pairs, learned on other sequences", _interval(found.recall.overall), _range(found.recall)],
        ["most picked experts of the next layer", _interval(found.popular.overall), _range(found.popular)],
        ["any experts, k / E", decimal(contents.top_k / contents.num_experts), ""],
    ]
    title = f"Share of the next layer's picks among {contents.top_k} foretold; intervals hold the learned table fixed"
    return ["", title, table(("", "", "layers"), rows)]


def _similarity(survey: Survey) -> list[str]:
    found = survey.similarity
    if found is None:
        return []
    first, later = _halves(survey)
    half = survey.contents.num_experts // 2
    rows = [
        [f"cosine of its {first} and {later} counts", _interval(found.cosine.overall), _range(found.cosine)],
        [f"  another sequence's {first}", _interval(found.other_sequence.overall), _range(found.other_sequence)],
        ["  equal counts", _interval(found.uniform.overall), _range(found.uniform)],
    ]
    if half:
        rows.append([f"top-{half} experts that are the same", _interval(found.overlap, half - 1), ""])
        rows.append(["  by chance", decimal(half / survey.contents.num_experts), ""])
    title = f"{first.capitalize()} beside {later} of a sequence, mean of {_counted(found.sequences, 'sequence')}"
    return ["", title, table(("", "", "layers"), rows)]


def _hit_rates(survey: Survey, rates: HitRates) -> list[str]:
    first, later = _halves(survey)
    experts = survey.contents.num_experts
    wanted = sorted({max(1, round(experts * part)) for part in (1 / 8, 1 / 4, 1 / 2, 3 / 4)})
    places = [int(np.argmin(np.abs(rates.gpu_experts - count))) for count in wanted]
    series = {
        f"own {first}": rates.own,
        f"another's {first}": rates.other_sequence,
        f"static: others' {later}, sequences alike": rates.static,
        f"static: others' {later}, picks alike": rates.static_pooled,
        f"oracle: own {later}": rates.oracle,
    }
    places = sorted(set(places))
    rows = [[name, *(_interval(one, i) for i in places)] for name, one in series.items()]
    rows.append(["any experts, K / E", *(decimal(rates.uniform[i]) for i in places)])
    counts = [f"K = {rates.gpu_experts[i]}" for i in places]
    title = (
        f"Hit rate of decode picks with K of {experts} experts a layer placed by,"
        f" {_counted(rates.sequences, 'sequence')} alike"
    )
    return ["", title, table(("", *counts), rows)]


def _drift(survey: Survey, drift: Drift) -> list[str]:
    if not len(drift.first_row):
        return []
    half = survey.contents.num_experts // 2
    every = len(drift.first_row)
    shown = _spread(every)
    rows = [
        [
            f"{drift.first_row[i]} - {drift.first_row[i] + drift.rows - 1}",
            f"{drift.sequences[i]:,}",
            _interval(drift.cosine, i),
            _interval(drift.hit_rate, i),
        ]
        for i in shown
    ]
    header = ("output tokens", "sequences", "cosine", f"hit rate, K = {half}")
    title = (
        f"Drift: windows of {drift.rows} output tokens beside the {_halves(survey)[0]}, of sequences that are so long"
    )
    if len(shown) < every:
        title += f" ({len(shown)} of {every:,} windows, from first to last; --json has all)"
    return ["", title, table(header, rows)]


def _cache(survey: Survey, curves: CacheCurves) -> list[str]:
    experts = survey.contents.num_experts
    shown = [place - 1 for place in _capacities(experts)]
    rows = [
        [str(i + 1), _interval(curves.lru, i), _interval(curves.belady, i), decimal((i + 1) / experts)] for i in shown
    ]
    header = ("experts cached", "LRU", "Belady (no demand cache does better)", "C / E")
    return ["", "Hit rate of decode picks in a cache, empty at the start of each decode", table(header, rows, left=0)]


def _by_layer(survey: Survey) -> list[str]:
    """One row a layer: what differs most between layers."""
    scope = next(scope for scope in ("decode", "all", "prefill") if scope in survey.skew)
    skew, half = survey.skew[scope], max(survey.contents.num_experts // 2, 1)
    columns: dict[str, NDArray[np.float64]] = {
        f"top {half}": skew.top_half.layers.value,
        "Gini": skew.gini.layers.value,
        "entropy": skew.entropy.layers.value,
    }
    if scope in survey.reuse and len(survey.lags):
        columns[f"again at {survey.lags[0]}"] = survey.reuse[scope].measured.layers.value[:, 0]
        columns["chance"] = survey.reuse[scope].chance.layers.value
    if survey.next_layer is not None:
        # The last layer has none after it.
        columns["next layer"] = np.append(survey.next_layer.recall.layers.value, np.nan)
    if survey.similarity is not None:
        columns["cosine"] = survey.similarity.cosine.layers.value
    if survey.hit_rates is not None:
        columns |= {f"hit {name}": survey.hit_rates.layers[name].value for name in ("own", "static", "oracle")}
    if survey.cache is not None:
        columns["LRU"] = survey.cache.lru_layers[:, half - 1]
        columns["Belady"] = survey.cache.belady_layers[:, half - 1]
    rows = [
        [str(layer), *(decimal(values[i]) for values in columns.values())]
        for i, layer in enumerate(survey.contents.layer_index)
    ]
    placed = f"; hits and caches with {half} of {survey.contents.num_experts} experts" if survey.cache else ""
    return ["", f"By layer ({scope}{placed})", table(("layer", *columns), rows, left=0)]


# ---- numbers ----


def _counted(count: int, thing: str) -> str:
    return f"{count:,} {thing}{'' if count == 1 else 's'}"


def decimal(value: Any, decimals: int = 3) -> str:
    """A number with so many decimals, or a dash for what cannot be told."""
    number = float(value)
    if not math.isfinite(number):
        return "-"
    return f"{round(number, decimals) + 0.0:.{decimals}f}"  # 0.0 makes a zero of -0.0


def _interval(estimate: Estimate, where: Any = (), decimals: int = 3) -> str:
    """A value with its interval, where it has one."""
    value, low, high = (float(part[where]) for part in estimate)
    if not (math.isfinite(low) and math.isfinite(high)):
        return decimal(value, decimals)
    return f"{decimal(value, decimals)} [{decimal(low, decimals)}, {decimal(high, decimals)}]"


def _range(found: Layered, where: int | None = None) -> str:
    """Least and largest layer."""
    values = found.layers.value if where is None else found.layers.value[:, where]
    known = values[np.isfinite(values)]
    return f"{decimal(known.min())} - {decimal(known.max())}" if len(known) else "-"


def _halves(survey: Survey) -> tuple[str, str]:
    """What is compared with what."""
    return ("prefill", "decode") if survey.reference == "prefill" else ("first half", "second half")


def _spread(count: int) -> list[int]:
    """Indices from the first to the last, not too many."""
    return [round(place) for place in np.linspace(0, count - 1, min(count, _MOST_ROWS)).tolist()]


def _capacities(experts: int) -> list[int]:
    """Every number of experts where they are few, else powers of two and a few beside them."""
    if experts <= _MOST_ROWS:
        return list(range(1, experts + 1))
    return sorted({max(1, round(experts * part)) for part in (1 / 32, 1 / 16, 1 / 8, 1 / 4, 3 / 8, 1 / 2, 3 / 4)})
