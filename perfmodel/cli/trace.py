"""``perfmodel trace``: import, check, record, generate and describe routing traces."""

from typing import Any

from perfmodel.cli import trace_check, trace_import, trace_record, trace_stats, trace_synth


def add(commands: Any) -> None:
    """Add the group of commands."""
    group = commands.add_parser("trace", help="import, check, record, generate and describe routing traces")
    actions = group.add_subparsers(metavar="ACTION", required=True)
    for command in (trace_import, trace_check, trace_record, trace_stats, trace_synth):
        command.add(actions)
