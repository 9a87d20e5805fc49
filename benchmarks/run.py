"""All rates of this project beside the naive baselines, in one run on one core: ``python benchmarks/run.py [--json]``.

A point is the mean time per output token of the context-aware system *and* of MoNDE on Mixtral-8x22B, over 2,048
decode steps with growing context, for one setting of five hardware values that all vary. Every rate is that of the
fastest of several passes, because machines are shared; ratios carry over from one machine to another, rates do not.
"""

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))

from baselines import Baseline
from planning import plan_ms

import perfmodel
from perfmodel.point import Points, hardware_points

MODEL, SYSTEM, TRACE = "mixtral-8x22b", "h100-cxl2-ndp", "tiny-mixtral-32l-mini"
POLICIES = ("context-aware:mean_bits=2", "monde")
PROMPT, OUTPUT = 128, 2048
#: The five values that vary, from low to high.
RANGES = {
    "gpu.memory_bandwidth_gb_per_s": (1000.0, 5000.0),
    "link.bandwidth_gb_per_s": (16.0, 128.0),
    "link.latency_us": (0.1, 2.0),
    "ndp.dram_bandwidth_gb_per_s": (128.0, 1024.0),
    "ndp.arrays": (16.0, 256.0),
}
#: As many points as a sweep prices at once; fewer where each takes longer.
MEAN_POINTS, PERCENTILE_POINTS, ORACLE_POINTS, NUMPY_POINTS = 1 << 16, 1 << 11, 20, 2


def fastest(call: Callable[[], Any], passes: int = 15) -> float:
    """Shortest of several passes [s], after one that does not count."""
    call()
    found = []
    for _ in range(passes):
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    return min(found)


def settings(count: int, system: perfmodel.System) -> Points:
    """``count`` points at which all five values vary at random, from a fixed seed."""
    rng = np.random.default_rng(1)
    values = {key: rng.uniform(low, high, count) for key, (low, high) in RANGES.items()}
    values["ndp.arrays"] = np.rint(values["ndp.arrays"])
    return hardware_points(system, values)


def sweep_rate(trace: perfmodel.RoutingTrace) -> tuple[float, int]:
    """Points a second through ``perfmodel.sweep`` into a Dataset, and how many there were."""
    sizes = (10, 10, 10, 20, 50)
    axes = {key: np.linspace(low, high, n) for (key, (low, high)), n in zip(RANGES.items(), sizes, strict=True)}
    axes["ndp.arrays"] = np.arange(16, 16 + 4 * sizes[-1], 4)

    def call() -> Any:
        return perfmodel.sweep(
            model=MODEL, system=SYSTEM, trace=trace, policy=POLICIES, axes=axes, prompt=PROMPT, output=OUTPUT,
            layers="cycle", threads=1, progress=False,
        )  # fmt: skip

    count = int(np.prod(sizes))
    return count / fastest(call, 5), count


