"""Scheduling of tasks and of experts against plain loops, and against all ways to share a layer."""

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal
from numpy.typing import NDArray
from timelines import Timeline

from perfmodel.kernels import schedule
from perfmodel.kernels.schedule import CPU, FETCH, GPU, NDP, SKIP, fiddler_split, hybrid_split, pimoe_split
from perfmodel.policies.base import Executor

SECONDS = st.sampled_from([0.0, 1e-6, 3e-5, 2e-3]) | st.floats(1e-7, 1e-2)


# ---- list scheduling ----


@st.composite
def timelines(draw: st.DrawFn) -> Timeline:
    """Up to 20 tasks on up to 4 resources."""
    line = Timeline()
    names = ["gpu", "link", "ndp", "cpu"][: draw(st.integers(1, 4))]
    for number in range(draw(st.integers(0, 20))):
        after = draw(st.lists(st.integers(0, number - 1), max_size=3)) if number else []
        line.task(draw(st.sampled_from(names)), draw(SECONDS), after)
    return line


def plain_schedule(line: Timeline) -> tuple[list[float], list[float]]:
    """The same rule on dictionaries."""
    free: dict[str, float] = {}
    start: list[float] = []
    finish: list[float] = []
    for resource, duration, after in zip(line.resources, line.durations, line.after, strict=True):
        start.append(max([free.get(resource, 0.0)] + [finish[other] for other in after]))
        finish.append(start[-1] + duration)
        free[resource] = finish[-1]
    return start, finish


def critical_path(line: Timeline) -> float:
    """Longest chain of dependences, whatever the resources."""
    longest: list[float] = []
    for duration, after in zip(line.durations, line.after, strict=True):
        longest.append(duration + max((longest[other] for other in after), default=0.0))
    return max(longest, default=0.0)


@given(timelines())
def test_tasks_start_as_a_plain_loop_says(line: Timeline) -> None:
    for found, expected in zip(line.schedule(), plain_schedule(line), strict=True):
        assert_array_equal(found, expected)


@given(timelines())
def test_a_schedule_keeps_its_promises(line: Timeline) -> None:
    start, finish = line.schedule()
    assert_array_equal(finish, start + np.array(line.durations))
    for number, after in enumerate(line.after):
        assert all(start[number] >= finish[other] for other in after)
    for name in set(line.resources):
        mine = [number for number, other in enumerate(line.resources) if other == name]
        assert all(finish[one] <= start[two] for one, two in itertools.pairwise(mine))
        assert line.makespan >= sum(line.durations[number] for number in mine) * (1 - 1e-12)
    assert line.makespan >= critical_path(line)
    assert line.makespan <= sum(line.durations) * (1 + 1e-12)


def test_copies_ahead_hide_behind_the_layer_before() -> None:
    """Two experts a layer: one resident, one copied while the layer before computes, and one on demand."""
    line = Timeline()
    computed = line.task("gpu", 2.0)
    ahead = line.task("link", 3.0)
    line.task("gpu", 1.0, after=[computed])
    demanded = line.task("link", 3.0, after=[computed])
    line.task("gpu", 1.0, after=[ahead])
    line.task("gpu", 1.0, after=[demanded])
    start, finish = line.schedule()
    assert start.tolist() == [0.0, 0.0, 2.0, 3.0, 3.0, 6.0]
    assert line.makespan == finish[-1] == 7.0


def test_executors_are_numbered_as_in_plans() -> None:
    for name in ("GPU", "FETCH", "NDP", "SKIP", "CPU"):
        assert getattr(schedule, name) == Executor[name]


# ---- the experts of a layer ----


