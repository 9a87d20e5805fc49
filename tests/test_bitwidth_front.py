"""Fronts of loss against bits: they hold the answer of every single budget."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from perfmodel.bitwidth import BitwidthFront, assigned_loss, bitwidth_front, optimal_bitwidths, select_bitwidths
from perfmodel.errors import PolicyError


@st.composite
def calls(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, dict[str, Any]]:
    """Importance [S, L, E], whole losses and the options of a front."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shape = tuple(draw(st.integers(1, most)) for most in (2, 3, 6))
    bits = draw(st.sampled_from([(1, 2, 3, 4), (2, 4, 8), (2, 3, 4, 8), (3, 5)]))
    losses = rng.integers(0, draw(st.sampled_from([2, 1000])), (*shape, len(bits))).astype(float)
    if draw(st.booleans()):
        losses = -np.sort(-losses, axis=-1)
    options: dict[str, Any] = {"bits": bits, "scope": draw(st.sampled_from(["layer", "model"]))}
    if draw(st.booleans()):
        options["sizes"] = rng.integers(1, 4, shape)
    if draw(st.booleans()):
        options["weights"] = rng.integers(0, 4, shape)
    if draw(st.booleans()):
        options["min_bits"] = rng.choice(bits, shape)
    return rng.integers(0, 4, shape).astype(float), losses, options


def single(ordered: bool, importance: np.ndarray, losses: np.ndarray, **options: Any) -> np.ndarray:
    return select_bitwidths(importance, losses, **options) if ordered else optimal_bitwidths(losses, **options)


def group_loss(losses: np.ndarray, bits: np.ndarray, options: dict[str, Any]) -> np.ndarray:
    by_layer = assigned_loss(losses, bits, bits=options["bits"], weights=options.get("weights"))
    return by_layer.sum(axis=-1) if options["scope"] == "model" else by_layer


@given(calls(), st.booleans())
def test_every_step_is_an_assignment_that_costs_and_loses_what_it_says(call, ordered) -> None:
    importance, losses, options = call
    front = bitwidth_front(losses, importance=importance if ordered else None, **options)
    sizes = np.broadcast_to(options.get("sizes", 1), importance.shape)
    axis = (-2, -1) if options["scope"] == "model" else -1
    groups = losses.shape[:-3] if options["scope"] == "model" else losses.shape[:-2]
    assert front.loss.shape == front.mean_bits.shape == (*groups, front.loss.shape[-1])
    for step in range(front.loss.shape[-1]):
        possible = np.isfinite(front.loss[..., step])
        if not possible.all():
            continue
        bits = front.bits_at(step)
        assert_array_equal(group_loss(losses, bits, options), front.loss[..., step])
        spent = (bits * sizes).sum(axis=axis)
        assert_allclose(spent / sizes.sum(axis=axis), front.mean_bits[..., step], rtol=1e-12, atol=0)
        if front.cost_bytes is not None:
            assert_allclose(spent / 8, front.cost_bytes[..., step], rtol=1e-12, atol=0)
    assert (front.cost_bytes is None) == ("sizes" not in options)


