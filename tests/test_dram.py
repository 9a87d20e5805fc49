"""DRAM closed forms against exact fractions and against Ramulator 2."""

import csv
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from perfmodel import reference
from perfmodel.kernels import dram

DATA = Path(__file__).parent / "data"


def _rows(name: str) -> list[dict[str, str]]:
    with (DATA / name).open(newline="") as file:
        return list(csv.DictReader(file))


TIMINGS = {
    row["memory"]: {key: float(value) for key, value in row.items() if key != "memory"}
    for row in _rows("dram_timings.csv")
}
RUNS = _rows("ramulator2_closed_form.csv")
# Largest error of each form over its rows, rounded up.
TOLERANCE = {
    "interleaved": 0.009,
    "row-by-row": 0.006,
    "bank-group-limited": 0.013,
    "random": 0.031,
    "one-bank": 0.03,
}


def _predicted(form: str, memory: str, read_buffer: float, refresh: bool) -> float:
    t = TIMINGS[memory]
    share = 1.0
    if form == "row-by-row":
        names = "lines_per_row n_bl n_ccd_l n_rtp n_rp n_rcd pseudo_channels"
        share = float(dram.row_by_row_fraction(*(t[name] for name in names.split())))
    elif form == "bank-group-limited":
        names = "lines_per_row n_bl n_ccd_l n_rp n_rcd"
        share = float(dram.bank_group_limited_fraction(*(t[name] for name in names.split()), read_buffer))
    elif form == "random":
        names = "n_bl n_faw n_rrd_s pseudo_channels command_cycles"
        share = float(dram.random_fraction(*(t[name] for name in names.split())))
    elif form == "one-bank":
        share = float(dram.one_bank_fraction(t["n_bl"], t["n_rc"], t["pseudo_channels"]))
    if refresh:
        names = "n_rtp n_rp n_rfc n_rcd n_refi"
        share *= float(dram.refresh_fraction(*(t[name] for name in names.split())))
    return share


@pytest.mark.parametrize("form", TOLERANCE)
@pytest.mark.parametrize("memory", TIMINGS)
def test_every_simulated_stream(form: str, memory: str) -> None:
    runs = [run for run in RUNS if run["form"] == form and run["memory"] == memory]
    # The bank-group form holds for one pseudo-channel only.
    assert bool(runs) == (form != "bank-group-limited" or TIMINGS[memory]["pseudo_channels"] == 1)
    for run in runs:
        predicted = _predicted(form, memory, float(run["read_buffer"]), run["refresh"] == "AllBank")
        assert_allclose(predicted, float(run["frac_peak"]), rtol=TOLERANCE[form], atol=0, err_msg=str(run))


def test_the_subset_is_complete() -> None:
    count = {form: sum(run["form"] == form for run in RUNS) for form in TOLERANCE}
    expected = {"interleaved": 12, "row-by-row": 72, "bank-group-limited": 24, "random": 36, "one-bank": 12}
    assert count == expected
    assert len(RUNS) == sum(expected.values())


def test_near_data_device_read_row_by_row_or_interleaved() -> None:
    assert_allclose(512 * _predicted("row-by-row", "LPDDR5-6400", 32, True), 207, rtol=2e-3, atol=0)
    assert_allclose(512 * _predicted("interleaved", "LPDDR5-6400", 32, True), 469, rtol=2e-3, atol=0)


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
