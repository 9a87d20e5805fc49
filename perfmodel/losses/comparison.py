"""What a comparison of objectives and rules found."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from perfmodel.bitwidth import Budget
from perfmodel.losses.rules import RULES, UNIFORM, rule_words
from perfmodel.placement import Norm

#: Uniform bits this close to the optimum are the optimum.
_NOTHING = 5e-4
#: Smaller shares are no difference worth a name, and neither are fewer standard errors.
_LEAST_SHARE, _LEAST_ERRORS = 0.01, 3.0


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
    uniform_exists : whether ``uniform`` is an assignment, or the mean of some; else it is a mix of two widths that no
        layer can have.
    assignments : by rule. zero_layers : layers of sequences whose optimum is 0, which the ratios leave out.
    hindsight, hindsight_model : least ``decode_vs_uniform`` of any assignment, with one budget a layer and with one
        for the whole model: chosen by the decode steps themselves.
    ratio_noise, decode_noise : standard error of what ``random`` less ``prefix`` is in ``ratio`` and in
        ``decode_vs_uniform``, from sequences and random orders; None where these are.
    """

    gpu_experts: int
    mean_bits: float
    spent_bits: float
    uniform_exists: bool
    objective: str
    assignments: dict[str, Assignment]
    zero_layers: int
    hindsight: float | None
    hindsight_model: float | None
    ratio_noise: float | None
    decode_noise: float | None


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
    """What the comparison shows, a statement each: at every mean, over the numbers of GPU experts alike."""
    return [
        f"at {mean:g} bits ({_over(found.gpu_experts)}): {words}"
        for mean in found.means
        for words in [*_orders(found, mean), *_budgets(found, mean)] or ["nothing can be said"]
    ]


def _over(gpu_experts: list[int]) -> str:
    return f"{'mean over ' * (len(gpu_experts) > 1)}K = {', '.join(map(str, gpu_experts))}"


def _orders(found: Comparison, mean: float) -> Iterator[str]:
    """What the order by importance is worth under the plain sum, beside a random one: in that sum, and in decode."""
    mixed = _mixed(found, mean)
    uniform = _values(found, mean, "plain", UNIFORM, "ratio")
    if not mixed and uniform and all(abs(one - 1) < _NOTHING for one in uniform):
        yield "uniform bits are the optimum of the plain sum"
        return
    for field, start, unit in (
        ("ratio", "of the plain sum", "the optimum"),
        ("decode_vs_uniform", "in decode, under the same objective", f"uniform bits{mixed}"),
    ):
        prefix, random = (_mean(found, mean, "plain", rule, field) for rule in ("prefix", "random"))
        if prefix is not None and random is not None:
            yield (
                f"{start}, the order by importance is {_beside(random - prefix, random, _noise(found, mean, field))}"
                f" a random one: {prefix:.3f} and {random:.3f} of {unit}"
            )


def _beside(gain: float, random: float, noise: float) -> str:
    """How an order that is lower by ``gain`` stands beside a random one."""
    if abs(gain) <= max(_LEAST_SHARE * random, _LEAST_ERRORS * noise):
        return "no different from"
    return "better than" if gain > 0 else "worse than"


def _noise(found: Comparison, mean: float, field: str) -> float:
    """Standard error of the mean over the numbers of GPU experts, which share sequences: no less than that of one."""
    name = {"ratio": "ratio_noise", "decode_vs_uniform": "decode_noise"}[field]
    settings = [one for one in found.settings if (one.mean_bits, one.objective) == (mean, "plain")]
    return sum(getattr(one, name) or 0.0 for one in settings) / len(settings)


def _budgets(found: Comparison, mean: float) -> Iterator[str]:
    """What loses least in decode, by what shares a budget."""
    mixed = _mixed(found, mean)
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
            best = f"{rule_words(rule)} under {objective}"
            if mixed or least < 1 - _LEAST_SHARE:
                yield f"with {budget}, decode loses least by {best}: {least:.3f} of uniform bits{mixed}"
            elif _below_uniform(found, mean, scope):
                margin = f"{100 * _LEAST_SHARE:g} %"
                yield f"with {budget}, nothing loses more than {margin} less in decode than uniform bits"
            else:
                yield f"with {budget}, nothing loses less in decode than uniform bits"


def _below_uniform(found: Comparison, mean: float, scope: str) -> bool:
    """Whether any single figure with such a budget is below 1 as it is printed."""
    figures = (
        one.assignments[rule].decode_vs_uniform
        for one in found.settings
        for rule, kind in RULES.items()
        if one.mean_bits == mean and kind.scope == scope and rule in one.assignments
    )
    return any(figure is not None and round(figure, 3) < 1 for figure in figures)


def _mixed(found: Comparison, mean: float) -> str:
    """Where uniform bits are a mix of widths that no layer can have, in words; empty where they never are."""
    counts = dict.fromkeys(
        one.gpu_experts for one in found.settings if one.mean_bits == mean and not one.uniform_exists
    )
    listed = ", ".join(map(str, counts))
    return f" (at K = {listed} a mix of widths that no layer can have)" if counts else ""


def _mean(found: Comparison, mean: float, objective: str, rule: str, what: str) -> float | None:
    """Mean of a figure over the numbers of GPU experts; None unless all have it."""
    values = _values(found, mean, objective, rule, what)
    return sum(values) / len(values) if values else None


def _values(found: Comparison, mean: float, objective: str, rule: str, what: str) -> list[float]:
    """A figure by number of GPU experts; none unless all have it."""
    settings = [one for one in found.settings if (one.mean_bits, one.objective) == (mean, objective)]
    values = [getattr(one.assignments[rule], what) for one in settings if rule in one.assignments]
    return [] if len(values) < len(settings) or None in values else [float(value) for value in values]
