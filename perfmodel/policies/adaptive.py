"""Context-aware placement that is corrected by few migrations while it decodes.

After the prefill everything is as in the context-aware policy. Then, after every ``window`` decode steps of a sequence,
the placement as it stands is held against those steps. Where it fits them worse than it promised, by more than
``threshold``, up to ``swaps`` experts of a layer change places: the near-data expert that was used most comes in for
the GPU expert that was used least. Counts are of the sequence so far, older windows counting ``memory`` as much as the
one after them. A pair of experts with counts c_in and c_out changes places only if

    c_in - c_out > hysteresis * spread * sqrt(c_in + c_out)

and if it pays back. ``sqrt(c_in + c_out)`` is how far the two differ by chance where steps are independent; ``spread``
is how much more counts vary because experts cling to neighbouring steps (`count_spread`). For the variance it would
stand below the root: here it stands before it, since what clings has often left again when its copy is there.

It pays back if the layer's experts take less time in all, in as many steps to come as the answer has had already, but
``payback`` at most: the steps of the copy, in which the outgoing expert is near memory and the incoming one is not yet
on the GPU, what the copy makes the layer wait for, and the steps from then on. All is estimated from the times of
single experts and of the shared ones, with the picks of the last ``window / (1 - memory)`` steps.

The incoming expert is copied at the stored precision into the slot of the outgoing one, which takes the width of the
incoming one and runs near memory from the first step of the copy on (the device holds every expert at every width of
the menu). So neither GPU memory nor the bit budget grows. The copy goes in ``pieces`` equal parts, one a step; with all
of them there, the expert runs on the GPU. Nobody waits for ``behind`` copies, unless the next layer is shorter than
they are; ``now`` makes the layer wait, and the last part serves the step that waited for it.

Source: arXiv 2512.04476 names corrections for drift while decoding as future work; this rule is one answer, chosen
here. What a placement promised is what it would have held in the prefill: the share of picks that find their expert on
the GPU (``watch=hit-rate``, all layers together), or the near-data picks of a layer and step (``watch=queue``, every
layer on its own).

The defaults are from a search on synthetic routing alone: answers of 100 to 1500 steps, some turning into another
sequence on the way, those that do not also with other skews and stickiness than `MIXTRAL_SKEW`. What they are worth:

- Without a switch: at most 0.8 % slower than the fixed placement on the traces of the search (stickiness 0 to 3, full
  precision and 2 to 4 bits, three systems, shapes of four models with and without shared experts).
- With a switch, at full precision on h100-cxl-ndp, it recovers part of the time up to a placement that knows each
  window of 64 (of 128) steps. Over the seeds of the search and four others at least 60 (64) % for 512 steps before and
  after the switch, 51 (60) % for 200 + 300 and 57 (63) % for 1000 + 300. Only 33 to 40 (42 to 50) % for 200 + 128: the
  shorter the new topic, the more the steps weigh in which there is no evidence yet.
- Two recordings of tiny-mixtral in one, which the search did not see: 42 to 60 (49 to 66) % over six choices of pairs,
  below half in three (two) of them.

Where a GPU expert at full precision takes as long as a near-data expert at few bits, migrations save little time, and
the payback rule then leaves the placement alone, however low its hit rate is; a placement by the counts of each window
is no bound there, but slower than the fixed one.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from perfmodel.bitwidth import LossTable
from perfmodel.kernels.picks import look_up
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
    option,
    require,
    require_experts,
)
from perfmodel.policies.context_aware import ContextAware
from perfmodel.policies.costs import COST_KEYS, expert_costs, shared_experts_s
from perfmodel.policies.drift import count_spread, held
from perfmodel.policies.placed import Basis, Decode

Watch = Literal["hit-rate", "queue"]
Copies = Literal["now", "behind"]


class _Migration(NamedTuple):
    """Experts that change places in one sequence after some step.

    step : first decode step that knows of it. copied : int64 [L], experts copied in every layer.
    during, after : uint8 [L, E + 1], class of every expert while it is copied and then.
    """

    step: int
    copied: NDArray[np.int64]
    during: NDArray[np.uint8]
    after: NDArray[np.uint8]


class _Times(NamedTuple):
    """What a pick and a copy take [s].

    gpu_s, near_s : float64 [classes], what a pick of a class adds to either side of a layer.
    piece_s : one piece of a copy. shared_s : shared experts of a layer, on the GPU.
    """

    gpu_s: NDArray[np.float64]
    near_s: NDArray[np.float64]
    piece_s: float
    shared_s: float


@dataclass(frozen=True)
class Adaptive(ContextAware):
    """Context-aware placement, corrected while decoding where it stops fitting."""

    window: int = option(8, "decode steps between two looks at the placement", low=1)
    watch: Watch = option("hit-rate", "what a placement promises: hits of all layers, or near-data picks of each")
    threshold: float = option(
        0.02, "what the promise may be missed by: a share of picks (hit-rate), or picks a layer and step (queue)", low=0
    )
    swaps: int = option(2, "most experts that change places in one layer after one window", low=0, high=EXPERTS)
    hysteresis: float = option(1.0, "lead in use of the incoming expert, in standard deviations", low=0)
    memory: float = option(0.8, "what a count keeps from one window to the next", low=0, high=1)
    payback: int = option(48, "most steps within which a migration must save its copy", low=1)
    migrate: Copies = option("behind", "copies that nobody waits for, or that their layer waits for")
    pieces: int | None = option(None, "steps that a copy is spread over, at most the window; auto: all of it", low=1)

    name: ClassVar[str] = "adaptive"
    summary: ClassVar[str] = "context-aware placement that few migrations correct while decoding"
    source: ClassVar[str] = "an open end of arXiv 2512.04476; the rule is this model's own"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "pieces", self._pieces <= self.window, f"1 to {self.window}, the window")

    @property
    def plan_keys(self) -> tuple[str, ...]:
        return COST_KEYS

    @property
    def _pieces(self) -> int:
        return self.window if self.pieces is None else self.pieces

    def residency(self, model: MoEModel, most_gpu_experts: float, losses: LossTable | None = None) -> Residency:
        require_experts(self, model, "swaps")
        return super().residency(model, most_gpu_experts, losses)

    def plan(self, inputs: PlanInputs) -> Plan:
        plan = super().plan(inputs)
        # The placement of the prefill says nothing about hits where it did not last.
        return plan if plan.copies is None else dataclasses.replace(plan, hot=None, alpha=None)

    def decode(self, inputs: PlanInputs, basis: Basis, classes: NDArray[np.uint8], table: ClassTable) -> Decode:
        kinds = table.classes()
        on_gpu = np.array([work.executor == Executor.GPU for work in kinds])
        times = self._times(inputs, kinds)
        ids, starts = inputs.replay.decode_ids, inputs.replay.decode_offsets
        tables, offsets = [], [0]
        copies = np.zeros((*ids.shape[:2], self.swaps), np.uint8)
        for s, (first, stop) in enumerate(pairwise(starts.tolist())):
            tables.append(classes[s])
            for move in self._migrations(ids[first:stop], basis.use[s], classes[s], on_gpu, times):
                begin = first + move.step
                placed = begin + self._pieces - (self.migrate == "now")
                # The parts that the sequence still reaches; the policy does not know how long it is.
                copies[begin : min(stop, begin + self._pieces)] += move.copied[:, None] > np.arange(self.swaps)
                for step, changed in ((begin, move.during), (placed, move.after)):
                    if step < stop:
                        offsets.append(step)
                        tables.append(changed)
            offsets.append(stop)
        moved = int(np.count_nonzero(copies))
        picks = look_up(np.array(tables), np.array(offsets, np.int64), ids)
        if not moved:
            return Decode(picks, None, ("no expert changed places while decoding",))
        full = float(inputs.model.expert_bits)
        when = When.BEHIND if self.migrate == "behind" else When.NOW
        numbers = [table.number(WorkClass(Executor.SKIP, full))]
        numbers.append(table.number(WorkClass(Executor.COPY, full / self._pieces, when=when)))
        a_token = moved / self._pieces / max(1, len(ids))
        note = f"{a_token:.3g} experts a decode step change places, all layers together"
        return Decode(picks, np.array(numbers, np.uint8)[copies], (note,))

    def _times(self, inputs: PlanInputs, kinds: tuple[WorkClass, ...]) -> _Times:
        """What picks of each class take, and one piece of a copy."""
        model, system = inputs.model, inputs.system
        gpu_s, near_s = np.zeros((2, len(kinds)))
        for number, work in enumerate(kinds):
            cost = expert_costs(model, system, 1, work.bits)
            if work.executor == Executor.GPU:
                gpu_s[number] = cost.gpu_s[0]
            elif work.executor == Executor.NDP:
                near_s[number] = cost.ndp_s[0]
        piece = expert_costs(model, system, 1, float(model.expert_bits) / self._pieces)
        return _Times(gpu_s, near_s, piece.copy_s, shared_experts_s(model, system))

    def _migrations(
        self,
        ids: NDArray[np.uint16],
        prompt: NDArray[np.float64],
        placed: NDArray[np.uint8],
        on_gpu: NDArray[np.bool_],
        times: _Times,
    ) -> Iterator[_Migration]:
        """The migrations of one sequence.

        ids : its decode picks [T, L, k]. prompt : use of every expert in its prefill [L, E].
        placed : class of every expert after it [L, E + 1]. on_gpu : which classes are on the GPU.
        """
        layers, experts = prompt.shape
        promised = held(prompt, on_gpu[placed[:, :-1]])
        # The prompt counts for as many steps as are remembered, if it is that long.
        steps = self.window / (1.0 - self.memory) if self.memory < 1.0 else np.inf
        counts = prompt * np.minimum(1.0, steps * ids.shape[2] / np.maximum(prompt.sum(axis=1, keepdims=True), 1.0))
        cells = np.arange(layers)[:, None] * (experts + 1)
        for step in range(self.window, len(ids), self.window):
            used = np.bincount(
                (cells + ids[step - self.window : step]).ravel(), minlength=layers * (experts + 1)
            ).reshape(layers, -1)[:, :-1]
            counts = self.memory * counts + used
            due = self._due(promised, used, on_gpu[placed[:, :-1]])
            if not due.any():
                continue
            recent = ids[max(0, step - round(min(step, steps))) : step]
            move = self._correct(step, recent, counts, placed, due, on_gpu, times)
            if not move.copied.any():
                continue
            placed = move.after
            yield move

    def _due(
        self, promised: NDArray[np.float64], used: NDArray[np.number[Any]], hot: NDArray[np.bool_]
    ) -> NDArray[np.bool_]:
        """Layers whose placement misses what it promised by more than the threshold [L]."""
        found = held(used, hot)
        if self.watch == "queue":
            missed = 1.0 - found[0] / np.maximum(found[1], 1.0)
            expected = 1.0 - promised[0] / np.maximum(promised[1], 1.0)
            picks = found[1] / self.window
            return np.asarray((missed - expected) * picks > self.threshold)
        shares = (one[0].sum() / max(one[1].sum(), 1.0) for one in (promised, found))
        return np.full(hot.shape[0], next(shares) - next(shares) > self.threshold)

    def _correct(
        self,
        step: int,
        recent: NDArray[np.uint16],
        counts: NDArray[np.float64],
        placed: NDArray[np.uint8],
        due: NDArray[np.bool_],
        on_gpu: NDArray[np.bool_],
        times: _Times,
    ) -> _Migration:
        """The migrations after the steps ``recent`` [N, L, k], from the use of every expert ``counts`` [L, E]."""
        layer = np.arange(len(placed))
        during, after, count = placed.copy(), placed.copy(), np.zeros(len(placed), np.int64)
        spread = count_spread(recent, counts.shape[1])
        took = self._lasting_s(step, recent, count, during, after, times)
        for _ in range(self.swaps):
            hot = on_gpu[after[:, :-1]]
            incoming = np.where(hot, -1.0, counts).argmax(axis=1)
            outgoing = np.where(hot, counts, np.inf).argmin(axis=1)
            more, less = counts[layer, incoming], counts[layer, outgoing]
            swap = due & hot.any(axis=1) & ~hot.all(axis=1)
            swap &= more - less > self.hysteresis * spread * np.sqrt(more + less)
            if not swap.any():
                break
            copying, tried = during.copy(), after.copy()
            tried[layer, incoming], tried[layer, outgoing] = after[layer, outgoing], after[layer, incoming]
            copying[layer, outgoing] = tried[layer, outgoing]
            then = self._lasting_s(step, recent, count + 1, copying, tried, times)
            swap &= then < took
            during[swap], after[swap], took[swap] = copying[swap], tried[swap], then[swap]
            count += swap
        return _Migration(step, count, during, after)

    def _lasting_s(
        self,
        step: int,
        recent: NDArray[np.uint16],
        count: NDArray[np.int64],
        during: NDArray[np.uint8],
        after: NDArray[np.uint8],
        times: _Times,
    ) -> NDArray[np.float64]:
        """What every layer takes in all the steps that the answer is taken to last, with ``count`` copies [L] [s]."""
        lasts = min(self.payback, step)
        copying = self._layer_times(recent, during, times)
        placed = self._layer_times(recent, after, times)
        hidden = copying if self.migrate == "behind" else np.zeros_like(copying)
        waits = np.maximum(count * times.piece_s - hidden, 0.0).mean(axis=0) * self._pieces
        there = self._pieces - (self.migrate == "now")
        return np.asarray(there * copying.mean(axis=0) + max(lasts - there, 0) * placed.mean(axis=0) + waits)

    def _layer_times(self, recent: NDArray[np.uint16], placed: NDArray[np.uint8], times: _Times) -> NDArray[np.float64]:
        """Time of the experts of every layer in some steps, had they been placed like this [N, L] [s]."""
        layer = np.arange(len(placed))[:, None]
        sides = []
        for side in (times.gpu_s, times.near_s):
            of_expert = side[placed]
            of_expert[:, -1] = 0.0
            sides.append(of_expert[layer, recent].sum(axis=2))
        sides[0] = sides[0] + times.shared_s
        return np.asarray(np.maximum(*sides) if self.overlap == "max" else sides[0] + sides[1])
