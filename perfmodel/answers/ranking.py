"""Every policy that applies, priced on one trace with the same GPU memory, in the order of a metric.

Equal memory: the GPU has so many bytes for every policy. Each keeps there what its rule wants of the network and the
KV cache of the longest context, and fills what is left with experts as its rule allows (`Policy.at_capacity`). An
option that a text spells out is kept as it is, even where the memory is then not filled. What is behind the link, host
memory or a near-data device, is the system's and is not made equal.

Policies are never ordered by hit rate: two caches with equal hit rates differ in what a miss costs, what is copied
ahead, and how much of it is hidden.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from perfmodel.answers.cache_bound import CacheSize, belady_hit_rate, cache_size
from perfmodel.answers.ranked import NoPolicyError, Ranked, Ranking, Refused, grouped
from perfmodel.answers.targets import in_other_units, unit_is_missing
from perfmodel.bitwidth import LossTable, losses_for
from perfmodel.errors import PerfModelError, PlacementError, PolicyError, SpecError, TraceError
from perfmodel.evaluation import METRICS, Metric, percentile_of
from perfmodel.evaluation import metric as find_metric
from perfmodel.evidence.uncertainty import interval_for
from perfmodel.hardware import EngineSpec
from perfmodel.hardware.base import shown, suggestion
from perfmodel.hardware.system import System
from perfmodel.model import MoEModel
from perfmodel.point import Points, hardware_point
from perfmodel.policies import POLICIES, Executor, Plan, PlanInputs, Policy
from perfmodel.routing.replay import BatchOf
from perfmodel.run import Run, make_replay, plan_run
from perfmodel.scenario.inputs import check_layers, checked_tokens, load_input, named_policies, under_engine
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
#: Widths that experts may be given [bit].
_NARROWEST, _WIDEST = 1.0, 32.0
#: Metrics that are named where an unknown one was asked for.
_EXAMPLES = ("tpot_ms", "tok_per_s", "tpot_p95_ms", "ttft_s", "end_to_end_s", "gpu_memory_gb", "quant_loss")


def rank(
    model: MoEModel | str | os.PathLike[str],
    system: System | str | os.PathLike[str],
    trace: RoutingTrace | str | os.PathLike[str],
    policies: Policy | str | Sequence[Policy | str] | None = None,
    *,
    prompt: int | None = None,
    output: int | None = None,
    batch: int = 1,
    batch_of: BatchOf = "sequences",
    micro_batch: int | None = None,
    memory_budget_gb: float | None = None,
    by: str = "tpot_mean_s",
    losses: LossTable | str | os.PathLike[str] | None = None,
    layers: Literal["cycle"] | None = None,
    values: Mapping[str, float | str] | None = None,
    bits: float | None = None,
    engine: EngineSpec | str | os.PathLike[str] | None = None,
) -> Ranking:
    """Every policy that applies, priced on the same trace with the same GPU memory, sorted by a metric.

    Parameters
    ----------
    model, system, trace, prompt, output, batch, batch_of, micro_batch, losses, layers : as in `evaluate`; a loss table
        also by name or path.
    policies : policies or their texts; ``all``, the default, stands for every one with its defaults. The memory of a
        text is filled (see `Policy.at_capacity`) unless that changes an option that it spells out; a policy that is
        given as an object spells out all.
    memory_budget_gb : GPU memory of every policy [GB]; by default the system's.
    by : any metric of ``evaluation.METRICS`` but the hit rate, which does not predict speed; also in other units, such
        as ``tpot_ms`` and ``tok_per_s``.
    values : other values of the system, by dotted key.
    bits : stored bits a weight of every policy that has an option ``bits`` and whose text does not set it [bit].
    engine : inference engine of the system, by name, path or object; ``none`` for no engine, None for its own.

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
    machine = under_engine(machine, engine)
    card, machine, changed = _memory_gb(machine), *_with_values(machine, memory_budget_gb, values)
    prompt, output = checked_tokens("prompt", prompt), checked_tokens("output", output)
    check_layers(layers)
    rules, labels = named_policies(_every(policies))
    rules, given = _with_bits(rules, labels, bits)
    replay = make_replay(network, recorded, prompt, output, layers, batch, batch_of)
    if not replay.trace.has_decode:
        raise TraceError("the trace holds no decode step in some sequence, and decode is what is priced")
    used = losses_for(table, network)
    inputs = PlanInputs(network, machine, replay, table)
    known: dict[CacheSize, float] = {}
    rows, refused = [], []
    for rule, label in zip(rules, labels, strict=True):
        filled = rule
        try:
            filled = at_capacity(rule, label, inputs)
            run = plan_run(network, machine, replay, filled, losses=table, micro_batch=micro_batch)
            rows.append(_ranked(run, label, metric, inputs, known))
        except _DOES_NOT_APPLY as error:
            reason = " ".join(str(error).split()).replace(filled.spec, rule.name)
            refused.append(Refused(label, reason, isinstance(error, PlacementError)))
    if not rows:
        raise NoPolicyError(f"rank: no policy applies to {network.name} on {machine.name}", refused)
    above = f"{machine.gpu.name} has {card:g} GB; every policy was given {_memory_gb(machine):g} GB"
    return Ranking(
        metric,
        _sorted(rows, metric),
        tuple(refused),
        network,
        machine,
        (used.name, used.origin),
        (
            *([above] if _memory_gb(machine) > card else []),
            *labelled({one.label: one.evaluation.notes for one in rows}),
        ),
        changed,
        None if bits is None else float(bits),
        given,
    )


