"""Hot experts on the GPU and cold ones near memory at few bits: what context-aware and static placement share."""

import dataclasses
import math
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
from perfmodel.bitwidth.budget import increments
from perfmodel.errors import PolicyError
from perfmodel.kernels.picks import look_up
from perfmodel.model import MoEModel
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
    Residency,
    WorkClass,
    make_plan,
    need_ndp,
    option,
    plan_prefill,
    require,
    require_experts,
)
from perfmodel.routing import statistics

Selector = Literal["prefix", "optimum", "uniform", "full"]
#: Widest replica that is kept beside the full-precision experts [bit].
_WIDEST = max(BITS)
#: Means that differ by rounding alone [bit].
_SAME = 1e-9


class Basis(NamedTuple):
    """What experts are placed and given bits by.

    importance : of every expert. use : float64 [S, L, E] or [1, L, E], selections of every expert in the same rows.
    """

    importance: placement.Importance
    use: NDArray[np.float64]


class Decode(NamedTuple):
    """What the decode steps of a placement are: the fields of a plan of the same names."""

    picks: NDArray[np.uint8]
    copies: NDArray[np.uint8] | None = None
    notes: tuple[str, ...] = ()


class _Widths(NamedTuple):
    """Stored bits of the near-data experts.

    bits : of every one [S, L, C], or one number for all.
    """

    bits: NDArray[Any] | float
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

    @property
    def plan_keys(self) -> tuple[str, ...]:
        return (*super().plan_keys, *SPLIT_KEYS) if self.prefill == "balanced" else super().plan_keys

    def _check_floor(self) -> None:
        """Refuse a budget below the fewest bits. Only for a plan: the mean may be set after `min_bits`."""
        if self.selector == "full" or self.mean_bits >= self.min_bits:
            return
        ends = f"{self.min_bits} to {_WIDEST}" if self.min_bits < _WIDEST else str(_WIDEST)
        default = type(self).__dataclass_fields__["mean_bits"].default
        hint = f"; it is {default:g} by default, so give mean_bits={self.min_bits}" if self.mean_bits == default else ""
        require(self, "mean_bits", False, f"{ends} with min_bits={self.min_bits}{hint}")

    def _without_effect(self) -> tuple[str, ...]:
        """What the options say in vain, as axes of a sweep may combine them."""
        if self.selector in ("prefix", "optimum"):
            return ()
        fields = {name: self.__dataclass_fields__[name].default for name in ("objective", "scope", "budget")}
        idle = [f"{name}={getattr(self, name)}" for name, default in fields.items() if getattr(self, name) != default]
        if not idle:
            return ()
        return (f"no effect: {', '.join(idle)}, as selector={self.selector} searches nothing",)

    def _count(self, model: MoEModel, most: float) -> int:
        """Experts per layer on the GPU, resolved against the model and the most that fit the GPU."""
        if self.gpu_experts is None:
            return placement.wanted_gpu_experts(model, most)
        require_experts(self, model, "gpu_experts")
        return self.gpu_experts

    def _menu(self, table: LossTable) -> tuple[int, ...]:
        """Widths that an expert may get: those of the table from ``min_bits`` to 4."""
        menu = tuple(width for width in table.bits if self.min_bits <= width <= _WIDEST)
        if not menu:
            why = f"above the {_WIDEST} bits that near-data experts go up to"
            if table.bits[0] <= _WIDEST:
                why = f"allowed: at least one from min_bits={self.min_bits} to {_WIDEST}"
            widths = ", ".join(map(str, table.bits))
            raise PolicyError(f"policy {self.name}: the widths of loss table {table.name} are {widths}, {why}")
        if not menu[0] <= self.mean_bits <= menu[-1]:
            kept = ", ".join(map(str, menu))
            ends = f"{menu[0]} to {menu[-1]}" if menu[1:] else str(menu[0])
            raise PolicyError(
                f"policy {self.name}: option mean_bits: found {self.mean_bits:g}, allowed {ends};"
                f" widths of loss table {table.name} that can be kept: {kept}{'; ' * bool(_unused(table))}"
                f"{'; '.join(_unused(table))}"
            )
        return menu

    def residency(self, model: MoEModel, most_gpu_experts: float, losses: LossTable | None = None) -> Residency:
        self._check_floor()
        count = self._count(model, most_gpu_experts)
        return Residency(count, 0.0, tuple(map(float, self._replicas(model, count, losses))))

    def at_capacity(self, model: MoEModel, most_gpu_experts: float) -> Policy:
        if self.gpu_experts is not None:
            return self
        return dataclasses.replace(self, gpu_experts=max(0, int(most_gpu_experts)))

    def _replicas(self, model: MoEModel, count: int, losses: LossTable | None) -> tuple[int, ...]:
        """Widths of which replicas are kept, with so many experts per layer on the GPU."""
        if self.selector == "full":
            return ()
        if self.selector == "uniform" or count == model.num_experts:
            return tuple(width for width in BITS if width >= self.min_bits)
        return self._menu(losses_for(losses, model))

    def _widths(self, inputs: PlanInputs, basis: Basis, cold: NDArray[np.int64], menu: tuple[int, ...]) -> _Widths:
        """Stored bits of the cold experts.

        cold : int64 [S, L, C], from the most to the least important expert of a layer.
        menu : widths of which replicas are kept.
        """
        if self.selector == "full" or cold.size == 0:
            return _Widths(float(inputs.model.expert_bits))
        if self.selector == "uniform":
            return _Widths(float(self.mean_bits))
        found = losses_for(inputs.losses, inputs.model)
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
        return _Widths(bits, (*table.notes, *_unused(found), *self._spent(bits, menu)))

    def _spent(self, bits: NDArray[Any], menu: tuple[int, ...]) -> tuple[str, ...]:
        """What is spent of the budget, where that is not all of it; ``bits`` is [S, L, C]."""
        layers, experts = bits.shape[1:]
        group, where = (experts, " a layer") if self.scope == "layer" else (layers * experts, "")
        who = f"{group} near-data experts{where}"
        if self.budget == "at-most":
            spent = float(bits.mean())
            less = spent < self.mean_bits - _SAME
            return (f"{who} spend {spent:.6g} of at most {self.mean_bits:g} bits",) if less else ()
        steps = increments(group, self.mean_bits, menu[0])
        step = math.gcd(*(width - menu[0] for width in menu)) or 1
        spent, following = (menu[0] + count / group for count in (steps, steps + step))
        if abs(spent - self.mean_bits) <= _SAME:
            return ()
        return (f"{who} spend a mean of {self.mean_bits:g} bits as {spent:.6g}; the next is {following:.6g}",)

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

    def decode(self, inputs: PlanInputs, basis: Basis, classes: NDArray[np.uint8], table: ClassTable) -> Decode:
        """Decode steps, from the work class of every expert after the prefill [S, L, E + 1]; see `_classes`."""
        return Decode(look_up(classes, inputs.replay.decode_offsets, inputs.replay.decode_ids))

    def placed(self, inputs: PlanInputs, basis: Basis, *, known_before: bool) -> Plan:
        need_ndp(self, inputs.system)
        kept = self.residency(inputs.model, inputs.most_gpu_experts, inputs.losses)
        count = int(kept.gpu_experts)
        values = basis.importance
        order = statistics.ranked_experts(values.values)
        widths = self._widths(inputs, basis, order[..., count:], tuple(map(int, kept.replica_bits)))
        full = float(inputs.model.expert_bits)
        table = ClassTable()
        classes = self._classes(order, count, widths.bits, full, table)
        hot: NDArray[np.bool_] = np.zeros(order.shape, np.bool_)
        np.put_along_axis(hot, order[..., :count], True, axis=-1)
        if not inputs.replay.all_assigned:
            classes[..., -1] = table.number(WorkClass(Executor.SKIP, full))
        decode = self.decode(inputs, basis, classes, table)
        prefill = plan_prefill(inputs, self.prefill, table, hot if known_before else None)
        moved = 0.0 if known_before else float(count * hot.shape[1])
        return make_plan(
            self,
            inputs,
            table,
            decode.picks,
            prefill,
            copies=decode.copies,
            overlap=self.overlap,
            migrated_experts=np.full(len(hot), moved),
            **kept._asdict(),
            hot=hot,
            alpha=values.alpha,
            norm=self.norm,
            **(_mean_widths(widths.bits, full, len(order)) if count < order.shape[-1] else {}),
            notes=(
                f"{count} of {inputs.model.num_experts} experts a layer on the GPU",
                f"decode: GPU and near-data sides combined by {self.overlap}; prefill experts: {self.prefill}",
                *values.notes,
                *widths.notes,
                *decode.notes,
                *self._without_effect(),
            ),
        )


def _unused(table: LossTable) -> tuple[str, ...]:
    """Widths of a table that are too wide to be kept."""
    wider = [str(width) for width in table.bits if width > _WIDEST]
    if not wider:
        return ()
    many = "widths" if wider[1:] else "width"
    return (
        f"{many} {', '.join(wider)} of loss table {table.name} {'are' if wider[1:] else 'is'} not used:"
        f" near-data experts go up to {_WIDEST} bits",
    )


def _mean_widths(bits: NDArray[Any] | float, full: float, sequences: int) -> dict[str, Any]:
    """Mean of the widths below the stored precision, of all and of every sequence, as fields of a plan [bit]."""
    if isinstance(bits, float):
        return {"mean_bits": bits, "sequence_bits": np.full(sequences, bits)} if bits < full else {}
    below = bits < full
    flat = (len(bits), -1)
    count = below.reshape(flat).sum(axis=1)
    total = (bits * below).reshape(flat).sum(axis=1, dtype=np.float64)
    if not count.any():
        return {}
    own = np.divide(total, count, out=np.full(len(bits), np.nan), where=count > 0)
    return {"mean_bits": float(total.sum() / count.sum()), "sequence_bits": own}
