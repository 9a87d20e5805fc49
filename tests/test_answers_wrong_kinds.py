"""Every public function refuses every wrong kind of argument in one line."""

import contextlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoints
import numpy as np
import pytest

import perfmodel
from perfmodel.errors import PerfModelError
from perfmodel.scenario import Scenario
from perfmodel.sweeps.request import Request

JUNK: list[Any] = [
    None, 5, -1.5, math.nan, math.inf, True, "", "x", "\0", "--", "x" * 5000, b"x", ("a",), ["a", 1], [], {}, {"a": 1},
    {1: 2}, {"link.latency_us": 5}, object(), np.float64(2), np.arange(3), np.array("x"), Path("gone"), 10**400, 1e308,
    {"a"}, int, np.float32, ("link.latency_us", 8), ("tpot_ms",),
]  # fmt: skip
SHORT = {"prompt": 8, "output": 8}
NAMES = {"model": "mixtral-8x7b", "system": "h100-cxl2-ndp", "trace": "tiny-mixtral-32l-mini"}
REST = {"losses": None, "layers": None}
AXES = {"link.latency_us": [1, 2]}
RUN = {"resume": False, "overwrite": False, "threads": 1, "memory_gb": 1.0}


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Callable[..., Any], dict[str, Any]]]:
    """Every public function with arguments that it takes."""
    two = Scenario.of(policy=["context-aware", "hobbit"], **SHORT)  # type: ignore[arg-type]
    one = Scenario.of(policy="context-aware", **SHORT)  # type: ignore[arg-type]
    request = Request.of(policy="monde", **SHORT)  # type: ignore[arg-type]
    dataset = perfmodel.sweep(policy="monde", axes=AXES, **SHORT)  # type: ignore[arg-type]
    asked = {"axes": AXES, "zip": (), "cases": None, "sample": None, "metrics": "tpot_mean_s", "dtype": "float64"}
    priced = {**NAMES, "policy": "monde", **SHORT, **REST}
    metric = {"metric": "tpot_mean_s"}
    losses = np.ones((1, 2, 4)) * [4, 3, 2, 1]
    menu = {"bits": (1, 2, 3, 4), "sizes": None, "weights": None, "min_bits": None, "scope": "layer"}
    budget = {"mean_bits": 2, **menu, "budget": "exact", "max_bytes": None}
    made = checkpoints.make(tmp_path_factory.mktemp("model"))
    build = {"bits": (2, 3), "group_size": None, "method": "gptq", "damping": None, "order": None, "folds": None}
    files = {"output": None, "held_out": None, "resume": False, "overwrite": False, "report": None}
    counted = {
        "lags": (1,),
        "windows": (2,),
        "batches": (1,),
        "min_decode": 16,
        "resamples": 2,
        "seed": 0,
        "report": None,
    }
    drawn = {"temperature": 1.0, "top_p": 1.0, "top_k": None, "seed": 0, "ignore_eos": False, "dtype": "float32"}
    recorded = {"max_new_tokens": 1, **drawn, "device": "cpu", "name": None, "keep_text": False, "report": None}
    kept = {"policy": "monde", "context": 10, "batch": 1, "kv_bits": 8, "kv_layout": "capped", "mla_cache": "expanded"}
    limits = {"target_tpot_ms": 20.0, "max_loss": None, "max_noise": None}
    return {
        "best": (perfmodel.best, {"dataset": dataset, **metric, "constraint": None}),
        "pareto": (perfmodel.pareto, {"dataset": dataset, "minimise": ["tpot_mean_s"], "maximise": ()}),
        "solve": (
            perfmodel.solve,
            {"scenario": one, "axis": "ndp.clock_ghz", "target": "tpot_s=5", "policy": 0, "low": 1.0, "high": 2.0},
        ),
        "break_even": (
            perfmodel.break_even,
            {"scenario": two, "axis": ("link.latency_us", 1, 2), "a": 0, "b": 1, **metric, "along": None},
        ),
        "tornado": (perfmodel.tornado, {"scenario": one, "keys": ["link.latency_us"], **metric, "change": 0.1}),
        "sobol_indices": (
            perfmodel.sobol_indices,
            {"scenario": one, "ranges": {"link.latency_us": (1, 2)}, "n": 16, "seed": 0, **metric},
        ),
        "evaluate": (perfmodel.evaluate, priced),
        "plan_run": (perfmodel.plan_run, priced),
        "load_spec": (perfmodel.load_spec, {"reference": "h100-pcie"}),
        "load_system": (perfmodel.load_system, {"reference": "h100-cxl2-ndp"}),
        "open_dataset": (perfmodel.open_dataset, {"path": "gone.nc"}),
        "parse_policy": (perfmodel.parse_policy, {"text": "monde"}),
        "select_bitwidths": (
            perfmodel.select_bitwidths,
            {"importance": np.ones((1, 2)), "losses": losses, **budget},
        ),
        "optimal_bitwidths": (perfmodel.optimal_bitwidths, {"losses": losses, **budget}),
        "bitwidth_front": (perfmodel.bitwidth_front, {"losses": losses, "importance": np.ones((1, 2)), **menu}),
        "build_losses": (
            perfmodel.build_losses,
            {"checkpoint": made.folder, "calibration": checkpoints.rows(), **build, **files},
        ),
        "rank": (
            perfmodel.rank,
            {**NAMES, **SHORT, **REST, "policies": "monde", "memory_budget_gb": 80.0, "by": "ttft_s", "values": None},
        ),
        "tune": (perfmodel.tune, {"scenario": one, **limits, "metric": "mean", "policy": None, "progress": None}),
        "sweep": (perfmodel.sweep, {**priced, **asked, **RUN, "out": None, "progress": None}),
        "run_sweep": (perfmodel.run_sweep, {"request": request, **RUN, "out": None, "progress": None}),
        "Scenario": (Scenario.of, priced),
        "Scenario.axis": (one.axis, {"name": "link.latency_us"}),
        "Scenario.check": (one.check, {"name": "link.latency_us", "values": [1]}),
        "Scenario.run": (one.run, {"policy": 0, "settings": {}}),
        "Scenario.prices": (one.prices, {"policy": 0, "settings": {}, "hardware": {}, "metrics": ["tpot_mean_s"]}),
        "Request": (Request.of, {"policy": "monde", **asked}),
        "MoEModel": (perfmodel.MoEModel.from_config, {"source": NAMES["model"]}),
        "RoutingTrace": (perfmodel.RoutingTrace.load, {"path": NAMES["trace"]}),
        "LossTable": (perfmodel.LossTable.load, {"path_or_name": "tiny-mixtral-32l-losses"}),
        "FrequencyProfile": (perfmodel.FrequencyProfile.load, {"path": "gone.npz"}),
        "open_trace": (perfmodel.open_trace, {"source": NAMES["trace"], "report": None}),
        "survey": (perfmodel.survey, {"source": NAMES["trace"], **counted}),
        "distinct_experts": (perfmodel.distinct_experts, {"experts": 8, "top_k": 2, "tokens": 3, "ranks": 1}),
        "memory_report": (
            perfmodel.memory_report,
            {
                "model": perfmodel.MoEModel.from_config(NAMES["model"]),
                "system": perfmodel.load_system(NAMES["system"]),
                **kept,
            },
        ),
        "Parallel": (perfmodel.Parallel, {"expert": 1, "tensor": 1, "pipeline": 1, "expert_tensor": 1}),
        "record_trace": (perfmodel.record_trace, {"model": made.folder, "prompts": ["a"], **recorded}),
    }


