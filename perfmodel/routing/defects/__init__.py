"""What is often wrong with recordings, how it shows, and what can be done about it.

:func:`check` only looks. :func:`mend` repairs what it is told to, and nothing else: every mend leaves out or
reorders rows, layers or picks that the recording holds, and none makes any up.
"""

import difflib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from perfmodel.errors import TraceError
from perfmodel.routing.npz import shown

if TYPE_CHECKING:
    from perfmodel.routing.trace import RoutingTrace

#: What can be wrong with a recording, by the name that ``--mend`` takes.
DEFECTS = MappingProxyType(
    {
        "warm-up": "rows of dummy tokens that a server runs before the first request",
        "repeated-layers": "a layer that is a copy of another under a new number",
        "interleaved": "rows of several sequences that take turns in place of following one another",
        "weight-order": "picks of a token that are not listed from the largest weight to the smallest",
        "unnormalised-weights": "gate weights of a token that do not sum to one",
        "padding": "rows or picks that belong to no token",
        "physical-ids": "ids of slots that hold copies of experts, in place of ids of experts",
        "missing-phase": "sequences without a prefill, a part of it, or decode steps",
        "looping": "a generation that repeats itself to the end",
        "duplicate-tokens": "a token that is recorded more than once",
    }
)


@dataclass(frozen=True)
class Finding:
    """One defect of one recording.

    defect : name, a key of :data:`DEFECTS`
    found : what was seen, where and how much of it, in one line
    mend : what mending it would do (or did), or None where nothing safe can be done
    mended : whether it was done
    """

    defect: str
    found: str
    mend: str | None = None
    mended: bool = False


@dataclass(frozen=True)
class Seen:
    """A defect as its check saw it. ``repair`` makes the mended trace; None where nothing safe can be done."""

    found: str
    mend: str | None = None
    repair: "Callable[[], RoutingTrace] | None" = None


def check(trace: "RoutingTrace") -> tuple[Finding, ...]:
    """What is wrong with a trace, in the order in which :func:`mend` works; empty where nothing was found.

    The rules and their limits stand with each check in :mod:`perfmodel.routing.defects`' modules. They were set so
    that clean recordings pass: a finding says what was seen, and the reader judges whether it is meant so.
    """
    findings = []
    for name, look in _checks().items():
        seen = look(trace)
        if seen is not None:
            findings.append(Finding(name, seen.found, seen.mend))
    return tuple(findings)


def mend(trace: "RoutingTrace", names: Iterable[str]) -> "tuple[RoutingTrace, tuple[Finding, ...]]":
    """The trace with the named defects mended, and everything that was found on the way.

    Each check looks at what the mends before it left. A named defect that the trace does not have changes nothing.
    What was mended is noted in ``metadata["mended"]``.

    Raises :class:`TraceError` for a name that is none of :data:`DEFECTS`, and for a named defect that the trace has
    and that cannot be mended safely.
    """
    wanted = checked_names(names)
    findings, done = [], {}
    for name, look in _checks().items():
        seen = look(trace)
        if seen is None:
            continue
        finding = Finding(name, seen.found, seen.mend)
        if name in wanted:
            if seen.repair is None:
                raise TraceError(f"{name} cannot be mended here: {seen.found}")
            trace, finding = seen.repair(), replace(finding, mended=True)
            done[name] = seen.found
        findings.append(finding)
    if done:
        before = trace.metadata.get("mended")
        trace = trace.with_metadata(mended={**(before if isinstance(before, dict) else {}), **done})
    return trace, tuple(findings)


def checked_names(names: Iterable[str]) -> frozenset[str]:
    """The names of defects, each a key of :data:`DEFECTS`; TraceError for another, with close matches."""
    found: object = names  # callers from outside may pass anything
    if isinstance(found, str) or not isinstance(found, Iterable):
        raise TraceError(f"expected a list of names of defects, found {shown(found)}")
    wanted = list(found)
    for name in wanted:
        if not isinstance(name, str) or name not in DEFECTS:
            near = difflib.get_close_matches(name[:100], DEFECTS, n=1) if isinstance(name, str) else []
            hint = f"; did you mean {near[0]}?" if near else ""
            raise TraceError(f"no defect is called {shown(name)}{hint} (allowed: {', '.join(DEFECTS)})")
    return frozenset(wanted)


def _checks() -> "dict[str, Callable[[RoutingTrace], Seen | None]]":
    """Every check, in an order in which the mends before make the later ones see more clearly."""
    from perfmodel.routing.defects import order, picks, repeats, sequences  # imported late: they make traces

    return {
        "physical-ids": picks.physical_ids,
        "padding": sequences.padding,
        "warm-up": sequences.warm_up,
        "repeated-layers": repeats.repeated_layers,
        "duplicate-tokens": repeats.duplicate_tokens,
        "interleaved": order.interleaved,
        "looping": order.looping,
        "missing-phase": sequences.missing_phase,
        "weight-order": picks.weight_order,
        "unnormalised-weights": picks.unnormalised_weights,
    }
