"""What a comparison of objectives and rules found."""

from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from perfmodel.bitwidth import Budget
from perfmodel.losses.rules import RULES, UNIFORM
from perfmodel.placement import Norm

#: Differences of ratios below this are none.
_NOTHING = 5e-4


class Assignment(NamedTuple):
    """One rule under one objective.

    loss : summed weighted loss of the near-data experts, mean over sequences
    ratio : over the optimum of the same objective with one budget a layer [1]; None where that is 0 everywhere
    decode_loss : expected loss of a decode pick, one on the GPU counting 0, in the table's unit; None without decode
    decode_vs_uniform : the same over that of uniform bits [1]; None where that is 0
    """

    loss: float
    ratio: float | None
    decode_loss: float | None
    decode_vs_uniform: float | None


@dataclass(frozen=True)
class Setting:
    """All rules under one objective and budget.

    gpu_experts : experts of a layer on the GPU. mean_bits : as asked. spent_bits : what whole increments reach [bit].
    assignments : by rule. zero_layers : layers of sequences whose optimum is 0, which the ratios leave out.
    hindsight, hindsight_model : least ``decode_vs_uniform`` of any assignment, with one budget a layer and with one
        for the whole model: chosen by the decode steps themselves.
    """

    gpu_experts: int
    mean_bits: float
    spent_bits: float
    objective: str
    assignments: dict[str, Assignment]
    zero_layers: int
    hindsight: float | None
    hindsight_model: float | None


@dataclass(frozen=True)
class Comparison:
    """What `assignments.compare_assignments` found, and for what."""

    table: str
    table_source: str
    trace: str
    trace_source: str
    sequences: int
    layers: int
    experts: int
    bits: tuple[int, ...]
    alpha: float
    norm: Norm
    min_bits: int
    budget: Budget
    seed: int
    settings: tuple[Setting, ...]
    notes: tuple[str, ...]

    def setting(self, gpu_experts: int, mean_bits: float, objective: str) -> Setting:
        """One of the settings; KeyError when there is none."""
        for one in self.settings:
            if (one.gpu_experts, one.mean_bits, one.objective) == (gpu_experts, mean_bits, objective):
                return one
        raise KeyError((gpu_experts, mean_bits, objective))

    @property
    def rules(self) -> list[str]:
        """The rules that any setting has, in order."""
        return [rule for rule in (UNIFORM, *RULES) if any(rule in one.assignments for one in self.settings)]

    @property
    def means(self) -> list[float]:
        """Mean bits compared, in order [bit]."""
        return list(dict.fromkeys(one.mean_bits for one in self.settings))

    @property
    def gpu_experts(self) -> list[int]:
        """Numbers of GPU experts compared, in order."""
        return list(dict.fromkeys(one.gpu_experts for one in self.settings))

    @property
    def objectives(self) -> list[str]:
        """Objectives compared, in order."""
        return list(dict.fromkeys(one.objective for one in self.settings))

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values."""
        return {
            **{name: value for name, value in asdict(self).items() if name != "settings"},
            "bits": list(self.bits),
            "notes": list(self.notes),
            "settings": [
                {**asdict(one), "assignments": {rule: found._asdict() for rule, found in one.assignments.items()}}
                for one in self.settings
            ],
            "readings": readings(self),
        }


def readings(found: Comparison) -> list[str]:
    """What the comparison shows: a line for every mean, over the numbers of GPU experts alike."""
    return [f"at {mean:g} bits {_reading(found, mean)}" for mean in found.means]


def _reading(found: Comparison, mean: float) -> str:
    words = [_order(found, mean)]
    for scope, budget in (("layer", "one budget a layer"), ("model", "one for the whole model")):
        costs = {
            (objective, rule): cost
            for objective in found.objectives
            for rule, kind in RULES.items()
            if kind.scope == scope and kind.order != "random"
            if (cost := _mean(found, mean, objective, rule, "decode_vs_uniform")) is not None
        }
        if costs:
            (objective, rule), least = min(costs.items(), key=lambda item: item[1])
            if least > 0.995:
                words.append(f"with {budget} nothing loses less in decode than uniform bits")
            else:
                words.append(
                    f"with {budget} decode loses least by {rule} under {objective}, {least:.2f} of uniform bits"
                )
    return ", ".join(word for word in words if word) or "nothing can be said"


def _order(found: Comparison, mean: float) -> str:
    """What the order by importance is worth under the plain sum, beside a random one."""
    ratios = {rule: _mean(found, mean, "plain", rule, "ratio") for rule in (UNIFORM, "prefix", "random")}
    known = {rule: ratio for rule, ratio in ratios.items() if ratio is not None}
    if len(known) < len(ratios):
        return ""
    if known[UNIFORM] < 1 + _NOTHING:
        return "uniform bits are the optimum of the plain sum"
    better = "better" if known["prefix"] < known["random"] - _NOTHING else "no better"
    words = f"under the plain sum the order by importance is {better} than a random one"
    words += f" ({known['prefix']:.3f} and {known['random']:.3f} of the optimum"
    decode = [_mean(found, mean, "plain", rule, "decode_vs_uniform") for rule in ("prefix", "random")]
    if decode[0] is not None and decode[1] is not None:
        words += f"; {decode[0]:.2f} and {decode[1]:.2f} of uniform bits in decode"
    return f"{words})"


def _mean(found: Comparison, mean: float, objective: str, rule: str, what: str) -> float | None:
    """Mean of a figure over the numbers of GPU experts; None unless all have it."""
    settings = [one for one in found.settings if (one.mean_bits, one.objective) == (mean, objective)]
    values = [getattr(one.assignments[rule], what) for one in settings if rule in one.assignments]
    if not values or len(values) < len(settings) or None in values:
        return None
    return float(sum(values) / len(values))
