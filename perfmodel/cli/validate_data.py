"""Everything that ``perfmodel validate`` finds, as plain values."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from perfmodel.cli.validate import finite

if TYPE_CHECKING:
    from perfmodel.cli.validate import Findings
    from perfmodel.evidence.candidates import Tried
    from perfmodel.evidence.errors import Errors
    from perfmodel.evidence.intervals import Coverage, Intervals
    from perfmodel.evidence.simulators import Comparison
    from perfmodel.evidence.validation import Row, Validation


def data(found: Findings) -> dict[str, Any]:
    """One document: ``simulators``, ``published`` and ``measured``, those that were asked for."""
    document: dict[str, Any] = {}
    if found.simulators is not None:
        document["simulators"] = dict(
            zip(("scalesim", "ramulator"), ([_compared(one) for one in rows] for rows in found.simulators), strict=True)
        )
    if found.published is not None:
        document["published"] = found.published.to_dict()
    if found.measured is not None:
        document["measured"] = _measured(found.measured, found)
    return document


def _compared(one: Comparison) -> dict[str, Any]:
    return {**one._asdict(), "error": one.error}


def _measured(one: Validation, found: Findings) -> dict[str, Any]:
    from perfmodel.evidence import cases
    from perfmodel.evidence.alternatives import alternatives
    from perfmodel.evidence.validation import REASONS

    quantities = one.quantities
    others = alternatives(one)
    groups = {
        "without_documented": (others.general,),
        "documented": (others.documented,),
        "default_profiles": (others.general, others.defaults),
        "default_profiles_read_rate": (others.general, others.defaults_read),
        "with_excluded": (others.general, others.documented, others.excluded),
        "without_documented_with_excluded": (others.general, others.general_excluded),
    }
    fetched = cases.fetched_machine(one.rows)
    question = cases.mixtral_question()
    return {
        "errors": {
            quantity: {
                "in_sample": _errors(one.errors(quantity, "in_sample")),
                "source_left_out": _errors(one.errors(quantity)),
                "machine_left_out": _errors(one.errors(quantity, "other_machines")),
                **{name: _some_errors(others.errors(quantity, *some)) for name, some in groups.items()},
            }
            for quantity in quantities
        },
        "groups": [
            {"quantity": quantity, "by": group.property, "value": group.value, **_errors(group.errors)}
            for quantity in quantities
            for group in one.groups(quantity)
        ],
        "excluded": [
            {"id": row.run.id, "quantity": row.quantity, "source": row.run.source, "measured": row.measured,
             "predicted": row.predicted, "ratio": row.ratio, "reason": row.reason}
            for row in others.excluded
        ],
        "constants": _constants(one),
        "tried": None if found.tried is None else [_tried(tried) for tried in found.tried],
        "intervals": {
            "decode": _intervals(one.intervals, one.coverage),
            "prefill": _intervals(one.prefill_intervals, one.prefill_coverage),
        },
        "far_off": [
            {"id": row.run.id, "quantity": row.quantity, "ratio": row.ratio, "reason": REASONS.get(row.run.id)}
            for row in one.far_off
        ],
        "cases": {
            "fetched": {"cells": [cell._asdict() for cell in fetched.cells], "rankings": fetched.rankings,
                        "right": fetched.right, "near": fetched.near},
            "cached": [cell._asdict() for cell in cases.cached_machine(one.rows)],
            "cost_line": [line._asdict() for line in cases.cost_line(one.rows)],
            "cached_prefill": [row._asdict() for row in cases.cached_prefill(one.rows)],
            "batch_sweep": [row._asdict() for row in cases.batch_sweep(one.rows)],
            "mixtral_question": {"batches": list(cases.BATCHES), **question._asdict(), "errors": question.errors},
            "known_failures": [
                {"kind": row.kind, "quantity": row.quantity, "why": row.why, **_errors(row.errors)}
                for row in cases.known_failures(one.rows)
            ],
        },
        "rows": [_row(row) for row in one.rows],
        "missing": {
            quantity: [{"id": run.id, "field": field} for run, field in one.missing[quantity]]
            for quantity in quantities
        },
    }  # fmt: skip


def _errors(one: Errors) -> dict[str, Any]:
    return {
        "rows": one.rows,
        "sources": one.sources,
        "by_row": one.by_row._asdict(),
        "by_source": one.by_source._asdict(),
        "worst_factor": one.worst_factor,
    }


def _some_errors(one: Errors | None) -> dict[str, Any] | None:
    return None if one is None else _errors(one)


def _constants(one: Validation) -> list[dict[str, Any]]:
    fit = one.fit
    return [
        {
            "name": constant.name,
            "unit": constant.unit,
            "start": constant.start,
            "low": constant.low,
            "high": constant.high,
            "value": fit.values[constant.name],
            "relative_standard_error": finite(fit.standard_errors[at]),
            "on_bound": bool(fit.on_bound[at]),
            "rows": int(fit.rows[at]),
            "without_source": {source: float(math.exp(logs[at])) for source, logs in one.without_source.items()},
        }
        for at, constant in enumerate(fit.constants)
    ]


def _tried(one: Tried) -> dict[str, Any]:
    return {**one._asdict(), "gains": [gain._asdict() for gain in one.gains]}


def _intervals(found: Intervals, covered: Coverage) -> dict[str, Any]:
    return {
        "classes": [one._asdict() for one in found.by_name.values()],
        "coverage": {
            name: finite(value) if isinstance(value, float) else value
            for name, value in covered._asdict().items()
            if name != "inside"
        },
    }


def _row(row: Row) -> dict[str, Any]:
    from perfmodel.evidence.described import machine_class, residency

    run = row.run
    return {
        "id": run.id,
        "quantity": row.quantity,
        "source": run.source,
        "citation": run.citation,
        "confidence": run.confidence,
        "model": run.model,
        "engine": run.engine,
        "machine": machine_class(run),
        "residency": residency(run),
        "batch": run.batch,
        "measured": row.measured,
        "predicted_in_sample": row.in_sample,
        "predicted": row.held_out,
        "ratio": row.ratio,
        "fitted": row.fitted,
    }