@st.composite
def layers(draw: st.DrawFn, most_experts: int = 9) -> dict[str, Any]:
    """Tokens, residents and costs of a few layers; times rise with the tokens."""
    experts, most = draw(st.integers(1, most_experts)), draw(st.integers(1, 6))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shape = (draw(st.integers(1, 4)), experts)
    base, slope = rng.choice([0.0, 1e-5, 1e-4, 1e-3], (2, 3)) * rng.choice([1.0, rng.random()], (2, 3))
    number = np.arange(most + 1)
    gpu_s, cpu_s, ndp_s = (base[i] + number * slope[i] for i in range(3))
    return {
        "tokens": rng.integers(0, most + 1, shape).astype(np.int32),
        "resident": rng.random(shape) < draw(st.sampled_from([0.0, 0.3, 1.0])),
        "gpu_s": gpu_s,
        "cpu_s": cpu_s,
        "ndp_s": ndp_s,
        "copy_s": draw(SECONDS),
    }


def split(kernel: Any, layer: dict[str, Any], other: str = "cpu_s", *more: Any) -> tuple[NDArray[Any], NDArray[Any]]:
    """Call one of the three kernels."""
    return kernel(layer["tokens"], layer["resident"], layer["gpu_s"], layer[other], layer["copy_s"], *more)


def one_by_one(layer: dict[str, Any]) -> Any:
    """Tokens of the residents and, as a dictionary, of the missing experts, layer by layer; those with tokens only."""
    for tokens, resident in zip(layer["tokens"].tolist(), layer["resident"], strict=True):
        held = {e: n for e, n in enumerate(tokens) if n and resident[e]}
        yield held, {e: n for e, n in enumerate(tokens) if n and not resident[e]}


def layer_timeline(layer: dict[str, Any], held: dict[int, int], missing: dict[int, int], ran: Any) -> float:
    """Makespan of a layer by the list scheduler: residents first, copies from the most tokens down."""
    line = Timeline()
    for tokens in held.values():
        line.task("gpu", layer["gpu_s"][tokens])
    for expert in sorted(missing, key=lambda e: (missing[e], e), reverse=True):
        if ran[expert] == FETCH:
            copied = line.task("link", layer["copy_s"])
            line.task("gpu", layer["gpu_s"][missing[expert]], after=[copied])
        else:
            line.task("other", layer["cpu_s"][missing[expert]])
    return line.makespan


def plain_hybrid(layer: dict[str, Any], held: dict[int, int], missing: dict[int, int]) -> tuple[dict[int, int], float]:
    gpu, cpu, link, ran = sum(layer["gpu_s"][n] for n in held.values()), 0.0, 0.0, {}
    waiting = sorted(missing, key=lambda e: (missing[e], e))
    while waiting:
        small, large = waiting[0], waiting[-1]
        after_cpu = cpu + layer["cpu_s"][missing[small]]
        after_gpu = max(gpu, link + layer["copy_s"]) + layer["gpu_s"][missing[large]]
        if after_cpu <= after_gpu:
            ran[waiting.pop(0)], cpu = CPU, after_cpu
        else:
            ran[waiting.pop()], gpu, link = FETCH, after_gpu, link + layer["copy_s"]
    return ran, max(gpu, cpu)


def check_residents(executor: NDArray[Any], layer: dict[str, Any]) -> None:
    """Every expert with tokens runs exactly once: residents on the GPU, and nothing without tokens."""
    assert_array_equal(executor == SKIP, layer["tokens"] == 0)
    assert_array_equal(executor == GPU, (layer["tokens"] > 0) & layer["resident"])


@given(layers())
def test_the_hybrid_greedy_equals_a_plain_one(layer: dict[str, Any]) -> None:
    executor, makespan = split(hybrid_split, layer)
    check_residents(executor, layer)
    for n, (held, missing) in enumerate(one_by_one(layer)):
        ran, expected = plain_hybrid(layer, held, missing)
        assert {e: executor[n, e] for e in missing} == ran
        assert_allclose(makespan[n], expected, rtol=1e-12)
        assert_allclose(makespan[n], layer_timeline(layer, held, missing, ran), rtol=1e-12)


