"""Text for people: tables of reproductions, comparisons, specs and policies, with units in the headers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from perfmodel import __version__
from perfmodel.errors import SpecError

if TYPE_CHECKING:  # what a report shows was computed elsewhere, so listing specs need not load the kernels
    from perfmodel.bitwidth import LossTable
    from perfmodel.evidence.context import QualityContext
    from perfmodel.evidence.explore import Outcome
    from perfmodel.evidence.figures import Figure, Interval
    from perfmodel.evidence.reproduce import Reproduction
    from perfmodel.evidence.uncertainty import Uncertainty
    from perfmodel.hardware import Choice, Constant, Spec, SpecEntry, System
    from perfmodel.model import MoEModel
    from perfmodel.routing import RoutingTrace
    from perfmodel.run import Evaluation


#: What a placement's hit rate and each of its controls is placed by.
HIT_RATE_LABELS = {
    "own": "this placement",
    "uniform": "uniform, K of E",
    "other_sequence": "by another's prompt",
    "static": "by counts of others' decode",
    "oracle": "by its own decode",
}


def table(header: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 1) -> str:
    """Aligned columns; the first ``left`` ones to the left, the others to the right."""
    lines = [list(header), *[list(row) for row in rows]]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]

    def text(line: list[str]) -> str:
        cells = [c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True))]
        return "  ".join(cells).rstrip()

    return "\n".join([text(lines[0]), "  ".join("-" * w for w in widths), *map(text, lines[1:])])


def number(value: float | None, digits: int = 4) -> str:
    """A number with as many significant digits as a reader needs, or a dash for what is absent."""
    return "-" if value is None else f"{value:.{digits}g}"


def percent(value: float | None) -> str:
    """A share in percent with one decimal."""
    return "-" if value is None else f"{100 * value:.1f} %"


def _interval(interval: Interval, kind: str) -> str:
    return f"{interval.low:.3g}-{interval.high:.3g}" if kind == "range" else f"{interval.low:.4g}"


def _ratio(computed: Interval, figure: Figure) -> str:
    """Computed over published; for ranges that do not overlap, the ratio of the nearest ends."""
    low, high = figure.value[0], figure.value[-1]
    if computed.low > high:
        return f"x {computed.low / high:.2f}"
    if computed.high < low:
        return f"x {computed.high / low:.2f}"
    return "overlap" if figure.kind == "range" else "x 1.00"


def _figure_rows(result: Reproduction) -> list[list[str]]:
    rows = []
    for row in result.rows:
        figure = row.figure
        published = "-".join(f"{v:g}" for v in figure.value)
        unit = "tok/s" if figure.kind == "rate" else "x"
        cells = [_interval(row.columns[column], figure.kind) for column in row.columns]
        ratios = [_ratio(row.columns[column], figure) for column in row.columns]
        mark = "" if figure.mark == "printed" else "*"
        rows.append([figure.id, "fit" if figure.fit else "", unit, published + mark, *cells, *ratios])
    return rows


def _outcome_rows(outcomes: Sequence[Outcome]) -> list[list[str]]:
    return [
        [
            o.name,
            " / ".join(f"{rate:.2f}" for rate in o.hit_rate.values()),
            percent(o.evidence_geomean_error),
            percent(o.geomean_error),
        ]
        for o in outcomes
    ]


def reproduction(result: Reproduction) -> str:
    """The whole reproduction as text: figures, constants, hit rates, readings and baselines."""
    metadata = result.trace.metadata
    systems = ", ".join(f"{name}: {result.systems[name].name}" for name in result.systems)
    header = ("figure", "", "unit", "published", *result.systems, "ds/pub", "ev/pub", "cal/pub")
    parts = [
        "Published figures of arXiv 2512.04476 and what this model makes of them",
        f"routing: {metadata.get('model')} ({metadata.get('source')}), {result.trace.num_sequences} sequences;"
        f" columns on {systems}",
        "",
        table(header, _figure_rows(result)),
        "",
        "* read from a summary of the paper's figures; the others are printed in its text. Batch 1 is inferred.",
        "A row's error is |ln(computed / published)|, and 0 where two ranges overlap.",
        f"geometric-mean error over the {len(result.fit_errors)} rows marked fit: evidence (no constant fitted)"
        f" {percent(result.evidence_geomean_error)}, calibrated {percent(result.geomean_error)},"
        f" leave-one-out {percent(result.fit.leave_one_out_geomean_error)};"
        f" largest calibrated error a factor of {math.exp(max(result.fit_errors)):.2f}",
        "",
        "Fitted constants (all others are measured, derived or assumed elsewhere; see --json for every one)",
        table(
            ("constant", "unit", "evidence", "fitted"),
            ([f["name"], f["unit"], number(f["evidence"]), number(f["value"])] for f in result.fitted()),
        ),
        "",
        *(f"flagged: {flag}" for flag in result.systems["calibrated"].flags),
        "",
        "Placement hit rate in decode, beside its controls",
        table(
            ("model", "own prefill", "uniform", "other prefill", "static", "oracle"),
            ([model, *(number(rate, 3) for rate in rates)] for model, rates in result.hit_rates.items()),
        ),
    ]
    parts += [
        "",
        "Near-data time at full precision over near-data time at few bits (published: about 5 and 8)",
        table(
            ("", *result.ndp_reduction),
            (
                [name, *(f"{values[name]:.2f} x" for values in result.ndp_reduction.values())]
                for name in next(iter(result.ndp_reduction.values()))
            ),
        ),
    ]
    parts += ["", _quality_context(result.quality)]
    if result.readings:
        parts += [
            "",
            "How the error moves with readings, with the hit rate (8x7B / 8x22B) and with other evidence",
            table(
                ("reading, trace or machine", "hit rate", "evidence", "refitted"),
                _outcome_rows((*result.readings, *result.traces, *result.machines)),
            ),
        ]
    if result.own_best:
        parts += [
            "",
            "Each baseline at its own best reading, calibrated machine, K experts a layer on the GPU on both sides",
            table(
                ("model", "best reading", "K", "tok/s", "as published", "3-bit gain", "2-bit gain"),
                (
                    [b.model, b.reading, str(b.gpu_experts), number(b.tok_per_s), number(b.default_tok_per_s)]
                    + [f"{b.gains[bits]:.2f} x" for bits in ("3-bit", "2-bit")]
                    for b in result.own_best
                ),
                left=2,
            ),
        ]
    parts += ["", carrying_line(result)]
    return "\n".join(parts)


def _quality_context(context: QualityContext) -> str:
    """Losses with the published accuracies beside them, and what neither says."""
    mark = "" if context.mark == "printed" else "*"
    rows = []
    for row in context.rows:
        computed = [number(row.quant_loss), number(row.quant_loss_vs_uniform), percent(row.quant_noise)]
        rows.append([row.name, *computed, "|", f"{row.published_accuracy_percent:.2f} %{mark}"])
    header = ("context-aware", "loss a pick [MSE]", "over uniform", "noise", "|", "published accuracy")
    title = "Quality (context): expected quantisation loss of the decode picks"
    return "\n".join([title, table(header, rows), context.sentence])


def carrying_line(result: Reproduction) -> str:
    """The assumptions that carry the result, in one line."""
    return (
        "Carried by: batch 1; MoNDE copies one full-precision expert a layer and step over a link of about 60 GB/s"
        " (twice PCIe 4 x16); HOBBIT copies 67/30/3 % of picks without a cache; arrays speed up as 16/bits;"
        f" routing of {result.trace.metadata.get('model')}."
    )


#: Rows of a comparison: label, unit, and how to read the value. A step of several tokens is called a step.
_METRICS: tuple[tuple[str, str, str, float], ...] = (
    ("time to first token", "s", "ttft_s", 1.0),
    ("one-time migration", "s", "migration_s", 1.0),
    ("time per {output}, mean", "ms", "tpot_mean_s", 1e3),
    ("  P50", "ms", "tpot_p50_s", 1e3),
    ("  P95", "ms", "tpot_p95_s", 1e3),
    ("  P99", "ms", "tpot_p99_s", 1e3),
    ("decode rate", "tok/s", "decode_tok_per_s", 1.0),
    ("end to end", "s", "end_to_end_s", 1.0),
    ("near-data side, busy a {step}", "ms", "ndp_side_s", 1e3),
    ("bandwidth floor a {step}", "ms", "bandwidth_floor_s", 1e3),
)


#: The same of the quality.
_QUALITY: tuple[tuple[str, str, str, float], ...] = (
    ("quantisation loss, mean of decode picks", "MSE", "quant_loss", 1.0),
    ("  over that of uniform bits", "x", "quant_loss_vs_uniform", 1.0),
    ("  noise: loss over the output's variance", "%", "quant_noise", 100.0),
)


def _scaled(value: float | None, scale: float) -> str:
    return number(None if value is None else value * scale)


def speedups(evaluations: Sequence[Evaluation]) -> list[dict[str, float | str | None]]:
    """Speed-up of every policy over the first one, in decode and end to end."""
    base = evaluations[0]
    result: list[dict[str, float | str | None]] = []
    for one in evaluations:
        whole = base.end_to_end_s / one.end_to_end_s if base.end_to_end_s and one.end_to_end_s else None
        first = base.ttft_s / one.ttft_s if base.ttft_s and one.ttft_s else None
        result.append(
            {
                "policy": one.policy,
                "decode": base.tpot_mean_s / one.tpot_mean_s,
                "time_to_first_token": first,
                "end_to_end": whole,
            }
        )
    return result


def comparison_data(
    evaluations: Sequence[Evaluation],
    model: MoEModel,
    system: System,
    trace: RoutingTrace,
    losses: LossTable,
    differences: Sequence[float] | None,
    uncertainties: Sequence[Uncertainty],
) -> dict[str, Any]:
    """A comparison as plain values, with what it was made from.

    losses : the table that the quality rests on. differences : largest relative difference of each policy from the
        per-pick loop, where it was checked [1]. uncertainties : of every policy.
    """
    data: dict[str, Any] = {
        "perfmodel": __version__,
        "model": model.name,
        "system": system.name,
        "system_hash": system.content_hash(),
        "trace": trace.metadata.get("model"),
        "trace_source": trace.metadata.get("source"),
        "trace_hash": trace.content_hash(),
        "losses": {
            "name": losses.name,
            "source": losses.source,
            "model": losses.measured_model,
            "hash": losses.content_hash(),
        },
        "baseline": evaluations[0].policy,
        "speedups": speedups(evaluations),
        "engine": None if system.engine is None else system.engine.name,
        "evaluations": [
            {**one.to_dict(), "interval": known.to_dict(one)}
            for one, known in zip(evaluations, uncertainties, strict=True)
        ],
    }
    if differences is not None:
        data["check"] = list(differences)
    return data


def intervals(
    names: Sequence[str],
    evaluations: Sequence[Evaluation],
    uncertainties: Sequence[Uncertainty],
    *,
    ends: bool = True,
) -> list[str]:
    """Where measurements of the decode rate are to be expected, a sentence for every class of predictions.

    ends : with both ends for every policy, and not as factors on what is predicted.
    """
    groups: dict[tuple[object, ...], list[int]] = {}
    for i, one in enumerate(uncertainties):
        groups.setdefault((one.reason, one.decode), []).append(i)
    sentences = []
    for members in groups.values():
        known = [uncertainties[i] for i in members]
        bands = [one.rate(evaluations[i]) if ends else None for i, one in zip(members, known, strict=True)]
        texts = [
            names[i] if band is None else f"{names[i]} {spread(band)}" for i, band in zip(members, bands, strict=True)
        ]
        sentences.append(_interval_sentence(texts, known, ends))
    return sentences


def spread(band: tuple[float, float]) -> str:
    """Both ends of an interval, with three digits, or without decimals."""
    return "-".join(f"{end:.0f}" if 1000 <= end < 1e6 else number(end, 3) for end in band)


def _interval_sentence(members: Sequence[str], known: Sequence[Uncertainty], ends: bool) -> str:
    one, first = known[0].decode, known[0]
    if one is None:
        return f"no interval for {', '.join(members)}: {first.reason}"
    rows = f"{one.rows} measured runs of {one.sources} source{'s' if one.sources > 1 else ''}"
    alike = {each.residency: each.alike for each in known}
    parts = (f"{count}{'' if i else ' of them'} {where}" for i, (where, count) in enumerate(alike.items()))
    rows += f", experts in {', in '.join(parts)}"
    what = f"no engine: {rows}" if first.engine is None else f"engine {first.engine}, class {one.name}: {rows}"
    factor = "" if ends else f"{spread((one.low, one.high))} times the predicted one for "
    return f"{100 * one.level:g} % interval of a measured tok/s: {factor}{', '.join(members)} ({what})"


def comparison(
    evaluations: Sequence[Evaluation], differences: Sequence[float] | None, uncertainties: Sequence[Uncertainty]
) -> str:
    """Policies side by side, the first one being the baseline of the speed-ups."""
    first = evaluations[0]
    names = [f"[{i + 1}]" for i in range(len(evaluations))]

    def scaled(metrics: Iterable[tuple[str, str, str, float]]) -> list[list[str]]:
        return [[label, unit, *(_scaled(getattr(e, key), by) for e in evaluations)] for label, unit, key, by in metrics]

    words = {"output": "output token", "step": "token"} if first.batch == 1 else {"output": "step", "step": "step"}
    rows = scaled((label.format(**words), unit, key, by) for label, unit, key, by in _METRICS)
    gains = speedups(evaluations)
    for key, label in (
        ("decode", "decode speed-up over [1]"),
        ("end_to_end", "end-to-end speed-up over [1]"),
    ):
        values = [gain[key] for gain in gains]
        rows.append([label, "x", *(number(v) if isinstance(v, float) else "-" for v in values)])
    rows += scaled(_QUALITY)
    rows.append(["", "", *("" for _ in evaluations)])
    rows += [
        [f"on the critical path: {part}", "ms", *(_scaled(e.breakdown_s[part], 1e3) for e in evaluations)]
        for part in first.breakdown_s
    ]
    for tier in first.bytes_per_token:
        rows.append([f"bytes a token: {tier}", "MB", *(_scaled(e.bytes_per_token[tier], 1e-6) for e in evaluations)])
    for device in first.memory_bytes:
        sizes = [e.memory_bytes.get(device, {}).get("total") for e in evaluations]
        rows.append([f"memory: {device}", "GB", *(_scaled(size, 1e-9) for size in sizes)])
    rows.append(["binding resource", "", *(e.binding_resource for e in evaluations)])
    cosines = [e.prefill_decode_cosine for e in evaluations]
    if any(cosines):
        means = [number(sum(c) / len(c), 3) if c else "-" for c in cosines]
        rows.append(["prefill-decode cosine, mean of layers", "", *means])
    rates = [e.hit_rate for e in evaluations]
    for key, label in HIT_RATE_LABELS.items():
        shares: list[float | None] = [getattr(rate, key) for rate in rates]
        if any(share is not None for share in shares):
            rows.append([f"hit rate: {label}", "", *("-" if share is None else number(share, 3) for share in shares)])
    if differences is not None:
        rows.append(["largest difference from the per-pick loop", "1", *(f"{d:.0e}" for d in differences)])
    notes = list(dict.fromkeys(note for e in evaluations for note in e.notes))
    return "\n".join(
        [
            f"{first.model} on {first.system}; routing of {first.trace} ({first.trace_source});"
            f" mean prompt {first.prompt_tokens:g}, output {first.output_tokens:g} tokens, {first.batch_text}",
            *(f"{name} {e.policy}" for name, e in zip(names, evaluations, strict=True)),
            "",
            table(("", "unit", *names), rows, left=2),
            "",
            *(f"- {line}" for line in intervals(names, evaluations, uncertainties)),
            *(f"- {note}" for note in notes),
            f"- weakest source among the hardware constants: {first.weakest_source}",
        ]
    )


def policies() -> str:
    """Every policy with its options."""
    from perfmodel.policies import ABLATIONS, POLICIES

    parts = []
    for kind in POLICIES.values():
        rows = [
            [f"  {o.name}", "auto" if o.default is None else str(o.default), o.allowed, o.meaning]
            for o in kind.options()
        ]
        parts.append(f"{kind.name}: {kind.summary} ({kind.source})")
        parts.append(table(("  option", "default", "allowed", "meaning"), rows, left=4))
        parts.append("")
    ablations = "; ".join(f"{name}: {options}" for name, options in ABLATIONS.items())
    parts.append(f"Ablations of context-aware: {ablations}")
    parts.append("Use as NAME or NAME:key=value,key=value, for example context-aware:mean_bits=2,gpu_experts=4")
    return "\n".join(parts)


def policies_data() -> list[dict[str, Any]]:
    """The same as plain values."""
    from perfmodel.policies import POLICIES

    return [
        {
            "name": kind.name,
            "summary": kind.summary,
            "source": kind.source,
            "needs_ndp": kind.needs_ndp,
            "options": [o._asdict() for o in kind.options()],
        }
        for kind in POLICIES.values()
    ]


def spec_list(entries: Sequence[SpecEntry]) -> str:
    """Bundled specs by kind."""
    return table(("kind", "name", "description"), ([e.kind, e.name, e.description] for e in entries), left=3)


def constants(items: Sequence[Constant], choices: Sequence[Choice] = ()) -> str:
    """Every number of a spec with its source, then its words; the citations follow, numbered, as many share one."""
    cited = [*(c.citation for c in items), *(c.citation for c in choices if c.citation)]
    citations = {citation: i + 1 for i, citation in enumerate(dict.fromkeys(cited))}
    rows = ([c.key, number(c.value, 6), c.unit, c.source, f"[{citations[c.citation]}]"] for c in items)
    parts = [table(("key", "value", "unit", "source", ""), rows)]
    if choices:
        words = ([c.key, c.value, c.source, f"[{citations[c.citation]}]" if c.citation else ""] for c in choices)
        parts.append(table(("choice", "value", "source", ""), words, left=2))
    parts.append("\n".join(f"[{i}] {citation}" for citation, i in citations.items()))
    return "\n\n".join(parts)


def derived_rate(spec: Spec | System) -> dict[str, Any] | None:
    """DRAM rate of a near-data device whose efficiency follows from timings and mapping; None for other specs.

    Holds ``dram_efficiency`` [1] and ``effective_dram_bandwidth_gb_per_s`` [GB/s], or ``problem`` where no rate
    is known for the combination.
    """
    from perfmodel.hardware import NdpSpec

    ndp = getattr(spec, "ndp", spec)
    if not isinstance(ndp, NdpSpec) or ndp.dram is None:
        return None
    from perfmodel.point import dram_efficiency

    origin = {"dram": ndp.dram.name, "mapping": ndp.mapping}
    try:
        share = dram_efficiency(ndp)
    except SpecError as error:
        return {**origin, "problem": str(error)}
    rate = share * ndp.dram_bandwidth_gb_per_s
    return {**origin, "dram_efficiency": share, "effective_dram_bandwidth_gb_per_s": rate}


def derived_rate_line(rate: dict[str, Any]) -> str:
    """What `derived_rate` found, in one line."""
    origin = f"{rate['dram']} and mapping {rate['mapping']}"
    if "problem" in rate:
        return f"no DRAM rate follows from {origin}: {rate['problem']}"
    return (
        f"derived from {origin}: dram_efficiency {number(rate['dram_efficiency'])},"
        f" effective DRAM rate {number(rate['effective_dram_bandwidth_gb_per_s'])} GB/s"
    )
