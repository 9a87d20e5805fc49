"""Compiled kernels against plain Python, against SCALE-Sim, and against common sense."""

import csv
import doctest
import importlib
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from perfmodel import reference
from perfmodel.kernels import link, roofline, systolic

SIMULATORS = Path(__file__).parent.parent / "perfmodel" / "evidence" / "simulators"

amounts = st.one_of(st.just(0.0), st.floats(1.0, 1e15))
rates = st.floats(1e6, 1e16)
times = st.floats(0.0, 1e-2)
half_sizes = st.floats(0.0, 1e7)
windows = st.one_of(st.just(math.inf), st.integers(1, 400).map(float))
faster = st.floats(1.0, 100.0)
dataflows = st.sampled_from([systolic.OS, systolic.WS, systolic.IS])
small = st.integers(0, 40)
sides = st.integers(1, 12)


@pytest.mark.parametrize("name", ["roofline", "link", "cpu", "systolic", "dram", "selector", "knapsack"])
def test_examples_in_docstrings(name: str) -> None:
    result = doctest.testmod(importlib.import_module(f"perfmodel.kernels.{name}"))
    assert result.attempted > 0
    assert result.failed == 0


# --- roofline and link ---


@given(amounts, amounts, rates, rates, half_sizes, times)
def test_roofline_equals_reference(flops, moved, flops_per_s, bytes_per_s, n_half, overhead) -> None:
    args = (flops, moved, flops_per_s, bytes_per_s, n_half, overhead)
    assert_allclose(roofline.roofline_time(*args), reference.roofline_time(*args), rtol=5e-15, atol=0)


@given(amounts, amounts, rates, rates, half_sizes, times, faster)
def test_roofline_is_never_slower_with_more(flops, moved, flops_per_s, bytes_per_s, n_half, overhead, x) -> None:
    before = roofline.roofline_time(flops, moved, flops_per_s, bytes_per_s, n_half, overhead)
    assert roofline.roofline_time(flops, moved, flops_per_s * x, bytes_per_s, n_half, overhead) <= before
    assert roofline.roofline_time(flops, moved, flops_per_s, bytes_per_s * x, n_half, overhead) <= before
    assert roofline.roofline_time(flops / x, moved / x, flops_per_s, bytes_per_s, n_half, overhead) <= before


@pytest.mark.parametrize("n_half", [1.0, 4096.0, 3e6])
def test_half_of_the_rate_at_the_half_size(n_half: float) -> None:
    seconds = roofline.roofline_time(0.0, n_half, 1e15, 1e12, n_half, 0.0)
    assert_allclose(n_half / seconds, 0.5e12, rtol=1e-15, atol=0)


def test_roofline_without_work_is_overhead_and_without_limits_is_free() -> None:
    assert roofline.roofline_time(0.0, 0.0, 1e15, 1e12, 1e6, 3e-6) == 3e-6
    assert roofline.roofline_time(1e12, 1e9, math.inf, math.inf, 0.0, 0.0) == 0.0


@pytest.mark.parametrize("position", range(6))
def test_roofline_hands_nan_on(position: int) -> None:
    for args in ([1e12, 1.0, 1e12, 1e12, 0.0, 0.0], [1.0, 1e12, 1e12, 1e12, 1.0, 0.0]):
        args[position] = math.nan
        with np.errstate(invalid="ignore"):
            assert math.isnan(roofline.roofline_time(*args))


@given(st.tuples(st.integers(0, 500), windows, amounts, amounts, amounts, amounts, rates, rates, half_sizes, times))
def test_decode_attention_equals_reference(args) -> None:
    expected = reference.decode_attention_time(*args)
    assert_allclose(roofline.decode_attention_time(*args), expected, rtol=5e-15, atol=0)


@given(st.tuples(st.integers(0, 500), windows, amounts, amounts, amounts, amounts, rates, rates, half_sizes, times))
def test_prefill_attention_equals_reference(args) -> None:
    expected = reference.prefill_attention_time(*args)
    assert_allclose(roofline.prefill_attention_time(*args), expected, rtol=5e-15, atol=0)


@given(st.integers(0, 2000), windows)
def test_causal_pairs_are_exact(tokens: int, window: float) -> None:
    assert roofline.causal_pairs(tokens, window) == reference.causal_pairs(tokens, window)


@given(st.integers(1, 5000), st.integers(1, 300))
def test_attention_stops_growing_at_the_window(context: int, window: int) -> None:
    def seconds(c: float) -> float:
        return float(roofline.decode_attention_time(c, window, 0, 0, 1e6, 1e3, 1e12, 1e12, 0, 0))

    assert seconds(context + 1) >= seconds(context)
    assert seconds(window + context) == seconds(window)


@given(st.tuples(amounts, rates, times, half_sizes))
def test_transfer_equals_reference(args) -> None:
    assert_allclose(link.transfer_time(*args), reference.transfer_time(*args), rtol=5e-15, atol=0)


@given(amounts, rates, times, half_sizes, faster)
def test_transfer_is_never_slower_with_more(moved, bytes_per_s, latency, n_half, x) -> None:
    before = link.transfer_time(moved, bytes_per_s, latency, n_half)
    assert link.transfer_time(moved, bytes_per_s * x, latency, n_half) <= before
    assert link.transfer_time(moved, bytes_per_s, latency / x, n_half / x) <= before


