"""Caches of experts against a plain cache, and what must hold for every rule."""

import dataclasses
import functools
import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal
from plain_caches import plain_replay

from perfmodel.caches import (
    AHEAD_HIGH,
    HIT_HIGH,
    MISS_HIGH,
    NO_EXPERT,
    NOT_RUN,
    RULES,
    CacheRule,
    ExpertCache,
    lru_hits_by_capacity,
    replay_cache,
)
from perfmodel.errors import PolicyError, TraceError
from perfmodel.kernels.cache import replay as general_kernel

Array = np.ndarray[Any, Any]
#: Rules that know nothing of the future.
BLIND = [rule for rule in RULES if rule != "belady"]


@st.composite
def traces(draw: st.DrawFn, most_steps: int = 14, most_experts: int = 7, most_layers: int = 3) -> tuple[Any, ...]:
    """Ids [T, L, k] that favour some experts and come again, offsets, and the number of experts."""
    lengths = draw(st.lists(st.integers(0, most_steps), min_size=1, max_size=3))
    experts = draw(st.integers(1, most_experts))
    width = draw(st.integers(1, min(3, experts)))
    layers = draw(st.integers(1, most_layers))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    favour = draw(st.sampled_from([0.0, 1.0, 3.0])) * rng.random((layers, experts))
    ids = np.argsort(rng.random((sum(lengths), layers, experts)) + favour, axis=-1)[..., :width].astype(np.uint16)
    if draw(st.booleans()):
        ids[rng.random(ids.shape) < 0.2] = draw(st.sampled_from([experts, NO_EXPERT]))
    return ids, np.cumsum([0, *lengths]), experts, rng


@st.composite
def loaded(draw: st.DrawFn, trace: tuple[Any, ...]) -> Array | None:
    """What the cache starts with."""
    ids, offsets, experts, rng = trace
    if draw(st.booleans()):
        return None
    rows = draw(st.sampled_from([1, len(offsets) - 1]))
    order = np.argsort(rng.random((rows, ids.shape[1], experts)), axis=-1).astype(np.uint16)
    return order[..., : draw(st.integers(0, experts))]


def settings_of(rule: CacheRule, trace: tuple[Any, ...]) -> st.SearchStrategy[ExpertCache]:
    """Caches of one size of expert."""
    return st.builds(
        ExpertCache,
        st.integers(0, trace[2] * trace[0].shape[1] + 1),
        st.just(rule),
        st.sampled_from(["layer", "global"]),
        protected=st.booleans(),
        persistent=st.booleans(),
        weights=st.sampled_from([(0.25, 0.25, 0.25, 0.25), (1.0, 0.0, 0.0, 0.0), (0.1, 0.3, 0.2, 0.4), (0, 0, 0, 1)]),
        smoothing=st.sampled_from([0.0, 0.3, 0.5, 1.0]),
    )


def same(found: Any, expected: tuple[Any, Any, Any]) -> None:
    assert_array_equal(found.outcome, expected[0])
    assert_array_equal(found.kept, expected[1])
    assert_array_equal(np.stack([found.wasted_high, found.wasted_low], -1), expected[2])


@given(traces(), st.data())
@pytest.mark.parametrize("rule", RULES)
def test_caches_on_demand_equal_a_plain_one(rule: CacheRule, trace: tuple[Any, ...], data: st.DataObject) -> None:
    ids, offsets, experts, rng = trace
    cache = data.draw(settings_of(rule, trace))
    more: dict[str, Any] = {"initial": data.draw(loaded(trace))}
    if rule == "recent-score":
        more["scores"] = rng.random(ids.shape)
    if rule == "activation" and data.draw(st.booleans()):
        more["likelihood"] = rng.random((2, ids.shape[1], experts)).round(1)
        more["match"] = rng.integers(0, 2, len(ids))
    found = replay_cache(ids, offsets, experts, cache, **more)
    same(found, plain_replay(ids, offsets, experts, cache, **more))
    again = replay_cache(ids.copy(), offsets, experts, cache, **more)
    assert_array_equal(found.outcome, again.outcome)
    assert ((found.outcome == NOT_RUN) == (ids >= experts)).all()
    assert found.copies_high == (found.outcome == MISS_HIGH).sum()


