"""``perfmodel trace check``: what is wrong with a trace, and mending it."""

import argparse
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from perfmodel.cli.base import add_command, load_trace, print_json, print_text, say
from perfmodel.cli.trace_output import add_output, check_output, trace_data
from perfmodel.errors import PerfModelError

if TYPE_CHECKING:
    from perfmodel.routing.defects import Finding


def add(commands: Any) -> None:
    """Add the command."""
    one = add_command(commands, "check", "look for the usual defects of recordings, and mend them on request", _check)
    one.add_argument("trace", metavar="FILE|NAME", help="trace (.npz), or the name of a bundled one")
    one.add_argument("--mend", metavar="NAME[,NAME...]", help="defects to mend; the result goes to -o")
    add_output(one, required=False)
    one.add_argument("--json", action="store_true", help="print one JSON document")


def mend_names(text: str) -> frozenset[str]:
    """The defects that ``--mend`` names; PerfModelError for a name that is none."""
    from perfmodel.routing.defects import checked_names

    try:
        return checked_names(name.strip() for name in text.split(","))
    except PerfModelError as error:
        raise PerfModelError(f"--mend: {error}") from None


def _check(options: argparse.Namespace) -> int:
    from perfmodel.routing import defects

    if (options.mend is None) != (options.out is None):
        given, other = ("-o", "--mend") if options.mend is None else ("--mend", "-o")
        raise PerfModelError(f"{given}: needs {other} too: what is mended goes to a file of its own")
    if options.overwrite and options.out is None:
        raise PerfModelError("--overwrite: needs -o, which says what is written")
    names: frozenset[str] = frozenset()
    if options.mend is None:
        trace = load_trace(options.trace)
        findings = defects.check(trace)
    else:
        names = mend_names(options.mend)
        place = check_output(options.out, overwrite=options.overwrite)
        trace, findings = defects.mend(load_trace(options.trace), names)
        trace.save(place)
    if options.json:
        rows = finding_rows(findings)
        print_json({"trace": options.trace, "out": options.out, **trace_data(trace), "findings": rows})
    else:
        print_text(findings_text(findings))
    if options.mend is not None:
        say_unneeded(names, findings)
        say(f"wrote {options.out}")
    return 0


def say_unneeded(names: Iterable[str], findings: "Iterable[Finding]") -> None:
    """Tell which defects were to be mended and are not there."""
    absent = sorted(set(names) - {one.defect for one in findings})
    if absent:
        say(f"nothing to mend: no {', '.join(absent)} found")


def finding_rows(findings: "Iterable[Finding]") -> list[dict[str, Any]]:
    """Findings as plain values."""
    return [{"defect": one.defect, "found": one.found, "mend": one.mend, "mended": one.mended} for one in findings]


def findings_text(findings: "Iterable[Finding]") -> str:
    """Findings in words, with what can be done about each."""
    lines = []
    for one in findings:
        if one.mended:
            done = f"mended: {one.mend}" if one.mend else "mended"
        elif one.mend:
            done = f"--mend {one.defect} would {one.mend}"
        else:
            done = "cannot be mended here"
        lines.append(f"{one.defect}: {one.found}\n  {done}")
    return "\n".join(lines) or "no defect found"
