"""How well a quantised checkpoint predicts text that it was not fitted to, for the assignments that are compared.

A smaller sum of losses is not a better model; this is the check. The experts that are on the GPU stay as they are, all
others are quantised as those were that the losses are of. One importance serves all text: the mean over the sequences
of the trace.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from perfmodel.bitwidth import LossTable
from perfmodel.errors import TraceError
from perfmodel.losses.calibration import Calibration
from perfmodel.losses.comparison import Comparison
from perfmodel.losses.options import Method
from perfmodel.losses.origin import Quantisation, quantisation, weights_notes
from perfmodel.losses.rules import UNIFORM, Floats, NearData, rule_words
from perfmodel.losses.tries import Try, checked_counts, tries
from perfmodel.progress import Report, check_report
from perfmodel.routing import RoutingTrace

#: Parts of the text whose scatter tells the noise.
_PARTS = 8
#: With fewer parts their scatter tells nothing.
_LEAST_PARTS = 5
#: Standard errors that the best of many tries must be better by, with as few parts.
_SURE = 4.0


class Difference(NamedTuple):
    """A difference of held-out losses and its standard error, from parts of the text [nat/token].

    error : None with fewer than five parts (of a window or more), and for an assignment beside itself
    """

    nats: float
    error: float | None


class Prediction(NamedTuple):
    """One assignment tried on text.

    gpu_experts : experts of a layer at the stored precision, the most important ones; None for all of them
    assignment : objective and rule, ``uniform``, or ``stored precision``
    mean_bits : of the others, as asked [bit]; None at the stored precision
    summed_loss : sum of the table's losses over all quantised experts, in the table's unit
    weighted_loss : the same, each loss times its expert's importance
    lowest_share : share of the quantised experts at the lowest width of the table [1]
    nats : held-out loss of the language model [nat/token]
    added : over that at the stored precision
    over_uniform : over that of uniform bits at the same mean; None where the mean is no width of the table
    same_as, same_mean : an assignment above that is the same, bit for bit, with as many experts on the GPU, and its
        mean bits; None where none is
    """

    gpu_experts: int | None
    assignment: str
    mean_bits: float | None
    summed_loss: float
    weighted_loss: float
    lowest_share: float
    nats: float
    added: Difference
    over_uniform: Difference | None
    same_as: str | None
    same_mean: float | None = None


@dataclass(frozen=True)
class HeldOut:
    """What `predict` found, for what.

    quantised : how the experts were. tokens : predicted tokens. lowest_bits : lowest width of the table [bit].
    gpu_experts : numbers of experts on the GPU that were tried; not_tried : others of the comparison
    """

    checkpoint: str
    quantised: Quantisation
    files: tuple[str, ...]
    tokens: int
    lowest_bits: int
    gpu_experts: tuple[int, ...]
    not_tried: tuple[int, ...]
    rows: tuple[Prediction, ...]
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values."""
        return {
            "checkpoint": self.checkpoint,
            **{name: value for name, value in self.quantised._asdict().items() if name != "notes"},
            "files": list(self.files),
            "tokens": self.tokens,
            "lowest_bits": self.lowest_bits,
            "gpu_experts": list(self.gpu_experts),
            "not_tried": list(self.not_tried),
            "notes": list(self.notes),
            "rows": [
                {
                    **one._asdict(),
                    "added": one.added._asdict(),
                    "over_uniform": None if one.over_uniform is None else one.over_uniform._asdict(),
                }
                for one in self.rows
            ],
            "readings": readings(self),
        }


