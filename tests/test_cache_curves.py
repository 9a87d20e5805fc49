"""Measured hit rates of expert caches come out of generated traces in direction; docs/caches.md quotes both."""

import functools
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from cache_traces import (
    Picks,
    batched,
    by_importance,
    distinct_within,
    draining,
    frequency_hits,
    loosely_reused,
    reuse_within,
    sequences,
    used,
)
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.caches import CacheRule, ExpertCache, Scope, lru_hits_by_capacity, replay_cache
from perfmodel.evaluation import Evaluation
from perfmodel.run import evaluate

TEXT = (Path(__file__).resolve().parent.parent / "docs" / "caches.md").read_text(encoding="utf-8")
PLAIN = " ".join(TEXT.split())

# everett6/moe-prefetch, artifacts/p7_slot_allocation.json: Qwen3-30B-A3B, 512 decode tokens of real prompts.
LRU_BY_SLOTS = {16: 58.1, 24: 70.1, 32: 78.1, 40: 83.8, 48: 87.9, 56: 90.7, 64: 92.9, 72: 94.4, 80: 95.6, 88: 96.5}
# aojsd/GPU_Offloading, results_GH200.md: Mixtral-8x7B, one cache for all layers, without prefetch; misses in percent.
EXPERTS_IN_CACHE = (249, 243, 236, 230, 217, 204, 192, 179)
MISSES = {
    "lru": (59.2, 75.9, 79.0, 80.9, 85.3, 87.3, 88.6, 90.6),
    "lfu": (6.0, 17.0, 23.7, 31.7, 46.5, 60.7, 74.5, 77.2),
    "static": (2.9, 5.7, 8.7, 10.9, 15.8, 21.1, 25.7, 30.7),
    "belady": (2.0, 4.2, 6.6, 8.7, 13.2, 17.9, 22.3, 27.2),
}


def quoted(*cells: str) -> None:
    """The page has a table row of these cells."""
    assert f"| {' | '.join(cells)} |" in TEXT


def percent(share: float) -> str:
    return f"{100 * share:.1f}"


@functools.cache
def qwen() -> Picks:
    return sequences("qwen3-30b-a3b", 3, 512)


def hits(picks: Picks, capacity: int, rule: CacheRule = "lru", scope: Scope = "layer", **options: bool) -> float:
    """Share of picks that hit, the cache empty at the start and kept from one sequence to the next."""
    cache = ExpertCache(capacity, rule, scope, persistent=True, **options)
    return replay_cache(picks.ids, picks.offsets, picks.num_experts, cache).hit_rate


def test_statistics_of_qwen() -> None:
    picks = qwen()
    top = np.sort(picks.counts / picks.counts.sum(axis=1, keepdims=True), axis=1)[:, -16:].sum(axis=1).mean()
    quoted("picked again by the next token", "0.427, 0.45", "yes, 0.427", f"{reuse_within(picks, 1):.3f}")
    quoted("picked again within 8 tokens", "0.80", "no", f"{reuse_within(picks, 8):.3f}")
    quoted("share of the top 16 of 128", "0.54 to 0.62", "yes", f"{top:.3f}")
    windows = ", ".join(f"{distinct_within(picks, tokens):.1f}" for tokens in (8, 32, 128))
    quoted("distinct experts in 8, 32, 128 tokens", "29.0, 52.8, 75.2", "yes", windows)


def test_lru_by_slots_in_one_pass() -> None:
    picks = qwen()
    curve = 100 * lru_hits_by_capacity(picks.ids, picks.offsets, picks.num_experts).sum(axis=0) / picks.asked
    assert (np.diff(curve) >= 0).all()
    worst = max(abs(curve[slots] - measured) for slots, measured in LRU_BY_SLOTS.items())
    assert worst < 5
    assert f"at most {worst:.1f} points" in PLAIN
    quoted("slots", *map(str, LRU_BY_SLOTS))
    quoted("measured", *(f"{measured:.1f}" for measured in LRU_BY_SLOTS.values()))
    quoted("replayed", *(f"{curve[slots]:.1f}" for slots in LRU_BY_SLOTS))
    # Of other seeds the curve is the same within a point, so the difference is not luck.
    other = sequences("qwen3-30b-a3b", 3, 512, seed=1)
    again = 100 * lru_hits_by_capacity(other.ids, other.offsets, other.num_experts).sum(axis=0) / other.asked
    assert np.abs(again - curve).max() < 1


