"""Counts of SGLang's expert distribution recorder: modes ``stat`` and ``stat_approx``, and ``per_pass``.

A ``.pt`` file, or the same content as JSON or ``.npz``. The first two hold ``logical_count`` [steps, layers, experts];
``per_pass`` holds ``records`` with ``global_physical_count`` [layers, slots] and ``last_physical_to_logical_map``.
Layers without experts count nothing, and are left out.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfmodel.errors import TraceError
from perfmodel.routing.defects import Finding
from perfmodel.routing.importers.base import Format, Imported, ImportOptions, as_signed
from perfmodel.routing.importers.counts import profile_of
from perfmodel.routing.importers.files import brief, entry, table
from perfmodel.routing.importers.probe import Probe
from perfmodel.routing.importers.pt import read_nested
from perfmodel.routing.importers.sglang import PICKS, check_passes, first_record, slot_map
from perfmodel.routing.npz import one_line

STAT, PER_PASS = "logical_count", "global_physical_count"


def recognise(probe: Probe) -> str | None:
    """The keys on the top level, or of the first record."""
    found = probe.document if probe.kind in ("json", "pt") else probe.shapes if probe.kind == "npz" else None
    if isinstance(found, Mapping) and STAT in found:
        return f"holds {STAT}"
    record = first_record(probe)
    return f"holds records with {PER_PASS}" if record and PER_PASS in record and PICKS not in record else None


def read(files: Sequence[Path], options: ImportOptions) -> Imported:
    """The sum over all steps of all files."""
    findings: list[Finding] = []
    every = []
    for path in files:
        name = one_line(path)
        every.append(_counts(table(read_nested(path), f"{name}: the content"), options, name, findings))
        if every[-1].shape != every[0].shape:
            raise TraceError(f"{name}: counts of shape {every[-1].shape}, the files before it have {every[0].shape}")
        same = next((i for i, other in enumerate(every[:-1]) if np.array_equal(other, every[-1])), None)
        if same is not None:
            found = (
                f"{name} has the very counts of {one_line(files[same].name)}, and both are added: one file may have "
                "been given twice, or every rank may have dumped the sum of all; give one of them if so"
            )
            findings.append(Finding("duplicate-tokens", found))
    imported = profile_of(FORMAT.name, files, options, np.sum(every, axis=0))
    return Imported(imported.result, (*findings, *imported.findings))


def _counts(dump: Mapping[str, Any], options: ImportOptions, name: str, findings: list[Finding]) -> NDArray[np.int64]:
    """Uses [layers, experts] in one dump."""
    if STAT in dump:
        if options.expert_map is not None:
            raise TraceError(f"{name}: {STAT} is of experts already; --expert-map is for counts of slots")
        return _summed(dump[STAT], f"{name}: {STAT}")
    records = entry(dump, "records", name)
    if not isinstance(records, list) or not records:
        raise TraceError(f"{name}: records is {brief(records)}, expected a list of forward passes")
    gaps, _ = check_passes(records, name)
    if gaps:
        found = f"{name} has no record of the forward passes {gaps}: steps without tokens, or lost ones"
        findings.append(Finding("missing-phase", found))
    mapping = slot_map(dump, options, name)
    slots = np.zeros(mapping.shape, np.int64)
    for i, record in enumerate(records):
        where = f"{name}: record {i}"
        counts = _summed(entry(table(record, where), PER_PASS, where), f"{where}: {PER_PASS}")
        if counts.shape != slots.shape:
            raise TraceError(f"{where}: {PER_PASS} has shape {counts.shape}, the map of slots {slots.shape}")
        slots += counts
    if (mapping != np.arange(mapping.shape[1])).any():
        found = f"{name} counts {mapping.shape[1]} slots of experts, of which its last map says what they hold"
        findings.append(Finding("physical-ids", found, "count every slot for its expert", mended=True))
    logical = np.zeros((len(slots), int(mapping.max()) + 1), np.int64)
    np.add.at(logical, (np.arange(len(slots))[:, None], mapping), slots)
    return logical


def _summed(value: Any, where: str) -> NDArray[np.int64]:
    """Counts [layers, experts], summed over steps where there are some; TraceError for negative ones."""
    try:
        array = np.asarray(value)
    except (ValueError, OverflowError) as error:
        raise TraceError(f"{where} is no array ({one_line(error)})") from None
    counts = as_signed(where, array, 3 if array.ndim == 3 else 2)
    if counts.size == 0 or counts.min() < 0 or counts.max() > 2**40:
        raise TraceError(f"{where} has shape {counts.shape}, expected counts >= 0 and at most 2**40")
    return np.asarray(counts.sum(axis=0, dtype=np.int64) if counts.ndim == 3 else counts.astype(np.int64))


FORMAT = Format(
    name="sglang-stat",
    summary="SGLang expert distribution recorder, modes stat, stat_approx and per_pass (.pt, .json, .npz): counts",
    gives="profile",
    takes=frozenset({"num_experts", "top_k", "layers", "expert_map"}),
    files=(
        "logical_count [steps, layers, experts]; or records with global_physical_count [layers, slots] "
        "and last_physical_to_logical_map"
    ),
    recognise=recognise,
    read=read,
)