@given(traces(), st.data())
@pytest.mark.parametrize("rule", BLIND)
def test_two_precisions_and_copies_ahead_equal_a_plain_cache(
    rule: CacheRule, trace: tuple[Any, ...], data: st.DataObject
) -> None:
    ids, offsets, experts, rng = trace
    cache = data.draw(settings_of(rule, trace))
    high, low = data.draw(st.sampled_from([(1, 1), (4, 1), (3, 2), (2.5, 1.5)]))
    cache = dataclasses.replace(
        cache,
        capacity=cache.capacity * high,
        high_size=high,
        low_size=low,
        capacity_low=data.draw(st.none() | st.integers(0, 8)),
    )
    more: dict[str, Any] = {"initial": data.draw(loaded(trace)), "scores": rng.random(ids.shape)}
    if data.draw(st.booleans()):
        more["wanted"] = rng.choice(3, ids.shape, p=[0.5, 0.35, 0.15]).astype(np.uint8)
    if data.draw(st.booleans()):
        predicted = np.where(rng.random(ids.shape) < 0.6, ids, rng.integers(0, experts + 1, ids.shape))
        more["predicted"] = predicted.astype(np.uint16)
        if data.draw(st.booleans()):
            more["predicted_wanted"] = rng.choice(3, ids.shape, p=[0.5, 0.35, 0.15]).astype(np.uint8)
    found = replay_cache(ids, offsets, experts, cache, **more)
    same(found, plain_replay(ids, offsets, experts, cache, **more))


@given(traces(most_steps=30), st.data())
@pytest.mark.parametrize("rule", ["lru", "lfu", "weighted", "belady"])
def test_fast_kernels_equal_the_general_one(rule: CacheRule, trace: tuple[Any, ...], data: st.DataObject) -> None:
    ids, offsets, experts, _ = trace
    cache = dataclasses.replace(data.draw(settings_of(rule, trace)), persistent=False)
    initial = data.draw(loaded(trace))
    found = replay_cache(ids, offsets, experts, cache, initial=initial)
    no_codes, no_numbers = np.empty((0, 0, 0), np.uint8), np.empty((0, 0, 0))
    nobody = np.empty((*ids.shape[:2], 0), np.uint16)
    outcome, kept, _ = general_kernel(
        ids, no_codes, nobody, no_codes, offsets, np.empty((1, ids.shape[1], 0), np.uint16) if initial is None
        else np.ascontiguousarray(initial), no_numbers, no_numbers, np.zeros(0, np.int64),
        np.array([cache.capacity, 0]), np.array([1, 1]), np.array([*cache.weights, 0.5]), experts, RULES.index(rule),
        cache.scope == "global", True, cache.protected,
    )  # fmt: skip
    assert_array_equal(found.outcome, outcome)
    assert_array_equal(found.kept, kept)


@given(traces(most_steps=30, most_experts=9), st.integers(0, 2), st.booleans(), st.data())
def test_few_slots_for_an_lru_cache_need_no_general_kernel(
    trace: tuple[Any, ...], slots: int, everywhere: bool, data: st.DataObject
) -> None:
    ids, offsets, experts, _ = trace
    cache = ExpertCache(min(slots, ids.shape[2] - 1), "lru", "global" if everywhere else "layer")
    initial = data.draw(loaded(trace))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("perfmodel.caches.replay.replay", None)
        found = replay_cache(ids, offsets, experts, cache, initial=initial)
    same(found, plain_replay(ids, offsets, experts, cache, initial=initial))


def test_what_is_loaded_twice_takes_one_slot() -> None:
    ids = np.array([[[1]], [[0]]], np.uint16)
    for many in (0, 300):
        cache, initial = ExpertCache(2), np.array([[[0, 0, 1]]], np.uint16)
        found = replay_cache(ids, np.array([0, 2]), 2 + many, cache, initial=initial)
        assert (found.outcome == HIT_HIGH).all()


