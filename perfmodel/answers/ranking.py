"""Every policy that applies, priced on one trace with the same GPU memory, in the order of a metric.

Equal memory: the GPU has so many bytes for every policy. Each keeps there what its rule wants of the network and the
KV cache of the longest context, and fills what is left with experts as its rule allows (`Policy.at_capacity`). An
option that a text spells out is kept as it is, even where the memory is then not filled. What is behind the link, host
memory or a near-data device, is the system's and is not made equal.

Policies are never ordered by hit rate: two caches with equal hit rates differ in what a miss costs, what is copied
ahead, and how much of it is hidden.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from perfmodel.answers.cache_bound import CacheSize, belady_hit_rate, cache_size
from perfmodel.bitwidth import LossTable, losses_for
from perfmodel.errors import PerfModelError, PlacementError, PolicyError, SpecError, TraceError
from perfmodel.evaluation import Evaluation, Metric
from perfmodel.evaluation import metric as find_metric
from perfmodel.hardware.base import shown
from perfmodel.hardware.system import System
from perfmodel.model import MoEModel
from perfmodel.point import Points, hardware_point
from perfmodel.policies import POLICIES, PlanInputs, Policy
from perfmodel.run import Run, make_replay, plan_run
from perfmodel.scenario.inputs import check_layers, checked_tokens, load_input, named_policies
from perfmodel.scenario.notes import labelled
from perfmodel.scenario.numbers import plain, real

if TYPE_CHECKING:
    from perfmodel.routing import RoutingTrace

#: Key of the memory that is made equal.
MEMORY_KEY = "gpu.memory_capacity_gb"
#: Word that stands for every policy with its defaults, beside texts of policies.
ALL = "all"
#: Errors that say that one policy does not apply, while others do.
_DOES_NOT_APPLY = (PlacementError, PolicyError, SpecError, TraceError)


class Refused(NamedTuple):
    """A policy that does not apply, and why."""

    label: str
    reason: str


@dataclass(frozen=True)
class Ranked:
    """One policy in a ranking.

    label : the policy as it was asked for; ``evaluation.policy`` spells every option.
    value : the metric that decides, in its base unit; None where it is unknown.
    evaluation : everything else about it. belady_hit_rate : share of decode picks that a cache of the same slots would
        hit by Belady's rule [1] (see `answers.cache_bound`); None for what is no cache.
    """

    label: str
    value: float | None
    evaluation: Evaluation
    belady_hit_rate: float | None

    @property
    def gpu_memory_bytes(self) -> float:
        """GPU memory in use [byte]."""
        return self.evaluation.memory_bytes["gpu"]["total"]

    @property
    def link_bytes(self) -> float:
        """Weights and activations that cross the link in a mean decode step [byte]."""
        moved = self.evaluation.bytes_per_token
        return moved["link_weights"] + moved["link_activations"]

    @property
    def link_busy(self) -> float:
        """Share of a mean decode step in which the link works, hidden or not [1]."""
        return self.evaluation.busy_s["link"] / self.evaluation.tpot_mean_s

    @property
    def floor_share(self) -> float:
        """The bandwidth floor over the mean time per output token [1]: how near the policy is to its own traffic."""
        return self.evaluation.bandwidth_floor_s / self.evaluation.tpot_mean_s

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values, ready for JSON."""
        return {
            "label": self.label,
            "value": self.value,
            "belady_hit_rate": self.belady_hit_rate,
            "gpu_memory_bytes": self.gpu_memory_bytes,
            "link_bytes": self.link_bytes,
            "link_busy": self.link_busy,
            "floor_share": self.floor_share,
            "evaluation": self.evaluation.to_dict(),
        }


