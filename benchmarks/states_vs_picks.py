"""Price one plan by states, by a compiled loop over picks, and by the plain oracle; print the ratios."""

import time
from collections.abc import Callable

import numba
import numpy as np

import perfmodel
from perfmodel.kernels import replay
from perfmodel.oracle import per_pick
from perfmodel.point import hardware_point


@numba.njit(error_model="numpy")
def loop_over_picks(picks, gpu_s, link_s, ndp_s):  # type: ignore[no-untyped-def]
    """Mean expert part of a token by visiting every pick; the two sides of a layer overlap."""
    total = 0.0
    for t in range(picks.shape[0]):
        for layer in range(picks.shape[1]):
            gpu, ndp = 0.0, 0.0
            for j in range(picks.shape[2]):
                work = picks[t, layer, j]
                gpu += gpu_s[work] + link_s[work]
                ndp += ndp_s[work]
            total += max(gpu, ndp)
    return total / picks.shape[0]


def best_of(times: int, call: Callable[[], object]) -> float:
    """Shortest of several runs [s]."""
    found = []
    for _ in range(times):
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    return min(found)


def main() -> None:
    """Print points a second and ratios."""
    model = perfmodel.MoEModel.from_config("mixtral-8x22b")
    trace = perfmodel.RoutingTrace.load("tiny-mixtral-32l-mini")
    run = perfmodel.plan_run(
        model, "h100-cxl2-ndp", trace, "context-aware:mean_bits=2", prompt=128, output=2048, layers="cycle"
    )
    system = run.system
    many = np.tile(hardware_point(system), (4096, 1))
    many[:, 1] *= np.linspace(0.5, 2.0, len(many))
    run.mean_token_s(many[:2])
    by_states = best_of(5, lambda: run.mean_token_s(many)) / len(many)

    states = run.decode
    one = run.decode._replace(
        row_offsets=np.arange(len(states.work) + 1),
        row_work=np.arange(len(states.work)),
        row_count=np.ones(len(states.work)),
        state_row=np.arange(len(states.work)),
        state_before=np.full(len(states.work), -1),
    )
    cost = replay.state_times(many[0], *run._expert_shape(one), 0.0, False)
    columns = [np.ascontiguousarray(cost[:, c]) for c in (replay.BUSY_GPU, replay.BUSY_LINK, replay.BUSY_NDP)]
    loop_over_picks(run.plan.picks[:1], *columns)
    by_picks = best_of(5, lambda: loop_over_picks(run.plan.picks, *columns))

    short = perfmodel.plan_run(
        model, system, trace.sequences([0]), "context-aware:mean_bits=2", prompt=16, output=16, layers="cycle"
    )
    per_pick(short)
    share = short.plan.picks.size / run.plan.picks.size
    by_oracle = best_of(2, lambda: per_pick(short)) / share

    picks = run.plan.picks.size
    print(f"{picks:,} picks, {len(states.state_row)} states, one core")
    print(f"states:               {1 / by_states:12,.0f} points/s")
    print(f"compiled loop, picks: {1 / by_picks:12,.0f} points/s   states are {by_picks / by_states:8,.0f} x faster")
    print(f"plain oracle:         {1 / by_oracle:12,.3f} points/s   states are {by_oracle / by_states:8,.0f} x faster")


if __name__ == "__main__":
    main()
