"""Which experts stay on the GPU: importance from routing statistics, top-K, and what fits in memory.

Source of the rules: arXiv 2512.04476, section on context-aware placement.
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from perfmodel.errors import PlacementError, PolicyError
from perfmodel.model import MoEModel
from perfmodel.routing import Replay, RoutingTrace, statistics
from perfmodel.routing.others import sum_of_outside

Phase = Literal["prefill", "decode"]
Norm = Literal["sum", "min-max"]
Side = Literal["gpu", "cpu"]
#: What is kept behind the link: every expert and its quantised copies, those copies alone, or nothing.
Behind = Literal["experts", "replicas", "nothing"]

#: Experts per layer on the GPU in the published evaluation, by (layers, experts, hidden size).
PUBLISHED_GPU_EXPERTS = {(32, 8, 4096): 4, (56, 8, 6144): 2}


class Importance(NamedTuple):
    """Importance of each expert, and what had to be assumed to get it.

    values : float64 [sequences, layers, experts], non-negative.
    alpha : share of the selection counts that was used.
    notes : sentences for the report.
    """

    values: NDArray[np.float64]
    alpha: float
    notes: tuple[str, ...]


def _normalised(values: NDArray[np.float64], norm: Norm) -> NDArray[np.float64]:
    if norm == "sum":
        total = values.sum(axis=-1, keepdims=True)
        return np.asarray(np.divide(values, total, out=np.zeros_like(values), where=total > 0))
    low = values.min(axis=-1, keepdims=True)
    span = values.max(axis=-1, keepdims=True) - low
    return np.asarray(np.divide(values - low, span, out=np.zeros_like(values), where=span > 0))


def importance_of(
    counts: NDArray[np.number[Any]], weight_sums: NDArray[np.float64] | None, *, alpha: float = 0.5, norm: Norm = "sum"
) -> NDArray[np.float64]:
    r"""Importance of experts from how often they were selected and with which weights [..., E].

    .. math:: S_{l,e} = \alpha\,\mathrm{Norm}(P_{l,e}) + (1 - \alpha)\,\mathrm{Norm}(W_{l,e})

    with P the number of times the router selected the expert and W the sum of its routing weights over those
    selections. ``Norm`` divides by the layer's sum (the usual reading) or rescales to [0, 1].

    Parameters
    ----------
    counts : P, not negative [..., E]
    weight_sums : W, not negative [..., E]; may be None where alpha is 1
    alpha : share of the counts [1], 0 to 1

    Raises
    ------
    PolicyError : alpha out of range, or below 1 without weights.

    Source: arXiv 2512.04476; the text leaves ``Norm`` open.
    """
    if not 0.0 <= alpha <= 1.0:
        raise PolicyError(f"alpha: found {alpha}, allowed 0 to 1")
    by_count = _normalised(counts.astype(np.float64), norm)
    if alpha == 1.0:
        return by_count
    if weight_sums is None:
        raise PolicyError(f"alpha: found {alpha:g}, allowed 1 without routing weights")
    return np.asarray(alpha * by_count + (1.0 - alpha) * _normalised(weight_sums, norm))


def importance(
    trace: RoutingTrace,
    *,
    alpha: float = 0.5,
    norm: Norm = "sum",
    phase: Phase = "prefill",
) -> Importance:
    """Importance of every expert of every layer, one set a sequence, by `importance_of`.

    Parameters
    ----------
    trace : recorded routing. Without weights alpha is forced to 1, and the notes say so.
    alpha : share of the counts [1], 0 to 1.
    phase : which rows are counted.

    Raises
    ------
    PolicyError : alpha out of range.
    """
    notes: list[str] = []
    if trace.topk_weights is None and 0.0 <= alpha < 1.0:
        notes.append(f"the trace has no routing weights: alpha forced from {alpha:g} to 1 (counts alone)")
        alpha = 1.0
    weights = statistics.weight_sums(trace, phase) if trace.topk_weights is not None and alpha != 1.0 else None
    values = importance_of(statistics.selection_counts(trace, phase), weights, alpha=alpha, norm=norm)
    return Importance(values, alpha, tuple(notes))


def importance_of_others(replay: Replay, *, alpha: float = 0.5, norm: Norm = "sum") -> Importance:
    """The mean importance of the decode steps of *other* sequences instead of a sequence's own (a static profile).

    Every other sequence counts alike, however long it is. Those of a batch are the sequences outside it. Parameters as
    in `importance`.

    Raises
    ------
    PolicyError : alpha out of range, or no other sequence to profile.
    """
    own = importance(replay.single.trace, alpha=alpha, norm=norm, phase="decode")
    if not replay.outside.any():
        needed = replay.batch.sequences + 1
        raise PolicyError(
            f"a profile of the other sequences needs a trace with at least {needed} sequences, found "
            f"{replay.single.trace.num_sequences}"
        )
    others = replay.outside.sum(axis=1)[:, None, None]
    return own._replace(values=sum_of_outside(own.values, replay) / others)


class Footprint(NamedTuple):
    """Bytes on one device, by use [byte]."""

    other_weights: float
    experts: float
    replicas: float
    kv_cache: float
    buffers: float

    @property
    def total(self) -> float:
        """Sum over all uses [byte]."""
        return float(sum(self))


def _outside(model: MoEModel, device: Side, attention_on: Side, trunk_on: Side) -> float:
    """Weights beside the routed experts that are on a device [byte]."""
    sizes = {name: size for name, size in model.bytes_by_class().items() if name != "expert"}
    on = {name: attention_on if name == "attention" else trunk_on for name in sizes}
    return sum(size for name, size in sizes.items() if on[name] == device)


def gpu_footprint(
    model: MoEModel,
    experts_per_layer: float,
    context_tokens: int,
    *,
    buffer_bytes: float = 0.0,
    attention_on: Side = "gpu",
    trunk_on: Side = "gpu",
    sequences: int = 1,
) -> Footprint:
    """GPU bytes with ``experts_per_layer`` experts of every MoE layer resident at the stored precision.

    attention_on : where attention and its KV cache are. trunk_on : where everything else beside the experts is.
    sequences : of ``context_tokens`` each that are decoded at the same time.
    """
    resident = experts_per_layer * len(model.moe_layers) * model.expert_bytes(model.expert_bits)
    return Footprint(
        other_weights=_outside(model, "gpu", attention_on, trunk_on),
        experts=resident,
        replicas=0.0,
        kv_cache=sequences * float(model.kv_bytes(context_tokens, model.cached_bits)) if attention_on == "gpu" else 0.0,
        buffers=buffer_bytes,
    )


def memory_footprint(
    model: MoEModel,
    replica_bits: Sequence[float],
    *,
    behind: Behind = "experts",
    copies: int = 1,
    context_tokens: int = 0,
    attention_on: Side = "gpu",
    trunk_on: Side = "gpu",
    sequences: int = 1,
) -> Footprint:
    """Bytes behind the link: every expert at its stored precision, and one copy at each replica width.

    behind : whether the experts and their copies are kept there, the copies alone, or neither.
    copies : how often they are kept, once for every socket that reads its own.
    context_tokens, attention_on, trunk_on, sequences : what else is there, see `gpu_footprint`.
    """
    experts = model.num_experts * len(model.moe_layers) * copies * (behind != "nothing")
    return Footprint(
        other_weights=_outside(model, "cpu", attention_on, trunk_on),
        experts=experts * model.expert_bytes(model.expert_bits) * (behind == "experts"),
        replicas=sum(experts * model.expert_bytes(bits) for bits in replica_bits),
        kv_cache=sequences * float(model.kv_bytes(context_tokens, model.cached_bits)) if attention_on == "cpu" else 0.0,
        buffers=0.0,
    )


def _sum_text(use: Footprint) -> str:
    names = ("other weights", "experts", "replicas", "KV cache", "buffers")
    parts = [f"{name} {value / 1e9:.2f}" for name, value in zip(names, use, strict=True) if value]
    return " + ".join(parts) + f" = {use.total / 1e9:.2f} GB"


def check_fits(what: str, use: Footprint, capacity_bytes: float, advice: str) -> None:
    """Refuse a footprint above the capacity, showing the sum.

    Raises
    ------
    PlacementError : with every term of the sum, the capacity and what to change.
    """
    if use.total > capacity_bytes:
        raise PlacementError(f"{what} does not fit: {_sum_text(use)}, capacity {capacity_bytes / 1e9:.2f} GB; {advice}")


def gpu_room(
    model: MoEModel,
    capacity_bytes: float,
    context_tokens: int,
    *,
    attention_on: Side = "gpu",
    trunk_on: Side = "gpu",
    sequences: int = 1,
) -> float:
    """Experts per layer that the GPU has room for at the stored precision, no more than there are, a part included.

    -1 where it does not even hold the rest.
    """
    per_layer = len(model.moe_layers) * model.expert_bytes(model.expert_bits)
    rest = gpu_footprint(
        model, 0, context_tokens, attention_on=attention_on, trunk_on=trunk_on, sequences=sequences
    ).total
    free = capacity_bytes - rest
    return min(float(model.num_experts), free / per_layer) if free >= 0 else -1.0


def largest_gpu_experts(model: MoEModel, capacity_bytes: float, context_tokens: int, **on: Any) -> int:
    """Largest count of resident experts per layer that fits the GPU, -1 if not even zero does; as in `gpu_room`."""
    return int(np.floor(gpu_room(model, capacity_bytes, context_tokens, **on)))


def wanted_gpu_experts(model: MoEModel, most: float) -> int:
    """Published count for the two Mixtrals, else half of the experts, but no more than fit.

    most : as `gpu_room` gives it.
    """
    shape = (model.num_layers, model.num_experts, model.hidden_size)
    return max(0, min(PUBLISHED_GPU_EXPERTS.get(shape, model.num_experts // 2), int(most)))
