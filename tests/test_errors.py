"""Statistics of residuals against plain Python."""

import itertools
import math
import statistics as plain

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from perfmodel.errors import SpecError
from perfmodel.evidence.errors import equal_sources, error_table, errors, weighted_quantile

SIZES = st.floats(-3.0, 3.0).map(lambda x: round(x, 6))
ROWS = st.lists(st.tuples(SIZES, st.sampled_from("abcd")), min_size=1, max_size=40)


def quantile(values: list[float], weights: list[float], level: float) -> float:
    """A weighted quantile by walking along the sorted values."""
    pairs = sorted(zip(values, weights, strict=True), key=lambda pair: pair[0])
    places, below = [], 0.0
    for value, weight in pairs:
        places.append((below + weight / 2, value))
        below += weight
    first, last = places[0][0], places[-1][0]
    at = first + level * (last - first)
    for (left, low), (right, high) in itertools.pairwise(places):
        if left <= at <= right:
            return low + (high - low) * (at - left) / (right - left)
    return places[-1][1] if at > last else places[0][1]


@given(ROWS, st.floats(0.0, 1.0))
def test_equal_weights_give_the_plain_quantile(rows, level) -> None:
    values = [value for value, _ in rows]
    expected = float(np.quantile(values, level))
    assert_allclose(weighted_quantile(values, np.full(len(values), 0.3), level), expected, rtol=1e-9, atol=1e-9)


@given(st.lists(st.tuples(SIZES, st.floats(0.1, 5.0)), min_size=1, max_size=20), st.floats(0.0, 1.0))
def test_weighted_quantile_is_the_plain_walk(rows, level) -> None:
    values, weights = [v for v, _ in rows], [w for _, w in rows]
    assert_allclose(weighted_quantile(values, weights, level), quantile(values, weights, level), rtol=1e-7, atol=1e-9)


@given(ROWS)
def test_statistics_are_plain_counts(rows) -> None:
    residuals, source = [r for r, _ in rows], [s for _, s in rows]
    found = errors(residuals, source)
    percentage = [abs(math.exp(r) - 1) for r in residuals]
    factors = [max(math.exp(r), math.exp(-r)) for r in residuals]
    assert (found.rows, found.sources) == (len(rows), len(set(source)))
    assert found.by_row.median == pytest.approx(plain.median(percentage), rel=1e-9, abs=1e-12)
    assert found.by_row.p90 == pytest.approx(float(np.quantile(percentage, 0.9)), rel=1e-9, abs=1e-12)
    assert found.by_row.bias == pytest.approx(math.exp(float(np.median(residuals))) - 1, rel=1e-9, abs=1e-12)
    assert found.by_row.within_close == pytest.approx(sum(f <= 1.25 for f in factors) / len(rows), rel=1e-9)
    assert found.by_row.within_near == pytest.approx(sum(f <= 1.5 for f in factors) / len(rows), rel=1e-9)
    assert found.worst_factor == pytest.approx(max(factors), rel=1e-12)
    assert factors[found.worst] == pytest.approx(max(factors), rel=1e-12)
    # Every source weighs the same: the mean over sources of each source's share.
    shares = []
    for label in set(source):
        mine = [f for f, s in zip(factors, source, strict=True) if s == label]
        shares.append(sum(f <= 1.5 for f in mine) / len(mine))
    assert found.by_source.within_near == pytest.approx(sum(shares) / len(shares), rel=1e-9, abs=1e-12)
    weights = [1 / source.count(s) for s in source]
    assert found.by_source.median == pytest.approx(quantile(percentage, weights, 0.5), rel=1e-7, abs=1e-9)
    assert found.by_source.p90 == pytest.approx(quantile(percentage, weights, 0.9), rel=1e-7, abs=1e-9)


@given(ROWS)
def test_one_row_a_source_makes_both_weightings_the_same(rows) -> None:
    found = errors([r for r, _ in rows], [str(i) for i in range(len(rows))])
    assert_allclose(found.by_source, found.by_row, rtol=1e-9, atol=1e-12)


def test_a_large_source_speaks_for_itself_only() -> None:
    found = errors([1.0] * 18 + [0.0, 0.0], ["big"] * 18 + ["a", "b"])
    assert found.by_row.within_near == pytest.approx(0.1)
    assert found.by_source.within_near == pytest.approx(2 / 3)
    assert found.by_row.median == pytest.approx(math.e - 1)
    assert found.by_source.median < 1.0
    assert_allclose(equal_sources(["x", "y", "x"]), [0.25, 0.5, 0.25])


def test_the_factor_itself_is_within() -> None:
    found = errors(np.log([1.25, 1 / 1.25, 1.5, 1 / 1.5, 1.5001, 1.0]), list("abcdef"))
    assert found.by_row.within_close == pytest.approx(3 / 6)
    assert found.by_row.within_near == pytest.approx(5 / 6)


def test_table_has_one_line_for_each_value() -> None:
    residuals = [0.1, 0.2, -0.9, 0.0, 0.4]
    table = error_table(
        residuals, list("aabbc"), {"batch": [8, 1, 8, 1, 64], "engine": ["vllm", "fiddler", None, "vllm", "vllm"]}
    )
    assert [(g.property, g.value, g.errors.rows, g.errors.sources) for g in table] == [
        ("batch", "1", 2, 2), ("batch", "8", 2, 2), ("batch", "64", 1, 1),
        ("engine", "fiddler", 1, 1), ("engine", "vllm", 3, 3),
    ]  # fmt: skip
    assert [g.errors.worst for g in table] == [1, 2, 4, 1, 4]
    assert table[1].errors.by_row == errors([0.1, -0.9], ["a", "b"]).by_row


def test_rows_without_errors_are_refused() -> None:
    for residuals, source in (([], []), ([0.1], ["a", "b"]), ([math.nan], ["a"])):
        with pytest.raises(SpecError, match="allowed: one finite number"):
            errors(residuals, source)
    with pytest.raises(SpecError, match="found 1 labels of batch, allowed: 2"):
        error_table([0.1, 0.2], ["a", "b"], {"batch": [1]})
