"""Answers as text for people, and as plain values for JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from perfmodel.evaluation import metric
from perfmodel.reports import number, table

if TYPE_CHECKING:
    import xarray as xr


_PROVENANCE = ("model", "system", "trace", "trace_source", "perfmodel_version", "weakest_source", "notes")
#: Points of a front that are printed; all of them are in the JSON document and the saved file.
_MOST_ROWS = 40


def _plain(value: Any) -> Any:
    """A value for JSON: NumPy scalars as plain ones, NaN as null."""
    plain = value.item() if isinstance(value, np.generic | np.ndarray) else value
    return None if isinstance(plain, float) and not math.isfinite(plain) else plain


def provenance(attrs: Any) -> dict[str, Any]:
    """Provenance for JSON."""
    found = {name: _plain(attrs[name]) for name in _PROVENANCE if name in attrs}
    return {**found, "notes": json.loads(found.get("notes", "[]"))}


def footer(attrs: Any, extra: Iterable[str] = ()) -> list[str]:
    """An empty line, notes, and what was priced."""
    origin = provenance(attrs)
    place = f"{origin.get('model')} on {origin.get('system')}, routing {origin.get('trace')}"
    lines = [f"{place} ({origin.get('trace_source')}); weakest source of a number: {origin.get('weakest_source')}"]
    return ["", *(f"note: {note}" for note in (*extra, *origin["notes"])), *lines]


def with_unit(name: str, unit: str) -> str:
    """A name for the head of a column."""
    return name if unit in ("", "1") else f"{name} [{unit}]"


def _text(value: Any, digits: int = 6) -> str:
    plain = _plain(value)
    return number(plain, digits) if plain is None or isinstance(plain, float) else str(plain)


# ---- sensitivity ----


def tornado_data(found: xr.Dataset) -> dict[str, Any]:
    """A tornado for JSON."""
    keys = []
    for i, key in enumerate(found.key.values.tolist()):
        one = found.isel(key=i)
        moved = {
            label: {
                "low": _plain(one.value.values[p, 0]),
                "high": _plain(one.value.values[p, 1]),
                "swing": _plain(one.swing.values[p]),
            }
            for p, label in enumerate(found.policy.values.tolist())
        }
        low, high = one.setting.values.tolist()
        keys.append({"key": key, "unit": str(one.unit.values), "low": low, "high": high, "policies": moved})
    base = dict(zip(found.policy.values.tolist(), map(_plain, found.base.values), strict=True))
    lists = {name: json.loads(found.attrs[name]) for name in ("no_effect", "zero", "refused", "clipped")}
    unit = found.value.attrs["units"]
    return {
        "metric": found.attrs["metric"],
        "unit": unit,
        "base": base,
        "keys": keys,
        **lists,
        **provenance(found.attrs),
    }


def tornado(found: xr.Dataset) -> str:
    """A tornado as a table: the metric at both ends of every key, by policy."""
    data = tornado_data(found)
    parts = []
    for label in found.policy.values.tolist():
        rows = []
        for key in data["keys"]:
            one = key["policies"][label]
            ends = f"{key['low']:.6g} to {key['high']:.6g} {'' if key['unit'] == '1' else key['unit']}".rstrip()
            share = (
                None if one["swing"] is None or not data["base"][label] else 100 * one["swing"] / data["base"][label]
            )
            rows.append([key["key"], ends, _text(one["low"]), _text(one["high"]), _text(share, 3)])
        title = f"{label}: {data['metric']} {_text(data['base'][label])} {data['unit']} as it stands"
        at = [f"at {end} [{data['unit']}]" for end in ("low", "high")]
        parts += [title, table(("key", "range", *at, "swing [%]"), rows, left=2), ""]
    extra = [f"{', '.join(data['no_effect'])}: no effect"] if data["no_effect"] else []
    extra += [f"{', '.join(data['zero'])}: zero, so a relative change does nothing"] if data["zero"] else []
    extra += [f"{', '.join(data['clipped'])}: stopped by a limit"] if data["clipped"] else []
    if data["refused"]:
        names = ", ".join(data["refused"])
        extra.append(f"{names}: not changed alone ({next(iter(data['refused'].values()))})")
    return "\n".join([*parts[:-1], *footer(found.attrs, extra)])


def sobol_data(found: xr.Dataset) -> dict[str, Any]:
    """Sobol indices for JSON."""
    names = ("first", "first_low", "first_high", "total", "total_low", "total_high")
    labels = found.policy.values.tolist()
    keys = []
    for i, key in enumerate(found.key.values.tolist()):
        one = found.isel(key=i)
        low, high = one.range.values.tolist()
        shares = {label: {name: _plain(one[name].values[p]) for name in names} for p, label in enumerate(labels)}
        entry = {"key": key, "unit": str(one.unit.values), "low": low, "high": high, "log": bool(one.log)}
        keys.append({**entry, "policies": shares})
    moments = {
        label: {"mean": _plain(found["mean"].values[p]), "variance": _plain(found["variance"].values[p])}
        for p, label in enumerate(labels)
    }
    attrs = {name: _plain(found.attrs[name]) for name in ("metric", "n", "seed")}
    return {**attrs, "policies": moments, "keys": keys, **provenance(found.attrs)}


def sobol(found: xr.Dataset) -> str:
    """Sobol indices as a table by policy, largest total first."""
    data = sobol_data(found)
    parts = []
    for label in found.policy.values.tolist():
        rows = []
        for key in sorted(data["keys"], key=lambda one: -(one["policies"][label]["total"] or 0.0)):
            one = key["policies"][label]
            ends = f"{key['low']:.6g} to {key['high']:.6g} {'' if key['unit'] == '1' else key['unit']}".rstrip()
            ends += " (log)" if key["log"] else ""
            between = [f"{_text(one[f'{n}_low'], 2)} to {_text(one[f'{n}_high'], 2)}" for n in ("first", "total")]
            rows.append([key["key"], ends, _text(one["first"], 3), between[0], _text(one["total"], 3), between[1]])
        moments = data["policies"][label]
        unit = metric(data["metric"]).unit
        spread = None if moments["variance"] is None else math.sqrt(moments["variance"])
        title = (
            f"{label}: {data['metric']} {_text(moments['mean'])} {unit}, standard deviation {_text(spread, 3)} {unit}"
        )
        header = ("key", "range", "alone [1]", "95 %", "with interactions [1]", "95 %")
        parts += [title, table(header, rows, left=2), ""]
    extra = [f"shares of the variance from {data['n']} base samples, seed {data['seed']}"]
    return "\n".join([*parts[:-1], *footer(found.attrs, extra)])


# ---- break-even ----


def break_even_data(found: xr.Dataset) -> dict[str, Any]:
    """Crossings of two policies for JSON."""
    further = [str(name) for name in found.coords]
    lines = []
    for i in range(found.sizes[further[0]] if further else 1):
        one = found.isel({further[0]: i}) if further else found
        crossings = [
            {
                "value": _plain(one.break_even.values[j]),
                **{name: str(one[name].values[j]) for name in ("kind", "before", "after")},
                **{name: _plain(one[name].values[j]) for name in ("a", "b")},
            }
            for j in range(found.sizes["crossing"])
            if one.kind.values[j]
        ]
        along = {further[0]: _plain(one[further[0]].values)} if further else {}
        lines.append({"along": along, "winner": str(one.winner.values) or None, "crossings": crossings})
    asked = {name: _plain(found.attrs[name]) for name in ("a", "b", "metric", "axis", "axis_units", "low", "high")}
    return {**asked, "metric_unit": found.a.attrs["units"], "lines": lines, **provenance(found.attrs)}


def break_even(found: xr.Dataset) -> str:
    """Crossings of two policies, one line each."""
    data = break_even_data(found)
    further = next(iter(data["lines"][0]["along"]), None)
    unit = data["metric_unit"]
    rows: list[list[str]] = []
    for line in data["lines"]:
        first = [] if further is None else [_text(line["along"][further])]
        if not line["crossings"]:
            rows.append([*first, "-", _all_along(line["winner"]), "", "", "", ""])
        for one in line["crossings"]:
            values = [_text(one["a"]), _text(one["b"])]
            rows.append([*first, f"{one['value']:.10g}", one["before"], one["after"], *values, one["kind"]])
    header = [with_unit(data["axis"], data["axis_units"]), "better below", "better above"]
    header += [f"{name} [{unit}]" for name in ("a", "b")]
    columns = [*([] if further is None else [further]), *header, "crossing"]
    searched = f"{data['axis']} from {data['low']:g} to {data['high']:g}"
    title = f"{data['metric']} of a = {data['a']} and b = {data['b']}, by {searched}"
    if further is None and not data["lines"][0]["crossings"]:
        body = f"no crossing: {_all_along(data['lines'][0]['winner'])}"
    else:
        body = table(columns, rows, left=1)
    return "\n".join([title, "", body, *footer(found.attrs)])


def _all_along(winner: str) -> str:
    """What holds where nothing changes."""
    words = {"tie": "both are equal all along", "unknown": "no plan of one of them"}
    return words.get(winner, f"{winner} all along")


# ---- pareto and best ----


def _points(found: xr.Dataset) -> list[dict[str, Any]]:
    """Points along the dimension ``point``, axes first."""
    names = [*map(str, found.coords), *map(str, found.data_vars)]
    columns = {name: found[name].values.tolist() for name in names if found[name].dims == ("point",)}
    return [{name: _plain(values[i]) for name, values in columns.items()} for i in range(found.sizes["point"])]


def pareto_data(found: xr.Dataset) -> dict[str, Any]:
    """A front for JSON."""
    objectives = json.loads(found.attrs["objectives"])
    units = {str(name): str(one.attrs.get("units", "")) for name, one in found.variables.items() if name != "point"}
    return {"objectives": objectives, "units": units, "points": _points(found), **provenance(found.attrs)}


def pareto(found: xr.Dataset) -> str:
    """A front as a table: axes, then the objectives."""
    data = pareto_data(found)
    axes = [str(name) for name in found.coords]
    names = [*axes, *(name for name in data["objectives"] if name not in axes)]
    shown = data["points"][:_MOST_ROWS]
    header = [with_unit(name, data["units"].get(name, "")) for name in names]
    goals = ", ".join(f"{goal} {name}" for name, goal in data["objectives"].items())
    lines = [f"{len(data['points'])} points, none beaten in all of: {goals}", ""]
    lines.append(table(header, ([_text(point[name]) for name in names] for point in shown)))
    left = len(data["points"]) - len(shown)
    extra = [f"{left} more points; see --json or -o"] if left else []
    return "\n".join([*lines, *footer(found.attrs, extra)])


def best_data(found: xr.Dataset, name: str, where: str | None) -> dict[str, Any]:
    """The best point for JSON."""
    point = {str(one): _plain(found[one].values) for one in (*found.coords, *found.data_vars)}
    units = {str(one): str(value.attrs.get("units", "")) for one, value in found.variables.items()}
    any_value = json.loads(found.attrs.get("any", "[]"))
    asked = {"metric": name, "where": where, "value": point[name], "unit": units[name], "any": any_value}
    return {**asked, "point": point, "units": units, **provenance(found.attrs)}


def best(found: xr.Dataset, name: str, where: str | None) -> str:
    """The best point as a table; where any value of an axis is as good, the other metrics are those of the one here."""
    data = best_data(found, name, where)
    names: Sequence[str] = list(data["point"])
    rows = [
        [
            one,
            f"any (here {_text(data['point'][one])})" if one in data["any"] else _text(data["point"][one]),
            "" if data["units"][one] == "1" else data["units"][one],
        ]
        for one in names
    ]
    condition = f" where {where}" if where else ""
    title = f"best {name}{condition}: {_text(data['value'])} {data['unit']}"
    return "\n".join([title, "", table(("axis or metric", "value", "unit"), rows), *footer(found.attrs)])
