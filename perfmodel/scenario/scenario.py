"""What is priced, and everything that a point of it may vary.

A scenario holds model, system, trace, policies and workload. Its points differ in axes (see ``axis.py``): numbers of
the hardware, options of the policies, workload lengths, or other files. Plans are made once for each setting that can
change them; the other hardware numbers are priced in bulk.
"""

import functools
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from perfmodel import __version__
from perfmodel.bitwidth import LossTable
from perfmodel.errors import PerfModelError, SpecError
from perfmodel.evaluation import metric_names
from perfmodel.hardware import EngineSpec, System
from perfmodel.hardware.base import shown
from perfmodel.model import MoEModel
from perfmodel.policies import Policy, parse_policy
from perfmodel.routing import RoutingTrace
from perfmodel.routing.replay import BatchOf
from perfmodel.run import Run
from perfmodel.scenario.axis import FILES, AxisInfo, all_axes, axis_info, with_options
from perfmodel.scenario.inputs import (
    DEFAULT_MODEL,
    DEFAULT_SYSTEM,
    DEFAULT_TRACE,
    WORKLOAD,
    check_layers,
    checked_batch_of,
    checked_tokens,
    content_hash,
    default_policies,
    load_input,
    named_policies,
    under_engine,
)
from perfmodel.scenario.numbers import plain, whole
from perfmodel.scenario.plans import INFEASIBLE, Plans, replans
from perfmodel.scenario.pricing import no_plan, price_points
from perfmodel.scenario.values import check_distinct, clean


