"""Cache replays against their targets and against plain Python caches, on one core: ``python benchmarks/caches.py``.

Traces are synthetic: one with skewed and sticky routing, and a uniform one, of 2 of 8 experts in 32 layers and of 8 of
128 in 48. Rates are those of the fastest of several passes, because machines are shared. The exit code is 1 where a
target is missed.
"""

import argparse
import json
import sys
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))

from run import fastest

from perfmodel.caches import MISS_HIGH, ExpertCache, lru_hits_by_capacity, replay_cache
from perfmodel.routing.synthetic import MIXTRAL_SKEW, generate

#: Steps, layers, experts, picks.
SHAPES = ((4096, 32, 8, 2), (1024, 48, 128, 8))
#: Least million picks a second, by experts.
TARGETS = {
    "lru": {8: 100.0, 128: 50.0},
    "lru, strict order": {8: 100.0, 128: 50.0},
    "lru, global": {},
    "lfu": {8: 20.0, 128: 20.0},
    "belady": {8: 50.0, 128: 50.0},
    "weighted, global": {8: 5.0},
    "lru, all capacities": {8: 50.0, 128: 50.0},
}


def python_lru(ids: np.ndarray, capacity: int) -> int:
    """Misses of one LRU cache a layer in plain Python, in strict order."""
    misses = 0
    for layer in range(ids.shape[1]):
        held: OrderedDict[int, None] = OrderedDict()
        for expert in ids[:, layer].ravel().tolist():
            if expert in held:
                held.move_to_end(expert)
            else:
                misses += 1
                held[expert] = None
                if len(held) > capacity:
                    held.popitem(last=False)
    return misses


def measure() -> list[dict[str, Any]]:
    """Rates of every rule on every trace."""
    rows = []
    for steps, layers, experts, width in SHAPES:
        skewed = generate(1, 1, steps, layers, experts, width, **MIXTRAL_SKEW._replace(alpha=1.0)._asdict())
        uniform = generate(1, 1, steps, layers, experts, width)
        slots = experts // 2 if experts <= 8 else experts // 4
        for name, trace in (("skewed", skewed), ("uniform", uniform)):
            ids = np.ascontiguousarray(trace.topk_ids[1:], np.uint16)
            bounds = np.array([0, steps])
            peer = python_lru(ids[:500], slots)
            strict = replay_cache(ids[:500], np.array([0, 500]), experts, ExpertCache(slots, protected=False))
            assert peer == strict.counts[MISS_HIGH]
            plain = fastest(lambda ids=ids, slots=slots: python_lru(ids[:500], slots), 3) / ids[:500].size
            caches = {
                "lru": ExpertCache(slots),
                "lru, strict order": ExpertCache(slots, protected=False),
                "lru, global": ExpertCache(slots * layers, scope="global"),
                "lfu": ExpertCache(slots, "lfu"),
                "belady": ExpertCache(slots, "belady"),
                "weighted, global": ExpertCache(slots * layers, "weighted", "global"),
            }
            calls: dict[str, Callable[[], Any]] = {
                rule: lambda ids=ids, cache=cache, bounds=bounds, experts=experts: replay_cache(
                    ids, bounds, experts, cache
                )
                for rule, cache in caches.items()
            }
            calls["lru, all capacities"] = lambda ids=ids, bounds=bounds, experts=experts: lru_hits_by_capacity(
                ids, bounds, experts
            )
            for rule, call in calls.items():
                seconds = fastest(call, 7) / ids.size
                rows.append(
                    {
                        "rule": rule,
                        "trace": name,
                        "experts": experts,
                        "slots": slots,
                        "hit_rate": call().hit_rate if rule in caches else None,
                        "million_picks_per_s": 1e-6 / seconds,
                        "target": TARGETS[rule].get(experts),
                        "ratio_to_plain_lru": plain / seconds,
                    }
                )
    return rows


def main() -> int:
    """Measure, print, and tell whether every target is met."""
    parser = argparse.ArgumentParser(description="Rates of cache replays on one core.")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args()
    rows = measure()
    if options.json:
        print(json.dumps(rows, indent=2))
    else:
        for row in rows:
            hits = "" if row["hit_rate"] is None else f"{100 * row['hit_rate']:5.1f} % hits"
            target = "" if row["target"] is None else f"target {row['target']:5.0f}"
            print(
                f"{row['rule']:20} {row['experts']:4} experts, {row['trace']:8} {hits:13}"
                f" {row['million_picks_per_s']:8.1f} million picks/s {row['ratio_to_plain_lru']:7.1f} x plain LRU"
                f"  {target}"
            )
    return int(any(row["target"] is not None and row["million_picks_per_s"] < row["target"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
