"""What every sequence costs and loses at every mean width that a bit budget can have, priced by the model itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from perfmodel.bitwidth import BITS, losses_for
from perfmodel.errors import PerfModelError, PolicyError
from perfmodel.evaluation import percentile_of
from perfmodel.point import hardware_point
from perfmodel.policies import POLICIES
from perfmodel.policies.placed import PlacedExperts
from perfmodel.progress import Report
from perfmodel.routing import statistics

if TYPE_CHECKING:
    from perfmodel.run import Run
    from perfmodel.scenario import Scenario

#: What is chosen, as an axis.
AXIS = "policy.mean_bits"
#: Means that are priced at most; of more, about so many are spread evenly, whole widths among them.
MOST_MEANS = 257

Floats = NDArray[np.float64]


class Front(NamedTuple):
    """Every mean that was priced.

    mean_bits : float64 [M], rising [bit]; what the budget says.
    spent_bits : float64 [S, M], mean width that every sequence's near-data experts really have, which a budget that is
        a ceiling may leave below it [bit]; NaN where none is quantised.
    latency_s, loss, noise : float64 [S, M], of every sequence's own decode steps; NaN where unknown.
    pooled_latency_s, pooled_loss, pooled_noise : float64 [M], of all sequences together, with one mean for all.
    variance : float64 [S], mean output variance of the experts that every sequence picks while decoding.
    tokens, picks : int64 [S], decode steps and assigned picks of every sequence.
    thinned : means that can be reached, where they are more than were priced; else 0.
    """

    mean_bits: Floats
    spent_bits: Floats
    latency_s: Floats
    loss: Floats
    noise: Floats
    pooled_latency_s: Floats
    pooled_loss: Floats
    pooled_noise: Floats
    variance: Floats
    tokens: NDArray[np.int64]
    picks: NDArray[np.int64]
    thinned: int


def priced_front(scenario: Scenario, label: str, metric: str, progress: Report | None = None) -> Front:
    """All means of one policy, each planned once for all sequences.

    metric : ``tpot_mean_s`` or a percentile of the time per output token. progress : as in `control.tune`.

    Raises
    ------
    PerfModelError : a policy without a bit budget, one whose text sets it, or one that keeps no expert near memory.
    PolicyError, PlacementError, TraceError : no plan at any whole width; the first reason.
    """
    rule = _budgeted(scenario, label)
    first = _any_plan(scenario, label)
    kept = first.model.num_experts - int(first.plan.gpu_experts)
    if kept == 0:
        raise PerfModelError(
            f"tune: policy {label} keeps all {first.model.num_experts} experts of a layer on the GPU, so there is no"
            f" width to choose; allowed: gpu_experts from 0 to {first.model.num_experts - 1}"
        )
    layers = len(first.model.moe_layers) if rule.scope == "model" else 1
    menu = [int(width) for width in first.plan.replica_bits]
    means, thinned = _means(menu, kept * layers, whole=rule.selector == "uniform")
    found: list[float] = []
    columns: list[tuple[Floats, ...]] = []
    pooled: list[tuple[float, float, float]] = []
    for mean, run in _runs(scenario, label, means, progress):
        point = hardware_point(run.system)
        own = run.sequence_quality
        columns.append((_spent(run), sequence_latency(run, metric), own.loss, own.noise))
        latency = float(run.metrics((metric,), point[None])[metric][0])
        pooled.append((latency, run.quality.loss, run.quality.noise))
        found.append(mean)
    spent, latency_s, loss, noise = (np.ascontiguousarray(np.stack(one, axis=1)) for one in zip(*columns, strict=True))
    pooled_latency_s, pooled_loss, pooled_noise = np.array(pooled, dtype=np.float64).T
    tokens = np.diff(first.plan.offsets).astype(np.int64)
    return Front(
        np.array(found),
        spent,
        latency_s,
        loss,
        noise,
        pooled_latency_s,
        pooled_loss,
        pooled_noise,
        _variance(first),
        tokens,
        first.sequence_quality.picks,
        thinned,
    )


def _spent(run: Run) -> Floats:
    """Mean width of the near-data experts of every sequence [S] [bit]; NaN where none is quantised."""
    spent = run.plan.sequence_bits
    return np.full(len(run.plan.offsets) - 1, np.nan) if spent is None else spent


def _variance(run: Run) -> Floats:
    """Mean output variance of the experts that every sequence picks while decoding [S]; NaN where unknown."""
    counts = statistics.selection_counts(run.replay.trace, "decode")
    variance = losses_for(run.losses, run.model).output_variance
    if variance is None:
        return np.full(len(counts), np.nan)
    return np.asarray((counts * variance).sum(axis=(1, 2)) / np.maximum(counts.sum(axis=(1, 2)), 1))


def sequence_latency(run: Run, metric: str) -> Floats:
    """Mean or percentile of the time of every sequence's own decode steps [S] [s]."""
    times = run.token_times(hardware_point(run.system))
    return np.array([latency_of(part, metric) for part in np.split(times, run.plan.offsets[1:-1])])


def latency_of(times: Floats, metric: str) -> float:
    """Mean or percentile of the times of some decode steps [s]."""
    percentile = percentile_of(metric)
    return float(np.mean(times) if percentile is None else np.percentile(times, percentile))


def _budgeted(scenario: Scenario, label: str) -> PlacedExperts:
    """The policy, which must have a bit budget that is still open."""
    rule = scenario.policy(label)
    if not isinstance(rule, PlacedExperts):
        names = ", ".join(name for name, kind in POLICIES.items() if issubclass(kind, PlacedExperts))
        raise PerfModelError(f"tune: policy {label} has no bit budget to choose; allowed: {names}")
    if rule.selector == "full":
        raise PerfModelError(
            f"tune: policy {label} keeps every expert at its stored precision; allowed: another selector than full"
        )
    options = {item.partition("=")[0].strip() for item in label.partition(":")[2].split(",")}
    if "mean_bits" in options and label != rule.spec:
        raise PerfModelError(f"tune: policy {label} sets mean_bits itself; leave it out, as it is what is chosen")
    return rule


def _any_plan(scenario: Scenario, label: str) -> Run:
    """A plan at some whole width, which every menu that holds the width can spend exactly."""
    refusal: PolicyError | None = None
    for width in reversed(BITS):
        try:
            return scenario.run(label, {AXIS: float(width)})
        except PolicyError as error:
            refusal = refusal or error
    assert refusal is not None
    raise refusal


def _means(menu: list[int], experts: int, *, whole: bool) -> tuple[list[float], int]:
    """Means to price, rising; and how many there are, where they are too many.

    experts : that share a budget. whole : only whole widths.
    """
    low, high = menu[0], menu[-1]
    if whole:
        return [float(width) for width in menu], 0
    steps = experts * (high - low)
    if steps < MOST_MEANS:
        return [low + step / experts for step in range(steps + 1)], 0
    spread = np.linspace(0, steps, MOST_MEANS).round().astype(np.int64)
    chosen = np.union1d(spread, [experts * (width - low) for width in menu])
    return [low + step / experts for step in chosen.tolist()], steps + 1


def _runs(scenario: Scenario, label: str, means: list[float], progress: Report | None) -> Iterator[tuple[float, Run]]:
    """Every mean that has a plan: widths with gaps between them do not reach all of them exactly."""
    for done, mean in enumerate(means):
        if progress is not None:
            progress(done, len(means))
        try:
            run = scenario.run(label, {AXIS: mean})
        except PolicyError:
            continue
        yield mean, run