def sort_metric(by: object) -> Metric:
    """The metric that a ranking is sorted by.

    Raises PerfModelError for an unknown one, and for the hit rate.
    """
    name = by if isinstance(by, str) else ""
    other = in_other_units(name)
    base = other[0] if other is not None and name not in METRICS else name
    if base not in METRICS and percentile_of(base) is None:
        missing = unit_is_missing(name, METRICS)
        allowed = [one for one in METRICS if one != "hit_rate"]
        close = suggestion(name, [*_EXAMPLES, *allowed])
        raise PerfModelError(
            f"rank: by: metric {shown(by)} {missing}"
            if missing
            else f"rank: by: unknown metric {shown(by)}{close}, allowed one that `perfmodel sweep` takes but hit_rate,"
            f" such as {', '.join(_EXAMPLES)}"
        )
    metric = find_metric(base)
    if metric.name == "hit_rate":
        raise PerfModelError(
            "rank: by: found hit_rate, which does not predict speed: a miss costs a whole copy, a few bits, a run on"
            " the CPU or nothing that is not hidden; allowed: any other metric, such as tpot_mean_s"
        )
    return metric


def _memory_gb(system: System) -> float:
    """Memory of all GPUs together [GB]."""
    return system.gpu.memory_capacity_gb * system.gpu.devices


def _with_values(system: System, memory_gb: object, values: object) -> tuple[System, dict[str, float | str]]:
    """The system with other values and with the memory of the ranking, and what was set."""
    given: Any = {} if values is None else values
    if not isinstance(given, Mapping):
        raise PerfModelError(f"rank: values: found {shown(plain(given))}, allowed a table of values by dotted key")
    changed = system.with_values(given) if given else system
    changed.check_set(given)
    given = dict(zip(given, map(plain, given.values()), strict=True))
    if memory_gb is None:
        return changed, given
    number = real(memory_gb)
    if number is None or not 0.0 < number < math.inf:
        raise PerfModelError(f"rank: memory budget: found {shown(plain(memory_gb))}, allowed GB above 0")
    if MEMORY_KEY in given:
        raise PerfModelError(f"rank: found a memory budget and {MEMORY_KEY}, allowed: one of them")
    try:
        each = number / changed.gpu.devices
        return changed.with_values({MEMORY_KEY: each}), {**given, MEMORY_KEY: each}
    except SpecError as error:
        # The number is one of the command's own; the key of the spec would not be found in what was typed.
        said = re.sub(r"^.*'memory_capacity_gb' = ", "found ", str(error)).replace(" is out of", ", out of")
        raise PerfModelError(f"rank: memory budget: {said}") from None


