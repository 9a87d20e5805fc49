"""The published figures of arXiv 2512.04476, and how each is computed from evaluations."""

import json
import math
from dataclasses import dataclass
from importlib import resources
from typing import Literal, NamedTuple

Kind = Literal["rate", "gain", "range", "ndp-latency"]

#: Lengths at which the figures are computed: the one published grid point, and the outputs of the ranges.
PROMPT, OUTPUT = 128, 2048
RANGE_OUTPUTS = (256, 512, 1024, 2048)


@dataclass(frozen=True)
class Figure:
    """One published figure.

    id : its name, as in ``published.json``. model : a bundled model, or "both". system : the policy it is about.
    baseline : the policy it is compared with, or None for an absolute rate. bits : mean bits, None for a
    baseline's own rate. value : the published number, or the two ends of a range. mark : "printed" in the text
    or "secondary", read from a summary of the figures. fit : whether a calibration may use it.
    """

    id: str
    kind: Kind
    model: str
    system: str
    baseline: str | None
    bits: float | None
    value: tuple[float, ...]
    mark: str
    fit: bool

    @property
    def models(self) -> tuple[str, ...]:
        """The bundled models that the figure is about."""
        return ("mixtral-8x7b", "mixtral-8x22b") if self.model == "both" else (self.model,)


_KINDS: dict[str, tuple[Kind, str | None]] = {
    "decode_throughput_tok_per_s": ("rate", None),
    "decode_throughput_gain_over_monde_max": ("gain", "monde"),
    "speedup_over_hobbit_max": ("gain", "hobbit"),
    "end_to_end_speedup_over_monde_range": ("range", "monde"),
    "ndp_latency_reduction_approx": ("ndp-latency", None),
}


def load_figures() -> tuple[Figure, ...]:
    """All published figures, in the order of the file."""
    text = resources.files("perfmodel.evidence").joinpath("published.json").read_text(encoding="utf-8")
    figures = []
    for row in json.loads(text)["figures"]:
        kind, baseline = _KINDS[row["quantity"]]
        value = row["value"] if isinstance(row["value"], list) else [row["value"]]
        figures.append(
            Figure(
                id=row["id"],
                kind=kind,
                model=row["model"],
                system=row["system"],
                baseline=baseline,
                bits=row.get("mean_bits"),
                value=tuple(float(v) for v in value),
                mark=row["mark"],
                fit=row["fit"],
            )
        )
    return tuple(figures)


class Interval(NamedTuple):
    """A computed figure: a point has equal ends."""

    low: float
    high: float


def error(computed: Interval, figure: Figure) -> float:
    """Distance between computed and published: ``|ln(computed / published)|``, 0 where two ranges overlap."""
    low, high = figure.value[0], figure.value[-1]
    if computed.low > high:
        return math.log(computed.low / high)
    if computed.high < low:
        return math.log(low / computed.high)
    return 0.0


def geometric_mean_error(errors: list[float]) -> float:
    """``exp(mean of |ln ratio|) - 1``: 0.05 means 5 % off on the geometric average."""
    return math.exp(sum(errors) / len(errors)) - 1.0
