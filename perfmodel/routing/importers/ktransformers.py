"""Activation tables of KTransformers: one matrix [layers, experts], by which it chooses the experts of the GPU.

A ``.npy`` file with the matrix, a ``.npz``, ``.safetensors`` or ``.pt`` file with one of the name
``activation_freq``, or a ``.pt`` file with a single tensor. Entries are counts, or any numbers proportional to them.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfmodel.errors import TraceError
from perfmodel.routing.importers.base import Format, Imported, ImportOptions
from perfmodel.routing.importers.canonical import only
from perfmodel.routing.importers.counts import check_size, profile_of
from perfmodel.routing.importers.probe import Probe
from perfmodel.routing.npz import one_line

NAME = "ktransformers"
_ARRAYS = ("activation_freq", "")
#: Most layers and experts of a matrix without a name that is recognised.
_MOST_LAYERS, _MOST_EXPERTS = 200, 4096
#: How far a row of rounded shares may be from 1.
_ROUNDED = 1e-3


def _array(probe: Probe) -> str | None:
    return next((name for name in _ARRAYS if name in probe.shapes), None)


def recognise(probe: Probe) -> str | None:
    """A matrix called activation_freq. Sums do not tell: rows of probabilities, of confusion and transition matrices
    and of attention have one sum too."""
    name = _array(probe)
    if not name or not _may_be_table(*probe.shapes[name], named=True):
        return None
    layers, experts = probe.shapes[name][0]
    return f"holds {name}, a matrix of {layers} layers x {experts} experts"


def nearly(probe: Probe) -> str | None:
    """A matrix without a name, and what its sums show.

    Every layer picks equally often, so rows of counts have one sum, and those of shares the sum 1.
    """
    name = _array(probe)
    if name is None or not _may_be_table(*probe.shapes[name], named=False):
        return None
    kind = _counts_or_shares(probe.array(name))
    found = (
        f"it is a matrix without a name, of {kind}"
        if kind
        else "its rows have neither one sum, as counts of picks, nor the sum 1, as shares"
    )
    return f"{found}; if it is a table of [layers, experts], name the format {NAME}"


def _may_be_table(shape: tuple[int, ...], dtype: np.dtype[Any], *, named: bool) -> bool:
    if len(shape) != 2 or dtype.kind not in "iuf" or 0 in shape:
        return False
    return named or (2 <= shape[0] <= _MOST_LAYERS and 2 <= shape[1] <= _MOST_EXPERTS)


def _counts_or_shares(table: NDArray[Any]) -> str | None:
    """What the sums of a matrix without a name show it to be."""
    table = table.astype(np.float64)
    if not (np.isfinite(table).all() and (table >= 0).all()):
        return None
    used = table[table.any(axis=1)]
    if len(used) < 2:
        return None
    sums, ordered = used.sum(axis=1), np.sort(used, axis=1)
    if (ordered == ordered[0]).all() or (np.diff(used, axis=1) <= 0).all():
        return None
    if (used == np.floor(used)).all():
        return (
            "counts that add up to the same number in every row" if (sums == sums[0]).all() and used.max() > 1 else None
        )
    return "shares that add up to 1 in every row" if (np.abs(sums - 1) < _ROUNDED).all() else None


def read(files: Sequence[Path], options: ImportOptions) -> Imported:
    """One file."""
    path = only(files)
    probe = Probe.of(path)
    name = _array(probe)
    if name is None:
        held = one_line(", ".join(probe.shapes)) or f"no array ({probe.kind} file)"
        raise TraceError(f"{one_line(path)}: expected a matrix activation_freq [layers, experts], holds {held}")
    shape, dtype = probe.shapes[name]
    if len(shape) != 2:
        raise TraceError(f"{one_line(path)}: has shape {shape} of {dtype}, expected [layers, experts]")
    try:
        check_size(shape)
    except TraceError as error:
        raise TraceError(f"{one_line(path)}: {error}") from None
    return profile_of(NAME, files, options, probe.array(name))


FORMAT = Format(
    name=NAME,
    summary="KTransformers activation_freq [layers, experts], .npy, .npz or .pt; also any such table of shares",
    gives="profile",
    takes=frozenset({"num_experts", "top_k", "layers"}),
    files="a .npy or .pt matrix, or activation_freq in an .npz, .safetensors or .pt",
    recognise=recognise,
    read=read,
    nearly=nearly,
)
