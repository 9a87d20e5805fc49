"""``perfmodel losses``: tables of how much worse every expert gets at every bit width."""

from typing import Any

from perfmodel.cli import losses_build, losses_capture, losses_compare, losses_show


def add(commands: Any) -> None:
    """Add the group of commands."""
    group = commands.add_parser("losses", help="build, show and compare loss tables of quantised experts")
    actions = group.add_subparsers(metavar="ACTION", required=True)
    for command in (losses_capture, losses_build, losses_show, losses_compare):
        command.add(actions)
