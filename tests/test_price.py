"""The kernels that price many points at once, against NumPy and against one point at a time."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.testing import assert_allclose, assert_array_equal
from strategies import NDP_SYSTEM, mixtral, recording, systems

from perfmodel import PerfModelError, Run, load_system, plan_run
from perfmodel.evaluation import METRICS, metric, percentile_of
from perfmodel.hardware import System
from perfmodel.kernels import layer, order
from perfmodel.kernels.block import BLOCK
from perfmodel.kernels.point import NDP_DATAFLOW, NDP_SCALING, POINT_SIZE
from perfmodel.point import Points, hardware_point, hardware_points

ALL = tuple(METRICS)


def small_run(policy: str, system: System = NDP_SYSTEM) -> Run:
    return plan_run(mixtral(), system, recording(), policy, prompt=6, output=9)


RUNS = {
    policy: small_run(policy)
    for policy in (
        "monde",
        "monde:reading=balance",
        "hobbit",
        "context-aware:mean_bits=2",
        "context-aware:mean_bits=3,overlap=sum",
        "static:prefill=balanced",
    )
}


# --- order statistics ---


@st.composite
def samples(draw) -> np.ndarray:
    size = draw(st.integers(1, 60) | st.integers(900, 3000))
    kind = draw(st.sampled_from(("close", "wide", "ties", "constant", "outlier")))
    rng = np.random.default_rng(draw(st.integers(0, 2**31)))
    values = 1e-3 + 1e-4 * rng.random(size)
    if kind == "wide":
        values = 10.0 ** rng.uniform(-12, 12, size)
    elif kind == "ties":
        values = rng.choice([1e-6, 2e-6, 3e-6], size)
    elif kind == "constant":
        values = np.full(size, 4.2e-5)
    elif kind == "outlier":
        values[rng.integers(size)] = 1e6
    return values


def select(values: np.ndarray, asked: list[float]) -> np.ndarray:
    place = (values.shape[1] - 1) * (np.array(asked) / 100.0)
    rank = np.floor(place)
    return order.order_statistics(values, rank.astype(np.int64), place - rank)


@settings(max_examples=150)
@given(samples(), st.lists(st.floats(0, 100) | st.sampled_from((0.0, 50.0, 95.0, 99.0, 100.0)), min_size=1, max_size=4))
def test_percentiles_are_those_of_numpy_to_the_last_bit(values: np.ndarray, asked: list[float]) -> None:
    table = np.stack([values, values[::-1]])
    assert_array_equal(select(table, asked), np.percentile(table, asked, axis=1))


@given(hnp.arrays(np.float64, st.tuples(st.just(1), st.integers(1, 40)), elements=st.sampled_from((1.0, np.inf, 2.0))))
def test_infinite_values_are_ordered_like_others(values: np.ndarray) -> None:
    ordered = np.sort(values[0])
    found = select(values, [0.0, 100.0])[:, 0]
    assert_array_equal(found, ordered[[0, -1]] if len(ordered) > 1 else ordered[[0, 0]])


def test_a_percentile_of_something_undefined_is_undefined() -> None:
    assert np.isnan(select(np.array([[1.0, np.nan, 3.0]]), [50.0])).all()


# --- tokens and their states ---


@given(hnp.arrays(np.int32, st.tuples(st.integers(0, 9), st.integers(1, 12)), elements=st.integers(0, 6)))
def test_states_of_tokens_are_counted(state_id: np.ndarray) -> None:
    offsets, state, count = layer.token_states(state_id, 7)
    for t, layers in enumerate(state_id):
        part = slice(offsets[t], offsets[t + 1])
        assert dict(zip(state[part].tolist(), count[part].tolist(), strict=True)) == {
            int(s): float((layers == s).sum()) for s in set(layers.tolist())
        }


# --- many points ---


@settings(max_examples=40)
@given(
    st.sampled_from(sorted(RUNS)),
    st.lists(systems(), min_size=1, max_size=4),
    st.lists(st.sampled_from((*ALL, "tpot_p99.9_s", "tpot_p0_s")), min_size=1, max_size=5, unique=True),
    st.integers(1, 3),
)
def test_every_metric_is_the_same_however_points_are_grouped(policy, several, names, cut) -> None:
    run = RUNS[policy]
    points = np.stack([hardware_point(system) for system in several])
    together = run.metrics(names, points)
    alone = [run.metrics(names, point[None]) for point in points]
    apart = [run.metrics([name], points)[name] for name in names]
    for name, one in zip(names, apart, strict=True):
        assert_array_equal(together[name], one)
        assert_array_equal(together[name], [values[name][0] for values in alone])
        parts = [run.metrics(names, part)[name] for part in (points[:cut], points[cut:])]
        assert_array_equal(np.concatenate(parts), together[name])


@pytest.mark.parametrize("policy", sorted(RUNS))
@pytest.mark.parametrize("count", [1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 7])
def test_blocks_of_any_length_agree_with_one_point_at_a_time(policy: str, count: int) -> None:
    run = RUNS[policy]
    rng = np.random.default_rng(count)
    values = {
        "link.bandwidth_gb_per_s": rng.uniform(8, 200, count),
        "ndp.arrays": rng.integers(1, 300, count),
        "gpu.memory_efficiency": rng.uniform(0.1, 1, count),
    }
    many = run.metrics(ALL, hardware_points(NDP_SYSTEM, values))
    for n in {0, count // 2, count - 1}:
        evaluation = run.price(NDP_SYSTEM.with_values({key: column[n] for key, column in values.items()}))
        for name in ("tpot_mean_s", "tpot_p50_s", "tpot_p99_s", "tpot_max_s", "ttft_s", "end_to_end_s", "decode_s"):
            assert many[name][n] == getattr(evaluation, name)
        assert many["busy_ndp_s"][n] == evaluation.busy_s["ndp"]
        assert many["link_s"][n] == evaluation.breakdown_s["link"]


@settings(max_examples=40)
@given(st.sampled_from(sorted(RUNS)), systems())
def test_percentiles_and_parts_follow_from_the_times_of_all_tokens(policy: str, system: System) -> None:
    run = RUNS[policy]
    point = hardware_point(system)
    times = run.token_times(point)
    names = ("tpot_mean_s", "tpot_p50_s", "tpot_p99_s", "tpot_p12.5_s", "tpot_max_s", "decode_s", "decode_tok_per_s")
    found = {name: values[0] for name, values in run.metrics(names, point[None]).items()}
    for name in names:
        asked = percentile_of(name)
        if asked is not None:
            assert found[name] == np.percentile(times, asked)
    assert_allclose(found["tpot_mean_s"], times.mean(), rtol=1e-13, atol=0)
    assert_allclose(found["decode_s"], times.sum() / recording().num_sequences, rtol=1e-13, atol=0)
    assert found["decode_tok_per_s"] == 1.0 / found["tpot_mean_s"]


def test_points_that_differ_in_a_word_are_priced_apart() -> None:
    words = [
        {"ndp.dataflow": flow, "ndp.precision_scaling": scaling}
        for flow in ("os", "ws")
        for scaling in ("linear", "none")
    ]
    several = [NDP_SYSTEM.with_values({**one, "ndp.arrays": 1 + i % 3}) for i, one in enumerate(words * 2)]
    points = np.stack([hardware_point(system) for system in several])
    assert {NDP_DATAFLOW, NDP_SCALING} <= set(Points.of(points).places.tolist())
    found = RUNS["context-aware:mean_bits=2"].metrics(("tpot_mean_s", "tpot_p99_s"), points)
    for name, values in found.items():
        assert_array_equal(values, [getattr(RUNS["context-aware:mean_bits=2"].price(one), name) for one in several])
    assert len(set(found["tpot_mean_s"].tolist())) > 2


# --- points of many settings ---


@settings(max_examples=60)
@given(st.data())
def test_points_of_many_settings_equal_the_points_of_each_system(data: st.DataObject) -> None:
    keys = data.draw(st.lists(st.sampled_from(_varied_keys(NDP_SYSTEM)), min_size=1, max_size=4, unique=True))
    count = data.draw(st.integers(1, 5))
    values = {}
    for key in keys:
        limits = NDP_SYSTEM.limits_of(key)
        middle = NDP_SYSTEM.get(key) or 1.0
        low, high = max(limits.low, middle / 2), min(limits.high, middle * 2)
        one = st.integers(int(low), int(high)) if limits.whole else st.floats(low, high)
        values[key] = np.array(data.draw(st.lists(one, min_size=count, max_size=count)), dtype=np.float64)
    points = hardware_points(NDP_SYSTEM, values)
    each = [
        hardware_point(NDP_SYSTEM.with_values({key: column[n] for key, column in values.items()})) for n in range(count)
    ]
    assert_array_equal(points.dense(), np.stack(each))


def _varied_keys(system: System) -> list[str]:
    # Timings of the DRAM must agree with each other, so those that may vary alone are few.
    return [key for key in system.numeric_keys() if not key.startswith("ndp.dram.")] + [
        "ndp.dram.n_rcd",
        "ndp.dram.n_rfc",
    ]


def test_settings_broadcast_against_each_other() -> None:
    grid = hardware_points(
        NDP_SYSTEM,
        {"link.bandwidth_gb_per_s": np.array([[20.0], [40.0]]), "link.efficiency": np.array([0.5, 0.7, 0.9])},
    )
    assert grid.num_points == 6
    last = NDP_SYSTEM.with_values({"link.bandwidth_gb_per_s": 40.0, "link.efficiency": 0.9})
    assert_array_equal(grid.dense()[-1], hardware_point(last))


def test_optional_values_and_tables_vary_too() -> None:
    system = load_system("h100-cxl-ndp").with_values({"ndp.precision_scaling": "none"})
    values = {
        "gpu.layer_overhead_us": np.array([0.0, 3.0, 9.0]),
        "gpu.peak_tflop_per_s.fp16": np.array([300.0, 600.0, 989.0]),
        "ndp.dram_efficiency": np.array([0.3, 0.6, 0.9]),
    }
    each = [hardware_point(system.with_values({key: column[n] for key, column in values.items()})) for n in range(3)]
    assert_array_equal(hardware_points(system, values).dense(), np.stack(each))


def test_no_setting_is_one_point_and_no_point_is_none() -> None:
    assert_array_equal(hardware_points(NDP_SYSTEM, {}).dense(), hardware_point(NDP_SYSTEM)[None])
    empty = RUNS["monde"].metrics(("tpot_mean_s", "tpot_p50_s", "ttft_s", "hit_rate"), np.empty((0, POINT_SIZE)))
    assert all(len(values) == 0 for values in empty.values())


# --- names of metrics ---


@pytest.mark.parametrize(
    ("wrong", "close"),
    [("tpot_mean", "tpot_mean_s"), ("ttft", "ttft_s"), ("tpot_p101_s", "tpot_p"), (3, "allowed"), ("", "allowed")],
)
def test_unknown_metrics_are_refused_with_close_matches(wrong, close: str) -> None:
    with pytest.raises(PerfModelError, match=close):
        metric(wrong)


def test_what_a_trace_cannot_tell_is_not_a_number() -> None:
    point = hardware_point(NDP_SYSTEM)[None]
    run = plan_run(mixtral(), NDP_SYSTEM, recording(), "monde", prompt=5, output=4)
    assert np.isfinite(run.metrics(("ttft_s",), point)["ttft_s"]).all()
    assert run.metrics(("hit_rate",), point)["hit_rate"] == [0.0]
    without = dataclasses.replace(run, plan=dataclasses.replace(run.plan, prefill_class=None, prefill_tokens=None))
    assert np.isnan(without.metrics(("ttft_s",), point)["ttft_s"]).all()
