"""Plans and prices the cases that the published figures need, each plan once."""

import copy
import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from perfmodel.evidence.figures import OUTPUT, PROMPT, Figure
from perfmodel.hardware import System
from perfmodel.model import MoEModel
from perfmodel.routing import Replay, RoutingTrace
from perfmodel.run import Run, make_replay, plan_run

MODELS = ("mixtral-8x7b", "mixtral-8x22b")


def policy_text(base: str, bits: float | None = None, options: str = "") -> str:
    """A policy with mean bits and further options added to its own."""
    name, _, own = base.partition(":")
    parts = [part for part in (f"mean_bits={bits:g}" if bits is not None else "", own, options) if part]
    return f"{name}:{','.join(parts)}" if parts else name


class Case(NamedTuple):
    """One evaluation that figures need."""

    model: str
    policy: str
    output: int


class Bench:
    """Plans and prices cases on one trace, each plan once."""

    def __init__(self, trace: RoutingTrace, system: System) -> None:
        self.trace, self.system = trace, system
        self.models = {name: MoEModel.from_config(name) for name in MODELS}
        self._replays: dict[tuple[str, int], Replay] = {}
        self._runs: dict[Case, Run] = {}

    def branch(self) -> "Bench":
        """A bench that shares what is planned so far and forgets its own plans when it is dropped."""
        other = copy.copy(self)
        other._replays, other._runs = dict(self._replays), dict(self._runs)
        return other

    def forget(self, unless: Callable[[Case], bool]) -> None:
        """Drop plans that are no longer needed; a plan on a long trace takes megabytes."""
        self._runs = {case: run for case, run in self._runs.items() if unless(case)}
        kept = {(case.model, case.output) for case in self._runs}
        self._replays = {key: replay for key, replay in self._replays.items() if key in kept}

    def run(self, case: Case) -> Run:
        """The plan of a case. A trace with other layers is cycled, and its notes say so."""
        if case not in self._runs:
            model = self.models[case.model]
            key = (case.model, case.output)
            if key not in self._replays:
                self._replays[key] = make_replay(model, self.trace, PROMPT, case.output, "cycle")
            self._runs[case] = plan_run(model, self.system, self._replays[key], case.policy)
        return self._runs[case]


def predictor(
    bench: Bench, figures: tuple[Figure, ...], readings: Mapping[str, str]
) -> Callable[[NDArray[np.float64]], NDArray[np.float64]]:
    """Logarithms of the fitted figures at hardware points, from mean token times alone."""

    def predict(points: NDArray[np.float64]) -> NDArray[np.float64]:
        @functools.cache
        def log_rate(model: str, name: str, bits: float | None) -> NDArray[np.float64]:
            case = Case(model, policy_text(readings.get(name, name), bits), OUTPUT)
            return -np.log(bench.run(case).mean_token_s(points))

        columns = []
        for figure in figures:
            value = log_rate(figure.model, figure.system, figure.bits)
            if figure.baseline is not None:
                value = value - log_rate(figure.model, figure.baseline, None)
            columns.append(value)
        return np.stack(columns, axis=1)

    return predict
