"""Measuring a machine: products against plain loops, timing by a clock that is told what to say, fits of times made
from known constants, files, and a short real run. No test looks at how fast this machine is."""

import functools
import itertools
import json
import math
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from commands import check_refusal, run
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from perfmodel import reference
from perfmodel.errors import PerfModelError, SpecError
from perfmodel.hardware import System, load_system
from perfmodel.kernels.stream import GROUP, gemv_int4, gemv_int8, read_words
from perfmodel.measure import CheckRow, Measurement, measure, measurement, median_error
from perfmodel.measure.check import LAYERS, _picks, _predicted, fitting_layer, forward
from perfmodel.measure.cpu import LARGE, LARGE_TOKENS, SMALL, SMALL_TOKENS, TOKENS, Row, experiments, shapes_for
from perfmodel.measure.fit import fit_products
from perfmodel.measure.gpu import COPIES, READS, TINY, fit_line, gpu_constants, measure_gpu
from perfmodel.measure.machine import Machine, _cores, _memory, _model_name, find_machine
from perfmodel.measure.overlay import Fits, cpu_spec, fit_rows, gpu_sources
from perfmodel.measure.pool import SHAPES, Shape, make_pool, matrices, pool_bytes, scaled
from perfmodel.measure.timing import ENOUGH, FEWEST, Case, Pass, Timing, summary, time_cases, waited
from perfmodel.measure.trust import find_doubts, undisturbed

ROOT = Path(__file__).resolve().parent.parent
MACHINE = Machine("A CPU @ 3 GHz", 1, 8, 2**20, 64 * 10**9, 32 * 10**9, "blas 1.0", "3.11", "2.3", "0.62", "2026-01-31")


# Compiled products