@functools.cache
def mixtral() -> tuple[Picks, dict[str, list[float]]]:
    """Batched steps of Mixtral, and the share of requests that miss by rule, for every size of one cache for all."""
    picks = batched(sequences("mixtral-8x7b", 32, 400), draining(400))
    start, misses = by_importance(picks), {}
    for rule in MISSES:
        misses[rule] = []
        for capacity in EXPERTS_IN_CACHE:
            if rule == "static":
                share = frequency_hits(picks.counts, picks.counts, capacity) / picks.asked
            else:
                cache = ExpertCache(capacity, rule, "global")
                share = replay_cache(picks.ids, picks.offsets, 8, cache, initial=start).hit_rate
            misses[rule].append(1 - share)
    return picks, misses


def test_policy_by_cache_size_for_mixtral() -> None:
    picks, found = mixtral()
    assert f"{picks.used.sum(axis=2).mean():.2f} distinct experts a layer" in PLAIN
    assert f"a mean of {draining(400).mean():.0f} and at most {draining(400).max()} requests" in PLAIN
    differences = {}
    for rule, misses in found.items():
        quoted(rule, "measured", *(f"{measured:.1f}" for measured in MISSES[rule]))
        quoted("", "replayed", *map(percent, misses))
        assert misses == sorted(misses)
        differences[rule] = max(abs(100 * one - two) for one, two in zip(misses, MISSES[rule], strict=True))
    text = ", ".join(f"{rule} {worst:.1f}" for rule, worst in differences.items())
    assert f"Largest differences in points: {text}" in PLAIN
    # The order at every size, and how far LRU and the best are apart when nearly all fits.
    for lru, lfu, static, belady in zip(*found.values(), strict=True):
        assert lru > lfu > static >= belady
    assert found["lru"][0] > 0.5
    assert found["static"][0] < 0.05


def test_steady_batches_and_layers_of_their_own() -> None:
    steady = batched(sequences("mixtral-8x7b", 20, 200), np.full(200, 20))
    start = by_importance(steady)
    missed = {}
    for scope, capacity in (("global", 243), ("global", 224), ("layer", 7)):
        cache = ExpertCache(capacity, "lru", scope)
        found = 1 - replay_cache(steady.ids, steady.offsets, 8, cache, initial=start).hit_rate
        missed[scope, capacity] = percent(found)
    distinct = f"{steady.used.sum(axis=2).mean():.2f}"
    assert f"With 20 requests at all times a layer is asked for {distinct} of its 8 experts" in PLAIN
    assert f"misses {missed['global', 243]} % at 243 experts" in PLAIN
    assert f"224 experts {missed['global', 224]} % miss, and {missed['layer', 7]} % in caches of 7 a layer" in PLAIN
    assert float(missed["layer", 7]) < float(missed["global", 224])


@given(st.integers(1, 5), st.integers(1, 4), st.data())
def test_layers_in_a_cycle_defeat_a_common_lru_cache_at_any_size_below_all(layers: int, width: int, data) -> None:
    """One request after another it never hits. What a step picks being protected, it holds until one layer lacks room.

    Every layer asks for the same experts in every step, which caches of each layer's own would always have.
    """
    steps = data.draw(st.integers(2, 6))
    everything = layers * width
    capacity = data.draw(st.integers(0, everything - 1))
    ids = np.broadcast_to(np.arange(width, dtype=np.uint16), (steps, layers, width)).copy()
    offsets = np.array([0, steps])
    found = {
        rule: replay_cache(ids, offsets, width, ExpertCache(capacity, rule, "global", protected=False)).hit_rate
        for rule in ("lru", "belady")
    }
    assert found["lru"] == 0
    full = replay_cache(ids, offsets, width, ExpertCache(everything, "lru", "global")).hit_rate
    assert full == pytest.approx(1 - 1 / steps, rel=1e-12)  # all but the first step
    # The best cache fills up and keeps what it has.
    assert found["belady"] * ids.size >= capacity * (steps - 1) * (1 - 1e-12)
    if capacity <= (layers - 1) * width:
        assert replay_cache(ids, offsets, width, ExpertCache(capacity, "lru", "global")).hit_rate == 0