def test_nothing_to_transfer_takes_no_time() -> None:
    assert link.transfer_time(0.0, 1e9, 1e-3, 1e6) == 0.0


# --- systolic arrays ---


def test_cycles_equal_every_scalesim_run() -> None:
    with (SIMULATORS / "scalesim_cycles.csv").open(newline="") as file:
        runs = list(csv.DictReader(file))
    assert len(runs) == 858
    column = {key: np.array([float(run[key]) for run in runs]) for key in runs[0] if key != "dataflow"}
    code = np.array([systolic.DATAFLOWS[run["dataflow"]] for run in runs])
    cycles = systolic.gemm_cycles(column["M"], column["K"], column["N"], column["rows"], column["cols"], code)
    assert_array_equal(cycles, column["demand_rows"])
    # The report counts from 0, so its last cycle is one less.
    assert_array_equal(cycles - 1, column["compute_cycles"])
    assert_array_equal(cycles - 1, column["total_cycles"] - column["stall_cycles"])


@given(st.tuples(small, small, small, sides, sides, dataflows))
def test_cycles_equal_reference(args) -> None:
    for name in ("folds", "fold_cycles", "gemm_cycles"):
        assert getattr(systolic, name)(*args) == getattr(reference, name)(*args), name


@given(st.tuples(small, small, small, sides, sides, st.integers(1, 70), dataflows))
def test_dealt_cycles_equal_reference(args) -> None:
    assert systolic.gemm_cycles_dealt(*args) == reference.gemm_cycles_dealt(*args)


gemms = (small, small, small, st.floats(0.5, 16.0), sides, sides, st.integers(1, 70), st.floats(1e8, 1e10))


@given(st.tuples(*gemms, dataflows, st.floats(1.0, 16.0), st.floats(1e3, 1e13)))
def test_gemm_time_equals_reference(args) -> None:
    assert_allclose(systolic.gemm_time(*args), reference.gemm_time(*args), rtol=5e-15, atol=0)


@given(*gemms, dataflows, st.floats(1.0, 16.0), st.floats(1e3, 1e13), faster, st.integers(0, 64))
def test_gemm_is_never_slower_with_more(
    m, k, n, bits, rows, cols, arrays, clock, dataflow, rate, dram, x, more
) -> None:
    def seconds(bits=bits, arrays=arrays, clock=clock, rate=rate, dram=dram) -> float:
        return float(systolic.gemm_time(m, k, n, bits, rows, cols, arrays, clock, dataflow, rate, dram))

    before = seconds()
    assert seconds(arrays=arrays + more) <= before
    assert seconds(clock=clock * x) <= before
    assert seconds(rate=rate * x) <= before
    assert seconds(dram=dram * x) <= before
    assert seconds(bits=bits / x) <= before


@given(small, small, small, sides, sides, dataflows)
def test_one_array_is_dealt_everything(m, k, n, rows, cols, dataflow) -> None:
    dealt = systolic.gemm_cycles_dealt(m, k, n, rows, cols, 1, dataflow)
    assert dealt == systolic.gemm_cycles(m, k, n, rows, cols, dataflow)


def test_unknown_dataflow_is_nan() -> None:
    assert np.isnan(systolic.gemm_cycles(4, 4, 4, 4, 4, [3, -1, 0.5])).all()
    with np.errstate(invalid="ignore"):
        assert math.isnan(systolic.gemm_time(4, 4, 4, 16, 4, 4, 1, 1e9, 3, 1.0, 1e12))


def test_large_products_do_not_wrap_around() -> None:
    size = 2**21
    folds = systolic.folds(np.int64(size), np.int64(size), np.int64(2 * size), 1, 1, systolic.OS)
    assert folds == 2.0 * size * size
    time = systolic.gemm_time(size, size, 2 * size, 16, 4, 4, 64, 1e9, systolic.OS, 1.0, 1e12)
    assert time > 1e6


def test_published_expert_on_64_small_arrays() -> None:
    # One token of an 8x22B expert, output stationary, FP16 rate; its 604 MB take 1.18 ms at 512 GB/s as well.
    sizes = [(6144, 16384), (6144, 16384), (16384, 6144)]
    cycles = sum(float(systolic.gemm_cycles_dealt(1, k, n, 4, 4, 64, systolic.OS)) for k, n in sizes)
    assert_allclose(cycles / 1e9, 1.181e-3, rtol=1e-3, atol=0)


# --- how ufuncs treat arrays ---


def test_arguments_broadcast_and_may_be_strided_read_only_or_empty() -> None:
    moved = np.arange(24.0).reshape(4, 6)[:, ::2]
    moved.flags.writeable = False
    rate = np.array([[1.0], [2.0], [3.0], [4.0]])
    expected = np.where(moved == 0, 0.0, 0.5 + moved / rate)
    assert_allclose(link.transfer_time(moved, rate, 0.5, 0.0), expected, rtol=1e-15, atol=0)
    assert link.transfer_time(np.empty((0, 3)), 1.0, 0.0, 0.0).shape == (0, 3)
    assert link.transfer_time(np.int32(8), np.float32(2), 0, 0) == 4.0
