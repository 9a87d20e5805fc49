"""Intervals from residuals: they hold what they say on data of known kind, by source, and say when they do not."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from perfmodel.errors import SpecError
from perfmodel.evidence.intervals import (
    ALL,
    MIN_ROWS,
    Coverage,
    _tested,
    build_intervals,
    class_sources,
    coverage,
    effective_rows,
    fewest_sources,
    interval,
    own_interval,
)


def clustered(seed: int, sources: int, most: int, between: float, within: float):
    """Residuals of rows whose sources share an error."""
    draw = np.random.default_rng(seed)
    counts = draw.integers(1, most + 1, sources)
    at = np.repeat(np.arange(sources), counts)
    residuals = draw.normal(0.0, between, sources)[at] + draw.normal(0.0, within, len(at))
    return residuals, [f"s{i}" for i in at]


def test_one_row_a_source_gives_plain_quantiles() -> None:
    residuals = np.random.default_rng(0).normal(size=19)
    found = interval(residuals, [str(i) for i in range(19)], name="x")
    low, high = np.quantile(residuals, [0.1, 0.9])
    assert found.low == pytest.approx(math.exp(-high), rel=1e-12)
    assert found.high == pytest.approx(math.exp(-low), rel=1e-12)
    assert (found.level, found.rows, found.sources, found.name) == (0.8, 19, 19, "x")


@given(st.integers(0, 10_000), st.floats(-1.0, 1.0))
def test_an_interval_moves_with_its_residuals(seed, shift) -> None:
    residuals, source = clustered(seed, 12, 6, 0.2, 0.1)
    found, moved = interval(residuals, source), interval(residuals + shift, source)
    assert 0.0 < found.low <= found.high
    # Predictions that are all too high by a factor put the measured value lower by it.
    assert_allclose([moved.low, moved.high], [found.low / math.exp(shift), found.high / math.exp(shift)], rtol=1e-9)
    wide = interval(residuals, source, 0.84)
    assert wide.low <= found.low
    assert wide.high >= found.high


def test_a_large_source_does_not_narrow_the_interval() -> None:
    residuals = np.concatenate([np.linspace(-0.5, 0.5, 11), np.zeros(200)])
    source = [str(i) for i in range(11)] + ["big"] * 200
    by_source = interval(residuals, source)
    by_row = interval(residuals, [str(i) for i in range(211)])
    assert by_source.high / by_source.low > 2.0
    assert by_row.high / by_row.low == pytest.approx(1.0)
    # Repeating every row of a source says nothing new about the next source.
    again = interval(np.repeat(residuals, 3), list(np.repeat(source, 3)))
    assert again.low == pytest.approx(by_source.low, rel=0.1)
    assert again.high == pytest.approx(by_source.high, rel=0.1)


@pytest.mark.parametrize(("sources", "most"), [(9, 1), (20, 1), (20, 5), (60, 20)])
def test_new_sources_are_covered_less_the_fewer_are_known(sources, most) -> None:
    inside = []
    for seed in range(250):
        found = interval(*clustered(seed, sources, most, 0.25, 0.15))
        draw = np.random.default_rng(seed + 10_000)
        new = draw.normal(0.0, 0.25, 40) + draw.normal(0.0, 0.15, 40)  # a row each of 40 new sources
        inside.append(np.mean((found.low <= np.exp(-new)) & (np.exp(-new) <= found.high)))
    least = 0.8 * (sources - 1) / (sources + 1)
    if most == 1:  # what is left of the level among K values and one more
        assert np.mean(inside) == pytest.approx(least, abs=0.025)
    else:
        assert least - 0.01 < np.mean(inside) < 0.81


def test_classes_fall_back_to_their_parents() -> None:
    residuals, source = clustered(1, 30, 4, 0.2, 0.1)
    rows = len(residuals)
    large = [("cpu/llama.cpp", "cpu") if int(s[1:]) < 20 else ("cpu/fiddler", "cpu") for s in source]
    large = [("resident/vllm", "resident") if int(s[1:]) in (28, 29) else path for s, path in zip(source, large, strict=True)]  # fmt: skip # noqa: E501
    found = build_intervals(residuals, source, large)
    assert {"cpu", "cpu/llama.cpp", ALL} <= set(found.by_name)
    assert "resident" not in found.by_name
    assert found.of(("cpu/llama.cpp", "cpu")).name == "cpu/llama.cpp"
    assert found.of(("cpu/unseen", "cpu")).name == "cpu"
    assert found.of(("resident/vllm", "resident")).name == ALL
    assert found.of(()).name == ALL
    assert found.by_name[ALL].rows == rows
    mine = [i for i, path in enumerate(large) if path[1] == "cpu"]
    assert found.by_name["cpu"] == interval(residuals[mine], [source[i] for i in mine], name="cpu")


def test_few_rows_or_sources_have_no_interval() -> None:
    source = [str(i) for i in range(30)]
    residuals = np.linspace(-0.3, 0.3, 30)
    few = [("few",) if i < MIN_ROWS - 1 else ("many",) for i in range(30)]
    assert set(build_intervals(residuals, source, few).by_name) == {ALL, "many"}
    assert (fewest_sources(), class_sources()) == (5, 11)
    with pytest.raises(SpecError, match=r"found 8 rows of 4 sources in class x, allowed: 5 or more sources .* of 80 %"):
        interval(np.zeros(8), [str(i % 4) for i in range(8)], name="x")
    interval(np.zeros(5), source[:5])
    with pytest.raises(SpecError, match=r"found 9 rows of 9 sources .*allowed: 10 or more sources .* of 90 %"):
        interval(np.zeros(9), source[:9], 0.9)
    # A class of its own takes more sources than the interval of all.
    for sources, names in ((10, {ALL}), (11, {ALL, "a"})):
        part = [("a",) if i < 20 * sources else () for i in range(400)]
        labels = [str(i % sources) if i < 20 * sources else f"other{i}" for i in range(400)]
        assert set(build_intervals(np.zeros(400), labels, part).by_name) == names


def test_one_machine_has_an_interval_of_its_own() -> None:
    residuals = np.random.default_rng(0).normal(size=30)
    found = own_interval(residuals, "a machine")
    same = interval(residuals, [str(i) for i in range(30)])
    assert_allclose(found[:3], same[:3], rtol=1e-12)
    assert found[3:] == (30, 1, "a machine")
    with pytest.raises(SpecError, match="found 9 residuals of a machine, allowed: 10 or more"):
        own_interval(residuals[:9], "a machine")


def test_bad_input_is_refused() -> None:
    with pytest.raises(SpecError, match="found level 1, allowed: above 0, below 1"):
        interval([0.0] * 20, [str(i) for i in range(20)], 1.0)
    with pytest.raises(SpecError, match="found 1 residuals of 2 rows"):
        interval([0.0], ["a", "b"])
    with pytest.raises(SpecError, match="found 0 rows"):
        interval([], [])
    with pytest.raises(SpecError, match="one of each a row"):
        build_intervals([0.0], ["a"], [])
    with pytest.raises(SpecError, match="one of each a row"):
        coverage([0.0], ["a"], [])


# ---- coverage ----


def covered(seed: int, sources: int = 40, most: int = 10, between: float = 0.25, within: float = 0.1) -> Coverage:
    residuals, source = clustered(seed, sources, most, between, within)
    return coverage(residuals, source, [("a",) if int(s[1:]) % 2 else ("b",) for s in source])


def test_coverage_of_a_source_is_by_intervals_of_the_others() -> None:
    residuals, source = clustered(2, 25, 6, 0.2, 0.1)
    found = coverage(residuals, source, [()] * len(residuals))
    for label in ("s0", "s7", "s24"):
        rest = [i for i, s in enumerate(source) if s != label]
        band = interval(residuals[rest], [source[i] for i in rest])
        mine = [i for i, s in enumerate(source) if s == label]
        assert_array_equal(found.inside[mine], [band.low <= math.exp(-residuals[i]) <= band.high for i in mine])
    assert found.share == found.inside.mean()
    assert (found.rows, found.sources) == (len(residuals), 25)


def test_coverage_is_near_the_level_and_the_tests_agree() -> None:
    trials = [covered(seed) for seed in range(20)]
    # Twenty sources a class, so a little below the level.
    assert 0.73 < np.mean([one.share for one in trials]) < 0.81
    assert 0.73 < np.mean([one.share_by_source for one in trials]) < 0.81
    for one in trials:
        assert one.sources <= one.rows
        assert 1.0 <= one.effective < 0.8 * one.rows
        assert one.p_effective > 0.01
        assert one.p_sources > 0.01
    # Rows taken for independent reject what is right more often than the effective number does.
    rejected = [sum(p < 0.05 for p in ps) for ps in zip(*((t.p_rows, t.p_effective) for t in trials), strict=True)]
    assert rejected[0] >= rejected[1]


def test_independent_rows_count_in_full() -> None:
    trials = [covered(seed, most=6, between=0.0) for seed in range(20)]
    assert np.median([one.effective / one.rows for one in trials]) > 0.7


def test_effective_rows_scatter_like_independent_ones() -> None:
    # The share of rows inside a fixed band has the variance of so many independent rows, with 0.8 of them inside.
    counts = np.array([60, *([1, 3, 5, 8, 12] * 5)])
    at = np.repeat(np.arange(len(counts)), counts)
    draw = np.random.default_rng(0)
    trials = [draw.normal(0.0, 0.2, len(counts))[at] + draw.normal(0.0, 0.15, len(at)) for _ in range(600)]
    shares = [np.mean(np.abs(r) < 1.2816 * 0.25) for r in trials]
    assert np.mean(shares) == pytest.approx(0.8, abs=0.01)
    found = np.median([effective_rows(r, at) for r in trials])
    assert found == pytest.approx(0.16 / np.var(shares), rel=0.25)
    assert found < 0.4 * len(at)


def test_rows_that_are_all_alike_count_as_their_source() -> None:
    source = np.repeat([f"s{i}" for i in range(40)], 5)
    alike = np.repeat(np.random.default_rng(0).normal(size=40), 5)
    assert effective_rows(alike, source) == pytest.approx(40.0, rel=1e-9)
    assert effective_rows(np.zeros(200), source) == pytest.approx(40.0, rel=1e-9)
    assert effective_rows(alike[::5], source[::5]) == pytest.approx(40.0, rel=1e-9)
    assert effective_rows(np.array([0.1, 0.2, 0.3]), ["a"] * 3) == pytest.approx(1.0)
    narrow = _tested(np.abs(alike) < 0.3, 40.0, source, 0.8)
    assert narrow.p_rows < narrow.p_effective < 1e-3
    assert narrow.p_sources == pytest.approx(narrow.p_effective, rel=1e-9)


def test_classes_of_their_own_level_are_covered_by_their_own_intervals() -> None:
    draw = np.random.default_rng(0)
    source = [f"s{i}" for i in range(40) for _ in range(5)]
    residuals = np.where(np.arange(200) < 100, 0.0, 0.5) + draw.normal(0.0, 0.02, 200)
    classes = [("low",) if i < 100 else ("high",) for i in range(200)]
    found = coverage(residuals, source, classes)
    assert found.p_effective > 0.05
    built = build_intervals(residuals, source, classes)
    assert built.of(("low",)).high / built.of(("low",)).low < 1.1
    assert built.of(()).high / built.of(()).low > 1.5
