"""Cache replay against plain caches that keep their entries in a list."""

import itertools
from collections import OrderedDict

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from perfmodel.kernels.cache import HIT_HIGH, HIT_LOW, MISS_HIGH, MISS_LOW, NOT_RUN, lru_hits, mixed_cache


class PlainLru:
    """A least-recently-used cache that really evicts."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.entries = capacity, OrderedDict()

    def touch(self, expert: int) -> bool:
        """Whether the expert is here; it becomes the newest."""
        if expert not in self.entries:
            return False
        self.entries.move_to_end(expert)
        return True

    def insert(self, expert: int) -> None:
        """Put an expert in, the oldest one out."""
        self.entries[expert] = None
        self.entries.move_to_end(expert)
        while len(self.entries) > self.capacity:
            self.entries.popitem(last=False)


@st.composite
def requests(draw: st.DrawFn):
    """Ids, a mask, wanted precisions and sequence offsets."""
    lengths = draw(st.lists(st.integers(1, 12), min_size=1, max_size=3))
    experts = draw(st.integers(1, 7))
    width = draw(st.integers(1, min(3, experts)))
    shape = (sum(lengths), draw(st.integers(1, 3)), width)
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    ids = np.argsort(rng.random((*shape[:2], experts)), axis=-1)[..., :width]
    mask = rng.random(shape) < draw(st.sampled_from([0.3, 0.8, 1.0]))
    wanted = rng.integers(0, 3, shape)
    offsets = np.cumsum([0, *lengths])
    return np.ascontiguousarray(ids, np.uint16), mask, wanted.astype(np.uint8), offsets, experts


def places(mask, offsets):
    """Sequence by sequence and layer by layer, the places of all requests in order."""
    for start, stop in itertools.pairwise(offsets):
        for layer in range(mask.shape[1]):
            yield [(t, layer, j) for t in range(start, stop) for j in range(mask.shape[2]) if mask[t, layer, j]]


@given(requests(), st.integers(0, 8))
def test_one_cache_equals_a_plain_one(request, capacity) -> None:
    ids, mask, _, offsets, experts = request
    expected = np.zeros(ids.shape, bool)
    for run in places(mask, offsets):
        cache = PlainLru(capacity)
        for place in run:
            expected[place] = cache.touch(ids[place])
            if not expected[place]:
                cache.insert(ids[place])
    assert_array_equal(lru_hits(ids, mask, offsets, experts, capacity), expected)


@given(requests(), st.integers(0, 8), st.integers(0, 8))
def test_two_caches_equal_plain_ones(request, capacity_high, capacity_low) -> None:
    ids, mask, wanted, offsets, experts = request
    expected = np.full(ids.shape, NOT_RUN)
    for run in places(mask, offsets):
        high, low = PlainLru(capacity_high), PlainLru(capacity_low)
        for place in run:
            expert, want = ids[place], wanted[place]
            if high.touch(expert):
                expected[place] = HIT_HIGH
            elif want > 0 and low.touch(expert):
                expected[place] = HIT_LOW
            elif want == 0:
                expected[place] = MISS_HIGH
                high.insert(expert)
            elif want == 1:
                expected[place] = MISS_LOW
                low.insert(expert)
    found = mixed_cache(ids, wanted, mask, offsets, experts, capacity_high, capacity_low)
    assert_array_equal(found, expected)


@given(requests())
def test_more_room_never_loses_a_hit(request) -> None:
    ids, mask, _, offsets, experts = request
    before = np.zeros(ids.shape, bool)
    for capacity in range(experts + 1):
        hits = lru_hits(ids, mask, offsets, experts, capacity)
        assert (hits | ~before).all()
        before = hits
    assert not lru_hits(ids, mask, offsets, experts, 0).any()
    # With room for all, only the first request of an expert in a sequence and layer misses.
    expected = sum(len({ids[place] for place in run}) for run in places(mask, offsets))
    assert mask.sum() - before.sum() == expected


def test_order_within_a_step_and_eviction_by_hand() -> None:
    ids = np.array([[[0, 1]], [[1, 2]], [[0, 1]], [[2, 1]]], np.uint16)
    mask = np.ones(ids.shape, bool)
    hits = lru_hits(ids, mask, np.array([0, 4]), 3, 2)
    # After each step the cache holds {0, 1}, {1, 2}, {0, 1} and {2, 1}.
    assert hits[:, 0].tolist() == [[False, False], [True, False], [False, False], [False, True]]
    assert not lru_hits(ids, mask, np.array([0, 1, 2, 3, 4]), 3, 2).any()


def test_low_precision_copies_never_serve_a_pick_that_wants_high_precision() -> None:
    ids = np.zeros((5, 1, 1), np.uint16)
    wanted = np.array([1, 1, 0, 1, 2], np.uint8).reshape(5, 1, 1)
    found = mixed_cache(ids, wanted, np.ones((5, 1, 1), bool), np.array([0, 5]), 2, 1, 1)
    assert found.ravel().tolist() == [MISS_LOW, HIT_LOW, MISS_HIGH, HIT_HIGH, HIT_HIGH]
