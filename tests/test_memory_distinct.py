"""How many different experts a batch visits, against exact fractions and simulated routing."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.errors import ModelConfigError
from perfmodel.memory import distinct_bound, distinct_experts, distinct_weighted

SIZES = st.integers(1, 300).flatmap(lambda experts: st.tuples(st.just(experts), st.integers(1, experts)))


@st.composite
def chances(draw: st.DrawFn) -> tuple[list[float], int]:
    """Chances of up to 12 experts that sum to k."""
    experts = draw(st.integers(1, 12))
    top_k = draw(st.integers(1, experts))
    weights = draw(st.lists(st.floats(0, 1), min_size=experts, max_size=experts))
    # Between equal chances and all on the first k experts, moved about by the weights.
    certain = [1.0] * top_k + [0.0] * (experts - top_k)
    mixed = [w * c + (1 - w) * top_k / experts for w, c in zip(weights, certain, strict=True)]
    excess = sum(mixed) - top_k
    room = [1 - p if excess < 0 else p for p in mixed]
    mixed = [p - excess * r / sum(room) for p, r in zip(mixed, room, strict=True)] if sum(room) else mixed
    return [min(1.0, max(0.0, p)) for p in mixed], top_k


def test_three_tokens_on_eight_experts() -> None:
    assert distinct_bound(8, 2, 3) == 6
    assert distinct_experts(8, 2, 3) == 4.625
    # Two experts that most tokens choose leave 3 to 4.
    assert 3 < distinct_weighted([0.75, 0.55, 0.2, 0.2, 0.1, 0.1, 0.05, 0.05], 2, 3) < 4


def test_expert_parallelism_counts_k_over_all_experts() -> None:
    assert distinct_experts(128, 8, 8, ranks=8) == pytest.approx(6.45, abs=0.005)
    # k over the experts of one rank would say that nearly all 16 of them are visited.
    assert distinct_experts(16, 8, 8) == pytest.approx(15.94, abs=0.005)
    assert distinct_experts(128, 8, 8, ranks=8) * 8 == distinct_experts(128, 8, 8)


@given(SIZES, st.integers(0, 2000))
def test_closed_form(sizes, tokens) -> None:
    experts, top_k = sizes
    exact = experts * (1 - (1 - Fraction(top_k, experts)) ** tokens)
    found = distinct_experts(experts, top_k, tokens)
    assert found == pytest.approx(float(exact), rel=1e-12, abs=1e-300)
    assert found <= distinct_bound(experts, top_k, tokens) == min(experts, top_k * tokens)
    assert distinct_experts(experts, top_k, 1) == top_k
    assert distinct_experts(experts, top_k, 0) == 0
    assert distinct_experts(experts, top_k, tokens + 1) >= found * (1 - 1e-14)


def test_one_token_visits_exactly_k() -> None:
    """Also where E times k / E is not k in floating point, as for 1 of 49."""
    for experts in range(1, 130):
        for top_k in range(1, experts + 1):
            assert distinct_experts(experts, top_k, 1) == top_k


def test_few_of_very_many_experts_do_not_cancel() -> None:
    """k / E of 1e-12: the naive power would be wrong in the fifth digit."""
    experts, tokens = 10**12, 10**3
    exact = experts * (1 - (1 - Fraction(1, experts)) ** tokens)
    assert distinct_experts(experts, 1, tokens) == pytest.approx(float(exact), rel=1e-14)
    assert distinct_experts(8, 8, 10**15) == 8


@given(chances(), st.integers(0, 60), st.integers(1, 12))
def test_weighted_form(case, tokens, ranks) -> None:
    inclusion, top_k = case
    exact = sum(1 - (1 - Fraction(p)) ** tokens for p in inclusion)
    found = distinct_weighted(inclusion, top_k, tokens)
    assert found == pytest.approx(float(exact), rel=1e-12, abs=1e-12)
    assert found <= distinct_experts(len(inclusion), top_k, tokens) * (1 + 1e-12)
    assert found <= distinct_weighted(inclusion, top_k, tokens + 1) * (1 + 1e-12)
    assert distinct_weighted(inclusion, top_k, 1) == pytest.approx(top_k, rel=1e-12)
    ranks = min(ranks, len(inclusion))
    parts = distinct_weighted(inclusion, top_k, tokens, ranks=ranks)
    each = math.ceil(len(inclusion) / ranks)
    assert parts.shape == (ranks,)
    for rank, part in enumerate(parts):
        own = inclusion[rank * each : (rank + 1) * each]
        assert part == pytest.approx(float(sum(1 - (1 - Fraction(p)) ** tokens for p in own)), rel=1e-12, abs=1e-12)


@given(SIZES, st.lists(st.integers(0, 10_000), min_size=1, max_size=5))
def test_arrays_are_their_elements(sizes, tokens) -> None:
    experts, top_k = sizes
    even = np.full(experts, top_k / experts)
    for found, one in (
        (distinct_experts(experts, top_k, tokens), lambda count: distinct_experts(experts, top_k, count)),
        (distinct_bound(experts, top_k, tokens), lambda count: distinct_bound(experts, top_k, count)),
        (distinct_weighted(even, top_k, tokens), lambda count: distinct_weighted(even, top_k, count)),
    ):
        assert found.tolist() == [one(count) for count in tokens]
        assert isinstance(one(tokens[0]), float)
    assert distinct_weighted(even, top_k, [tokens], ranks=1).shape == (1, len(tokens), 1)
    assert distinct_weighted(even, top_k, tokens) == pytest.approx(distinct_experts(experts, top_k, tokens), rel=1e-9)


def test_independent_tokens_by_enumeration() -> None:
    """All choices of 2 of 4 experts by 3 tokens, each as likely as any other."""
    picks = list(itertools.combinations(range(4), 2))
    counts = [len(set().union(*choice)) for choice in itertools.product(picks, repeat=3)]
    assert distinct_experts(4, 2, 3) == pytest.approx(sum(counts) / len(counts), rel=1e-14)


def test_ragged_ranks_give_the_fullest() -> None:
    assert distinct_experts(10, 2, 1, ranks=4) == pytest.approx(3 * 0.2)
    assert distinct_weighted(np.full(10, 0.2), 2, 1, ranks=4) == pytest.approx([0.6, 0.6, 0.6, 0.2])


@pytest.mark.parametrize(
    ("function", "arguments", "said"),
    [
        (distinct_experts, (0, 1, 1), "experts is 0"),
        (distinct_experts, (8, 9, 1), "top_k is 9"),
        (distinct_experts, (8, 0, 1), "top_k is 0"),
        (distinct_experts, (8, 2.0, 1), "top_k is 2.0"),
        (distinct_experts, (8, True, 1), "top_k is True"),
        (distinct_experts, (8, 2, -1), "tokens is -1"),
        (distinct_experts, (8, 2, 1.5), "tokens is 1.5"),
        (distinct_experts, (8, 2, math.nan), "tokens is nan"),
        (distinct_experts, (8, 2, "3"), "tokens is '3'"),
        (distinct_experts, (8, 2, [1, [2, 3]]), "tokens is"),
        (distinct_experts, (8, 2, True), "tokens is True"),
        (distinct_bound, (8, 2, 1e16), "tokens is 1e+16"),
        (distinct_weighted, ([], 1, 1), "inclusion is"),
        (distinct_weighted, ([[1.0]], 1, 1), "inclusion is"),
        (distinct_weighted, (["a"], 1, 1), "inclusion is"),
        (distinct_weighted, ([1.2, -0.2], 1, 1), "inclusion is"),
        (distinct_weighted, ([math.nan, 1.0], 1, 1), "inclusion is"),
        (distinct_weighted, ([0.25] * 4, 2, 1), "inclusion sums to 1; allowed: top_k, 2"),
        (distinct_weighted, ([0.5, 0.5], 3, 1), "top_k is 3"),
    ],
)
def test_bad_arguments(function, arguments, said) -> None:
    with pytest.raises(ModelConfigError) as caught:
        function(*arguments)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("ranks", [0, 9, 2.0, True])
def test_bad_ranks(ranks) -> None:
    for call in (
        lambda: distinct_experts(8, 2, 1, ranks=ranks),
        lambda: distinct_weighted([0.25] * 8, 2, 1, ranks=ranks),
    ):
        with pytest.raises(ModelConfigError, match="ranks is"):
            call()
