"""The kinds of figures that a dataset can be drawn as, and the options that each takes; needs no matplotlib."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from perfmodel.errors import PerfModelError


class Kind(NamedTuple):
    """What a kind of figure shows, which options of `sweep_figure` it takes, and which datasets it draws."""

    text: str
    options: tuple[str, ...]
    datasets: tuple[str, ...] = ("sweep",)


KINDS = {
    "speedup": Kind("gain over a baseline along an axis", ("x", "panels", "metric", "baseline", "policy", "at")),
    "heatmap": Kind("two axes in colour, with the break-even line", ("x", "y", "metric", "baseline", "policy", "at")),
    "pareto": Kind(
        "two metrics or axes against each other, with the front", ("x", "y", "policy", "at"), ("sweep", "pareto")
    ),
    "roofline": Kind("operators of the model on the rooflines of the system", ("at",)),
    "breakdown": Kind("parts of the critical path of a mean token", ("x", "policy", "at")),
    "cdf": Kind("distribution of the time per output token", ("policy", "at")),
    "tornado": Kind("effect of one hardware number at a time", ("metric", "policy", "at"), ("sweep", "tornado")),
    "sobol": Kind("shares of the variance, from sensitivity --sobol -o", ("policy",), ("sobol",)),
    "break-even": Kind("where the better policy changes, from break-even --along -o", (), ("break-even",)),
}


def not_among(what: str, found: object, known: Iterable[str], after: str = "") -> PerfModelError:
    """An error that names what was found, close matches, and what is allowed."""
    from perfmodel.hardware.base import shown, suggestion  # only now, so that the list of kinds is had at once

    names = list(known)
    close = suggestion(found, names) if isinstance(found, str) else ""
    listed = ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "")
    return PerfModelError(f"{what}: found {shown(found)}{close}, allowed {listed or 'none'}{after}")


def check_kind(kind: object, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that are set, all of which the kind takes; messages spell them as on the command line.

    Raises
    ------
    PerfModelError : an unknown kind (with close matches), or an option that this kind does not take.
    """
    if not isinstance(kind, str) or kind not in KINDS:
        raise not_among("plot kind", kind, KINDS)
    given = {name: value for name, value in options.items() if value is not None}
    for name, value in given.items():
        if name not in KINDS[kind].options:
            raise not_among(f"option of plot {kind}", f"--{name}", [f"--{one}" for one in KINDS[kind].options])
        if name == "at":
            fits, allowed = isinstance(value, Mapping), ["a table of values by axis"]
        else:
            several = list(value) if name == "policy" and isinstance(value, Sequence) else [value]
            fits, allowed = all(isinstance(one, str) for one in several), ["a name"]
        if not fits:
            raise not_among(f"plot {kind} --{name}", value, allowed)
    return given


def check_dataset(kind: str, answer: str) -> None:
    """Refuse a dataset that a kind cannot draw; ``answer`` says what the dataset is."""
    if answer in KINDS[kind].datasets:
        return
    wanted = " or ".join(KINDS[kind].datasets)
    others = [name for name, one in KINDS.items() if answer in one.datasets]
    hint = f"; a {answer[:40]} is drawn by the kind{'s' * (len(others) > 1)} {', '.join(others)}" if others else ""
    raise PerfModelError(f"dataset of plot {kind}: found a {answer[:40]!a}, allowed a {wanted}{hint}")