@given(data=st.data(), experts=st.integers(1, 3), rows=st.integers(1, 5), groups=st.integers(1, 4))
def test_products_of_few_bits(data: st.DataObject, experts: int, rows: int, groups: int) -> None:
    random = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    cols = groups * GROUP
    token = random.integers(-127, 128, cols).astype(np.int8)
    scales = random.uniform(0.5, 2.0, (experts, rows, groups)).astype(np.float32)
    token_scales = random.uniform(0.5, 2.0, groups).astype(np.float32)
    first, count = data.draw(st.integers(0, 5)), data.draw(st.integers(0, experts))
    low = data.draw(st.integers(0, rows))
    high = data.draw(st.integers(low, rows))
    whole = random.integers(-128, 128, (experts, rows, cols)).astype(np.int8)
    packed = random.integers(0, 256, (experts, rows, cols // 2)).astype(np.uint8)
    halves = packed.reshape(experts, rows, groups, GROUP // 2).astype(np.int64)
    unpacked = np.concatenate([halves % 16, halves // 16], axis=3).reshape(experts, rows, cols) - 8
    done = [(first + i) % experts for i in range(count)]
    for kernel, weights, plain in ((gemv_int8, whole, whole.astype(np.int64)), (gemv_int4, packed, unpacked)):
        # Weights with their scales taken in, times the token with its own, all in 64 bits.
        full = plain * np.repeat(scales.astype(np.float64), GROUP, axis=2)
        expected = np.einsum("erc,c->er", full, token * np.repeat(token_scales.astype(np.float64), GROUP))
        size = np.einsum("erc,c->er", abs(full), abs(token * np.repeat(token_scales.astype(np.float64), GROUP)))
        out = np.full((experts, rows), np.nan, np.float32)
        kernel(weights, scales, token, token_scales, first, count, low, high, out)
        touched = np.zeros((experts, rows), np.bool_)
        touched[done, low:high] = True
        assert (np.isnan(out) == ~touched).all()
        assert (abs(out - expected)[touched] <= 1e-6 * size[touched] + 1e-12).all()


def test_all_words_are_read() -> None:
    words = np.array([2**64 - 1, 5, 7, *range(1000)], np.uint64)
    assert read_words(words) == (11 + sum(range(1000))) % 2**64


# Timing


class Hands:
    """A clock that work moves on."""

    def __init__(self) -> None:
        self.now = 0.0
        self.queue = 0.0

    def work(self, seconds: float, wait: Callable[[], float] = lambda: 0.0) -> Callable[[int], None]:
        def run(repeats: int) -> None:
            waited = wait()
            self.queue += waited
            self.now += seconds * repeats + waited

        return run


def test_times_are_per_piece_and_cases_take_turns() -> None:
    hands, order = Hands(), []

    def case(name: str, seconds: float) -> Case:
        work = hands.work(seconds)

        def noted(repeats: int) -> None:
            order.append(name)
            work(repeats)

        return Case(name, noted, least_s=0.01, threads=2)

    seen: list[tuple[int, int]] = []
    found = time_cases(
        [case("long", 0.5), case("short", 1e-4)],
        20.0,
        lambda: hands.now,
        lambda *one: seen.append(one),
        waits=lambda: 0.0,
    )
    assert_allclose([one.seconds for one in found], [0.5, 1e-4], rtol=1e-9, atol=0)
    assert found[0].repeats == 1
    assert found[1].repeats in (100, 101)  # of 0.1 ms each
    assert [one.passes for one in found] == [ENOUGH, ENOUGH]
    assert order[-2 * ENOUGH :] == ["long", "short"] * ENOUGH
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert all(0 <= done <= total for done, total in seen)


def test_the_time_limit() -> None:
    hands = Hands()
    cases = [Case(str(i), hands.work(1.0), threads=2) for i in range(4)]
    found = time_cases(cases, 8.0, lambda: hands.now, waits=lambda: 0.0)
    # Two runs each do not count; one pass each is the least, and then nothing begins after half as much again.
    assert [one.passes for one in found] == [2, 1, 1, 1]
    assert hands.now == 13.0


def test_a_pass_that_waited_does_not_count() -> None:
    hands = Hands()
    turns = itertools.count()
    case = Case("now and then", hands.work(1.0, lambda: 3.0 if next(turns) % 2 else 0.0), threads=2)
    (found,) = time_cases([case], 1000.0, lambda: hands.now, waits=lambda: hands.queue)
    assert found == Timing(1.0, 0.0, ENOUGH, 1, True)
    case = Case("always", hands.work(1.0, lambda: 1.0 + next(turns) % 2), threads=2)
    (found,) = time_cases([case], 30.0, lambda: hands.now, waits=lambda: hands.queue)
    assert (found.seconds, found.calm) == (2.0, False)


def test_one_thread_is_timed_by_its_own_clock() -> None:
    hands = Hands()
    case = Case("alone", hands.work(1.0, lambda: 5.0))
    (found,) = time_cases([case], 100.0, lambda: hands.now, own_clock=lambda: hands.now - hands.queue, waits=waited)
    assert (found.seconds, found.calm) == (1.0, True)


@given(st.lists(st.floats(1e-6, 10.0), min_size=FEWEST, max_size=30), st.integers(1, 9))
def test_summary(times: list[float], repeats: int) -> None:
    found = summary([Pass(one, 0.0) for one in times] + [Pass(1e-9, 1.0)], repeats)
    assert_allclose(found.seconds, np.median(times) / repeats, rtol=1e-12, atol=0)
    quartiles = np.percentile(times, [25, 75])
    assert found.spread is not None
    assert_allclose(found.spread, (quartiles[1] - quartiles[0]) / np.median(times), rtol=1e-9, atol=1e-12)
    assert found.calm


def test_one_pass_has_no_spread() -> None:
    assert summary([Pass(2.0, 0.0)], 4) == Timing(0.5, None, 1, 4)
    assert summary([Pass(2.0, 1.0), Pass(3.0, 2.0)]) == Timing(2.0, None, 1, 1, calm=False)


def test_waiting_is_counted() -> None:
    before = waited()
    assert 0.0 <= before <= waited()


# The machine and its memory

CPUINFO = """processor\t: 0
model name\t: Some  CPU
physical id\t: 0
core id\t\t: 0

processor\t: 1
model name\t: Some  CPU
physical id\t: 0
core id\t\t: 0

processor\t: 2
model name\t: Some  CPU
physical id\t: 1
core id\t\t: 0
"""


def test_physical_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perfmodel.measure.machine._read", lambda path: "")
    assert _cores(CPUINFO, frozenset({0, 1, 2})) == (2, 2)
    assert _cores(CPUINFO, frozenset({0, 1})) == (1, 1)
    assert _cores("", frozenset({0, 1, 5})) == (1, 3)
    monkeypatch.setattr("perfmodel.measure.machine._read", lambda path: "100000 100000" if "cpu.max" in path else "")
    assert _cores(CPUINFO, frozenset({0, 1, 2})) == (1, 1)
    assert _model_name(CPUINFO) == "Some CPU"
    assert _model_name("")


def test_memory_within_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "MemTotal:       1000 kB\nMemFree: 1 kB\nMemAvailable:    600 kB\n"
    limits = {"max": "max", "current": "400000"}
    monkeypatch.setattr("perfmodel.measure.machine._read", lambda path: limits[path.rpartition(".")[2]])
    assert _memory(text) == (1024000, 614400)
    limits["max"] = "500000"
    assert _memory(text) == (500000, 100000)


def test_this_machine() -> None:
    found = find_machine()
    assert found.cores >= 1
    assert found.cores % found.sockets == 0
    assert 0 < found.free_bytes <= found.memory_bytes
    assert np.__version__ in found.versions


@given(st.floats(0.05, 100.0), st.integers(2**20, 2**30), st.integers(10**9, 10**12))
def test_the_pool_is_bounded(memory_gb: float, cache: int, free: int) -> None:
    if memory_gb * 1e9 > free or 0.8 * memory_gb * 1e9 < max(2 * cache, 2**25):
        with pytest.raises(PerfModelError, match="--memory-gb: found"):
            pool_bytes(memory_gb, cache, free)
    else:
        size = pool_bytes(memory_gb, cache, free)
        assert max(2 * cache, 2**25) - 4096 <= size <= 0.8 * memory_gb * 1e9
        assert size % 4096 == 0
    assert pool_bytes(None, 2**20, 10**11) <= 0.8 * 2e9


@given(st.sampled_from(SHAPES), st.floats(2**20, 2**30))
def test_scaling_keeps_what_it_says(shape: Shape, most: float) -> None:
    found = scaled(shape, most)
    assert found.params * found.factor == shape.params
    assert 4 * found.params <= most
    assert found.cols % GROUP == 0
    assert found.factor == 1 or 8 * found.params > most


def test_the_pool_holds_numbers() -> None:
    pool = make_pool(2**23)
    numbers = pool.view(np.float32)
    assert abs(numbers).max() <= 1.0
    assert len(np.unique(numbers)) > 10**5
    assert matrices(pool, 100, 64, np.float32).shape == (2**23 // 25600, 100, 64)
    assert not pool.flags.writeable


# Fits


def product_time(row: Row, constants: dict[str, float]) -> float:
    """A product by the reference formula; the memory and the units are shared evenly by threads.

    Only the BLAS library repacks weights.
    """
    share = row.threads / 8
    return reference.cpu_expert_time(
        tokens=row.tokens,
        params=row.shape.params,
        weight_bytes=row.weight_bytes,
        hidden=row.shape.cols,
        flops_per_s=constants["matrix"] * share,
        vector_flops_per_s=constants["vector"] * share,
        tile_rows=int(constants["tile"]),
        bytes_per_s=min(constants["memory"], constants["thread"] * row.threads),
        overhead_s=constants["product"],
        pack_bytes_per_s=constants.get("pack", 0.0) * share if row.kernel == "blas" else 0.0,
    )


def made_rows(constants: dict[str, float], noise: float = 0.0, threads: tuple[int, ...] = (1, 8)) -> list[Row]:
    """All experiments with the times that the constants give."""
    random = np.random.default_rng(1)
    pool = make_pool(2**26)
    shapes = shapes_for(1000.0, 2**26)
    with ThreadPoolExecutor(1) as executor:
        rows = [one.row for one in experiments(pool, shapes, threads, executor, lambda _: None)]  # type: ignore[arg-type,return-value]

    def seconds(row: Row) -> float:
        if row.kernel == "read":
            return row.weight_bytes / min(constants["memory"] * 1.05, 1.05 * constants["thread"] * row.threads)
        if row.tokens == LARGE_TOKENS:
            return 2 * LARGE_TOKENS * LARGE.params / (1.25 * constants["matrix"] * row.threads / 8)
        return product_time(row, constants) * math.exp(noise * random.standard_normal())

    return [row._replace(timing=Timing(seconds(row), 0.02, 11, 3, True)) for row in rows]


CONSTANTS = {"memory": 400e9, "thread": 75e9, "vector": 300e9, "matrix": 1.2e12, "tile": 16.0, "product": 4e-6}
PACKED = {**CONSTANTS, "tile": 8.0, "pack": 250e9}


def test_experiments_cover_what_they_promise() -> None:
    rows = made_rows(CONSTANTS)
    blas = {(row.shape.model, row.tokens) for row in rows if row.kernel == "blas"}
    wide = {(shape.model, tokens) for shape in SHAPES for tokens in TOKENS}
    assert blas == wide | {(SMALL.model, tokens) for tokens in SMALL_TOKENS} | {(LARGE.model, LARGE_TOKENS)}
    assert {(row.kernel, row.bits) for row in rows} == {("read", 8), ("blas", 32), ("int8", 8.5), ("int4", 4.5)}
    assert {row.threads for row in rows} == {1, 8}


@pytest.mark.parametrize("tile", [1.0, 8.0, 16.0, 32.0])
def test_the_fit_finds_the_constants(tile: float) -> None:
    fits = fit_rows(made_rows({**CONSTANTS, "tile": tile}))
    assert fits.blas.median_error < 1e-3
    assert fits.blas.pack_bytes_per_s is None
    assert_allclose(fits.blas.bytes_per_s, CONSTANTS["memory"], rtol=0.01, atol=0)
    assert_allclose(fits.blas.product_s, CONSTANTS["product"], rtol=0.2, atol=0)
    assert_allclose(fits.blas.thread_bytes_per_s, CONSTANTS["thread"], rtol=0.05, atol=0)
    if tile > 8:  # otherwise only one kind of units is ever used, and other constants give the same times
        assert fits.blas.tile_rows == tile
        assert_allclose(fits.blas.matrix_flops_per_s, CONSTANTS["matrix"], rtol=0.01, atol=0)
        assert_allclose(fits.blas.vector_flops_per_s, CONSTANTS["vector"], rtol=0.05, atol=0)


def test_the_fit_stands_noise_and_disturbed_rows() -> None:
    rows = made_rows(CONSTANTS, noise=0.05)
    for i in range(0, len(rows), 7):
        if rows[i].kernel != "read" and rows[i].tokens != LARGE_TOKENS:
            rows[i] = rows[i]._replace(timing=Timing(rows[i].timing.seconds * 10, 3.0, 1, 1, calm=False))
    fit = fit_rows(undisturbed(rows)).blas
    assert_allclose([fit.bytes_per_s, fit.matrix_flops_per_s], [400e9, 1.2e12], rtol=0.1, atol=0)
    assert 0.0 < fit.median_error < 0.1


@pytest.mark.parametrize(("tile", "pack"), [(1.0, 200e9), (8.0, 250e9), (8.0, 120e9)])
def test_the_fit_tells_packing_from_arithmetic(tile: float, pack: float) -> None:
    exact = fit_rows(made_rows({**CONSTANTS, "tile": tile, "pack": pack}))
    assert exact.blas.median_error < 1e-3
    assert exact.blas.pack_bytes_per_s is not None
    assert_allclose(exact.blas.pack_bytes_per_s, pack, rtol=0.02, atol=0)
    assert_allclose(exact.blas.matrix_flops_per_s, CONSTANTS["matrix"], rtol=0.02, atol=0)
    assert_allclose(exact.blas.bytes_per_s, CONSTANTS["memory"], rtol=0.01, atol=0)
    # Weights of few bits are stored ready for use.
    assert exact.quantised.pack_bytes_per_s is None
    assert exact.quantised.matrix_flops_per_s == exact.blas.matrix_flops_per_s
    rows = made_rows({**CONSTANTS, "tile": tile, "pack": pack}, noise=0.05)
    rows = [
        row._replace(timing=row.timing._replace(seconds=10 * row.timing.seconds))
        if row.kernel == "blas" and row.tokens < LARGE_TOKENS and i % 9 == 0
        else row
        for i, row in enumerate(rows)
    ]
    noisy = fit_rows(rows).blas
    assert noisy.pack_bytes_per_s is not None
    assert_allclose([noisy.pack_bytes_per_s, noisy.matrix_flops_per_s], [pack, CONSTANTS["matrix"]], rtol=0.15, atol=0)


def test_few_bits_are_bound_by_arithmetic() -> None:
    fits = fit_rows(made_rows({**CONSTANTS, "vector": 200e9}))
    assert fits.quantised.tile_rows == fits.blas.tile_rows
    assert_allclose(fits.quantised.vector_flops_per_s, 200e9, rtol=0.02, atol=0)


def test_a_fit_needs_single_tokens() -> None:
    rows = [row for row in made_rows(CONSTANTS) if row.tokens != 1]
    with pytest.raises(PerfModelError, match="one token"):
        fit_products([row for row in rows if row.kernel == "blas"])


# The overlay


@pytest.mark.parametrize("constants", [CONSTANTS, PACKED])
@pytest.mark.parametrize("kernels", ["blas", "quantised"])
def test_the_spec_gives_back_the_measured_times(kernels: str, constants: dict[str, float]) -> None:
    """What is fitted, divided into peaks and shares, written and read, prices products as they were measured."""
    rows = made_rows(constants)
    cpu = cpu_spec(MACHINE, rows, fit_rows(rows), kernels)
    assert (cpu.pack_gb_per_s is not None) == (kernels == "blas" and "pack" in constants)
    assert (cpu.cores, cpu.threads, cpu.sockets) == (8, None, 1)
    assert {cpu.source_of(key).source for key in cpu.numeric_keys()} == {"measured"}
    cited = cpu.source_of("dram_efficiency").citation
    for word in ("spread", "interquartile", "11 passes", "NumPy 2.3", "Numba 0.62", "blas 1.0", "Python 3.11", "3 GHz"):
        assert word in cited, word
    assert "2026-01-31" in cited
    for row in rows:
        if row.threads == 8 and row.kernel == ("blas" if kernels == "blas" else "int4") and row.tokens <= 64:
            time_s = reference.cpu_expert_time(
                tokens=row.tokens, params=row.shape.params, weight_bytes=row.weight_bytes, hidden=row.shape.cols,
                flops_per_s=cpu.effective_flops_per_s(), vector_flops_per_s=cpu.effective_vector_flops_per_s,
                tile_rows=cpu.tile_rows or 1, bytes_per_s=cpu.effective_dram_bandwidth_bytes_per_s,
                overhead_s=cpu.expert_overhead_s / 3, pack_bytes_per_s=cpu.effective_pack_bytes_per_s,
            )  # fmt: skip
            assert_allclose(time_s, row.timing.seconds, rtol=0.05, atol=0)


def test_fewer_threads_than_cores_leave_the_peaks_whole() -> None:
    rows = made_rows(PACKED, threads=(1, 8))
    cpu = cpu_spec(MACHINE._replace(cores=16), rows, fit_rows(rows), "blas")
    assert cpu.threads == 8
    assert cpu.pack_gb_per_s is not None
    assert_allclose([cpu.pack_gb_per_s, cpu.effective_pack_bytes_per_s / 1e9], [500, 250], rtol=0.02, atol=0)
    assert_allclose(cpu.effective_flops_per_s(), 1.2e12, rtol=0.02, atol=0)
    assert_allclose(cpu.peak_flops_per_s("fp32"), 2 * 1.25 * 1.2e12, rtol=1e-9, atol=0)


def test_one_pass_is_called_that() -> None:
    rows = [row._replace(timing=row.timing._replace(passes=1, spread=None)) for row in made_rows(CONSTANTS)]
    cpu = cpu_spec(MACHINE, rows, fit_rows(rows), "blas")
    cited = {key: cpu.source_of(key).citation for key in cpu.numeric_keys()}
    assert "; one pass;" in cited["dram_bandwidth_gb_per_s"]
    assert "(one pass each)" in cited["dram_efficiency"]
    for text in cited.values():
        assert "spread" not in text
        assert "median of 1" not in text
    # A few single ones among others are told apart from the medians.
    rows = made_rows(CONSTANTS)
    place = next(i for i, row in enumerate(rows) if row.kernel == "blas" and row.threads == 8)
    rows[place] = rows[place]._replace(timing=rows[place].timing._replace(passes=1, spread=None))
    cited["few"] = cpu_spec(MACHINE, rows, fit_rows(rows), "blas").source_of("dram_efficiency").citation
    assert "medians of 11 passes, spread 2.0 %" in cited["few"]
    assert "one pass of 1 of them" in cited["few"]


@functools.cache
def packed() -> tuple[list[Row], Fits]:
    """Rows that repack weights, and their fits."""
    rows = made_rows(PACKED)
    return rows, fit_rows(rows)


def made_measurement(**changed: Any) -> Measurement:
    rows, fits = packed()
    base = load_system(measurement.BASE)
    cpu = cpu_spec(MACHINE, rows, fits, "blas")
    system = measurement.measured_system(base, cpu, {}, {})
    whole = Measurement(
        MACHINE, (1, 8), 2**26, rows, fits, "blas", measurement.BASE, cpu, system, "", [], {}, {}, None, [], [], 1.0
    )
    return whole._replace(**changed)


def test_an_overlay_is_read_back_the_same(tmp_path: Path) -> None:
    found = made_measurement()
    path = tmp_path / "my machine (2).toml"
    found.write(path)
    back = load_system(path)
    assert back.content_hash() == found.system.content_hash()
    assert back.cpu == found.cpu
    base = load_system(measurement.BASE)
    assert (back.gpu, back.link, back.host) == (base.gpu, base.link, base.host)
    assert back.flags == ()


def test_a_failure_leaves_the_older_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("older", encoding="utf-8")
    with pytest.raises(SpecError, match="not written"):
        made_measurement(base="no-such-system").write(path)
    assert [(one.name, one.read_text(encoding="utf-8")) for one in tmp_path.iterdir()] == [("mine.toml", "older")]


# What may be believed


def disturb(rows: list[Row], threads: int, factor: float = 20.0, every: int = 1, calm: bool = False) -> list[Row]:
    """The rows, of which those on so many threads (or every so manieth of them) took longer."""
    return [
        row._replace(timing=Timing(factor * row.timing.seconds, None, 1, row.timing.repeats, calm))
        if row.threads == threads and i % every == 0
        else row
        for i, row in enumerate(rows)
    ]


def test_disturbed_threads_are_left_out() -> None:
    rows = made_rows(CONSTANTS, threads=(1, 4, 8))
    assert undisturbed(rows) == rows
    used = undisturbed(disturb(rows, 8))
    assert used == [row for row in rows if row.threads < 8]
    assert undisturbed(disturb(disturb(rows, 8), 4)) == [row for row in rows if row.threads == 1]
    # What is fitted, and written, is then what those rows alone say.
    cpu = cpu_spec(MACHINE, used, fit_rows(used), "blas")
    assert (cpu.threads, cpu.cores) == (4, 8)
    assert_allclose(cpu.effective_flops_per_s(), CONSTANTS["matrix"] / 2, rtol=0.02, atol=0)
    assert_allclose(cpu.effective_dram_bandwidth_bytes_per_s, 4 * CONSTANTS["thread"], rtol=0.02, atol=0)


def test_some_disturbed_rows_are_left_out_alone() -> None:
    rows = made_rows(CONSTANTS)
    products = [i for i, row in enumerate(rows) if row.threads == 8 and row.kernel == "int4"]
    for i in products[::2]:
        rows[i] = rows[i]._replace(timing=rows[i].timing._replace(calm=False))
    used = undisturbed(rows)
    assert used == [row for i, row in enumerate(rows) if i not in products[::2]]
    # Nothing takes the place of the two that are measured once, nor of more than half of the products.
    for kernel, tokens in (("read", 0), ("blas", LARGE_TOKENS)):
        one = [
            row._replace(timing=row.timing._replace(calm=False))
            if (row.threads, row.kernel, row.tokens) == (8, kernel, tokens)
            else row
            for row in rows
        ]
        assert {row.threads for row in undisturbed(one)} == {1}
    most = [
        row._replace(timing=row.timing._replace(calm=False)) if row.threads == 8 and row.kernel[:3] == "int" else row
        for row in rows
    ]
    assert {row.threads for row in undisturbed(most)} == {1}


def test_nothing_is_left_undisturbed() -> None:
    """Then the constants rest on all rows, and a note says so; without a contradiction that is no doubt."""
    rows = disturb(made_rows(CONSTANTS, threads=(8,)), 8, factor=1.0)
    assert undisturbed(rows) == rows
    assert find_doubts(rows, fit_rows(rows), "blas", []) == []


def doubtful(which: str) -> dict[str, Any]:
    """Parts of a measurement that contradicts itself in one way."""
    rows, fits = packed()
    if which == "fit":
        return {"fits": fits._replace(blas=fits.blas._replace(residuals=np.log([1.0, 1.3, 0.6])))}
    if which == "quantised":
        worse = fits.quantised._replace(residuals=np.log([1.3]))
        return {"fits": fits._replace(quantised=worse), "kernels": "quantised"}
    if which == "threads":
        # Slow only by what no other row tells: all times of all threads together, so that the fit is as good.
        slow = disturb(rows, 8, factor=12.0, calm=True)
        return {"rows": slow, "fits": fit_rows(slow)}
    if which == "vector":
        fast = 1.2 * 1.25 * PACKED["matrix"]
        return {"fits": fits._replace(blas=fits.blas._replace(vector_flops_per_s=fast))}
    if which == "check":
        return {"check": [CheckRow(LAYERS[0], "alike", 1, 1, Timing(1.0, 0.0, 3, 1), 1.3)]}
    raise AssertionError(which)


DOUBTS = {
    "fit": "fitted times in 32 bits are 30 % off at the median",
    "quantised": "fitted times with 8 and 4 bits are 30 % off at the median",
    "threads": "products on 8 threads run at 0.",
    "vector": "few tokens run at 1.2 times the rate of a large product",
    "check": "the check is 30 % off at the median",
}


@pytest.mark.parametrize("which", DOUBTS)
def test_a_contradiction_is_printed_and_not_written(
    which: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = made_measurement(**doubtful(which))
    assert len(found.doubts) == 1
    assert found.doubts[0].startswith(DOUBTS[which])
    monkeypatch.setattr("perfmodel.measure.measure", lambda **_: found)
    path = tmp_path / "new" / "mine.toml"
    text, document = run("measure", "-o", path), run("measure", "-o", path, "--json")
    for answer in (text, document):
        assert answer.code == 1
        (line,) = answer.err.splitlines()
        for words in ("mine.toml was not written", DOUBTS[which], "a calmer machine or --threads 1 helps"):
            assert words in line
    assert list(tmp_path.iterdir()) == []
    assert json.loads(document.out)["doubts"] == found.doubts
    assert "cpu.dram_efficiency" in text.out
    assert DOUBTS[which] in text.out
    with pytest.raises(PerfModelError, match="was not written"):
        found.write(path)
    assert list(tmp_path.iterdir()) == []
    # Looking at it without a file is no failure.
    assert run("measure").code == 0


def test_what_holds_together_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Just within every limit; a folder that is missing is made, as other commands do."""
    fits = packed()[1]
    blas = fits.blas._replace(residuals=np.log([1.24]), vector_flops_per_s=1.09 * 1.25 * PACKED["matrix"])
    calm, other = Timing(1.0, 0.0, 3, 1), Timing(1.0, None, 1, 1, calm=False)
    check = [CheckRow(LAYERS[0], "alike", 1, 1, one, said) for one, said in ((calm, 1.24), (other, 90.0))]
    bad = fits.quantised._replace(residuals=np.log([9.0]))  # is not what is written
    found = made_measurement(fits=fits._replace(blas=blas, quantised=bad), check=check)
    assert found.doubts == []
    assert found.refusal == ""
    monkeypatch.setattr("perfmodel.measure.measure", lambda **_: found)
    path = tmp_path / "new" / "folder" / "mine.toml"
    answer = run("measure", "-o", path)
    assert (answer.code, answer.err) == (0, f"wrote {path}\n")
    assert load_system(path).cpu == found.cpu


def test_one_thread_is_not_recommended_to_itself() -> None:
    found = made_measurement(threads=(1,), **doubtful("check"))
    assert found.refusal.endswith("; a calmer machine helps")


def test_a_busy_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """All cores disturbed, one thread calm: that one is fitted, checked and written, and a note says so."""
    here = MACHINE._replace(cores=2, cache_bytes=2**20)
    seconds = iter([row.timing for row in disturb(made_rows(PACKED, threads=(1, 2)), 2)])
    monkeypatch.setattr(measurement, "find_machine", lambda: here)
    monkeypatch.setattr(measurement, "time_cases", lambda cases, *a, **k: [next(seconds) for _ in cases])
    path = tmp_path / "mine.toml"
    answer = run("measure", "--no-gpu", "--memory-gb", 0.1, "--seconds", 100, "-o", path)
    assert (answer.code, answer.err) == (0, f"wrote {path}\n")
    assert "too few experiments on 2 threads were left undisturbed" in answer.out
    assert "cpu.threads = 1" in answer.out
    assert "the constants leave out 40" in answer.out
    cpu = load_system(path).cpu
    assert cpu is not None
    assert (cpu.threads, cpu.cores) == (1, 2)
    assert cpu.source_of("threads").citation == "most threads that were measured undisturbed"
    assert "on 1 thread" in cpu.source_of("peak_tflop_per_s.fp32").citation


# The check


@given(st.integers(0, 2**32), st.integers(1, 6), st.integers(1, 3))
def test_the_forward_pass(seed: int, tokens: int, top_k: int) -> None:
    random = np.random.default_rng(seed)
    hidden, inner, count = 5, 7, 4
    draw: Callable[..., Any] = lambda *shape: random.standard_normal(shape).astype(np.float32)  # noqa: E731
    experts = [(draw(inner, hidden), draw(inner, hidden), draw(hidden, inner)) for _ in range(count)]
    states, gates = draw(tokens, hidden), draw(tokens, top_k)
    picks = np.argsort(random.random((tokens, count)), axis=1)[:, :top_k]
    expected = np.zeros((tokens, hidden))
    for t, j in itertools.product(range(tokens), range(top_k)):
        gate, up, down = (one.astype(np.float64) for one in experts[picks[t, j]])
        g = gate @ states[t]
        expected[t] += gates[t, j] * (down @ (g / (1 + np.exp(-g)) * (up @ states[t])))
    assert_allclose(forward(states, picks, gates, experts), expected, rtol=1e-3, atol=1e-4)


def test_the_prediction_is_the_closed_form_of_the_system() -> None:
    system = made_measurement().system
    assert system.cpu is not None
    layer = fitting_layer(LAYERS[0], 2**29, 10.0)
    assert layer.intermediate * layer.factor == LAYERS[0].intermediate
    picks = _picks(layer, "random", 16)
    assert all(len(set(row)) == layer.top_k for row in picks.tolist())
    for threads in (1, 8):
        cpu = system.with_values({"cpu.threads": threads}).cpu
        assert cpu is not None
        expected = sum(
            reference.cpu_expert_time(
                tokens=int(count), params=layer.params, weight_bytes=4.0 * layer.params, hidden=layer.hidden,
                flops_per_s=cpu.effective_flops_per_s(), vector_flops_per_s=cpu.effective_vector_flops_per_s,
                tile_rows=cpu.tile_rows or 1, bytes_per_s=cpu.effective_dram_bandwidth_bytes_per_s,
                overhead_s=cpu.expert_overhead_s, pack_bytes_per_s=cpu.effective_pack_bytes_per_s,
            )
            for count in np.unique(picks, return_counts=True)[1]
        )  # fmt: skip
        assert_allclose(_predicted(system, layer, picks, threads), expected, rtol=1e-12, atol=0)


def test_disturbed_rows_do_not_count() -> None:
    calm, other = Timing(1.0, 0.0, 3, 1), Timing(9.0, 0.0, 1, 1, calm=False)
    rows = [CheckRow(LAYERS[0], "alike", 1, 1, one, 1.25) for one in (calm, other, other)]
    assert median_error(rows) == 0.25
    assert median_error(rows[1:]) is None


# The GPU


class FakeGpu:
    """A GPU with known constants."""

    name = "Fake GPU"
    memory_bytes = 24e9
    launch_s, gemv_rate, gemv_n_half, read_rate = 4e-6, 700e9, 1.4e6, 900e9
    latency_s, link_rate, link_n_half, pageable_rate = 6e-6, 24e9, 96e3, 8e9

    def read(self, size: int) -> float:
        return 3e-6 + size / self.read_rate

    def gemv(self, rows: int, cols: int) -> float:
        return self.launch_s + (2 * rows * cols + self.gemv_n_half) / self.gemv_rate

    def launch(self) -> float:
        return self.launch_s

    def synchronise(self) -> float:
        return 20e-6

    def copy(self, size: int, pinned: bool) -> float:
        if size <= TINY:
            return self.latency_s
        return self.latency_s + (size + self.link_n_half) / (self.link_rate if pinned else self.pageable_rate)


def test_constants_of_a_gpu() -> None:
    device = FakeGpu()
    seen: list[tuple[int, int]] = []
    rows = measure_gpu(device, lambda *one: seen.append(one))
    assert seen[-1][0] == seen[-1][1]
    assert {row.size for row in rows if row.kind == "read"} == set(READS)
    assert {row.size for row in rows if row.kind == "pinned"} == {TINY, *COPIES}
    found = gpu_constants(device, rows)
    expected = {
        "gpu.memory_capacity_gb": 24.0, "gpu.memory_bandwidth_gb_per_s": 2**30 / (3e-6 + 2**30 / 900e9) / 1e9,
        "gpu.memory_n_half_kb": 1400.0, "gpu.launch_overhead_us": 4.0, "link.bandwidth_gb_per_s": 24.0,
        "link.efficiency": 1.0, "link.latency_us": 6.0, "link.n_half_kb": 96.0,
    }  # fmt: skip
    rate = found.values.pop("gpu.memory_efficiency") * found.values["gpu.memory_bandwidth_gb_per_s"]
    assert_allclose(rate, 700.0, rtol=1e-6, atol=0)
    assert found.values.keys() == expected.keys()
    assert_allclose(list(found.values.values()), list(expected.values()), rtol=1e-6, atol=0)
    assert_allclose(found.pageable.bytes_per_s, 8e9, rtol=1e-6, atol=0)


@given(st.floats(0.0, 1e-3), st.floats(1e8, 1e12))
def test_a_line_through_exact_times(fixed: float, rate: float) -> None:
    sizes = [2.0**power for power in range(12, 29, 2)]
    found = fit_line(sizes, [fixed + size / rate for size in sizes])
    assert_allclose(found.bytes_per_s, rate, rtol=1e-6, atol=0)
    assert_allclose(found.fixed_s, fixed, rtol=1e-5, atol=1e-9 * max(sizes) / rate)


def test_a_line_has_no_negative_time() -> None:
    sizes = [1e6, 2e6, 4e6]
    found = fit_line(sizes, [size / 1e9 - 1e-5 for size in sizes])
    assert found.fixed_s == 0.0
    assert found.bytes_per_s > 1e9


def test_a_gpu_by_torch() -> None:
    """The calls are those of PyTorch: on the processor, with a clock of ours in place of the GPU's."""
    torch = pytest.importorskip("torch")
    from perfmodel.measure.torch_gpu import TorchDevice

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = time.perf_counter()

        def synchronize(self) -> None:
            pass

        def elapsed_time(self, end: Any) -> float:
            return float(1e3 * (end.at - self.at))

    cuda = SimpleNamespace(
        init=lambda: None, current_device=lambda: 0, synchronize=lambda: None, Event=Event,
        get_device_properties=lambda _: SimpleNamespace(name="none", total_memory=10**9),
        mem_get_info=lambda _: (2**25, 2**30),
    )  # fmt: skip
    fake = SimpleNamespace(
        cuda=cuda, device=lambda kind, index: torch.device("cpu"),
        ones=lambda *a, pin_memory=False, **k: torch.ones(*a, **k),
        **{name: getattr(torch, name) for name in ("zeros", "empty", "sum", "mv", "float16", "float32", "uint8")},
    )  # fmt: skip
    device = TorchDevice(fake)
    calls = (
        device.read(2**16), device.gemv(64, 32), device.launch(), device.synchronise(),
        device.copy(TINY, True), device.copy(5000, False), device.copy(2**20, True),
    )  # fmt: skip
    assert all(0.0 < seconds < 10.0 for seconds in calls)


def test_values_of_a_gpu_become_a_system(tmp_path: Path) -> None:
    device = FakeGpu()
    rows = measure_gpu(device)
    found = gpu_constants(device, rows)
    sources = gpu_sources(found, rows, device.name, MACHINE.versions)
    whole = made_measurement(gpu=device.name, gpu_rows=rows, values=found.values, sources=sources)
    path = tmp_path / "both.toml"
    whole.write(path)
    back = load_system(path)
    assert back.source_of("link.latency_us").source == "measured"
    assert "Fake GPU" in back.source_of("gpu.memory_efficiency").citation
    system = measurement.measured_system(load_system(measurement.BASE), whole.cpu, found.values, sources)
    assert system.content_hash() == back.content_hash()


# Whole runs


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A real run, as short as allowed, of the command, believed whatever it says; the file and the document."""
    path = tmp_path_factory.mktemp("measured") / "mine.toml"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measurement, "find_doubts", lambda *_: [])
        return path, run("measure", "--seconds", 1, "--threads", 1, "--no-gpu", "--json", "-o", path).document


def test_a_short_run_writes_a_system(short: tuple[Path, Any]) -> None:
    path, document = short
    system: System = load_system(path)
    assert system.cpu is not None
    assert document["overrides"] == []
    written = {one["key"]: one["value"] for one in document["constants"]}
    assert written == {one.key: one.value for one in system.cpu.constants()}
    assert {row["kernel"] for row in document["rows"]} == {"read", "blas", "int8", "int4"}
    assert all(row["seconds"] > 0 and row["passes"] >= 1 for row in document["rows"])
    assert document["seconds"] < 90
    assert [path.name for path in path.parent.iterdir()] == ["mine.toml"]


def test_a_run_with_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPU, check and report, on times that a fake clock gives."""
    monkeypatch.setattr(measurement, "find_gpu", lambda: (FakeGpu(), ""))
    ticks = itertools.count()
    here = find_machine()._replace(cores=1, sockets=1, cache_bytes=2**20, free_bytes=10**9)
    monkeypatch.setattr(measurement, "find_machine", lambda: here)
    monkeypatch.setattr(measurement, "time_cases", lambda cases, *a, **k: [Timing(1e-3, 0.1, 3, 1)] * len(cases))
    monkeypatch.setattr(
        "perfmodel.measure.check.time_cases", lambda cases, *a, **k: [Timing(1e-3, 0, 3, 1)] * len(cases)
    )
    found = measure(check=True, seconds=1, memory_gb=0.1, clock=lambda: float(next(ticks)))
    assert found.gpu == "Fake GPU"
    assert {row.threads for row in found.check} == {1}
    assert found.check_error is not None
    answer = run("measure", "--check", "--gpu", "--memory-gb", 0.1, "--kernels", "quantised")
    assert answer.code == 0, answer.err
    for words in (
        "median error",
        "Fake GPU",
        "pageable copies 8 GB/s",
        "cpu.dram_efficiency",
        "note: arithmetic rates",
    ):
        assert words in answer.out
    document = run("measure", "--check", "--gpu", "--memory-gb", 0.1, "--json").document
    assert len(document["check"]) == len(found.check)
    assert document["gpu"] == "Fake GPU"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--seconds", "0.5"), ["--seconds", "0.5", "allowed 1 to 3600"]),
        (("--seconds", "soon"), ["--seconds", "'soon'", "a number"]),
        (("--memory-gb", "0.001"), ["--memory-gb", "0.001", "allowed at least"]),
        (("--memory-gb", "-1"), ["--memory-gb", "-1", "above 0"]),
        (("--memory-gb", "1e9"), ["--memory-gb", "1e+09", "allowed at most"]),
        (("--threads", "0"), ["--threads", "0", "allowed 1 to"]),
        (("--threads", "100000"), ["--threads", "100000", "allowed 1 to"]),
        (("--threads", "1,,2"), ["--threads", "''", "whole numbers"]),
        (("--threads", "x" * 5000), ["--threads", "whole numbers"]),
        (("--kernels", "mkl"), ["--kernels", "'mkl'", "blas, quantised"]),
        (("--base", "nothing"), ["nothing"]),
        (("-o", "spec.json"), ["-o", "spec.json", ".toml"]),
        (("-o", ""), ["-o", "''", ".toml"]),
        (("-o", "/proc/nowhere/x.toml"), ["-o", "/proc"]),
        (("--gpu", "--no-gpu"), ["--no-gpu", "--gpu"]),
    ],
)
def test_refusals(arguments: tuple[str, ...], words: list[str]) -> None:
    check_refusal(run("measure", *arguments), *words)


def test_the_base_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "base.toml"
    made_measurement().write(path)
    before = path.read_bytes()
    check_refusal(run("measure", "-o", path, "--base", path), "-o", "the base itself")
    assert path.read_bytes() == before


def test_a_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurement, "find_gpu", lambda: (None, "PyTorch is not installed"))
    check_refusal(run("measure", "--gpu"), "--gpu", "PyTorch is not installed")


def test_threads_that_cannot_be_set() -> None:
    without = MACHINE._replace(blas="")
    assert measurement.thread_counts(None, without) == (8,)
    assert measurement.thread_counts([8], without) == (8,)
    with pytest.raises(PerfModelError, match=r"--threads: found 1, allowed 8"):
        measurement.thread_counts([1], without)
    assert measurement.thread_counts(None, MACHINE) == (1, 8)
    assert measurement.thread_counts([4, 2, 4], MACHINE) == (2, 4)


def test_an_interrupt_leaves_nothing(tmp_path: Path) -> None:
    code = (
        "import perfmodel.measure.measurement as s, sys\n"
        "from perfmodel.cli import main\n"
        "old = s.time_cases\n"
        "def told(*a, **k):\n"
        "    print('now', flush=True)\n"
        "    return old(*a, **k)\n"
        "s.time_cases = told\n"
        "sys.exit(main(['measure', '--seconds', '600', '--no-gpu', '-o', 'mine.toml']))\n"
    )
    # A command that was started in the background would ignore interrupts.
    start = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    with subprocess.Popen(
        [sys.executable, "-c", start + code],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == "now\n"
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, "", "perfmodel: interrupted\n")
    assert list(tmp_path.iterdir()) == []


# The page

PAGE = (ROOT / "docs" / "measuring.md").read_text(encoding="utf-8")


def test_commands_of_the_page(short: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Measuring once is enough: commands of that kind are only parsed, the others use the file it wrote."""
    from perfmodel.cli import build_parser

    monkeypatch.chdir(short[0].parent)
    lines = [
        line
        for block in re.findall(r"^```sh\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)
        for line in block.splitlines()
    ]
    assert lines
    for line in lines:
        program, *words = shlex.split(line)
        assert program == "perfmodel"
        if words[0] == "measure":
            build_parser().parse_args(words)
        else:
            answer = run(*words)
            assert answer.code == 0, answer.err


def test_every_option_and_key_is_explained(short: tuple[Path, Any]) -> None:
    help_text = run("measure", "--help").out
    for option in set(re.findall(r"--[a-z-]+", help_text)) - {"--help"}:
        assert f"`{option}" in PAGE or f" {option}" in PAGE, option
    keys = {f"cpu.{one['key'].partition('.')[0]}" for one in short[1]["constants"]} - {"cpu.sockets"}
    keys |= set(gpu_constants(FakeGpu(), measure_gpu(FakeGpu())).values)
    for key in keys | {"cpu.thread_bandwidth_gb_per_s"}:
        assert f"`{key}`" in PAGE, key


def test_json_is_one_document(short: tuple[Path, Any]) -> None:
    assert json.loads(json.dumps(short[1], allow_nan=False)) == short[1]
    assert_array_equal(sorted(short[1]["fits"]), ["blas", "quantised"])
