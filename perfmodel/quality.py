"""Expected quantisation loss of a plan: the loss table times how often the decode steps use each expert.

The loss of a pick is the output error (mean squared error) of its expert at the pick's width. A pick at the stored
precision counts 0; a pick that is skipped misses the expert's whole output and counts its output variance. These are
errors of single experts, and no accuracy follows from them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from perfmodel.bitwidth import LossTable, losses_for
from perfmodel.kernels.quality import count_picks, weigh, weigh_sequences
from perfmodel.model import MoEModel
from perfmodel.policies.base import Executor, Plan, WorkClass
from perfmodel.routing import Replay

_LOSS, _UNIFORM, _VARIANCE = 0, 1, 2


@dataclass(frozen=True)
class Quality:
    """Expected quantisation loss of the assigned decode picks of a plan, all sequences together.

    loss : mean over picks of the loss of its expert at its width; 0 at the stored precision. In the unit of the loss
        table: mean squared error of an expert's output.
    vs_uniform : the loss over that of the same picks with every quantised one at ``mean_bits`` [1]; NaN where no pick
        is quantised.
    noise : the loss over the mean output variance of the same picks [1].
    mean_bits : mean width of the quantised experts, or of the quantised picks where the policy gives widths to those
        [bit]; NaN where no pick is quantised.
    quantised, skipped : share of the picks below the stored precision, and of those that are not computed at all [1].
    notes : which table the loss rests on, and what it does not tell. What is unknown is NaN.
    """

    loss: float
    vs_uniform: float
    noise: float
    mean_bits: float
    quantised: float
    skipped: float
    notes: tuple[str, ...]


class SequenceQuality(NamedTuple):
    """The same for every sequence on its own: loss, vs_uniform and noise [S], and assigned picks [S].

    All sequences are held against the plan's ``mean_bits``.
    """

    loss: NDArray[np.float64]
    vs_uniform: NDArray[np.float64]
    noise: NDArray[np.float64]
    picks: NDArray[np.int64]


def plan_quality(model: MoEModel, replay: Replay, plan: Plan, losses: LossTable | None) -> Quality:
    """Expected quantisation loss of a plan.

    losses : loss table of the model; by default as in `bitwidth.losses_for`. It is not looked at where the plan
        neither quantises nor skips a pick: then the loss is exactly 0.

    Raises TraceError when the given table has another number of experts.
    """
    if not any(_is_lossy(work, model.expert_bits) for work in plan.classes):
        return _LOSSLESS
    counts = count_picks(plan.picks, replay.decode_ids, model.num_experts, len(plan.classes))
    by_class = counts.sum(axis=(0, 1))
    if not any(_is_lossy(work, model.expert_bits) and by_class[c] for c, work in enumerate(plan.classes)):
        return _LOSSLESS
    table = losses_for(losses, model)
    mean_bits = _mean_bits(plan, by_class, model.expert_bits)
    values = _values(plan.classes, table, model.expert_bits, mean_bits)
    sums = weigh(counts, values)
    loss, vs_uniform, noise = (float(one) for one in _figures(sums, by_class, plan.classes, model.expert_bits))
    picks = int(by_class.sum())
    skips = sum(int(by_class[c]) for c, work in enumerate(plan.classes) if work.executor == Executor.SKIP)
    quantised = int(by_class[_quantised(plan.classes, model.expert_bits)].sum())
    notes = _notes(plan.classes, by_class, table, model.expert_bits, mean_bits)
    if table.output_variance is not None and math.isnan(noise) and not math.isnan(loss):
        zero = f"the output variances of loss table {table.name} are 0 for every pick"
        notes = (*notes, f"quality: {zero}, so the share of the output's variance is unknown")
    return Quality(loss, vs_uniform, noise, mean_bits, quantised / picks, skips / picks, notes)


def sequence_quality(model: MoEModel, replay: Replay, plan: Plan, losses: LossTable | None) -> SequenceQuality:
    """Expected quantisation loss of every sequence of a plan; parameters and errors as in `plan_quality`."""
    whole = plan_quality(model, replay, plan, losses)
    if whole is _LOSSLESS:
        zero = np.zeros(len(plan.offsets) - 1)
        steps = np.add.reduceat(replay.assigned.sum(axis=(1, 2)), plan.offsets[:-1])
        return SequenceQuality(zero, np.full_like(zero, np.nan), zero.copy(), steps.astype(np.int64))
    table = losses_for(losses, model)
    values = _values(plan.classes, table, model.expert_bits, whole.mean_bits)
    sums, by_class = weigh_sequences(plan.picks, replay.decode_ids, plan.offsets, values)
    return SequenceQuality(*_figures(sums.T, by_class.T, plan.classes, model.expert_bits), by_class.sum(axis=1))


_LOSSLESS = Quality(0.0, math.nan, 0.0, math.nan, 0.0, 0.0, ())


def _is_lossy(work: WorkClass, full: float) -> bool:
    """Whether the picks of a class may lose something: skipped, or below the stored precision."""
    return work.executor == Executor.SKIP or work.bits < full


def _quantised(classes: Sequence[WorkClass], full: float) -> list[int]:
    """Numbers of the classes that are computed below the stored precision."""
    return [c for c, work in enumerate(classes) if work.executor != Executor.SKIP and work.bits < full]


def _mean_bits(plan: Plan, by_class: NDArray[np.int64], full: float) -> float:
    """Mean width of what is quantised [bit]; NaN where nothing is."""
    quantised = _quantised(plan.classes, full)
    count = by_class[quantised].sum()
    if not count:
        return math.nan
    if plan.mean_bits is not None:
        return plan.mean_bits
    return float((by_class[quantised] * [plan.classes[c].bits for c in quantised]).sum() / count)


def _values(classes: Sequence[WorkClass], table: LossTable, full: float, mean_bits: float) -> NDArray[np.float64]:
    """What one pick counts by layer, expert and class [3, L, E, C]: its loss, that at uniform bits, the variance."""
    shape = table.losses.shape[:2]
    values = np.zeros((3, *shape, len(classes)))
    variance = np.full(shape, np.nan) if table.output_variance is None else table.output_variance
    values[_VARIANCE] = variance[..., None]
    for c, work in enumerate(classes):
        if work.executor == Executor.SKIP:
            values[_LOSS, ..., c] = values[_UNIFORM, ..., c] = variance
        elif work.bits < full:
            known = work.bits in table.bits  # between two widths there is no replica that could have been measured
            values[_LOSS, ..., c] = table.at(work.bits) if known else np.nan
            values[_UNIFORM, ..., c] = table.at(mean_bits)
    return values


def _figures(
    sums: NDArray[np.float64], by_class: NDArray[np.int64], classes: Sequence[WorkClass], full: float
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Loss, its ratio to uniform bits, and noise, from sums [3, ...] and counts [C, ...]."""
    lossy = [c for c, work in enumerate(classes) if _is_lossy(work, full)]
    nothing = by_class[lossy].sum(axis=0) == 0
    quantised = by_class[_quantised(classes, full)].sum(axis=0) > 0
    picks = np.maximum(by_class.sum(axis=0), 1)
    loss, uniform, variance = (sums[i] / picks for i in (_LOSS, _UNIFORM, _VARIANCE))
    with np.errstate(divide="ignore", invalid="ignore"):
        vs_uniform = np.where(quantised & (uniform > 0), loss / uniform, np.nan)
        noise = np.where(nothing, 0.0, np.where(variance > 0, loss / variance, np.nan))
    return loss, vs_uniform, noise


