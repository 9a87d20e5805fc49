"""Parameters of a request, checked one by one."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, get_args

from perfmodel.errors import PerfModelError
from perfmodel.evaluation import metric
from perfmodel.hardware.base import shown
from perfmodel.scenario import Scenario
from perfmodel.scenario.axis import FIXED_AXES
from perfmodel.scenario.inputs import named_policies
from perfmodel.sweeps.axes import parse_values

DTypeName = Literal["float64", "float32"]


def checked_metrics(metrics: Any) -> tuple[str, ...]:
    """Names of metrics: known, at least one, none twice."""
    listed = [metrics] if isinstance(metrics, str) else list(metrics) if isinstance(metrics, Iterable) else []
    if not listed:
        raise PerfModelError(f"metrics: found {shown(metrics)}, allowed at least one name of a metric")
    names = [metric(name).name for name in listed]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise PerfModelError(f"metrics: {twice} is given twice; allowed: every metric once")
    return tuple(names)


def checked_dtype(dtype: Any) -> DTypeName:
    """The type of the results."""
    known: tuple[DTypeName, ...] = get_args(DTypeName)
    if dtype not in known:
        raise PerfModelError(f"dtype: found {shown(dtype)}, allowed {' | '.join(known)}")
    return known[known.index(dtype)]


def as_table(what: str, given: Any) -> dict[str, Any]:
    """A mapping with texts as keys; empty for None."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise PerfModelError(f"{what}: found {shown(given)}, allowed a table of values by axis")
    odd = next((name for name in given if not isinstance(name, str)), None)
    if odd is not None:
        raise PerfModelError(f"{what}: found {shown(odd)} as the name of an axis, allowed texts")
    return dict(given)


def first_value(name: str, axes: Mapping[str, Any], cases: Mapping[str, Sequence[Any]]) -> Any:
    """First value of a file axis, which stands in for the scenario's own input."""
    if name in cases:
        return cases[name][0]
    values = axes.get(name)
    if isinstance(values, str):
        return values.replace(";", ",").split(",")[0].strip()
    return values[0] if isinstance(values, Sequence) and len(values) else values


def policies_of_axes(
    axes: Mapping[str, Any], cases: Mapping[str, Sequence[Any]], zipped: Sequence[str]
) -> list[Any] | None:
    """Policies of the axis ``policy``, or None without such an axis; those of rows may repeat."""
    if "policy" in cases:
        return _distinct(cases["policy"])
    values = axes.get("policy")
    if values is None:
        return None
    if isinstance(values, str):
        values = parse_values(values, FIXED_AXES["policy"])
    listed = list(values) if isinstance(values, Iterable) else [values]
    return _distinct(listed) if "policy" in zipped else listed


def _distinct(values: Iterable[Any]) -> list[Any]:
    found: list[Any] = []
    for value in values:
        if value not in found:
            found.append(value)
    return found


def check_same_policies(on_axis: Sequence[Any], policy: Any) -> None:
    """Policies that are an axis may be given once more, but no others."""
    if policy is None:
        return
    if named_policies(policy)[0] != named_policies(on_axis)[0]:
        raise PerfModelError("policy: given twice, as an axis and as the policies to compare; allowed: one of them")


def check_options(scenario: Scenario, names: Iterable[str]) -> None:
    """Refuse an axis over an option that some policy's text sets too."""
    for name in names:
        option = name.removeprefix("policy.")
        for rule, label in zip(scenario.policies, scenario.labels, strict=True):
            spelled = {item.partition("=")[0].strip() for item in label.partition(":")[2].split(",")}
            if option != name and option in spelled and label != rule.spec:
                raise PerfModelError(
                    f"axis {name}: policy {label} sets {option} itself; leave {option} out of one of them"
                )
