"""Context-aware placement and precision on a GPU with near-data processing, and static placement beside it.

Once per sequence, after its prefill: the most important experts of every layer move to the GPU at full
precision; the others stay on the near-data device, each at a width that the selector chose among those of the loss
table up to 4 bits. No expert moves while decoding: each pick is computed on the side that holds it.

Source: arXiv 2512.04476. Where the text is silent:

- *overlap*: the text says that both sides run at the same time, so a layer takes the slower side (``max``).
  ``sum`` runs them one after the other.
- *prefill*: the text does not say where it runs. ``ndp`` keeps every expert in place at full precision, since
  the placement is known only afterwards.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from perfmodel import placement
from perfmodel.errors import PolicyError, TraceError
from perfmodel.policies.base import Plan, PlanInputs, option
from perfmodel.policies.placed import Basis, PlacedExperts
from perfmodel.routing import RoutingTrace, statistics
from perfmodel.routing.npz import one_line
from perfmodel.routing.others import no_others_text, own_prompt_note, sum_of_outside
from perfmodel.routing.profile import FrequencyProfile, load_use


@dataclass(frozen=True)
class ContextAware(PlacedExperts):
    """Placement and precision from each sequence's own prefill."""

    name: ClassVar[str] = "context-aware"
    summary: ClassVar[str] = "hot experts on the GPU, cold ones near memory at 1-4 bits, chosen from the prefill"
    source: ClassVar[str] = "arXiv 2512.04476"

    def plan(self, inputs: PlanInputs) -> Plan:
        if not inputs.replay.trace.has_prefill:
            raise PolicyError(
                f"policy {self.name} places experts from each sequence's prefill, and this trace holds no prefill; "
                "use static (a profile of the other sequences), monde or hobbit"
            )
        values = placement.importance(inputs.replay.trace, alpha=self.alpha, norm=self.norm)
        use = statistics.selection_counts(inputs.replay.trace, "prefill").astype(np.float64)
        return self.placed(inputs, Basis(values, use), known_before=False)


