"""The layout that :meth:`RoutingTrace.save` writes: a recording that may still be checked and mended."""

from collections.abc import Sequence
from pathlib import Path

from perfmodel.errors import TraceError
from perfmodel.routing.importers.base import Format, Imported, ImportOptions
from perfmodel.routing.importers.probe import Probe
from perfmodel.routing.npz import one_line, read_npz
from perfmodel.routing.trace import CANONICAL_KEYS, OPTIONAL_KEYS, trace_from_arrays


def recognise(probe: Probe) -> str | None:
    """Every array of the layout is there."""
    return "holds the arrays of a saved trace" if probe.kind == "npz" and set(probe.shapes) >= CANONICAL_KEYS else None


def read(files: Sequence[Path], options: ImportOptions) -> Imported:
    """One file; model and number of experts may be said anew."""
    path = only(files)
    arrays = read_npz(path, (*CANONICAL_KEYS, *OPTIONAL_KEYS))
    lacking = CANONICAL_KEYS - set(arrays)
    if lacking:
        raise TraceError(f"{one_line(path)}: the canonical layout also needs {', '.join(sorted(lacking))}")
    try:
        trace = trace_from_arrays(arrays)
        if options.num_experts is not None:
            trace = trace.with_num_experts(options.num_experts)
    except TraceError as error:
        raise TraceError(f"{one_line(path)}: {error}") from error
    return Imported(trace.with_metadata(model=options.model) if options.model else trace)


def only(files: Sequence[Path]) -> Path:
    """The one file of a format that has one file a recording."""
    if len(files) != 1:
        raise TraceError(f"{one_line(files[1])}: a second file; allowed: one file a recording in this format")
    return files[0]


FORMAT = Format(
    name="canonical",
    summary="perfmodel's own .npz, as it is written by every command that makes a trace",
    gives="trace",
    takes=frozenset({"num_experts"}),
    files=(
        "what perfmodel writes: topk_ids, topk_weights, sequence_offsets, prompt_len, layer_index, "
        "num_experts, metadata"
    ),
    recognise=recognise,
    read=read,
)
