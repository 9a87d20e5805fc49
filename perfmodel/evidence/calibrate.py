"""Fit a few hardware constants to published figures, and say how far the fit can be trusted."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from perfmodel.evidence.figures import geometric_mean_error
from perfmodel.hardware import System
from perfmodel.point import hardware_point

#: Residuals (in ln) beyond about this size weigh linearly, so that one odd figure does not steer the constants.
ROBUST_SCALE = 0.1
#: How far a constant may move from its evidence, either way, as a factor.
WIDEST_FACTOR = 8.0
_STEP = 1e-6

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


def _solve(
    system: System,
    keys: tuple[str, ...],
    predict: Predict,
    published: NDArray[np.float64],
    start: NDArray[np.float64],
) -> NDArray[np.float64]:
    """Logarithms of the fitted constants."""

    def points(logs: NDArray[np.float64]) -> NDArray[np.float64]:
        systems = (fitted_system(system, dict(zip(keys, np.exp(row), strict=True)), "being fitted") for row in logs)
        return np.stack([hardware_point(s) for s in systems])

    def residuals(x: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.asarray(predict(points(x[None, :]))[0] - published)

    def jacobian(x: NDArray[np.float64]) -> NDArray[np.float64]:
        steps = np.vstack([x - _STEP * np.eye(len(x)), x + _STEP * np.eye(len(x))])
        below, above = np.split(predict(points(steps)), 2)
        return np.asarray((above - below).T / (2 * _STEP))

    low, high = _bounds(system, keys)
    inside = np.clip(start, low + 10 * _STEP, high - 10 * _STEP)
    solution = least_squares(
        residuals,
        inside,
        jac=jacobian,
        bounds=(low, high - 2 * _STEP),
        loss="soft_l1",
        f_scale=ROBUST_SCALE,
        xtol=1e-10,
        ftol=1e-10,
        gtol=1e-10,
    )
    return np.asarray(solution.x)


def calibrate(
    system: System,
    keys: Sequence[str],
    predict: Predict,
    published: Sequence[float],
    *,
    leave_one_out: bool = True,
) -> Fit:
    """Fit the constants ``keys`` of a system to published figures.

    Minimises the soft-L1 loss of ln(computed / published), starting from the system's own values.

    Parameters
    ----------
    system : where the constants start and everything else comes from.
    keys : dotted numeric keys of the system; positive values.
    predict : logarithms of the figures at hardware points, [N, POINT_SIZE] -> [N, figures].
    published : the figures, positive, more of them than constants.
    leave_one_out : fit again without each figure in turn.
    """
    names = tuple(keys)
    target = np.log(np.asarray(published, dtype=np.float64))
    start = np.log([system.get(key) for key in names])
    best = _solve(system, names, predict, target, start)
    values = np.exp(best)
    fitted = fitted_system(system, dict(zip(names, values, strict=True)), "fitted")
    residuals = predict(hardware_point(fitted)[None, :])[0] - target
    left_out = None
    if leave_one_out:
        left_out = np.empty(len(target))
        for i in range(len(target)):
            keep = np.arange(len(target)) != i

            def others(points: NDArray[np.float64], keep: NDArray[np.bool_] = keep) -> NDArray[np.float64]:
                return predict(points)[:, keep]

            x = _solve(system, names, others, target[keep], best)
            without = fitted_system(system, dict(zip(names, np.exp(x), strict=True)), "fitted without one figure")
            left_out[i] = (predict(hardware_point(without)[None, :])[0] - target)[i]
    return Fit(names, tuple(float(v) for v in values), residuals, left_out)
