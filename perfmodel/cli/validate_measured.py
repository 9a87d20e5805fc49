"""Predicted against measured as a report: errors, constants, intervals, rows."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING

from perfmodel.cli.pages import Grid, Part

if TYPE_CHECKING:
    from perfmodel.evidence.candidates import Tried
    from perfmodel.evidence.errors import Statistics
    from perfmodel.evidence.intervals import Coverage, Intervals
    from perfmodel.evidence.validation import Row, Validation

#: What `cells` gives.
COLUMNS = ("median", "p90", "bias", "within 1.25x", "within 1.5x")


def share(value: float, *, sign: bool = False) -> str:
    """A share in whole percent."""
    rounded = round(100.0 * value)
    return f"{rounded:+d} %" if sign and rounded else f"{rounded:d} %"


def short(value: float) -> str:
    """Three significant digits, never an exponent."""
    if value == 0.0 or not math.isfinite(value):
        return "0" if value == 0.0 else "-"
    return f"{value:.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"


def cells(one: Statistics) -> tuple[str, ...]:
    """Statistics as cells of a table."""
    return (
        share(one.median), share(one.p90), share(one.bias, sign=True), share(one.within_close), share(one.within_near),
    )  # fmt: skip


def measured_parts(
    found: Validation,
    tried: tuple[Tried, ...] | None,
    *,
    rows: bool,
) -> list[Part]:
    """All of the validation on measured rows.

    tried : constants that were tried, if any.
    rows : whether every row is listed.
    """
    from perfmodel.cli.validate_alternatives import excluded_part, headline

    parts = [headline(found), *(_groups(found, one) for one in found.quantities), _constants(found)]
    if tried is not None:
        parts.append(_tried(tried))
    parts += [_intervals(found), _far_off(found), _missing(found)]
    excluded = excluded_part(found)
    if excluded is not None:
        parts.append(excluded)
    return [*parts, _rows(found)] if rows else parts


def _groups(found: Validation, quantity: str) -> Part:
    lines = [
        (one.property, one.value, str(one.errors.rows), str(one.errors.sources), *cells(one.errors.by_row))
        for one in found.groups(quantity)
    ]
    return Part(
        f"Errors of {quantity} by engine, machine, residency and batch",
        (
            "Every row with its source left out. Resident: all experts on the GPU; cpu: some run on the CPU; cached: a"
            " cache on the GPU, and the CPU runs what misses; fetched: some are copied to the GPU.",
            Grid(("by", "", "rows", "sources", *COLUMNS), tuple(lines), 2),
        ),
    )


def _constants(found: Validation) -> Part:
    from perfmodel.evidence.alternatives import constant_ranges
    from perfmodel.evidence.cases import DOCUMENTED, engine_class

    fit, ranges = found.fit, constant_ranges(found)
    lines = []
    for at, (one, span) in enumerate(zip(fit.constants, ranges, strict=True)):
        error = fit.standard_errors[at]
        width = share(float(error)) if math.isfinite(error) else "on its bound"
        lines.append((
            one.name, one.unit, f"{one.start:g}", short(fit.values[one.name]), width,
            f"{short(span.low)} to {short(span.high)}", f"{one.low:g} to {one.high:g}", str(int(fit.rows[at])),
        ))  # fmt: skip
    known = Counter(engine_class(row.run) == DOCUMENTED for row in found.rows if not row.fitted)
    return Part(
        "Fitted constants",
        (
            f"Shared by all engines, fitted to {found.fitted_rows} rows by robust least squares; every other constant"
            " of an engine is counted, published, measured or assumed (perfmodel specs show NAME)."
            f" {known.total()} rows depend on none of them: {known[True]} of documented machines, and"
            f" {known[False]} that other constants decide.",
            Grid(("constant", "unit", "start", "fitted", "standard error", "without one source", "allowed", "rows"),
                 tuple(lines), 2),
            "Without one source is the range over the fits that each leave out one. They rest on few sources:",
            "\n".join(
                f"- {one.name}: {one.sources} sources move it by 1 % or more; {short(one.low)} without"
                f" {one.low_without}, {short(one.high)} without {one.high_without}"
                for one in ranges
            ),
        ),
    )  # fmt: skip


def _tried(tried: tuple[Tried, ...]) -> Part:
    lines = [
        (
            one.name,
            f"{100 * one.error_now:.1f} %",
            f"{100 * one.error_start:.1f} %",
            f"{100 * one.error:.1f} %",
            f"{one.start:g}",
            "rejected" if one.rejected else "would help",
        )
        for one in tried
    ]
    body = [why for one in tried if not one.rejected for why in _why_not(one)]
    if body:
        body.append(
            "Neither kind is fitted on such ground: a gain that a few benchmarks of servers carry, whose rates contain"
            " more than decode steps (arrivals, scheduling, prompts of other requests), says little of an engine."
        )
    better = [one.name for one in tried if one.error_start < one.error_now and one.rejected]
    if better:
        body.append(
            f"At their start, {', '.join(better)} would do better than as the profiles have them, which is assumed from"
            " benchmarks of kernels and from counts. That is not taken up: choosing between two values by this error"
            " would be a fit, and a fit does no better than the start."
        )
    return Part(
        "Constants that were tried",
        (
            "Each alone on top of the fitted ones. The error is that of sources left out, half by rows and half by"
            " sources, with a row capped at a factor of 4: now, with the value that each profile has; at its start, one"
            " value for all that is known without any run; and fitted. A constant that does not lower the better of the"
            " other two by 1 % of it is rejected.",
            Grid(("constant", "error now", "at its start", "fitted", "start", ""), tuple(lines), 1),
            *body,
        ),
    )


def _why_not(one: Tried) -> list[str]:
    """Why a constant that would help is not fitted, from what it changes."""
    gains = ", ".join(f"{share(gain.part)} is of {gain.source} ({gain.rows} rows)" for gain in one.gains)
    off = ", ".join(share(error, sign=True) for error in one.question)
    worst = max(map(abs, one.question))
    verdict = "beyond" if worst > 0.25 else "still within"
    return [
        f"{one.message[0].upper()}{one.message[1:]}; its value would be {short(one.value or 0.0)}. Of what all sources"
        f" gain and lose together, {gains}. With it the vLLM profile would be off by {off} on the question of four"
        f" batches below, {verdict} the 25 % that it is held to."
    ]


def _intervals(found: Validation) -> Part:
    from perfmodel.evidence.validation import SIGNIFICANT

    pairs = (
        ("decode", found.intervals, found.coverage),
        ("prefill", found.prefill_intervals, found.prefill_coverage),
    )
    lines = [line for quantity, intervals, _ in pairs for line in _bands(quantity, intervals)]
    return Part(
        "Intervals of predictions",
        (
            "The measured value lies between the prediction times the low factor and the prediction times the high one,"
            " at the level. A prediction takes the first class that it belongs to: its engine on its machine, the kind"
            " of engine with where the experts are, the latter alone, all.",
            Grid(("quantity", "class", "low", "high", "level", "rows", "sources"), tuple(lines), 2),
            "Whether rows of a source lie in intervals that were built without it:",
            Grid(
                ("quantity", "level", "rows", "sources", "inside", "by source", "effective rows", "p effective",
                 "p rows", "p sources"),
                tuple(_covered(quantity, one) for quantity, _, one in pairs),
            ),
            "The p values are of two-sided binomial tests of the level. Rows of a source lie inside or outside"
            " together, so that the test to go by is the one on effective rows, the independent rows that they amount"
            " to; that on rows rejects too often, that on sources too rarely.",
            *(
                f"Intervals of {quantity} do not hold what they say of sources left out; compare and rank show none"
                " where that is so of the bundled runs."
                for quantity, _, one in pairs
                if one.p_effective < SIGNIFICANT
            ),
        ),
    )  # fmt: skip


def _bands(quantity: str, found: Intervals) -> list[tuple[str, ...]]:
    return [
        (quantity, one.name, f"{one.low:.2f}", f"{one.high:.2f}", share(one.level), str(one.rows), str(one.sources))
        for one in found.by_name.values()
    ]


def _covered(quantity: str, one: Coverage) -> tuple[str, ...]:
    return (
        quantity, share(one.level), str(one.rows), str(one.sources), share(one.share), share(one.share_by_source),
        f"{one.effective:.0f}", *map(_chance, (one.p_effective, one.p_rows, one.p_sources)),
    )  # fmt: skip


def _chance(value: float) -> str:
    return "below 0.01" if value < 0.005 else f"{value:.2f}"


def _far_off(found: Validation) -> Part:
    from perfmodel.evidence.validation import REASONS, WORST_FACTOR

    title = f"Rows that are off by more than {WORST_FACTOR:g}x"
    if not found.far_off:
        return Part(title, ("None.",))
    rows: dict[str, list[Row]] = {}
    for row in found.far_off:
        rows.setdefault(row.run.id, []).append(row)
    lines = []
    for name, some in rows.items():
        run = some[0].run
        rates = " and ".join(
            f"{row.quantity} measured at {short(row.measured)} and predicted as {short(row.held_out)} tok/s"
            for row in some
        )
        reason = REASONS.get(name, "No reason is known.")
        lines.append(f"- {name}, {run.engine} with {run.model} on {run.gpu}: {rates}. {reason}")
    return Part(title, ("\n".join(lines),))


def _missing(found: Validation) -> Part:
    body: list[str | Grid] = []
    for quantity in ("decode", "prefill"):
        targets = {"decode": ("decode_tok_per_s", "step_ms"), "prefill": ("prefill_tok_per_s",)}[quantity]
        runs: dict[str, list[str]] = {}
        for run, field in found.missing[quantity]:
            if any(getattr(run, key) is not None for key in targets):
                runs.setdefault(field, []).append(run.id)
        lines = tuple((field, str(len(ids)), _ids(ids)) for field, ids in sorted(runs.items()))
        none = len(found.missing[quantity]) - sum(map(len, runs.values()))
        body += [
            f"{quantity.capitalize()}: {len([row for row in found.rows if row.quantity == quantity])} rows count."
            f" {none} runs give no rate of it, and these miss a field, or name in it what is not known:",
            Grid(("first missing field", "rows", "which"), lines, 1),
        ]
    return Part(
        "Rows that do not count",
        (
            "By a rule over the fields of a row, so that none can be dropped for its error; a key excluded_because says"
            " something about the run itself.",
            *body,
        ),
    )


def _ids(ids: list[str], most: int = 12) -> str:
    return ", ".join(ids[:most]) + (f" and {len(ids) - most} more" if len(ids) > most else "")


def _rows(found: Validation) -> Part:
    return Part(
        "Every row",
        (
            "Rates in tok/s: measured, predicted in sample, and with the source left out. Fit: whether a fitted"
            " constant depends on the row.",
            Grid(
                ("row", "of", "source", "engine", "model", "machine", "batch", "fit", "measured", "in sample",
                 "left out", "off"),
                tuple(map(_row, found.rows)),
                6,
            ),
        ),
    )  # fmt: skip


def _row(row: Row) -> tuple[str, ...]:
    from perfmodel.evidence.described import machine_class

    run = row.run
    return (
        run.id, row.quantity, run.source, str(run.engine), str(run.model), machine_class(run),
        f"{run.batch or 1:g}", "yes" if row.fitted else "no", short(row.measured), short(row.in_sample),
        short(row.held_out), share(row.ratio - 1.0, sign=True),
    )  # fmt: skip
