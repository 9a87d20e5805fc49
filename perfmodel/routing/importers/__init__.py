"""Reading routing recordings in the layouts that other tools write: one module for each layout."""

from pathlib import Path

from perfmodel.errors import TraceError
from perfmodel.routing.importers.registry import find_format, formats, import_files, recognise
from perfmodel.routing.importers.row_phase import ROW_PHASE_KEYS, from_row_phase
from perfmodel.routing.npz import npz_keys, one_line, read_npz
from perfmodel.routing.profile import PROFILE_KEYS
from perfmodel.routing.trace import CANONICAL_KEYS, OPTIONAL_KEYS, RoutingTrace, trace_from_arrays

__all__ = ["find_format", "formats", "from_row_phase", "import_files", "load_any", "recognise"]


def load_any(path: str | Path) -> RoutingTrace:
    """Load an ``.npz`` routing recording, recognising its layout by the arrays that it holds.

    Known layouts are the canonical one that :meth:`RoutingTrace.save` writes and the row-phase layout
    (:func:`from_row_phase`). Further arrays in the file are ignored. Raises :class:`TraceError`.
    """
    keys = set(npz_keys(path))
    if keys >= CANONICAL_KEYS:
        arrays = read_npz(path, (*CANONICAL_KEYS, *OPTIONAL_KEYS))
        try:
            return trace_from_arrays(arrays)
        except TraceError as error:
            raise TraceError(f"{one_line(path)}: {error}") from error
    if keys >= ROW_PHASE_KEYS:
        return from_row_phase(path)
    if keys >= PROFILE_KEYS:
        raise TraceError(
            f"{one_line(path)}: is a frequency profile, which says how often experts were used and has no tokens to "
            f"replay; --policy static:profile=FILE and trace synth --profile FILE take it"
        )
    layouts = {"canonical": CANONICAL_KEYS, "row-phase": ROW_PHASE_KEYS}
    if "losses" in keys:
        needed = " or ".join(f"{', '.join(sorted(own))} ({name})" for name, own in layouts.items())
        raise TraceError(
            f"{one_line(path)}: is a loss table (--loss takes it); allowed: a routing trace, with {needed}"
        )
    # Of equally near layouts the canonical one, which comes first.
    nearest = min(layouts, key=lambda name: len(layouts[name] - keys))
    raise TraceError(
        f"{one_line(path)}: no known trace layout; holds {one_line(', '.join(sorted(keys)))}; "
        f"the {nearest} layout also needs {', '.join(sorted(layouts[nearest] - keys))}"
    )
