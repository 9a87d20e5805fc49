"""What an answer rests on, as attributes that every file format can hold."""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from perfmodel.sweeps.identity import VERSIONS

if TYPE_CHECKING:
    from perfmodel.scenario import Scenario


def described_by(scenario: "Scenario", kind: str, labels: Sequence[str], varied: Sequence[str]) -> dict[str, Any]:
    """Attributes of an answer, by the names that sweeps use too.

    Parameters
    ----------
    kind : what was asked, such as ``tornado``. labels : the policies it is about. varied : axes that it went through.
    """
    return {
        "title": f"perfmodel {kind}",
        "kind": kind,
        **{f"{name}_version": version for name, version in VERSIONS.items()},
        "scenario": json.dumps(scenario.to_dict()),
        "hashes": json.dumps(scenario.content()),
        "model": scenario.model.name,
        "system": scenario.system.name,
        "trace": str(scenario.trace.metadata.get("model", "unnamed")),
        "trace_source": str(scenario.trace.metadata.get("source", "unknown")),
        "policies": json.dumps(list(labels)),
        "weakest_source": _weakest(scenario, varied),
        "notes": json.dumps(_notes(scenario, labels, varied)),
    }


def _weakest(scenario: "Scenario", varied: Sequence[str]) -> str:
    """Weakest kind of source among the numbers that stay as they are."""
    return scenario.system.weakest_source(key for key in scenario.system.numeric_keys() if key not in varied)


def _notes(scenario: "Scenario", labels: Sequence[str], varied: Sequence[str]) -> list[str]:
    """What was assumed, by the replay and by the plans; plans that the varied axes change speak for themselves only."""
    from perfmodel.scenario.plans import INFEASIBLE, replans

    found: list[str] = []
    for label in labels:
        try:
            run = scenario.run(label)
        except INFEASIBLE:
            continue
        same = all(scenario.axis(name).kind == "hardware" and not replans(run.policy, name) for name in varied)
        found += [*run.replay.notes, *(run.plan.notes if same else ())]
    source = scenario.trace.metadata.get("source", "unknown")
    if source != "recorded":
        found.append(f"the routing is {source}, not a recording")
    return list(dict.fromkeys([*found, *scenario.system.flags]))
