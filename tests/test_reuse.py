"""Stack distances against caches that really hold and evict experts, and against every choice a cache could make."""

import functools
import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plain_survey import keeps_soonest

from perfmodel.caches import HIT_HIGH, ExpertCache, replay_cache
from perfmodel.kernels.reuse import stack_distances
from perfmodel.routing.blocks import NO_EXPERT

Array = np.ndarray[Any, Any]


def curves(ids: Array, experts: int, offsets: list[int] | None = None, prompts: list[int] | None = None) -> Any:
    """Hits of a least-recently-used cache and of the best one, of 1..E experts, and all picks; and both by layer."""
    bounds = np.array([0, len(ids)] if offsets is None else offsets)
    sequences = len(bounds) - 1
    tables = [np.zeros((rows, experts + 1), np.int64) for rows in (sequences, sequences, ids.shape[1], ids.shape[1])]
    starts = np.zeros(sequences, np.int64) if prompts is None else np.array(prompts)
    group = np.arange(sequences)
    stack_distances(np.ascontiguousarray(ids, np.uint16), 0, 0, sequences, bounds, starts, group, *tables)
    for one, by_layer in (tables[0], tables[2]), (tables[1], tables[3]):
        np.testing.assert_array_equal(one.sum(0), by_layer.sum(0))
    assert tables[0].sum() == tables[1].sum()
    return [np.cumsum(table, axis=-1)[:, :-1] for table in tables] + [tables[0].sum(-1)]


def requests_of(ids: Array) -> list[int]:
    """Requests of one layer in their order."""
    return [int(expert) for expert in ids.ravel() if expert != NO_EXPERT]


