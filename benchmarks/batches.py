"""Decode steps of 1 to 64 tokens: how long their states take to find, and to price at many hardware points."""

import dataclasses
import time

import numpy as np

import perfmodel
from perfmodel.hardware import load_system
from perfmodel.point import hardware_points
from perfmodel.run import Run, make_replay, plan_run

SIZES = (1, 2, 4, 8, 16, 32, 64)
POINTS = 256


def fastest_ms(work, passes: int = 5) -> float:  # type: ignore[no-untyped-def]
    """The fastest of several calls [ms]."""
    times = []
    for _ in range(passes):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return 1e3 * min(times)


def batched_run(size: int) -> Run:
    """64 sequences of 512 tokens through Mixtral-8x7B, planned in steps of so many tokens."""
    model = perfmodel.MoEModel.from_config("mixtral-8x7b")
    trace = perfmodel.RoutingTrace.load("tiny-mixtral-32l-mini").sequences([s % 6 for s in range(64)])
    # Room for the caches of 64 sequences, so that all sizes are planned alike.
    system = load_system("h100-cxl-ndp").with_values({"gpu.memory_capacity_gb": 160})
    replay = make_replay(model, trace, 128, 512, batch=size)
    return plan_run(model, system, replay, "context-aware:gpu_experts=4")


def main() -> None:
    points = None
    first: tuple[float, float] | None = None
    print("batch  states  states ms  price ms  ratios to batch 1")
    for size in SIZES:
        run = batched_run(size)
        if points is None:
            points = hardware_points(run.system, {"link.bandwidth_gb_per_s": np.linspace(10, 100, POINTS)})
        states = fastest_ms(lambda run=run: dataclasses.replace(run).decode)
        run.metrics(("tpot_mean_s",), points)  # what all points share is derived once
        price = fastest_ms(lambda run=run, points=points: run.metrics(("tpot_mean_s",), points))
        first = first or (states, price)
        ratios = f"{states / first[0]:6.2f} {price / first[1]:6.2f}"
        print(f"{size:5}  {len(run.decode.state_row):6}  {states:9.2f}  {price:8.2f}  {ratios}")


if __name__ == "__main__":
    main()
