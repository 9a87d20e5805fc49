"""Fit a few hardware constants to published figures, and say how far the fit can be trusted."""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from perfmodel.errors import SpecError
from perfmodel.evidence.figures import geometric_mean_error
from perfmodel.hardware import System
from perfmodel.kernels import point as place
from perfmodel.point import hardware_point

#: Residuals (in ln) beyond about this size weigh linearly, so that one odd figure does not steer the constants.
ROBUST_SCALE = 0.1
#: How far a constant may move from its evidence, either way, as a factor.
WIDEST_FACTOR = 8.0
#: The constants that can be fitted, and the places of the hardware point that each scales.
FITTABLE = {
    "gpu.memory_efficiency": (place.GPU_BANDWIDTH, place.EXPERT_BANDWIDTH),
    "gpu.layer_overhead_us": (place.LAYER_OVERHEAD,),
    "ndp.dram_efficiency": (place.NDP_BANDWIDTH,),
    "link.bandwidth_gb_per_s": (place.LINK_BANDWIDTH,),
}
_STEP = 1e-6
_FIRST_STEP = 0.02
_TOLERANCE = 1e-6

#: Logarithms of the fitted figures at every hardware point: [N, POINT_SIZE] -> [N, figures].
Predict = Callable[[NDArray[np.float64]], NDArray[np.float64]]


class Fit(NamedTuple):
    """Constants fitted to figures.

    keys, values : spec keys and their fitted values, in the units of the spec file.
    residuals : float64 [figures], ln(computed / published).
    left_out : float64 [figures], the same for each figure when the constants are fitted to the others alone.
    """

    keys: tuple[str, ...]
    values: tuple[float, ...]
    residuals: NDArray[np.float64]
    left_out: NDArray[np.float64] | None

    @property
    def geomean_error(self) -> float:
        """Geometric-mean error over the fitted figures."""
        return geometric_mean_error([abs(float(r)) for r in self.residuals])

    @property
    def leave_one_out_geomean_error(self) -> float | None:
        """The same over figures that the constants have not seen."""
        return None if self.left_out is None else geometric_mean_error([abs(float(r)) for r in self.left_out])

    def overrides(self) -> dict[str, float]:
        """The fitted values as overrides of a system."""
        return dict(zip(self.keys, self.values, strict=True))


def fitted_system(system: System, values: dict[str, float], citation: str) -> System:
    """The system with fitted values in place, marked as calibrated."""
    return system.with_values(values, source="calibrated", citation=citation)


