"""How far a prediction may be from a measurement: the interval of its class, from runs that were measured.

The classes of a prediction are its very machine under its engine, where that machine is documented completely and some
run had its experts there; the kind of the engine with where the experts are; the latter alone; and all engines. The
first that has enough runs counts (`perfmodel.evidence.intervals`). Machines and engines are told by their values: a
name promises nothing, and one number changed makes another machine. Systems without an engine have classes of their
own, from the same runs predicted without one. The intervals are bundled, so that nothing is fitted here;
`perfmodel.evidence.validation.write_intervals` makes the file anew.

An interval is of one prediction against one measurement. Two policies on one machine share most of what is wrong about
the machine and the engine, so intervals that overlap do not say that their order is unknown by as much.
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from importlib import resources
from typing import Any, NamedTuple

from perfmodel.evaluation import Evaluation
from perfmodel.evidence.intervals import Interval, Intervals
from perfmodel.evidence.intervals import Path as ClassPath
from perfmodel.hardware import EngineSpec, Spec, System, load_spec

#: The bundled intervals, beside this module.
BUNDLED = "intervals.toml"
#: The class of all runs predicted without an engine.
NO_ENGINE = "no engine"
#: Profiles that no measured run goes with, and why.
UNMEASURED = {
    "ideal": "profile ideal is a bound and no engine",
    "ndp-simulator": "profile ndp-simulator stands for a simulator, of which nothing was measured",
}
NEAR_DATA = "no measurement of near-data devices"
#: Residency of experts on a near-data device.
NEAR = "near-data"


class Documented(NamedTuple):
    """A machine that is documented completely, by the names of its bundled specs. cpu : None where none took part."""

    engine: str
    gpu: str
    link: str
    cpu: str | None = None

    @property
    def name(self) -> str:
        """The class of its runs."""
        return own_class(self.engine, self.gpu if self.cpu is None else f"{self.gpu} + {self.cpu}")

    def is_of(self, system: System) -> bool:
        """Whether a system is this very machine under this very engine, whatever they are called."""
        parts: list[tuple[Spec | None, str]] = [
            (system.engine, self.engine),
            (system.gpu, self.gpu),
            (system.link, self.link),
        ]
        if self.cpu is not None:
            parts.append((system.cpu, self.cpu))
        return all(_equal(spec, name) for spec, name in parts)


#: The machines that have an interval of their own.
DOCUMENTED = (
    Documented("gpu-offloading", "gh200", "nvlink-c2c"),
    Documented("llama-cpp-expert-cache", "rtx-5070", "pcie-5.0-x16", "ryzen-7950x"),
)


class Uncertainty(NamedTuple):
    """What is known of the error of a prediction.

    decode, prefill : intervals of the decode rate and of the rate of a prefill, as factors on the prediction; None
    where nothing like it was measured, which ``reason`` says, or where intervals of prefills hold too little.
    residency : where the experts are, see `residency_of`. alike : how many rows behind ``decode`` had them there.
    engine : name of the system's engine, or None without one.
    """

    decode: Interval | None
    prefill: Interval | None
    residency: str
    alike: int = 0
    reason: str | None = None
    engine: str | None = None

    def rate(self, evaluation: Evaluation) -> tuple[float, float] | None:
        """Lowest and highest decode rate of the interval [token/s]."""
        if self.decode is None:
            return None
        rate = evaluation.decode_tok_per_s
        return rate * self.decode.low, rate * self.decode.high

    def first_token(self, evaluation: Evaluation) -> tuple[float, float] | None:
        """Shortest and longest time to first token of the interval [s]."""
        if self.prefill is None or evaluation.ttft_s is None:
            return None
        return evaluation.ttft_s / self.prefill.high, evaluation.ttft_s / self.prefill.low

    def to_dict(self, evaluation: Evaluation) -> dict[str, Any] | None:
        """The interval for JSON: ``low`` and ``high`` are decode rates [token/s]; None where there is none."""
        rate, first = self.rate(evaluation), self.first_token(evaluation)
        if self.decode is None or rate is None:
            return None
        time = evaluation.tpot_mean_s
        found = {
            "low": rate[0],
            "high": rate[1],
            "tpot_low_s": time / self.decode.high,
            "tpot_high_s": time / self.decode.low,
            **_named(self.decode),
            "residency": self.residency,
            "rows_of_residency": self.alike,
        }
        if self.prefill is not None and first is not None:
            found["ttft"] = {"low_s": first[0], "high_s": first[1], **_named(self.prefill)}
        return found


def _named(one: Interval) -> dict[str, Any]:
    return {"level": one.level, "class": one.name, "rows": one.rows, "sources": one.sources}


def residency_of(evaluation: Evaluation) -> str:
    """Where the experts of a policy are: ``resident``, ``cpu``, ``cached`` (misses on the CPU), ``fetched``, `NEAR`.

    By what its decode steps move, in the words of `perfmodel.evidence.described.residency` but for the last.
    """
    moved = evaluation.bytes_per_token
    if moved["ndp_memory"] > 0.0:
        return NEAR
    if moved["cpu_memory"] > 0.0:
        return "cached" if moved["link_weights"] > 0.0 else "cpu"
    return "fetched" if moved["link_weights"] > 0.0 else "resident"


def own_class(engine: str, machine: str) -> str:
    """The class of runs of one machine, in a word, under one engine."""
    return f"{engine} on {machine}"


def class_path(engine: EngineSpec | None, where: str) -> ClassPath:
    """Classes of a prediction on no machine in particular, the most specific first.

    engine : profile of the engine, or None. where : residency.
    """
    if engine is None:
        return (f"{NO_ENGINE}, {where}", NO_ENGINE)
    return (f"{engine_kind(engine)}, {where}", where)


def engine_kind(engine: EngineSpec) -> str:
    """Kind of an engine in a word: whether it replays recorded graphs, or launches kernels one by one."""
    return "graph engine" if engine.launch == "graph" else "eager engine"


@functools.cache
def _values(name: str) -> dict[str, int | float | str]:
    spec = load_spec(name)
    return dict(spec.items()) if isinstance(spec, Spec) else {}


def _equal(spec: Spec | None, name: str) -> bool:
    """Whether a spec has the values of a bundled one."""
    return spec is not None and dict(spec.items()) == _values(name)


def interval_for(evaluation: Evaluation, system: System) -> Uncertainty:
    """What measured runs say about the error of an evaluation on a system."""
    where, engine = residency_of(evaluation), system.engine
    if where == NEAR:
        return Uncertainty(None, None, where, reason=NEAR_DATA)
    for name, reason in UNMEASURED.items():
        if _equal(engine, name):
            return Uncertainty(None, None, where, reason=reason)
    known = bundled()
    own = [one.name for one in DOCUMENTED if known.rows.get(one.name, {}).get(where) and one.is_of(system)]
    path = (*own, *class_path(engine, where))
    decode = known.intervals["decode"].of(path)
    prefill = known.intervals["prefill"].of(path) if "prefill" in known.intervals else None
    alike = known.rows.get(decode.name, {}).get(where, 0)
    return Uncertainty(decode, prefill, where, alike, engine=None if engine is None else engine.name)


class Bundled(NamedTuple):
    """What the bundled file holds.

    intervals : of ``decode`` and, where they hold what they say, of ``prefill``. rows : rows of decode behind an
    interval, by its name and residency.
    """

    intervals: Mapping[str, Intervals]
    rows: Mapping[str, Mapping[str, int]]


@functools.cache
def bundled() -> Bundled:
    """The bundled intervals."""
    data = tomllib.loads(resources.files(__package__).joinpath(BUNDLED).read_text(encoding="utf-8"))
    level, rows = data.pop("level"), data.pop("rows")
    found = {
        quantity: Intervals({name: Interval(level=level, name=name, **entry) for name, entry in entries.items()})
        for quantity, entries in data.items()
    }
    return Bundled(found, rows)


def bundled_text(found: Bundled, level: float) -> str:
    """The text of the file that `bundled` reads."""
    lines = [
        "# Intervals of predictions as factors: the measured rate lies in prediction * low to prediction * high.",
        "# Written by perfmodel.evidence.validation.write_intervals from measured.toml.",
        f"level = {level:g}",
    ]
    for quantity, intervals in found.intervals.items():
        lines += ["", f"[{quantity}]"]
        lines += [
            f'"{name}" = {{ low = {one.low:.4g}, high = {one.high:.4g}, rows = {one.rows}, sources = {one.sources} }}'
            for name, one in intervals.by_name.items()
        ]
    lines += ["", "# Rows of decode by where their experts were.", "[rows]"]
    for name, counts in found.rows.items():
        entries = ", ".join(f"{where} = {count}" for where, count in counts.items())
        lines.append(f'"{name}" = {{ {entries} }}')
    return "\n".join(lines) + "\n"
