"""A choice of mean widths as a labelled dataset, with every mean that was priced."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from perfmodel.answers.control_front import AXIS
from perfmodel.answers.provenance import described_by
from perfmodel.evaluation import METRICS
from perfmodel.evaluation import metric as find_metric

if TYPE_CHECKING:
    import xarray as xr

    from perfmodel.answers.control import Tuning
    from perfmodel.scenario import Scenario


def control_dataset(scenario: Scenario, found: Sequence[Tuning]) -> xr.Dataset:
    """Time and loss of every policy, sequence and mean; ``chosen`` is 1 at the choices, ``met`` where the limit holds.

    found : answers to one question, one a policy; a mean that a policy did not price is NaN.
    """
    import xarray as xr

    first = found[0]
    means = np.unique(np.concatenate([one.front.mean_bits for one in found]))
    shape = (len(found), len(first.labels), len(means))
    names = {"latency_s": find_metric(first.metric), "loss": METRICS["quant_loss"], "noise": METRICS["quant_noise"]}
    spent = np.full(shape, np.nan)
    tables = {name: np.full(shape, np.nan) for name in names}
    chosen, met = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    for p, one in enumerate(found):
        at = np.searchsorted(means, one.front.mean_bits)
        spent[p][:, at] = one.front.spent_bits
        for name, table in tables.items():
            table[p][:, at] = getattr(one.front, name)
        chosen[p, np.arange(shape[1]), at[one.chosen]] = 1
        met[p][:, at] = one.limit.of(one.front) <= one.limit.value
    dims = ("policy", "sequence", AXIS)
    option = scenario.axis(AXIS)
    coords = {
        "policy": ("policy", np.array([one.policy for one in found], dtype=object), {"long_name": "policy"}),
        "sequence": ("sequence", np.array(first.labels, dtype=object), {"long_name": "sequence of the trace"}),
        AXIS: (AXIS, means, {"units": option.unit, "long_name": option.meaning}),
    }
    data = {
        kind.name: (dims, tables[name], {"units": kind.unit, "long_name": kind.meaning, "family": kind.family})
        for name, kind in names.items()
    }
    width = {"units": "bit", "long_name": "mean bits that near-data experts really have"}
    flags = {
        "spent_bits": (dims, spent, width),
        "chosen": (dims, chosen, {"units": "1", "long_name": "1 for the mean that the sequence gets"}),
        "met": (dims, met, {"units": "1", "long_name": "1 where the limit is kept"}),
    }
    attrs = described_by(scenario, "tune", "quant_loss", [one.policy for one in found], [AXIS])
    notes = json.dumps(list(dict.fromkeys(note for one in found for note in one.notes)))
    asked = {"metric": first.metric, "limited": first.limit.what, "limit": first.limit.value, "complete": 1}
    return xr.Dataset({**data, **flags}, coords, {**attrs, "notes": notes, **asked})
