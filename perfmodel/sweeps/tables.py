"""Datasets as tables: one row a point, one column an axis or metric."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import pyarrow as pa
    import xarray as xr

#: Rows that are put together at once.
_ROWS = 2**20


def description(dataset: "xr.Dataset") -> dict[str, Any]:
    """Provenance of a table and what its columns mean, for JSON."""
    columns = {str(name): {key: str(value) for key, value in dataset[name].attrs.items()} for name in _names(dataset)}
    return {**{str(name): _bare(value) for name, value in dataset.attrs.items()}, "columns": columns}


def write_csv(dataset: "xr.Dataset", path: Path) -> None:
    """A header and one line a point; every number is written so that it reads back as the same number."""
    import pyarrow.csv as csv

    with path.open("wb") as stream:
        for number, batch in enumerate(_batches(dataset)):
            csv.write_csv(batch, stream, csv.WriteOptions(include_header=number == 0))


def write_parquet(dataset: "xr.Dataset", path: Path) -> None:
    """Columns by name; the provenance is the entry ``perfmodel`` of the file's metadata."""
    import pyarrow.parquet as parquet

    note = {"perfmodel": json.dumps(description(dataset))}
    batches = _batches(dataset)
    first = next(batches).replace_schema_metadata(note)
    with parquet.ParquetWriter(path, first.schema) as writer:
        writer.write_table(first)
        for batch in batches:
            writer.write_table(batch.replace_schema_metadata(note))


def _bare(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def _names(dataset: "xr.Dataset") -> list[Any]:
    """Columns: the axes from the outermost to the innermost, those without a dimension first, then the metrics."""
    order = {dim: i for i, dim in enumerate(dataset.sizes)}
    axes = sorted(dataset.coords, key=lambda name: order[dataset[name].dims[-1]] if dataset[name].dims else -1)
    return [*axes, *dataset.data_vars]


def _batches(dataset: "xr.Dataset") -> Iterator["pa.Table"]:
    """The rows in C order of the dataset's dimensions, some at a time."""
    import pyarrow as pa

    sizes = {str(dim): int(size) for dim, size in dataset.sizes.items()}
    total = math.prod(sizes.values())
    columns = {str(name): dataset[name] for name in _names(dataset)}
    data = {name: np.asarray(column.values) for name, column in columns.items()}
    for start in range(0, max(total, 1), _ROWS):
        rest = np.arange(start, min(start + _ROWS, total))
        place: dict[str, Any] = {}
        for dim, size in reversed(sizes.items()):
            rest, place[dim] = np.divmod(rest, size)
        rows = min(_ROWS, total - start)
        table = {}
        for name, column in columns.items():
            index = tuple(place[str(dim)] for dim in column.dims)
            table[name] = pa.array(data[name][index] if index else [data[name].item()] * rows)
        yield pa.table(table)
