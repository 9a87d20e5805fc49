"""What an answer rests on, as attributes that every file format can hold."""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perfmodel.scenario import Scenario


def described_by(
    scenario: "Scenario", kind: str, metric: str, labels: Sequence[str], varied: Sequence[str]
) -> dict[str, Any]:
    """Attributes of an answer, by the names that sweeps use too.

    Parameters
    ----------
    kind, metric : what was asked, such as ``tornado``, and of which metric. labels : the policies it is about. varied :
        axes that it went through.
    """
    from perfmodel.sweeps.provenance import described, weakest_source

    inputs: dict[str, list[Any]] = {kind: [scenario.file(kind, None)] for kind in ("model", "system", "trace")}
    return {
        **described(scenario, kind, labels, inputs),
        "weakest_source": weakest_source([scenario.system], varied),
        "notes": json.dumps(_notes(scenario, metric, labels, varied)),
    }


def _notes(scenario: "Scenario", metric: str, labels: Sequence[str], varied: Sequence[str]) -> list[str]:
    """What was assumed, by the replay and by the plans; plans that the varied axes change speak for themselves only."""
    from perfmodel.scenario.notes import labelled, quality_notes
    from perfmodel.scenario.plans import INFEASIBLE, replans
    from perfmodel.sweeps.provenance import routing_notes

    found: dict[str, list[str]] = {}
    for label in labels:
        try:
            run = scenario.run(label)
        except INFEASIBLE:
            continue
        same = all(scenario.axis(name).kind == "hardware" and not replans(run.policy, name) for name in varied)
        found[label] = [*run.replay.notes, *(run.plan.notes if same else ()), *quality_notes(run, [metric])]
    return list(dict.fromkeys([*labelled(found), *routing_notes(scenario.trace), *scenario.system.flags]))
