"""The dynamic programs of bit widths against trying everything and against mixed-integer programming."""

from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_array_equal
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from perfmodel import reference
from perfmodel.kernels.knapsack import best_levels, best_shares, cost_fronts, merge_fronts


class Rows(NamedTuple):
    """Losses [L, E, M] and costs of some layers, whole numbers as floats so that sums are exact."""

    losses: np.ndarray
    costs: np.ndarray


def lost(losses: np.ndarray, levels: np.ndarray) -> float | None:
    """Summed loss of levels; None where they are those of no assignment."""
    return None if levels.min(initial=0) < 0 else float(np.take_along_axis(losses, levels[..., None], -1).sum())


@st.composite
def rows(draw: st.DrawFn, max_layers: int = 1, max_experts: int = 5, max_levels: int = 4) -> Rows:
    """Any losses, with many ties; costs that do not fall with the level and may stand still."""
    layers, experts = draw(st.integers(1, max_layers)), draw(st.integers(0, max_experts))
    levels, most = draw(st.integers(1, max_levels)), draw(st.sampled_from([1, 4, 50]))
    size = layers * experts * levels
    shape = (layers, experts, levels)
    losses = np.array(draw(st.lists(st.integers(0, most), min_size=size, max_size=size)), float).reshape(shape)
    if draw(st.booleans()):
        losses = -np.sort(-losses, axis=-1)
    dear = draw(st.sampled_from([1, 3]))
    steps = np.array(draw(st.lists(st.integers(0, dear), min_size=size, max_size=size)), np.int64).reshape(shape)
    steps[..., 0] = 0
    if draw(st.booleans()):
        steps[..., 1:] = 1
    return Rows(losses, np.cumsum(steps, axis=-1))


def layer_budgets(given_rows: Rows) -> st.SearchStrategy[int]:
    return st.integers(0, int(given_rows.costs[0, :, -1].sum()) + 2)


# --- one layer ---


@given(rows(), st.data(), st.booleans(), st.booleans())
def test_levels_equal_trying_every_assignment(layer, data, at_most, ordered) -> None:
    budget = data.draw(layer_budgets(layer))
    found = best_levels(*layer, np.array([budget]), np.array([at_most]), ordered)
    expected = reference.best_assignment(*layer, budget, at_most, ordered)
    assert_array_equal(found, np.full_like(found, -1) if expected is None else expected)


@given(rows(), st.booleans())
def test_front_holds_the_answer_of_every_budget(layer, ordered) -> None:
    last = int(layer.costs[0, :, -1].sum()) + 2
    (front,) = cost_fronts(*layer, last, ordered)
    budgets = np.arange(last + 1)
    repeated = [np.ascontiguousarray(np.broadcast_to(a, (last + 1, *a.shape[1:]))) for a in layer]
    for at_most in (False, True):
        levels = best_levels(*repeated, budgets, np.full(last + 1, at_most), ordered)
        possible = levels.min(axis=1, initial=0) >= 0
        if layer.losses.shape[1]:
            best = np.minimum.accumulate(front) if at_most else front
            assert_array_equal(possible, np.isfinite(best))
            lost = np.take_along_axis(repeated[0], np.maximum(levels, 0)[..., None], axis=-1).sum(axis=(1, 2))
            assert_array_equal(lost[possible], best[possible])
            spent = np.take_along_axis(repeated[1], np.maximum(levels, 0)[..., None], axis=-1).sum(axis=(1, 2))
            assert (spent[possible] <= budgets[possible] if at_most else spent[possible] == budgets[possible]).all()
        else:
            assert_array_equal(front, np.where(budgets == 0, 0.0, np.inf))


@given(rows(max_experts=12), st.data())
def test_prefix_rule_costs_and_ordered_levels_do_not_rise(layer, data) -> None:
    budget = np.array([data.draw(layer_budgets(layer))])
    free = best_levels(*layer, budget, np.array([True]), False)
    ordered = best_levels(*layer, budget, np.array([True]), True)
    assert (np.diff(ordered, axis=1) <= 0).all()
    free_loss, ordered_loss = lost(layer.losses, free), lost(layer.losses, ordered)
    assert free_loss is not None
    assert ordered_loss is not None
    assert free_loss <= ordered_loss


