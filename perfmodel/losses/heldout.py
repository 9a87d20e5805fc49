"""How well a quantised checkpoint predicts text that it was not fitted to, for the assignments that are compared.

A smaller sum of losses is not a better model; this is the check. All experts are quantised, and one importance serves
all text: the mean over the sequences of the trace.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from perfmodel.bitwidth import LossTable, Objective
from perfmodel.errors import TraceError
from perfmodel.losses.assignments import sequence_importance
from perfmodel.losses.calibration import Calibration
from perfmodel.losses.comparison import Comparison
from perfmodel.losses.options import Method
from perfmodel.losses.rules import RULES, UNIFORM, Floats, NearData, allowed, choose, near_data, spent_bits
from perfmodel.progress import Report, check_report
from perfmodel.routing import RoutingTrace

#: The rules whose assignments are tried on text, under these objectives.
_OBJECTIVES: tuple[Objective, ...] = ("plain", "importance", "variance")
_RULES = ("prefix", "optimum", "floor optimum", "model optimum")
#: The checkpoint as it is.
STORED = "stored precision"
#: Parts of the text whose scatter tells the noise.
_PARTS = 8
#: Standard errors that the best of several tries must be better by.
_SURE = 3.0


class Difference(NamedTuple):
    """A difference of held-out losses and its standard error, from parts of the text [nat/token]; None for one part."""

    nats: float
    error: float | None


class Prediction(NamedTuple):
    """One assignment tried on text.

    assignment : objective and rule, ``uniform``, or ``stored precision``
    mean_bits : as asked [bit]; None at the stored precision
    summed_loss : sum of the table's losses over all experts, in the table's unit
    weighted_loss : the same, each loss times its expert's importance
    lowest_share : share of the experts at the lowest width of the table [1]
    nats : held-out loss of the language model [nat/token]
    added : over that at the stored precision
    over_uniform : over that of uniform bits at the same mean; None where the mean is no width of the table
    """

    assignment: str
    mean_bits: float | None
    summed_loss: float
    weighted_loss: float
    lowest_share: float
    nats: float
    added: Difference
    over_uniform: Difference | None


@dataclass(frozen=True)
class HeldOut:
    """What `predict` found, for what.

    method : how the experts were quantised. tokens : predicted tokens. lowest_bits : lowest width of the table [bit].
    """

    checkpoint: str
    method: str
    files: tuple[str, ...]
    tokens: int
    lowest_bits: int
    rows: tuple[Prediction, ...]

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values."""
        return {
            "checkpoint": self.checkpoint,
            "method": self.method,
            "files": list(self.files),
            "tokens": self.tokens,
            "lowest_bits": self.lowest_bits,
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
    method: Method | None = None,
    calibration: str | os.PathLike[str] | None = None,
    tokens: int | None = None,
    report: Report | None = None,
) -> HeldOut:
    """Held-out loss of a language model at every assignment, with all of its experts quantised.

    Parameters
    ----------
    found : the comparison of the same table and trace; gives the budgets, the importance and the floor.
    checkpoint : folder of the model. files : text that it is to predict.
    method : ``gptq`` or ``rtn``; by default GPTQ with calibration rows, else rounding to nearest.
    calibration : rows for GPTQ. tokens : at most so many of the text; by default all.
    report : called with the assignments that are done, and all of them.

    Raises
    ------
    PerfModelError : the extra ``record`` is not installed; the model, text or rows cannot be used, or do not fit
    """
    from perfmodel.losses.record.language_model import QuantisedModel, quantiser
    from perfmodel.losses.record.text import SEQUENCE

    check_report("report", report)
    chosen: Method = method or ("rtn" if calibration is None else "gptq")
    rows = None if calibration is None else Calibration.load(calibration)
    model = QuantisedModel(Path(checkpoint), quantiser(chosen, rows))
    if rows is not None:
        rows.check_model(model.files.model)
    shape = (model.num_layers, model.num_experts)
    if shape != (found.layers, found.experts):
        raise TraceError(
            f"checkpoint {model.files.name} has {shape[0]} layers x {shape[1]} experts, the trace of {found.trace}"
            f" {found.layers} x {found.experts}; give a trace of this model"
        )
    sequence = min(SEQUENCE, model.outline.positions or SEQUENCE)
    windows = model.windows([Path(file) for file in files], tokens=tokens, sequence=sequence)
    near = _pooled(found, table.for_model(*shape), trace)
    parts = [windows[i::_PARTS] for i in range(min(_PARTS, len(windows)))]
    tokens_of = np.array([sum(len(window) - 1 for window in part) for part in parts], np.float64)
    nats: dict[bytes, Floats] = {}
    tried = list(_assignments(found, near))
    for done, (_, _, bits) in enumerate(tried):
        if report is not None:
            report(done, len(tried))
        if _key(bits) not in nats:
            whole = None if bits is None else bits.astype(np.int64)
            nats[_key(bits)] = np.array([model.loss(part, whole) for part in parts])
    if report is not None:
        report(len(tried), len(tried))
    uniform = {mean: nats[_key(bits)] for name, mean, bits in tried if name == UNIFORM}
    return HeldOut(
        checkpoint=model.files.name,
        method=chosen,
        files=tuple(Path(file).name for file in files),
        tokens=int(tokens_of.sum()),
        lowest_bits=near.bits[0],
        rows=tuple(
            Prediction(
                assignment=name,
                mean_bits=mean,
                summed_loss=_loss(near, bits, None),
                weighted_loss=_loss(near, bits, near.importance),
                lowest_share=0.0 if bits is None else float((bits == near.bits[0]).mean()),
                nats=float(nats[_key(bits)] @ tokens_of / tokens_of.sum()),
                added=_difference(nats[_key(bits)] - nats[_key(None)], tokens_of),
                over_uniform=_difference(nats[_key(bits)] - uniform[mean], tokens_of) if mean in uniform else None,
            )
            for name, mean, bits in tried
        ),
    )