def predict(
    found: Comparison,
    table: LossTable,
    trace: RoutingTrace,
    checkpoint: str | os.PathLike[str],
    files: Sequence[str | os.PathLike[str]],
    *,
    gpu_experts: Sequence[int] | None = None,
    method: Method | None = None,
    calibration: str | os.PathLike[str] | None = None,
    tokens: int | None = None,
    report: Report | None = None,
) -> HeldOut:
    """Held-out loss of a language model at every assignment, its experts quantised as the table says.

    Parameters
    ----------
    found : the comparison of the same table and trace; gives the objectives, budgets, importance and floor.
    checkpoint : folder of the model. files : text that it is to predict.
    gpu_experts : experts of a layer that stay as they are, some of the numbers in ``found``; by default 0 if it is one
        of them, else all of them. Random orders are tried in the first of their draws.
    method : ``gptq`` or ``rtn``; by default the table's, see `perfmodel.losses.origin.quantisation`.
    calibration : rows for GPTQ. tokens : at most so many of the text; by default all.
    report : called with the assignments that are done, and all of them, those that are equal counted once.

    Raises
    ------
    PerfModelError : the extra ``record`` is not installed; the model, text or rows cannot be used, or do not fit; the
        table is of weights by another method, or of a model of other sizes
    """
    from perfmodel.losses.record.language_model import QuantisedModel, quantiser
    from perfmodel.record.text import SEQUENCE

    check_report("report", report)
    counts = checked_counts(found, gpu_experts)
    made = quantisation(table, method, calibrated=calibration is not None)
    rows = None if calibration is None else Calibration.load(calibration)
    quantise = quantiser(made.method, rows, group=made.group_size, damping=made.damping, order=made.order)
    model = QuantisedModel(Path(checkpoint), quantise)
    if rows is not None:
        rows.check_model(model.files.model)
    shape = (model.num_layers, model.num_experts)
    if shape != (found.layers, found.experts):
        raise TraceError(
            f"checkpoint {model.files.name!r} has {shape[0]} layers x {shape[1]} experts, the trace of {found.trace!r}"
            f" {found.layers} x {found.experts}; give a trace of this model"
        )
    about_weights = weights_notes(table, model.files)
    sequence = min(SEQUENCE, model.outline.positions or SEQUENCE)
    windows = model.windows([Path(file) for file in files], tokens=tokens, sequence=sequence)
    parts = [windows[i::_PARTS] for i in range(min(_PARTS, len(windows)))]
    tokens_of = np.array([sum(len(window) - 1 for window in part) for part in parts], np.float64)
    tried = list(tries(found, table.for_model(*shape), trace, counts))
    distinct = {one.bits.tobytes(): one.bits for one in tried}
    nats: dict[bytes, Floats] = {}
    for key, bits in distinct.items():
        if report is not None:
            report(len(nats), len(distinct))
        nats[key] = np.array([model.loss(part, bits) for part in parts])
    if report is not None:
        report(len(nats), len(distinct))
    return HeldOut(
        checkpoint=model.files.name,
        quantised=made,
        files=tuple(Path(file).name for file in files),
        tokens=int(tokens_of.sum()),
        lowest_bits=table.bits[0],
        gpu_experts=counts,
        not_tried=tuple(count for count in found.gpu_experts if count not in counts),
        rows=tuple(_predictions(tried, nats, tokens_of)),
        notes=(*made.notes, *about_weights, *_calibration_notes(table, rows)),
    )


def _calibration_notes(table: LossTable, rows: Calibration | None) -> list[str]:
    hashes = table.info.get("sha256")
    stated = hashes.get("calibration") if isinstance(hashes, Mapping) else None
    if rows is None or stated in (None, rows.content_hash()):
        return []
    return [f"{Path(rows.name).name!r} does not hold the rows that loss table {table.name!r} was built with"]


