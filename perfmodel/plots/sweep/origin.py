"""Where the numbers of a sweep come from, in words for captions."""

import json
from collections.abc import Sequence

from perfmodel.plots.sweep.selection import Fixed, Sweep
from perfmodel.plots.words import model_name, plain, routing


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
    return " ".join([*sentences, *_workload(sweep, held), *_assumptions(sweep)])


def _described(sweep: Sweep, name: str) -> dict[str, object]:
    """One of the descriptions in the provenance; empty where there is none."""
    try:
        found = json.loads(sweep.dataset.attrs.get(name, "{}"))
    except (TypeError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _workload(sweep: Sweep, held: set[str]) -> list[str]:
    """Lengths that the sweep sets and does not vary."""
    scenario = _described(sweep, "scenario")
    lengths = [
        f"{name} {scenario[name]}"
        for name in ("prompt", "output")
        if scenario.get(name) is not None and f"workload.{name}" not in {*held, *sweep.axes}
    ]
    return [f"Tokens: {', '.join(lengths)}."] if lengths else []


def _assumptions(sweep: Sweep) -> list[str]:
    weakest = sweep.dataset.attrs.get("weakest_source")
    return [f"Weakest source among the hardware constants: {plain(weakest)}."] if weakest else []
