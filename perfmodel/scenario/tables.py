"""Prices of tables of points: one plan for every distinct setting that can change it."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from perfmodel.policies import Policy
from perfmodel.scenario.axis import has_option

if TYPE_CHECKING:
    from perfmodel.scenario.scenario import Scenario


def fill_prices(
    scenario: "Scenario",
    policy: Policy,
    tables: Sequence[Mapping[str, NDArray[Any]]],
    found: Mapping[str, NDArray[Any]],
    infeasible: dict[str, int],
    where: tuple[int, Any] | None = None,
) -> None:
    """Fill in the metrics of one policy at every combination of rows of some tables.

    Every distinct plan is priced once, for all hardware values together; along dimensions that do not matter to the
    policy, the same prices are repeated.

    Parameters
    ----------
    tables : one a dimension: checked values by full axis name, all of one length.
    found : by metric, an array with one dimension a table, which is filled in.
    infeasible : the number of points without a plan is added here, by reason; they are NaN.
    where : only these positions along one dimension are priced.
    """
    outer: list[Any] = [slice(None)] * len(tables)
    if where is not None:
        outer[where[0]] = where[1]
    own = [{name: values[at] for name, values in table.items()} for table, at in zip(tables, outer, strict=True)]
    kinds = {name: scenario.axis(name).kind for table in own for name in table}
    plans = [list(groups(table, [n for n in table if _decides(policy, n, kinds[n])])) for table in own]
    hardware = [[n for n in table if kinds[n] == "hardware"] for table in own]
    metrics = tuple(found)
    for combination in itertools.product(*plans):
        settings = {name: value for part, _ in combination for name, value in part.items()}
        arrays = {
            name: own[d][name][at].reshape(_along(d, len(own)))
            for d, (_, at) in enumerate(combination)
            for name in hardware[d]
        }
        reasons: dict[str, int] = {}
        prices = scenario.prices(policy, settings, arrays, metrics, infeasible=reasons)
        places = [_inside(out, at) for out, (_, at) in zip(outer, combination, strict=True)]
        target = _index(places, tables)
        for name, values in prices.items():
            found[name][target] = values
        if reasons:
            repeats = found[metrics[0]][target].size // prices[metrics[0]].size
            for reason, count in reasons.items():
                infeasible[reason] = infeasible.get(reason, 0) + count * repeats


def _decides(policy: Policy, name: str, kind: str) -> bool:
    """Whether an axis, hardware aside, matters to a policy."""
    if kind == "option":
        return has_option(policy, name.removeprefix("policy."))
    return kind not in ("hardware", "policy")


def groups(table: Mapping[str, NDArray[Any]], names: Sequence[str]) -> Iterator[tuple[dict[str, Any], Any]]:
    """Positions of a table of columns by the distinct values of some of them, in order of appearance.

    Yields the values, and a slice or an index array of the positions; with no names, one group of all positions.
    """
    chosen = [table[name] for name in names]
    if not chosen:
        yield {}, slice(None)
        return
    where: dict[tuple[Any, ...], list[int]] = {}
    for i, row in enumerate(zip(*(column.tolist() for column in chosen), strict=True)):
        where.setdefault(row, []).append(i)
    for row, found in where.items():
        contiguous = found[-1] - found[0] + 1 == len(found)
        place = slice(found[0], found[-1] + 1) if contiguous else np.array(found)
        yield dict(zip(names, row, strict=True)), place


def _along(dimension: int, ndim: int) -> tuple[int, ...]:
    return tuple(-1 if d == dimension else 1 for d in range(ndim))


def _inside(outer: Any, inner: Any) -> Any:
    """Positions ``inner`` among the positions ``outer``."""
    whole = slice(None)
    if isinstance(outer, slice) and outer == whole:
        return inner
    if isinstance(inner, slice) and inner == whole:
        return outer
    if isinstance(outer, slice):
        return (
            slice(outer.start + inner.start, outer.start + inner.stop)
            if isinstance(inner, slice)
            else inner + outer.start
        )
    return outer[inner]


def _index(places: Sequence[Any], tables: Sequence[Mapping[str, NDArray[Any]]]) -> tuple[Any, ...]:
    """An index of the rectangle of these positions."""
    if all(isinstance(place, slice) for place in places):
        return tuple(places)
    sizes = (len(next(iter(table.values()))) for table in tables)
    return np.ix_(*(np.arange(size)[place] for size, place in zip(sizes, places, strict=True)))
