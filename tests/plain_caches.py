"""A plain cache of experts with sets and dicts, the oracle of the tests of `perfmodel.caches`."""

import itertools
import math
from typing import Any

import numpy as np

from perfmodel.caches import ExpertCache

NAMES = ("hit high", "hit low", "miss high", "miss low", "not run", "ahead high", "ahead low")
HIGH, LOW, NOTHING = range(3)


class PlainCache:
    """One cache of one sequence; an entry is (bits, layer, expert)."""

    def __init__(self, cache: ExpertCache, layers: int, experts: int) -> None:
        self.cache, self.layers, self.experts = cache, layers, experts
        self.entries: dict[tuple[int, int, int], int] = {}  # and when they were last used, or came
        self.uses = np.zeros((layers, experts), int)
        self.high_uses = np.zeros((layers, experts), int)
        self.used_at = np.zeros((layers, experts), int)
        self.mean = np.zeros((layers, experts))
        self.requests: list[tuple[int, int]] = []  # all of the sequence, for Belady's rule
        self.done = 0
        self.clock = 0

    def size(self, bits: int) -> int:
        return math.ceil((self.cache.high_size, self.cache.low_size)[bits])

    def rivals(self, bits: int, layer: int) -> list[tuple[int, int, int]]:
        """Entries that share their room with a copy."""
        shared = self.cache.capacity_low is None
        return [
            entry
            for entry in self.entries
            if (shared or entry[0] == bits) and (self.cache.scope == "global" or entry[1] == layer)
        ]

    def limit(self, bits: int) -> int:
        both = self.cache.capacity_low
        return math.floor(self.cache.capacity if both is None or bits == HIGH else both)

    def next_request(self, layer: int, expert: int) -> float:
        later = (i for i in range(self.done, len(self.requests)) if self.requests[i] == (layer, expert))
        return next(later, math.inf)

    def score(self, layer: int, expert: int, now: int, step: int, chances: Any) -> float:
        near = 1.0 - (layer - now) % self.layers / self.layers
        w = self.cache.weights
        match self.cache.rule:
            case "lru":
                return 0.0
            case "lfu":
                return float(self.uses[layer, expert])
            case "weighted":
                records = w[0] * self.used_at[layer, expert] + w[1] * self.uses[layer, expert]
                return float((records + w[2] * self.high_uses[layer, expert]) / step + w[3] * near)
            case "recent-score":
                return float(self.mean[layer, expert])
            case "activation":
                share = chances[layer, expert] if chances is not None else 0.0
                if chances is None and self.uses[layer].sum():
                    share = self.uses[layer, expert] / self.uses[layer].sum()
                return float((share + 1e-4) * near)
        return -self.next_request(layer, expert)

    def load(self, layer: int, expert: int) -> None:
        """Load at the start what fits; later ones are less recent."""
        room = self.limit(HIGH) - sum(self.size(entry[0]) for entry in self.rivals(HIGH, layer))
        if (HIGH, layer, expert) not in self.entries and room >= self.size(HIGH):
            self.entries[HIGH, layer, expert] = -1 - len(self.entries)

    def insert(self, bits: int, layer: int, expert: int, now: int, step: int, chances: Any, safe: set[Any]) -> bool:
        """Make room for a copy; whether it is kept."""
        rivals = self.rivals(bits, layer)
        loose = [entry for entry in rivals if entry not in safe]
        room = self.limit(bits) - sum(self.size(entry[0]) for entry in rivals)
        if room + sum(self.size(entry[0]) for entry in loose) < self.size(bits):
            return False
        while room < self.size(bits):
            worst = min(
                loose, key=lambda one: (self.score(one[1], one[2], now, step, chances), self.entries[one], one[1:])
            )
            if self.cache.rule == "belady" and not self.next_request(*worst[1:]) > self.next_request(layer, expert):
                return False
            loose.remove(worst)
            del self.entries[worst]
            room += self.size(worst[0])
        self.entries[bits, layer, expert] = self.clock
        return True


