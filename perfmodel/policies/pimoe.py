"""PIMoE: hot experts on the GPU and cold ones near memory, evened out between the two in every layer.

A layer starts with its hot experts on the GPU and all others on the memory channels that hold them. While the busiest
channel takes longer than the GPU, its expert with most tokens moves to the GPU (`kernels.schedule.pimoe_split`). In
decode every expert has one token; the prefill is split by the same rule, with nothing on the GPU yet.

Source: PIMoE, DAC 2025, an NPU beside memory that computes, known from summaries alone; here the GPU takes the place of
the NPU. Readings taken: the hot experts are the ones the prompt selected most, copied once after the prefill. The
published NPU reads the same memory, so that a move costs no copy; here a move is a copy over the link, and by default
(``guarded``) none is made after which the GPU would be busy for longer than the channel was. ``published`` looks only
at the state before a move. Expert e is on channel e mod ``channels``, which alone has that share of the device's rate.
That serves the rule only: the near-data side is priced at the rate of the whole device, which evenly busy channels
reach.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from perfmodel.bitwidth import LossTable
from perfmodel.errors import PolicyError
from perfmodel.kernels.schedule import pimoe_split
from perfmodel.model import MoEModel
from perfmodel.placement import wanted_gpu_experts
from perfmodel.policies.base import (
    EXPERTS,
    ClassTable,
    Executor,
    Plan,
    PlanInputs,
    Policy,
    Residency,
    WorkClass,
    make_plan,
    need_ndp,
    option,
    prefill_counts,
    require_experts,
)
from perfmodel.policies.costs import COST_KEYS, expert_costs
from perfmodel.policies.hosted import split_prefill
from perfmodel.routing import statistics

#: A quotient that is whole but for rounding counts as whole.
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Pimoe(Policy):
    """Hot experts on the GPU, cold ones near memory, evened out layer by layer."""

    name: ClassVar[str] = "pimoe"
    summary: ClassVar[str] = "hot experts on the GPU, cold ones near memory, evened out in every layer"
    source: ClassVar[str] = "PIMoE, DAC 2025, from summaries"

    gpu_experts: int | None = option(
        None, "hot experts per layer; auto: as the context-aware policy, if one in copy fits too", low=0, high=EXPERTS
    )
    channels: int = option(1, "memory channels that experts are spread over", low=1, high=1024)
    moves: Literal["guarded", "published"] = option("guarded", "only moves that shorten a layer, or all of the rule")

    @property
    def plan_keys(self) -> tuple[str, ...]:
        return COST_KEYS

    def residency(self, model: MoEModel, most_gpu_experts: float, losses: LossTable | None = None) -> Residency:
        count = self._most(model, most_gpu_experts) if self.gpu_experts is None else self.gpu_experts
        require_experts(self, model, "gpu_experts")
        staging = 0.0 if count == model.num_experts else model.expert_bytes(float(model.expert_bits))
        return Residency(float(count), staging, ())

    @staticmethod
    def _most(model: MoEModel, most: float) -> int:
        """Experts a layer as the context-aware policy takes them, no more than fit beside one that is being copied."""
        layers = len(model.moe_layers)
        room = int(most * layers + _ROUNDING)
        return wanted_gpu_experts(model, most if room == layers * model.num_experts else (room - 1) // layers)

    def _split(self, inputs: PlanInputs, tokens: NDArray[np.int64], resident: NDArray[np.bool_]) -> NDArray[np.uint8]:
        """Where every expert of N layers runs [N, E], by its tokens and by what is resident [N, E]."""
        counts = np.arange(int(tokens.max(initial=1)) + 1)
        costs = expert_costs(inputs.model, inputs.system, counts, float(inputs.model.expert_bits))
        near_s = costs.ndp_s * self.channels
        split, _ = pimoe_split(
            np.ascontiguousarray(tokens, np.int32),
            np.ascontiguousarray(resident),
            costs.gpu_s,
            near_s,
            costs.copy_s,
            self.channels,
            self.moves == "guarded",
        )
        return np.asarray(split)

    def plan(self, inputs: PlanInputs) -> Plan:
        need_ndp(self, inputs.system)
        tokens = prefill_counts(inputs)
        if tokens is None or (inputs.replay.trace.prompt_len == 0).any():
            raise PolicyError(
                "policy pimoe takes its hot experts from each sequence's prefill, and this trace holds no prefill for "
                "some; use a trace with prompts"
            )
        model, full = inputs.model, float(inputs.model.expert_bits)
        kept = self.residency(model, inputs.most_gpu_experts)
        count = int(kept.gpu_experts)
        hot: NDArray[np.bool_] = np.zeros(tokens.shape, np.bool_)
        np.put_along_axis(hot, statistics.ranked_experts(tokens.astype(np.float64))[..., :count], True, axis=-1)
        table = ClassTable()
        numbers = np.array([table.number(WorkClass(Executor(one), full)) for one in range(4)], np.uint8)
        flat = (-1, model.num_experts)
        before = self._split(inputs, tokens.reshape(flat), np.zeros_like(hot).reshape(flat))
        picks = numbers[self._decode(inputs, hot)]
        fetched = int(np.count_nonzero(picks == numbers[Executor.FETCH]))
        if fetched == 0 and not (before == Executor.FETCH).any():
            kept = kept._replace(gpu_buffer_bytes=0.0)
        return make_plan(
            self,
            inputs,
            table,
            picks,
            split_prefill(tokens, before.reshape(tokens.shape), table, full),
            overlap="max",
            fetch="pipelined",
            migrated_experts=np.full(len(hot), float(count * hot.shape[1])),
            **kept._asdict(),
            notes=(
                f"{count} of {model.num_experts} experts a layer on the GPU;"
                f" a decode step moves {fetched / max(1, len(picks)):.3g} more there",
            ),
        )

    def _decode(self, inputs: PlanInputs, hot: NDArray[np.bool_]) -> NDArray[np.uint8]:
        """Executor of every pick [T, L, k], by the tokens of its step.

        One sequence at a time, since tokens of all experts take much memory.
        """
        ids, experts = inputs.replay.decode_ids, hot.shape[-1]
        found = np.empty(ids.shape, np.uint8)
        layers, size = ids.shape[1], inputs.replay.batch.tokens
        for s, (first, stop) in enumerate(pairwise(inputs.replay.decode_offsets.tolist())):
            own = ids[first:stop].astype(np.int64)
            steps = (stop - first) // size
            tokens = np.zeros((steps, layers, experts + 1), np.int64)
            for token in range(size):
                picked = np.zeros_like(tokens)
                np.put_along_axis(picked, own[token::size], 1, axis=-1)
                tokens += picked
            resident = np.broadcast_to(hot[s], (steps, layers, experts)).reshape(-1, experts)
            split = self._split(inputs, tokens[..., :-1].reshape(-1, experts), resident)
            padded = np.pad(split.reshape(steps, layers, experts), ((0, 0), (0, 0), (0, 1)), constant_values=3)
            found[first:stop] = np.take_along_axis(np.repeat(padded, size, axis=0), own, axis=-1)
        return found
