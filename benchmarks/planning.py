"""Plan the context-aware policy for many settings on one trace; print the time of a plan."""

import itertools
import time

import perfmodel
from perfmodel.hardware import load_system
from perfmodel.policies import ContextAware
from perfmodel.run import make_replay, plan_run

GPU_EXPERTS = (1, 2, 3, 4)
MEAN_BITS = (1.0, 1.25, 1.5, 2.0, 2.25, 2.5, 2.75, 3.0, 3.5, 4.0)
ALPHA = (0.0, 0.25, 0.5, 0.75, 1.0)


def plan_ms(passes: int = 5) -> float:
    """Mean time of one of 200 plans on the same replay, in the fastest of several passes [ms].

    Mixtral-8x22B, 2,048 decode tokens of one sequence after a prompt of 128. A plan is everything that comes before
    pricing: importance, placement, bitwidth search, memory check, states of decode and prefill and their counts. What
    all plans share is derived once a pass, and counts.
    """
    model = perfmodel.MoEModel.from_config("mixtral-8x22b")
    trace = perfmodel.RoutingTrace.load("tiny-mixtral-32l-mini").sequences([0])
    # Four experts a layer do not fit the GPU of this system.
    system = load_system("h100-cxl2-ndp").with_values({"gpu.memory_capacity_gb": 160})
    policies = [
        ContextAware(gpu_experts=count, mean_bits=bits, alpha=alpha)
        for count, bits, alpha in itertools.product(GPU_EXPERTS, MEAN_BITS, ALPHA)
    ]
    fastest = float("inf")
    for _ in range(passes):
        replay = make_replay(model, trace, 128, 2048, "cycle")
        start = time.perf_counter()
        for policy in policies:
            run = plan_run(model, system, replay, policy)
            assert run.decode.state_count.sum() == run.plan.picks[..., 0].size
            assert run.prefill is not None
        fastest = min(fastest, time.perf_counter() - start)
    return 1e3 * fastest / len(policies)


if __name__ == "__main__":
    print(f"{plan_ms():.3f} ms a plan")