@pytest.mark.parametrize("experts", [8, 9, 64, 128, 300])
@pytest.mark.parametrize("protected", [False, True])
def test_larger_traces_equal_a_plain_cache(experts: int, protected: bool) -> None:
    rng = np.random.default_rng(experts)
    favour = 2 * rng.random((2, experts))
    ids = np.argsort(rng.random((80, 2, experts)) + favour, axis=-1)[..., :4].astype(np.uint16)
    for rule in ("lru", "lfu", "weighted", "belady"):
        for scope, slots in (("layer", experts // 2), ("global", experts)):
            cache = ExpertCache(slots, rule, scope, protected=protected)
            same(
                replay_cache(ids, np.array([0, 50, 80]), experts, cache), plain_replay(ids, [0, 50, 80], experts, cache)
            )


@given(traces(), st.data())
@pytest.mark.parametrize("rule", BLIND)
def test_belady_bounds_every_cache_on_demand(rule: CacheRule, trace: tuple[Any, ...], data: st.DataObject) -> None:
    ids, offsets, experts, rng = trace
    cache = data.draw(settings_of(rule, trace))
    initial = data.draw(loaded(trace))
    found = replay_cache(ids, offsets, experts, cache, initial=initial, scores=rng.random(ids.shape))
    best = replay_cache(ids, offsets, experts, dataclasses.replace(cache, rule="belady"), initial=initial)
    assert best.counts[MISS_HIGH] <= found.counts[MISS_HIGH]


def fewest_misses(requests: list[Any], capacity: int) -> int:
    """Misses of the best choices, found by trying all: what was copied replaces any resident, or is not kept."""

    @functools.cache
    def best(place: int, held: frozenset[Any]) -> int:
        if place == len(requests):
            return 0
        one = requests[place]
        if one in held:
            return best(place + 1, held)
        kept = [held] + ([held | {one}] if len(held) < capacity else [held - {out} | {one} for out in held])
        return 1 + min(best(place + 1, choice) for choice in kept)

    return best(0, frozenset())


@given(traces(most_steps=4, most_experts=4, most_layers=2), st.integers(0, 4))
def test_no_choices_beat_belady(trace: tuple[Any, ...], capacity: int) -> None:
    ids, offsets, experts, _ = trace
    for scope in ("layer", "global"):
        found = replay_cache(ids, offsets, experts, ExpertCache(capacity, "belady", scope))
        expected = 0
        for begin, end in itertools.pairwise(offsets):
            asked = [
                (layer, int(expert))
                for step in ids[begin:end]
                for layer, picks in enumerate(step)
                for expert in picks
                if expert < experts
            ]
            parts = [asked] if scope == "global" else [[r for r in asked if r[0] == i] for i in range(ids.shape[1])]
            expected += sum(fewest_misses(part, capacity) for part in parts)
        assert found.counts[MISS_HIGH] == expected


@given(traces(), st.booleans())
@pytest.mark.parametrize("many", [0, 300])
def test_one_pass_gives_the_hits_at_every_capacity(many: int, trace: tuple[Any, ...], persistent: bool) -> None:
    ids, offsets, experts, _ = trace
    ids[ids >= experts] = NO_EXPERT
    experts += many
    hits = lru_hits_by_capacity(ids, offsets, experts, persistent=persistent)
    assert hits.shape == (ids.shape[1], experts + 1)
    for capacity in {*range(min(9, experts + 1)), experts}:
        cache = ExpertCache(capacity, protected=False, persistent=persistent)
        found = replay_cache(ids, offsets, experts, cache)
        assert_array_equal(hits[:, capacity], (found.outcome == HIT_HIGH).sum((0, 2)))


@given(traces(), st.data())
@pytest.mark.parametrize("rule", RULES)
def test_room_for_all_and_a_warm_start_never_miss(rule: CacheRule, trace: tuple[Any, ...], data: st.DataObject) -> None:
    ids, offsets, experts, rng = trace
    cache = data.draw(settings_of(rule, trace))
    cache = dataclasses.replace(cache, capacity=experts * (ids.shape[1] if cache.scope == "global" else 1))
    every = np.tile(rng.permutation(experts).astype(np.uint16), (1, ids.shape[1], 1))
    found = replay_cache(ids, offsets, experts, cache, initial=every, scores=rng.random(ids.shape))
    assert_array_equal(found.outcome, np.where(ids < experts, HIT_HIGH, NOT_RUN))
    assert found.hit_rate == (1.0 if (ids < experts).any() else 0.0)


@given(st.integers(2, 6), st.integers(1, 4), st.integers(2, 8), st.booleans(), st.data())
def test_a_global_lru_never_hits_where_layers_are_visited_in_turn(
    layers: int, width: int, steps: int, protected: bool, data: st.DataObject
) -> None:
    ids = np.tile(np.arange(width, dtype=np.uint16), (steps, layers, 1))
    offsets, asked = np.array([0, steps]), layers * width
    # A protected step finds all picks that are there when it starts: its last one is the first that would be.
    capacity = data.draw(st.integers(width, asked - width) if protected else st.integers(1, asked - 1))

    def hits(cache: ExpertCache) -> int:
        return int(replay_cache(ids, offsets, width + 2, cache).counts[HIT_HIGH])

    assert hits(ExpertCache(capacity, "lru", "global", protected=protected)) == 0
    assert hits(ExpertCache(asked, "lru", "global", protected=protected)) == (steps - 1) * asked
    assert hits(ExpertCache(width, "lru", "layer", protected=protected)) == (steps - 1) * asked
    # Keeping the first experts for ever hits as often, and the best cache is no worse.
    assert hits(ExpertCache(capacity, "belady", "global")) >= (steps - 1) * capacity


def test_order_of_requests_and_protection_by_hand() -> None:
    # Two slots hold 0 (older) and 1. The step picks 2 and then 0.
    ids = np.array([[[0, 1]], [[2, 0]]], np.uint16)
    bounds = np.array([0, 2])
    strict = replay_cache(ids, bounds, 3, ExpertCache(2, protected=False))
    assert strict.outcome[1, 0].tolist() == [MISS_HIGH, MISS_HIGH]
    guarded = replay_cache(ids, bounds, 3, ExpertCache(2))
    assert guarded.outcome[1, 0].tolist() == [MISS_HIGH, HIT_HIGH]
    assert guarded.kept.all()


def test_below_top_k_a_step_keeps_its_first_picks_or_its_last_ones() -> None:
    ids = np.array([[[0, 1, 2]], [[0, 1, 2]]], np.uint16)
    bounds = np.array([0, 2])
    for rule in BLIND:
        guarded = replay_cache(ids, bounds, 3, ExpertCache(2, rule), scores=np.ones(ids.shape))
        assert guarded.kept[0, 0].tolist() == [True, True, False]
        assert guarded.outcome[1, 0].tolist() == [HIT_HIGH, HIT_HIGH, MISS_HIGH]
    strict = replay_cache(ids, bounds, 3, ExpertCache(2, protected=False))
    assert strict.kept.all()
    assert strict.outcome[1, 0].tolist() == [MISS_HIGH] * 3


def test_copies_ahead_by_hand() -> None:
    ids = np.array([[[0]], [[1]], [[1]]], np.uint16)
    predicted = np.array([[[NO_EXPERT, NO_EXPERT]], [[1, 2]], [[1, 0]]], np.uint16)
    found = replay_cache(ids, np.array([0, 3]), 4, ExpertCache(3), predicted=predicted)
    assert found.outcome.ravel().tolist() == [MISS_HIGH, AHEAD_HIGH, HIT_HIGH]
    assert found.wasted_high.ravel().tolist() == [0, 1, 0]
    assert found.copies_high == 3
    nowhere = replay_cache(ids, np.array([0, 3]), 4, ExpertCache(0), predicted=predicted)
    assert nowhere.outcome.ravel().tolist() == [MISS_HIGH, AHEAD_HIGH, AHEAD_HIGH]
    assert nowhere.wasted_high.ravel().tolist() == [0, 1, 1]
    assert not nowhere.kept.any()


@pytest.mark.parametrize("rule", RULES)
def test_nothing_to_replay(rule: CacheRule) -> None:
    for shape in ((0, 2, 2), (3, 2, 0)):
        ids = np.empty(shape, np.uint16)
        bounds = np.array([0, 0, shape[0]])
        found = replay_cache(ids, bounds, 4, ExpertCache(2, rule), scores=np.empty(shape))
        assert found.outcome.shape == shape
        assert found.hit_rate == 0.0
        assert lru_hits_by_capacity(ids, bounds, 4).sum() == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"capacity": -1}, "capacity is -1, expected a number >= 0"),
        ({"capacity": float("nan")}, "capacity is nan"),
        ({"capacity": "4"}, "capacity is '4'"),
        ({"capacity_low": -2}, "capacity_low is -2"),
        ({"low_size": 0}, "low_size is 0, expected a number > 0"),
        ({"rule": "fifo"}, "rule is 'fifo', expected one of lru, lfu"),
        ({"scope": "model"}, "scope is 'model', expected one of layer, global"),
        ({"weights": (1.0, 2.0, 0.0, 0.0)}, "expected four numbers from 0 to 1"),
        ({"weights": (1.0,)}, "expected four numbers from 0 to 1"),
        ({"smoothing": 1.5}, "smoothing is 1.5, expected 0 to 1"),
    ],
)
def test_bad_settings_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        ExpertCache(**{"capacity": 2, **changes})


