"""The most that fits: sequences, context, experts on the GPU.

Memory never falls as one of these grows, so the answer is where it crosses the capacity. Each answer was tried and
fits, and the number above it was tried and does not; sums and capacities are those of `memory_report`.
"""

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, Unpack

from perfmodel.hardware import System
from perfmodel.memory.request import MOST, Options, checked
from perfmodel.memory.sums import Sums, largest
from perfmodel.model import MoEModel


class GpuExperts(NamedTuple):
    """The most routed experts that fit the GPUs, all of them together.

    per_layer : as many in every MoE layer; layers with fewer keep all they have.
    total : over all layers, spread as evenly as whole numbers can be, the first layers having one more.
    layers : MoE layers with all their experts, from the last layer on.
    """

    per_layer: int
    total: int
    layers: int


def largest_batch(model: MoEModel | str | Path, system: System | str | Path, **options: Unpack[Options]) -> int:
    """Most sequences that fit, up to 1e9; 0 when not even one does.

    options : see `Options`; ``batch`` does not count. A policy that chooses how many experts stay on the GPU keeps
    fewer where the cache needs the room. Errors as in `memory_report`.
    """
    request = checked(model, system, {**options, "batch": 1})
    sums = Sums(request)
    return largest(lambda batch: sums.fits(request.context, batch), 1, MOST)


def largest_context(model: MoEModel | str | Path, system: System | str | Path, **options: Unpack[Options]) -> int:
    """Longest context of each sequence that fits [token], up to 1e9; 0 when not even one token does.

    What the model was trained for is not looked at. options : see `Options`; ``context`` does not count. Policies and
    errors as in `largest_batch`.
    """
    request = checked(model, system, {**options, "context": 1})
    sums = Sums(request)
    return largest(lambda context: sums.fits(context, request.batch), 1, MOST)


def largest_gpu_experts(
    model: MoEModel | str | Path, system: System | str | Path, **options: Unpack[Options]
) -> GpuExperts | None:
    """Most experts that fit the GPUs beside everything else; None when nothing fits without any of them.

    options : see `Options`; ``gpu_experts`` does not count. Without a policy the other experts are behind the link,
    where more of them may not fit than on the GPU: only the GPU is looked at. Errors as in `memory_report`.
    """
    request = checked(model, system, {**options, "gpu_experts": 0})
    sums = Sums(request)
    none = sums.kept(request.context, request.batch)
    counts = sums.counts

    def fits(resident: tuple[int, ...]) -> bool:
        kept = replace(none, resident=resident, per_layer=None)
        return sums.gpu(request.context, request.batch, kept).fits is not False

    def spread(total: int) -> tuple[int, ...]:
        """So many experts over the layers, evenly; what a layer cannot hold goes to the next round."""
        each = largest(lambda count: sum(min(count, most) for most in counts) <= total, 0, max(counts, default=0))
        left = total - sum(min(each, most) for most in counts)
        resident = []
        for most in counts:
            more = 1 if left and most > each else 0
            left -= more
            resident.append(min(each, most) + more)
        return tuple(resident)

    def last(layers: int) -> tuple[int, ...]:
        return tuple(most if layer >= len(counts) - layers else 0 for layer, most in enumerate(counts))

    per_layer = largest(lambda count: fits(tuple(min(count, most) for most in counts)), 0, max(counts, default=0))
    if per_layer < 0:
        return None
    return GpuExperts(
        per_layer,
        largest(lambda total: fits(spread(total)), 0, sum(counts)),
        largest(lambda layers: fits(last(layers)), 0, len(counts)),
    )