def _predictions(tried: Sequence[Try], nats: dict[bytes, Floats], tokens: Floats) -> Iterator[Prediction]:
    stored = nats[tried[0].bits.tobytes()]
    uniform = {(one.gpu_experts, one.mean_bits): nats[one.bits.tobytes()] for one in tried if one.name == UNIFORM}
    first: dict[tuple[int | None, bytes], Try] = {}
    for one in tried:
        key = one.bits.tobytes()
        base = uniform.get((one.gpu_experts, one.mean_bits))
        same = first.setdefault((one.gpu_experts, key), one)
        assigned = None if one.near is None else np.take_along_axis(one.bits[None], one.near.experts, axis=-1)
        yield Prediction(
            gpu_experts=one.gpu_experts,
            assignment=one.name,
            mean_bits=one.mean_bits,
            summed_loss=_loss(one.near, assigned, weighted=False),
            weighted_loss=_loss(one.near, assigned, weighted=True),
            lowest_share=0.0 if one.near is None else float(np.mean(assigned == one.near.bits[0])),
            nats=float(nats[key] @ tokens / tokens.sum()),
            added=_difference(nats[key] - stored, tokens),
            over_uniform=None if base is None else _difference(nats[key] - base, tokens),
            same_as=None if same is one else same.name,
            same_mean=None if same is one else same.mean_bits,
        )


def _loss(near: NearData | None, assigned: NDArray[np.int64] | None, *, weighted: bool) -> float:
    if near is None or assigned is None:
        return 0.0
    return float(near.loss(assigned.astype(np.int8), near.importance if weighted else None).sum())


def _difference(parts: Floats, tokens: Floats) -> Difference:
    """Mean over tokens of differences by part, and its standard error from how the parts scatter."""
    share = tokens / tokens.sum()
    mean = float(parts @ share)
    if len(parts) < _LEAST_PARTS or not parts.any():
        return Difference(mean, None)
    spread = float(((share * (parts - mean)) ** 2).sum()) * len(parts) / (len(parts) - 1)
    return Difference(mean, float(np.sqrt(spread)))


def readings(found: HeldOut) -> list[str]:
    """Whether the smallest sum of losses made the best model: a line for every mean that is a width of the table."""
    lines = []
    settings = dict.fromkeys((one.mean_bits, one.gpu_experts) for one in found.rows if one.over_uniform is not None)
    for mean, count in settings:
        rows = [one for one in found.rows if (one.mean_bits, one.gpu_experts) == (mean, count)]
        if len(rows) > 1:
            best, least = min(rows, key=lambda one: one.nats), min(rows, key=lambda one: one.summed_loss)
            start = f"at {mean:g} bits (K = {count}): "
            lines.append(start + _best(best))
            if least is not best:
                lines.append(
                    f"{start}the smallest summed loss, {assignment_words(least.assignment)}, gives {_over(least)}"
                )
    return lines


def _best(row: Prediction) -> str:
    if row.over_uniform is None or row.over_uniform.nats >= 0:
        return "no assignment makes a better model than uniform bits"
    error = row.over_uniform.error
    sure = error is not None and -row.over_uniform.nats > _SURE * error
    start = "the best model is" if sure else "nothing is surely better than uniform bits; the best try is"
    return f"{start} {assignment_words(row.assignment)}, {_over(row)}"


def _over(row: Prediction) -> str:
    return "" if row.over_uniform is None else f"{difference_words(row.over_uniform)} nats a token over uniform bits"


def difference_words(found: Difference) -> str:
    """A difference as people write it: ``-0.027 +- 0.008``."""
    return nats_words(found.nats) + ("" if found.error is None else f" +- {error_words(found)}")


def assignment_words(assignment: str) -> str:
    """Objective and rule of an assignment that was tried, as tables name them."""
    objective, comma, rule = assignment.rpartition(", ")
    return f"{objective}{comma}{rule_words(rule) if comma else rule}"


def nats_words(nats: float) -> str:
    """A difference with its sign, and 0 without a minus."""
    return f"{nats if abs(nats) >= 0.0005 else 0.0:+.3f}"


def error_words(found: Difference) -> str:
    """A standard error, or a dash where there is none."""
    if found.error is None:
        return "-"
    return f"{found.error:.3f}" if found.error >= 0.0005 else "<0.001"
