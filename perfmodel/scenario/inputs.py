"""What a sweep or an answer starts from: models, systems, traces, loss tables and policies by name, path or object."""

import hashlib
import json
import os
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from perfmodel.bitwidth import LossTable
from perfmodel.errors import PerfModelError
from perfmodel.hardware import EngineSpec, System, load_system
from perfmodel.hardware.base import shown
from perfmodel.model import MoEModel
from perfmodel.policies import Policy, parse_policy
from perfmodel.routing import RoutingTrace
from perfmodel.routing.replay import BatchOf, checked_batch
from perfmodel.scenario.numbers import plain, whole

#: What is priced where nothing is said: the published systems.
DEFAULT_MODEL, DEFAULT_SYSTEM, DEFAULT_TRACE = "mixtral-8x7b", "h100-cxl2-ndp", "tiny-mixtral-32l-mini"
DEFAULT_POLICIES = ("monde", "hobbit", "context-aware:mean_bits=3", "context-aware:mean_bits=2")

#: What of a scenario says how its trace is replayed and stepped through.
WORKLOAD = ("prompt", "output", "batch", "batch_of", "micro_batch")

_LOADERS: dict[str, Callable[[Any], Any]] = {
    "model": MoEModel.from_config,
    "system": load_system,
    "trace": RoutingTrace.load,
    "loss": LossTable.load,
}
_KINDS = {"model": MoEModel, "system": System, "trace": RoutingTrace, "loss": LossTable}


def default_policies(system: System, varied: Iterable[str] = ()) -> tuple[str, ...]:
    """The published systems that can run on a system, without the options that are ``varied``."""
    fit = [text for text in DEFAULT_POLICIES if system.ndp is not None or not parse_policy(text).needs_ndp]
    return without_options(fit, varied)


def without_options(policies: Iterable[str], varied: Iterable[str]) -> tuple[str, ...]:
    """Texts of policies without the options that are ``varied``, each once."""
    dropped = {name.removeprefix("policy.") for name in varied}
    found = []
    for text in policies:
        name, _, options = text.partition(":")
        kept = ",".join(one for one in options.split(",") if one and one.partition("=")[0] not in dropped)
        found.append(f"{name}:{kept}" if kept else name)
    return tuple(dict.fromkeys(found))


def content_hash(kind: str, value: Any) -> str:
    """SHA-256 of what decides the numbers in a model, system, trace or loss table; names do not count."""
    if kind != "model":
        return str(value.content_hash())
    content = {name: one for name, one in asdict(value).items() if name != "name"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def named_policies(given: object) -> tuple[tuple[Policy, ...], tuple[str, ...]]:
    """Policies, and what each is called: the text it was given as.

    Raises
    ------
    PerfModelError : something else than policies and their texts, none at all, or two that are the same.
    """
    given = given.tolist() if isinstance(given, np.ndarray) else given
    listed: Iterable[Any] = [given] if isinstance(given, Policy | str) or not isinstance(given, Iterable) else given
    found: dict[Policy, str] = {}
    for one in listed:
        if not isinstance(one, Policy | str):
            raise PerfModelError(f"policy: found {shown(plain(one))}, allowed a policy, its text, or several of them")
        rule = parse_policy(one) if isinstance(one, str) else one
        label = one.strip() if isinstance(one, str) else one.spec
        if rule in found:
            raise PerfModelError(f"policy: {label} and {found[rule]} are the same policy; allowed: distinct ones")
        found[rule] = label
    if not found:
        raise PerfModelError("policy: none given; allowed: at least one (see `perfmodel policies`)")
    return tuple(found), tuple(found.values())


def load_input(kind: str, value: Any) -> Any:
    """An input from its name, path or object."""
    if isinstance(value, _KINDS[kind]) or (kind == "loss" and value is None):
        return value
    if not isinstance(value, str | os.PathLike):
        raise PerfModelError(f"{kind}: found {type(value).__name__}, allowed a name, a path, or the object itself")
    return _LOADERS[kind](value if isinstance(value, str) else Path(value))


def under_engine(system: System, engine: EngineSpec | str | os.PathLike[str] | None) -> System:
    """The system under an engine, as in `System.with_engine`; None, which is nothing given, keeps its own."""
    if engine is None:
        return system
    if not isinstance(engine, str | os.PathLike | EngineSpec):
        raise PerfModelError(f"engine: found {type(engine).__name__}, allowed a name, a path, or the object itself")
    return system.with_engine(engine)


def checked_tokens(name: str, given: object) -> int | None:
    """A number of tokens, or None; PerfModelError for anything else."""
    if given is None:
        return None
    tokens = whole(given)
    if tokens is None or tokens < 1:
        raise PerfModelError(f"{name}: found {shown(plain(given))}, allowed a whole number of tokens from 1")
    return tokens


def checked_batch_of(given: object) -> BatchOf:
    """What the tokens of a decode step are; PerfModelError for anything but the two words."""
    return checked_batch(1, given).of


def check_layers(given: object) -> None:
    """Refuse everything but ``cycle`` and None."""
    if given is not None and not (isinstance(given, str) and given == "cycle"):
        raise PerfModelError(f"layers: found {shown(given)}, allowed 'cycle'")