def _bounds(system: System, keys: Sequence[str]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    start = np.log([system.get(key) for key in keys])
    reach = math.log(WIDEST_FACTOR)
    # An efficiency above 1 means nothing; a bandwidth may exceed a stated peak, which the system then flags.
    ceiling = np.array([0.0 if key.endswith("efficiency") else np.inf for key in keys])
    return start - reach, np.minimum(start + reach, ceiling)


def scaled_points(system: System, keys: Sequence[str], logs: NDArray[np.float64]) -> NDArray[np.float64]:
    """Hardware points of the system with the constants ``keys`` at exp(``logs``) [N, keys] -> [N, POINT_SIZE].

    Every constant that can be fitted scales places of the point, so no spec is validated on the way.
    """
    points = np.tile(hardware_point(system), (len(logs), 1))
    for column, key in enumerate(keys):
        points[:, FITTABLE[key]] *= np.exp(logs[:, column, None]) / system.get(key)
    return points


def _solve(
    system: System, keys: tuple[str, ...], predict: Predict, target: NDArray[np.float64], start: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Logarithms of the fitted constants."""
    steps = np.vstack([np.zeros(len(keys)), _STEP * np.eye(len(keys))])

    @functools.lru_cache(maxsize=4)
    def at(logs: bytes) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        # Residuals and their derivatives come from one call, because a point more costs almost nothing.
        predicted = predict(scaled_points(system, keys, np.frombuffer(logs) + steps))
        return predicted[0] - target, (predicted[1:] - predicted[0]).T / _STEP

    def residuals(x: NDArray[np.float64]) -> NDArray[np.float64]:
        return at(x.tobytes())[0]

    def jacobian(x: NDArray[np.float64]) -> NDArray[np.float64]:
        return at(x.tobytes())[1]

    low, high = _bounds(system, keys)
    solution = least_squares(
        residuals,
        np.clip(start, low + 10 * _STEP, high - 10 * _STEP),
        jac=jacobian,
        bounds=(low, high - 2 * _STEP),
        loss="soft_l1",
        f_scale=ROBUST_SCALE,
        xtol=_TOLERANCE,
        ftol=_TOLERANCE,
        gtol=_TOLERANCE,
    )

    def cost(logs: NDArray[np.float64]) -> NDArray[np.float64]:
        scaled = (predict(scaled_points(system, keys, logs)) - target) / ROBUST_SCALE
        return np.asarray((np.sqrt(1.0 + scaled**2) - 1.0).sum(axis=1))

    # Linear algebra libraries may differ in the last bits from run to run; starting from four decimals hides that.
    return _polish(cost, np.clip(np.round(solution.x, 4), low, high), low, high)


def _polish(
    cost: Callable[[NDArray[np.float64]], NDArray[np.float64]],
    x: NDArray[np.float64],
    low: NDArray[np.float64],
    high: NDArray[np.float64],
) -> NDArray[np.float64]:
    """Walk downhill from ``x`` without derivatives; ``cost`` takes many places at once [N, keys] -> [N].

    Where the slower side of a layer changes, the model has a kink on which a step along the gradient gets stuck.
    """
    directions = np.array(list(itertools.product((-1.0, 0.0, 1.0), repeat=len(x))))
    directions = directions[np.any(directions != 0.0, axis=1)]
    step, best = _FIRST_STEP, float(cost(x[None, :])[0])
    while step > _TOLERANCE:
        places = np.clip(x + step * directions, low, high)
        costs = cost(places)
        lowest = int(np.argmin(costs))
        if costs[lowest] < best:
            x, best = places[lowest], float(costs[lowest])
        else:
            step /= 2.0
    return x


def calibrate(
    system: System,
    keys: Sequence[str],
    predict: Predict,
    published: Sequence[float],
    *,
    leave_one_out: bool = True,
    start: Sequence[float] | None = None,
) -> Fit:
    """Fit the constants ``keys`` of a system to published figures.

    Minimises the soft-L1 loss of ln(computed / published), starting from the system's own values.

    Parameters
    ----------
    system : where the constants start and everything else comes from.
    keys : dotted numeric keys of the system, from FITTABLE; positive values.
    predict : logarithms of the figures at hardware points, [N, POINT_SIZE] -> [N, figures].
    published : the figures, positive, more of them than constants.
    leave_one_out : fit again without each figure in turn.
    start : values to start from instead of the system's own, which saves steps near a known fit.

    Raises
    ------
    SpecError : a constant that cannot be fitted, too few figures, or figures that are not positive.
    """
    names = tuple(keys)
    unknown = [key for key in names if key not in FITTABLE]
    if unknown:
        raise SpecError(f"calibrate: found key {unknown[0]!r}, allowed {', '.join(FITTABLE)}")
    if len(published) <= len(names) or not all(0.0 < value < math.inf for value in published):
        raise SpecError(
            f"calibrate: found figures {list(published)} for {len(names)} constants, allowed: more figures than"
            " constants, each positive and finite"
        )
    target = np.log(np.asarray(published, dtype=np.float64))
    begin = np.log(start if start is not None else [system.get(key) for key in names])
    best = _solve(system, names, predict, target, begin)
    residuals = predict(scaled_points(system, names, best[None, :]))[0] - target
    left_out = None
    if leave_one_out:
        left_out = np.empty(len(target))
        for i in range(len(target)):
            keep = np.arange(len(target)) != i

            def others(points: NDArray[np.float64], keep: NDArray[np.bool_] = keep) -> NDArray[np.float64]:
                return predict(points)[:, keep]

            x = _solve(system, names, others, target[keep], best)
            left_out[i] = (predict(scaled_points(system, names, x[None, :]))[0] - target)[i]
    return Fit(names, tuple(float(v) for v in np.exp(best)), residuals, left_out)
