"""Two machines that their owners documented completely, predicted from those machines' own benchmarks alone.

A GH200 that fetches experts of Mixtral-8x7B in BF16 (aojsd/GPU_Offloading), and an RTX 5070 with a Ryzen 9 7950X that
caches experts of Qwen3-30B-A3B Q4_K_M and runs the others on the CPU (everett6/moe-prefetch).
"""

import functools
import itertools
from dataclasses import replace

import numpy as np
import pytest
from numpy.testing import assert_allclose

from perfmodel.evidence.constants import make_problem
from perfmodel.evidence.described import engine_of, model_of, system_of
from perfmodel.evidence.measured import MeasuredRun, counting, load_measured
from perfmodel.evidence.occupancy import LRU_HITS, missed_per_token, uploads_per_token
from perfmodel.evidence.predict import Predicted, predicted, prefill
from perfmodel.hardware import EngineSpec, load_spec
from perfmodel.policies import Executor

FETCHING, CACHING = "gpu-offloading", "llama-cpp-expert-cache"
POLICIES = ("belady", "static", "lfu", "lru")


@functools.cache
def rows(engine: str, quantity: str) -> tuple[Predicted, ...]:
    """The rows of an engine that count."""
    own = [run for run in counting(load_measured(), quantity) if run.engine == engine]  # type: ignore[arg-type]
    return predicted(own, quantity)


@functools.cache
def row(name: str) -> MeasuredRun:
    return next(run for run in load_measured() if run.id == name)


def step_ms(one: Predicted) -> float:
    """A decode step [ms]."""
    return 1e3 * one.tokens / one.rate()


def over_measured(one: Predicted) -> float:
    """Time predicted over time measured [1]."""
    return one.measured / one.rate()


# ---- GH200, experts fetched ----


def test_the_fetching_machine_is_met_closely() -> None:
    found = rows(FETCHING, "decode")
    assert len(found) == 96
    for one in found:
        off = abs(step_ms(one) / float(one.run.step_ms or 0.0) - 1.0)
        assert off < (0.08 if one.run.prefetch == "none" else 0.25), one.run.id
    # In the median all three ways of copying ahead are much closer.
    for how, most in (("none", 0.05), ("oracle", 0.06), ("oracle-1", 0.12)):
        off = np.median([abs(over_measured(one) - 1.0) for one in found if one.run.prefetch == how])
        assert off < most


def test_policies_of_the_fetching_machine_are_ranked_right() -> None:
    def key(one: Predicted) -> tuple[float, str]:
        return float(one.run.gpu_experts or 0.0), str(one.run.prefetch)

    cells = itertools.groupby(sorted(rows(FETCHING, "decode"), key=key), key)
    counted = 0
    for _, several in cells:
        here = list(several)
        assert {one.run.policy for one in here} == set(POLICIES)
        by_measured = [one.run.policy for one in sorted(here, key=lambda one: -one.measured)]
        assert [one.run.policy for one in sorted(here, key=step_ms)] == by_measured
        counted += 1
    assert counted == 24


def test_copying_ahead_of_all_layers_always_helps() -> None:
    # By 16 % in the median, and by 28 % as predicted: copies hide behind a whole layer here, and did so only in part.
    gains: dict[str, list[float]] = {"measured": [], "predicted": []}
    by_key = {(one.run.gpu_experts, one.run.policy, one.run.prefetch): one for one in rows(FETCHING, "decode")}
    for (size, policy, how), one in by_key.items():
        if how == "none":
            ahead = by_key[size, policy, "oracle"]
            gains["measured"].append(ahead.measured / one.measured)
            gains["predicted"].append(ahead.rate() / one.rate())
            assert ahead.rate() > one.rate()
    assert np.median(gains["measured"]) == pytest.approx(1.16, abs=0.01)
    assert 1.16 < np.median(gains["predicted"]) < 1.30


# ---- RTX 5070 and Ryzen 9 7950X, misses on the CPU ----


@pytest.mark.parametrize("slots", sorted(LRU_HITS))
def test_the_caching_machine_follows_the_cost_line_of_its_owner(slots: int) -> None:
    # Fitted by the owner to 20 arms: milliseconds = 6.79 + 0.0386 missed + 0.0256 uploaded experts of a token.
    run = replace(row("N004"), slots_per_layer=slots, gpu_experts=slots / 128)
    model = model_of(run)
    line = 6.79 + 0.0386 * missed_per_token(run, model) + 0.0256 * uploads_per_token(run, model)
    assert step_ms(predicted([run], "decode")[0]) == pytest.approx(line, rel=0.10)


