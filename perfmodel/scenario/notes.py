"""Notes of many plans in few sentences.

A sentence says for which policies it holds unless it holds for all, and sentences that differ in their numbers alone
are one, with the range of each number.
"""

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from perfmodel.errors import PerfModelError
from perfmodel.evaluation import QUALITY

if TYPE_CHECKING:
    from perfmodel.run import Run
    from perfmodel.scenario.scenario import Scenario

#: A number that stands alone, and is no part of a name such as cxl-2.0-x16 or mixtral-8x7b.
_NUMBER = re.compile(r"(?<![\w.-])[0-9]+(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?(?![\w]|\.[0-9])")


def merged(notes: Iterable[str]) -> list[str]:
    """Sentences, each once; of those that differ in their numbers alone, one with ranges: ``0 to 6 of 8 experts``."""
    kinds: dict[str, list[list[str]]] = {}
    for note in notes:
        kinds.setdefault(_NUMBER.sub("\0", note), []).append(_NUMBER.findall(note))
    found = []
    for kind, numbers in kinds.items():
        ranges = iter([_range(column) for column in zip(*numbers, strict=True)])
        found.append(re.sub("\0", lambda _, ranges=ranges: next(ranges), kind))  # type: ignore[misc]
    return found


def _range(numbers: Iterable[str]) -> str:
    ordered = sorted(dict.fromkeys(numbers), key=float)
    return ordered[0] if len(ordered) == 1 else f"{ordered[0]} to {ordered[-1]}"


def labelled(by_policy: Mapping[str, Iterable[str]]) -> list[str]:
    """Sentences by policy as one list: those of some policies only begin with their names."""
    holders: dict[str, list[str]] = {}
    for policy, notes in by_policy.items():
        for note in merged(notes):
            holders.setdefault(note, []).append(policy)
    return [
        note if len(policies) == len(by_policy) else f"{', '.join(policies)}: {note}"
        for note, policies in holders.items()
    ]


def quality_notes(run: "Run", metrics: Iterable[object]) -> tuple[str, ...]:
    """What the quality of a plan rests on, where one of the metrics is about it."""
    return run.quality.notes if any(name in QUALITY for name in metrics) else ()


def gathered(
    scenario: "Scenario",
    places: Iterable[tuple[str, Mapping[str, Any]]],
    metrics: Iterable[object] = (),
    *,
    flags: bool = True,
) -> list[str]:
    """What was assumed by replays and plans, and which hardware values are beyond what a part states.

    places : policies, each with the settings of one point; a point without a plan has nothing to say.
    metrics : names of what was asked; what quality rests on is said only where it was.
    flags : whether to look at the hardware values.
    """
    asked = list(metrics)
    by_policy: dict[str, list[str]] = {}
    for label, settings in places:
        try:
            run = scenario.run(label, settings)
        except PerfModelError:
            continue
        notes = by_policy.setdefault(label, [])
        flagged = run.system.flags if flags else ()
        notes += [*run.replay.notes, *run.plan.notes, *quality_notes(run, asked), *flagged]
    return labelled(by_policy)