def plain_replay(
    ids: Any, offsets: Any, experts: int, cache: ExpertCache, *, wanted: Any = None, predicted: Any = None,
    predicted_wanted: Any = None, initial: Any = None, scores: Any = None, likelihood: Any = None, match: Any = None,
) -> tuple[Any, Any, Any]:  # fmt: skip
    """Outcome and kept [T, L, k], and wasted copies [T, L, 2]."""
    steps, layers, width = ids.shape
    outcome, kept = np.full(ids.shape, NAMES.index("not run")), np.zeros(ids.shape, bool)
    wasted = np.zeros((steps, layers, 2), int)
    bounds = [0, steps] if cache.persistent else offsets
    guarding = cache.protected and cache.rule != "belady"
    for s, (begin, end) in enumerate(itertools.pairwise(bounds)):
        plain = PlainCache(cache, layers, experts)
        places = [
            (t, i, j) for t in range(begin, end) for i in range(layers) for j in range(width) if ids[t, i, j] < experts
        ]
        plain.requests = [(i, int(ids[t, i, j])) for t, i, j in places]
        if initial is not None:
            for rank in range(initial.shape[2]):
                for i in range(layers):
                    expert = int(initial[min(s, len(initial) - 1), i, rank])
                    if expert < experts:
                        plain.load(i, expert)
        for t, now in itertools.product(range(begin, end), range(layers)):
            step, safe = t - begin + 1, set()
            chances = None
            if likelihood is not None:
                chances = likelihood[0 if match is None else match[t]]
            foretold = []
            for j in range(0 if predicted is None else predicted.shape[2]):
                want = HIGH if predicted_wanted is None else int(predicted_wanted[t, now, j])
                if predicted[t, now, j] < experts and want != NOTHING:
                    foretold.append((int(predicted[t, now, j]), want))
            if guarding:
                safe |= {(HIGH, now, expert) for expert, _ in foretold}
                safe |= {(LOW, now, expert) for expert, want in foretold if want == LOW}
            waiting: dict[tuple[int, int], bool] = {}  # copies without their pick: whether the cache has them
            unplaced = set()
            for expert, want in foretold:
                there = {
                    bits for bits in (HIGH, LOW) if (bits, now, expert) in plain.entries or (bits, expert) in waiting
                }
                if HIGH in there or want in there:
                    continue
                plain.clock += 1
                plain.used_at[now, expert] = step
                waiting[want, expert] = True
                if not plain.insert(want, now, expert, now, step, chances, safe):
                    unplaced.add((want, expert))
            wants = [HIGH] * width if wanted is None else wanted[t, now].tolist()
            picks = [(j, int(ids[t, now, j]), wants[j]) for j in range(width) if ids[t, now, j] < experts]
            if cache.rule == "recent-score":
                plain.mean[now] *= 1.0 - cache.smoothing
                for j, expert, _ in picks:
                    plain.mean[now, expert] += cache.smoothing * scores[t, now, j]
            if guarding:
                safe |= {(HIGH, now, expert) for _, expert, _ in picks}
                safe |= {(LOW, now, expert) for _, expert, want in picks if want != HIGH}
            for j, expert, want in picks:
                plain.done += 1
                serving = [HIGH] if want == HIGH else [HIGH, LOW]
                found = [b for b in serving if (b, now, expert) in plain.entries or (b, expert) in unplaced]
                if not found and want == NOTHING:
                    continue
                bits = found[0] if found else want
                how = "miss" if not found else "ahead" if waiting.pop((bits, expert), False) else "hit"
                outcome[t, now, j] = NAMES.index(f"{how} {'low' if bits else 'high'}")
                plain.clock += 1
                plain.uses[now, expert] += 1
                plain.high_uses[now, expert] += bits == HIGH
                plain.used_at[now, expert] = step
                if (bits, now, expert) in plain.entries:
                    plain.entries[bits, now, expert] = plain.clock
                    kept[t, now, j] = True
                elif not found:
                    kept[t, now, j] = plain.insert(bits, now, expert, now, step, chances, safe)
                for pool in (HIGH, LOW):
                    used = sum(plain.size(entry[0]) for entry in plain.rivals(pool, now))
                    assert used <= plain.limit(pool)
            for bits, _ in waiting:
                wasted[t, now, bits] += 1
    return outcome, kept, wasted
