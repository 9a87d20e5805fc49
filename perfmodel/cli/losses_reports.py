"""Loss tables and assignments of bit widths as text for people."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from perfmodel.losses.comparison import readings
from perfmodel.losses.heldout import difference_words
from perfmodel.losses.heldout import readings as held_out_readings
from perfmodel.losses.summary import FEW_ROWS, row_range
from perfmodel.reports import number, percent, table

if TYPE_CHECKING:
    from collections.abc import Iterable

    from perfmodel.losses.comparison import Comparison, Setting
    from perfmodel.losses.heldout import HeldOut
    from perfmodel.losses.summary import LossSummary

#: Heads of columns by rule; the text below the tables says what they mean.
_HEADS = {
    "uniform": "uniform",
    "random": "random",
    "prefix": "prefix",
    "optimum": "optimum",
    "floor prefix": "floor prefix",
    "floor optimum": "floor opt.",
    "model prefix": "model prefix",
    "model optimum": "model opt.",
}
#: Experts that are named one by one; all of them are in the JSON document.
_MOST_NAMED = 10


def summary_text(summary: LossSummary) -> str:
    """What `losses show` prints."""
    one, widths = summary.table, summary.widths
    few = 3  # significant digits that a mean over experts is good for
    losses = table(
        ("bits", "mean loss [MSE]", "of output variance", "fall a bit: of means", "geometric", "over RTN: geometric",
         "of means"),
        (
            [str(w.bits), number(w.mean_loss), percent(w.variance_share), _times(w.fall_of_means),
             _times(w.fall_geometric), number(w.over_rtn_geometric, few), number(w.over_rtn_of_means, few)]
            for w in widths
        ),
        left=0,
    )  # fmt: skip
    unlike = table(
        ("bits", "worst/best expert of a layer: geometric", "mean", "largest", "in layer", "layers", "CV experts",
         "CV layers"),
        (
            [str(w.bits), number(w.worst_over_best, few), number(w.worst_over_best_mean, few),
             number(w.worst_over_best_max, few), "-" if w.worst_layer is None else str(w.worst_layer),
             number(w.layers_ratio, few), number(w.cv_experts, few), number(w.cv_layers, few)]
            for w in widths
        ),
        left=0,
    )  # fmt: skip
    return "\n".join(
        [
            f"{one.name}: {one.num_layers} layers x {one.num_experts} experts at {_listed(one.bits)} bits"
            f" ({one.source})",
            *_origin(summary),
            "",
            losses,
            "",
            unlike,
            "layers: largest mean loss of a layer over the smallest. CV: standard deviation over mean.",
            "",
            *_orders(summary),
            *(f"note: {note}" for note in one.notes),
        ]
    )


def _origin(summary: LossSummary) -> list[str]:
    """How the table was made, and on how many rows."""
    # Hashes and other nested values are for programs; they are in the JSON document.
    info = {
        key: value for key, value in summary.table.info.items() if value is not None and not isinstance(value, dict)
    }
    lines = [f"made by: {', '.join(f'{_plain(key)} {_plain(value)}' for key, value in info.items())}"] if info else []
    if (rows := summary.table.n_tokens) is not None:
        found = row_range(rows)
        lines.append(f"rows an expert was measured on: {found['min']} to {found['max']}, median {found['median']:g}")
    return lines


def _orders(summary: LossSummary) -> list[str]:
    """Monotonicity, diminishing gains, and the experts to be careful with."""
    count = summary.num_experts
    lines = [f"monotone: the loss of {summary.monotone} of {count} experts never rises with bits"]
    lines += _named(
        f"layer {b.layer} expert {b.expert}: {'from 0' if b.factor is None else f'{number(b.factor)} x'}"
        f" from {b.from_bits} to {b.to_bits} bits"
        for b in summary.breakers
    )
    if summary.diminishing is not None:
        nearest = "" if summary.rtn_diminishing is None else f" (RTN {percent(summary.rtn_diminishing / count)})"
        share = percent(summary.diminishing / count)
        lines.append(f"diminishing gains: {summary.diminishing} of {count} experts, {share}{nearest}")
    if summary.scarce:
        lines.append(
            f"measured on fewer than {FEW_ROWS} rows, or on borrowed ones: {len(summary.scarce)} of {count} experts"
        )
        lines += _named(
            f"layer {s.layer} expert {s.expert}: {'-' if s.rows is None else s.rows} {'borrowed ' * s.borrowed}rows"
            for s in summary.scarce
        )
    return lines


def _named(lines: Iterable[str]) -> list[str]:
    """The first lines, indented, and how many more there are."""
    every = [f"  {line}" for line in lines]
    more = len(every) - _MOST_NAMED
    return every if more <= 0 else [*every[:_MOST_NAMED], f"  and {more} more (all with --json)"]


def comparison_text(found: Comparison) -> str:
    """What `losses compare` prints of objectives and rules."""
    parts = [
        f"{found.table} ({found.table_source}) with the routing of {found.trace} ({found.trace_source}):"
        f" {found.sequences} sequences, {found.layers} layers x {found.experts} experts",
        "",
        "Loss over the optimum of the same objective with one budget a layer",
        _comparison_table(found, "optimum loss", "optimum", "loss", "ratio"),
    ]
    if any(one.assignments["uniform"].decode_vs_uniform is not None for one in found.settings):
        parts += [
            "",
            "What the same assignments lose in the decode steps: mean loss of a pick, over that of uniform bits",
            _comparison_table(found, "uniform [MSE]", "uniform", "decode_loss", "decode_vs_uniform"),
            "hindsight: the least that any assignment can lose, chosen by the decode steps themselves.",
        ]
    return "\n".join(
        [*parts, "", *_legend(found), *(f"note: {note}" for note in found.notes), "", *_sentences(readings(found))]
    )


def _comparison_table(found: Comparison, head: str, base: str, absolute: str, relative: str) -> str:
    """A row for every setting: an absolute figure of one rule, and what the other rules are relative to it."""
    rules = [rule for rule in found.rules if rule != base]
    rows = []
    for one in found.settings:
        figures = [getattr(one.assignments[rule], relative) if rule in one.assignments else None for rule in rules]
        first = getattr(one.assignments[base], absolute)
        rows.append([*_where(one), one.objective, number(first), *map(_ratio, figures)])
        if relative == "decode_vs_uniform" and one.objective == found.objectives[-1]:
            least = {"optimum": one.hindsight, "model optimum": one.hindsight_model}
            rows.append([*_where(one), "hindsight", "", *(_ratio(least[r]) if r in least else "" for r in rules)])
    return table(("K", "bits", "objective", head, *(_HEADS[rule] for rule in rules)), rows, left=3)


def held_out_text(found: HeldOut) -> str:
    """What `losses compare` prints of text."""
    rows = [
        ["" if one.mean_bits is None else f"{one.mean_bits:g}", one.assignment, number(one.summed_loss),
         number(one.weighted_loss), percent(one.lowest_share), f"{one.nats:.3f}", difference_words(one.added),
         "-" if one.over_uniform is None else difference_words(one.over_uniform)]
        for one in found.rows
    ]  # fmt: skip
    head = (
        "bits",
        "assignment",
        "summed loss",
        "times importance",
        f"experts at {found.lowest_bits} bit{'s' * (found.lowest_bits > 1)}",
        "held-out loss [nat/token]",
        "added",
        "over uniform",
    )
    return "\n".join(
        [
            f"Held-out loss of {found.checkpoint} with all experts quantised by {found.method}, {found.tokens} tokens"
            f" of {', '.join(_plain(name) for name in found.files[:4])}{' and others' * (len(found.files) > 4)}",
            table(head, rows, left=2),
            "One importance for all text: the mean over the sequences of the trace. +-: standard error.",
            "",
            *_sentences(held_out_readings(found)),
        ]
    )


def _where(one: Setting) -> list[str]:
    return [str(one.gpu_experts), f"{one.mean_bits:g}"]


def _legend(found: Comparison) -> list[str]:
    """What the rows and columns mean."""
    first = found.bits[0]
    lines = [
        f"K: experts of a layer on the GPU, the most important ones (alpha {found.alpha:g}, norm {found.norm})."
        f" bits: mean of the others, {found.budget}.",
        "objective: plain sum of losses, or each loss times importance or expected use, or over its output variance.",
        "random, prefix: bits fall along a random order, and along importance; optimum: whatever is best.",
        "model: one budget for all layers together; its ratios are of losses summed over layers. A smaller sum need"
        " not be a better model: --checkpoint and --text try it.",
    ]
    if "floor prefix" in found.rules:
        lines.append(f"floor: no expert below {found.min_bits} bits.")
    spent = {(one.mean_bits, one.spent_bits) for one in found.settings if one.mean_bits != one.spent_bits}
    if spent:
        listed = ", ".join(f"{mean:g} as {bits:.4g}" for mean, bits in sorted(spent))
        lines.append(f"Whole increments above {first} bits spend a mean of {listed}; uniform bits are given the same.")
    if any(one.spent_bits not in found.bits for one in found.settings):
        lines.append("uniform between two widths: the linear mix of the two next to it.")
    if zero := max(one.zero_layers for one in found.settings):
        lines.append(f"Up to {zero} layers of sequences have an optimum of 0 and are left out of ratios.")
    return lines


def _sentences(lines: Iterable[str]) -> list[str]:
    return [f"{line[0].upper()}{line[1:]}." for line in lines]


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _times(factor: float | None) -> str:
    return "-" if factor is None else f"{number(factor, 3)} x"


def _plain(value: Any) -> str:
    """A value of the metadata, short and in one line."""
    if isinstance(value, list) and all(isinstance(one, int | float) for one in value):
        value = "/".join(f"{one:.4g}" for one in value)
    text = " ".join(str(value).split())
    text = text if text.isprintable() else ascii(text)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _listed(widths: Iterable[int]) -> str:
    return ", ".join(map(str, widths))
