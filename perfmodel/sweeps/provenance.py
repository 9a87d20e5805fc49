"""What a sweep rests on, as attributes that every file format can hold: numbers and texts, lists as JSON."""

import contextlib
import itertools
import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from perfmodel.bitwidth import losses_for
from perfmodel.errors import PlacementError, SpecError, TraceError
from perfmodel.evaluation import QUALITY
from perfmodel.hardware import System
from perfmodel.hardware.base import SOURCE_KINDS
from perfmodel.hardware.system import PARTS
from perfmodel.policies import Policy
from perfmodel.routing import RoutingTrace
from perfmodel.scenario import Scenario
from perfmodel.scenario.axis import has_option
from perfmodel.scenario.notes import gathered, merged
from perfmodel.scenario.plans import replans
from perfmodel.scenario.tables import groups
from perfmodel.sweeps.identity import VERSIONS

if TYPE_CHECKING:
    from perfmodel.sweeps.request import Request

#: Reasons that are named for points without a plan; the others are only counted.
_REASONS = 5
#: Plans of a policy whose notes are read, and positions of a dimension among which they are looked for.
_PLANS, _ROWS = 32, 4096
#: Names that are listed where models, systems or traces are an axis.
_NAMES = 20


def attributes(request: "Request") -> dict[str, Any]:
    """What is known about a sweep before it is computed. ``complete`` is 0 until `closing_attributes` replace it."""
    inputs = {kind: _inputs(request, kind) for kind in ("model", "system", "trace")}
    own = {"complete": 0, "command": request.command(), "request": json.dumps(request.to_dict()), "key": request.key()}
    quality = {"losses": _losses(request)} if any(name in QUALITY for name in request.metrics) else {}
    return {**described(request.scenario, "sweep", request.scenario.labels, inputs), **quality, **own}


def described(scenario: Scenario, kind: str, labels: Sequence[str], inputs: Mapping[str, list[Any]]) -> dict[str, Any]:
    """Attributes of every dataset that comes from a scenario.

    Parameters
    ----------
    kind : what was asked: ``sweep``, or an answer such as ``tornado``. labels : the policies it is about.
    inputs : its models, systems and traces, by kind.
    """
    traces = [trace.metadata for trace in inputs["trace"]]
    return {
        "title": f"perfmodel {kind}",
        "kind": kind,
        **{f"{name}_version": version for name, version in VERSIONS.items()},
        "scenario": json.dumps(scenario.to_dict()),
        "hashes": json.dumps(scenario.content()),
        "model": _joined(one.name for one in inputs["model"]),
        "system": _joined(one.name for one in inputs["system"]),
        "trace": _joined(str(one.get("model", "unnamed")) for one in traces),
        "trace_source": _joined(str(one.get("source", "unknown")) for one in traces),
        "policies": json.dumps(list(labels)),
    }


def closing_attributes(request: "Request", infeasible: Mapping[str, int]) -> dict[str, Any]:
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
        "weakest_source": weakest_source(_inputs(request, "system"), request.design.axes),
    }


def _joined(names: Iterator[str]) -> str:
    distinct = list(dict.fromkeys(names))
    more = f" and {len(distinct) - _NAMES} more" if len(distinct) > _NAMES else ""
    return ", ".join(distinct[:_NAMES]) + more


def _inputs(request: "Request", kind: str) -> list[Any]:
    """The models, systems or traces of a sweep."""
    scenario = request.scenario
    if kind not in request.design.axes:
        return [scenario.file(kind, None)]
    return [scenario.file(kind, one) for one in dict.fromkeys(request.design.axes[kind].tolist())]


def _losses(request: "Request") -> str:
    """The loss tables that the quality of a sweep rests on, with what kind of source they are."""
    tables = []
    for model, losses in itertools.product(_inputs(request, "model"), _inputs(request, "loss")):
        with contextlib.suppress(TraceError):  # a table of another model, which is refused where a plan needs it
            tables.append(losses_for(losses, model))
    return _joined(f"{table.name} ({table.origin})" for table in tables)


