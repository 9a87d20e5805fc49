"""Plans of one scenario, each made once: for every policy, file, workload and hardware value that can change it."""

from collections.abc import Mapping
from typing import Any, Literal

from perfmodel.errors import PlacementError, PolicyError, SpecError
from perfmodel.policies import Policy
from perfmodel.routing import Replay
from perfmodel.routing.replay import BatchOf
from perfmodel.run import Run, make_replay, plan_run
from perfmodel.scenario.inputs import load_input, under_engine
from perfmodel.scenario.memo import Memo

#: Errors that say that one setting cannot be run, while others can.
INFEASIBLE = (PlacementError, PolicyError, SpecError)

#: What plans and replays may take up together [byte]; derived arrays are several times as large as the picks.
_BUDGET = 2.0**28
_TIMES, _BESIDE = 8.0, 1e5


def replans(policy: Policy, key: str) -> bool:
    """Whether another value at a hardware key may change the plan of a policy."""
    return any(key == one or (one.endswith(".") and key.startswith(one)) for one in policy.plan_keys)


class Plans:
    """Plans by what decides them, the least recently used ones forgotten; for many threads.

    own : the scenario's model, system, trace and loss table by kind. workload : its values at the axes of the workload.
    layers, batch_of : as in `evaluate`. engine : what the systems of files run under, or None for their own.
    """

    def __init__(
        self,
        own: Mapping[str, Any],
        workload: Mapping[str, int | None],
        layers: Literal["cycle"] | None,
        batch_of: BatchOf = "sequences",
        engine: Any = None,
    ) -> None:
        self._engine = engine
        self._own, self._workload, self._layers, self._batch_of = own, workload, layers, batch_of
        self._runs: Memo[Run] = Memo(_BUDGET, lambda run: _BESIDE + _TIMES * run.plan.picks.nbytes, INFEASIBLE)
        self._replays: Memo[Replay] = Memo(_BUDGET, lambda one: _BESIDE + _TIMES * one.trace.topk_ids.nbytes)
        self._files: Memo[Any] = Memo(float("inf"), lambda _: 0.0)

    def run(self, rule: Policy, fixed: Mapping[str, Any], planned: Mapping[str, float]) -> Run:
        """The plan of a policy.

        fixed : values of the axes ``model``, ``system``, ``trace``, ``loss`` and of the workload that differ from the
        scenario's. planned : values at the hardware keys for which the policy replans.
        """
        key = (rule.name, rule, tuple(sorted(fixed.items())), tuple(sorted(planned.items())))
        return self._runs.get(key, lambda: self._make(rule, fixed, planned))

    def _make(self, rule: Policy, fixed: Mapping[str, Any], planned: Mapping[str, float]) -> Run:
        model, system, losses = (self.file(kind, fixed.get(kind)) for kind in ("model", "system", "loss"))
        if planned:
            system = system.with_values(planned)
        micro = self._value(fixed, "micro_batch")
        return plan_run(model, system, self._replay(fixed), rule, losses=losses, micro_batch=micro)

    def _value(self, fixed: Mapping[str, Any], name: str) -> int | None:
        """A number of the workload."""
        found: int | None = fixed.get(f"workload.{name}", self._workload[name])
        return found

    def _replay(self, fixed: Mapping[str, Any]) -> Replay:
        model, trace = fixed.get("model"), fixed.get("trace")
        prompt, output, batch = (self._value(fixed, name) for name in ("prompt", "output", "batch"))
        how = prompt, output, self._layers, batch or 1, self._batch_of
        return self._replays.get(
            (model, trace, how), lambda: make_replay(self.file("model", model), self.file("trace", trace), *how)
        )

    def file(self, kind: str, reference: str | None) -> Any:
        """The model, system, trace or loss table of a name or path; without one, the scenario's own."""
        if reference is None:
            return self._own[kind]
        return self._files.get((kind, reference), lambda: self._load(kind, reference))

    def _load(self, kind: str, reference: str) -> Any:
        found = load_input(kind, reference)
        return under_engine(found, self._engine) if kind == "system" else found