class Both(NamedTuple):
    """Hit rates of LRU, and of the experts used most: by the trace itself, and by the other sequences."""

    lru: float
    frequency: float
    pinned: float


def regimes(picks: Picks, width: int, tokens: float) -> Both:
    """One cache for all layers that holds the experts of so many tokens."""
    layers = picks.ids.shape[1]
    capacity = round(tokens * width * layers)
    each = np.add.reduceat(used(picks.ids, picks.num_experts), picks.offsets[:-1], axis=0, dtype=np.int64)
    total = each.sum(axis=0)
    pinned = sum(frequency_hits(one, total - one, capacity) for one in each)
    return Both(
        hits(picks, capacity, scope="global"),
        frequency_hits(total, total, capacity) / picks.asked,
        pinned / picks.asked,
    )


@pytest.mark.parametrize("name", ["reuse as Qwen3-30B", "loose reuse"])
def test_lru_or_frequency_depends_on_the_tokens_that_fit(name: str) -> None:
    picks, width = (qwen(), 8) if name.startswith("reuse") else (loosely_reused(), 6)
    rates = {}
    for tokens in (0.75, 1.4, 2, 4, 8):
        rates[tokens] = regimes(picks, width, tokens)
        quoted(name, f"{tokens:g}", *map(percent, rates[tokens]))
    assert rates[0.75].lru < 0.01  # less than a token fits: what comes next is always just gone
    assert rates[0.75].frequency > 0.2
    assert rates[8].lru > rates[8].frequency > rates[8].pinned
    if name.startswith("loose"):
        assert rates[1.4].lru < 0.25 < 0.3 < rates[1.4].pinned
    ahead = [rate.lru > rate.frequency for rate in rates.values()]
    assert ahead == sorted(ahead)  # once LRU is ahead it stays so


def test_one_request_after_another_against_whole_steps() -> None:
    """A step that is served at once keeps what it needs; counted one by one its picks push each other out."""
    picks = batched(sequences("qwen3-30b-a3b", 8, 256), np.full(256, 8))
    assert f"{picks.used.sum(axis=2).mean():.1f} distinct experts a layer (42.6 measured)" in PLAIN
    for rule in ("lru", "belady"):
        alone, whole = (1 - hits(picks, 51, rule, protected=protected) for protected in (False, True))
        quoted(rule, "51", f"{100 * alone:.1f}", f"{100 * whole:.1f}", f"{100 * (alone / whole - 1):.0f} %")
        assert 1.15 < alone / whole < 1.4 if rule == "lru" else alone == whole
    ids = picks.ids[:, :, ::-1]
    turned = Picks(np.ascontiguousarray(ids), picks.offsets, picks.num_experts)
    for protected in (False, True):
        assert hits(turned, 51, protected=protected) == pytest.approx(hits(picks, 51, protected=protected), abs=0.03)


@functools.cache
def priced(policy: str) -> Evaluation:
    text = f"expert-cache:bits=4,{policy}"
    return evaluate("mixtral-8x7b", "rtx4090-pcie4-cpu", "tiny-mixtral-32l-mini", text, prompt=128, output=256)


def test_more_hits_are_not_faster() -> None:
    rows = re.findall(r"^\| `([^`]+)` \| ([\d.]+) \| ([\d.]+) \|$", TEXT, flags=re.MULTILINE)
    found = {policy: (priced(policy).hit_rate.own, 1e3 * priced(policy).tpot_mean_s) for policy, *_ in rows}
    for policy, rate, time in rows:
        assert (rate, time) == (percent(found[policy][0]), f"{found[policy][1]:.1f}")
    assert len(rows) == 4
    by_hits, by_time = (sorted(found, key=lambda policy: found[policy][at]) for at in (0, 1))
    # The fewest hits are the fastest, and equal hits are not equally fast.
    cpu_1, cpu_2, cpu_4 = (f"slots={slots},misses=cpu" for slots in (1, 2, 4))
    fetch_4 = "slots=4,misses=fetch"
    assert by_hits[0] == cpu_1
    assert by_time == [cpu_1, cpu_4, fetch_4, cpu_2]
    assert found[cpu_4][0] == found[fetch_4][0]
    binding = {one: max(("cpu", "link"), key=priced(one).breakdown_s.__getitem__) for one in (cpu_1, cpu_2)}
    assert binding == {cpu_1: "cpu", cpu_2: "link"}
