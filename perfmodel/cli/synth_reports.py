"""What ``perfmodel trace synth`` says of what it generated, and how good a fit is."""

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from perfmodel.routing import RoutingTrace
    from perfmodel.routing.fitting import Fit
    from perfmodel.routing.synthetic import Skew


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
        "sequences": trace.num_sequences,
        "tokens": trace.num_tokens,
        "prefill_tokens": int(trace.prompt_len.sum()),
        "layers": trace.num_layers,
        "experts": trace.num_experts,
        "top_k": trace.top_k,
        "metadata": trace.metadata,
        "numbers": plan.numbers,
        "notes": plan.notes,
    }


def synth_text(plan: Plan, trace: "RoutingTrace") -> str:
    """What was generated, in lines."""
    prefill = int(trace.prompt_len.sum())
    lines = [
        f"SYNTHETIC routing of {plan.model}: {trace.num_sequences} sequences, {prefill:,} prefill and "
        f"{trace.num_tokens - prefill:,} decode rows, {trace.num_layers} layers, top-{trace.top_k} of "
        f"{trace.num_experts} experts",
        f"parameters: {plan.skew.parameter_source}",
    ]
    lines += [f"note: {note}" for note in plan.notes]
    lines += [f"  {one['name']}: {one['value']} ({one['kind']}: {one['source']})" for one in plan.numbers]
    if plan.fit is not None:
        lines += _fit_lines(plan.fit)
    return "\n".join(lines)


def _fit_lines(fit: "Fit") -> list[str]:
    from perfmodel.routing.fitting import TOLERANCE

    off = sum(not check.within for check in fit.checks)
    verdict = "all within" if not off else f"{off} of {len(fit.checks)} NOT within"
    width = max(len(check.name) for check in fit.checks)
    return [
        f"fitted to {len(fit.training)} sequences; {len(fit.held_out)} held-out ones beside generated ones of the same "
        f"lengths: {verdict} {TOLERANCE:g}",
        f"{'':{width}}  recorded  generated  difference  (standard error of the recorded)",
        *(
            f"{check.name:{width}}  {check.recorded:8.3f}  {check.generated:9.3f}  {check.difference:+10.3f}  "
            f"({check.error:.3f}){'' if check.within else '  outside'}"
            for check in fit.checks
        ),
    ]
