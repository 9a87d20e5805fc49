"""What all readers of tables of counts do once they have the numbers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from perfmodel.errors import TraceError
from perfmodel.routing.checks import MAX_EXPERTS
from perfmodel.routing.defects import Finding
from perfmodel.routing.defects.rows import counted
from perfmodel.routing.importers.base import Imported, ImportOptions, described, layer_numbers
from perfmodel.routing.npz import one_line
from perfmodel.routing.profile import MAX_BYTES, FrequencyProfile, Scale


def profile_of(
    format_name: str,
    files: Sequence[Path],
    options: ImportOptions,
    counts: ArrayLike,
    *,
    layers: Sequence[int] | NDArray[np.int64] | None = None,
    scale: Scale | None = None,
    top_k: int | None = None,
    **known: Any,
) -> Imported:
    """A frequency profile from numbers [L, E], checked against what the user said.

    files : where the numbers are from; none where they come from memory
    layers : model layer of each row, where the files state it; otherwise ``options.layers``, or 0, 1, 2, ...
    scale : what the numbers are; by default "counts" where all are whole, "shares" otherwise
    top_k : picks of a token, where the files state it
    known : further metadata

    Layers in which no expert was used, such as the dense layers of a model, are left out, which a finding says.
    """
    where = one_line(files[0]) if files else format_name
    try:
        table = as_table(counts)
        rows = layer_numbers(options, len(table), where) if layers is None else np.asarray(layers, np.int64)
        rows = np.arange(len(table)) if rows is None else rows
        if options.num_experts not in (None, table.shape[1]):
            raise TraceError(f"holds {table.shape[1]} experts a layer, --num-experts says {options.num_experts}")
        if top_k is not None and options.top_k not in (None, top_k):
            raise TraceError(f"says that a token has {top_k} picks, --top-k says {options.top_k}")
        used = np.asarray(table != 0).any(axis=1)
        if not used.any():
            raise TraceError("no expert was used in any layer; there is nothing to import")
        whole = table.dtype.kind != "f" or bool((np.isfinite(table) & (table == np.floor(table))).all())
        origin = {} if files else {"how": f"from numbers in memory ({format_name})"}
        profile = FrequencyProfile(
            counts=table[used],
            layer_index=rows[used],
            metadata=described(format_name, files, options, **{"source": "from-counts", **origin, **known}),
            top_k=top_k if options.top_k is None else options.top_k,
            scale=scale or ("counts" if whole else "shares"),
        )
    except TraceError as error:
        raise error if str(error).startswith(where) else TraceError(f"{where}: {error}") from error
    return Imported(profile, _left_out(rows[~used]))


def as_table(counts: ArrayLike) -> NDArray[Any]:
    """Numbers as an array [L, E] of a size that a model may have; TraceError for anything else."""
    try:
        table = np.asarray(counts)
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise TraceError(f"counts are no array ({one_line(error)})") from error
    if table.dtype.kind not in "iuf" or table.ndim != 2 or 0 in table.shape:
        raise TraceError(
            f"counts have dtype {table.dtype} and shape {table.shape}, expected numbers of layers x experts"
        )
    check_size(table.shape)
    return table


def check_size(shape: tuple[int, ...]) -> None:
    """Refuse a table [..., L, E] that is larger than any model's."""
    layers, experts = shape[-2:]
    if experts > MAX_EXPERTS or layers * experts > MAX_BYTES // 8:
        most = f"{MAX_EXPERTS} experts a layer, {MAX_BYTES // 8} in all"
        raise TraceError(f"counts have {layers} layers of {experts} experts; allowed: at most {most}")


def _left_out(layers: NDArray[np.int64]) -> tuple[Finding, ...]:
    if not len(layers):
        return ()
    some = ", ".join(map(str, layers[:8])) + (", ..." if len(layers) > 8 else "")
    unused = f"{counted(len(layers), 'layer')} ({some})"
    found = f"no expert was used in {unused}: dense layers, or layers that were not recorded"
    return (Finding("padding", found, "leave them out, for they hold no routing", True),)
