"""The public interface: the same names whatever was imported first, and one kind of error for bad arguments."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import perfmodel
from perfmodel import PerfModelError, evaluate, plan_run
from perfmodel.evaluation import Evaluation
from perfmodel.hardware import load_system
from perfmodel.kernels.point import POINT_SIZE
from perfmodel.point import hardware_point

NAMES = ("mixtral-8x7b", "h100-cxl2-ndp", "tiny-mixtral-32l-mini", "monde")
SMALL = {"prompt": 8, "output": 2}
#: Where every public name is defined, and what kind of thing it is.
HOMES = {
    "POLICIES": ("perfmodel.policies", dict),
    "Evaluation": ("perfmodel.evaluation", type),
    "BitwidthFront": ("perfmodel.bitwidth", type),
    "LossTable": ("perfmodel.bitwidth", type),
    "Tuning": ("perfmodel.answers", type),
    "bitwidth_front": ("perfmodel.bitwidth", "function"),
    "build_losses": ("perfmodel.losses.build", "function"),
    "optimal_bitwidths": ("perfmodel.bitwidth", "function"),
    "tune": ("perfmodel.answers.control", "function"),
    "Ranking": ("perfmodel.answers", type),
    "rank": ("perfmodel.answers.ranking", "function"),
    "MemoryReport": ("perfmodel.memory.report", type),
    "MoEModel": ("perfmodel.model", type),
    "Parallel": ("perfmodel.memory.parallel", type),
    "Storage": ("perfmodel.storage", type),
    "distinct_experts": ("perfmodel.memory.distinct", "function"),
    "memory_report": ("perfmodel.memory.report", "function"),
    "PerfModelError": ("perfmodel.errors", type),
    "Policy": ("perfmodel.policies.base", type),
    "RoutingTrace": ("perfmodel.routing.trace", type),
    "Run": ("perfmodel.run", type),
    "System": ("perfmodel.hardware.system", type),
    "Scenario": ("perfmodel.scenario.scenario", type),
    "best": ("perfmodel.answers.choice", "function"),
    "break_even": ("perfmodel.answers.crossing", "function"),
    "evaluate": ("perfmodel.run", "function"),
    "load_spec": ("perfmodel.hardware.system", "function"),
    "load_system": ("perfmodel.hardware.system", "function"),
    "open_dataset": ("perfmodel.sweeps.dataset", "function"),
    "pareto": ("perfmodel.answers.dominance", "function"),
    "parse_policy": ("perfmodel.policies", "function"),
    "plan_run": ("perfmodel.run", "function"),
    "run_sweep": ("perfmodel.sweeps.api", "function"),
    "select_bitwidths": ("perfmodel.bitwidth", "function"),
    "sobol_indices": ("perfmodel.answers.variance", "function"),
    "solve": ("perfmodel.answers.inverse", "function"),
    "sweep": ("perfmodel.sweeps.api", "function"),
    "tornado": ("perfmodel.answers.one_at_a_time", "function"),
    "FrequencyProfile": ("perfmodel.routing.profile", type),
    "open_trace": ("perfmodel.routing.blocks", "function"),
    "record_trace": ("perfmodel.record.trace", "function"),
    "survey": ("perfmodel.routing.statistics.reading", "function"),
}

CHECK = """
import importlib, types
import perfmodel
homes = {homes}
assert sorted(perfmodel.__all__) == sorted(homes), perfmodel.__all__
for _ in range(2):  # found through __getattr__ first, then in the module
    for name, (home, kind) in homes.items():
        value = getattr(perfmodel, name)
        assert value is getattr(importlib.import_module(home), name), name
        if kind == 'function':
            assert isinstance(value, types.FunctionType) and value.__name__ == name, (name, value)
        else:
            assert isinstance(value, type if kind == 'type' else dict), (name, value)
        assert name in dir(perfmodel), name
