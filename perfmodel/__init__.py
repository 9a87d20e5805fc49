"""Analytical performance model of Mixture-of-Experts inference with offloaded experts.

The names below are the public interface; they are imported when first used, so that ``import perfmodel`` is cheap.
"""

import typing as _typing

__version__ = "0.1.0"

if _typing.TYPE_CHECKING:
    from perfmodel.answers import Ranking, Tuning, best, break_even, pareto, rank, sobol_indices, solve, tornado, tune
    from perfmodel.bitwidth import BitwidthFront, LossTable, bitwidth_front, optimal_bitwidths, select_bitwidths
    from perfmodel.errors import PerfModelError
    from perfmodel.evaluation import Evaluation
    from perfmodel.hardware import System, load_spec, load_system
    from perfmodel.losses import build_losses
    from perfmodel.memory import MemoryReport, Parallel, distinct_experts, memory_report
    from perfmodel.model import MoEModel
    from perfmodel.policies import POLICIES, Policy, parse_policy
    from perfmodel.record import record_trace
    from perfmodel.routing import FrequencyProfile, RoutingTrace, open_trace
    from perfmodel.routing.statistics import survey
    from perfmodel.run import Run, evaluate, plan_run
    from perfmodel.scenario import Scenario
    from perfmodel.storage import Storage
    from perfmodel.sweeps.api import run_sweep, sweep
    from perfmodel.sweeps.dataset import open_dataset

_HOMES = {
    "BitwidthFront": "bitwidth",
    "Evaluation": "evaluation",
    "FrequencyProfile": "routing",
    "LossTable": "bitwidth",
    "MemoryReport": "memory",
    "MoEModel": "model",
    "POLICIES": "policies",
    "Parallel": "memory",
    "PerfModelError": "errors",
    "Policy": "policies",
    "Ranking": "answers",
    "RoutingTrace": "routing",
    "Run": "run",
    "Scenario": "scenario",
    "Storage": "storage",
    "System": "hardware",
    "Tuning": "answers",
    "best": "answers",
    "bitwidth_front": "bitwidth",
    "break_even": "answers",
    "build_losses": "losses",
    "distinct_experts": "memory",
    "evaluate": "run",
    "load_spec": "hardware",
    "load_system": "hardware",
    "memory_report": "memory",
    "open_dataset": "sweeps.dataset",
    "open_trace": "routing",
    "optimal_bitwidths": "bitwidth",
    "pareto": "answers",
    "parse_policy": "policies",
    "plan_run": "run",
    "rank": "answers",
    "record_trace": "record",
    "run_sweep": "sweeps.api",
    "select_bitwidths": "bitwidth",
    "sobol_indices": "answers",
    "solve": "answers",
    "survey": "routing.statistics",
    "sweep": "sweeps.api",
    "tornado": "answers",
    "tune": "answers",
}

__all__ = [
    "POLICIES",
    "BitwidthFront",
    "Evaluation",
    "FrequencyProfile",
    "LossTable",
    "MemoryReport",
    "MoEModel",
    "Parallel",
    "PerfModelError",
    "Policy",
    "Ranking",
    "RoutingTrace",
    "Run",
    "Scenario",
    "Storage",
    "System",
    "Tuning",
    "best",
    "bitwidth_front",
    "break_even",
    "build_losses",
    "distinct_experts",
    "evaluate",
    "load_spec",
    "load_system",
    "memory_report",
    "open_dataset",
    "open_trace",
    "optimal_bitwidths",
    "pareto",
    "parse_policy",
    "plan_run",
    "rank",
    "record_trace",
    "run_sweep",
    "select_bitwidths",
    "sobol_indices",
    "solve",
    "survey",
    "sweep",
    "tornado",
    "tune",
]


def __getattr__(name: str) -> _typing.Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'perfmodel' has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(f"perfmodel.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
