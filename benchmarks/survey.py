"""Routing statistics: targets, and each beside what one would write first, in one run on one core.

``python benchmarks/survey.py [--large] [--json]``

The trace is random: 33,000 tokens of 64 sequences, 26 layers, 6 of 64 experts, some of them favoured and some used
again by the next token. ``--large`` also surveys 10^8 picks from a file; it needs Linux and 0.3 GB in the temporary
folder. Times are those of the fastest of several passes, because machines are shared; ratios carry over from one
machine to another, times do not. The exit code is 1 where a target is missed.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # one core also for the linear algebra of the intervals

import numba
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))

from run import fastest

from perfmodel.caches import HIT_HIGH, ExpertCache, replay_cache
from perfmodel.kernels import forecast, reuse, tally
from perfmodel.routing import RoutingTrace
from perfmodel.routing.statistics import survey

TOKENS, SEQUENCES, LAYERS, EXPERTS, TOP_K = 33_024, 64, 26, 64, 6
PROMPT = 100
LAGS = (1, 2, 4, 8, 16, 32)
COPIES = 20
#: Tokens of one layer that a plain Python cache gets.
SLICE = 4000
CAPACITY = 16
#: What the project promises.
TARGETS = {"survey of 33,000 tokens [s]": 2.0, "survey of 10^8 picks [s]": 60.0, "its memory [GB]": 1.0}
_LARGE = """
import json, pathlib, sys, time
from perfmodel.routing.statistics import survey
survey("tiny-mixtral-32l-mini")
start = time.perf_counter()
survey(sys.argv[1])
seconds = time.perf_counter() - start
# Not what the process was started with, which the usage of resources would count too.
status = dict(line.split(":", 1) for line in pathlib.Path("/proc/self/status").read_text().splitlines())
print(json.dumps([seconds, int(status["VmHWM"].split()[0]) * 1024 / 1e9]))
"""


def make_ids(seed: int = 0) -> np.ndarray:
    """Picks [T, L, k] of favoured experts, those of the token before preferred."""
    rng = np.random.default_rng(seed)
    favour = rng.gumbel(size=(LAYERS, EXPERTS)) * 0.7
    ids = np.empty((TOKENS, LAYERS, TOP_K), np.uint8)
    last = np.zeros((LAYERS, EXPERTS), bool)
    for t in range(TOKENS):
        score = rng.random((LAYERS, EXPERTS)) * 3 + favour + 0.7 * last
        ids[t] = np.argpartition(-score, TOP_K, axis=-1)[:, :TOP_K]
        last[:] = False
        np.put_along_axis(last, ids[t].astype(np.int64), True, axis=-1)
    return ids


def make_trace(ids: np.ndarray) -> RoutingTrace:
    """A trace of equally long sequences."""
    return RoutingTrace(
        topk_ids=ids,
        topk_weights=np.broadcast_to(np.linspace(0.3, 0.1, TOP_K, dtype=np.float32), ids.shape),
        sequence_offsets=np.arange(0, len(ids) + 1, TOKENS // SEQUENCES),
        prompt_len=np.full(len(ids) * SEQUENCES // TOKENS, PROMPT),
        layer_index=np.arange(LAYERS),
        num_experts=EXPERTS,
        metadata={"model": "random", "source": "synthetic"},
    )


class Kernels:
    """The kernels on one block, each filling tables of its own."""

    def __init__(self, trace: RoutingTrace) -> None:
        ids = trace.topk_ids.astype(np.uint16)
        self.where = (ids, 0, 0, SEQUENCES, trace.sequence_offsets)
        self.prompts, self.group = trace.prompt_len, np.zeros(SEQUENCES, np.int64)

    def reuse(self) -> np.ndarray:
        """Shared picks by lag [L, lags], and with them distinct experts in windows."""
        lags, windows = np.array(LAGS), np.array([2, 8, 32, 128])
        state = (np.zeros((LAYERS, EXPERTS), np.uint64), np.zeros((LAYERS, EXPERTS), np.int64))
        shared, asked = (np.zeros((1, LAYERS, 3, len(LAGS)), np.int64) for _ in range(2))
        pending, distinct = np.zeros((2, 4, LAYERS), np.int64), np.zeros((1, LAYERS, 3, 4), np.int64)
        whole = np.zeros((1, 3, 4), np.int64)
        tally.reuse_and_windows(
            *self.where, self.prompts, self.group, lags, windows, *state, pending, shared, asked, distinct, whole
        )
        return shared[0].sum(1)

    def caches(self) -> tuple[np.ndarray, np.ndarray]:
        """Hits of both caches at every capacity [E]."""
        found = [np.zeros((rows, EXPERTS + 1), np.int64) for rows in (1, 1, LAYERS, LAYERS)]
        reuse.stack_distances(*self.where, self.prompts, self.group, *found)
        return found[0][0].cumsum()[:-1], found[1][0].cumsum()[:-1]

    def next_layer(self) -> int:
        """Picks of odd sequences that a table of even ones foretells."""
        pairs = np.zeros((LAYERS - 1, EXPERTS, EXPERTS))
        own, following = (np.zeros((LAYERS - 1, EXPERTS), np.int64) for _ in range(2))
        forecast.learn_pairs(*self.where, pairs, own, following)
        chances = (pairs + 0.1) / (own + 1.0)[..., None]
        found, asked = np.zeros((1, LAYERS - 1, 2), np.int64), np.zeros((1, LAYERS - 1), np.int64)
        forecast.foretell(*self.where, self.group, chances, np.zeros(own.shape, bool), found, asked)
        return int(found[0, :, 0].sum())


def numpy_reuse(trace: RoutingTrace) -> np.ndarray:
    """Shared picks by lag [L, lags] by comparing every pick with every earlier one."""
    sequence = np.repeat(np.arange(SEQUENCES), TOKENS // SEQUENCES)
    shared = []
    for lag in LAGS:
        same = sequence[lag:] == sequence[:-lag]
        now, before = trace.topk_ids[lag:][same], trace.topk_ids[:-lag][same]
        found = np.zeros(now.shape, bool)
        for j in range(TOP_K):
            found |= now == before[..., j : j + 1]
        shared.append(found.sum((0, 2)))
    return np.stack(shared, -1)


def numpy_next_layer(trace: RoutingTrace) -> int:
    """Foretold picks with whole-array operations, one layer after another."""
    even = np.repeat(np.arange(SEQUENCES) % 2 == 0, TOKENS // SEQUENCES)
    found = 0
    for layer in range(LAYERS - 1):
        now, after = trace.topk_ids[:, layer].astype(np.int64), trace.topk_ids[:, layer + 1].astype(np.int64)
        both = now[even][:, :, None] * EXPERTS + after[even][:, None]
        pairs = np.bincount(both.ravel(), minlength=EXPERTS**2).reshape(EXPERTS, EXPERTS)
        chances = (pairs + 0.1) / (pairs.sum(-1, keepdims=True) / TOP_K + 1.0)
        score = chances[now[~even]].sum(1)
        told = np.argsort(-score, axis=-1, kind="stable")[:, :TOP_K]
        found += int((after[~even][:, :, None] == told[:, None]).sum())
    return found


def each_capacity(trace: RoutingTrace) -> np.ndarray:
    """Hits of a compiled cache simulator, run once for every capacity [E]."""
    decode = trace.phase("decode")
    ids = np.ascontiguousarray(trace.topk_ids[decode], np.uint16)
    offsets = np.arange(0, len(ids) + 1, TOKENS // SEQUENCES - PROMPT)
    caches = [ExpertCache(capacity, protected=False) for capacity in range(1, EXPERTS + 1)]
    return np.array([(replay_cache(ids, offsets, EXPERTS, cache).outcome == HIT_HIGH).sum() for cache in caches])


def python_lru(requests: list[int]) -> int:
    """Hits of one cache in plain Python."""
    held: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for expert in requests:
        if expert in held:
            hits += 1
            held.move_to_end(expert)
        else:
            held[expert] = None
            if len(held) > CAPACITY:
                held.popitem(last=False)
    return hits


def python_belady(requests: list[int]) -> int:
    """Hits of the best cache in plain Python, which knows when each held expert is needed again."""
    upcoming, following = [0] * len(requests), {}
    for place in range(len(requests) - 1, -1, -1):
        upcoming[place] = following.get(requests[place], len(requests))
        following[requests[place]] = place
    held: dict[int, int] = {}
    hits = 0
    for expert, again in zip(requests, upcoming, strict=True):
        hits += expert in held
        held[expert] = again
        if len(held) > CAPACITY:
            del held[max(held, key=held.__getitem__)]
    return hits


def compare(trace: RoutingTrace, note: Callable[[str], None]) -> dict[str, dict[str, float]]:
    """Nanoseconds a pick of each statistic and of the plain way, after checking that both give the same."""
    kernels = Kernels(trace)
    picks = trace.topk_ids.size
    decode = picks * (1 - PROMPT * SEQUENCES / TOKENS)
    np.testing.assert_array_equal(kernels.reuse(), numpy_reuse(trace))
    lru, best = kernels.caches()
    np.testing.assert_array_equal(lru, each_capacity(trace))
    assert abs(kernels.next_layer() - numpy_next_layer(trace)) <= 1e-5 * picks  # sums in another order, rare ties
    requests = trace.topk_ids[PROMPT : PROMPT + SLICE, 0].ravel().tolist()
    assert (lru <= best).all()
    note("all ways agree")
    ours = {
        "reuse": fastest(kernels.reuse, 5) / picks,
        "caches": fastest(kernels.caches, 5) / decode,
        "next": fastest(kernels.next_layer, 5) / picks,
    }
    one = len(requests)
    rows = {
        "reuse at 6 lags (ours with windows), NumPy": (ours["reuse"], fastest(lambda: numpy_reuse(trace), 3) / picks),
        "next layer, NumPy": (ours["next"], fastest(lambda: numpy_next_layer(trace), 2) / picks),
        "LRU and Belady at 64 capacities, compiled LRU one by one": (
            ours["caches"],
            fastest(lambda: each_capacity(trace), 1) / decode,
        ),
        "LRU and Belady at 64 capacities, plain Python at one": (
            ours["caches"],
            (fastest(lambda: python_lru(requests), 3) + fastest(lambda: python_belady(requests), 3)) / one,
        ),
    }
    return {
        name: {"ns_per_pick": 1e9 * mine, "plain_ns_per_pick": 1e9 * plain, "ratio": plain / mine}
        for name, (mine, plain) in rows.items()
    }


def large(ids: np.ndarray) -> tuple[float, float]:
    """Seconds and gigabytes of a survey of 10^8 picks in a process of its own."""
    rng = np.random.default_rng(1)
    copies = [rng.permutation(EXPERTS).astype(np.uint8)[ids] for _ in range(COPIES)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "large.npz"
        make_trace(np.concatenate(copies)).save(path)
        del copies
        done = subprocess.run([sys.executable, "-c", _LARGE, str(path)], capture_output=True, text=True, check=True)
    seconds, gigabytes = json.loads(done.stdout)
    return seconds, gigabytes


def main() -> int:
    """Measure, print, and tell whether every target is met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--large", action="store_true", help="also 10^8 picks from a file")
    parser.add_argument("--json", action="store_true", help="one JSON document")
    options = parser.parse_args()
    note: Callable[[str], Any] = (lambda text: None) if options.json else print
    ids = make_ids()
    trace = make_trace(ids)
    rows = compare(trace, note)
    found = {"survey of 33,000 tokens [s]": fastest(lambda: survey(trace), 3)}
    if options.large:
        found["survey of 10^8 picks [s]"], found["its memory [GB]"] = large(ids)
    if options.json:
        versions = {"python": platform.python_version(), "numpy": np.__version__, "numba": numba.__version__}
        print(json.dumps({"rows": rows, "found": found, "targets": TARGETS, "versions": versions}, allow_nan=False))
    else:
        for name, row in rows.items():
            print(f"{name:60} {row['ns_per_pick']:8.1f} {row['plain_ns_per_pick']:9.1f} ns/pick {row['ratio']:7.1f} x")
        for name, value in found.items():
            print(f"{name:60} {value:8.2f}   target {TARGETS[name]:g}")
    return int(any(value > TARGETS[name] for name, value in found.items()))


if __name__ == "__main__":
    sys.exit(main())