def measure() -> dict[str, Any]:
    """Everything this script prints."""
    model, system = perfmodel.MoEModel.from_config(MODEL), perfmodel.load_system(SYSTEM)
    trace = perfmodel.RoutingTrace.load(TRACE).sequences([0])
    runs = [
        perfmodel.plan_run(model, system, trace, policy, prompt=PROMPT, output=OUTPUT, layers="cycle")
        for policy in POLICIES
    ]
    many, fewer = settings(MEAN_POINTS, system), settings(PERCENTILE_POINTS, system)
    mean_s = fastest(lambda: [run.metrics(["tpot_mean_s"], many) for run in runs]) / MEAN_POINTS
    both = ["tpot_p50_s", "tpot_p99_s"]
    percentile_s = fastest(lambda: [run.metrics(both, fewer) for run in runs]) / PERCENTILE_POINTS

    points = settings(ORACLE_POINTS, system).dense()
    baselines = [Baseline(run) for run in runs]
    oracle_s = fastest(lambda: [one.by_picks(point) for one in baselines for point in points], 5) / ORACLE_POINTS
    numpy_s = fastest(lambda: [one.by_tokens(point) for one in baselines for point in points[:NUMPY_POINTS]], 1)
    numpy_s /= NUMPY_POINTS

    by_states = np.array([run.metrics(["tpot_mean_s"], points)["tpot_mean_s"] for run in runs])
    by_picks = np.array([[one.by_picks(point) for point in points] for one in baselines])
    by_tokens = np.array([[one.by_tokens(point) for point in points[:NUMPY_POINTS]] for one in baselines])
    times = np.array([[run.token_times(point) for point in points] for run in runs])
    percentiles = np.array([list(run.metrics(both, points).values()) for run in runs])
    sweep_points_per_s, sweep_points = sweep_rate(trace)
    return {
        "mean_points_per_s": 1 / mean_s,
        "sweep_points_per_s": sweep_points_per_s,
        "percentile_points_per_s": 1 / percentile_s,
        "oracle_points_per_s": 1 / oracle_s,
        "numpy_points_per_s": 1 / numpy_s,
        "plan_ms": plan_ms(),
        "mean_to_oracle_ratio": oracle_s / mean_s,
        "mean_to_numpy_ratio": numpy_s / mean_s,
        "largest_difference_to_oracle": float(np.abs(by_states / by_picks - 1).max()),
        "largest_difference_to_numpy": float(np.abs(by_states[:, :NUMPY_POINTS] / by_tokens - 1).max()),
        "percentiles_equal_numpy": bool((np.percentile(times, (50, 99), axis=2).swapaxes(0, 1) == percentiles).all()),
        "scenario": {
            "model": MODEL,
            "system": SYSTEM,
            "trace": f"{TRACE}, first sequence",
            "policies": list(POLICIES),
            "decode_steps": OUTPUT,
            "picks": [int(run.plan.picks.size) for run in runs],
            "states": [len(run.decode.state_row) for run in runs],
            "varied": list(RANGES),
            "sweep_points": sweep_points,
        },
        "machine": {
            "processor": processor(),
            "cores": os.cpu_count(),
            "system": platform.platform(),
            "python": platform.python_version(),
            "numpy": np.__version__,
            "numba": numba.__version__,
            "perfmodel": perfmodel.__version__,
        },
    }


def processor() -> str:
    """Name of the processor, as far as the system tells it."""
    names = Path("/proc/cpuinfo")
    if names.exists():
        for line in names.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def report(found: dict[str, Any]) -> str:
    """The rates as a table."""
    machine, scenario = found["machine"], found["scenario"]
    rows = [
        ("means, compiled inner loop", "mean_points_per_s"),
        ("means, perfmodel.sweep() into a Dataset", "sweep_points_per_s"),
        ("exact P50 and P99", "percentile_points_per_s"),
        ("baseline: compiled loop over picks", "oracle_points_per_s"),
        ("baseline: NumPy loop over tokens", "numpy_points_per_s"),
    ]
    base = found["oracle_points_per_s"]
    lines = [
        f"{machine['processor']}, one core; Python {machine['python']}, NumPy {machine['numpy']},"
        f" Numba {machine['numba']}",
        f"a point: {' and '.join(scenario['policies'])} on {scenario['model']}, {scenario['decode_steps']:,} decode"
        f" steps, {len(scenario['varied'])} hardware values varied",
        "",
        *(
            f"{name:42} {found[key]:15,.1f} points/s {found[key] / base:12,.4g} x the loop over picks"
            for name, key in rows
        ),
        "",
        f"{'one plan, selection included':42} {found['plan_ms']:15.3f} ms",
        f"largest relative difference: {found['largest_difference_to_oracle']:.1e} to the loop over picks,"
        f" {found['largest_difference_to_numpy']:.1e} to the loop over tokens;"
        f" percentiles equal numpy.percentile: {'yes' if found['percentiles_equal_numpy'] else 'NO'}",
    ]
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Rates of the model beside naive baselines, on one core.")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args()
    found = measure()
    print(json.dumps(found, indent=2) if options.json else report(found))


if __name__ == "__main__":
    main()
