"""Prices of many hardware values at once, plan by plan."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfmodel.errors import PerfModelError
from perfmodel.point import hardware_points, without_timings
from perfmodel.policies import Policy
from perfmodel.scenario.axis import FILES
from perfmodel.scenario.places import distinct_places, extent, part_of
from perfmodel.scenario.plans import INFEASIBLE, Plans, replans


def price_points(
    plans: Plans,
    rule: Policy,
    fixed: Mapping[str, Any],
    arrays: Mapping[str, NDArray[np.float64]],
    shape: tuple[int, ...],
    metrics: tuple[str, ...],
    infeasible: dict[str, int] | None,
) -> dict[str, NDArray[np.float64]]:
    """Metrics of a policy, each of a shape to which all arrays of hardware values broadcast.

    Keys for which the policy replans are gone through value by value; the others are priced together.

    fixed : files and workload that differ from the scenario's. infeasible : as in `Scenario.prices`.
    """
    planned = {key: array for key, array in arrays.items() if replans(rule, key)}
    free = {key: array for key, array in arrays.items() if key not in planned}
    if all(array.size == 1 for array in planned.values()):
        values = {key: array.item() for key, array in planned.items()}
        return _one_plan(plans, rule, fixed, values, free, shape, metrics, infeasible)
    found = {name: np.full(shape, np.nan) for name in metrics}
    for place, values in distinct_places(planned, shape):
        part = {key: part_of(array, place, len(shape)) for key, array in free.items()}
        size = np.broadcast_shapes(*(array.shape for array in part.values()), extent(place, shape))
        some = _one_plan(plans, rule, fixed, values, part, size, metrics, infeasible)
        for name in metrics:
            found[name][place] = some[name]
    return found


def _one_plan(
    plans: Plans,
    rule: Policy,
    fixed: Mapping[str, Any],
    planned: Mapping[str, float],
    free: Mapping[str, NDArray[np.float64]],
    shape: tuple[int, ...],
    metrics: tuple[str, ...],
    infeasible: dict[str, int] | None,
) -> dict[str, NDArray[np.float64]]:
    """Prices of one plan, in an array of the given shape."""
    for kind in FILES:
        plans.file(kind, fixed.get(kind))  # one that cannot be read is a mistake, and not a point without a plan
    try:
        run = plans.run(rule, fixed, planned)
    except INFEASIBLE as error:
        return no_plan(error, shape, metrics, infeasible)
    own = np.broadcast_shapes(*(array.shape for array in free.values()))
    refused: dict[str, NDArray[np.bool_]] = {}
    settled = without_timings(run.system, dict(free), None if infeasible is None else refused)
    priced = run.metrics(metrics, hardware_points(run.system, settled))
    found = {name: values.reshape(own) for name, values in priced.items()}
    if own != shape:
        found = {name: np.broadcast_to(found[name], shape).copy() for name in metrics}
    for reason, mask in refused.items():
        lost = np.broadcast_to(mask, shape)
        for values in found.values():
            values[lost] = np.nan
        _count(infeasible, f"{reason}; axes that belong together can be zipped", int(lost.sum()))
    return found


def no_plan(
    error: PerfModelError, shape: tuple[int, ...], metrics: tuple[str, ...], infeasible: dict[str, int] | None
) -> dict[str, NDArray[np.float64]]:
    """Points without a plan: NaN everywhere, and counted; where nobody counts them, the reason is raised."""
    if infeasible is None:
        raise error
    _count(infeasible, str(error), int(np.prod(shape)))
    return {name: np.full(shape, np.nan) for name in metrics}


def _count(infeasible: dict[str, int] | None, reason: str, points: int) -> None:
    if infeasible is not None:
        infeasible[reason] = infeasible.get(reason, 0) + points
