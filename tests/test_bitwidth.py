"""The prefix selector in its usual form: menu 1 to 4, an exact budget for each layer."""

import itertools
import math
import re
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numba.core.runtime import _nrt_python, rtsys
from numpy.testing import assert_array_equal

from perfmodel import reference
from perfmodel.bitwidth import bitwidth_front, optimal_bitwidths, select, select_bitwidths
from perfmodel.bitwidth.budget import increments
from perfmodel.errors import PolicyError
from perfmodel.kernels.selector import (
    BAD_IMPORTANCE,
    BAD_LOSSES,
    BAD_WEIGHTS,
    COARSE,
    NOTHING,
    WIDE,
    select_prefix,
    select_prefix_wide,
)


@st.composite
def layers(draw: st.DrawFn, whole: bool = False, max_experts: int = 10) -> tuple[np.ndarray, np.ndarray]:
    """Importance [E], which may tie, and losses [E, 4] of one layer; with many ties where they are whole."""
    num = draw(st.integers(1, max_experts))
    loss = st.integers(0, draw(st.sampled_from([1, 3, 40]))).map(float) if whole else st.floats(0, 1e3)
    losses = draw(st.lists(st.tuples(loss, loss, loss, loss), min_size=num, max_size=num))
    importance = draw(st.lists(st.integers(-3, 3), min_size=num, max_size=num))
    return np.array(importance, dtype=float) / num, np.array(losses)


budgets = st.one_of(st.sampled_from([1.0, 2.0, 3.0, 4.0]), st.floats(1.0, 4.0))


def steps_of(num_experts: int, mean_bits: float) -> int:
    """Increments that a mean allows, with exact arithmetic."""
    return math.floor(num_experts * (Fraction(float(mean_bits)) - 1) + Fraction(1, 10**9))


def exact_loss(losses: np.ndarray, bits: np.ndarray) -> Fraction:
    return reference.summed_loss(losses, bits - 1)


def assert_best(found: Fraction, smallest: Fraction) -> None:
    """Within the promised part of the smallest loss, be it far below the largest."""
    assert 0 <= found - smallest <= smallest * Fraction(1, 10**9)


# --- it is the best prefix split ---


@given(layers(whole=True, max_experts=14), budgets)
def test_equals_trying_every_prefix_split(layer, mean_bits) -> None:
    # Whole numbers add up exactly, so even ties must agree.
    importance, losses = layer
    expected = reference.select_prefix(importance, losses, steps_of(len(importance), mean_bits))
    assert_array_equal(select_bitwidths(importance, losses, mean_bits), expected)


@given(layers(), budgets)
def test_no_prefix_split_is_better(layer, mean_bits) -> None:
    importance, losses = layer
    bits = select_bitwidths(importance, losses, mean_bits)
    best = reference.select_prefix(importance, losses, steps_of(len(importance), mean_bits))
    assert_best(exact_loss(losses, bits), exact_loss(losses, best))


@given(layers(max_experts=6), budgets)
def test_is_the_best_of_all_ordered_assignments(layer, mean_bits) -> None:
    importance, losses = layer
    bits = select_bitwidths(importance, losses, mean_bits)
    order = np.argsort(-importance, kind="stable")
    budget = steps_of(len(order), mean_bits)
    best = min(
        exact_loss(losses[order], np.array(tried))
        for tried in itertools.combinations_with_replacement((4, 3, 2, 1), len(order))
        if sum(tried) - len(order) == budget
    )
    assert_best(exact_loss(losses, bits), best)


