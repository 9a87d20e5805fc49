"""Assignments of bit widths compared, and tried on text, as text for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

from perfmodel.losses.comparison import readings
from perfmodel.losses.heldout import assignment_words, error_words, nats_words
from perfmodel.losses.heldout import readings as held_out_readings
from perfmodel.losses.rules import RANDOM_ORDERS, RULES, UNIFORM, rule_words
from perfmodel.reports import number, percent, table
from perfmodel.routing.npz import one_line

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from perfmodel.losses.comparison import Comparison, Setting
    from perfmodel.losses.heldout import Difference, HeldOut, Prediction

#: The row of what no rule can know.
_HINDSIGHT = "(hindsight)"


def comparison_text(found: Comparison) -> str:
    """What `losses compare` prints of objectives and rules."""
    parts = [
        f"{found.table} ({found.table_source}) with the routing of {found.trace} ({found.trace_source}):"
        f" {found.sequences} sequences, {found.layers} layers x {found.experts} experts",
        "",
        *_legend(found),
        "",
        "Loss over the optimum of the same objective with one budget a layer",
        _comparison_table(found, "optimum (sum)", "optimum", "loss", "ratio"),
    ]
    if _has_decode(found):
        parts += [
            "",
            "What the same assignments lose in the decode steps: mean loss of a pick, over that of uniform bits",
            _comparison_table(found, "uniform [MSE]", "uniform", "decode_loss", "decode_vs_uniform"),
        ]
    notes = [f"note: {note}" for note in found.notes]
    return "\n".join([*parts, "", *notes, *([""] if notes else []), *sentences(readings(found))])


def _has_decode(found: Comparison) -> bool:
    return any(one.assignments["uniform"].decode_vs_uniform is not None for one in found.settings)


def _comparison_table(found: Comparison, head: str, base: str, absolute: str, relative: str) -> str:
    """A row for every setting: an absolute figure of one rule, and what the other rules are relative to it."""
    rules = [rule for rule in found.rules if rule != base]
    rows = []
    for one in found.settings:
        figures = [getattr(one.assignments[rule], relative) if rule in one.assignments else None for rule in rules]
        first = getattr(one.assignments[base], absolute)
        cells = _starred(rules, figures, below=base == UNIFORM, exists=one.uniform_exists)
        rows.append([*_where(one), one.objective, number(first), *cells])
        if relative == "decode_vs_uniform" and one.objective == found.objectives[-1]:
            least = {"optimum": one.hindsight, "model optimum": one.hindsight_model}
            rows.append([*_where(one), _HINDSIGHT, "", *(f"{_ratio(least[r])} " if r in least else "" for r in rules)])
    return table(("K", "bits", "objective", head, *(f"{rule_words(rule)} " for rule in rules)), rows, left=3)


def _starred(rules: Sequence[str], figures: Sequence[float | None], *, below: bool, exists: bool) -> list[str]:
    """Figures with a star at the least of those with one budget a layer, and of those with one for the model.

    below : whether only a figure below 1 can have one
    exists : whether a layer can have uniform bits, or the mix that they stand for; else they are neither the least of a
        row nor a bound for it
    """
    cells = [_ratio(value) for value in figures]
    stars = [" "] * len(cells)
    for scope in ("layer", "model"):
        places = [i for i, rule in enumerate(rules) if (RULES[rule].scope if rule in RULES else "layer") == scope]
        places = [i for i in places if exists or rules[i] != UNIFORM]
        known = {cells[i] for i in places if figures[i] is not None}
        least = min(known, key=float, default="-")
        if len(known) > 1 and not (below and exists and float(least) >= 1):
            for i in places:
                stars[i] = "*" if cells[i] == least else " "
    return [cell + star for cell, star in zip(cells, stars, strict=True)]


def _where(one: Setting) -> list[str]:
    return [str(one.gpu_experts), f"{one.mean_bits:g}"]


def _legend(found: Comparison) -> list[str]:
    """What the rows and columns mean."""
    first = found.bits[0]
    lines = [
        f"K: experts of a layer on the GPU, the most important ones (alpha {found.alpha:g}, norm {found.norm})."
        f" bits: mean of the others, {found.budget}.",
        "objective: plain sum of losses, or each loss times importance or expected use, or over its output variance.",
        f"random: bits fall along a random order ({RANDOM_ORDERS} of them, seed {found.seed}); prefix: along"
        " importance; optimum: least sum in any order.",
        "model: one budget for all layers together; its ratios are of losses summed over layers.",
    ]
    if "floor prefix" in found.rules:
        same = any("floor prefix" not in one.assignments for one in found.settings)
        lines.append(f"floor: no expert below {found.min_bits} bits{'; - where that leaves nothing to choose' * same}.")
    lines.append("*: least of its row with one budget a layer, and with one for the model, unless uniform bits are.")
    if _has_decode(found):
        lines.append(
            f"{_HINDSIGHT} is no objective: the least that any assignment can lose, chosen by the decode itself."
        )
    lines.append("A smaller sum of losses need not be a better model: --checkpoint and --text try it.")
    spent = {(one.mean_bits, one.spent_bits) for one in found.settings if one.mean_bits != one.spent_bits}
    if spent:
        listed = ", ".join(f"{mean:g} as {bits:.4g}" for mean, bits in sorted(spent))
        lines.append(
            f"Whole increments above {_bits(first)} spend a mean of {listed}; uniform bits are given the same."
        )
    if any(one.spent_bits not in found.bits for one in found.settings):
        nowhere = any(not one.uniform_exists for one in found.settings)
        lines.append(
            "uniform between two widths: the linear mix of the two next to it"
            f"{', which not every number of near-data experts allows; it has no star there' * nowhere}."
        )
    if zero := max(one.zero_layers for one in found.settings):
        lines.append(f"Up to {zero} layers of sequences have an optimum of 0 and are left out of ratios.")
    return lines


def held_out_text(found: HeldOut) -> str:
    """What `losses compare` prints of text."""
    head = (
        "K",
        "bits",
        "assignment",
        "summed loss",
        "times importance",
        f"at {_bits(found.lowest_bits)}",
        "held-out loss [nat/token]",
        "added",
        "+-",
        "over uniform",
        "+-",
    )
    files = ", ".join(repr(one_line(name)) for name in found.files[:4])
    rest = f"; K = {', '.join(map(str, found.not_tried))} not tried (--gpu-experts)" if found.not_tried else ""
    return "\n".join(
        [
            f"Held-out loss of {found.checkpoint!r} with experts quantised by {found.quantised.words};"
            f" {found.tokens} tokens of {files}{' and others' * (len(found.files) > 4)}",
            f"{_kept(found.gpu_experts)}{rest}. One importance for all text: the mean over the sequences of the trace.",
            "at: share of the quantised experts at the lowest width. +-: standard error from parts of the text, - where"
            " there are fewer than 5. random: the first of the random orders.",
            "",
            table(head, [_held_out_row(one) for one in found.rows if one.same_as is None], left=3),
            *_same(found),
            *(f"note: {note}" for note in found.notes),
            "",
            *sentences(held_out_readings(found)),
        ]
    )


def _kept(counts: Sequence[int]) -> str:
    """How many experts are not quantised."""
    if tuple(counts) == (0,):
        return "K = 0: no expert on the GPU, all quantised"
    return f"K = {', '.join(map(str, counts))}: the K most important experts of a layer at the stored precision"


def _held_out_row(one: Prediction) -> list[str]:
    return [
        "" if one.gpu_experts is None else str(one.gpu_experts),
        "" if one.mean_bits is None else f"{one.mean_bits:g}",
        assignment_words(one.assignment),
        number(one.summed_loss),
        number(one.weighted_loss),
        percent(one.lowest_share),
        f"{one.nats:.3f}",
        *_apart(one.added),
        *_apart(one.over_uniform),
    ]


def _apart(found: Difference | None) -> tuple[str, str]:
    """A difference and its error in two cells; dashes for what is absent, or compared with itself."""
    if found is None or (found.nats == 0 and found.error is None):
        return "-", "-"
    return nats_words(found.nats), error_words(found)


def _same(found: HeldOut) -> list[str]:
    """Assignments that are equal to one in the table, and not shown there."""
    groups: dict[tuple[int | None, str], list[str]] = {}
    for one in found.rows:
        if one.same_as is not None:
            asked = f" at {one.mean_bits:g}" if one.mean_bits != one.same_mean else ""
            same = f"{assignment_words(one.same_as)} at {_bits(one.same_mean or 0)}"
            groups.setdefault((one.gpu_experts, same), []).append(f"{assignment_words(one.assignment)}{asked}")
    return [
        f"the same as {same}{f' (K = {count})' * (len(found.gpu_experts) > 1)}: {'; '.join(names)}"
        for (count, same), names in groups.items()
    ]


def sentences(lines: Iterable[str]) -> list[str]:
    """Lines that begin with a capital letter and end in a full stop."""
    return [f"{line[0].upper()}{line[1:]}." for line in lines]


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _bits(width: float) -> str:
    return f"{width:g} bit{'s' * (width != 1)}"
