"""What a ranking holds: policies that apply in their order, policies that do not, and what was equal for all."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from perfmodel.errors import PolicyError
from perfmodel.evaluation import Evaluation, Metric
from perfmodel.evidence.uncertainty import Uncertainty
from perfmodel.hardware.system import System
from perfmodel.model import MoEModel

#: Metrics that the decode rate alone decides.
_BY_RATE = ("tpot_mean_s", "decode_tok_per_s", "decode_s")


class Refused(NamedTuple):
    """A policy that does not apply, and why.

    memory : whether it would apply with more memory.
    """

    label: str
    reason: str
    memory: bool = False


class NoPolicyError(PolicyError):
    """No policy applies.

    what : what was asked for, in words. refused : every policy with its reason, those of memory first.
    """

    def __init__(self, what: str, refused: Sequence[Refused]) -> None:
        self.what = what
        self.refused = tuple(sorted(refused, key=lambda one: not one.memory))
        super().__init__(f"{what}: {'; '.join(self.reasons)}")

    @property
    def reasons(self) -> list[str]:
        """One sentence a reason, without the advice that follows its first clause."""
        return [f"{', '.join(names)}: {why.partition('; ')[0]}" for names, why in grouped(self.refused)]


@dataclass(frozen=True)
class Ranked:
    """One policy in a ranking.

    label : the policy as it was asked for; ``evaluation.policy`` spells every option.
    value : the metric that decides, in its base unit; None where it is unknown.
    evaluation : everything else about it. belady_hit_rate : share of decode picks that a cache of the same slots would
        hit by Belady's rule [1] (see `answers.cache_bound`); None for what is no cache.
    bits : mean stored bits a weight of the experts that decode picks and runs [bit]; None where none runs.
    uncertainty : what measured runs say about the error of its decode rate.
    """

    label: str
    value: float | None
    evaluation: Evaluation
    belady_hit_rate: float | None
    bits: float | None
    uncertainty: Uncertainty

    @property
    def gpu_memory_bytes(self) -> float:
        """GPU memory in use [byte]."""
        return self.evaluation.memory_bytes["gpu"]["total"]

    @property
    def link_bytes(self) -> float:
        """Weights and activations that cross the link in a mean decode step [byte]."""
        moved = self.evaluation.bytes_per_token
        return moved["link_weights"] + moved["link_activations"]

    @property
    def link_busy(self) -> float:
        """Share of a mean decode step in which the link works, hidden or not [1]."""
        return self.evaluation.busy_s["link"] / self.evaluation.tpot_mean_s

    @property
    def floor_share(self) -> float:
        """The bandwidth floor over the mean time per output token [1]: how near the policy is to its own traffic."""
        return self.evaluation.bandwidth_floor_s / self.evaluation.tpot_mean_s

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values, ready for JSON."""
        return {
            "label": self.label,
            "value": self.value,
            "belady_hit_rate": self.belady_hit_rate,
            "bits": self.bits,
            "gpu_memory_bytes": self.gpu_memory_bytes,
            "link_bytes": self.link_bytes,
            "link_busy": self.link_busy,
            "floor_share": self.floor_share,
            "interval": self.uncertainty.to_dict(self.evaluation),
            "evaluation": self.evaluation.to_dict(),
        }


@dataclass(frozen=True)
class Ranking:
    """Policies in the order of a metric, the best first.

    metric : what decides. rows : policies that apply; those whose metric is unknown come last.
    refused : policies that do not apply. system : the machine, with the memory that was given and other values set.
    losses : name and origin of the loss table that the quality rests on. notes : what the numbers rest on.
    values : what was set in the system, by dotted key, the memory budget among it.
    bits : width that policies were given which leave theirs open [bit], or None; given_bits : those policies.
    """

    metric: Metric
    rows: tuple[Ranked, ...]
    refused: tuple[Refused, ...]
    model: MoEModel
    system: System
    losses: tuple[str, str]
    notes: tuple[str, ...]
    values: Mapping[str, float | str]
    bits: float | None = None
    given_bits: tuple[str, ...] = ()

    @property
    def memory_gb(self) -> float:
        """GPU memory of every policy, of all GPUs together [GB]."""
        return self.system.gpu.memory_capacity_gb * self.system.gpu.devices

    @property
    def unresolved(self) -> list[tuple[Ranked, Ranked]]:
        """Neighbours in an order by decode rate whose intervals of it overlap."""
        found: list[tuple[Ranked, Ranked]] = []
        if self.metric.name not in _BY_RATE:
            return found
        for one, other in itertools.pairwise(self.rows):
            first, second = one.uncertainty.rate(one.evaluation), other.uncertainty.rate(other.evaluation)
            if first and second and first[0] <= second[1] and second[0] <= first[1]:
                found.append((one, other))
        return found

    @property
    def reduced(self) -> list[str]:
        """Policies whose picks run below the stored precision of the model, in the mean."""
        stored = float(self.model.expert_bits) * (1 - 1e-9)
        return [one.label for one in self.rows if one.bits is not None and one.bits < stored]

    @property
    def own_bits(self) -> list[str]:
        """Policies that kept their own width while others were given one."""
        return [one.label for one in self.rows if one.label not in self.given_bits]

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values, ready for JSON."""
        return {
            "metric": self.metric.name,
            "unit": self.metric.unit,
            "better": self.metric.better,
            "model": self.model.name,
            "system": self.system.name,
            "system_hash": self.system.content_hash(),
            "engine": None if self.system.engine is None else self.system.engine.name,
            "gpu_memory_gb": self.memory_gb,
            "values": dict(self.values),
            "bits": None if self.bits is None else {"given": self.bits, "to": list(self.given_bits)},
            "losses": dict(zip(("name", "origin"), self.losses, strict=True)),
            "ranking": [one.to_dict() for one in self.rows],
            "unresolved": [[one.label, other.label] for one, other in self.unresolved],
            "refused": [one._asdict() for one in self.refused],
            "notes": list(self.notes),
        }


def grouped(refused: Sequence[Refused]) -> list[tuple[tuple[str, ...], str]]:
    """Reasons, each with the policies that it holds for; the name of the policy is not repeated in the reason."""
    found: dict[str, list[str]] = {}
    for label, reason, _ in refused:
        name = label.partition(":")[0].strip()
        said = re.sub(rf"^(policy )?{re.escape(name)}(: *| +)", "", reason)
        found.setdefault(said, []).append(label)
    return [(tuple(labels), reason) for reason, labels in found.items()]
