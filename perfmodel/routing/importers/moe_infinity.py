"""Collections of MoE-Infinity: a matrix of counts [layers, experts] for each sequence, [sequences, layers, experts].

A ``.npy`` file, or one with an array of the name ``trace_collection``. The collection has a fixed capacity, and the
places that no sequence has taken yet hold zeros. Prefill and decode steps of a sequence are in one matrix, so that
neither phases nor tokens can be had back.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from perfmodel.errors import TraceError
from perfmodel.routing.defects import Finding
from perfmodel.routing.importers.base import Format, Imported, ImportOptions
from perfmodel.routing.importers.canonical import only
from perfmodel.routing.importers.counts import check_size, profile_of
from perfmodel.routing.importers.probe import Probe
from perfmodel.routing.npz import one_line

NAME = "moe-infinity"
_ARRAYS = ("trace_collection", "")
_LARGEST = 2**28
"""Largest collection [byte]: that of a thousand sequences of the largest models."""


def _array(probe: Probe) -> str | None:
    return next((name for name in _ARRAYS if name in probe.shapes), None)


def recognise(probe: Probe) -> str | None:
    """An array called trace_collection. Sums do not tell: other stacks of counts, such as of classes by fold, have
    as many in every row too."""
    name = _array(probe)
    return f"holds {name} {probe.shapes[name][0]}" if name and _may_be_collection(*probe.shapes[name]) else None


def nearly(probe: Probe) -> str | None:
    """An array without a name: what its sums say, or what is wrong with numbers that are no integers.

    In a sequence every layer picks equally often, so the sums of its layers are one number, or in a model with an
    encoder two, first the one and then the other. That says nothing of fewer than two layers a number, and of masks
    of zeros and ones, which are left alone.
    """
    name = _array(probe)
    if name is None or not _may_be_collection(*probe.shapes[name]):
        return None
    wrong = _wrong(probe.array(name))
    if wrong:
        return wrong if probe.shapes[name][1].kind == "f" else None
    return (
        "it is a stack of counts without a name, the same number in every row; if they are counts of picks "
        f"[sequences, layers, experts], name the format {NAME}"
    )


def _may_be_collection(shape: tuple[int, ...], dtype: np.dtype[Any]) -> bool:
    return (
        len(shape) == 3
        and dtype.kind in "iuf"
        and 0 not in shape
        and bool(np.prod(shape, dtype=object) * 8 <= _LARGEST)
    )


def _wrong(numbers: NDArray[Any]) -> str | None:
    """Why numbers are no counts of picks."""
    bad = ~((numbers >= 0) & (numbers < np.inf))
    if not bad.any():
        bad = numbers != np.floor(numbers)
    if bad.any():
        at = tuple(int(i) for i in np.argwhere(bad)[0])
        return f"{list(at)} is {numbers[at]}, expected whole numbers >= 0"
    sums = numbers.sum(axis=2, dtype=np.float64)
    taken = sums.any(axis=1)
    used = sums[taken][:, (sums > 0).any(axis=0)]
    if numbers.max() <= 1:
        return "it holds zeros and ones only, as a mask does"
    steps = used[:, 1:] != used[:, :-1]
    one = not steps.any() and used.shape[1] > 1
    # Encoder and decoder: one step, at the same place in all sequences, with two layers or more on both sides.
    (places,) = np.nonzero(steps.any(axis=0))
    two = len(places) == 1 and 1 <= places[0] < used.shape[1] - 2
    if one or two:
        return None
    return "its layers do not have as many picks each in a sequence"


def read(files: Sequence[Path], options: ImportOptions) -> Imported:
    """One file; the matrices of all sequences are added."""
    path = only(files)
    probe = Probe.of(path)
    name = _array(probe)
    if name is None:
        held = one_line(", ".join(probe.shapes)) or f"no array ({probe.kind} file)"
        raise TraceError(f"{one_line(path)}: expected counts [sequences, layers, experts], holds {held}")
    shape, dtype = probe.shapes[name]
    try:
        _check(shape, dtype)
    except TraceError as error:
        raise TraceError(f"{one_line(path)}: {error}") from None
    return from_matrices(probe.array(name), options, files)


def from_matrices(matrices: ArrayLike, options: ImportOptions, files: Sequence[Path] = ()) -> Imported:
    """A profile from counts [sequences, layers, experts]; ``files`` says where they are from."""
    where = one_line(files[0]) if files else NAME
    try:
        numbers = np.asarray(matrices)
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise TraceError(f"{where}: counts are no array ({one_line(error)})") from error
    try:
        _check(numbers.shape, numbers.dtype)
    except TraceError as error:
        raise TraceError(f"{where}: {error}") from None
    wrong = ~((numbers >= 0) & (numbers < np.inf))
    if wrong.any():
        s, layer, expert = np.argwhere(wrong)[0]
        found = f"sequence {s}, layer row {layer}, expert {expert} is {numbers[s, layer, expert]}"
        raise TraceError(f"{where}: {found}, expected a finite number >= 0")
    taken = np.asarray((numbers != 0).any(axis=(1, 2)))
    imported = profile_of(NAME, files, options, numbers.sum(axis=0, dtype=np.float64), num_sequences=int(taken.sum()))
    return Imported(imported.result, (*imported.findings, *_unused(taken)))


def _check(shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    if len(shape) != 3 or dtype.kind not in "iuf" or 0 in shape:
        raise TraceError(f"counts have dtype {dtype} and shape {shape}, expected numbers [sequences, layers, experts]")
    check_size(shape)
    size = int(np.prod(shape, dtype=object)) * 8
    if size > _LARGEST:
        raise TraceError(f"counts of shape {shape} need {size:,} bytes; allowed: at most {_LARGEST:,}")


def _unused(taken: NDArray[np.bool_]) -> tuple[Finding, ...]:
    if taken.all():
        return ()
    found = f"{int((~taken).sum())} of {len(taken)} matrices hold only zeros: places that no sequence had taken"
    return (Finding("padding", found, "leave them out, for they hold no routing", True),)


FORMAT = Format(
    name=NAME,
    summary="MoE-Infinity expert activation matrices [sequences, layers, experts], .npy",
    gives="profile",
    takes=frozenset({"num_experts", "top_k", "layers"}),
    files="a .npy, or an .npz or .pt with trace_collection",
    recognise=recognise,
    read=read,
    nearly=nearly,
)
