"""Activation tables of KTransformers: one matrix [layers, experts], by which it chooses the experts of the GPU.

A ``.npy`` file with the matrix, a ``.npz``, ``.safetensors`` or ``.pt`` file with one of the name
``activation_freq``, or a ``.pt`` file with a single tensor. Entries are counts, or any numbers proportional to them.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from perfmodel.errors import TraceError
from perfmodel.routing.importers.base import Format, Imported, ImportOptions
from perfmodel.routing.importers.canonical import only
from perfmodel.routing.importers.counts import as_table, check_size, profile_of
from perfmodel.routing.importers.probe import Probe
from perfmodel.routing.npz import one_line

NAME = "ktransformers"
_ARRAYS = ("activation_freq", "")


def _array(probe: Probe) -> str | None:
    return next((name for name in _ARRAYS if name in probe.shapes), None)


def recognise(probe: Probe) -> str | None:
    """A matrix of at least two columns whose entries are all finite and >= 0, and at least one above."""
    name = _array(probe)
    if name is None:
        return None
    shape, dtype = probe.shapes[name]
    if len(shape) != 2 or dtype.kind not in "iuf" or shape[1] < 2 or 0 in shape:
        return None
    try:
        table = as_table(probe.array(name))
    except TraceError:
        return None  # larger than any model
    if not (np.isfinite(table).all() and (table >= 0).all() and table.any()):
        return None
    return f"a matrix of {shape[0]} layers x {shape[1]} experts, no entry negative"


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
    recognise=recognise,
    read=read,
)