def test_every_public_function_is_among_them(calls: dict[str, Any]) -> None:
    types = {"BitwidthFront", "Evaluation", "MemoryReport", "POLICIES", "PerfModelError", "Policy", "Run", "Storage"}
    types |= {"Ranking", "System", "Tuning"}
    assert set(perfmodel.__all__) - types <= set(calls)


@pytest.mark.parametrize(
    "name",
    [
        "best", "pareto", "solve", "break_even", "tornado", "sobol_indices", "evaluate", "plan_run", "load_spec",
        "load_system", "open_dataset", "parse_policy", "select_bitwidths", "sweep", "run_sweep", "Scenario",
        "Scenario.axis", "Scenario.check", "Scenario.run", "Scenario.prices", "Request", "MoEModel", "RoutingTrace",
        "LossTable", "optimal_bitwidths", "bitwidth_front", "build_losses", "tune",
        "FrequencyProfile", "open_trace", "survey", "record_trace", "memory_report", "Parallel", "distinct_experts",
        "rank",
    ],
)  # fmt: skip
def test_wrong_kinds_are_refused_in_one_line(
    calls: dict[str, Any], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    function, arguments = calls[name]
    with contextlib.suppress(PerfModelError):
        function(**arguments)  # the names of the arguments are right
    refused = 0
    for argument in arguments:
        for value in JUNK:
            try:
                function(**{**arguments, argument: value})
            except PerfModelError as error:
                text = str(error)
                assert text
                assert len(text.splitlines()) == 1, (argument, value)
                assert len(text) < 1500, (argument, value)
                refused += 1
    assert refused >= 10 * len([one for one in arguments if one != "progress"])
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"
