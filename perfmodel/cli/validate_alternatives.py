"""The errors of the validation in short, documented machines apart, and what excluded rows would change in them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from perfmodel.cli.pages import Grid, Part
from perfmodel.cli.validate_measured import COLUMNS, cells, share, short

if TYPE_CHECKING:
    from perfmodel.evidence.alternatives import Alternatives
    from perfmodel.evidence.errors import Errors
    from perfmodel.evidence.validation import Validation

#: Fewest rows that a line of statistics of their own is given for.
_FEWEST = 10
_Line = tuple[str, ...]


def headline(found: Validation) -> Part:
    """Errors by what was left out of the fit, the rows of documented machines apart."""
    from perfmodel.evidence.alternatives import alternatives

    others = alternatives(found)
    return Part(
        "Predicted against measured",
        (
            "Tokens per second of decode and prefill. What counts is the first line of each: every row predicted by a"
            " fit that has not seen its source (repository), without the machines whose own benchmarks the model has."
            " Median and 90th percentile are of the absolute percentage error, bias is the median of predicted over"
            " measured, less 1. Sources alike: every source weighs the same, because one with many rows would"
            " otherwise speak for all.",
            Grid(
                ("quantity", "rows of", "fit", "weights", "count", *COLUMNS, "worst"),
                tuple(line for quantity in found.quantities for line in _of(found, others, quantity)),
                4,
            ),
            *_documented_words(others),
            "In sample, the constants were fitted to the row itself, among others. Rows that a fit sees: without those"
            " that no fitted constant changes.",
        ),
    )


def _of(found: Validation, others: Alternatives, quantity: str) -> list[_Line]:
    lines: list[_Line] = []

    def add(rows: str, fit: str, one: Errors | None, *, sources: bool = True) -> None:
        if one is None:
            return
        worst = f"{one.worst_factor:.1f}x"
        lines.append((quantity, rows, fit, "rows alike", str(one.rows), *cells(one.by_row), worst))
        if sources:
            lines.append((quantity, rows, fit, "sources alike", str(one.sources), *cells(one.by_source), ""))

    if others.documented:
        add("other machines", "source left out", others.errors(quantity, others.general))
        add("documented machines", "none", others.errors(quantity, others.documented), sources=False)
        add("the same by default profiles", "source left out", others.errors(quantity, others.defaults), sources=False)
        add("all, those by default profiles", "source left out",
            others.errors(quantity, others.general, others.defaults))  # fmt: skip
    add("all", "source left out", found.errors(quantity))
    add("all", "in sample", found.errors(quantity, "in_sample"))
    add("all", "machine left out", found.errors(quantity, "other_machines"))
    shared = found.errors_of([row for row in found.rows if row.quantity == quantity and row.fitted])
    if shared is not None and shared.rows >= _FEWEST:
        add("all that a fit sees", "source left out", shared, sources=False)
    return lines


def _documented_words(others: Alternatives) -> tuple[str, ...]:
    from perfmodel.evidence.alternatives import DEFAULTS

    if not others.documented:
        return ()
    count = len([row for row in others.documented if row.quantity == "decode"])
    named = " and ".join(f"{name} by {default}" for name, default in DEFAULTS.items())
    return (
        f"{count} of the decode rows are of two documented machines. The constants of their profiles come from hardware"
        " rows of the same sources: benchmarks of parts of the machine, and on the GH200 the compute part of the steps"
        " of these very rows. Nothing is fitted to the speeds, but a machine that you have not measured is not"
        " predicted so well. By default profiles, they are predicted like any machine of their kind"
        f" ({named}), by a fit without their source and without the rate at which the CPU was measured to read"
        f" experts{_with_read_rate(others)}.",
    )


def _with_read_rate(others: Alternatives) -> str:
    """What the rate at which the CPU reads experts would change in that."""
    without, known = others.errors("decode", others.defaults), others.errors("decode", others.defaults_read)
    if without is None or known is None:
        return ""
    return (
        f"; with that rate {share(known.by_row.within_near)} of their decode rows lie within 1.5x,"
        f" and {share(without.by_row.within_near)} without it"
    )


def excluded_part(found: Validation) -> Part | None:
    """Rows that a stated reason excludes, with their predictions, and the errors with them back."""
    from perfmodel.evidence.alternatives import alternatives
    from perfmodel.evidence.validation import WORST_FACTOR

    others = alternatives(found)
    if not others.excluded:
        return None
    rows = tuple(
        (
            row.run.id, row.quantity, row.run.source, str(row.run.engine), short(row.measured), short(row.predicted),
            f"{row.ratio:.2f}",
        )
        for row in others.excluded
    )  # fmt: skip
    reasons: dict[str, list[str]] = {}
    for row in others.excluded:
        reasons.setdefault(row.reason, []).append(row.run.id)
    lines = []
    for quantity in found.quantities:
        for name, groups in (
            ("other machines", (others.general,)),
            ("other machines, with the excluded", (others.general, others.general_excluded)),
            ("all", (others.general, others.documented)),
            ("all, with the excluded", (others.general, others.documented, others.excluded)),
        ):
            one = others.errors(quantity, *groups)
            if one is not None:
                far = sum(
                    not 1.0 / WORST_FACTOR <= row.ratio <= WORST_FACTOR
                    for group in groups
                    for row in group
                    if row.quantity == quantity
                )
                lines.append(
                    (quantity, name, str(one.rows), *cells(one.by_row), f"{one.worst_factor:.1f}x", str(far))
                )  # fmt: skip
    return Part(
        "Rows that are excluded",
        (
            "They have every field that counts, and a key that says why their rate is not the plain speed of one"
            " configuration. Predicted by the fit without their source, in tok/s:",
            Grid(("row", "of", "source", "engine", "measured", "predicted", "predicted over measured"), rows, 4),
            "\n".join(f"- {', '.join(ids)}: {reason}" for reason, ids in reasons.items()),
            "The errors with them back, rows alike; no constant is fitted to them:",
            Grid(("quantity", "rows of", "count", *COLUMNS, "worst", f"beyond {WORST_FACTOR:g}x"), tuple(lines), 2),
        ),
    )


def by_source_words(found: Validation) -> str:
    """How many rows lie within 1.5x, with rows and with sources alike."""
    from perfmodel.evidence.alternatives import alternatives

    others = alternatives(found)
    words = []
    for quantity in found.quantities:
        one = found.errors(quantity)
        text = (
            f"{share(one.by_source.within_near)} of {quantity} with sources alike,"
            f" {share(one.by_row.within_near)} with rows alike"
        )
        general = others.errors(quantity, others.general)
        if others.documented and general is not None:
            text += (
                f" (without documented machines {share(general.by_source.within_near)} and"
                f" {share(general.by_row.within_near)})"
            )
        words.append(text)
    return f"Within 1.5x lie {'; '.join(words)}: sources with few rows are met less well."