def test_rows_do_not_depend_on_each_other() -> None:
    rng = np.random.default_rng(0)
    losses = rng.random((7, 6, 3))
    costs = np.cumsum(rng.integers(0, 4, (7, 6, 3)), axis=-1)
    costs -= costs[..., :1]
    losses.flags.writeable = costs.flags.writeable = False
    budget, at_most = np.array([5, 0, -1, 12, 500, 3, 7]), np.array([True, False, True, True, False, True, False])
    for ordered in (False, True):
        together = best_levels(losses, costs, budget, at_most, ordered)
        for b in range(7):
            alone = best_levels(losses[b : b + 1], costs[b : b + 1], budget[b : b + 1], at_most[b : b + 1], ordered)
            assert_array_equal(together[b], alone[0])
        assert (together[[2, 4]] == -1).all()
        fronts = cost_fronts(losses, costs, 30, ordered)
        for b in range(7):
            assert_array_equal(fronts[b], cost_fronts(losses[b : b + 1], costs[b : b + 1], 30, ordered)[0])
            # A shorter front is the start of a longer one.
            assert_array_equal(fronts[b, :9], cost_fronts(losses[b : b + 1], costs[b : b + 1], 8, ordered)[0])


@pytest.mark.parametrize("num_experts", [0, 1, 512])
def test_ends_of_the_range_of_experts(num_experts: int) -> None:
    rng = np.random.default_rng(num_experts)
    losses = rng.integers(0, 1000, (1, num_experts, 4)).astype(float)
    costs = np.broadcast_to(np.arange(4), losses.shape).copy()
    for ordered in (False, True):
        front = cost_fronts(losses, costs, 3 * num_experts, ordered)[0]
        assert front[0] == losses[..., 0].sum()
        assert front[-1] == losses[..., -1].sum()
        for budget, level in ((0, 0), (3 * num_experts, 3)):
            found = best_levels(losses, costs, np.array([budget]), np.array([False]), ordered)
            assert_array_equal(found, np.full((1, num_experts), level))


# --- several layers ---


@settings(max_examples=40)
@given(rows(max_layers=3, max_experts=2, max_levels=3), st.data(), st.booleans(), st.booleans())
def test_shares_of_layers_equal_trying_every_assignment(model, data, at_most, ordered) -> None:
    most = int(model.costs[..., -1].sum())
    budget = data.draw(st.integers(0, most + 2))
    dearest = int(model.costs[..., -1].sum(axis=-1).max())
    fronts = cost_fronts(*model, dearest, ordered)
    shares = best_shares(fronts, budget, at_most)
    levels = best_levels(*model, shares, np.zeros(len(shares), np.bool_), ordered)
    expected = reference.best_assignment(*model, budget, at_most, ordered)
    assert_array_equal(levels, np.full_like(levels, -1) if expected is None else expected)
    if expected is None:
        assert (shares == -1).all()
    else:
        assert_array_equal(shares, np.take_along_axis(model.costs, expected[..., None], -1).sum(axis=(1, 2)))


def plain_merge(fronts: np.ndarray, last: int) -> np.ndarray:
    """Min-plus sums of all pairs, one row after the other."""
    total = np.full(last + 1, np.inf)
    total[0] = 0.0
    for front in fronts:
        grown = np.full(last + 1, np.inf)
        for q, r in np.ndindex(len(front), last + 1):
            if q + r <= last:
                grown[q + r] = min(grown[q + r], front[q] + total[r])
        total = grown
    return total