def _notes(
    classes: Sequence[WorkClass], by_class: NDArray[np.int64], table: LossTable, full: float, mean_bits: float
) -> tuple[str, ...]:
    """Which table was used, and why a number is unknown."""
    used = [work for c, work in enumerate(classes) if by_class[c]]
    skipped = any(work.executor == Executor.SKIP for work in used)
    widths = {work.bits for work in used if work.executor != Executor.SKIP and work.bits < full}
    missing = sorted(widths - set(table.bits))
    lacks = f"quality: loss table {table.name} has no"
    what = f"mean output error of the experts that decode picks, by loss table {table.name} ({table.origin})"
    notes = [f"quality: {what}; no accuracy follows from it"]
    if missing:
        notes.append(f"{lacks} losses at {', '.join(f'{width:g}' for width in missing)} bits, so the loss is unknown")
    if table.output_variance is None:
        what = "the loss of skipped picks" if skipped else "the share of the output's variance"
        notes.append(f"{lacks} output variances, so {what} is unknown")
    if widths and not table.bits[0] <= mean_bits <= table.bits[-1]:
        notes.append(f"{lacks} losses at {mean_bits:g} bits, so the loss at uniform bits is unknown")
    return (*table.notes, *notes)


__all__ = ["Quality", "SequenceQuality", "plan_quality", "sequence_quality"]
