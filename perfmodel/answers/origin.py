"""Notes of some points of a sweep: those of their own plans, made again from the sweep's provenance."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from perfmodel.errors import PerfModelError
from perfmodel.scenario import Scenario
from perfmodel.scenario.notes import gathered

if TYPE_CHECKING:
    import xarray as xr

#: Points whose plans are made again; of more points these many, spread evenly.
_MOST = 64


def notes_of_points(dataset: xr.Dataset, found: xr.Dataset) -> list[str]:
    """What was assumed at some points.

    dataset : the sweep. found : points of it, one, or several along the dimension ``point``. Where the scenario
    cannot be built again, because it was in memory or its files are gone, the notes are those of the whole sweep.
    """
    own = json.loads(dataset.attrs.get("notes", "[]"))
    scenario = _scenario(dataset)
    if scenario is None:
        return [str(note) for note in own]
    size = int(found.sizes.get("point", 1))
    chosen = np.unique(np.linspace(0, size - 1, min(size, _MOST)).round().astype(np.int64)).tolist()
    places = [_place(scenario, found.isel(point=i) if "point" in found.dims else found) for i in chosen]
    notes = gathered(scenario, places, metrics=found.data_vars)
    return [*notes, f"notes are those of {_MOST} of {size} points"] if size > _MOST else notes


def _scenario(dataset: xr.Dataset) -> Scenario | None:
    """The scenario of a sweep, if it can be had."""
    from perfmodel.sweeps.dataset import scenario_of

    try:
        return scenario_of(dataset)
    except PerfModelError:
        return None


def _place(scenario: Scenario, point: xr.Dataset) -> tuple[str, dict[str, Any]]:
    """Policy and settings of one point."""
    settings = dict(_settings(scenario, point))
    return str(settings.pop("policy", scenario.labels[0])), settings


def _settings(scenario: Scenario, point: xr.Dataset) -> Iterator[tuple[str, Any]]:
    from perfmodel.sweeps.axes import plain_number

    for name, coordinate in point.coords.items():
        try:
            axis = scenario.axis(name)
        except PerfModelError:
            continue  # the number of a case or a sample, or a coordinate that was added
        value = coordinate.values.item()
        if axis.numeric:  # an axis with words among its numbers is saved as texts
            value = plain_number(value, value) if isinstance(value, str) else value
            value = int(value) if axis.whole and not isinstance(value, str) else value
        yield axis.name, value
