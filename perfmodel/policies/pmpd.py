"""PMPD: fewer bits the longer an answer gets.

The prompt and the first tokens of an answer run at the widest width, later ones at ever narrower ones; what is
narrowed is every expert alike. Here a ``schedule`` says from which decode step on which width holds.

Source: arXiv 2410.13461 (progressive mixed-precision decoding), whose schedules are learned or tuned for a task; the
default here is an assumption. Readings taken: only routed experts are narrowed, as in the other policies. On the GPU
the widths are nested, a narrow one being the leading bits of the wide one, so the widest alone takes memory. Near
memory there is one copy of each width, as the other policies have it. What the bits cost in quality follows from the
loss table, as with every policy.
"""

import re
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from perfmodel.bitwidth import LossTable
from perfmodel.errors import PolicyError
from perfmodel.hardware.base import shown
from perfmodel.model import MoEModel
from perfmodel.policies.base import (
    MOST_CLASSES,
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
)

_STEP = re.compile(r"(\d{1,2}(?:\.\d{1,3})?)@(\d{1,9})")
#: One class of work is left for picks that are not run.
_MOST_STEPS = MOST_CLASSES - 1
_FORM = "bits@step joined by /, such as 4@0/3@64/2@256: steps rise from 0, bits of 1 to 32 fall"


@dataclass(frozen=True)
class Pmpd(Policy):
    """Widths that fall with the decode position."""

    name: ClassVar[str] = "pmpd"
    summary: ClassVar[str] = "all experts in one place, at fewer bits the longer the answer gets"
    source: ClassVar[str] = "arXiv 2410.13461"
    needs_ndp: ClassVar[bool] = False

    schedule: str = option("4@0/3@64/2@256", "bits from a decode step on", _FORM)
    place: Literal["gpu", "ndp"] = option("gpu", "all experts on the GPU, or all near memory")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.steps()

    def steps(self) -> tuple[tuple[float, int], ...]:
        """Stored bits, and the decode step from which on they hold.

        Raises PolicyError for another form than the option says, or for more steps than a plan can tell apart.
        """
        found = [_STEP.fullmatch(part) for part in self.schedule.split("/")]
        steps = tuple((float(one[1]), int(one[2])) for one in found if one)
        bits, starts = [width for width, _ in steps], [start for _, start in steps]
        fits = len(steps) == len(found) and starts[0] == 0 and starts == sorted(set(starts))
        if not fits or bits != sorted(set(bits), reverse=True) or not 1 <= bits[-1] <= bits[0] <= 32:
            raise PolicyError(f"policy pmpd: option schedule: found {shown(self.schedule)}, allowed {_FORM}")
        if len(steps) > _MOST_STEPS:
            raise PolicyError(
                f"policy pmpd: option schedule: found {len(steps)} steps, allowed at most {_MOST_STEPS} steps"
            )
        return steps

    def _widths(self, model: MoEModel) -> list[float]:
        """Width of every step of the schedule; the model's own where that is narrower [bit]."""
        return [min(width, float(model.expert_bits)) for width, _ in self.steps()]

    def residency(self, model: MoEModel, most_gpu_experts: float, losses: LossTable | None = None) -> Residency:
        widths, full = self._widths(model), float(model.expert_bits)
        if self.place == "ndp":
            return Residency(0.0, 0.0, tuple(sorted({width for width in widths if width < full})))
        if widths[0] == full:
            return Residency(float(model.num_experts), 0.0, (), behind="nothing")
        every = model.num_experts * len(model.moe_layers)
        return Residency(0.0, every * model.expert_bytes(widths[0]), (widths[0],), behind="nothing")

    def plan(self, inputs: PlanInputs) -> Plan:
        if self.place == "ndp":
            need_ndp(self, inputs.system)
        model, full = inputs.model, float(inputs.model.expert_bits)
        executor = Executor.NDP if self.place == "ndp" else Executor.GPU
        table = ClassTable()
        numbers = [table.number(WorkClass(executor, width, width < full)) for width in self._widths(model)]
        lengths = np.diff(inputs.replay.decode_offsets)
        position = np.arange(lengths.sum()) - np.repeat(inputs.replay.decode_offsets[:-1], lengths)
        position //= inputs.replay.batch.sequences
        stage = np.searchsorted([start for _, start in self.steps()], position, side="right") - 1
        ids = inputs.replay.decode_ids
        picks = np.broadcast_to(np.array(numbers, np.uint8)[stage, None, None], ids.shape).copy()
        if not inputs.replay.all_assigned:
            picks[~inputs.replay.assigned] = table.number(WorkClass(Executor.SKIP, full))
        tokens = prefill_counts(inputs)
        classes = None if tokens is None else np.full(tokens.shape, numbers[0], np.uint8)
        kept = self.residency(model, inputs.most_gpu_experts)
        where = "on the GPU" if self.place == "gpu" else "near memory"
        return make_plan(
            self,
            inputs,
            table,
            picks,
            (classes, tokens),
            overlap="max",
            **kept._asdict(),
            notes=(f"all experts {where}; schedule {self.schedule}, the prompt at its first width",),
        )
