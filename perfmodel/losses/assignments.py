"""Which objective pays: ways to spend a bit budget, held against the optimum and against what decoding really uses.

Every sequence keeps its K most important experts on the GPU and the others near memory at few bits. For each
objective (plain sum of losses, or weighted) several rules spend the same budget on the near-data experts, and each is
shown relative to the optimum *of that objective* with one budget a layer. What an assignment costs in the decode
steps does not depend on an objective, so there all rows can be compared with each other.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfmodel import placement
from perfmodel.bitwidth import OBJECTIVES, Budget, LossTable, Objective
from perfmodel.errors import TraceError
from perfmodel.losses.choices import check_kinds, check_rest, check_size, checked_gpu_experts, checked_means, short_name
from perfmodel.losses.comparison import Comparison, Setting
from perfmodel.losses.rules import (
    HINDSIGHT,
    RANDOM_ORDERS,
    RULES,
    UNIFORM,
    NearData,
    allowed,
    choose,
    mix_exists,
    near_data,
    spent_bits,
)
from perfmodel.losses.tally import Tally, noise
from perfmodel.placement import Norm
from perfmodel.routing import RoutingTrace, statistics

Floats = NDArray[np.float64]

#: Numbers held at once in the largest array.
_CHUNK = 4_000_000
#: Additions spent on budgets for whole models, some seconds; where all sequences need more, only some get one.
_MOST_MERGED = 3e9


@dataclass(frozen=True, eq=False)
class _Work:
    """What is compared, on what, and the sums so far by (GPU experts, mean bits, objective, rule)."""

    table: LossTable
    importance: Floats
    use: Floats
    decode: Floats
    objectives: tuple[Objective, ...]
    means: tuple[float, ...]
    min_bits: int
    budget: Budget
    seed: int
    merged: NDArray[np.int64]
    tallies: dict[tuple[int, float, str, str], Tally] = field(default_factory=dict)

    def tally(self, *key: Any) -> Tally:
        return self.tallies.setdefault(key, Tally())


def compare_assignments(
    table: LossTable,
    trace: RoutingTrace,
    *,
    gpu_experts: Sequence[Any] | None = None,
    mean_bits: Sequence[Any] | None = None,
    alpha: float = 0.5,
    norm: Norm = "sum",
    min_bits: int = 2,
    budget: Budget | None = None,
    seed: int = 0,
) -> Comparison:
    """Objectives and rules that assign bit widths, for one loss table and one trace.

    Parameters
    ----------
    table : losses; layers are cut or cycled to the trace's, with a note.
    trace : routing. Unless every sequence has a prefill, importance and use come from the decode steps of the other
        sequences; without decode steps, nothing is said of them.
    gpu_experts : experts of a layer on the GPU, each from 0 to E - 1; by default 0, a quarter and a half of them.
    mean_bits : mean bits of the near-data experts [bit]; by default 2 and 3, where the table spans them.
    alpha, norm : of the importance, as in `placement.importance`.
    min_bits : least width under the rules with a floor [bit].
    budget : ``exact`` or ``at-most``, as in the selector; by default exact where the table's widths are consecutive.
    seed : of the random orders.

    The ratio of a rule with one budget a layer is the mean over sequences and layers of ``loss / optimum``; with one
    budget for the whole model it is the mean over sequences of the ratio of losses summed over layers. Layers whose
    optimum is 0 are left out. Every rule spends ``lowest + floor(n (mean - lowest)) / n`` bits on the n near-data
    experts of a layer; ``uniform`` between two widths of the table is the linear mix of these two.

    Raises PolicyError and TraceError for numbers out of range, a table of another number of experts, or a trace
    without prefill that has a single sequence.
    """
    check_kinds(table, trace)
    if trace.num_experts_inferred and trace.num_experts < table.num_experts:
        trace = trace.with_num_experts(table.num_experts)
    model = str(trace.metadata["model"])
    if trace.num_experts != table.num_experts:
        raise TraceError(
            f"loss table {table.name!r} has {table.num_experts} experts a layer, the trace of {model!r}"
            f" {trace.num_experts}; give a table of this model"
        )
    fitted = table.for_model(trace.num_layers, trace.num_experts)
    on_gpu = checked_gpu_experts(gpu_experts, trace.num_experts)
    means = checked_means(mean_bits, fitted.bits)
    check_rest(alpha, norm, min_bits, budget, seed, fitted.bits)
    importance, use, notes = sequence_importance(trace, alpha, norm)
    objectives: list[Objective] = list(OBJECTIVES)
    check_size(fitted)
    if (measured := fitted.measured_model) is not None and short_name(measured) != short_name(model):
        notes.append(f"the losses are of {measured!r}, the routing of {model!r}")
    if fitted.output_variance is None:
        objectives.remove("variance")
        notes.append(f"loss table {table.name} has no output variances, so objective variance is left out")
    gaps = bool((np.diff(fitted.bits) > 1).any())
    if gaps and budget is None:
        notes.append("the table's widths have gaps, so budgets are ceilings (at-most)")
    if not trace.phase("decode").any():
        notes.append("the trace has no decode steps, so what assignments cost there is unknown")
    merged = _merged(trace.num_sequences, fitted, on_gpu, means, len(objectives) + 1)
    if len(merged) < trace.num_sequences:
        notes.append(f"budgets for the whole model: {len(merged)} of {trace.num_sequences} sequences, to save time")
    work = _Work(
        table=fitted,
        importance=importance,
        use=use,
        decode=statistics.selection_counts(trace, "decode").astype(np.float64),
        objectives=tuple(objectives),
        means=means,
        min_bits=min_bits,
        budget=budget or ("at-most" if gaps else "exact"),
        seed=seed,
        merged=merged,
    )
    return Comparison(
        table=fitted.name,
        table_source=fitted.origin,
        trace=model,
        trace_source=str(trace.metadata["source"]),
        sequences=trace.num_sequences,
        layers=trace.num_layers,
        experts=trace.num_experts,
        bits=fitted.bits,
        alpha=alpha,
        norm=norm,
        min_bits=min_bits,
        budget=work.budget,
        seed=seed,
        settings=tuple(one for count in on_gpu for one in _settings(work, count)),
        notes=(*fitted.notes, *notes),
    )


def sequence_importance(trace: RoutingTrace, alpha: float, norm: Norm) -> tuple[Floats, Floats, list[str]]:
    """Importance and expected use of every expert [S, L, E], as known before the decode, and notes on how.

    Use is the number of picks in the sequence's prefill, or else in the decode steps of the other sequences.
    """
    if trace.has_prefill:
        found = placement.importance(trace, alpha=alpha, norm=norm)
        return found.values, statistics.selection_counts(trace, "prefill").astype(np.float64), list(found.notes)
    found = placement.importance_of_others(trace.replay(), alpha=alpha, norm=norm)
    counts = statistics.selection_counts(trace, "decode").astype(np.float64)
    note = "no prefill in every sequence: importance and use come from the decode steps of the other sequences"
    return found.values, statistics.sum_of_others(counts), [note, *found.notes]


def _settings(work: _Work, gpu_experts: int) -> Iterator[Setting]:
    """All means and objectives with so many experts on the GPU."""
    sequences, layers, experts = work.importance.shape
    size = max(1, _CHUNK // (layers * experts * len(work.table.bits)))
    generator = np.random.default_rng([work.seed, gpu_experts])
    for start in range(0, sequences, size):
        part = slice(start, start + size)
        values = (work.importance[part], work.use[part], work.decode[part])
        near = near_data(work.table, *values, gpu_experts, generator)
        merged = work.merged[(work.merged >= start) & (work.merged < start + size)] - start
        picks = work.decode[part].sum(axis=(1, 2))
        for mean in work.means:
            _add_layers(work, (gpu_experts, mean), near, picks)
            _add_models(work, (gpu_experts, mean), near.sequences(merged), picks[merged])
    for mean in work.means:
        yield from _results(work, gpu_experts, mean)


def _add_layers(work: _Work, key: tuple[int, float], near: NearData, picks: Floats) -> None:
    """Rules with one budget a layer, under every objective."""
    mean = spent_bits(key[1], near.importance.shape[-1], near.bits)
    rules = {
        name: rule
        for name, rule in RULES.items()
        if rule.scope == "layer" and allowed(rule, near.bits, work.min_bits, mean)
    }
    decode_uniform = near.loss(mean, near.decode)
    for objective in work.objectives:
        weights = near.weights(objective)
        best = near.loss(choose(rules["optimum"], near, weights, mean, work.budget, work.min_bits), weights)
        uniform = work.tally(*key, objective, UNIFORM)
        uniform.add(near.loss(mean, weights), best, "layer")
        uniform.add_decode(decode_uniform, decode_uniform, picks)
        for name, rule in rules.items():
            tally = work.tally(*key, objective, name)
            for draw in range(RANDOM_ORDERS if rule.order == "random" else 1):
                assigned = choose(rule, near, weights, mean, work.budget, work.min_bits, draw)
                tally.add(near.loss(assigned, weights), best, "layer")
                tally.add_decode(near.loss(assigned, near.decode), decode_uniform, picks)
    _add_hindsight(work, key, "optimum", near, mean, picks)


def _add_models(work: _Work, key: tuple[int, float], near: NearData, picks: Floats) -> None:
    """Rules with one budget for the whole model, under every objective."""
    if not near.num_sequences:
        return
    mean = spent_bits(key[1], near.importance.shape[-1], near.bits)
    decode_uniform = near.loss(mean, near.decode)
    for objective in work.objectives:
        weights = near.weights(objective)
        best = near.loss(choose(RULES["optimum"], near, weights, mean, work.budget, work.min_bits), weights)
        for name, rule in RULES.items():
            if rule.scope == "model":
                assigned = choose(rule, near, weights, mean, work.budget, work.min_bits)
                tally = work.tally(*key, objective, name)
                tally.add(near.loss(assigned, weights), best, "model")
                tally.add_decode(near.loss(assigned, near.decode), decode_uniform, picks)
    _add_hindsight(work, key, "model optimum", near, mean, picks)


def _add_hindsight(work: _Work, key: tuple[int, float], rule: str, near: NearData, mean: float, picks: Floats) -> None:
    """The least that decode steps can lose: an optimum that knows them."""
    assigned = choose(RULES[rule], near, near.weights(HINDSIGHT), mean, work.budget, work.min_bits)
    loss = near.loss(assigned, near.decode)
    tally = work.tally(*key, HINDSIGHT, rule)
    tally.add(loss, loss, "layer")
    tally.add_decode(loss, near.loss(mean, near.decode), picks)


def _results(work: _Work, gpu_experts: int, mean: float) -> Iterator[Setting]:
    least = {rule: work.tally(gpu_experts, mean, HINDSIGHT, rule) for rule in ("optimum", "model optimum")}
    for objective in work.objectives:
        found = {
            name: tally.result()
            for name in (UNIFORM, *RULES)
            if (tally := work.tallies.get((gpu_experts, mean, objective, name))) is not None
        }
        tallies = [work.tally(gpu_experts, mean, objective, rule) for rule in ("optimum", "random", "prefix")]
        known, random, prefix = tallies
        near = work.table.num_experts - gpu_experts
        spent = spent_bits(mean, near, work.table.bits)
        yield Setting(
            gpu_experts=gpu_experts,
            mean_bits=mean,
            spent_bits=spent,
            uniform_exists=mix_exists(spent, near, work.table.bits),
            objective=objective,
            assignments=found,
            zero_layers=known.sequences * work.table.num_layers - known.ratios,
            hindsight=least["optimum"].result().decode_vs_uniform,
            hindsight_model=least["model optimum"].result().decode_vs_uniform,
            ratio_noise=noise(random.ratio_of, prefix.ratio_of),
            decode_noise=noise(random.decode_of, prefix.decode_of, random.uniform / random.sequences),
        )


def _merged(
    sequences: int, table: LossTable, gpu_experts: Sequence[int], means: Sequence[float], objectives: int
) -> NDArray[np.int64]:
    """Sequences that get a budget for the whole model: all, or evenly spread ones where that would take long."""
    steps = [(table.num_experts - count) * (mean - table.bits[0]) for count in gpu_experts for mean in means]
    one = 2 * objectives * sum((table.num_layers * step) ** 2 for step in steps)
    count = int(np.clip(_MOST_MERGED // max(one, 1.0), 1, sequences))
    return np.unique(np.linspace(0, sequences - 1, count).round().astype(np.int64))
