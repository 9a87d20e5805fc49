"""DAOP: after the prefill hot experts change places with cold ones on the GPU; while decoding the CPU computes ahead.

Source: arXiv 2501.10375; only its rules and its block times are known here (CPU 8.02, GPU 1.24, moving an expert 39.87,
activations 0.02 ms). Rules, and the readings taken:

- Before a sequence the experts that the decode steps of the other sequences use most are on the GPU, as many a layer.
- After the prefill the hottest expert on the CPU changes places with the coldest on the GPU as long as its prompt used
  it more than ``ratio`` times as often; at most half of a layer's experts on the GPU are replaced. Nothing moves while
  decoding.
- Experts of the next block are predicted, right with the chance ``accuracy`` (published: 84.1 %), and those on the CPU
  are computed ahead. Such work is priced one layer late: the CPU does it after the others of its own layer, beside the
  rest of that layer and the attention that follows. Where layers are alike this hides as much as doing it one layer
  early, but for the last layer, which waits for its own. What was predicted wrongly is computed in vain and occupies
  the CPU all the same.

Not modelled: what a result costs in quality that was computed from an earlier hidden state, and replacing an expert on
the CPU by a resident one, for which no rule is known here.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from perfmodel.bitwidth import LossTable
from perfmodel.kernels.picks import look_up
from perfmodel.kernels.tally import NO_EXPERT
from perfmodel.model import MoEModel
from perfmodel.policies.base import (
    EXPERTS,
    ClassTable,
    Executor,
    Plan,
    PlanInputs,
    Residency,
    When,
    WorkClass,
    make_plan,
    option,
    prefill_counts,
)
from perfmodel.policies.cached import extra_copies
from perfmodel.policies.costs import COST_KEYS, need_cpu
from perfmodel.policies.host import HostPrefill, host_prefill
from perfmodel.policies.hosted import HostedExperts
from perfmodel.routing import prediction, statistics


@dataclass(frozen=True)
class Daop(HostedExperts):
    """Placement corrected once a sequence, and predicted experts computed ahead on the CPU."""

    name: ClassVar[str] = "daop"
    summary: ClassVar[str] = "experts swapped once after the prefill; predicted ones computed ahead on the CPU"
    source: ClassVar[str] = "arXiv 2501.10375; its rules as cited by others"

    gpu_experts: int | None = option(None, "experts a layer on the GPU; auto: as many as fit", low=0, high=EXPERTS)
    ratio: float = option(
        1.05, "how much more often the prompt has to use an expert that takes a place", low=1, high=1e6
    )
    accuracy: float = option(0.841, "chance that a predicted expert is right", low=0, high=1)
    ahead: Literal["yes", "no"] = option("yes", "whether predicted experts are computed ahead on the CPU")
    seed: int = option(0, "seed of the wrong predictions", low=0, high=2**32 - 1)
    prefill: HostPrefill = option("cpu", "where the prefill runs experts of host memory")

    @property
    def copies_experts(self) -> bool:
        return self.prefill != "cpu"

    @property
    def plan_keys(self) -> tuple[str, ...]:
        return COST_KEYS if self.prefill in ("each", "faster") else super().plan_keys

    def _count(self, model: MoEModel, most: float) -> int:
        return self._a_layer(model, most, "gpu_experts")

    def residency(self, model: MoEModel, most_gpu_experts: float, losses: LossTable | None = None) -> Residency:
        return self._keeps(model, self._count(model, most_gpu_experts) * len(model.moe_layers))

    def plan(self, inputs: PlanInputs) -> Plan:
        need_cpu(self, inputs.system)
        model, bits, trace = inputs.model, self._bits(inputs.model), inputs.replay.trace
        count = self._count(model, inputs.most_gpu_experts)
        notes: tuple[str, ...] = ()
        before = np.full((trace.num_sequences, len(model.moe_layers), model.num_experts), count > 0)
        if 0 < count < model.num_experts:
            use = self.use_of_others(inputs)
            before, notes = statistics.top_experts(use.counts, count), use.notes
        tokens = prefill_counts(inputs)
        hot = before if tokens is None else self._swapped(before, tokens, count)
        table = ClassTable()
        prefill = host_prefill(inputs, table, self.prefill, bits=bits, hot=before)
        picks, copies = self.pick_classes(inputs, hot, table), None
        if self.ahead == "yes":
            copies = self._compute_ahead(inputs, hot, picks, table)
        kept: dict[str, Any] = self.residency(model, inputs.most_gpu_experts)._asdict()
        moved = (hot & ~before).sum(axis=(1, 2)).astype(np.float64)
        stored = moved * (bits / float(model.expert_bits))  # a copy of fewer bits counts as that part of one
        return make_plan(
            self,
            inputs,
            table,
            picks,
            prefill,
            overlap="max",
            copies=copies,
            round_trips="layer",
            migrated_experts=stored,
            **kept,
            notes=(
                self.placed_note(inputs, hot),
                *notes,
                f"{moved.mean() / len(model.moe_layers):.2f} experts a layer take another's place after the prefill",
            ),
        )

    def _swapped(self, before: NDArray[np.bool_], tokens: NDArray[np.int64], count: int) -> NDArray[np.bool_]:
        """The placement after the prefill [S, L, E]; equal use: lower ids change first."""
        most = min(count // 2, before.shape[-1] - count)
        coming = np.argsort(np.where(before, 1, -tokens), axis=-1, kind="stable")[..., :most]
        going = np.argsort(np.where(before, tokens, np.iinfo(np.int64).max), axis=-1, kind="stable")[..., :most]
        hotter, colder = (np.take_along_axis(tokens, some, axis=-1) for some in (coming, going))
        # The pairs get ever less different, so those that change are the first ones.
        swap = hotter > self.ratio * colder
        hot = before.copy()
        np.put_along_axis(hot, going, ~swap, axis=-1)
        np.put_along_axis(hot, coming, swap, axis=-1)
        return hot

    def _compute_ahead(
        self, inputs: PlanInputs, hot: NDArray[np.bool_], picks: NDArray[np.uint8], table: ClassTable
    ) -> NDArray[np.uint8] | None:
        """Mark what was computed ahead in ``picks``; returns what was computed in vain."""
        bits, ids = self._bits(inputs.model), inputs.replay.decode_ids
        named = prediction.gate_prediction(inputs.replay, self.accuracy, self.seed)
        same = named[..., None, :] == ids[..., :, None]
        cold = np.zeros((*hot.shape[:2], hot.shape[2] + 1), np.uint8)
        cold[..., :-1] = ~hot
        experts = np.where(named == NO_EXPERT, inputs.model.num_experts, named).astype(np.uint16)
        vain = (look_up(cold, inputs.replay.decode_offsets, experts) == 1) & ~same.any(axis=-2)
        on_cpu = look_up(cold, inputs.replay.decode_offsets, ids) == 1
        early = on_cpu & same.any(axis=-1)
        early[:, -1] = False
        behind = WorkClass(Executor.CPU, bits, when=When.BEHIND)
        if early.any():
            picks[early] = table.number(behind)
        wasted = vain.sum(axis=2)
        last = np.zeros_like(wasted)
        last[:, -1] = wasted[:, -1]
        return extra_copies([(wasted - last, behind), (last, WorkClass(Executor.CPU, bits))], table, bits)
