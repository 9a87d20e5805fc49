"""The command line. Every module below holds related commands; `main` puts them together.

Heavy imports happen inside the commands, so that help and mistakes answer at once.
"""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from perfmodel.cli.base import Parser

__all__ = ["build_parser", "main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command, see `perfmodel.cli.commands.main`; an interrupt while that is imported ends as any other."""
    try:
        from perfmodel.cli.commands import main as run
    except KeyboardInterrupt:
        sys.stderr.write("perfmodel: interrupted\n")
        return 130
    return run(arguments)


def build_parser() -> "Parser":
    """The whole command line."""
    from perfmodel.cli.commands import build_parser as build

    return build()
