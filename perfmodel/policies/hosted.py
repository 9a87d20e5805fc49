"""Experts in host memory, some of them on the GPU for a whole sequence: what such policies share."""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from perfmodel.errors import PolicyError
from perfmodel.kernels.picks import look_up
from perfmodel.model import MoEModel
from perfmodel.policies.base import (
    ClassTable,
    Executor,
    PlanInputs,
    Policy,
    Residency,
    WorkClass,
    option,
    require_experts,
)
from perfmodel.policies.host import Prefill
from perfmodel.routing import statistics
from perfmodel.routing.others import no_others_text, others_text, own_prompt_note, sum_of_outside


class Use(NamedTuple):
    """How often every expert is used as far as is known before a sequence: float64 [S, L, E], and from where."""

    counts: NDArray[np.float64]
    notes: tuple[str, ...]


#: Of an expert; room that is a whole number may come out a little below it.
_ROUNDING = 1e-9


@dataclass(frozen=True)
class HostedExperts(Policy):
    """What policies share that leave experts in host memory, where the CPU runs them."""

    bits: float | None = option(None, "stored bits of every expert; auto: the model's", low=1, high=32)

    needs_ndp: ClassVar[bool] = False
    needs_cpu: ClassVar[bool] = True

    @property
    def copies_experts(self) -> bool:
        """Whether experts may be copied to the GPU only to be used once, which needs room for one of them there."""
        return False

    def _bits(self, model: MoEModel) -> float:
        return float(model.expert_bits) if self.bits is None else min(self.bits, float(model.expert_bits))

    def _room(self, model: MoEModel, most: float) -> int:
        """Experts of all layers together that fit beside one that is being copied.

        most : experts a layer that the GPU has room for at the stored precision, a part included.
        """
        layers, experts = len(model.moe_layers), model.num_experts
        room = max(0, int(min(float(experts), most * model.expert_bits / self._bits(model)) * layers + _ROUNDING))
        return room if room == layers * experts else max(0, room - self.copies_experts)

    def _a_layer(self, model: MoEModel, most: float, name: str) -> int:
        """Experts of every layer on the GPU: what an option says, or as many as fit."""
        require_experts(self, model, name)
        asked: int | None = getattr(self, name)
        return self._room(model, most) // len(model.moe_layers) if asked is None else asked

    def _keeps(self, model: MoEModel, experts: int) -> Residency:
        """Memory for so many experts of all layers together on the GPU."""
        layers, bits = len(model.moe_layers), self._bits(model)
        staging = self.copies_experts and experts < layers * model.num_experts
        buffer = model.expert_bytes(bits) if staging else 0.0
        if bits == model.expert_bits:
            return Residency(experts / layers, buffer, ())
        return Residency(0.0, experts * model.expert_bytes(bits) + buffer, (bits,), behind="replicas")

    def use_of_others(self, inputs: PlanInputs) -> Use:
        """Use of every expert in the decode steps of the other sequences; where there is none, in the own prompt.

        The other sequences of a batch are those outside it.

        Raises
        ------
        PolicyError : no other sequence, and no prompt.
        """
        replay = inputs.replay
        if replay.outside.any():
            counts = statistics.selection_counts(replay.single.trace, "decode").astype(np.float64)
            return Use(sum_of_outside(counts, replay), (f"experts placed by {others_text(replay)}",))
        if not replay.trace.has_prefill:
            raise PolicyError(
                f"policy {self.name} places experts by how other sequences use them, and {no_others_text(replay)}"
                f" without a prefill; allowed: at least {replay.batch.sequences + 1} sequences, or a prefill"
            )
        counts = statistics.selection_counts(replay.trace, "prefill").astype(np.float64)
        return Use(counts, (own_prompt_note(replay),))

    def pick_classes(
        self,
        inputs: PlanInputs,
        hot: NDArray[np.bool_],
        table: ClassTable,
        cold: Executor = Executor.CPU,
    ) -> NDArray[np.uint8]:
        """Class of every pick [T, L, k]: on the GPU where ``hot`` [S, L, E], else by ``cold``."""
        bits = self._bits(inputs.model)
        classes = np.zeros((*hot.shape[:2], hot.shape[2] + 1), np.uint8)
        for where, executor in ((hot, Executor.GPU), (~hot, cold)):
            if where.any():
                classes[..., :-1][where] = table.number(WorkClass(executor, bits))
        if not inputs.replay.all_assigned:
            classes[..., -1] = table.number(WorkClass(Executor.SKIP, bits))
        return np.asarray(look_up(classes, inputs.replay.decode_offsets, inputs.replay.decode_ids))

    def placed_note(self, inputs: PlanInputs, hot: NDArray[np.bool_]) -> str:
        """How many experts are on the GPU, for the report."""
        layers = len(inputs.model.moe_layers)
        return (
            f"{int(hot[0].sum())} of {layers * inputs.model.num_experts} experts on the GPU at"
            f" {self._bits(inputs.model):g} bits, the others in host memory"
        )


def most_used(use: NDArray[np.float64], experts: int) -> NDArray[np.bool_]:
    """The most used experts of all layers together [S, L, E]; ties go to the lower layer, then the lower id."""
    flat = use.reshape(len(use), -1)
    order = np.argsort(-flat, axis=1, kind="stable")[:, :experts]
    hot = np.zeros(flat.shape, np.bool_)
    np.put_along_axis(hot, order, True, axis=1)
    return hot.reshape(use.shape)


def split_prefill(tokens: NDArray[np.int64], split: NDArray[np.uint8], table: ClassTable, bits: float) -> Prefill:
    """The prefill of a plan, from where each expert runs [S, L, E] by the number of its executor."""
    classes = np.zeros(tokens.shape, np.uint8)
    for executor in np.unique(split).tolist():
        classes[split == executor] = table.number(WorkClass(Executor(executor), bits))
    return Prefill(classes, tokens)
