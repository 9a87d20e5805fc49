"""One sweep, complete: scenario, design and metrics, and the price of any block of it."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from perfmodel.errors import PerfModelError
from perfmodel.evaluation import metric_names
from perfmodel.hardware.files import path_text
from perfmodel.policies import Policy
from perfmodel.routing.replay import BatchOf
from perfmodel.scenario import Scenario
from perfmodel.scenario.axis import FILES
from perfmodel.scenario.inputs import (
    DEFAULT_MODEL,
    DEFAULT_SYSTEM,
    DEFAULT_TRACE,
    WORKLOAD,
    default_policies,
    load_input,
    named_policies,
)
from perfmodel.scenario.tables import fill_prices, groups
from perfmodel.sweeps.cases import cases_name, cases_reference, read_cases
from perfmodel.sweeps.design import Block, Design
from perfmodel.sweeps.files import merged, read_file
from perfmodel.sweeps.given import (
    DTypeName,
    as_table,
    check_not_varied,
    check_same_policies,
    checked_dtype,
    distinct,
    first_value,
    policies_of_axes,
)
from perfmodel.sweeps.identity import command_line, request_key
from perfmodel.sweeps.layout import lay_out, read_axes, zip_groups
from perfmodel.sweeps.samples import Sample

DEFAULT_METRICS = ("tpot_mean_s",)

__all__ = ["DEFAULT_METRICS", "DTypeName", "Priced", "Request"]


class Priced(NamedTuple):
    """A priced block.

    values : by metric, each of the block's shape; NaN where a plan is not possible, or the trace cannot tell.
    infeasible : number of points whose plan is not possible, by reason. Adding up the counts of all blocks gives the
        same for every division into blocks.
    """

    values: dict[str, NDArray[Any]]
    infeasible: dict[str, int]


@dataclass(frozen=True, eq=False)
class Request:
    """What a sweep computes; picklable. Build it with `Request.of`, `Request.load` or `Request.from_dict`.

    dtype : of the results. recipe : how the design was asked for, as plain values for JSON: ``axes``, ``zip``,
    ``cases`` and ``sample``.
    """

    scenario: Scenario
    design: Design
    metrics: tuple[str, ...]
    dtype: DTypeName
    recipe: Mapping[str, Any]

    @classmethod
    def of(
        cls,
        model: Any = None,
        system: Any = None,
        trace: Any = None,
        policy: Policy | str | Sequence[Policy | str] | None = None,
        axes: Mapping[str, Any] | None = None,
        *,
        zip: Any = (),  # noqa: A002
        cases: Any = None,
        sample: Any = None,
        metrics: str | Sequence[str] = DEFAULT_METRICS,
        prompt: int | None = None,
        output: int | None = None,
        batch: int = 1,
        batch_of: BatchOf = "sequences",
        micro_batch: int | None = None,
        layers: Literal["cycle"] | None = None,
        losses: Any = None,
        engine: Any = None,
        dtype: DTypeName = "float64",
    ) -> "Request":
        """A sweep from Python values.

        Parameters
        ----------
        model, system, trace, policy, prompt, output, batch, batch_of, micro_batch, layers, losses, engine : as in
            `Scenario.of`; where one is an axis, its first value stands in for it.
        axes : values by axis (see `Scenario.axis`): a list, or a text that `axes.parse_values` reads.
        zip : axes that vary together: ``"a,b"``, or several such groups.
        cases : a table of points, its columns being axes: a .csv or .parquet file, a DataFrame, or columns by name.
        sample : ``"sobol:1024"`` or ``"lhs:1000:seed"``, or a table: draws points from the axes given as
            ``"low:high[:log]"``.
        metrics : names of ``evaluation.METRICS``. dtype : of the results, ``"float64"`` or ``"float32"``.

        Raises
        ------
        PerfModelError : anything unknown, out of range, or contradictory.
        """
        given = as_table("axes", axes)
        table = {} if cases is None else read_cases(cases)
        source = "cases" if cases is None else cases_name(cases)
        asked, kind = metric_names(metrics), checked_dtype(dtype)
        drawn = None if sample is None else Sample.of(sample)
        inputs = {"model": model, "system": system, "trace": trace, "loss": losses}
        for name in FILES:
            first = first_value(name, given, table)
            inputs[name] = inputs[name] if first is None or (isinstance(first, str | list) and not first) else first
        _check_cases(table, source)
        together = zip_groups(zip)
        zipped = [name for group in together for name in group]
        policies = policies_of_axes(given, table, zipped)
        if policies is not None:
            check_same_policies(policies, policy)
        texts = policies if policies is not None else policy
        defaults = {"model": DEFAULT_MODEL, "system": DEFAULT_SYSTEM, "trace": DEFAULT_TRACE}
        model, system, trace = (inputs[name] if inputs[name] is not None else defaults[name] for name in defaults)
        if texts is None:
            texts = default_policies(load_input("system", system), (*given, *table))
        scenario = Scenario.of(
            model, system, trace, texts, prompt=prompt, output=output, losses=inputs["loss"], layers=layers,
            batch=batch, batch_of=batch_of, micro_batch=micro_batch, engine=engine,
        )  # fmt: skip
        on_grid = {name: values for name, values in given.items() if name != "policy" or name in zipped}
        wanted = read_axes(scenario, on_grid, table, zipped, source)
        varied = (*wanted.written, *wanted.cases)
        scenario.check_varied(varied)
        check_not_varied(varied, {"micro_batch": micro_batch, "batch": None if batch == 1 else batch})
        design = lay_out(scenario, wanted, together, drawn)
        recipe = {
            "axes": wanted.written,
            "zip": [[scenario.axis(name).name for name in group] for group in together],
            "cases": None if cases is None else cases_reference(cases, wanted.cases),
            "sample": None if drawn is None else drawn._asdict(),
        }
        return cls(scenario, design, asked, kind, recipe)

    @classmethod
    def load(cls, path: str | os.PathLike[str], **changes: Any) -> "Request":
        """A sweep from a TOML file with ``kind = "sweep"``.

        Keys are the parameters of `of` (``losses`` also as ``loss``); axes are the table ``[axes]``, samples the table
        ``[sample]``. Relative paths start at the folder of the file.

        Parameters
        ----------
        changes : parameters of `of` that replace what the file says; axes are replaced one by one, others are added.

        Raises
        ------
        PerfModelError : a file that cannot be read, an unknown key (with close matches), or anything `of` refuses; it
            names the file, and what replaced parts of it.
        """
        parameters = merged(read_file(path), changes)
        try:
            return cls.of(**parameters)
        except PerfModelError as error:
            others = [name for name, value in changes.items() if value not in (None, {})]
            changed = f" (with other {', '.join(others)})" if others else ""
            raise type(error)(f"{path_text(Path(os.fsdecode(path)))}{changed}: {error}") from None

    @classmethod
    def from_dict(cls, data: Any) -> "Request":
        """The request that `to_dict` described; PerfModelError where it held objects without a name or path."""
        if not isinstance(data, Mapping) or not {"scenario", "axes", "metrics"} <= set(data):
            raise PerfModelError("request: not the description of a sweep; allowed: what Request.to_dict gives")
        scenario = Scenario.from_dict(data["scenario"])
        cases = data.get("cases")
        if isinstance(cases, Mapping):
            raise PerfModelError("request: its cases existed in memory only; build it from the same table")
        names = ("model", "system", "trace", "engine", *WORKLOAD, "layers")
        same = {name: data["scenario"][name] for name in names if data["scenario"].get(name) is not None}
        on_axis = "policy" in data["axes"] or (cases is not None and "policy" in read_cases(cases))
        return cls.of(
            **same,
            losses=data["scenario"].get("loss"),
            policy=None if on_axis else scenario.labels,
            axes=data["axes"],
            zip=data.get("zip", ()),
            cases=cases,
            sample=data.get("sample"),
            metrics=data["metrics"],
            dtype=data.get("dtype", "float64"),
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON: ``scenario``, the recipe of the design, ``metrics`` and ``dtype``."""
        own = {"metrics": list(self.metrics), "dtype": self.dtype}
        return {"scenario": self.scenario.to_dict(), **self.recipe, **own}

    def key(self) -> str:
        """SHA-256 of everything that decides the numbers: contents rather than names, and versions."""
        return request_key(self.scenario, self.design, self.metrics, self.dtype)

    def command(self) -> str:
        """The command line that computes this sweep, with a remark where something has no name or path."""
        return command_line(self.to_dict())

    def price(self, block: Block) -> Priced:
        """Metrics of all points of a block: a pure function, the same to the bit for every division into blocks."""
        tables = self.design.within(block)
        found = {name: np.empty(block.shape, np.dtype(self.dtype)) for name in self.metrics}
        infeasible: dict[str, int] = {}
        outer = next((d for d, table in enumerate(tables) if "policy" in table), None)
        if outer is None:
            fill_prices(self.scenario, self.scenario.policies[0], tables, found, infeasible)
        else:
            for chosen, place in groups(tables[outer], ["policy"]):
                rule = self.scenario.policy(chosen["policy"])
                fill_prices(self.scenario, rule, tables, found, infeasible, (outer, place))
        return Priced(found, infeasible)


def _check_cases(table: Mapping[str, Sequence[Any]], source: str) -> None:
    """Refuse files and policies in a table of cases with the name of the table."""
    for name in (*FILES, "policy"):
        for value in distinct(table.get(name, ())):
            try:
                named_policies(value) if name == "policy" else load_input(name, value)
            except PerfModelError as error:
                raise PerfModelError(f"{source}: column {name}: {error}") from None
