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
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from perfmodel import placement
from perfmodel.bitwidth import LossTable, select_bitwidths
from perfmodel.errors import PolicyError
from perfmodel.kernels.picks import look_up
from perfmodel.placement import Norm
from perfmodel.policies.base import (
    ClassTable,
    Executor,
    Overlap,
    Plan,
    PlanInputs,
    Policy,
    PrefillMode,
    WorkClass,
    decode_ids,
    make_plan,
    need_ndp,
    option,
    plan_prefill,
    require,
)
from perfmodel.routing import RoutingTrace, statistics

Selector = Literal["prefix", "uniform", "full"]
_REPLICAS = (1.0, 2.0, 3.0, 4.0)
#: Losses of this project's own small model, measured on its weights; used where no table is given.
BUNDLED_LOSSES = "tiny-mixtral-32l-losses"


@dataclass(frozen=True)
class _PlacedExperts(Policy):
    """What context-aware and static placement share: hot experts on the GPU, cold ones in place at few bits."""

    mean_bits: float = option(3.0, "mean bits of the near-data experts of a layer", "1 to 4")
    gpu_experts: int | None = option(
        None,
        "experts per layer on the GPU; auto: published count, else the largest up to E/2 that fits",
        "0 to E | auto",
    )
    selector: Selector = option(
        "prefix", "prefix: chosen by the bitwidth search; uniform: mean_bits for all; full: stored precision"
    )
    alpha: float = option(0.5, "share of selection counts in the importance, the rest being routing weights", "0 to 1")
    norm: Norm = option("sum", "how counts and weights are normalised within a layer")
    overlap: Overlap = option("max", "GPU and near-data sides of a decode layer at the same time, or in turn")
    prefill: PrefillMode = option("ndp", "where the prefill runs its experts")

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "mean_bits", 1.0 <= self.mean_bits <= 4.0, "1 to 4")
        require(self, "alpha", 0.0 <= self.alpha <= 1.0, "0 to 1")
        require(self, "gpu_experts", self.gpu_experts is None or self.gpu_experts >= 0, "0 to E, or auto")
        whole = self.selector != "uniform" or float(self.mean_bits).is_integer()
        require(self, "mean_bits", whole, "a whole number with selector=uniform")

    @property
    def hardware_dependent(self) -> bool:
        return self.prefill == "balanced" or self.gpu_experts is None

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

    def _bits(
        self, inputs: PlanInputs, values: NDArray[np.float64], hot: NDArray[np.bool_]
    ) -> tuple[NDArray[np.float64], tuple[str, ...]]:
        """Stored bits of every expert [S, L, E]; hot experts keep the stored precision."""
        full = float(inputs.model.expert_bits)
        bits = np.full(hot.shape, full)
        if self.selector == "full" or hot.all():
            return bits, ()
        if self.selector == "uniform":
            bits[~hot] = self.mean_bits
            return bits, ()
        losses, notes = _losses(inputs)
        # Every layer has the same number of cold experts, so they gather into a dense axis.
        cold = np.nonzero(~hot)
        shape = (*hot.shape[:2], -1)
        table = np.broadcast_to(losses, (*hot.shape, losses.shape[-1]))[cold].reshape(*shape, losses.shape[-1])
        bits[cold] = select_bitwidths(values[cold].reshape(shape), table, self.mean_bits).reshape(-1)
        return bits, notes

    def _placed(self, inputs: PlanInputs, values: placement.Importance, *, known_before: bool) -> Plan:
        need_ndp(self, inputs.system)
        count = self._count(inputs)
        hot = statistics.top_experts(values.values, count)
        bits, bit_notes = self._bits(inputs, values.values, hot)
        full = float(inputs.model.expert_bits)
        table = ClassTable()
        classes = np.zeros(hot.shape, np.uint8)
        if hot.any():
            classes[hot] = table.number(WorkClass(Executor.GPU, full))
        for width in np.unique(bits[~hot]):
            work = WorkClass(Executor.NDP, float(width), quantised=bool(width < full))
            classes[~hot & (bits == width)] = table.number(work)
        ids, assigned, sequence, _ = decode_ids(inputs)
        picks = look_up(classes, sequence, ids)
        if not assigned.all():
            picks[~assigned] = table.number(WorkClass(Executor.SKIP, full))
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


def _losses(inputs: PlanInputs) -> tuple[NDArray[np.float64], tuple[str, ...]]:
    """Loss table for the model's MoE layers [L, E, 4].

    A table that was given must fit the model. Without one, the bundled table serves models with as many experts,
    and an assumed table the others.
    """
    model = inputs.model
    chosen = inputs.losses or LossTable.load(BUNDLED_LOSSES)
    table = chosen.for_model(len(model.moe_layers), model.num_experts, assume=inputs.losses is None)
    named = () if table.source == "assumed" else (f"losses: {table.name} ({table.source})",)
    return table.losses, (*named, *table.notes)


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
