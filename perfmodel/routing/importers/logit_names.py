"""Router logits in a file of any kind, by the names that :mod:`perfmodel.routing.importers.logit_files` explains."""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfmodel.errors import TraceError
from perfmodel.routing.importers.probe import Probe
from perfmodel.routing.importers.pt import read_pt
from perfmodel.routing.importers.pt_outline import Outline
from perfmodel.routing.npz import one_line

NAME = re.compile(r"(encoder_|decoder_|)router_logits(?:[._/]([0-9]{1,6}))?(?:[._/]([0-9]{1,6}))?")
#: Names of arrays that count layers and say no more.
_COUNTED = re.compile(r"(?:layer_?|arr_)([0-9]{1,6})")
_MOST_ARRAYS = 100_000
#: Most experts of tables that have no name which says what they are.
_MOST_EXPERTS = 4096
_BESIDE = re.compile(r"attention_mask|prompt_len|input_ids|e_score_correction_bias(?:[.][0-9]{1,6})?")


def logit_names(probe: Probe) -> list[str]:
    """Names of the arrays of logits in a file; none in a file of another kind.

    A ``.pt`` file that is a list without names, or a list of such lists, one a call, has to be one of tables of
    floating point numbers with as many columns each as a model may have experts.
    """
    if probe.kind == "pt" and not isinstance(probe.document, dict):
        items = probe.document if isinstance(probe.document, list | tuple) else ()
        nested = items and all(isinstance(one, list | tuple) and one and not isinstance(one, Outline) for one in items)
        calls = items if nested else [items]
        tensors = [one for call in calls for one in call]
        if not all(_may_be_logits(one) for one in tensors) or len({one.shape[-1] for one in tensors}) > 1:
            return []
        return [f"router_logits.{i}" for i in range(len(tensors))]
    return [name for name in arrays_of(probe)[0] if NAME.fullmatch(name)]


def _may_be_logits(one: Any) -> bool:
    return (
        isinstance(one, Outline)
        and one.dtype.kind == "f"
        and len(one.shape) in (2, 3)
        and 2 <= one.shape[-1] <= _MOST_EXPERTS
    )


def arrays_of(probe: Probe) -> tuple[Mapping[str, tuple[int, ...]], Callable[[str], NDArray[Any]]]:
    """Shapes of the arrays of a file, and a way to read one; tuples in a ``.pt`` file become ``name.0``, ``name.1``."""
    if probe.kind in ("npz", "safetensors"):
        names = _named_by_number(probe)
        shapes = {names.get(name, name): shape for name, (shape, _) in probe.shapes.items()}
        held = {new: name for name, new in names.items()}
        return shapes, lambda name: probe.array(held.get(name, name))
    document = probe.document
    if probe.kind == "json" and not (isinstance(document, dict) and any(map(NAME.fullmatch, document))):
        return {}, probe.array  # a list in JSON may be anything
    if document is None:
        return {}, probe.array
    where = one_line(probe.path)

    outlines = named(where, document)
    content: dict[str, Any] = {}

    def array(name: str) -> NDArray[Any]:
        if not content:
            content.update(named(where, read_pt(probe.path)) if probe.kind == "pt" else outlines)
        return np.asarray(content[name])

    return {name: one.shape for name, one in outlines.items()}, array


def _named_by_number(probe: Probe) -> dict[str, str]:
    """Names for arrays that are only numbered, ``layer_0`` or ``arr_0`` and on, if they can be nothing but logits.

    All have floating point numbers and one shape, their numbers leave no gap, and nothing else is in the file but
    what may lie beside logits.
    """
    found = {name: match for name in probe.shapes if (match := _COUNTED.fullmatch(name))}
    if any(name not in found and not _BESIDE.fullmatch(name) for name in probe.shapes):
        return {}
    if sorted(int(match[1]) for match in found.values()) != list(range(len(found))):
        return {}
    kinds = {(shape, dtype.kind) for shape, dtype in (probe.shapes[name] for name in found)}
    if len(kinds) != 1 or not _may_be_logits(Outline(*probe.shapes[next(iter(found))])):
        return {}
    return {name: f"router_logits.{int(match[1])}" for name, match in found.items()}


def as_arrays(value: Any, where: str) -> Any:
    """Tables, lists and tuples with arrays for everything else."""
    if isinstance(value, Mapping):
        return {str(key): as_arrays(item, where) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return tuple(as_arrays(item, where) for item in value)
    try:
        return np.asarray(value)
    except Exception as error:  # of whatever kind of array or tensor it is
        raise TraceError(f"{where}: {type(value).__name__} is no array ({one_line(error)})") from None


def named(where: str, document: Any) -> dict[str, Any]:
    """Arrays of a nested document by their names, ``name.0``, ``name.1`` for the items of lists."""
    arrays = {}
    for name, one in _flat(where, "", document if isinstance(document, dict) else {"router_logits": document}, 0):
        arrays[name] = one
        if len(arrays) > _MOST_ARRAYS:
            raise TraceError(f"{where}: nests more than {_MOST_ARRAYS:,} arrays")
    return arrays


def _flat(where: str, name: str, value: Any, depth: int) -> Iterator[tuple[str, Any]]:
    """Arrays of a nested document, or their outlines; lists of numbers, which JSON has for tensors, are arrays too."""
    if isinstance(value, np.ndarray | Outline):
        yield name, value
        return
    if depth > 3 or not isinstance(value, dict | list | tuple):
        return
    if isinstance(value, list) and not isinstance(next(iter(value), None), np.ndarray | tuple):
        array = _regular(value)
        if array is not None and array.ndim == 4:
            raise TraceError(
                f"{where}: {name} has four axes, which may be calls of layers or layers of sequences; allowed: an .npz "
                f"file, where names tell"
            )
        if array is not None and array.ndim < 3:
            yield name, array
            return
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        yield from _flat(where, f"{name}.{key}" if name else str(key), item, depth + 1)


def _regular(value: list[Any]) -> NDArray[Any] | None:
    """Lists of lists of numbers as an array, where they are equally long."""
    try:
        array = np.array(value)
    except (ValueError, TypeError, OverflowError):
        return None
    return array if array.dtype.kind in "iuf" else None
