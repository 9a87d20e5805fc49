"""What makes two sweeps the same, and the command line that computes one."""

import hashlib
import json
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import numba
import numpy as np

from perfmodel import __version__
from perfmodel.policies import Static
from perfmodel.routing import RoutingTrace
from perfmodel.scenario import Scenario
from perfmodel.scenario.axis import FILES
from perfmodel.scenario.inputs import content_hash
from perfmodel.sweeps.axes import number_text
from perfmodel.sweeps.design import Design

#: Libraries whose version may change the last bits.
VERSIONS = {"perfmodel": __version__, "numba": numba.__version__, "numpy": np.__version__}


def request_key(scenario: Scenario, design: Design, metrics: Sequence[str], dtype: str) -> str:
    """SHA-256 of the contents that decide the numbers of a sweep, and of `VERSIONS`."""
    rules = [policy.spec for policy in scenario.policies]
    content = {
        "versions": VERSIONS,
        "inputs": scenario.content(),
        "workload": [scenario.prompt, scenario.output, scenario.layers],
        "policies": rules,
        "profiles": _profiles(scenario, design),
        "metrics": list(metrics),
        "dtype": dtype,
        "dims": [
            [dim.name, {name: _fingerprint(scenario, name, values) for name, values in dim.axes.items()}]
            for dim in design.dims
        ],
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


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
    """Contents of the traces that policies place experts by, by name."""
    names = {policy.profile for policy in scenario.policies if isinstance(policy, Static)}
    names |= set(design.axes["policy.profile"].tolist()) if "policy.profile" in design.axes else set()
    return {name: RoutingTrace.load(name).content_hash() for name in sorted(names - {"others"})}


def command_line(request: Mapping[str, Any]) -> str:
    """The canonical ``perfmodel sweep`` line of a request's plain values (see `Request.to_dict`).

    What exists in memory only is left out of the line, and named after it.
    """
    scenario = request["scenario"]
    words = ["perfmodel", "sweep"]
    lost = []
    for name in ("model", "system", "trace", "loss"):
        if isinstance(scenario[name], Mapping):
            lost.append(name)
        elif scenario[name] is not None:
            words += [f"--{name}", scenario[name]]
    if "policy" not in request["axes"]:
        words += [word for label in scenario["policy"] for word in ("--policy", label)]
    for name in ("prompt", "output", "layers"):
        if scenario[name] is not None:
            words += [f"--{name}", str(scenario[name])]
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
    return (";" if any("," in text for text in texts) else ",").join(texts)
