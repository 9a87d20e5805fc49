"""A report as a list of titled parts, shown as text for a terminal or as a Markdown page."""

import textwrap
from collections.abc import Sequence
from typing import NamedTuple

from perfmodel.reports import table

#: Letters of a line of prose on a terminal and in Markdown files.
_TERMINAL, _WIDTH = 110, 140


class Grid(NamedTuple):
    """A table; the first ``left`` columns are words, the others numbers."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    left: int = 1


class Part(NamedTuple):
    """A titled part of a report: sentences and tables in their order."""

    title: str
    body: tuple[str | Grid, ...]


def as_text(parts: Sequence[Part]) -> str:
    """Parts for a terminal."""
    blocks = []
    for part in parts:
        body = [
            table(one.header, one.rows, left=one.left) if isinstance(one, Grid) else _filled(one, _TERMINAL)
            for one in part.body
        ]
        blocks.append("\n\n".join([f"{part.title}\n{'=' * len(part.title)}", *body]))
    return "\n\n\n".join(blocks)


def as_markdown(title: str, lead: Sequence[str], parts: Sequence[Part]) -> str:
    """Parts as one Markdown page with a title and a few sentences below it."""
    blocks: list[str | Grid] = [f"# {title}", *lead]
    for part in parts:
        blocks += [f"## {part.title}", *part.body]
    lines = [_markdown_table(one) if isinstance(one, Grid) else _filled(one, _WIDTH) for one in blocks]
    return "\n\n".join(lines) + "\n"


def _filled(text: str, width: int) -> str:
    """Prose in lines of a width, and lists with their lines indented; titles and code stay as they are."""
    if text.startswith(("#", "```")):
        return text
    return "\n".join(
        textwrap.fill(
            line, width, subsequent_indent="  " if line.startswith("- ") else "", break_long_words=False,
            break_on_hyphens=False,
        )
        for line in text.split("\n")
    )  # fmt: skip


def _markdown_table(grid: Grid) -> str:
    marks = ["---" if at < grid.left else "---:" for at in range(len(grid.header))]
    lines = [grid.header, marks, *grid.rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
