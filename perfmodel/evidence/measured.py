"""Measured runs of MoE models as data: what was run, on what, and how fast. `MeasuredRun` has the keys of a row.

The bundled rows are in ``measured.toml``; a file of your own has the same form, a table ``[[run]]`` for each row, and
may name models, GPUs, CPUs, links and engines by path, relative to the file. A key that a row does not have was not
stated; ``inferred`` names the keys that follow from what the row names (the slot of a named card, the bits of a named
file type, a short chat prompt) instead of being stated in it.

**Which rows count** is decided by a rule over the fields, so nobody can drop a row that is predicted badly:

- *decode*: a target (``decode_tok_per_s`` or ``step_ms``); a ``model`` whose shape is known, ``expert_bits`` and
  ``other_bits``; a ``gpu``, and with several of them how they ``split`` the model; a ``batch``; and ``gpu_experts``.
  Where that is below 1 also ``elsewhere``, and what the speed there follows from: the ``cpu`` that runs the other
  experts, or the ``link`` that they are fetched over.
  An ``engine`` that is missing or unknown stands for the default profile of its kind, and a missing
  ``context_tokens`` for the prompt and half the output, or 500 where neither is known.
- *prefill*: the same with ``prefill_tok_per_s`` as the target and ``prompt_tokens`` in the place of ``batch``.
- A row with ``excluded_because`` does not count: it is not the plain speed of one configuration, for a reason that can
  be read off the row before anything is predicted. ``decode_excluded_because`` and ``prefill_excluded_because`` say so
  of one of its rates alone.

`missing_field` names the first field that keeps a row from counting.
"""

import functools
import os
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Literal

from perfmodel.errors import SpecError
from perfmodel.evidence.measured_run import MeasuredRun
from perfmodel.hardware import list_specs
from perfmodel.hardware.base import shown, suggestion
from perfmodel.hardware.files import path_text, read_toml
from perfmodel.model import bundled_models

__all__ = [
    "QUANTITIES",
    "MeasuredRun",
    "Quantity",
    "counting",
    "is_bundled",
    "is_file",
    "load_measured",
    "missing_field",
]

Quantity = Literal["decode", "prefill"]
QUANTITIES: tuple[Quantity, ...] = ("decode", "prefill")

_BUNDLED = Path(__file__).resolve().parent / "measured.toml"
#: Keys that name a bundled shape or spec, or a file.
_REFERENCES = ("model", "gpu", "cpu", "link", "engine")


def load_measured(path: str | os.PathLike[str] | None = None) -> tuple[MeasuredRun, ...]:
    """The measured runs of a file, in its order; without a path those that come with the package.

    Raises
    ------
    SpecError : the file cannot be read, or a row is not one of measured runs: the line names file, row, key, what was
        found and what is allowed.
    """
    if path is not None and not isinstance(path, str | os.PathLike):
        raise SpecError(f"measured runs: found {shown(path)}; allowed: the path of a TOML file")
    file = _BUNDLED if path is None else Path(os.fsdecode(path))
    where = path_text(file)
    data = read_toml(file)
    rows = data.get("run")
    others = [key for key in data if key != "run"]
    if others:
        raise SpecError(f"{where}: unknown key {shown(others[0])}; allowed: tables [[run]]")
    if not isinstance(rows, list) or not rows:
        found = f"key 'run' is {shown(rows)}" if "run" in data else "no run"
        raise SpecError(f"{where}: {found}; allowed: one or more tables [[run]]")
    runs: dict[str, MeasuredRun] = {}
    for number, row in enumerate(rows, 1):
        run = _run(row, f"{where}: run {number}", file.parent)
        if run.id in runs:
            raise SpecError(
                f"{where}: run {number}: key 'id' is {shown(run.id)} for the second time; allowed: a new id"
            )
        runs[run.id] = run
    return tuple(runs.values())


def _run(row: object, where: str, folder: Path) -> MeasuredRun:
    """A row of a file as a run; references that are paths start at its folder."""
    if not isinstance(row, Mapping):
        raise SpecError(f"{where}: found {shown(row)}; allowed: a table [[run]]")
    called = row.get("id")
    where = f"{where} ({shown(called)})" if isinstance(called, str) else where
    names = [one.name for one in fields(MeasuredRun)]
    for key in row:
        if key not in names:
            raise SpecError(f"{where}: unknown key {shown(key)}{suggestion(key, names)}; allowed: {', '.join(names)}")
    for one in fields(MeasuredRun):
        if one.default is MISSING and one.name not in row:
            raise SpecError(f"{where}: key '{one.name}' is missing")
    values = dict(row)
    for key in _REFERENCES:
        if isinstance(values.get(key), str) and is_file(values[key]):
            values[key] = str(folder / values[key])
    if isinstance(values.get("inferred"), list):
        values["inferred"] = tuple(values["inferred"])
    try:
        return MeasuredRun(**values)
    except SpecError as error:
        raise SpecError(f"{where}: {error}") from None


def is_file(reference: str) -> bool:
    """Whether a reference of a row is a path rather than a bundled name."""
    separators = {"/", os.sep, os.altsep or "/"}
    return any(mark in reference for mark in separators) or reference.endswith((".toml", ".json", ".gguf"))


@functools.cache
def _bundled_specs() -> frozenset[tuple[str, str]]:
    return frozenset((entry.kind, entry.name) for entry in list_specs())


def is_bundled(kind: str, name: str) -> bool:
    """Whether a bundled spec of that kind has that name."""
    return (kind, name) in _bundled_specs()


def _known(kind: str, reference: str | None) -> bool:
    """Whether a reference of a row can be read: nothing, a file, or a bundled spec of its kind."""
    return reference is None or is_file(reference) or is_bundled(kind, reference)


def missing_field(run: MeasuredRun, quantity: Quantity) -> str | None:
    """The first field that keeps a row from counting on a quantity, by the rule of the module; None if it counts.

    ``excluded_because`` and its two kin are such fields where they are given; ``model``, ``gpu``, ``cpu`` and ``link``
    where nothing bundled has that name.
    """
    if quantity not in QUANTITIES:
        raise SpecError(f"quantity is {shown(quantity)}; allowed: {', '.join(QUANTITIES)}")
    prefill = quantity == "prefill"
    target = run.prefill_tok_per_s if prefill else (run.decode_tok_per_s or run.step_ms)
    if target is None:
        return "prefill_tok_per_s" if prefill else "decode_tok_per_s"
    if run.excluded_because is not None:
        return "excluded_because"
    because = f"{quantity}_excluded_because"
    if getattr(run, because) is not None:
        return because
    if run.model is None or not (is_file(run.model) or run.model in bundled_models()):
        return "model"
    unknown = next((key for key in ("gpu", "cpu", "link") if not _known(key, getattr(run, key))), None)
    if unknown is not None:
        return unknown
    needed = ["expert_bits", "other_bits", "gpu"]
    if run.devices > 1:
        needed.append("split")
    needed += ["prompt_tokens" if prefill else "batch", "gpu_experts"]
    if run.gpu_experts is not None and run.gpu_experts < 1:
        needed.append("elsewhere")
        if run.elsewhere is not None:
            needed.append({"cpu": "cpu", "fetch": "link"}[run.elsewhere])
    return next((key for key in needed if getattr(run, key) is None), None)


def counting(runs: Iterable[MeasuredRun], quantity: Quantity) -> tuple[MeasuredRun, ...]:
    """The runs that count as evidence on a quantity, in their order."""
    return tuple(run for run in runs if missing_field(run, quantity) is None)
