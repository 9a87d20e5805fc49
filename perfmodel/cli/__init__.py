"""The command line. Every module below holds related commands; `main` puts them together.

Heavy imports happen inside the commands, so that help and mistakes answer at once.
"""

from perfmodel.cli.commands import build_parser, main

__all__ = ["build_parser", "main"]
