"""What ``perfmodel trace synth`` says of what it generated, and how good a fit is."""

import re
from typing import TYPE_CHECKING, Any, NamedTuple

from perfmodel.cli.trace_output import trace_data

if TYPE_CHECKING:
    from perfmodel.routing import RoutingTrace
    from perfmodel.routing.fitting import Fit
    from perfmodel.routing.synthetic import Skew


#: Parameters that ``--set`` takes, as generate calls them.
SETTABLE = (
    "alpha", "sequence_concentration", "decode_concentration", "phase_concentration", "stickiness", "memory_tokens",
    "next_layer", "gate_sharpness", "order_noise", "repeats",
)  # fmt: skip


class Plan(NamedTuple):
    """What to generate: shape, lengths and parameters, and what is known of them."""

    model: str
    shape: tuple[int, int, int]
    layer_index: Any
    sequences: int
    prompt: Any
    output: Any
    labels: tuple[str, ...] | None
    skew: "Skew"
    notes: list[str]
    numbers: list[dict[str, str]]
    fit: "Fit | None" = None


def fit_data(fit: "Fit") -> dict[str, Any]:
    """How good a fit is, as plain values."""
    from perfmodel.routing.fitting import TOLERANCE

    return {
        "good": fit.good,
        "tolerance": TOLERANCE,
        "training": list(fit.training),
        "held_out": list(fit.held_out),
        "checks": [
            {**check._asdict(), "difference": check.difference, "within": bool(check.within)} for check in fit.checks
        ],
    }


def synth_data(plan: Plan, trace: "RoutingTrace", out: str) -> dict[str, Any]:
    """What was generated, as plain values."""
    return {
        "out": out,
        "content_hash": trace.content_hash(),
        **trace_data(trace),
        "numbers": plan.numbers,
        "notes": plan.notes,
    }


def synth_text(plan: Plan, trace: "RoutingTrace") -> str:
    """What was generated, in lines; parameters by the names that ``--set`` takes."""
    from perfmodel.routing.defects.rows import counted

    prefill = int(trace.prompt_len.sum())
    source = re.sub(rf"\b({'|'.join(SETTABLE)})\b", lambda one: one[0].replace("_", "-"), plan.skew.parameter_source)
    lines = [
        f"SYNTHETIC routing of {plan.model}: {counted(trace.num_sequences, 'sequence')}, {prefill:,} prefill and "
        f"{trace.num_tokens - prefill:,} decode rows, {counted(trace.num_layers, 'layer')}, top-{trace.top_k} of "
        f"{trace.num_experts} experts",
        f"parameters: {source}",
    ]
    lines += [f"note: {note}" for note in plan.notes]
    lines += [f"  {one['name']}: {one['value']} ({one['kind']}: {one['source']})" for one in plan.numbers]
    if plan.fit is not None:
        lines += _fit_lines(plan.fit)
    return "\n".join(lines)


def _fit_lines(fit: "Fit") -> list[str]:
    from perfmodel.routing.defects.rows import counted
    from perfmodel.routing.fitting import TOLERANCE

    off = sum(not check.within for check in fit.checks)
    verdict = "all within" if not off else f"{off} of {len(fit.checks)} NOT within"
    width = max(len(check.name) for check in fit.checks)
    return [
        f"fitted to {counted(len(fit.training), 'sequence')}; {len(fit.held_out)} held-out ones beside generated ones "
        f"of the same lengths: {verdict} {TOLERANCE:g}",
        f"{'':{width}}  recorded  generated  difference  (standard error of the recorded)",
        *(
            f"{check.name:{width}}  {check.recorded:8.3f}  {check.generated:9.3f}  {check.difference:+10.3f}  "
            f"({check.error:.3f}){'' if check.within else '  outside'}"
            for check in fit.checks
        ),
        *_miss_lines(fit),
    ]


def _miss_lines(fit: "Fit") -> list[str]:
    misses = fit.misses
    return [] if misses is None else [f"misses of the largest LRU cache, relative to the recorded: {misses:+.1%}"]
