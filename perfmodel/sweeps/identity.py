"""What makes two sweeps the same, and the command line that computes one."""

import functools
import hashlib
import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numba
import numpy as np

from perfmodel import __version__
from perfmodel.bitwidth import BUNDLED_LOSSES, LossTable
from perfmodel.policies import Static
from perfmodel.routing.profile import load_use
from perfmodel.scenario import Scenario
from perfmodel.scenario.axis import FILES
from perfmodel.scenario.inputs import WORKLOAD, content_hash
from perfmodel.sweeps.axes import number_text
from perfmodel.sweeps.design import Design

#: Libraries whose version may change the last bits.
VERSIONS = {"perfmodel": __version__, "numba": numba.__version__, "numpy": np.__version__}


@functools.cache
def program_hash() -> str:
    """SHA-256 of the source code of this package: numbers of another program may be others."""
    package = Path(__file__).resolve().parent.parent
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(path.relative_to(package).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


@functools.cache
def _default_losses() -> str:
    return content_hash("loss", LossTable.load(BUNDLED_LOSSES))


def rests_on(scenario: Scenario, design: Design) -> dict[str, Any]:
    """Hashes and versions of what decides the numbers of a sweep beside its request, by what a message calls them."""
    axes = {name: design.axes[name].tolist() for name in FILES if name in design.axes}
    return {
        "program": program_hash(),
        **{f"{name} version": version for name, version in VERSIONS.items()},
        **{name: value for name, value in scenario.content().items() if name in FILES},
        **{
            f"{kind} {reference}": content_hash(kind, scenario.file(kind, reference))
            for kind, references in axes.items()
            for reference in dict.fromkeys(references)
        },
        **({"the bundled loss table": _default_losses()} if scenario.losses is None else {}),
        **{f"profile {name}": value for name, value in _profiles(scenario, design).items()},
    }


def request_key(scenario: Scenario, design: Design, metrics: Sequence[str], dtype: str) -> str:
    """SHA-256 of everything that decides the numbers of a sweep: contents rather than names, program and versions."""
    content = {
        "program": program_hash(),
        "versions": VERSIONS,
        "inputs": scenario.content(),
        "losses": _default_losses() if scenario.losses is None else None,
        "profiles": _profiles(scenario, design),
        "workload": [*(getattr(scenario, name) for name in WORKLOAD), scenario.layers],
        "policies": [policy.spec for policy in scenario.policies],
        "metrics": list(metrics),
        "dtype": dtype,
        "dims": [
            [dim.name, {name: _fingerprint(scenario, name, values) for name, values in dim.axes.items()}]
            for dim in design.dims
        ],
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def differences(before: tuple[Any, Any], now: tuple[Any, Any]) -> list[str]:
    """What tells two sweeps apart, in words: their requests (as plain values), else what they rest on."""
    asked, same = (_flat(json.loads(json.dumps(one))) for one in (before[0], now[0]))
    found = [
        f"{name or 'request'}: {_short(asked.get(name))} there, {_short(same.get(name))} here"
        for name in {**asked, **same}
        if asked.get(name) != same.get(name)
    ]
    ground, own = (one if isinstance(one, Mapping) else {} for one in (before[1], now[1]))
    return found or [
        _changed(name, ground.get(name), own.get(name))
        for name in {**ground, **own}
        if ground.get(name) != own.get(name)
    ]


def _changed(name: str, before: Any, now: Any) -> str:
    if name == "program":
        return "the program changed: its source code is not the one that began this sweep"
    return f"{name} {before} there, {now} here" if name.endswith(" version") else f"the contents of {name} changed"


def _flat(value: Any, name: str = "") -> dict[str, Any]:
    """Nested tables as one, by dotted names."""
    if not isinstance(value, dict):
        return {name: value}
    found: dict[str, Any] = {}
    for key, inner in value.items():
        found |= _flat(inner, f"{name}.{key}" if name else str(key))
    return found


def _short(value: Any) -> str:
    text = "nothing" if value is None else json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _fingerprint(scenario: Scenario, name: str, values: Any) -> Any:
    """Values of an axis by what they hold: files by their contents, policies with every option spelled out."""
    kind = scenario.axis(name).kind
    if kind in FILES:
        return [content_hash(kind, scenario.file(kind, reference)) for reference in values.tolist()]
    if kind == "policy":
        return [scenario.policy(label).spec for label in values.tolist()]
    if values.dtype == object:
        return values.tolist()
    return hashlib.sha256(values.dtype.str.encode() + np.ascontiguousarray(values).tobytes()).hexdigest()


def _profiles(scenario: Scenario, design: Design) -> dict[str, str]:
    """Contents of the traces and frequency profiles that policies place experts by, by name."""
    names = {policy.profile for policy in scenario.policies if isinstance(policy, Static)}
    names |= set(design.axes["policy.profile"].tolist()) if "policy.profile" in design.axes else set()
    return {name: load_use(name).content_hash() for name in sorted(names - {"others"})}


def command_line(request: Mapping[str, Any]) -> str:
    """The canonical ``perfmodel sweep`` line of a request's plain values (see `Request.to_dict`).

    What exists in memory only is left out of the line, and named after it.
    """
    scenario = request["scenario"]
    words = ["perfmodel", "sweep"]
    lost = []
    for name in ("model", "system", "engine", "trace", "loss"):
        reference = scenario.get(name)  # a sweep from before there were engines names none
        if isinstance(reference, Mapping):
            lost.append(name)
        elif reference is not None:
            words += [f"--{name}", reference]
    if "policy" not in request["axes"]:
        words += [word for label in scenario["policy"] for word in ("--policy", label)]
    for name, usual in {**dict.fromkeys((*WORKLOAD, "layers")), "batch": 1, "batch_of": "sequences"}.items():
        if scenario[name] not in (None, usual):
            words += [f"--{name.replace('_', '-')}", str(scenario[name])]
    for name, values in request["axes"].items():
        words += ["--axis", f"{name}={_axis_text(values)}"]
    words += [word for group in request["zip"] for word in ("--zip", ",".join(group))]
    if isinstance(request["cases"], Mapping):
        lost.append("cases")
    elif request["cases"] is not None:
        words += ["--cases", request["cases"]]
    if request["sample"] is not None:
        words += ["--sample", ":".join(str(value) for value in request["sample"].values())]
    words += [word for name in request["metrics"] for word in ("--metric", name)]
    if request["dtype"] != "float64":
        words += ["--dtype", request["dtype"]]
    return shlex.join(words) + (f"  # in memory only: {', '.join(lost)}" if lost else "")


def _axis_text(values: Any) -> str:
    if isinstance(values, str):
        return values
    texts = [value if isinstance(value, str) else number_text(value) for value in values]
    if not any("," in text for text in texts):
        return ",".join(texts)
    return ";".join(texts) + (";" if len(texts) == 1 else "")  # what ends in one is a single value
