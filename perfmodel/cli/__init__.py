"""The command line. Every module below holds related commands; `main` puts them together.

Heavy imports happen inside the commands, so that help and mistakes answer at once.
"""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from perfmodel.cli.interrupts import safe_interrupts

if TYPE_CHECKING:
    from perfmodel.cli.base import Parser

__all__ = ["build_parser", "main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command, see `perfmodel.cli.commands.main`; an interrupt ends it at any time."""
    try:
        with safe_interrupts():
            from perfmodel.cli.commands import main as run

            return run(arguments)
    except KeyboardInterrupt:
        sys.stderr.write("perfmodel: interrupted\n")
        return 130


def build_parser() -> "Parser":
    """The whole command line."""
    from perfmodel.cli.commands import build_parser as build

    return build()
