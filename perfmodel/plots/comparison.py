"""Evaluations side by side in one figure."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from perfmodel.errors import PerfModelError
from perfmodel.plots.canvas import canvas
from perfmodel.plots.drawing import beside, handles, leave_room, name_rows, stack, token_panel, too_small
from perfmodel.plots.style import BLACK, BLUE, GREEN, PAGE, RED, SKY, YELLOW, Look
from perfmodel.plots.words import caption, folded, model_name, number, plain, routing, short_policies
from perfmodel.run import Evaluation

#: More rows than this make no readable figure.
MOST_EVALUATIONS = 40

_STAGES = {
    "ttft": Look("prefill (TTFT)", GREEN, "xxxx"),
    "migration": Look("migration", BLACK),
    "decode": Look("decode", SKY),
}
_MEMORY = {
    "other_weights": Look("other weights", BLUE),
    "experts": Look("experts", SKY),
    "replicas": Look("replicas", YELLOW),
    "kv_cache": Look("KV cache", GREEN, "xxxx"),
    "buffers": Look("copy buffers", RED, "----"),
}


def comparison_figure(
    evaluations: Sequence[Evaluation],
    *,
    labels: Sequence[str] | None = None,
    gpu_capacity_bytes: Mapping[str, float] | None = None,
) -> Figure:
    """Evaluations side by side; the first is the baseline of the speed-ups.

    Panels: decode rate [tok/s], critical path of a mean token [ms], end-to-end time [s], GPU memory [GB].

    Parameters
    ----------
    evaluations : one row each, from top to bottom; 1 to 40.
    labels : names of the rows; by default the policies with the options in which they differ.
    gpu_capacity_bytes : memory of the GPU by system name [byte], to be marked; systems not named have no mark.

    Raises
    ------
    PerfModelError : no evaluation, too many to read, or another number of labels.
    """
    if not 1 <= len(evaluations) <= MOST_EVALUATIONS:
        raise PerfModelError(
            f"a comparison figure shows 1 to {MOST_EVALUATIONS} evaluations, and {len(evaluations)} were given"
        )
    if labels is not None and len(labels) != len(evaluations):
        raise PerfModelError(f"a comparison figure of {len(evaluations)} evaluations got {len(labels)} labels")
    names = _row_labels(evaluations, labels)
    lines = max(1.7, *(name.count("\n") + 1.6 for name in names)) * len(names)
    with canvas(2, 2, (PAGE, 2.6 + 2 * 0.125 * lines), sharey=True) as (figure, grid):
        rates, token, whole, memory = grid.flat
        _draw_rates(rates, evaluations)
        token_panel(token, evaluations)
        _draw_end_to_end(whole, evaluations)
        _draw_memory(memory, evaluations, gpu_capacity_bytes or {})
        for axes in grid.flat:
            name_rows(axes, names)
            if found := handles(axes):
                axes.legend(
                    list(found.values()), list(found), loc="lower left", bbox_to_anchor=(0, 1), ncols=3,
                    borderaxespad=0.2, handlelength=1.2, columnspacing=0.8,
                )  # fmt: skip
        caption(figure, *_sentences(evaluations), too_small(evaluations))
    return figure


def _row_labels(evaluations: Sequence[Evaluation], labels: Sequence[str] | None) -> list[str]:
    """Labels or short policies, with the model and the system where they differ."""
    parts = [labels if labels is not None else short_policies([e.policy for e in evaluations])]
    columns = ([model_name(e.model) for e in evaluations], [e.system for e in evaluations])
    parts += [names for names in columns if len(set(names)) > 1]
    return ["\n".join(folded(plain(text, 80), 22) for text in row) for row in zip(*parts, strict=True)]


def _draw_rates(axes: Axes, evaluations: Sequence[Evaluation]) -> None:
    rates = [e.decode_tok_per_s for e in evaluations]
    axes.barh(np.arange(len(rates)), rates, 0.62, **Look("", BLUE).options())
    for y, rate in enumerate(rates):
        beside(axes, rate, y, f"{number(rate)} ({number(rate / rates[0])}×)" if y else f"{number(rate)} (baseline)")
    leave_room(axes, max(rates), 0.5)
    axes.set_xlabel("decode rate (tok/s), × over the first")


def _draw_end_to_end(axes: Axes, evaluations: Sequence[Evaluation]) -> None:
    missing = "no prefill in the trace"
    axes.set_xlabel("end to end, mean sequence (s)")
    if all(e.ttft_s is None for e in evaluations):
        axes.set_xticks([])
        axes.text(0.5, 0.5, missing, transform=axes.transAxes, ha="center", va="center")
        return
    rows = [(0.0, 0.0, 0.0) if e.ttft_s is None else (e.ttft_s, e.migration_s, e.decode_s) for e in evaluations]
    totals = stack(axes, dict(zip(_STAGES, zip(*rows, strict=True), strict=True)), _STAGES)
    for y, (total, e) in enumerate(zip(totals, evaluations, strict=True)):
        beside(axes, total, y, missing if e.ttft_s is None else number(total))
    leave_room(axes, float(totals.max()), 0.2)


def _draw_memory(axes: Axes, evaluations: Sequence[Evaluation], capacity: Mapping[str, float]) -> None:
    memory = [e.memory_bytes["gpu"] for e in evaluations]
    uses = dict.fromkeys(use for one in memory for use in one if use != "total")
    totals = stack(axes, {use: [one.get(use, 0.0) / 1e9 for one in memory] for use in uses}, _MEMORY)
    limits = {y: capacity[e.system] / 1e9 for y, e in enumerate(evaluations) if e.system in capacity}
    highest = max(float(totals.max()), *limits.values(), 0.0)
    if limits:
        axes.plot(list(limits.values()), list(limits), "|", color=RED, ms=13, mew=1.8, label="capacity")
    for y, total in enumerate(totals):
        end = limits.get(y, 0.0)
        # A label that would run into the mark of the capacity goes behind it.
        x = end + 0.01 * highest if total <= end < total + 0.2 * highest else total
        beside(axes, x, y, number(total))
    leave_room(axes, highest, 0.2)
    axes.set_xlabel("GPU memory (GB)")


def _sentences(evaluations: Sequence[Evaluation]) -> list[str]:
    """What was compared, for the caption."""

    def among(values: Sequence[str]) -> str:
        distinct = list(dict.fromkeys(values))
        return ", ".join(distinct[:4]) + (f" and {len(distinct) - 4} more" if len(distinct) > 4 else "")

    lengths = [f"{number(e.prompt_tokens)} + {number(e.output_tokens)}" for e in evaluations]
    return [
        f"Model: {among([model_name(e.model) for e in evaluations])}.",
        f"System: {among([plain(e.system) for e in evaluations])}.",
        f"Routing: {among([routing(e.trace, e.trace_source) for e in evaluations])}.",
        f"Prompt + output: {among(lengths)} tokens, mean over sequences.",
        f"Weakest source among the hardware constants: {among([plain(e.weakest_source) for e in evaluations])}.",
    ]
