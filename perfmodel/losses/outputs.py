"""Places for files of hours of work, refused before the work where they cannot be written."""

from pathlib import Path
from typing import Any

from perfmodel.errors import PerfModelError, TraceError
from perfmodel.routing.npz import one_line, read_npz
from perfmodel.routing.places import PARTIAL, check_place

#: In the metadata of every table that is built here.
MARK = "perfmodel_version"


def partial_file(output: Path) -> Path:
    """Where unfinished work on a file lies; links of its own name followed."""
    target = output.resolve()
    return target.with_name(PARTIAL.format(stem=target.stem))


def check_output(output: Any, inputs: tuple[Path, ...]) -> Path:
    """`check_place` for a table; what is there and was not built here is refused, whatever is asked for."""
    target = check_place(output, inputs)
    if target.exists() and not _built_here(target):
        raise PerfModelError(
            f"output {one_line(output)}: exists and is no loss table that perfmodel built; it is left alone, choose"
            " another output"
        )
    return target


def _built_here(path: Path) -> bool:
    try:
        return f'"{MARK}"' in str(read_npz(path, ["metadata"])["metadata"])
    except (TraceError, KeyError):
        return False