@pytest.mark.parametrize("num_experts", [1, 2, 3, 5, 8, 31, 32, 33, 64, 255, 512])
@pytest.mark.parametrize("kind", ["falling", "any", "few values", "zero gains"])
def test_equals_the_dynamic_program_for_any_number_of_experts(num_experts: int, kind: str) -> None:
    """Another algorithm with the same rule for ties; whole losses add up exactly in both."""
    rng = np.random.default_rng(num_experts)
    losses = {
        "falling": np.sort(rng.integers(0, 10**6, (num_experts, 4)), axis=1)[:, ::-1],
        "any": rng.integers(0, 10**6, (num_experts, 4)),
        "few values": rng.integers(0, 3, (num_experts, 4)),
        "zero gains": np.repeat(rng.integers(0, 9, (num_experts, 1)), 4, axis=1),
    }[kind].astype(float)
    importance = rng.integers(0, max(2, num_experts // 2), num_experts).astype(float)
    front = bitwidth_front(losses, importance=importance)
    for mean_bits in (1.0, 1.3, 2.0, 2.718, 3.9, 4.0):
        bits = select_bitwidths(importance, losses, mean_bits)
        step = steps_of(num_experts, mean_bits)
        assert_array_equal(bits, front.bits_at(step))
        assert np.take_along_axis(losses, bits[:, None] - 1, axis=1).sum() == front.loss[step]


@given(st.integers(20, 50), st.integers(0, 150), st.sampled_from([1, 2, 50]), st.integers(0, 2**32 - 1))
def test_few_and_many_experts_break_ties_alike(num_experts, step, most, seed) -> None:
    """Losses from 0 to ``most``: with few values nearly everything ties."""
    rng = np.random.default_rng(seed)
    losses = rng.integers(0, most + 1, (num_experts, 4)).astype(float)
    importance = rng.integers(0, 5, num_experts).astype(float)
    step = min(step, 3 * num_experts)
    bits = select_bitwidths(importance, losses, 1 + step / num_experts)
    assert_array_equal(bits, bitwidth_front(losses, importance=importance).bits_at(step))


# --- losses of very different size ---


@st.composite
def spread_layers(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """Layers whose losses span up to 120 decades, some of them 0."""
    num = draw(st.integers(1, 8))
    loss = st.one_of(st.just(0.0), st.builds(lambda x, e: x * 10.0**e, st.floats(1, 10), st.integers(-60, 60)))
    losses = draw(st.lists(st.tuples(loss, loss, loss, loss), min_size=num, max_size=num))
    return np.array(draw(st.permutations(range(num))), dtype=float), np.array(losses)


@given(spread_layers(), budgets, st.booleans())
def test_a_large_loss_does_not_drown_small_ones(layer, mean_bits, many) -> None:
    """Alone and among others, by both kernels."""
    importance, losses = layer
    best = reference.select_prefix(importance, losses, steps_of(len(importance), mean_bits))
    if many:
        bits = select_bitwidths(importance, np.stack([losses, np.ones_like(losses), losses]), mean_bits)
        assert_array_equal(bits[0], bits[2])
        assert_array_equal(bits[1], select_bitwidths(importance, np.ones_like(losses), mean_bits))
        bits = bits[0]
    else:
        bits = select_bitwidths(importance, losses, mean_bits)
    assert_best(exact_loss(losses, bits), exact_loss(losses, best))


def test_a_large_loss_that_can_be_avoided() -> None:
    losses = [[1e16, 0.5, 0, 0], [5e-4, 0, 0, 0], [0, 0, 0, 0]]
    assert select_bitwidths([3, 2, 1], losses, 2).tolist() == [3, 2, 1]
    assert select_bitwidths([3, 2, 1], losses, 2, bits=[1, 2, 3, 4]).tolist() == [3, 2, 1]
    assert select_bitwidths([3, 2, 1], losses, 2, min_bits=0).tolist() == [3, 2, 1]
    front = bitwidth_front(losses, importance=[3, 2, 1])
    assert front.bits_at(3).tolist() == [3, 2, 1]
    assert front.loss[3] == 0
    # Weights can do it as well, and numbers that no one power of two brings together.
    weights = [2.0**60, 1, 1]
    assert select_bitwidths([3, 2, 1], [[1, 2.0**-61, 0, 0], *losses[1:]], 2, weights=weights).tolist() == [3, 2, 1]
    far = [[1e300, 1e-300, 0, 0], [1e-303, 0, 0, 0], [0, 0, 0, 0]]
    assert select_bitwidths([3, 2, 1], far, 2).tolist() == [3, 2, 1]


def test_rows_that_need_the_dynamic_program_take_their_own_numbers() -> None:
    """Importance, losses and weights repeat in turn with different periods."""
    rng = np.random.default_rng(6)
    for num in (5, 40):
        losses = rng.random((3, num, 4)) * 10.0 ** rng.integers(-9, 9, (3, num, 1))
        importance, weights = rng.random((4, 2, 3, num)), rng.random((2, 3, num)) * 10.0 ** rng.integers(0, 9, num)
        bits = select_bitwidths(importance, losses, 2.5, weights=weights)
        alone = np.empty_like(bits)
        for s, t, k in np.ndindex(4, 2, 3):
            front = bitwidth_front(losses[k], importance=importance[s, t, k], weights=weights[t, k])
            alone[s, t, k] = front.bits_at(steps_of(num, 2.5))
        assert_array_equal(bits, alone)


def test_many_rows_that_need_the_dynamic_program(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(7)
    losses = rng.random((9, 6, 4)) * 10.0 ** rng.integers(-12, 12, (9, 6, 1))
    importance = rng.random((9, 6))
    expected = select_bitwidths(importance, losses, 2.5)
    monkeypatch.setattr(select, "_AT_ONCE", 50)
    assert_array_equal(select_bitwidths(importance, losses, 2.5), expected)


def test_sums_of_large_losses_do_not_overflow() -> None:
    rng = np.random.default_rng(8)
    for num in (20, 40):
        losses, importance = rng.random((num, 4)), rng.random(num)
        expected = select_bitwidths(importance, losses, 2.5)
        for exponent in (961, 1000, 1023):
            assert_array_equal(select_bitwidths(importance, np.ldexp(losses, exponent), 2.5), expected)


@pytest.mark.parametrize("num", [31, 32, 33, 100])
@pytest.mark.parametrize("kind", ["equal", "close", "few values", "huge", "signed zeros"])
def test_importance_is_ordered_exactly(num: int, kind: str) -> None:
    """Also where it ties, or differs by less than half precision holds."""
    rng = np.random.default_rng(num)
    importance = {
        "equal": np.ones(num),
        "close": 1 + rng.integers(0, 4, num) * 2.0**-52,
        "few values": rng.integers(0, 4, num).astype(float),
        "huge": rng.choice([-1.0, 1.0], num) * 10.0 ** rng.integers(290, 308, num),
        "signed zeros": rng.choice([-0.0, 0.0], num),
    }[kind]
    losses = np.tile([8.0, 8.0, 8.0, 0.0], (num, 1))  # only 4 bits help
    order = sorted(range(num), key=lambda e: (-importance[e], e))
    for wide in (0, 1, num // 2, num):
        bits = select_bitwidths(importance, losses, 1 + 3 * wide / num)
        assert_array_equal(np.sort(np.flatnonzero(bits == 4)), np.sort(order[:wide]))


# --- when it is the best of all assignments ---


@st.composite
def ordered_tables(draw: st.DrawFn, max_experts: int) -> tuple[np.ndarray, np.ndarray, float]:
    """Layers where no bit gains a less important expert more than a more important one; gains may be negative."""
    num = draw(st.integers(1, max_experts))
    gain = st.integers(-20, 20)
    steps = np.array([sorted(draw(st.lists(gain, min_size=num, max_size=num)), reverse=True) for _ in range(3)])
    last = np.array(draw(st.lists(st.integers(0, 9), min_size=num, max_size=num)))
    losses = last[:, None] + np.concatenate([np.cumsum(steps[::-1], axis=0)[::-1], np.zeros((1, num))]).T
    losses -= min(0, losses.min())
    importance = np.arange(num, 0, -1.0)
    shuffled = np.array(draw(st.permutations(range(num))))
    return importance[shuffled], losses[shuffled], draw(budgets)


@given(ordered_tables(max_experts=5))
def test_is_the_best_of_all_assignments_where_gains_follow_importance(table) -> None:
    importance, losses, mean_bits = table
    costs = np.broadcast_to(np.arange(4), losses.shape)
    budget = steps_of(len(importance), mean_bits)
    best = reference.best_assignment(losses[None], costs[None], budget, False, False)
    assert best is not None
    bits = select_bitwidths(importance, losses, mean_bits)
    assert exact_loss(losses, bits) == reference.summed_loss(losses, best[0])


@given(ordered_tables(max_experts=40))
def test_costs_nothing_against_the_optimum_where_gains_follow_importance(table) -> None:
    importance, losses, mean_bits = table
    prefix, free = select_bitwidths(importance, losses, mean_bits), optimal_bitwidths(losses, mean_bits)
    assert exact_loss(losses, prefix) == exact_loss(losses, free)


@given(layers(whole=True, max_experts=30), budgets, st.data())
def test_costs_nothing_where_losses_are_alike_and_weighted_by_importance(layer, mean_bits, data) -> None:
    importance = np.array([data.draw(st.integers(0, 50)) for _ in layer[0]], dtype=float)
    falling = np.sort(layer[1][0])[::-1]
    losses = np.tile(falling, (len(importance), 1))
    prefix = select_bitwidths(importance, losses, mean_bits, weights=importance)
    free = optimal_bitwidths(losses, mean_bits, weights=importance)
    weighted = losses * importance[:, None]
    assert exact_loss(weighted, prefix) == exact_loss(weighted, free)


@given(layers(whole=True), budgets)
def test_is_never_better_than_the_optimum(layer, mean_bits) -> None:
    importance, losses = layer
    prefix, free = select_bitwidths(importance, losses, mean_bits), optimal_bitwidths(losses, mean_bits)
    assert exact_loss(losses, free) <= exact_loss(losses, prefix)


# --- what it promises besides ---


@given(layers(), budgets)
def test_spends_the_budget_exactly_and_in_order(layer, mean_bits) -> None:
    importance, losses = layer
    bits = select_bitwidths(importance, losses, mean_bits)
    assert bits.dtype == np.int8
    assert bits.min() >= 1
    assert bits.max() <= 4
    assert bits.sum() - bits.size == math.floor(bits.size * (mean_bits - 1) + 1e-9)
    assert (np.diff(bits[np.argsort(-importance, kind="stable")]) <= 0).all()


@given(layers(), st.integers(1, 4))
def test_is_never_worse_than_uniform(layer, mean_bits) -> None:
    importance, losses = layer
    bits = select_bitwidths(importance, losses, mean_bits)
    uniform = exact_loss(losses, np.full(bits.size, mean_bits))
    assert exact_loss(losses, bits) <= uniform + Fraction(1e-12) * (1 + uniform)


@given(layers(), budgets, st.integers(-900, 900), st.booleans())
def test_does_not_depend_on_the_unit_of_losses(layer, mean_bits, exponent, weighted) -> None:
    importance, losses = layer
    # Keep clear of the range where scaling itself would lose bits.
    losses = np.where(losses < 1e-9, 0.0, losses)
    weights = 1 + np.arange(len(importance)) % 3 if weighted else None
    expected = select_bitwidths(importance, losses, mean_bits, weights=weights)
    scaled = np.ldexp(losses, exponent)
    assert_array_equal(select_bitwidths(importance, scaled, mean_bits, weights=weights), expected)
    if weights is not None:
        scaled = np.ldexp(weights, exponent)
        assert_array_equal(select_bitwidths(importance, losses, mean_bits, weights=scaled), expected)


@given(layers(whole=True), budgets, st.data())
def test_weights_are_factors_of_the_losses(layer, mean_bits, data) -> None:
    importance, losses = layer
    weights = np.array([data.draw(st.integers(0, 9)) for _ in importance], dtype=float)
    bits = select_bitwidths(importance, losses, mean_bits, weights=weights)
    assert_array_equal(bits, select_bitwidths(importance, losses * weights[:, None], mean_bits))


@given(layers(), budgets, st.randoms(use_true_random=False))
def test_follows_a_permutation_of_the_experts(layer, mean_bits, random) -> None:
    losses = layer[1]
    importance = np.arange(len(losses)) / 7  # equal ones go by index, which a permutation changes
    order = list(range(len(importance)))
    random.shuffle(order)
    bits = select_bitwidths(importance, losses, mean_bits)
    assert_array_equal(select_bitwidths(importance[order], losses[order], mean_bits), bits[order])


@given(layers(), budgets)
def test_depends_on_the_order_of_importance_only(layer, mean_bits) -> None:
    importance, losses = layer
    bits = select_bitwidths(importance, losses, mean_bits)
    assert_array_equal(select_bitwidths(np.exp(importance) - 7, losses, mean_bits), bits)


def test_equal_importance_goes_by_index() -> None:
    losses = np.tile([8.0, 8.0, 8.0, 0.0], (4, 1))  # only 4 bits help
    assert select_bitwidths(np.ones(4), losses, 1.75).tolist() == [4, 1, 1, 1]
    assert select_bitwidths([0, 1, 1, 0], losses, 1.75).tolist() == [1, 4, 1, 1]
    assert select_bitwidths([-0.0, 0.0, -1, -0.0], losses, 1.75).tolist() == [4, 1, 1, 1]


def test_equal_losses_prefer_few_wide_experts() -> None:
    assert select_bitwidths(np.arange(6.0), np.ones((6, 4)), 2.0).tolist() == [2] * 6
    assert select_bitwidths(np.arange(6.0), np.ones((6, 4)), 2.5).tolist() == [2, 2, 2, 3, 3, 3]


def test_more_bits_in_total_never_cost_more_when_losses_fall() -> None:
    rng = np.random.default_rng(3)
    losses = np.sort(rng.random((9, 4)), axis=1)[:, ::-1]
    importance = rng.random(9)
    totals = [exact_loss(losses, select_bitwidths(importance, losses, 1 + r / 9)) for r in range(28)]
    assert all(later <= earlier for earlier, later in itertools.pairwise(totals))


# --- shapes and kinds of arrays ---


def test_leading_axes_broadcast() -> None:
    rng = np.random.default_rng(1)
    importance, losses, weights = rng.random((5, 3, 6)), rng.random((3, 6, 4)), rng.random((5, 1, 6))
    bits = select_bitwidths(importance, losses, 2.5)
    weighted = select_bitwidths(importance, losses, 2.5, weights=weights)
    assert bits.shape == (5, 3, 6)
    for s, layer in itertools.product(range(5), range(3)):
        one = importance[s, layer], losses[layer]
        assert_array_equal(bits[s, layer], select_bitwidths(*one, 2.5))
        assert_array_equal(weighted[s, layer], select_bitwidths(*one, 2.5, weights=weights[s, 0]))
    rank = importance[0, 0]
    assert_array_equal(select_bitwidths(rank, losses, 2.5)[2], select_bitwidths(rank, losses[2], 2.5))
    alone = select_bitwidths(rank, losses[2], 2.5, weights=weights[:, 0])
    assert alone.shape == (5, 6)
    for s in range(5):
        assert_array_equal(alone[s], select_bitwidths(rank, losses[2], 2.5, weights=weights[s, 0]))
    # An axis in the middle: sequences of importance against tables that differ by sequence only.
    tables = rng.random((5, 1, 6, 4))
    found = select_bitwidths(importance, tables, 2.5)
    for s, layer in itertools.product(range(5), range(3)):
        assert_array_equal(found[s, layer], select_bitwidths(importance[s, layer], tables[s, 0], 2.5))


def test_any_layout_and_kind_of_numbers() -> None:
    rng = np.random.default_rng(2)
    importance, losses = rng.integers(0, 9, (4, 6)), rng.integers(0, 99, (4, 6, 4))
    expected = select_bitwidths(importance.astype(float), losses.astype(float), 2.5)
    buffer = np.zeros(8 * losses.size + 1, np.uint8)
    unaligned = buffer[1:].view(np.float64).reshape(losses.shape)
    unaligned[:] = losses
    twice = np.repeat(losses.astype(float), 2, axis=1)[:, ::2]
    fixed = losses.astype(float)
    fixed.flags.writeable = False
    tables = [losses.tolist(), losses.astype(np.float32), losses.astype(">f8"), np.asfortranarray(fixed), twice, fixed]
    for given_losses in [*tables, unaligned]:
        assert_array_equal(select_bitwidths(importance, given_losses, 2.5), expected)
        assert_array_equal(select_bitwidths(importance.tolist(), given_losses, np.float32(2.5)), expected)


def test_nothing_to_choose() -> None:
    assert select_bitwidths(np.empty((2, 3, 0)), np.empty((3, 0, 4)), 2.0).shape == (2, 3, 0)
    assert select_bitwidths(np.empty((0, 5)), np.ones((5, 4)), 2.0).shape == (0, 5)
    assert select_bitwidths(np.ones(5), np.empty((0, 5, 4)), 2.0).shape == (0, 5)
    with pytest.raises(PolicyError):
        select_bitwidths([], np.empty((0, 4)), 5.0)


@pytest.mark.parametrize("mean", [2.5, np.float64(2.5), np.float32(2.5), Fraction(5, 2)])
def test_a_mean_is_any_real_number(mean) -> None:
    assert select_bitwidths([2.0, 1.0], [[4, 3, 2, 1], [4, 3, 2, 1]], mean).sum() == 5
    assert select_bitwidths([2.0, 1.0], [[4, 3, 2, 1], [4, 3, 2, 1]], 3).sum() == 6


@pytest.mark.parametrize(
    ("num", "mean", "lowest", "expected"),
    [(6, 3, 1, 12), (10, 2.3, 1, 13), (7, 1.5, 1, 3), (0, 4, 1, 0), (512, 1 + 7 / 512, 1, 7), (10, 2.3, 2, 3)],
)
def test_budget(num: int, mean: float, lowest: int, expected: int) -> None:
    assert increments(num, mean, lowest) == expected


@given(st.integers(1, 512), st.data())
def test_a_mean_made_from_increments_gives_them_back(num, data) -> None:
    wanted = data.draw(st.integers(0, 3 * num))
    assert increments(num, 1 + wanted / num, 1) == wanted
    assert increments(num, (num + wanted) / num, 1) == wanted
    assert increments(np.array([num / 1]), (num + wanted) / num, 1).tolist() == [wanted]


@given(st.integers(10**6, 10**9), st.integers(1, 15), st.data())
def test_a_mean_of_many_weights_gives_their_increments_back(num, lowest, data) -> None:
    wanted = data.draw(st.integers(0, num))
    assert increments(num, lowest + wanted / num, lowest) == wanted
    assert increments(num, (lowest * num + wanted) / num, lowest) == wanted


@pytest.mark.parametrize("short", [1e-8, 1e-7, 1e-6])
def test_a_mean_that_is_short_of_a_step_does_not_reach_it(short: float) -> None:
    for wanted in (1, 7, 16):
        assert increments(8, 1 + (wanted - short) / 8, 1) == wanted - 1
        assert (select_bitwidths(np.arange(8.0), np.ones((8, 4)), 1 + (wanted - short) / 8) - 1).sum() == wanted - 1


def test_survives_the_largest_and_smallest_losses() -> None:
    largest = np.finfo(float).max
    losses = np.array([[largest, largest / 2, 0, 0]] * 3 + [[5e-324, 0, 0, 0]] * 3)
    importance = np.arange(6.0)[::-1]
    assert select_bitwidths(importance, losses, 2.0).tolist() == [3, 3, 3, 1, 1, 1]
    weights = [largest, largest, largest, 5e-324, 5e-324, 5e-324]
    assert select_bitwidths(importance, losses, 2.0, weights=weights).tolist() == [3, 3, 3, 1, 1, 1]
    assert select_bitwidths(importance, losses, 2.0, weights=[5e-324] * 6).tolist() == [3, 3, 3, 1, 1, 1]
    # Small losses times small weights are not lost beside an expert that no bit helps.
    small = np.ldexp([[4.0] * 4, [4.0, 2.0, 1.0, 0.5], [4.0, 2.0, 1.0, 0.5]], -1000)
    assert select_bitwidths([1, 3, 2], small, 2.0, weights=[1.0, 2.0**-90, 2.0**-93]).tolist() == [1, 4, 1]
    one = np.array([[4.0, 4.0, 4.0, 0.0]] * 2)
    assert select_bitwidths([2, 1], one, 2.5, weights=[5e-324, 5e-324]).tolist() == [4, 1]
    tiny = np.array([[1e-320, 5e-321, 0, 0]] * 2 + [[5e-324, 0, 0, 0]] * 4)
    assert select_bitwidths(importance, tiny, 1.5).tolist() == [3, 2, 1, 1, 1, 1]


# --- what it refuses ---


@pytest.mark.parametrize(
    "mean_bits",
    [0.99, 4.01, -2, math.nan, math.inf, True, "2", None, [2.0], 2j, 10**400, 10**5000, np.array([2.0])],
    ids=lambda value: str(type(value).__name__),
)
def test_refuses_an_impossible_budget(mean_bits) -> None:
    with pytest.raises(PolicyError, match=r"mean_bits is .*from 1 to 4"):
        select_bitwidths([1.0, 2.0], np.ones((2, 4)), mean_bits)


GOOD = np.ones((2, 4))


@pytest.mark.parametrize(
    ("importance", "losses", "message"),
    [
        ([1.0, math.nan], GOOD, r"importance\[1\] is nan"),
        ([1.0, -math.inf], GOOD, r"importance\[1\] is -inf"),
        ([1.0, 2.0], GOOD * [1, 1, math.inf, 1], r"losses\[0, 2\] is inf"),
        ([1.0, 2.0], GOOD * [1, math.nan, 1, 1], r"losses\[0, 1\] is nan"),
        ([1.0, 2.0], GOOD * [1, -1, 1, 1], r"losses\[0, 1\] is -1.0; it must be 0 or more"),
        ([1.0, 2.0], np.ones((3, 4)), r"shape \[2\] and losses \[3, 4\]"),
        ([1.0, 2.0], np.ones((2, 3)), r"shape \[2\] and losses \[2, 3\]"),
        ([1.0, 2.0], np.ones(4), "shape"),
        (1.0, GOOD, "shape"),
        (np.float64(1.0), np.float64(1.0), "shape"),
        (np.ones((3, 2)), np.ones((4, 2, 4)), "do not match"),
        (["a", "b"], GOOD, "type <U1"),
        ([True, False], GOOD, "type bool"),
        ([1j, 2], GOOD, "type complex128"),
        ([10**400, 2], GOOD, "type object"),
        ([None, 2], GOOD, "type object"),
        (None, GOOD, "type object"),
        ([[1.0], [1.0, 2.0]], GOOD, "not an array of numbers"),
        ([1.0, 2.0], {"a": 1}, "type object"),
        (np.array([1.0, 2.0], dtype=np.longdouble) * 10, GOOD * np.longdouble("1e400"), "losses.* is inf"),
    ],
)
def test_refuses_bad_numbers_and_shapes(importance, losses, message) -> None:
    with pytest.raises(PolicyError, match=message) as caught:
        select_bitwidths(importance, losses, 2.0)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([1.0, math.nan], r"weights\[1\] is nan"),
        ([1.0, math.inf], r"weights\[1\] is inf"),
        ([1.0, -1.0], r"weights\[1\] is -1.0; it must be 0 or more"),
        ([1.0], r"weights has shape \[1\]; it must be \[..., 2\]"),
        (2.0, r"weights has shape \[\]"),
        (np.ones((3, 2)), "do not match"),
        ("heavy", "weights holds values of type <U5"),
    ],
)
def test_refuses_bad_weights(weights, message) -> None:
    with pytest.raises(PolicyError, match=message) as caught:
        select_bitwidths(np.ones((4, 2)), GOOD, 2.0, weights=weights)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("place", [0, 17, 447])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1.0])
def test_finds_a_bad_number_anywhere(place: int, value: float) -> None:
    rng = np.random.default_rng(4)
    arrays = {"importance": rng.random((8, 7, 8)), "losses": rng.random((2, 7, 8, 4)), "weights": rng.random((8, 7, 8))}
    for name, array in arrays.items():
        if name == "importance" and value == -1.0:
            continue  # only its order counts
        bad = array.copy()
        bad.reshape(-1)[place] = value
        given_arrays = {**arrays, "losses": arrays["losses"][0], name: bad if name != "losses" else bad[place // 224]}
        where = list(np.unravel_index(place % 224 if name == "losses" else place, given_arrays[name].shape))
        with pytest.raises(PolicyError, match=re.escape(f"{name}{[int(i) for i in where]} is {value}")):
            select_bitwidths(given_arrays["importance"], given_arrays["losses"], 2.0, weights=given_arrays["weights"])


# --- the kernel itself ---


@pytest.mark.parametrize("select_prefix", [select_prefix, select_prefix_wide])
def test_kernel_repeats_rows_in_turn_and_leaves_bits_alone_on_failure(select_prefix) -> None:
    rng = np.random.default_rng(5)
    importance, losses, weights = rng.random((6, 5)), rng.random((3, 5, 4)), rng.random((2, 5))
    bits = np.empty((6, 5), np.int8)
    assert select_prefix(importance, losses, weights, 8, bits) == NOTHING
    for n in range(6):
        one = np.empty((1, 5), np.int8)
        assert select_prefix(importance[n : n + 1], losses[n % 3][None], weights[n % 2][None], 8, one) == NOTHING
        assert_array_equal(bits[n], one[0])
    before = bits.copy()
    for code, position in ((BAD_IMPORTANCE, 0), (BAD_LOSSES, 1), (BAD_WEIGHTS, 2)):
        arrays = [importance.copy(), losses.copy(), weights.copy()]
        arrays[position].reshape(-1)[-1] = math.nan
        assert select_prefix(*arrays, 3, bits) == code
        assert_array_equal(bits, before)


@given(layers(whole=True, max_experts=WIDE - 1), st.data())
def test_both_kernels_give_the_same(layer, data) -> None:
    importance, losses = layer
    budget = data.draw(st.integers(0, 3 * len(importance)))
    found = np.empty((2, 1, len(importance)), np.int8)
    said = [
        kernel(importance[None], losses[None], np.empty((0, 0)), budget, bits)
        for kernel, bits in zip((select_prefix, select_prefix_wide), found, strict=True)
    ]
    assert said[0] == said[1]
    assert_array_equal(found[0], found[1])


@pytest.mark.parametrize("kernel", [select_prefix, select_prefix_wide])
def test_kernel_marks_the_rows_where_rounding_would_count(kernel) -> None:
    losses = np.ones((3, 3, 4)) * [4, 3, 2, 1]
    losses[1] = [[1e16, 0.5, 0, 0], [5e-4, 0, 0, 0], [0, 0, 0, 0]]
    bits = np.empty((3, 3), np.int8)
    assert kernel(np.array([[3.0, 2.0, 1.0]]), losses, np.empty((0, 0)), 3, bits) == COARSE
    assert (bits[:, 0] == 0).tolist() == [False, True, False]
    for budget in (0, 9):  # nothing to choose
        assert kernel(np.array([[3.0, 2.0, 1.0]]), losses, np.empty((0, 0)), budget, bits) == NOTHING


@pytest.mark.parametrize("kernel", [select_prefix, select_prefix_wide])
@pytest.mark.parametrize("weighted", [False, True])
def test_kernel_allocates_nothing_per_row(kernel, weighted: bool) -> None:
    rng = np.random.default_rng(9)

    def allocations(rows: int) -> int:
        importance, losses = rng.random((rows, 40)), rng.random((rows, 40, 4))
        weights = rng.random((rows, 40)) if weighted else np.empty((0, 0))
        bits = np.empty((rows, 40), np.int8)
        before = rtsys.get_allocation_stats().alloc
        kernel(importance, losses, weights, 60, bits)
        return int(rtsys.get_allocation_stats().alloc - before)

    was_on = _nrt_python.memsys_stats_enabled()
    _nrt_python.memsys_enable_stats()
    try:
        assert allocations(1000) == allocations(1) > 0
    finally:
        if not was_on:
            _nrt_python.memsys_disable_stats()
