"""How the weights behind a loss table were quantised, as its file says it, and as text is to be tried with them."""

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from perfmodel.bitwidth import LossTable
from perfmodel.errors import PerfModelError, TraceError
from perfmodel.losses.checkpoint import Checkpoint
from perfmodel.losses.choices import short_name
from perfmodel.losses.gptq import Damping, Order
from perfmodel.losses.options import METHODS, Method, checked
from perfmodel.routing.npz import shown

#: Sizes of a model that a table's metadata may state.
_SIZES = ("num_layers", "num_experts", "hidden_size", "expert_size")
#: A group this large is a whole row of any matrix.
_WIDEST = 2**31 - 1
#: What is assumed where a file does not say it, by the key of its metadata.
_ASSUMED = {"group_size": "one scale a row", "damping": "damping auto", "order": "natural order"}


class Quantisation(NamedTuple):
    """How weights are quantised; `perfmodel.losses.build.build_losses` says what the options mean.

    notes : what a reader has to know of how this was found
    """

    method: Method
    group_size: int | None
    damping: Damping
    order: Order
    notes: tuple[str, ...]

    @property
    def words(self) -> str:
        """For people."""
        return ", ".join(described(self._asdict()))


def described(info: Mapping[str, Any]) -> list[str]:
    """Method and options of a table's metadata in words; what it does not say is left out."""
    method, group, order = info.get("method"), info.get("group_size"), info.get("order")
    found = [str(method)] if method is not None else []
    if "group_size" in info:
        found.append("one scale a row" if group is None else f"one scale a group of {group} columns")
    if method != "rtn":
        found += [f"damping {info['damping']}"] if info.get("damping") is not None else []
        found += [f"{order} order"] if order is not None else []
        found += [f"{info['folds']} folds"] if info.get("folds") is not None else []
    return found


def table_for_text(table: LossTable, rtn: NDArray[np.float64] | None, method: Method | None = None) -> LossTable:
    """The table whose losses are of the weights that text is to be tried with, so that both say the same.

    rtn : losses of rounding to nearest from the same file; None where it has none. method : as asked, if it was.

    With rounding to nearest that is the table of ``rtn``. A file that holds these beside its losses, and says nothing
    of how it was made, is taken for one by GPTQ.
    """
    if rtn is None:
        return table
    if (method or _stated(table)) == "rtn" and _stated(table) != "rtn":
        note = f"losses are those of rounding to nearest (losses_rtn of {table.name!r})"
        return replace(table, losses=rtn, info={**table.info, "method": "rtn"}, notes=(*table.notes, note))
    if _stated(table) is None and "method" not in table.info:
        note = f"loss table {table.name!r} does not say how it was made; with losses_rtn beside them, its losses are"
        note += " taken for GPTQ's"
        return replace(table, info={**table.info, "method": "gptq"}, notes=(*table.notes, note))
    return table


def quantisation(
    table: LossTable, method: Method | None = None, *, calibrated: bool, has_rtn: bool = False
) -> Quantisation:
    """How the weights of a table are made again.

    method : as asked; by default the table's. Where the table does not say it: GPTQ with calibration rows, else
        rounding to nearest.
    has_rtn : whether the table's file holds losses of rounding to nearest as well, which a refusal then points to

    Raises PerfModelError for a method that is not the table's, GPTQ without rows, and rows without GPTQ; TraceError
    for metadata that no build could have written.
    """
    stated = _stated(table)
    chosen: Method = method or stated or ("gptq" if calibrated else "rtn")
    if chosen not in METHODS:
        raise PerfModelError(f"method: found {chosen!r}; allowed: {', '.join(METHODS)}")
    if stated not in (None, chosen):
        have = "the file has no losses_rtn" if chosen == "rtn" else "losses of weights by GPTQ are needed"
        raise PerfModelError(
            f"method: found {chosen} for loss table {table.name!r}, which is of weights by {stated} ({have});"
            f" allowed: {stated}"
        )
    if chosen == "gptq" and not calibrated:
        why = f"loss table {table.name!r} is of weights by gptq" if stated else "gptq was asked for (--method)"
        other = ", or --method rtn, as the file holds losses_rtn" if has_rtn else ""
        raise PerfModelError(f"{why}: found no calibration rows; allowed: --calibration FILE{other}")
    if chosen == "rtn" and calibrated:
        raise PerfModelError(
            f"--calibration: of no use with rounding to nearest (loss table {table.name!r}); allowed with gptq"
        )
    known = {key: table.info.get(key) for key in _ASSUMED if chosen == "gptq" or key == "group_size"}
    try:
        options = checked(
            method=chosen, bits=table.bits, folds=None, has_held_out=True, widest=_WIDEST,
            **{"group_size": None, "damping": None, "order": None, **known},
        )  # fmt: skip
    except PerfModelError as error:
        raise TraceError(f"loss table {table.name!r}: metadata: {error}") from None
    missing = ", ".join(words for key, words in _ASSUMED.items() if key in known and key not in table.info)
    notes = []
    if stated is None:
        named = table.info.get("method")
        found = "does not say how its weights were quantised" if named is None else f"names method {shown(named)}"
        cannot = "" if named is None else ", which cannot be done again"
        assumed = ", ".join(filter(None, (chosen, missing)))
        notes.append(
            f"loss table {table.name!r} {found}{cannot}; {'assumed' if named is None else 'instead'}: {assumed};"
            f" summed and held-out losses {'may be' if named is None else 'are'} of different weights"
        )
    elif missing:
        notes.append(f"loss table {table.name!r} does not say all of how it was made; assumed: {missing}")
    if chosen == "gptq" and table.info.get("folds") is not None:
        notes.append("summed losses are of weights fitted to all folds but one, held-out losses of fits to all of them")
    return Quantisation(chosen, options.group_size, options.damping, options.order, tuple(notes))


def weights_notes(table: LossTable, files: Checkpoint) -> list[str]:
    """Refuse a table of a model of other sizes; say so where it is of other weights, or where only names can tell."""
    for key in _SIZES:
        stated, size = table.info.get(key), getattr(files.model, key)
        if stated not in (None, size):
            raise TraceError(
                f"loss table {table.name!r} is of a model with {key} {shown(stated)}, checkpoint {files.name!r} has"
                f" {size}; give a table of this model"
            )
    hashes = table.info.get("sha256")
    stated = hashes.get("checkpoint") if isinstance(hashes, Mapping) else None
    if stated is not None:
        digest = hashlib.sha256()
        for layer, expert in np.ndindex(files.model.num_moe_layers, files.model.num_experts):
            digest.update(files.expert_hash(layer, expert))
        other = digest.hexdigest() != stated
        return [f"loss table {table.name!r} was built from other weights than {files.name!r} has"] * other
    named = table.measured_model
    if named is None or short_name(named) == short_name(files.name):
        return []
    return [f"loss table {table.name!r} is of {named!r}, the checkpoint is called {files.name!r}"]


def _stated(table: LossTable) -> Method | None:
    """The method that the metadata names, where it is one that can be done again."""
    found = table.info.get("method")
    return found if isinstance(found, str) and found in METHODS else None
