"""Which mean every sequence gets, and how that compares with one mean for all."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from perfmodel.answers.control_front import AXIS, Floats, Front, latency_of
from perfmodel.point import hardware_point

if TYPE_CHECKING:
    from perfmodel.scenario import Scenario

#: Fixed means that stand beside the choice [bit].
_FIXED = (2.0, 3.0)


class Limit(NamedTuple):
    """What may be at most how much: the ``latency`` [s], the ``loss``, or the ``noise`` [1]."""

    what: Literal["latency", "loss", "noise"]
    value: float

    def of(self, front: Front) -> Floats:
        """What is limited, of every sequence at every mean [S, M]."""
        return {"latency": front.latency_s, "loss": front.loss, "noise": front.noise}[self.what]

    def shown(self, value: float) -> str:
        """A value of what is limited, as people read it."""
        times, unit = {"latency": (1e3, " ms"), "loss": (1.0, ""), "noise": (100.0, " %")}[self.what]
        return f"{times * value:.6g}{unit}"

    def pooled(self, front: Front) -> Floats:
        """What is limited, of all sequences together at every mean [M]."""
        pooled = {"latency": front.pooled_latency_s, "loss": front.pooled_loss, "noise": front.pooled_noise}
        return pooled[self.what]


class Compared(NamedTuple):
    """All sequences together under one rule.

    rule : how the mean is chosen. mean_bits : mean over the sequences [bit]. spent_bits : mean over the sequences of
        the width that near-data experts really have [bit].
    latency_s, loss, noise : over all decode steps and picks. met : sequences that keep the limit.
    """

    rule: str
    mean_bits: float
    spent_bits: float
    latency_s: float
    loss: float
    noise: float
    met: int


def choice(limit: Limit, front: Front) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Place of the mean that every sequence gets [S], and whether it keeps the limit [S]; see `control.tune`."""
    values = limit.of(front)
    found = [_one(limit, *row) for row in zip(values, front.latency_s, front.loss, strict=True)]
    chosen, met = zip(*found, strict=True)
    return np.array(chosen, dtype=np.int64), np.array(met, dtype=np.bool_)


def _one(limit: Limit, values: Floats, latency: Floats, loss: Floats) -> tuple[int, bool]:
    """Place of one mean among all [M], and whether it keeps the limit."""
    good = np.flatnonzero(values <= limit.value)
    if len(good):
        return _best(limit, good, latency, loss), True
    return _smallest(np.arange(len(values)), values, loss if limit.what == "latency" else latency), False


def _best(limit: Limit, good: NDArray[np.intp], latency: Floats, loss: Floats) -> int:
    """Of means that keep the limit the largest, or under a ceiling of the loss the fastest."""
    return int(good[-1]) if limit.what == "latency" else _smallest(good, latency, loss)


def _smallest(places: NDArray[np.intp], first: Floats, then: Floats) -> int:
    """The place with the smallest first number; of equal ones that with the smaller second, then the last."""

    def key(place: int) -> tuple[float, float, int]:
        one, other = (math.inf if np.isnan(row[place]) else float(row[place]) for row in (first, then))
        return one, other, -place

    best: int = min(places.tolist(), key=key)
    return best


def compared(
    scenario: Scenario, label: str, metric: str, limit: Limit, front: Front, chosen: NDArray[np.int64]
) -> tuple[Compared, ...]:
    """All sequences together: each at its own mean, all at the best single mean, and at fixed ones."""
    good = (limit.of(front) <= limit.value).sum(axis=0)

    def single(rule: str, place: int) -> Compared:
        latency, loss, noise = (one[place] for one in (front.pooled_latency_s, front.pooled_loss, front.pooled_noise))
        return Compared(
            rule,
            float(front.mean_bits[place]),
            float(front.spent_bits[:, place].mean()),
            float(latency),
            float(loss),
            float(noise),
            int(good[place]),
        )

    rows = [_own(scenario, label, metric, limit, front, chosen)]
    most = np.flatnonzero(good == good.max())
    best = _best(limit, most, front.pooled_latency_s, front.pooled_loss)
    rows.append(single("one mean, limit kept by most", best))
    place, reached = _one(limit, limit.pooled(front), front.pooled_latency_s, front.pooled_loss)
    if reached:
        rows.append(single("one mean, limit kept on average", place))
    places = [place for bits in _FIXED for place in np.flatnonzero(front.mean_bits == bits).tolist()]
    return (*rows, *(single(f"fixed {front.mean_bits[place]:g} bits", place) for place in places))


def _own(
    scenario: Scenario, label: str, metric: str, limit: Limit, front: Front, chosen: NDArray[np.int64]
) -> Compared:
    """Every sequence at its own mean: its decode steps and picks, put together with those of the others."""
    steps: list[Floats] = [np.empty(0)] * len(chosen)
    for place in np.unique(chosen).tolist():
        run = scenario.run(label, {AXIS: float(front.mean_bits[place])})
        times = np.split(run.token_times(hardware_point(run.system)), run.plan.offsets[1:-1])
        for s in np.flatnonzero(chosen == place).tolist():
            steps[s] = times[s]
    own = np.arange(len(chosen)), chosen
    share = front.picks / max(int(front.picks.sum()), 1)
    loss, variance = float((share * front.loss[own]).sum()), float((share * front.variance).sum())
    return Compared(
        rule="a mean for every sequence",
        mean_bits=float(front.mean_bits[chosen].mean()),
        spent_bits=float(front.spent_bits[own].mean()),
        latency_s=latency_of(np.concatenate(steps), metric),
        loss=loss,
        noise=0.0 if loss == 0.0 else loss / variance if variance > 0.0 else math.nan,
        met=int((limit.of(front)[own] <= limit.value).sum()),
    )
