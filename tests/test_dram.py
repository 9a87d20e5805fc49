"""DRAM closed forms against exact fractions and against Ramulator 2."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from perfmodel import reference
from perfmodel.evidence.simulators import compare_ramulator, dram_timings, share_of_peak
from perfmodel.kernels import dram

TIMINGS = dram_timings()
RUNS = compare_ramulator()
# Largest error of each form over its rows, rounded up.
TOLERANCE = {
    "interleaved": 0.009,
    "row-by-row": 0.006,
    "bank-group-limited": 0.013,
    "random": 0.031,
    "one-bank": 0.03,
}


@pytest.mark.parametrize("form", TOLERANCE)
@pytest.mark.parametrize("memory", TIMINGS)
def test_every_simulated_stream(form: str, memory: str) -> None:
    runs = [run for run in RUNS if run.kind == form and run.case.startswith(f"{memory},")]
    # The bank-group form holds for one pseudo-channel only.
    assert bool(runs) == (form != "bank-group-limited" or TIMINGS[memory]["pseudo_channels"] == 1)
    for run in runs:
        assert_allclose(run.predicted, run.simulated, rtol=TOLERANCE[form], atol=0, err_msg=str(run))


def test_the_subset_is_complete() -> None:
    count = {form: sum(run.kind == form for run in RUNS) for form in TOLERANCE}
    expected = {"interleaved": 12, "row-by-row": 72, "bank-group-limited": 24, "random": 36, "one-bank": 12}
    assert count == expected
    assert len(RUNS) == sum(expected.values())


def test_near_data_device_read_row_by_row_or_interleaved() -> None:
    timing = TIMINGS["LPDDR5-6400"]
    assert_allclose(512 * share_of_peak("row-by-row", timing, 32, True), 207, rtol=2e-3, atol=0)
    assert_allclose(512 * share_of_peak("interleaved", timing, 32, True), 469, rtol=2e-3, atol=0)


cycles = st.integers(1, 100)
lines = st.integers(1, 200)
channels = st.integers(1, 2)


@given(st.tuples(cycles, cycles, st.integers(1, 1000), cycles, st.integers(1, 20_000)))
def test_refresh_equals_reference(args) -> None:
    assert_allclose(dram.refresh_fraction(*args), reference.refresh_fraction(*args), rtol=1e-12, atol=0)
    assert 0 <= dram.refresh_fraction(*args) < 1


@given(st.tuples(lines, cycles, cycles, cycles, cycles, cycles, channels))
def test_row_by_row_equals_reference(args) -> None:
    assert_allclose(dram.row_by_row_fraction(*args), reference.row_by_row_fraction(*args), rtol=1e-14, atol=0)


@given(st.tuples(lines, cycles, cycles, cycles, cycles, st.integers(1, 256)))
def test_bank_group_limited_equals_reference(args) -> None:
    expected = reference.bank_group_limited_fraction(*args)
    assert_allclose(dram.bank_group_limited_fraction(*args), expected, rtol=1e-12, atol=0)


@given(lines, cycles, st.integers(1, 4), cycles, cycles, st.integers(1, 256))
def test_a_deeper_buffer_never_hurts(lines_per_row, n_bl, factor, n_rp, n_rcd, read_buffer) -> None:
    def share(reads: int) -> float:
        return float(dram.bank_group_limited_fraction(lines_per_row, n_bl, factor * n_bl, n_rp, n_rcd, reads))

    assert share(read_buffer + 1) >= share(read_buffer) * (1 - 1e-14)
    # Without lookahead only the column timing counts; with plenty, the pins or the bank group do.
    assert_allclose(share(0), 1 / factor, rtol=1e-14, atol=0)


@given(st.tuples(cycles, cycles, cycles, channels, st.sampled_from([0, 2, 3])))
def test_random_equals_reference(args) -> None:
    expected = reference.random_fraction(*args)
    assert_allclose(dram.random_fraction(*args), expected, rtol=1e-14, atol=0)


@given(st.tuples(cycles, cycles, channels))
def test_one_bank_equals_reference(args) -> None:
    assert_allclose(dram.one_bank_fraction(*args), reference.one_bank_fraction(*args), rtol=1e-14, atol=0)