def _loss(near: NearData, bits: NDArray[np.int8] | None, weights: Floats | None) -> float:
    return 0.0 if bits is None else float(near.loss(bits[None], weights).sum())


def _key(bits: NDArray[np.int8] | None) -> bytes:
    return b"" if bits is None else bits.tobytes()


def _difference(parts: Floats, tokens: Floats) -> Difference:
    """Mean over tokens of differences by part, and its standard error from how the parts scatter."""
    share = tokens / tokens.sum()
    mean = float(parts @ share)
    if len(parts) < 2:
        return Difference(mean, None)
    spread = float(((share * (parts - mean)) ** 2).sum()) * len(parts) / (len(parts) - 1)
    return Difference(mean, float(np.sqrt(spread)))


def _pooled(found: Comparison, table: LossTable, trace: RoutingTrace) -> NearData:
    """All experts, with the mean importance of the sequences."""
    if trace.num_experts_inferred:
        trace = trace.with_num_experts(table.num_experts)
    importance, use, _ = sequence_importance(trace, found.alpha, found.norm)
    mean, total = importance.mean(axis=0, keepdims=True), use.sum(axis=0, keepdims=True)
    return near_data(table, mean, total, total, 0, np.random.default_rng(found.seed))


def _assignments(found: Comparison, near: NearData) -> Iterator[tuple[str, float | None, NDArray[np.int8] | None]]:
    """Names, mean bits and widths [L, E] of what is tried; None for the stored precision."""
    yield STORED, None, None
    layers, experts = near.importance.shape[1:]
    for width in near.bits:
        yield UNIFORM, float(width), np.full((layers, experts), width, np.int8)
    for mean in found.means:
        spent = spent_bits(mean, experts, near.bits)
        for objective in (one for one in _OBJECTIVES if one in found.objectives):
            weights = near.weights(objective)
            for name in _RULES:
                if allowed(RULES[name], near.bits, found.min_bits, spent):
                    bits = choose(RULES[name], near, weights, spent, found.budget, found.min_bits)
                    yield f"{objective}, {name}", mean, bits[0]


def readings(found: HeldOut) -> list[str]:
    """Whether the smallest sum of losses made the best model: a line for every mean that is a width of the table."""
    lines = []
    for mean in dict.fromkeys(one.mean_bits for one in found.rows if one.over_uniform is not None):
        rows = [one for one in found.rows if one.mean_bits == mean]
        if len(rows) > 1:
            best, least = min(rows, key=lambda one: one.nats), min(rows, key=lambda one: one.summed_loss)
            words = f"at {mean:g} bits {_best(best)}"
            if least is not best:
                words += f"; the smallest summed loss, {least.assignment}, gives {_over(least)}"
            lines.append(words)
    return lines


def _best(row: Prediction) -> str:
    if row.over_uniform is None or row.over_uniform.nats >= 0:
        return "no assignment makes a better model than uniform bits"
    error = row.over_uniform.error
    sure = error is not None and -row.over_uniform.nats > _SURE * error
    start = "the best model is" if sure else "nothing is surely better than uniform bits; the best try is"
    return f"{start} {row.assignment}, {_over(row)}"


def _over(row: Prediction) -> str:
    return "" if row.over_uniform is None else f"{difference_words(row.over_uniform)} nats a token over uniform bits"


def difference_words(found: Difference) -> str:
    """A difference as people write it: ``-0.027 +- 0.008``."""
    return f"{found.nats:+.3f}" + ("" if found.error is None else f" +- {found.error:.3f}")
