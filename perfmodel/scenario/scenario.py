"""What is priced, and everything that a point of it may vary.

A scenario holds model, system, trace, policies and workload. Its points differ in axes (see ``axis.py``): numbers of
the hardware, options of the policies, workload lengths, or other files. Plans are made once for each setting that can
change them; the other hardware numbers are priced in bulk.
"""

import functools
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from perfmodel import __version__
from perfmodel.bitwidth import LossTable
from perfmodel.errors import PerfModelError, SpecError
from perfmodel.hardware import System
from perfmodel.hardware.base import shown
from perfmodel.model import MoEModel
from perfmodel.point import hardware_points
from perfmodel.policies import Policy, parse_policy
from perfmodel.routing import RoutingTrace
from perfmodel.run import Run
from perfmodel.scenario.axis import FILES, AxisInfo, all_axes, axis_info, clean, with_options
from perfmodel.scenario.inputs import (
    DEFAULT_MODEL,
    DEFAULT_SYSTEM,
    DEFAULT_TRACE,
    content_hash,
    default_policies,
    load_input,
    named_policies,
)
from perfmodel.scenario.places import distinct_places, extent, part_of
from perfmodel.scenario.plans import INFEASIBLE, Plans, replans


@dataclass(frozen=True, eq=False)
class Scenario:
    """Model, system, trace, policies and workload; build it with `Scenario.of`.

    policies, labels : the policies, and what each is called: the text it was given as.
    prompt, output : tokens of every sequence [1], None for the recorded lengths. losses : None for the default table.
    references : name or path of model, system, trace and loss table; None for what was given as an object.
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

    def __getstate__(self) -> dict[str, Any]:
        # Without what is only remembered: plans, replays, files that axes name.
        return {one.name: getattr(self, one.name) for one in fields(self)}

    @functools.cached_property
    def _plans(self) -> Plans:
        own = {"model": self.model, "system": self.system, "trace": self.trace, "loss": self.losses}
        return Plans(own, self.prompt, self.output, self.layers)

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
    ) -> "Scenario":
        """A scenario from names, paths or objects.

        policy : one or several; by default the published systems that run on the system. Others as in ``evaluate``.

        Raises
        ------
        PerfModelError : anything that cannot be loaded, or two equal policies.
        """
        given: dict[str, Any] = {"model": model, "system": system, "trace": trace, "loss": losses}
        loaded = {name: load_input(name, value) for name, value in given.items()}
        policies, labels = named_policies(default_policies(loaded["system"]) if policy is None else policy)
        for name, tokens in (("prompt", prompt), ("output", output)):
            if tokens is not None and (type(tokens) is not int or tokens < 1):
                raise PerfModelError(f"{name}: found {shown(tokens)}, allowed a whole number of tokens from 1")
        if layers not in (None, "cycle"):
            raise PerfModelError(f"layers: found {shown(layers)}, allowed 'cycle'")
        references = {name: os.fsdecode(v) if isinstance(v, str | os.PathLike) else None for name, v in given.items()}
        return cls(
            loaded["model"], loaded["system"], loaded["trace"], policies, labels, prompt, output, loaded["loss"],
            layers, references,
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
            "policy": list(self.labels),
            "prompt": self.prompt,
            "output": self.output,
            "layers": self.layers,
            "loss": None if self.losses is None else loss,
        }

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
        rest = {name: data.get(name) for name in ("prompt", "output", "layers")}
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
        return all_axes(self.system, self.policies)

    def axis(self, name: object) -> AxisInfo:
        """The axis of a name; options and ``prompt``/``output`` also without prefix.

        Raises PerfModelError for an unknown axis, with close matches and how to list all.
        """
        if not isinstance(name, str) or name not in self._axes:
            info = axis_info(self.system, self.policies, name)
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
        if distinct and len(set(array.tolist())) < len(array):
            seen: set[Any] = set()
            twice = next(v for v in array.tolist() if v in seen or seen.add(v))  # type: ignore[func-returns-value]
            raise PerfModelError(f"axis {info.name}: value {shown(twice)} is given twice; allowed: distinct values")
        return array

    # ---- plans and prices ----

    def policy(self, which: int | str | Policy) -> Policy:
        """A policy of this scenario by number or label, or any other by text."""
        if isinstance(which, Policy):
            return which
        if isinstance(which, str):
            known = dict(zip(self.labels, self.policies, strict=True))
            return known.get(which) or parse_policy(which)
        if type(which) is not int or not 0 <= which < len(self.policies):
            raise PerfModelError(f"policy: found {shown(which)}, allowed 0 to {len(self.policies) - 1}, or a text")
        return self.policies[which]

    def run(self, policy: int | str | Policy, settings: Mapping[str, Any] | None = None) -> Run:
        """The planned run of a policy at some axis values, which are taken as checked (see `check`).

        Options that the policy lacks do not matter to it. The plan is shared by all hardware values that cannot
        change it; ``run.system`` holds every hardware value that was given.

        Raises
        ------
        PerfModelError : a plan that does not fit (PlacementError) or that the system or trace cannot serve.
        """
        rule, fixed, hardware = self._resolve(policy, settings)
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
        infeasible : where given, points whose plan is not possible are NaN, and their number is added here by reason.

        Returns
        -------
        Arrays of the broadcast shape.

        Raises
        ------
        PerfModelError : unknown names; without ``infeasible`` also a plan that is not possible.
        """
        rule, fixed, scalars = self._resolve(policy, settings)
        names = tuple(metrics)
        values_of = {**scalars, **{self._key(key): value for key, value in hardware.items()}}
        try:
            arrays = {key: np.asarray(value, dtype=np.float64) for key, value in values_of.items()}
            shape = np.broadcast_shapes(*(array.shape for array in arrays.values()))
        except (ValueError, TypeError, OverflowError) as error:
            raise PerfModelError(f"hardware values: not arrays of numbers that broadcast ({error})") from None
        planned = {key: array for key, array in arrays.items() if replans(rule, key)}
        free = {key: array for key, array in arrays.items() if key not in planned}
        if all(array.size == 1 for array in planned.values()):
            values = {key: array.item() for key, array in planned.items()}
            return self._price(rule, fixed, values, free, shape, names, infeasible)
        found = {name: np.full(shape, np.nan) for name in names}
        for place, values in distinct_places(planned, shape):
            part = {key: part_of(array, place, len(shape)) for key, array in free.items()}
            size = np.broadcast_shapes(*(array.shape for array in part.values()), extent(place, shape))
            some = self._price(rule, fixed, values, part, size, names, infeasible)
            for name in names:
                found[name][place] = some[name]
        return found

    def _price(
        self,
        rule: Policy,
        fixed: Mapping[str, Any],
        planned: Mapping[str, float],
        free: Mapping[str, NDArray[np.float64]],
        shape: tuple[int, ...],
        metrics: tuple[str, ...],
        infeasible: dict[str, int] | None,
    ) -> dict[str, NDArray[np.float64]]:
        """Prices of one plan, in an array of the given shape."""
        try:
            run = self._plans.run(rule, fixed, planned)
        except INFEASIBLE as error:
            if infeasible is None:
                raise
            reason = str(error)
            infeasible[reason] = infeasible.get(reason, 0) + int(np.prod(shape))
            return {name: np.full(shape, np.nan) for name in metrics}
        own = np.broadcast_shapes(*(array.shape for array in free.values()))
        priced = run.metrics(metrics, hardware_points(run.system, free))
        found = {name: values.reshape(own) for name, values in priced.items()}
        return found if own == shape else {name: np.broadcast_to(found[name], shape).copy() for name in metrics}

    def _key(self, name: str) -> str:
        info = self.axis(name)
        if info.kind != "hardware":
            raise PerfModelError(f"axis {info.name}: an array of hardware values is needed; allowed: hardware keys")
        return info.name

    def _resolve(
        self, policy: int | str | Policy, settings: Mapping[str, Any] | None
    ) -> tuple[Policy, dict[str, Any], dict[str, float]]:
        """The policy with its options, the files and workload of the settings, and their hardware values."""
        options: dict[str, Any] = {}
        fixed: dict[str, Any] = {}
        hardware: dict[str, float] = {}
        for name, value in (settings or {}).items():
            info = self.axis(name)
            if info.kind == "option":
                options[info.name.removeprefix("policy.")] = value
            elif info.kind == "hardware":
                hardware[info.name] = value
            elif info.kind == "policy":
                policy = value
            else:
                fixed[info.name] = value
        return with_options(self.policy(policy), options), fixed, hardware

    def file(self, kind: str, reference: str | None) -> Any:
        """The model, system, trace or loss table of a name or path; without one, the scenario's own."""
        return self._plans.file(kind, reference)


__all__ = ["Scenario"]
