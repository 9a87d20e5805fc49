"""Which loss table serves a model, and on which model it was measured."""

import functools
from dataclasses import replace

import numpy as np

from perfmodel.bitwidth.table import LossTable
from perfmodel.errors import TraceError
from perfmodel.model import MoEModel

#: Losses of this project's own small model, measured on its weights; used where no table is given.
BUNDLED_LOSSES = "tiny-mixtral-32l-losses"
#: Losses and variances above 0 of a table that is summed over picks: no sum or ratio of sums leaves a float64.
_SMALLEST, _LARGEST = 1e-100, 1e100


@functools.lru_cache(maxsize=16)
def losses_for(given: LossTable | None, model: MoEModel) -> LossTable:
    """Loss table for a model's MoE layers.

    A table that was given must fit the model. Without one, the bundled table serves models with as many experts,
    and an assumed table the others. The notes of the result say which it is, and of which model it is.

    Raises TraceError when the given table has another number of experts, or numbers whose sums or ratios a float64
    may not hold.
    """
    chosen = given or LossTable.load(BUNDLED_LOSSES)
    _check_range(chosen)
    table = chosen.for_model(len(model.moe_layers), model.num_experts, assume=given is None)
    named = () if table.source == "assumed" else (f"losses: {_measured_on(table, model)}",)
    return replace(table, notes=(*named, *table.notes))


def _check_range(table: LossTable) -> None:
    """Refuse numbers that cannot be added up and divided safely."""
    for name, values in (("losses", table.losses), ("output_variance", table.output_variance)):
        above = np.empty(0) if values is None else values[values > 0]
        odd = above[(above < _SMALLEST) | (above > _LARGEST)]
        if odd.size:
            unit = "larger" if odd[0] > _LARGEST else "smaller"
            raise TraceError(
                f"loss table {table.name}: {name} holds {odd[0]:.6g}, allowed 0 or {_SMALLEST:g} to {_LARGEST:g};"
                f" give losses and variances in a {unit} unit"
            )


def _measured_on(table: LossTable, model: MoEModel) -> str:
    """What a table is called, and on which model it was measured where that is not the priced one."""
    name = table.measured_model
    words = {"hidden_size": "hidden size", "expert_size": "expert size", "num_layers": "layers"}
    other = [
        f"{text} {table.info[key]}"
        for key, text in words.items()
        if isinstance(table.info.get(key), int) and table.info[key] != getattr(model, key)
    ]
    if table.source == "unstated":
        return f"{table.name} ({table.origin})"
    if other or (name not in (None, model.name) and not words.keys() <= table.info.keys()):
        on = f"{name or 'a model'}{f' ({other[0]})' if other else ''}"
        return f"{table.name}, measured on {on}, not on {model.name}: ratios between widths may carry over at best"
    if name is None:
        return f"{table.name} ({table.origin}; its model is not stated)"
    return f"{table.name} ({table.origin}{'' if name == model.name else f' on {name}, of the same shape'})"
