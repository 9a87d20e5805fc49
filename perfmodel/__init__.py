"""Analytical performance model of Mixture-of-Experts inference with offloaded experts.

The names below are the public interface; they are imported when first used, so that ``import perfmodel`` is cheap.
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from perfmodel.bitwidth import LossTable, select_bitwidths
    from perfmodel.errors import PerfModelError
    from perfmodel.evaluation import Evaluation
    from perfmodel.hardware import System, load_spec, load_system
    from perfmodel.model import MoEModel
    from perfmodel.policies import POLICIES, Policy, parse_policy
    from perfmodel.routing import RoutingTrace
    from perfmodel.run import Run, evaluate, plan_run

_HOMES = {
    "Evaluation": "evaluation",
    "LossTable": "bitwidth",
    "MoEModel": "model",
    "POLICIES": "policies",
    "PerfModelError": "errors",
    "Policy": "policies",
    "RoutingTrace": "routing",
    "Run": "run",
    "System": "hardware",
    "evaluate": "run",
    "load_spec": "hardware",
    "load_system": "hardware",
    "parse_policy": "policies",
    "plan_run": "run",
    "select_bitwidths": "bitwidth",
}

__all__ = [
    "POLICIES",
    "Evaluation",
    "LossTable",
    "MoEModel",
    "PerfModelError",
    "Policy",
    "RoutingTrace",
    "Run",
    "System",
    "evaluate",
    "load_spec",
    "load_system",
    "parse_policy",
    "plan_run",
    "select_bitwidths",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'perfmodel' has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(f"perfmodel.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