@given(calls(), st.booleans())
def test_every_budget_is_answered_as_alone(call, ordered) -> None:
    """Exactly where experts are of one size, and at most everywhere."""
    importance, losses, options = call
    importance, losses = importance[0], losses[0]
    options = {
        name: value[0] if isinstance(value, np.ndarray) and value.ndim == 3 else value
        for name, value in options.items()
    }
    front = bitwidth_front(losses, importance=importance if ordered else None, **options)
    lowest, highest = options["bits"][0], options["bits"][-1]
    for mean in np.unique(np.clip(front.mean_bits, lowest, highest)):
        try:
            alone = single(ordered, importance, losses, mean_bits=mean, budget="at-most", **options)
        except PolicyError:
            with pytest.raises(PolicyError, match="lowest widths allowed"):
                front.step_within(mean)
            continue
        assert_array_equal(front.bits_at(front.step_within(mean)), alone)
        if options["scope"] == "layer" or "sizes" in options:
            continue
        at = np.flatnonzero(np.isclose(front.mean_bits, mean, rtol=1e-12))
        if at.size and np.isfinite(front.loss[at[0]]):
            exact = single(ordered, importance, losses, mean_bits=mean, **options)
            assert_array_equal(front.bits_at(at[0]), exact)
        elif at.size:
            with pytest.raises(PolicyError, match="cannot meet exactly"):
                single(ordered, importance, losses, mean_bits=mean, **options)


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("num_experts", [0, 1, 2, 7, 64, 200])
def test_usual_front_at_every_budget(num_experts: int, ordered: bool) -> None:
    rng = np.random.default_rng(num_experts)
    importance, losses = rng.random((2, num_experts)), rng.integers(0, 100, (2, num_experts, 4)).astype(float)
    front = bitwidth_front(losses, importance=importance if ordered else None)
    assert front.loss.shape == (2, 3 * num_experts + 1)
    for step in range(0, 3 * num_experts + 1, max(1, num_experts // 16)):
        mean = 1 + step / max(num_experts, 1)
        bits = single(ordered, importance, losses, mean_bits=mean)
        assert_array_equal(front.bits_at(step), bits)
        assert_array_equal(assigned_loss(losses, bits), front.loss[:, step])
        if num_experts:
            assert_allclose(front.mean_bits[:, step], mean, rtol=1e-12, atol=0)


@settings(max_examples=30)
@given(calls())
def test_free_front_is_never_above_the_ordered_one(call) -> None:
    importance, losses, options = call
    ordered, free = (bitwidth_front(losses, importance=one, **options) for one in (importance, None))
    assert_array_equal(ordered.mean_bits, free.mean_bits)
    assert (free.loss <= ordered.loss).all()


def small() -> BitwidthFront:
    return bitwidth_front([[[4, 1, 2, 2.0], [4, 3, 2, 1]], [[8, 8, 8, 8.0], [9, 9, 9, 9]]])


def test_losses_within_a_budget_and_which_budgets_are_worth_it() -> None:
    front = small()
    assert front.loss.tolist() == [[8, 5, 4, 3, 2, 3, 3], [17] * 7]
    assert front.loss_within.tolist() == [[8, 5, 4, 3, 2, 2, 2], [17] * 7]
    assert front.efficient.tolist() == [[True] * 5 + [False] * 2, [True] + [False] * 6]
    assert front.step_within(4.0).tolist() == [4, 0]
    assert front.step_within(2.2).tolist() == [2, 0]
    assert front.bits_at([4, 0]).tolist() == [[2, 4], [1, 1]]
    assert front.bits_at(np.array([0, 6])).tolist() == [[1, 1], [4, 4]]
    assert "problem" not in repr(front)


def test_one_group() -> None:
    front = bitwidth_front(np.ones((3, 4, 4)), scope="model")
    assert front.loss.shape == (37,)
    assert front.step_within(2.0).shape == ()
    assert front.bits_at(front.step_within(2.0)).tolist() == [[1] * 4] * 3
    assert front.bits_at(36).tolist() == [[4] * 4] * 3


def test_does_not_depend_on_the_unit_of_losses() -> None:
    losses = np.random.default_rng(1).random((3, 5, 4))
    front = bitwidth_front(losses)
    for exponent in (-900, 900):
        assert_array_equal(bitwidth_front(np.ldexp(losses, exponent)).loss, np.ldexp(front.loss, exponent))
    largest = np.finfo(float).max
    assert bitwidth_front([[largest, 0, 0, 0]]).loss.tolist() == [largest, 0, 0, 0]


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (7, "step is 7; it must be whole numbers from 0 to 6"),
        (-1, "step is -1"),
        (1.5, "step is 1.5"),
        (math.nan, "step is nan"),
        ("first", "step holds"),
        ([1, 2, 3], r"step has shape \[3\]; the front has \[2\]"),
        ([[1, 2]], r"step has shape \[1, 2\]"),
    ],
)
def test_refuses_steps_that_are_not_there(step, message) -> None:
    with pytest.raises(PolicyError, match=message) as caught:
        small().bits_at(step)
    assert "\n" not in str(caught.value)


def test_refuses_a_step_that_nothing_costs() -> None:
    front = bitwidth_front(np.ones((1, 3)), bits=(2, 3, 8))
    assert np.isfinite(front.loss).tolist() == [True, True, False, False, False, False, True]
    with pytest.raises(PolicyError, match="nothing costs just that"):
        front.bits_at(3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"losses": np.full((2, 3), 1.0)}, "losses has shape"),
        ({"losses": [[1, 2, 3, math.nan]]}, r"losses\[0, 3\] is nan"),
        ({"losses": [[1, 2, 3, -4]]}, r"losses\[0, 3\] is -4"),
        ({"losses": [[1e308, 1, 1, 1]] * 2}, "losses add up to more than a float64 holds"),
        ({"importance": [1, 2]}, "importance has shape"),
        ({"sizes": [0]}, "sizes"),
        ({"scope": "model"}, "scope 'model' needs"),
        ({"losses": np.ones((2, 4)), "sizes": [10**12, 10**12 - 1]}, "would need tables"),
        ({"losses": np.ones((9, 2, 4)), "sizes": [10**12, 10**12 - 1], "scope": "model"}, "would need tables"),
        ({"bits": (4, 3, 2, 1)}, "bits is"),
        ({"min_bits": 9}, "min_bits"),
    ],
)
def test_refuses_wrong_input_in_one_line(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(PolicyError, match=message) as caught:
        bitwidth_front(**{"losses": np.ones((1, 4)), **changes})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("mean", [0.5, 5, None, "2", math.nan])
def test_refuses_a_mean_outside_the_menu(mean) -> None:
    with pytest.raises(PolicyError, match=r"mean_bits is .*from 1 to 4"):
        small().step_within(mean)
