"""Context-aware placement and precision on a GPU with near-data processing, and static placement beside it.

Once per sequence, after its prefill: the most important experts of every layer move to the GPU at full
precision; the others stay on the near-data device, each at a width from 1 to 4 bits that the selector chose.
No expert moves while decoding: each pick is computed on the side that holds it.

Source: arXiv 2512.04476. Where the text is silent:

- *overlap*: the text says that both sides run at the same time, so a layer takes the slower side (``max``).
  ``sum`` runs them one after the other.
- *prefill*: the text does not say where it runs. ``ndp`` keeps every expert in place at full precision, since
  the placement is known only afterwards.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from perfmodel import placement
from perfmodel.bitwidth import bits_by_rank, losses_for
from perfmodel.errors import PolicyError
from perfmodel.kernels.picks import look_up
from perfmodel.placement import Norm
from perfmodel.policies.base import (
    EXPERTS,
    SPLIT_KEYS,
    ClassTable,
    Executor,
    Overlap,
    Plan,
    PlanInputs,
    Policy,
    PrefillMode,
    WorkClass,
    make_plan,
    need_ndp,
    option,
    plan_prefill,
    require,
)
from perfmodel.routing import RoutingTrace, statistics

Selector = Literal["prefix", "uniform", "full"]
_REPLICAS = (1.0, 2.0, 3.0, 4.0)


@dataclass(frozen=True)
class _PlacedExperts(Policy):
    """What context-aware and static placement share: hot experts on the GPU, cold ones in place at few bits."""

    mean_bits: float = option(3.0, "mean bits of the near-data experts of a layer", low=1, high=4)
    gpu_experts: int | None = option(
        None,
        "experts per layer on the GPU; auto: published count, else the largest up to E/2 that fits",
        low=0,
        high=EXPERTS,
    )
    selector: Selector = option(
        "prefix", "prefix: chosen by the bitwidth search; uniform: mean_bits for all; full: stored precision"
    )
    alpha: float = option(
        0.5, "share of selection counts in the importance, the rest being routing weights", low=0, high=1
    )
    norm: Norm = option("sum", "how counts and weights are normalised within a layer")
    overlap: Overlap = option("max", "GPU and near-data sides of a decode layer at the same time, or in turn")
    prefill: PrefillMode = option("ndp", "where the prefill runs its experts")

    def __post_init__(self) -> None:
        super().__post_init__()
        whole = self.selector != "uniform" or float(self.mean_bits).is_integer()
        require(self, "mean_bits", whole, "a whole number with selector=uniform")

    @property
    def plan_keys(self) -> tuple[str, ...]:
        return (*super().plan_keys, *SPLIT_KEYS) if self.prefill == "balanced" else super().plan_keys

    def _count(self, inputs: PlanInputs) -> int:
        """Experts per layer on the GPU, resolved against the model and the GPU's memory."""
        model = inputs.model
        if self.gpu_experts is None:
            return placement.default_gpu_experts(model, inputs.system.gpu.memory_capacity_bytes, inputs.max_context)
        require(
            self,
            "gpu_experts",
            self.gpu_experts <= model.num_experts,
            f"0 to {model.num_experts} for {model.name}",
        )
        return self.gpu_experts

    def _bits(self, inputs: PlanInputs, cold: NDArray[np.int64]) -> tuple[NDArray[Any] | float, tuple[str, ...]]:
        """Stored bits of every cold expert, or one number for all.

        cold : int64 [S, L, C], from the most to the least important expert of a layer.
        """
        if self.selector == "full" or cold.size == 0:
            return float(inputs.model.expert_bits), ()
        if self.selector == "uniform":
            return float(self.mean_bits), ()
        table = losses_for(inputs.losses, len(inputs.model.moe_layers), inputs.model.num_experts)
        ordered = table.losses[np.arange(cold.shape[1])[:, None], cold]
        bits = bits_by_rank(ordered.reshape(-1, *ordered.shape[2:]), self.mean_bits)
        return bits.reshape(cold.shape), table.notes

    def _classes(
        self, order: NDArray[np.int64], count: int, bits: NDArray[Any] | float, full: float, table: ClassTable
    ) -> NDArray[np.uint8]:
        """Work class of every expert [S, L, E + 1]; 0 in the last place of a layer."""
        by_rank = np.empty(order.shape, np.uint8)
        if count:
            by_rank[..., :count] = table.number(WorkClass(Executor.GPU, full))
        cold = by_rank[..., count:]
        for width in np.unique(bits) if cold.size else ():
            number = table.number(WorkClass(Executor.NDP, float(width), quantised=bool(width < full)))
            np.copyto(cold, number, where=bits == width)
        classes = np.zeros((*order.shape[:-1], order.shape[-1] + 1), np.uint8)
        np.put_along_axis(classes, order, by_rank, axis=-1)
        return classes

    def _placed(self, inputs: PlanInputs, values: placement.Importance, *, known_before: bool) -> Plan:
        need_ndp(self, inputs.system)
        count = self._count(inputs)
        order = statistics.ranked_experts(values.values)
        bits, bit_notes = self._bits(inputs, order[..., count:])
        full = float(inputs.model.expert_bits)
        table = ClassTable()
        classes = self._classes(order, count, bits, full, table)
        hot: NDArray[np.bool_] = np.zeros(order.shape, np.bool_)
        np.put_along_axis(hot, order[..., :count], True, axis=-1)
        if not inputs.replay.all_assigned:
            classes[..., -1] = table.number(WorkClass(Executor.SKIP, full))
        picks = look_up(classes, inputs.replay.decode_offsets, inputs.replay.decode_ids)
        prefill = plan_prefill(inputs, self.prefill, table, hot if known_before else None)
        moved = 0.0 if known_before else float(count * hot.shape[1])
        return make_plan(
            self,
            inputs,
            table,
            picks,
            prefill,
            overlap=self.overlap,
            migrated_experts=np.full(len(hot), moved),
            gpu_experts=count,
            gpu_buffer_bytes=0.0,
            replica_bits=() if self.selector == "full" else _REPLICAS,
            hot=hot,
            alpha=values.alpha,
            norm=self.norm,
            notes=(
                f"{count} of {inputs.model.num_experts} experts a layer on the GPU",
                f"decode: GPU and near-data sides combined by {self.overlap}; prefill experts: {self.prefill}",
                *values.notes,
                *bit_notes,
            ),
        )