assert callable(perfmodel.evaluate)
assert not {{'Any', 'TYPE_CHECKING'}} & set(dir(perfmodel)), dir(perfmodel)
from perfmodel import *
assert evaluate is perfmodel.evaluate and callable(evaluate)
"""


def run_code(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """A piece of code in a process of its own, with warnings as errors."""
    root = Path(perfmodel.__file__).resolve().parent.parent
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=folder,
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(root)},
        check=False,
    )


@pytest.mark.parametrize(
    "first",
    [
        "import perfmodel",
        "import perfmodel; perfmodel.evaluate",
        "from perfmodel import evaluate; assert callable(evaluate)",
        "import perfmodel.run",
        "import perfmodel.evaluation",
        "import perfmodel.oracle",
        "import perfmodel.sweeps.dataset; import perfmodel.sweeps.api",
        "import perfmodel.answers",
        "import perfmodel; perfmodel.solve",
        "import perfmodel.evidence.reproduce",
        "import perfmodel.cli",
        "import perfmodel.cli; perfmodel.cli.build_parser(); import perfmodel.reports",
    ],
)
def test_names_are_the_same_after_any_import(tmp_path: Path, first: str) -> None:
    homes = {name: (home, getattr(kind, "__name__", kind)) for name, (home, kind) in HOMES.items()}
    done = run_code(f"{first}\n{CHECK.format(homes=homes)}", tmp_path)
    assert done.returncode == 0, done.stderr


def test_importing_the_package_loads_nothing_heavy(tmp_path: Path) -> None:
    heavy = "{'numba', 'numpy', 'scipy', 'pydantic', 'matplotlib', 'xarray', 'pandas', 'zarr', 'dask', 'rich'}"
    done = run_code(f"import sys, perfmodel; print(sorted({heavy} & set(sys.modules)))", tmp_path)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr
    done = run_code(f"import sys, perfmodel; perfmodel.PerfModelError; print({heavy} & set(sys.modules))", tmp_path)
    assert (done.returncode, done.stdout) == (0, "set()\n"), done.stderr


# Arguments of evaluate


def test_names_and_objects_give_the_same() -> None:
    model, system, trace, policy = NAMES
    objects = (
        perfmodel.MoEModel.from_config(model),
        perfmodel.load_system(system),
        perfmodel.RoutingTrace.load(trace),
        perfmodel.parse_policy(policy),
    )
    expected = evaluate(*objects, **SMALL)
    assert isinstance(expected, Evaluation)
    assert evaluate(*NAMES, **SMALL) == expected
    for place in range(4):
        mixed = [*objects[:place], NAMES[place], *objects[place + 1 :]]
        assert evaluate(*mixed, **SMALL) == expected


@pytest.mark.parametrize("place", range(4), ids=["model", "system", "trace", "policy"])
@pytest.mark.parametrize(
    "wrong", [None, 3, 1.5, True, b"x", [], {}, object(), dict, perfmodel, "", "no-such-name"], ids=repr
)
def test_wrong_arguments_are_refused(place: int, wrong: Any) -> None:
    arguments: list[Any] = list(NAMES)
    arguments[place] = wrong
    for call in (evaluate, plan_run):
        with pytest.raises(PerfModelError) as caught:
            call(*arguments, **SMALL)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("key", "wrong"),
    [
        *(("prompt", wrong) for wrong in ("8", 1.5, True, 0, -1, [8])),
        *(("output", wrong) for wrong in ("8", 1.5, True, 0, -1, [8])),
        *(("layers", wrong) for wrong in ("x", 3, ["cycle"])),
        *(("losses", wrong) for wrong in ("tiny-mixtral-32l-losses", 3, np.ones((32, 8, 4)), [])),
    ],
)
@pytest.mark.parametrize("policy", ["monde", "context-aware"])
def test_wrong_options_are_refused(key: str, wrong: Any, policy: str) -> None:
    with pytest.raises(PerfModelError, match=r"prompt|output|layer|losses"):
        evaluate(*NAMES[:3], policy, **{**SMALL, key: wrong})


def test_mean_token_time_needs_points_of_the_right_shape() -> None:
    run = plan_run(*NAMES, **SMALL)
    point = hardware_point(load_system(NAMES[1]))
    np.testing.assert_allclose(run.mean_token_s(point[None, :]), run.price().tpot_mean_s, rtol=1e-12, atol=0)
    ragged, junk = [[1.0], [1.0, 2.0]], {"a": 1}
    wrong: tuple[Any, ...] = (
        point, 1.0, [], [[]], point[None, :-1], point[None, None, :], np.ones((POINT_SIZE, 2)), ragged, "x", None, junk
    )  # fmt: skip
    for points in wrong:
        with pytest.raises(PerfModelError, match="points"):
            run.mean_token_s(points)
