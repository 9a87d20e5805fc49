"""Robust least squares on logarithms: the same answer on every run, also where a model has kinks."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from perfmodel.errors import SpecError

Floats = NDArray[np.float64]
#: Log constants of many candidates -> log predictions of every row: [N, P] -> [N, R].
Predict = Callable[[Floats], Floats]

#: Residuals (in ln) beyond about this size weigh linearly, so that a few odd rows do not steer the constants.
ROBUST_SCALE = 0.15
#: Constants are found to about this share of themselves; a quick fit, for an error on held-out rows, to the second.
FINE, COARSE = 1e-5, 2e-3
_STEP = 1e-6
_FIRST_STEP = 0.02
_TOLERANCE, _QUICK_TOLERANCE = 1e-7, 1e-5
_MOST_STEPS = 200


class Posed(NamedTuple):
    """One least-squares question in P logarithms x: the sum over rows of weight * soft-L1(predict(x) - target), and
    weakly ((x - centre) / width)^2.

    predict : [N, P] -> [N, R]. target, weights : [R]. low, high : bounds [P].
    centre, width : [P] prior of x; a width of inf says nothing about that constant.
    """

    predict: Predict
    target: Floats
    weights: Floats
    low: Floats
    high: Floats
    centre: Floats
    width: Floats

    def errors(self, logs: Floats) -> Floats:
        """Residuals of candidates [N, P] -> [N, R + P]: the rows', then the priors', where a constant that is one
        width away from its centre weighs as much as a row that is ROBUST_SCALE off."""
        rows = self.predict(logs) - self.target
        if not np.isfinite(rows).all():
            bad = int(np.flatnonzero(~np.isfinite(rows).all(axis=0))[0])
            raise SpecError(f"fit: the prediction of row {bad} is not a positive finite number at some constants")
        return np.concatenate([rows, ROBUST_SCALE / self.width * (logs - self.centre)], axis=1)

    def costs(self, logs: Floats) -> Floats:
        """What is minimised, for candidates [N, P] -> [N]."""
        squares = (self.errors(logs) / ROBUST_SCALE) ** 2
        return np.asarray((np.sqrt(1.0 + squares) - 1.0) @ self._all_weights())

    def _all_weights(self) -> Floats:
        return np.concatenate([self.weights, np.ones(len(self.low))])

    def slopes(self, logs: Floats) -> tuple[Floats, Floats]:
        """Residuals [R + P] at one place [P], and their derivatives [R + P, P], from one call."""
        found = self.errors(logs + np.vstack([np.zeros(len(logs)), _STEP * np.eye(len(logs))]))
        return found[0], (found[1:] - found[0]).T / _STEP

    def solve(self, start: Floats, *, quick: bool = False) -> Floats:
        """The logarithms [P] that minimise the cost, from ``start``."""
        tolerance = _QUICK_TOLERANCE if quick else _TOLERANCE

        @functools.lru_cache(maxsize=4)
        def at(place: bytes) -> tuple[Floats, Floats]:
            return self.slopes(np.frombuffer(place))

        weights = self._all_weights()

        def residuals(x: Floats) -> Floats:
            return at(x.tobytes())[0]

        def jacobian(x: Floats) -> Floats:
            return at(x.tobytes())[1]

        def loss(z: Any) -> Any:
            root = np.sqrt(1.0 + z)
            return weights * np.stack([2.0 * (root - 1.0), 1.0 / root, -0.5 / root**3])

        margin = 10 * _STEP
        solution = least_squares(
            residuals,
            np.clip(start, self.low + margin, self.high - margin),
            jac=jacobian,
            bounds=(self.low, self.high - 2 * _STEP),
            loss=loss,  # type: ignore[arg-type]  # the weights are those of all rows, which the type does not say
            f_scale=ROBUST_SCALE,
            xtol=tolerance,
            ftol=tolerance,
            gtol=tolerance,
            max_nfev=_MOST_STEPS,
        )
        # Linear algebra libraries may differ in the last bits from run to run; starting from four decimals hides that.
        return self._polish(np.clip(np.round(solution.x, 4), self.low, self.high), quick)

    def _polish(self, x: Floats, quick: bool) -> Floats:
        """Walk downhill from ``x`` without derivatives, along every constant and, unless it is to be quick, along the
        diagonals of every pair.

        Where another side of a maximum takes over, a model has a kink on which a step along the gradient gets stuck.
        """
        directions, tolerance = _directions(len(x), pairs=not quick), COARSE if quick else FINE
        step, best = _FIRST_STEP, float(self.costs(x[None, :])[0])
        while step > tolerance:
            places = np.clip(x + step * directions, self.low, self.high)
            costs = self.costs(places)
            lowest = int(np.argmin(costs))
            # Less than this is rounding, which may differ from run to run.
            if costs[lowest] < best * (1.0 - 1e-12):
                x, best = places[lowest], float(costs[lowest])
            else:
                step /= 2.0
        return x


@functools.cache
def _directions(size: int, *, pairs: bool) -> Floats:
    """Steps of +-1 along each of ``size`` axes [2 size, size]; with the diagonals of each pair [2 size^2, size]."""
    axes = np.eye(size)
    diagonals = [axes[i] + sign * axes[j] for i in range(size) for j in range(i) for sign in (1.0, -1.0)]
    one_way = np.array([*axes, *diagonals] if pairs else axes)
    return np.concatenate([one_way, -one_way])