@dataclass(frozen=True)
class ContextAware(_PlacedExperts):
    """Placement and precision from each sequence's own prefill."""

    name: ClassVar[str] = "context-aware"
    summary: ClassVar[str] = "hot experts on the GPU, cold ones near memory at 1-4 bits, chosen from the prefill"
    source: ClassVar[str] = "arXiv 2512.04476"

    def plan(self, inputs: PlanInputs) -> Plan:
        if not inputs.replay.trace.has_prefill:
            raise PolicyError(
                "policy context-aware places experts from each sequence's prefill, and this trace holds no prefill; "
                "use static (a profile of the other sequences), monde or hobbit"
            )
        values = placement.importance(inputs.replay.trace, alpha=self.alpha, norm=self.norm)
        return self._placed(inputs, values, known_before=False)


@dataclass(frozen=True)
class Static(_PlacedExperts):
    """Placement from a profile of other traffic, known before the prompt arrives.

    The profile is the decode steps of the *other* sequences of the trace (leave-one-out), or those of another
    trace. Nothing migrates, and the prefill already finds the hot experts on the GPU.
    """

    profile: str = option("others", "decode profile to place by", "others | name or file of another trace")

    name: ClassVar[str] = "static"
    summary: ClassVar[str] = "the same split, placed once from the decode profile of the other sequences"
    source: ClassVar[str] = "control for arXiv 2512.04476; needs no prefill"

    def plan(self, inputs: PlanInputs) -> Plan:
        if self.profile == "others":
            values = placement.importance(
                inputs.replay.trace, alpha=self.alpha, norm=self.norm, phase="decode", leave_one_out=True
            )
        else:
            values = self._from_another_trace(inputs)
        return self._placed(inputs, values, known_before=True)

    def _from_another_trace(self, inputs: PlanInputs) -> placement.Importance:
        """One placement for all sequences, from the decode steps of the profile (its prefill if it has none)."""
        model, sequences = inputs.model, inputs.replay.trace.num_sequences
        profile = RoutingTrace.load(self.profile)
        if profile.num_experts_inferred and profile.num_experts <= model.num_experts:
            profile = profile.with_num_experts(model.num_experts)
        profile.check_model(model)
        if profile.num_layers != len(model.moe_layers):
            raise PolicyError(
                f"policy static: profile {self.profile} has {profile.num_layers} layers, {model.name} has"
                f" {len(model.moe_layers)} MoE layers; allowed: as many"
            )
        own = placement.importance(
            profile, alpha=self.alpha, norm=self.norm, phase="decode" if profile.has_decode else "prefill"
        )
        pooled = own.values.mean(axis=0, keepdims=True)
        return own._replace(values=np.repeat(pooled, sequences, axis=0))


#: Options that switch one idea of the context-aware system off.
ABLATIONS: dict[str, str] = {
    "placement only": "selector=full",
    "precision only": "gpu_experts=0",
    "uniform bits": "selector=uniform",
}