@dataclass(frozen=True)
class Static(PlacedExperts):
    """Placement from a profile of other traffic, known before the prompt arrives.

    The profile is the decode steps of the *other* sequences of the trace (leave-one-out; in a batch, of those outside
    it), those of another trace, or a frequency profile: counts, shares or an order of experts, without weights. Nothing
    migrates, and the prefill already finds the hot experts on the GPU. A batch of all sequences of the trace is placed
    by its own prompts.
    """

    profile: str = option(
        "others", "decode profile to place by", "others | name or file of another trace | frequency profile"
    )

    name: ClassVar[str] = "static"
    summary: ClassVar[str] = "the same split, placed once from the decode profile of the other sequences"
    source: ClassVar[str] = "control for arXiv 2512.04476; needs no prefill"

    def plan(self, inputs: PlanInputs) -> Plan:
        basis = self._from_others(inputs) if self.profile == "others" else self._from_elsewhere(inputs)
        return self.placed(inputs, basis, known_before=True)

    def _from_others(self, inputs: PlanInputs) -> Basis:
        """One placement a sequence or batch, from the decode steps of the sequences outside it.

        A batch of all sequences of the trace is placed by its own prompts.
        """
        replay = inputs.replay
        if replay.single.trace.num_sequences > 1 and not replay.outside.any():
            return self._from_own_prompts(inputs)
        values = placement.importance_of_others(replay, alpha=self.alpha, norm=self.norm)
        counts = statistics.selection_counts(replay.single.trace, "decode").astype(np.float64)
        return Basis(values, sum_of_outside(counts, replay))

    def _from_own_prompts(self, inputs: PlanInputs) -> Basis:
        replay = inputs.replay
        if not replay.trace.has_prefill:
            raise PolicyError(
                f"policy {self.name} places experts by how other sequences use them, and {no_others_text(replay)}"
                f" without a prefill; allowed: at least {replay.batch.sequences + 1} sequences, or a prefill"
            )
        values = placement.importance(replay.trace, alpha=self.alpha, norm=self.norm)
        use = statistics.selection_counts(replay.trace, "prefill").astype(np.float64)
        return Basis(values._replace(notes=(*values.notes, own_prompt_note(replay))), use)

    def _from_elsewhere(self, inputs: PlanInputs) -> Basis:
        """One placement for all sequences, from another trace or from counts alone."""
        try:
            return self._from_profile(inputs)
        except TraceError as error:
            file = f"{one_line(self.profile)}: "
            raise TraceError(
                f"policy static: option profile: {file}{str(error).removeprefix(file)}; allowed: a trace, or a "
                f"frequency profile, that fits {inputs.model.name}"
            ) from error

    def _from_profile(self, inputs: PlanInputs) -> Basis:
        profile = load_use(self.profile)
        if isinstance(profile, FrequencyProfile):
            self._check_layers(profile.num_layers, inputs)
            return self._from_counts(inputs, profile)
        if profile.num_experts_inferred and profile.num_experts <= inputs.model.num_experts:
            profile = profile.with_num_experts(inputs.model.num_experts)
        profile.check_model(inputs.model)
        self._check_layers(profile.num_layers, inputs)
        return self._from_another_trace(inputs, profile)

    def _check_layers(self, found: int, inputs: PlanInputs) -> None:
        if found != len(inputs.model.moe_layers):
            raise PolicyError(
                f"policy static: profile {self.profile} has {found} layers, {inputs.model.name} has"
                f" {len(inputs.model.moe_layers)} MoE layers; allowed: as many"
            )

    def _from_another_trace(self, inputs: PlanInputs, profile: RoutingTrace) -> Basis:
        """One placement for all sequences, from the decode steps of the profile (its prefill if it has none)."""
        phase: placement.Phase = "decode" if profile.has_decode else "prefill"
        own = placement.importance(profile, alpha=self.alpha, norm=self.norm, phase=phase)
        pooled = own.values.mean(axis=0, keepdims=True)
        use = statistics.selection_counts(profile, phase).sum(axis=0, keepdims=True, dtype=np.float64)
        sequences = inputs.replay.trace.num_sequences
        return Basis(own._replace(values=np.repeat(pooled, sequences, axis=0)), use)

    def _from_counts(self, inputs: PlanInputs, profile: FrequencyProfile) -> Basis:
        """One placement for all sequences, from how often experts were used, or from their order alone."""
        profile.check_model(inputs.model)
        by_order = profile.scale == "ranks"
        if by_order and self.objective != "plain":
            raise PolicyError(
                f"policy static: option objective: found {self.objective}, allowed plain: profile {self.profile}"
                f" says in which order experts are used, not how often"
            )
        notes = [f"placed by a frequency profile of {profile.metadata['model']}, {_WHAT_COUNTS[profile.scale]}"]
        if self.alpha < 1.0:
            notes.append(f"the profile has no routing weights: alpha forced from {self.alpha:g} to 1 (counts alone)")
        use = profile.shares() if profile.scale == "shares" else profile.counts
        # An order has no sum or span to normalise by; either would keep it.
        values = use if by_order else placement.importance_of(use, None, alpha=1.0, norm=self.norm)
        values = np.repeat(values[None], inputs.replay.trace.num_sequences, axis=0)
        return Basis(placement.Importance(values, 1.0, tuple(notes)), use[None])


#: What the numbers of a frequency profile are, for the notes of a plan.
_WHAT_COUNTS = {
    "counts": "which says how often experts were used and knows no sequences",
    "shares": "which says the shares of experts in each layer and knows no sequences",
    "ranks": "which says in which order experts are used, not how often",
}

#: Options that switch one idea of the context-aware system off.
ABLATIONS: dict[str, str] = {
    "placement only": "selector=full",
    "precision only": "gpu_experts=0",
    "uniform bits": "selector=uniform",
}
