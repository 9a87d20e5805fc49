"""Rounding of matrices: grids, second moments, and GPTQ against slow solutions of its definition."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal
from numpy.typing import NDArray

from perfmodel.losses import gptq
from perfmodel.losses.gptq import LEAST_DAMPING, Moments, moments, quantised, shrinkage
from perfmodel.losses.grids import rounded, scale_bits_per_weight

Floats = NDArray[np.float64]
WIDTHS = (1, 2, 3, 4, 8)

widths = st.sampled_from(WIDTHS)
seeds = st.integers(0, 2**32 - 1)


def correlated(seed: int, num_rows: int, size: int) -> Floats:
    """Rows whose entries depend on each other, of unlike sizes."""
    rng = np.random.default_rng(seed)
    mix = rng.normal(size=(size, size)) * 0.5 + np.diag(rng.uniform(0.1, 2, size))
    return rng.normal(size=(num_rows, size)) @ mix


# --- oracles, in plain Python ---


def grid_of(weights: list[Fraction], bits: int) -> list[Fraction]:
    """Every value that a weight may take."""
    if bits == 1:
        size = sum(map(abs, weights), Fraction(0)) / len(weights)
        return [-size, size]
    low, high = min(*weights, Fraction(0)), max(*weights, Fraction(0))
    step = (high - low) / (2**bits - 1)
    if step == 0:
        return [Fraction(0)]
    zero = round(-low / step)  # to even, as Python rounds fractions
    return [(level - zero) * step for level in range(2**bits)]


def nearest(weight: Fraction, grid: list[Fraction]) -> Fraction:
    return min(grid, key=lambda value: abs(value - weight))


def inverse(matrix: list[list[Fraction]]) -> list[list[Fraction]]:
    """Gauss and Jordan, without pivots: for a positive definite matrix."""
    size = len(matrix)
    work = [[*row, *(Fraction(int(i == j)) for j in range(size))] for i, row in enumerate(matrix)]
    for i in range(size):
        work[i] = [value / work[i][i] for value in work[i]]
        for j in range(size):
            if j != i:
                work[j] = [a - work[j][i] * b for a, b in zip(work[j], work[i], strict=True)]
    return [row[size:] for row in work]


def one_column_after_another(
    row: list[Fraction], second: list[list[Fraction]], bits: int, group: int
) -> list[Fraction]:
    """One row by the definition: round a weight, move the others to where the output changes least, and forget it."""
    left, inv, found, grid = list(row), inverse(second), [], []
    for column in range(len(row)):
        if column % group == 0:
            grid = grid_of(left[:group], bits)
        value = nearest(left[0], grid)
        share = (left[0] - value) / inv[0][0]
        left = [weight - share * inv[0][j] for j, weight in enumerate(left)][1:]
        inv = [[inv[i][j] - inv[i][0] * inv[0][j] / inv[0][0] for j in range(1, len(inv))] for i in range(1, len(inv))]
        found.append(value)
    return found


def with_downdates(weights: Floats, second: Floats, bits: int, group: int) -> Floats:
    """The same in float64 for whole matrices: the inverse of what is left is brought up to date at every column."""
    left, inv, found = weights.copy(), np.linalg.inv(second), np.empty_like(weights)
    size = weights.shape[1]
    for column in range(size):
        if column % group == 0:
            end = min(column + group, size)
            block = left[:, column:end]
            low, high = np.minimum(block.min(1), 0), np.maximum(block.max(1), 0)
            scale = np.abs(block).mean(1) if bits == 1 else (high - low) / (2**bits - 1)
            zero = np.round(-low / scale)
        value = left[:, column]
        if bits == 1:
            found[:, column] = np.where(value >= 0, scale, -scale)
        else:
            found[:, column] = (np.clip(np.round(value / scale) + zero, 0, 2**bits - 1) - zero) * scale
        share = (value - found[:, column]) / inv[column, column]
        left -= share[:, None] * inv[column]
        inv -= np.outer(inv[:, column], inv[column]) / inv[column, column]
    return found


# --- grids ---


@given(seeds, widths, st.integers(1, 9), st.one_of(st.none(), st.integers(2, 12)))
def test_rounding_takes_the_nearest_value_of_the_grid(seed: int, bits: int, size: int, group: int | None) -> None:
    weights = np.random.default_rng(seed).normal(size=(2, size))
    found = rounded(weights, bits, group)
    step = group or size
    for row in range(2):
        for start in range(0, size, step):
            exact = [Fraction(value) for value in weights[row, start : start + step]]
            grid = grid_of(exact, bits)
            expected = [float(nearest(value, grid)) for value in exact]
            assert_allclose(found[row, start : start + step], expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("bits", WIDTHS)
def test_special_rows(bits: int) -> None:
    assert_array_equal(rounded(np.zeros((2, 3)), bits), np.zeros((2, 3)))
    same = rounded(np.full((1, 4), -0.75), bits)
    assert_allclose(same, np.full((1, 4), -0.75), rtol=1e-15, atol=0)
    assert_array_equal(rounded(np.array([[0.5, 0.0]]), bits)[0, 0] > 0, True)


def test_one_bit_is_sign_times_mean_magnitude() -> None:
    found = rounded(np.array([[1.0, -3.0, 0.0, -0.0]]), 1)
    assert found.tolist() == [[1.0, -1.0, 1.0, 1.0]]


def test_zero_is_on_every_wider_grid() -> None:
    assert rounded(np.array([[3.0, 9.0, 0.2]]), 2).tolist() == [[3.0, 9.0, 0.0]]


def test_halves_go_to_even() -> None:
    # One unit a step: 0.5 and 2.5 lie between two levels.
    assert rounded(np.array([[0.0, 0.5, 1.5, 2.5, 15.0]]), 4).tolist() == [[0.0, 0.0, 2.0, 2.0, 15.0]]


def test_scale_bits() -> None:
    assert scale_bits_per_weight([(8, 64), (4, 32)], 1) == (8 + 4) * 16 / (8 * 64 + 4 * 32)
    assert scale_bits_per_weight([(8, 64)], 3, 48) == 2 * 19 / 64  # the last group is shorter


# --- second moments ---


def plain_shrinkage(rows: Floats) -> float:
    """By the definition: how much the products of single rows scatter about their mean."""
    count, size = rows.shape
    products = np.array([np.outer(row, row) for row in rows])
    second = products.mean(0)
    scatter = sum(np.sum((one - second) ** 2) for one in products) / count**2
    away = np.sum((second - np.trace(second) / size * np.eye(size)) ** 2)
    return float(min(scatter / away, 1))


@given(seeds, st.integers(2, 30), st.integers(2, 8))
def test_shrinkage_is_that_of_ledoit_and_wolf(seed: int, count: int, size: int) -> None:
    rows = correlated(seed, count, size)
    found = shrinkage(rows, rows.T @ rows / count)
    assert 0 <= found <= 1
    assert_allclose(found, plain_shrinkage(rows), rtol=1e-9, atol=0)
    for changed in (rows[::-1], -rows, rows * 2.0**40):
        assert_allclose(shrinkage(changed, changed.T @ changed / count), found, rtol=1e-9, atol=0)


def test_shrinkage_of_many_rows_is_small_and_of_unrelated_ones_large() -> None:
    rows = correlated(1, 20_000, 6)
    assert shrinkage(rows, rows.T @ rows / len(rows)) < 0.01
    white = np.random.default_rng(2).normal(size=(50, 40))
    assert shrinkage(white, white.T @ white / 50) > 0.8
    assert shrinkage(np.eye(3) * 3**0.5, np.eye(3)) == 1.0  # nothing tells it from the identity


@pytest.mark.parametrize("damping", ["auto", 0.01, 0.5, 1000.0])
@pytest.mark.parametrize("order", gptq.Order.__args__)
def test_the_factor_is_that_of_the_inverse(damping: gptq.Damping, order: gptq.Order) -> None:
    rows = correlated(3, 40, 9)
    found = moments(rows, damping, order)
    second = rows.T @ rows / len(rows)
    expected = second + found.damping * np.diagonal(second).mean() * np.eye(9)
    expected = expected[np.ix_(found.order, found.order)]
    assert_array_equal(found.factor, np.triu(found.factor))
    product = found.factor @ expected @ found.factor.T  # the identity, up to the unit of the moment
    assert_allclose(product / product[0, 0], np.eye(9), rtol=1e-9, atol=1e-9)
    if order == "activation":
        assert (np.diff(np.diagonal(second)[found.order]) <= 0).all()
    if damping == "auto":
        rho = shrinkage(rows, second)
        assert_allclose(found.damping, rho / (1 - rho), rtol=1e-12, atol=0)
    else:
        assert_allclose(found.damping, damping, rtol=1e-12, atol=0)


def test_automatic_damping_has_a_floor() -> None:
    assert_allclose(moments(correlated(4, 50_000, 3)).damping, LEAST_DAMPING, rtol=1e-12, atol=0)


def test_without_inputs_nothing_is_related() -> None:
    assert_array_equal(moments(np.zeros((5, 3))).factor, np.eye(3))


# --- GPTQ ---


@given(seeds, widths, st.integers(1, 6), st.integers(2, 6))
def test_equals_the_exact_solution(seed: int, bits: int, size: int, group: int) -> None:
    rows = correlated(seed, 3 * size, size)
    weights = np.random.default_rng(seed + 1).normal(size=(2, size))
    found = quantised(weights, moments(rows, 0.1), bits, group)
    second = [[Fraction(value) for value in row] for row in rows.T @ rows / len(rows)]
    mean = sum((second[i][i] for i in range(size)), Fraction(0)) / size
    for i in range(size):
        second[i][i] += mean / 10
    for row, exact in zip(found, weights, strict=True):
        expected = one_column_after_another([Fraction(value) for value in exact], second, bits, group)
        assert_allclose(row, [float(value) for value in expected], rtol=1e-8, atol=0)


@pytest.mark.parametrize("group", [None, 32, 50, 128, 200])
@pytest.mark.parametrize("bits", [1, 3])
def test_blocks_of_columns_change_nothing(bits: int, group: int | None) -> None:
    rows, weights = correlated(5, 600, 300), np.random.default_rng(6).normal(size=(7, 300))
    second = rows.T @ rows / len(rows)
    second += 0.05 * np.diagonal(second).mean() * np.eye(300)
    expected = with_downdates(weights, second, bits, group or 300)
    assert_allclose(quantised(weights, moments(rows, 0.05), bits, group), expected, rtol=1e-7, atol=0)


@given(st.integers(1, 700), st.integers(1, 700))
def test_blocks_cover_all_columns_and_break_no_group(size: int, group: int) -> None:
    group = min(size, group)
    blocks = gptq._blocks(size, group)
    assert [start for start, _ in blocks] == [0, *(stop for _, stop in blocks[:-1])]
    assert blocks[-1][1] == size
    assert all(0 < stop - start <= 128 for start, stop in blocks)
    for first in range(0, size, group):
        end = min(first + group, size)
        (home,) = [block for block in blocks if block[0] <= first < block[1]]
        assert home[0] == first or end <= home[1]


@given(seeds, widths, st.integers(1, 20), st.one_of(st.none(), st.integers(2, 20)))
def test_unrelated_inputs_leave_rounding_to_nearest(seed: int, bits: int, size: int, group: int | None) -> None:
    weights = np.random.default_rng(seed).normal(size=(3, size))
    sizes = np.diag(np.random.default_rng(seed).uniform(0.5, 2, size))
    found = quantised(weights, Moments(np.arange(size), sizes, 0.0), bits, group)
    assert_allclose(found, rounded(weights, bits, group), rtol=1e-14, atol=0)


@given(seeds, widths)
def test_an_input_that_is_never_there_is_rounded_to_nearest(seed: int, bits: int) -> None:
    rows, weights = correlated(seed, 30, 6), np.random.default_rng(seed).normal(size=(4, 6))
    rows[:, 2] = 0
    found = quantised(weights, moments(rows), bits)
    assert_allclose(found[:, 2], rounded(weights, bits)[:, 2], rtol=1e-12, atol=0)


def _error(weights: Floats, found: Floats, rows: Floats) -> float:
    return float(np.sum((rows @ (found - weights).T) ** 2))


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_output_errors_on_seen_rows_fall(bits: int) -> None:
    ratios = []
    for seed in range(60):
        rows, weights = correlated(seed, 200, 24), np.random.default_rng(seed).normal(size=(8, 24))
        found = quantised(weights, moments(rows, 0.01), bits)
        ratios.append(_error(weights, found, rows) / _error(weights, rounded(weights, bits), rows))
    assert max(ratios) < 1.0
    assert np.mean(ratios) < 0.6


@given(seeds, st.sampled_from([2, 3, 4]))
def test_rows_are_independent_and_their_unit_does_not_matter(seed: int, bits: int) -> None:
    weights, inputs = np.random.default_rng(seed).normal(size=(5, 9)), moments(correlated(seed, 40, 9))
    found = quantised(weights, inputs, bits, 4)
    assert_allclose(quantised(weights[[3, 1]], inputs, bits, 4), found[[3, 1]], rtol=1e-13, atol=0)
    assert_allclose(quantised(weights * 2.0**-30, inputs, bits, 4), found * 2.0**-30, rtol=0, atol=0)


@given(seeds, widths)
def test_by_activation_the_names_of_columns_do_not_matter(seed: int, bits: int) -> None:
    rng = np.random.default_rng(seed)
    rows, weights, turned = correlated(seed, 40, 8), rng.normal(size=(3, 8)), rng.permutation(8)
    found = quantised(weights, moments(rows, 0.1, "activation"), bits, 3)
    again = quantised(weights[:, turned], moments(rows[:, turned], 0.1, "activation"), bits, 3)
    assert_allclose(again, found[:, turned], rtol=1e-9, atol=0)


def test_the_matrix_that_is_given_stays_as_it_is() -> None:
    weights = np.asfortranarray(np.random.default_rng(7).normal(size=(4, 6)))
    kept = weights.copy()
    weights.flags.writeable = False
    quantised(weights, moments(correlated(8, 20, 6)), 2, 3)
    assert_array_equal(weights, kept)