def test_bad_arrays_are_refused() -> None:
    ids, bounds, cache = np.zeros((3, 2, 1), np.uint16), np.array([0, 3]), ExpertCache(1)
    bad: list[tuple[dict[str, Any], str]] = [
        ({"ids": ids.astype(np.int64)}, "ids has dtype int64"),
        ({"ids": ids + np.uint16(9)}, "ids holds expert 9, expected 0 to 3"),
        ({"num_experts": 0}, "num_experts is 0"),
        ({"offsets": np.array([0, 2])}, "offsets run from 0 to 2"),
        ({"offsets": np.array([0, 4, 3])}, "expected to rise"),
        ({"offsets": np.array([0.0, 3.0])}, "offsets have dtype float64"),
        ({"wanted": np.zeros((3, 2, 2), np.uint8)}, "wanted has shape"),
        ({"wanted": np.full(ids.shape, 3, np.uint8)}, "wanted is no uint8 array"),
        ({"predicted": np.zeros((2, 2, 1), np.uint16)}, "predicted has shape"),
        ({"predicted": np.zeros((3, 2, 256), np.uint16)}, "at most 255"),
        ({"predicted_wanted": np.zeros(ids.shape, np.uint8)}, "without predicted"),
        ({"initial": np.zeros((2, 2, 1), np.uint16)}, "initial has shape"),
        ({"scores": np.zeros((3, 2, 2))}, "scores has shape"),
        ({"scores": np.full(ids.shape, np.nan)}, "scores has other entries"),
        ({"likelihood": np.zeros((2, 2, 4))}, "match is missing"),
        ({"match": np.zeros(3, np.int64)}, "without likelihood"),
        ({"likelihood": np.zeros((2, 2, 4)), "match": np.array([0, 1, 2])}, "match has other entries"),
    ]
    for changes, message in bad:
        with pytest.raises(TraceError, match=message):
            replay_cache(**{"ids": ids, "offsets": bounds, "num_experts": 4, "cache": cache, **changes})
    with pytest.raises(TraceError, match="scores are missing"):
        replay_cache(ids, bounds, 4, ExpertCache(1, "recent-score"))
    for name, array in (("wanted", np.zeros(ids.shape, np.uint8)), ("predicted", ids)):
        with pytest.raises(PolicyError, match="rule belady is the bound"):
            replay_cache(ids, bounds, 4, ExpertCache(1, "belady"), **{name: array})