@dataclass(frozen=True, eq=False)
class Scenario:
    """Model, system, trace, policies and workload; build it with `Scenario.of`.

    policies, labels : the policies, and what each is called: the text it was given as.
    prompt, output : tokens of every sequence [1], None for the recorded lengths. losses : None for the default table.
    batch, batch_of, micro_batch : tokens of a decode step, and of a pass of the prefill, as in ``evaluate``.
    engine : what every system runs under, or None for its own; ``system`` is under it.
    references : name or path of model, system, trace, loss table and engine; None for what was given as an object.
    """

    model: MoEModel
    system: System
    trace: RoutingTrace
    policies: tuple[Policy, ...]
    labels: tuple[str, ...]
    prompt: int | None = None
    output: int | None = None
    losses: LossTable | None = None
    layers: Literal["cycle"] | None = None
    references: Mapping[str, str | None] = field(default_factory=dict)
    batch: int = 1
    batch_of: BatchOf = "sequences"
    micro_batch: int | None = None
    engine: EngineSpec | str | os.PathLike[str] | None = None

    def __getstate__(self) -> dict[str, Any]:
        # Without what is only remembered: plans, replays, files that axes name.
        return {one.name: getattr(self, one.name) for one in fields(self)}

    @functools.cached_property
    def _plans(self) -> Plans:
        own = {"model": self.model, "system": self.system, "trace": self.trace, "loss": self.losses}
        workload = {name: getattr(self, name) for name in ("prompt", "output", "batch", "micro_batch")}
        return Plans(own, workload, self.layers, self.batch_of, self.engine)

    @functools.cached_property
    def _axes(self) -> dict[object, AxisInfo]:
        return {}

    @classmethod
    def of(
        cls,
        model: MoEModel | str | os.PathLike[str] = DEFAULT_MODEL,
        system: System | str | os.PathLike[str] = DEFAULT_SYSTEM,
        trace: RoutingTrace | str | os.PathLike[str] = DEFAULT_TRACE,
        policy: Policy | str | Sequence[Policy | str] | None = None,
        *,
        prompt: int | None = None,
        output: int | None = None,
        losses: LossTable | str | os.PathLike[str] | None = None,
        layers: Literal["cycle"] | None = None,
        batch: int = 1,
        batch_of: BatchOf = "sequences",
        micro_batch: int | None = None,
        engine: EngineSpec | str | os.PathLike[str] | None = None,
    ) -> "Scenario":
        """A scenario from names, paths or objects.

        policy : one or several; by default the published systems that run on the system. engine : inference engine of
        every system, by name, path or object; ``none`` for no engine, and None for the system's own. Others as in
        ``evaluate``.

        Raises
        ------
        PerfModelError : anything that cannot be loaded, or two equal policies.
        """
        given: dict[str, Any] = {"model": model, "system": system, "trace": trace, "loss": losses}
        loaded = {name: load_input(name, value) for name, value in given.items()}
        loaded["system"] = under_engine(loaded["system"], engine)
        given["engine"] = engine
        policies, labels = named_policies(default_policies(loaded["system"]) if policy is None else policy)
        prompt, output = checked_tokens("prompt", prompt), checked_tokens("output", output)
        check_layers(layers)
        references = {name: os.fsdecode(v) if isinstance(v, str | os.PathLike) else None for name, v in given.items()}
        return cls(
            loaded["model"], loaded["system"], loaded["trace"], policies, labels, prompt, output, loaded["loss"],
            layers, references, checked_tokens("batch", batch) or 1, checked_batch_of(batch_of),
            checked_tokens("micro_batch", micro_batch), engine,
        )  # fmt: skip

    # ---- provenance ----

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, read by `from_dict`; what has no name or path is ``{"in_memory": hash}``."""
        hashes = self.content()
        named: dict[str, Any] = {
            name: self.references.get(name) or {"in_memory": hashes[name]} for name in ("model", "system", "trace")
        }
        loss = self.references.get("loss") or {"in_memory": hashes["loss"]}
        return {
            **named,
            "engine": self._engine_reference,
            "policy": list(self.labels),
            "prompt": self.prompt,
            "output": self.output,
            "batch": self.batch,
            "batch_of": self.batch_of,
            "micro_batch": self.micro_batch,
            "layers": self.layers,
            "loss": None if self.losses is None else loss,
        }

    @property
    def _engine_reference(self) -> str | dict[str, str] | None:
        """Name or path of the engine that was given, or that there was one without."""
        if self.engine is None or self.references.get("engine"):
            return self.references.get("engine")
        return {"in_memory": content_hash("system", self.system)}

    @classmethod
    def from_dict(cls, data: Any) -> "Scenario":
        """The scenario that `to_dict` described; PerfModelError where it held objects without a name or path."""
        if not isinstance(data, Mapping) or not {"model", "system", "trace", "policy"} <= set(data):
            raise PerfModelError("scenario: not the description of a scenario; allowed: what Scenario.to_dict gives")
        lost = [name for name, value in data.items() if isinstance(value, Mapping)]
        if lost:
            raise PerfModelError(
                f"scenario: its {' and '.join(lost)} existed in memory only; build the scenario from the same objects"
            )
        rest = {name: data[name] for name in (*WORKLOAD, "layers", "engine") if data.get(name) is not None}
        return cls.of(data["model"], data["system"], data["trace"], data["policy"], losses=data.get("loss"), **rest)

    def content(self) -> dict[str, str | None]:
        """Hashes of everything that decides the numbers, by name, and the version of this package."""
        return dict(self._hashes)

    @functools.cached_property
    def _hashes(self) -> dict[str, str | None]:
        return {
            "model": content_hash("model", self.model),
            "system": content_hash("system", self.system),
            "trace": content_hash("trace", self.trace),
            "loss": None if self.losses is None else content_hash("loss", self.losses),
            "perfmodel": __version__,
        }

    # ---- axes ----

    def axes(self) -> tuple[AxisInfo, ...]:
        """Every axis that can be varied."""
        return all_axes(self.system, self.policies, self.model.num_experts)

    def axis(self, name: object) -> AxisInfo:
        """The axis of a name; options and ``prompt``/``output`` also without prefix.

        Raises PerfModelError for an unknown axis, with close matches and how to list all.
        """
        if not isinstance(name, str) or name not in self._axes:
            info = axis_info(self.system, self.policies, self.model.num_experts, name)
            self._axes[info.name] = info
            if isinstance(name, str):
                self._axes[name] = info
            return info
        return self._axes[name]

    def check(self, name: object, values: object, *, distinct: bool = True) -> tuple[Any, ...]:
        """Values of an axis, checked and plain: range, whole numbers, finite, known policies, readable files.

        distinct : refuse a value that is given twice.

        Raises
        ------
        PerfModelError : with axis, value and what is allowed.
        """
        return tuple(self.check_array(name, values, distinct=distinct).tolist())

    def check_array(self, name: object, values: object, *, distinct: bool = True, alone: bool = True) -> NDArray[Any]:
        """The same as one array: float64 or int64 for numbers, objects for words and mixtures.

        alone : the axis varies alone, so that every value must fit the other values of its spec.
        """
        info = self.axis(name)
        array = clean(info, values, self.policies)
        if info.kind == "policy":
            named_policies(list(dict.fromkeys(array.tolist())))
        elif info.kind in FILES:
            for one in dict.fromkeys(array.tolist()):
                self.file(info.kind, one)
        elif info.kind == "hardware" and alone:
            for end in (array.min(), array.max()):
                try:
                    self.system.with_values({info.name: end.item()})
                except SpecError as error:
                    raise PerfModelError(f"axis {info.name}: {error}") from None
        if distinct:
            check_distinct(info, array)
        return array

    def check_idle(self, names: Collection[str]) -> None:
        """Refuse axes of the engine, by their full names, that can change nothing when these vary together."""
        for name in () if "system" in names else names:
            reason = self.system.idle(name, names)
            if reason is not None:
                raise PerfModelError(f"axis {name}: {reason}")

    def check_varied(self, names: Iterable[str]) -> None:
        """Refuse axes that are not what they seem, as all that vary together are.

        An option that the text of some policy sets too, as its name would no longer be true; and a number of the
        engine that can change nothing here. Of the systems of an axis, each decides for itself.
        """
        known = dict.fromkeys(self.axis(name).name for name in names)
        self.check_idle(known)
        for name in known:
            option = self.axis(name).name.removeprefix("policy.")
            for rule, label in zip(self.policies, self.labels, strict=True):
                spelled = {item.partition("=")[0].strip() for item in label.partition(":")[2].split(",")}
                if self.axis(name).kind == "option" and option in spelled and label != rule.spec:
                    raise PerfModelError(
                        f"axis policy.{option}: policy {label} sets {option} itself; leave {option} out of one of them"
                    )

    # ---- plans and prices ----

    def policy(self, which: int | str | Policy) -> Policy:
        """A policy of this scenario by number or label, or any other by text."""
        if isinstance(which, Policy):
            return which
        if isinstance(which, str):
            known = dict(zip(self.labels, self.policies, strict=True))
            return known.get(which) or parse_policy(which)
        number = whole(which)
        if number is None or not 0 <= number < len(self.policies):
            raise PerfModelError(
                f"policy: found {shown(plain(which))}, allowed 0 to {len(self.policies) - 1}, or a text"
            )
        return self.policies[number]

    def run(self, policy: int | str | Policy, settings: Mapping[str, Any] | None = None) -> Run:
        """The planned run of a policy at some axis values, which are taken as checked (see `check`).

        Options that the policy lacks do not matter to it. The plan is shared by all hardware values that cannot
        change it; ``run.system`` holds every hardware value that was given.

        Raises
        ------
        PerfModelError : a plan that does not fit (PlacementError) or that the system or trace cannot serve.
        """
        base, options, fixed, hardware = self._resolve(policy, settings)
        rule = with_options(base, options)
        planned = {key: value for key, value in hardware.items() if replans(rule, key)}
        run = self._plans.run(rule, fixed, planned)
        rest = {key: value for key, value in hardware.items() if key not in planned}
        if rest:
            run = replace(run, system=run.system.with_values(rest))
        return run

    def prices(
        self,
        policy: int | str | Policy,
        settings: Mapping[str, Any] | None,
        hardware: Mapping[str, ArrayLike],
        metrics: Iterable[str],
        *,
        infeasible: dict[str, int] | None = None,
    ) -> dict[str, NDArray[np.float64]]:
        """Metrics of a policy for many hardware values at once.

        Parameters
        ----------
        settings : one value each, of any axes. hardware : arrays that broadcast against each other, by dotted key;
            checked beforehand (see `check`). metrics : names of ``evaluation.METRICS``.
        infeasible : where given, points whose plan is not possible, or whose values contradict each other, are NaN,
            and their number is added here by reason.

        Returns
        -------
        Arrays of the broadcast shape.

        Raises
        ------
        PerfModelError : unknown names; without ``infeasible`` also a plan that is not possible.
        """
        base, options, fixed, scalars = self._resolve(policy, settings)
        names = metric_names(metrics)
        values_of = {**scalars, **{self._key(key): value for key, value in _table("hardware", hardware).items()}}
        try:
            arrays = {key: np.asarray(value, dtype=np.float64) for key, value in values_of.items()}
            shape = np.broadcast_shapes(*(array.shape for array in arrays.values()))
        except (ValueError, TypeError, OverflowError) as error:
            raise PerfModelError(f"hardware values: not arrays of numbers that broadcast ({error})") from None
        try:
            rule = with_options(base, options)
        except INFEASIBLE as error:
            return no_plan(error, shape, names, infeasible)
        return price_points(self._plans, rule, fixed, arrays, shape, names, infeasible)

    def _key(self, name: str) -> str:
        info = self.axis(name)
        if info.kind != "hardware":
            raise PerfModelError(f"axis {info.name}: an array of hardware values is needed; allowed: hardware keys")
        return info.name

    def _resolve(
        self, policy: int | str | Policy, settings: Mapping[str, Any] | None
    ) -> tuple[Policy, dict[str, Any], dict[str, Any], dict[str, float]]:
        """The policy; and of the settings the options, the files and workload, and the hardware values."""
        options: dict[str, Any] = {}
        fixed: dict[str, Any] = {}
        hardware: dict[str, float] = {}
        for name, value in _table("settings", settings).items():
            info = self.axis(name)
            if info.kind == "option":
                options[info.name.removeprefix("policy.")] = value
            elif info.kind == "hardware":
                hardware[info.name] = value
            elif info.kind == "policy":
                policy = value
            else:
                fixed[info.name] = value
        return self.policy(policy), options, fixed, hardware

    def file(self, kind: str, reference: str | None) -> Any:
        """The model, system, trace or loss table of a name or path; without one, the scenario's own."""
        return self._plans.file(kind, reference)


def _table(what: str, given: object) -> Mapping[Any, Any]:
    if given is not None and not isinstance(given, Mapping):
        raise PerfModelError(f"{what}: found {shown(given)}, allowed a table of values by axis")
    return given or {}


__all__ = ["Scenario"]
