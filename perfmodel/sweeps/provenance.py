"""What a sweep rests on, as attributes that every file format can hold: numbers and texts, lists as JSON."""

import itertools
import json
from collections.abc import Iterator, Mapping
from typing import Any

from perfmodel.errors import PlacementError, SpecError
from perfmodel.hardware import System
from perfmodel.hardware.base import SOURCE_KINDS
from perfmodel.routing import RoutingTrace
from perfmodel.run import Run
from perfmodel.scenario.axis import FILES
from perfmodel.scenario.plans import INFEASIBLE
from perfmodel.sweeps.identity import VERSIONS
from perfmodel.sweeps.request import Request

#: Reasons that are named for points without a plan; the others are only counted.
_REASONS = 5
#: Names that are listed where models, systems or traces are an axis.
_NAMES = 20


def attributes(request: Request) -> dict[str, Any]:
    """What is known about a sweep before it is computed. ``complete`` is 0 until `closing_attributes` replace it."""
    scenario = request.scenario
    traces = _inputs(request, "trace")
    return {
        "title": "perfmodel sweep",
        "kind": "sweep",
        "complete": 0,
        **{f"{name}_version": version for name, version in VERSIONS.items()},
        "command": request.command(),
        "request": json.dumps(request.to_dict()),
        "scenario": json.dumps(scenario.to_dict()),
        "key": request.key(),
        "hashes": json.dumps(scenario.content()),
        "model": _joined(one.name for one in _inputs(request, "model")),
        "system": _joined(one.name for one in _inputs(request, "system")),
        "trace": _joined(str(one.metadata.get("model", "unnamed")) for one in traces),
        "trace_source": _joined(str(one.metadata.get("source", "unknown")) for one in traces),
        "policies": json.dumps(list(scenario.labels)),
    }


def closing_attributes(request: Request, infeasible: Mapping[str, int]) -> dict[str, Any]:
    """What only the whole sweep can tell: notes, weakest source, and points without a plan.

    infeasible : number of points by reason, over all blocks.

    Raises
    ------
    PlacementError : not a single point has a plan.
    """
    reasons = sorted(infeasible.items(), key=lambda one: (-one[1], one[0]))
    count = sum(infeasible.values())
    if count == request.design.size:
        more = f" (and {len(reasons) - 1} other reasons)" if len(reasons) > 1 else ""
        raise PlacementError(f"sweep: none of its {count} points can be priced: {reasons[0][0]}{more}")
    stated = {"points": count, "of": request.design.size, "reasons": reasons[:_REASONS]}
    return {
        "complete": 1,
        "infeasible": json.dumps(stated),
        "notes": json.dumps(_notes(request)),
        "weakest_source": _weakest(request),
    }


def _joined(names: Iterator[str]) -> str:
    distinct = list(dict.fromkeys(names))
    more = f" and {len(distinct) - _NAMES} more" if len(distinct) > _NAMES else ""
    return ", ".join(distinct[:_NAMES]) + more


def _inputs(request: Request, kind: str) -> list[Any]:
    """The models, systems or traces of a sweep."""
    scenario = request.scenario
    if kind not in request.design.axes:
        return [scenario.file(kind, None)]
    return [scenario.file(kind, one) for one in dict.fromkeys(request.design.axes[kind].tolist())]


def _weakest(request: Request) -> str:
    """Weakest kind of source among the hardware constants that the sweep does not vary."""
    systems: list[System] = _inputs(request, "system")
    varied = set(request.design.axes)
    kinds = [one.weakest_source(key for key in one.numeric_keys() if key not in varied) for one in systems]
    return max(kinds, key=SOURCE_KINDS.index)


def _notes(request: Request) -> list[str]:
    """Sentences of the design, of replays and plans, and of values above what a part states.

    Plans differ from point to point; theirs are those of the first point of every policy, model, system and trace.
    """
    found: list[str] = list(request.design.notes)
    for run in _first_runs(request):
        found += [*run.replay.notes, *run.plan.notes, *run.system.flags]
    for trace in _inputs(request, "trace"):
        found += _routing_note(trace)
    for name, values in request.design.axes.items():
        if request.scenario.axis(name).kind == "hardware":
            for system in _inputs(request, "system"):
                try:
                    found += system.with_values({name: values.max().item()}).flags
                except SpecError:
                    continue  # fits only together with the values of other axes
    return list(dict.fromkeys(found))


def _routing_note(trace: RoutingTrace) -> list[str]:
    source = trace.metadata.get("source", "unknown")
    return [] if source == "recorded" else [f"the routing is {source}, not a recording"]


def _first_runs(request: Request) -> Iterator[Run]:
    """A run of every policy and of every further model, system, trace and loss table, at the first point.

    Where the first point has no plan, the last one is taken.
    """
    axes = request.design.axes
    ends = [{name: values[[end]].tolist()[0] for name, values in axes.items()} for end in (0, -1)]
    files = [{name: one} for name in FILES if name in axes for one in dict.fromkeys(axes[name].tolist())]
    for rule, file in itertools.product(request.scenario.policies, files or [{}]):
        for end in ends:
            try:
                yield request.scenario.run(rule, {**end, **file, "policy": rule})
                break
            except INFEASIBLE:
                continue
