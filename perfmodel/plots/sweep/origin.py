"""Where the numbers of a sweep come from, in words for captions."""

import json
import re
from collections.abc import Sequence

import numpy as np

from perfmodel.plots.sweep.axes import Fixed
from perfmodel.plots.sweep.selection import Sweep
from perfmodel.plots.words import model_name, plain, routing

#: Notes of a replay that belong to the workload: what was cycled, cut, or not recorded.
_REPLAY = re.compile(r"(prompts|outputs) set to|model layers|\d+ of \d+ sequences have no recorded prompt")


def origin_words(sweep: Sweep, fixed: Sequence[Fixed] = ()) -> str:
    """Sentences about model, system, routing and workload, about assumptions, and about points without a plan.

    Where a model, system or trace is an axis that is held at one value, that one is named.
    """
    stated = {name: str(sweep.dataset.attrs.get(name, "")) for name in ("model", "system", "trace", "trace_source")}
    held = {one.axis.name for one in fixed}
    sentences = [
        f"{name.capitalize()}: {', '.join(map(show, stated[name].split(', ')))}."
        for name, show in (("model", model_name), ("system", plain))
        if stated[name] and name not in held
    ]
    if stated["trace"] and "trace" not in held:
        sentences.append(f"Routing: {routing(stated['trace'], stated['trace_source'])}.")
    losses = sweep.dataset.attrs.get("losses")  # of sweeps that ask for quality
    if losses and "loss" not in held:
        sentences.append(f"Losses: {plain(losses, 160)}.")
    return " ".join([*sentences, *_workload(sweep, held), *_assumptions(sweep)])


def _described(sweep: Sweep, name: str, empty: str = "{}") -> object:
    """One of the descriptions in the provenance; empty where there is none."""
    try:
        return json.loads(sweep.dataset.attrs.get(name, empty))
    except (TypeError, ValueError):
        return json.loads(empty)


def _workload(sweep: Sweep, held: set[str]) -> list[str]:
    """Lengths that the sweep does not vary, set or as recorded, and what was done to the recording for them."""
    described = _described(sweep, "scenario")
    if not isinstance(described, dict) or not described:
        return []
    lengths = {one: described.get(one) for one in ("prompt", "output") if f"workload.{one}" not in {*held, *sweep.axes}}
    given = [f"{one} {tokens}" for one, tokens in lengths.items() if tokens is not None]
    recorded = [one for one, tokens in lengths.items() if tokens is None]
    parts = [f"{', '.join(given)} tokens"] if given else []
    if recorded:
        means = _means(sweep)
        mean = f": mean {' and '.join(f'{means[one]:.0f}' for one in recorded)} tokens" if means else ""
        parts.append(f"{' and '.join(recorded)} as recorded{mean}")
    notes = _described(sweep, "notes", "[]")
    said = [str(one) for one in notes if _REPLAY.match(str(one))] if isinstance(notes, list) else []
    sentences = [f"Workload: {'; '.join(parts)}."] if parts else []
    return sentences + [f"{plain(one[:1].upper() + one[1:], 160)}." for one in said]


def _means(sweep: Sweep) -> dict[str, float]:
    """Mean recorded lengths; empty where the recording is varied or gone."""
    if sweep.scenario is None or "trace" in sweep.dataset.coords:
        return {}
    trace = sweep.scenario.trace
    lengths = {"prompt": trace.prompt_len, "output": trace.sequence_lengths - trace.prompt_len}
    return {name: float(np.mean(tokens)) for name, tokens in lengths.items()}


def _assumptions(sweep: Sweep) -> list[str]:
    weakest = sweep.dataset.attrs.get("weakest_source")
    return [f"Weakest source among the hardware constants: {plain(weakest)}."] if weakest else []