def _with_bits(
    rules: tuple[Policy, ...], labels: tuple[str, ...], bits: object
) -> tuple[tuple[Policy, ...], tuple[str, ...]]:
    """The policies with this width where they have one and their text leaves it open, and which those are."""
    if bits is None:
        return rules, ()
    width = real(bits)
    if width is None or not _NARROWEST <= width <= _WIDEST:
        raise PerfModelError(
            f"rank: bits: found {shown(plain(bits))}, allowed {_NARROWEST:g} to {_WIDEST:g} bits a weight"
        )
    found, given = [], []
    option: dict[str, Any] = {"bits": width}
    for rule, label in zip(rules, labels, strict=True):
        takes = any(field.name == "bits" for field in dataclasses.fields(rule)) and "bits" not in _spelled(label)
        found.append(dataclasses.replace(rule, **option) if takes else rule)
        given += [label] if takes else []
    if not given:
        raise PerfModelError(f"rank: bits: found {width:g}, but every policy here sets its own width")
    return tuple(found), tuple(given)


def _every(policies: object) -> object:
    """The policies that were given, with those that the word ``all`` stands for in its place."""
    if policies is None:
        return list(POLICIES)
    if isinstance(policies, str | Policy):
        policies = [policies]
    if not isinstance(policies, list | tuple):
        return policies
    found: list[object] = []
    every = [isinstance(one, str) and one.strip() == ALL for one in policies]
    if sum(every) > 1:
        raise PerfModelError(f"rank: policies: {ALL} is given twice, allowed: once, beside texts with options")
    for one, stands_for_all in zip(policies, every, strict=True):
        found.extend(POLICIES if stands_for_all else [one])
    return found


def _spelled(label: str) -> set[str]:
    """Options that a text of a policy sets."""
    return {item.partition("=")[0].strip() for item in label.partition(":")[2].split(",")} - {""}


def at_capacity(rule: Policy, label: str, inputs: PlanInputs) -> Policy:
    """The policy with the GPU memory filled, unless that changes an option that its text spells out."""
    filled = rule.at_capacity(inputs.model, inputs.most_gpu_experts)
    kept = all(getattr(filled, name) == getattr(rule, name) for name in _spelled(label))
    return filled if kept else rule


def _ranked(run: Run, label: str, metric: Metric, inputs: PlanInputs, known: dict[CacheSize, float]) -> Ranked:
    value = float(run.metrics((metric.name,), Points.one(hardware_point(run.system)))[metric.name][0])
    size = cache_size(run.policy, inputs)
    if size is not None and size not in known:
        known[size] = belady_hit_rate(size, inputs)
    bound = None if size is None else known[size]
    evaluation = run.price()
    error = interval_for(evaluation, run.system)
    return Ranked(label, None if math.isnan(value) else value, evaluation, bound, _mean_bits(run.plan), error)


def _mean_bits(plan: Plan) -> float | None:
    """Mean stored bits a weight of the picks that ran while decoding [bit]."""
    picks = np.bincount(plan.picks.ravel(), minlength=len(plan.classes)).tolist()
    ran = [(n, one.bits) for n, one in zip(picks, plan.classes, strict=True) if one.executor != Executor.SKIP and n]
    total = sum(n for n, _ in ran)
    return sum(n * bits for n, bits in ran) / total if total else None


def _sorted(rows: Sequence[Ranked], metric: Metric) -> tuple[Ranked, ...]:
    """Rows from the best to the worst; equal ones as they were given, unknown ones last."""
    if all(one.value is None for one in rows):
        raise PerfModelError(
            f"rank: by: found {metric.name}, which is unknown for every policy here (no prefill in the trace, or losses"
            " that no table has); allowed: another metric, such as tpot_mean_s"
        )
    sign = 1.0 if metric.better == "lower" else -1.0
    return tuple(sorted(rows, key=lambda one: math.inf if one.value is None else sign * one.value))


__all__ = ["Ranked", "Ranking", "Refused", "grouped", "rank"]
