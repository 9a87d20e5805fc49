"""Quality-aware control: the mean width of the near-data experts, chosen for every sequence on its own."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from perfmodel.answers.control_choice import Compared, Limit, choice, compared
from perfmodel.answers.control_front import AXIS, Floats, Front, priced_front
from perfmodel.answers.curve import checked_scenario, one_policy
from perfmodel.bitwidth import losses_for
from perfmodel.errors import NoAnswerError, PerfModelError
from perfmodel.evaluation import metric as find_metric
from perfmodel.evaluation import percentile_of
from perfmodel.hardware.base import shown
from perfmodel.progress import Report, check_report
from perfmodel.scenario.notes import gathered
from perfmodel.scenario.numbers import plain, real

if TYPE_CHECKING:
    from perfmodel.scenario import Scenario


@dataclass(frozen=True, eq=False)
class Tuning:
    """A mean width for every sequence, and what it costs and loses.

    Arrays go by sequence [S] and by mean [M]; what the loss table cannot tell is NaN.

    policy : without its ``mean_bits``. metric : the time per output token that counts, mean or percentile.
    limit : what may be at most how much.
    labels : names of the sequences. front : every mean that was priced (see `control_front.Front`).
    chosen : int64 [S], place of every sequence's choice among ``front.mean_bits``.
    met : bool [S], whether it keeps the limit; where it does not, no mean does, and this is the nearest.
    compared : all sequences together: by choice, with one mean for all, and with fixed means.
    notes : what the answer rests on, and what it cannot see.
    """

    policy: str
    metric: str
    limit: Limit
    labels: tuple[str, ...]
    front: Front
    chosen: NDArray[np.int64]
    met: NDArray[np.bool_]
    compared: tuple[Compared, ...]
    notes: tuple[str, ...]

    @property
    def asked(self) -> str:
        """The limit in words."""
        name = self.metric.removesuffix("_s") if self.limit.what == "latency" else self.limit.what
        return f"{name} at most {self.limit.shown(self.limit.value)}"

    @property
    def mean_bits(self) -> Floats:
        """Chosen mean width of every sequence [S] [bit]."""
        return self.front.mean_bits[self.chosen]

    @property
    def spent_bits(self) -> Floats:
        """Mean width that the near-data experts of every sequence really have at its choice [S] [bit]."""
        return self._at_choice(self.front.spent_bits)

    @property
    def latency_s(self) -> Floats:
        """Time per output token of every sequence at its choice [S] [s]."""
        return self._at_choice(self.front.latency_s)

    @property
    def loss(self) -> Floats:
        """Expected quantisation loss of every sequence at its choice [S], see `perfmodel.quality`."""
        return self._at_choice(self.front.loss)

    @property
    def noise(self) -> Floats:
        """The same as a share of the variance of the experts' output [S] [1]."""
        return self._at_choice(self.front.noise)

    def _at_choice(self, values: Floats) -> Floats:
        return values[np.arange(len(self.chosen)), self.chosen]

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values, ready for JSON; None stands for what is unknown."""
        rows = zip(
            self.labels, self.front.tokens.tolist(), self.mean_bits.tolist(), self.spent_bits.tolist(),
            self.latency_s.tolist(), self.loss.tolist(), self.noise.tolist(), self.met.tolist(), strict=True,
        )  # fmt: skip
        names = ("label", "tokens", "mean_bits", "spent_bits", "latency_s", "loss", "noise", "met")
        arrays = {name: value.tolist() for name, value in self.front._asdict().items() if name != "thinned"}
        found = {
            "policy": self.policy,
            "metric": self.metric,
            "limited": self.limit.what,
            "limit": self.limit.value,
            "sequences": [dict(zip(names, row, strict=True)) for row in rows],
            "compared": [one._asdict() for one in self.compared],
            "front": arrays,
            "notes": list(self.notes),
        }
        cleaned: dict[str, Any] = _without_nan(found)
        return cleaned


def tune(
    scenario: Scenario,
    *,
    target_tpot_ms: float | None = None,
    max_loss: float | None = None,
    max_noise: float | str | None = None,
    metric: str = "mean",
    policy: str | int | None = None,
    progress: Report | None = None,
) -> Tuning:
    """The mean width of the near-data experts of every sequence, from a limit on its latency or on its loss.

    Every mean that the bit budget can have is planned and priced (of very many, some that are evenly spread), for the
    routing that every sequence really had. Nothing is assumed to rise or fall along the means. Exactly one limit:

    - a target: every sequence gets the largest mean whose time per output token is at most the target;
    - a ceiling of the loss or noise: the mean with the smallest time per output token whose loss or noise is at most
      the ceiling (of equal times the smaller loss, then the larger mean).

    A sequence that keeps the limit at no mean gets the one that comes nearest.

    Parameters
    ----------
    scenario : what is priced; sequences are those of its trace.
    target_tpot_ms : limit of the time per output token of every sequence [ms].
    max_loss : limit of every sequence's expected quantisation loss, in the unit of the loss table.
    max_noise : the same as a share of the variance of the experts' unquantised output [1], at most 1; or a text such
        as ``3%``.
    metric : which time per output token: ``mean``, ``max``, or a percentile of the sequence's own decode steps such
        as ``p99``.
    policy : which of the scenario's policies, by text or number; needed only if there are several.
    progress : called with the means that are priced and all that will be.

    Raises
    ------
    PerfModelError : none or several limits, one that is no number above 0 (a ceiling may be 0), an unknown metric, or
        a policy without a bit budget, or with one that its text sets.
    PolicyError, PlacementError, TraceError : no plan.
    NoAnswerError : no sequence keeps the limit; the message says what is reached, and the details say it by sequence.
    """
    check_report("progress", progress)
    label = one_policy(checked_scenario(scenario), policy)
    limit = _limit(target_tpot_ms, max_loss, max_noise)
    name = latency_metric(metric)
    front = priced_front(scenario, label, name, progress)
    if np.isnan(limit.of(front)).all():
        raise PerfModelError(f"tune: the {limit.what} of {label} is unknown: {_why_unknown(scenario, label, front)}")
    chosen, met = choice(limit, front)
    found = Tuning(
        policy=label,
        metric=name,
        limit=limit,
        labels=_labels(scenario, label),
        front=front,
        chosen=chosen,
        met=met,
        compared=compared(scenario, label, name, limit, front, chosen),
        notes=(
            *_notes(limit, front, chosen, met),
            *_rests_on(scenario, label, front.mean_bits[np.unique(chosen)].tolist()),
        ),
    )
    if not met.any():
        raise _nowhere(found)
    return found


def latency_metric(text: object) -> str:
    """Metric of a latency as people write it: ``mean``, ``max``, ``p99``, or its full name.

    Raises
    ------
    PerfModelError : anything else.
    """
    if isinstance(text, str):
        full = text if text.startswith("tpot_") else f"tpot_{text}_s"
        if full == "tpot_mean_s" or percentile_of(full) is not None:
            percentile = percentile_of(full)
            if percentile is None or percentile <= 100.0:
                return find_metric(full).name
    raise PerfModelError(f"metric: found {shown(text)}, allowed mean, max or p0 to p100 (a percentile, such as p99)")


def _limit(target_tpot_ms: object, max_loss: object, max_noise: object) -> Limit:
    """What is limited, and to how much in base units."""
    given = {"target_tpot_ms": target_tpot_ms, "max_loss": max_loss, "max_noise": max_noise}
    stated = {name: value for name, value in given.items() if value is not None}
    if len(stated) != 1:
        found = " and ".join(stated) or "none"
        raise PerfModelError(f"tune: found {found}, allowed exactly one of {', '.join(given)}")
    ((name, value),) = stated.items()
    number = _share(value) if name == "max_noise" and isinstance(value, str) else real(value)
    ceiling = name != "target_tpot_ms"
    if number is None or not (0.0 < number < math.inf or (ceiling and number == 0.0)):
        allowed = "a number from 0" if ceiling else "a number of milliseconds above 0"
        share = ", or a text such as 3%" if name == "max_noise" else ""
        raise PerfModelError(f"tune: {_LIMITS[name]}: found {shown(plain(value))}, allowed {allowed}{share}")
    if name == "max_noise" and number > 1.0:
        allowed = "0 to 1"
        if isinstance(value, str) and value.strip().endswith("%"):
            allowed = "0 to 100%"
        elif number <= 100.0:
            allowed += f"; for {number:g} % give {number / 100:g} or {number:g}%"
        raise PerfModelError(
            f"tune: {_LIMITS[name]}: found {shown(plain(value))}, allowed a share of the variance from {allowed}"
        )
    if not ceiling:
        return Limit("latency", number * 1e-3)
    return Limit("loss" if name == "max_loss" else "noise", number)


#: What the limits are called.
_LIMITS = {
    "target_tpot_ms": "target of the time per output token",
    "max_loss": "ceiling of the loss",
    "max_noise": "ceiling of the noise",
}


def _share(text: str) -> float | None:
    """Number that a text such as ``0.03`` or ``3%`` means; None where it means none."""
    digits = text.strip()
    try:
        return float(digits.removesuffix("%")) / (100.0 if digits.endswith("%") else 1.0)
    except ValueError:
        return None


def _labels(scenario: Scenario, label: str) -> tuple[str, ...]:
    """Names of the sequences: numbers, and labels where the trace has them."""
    trace = scenario.trace
    names = trace.labels or [""] * trace.num_sequences
    return tuple(f"{number} {name}".rstrip() for number, name in enumerate(names))


def _notes(limit: Limit, front: Front, chosen: NDArray[np.int64], met: NDArray[np.bool_]) -> list[str]:
    """What the answer cannot see, or what a reader would not expect."""
    every = len(chosen)
    notes = [
        "means are chosen from the decode steps themselves, which nobody knows beforehand: the best case of control"
    ]
    if front.thinned:
        notes.append(f"{len(front.mean_bits)} of the {front.thinned} means that the budget can have were priced")
    if limit.what == "latency":
        better = [
            bool((front.loss[s, front.latency_s[s] <= limit.value] < front.loss[s, chosen[s]]).any())
            for s in np.flatnonzero(met).tolist()
        ]
        if any(better):
            notes.append(f"a smaller mean within the target loses less in {sum(better)} of {every} sequences")
    return notes


def _rests_on(scenario: Scenario, label: str, means: Iterable[float]) -> list[str]:
    """What the plans and their losses rest on."""
    return gathered(scenario, [(label, {AXIS: mean}) for mean in means], metrics=["quant_loss"])


def _why_unknown(scenario: Scenario, label: str, front: Front) -> str:
    """Why no mean has a known loss or noise, and what can be asked instead."""
    run = scenario.run(label, {AXIS: float(front.mean_bits[0])})
    table = losses_for(run.losses, run.model)
    if table.source == "assumed":
        return (
            f"no loss table of {run.model.num_experts} experts a layer is bundled, and the assumed one has no output"
            " variances; build a table (perfmodel losses build) and give it with --loss (losses), or limit the time per"
            " output token or the loss"
        )
    notes = _rests_on(scenario, label, front.mean_bits.tolist())
    return "; ".join(note.removeprefix("quality: ") for note in notes if "unknown" in note)


def _nowhere(found: Tuning) -> NoAnswerError:
    """No sequence keeps the limit: what comes nearest, and every sequence for JSON."""
    values = found.limit.of(found.front)[np.arange(len(found.chosen)), found.chosen]
    s = int(np.nanargmin(values))
    nearest = found.limit.shown(float(values[s]))
    return NoAnswerError(
        f"tune: no sequence of {found.policy} has {found.asked} at any mean; the nearest is {nearest},"
        f" sequence {found.labels[s]} at a mean of {found.mean_bits[s]:.6g} bits",
        found.to_dict(),
    )


def _without_nan(value: Any) -> Any:
    """Plain values for JSON: None for NaN."""
    if isinstance(value, dict):
        return {name: _without_nan(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_without_nan(one) for one in value]
    return None if isinstance(value, float) and math.isnan(value) else value