@given(st.integers(0, 4), st.integers(1, 6), st.integers(0, 25), st.integers(0, 2**32 - 1))
def test_merged_fronts_equal_plain_sums_of_pairs(num_rows, steps, last, seed) -> None:
    rng = np.random.default_rng(seed)
    fronts = rng.integers(0, 30, (num_rows, steps)).astype(float)
    fronts[rng.random(fronts.shape) < 0.3] = np.inf
    expected = plain_merge(fronts, last)
    assert_array_equal(merge_fronts(fronts, last), expected)
    for at_most in (False, True):
        for budget in range(last + 1):
            shares = best_shares(fronts, budget, at_most)
            reached = expected[: budget + 1].min() if at_most else expected[budget]
            if np.isinf(reached):
                assert (shares == -1).all()
            else:
                assert fronts[np.arange(num_rows), shares].sum() == reached
                assert shares.sum() <= budget if at_most else shares.sum() == budget


# --- mixed-integer programming ---


def by_milp(losses: np.ndarray, costs: np.ndarray, budget: int, at_most: bool) -> float | None:
    """Smallest summed loss of one level for every expert, by HiGHS; None where there is none."""
    experts, levels = losses.shape
    one_each = csr_array((np.ones(losses.size), np.arange(losses.size), np.arange(experts + 1) * levels))
    solved = milp(
        losses.ravel(),
        integrality=np.ones(losses.size),
        bounds=Bounds(0, 1),
        constraints=[
            LinearConstraint(one_each, 1, 1),
            LinearConstraint(costs.reshape(1, -1), -np.inf if at_most else budget, budget),
        ],
        options={"mip_rel_gap": 0.0},
    )
    return None if solved.x is None else float(losses.ravel() @ np.round(solved.x))


# HiGHS stops where its bounds are this close, even with a relative gap of 0.
HIGHS_GAP = 1e-6


def assert_as_good(found: float | None, expected: float | None) -> None:
    """Never worse than HiGHS, and better by no more than it promises."""
    assert (found is None) == (expected is None)
    if found is not None and expected is not None:
        assert found <= expected * (1 + 1e-13)
        assert expected - found <= HIGHS_GAP


@st.composite
def tables(draw: st.DrawFn, max_layers: int, max_experts: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Losses and costs [L, E, 5] of widths 1, 2, 3, 4, 8, as they come or with ties; and a budget."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    layers, experts = draw(st.integers(1, max_layers)), draw(st.integers(1, max_experts))
    losses = rng.random((layers, experts, 5)) * rng.exponential(size=(layers, experts, 1))
    kind = draw(st.sampled_from(["falling", "any", "ties", "no gain"]))
    if kind == "falling":
        losses = -np.sort(-losses, axis=-1)
    elif kind == "ties":
        losses = np.floor(8 * losses)
    elif kind == "no gain":
        losses[...] = losses[..., :1]
    size = rng.integers(1, 6, (layers, experts, 1)) if draw(st.booleans()) else np.ones((layers, experts, 1), int)
    costs = np.array([0, 1, 2, 3, 7]) * size
    return losses, costs, int(draw(st.floats(0, 1)) * costs[..., -1].sum())


@settings(max_examples=80)
@given(tables(max_layers=1, max_experts=64), st.booleans())
def test_layer_equals_mixed_integer_programming(table, at_most) -> None:
    losses, costs, budget = table
    found = best_levels(losses, costs, np.array([budget]), np.array([at_most]), False)
    assert_as_good(lost(losses, found), by_milp(losses[0], costs[0], budget, at_most))


@settings(max_examples=40)
@given(tables(max_layers=4, max_experts=16), st.booleans())
def test_model_equals_mixed_integer_programming(table, at_most) -> None:
    losses, costs, budget = table
    fronts = cost_fronts(losses, costs, int(costs[..., -1].sum(axis=-1).max()), False)
    shares = best_shares(fronts, budget, at_most)
    levels = best_levels(losses, costs, shares, np.zeros(len(shares), np.bool_), False)
    assert_as_good(lost(losses, levels), by_milp(losses.reshape(-1, 5), costs.reshape(-1, 5), budget, at_most))
