"""Objectives and the loss of an assignment."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from perfmodel.bitwidth import OBJECTIVES, assigned_loss, objective_weights, optimal_bitwidths
from perfmodel.errors import PolicyError

GIVEN = {
    "importance": [[0.5, 0.25, 0.25]],
    "use": [[3, 0, 1]],
    "output_variance": [[4.0, 0.5, 0.0]],
}


def test_objectives() -> None:
    assert OBJECTIVES == ("plain", "importance", "use", "variance")
    assert objective_weights("plain", **GIVEN) is None
    assert objective_weights("plain") is None
    assert objective_weights("importance", **GIVEN).tolist() == GIVEN["importance"]
    assert objective_weights("use", **GIVEN).tolist() == GIVEN["use"]
    # An expert without output has no share to lose; nor has one whose inverse would be infinite.
    assert objective_weights("variance", **GIVEN).tolist() == [[0.25, 2.0, 0.0]]
    assert objective_weights("variance", output_variance=[1e-310, 2.0**-1000]).tolist() == [0.0, 2.0**1000]


def test_objectives_change_what_is_best() -> None:
    losses = np.array([[8.0, 4, 2, 1], [6.0, 3, 1.5, 0.75], [2.0, 1, 0.5, 0.25]])
    chosen = {
        name: optimal_bitwidths(losses, 2, weights=objective_weights(name, [1, 1, 9], [0, 5, 1], [8, 6, 0.1])).tolist()
        for name in OBJECTIVES
    }
    assert chosen == {"plain": [3, 2, 1], "importance": [2, 1, 3], "use": [1, 4, 1], "variance": [1, 1, 4]}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("importanse", [1]), "objective is 'importanse'; .*did you mean 'importance'"),
        ((None,), "objective is None"),
        ((["plain"],), "objective is"),
        (("importance",), "objective 'importance' needs importance, and none is given"),
        (("use", [1.0]), "objective 'use' needs use"),
        (("variance", [1.0], [1.0]), "objective 'variance' needs output_variance"),
        (("importance", [1.0, -1.0]), r"importance\[1\] is -1.0; it must be 0 or more"),
        (("use", None, [math.inf]), r"use\[0\] is inf"),
        (("variance", None, None, "much"), "output_variance holds"),
    ],
)
def test_refuses_what_it_cannot_weigh_by(arguments, message) -> None:
    with pytest.raises(PolicyError, match=message) as caught:
        objective_weights(*arguments)
    assert "\n" not in str(caught.value)


@given(st.integers(0, 2**32 - 1), st.booleans())
def test_assigned_loss_is_the_sum_over_experts(seed, weighted) -> None:
    rng = np.random.default_rng(seed)
    bits = (1, 3, 8)
    losses, assigned = rng.random((2, 4, 3)), rng.choice(bits, (5, 2, 4))
    weights = rng.random((5, 1, 4)) if weighted else None
    found = assigned_loss(losses, assigned, bits=bits, weights=weights)
    assert found.shape == (5, 2)
    for s, layer in np.ndindex(5, 2):
        factors = [1.0] * 4 if weights is None else weights[s, 0]
        parts = [losses[layer, e, bits.index(assigned[s, layer, e])] * factors[e] for e in range(4)]
        assert_allclose(found[s, layer], math.fsum(parts), rtol=1e-14, atol=0)


def test_assigned_loss_of_nothing() -> None:
    assert_array_equal(assigned_loss(np.empty((3, 0, 4)), np.empty((3, 0))), np.zeros(3))
    assert_array_equal(assigned_loss(np.empty((0, 2, 4)), np.ones(2)), np.zeros(0))


@pytest.mark.parametrize(
    ("losses", "assigned", "options", "message"),
    [
        (np.ones((2, 4)), [1, 5], {}, r"assigned\[1\] is 5; the losses are those of 1, 2, 3, 4 bits"),
        (np.ones((2, 4)), [0, 1], {}, r"assigned\[0\] is 0;"),
        (np.ones((2, 4)), [1.5, 1], {}, r"assigned\[0\] is 1.5;"),
        (np.ones((2, 3)), [3, 2], {"bits": (2, 4, 8)}, r"assigned\[0\] is 3; the losses are those of 2, 4, 8 bits"),
        (np.ones((2, 4)), [1, 1, 1], {}, r"assigned has shape \[3\]; it must be \[..., 2\]"),
        (np.ones((2, 3)), [1, 1], {}, r"losses has shape \[2, 3\]; it must be \[..., experts, 4\]"),
        (np.ones(4), [1], {}, "losses has shape"),
        (np.ones((3, 2, 4)), np.ones((2, 2)), {}, "do not match"),
        (np.ones((2, 4)), [1, 1], {"weights": [1]}, "weights has shape"),
        (np.ones((2, 4)), [1, 1], {"weights": [1, -1]}, r"weights\[1\] is -1"),
        (-np.ones((2, 4)), [1, 1], {}, r"losses\[0, 0\] is -1"),
        (np.full((2, 4), 1e308), [1, 1], {}, "more than a float64 holds"),
        (np.ones((2, 4)), [1, 1], {"bits": (1, 2)}, "losses has shape"),
        (np.ones((2, 4)), "ab", {}, "assigned holds"),
    ],
)
def test_refuses_wrong_assignments(losses, assigned, options, message) -> None:
    with pytest.raises(PolicyError, match=message) as caught:
        assigned_loss(losses, assigned, **options)
    assert "\n" not in str(caught.value)