def best_makespan(layer: dict[str, Any], held: dict[int, int], missing: dict[int, int]) -> float:
    """The shortest over all ways to share the missing experts.

    For a given set of copies, residents first and then the copied ones from the most tokens down is the best order:
    Johnson's rule for two machines in a row, with equal times on the first.
    """
    return min(
        layer_timeline(layer, held, missing, dict(zip(missing, choice, strict=True)))
        for choice in itertools.product((CPU, FETCH), repeat=len(missing))
    )


@given(layers(most_experts=5))
def test_the_hybrid_greedy_is_never_better_than_the_best(layer: dict[str, Any]) -> None:
    _, makespan = split(hybrid_split, layer)
    for n, (held, missing) in enumerate(one_by_one(layer)):
        assert makespan[n] >= best_makespan(layer, held, missing) * (1 - 1e-12)


def excess_of_the_greedy(layer: dict[str, Any]) -> float:
    """Share by which the greedy takes longer than the best."""
    ((held, missing),) = one_by_one(layer)
    return float(split(hybrid_split, layer)[1][0] / best_makespan(layer, held, missing) - 1)


def some_layer(rng: np.random.Generator, **costs: Any) -> dict[str, Any]:
    """Two to six experts with 1 to 64 tokens each, a quarter of them resident."""
    experts = rng.integers(2, 7)
    tokens = np.rint(64 ** rng.random((1, experts))).astype(np.int32)
    return {"tokens": tokens, "resident": rng.random((1, experts)) < 0.25, **costs}


def test_the_hybrid_greedy_is_near_the_best_where_costs_are_alike() -> None:
    """A copy takes a third to three times as long as the CPU for a typical expert."""
    rng = np.random.default_rng(7)
    gpu_s, cpu_s = 1e-5 + 1e-7 * np.arange(65), 1e-4 + 1e-5 * np.arange(65)
    excess = [
        excess_of_the_greedy(some_layer(rng, gpu_s=gpu_s, cpu_s=cpu_s, copy_s=3e-4 * 3 ** rng.uniform(-1, 1)))
        for _ in range(80)
    ]
    assert 0 < np.mean(excess) < 0.01
    assert max(excess) < 0.1


def test_the_hybrid_greedy_can_be_far_from_the_best_where_costs_are_anything() -> None:
    """Every cost drawn over three or four powers of ten: nearly always the best, and now and then twice as long."""
    rng = np.random.default_rng(1)
    excess = []
    for _ in range(300):
        (gpu_s, cpu_s) = (10 ** rng.uniform(-6, -3) + 10 ** rng.uniform(-8, -4) * np.arange(65) for _ in range(2))
        excess.append(excess_of_the_greedy(some_layer(rng, gpu_s=gpu_s, cpu_s=cpu_s, copy_s=10 ** rng.uniform(-6, -2))))
    assert np.mean(np.array(excess) < 1e-9) > 0.7
    assert 0.005 < np.mean(excess) < 0.06
    assert 0.3 < max(excess) < 3.0


def test_the_hybrid_greedy_by_hand() -> None:
    """Resident 3 keeps the GPU busy until 1; CPU 1 a token; copies of 2: the CPU takes two, the link one."""
    tokens = np.array([[1, 2, 4, 5, 0]], np.int32)
    resident = np.array([[False, False, False, True, True]])
    gpu_s, cpu_s = np.ones(6), np.arange(6.0)
    executor, makespan = hybrid_split(tokens, resident, gpu_s, cpu_s, 2.0)
    # The CPU would finish expert 0 at 1, before the copy at 3; then expert 1 at 3, as early as the copy; then the copy.
    assert executor.tolist() == [[CPU, CPU, FETCH, GPU, SKIP]]
    assert makespan.tolist() == [3.0]