@st.composite
def picks(draw: st.DrawFn, most_experts: int = 6, most_rows: int = 14, layers: int = 1) -> tuple[Array, int]:
    """Picks [rows, layers, k] that favour a few experts, some of them unassigned, and the number of experts."""
    experts = draw(st.integers(1, most_experts))
    width = draw(st.integers(1, min(experts, 3)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shape = (draw(st.integers(1, most_rows)), layers, experts)
    favour = draw(st.sampled_from([0.0, 0.5, 2.0])) * np.arange(experts) / experts
    ids = np.argsort(rng.random(shape) + favour, axis=-1)[..., :width]
    if draw(st.booleans()):
        ids[rng.random(ids.shape) < 0.2] = NO_EXPERT
    return ids, experts


def most_hits(requests: list[int], capacity: int) -> int:
    """Hits of the best choices, found by trying all: after a miss the expert may replace any held one, or none."""

    @functools.cache
    def best(place: int, held: frozenset[int]) -> int:
        if place == len(requests):
            return 0
        expert = requests[place]
        if expert in held:
            return 1 + best(place + 1, held)
        kept = [held] + ([held | {expert}] if len(held) < capacity else [held - {one} | {expert} for one in held])
        return max(best(place + 1, one) for one in kept)

    return best(0, frozenset())


def replay(requests: list[int], capacity: int, rule: str, seed: int) -> int:
    """Hits of a cache on demand that evicts by a rule, and with ``bypass`` does not keep every expert."""
    rng = np.random.default_rng(seed)
    held: list[int] = []
    uses: dict[int, int] = {}
    hits = 0
    for expert in requests:
        uses[expert] = uses.get(expert, 0) + 1
        if expert in held:
            hits += 1
            if rule == "lru":
                held.remove(expert)
                held.append(expert)
            continue
        if len(held) < capacity:
            held.append(expert)
            continue
        if "bypass" in rule and rng.random() < 0.5:
            continue
        if "random" in rule:
            out = held[rng.integers(len(held))]
        elif rule == "lfu":
            out = min(held, key=lambda one: uses[one])
        elif rule == "mru":
            out = held[-1]
        else:  # the one that came first, or for lru was used first
            out = held[0]
        held.remove(out)
        held.append(expert)
    return hits


@given(picks(most_experts=4, most_rows=6))
def test_nothing_beats_the_best_cache(case: tuple[Array, int]) -> None:
    ids, experts = case
    found = curves(ids, experts)[1][0]
    requests = requests_of(ids)
    assert found.tolist() == [most_hits(requests, capacity) for capacity in range(1, experts + 1)]


@given(picks(most_experts=9, most_rows=60))
def test_the_best_cache_keeps_what_is_needed_soonest(case: tuple[Array, int]) -> None:
    ids, experts = case
    found = curves(ids, experts)[1][0]
    requests = requests_of(ids)
    assert found.tolist() == [keeps_soonest(requests, capacity) for capacity in range(1, experts + 1)]


@given(picks(most_experts=8, most_rows=60), st.integers(0, 1000))
@pytest.mark.parametrize("rule", ["lru", "fifo", "lfu", "mru", "random", "random bypass", "fifo bypass"])
def test_no_cache_on_demand_beats_it(rule: str, case: tuple[Array, int], seed: int) -> None:
    ids, experts = case
    lru, best = (found[0] for found in curves(ids, experts)[:2])
    requests = requests_of(ids)
    for capacity in range(1, experts + 1):
        hits = replay(requests, capacity, rule, seed)
        assert hits <= best[capacity - 1]
        if rule == "lru":
            assert hits == lru[capacity - 1]


@given(picks(most_experts=7, most_rows=30, layers=3), st.data())
def test_the_lru_curve_is_that_of_the_cache_simulator(case: tuple[Array, int], data: st.DataObject) -> None:
    ids, experts = case
    cut = data.draw(st.integers(1, len(ids)))
    offsets = sorted({0, cut, len(ids)})
    lengths = np.diff(offsets)
    prompts = [data.draw(st.integers(0, int(length))) for length in lengths]
    lru, best, lru_layers, best_layers, asked = curves(ids, experts, offsets, prompts)
    decode = np.concatenate(
        [np.arange(a + p, b) for (a, b), p in zip(itertools.pairwise(offsets), prompts, strict=True)]
    )
    rows = np.ascontiguousarray(ids[decode], np.uint16)
    starts = np.cumsum([0, *(lengths - prompts)])
    for capacity in range(1, experts + 1):
        hits = replay_cache(rows, starts, experts, ExpertCache(capacity, protected=False)).outcome == HIT_HIGH
        by_sequence = [hits[a:b].sum() for a, b in itertools.pairwise(starts)]
        assert lru[:, capacity - 1].tolist() == by_sequence
        assert lru_layers[:, capacity - 1].tolist() == hits.sum((0, 2)).tolist()
    # A sequence or a layer alone gives the same, as no cache outlives its sequence.
    for s, (a, b) in enumerate(itertools.pairwise(starts)):
        alone = curves(rows[a:b], experts) if b > a else [np.zeros((1, experts))] * 2
        np.testing.assert_array_equal(best[s], alone[1][0])
        assert asked[s] == (rows[a:b] != NO_EXPERT).sum()
    assert (best_layers >= lru_layers).all()


@given(picks(most_experts=8, most_rows=40))
def test_room_for_all_misses_only_first_requests(case: tuple[Array, int]) -> None:
    ids, experts = case
    lru, best, _, _, asked = curves(ids, experts)
    requests = requests_of(ids)
    assert lru[0, -1] == best[0, -1] == len(requests) - len(set(requests))
    assert asked[0] == len(requests)
    for curve in lru[0], best[0]:
        assert (np.diff(curve) >= 0).all()


def test_an_expert_that_is_needed_late_is_not_kept_by_hand() -> None:
    # One place. Keeping 0 through the single use of 1 hits twice; a cache that must keep what it fetched hits never.
    ids = np.array([0, 1, 0, 2, 0]).reshape(-1, 1, 1)
    lru, best = (found[0].tolist() for found in curves(ids, 3)[:2])
    assert lru == [0, 2, 2]
    assert best == [2, 2, 2]


def test_picks_of_a_token_come_in_their_order() -> None:
    ids = np.array([[0, 1], [1, 0]]).reshape(2, 1, 2)
    assert curves(ids, 2)[0][0].tolist() == [1, 2]
    assert curves(ids[:, :, ::-1], 2)[0][0].tolist() == [1, 2]
    assert curves(np.array([[0, 1], [0, 1]]).reshape(2, 1, 2), 2)[0][0].tolist() == [0, 2]