def test_the_caching_machine_is_met_in_its_means_over_prompts() -> None:
    # Left out: single prompts, builds that differ in upload threads, and one that runs the CPU beside the GPU.
    found = [one for one in rows(CACHING, "decode") if "mean over 23 prompts" in str(one.run.note)]
    assert len(found) >= 15
    for one in found:
        assert over_measured(one) == pytest.approx(1.0, abs=0.10), one.run.id
    every = [over_measured(one) for one in rows(CACHING, "decode") if one.run.source == "everett6/moe-prefetch"]
    assert np.median(np.abs(np.array(every) - 1.0)) < 0.05
    assert 0.8 < min(every) < max(every) < 1.25


@pytest.mark.parametrize(("tokens", "executor"), [(9, Executor.CPU), (31, Executor.CPU), (32, Executor.FETCH)])
def test_prompts_switch_from_the_cpu_to_streaming(tokens: int, executor: Executor) -> None:
    run = replace(row("N004-9"), prompt_tokens=tokens)
    layers = prefill(run, model_of(run), engine_of(run)).layers
    away = [part.executor for one in layers if one.number for part in one.experts]
    assert away == [executor]


@pytest.mark.parametrize(("copies", "low", "high"), [("pinned", 0.297, 0.367), ("pageable", 0.58, 0.70)])
def test_a_streamed_pass_of_512_tokens_takes_the_measured_time(copies: str, low: float, high: float) -> None:
    # Measured over long prompts: so many seconds a pass.
    for passes in (1, 2, 5):
        run = replace(row("N004-2695"), prompt_tokens=512 * passes, copies=copies)
        one = predicted([run], "prefill")[0]
        each = one.tokens / one.rate() / passes
        assert each == pytest.approx((low + high) / 2, rel=0.20)
        assert 0.95 * low < each < 1.05 * high


def test_long_prompts_of_the_caching_machine_are_met() -> None:
    ratios = [over_measured(one) for one in rows(CACHING, "prefill") if (one.run.prompt_tokens or 0) >= 512]
    assert len(ratios) >= 10
    assert max(abs(np.log(ratios))) < np.log(1.35)
    assert np.median(np.abs(np.array(ratios) - 1.0)) < 0.20


# ---- nothing is fitted to them ----


@pytest.mark.parametrize("name", [FETCHING, CACHING])
def test_their_constants_are_benchmarks_of_the_machine(name: str) -> None:
    engine = load_spec(name)
    assert isinstance(engine, EngineSpec)
    sources = {key: engine.source_of(key).source for key in engine.numeric_keys()}
    assert "calibrated" not in sources.values()
    costs = ("memory_efficiency", "kernel_us", "step_us", "copy_overhead_us", "round_trip_us")
    assert {sources[key] for key in costs} <= {"measured", "derived"}
    if name == CACHING:
        assert {sources[key] for key in ("cpu_efficiency", "prefill_cpu_below_tokens")} == {"measured"}


@pytest.mark.parametrize("name", [FETCHING, CACHING])
def test_no_fitted_constant_reaches_them(name: str) -> None:
    own = rows(name, "decode")
    # A fit needs a row that depends on its constants.
    other = predicted([row("M001")], "decode")
    problem = make_problem([*own, *other], ("kernel_us", "memory_n_half_kb"))
    low, high = problem.predict(np.log([[1.0, 100.0], [9.0, 9000.0]]))
    assert_allclose(low[: len(own)], high[: len(own)], rtol=0, atol=0)
    assert low[-1] > high[-1]
    assert_allclose(np.exp(low[: len(own)]), [one.rate() for one in own], rtol=1e-12, atol=0)


def test_the_machines_are_the_documented_ones() -> None:
    caching, fetching = system_of(row("N004")), system_of(rows(FETCHING, "decode")[0].run)
    assert (caching.gpu.name, caching.link.name) == ("rtx-5070", "pcie-5.0-x16")
    assert caching.cpu is not None
    assert caching.cpu.name == "ryzen-7950x"
    # What the CPU reads experts at was measured: 61 GB/s.
    read = caching.cpu.dram_bandwidth_gb_per_s * caching.get("engine.cpu_efficiency")
    assert read == pytest.approx(61.0, rel=1e-9)
    assert (fetching.gpu.name, fetching.link.name) == ("gh200", "nvlink-c2c")
