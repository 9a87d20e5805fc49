"""Hot experts on the GPU and cold ones near memory at few bits: what context-aware and static placement share."""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from perfmodel import placement
from perfmodel.bitwidth import (
    BITS,
    Budget,
    LossTable,
    Objective,
    Scope,
    losses_for,
    objective_weights,
    optimal_bitwidths,
    select_bitwidths,
)
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
from perfmodel.routing import statistics

Selector = Literal["prefix", "optimum", "uniform", "full"]
#: Widest replica that is kept beside the full-precision experts [bit].
_WIDEST = max(BITS)


class Basis(NamedTuple):
    """What experts are placed and given bits by.

    importance : of every expert. use : float64 [S, L, E] or [1, L, E], selections of every expert in the same rows.
    """

    importance: placement.Importance
    use: NDArray[np.float64]


class _Widths(NamedTuple):
    """Stored bits of the near-data experts.

    bits : of every one [S, L, C], or one number for all. menu : widths of which replicas are kept.
    """

    bits: NDArray[Any] | float
    menu: tuple[int, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class PlacedExperts(Policy):
    """What context-aware and static placement share: hot experts on the GPU, cold ones in place at few bits."""

    mean_bits: float = option(3.0, "mean bits of the near-data experts", low=1, high=_WIDEST)
    gpu_experts: int | None = option(
        None,
        "experts per layer on the GPU; auto: published count, else the largest up to E/2 that fits",
        low=0,
        high=EXPERTS,
    )
    selector: Selector = option(
        "prefix",
        "prefix: the published search; optimum: least loss in any order; uniform: mean_bits for all; full: stored"
        " precision",
    )
    objective: Objective = option(
        "plain", "what the search adds up: losses, times importance or selections, or over the output variance"
    )
    scope: Scope = option("layer", "mean_bits holds in every layer, or over the layers of the whole model")
    min_bits: int = option(1, "fewest bits of a near-data expert", low=1, high=_WIDEST)
    budget: Budget = option("exact", "mean_bits is spent exactly, or is the most that may be spent")
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
        enough = self.selector == "full" or self.mean_bits >= self.min_bits
        require(self, "mean_bits", enough, f"{self.min_bits} to {_WIDEST} with min_bits={self.min_bits}")

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

    def _menu(self, table: LossTable) -> tuple[int, ...]:
        """Widths that an expert may get: those of the table from ``min_bits`` to 4."""
        menu = tuple(width for width in table.bits if self.min_bits <= width <= _WIDEST)
        if not menu or not menu[0] <= self.mean_bits <= menu[-1]:
            kept = ", ".join(map(str, menu)) or f"none from {self.min_bits} to {_WIDEST}"
            ends = f"{menu[0]} to {menu[-1]}" if menu else "another loss table"
            raise PolicyError(
                f"policy {self.name}: option mean_bits: found {self.mean_bits:g}, allowed {ends};"
                f" widths of loss table {table.name} that can be kept: {kept}"
            )
        return menu

    def _widths(self, inputs: PlanInputs, basis: Basis, cold: NDArray[np.int64]) -> _Widths:
        """Stored bits of the cold experts.

        cold : int64 [S, L, C], from the most to the least important expert of a layer.
        """
        menu = tuple(width for width in BITS if width >= self.min_bits)
        if self.selector == "full":
            return _Widths(float(inputs.model.expert_bits), ())
        if cold.size == 0:
            return _Widths(float(inputs.model.expert_bits), menu)
        if self.selector == "uniform":
            return _Widths(float(self.mean_bits), menu)
        found = losses_for(inputs.losses, len(inputs.model.moe_layers), inputs.model.num_experts)
        menu = self._menu(found)
        table = found.only(menu)
        losses = table.losses[np.arange(cold.shape[1])[:, None], cold]
        how: dict[str, Any] = {
            "bits": menu,
            "budget": self.budget,
            "scope": self.scope,
            "weights": self._weights(table, basis, cold),
        }
        if self.selector == "optimum":
            bits = optimal_bitwidths(losses, self.mean_bits, **how)
        else:
            # In order already, so that a falling number ranks as the importance does.
            rank = np.arange(cold.shape[2], 0, -1, dtype=np.float64)
            bits = select_bitwidths(rank, losses, self.mean_bits, **how)
        return _Widths(bits, menu, table.notes)

    def _weights(self, table: LossTable, basis: Basis, cold: NDArray[np.int64]) -> NDArray[np.float64] | None:
        """What the search multiplies the losses of the cold experts by [S, L, C]; None for the plain sum."""
        if self.objective == "plain":
            return None
        if self.objective == "variance" and table.output_variance is None:
            require(self, "objective", False, f"plain, importance or use: loss table {table.name} has no variances")
        weights = objective_weights(self.objective, basis.importance.values, basis.use, table.output_variance)
        every = np.broadcast_to(np.asarray(weights), (len(cold), *table.losses.shape[:2]))
        return np.take_along_axis(every, cold, axis=-1)

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

    def placed(self, inputs: PlanInputs, basis: Basis, *, known_before: bool) -> Plan:
        need_ndp(self, inputs.system)
        count = self._count(inputs)
        values = basis.importance
        order = statistics.ranked_experts(values.values)
        widths = self._widths(inputs, basis, order[..., count:])
        full = float(inputs.model.expert_bits)
        table = ClassTable()
        classes = self._classes(order, count, widths.bits, full, table)
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
            replica_bits=tuple(map(float, widths.menu)),
            hot=hot,
            alpha=values.alpha,
            norm=self.norm,
            mean_bits=_mean_width(widths.bits, full) if count < order.shape[-1] else None,
            notes=(
                f"{count} of {inputs.model.num_experts} experts a layer on the GPU",
                f"decode: GPU and near-data sides combined by {self.overlap}; prefill experts: {self.prefill}",
                *values.notes,
                *widths.notes,
            ),
        )


def _mean_width(bits: NDArray[Any] | float, full: float) -> float | None:
    """Mean of the widths below the stored precision [bit]; None where there is none."""
    widths = np.asarray(bits)
    below = widths[widths < full]
    return float(below.mean()) if below.size else None