@dataclass(frozen=True)
class Ranking:
    """Policies in the order of a metric, the best first.

    metric : what decides. rows : policies that apply; those whose metric is unknown come last.
    refused : policies that do not apply. system : the machine, with the memory that was given and other values set.
    losses : name and origin of the loss table that the quality rests on. notes : what the numbers rest on.
    """

    metric: Metric
    rows: tuple[Ranked, ...]
    refused: tuple[Refused, ...]
    model: MoEModel
    system: System
    losses: tuple[str, str]
    notes: tuple[str, ...]

    @property
    def memory_gb(self) -> float:
        """GPU memory of every policy [GB]."""
        return self.system.gpu.memory_capacity_gb

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values, ready for JSON."""
        return {
            "metric": self.metric.name,
            "unit": self.metric.unit,
            "better": self.metric.better,
            "model": self.model.name,
            "system": self.system.name,
            "system_hash": self.system.content_hash(),
            "gpu_memory_gb": self.memory_gb,
            "losses": dict(zip(("name", "origin"), self.losses, strict=True)),
            "ranking": [one.to_dict() for one in self.rows],
            "refused": [one._asdict() for one in self.refused],
            "notes": list(self.notes),
        }


def rank(
    model: MoEModel | str | os.PathLike[str],
    system: System | str | os.PathLike[str],
    trace: RoutingTrace | str | os.PathLike[str],
    policies: Policy | str | Sequence[Policy | str] | None = None,
    *,
    prompt: int | None = None,
    output: int | None = None,
    memory_budget_gb: float | None = None,
    by: str = "tpot_mean_s",
    losses: LossTable | str | os.PathLike[str] | None = None,
    layers: Literal["cycle"] | None = None,
    values: Mapping[str, float | str] | None = None,
) -> Ranking:
    """Every policy that applies, priced on the same trace with the same GPU memory, sorted by a metric.

    Parameters
    ----------
    model, system, trace, prompt, output, losses, layers : as in `evaluate`; a loss table also by name or path.
    policies : policies or their texts; ``all``, the default, stands for every one with its defaults. The memory of a
        text is filled (see `Policy.at_capacity`) unless that changes an option that it spells out; a policy that is
        given as an object spells out all.
    memory_budget_gb : GPU memory of every policy [GB]; by default the system's.
    by : any metric of ``evaluation.METRICS`` but the hit rate, which does not predict speed.
    values : other values of the system, by dotted key.

    Raises
    ------
    PerfModelError : bad arguments, a metric that no policy has, or no policy that applies (with the reason of each).
    TraceError : the trace does not fit the model, or holds no decode step.
    """
    metric = sort_metric(by)
    network, machine, recorded, table = (
        load_input(kind, value)
        for kind, value in (("model", model), ("system", system), ("trace", trace), ("loss", losses))
    )
    machine = _with_values(machine, memory_budget_gb, values)
    prompt, output = checked_tokens("prompt", prompt), checked_tokens("output", output)
    check_layers(layers)
    rules, labels = named_policies(_every(policies))
    replay = make_replay(network, recorded, prompt, output, layers)
    if not replay.trace.has_decode:
        raise TraceError("the trace holds no decode step in some sequence, and decode is what is priced")
    used = losses_for(table, network)
    inputs = PlanInputs(network, machine, replay, table)
    known: dict[CacheSize, float] = {}
    rows, refused = [], []
    for rule, label in zip(rules, labels, strict=True):
        try:
            filled = at_capacity(rule, label, inputs)
            run = plan_run(network, machine, replay, filled, losses=table)
            rows.append(_ranked(run, label, metric, inputs, known))
        except _DOES_NOT_APPLY as error:
            refused.append(Refused(label, " ".join(str(error).split())))
    if not rows:
        # Without the advice that follows the first clause: one line has to hold the reasons of all.
        reasons = "; ".join(f"{', '.join(names)}: {why.partition('; ')[0]}" for names, why in grouped(refused))
        raise PolicyError(f"rank: no policy applies to {network.name} on {machine.name}: {reasons}")
    return Ranking(
        metric,
        _sorted(rows, metric),
        tuple(refused),
        network,
        machine,
        (used.name, used.origin),
        tuple(labelled({one.label: one.evaluation.notes for one in rows})),
    )


def sort_metric(by: object) -> Metric:
    """The metric that a ranking is sorted by.

    Raises PerfModelError for an unknown one, and for the hit rate.
    """
    metric = find_metric(by)
    if metric.name == "hit_rate":
        raise PerfModelError(
            "rank: by: found hit_rate, which does not predict speed: a miss costs a whole copy, a few bits, a run on"
            " the CPU or nothing that is not hidden; allowed: any other metric, such as tpot_mean_s"
        )
    return metric


def _with_values(system: System, memory_gb: object, values: object) -> System:
    """The system with other values, and with the memory of the ranking."""
    given = {} if values is None else values
    if not isinstance(given, Mapping):
        raise PerfModelError(f"rank: values: found {shown(plain(given))}, allowed a table of values by dotted key")
    if memory_gb is not None:
        number = real(memory_gb)
        if number is None or not 0.0 < number < math.inf:
            raise PerfModelError(f"rank: memory budget: found {shown(plain(memory_gb))}, allowed GB above 0")
        if MEMORY_KEY in given:
            raise PerfModelError(f"rank: found a memory budget and {MEMORY_KEY}, allowed: one of them")
        given = {**given, MEMORY_KEY: number}
    return system.with_values(given) if given else system


def _every(policies: object) -> object:
    """The policies that were given, with those that the word ``all`` stands for in its place."""
    if policies is None:
        return list(POLICIES)
    if isinstance(policies, str | Policy):
        policies = [policies]
    if not isinstance(policies, list | tuple):
        return policies
    found: list[object] = []
    for one in policies:
        found.extend(POLICIES if isinstance(one, str) and one.strip() == ALL else [one])
    return found


def at_capacity(rule: Policy, label: str, inputs: PlanInputs) -> Policy:
    """The policy with the GPU memory filled, unless that changes an option that its text spells out."""
    filled = rule.at_capacity(inputs.model, inputs.most_gpu_experts)
    spelled = {item.partition("=")[0].strip() for item in label.partition(":")[2].split(",")}
    kept = all(getattr(filled, name) == getattr(rule, name) for name in spelled - {""})
    return filled if kept else rule


def _ranked(run: Run, label: str, metric: Metric, inputs: PlanInputs, known: dict[CacheSize, float]) -> Ranked:
    value = float(run.metrics((metric.name,), Points.one(hardware_point(run.system)))[metric.name][0])
    size = cache_size(run.policy, inputs)
    if size is not None and size not in known:
        known[size] = belady_hit_rate(size, inputs)
    return Ranked(label, None if math.isnan(value) else value, run.price(), None if size is None else known[size])


def _sorted(rows: Sequence[Ranked], metric: Metric) -> tuple[Ranked, ...]:
    """Rows from the best to the worst; equal ones as they were given, unknown ones last."""
    if all(one.value is None for one in rows):
        raise PerfModelError(
            f"rank: by: found {metric.name}, which is unknown for every policy here (no prefill in the trace, or losses"
            " that no table has); allowed: another metric, such as tpot_mean_s"
        )
    sign = 1.0 if metric.better == "lower" else -1.0
    return tuple(sorted(rows, key=lambda one: math.inf if one.value is None else sign * one.value))


def grouped(refused: Sequence[Refused]) -> list[tuple[tuple[str, ...], str]]:
    """Reasons, each with the policies that it holds for; the name of the policy is not repeated in the reason."""
    found: dict[str, list[str]] = {}
    for label, reason in refused:
        name = f"policy {label.partition(':')[0].strip()}"
        found.setdefault(reason.removeprefix(name).lstrip(": "), []).append(label)
    return [(tuple(labels), reason) for reason, labels in found.items()]


__all__ = ["Ranked", "Ranking", "Refused", "rank"]
