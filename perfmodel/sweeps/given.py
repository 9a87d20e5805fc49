"""Parameters of a request, checked one by one."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np

from perfmodel.errors import PerfModelError
from perfmodel.hardware.base import shown
from perfmodel.policies import Policy
from perfmodel.scenario.axis import FIXED_AXES
from perfmodel.scenario.inputs import named_policies
from perfmodel.sweeps.axes import parse_values, split_words

DTypeName = Literal["float64", "float32"]


def checked_dtype(dtype: Any) -> DTypeName:
    """The type of the results, from its name or NumPy's own type."""
    known: tuple[DTypeName, ...] = get_args(DTypeName)
    is_type = isinstance(dtype, np.dtype) or (isinstance(dtype, type) and issubclass(dtype, np.generic))
    name = np.dtype(dtype).name if is_type else dtype
    found = next((one for one in known if isinstance(name, str) and one == name), None)
    if found is None:
        raise PerfModelError(f"dtype: found {shown(dtype)}, allowed {' | '.join(known)}")
    return found


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
    if isinstance(values, np.ndarray):
        values = values.tolist()
    if isinstance(values, str):
        return split_words(values, FIXED_AXES[name])[0] if values.strip() else values
    return values[0] if isinstance(values, Sequence) and len(values) else values


def policies_of_axes(
    axes: Mapping[str, Any], cases: Mapping[str, Sequence[Any]], zipped: Sequence[str]
) -> list[Any] | None:
    """Policies of the axis ``policy``, or None without such an axis; those of rows may repeat."""
    if "policy" in cases:
        return distinct(cases["policy"])
    values = axes.get("policy")
    if values is None:
        return None
    if isinstance(values, str):
        values = parse_values(values, FIXED_AXES["policy"])
    listed = list(values) if isinstance(values, Iterable) and not isinstance(values, Policy) else [values]
    return distinct(listed) if "policy" in zipped else listed


def distinct(values: Iterable[Any]) -> list[Any]:
    """Values, each once, in order of appearance."""
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


def check_not_varied(varied: Iterable[str], workload: Mapping[str, Any]) -> None:
    """What is an axis may not be set for all points too.

    varied : full names of the axes. workload : what was given for all points; None where nothing was.
    """
    for name, value in workload.items():
        if value is not None and f"workload.{name}" in varied:
            raise PerfModelError(
                f"{name}: given twice, as the axis workload.{name} and as {shown(value)} for all points; allowed:"
                " one of them"
            )
