"""Loss tables as text for people."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from perfmodel.losses.origin import described
from perfmodel.losses.summary import FEW_ROWS, row_range
from perfmodel.reports import number, percent, table
from perfmodel.routing.npz import one_line

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from perfmodel.losses.summary import LossSummary

#: Experts that are named one by one; all of them are in the JSON document.
_MOST_NAMED = 10
#: Metadata of more letters is left to the JSON document.
_MOST_LETTERS = 60
#: Rows that a table was made from, by the key of its metadata.
_ROWS = {"calibration": "calibration", "held_out": "measured on"}
#: Metadata that has its own words, or is for programs.
_KNOWN = {
    *_ROWS, "method", "group_size", "damping", "order", "folds", "scale_bits_per_weight", "model", "checkpoint",
    "hidden_size", "least_rows", "sha256",
}  # fmt: skip


def summary_text(summary: LossSummary) -> str:
    """What `losses show` prints."""
    one, widths = summary.table, summary.widths
    few = 3  # significant digits that a mean over experts is good for
    losses = table(
        ("bits", "mean loss [MSE]", "noise", "falls per bit: of the mean", "geometric mean", "over RTN: of the mean",
         "geometric mean"),
        (
            [str(w.bits), number(w.mean_loss), _share(w.noise), _times(w.fall_of_means),
             _times(w.fall_geometric), number(w.over_rtn_of_means, few), number(w.over_rtn_geometric, few)]
            for w in widths
        ),
        left=0,
    )  # fmt: skip
    unlike = table(
        ("bits", "worst/best expert of a layer: geometric", "mean", "largest", "in layer", "layers", "CV experts",
         "CV layers"),
        (
            [str(w.bits), number(w.worst_over_best, few), number(w.worst_over_best_mean, few),
             number(w.worst_over_best_max, few), "-" if w.worst_layer is None else str(w.worst_layer),
             number(w.layers_ratio, few), number(w.cv_experts, few), number(w.cv_layers, few)]
            for w in widths
        ),
        left=0,
    )  # fmt: skip
    return "\n".join(
        [
            f"{one.name}: {one.num_layers} layers x {one.num_experts} experts at {_listed(one.bits)} bits"
            f" ({one.origin})",
            *_origin(summary),
            "",
            losses,
            "noise: mean loss over the mean variance of the unquantised output. RTN: rounding to nearest.",
            "",
            unlike,
            "layers: largest mean loss of a layer over the smallest. CV: standard deviation over mean.",
            "",
            *_orders(summary),
            *(f"note: {note}" for note in one.notes),
        ]
    )


def _origin(summary: LossSummary) -> list[str]:
    """How the table was made, of what, and on how many rows."""
    info = summary.table.info
    lines = [f"{start}: {words}" for start, words in (("made by", _made(info)), ("of", _inputs(info))) if words]
    other = {key: value for key, value in info.items() if key not in _KNOWN and isinstance(value, str | int | float)}
    shown = [f"{_short(key)} {_short(value)}" for key, value in other.items() if len(str(value)) <= _MOST_LETTERS]
    if shown:
        lines.append(f"metadata: {', '.join(shown)}")
    if len(shown) < len(other):
        lines.append("more metadata with --json")
    if (rows := summary.table.n_tokens) is not None:
        found = row_range(rows)
        lines.append(f"rows an expert was measured on: {found['min']} to {found['max']}, median {found['median']:g}")
    return lines


def _made(info: Mapping[str, Any]) -> str:
    """Method and options, and what scales cost."""
    words = ", ".join(map(_short, described(info)))
    scales = info.get("scale_bits_per_weight")
    if isinstance(scales, list) and scales and all(isinstance(one, int | float) for one in scales):
        words += f"{'; ' if words else ''}scales add {', '.join(f'{one:.2g}' for one in scales)} bits a weight"
    return words


def _inputs(info: Mapping[str, Any]) -> str:
    """The model and the rows."""
    model = info.get("model", info.get("checkpoint"))
    words = [f"model {_short(model)}"] if model is not None else []
    if info.get("hidden_size") is not None:
        words.append(f"hidden size {_short(info['hidden_size'])}")
    rows = [f"{name} {_short(info[key])}" for key, name in _ROWS.items() if info.get(key) is not None]
    return "; ".join(", ".join(part) for part in (words, rows) if part)


def _orders(summary: LossSummary) -> list[str]:
    """Monotonicity, diminishing gains, and the experts to be careful with."""
    count = summary.num_experts
    lines = [f"monotone: the loss of {summary.monotone} of {count} experts never rises with bits"]
    lines += _named(
        f"layer {b.layer} expert {b.expert}: {'from 0' if b.factor is None else f'{number(b.factor)} x'}"
        f" from {b.from_bits} to {b.to_bits} bits"
        for b in summary.breakers
    )
    if summary.diminishing is not None:
        nearest = "" if summary.rtn_diminishing is None else f" (RTN {percent(summary.rtn_diminishing / count)})"
        share = percent(summary.diminishing / count)
        lines.append(f"diminishing gains: {summary.diminishing} of {count} experts, {share}{nearest}")
    if summary.scarce:
        lines.append(
            f"measured on fewer than {FEW_ROWS} rows, or on borrowed ones: {len(summary.scarce)} of {count} experts"
        )
        lines += _named(
            f"layer {s.layer} expert {s.expert}: {'-' if s.rows is None else s.rows} {'borrowed ' * s.borrowed}rows"
            for s in summary.scarce
        )
    return lines


def _named(lines: Iterable[str]) -> list[str]:
    """The first lines, indented, and how many more there are."""
    every = [f"  {line}" for line in lines]
    more = len(every) - _MOST_NAMED
    return every if more <= 0 else [*every[:_MOST_NAMED], f"  and {more} more (all with --json)"]


def _times(factor: float | None) -> str:
    return "-" if factor is None else f"{number(factor, 3)} x"


def _share(value: float | None) -> str:
    """A share in percent with three digits, however small."""
    return "-" if value is None else f"{number(100 * value, 3)} %"


def _short(value: Any) -> str:
    """A value of the metadata in one line."""
    text = one_line(" ".join(str(value).split()))
    return text if len(text) <= _MOST_LETTERS else f"{text[: _MOST_LETTERS - 3]}..."


def _listed(widths: Iterable[int]) -> str:
    return ", ".join(map(str, widths))
