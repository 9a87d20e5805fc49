"""``perfmodel specs``: list, show and validate hardware specs."""

import argparse
from typing import Any

from perfmodel.cli.base import EXIT_BAD_INPUT, add_command, one_line, print_json, print_text, say
from perfmodel.errors import PerfModelError


def add(commands: Any) -> None:
    """Add the group of commands."""
    group = commands.add_parser("specs", help="list, show and validate hardware specs")
    specs = group.add_subparsers(metavar="ACTION", required=True)
    one = add_command(specs, "list", "list the bundled specs", _list)
    one.add_argument("--json", action="store_true", help="print one JSON document")
    one = add_command(specs, "show", "show every number and choice of a spec with its source", _show)
    one.add_argument("name", metavar="NAME", help="bundled name or file")
    one.add_argument("--json", action="store_true", help="print one JSON document")
    one = add_command(specs, "validate", "check spec files", _validate)
    one.add_argument("files", nargs="+", metavar="FILE")
    one = add_command(specs, "schema", "print the JSON Schema of a kind of spec, for editors", _schema)
    one.add_argument("kind", metavar="KIND", help="gpu, link, ndp, cpu, host, engine, dram or system")


def _list(options: argparse.Namespace) -> int:
    from perfmodel import reports
    from perfmodel.hardware import list_specs

    entries = list_specs()
    if options.json:
        print_json([{"kind": e.kind, "name": e.name, "description": e.description} for e in entries])
    else:
        print_text(reports.spec_list(entries))
    return 0


def _show(options: argparse.Namespace) -> int:
    from perfmodel import reports
    from perfmodel.hardware import load_spec

    spec = load_spec(options.name)
    items, choices = spec.constants(), spec.choices()
    derived = reports.derived_rate(spec)
    if options.json:
        data = {
            "name": spec.name,
            "description": spec.description,
            "constants": [c._asdict() for c in items],
            "choices": [c._asdict() for c in choices],
            "derived": derived,
        }
        print_json(data)
    else:
        rate = "" if derived is None else f"\n\n{reports.derived_rate_line(derived)}"
        print_text(f"{spec.name}: {spec.description}\n\n{reports.constants(items, choices)}{rate}")
    return 0


def _validate(options: argparse.Namespace) -> int:
    from perfmodel.hardware import load_spec

    bad = 0
    for name in options.files:
        try:
            spec = load_spec(name)
        except PerfModelError as error:
            say(f"perfmodel: error: {one_line(error)}")
            bad += 1
        else:
            print_text(f"{name}: ok ({spec.kind} {spec.name})")
    return EXIT_BAD_INPUT if bad else 0


def _schema(options: argparse.Namespace) -> int:
    from perfmodel.hardware import json_schema

    print_json(json_schema(options.kind))
    return 0
