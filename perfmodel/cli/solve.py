"""``perfmodel solve``: the value of an axis at which a metric meets a target."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from perfmodel.cli.answers import exit_codes, finish, pair, scenario_of
from perfmodel.cli.base import EXIT_NO_ANSWER, add_command, print_json, print_text
from perfmodel.errors import NoAnswerError

if TYPE_CHECKING:
    from perfmodel.answers import Crossing, Solution
    from perfmodel.scenario import Scenario

_DEFAULT = ("context-aware",)
#: One answer: the policy, the further axis, and where the target is met, or why nowhere.
_Answer = tuple[str, dict[str, Any], "Solution | NoAnswerError"]


def add(commands: Any) -> None:
    """Add the command."""
    one = add_command(commands, "solve", "find the value of an axis at which a metric meets a target", _solve)
    one.epilog = exit_codes("some policy meets the target nowhere")
    one.add_argument("--for", required=True, dest="axis", metavar="AXIS", help="what to find, any axis of numbers")
    one.add_argument("--target", required=True, metavar="NAME=VALUE", help="such as tpot_ms=50 or tok_per_s=20")
    one.add_argument("--low", type=float, metavar="X", help="low end of the search (default: the axis' own)")
    one.add_argument("--high", type=float, metavar="X", help="high end of the search (default: the axis' own)")
    one.add_argument("--along", metavar="NAME=VALUES", help="one search for each value of a further axis")
    finish(one, f"repeatable, one answer each; by default {_DEFAULT[0]}")


def _solve(options: argparse.Namespace) -> int:
    from perfmodel.answers import solve
    from perfmodel.answers.targets import target_of
    from perfmodel.scenario.inputs import without_options

    along = None if options.along is None else pair("--along", options.along, "NAME=VALUES")
    scenario = scenario_of(options, without_options(_DEFAULT, [options.axis, *([] if along is None else along[:1])]))
    answers: list[_Answer] = []
    for label in scenario.labels:
        for settings in _settings(scenario, along):
            try:
                found: Solution | NoAnswerError = solve(
                    scenario, options.axis, options.target, policy=label, low=options.low, high=options.high,
                    settings=settings,
                )  # fmt: skip
            except NoAnswerError as error:
                found = error
            answers.append((label, settings, found))
    target = target_of(options.target)
    origin = _origin(scenario, scenario.axis(options.axis).name, target.metric.name, answers)
    if options.json:
        asked = {
            "axis": scenario.axis(options.axis).name,
            "metric": target.metric.name,
            "metric_unit": target.metric.unit,
            "target": target.value,
            "goal": target.goal,
        }
        print_json({**asked, "answers": [_data(one) for one in answers], **origin})
    else:
        print_text("\n\n".join([*map(_text, answers), "\n".join(_footer(origin))]))
    return EXIT_NO_ANSWER if any(isinstance(found, NoAnswerError) for *_, found in answers) else 0


def _settings(scenario: Scenario, along: tuple[str, str] | None) -> list[dict[str, Any]]:
    from perfmodel.answers.ranges import values_of

    if along is None:
        return [{}]
    axis = scenario.axis(along[0])
    return [{axis.name: value} for value in values_of(scenario, axis, along[1])]


def _origin(scenario: Scenario, axis: str, metric: str, answers: Sequence[_Answer]) -> dict[str, Any]:
    """What the answers rest on; the notes are those of the values that were found."""
    from perfmodel.answers.provenance import described_by
    from perfmodel.cli.answer_reports import provenance
    from perfmodel.scenario.notes import gathered
    from perfmodel.sweeps.provenance import routing_notes

    places: list[tuple[str, dict[str, Any]]] = []
    for label, settings, found in answers:
        if not isinstance(found, NoAnswerError):
            values = [int(one.value) if scenario.axis(axis).whole else one.value for one in found.crossings]
            places += [(label, {**settings, axis: value}) for value in values] or [(label, settings)]
    varied = dict.fromkeys([axis, *(name for _, settings, _ in answers for name in settings)])
    attrs = described_by(scenario, "solve", metric, scenario.labels, list(varied))
    notes = dict.fromkeys([*gathered(scenario, places, metrics=[metric]), *routing_notes(scenario.trace)])
    return provenance({**attrs, "notes": json.dumps(list(notes))})


def _footer(origin: dict[str, Any]) -> list[str]:
    from perfmodel.cli.answer_reports import footer

    return footer({**origin, "notes": json.dumps(origin["notes"])})[1:]


def _data(answer: _Answer) -> dict[str, Any]:
    """One answer for JSON; without a value it says why, and what came nearest."""
    label, settings, found = answer
    if isinstance(found, NoAnswerError):
        empty: dict[str, Any] = {"value": None, "crossings": [], "met": [], "notes": []}
        return {"policy": label, "settings": settings, **empty, "reason": str(found), **found.details}
    return {**found.to_dict(), "reason": None}


def _text(answer: _Answer) -> str:
    """One answer: where the target is met."""
    from perfmodel.cli.answer_reports import with_unit
    from perfmodel.reports import number, table

    label, settings, found = answer
    if isinstance(found, NoAnswerError):
        return str(found)
    unit = "" if found.unit == "1" else f" {found.unit}"
    at = "".join(
        f", {name}={value:.6g}" if isinstance(value, float) else f", {name}={value}" for name, value in settings.items()
    )
    parts = [f"{label}{at}: {found.metric} {found.goal} {found.target:.6g} {found.metric_unit}, by {found.axis}", ""]
    if found.crossings:
        header = (
            with_unit(found.axis, found.unit), with_unit(found.metric, found.metric_unit), "met", "crossing",
            "TTFT [s]", "migration [s]", "decode [s]", "end to end [s]",
        )  # fmt: skip
        rows = [
            [
                f"{one.value:.10g}", f"{one.reached:.6g}", one.side, _kind(one), number(one.ttft_s),
                number(one.migration_s), number(one.decode_s), number(one.end_to_end_s),
            ]
            for one in found.crossings
        ]  # fmt: skip
        parts += [table(header, rows, left=0), ""]
    ranges = ", ".join(f"{low:.6g}" if low == high else f"{low:.6g} to {high:.6g}" for low, high in found.met)
    everywhere = "everywhere: " if not found.crossings else ""
    parts.append(f"met {everywhere}at {ranges}{unit}; searched {found.low:g} to {found.high:g}{unit}")
    return "\n".join([*parts, *(f"note: {note}" for note in found.notes)])


def _kind(one: Crossing) -> str:
    """How the target is crossed; what lies beyond a step is told apart from the value itself."""
    if one.beyond is None:
        return one.kind
    there = "no plan" if one.reached_beyond is None else f"{one.reached_beyond:.6g}"
    if math.isclose(one.beyond, one.value, rel_tol=1e-9):
        return f"step, {there} just {'above' if one.beyond > one.value else 'below'}"
    return f"step, {there} at {one.beyond:.10g}"
