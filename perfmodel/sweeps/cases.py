"""A table of cases: one point a row, one axis a column."""

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from perfmodel.errors import PerfModelError
from perfmodel.hardware.base import shown
from perfmodel.hardware.files import path_text
from perfmodel.sweeps.axes import plain_number
from perfmodel.sweeps.files import beside

if TYPE_CHECKING:
    import pyarrow as pa

_SUFFIXES = (".csv", ".parquet")


def read_cases(cases: Any) -> dict[str, list[Any]]:
    """Columns of a table of cases, by name, all of one length and without gaps.

    cases : path of a ``.csv`` or ``.parquet`` file, a DataFrame, or a mapping of columns. Relative paths in a file
        start at the folder of that file.

    Raises
    ------
    PerfModelError : a file that cannot be read, no rows, no columns, unequal columns, or an empty cell.
    """
    where = cases_name(cases)
    if isinstance(cases, str | os.PathLike):
        path = Path(os.fsdecode(cases))
        table = _read(path)
        columns = _columns(table.column_names, lambda i: table.column(i).to_pylist(), where)
        if path.suffix == ".csv":
            columns = {name: _numbers(values) for name, values in columns.items()}
        return {name: beside(name, values, path.parent) for name, values in columns.items()}
    if isinstance(cases, Mapping):
        columns = {name: _list(name, column) for name, column in cases.items()}
        lengths = {name: len(column) for name, column in columns.items()}
        if len(set(lengths.values())) > 1:
            found = ", ".join(f"{name} has {length}" for name, length in lengths.items())
            raise PerfModelError(f"cases: columns of unequal length ({found}); allowed: one value a column and case")
        return _checked(columns, "cases")
    if hasattr(cases, "columns") and hasattr(cases, "iloc"):
        return _columns(cases.columns, lambda i: cases.iloc[:, i].tolist(), "cases")
    raise PerfModelError(
        f"cases: found {type(cases).__name__}, allowed a .csv or .parquet file, a DataFrame, or a mapping of columns"
    )


def cases_name(cases: Any) -> str:
    """What messages about a table of cases begin with: the path of a file is part of it."""
    if not isinstance(cases, str | os.PathLike):
        return "cases"
    text = os.fsdecode(cases)
    if not text.strip():
        raise PerfModelError(f"cases: found {text!r}, allowed the path of a {' or '.join(_SUFFIXES)} file")
    return f"cases {path_text(Path(text))}"


def _list(name: object, column: Any) -> list[Any]:
    if isinstance(column, str | bytes) or not hasattr(column, "__iter__"):
        raise PerfModelError(f"cases: column {shown(name)} is {shown(column)}; allowed: a list of values")
    return list(column.tolist() if hasattr(column, "tolist") else column)


def _read(path: Path) -> "pa.Table":
    where = f"cases {path_text(path)}"
    if path.suffix not in _SUFFIXES:
        raise PerfModelError(f"{where}: unknown kind of file; allowed: {' and '.join(_SUFFIXES)}")
    try:
        if not path.is_file():
            raise PerfModelError(f"{where}: {'not a regular file' if path.exists() else 'no such file'}")
        if path.suffix == ".csv":
            import pyarrow.csv

            return pyarrow.csv.read_csv(path)
        import pyarrow.parquet

        return pyarrow.parquet.read_table(path)
    except PerfModelError:
        raise
    except Exception as error:  # parsers raise many kinds of errors when fed with other files
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise PerfModelError(f"{where}: cannot be read ({reason})") from None


def _numbers(values: list[Any]) -> list[Any]:
    """Cells of a column that mixes words and numbers, which CSV readers leave as texts."""
    return [plain_number(value, value) if isinstance(value, str) else value for value in values]


def _columns(names: Any, column: Callable[[int], Any], where: str) -> dict[str, list[Any]]:
    """Columns by name, without the spaces around it; ``column`` gives the values of one by its place."""
    listed = [name.strip() if isinstance(name, str) else name for name in names]
    if len(set(listed)) < len(listed):
        raise PerfModelError(f"{where}: two columns have the same name; allowed: one column an axis")
    return _checked({name: column(i) for i, name in enumerate(listed)}, where)


def _checked(columns: dict[Any, list[Any]], where: str) -> dict[str, list[Any]]:
    if not columns or not next(iter(columns.values())):
        raise PerfModelError(f"{where}: holds no cases; allowed: a column an axis and a row a case")
    for name, values in columns.items():
        if not isinstance(name, str):
            raise PerfModelError(f"{where}: column {shown(name)}: allowed: the name of an axis")
        for i, value in enumerate(values):
            if value is None or value != value or (isinstance(value, str) and not value.strip()):
                raise PerfModelError(f"{where}: column {name}, case {i + 1}: no value; allowed: a value in every cell")
    return columns


def cases_reference(cases: Any, columns: Mapping[str, NDArray[Any]]) -> str | dict[str, str]:
    """The path of a table of cases; for one in memory, ``{"in_memory": hash of its checked columns}``."""
    if isinstance(cases, str | os.PathLike):
        return os.fsdecode(cases)
    content = {name: column.tolist() for name, column in columns.items()}
    return {"in_memory": hashlib.sha256(json.dumps(content).encode()).hexdigest()}
