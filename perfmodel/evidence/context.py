"""Published accuracies beside the computed quantisation losses of the same settings: context, never a prediction.

The losses are output errors of the experts of another, small model; the accuracies are of the paper's model on its
tasks. Nothing here is fitted, and no number of one kind is computed from the other or held against it.
"""

import csv
import json
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from perfmodel.bitwidth import losses_for
from perfmodel.evidence.bench import Bench, Case, policy_text
from perfmodel.evidence.figures import OUTPUT
from perfmodel.paths import replace_when_done


class Accuracy(NamedTuple):
    """A published accuracy [%]: of the context-aware system at a mean width, None for full precision."""

    name: str
    bits: float | None
    selector: str
    value: float


class Published(NamedTuple):
    """All of them: of which model, measured how, and whether they were printed or read from a summary."""

    model: str
    quantity: str
    mark: str
    rows: tuple[Accuracy, ...]


class QualityRow(NamedTuple):
    """One setting: what is computed, and the accuracy that was published for it [%].

    quant_loss, quant_loss_vs_uniform, quant_noise : as in `Evaluation`; None where they are unknown.
    """

    name: str
    policy: str
    quant_loss: float | None
    quant_loss_vs_uniform: float | None
    quant_noise: float | None
    published_accuracy_percent: float


class QualityContext(NamedTuple):
    """Computed losses with published accuracies beside them.

    model, quantity, mark : of the accuracies. losses : loss table behind the computed numbers, and its kind of source.
    """

    model: str
    quantity: str
    mark: str
    losses: str
    losses_source: str
    rows: tuple[QualityRow, ...]

    @property
    def sentence(self) -> str:
        """What the numbers are, and what they are not."""
        return (
            f"Losses are output errors of single experts of this project's small model, by loss table {self.losses}"
            f" ({self.losses_source}) times the use in decode. The accuracies are the paper's, {self.quantity}: they"
            " stand here as context, and are neither predicted from the losses nor compared with them."
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {**self._asdict(), "rows": [row._asdict() for row in self.rows], "sentence": self.sentence}


def load_accuracies() -> Published:
    """The published accuracies, in the order of the file."""
    text = resources.files("perfmodel.evidence").joinpath("published.json").read_text(encoding="utf-8")
    found = json.loads(text)["accuracy"]
    rows = (Accuracy(row["name"], row["mean_bits"], row["selector"], row["value"]) for row in found["rows"])
    return Published(found["model"], found["quantity"], found["mark"], tuple(rows))


def quality_context(bench: Bench) -> QualityContext:
    """Losses of the settings whose accuracy was published, on the trace of a bench."""
    published = load_accuracies()
    rows = []
    for one in published.rows:
        policy = policy_text("context-aware", one.bits, "" if one.selector == "prefix" else f"selector={one.selector}")
        found = bench.run(Case(published.model, policy, OUTPUT)).price()
        computed = (found.quant_loss, found.quant_loss_vs_uniform, found.quant_noise)
        rows.append(QualityRow(one.name, policy, *computed, one.value))
    network = bench.models[published.model]
    table = losses_for(None, network)
    return QualityContext(*published[:3], table.name, table.source, tuple(rows))


def write_quality_csv(context: QualityContext, path: Path) -> None:
    """Every setting as CSV; what is unknown is empty."""
    with replace_when_done(path) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(QualityRow._fields)
        writer.writerows(context.rows)