@given(layers(most_experts=6))
def test_the_fiddler_split_minimises_the_sum(layer: dict[str, Any]) -> None:
    executor, total = split(fiddler_split, layer)
    check_residents(executor, layer)
    for n, (_, missing) in enumerate(one_by_one(layer)):
        costs = {e: (layer["cpu_s"][s], layer["copy_s"] + layer["gpu_s"][s]) for e, s in missing.items()}
        every = [sum(choice) for choice in itertools.product(*costs.values())]
        assert_allclose(total[n], min(every), rtol=1e-12)
        assert {e: executor[n, e] for e in missing} == {e: CPU if c <= g else FETCH for e, (c, g) in costs.items()}


def test_fiddler_copies_from_eleven_tokens_on() -> None:
    """Its published constants, 7 a token on the CPU against 70 for any copy, and the tie stays on the CPU."""
    tokens = np.array([[9, 10, 11, 40, 0]], np.int32)
    executor, total = fiddler_split(tokens, np.zeros((1, 5), bool), np.zeros(41), 7.0 * np.arange(41), 70.0)
    assert executor.tolist() == [[CPU, CPU, FETCH, FETCH, SKIP]]
    assert total.tolist() == [63.0 + 70 + 70 + 70]


def plain_pimoe(
    layer: dict[str, Any], held: dict[int, int], missing: dict[int, int], channels: int, guarded: bool
) -> tuple[dict[int, int], float]:
    lists: list[list[int]] = [[e for e in missing if e % channels == c] for c in range(channels)]
    gpu, link, ran = sum(layer["gpu_s"][n] for n in held.values()), 0.0, dict.fromkeys(missing, NDP)
    while True:
        busy = [sum(layer["ndp_s"][missing[e]] for e in some) for some in lists]
        most = max(range(channels), key=busy.__getitem__)
        if busy[most] <= gpu:
            break
        moved = max(lists[most], key=lambda e: missing[e])
        after = max(gpu, link + layer["copy_s"]) + layer["gpu_s"][missing[moved]]
        if guarded and after > busy[most]:
            break
        lists[most].remove(moved)
        ran[moved], gpu, link = FETCH, after, link + layer["copy_s"]
    return ran, max([gpu, *busy])


@given(layers(), st.integers(1, 4), st.booleans())
def test_the_pimoe_loop_equals_a_plain_one(layer: dict[str, Any], channels: int, guarded: bool) -> None:
    # Whole microseconds, so that sums do not depend on their order.
    for key in ("gpu_s", "ndp_s", "copy_s"):
        layer[key] = np.rint(layer[key] * 1e6)
    executor, makespan = split(pimoe_split, layer, "ndp_s", channels, guarded)
    check_residents(executor, layer)
    for n, (held, missing) in enumerate(one_by_one(layer)):
        ran, expected = plain_pimoe(layer, held, missing, channels, guarded)
        assert {e: executor[n, e] for e in missing} == ran
        assert makespan[n] == expected


@given(layers(), st.integers(1, 4))
def test_a_guarded_move_never_costs_time(layer: dict[str, Any], channels: int) -> None:
    _, makespan = split(pimoe_split, layer, "ndp_s", channels, True)
    for n, (held, missing) in enumerate(one_by_one(layer)):
        busy = [0.0] * channels
        for e, s in missing.items():
            busy[e % channels] += layer["ndp_s"][s]
        unmoved = max(sum(layer["gpu_s"][s] for s in held.values()), *busy)
        assert makespan[n] <= unmoved * (1 + 1e-12)


@pytest.mark.parametrize(("guarded", "moved", "time"), [(False, 1, 9.0), (True, 0, 5.0)])
def test_the_published_pimoe_loop_moves_even_where_copies_are_slow(guarded: bool, moved: int, time: float) -> None:
    """Two cold experts on one channel, 5 together; a copy takes 8 and the GPU 1."""
    tokens = np.array([[2, 3]], np.int32)
    costs = (np.ones(4), np.arange(4.0))
    executor, makespan = pimoe_split(tokens, np.zeros((1, 2), bool), *costs, 8.0, 1, guarded)
    assert np.count_nonzero(executor == FETCH) == moved
    assert makespan.tolist() == [time]