def weakest_source(systems: Iterable[System], varied: Collection[str]) -> str:
    """Weakest kind of source among the hardware constants that are not varied."""
    kinds = [one.weakest_source(key for key in one.numeric_keys() if key not in varied) for one in systems]
    return max(kinds, key=SOURCE_KINDS.index)


def _notes(request: "Request") -> list[str]:
    """Sentences of the design, of replays and plans, and of values above what a part states.

    Plans differ from point to point: a sentence names the policies that it is true for, and where only its numbers
    differ it gives their range.
    """
    found: list[str] = [
        *request.design.notes,
        *gathered(request.scenario, _plans(request), metrics=request.metrics, flags=False),
    ]
    for trace in _inputs(request, "trace"):
        found += routing_notes(trace)
    for system in _inputs(request, "system"):
        found += merged(_flags(system, request.design.axes))
    return list(dict.fromkeys(found))


def _flags(system: System, axes: Mapping[str, NDArray[Any]]) -> Iterator[str]:
    """Sentences about harmful values, and about those above what a part states; of an axis, about the ends of them."""
    yield from (flag for flag in system.flags if flag.partition(" ")[0] not in axes)
    for name in (key for key in axes if key.partition(".")[0] in PARTS):
        try:
            highest = system.with_values({name: axes[name].max().item()})
            if name in highest.stated_peaks:
                above = axes[name][axes[name] > highest.stated_peaks[name].value]
                ends = dict.fromkeys((above.min().item(), above.max().item()) if len(above) else ())
                for one in ends:
                    flags = system.with_values({name: one}).flags
                    yield from (flag for flag in flags if flag.partition(" ")[0] == name)
            else:
                yield from (flag for flag in highest.flags if flag.partition(" ")[0] == name)
        except SpecError:
            continue  # fits only together with the values of other axes


def routing_notes(trace: RoutingTrace) -> list[str]:
    """A sentence when the routing is no recording."""
    source = trace.metadata.get("source", "unknown")
    return [] if source == "recorded" else [f"the routing is {source}, not a recording"]


def _plans(request: "Request") -> Iterator[tuple[str, dict[str, Any]]]:
    """Policies with the settings of their plans: all, or of many some that are spread evenly, ends included."""
    scenario, dims = request.scenario, request.design.dims
    for rule, label in zip(scenario.policies, scenario.labels, strict=True):
        tables = [_decisive(request, rule, _spread(dim.axes, _ROWS)) for dim in dims]
        count = math.prod(map(len, tables))
        for number in sorted(set(np.linspace(0, count - 1, min(count, _PLANS)).round().astype(np.int64).tolist())):
            place = np.unravel_index(number, tuple(map(len, tables))) if tables else ()
            rows = [table[int(i)] for table, i in zip(tables, place, strict=True)]
            yield label, {name: value for row in rows for name, value in row.items()}


def _spread(axes: Mapping[str, NDArray[Any]], most: int) -> dict[str, NDArray[Any]]:
    """Values of a dimension, of very many some that are spread evenly."""
    size = len(next(iter(axes.values())))
    chosen = np.linspace(0, size - 1, most).round().astype(np.int64) if size > most else slice(None)
    return {name: values[chosen] for name, values in axes.items()}


def _decisive(request: "Request", rule: Policy, axes: Mapping[str, NDArray[Any]]) -> list[dict[str, Any]]:
    """The distinct settings along a dimension that decide a plan of a policy."""
    mine = axes
    if "policy" in axes:
        chosen = [request.scenario.policy(label) == rule for label in axes["policy"].tolist()]
        mine = {name: values[np.array(chosen, dtype=np.bool_)] for name, values in axes.items()}
    names = [
        name
        for name in axes
        if name != "policy"
        and (request.scenario.axis(name).kind != "hardware" or replans(rule, name))
        and (not name.startswith("policy.") or has_option(rule, name.removeprefix("policy.")))
    ]
    return [row for row, _ in groups(mine, names)]
