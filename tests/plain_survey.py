"""Routing statistics in plain loops over tokens, layers and picks: what a survey must find."""

import itertools
from typing import Any

import numpy as np

from perfmodel.routing import RoutingTrace

Array = np.ndarray[Any, Any]


def spans(trace: RoutingTrace, scope: str) -> list[range]:
    """Rows of every sequence that belong to a scope."""
    found = []
    for (start, stop), prompt in zip(itertools.pairwise(trace.sequence_offsets), trace.prompt_len, strict=True):
        middle = start + prompt
        found.append({"all": range(start, stop), "prefill": range(start, middle), "decode": range(middle, stop)}[scope])
    return found


def split_spans(trace: RoutingTrace) -> list[tuple[range, range]]:
    """Rows of every sequence before and after where it is cut in two: its prompt, or its middle if no one has any."""
    found = []
    for start, stop in itertools.pairwise(trace.sequence_offsets):
        found.append((start, stop))
    halves = not trace.prompt_len.any()
    cuts = [(b - a) // 2 if halves else p for (a, b), p in zip(found, trace.prompt_len, strict=True)]
    return [(range(a, a + cut), range(a + cut, b)) for (a, b), cut in zip(found, cuts, strict=True)]


def chosen(trace: RoutingTrace, row: int, layer: int) -> list[int]:
    """Experts of a token in a layer, without unassigned picks."""
    return [int(e) for e in trace.topk_ids[row, layer] if e != trace.unassigned]


def counts_of(trace: RoutingTrace, rows: range) -> Array:
    """Picks of every expert [L, E]."""
    counts = np.zeros((trace.num_layers, trace.num_experts))
    for row in rows:
        for layer in range(trace.num_layers):
            for expert in chosen(trace, row, layer):
                counts[layer, expert] += 1
    return counts


def quotient(part: float, whole: float) -> float:
    """NaN where nothing was counted."""
    return part / whole if whole else float("nan")


def reuse(trace: RoutingTrace, scope: str, lag: int, layers: list[int]) -> float:
    """Share of picks that the token ``lag`` before made too."""
    shared = asked = 0
    for rows in spans(trace, scope):
        for row in rows[lag:]:
            for layer in layers:
                now, before = chosen(trace, row, layer), chosen(trace, row - lag, layer)
                shared += len(set(now) & set(before))
                asked += len(now)
    return quotient(shared, asked)


def chance(trace: RoutingTrace, scope: str, layers: list[int]) -> float:
    """Share of a token's picks that another token of its sequence and scope made too, over all pairs of them."""
    expected = asked = 0.0
    for rows in spans(trace, scope):
        if len(rows) < 2:
            continue
        for layer in layers:
            for one in rows:
                mine = chosen(trace, one, layer)
                others = [len(set(mine) & set(chosen(trace, other, layer))) for other in rows if other != one]
                expected += float(np.mean(others))
                asked += len(mine)
    return quotient(expected, asked)


def distinct(trace: RoutingTrace, scope: str, window: int, layers: list[int]) -> float:
    """Mean number of different experts in whole windows."""
    found = []
    for rows in spans(trace, scope):
        for start in range(0, len(rows) - window + 1, window):
            part = rows[start : start + window]
            found += [len({e for row in part for e in chosen(trace, row, layer)}) for layer in layers]
    return quotient(sum(found), len(found))


def weights_by_rank(trace: RoutingTrace, layers: list[int]) -> Array:
    """Mean share of the weight by rank."""
    assert trace.topk_weights is not None
    rows = [np.sort(row[layer].astype(float))[::-1] for row in trace.topk_weights for layer in layers]
    known = [row / row.sum() for row in rows if row.sum() > 0]
    return np.mean(known, axis=0) if known else np.full(trace.top_k, np.nan)


def next_layer(trace: RoutingTrace, layer: int) -> tuple[int, int, int]:
    """Picks of odd sequences in the layer after ``layer`` foretold from it, foretold by popularity, and all."""
    experts, top_k = trace.num_experts, trace.top_k
    pairs, own, following = np.zeros((experts, experts)), np.zeros(experts), np.zeros(experts)
    for rows in spans(trace, "all")[::2]:
        for row in rows:
            for e in chosen(trace, row, layer):
                own[e] += 1
                for f in chosen(trace, row, layer + 1):
                    pairs[e, f] += 1
            for f in chosen(trace, row, layer + 1):
                following[f] += 1
    popular = set(sorted(range(experts), key=lambda f: (-following[f], f))[:top_k])
    found = usual = asked = 0
    for rows in spans(trace, "all")[1::2]:
        for row in rows:
            score = np.zeros(experts)
            for e in chosen(trace, row, layer):
                score = score + (pairs[e] + 0.1) / (own[e] + 1)
            told = set(sorted(range(experts), key=lambda f: (-score[f], f))[:top_k])
            after = set(chosen(trace, row, layer + 1))
            found, usual, asked = found + len(after & told), usual + len(after & popular), asked + len(after)
    return found, usual, asked


def cosine(a: Array, b: Array) -> float:
    """Cosine of two vectors."""
    return float(a @ b / np.sqrt((a @ a) * (b @ b)))


def top(counts: Array, experts: int) -> set[int]:
    """The most picked experts, the lower number first among equals."""
    return set(sorted(range(len(counts)), key=lambda e: (-counts[e], e))[:experts])


def static_hit_rate(decode: Array, experts: int) -> float:
    """Hit rate of what the other sequences pick most, each sequence alike; ``decode`` is [S, L, E].

    Shares are rounded as the kernels do it, so that it is the same picks that tie.
    """
    shares = [np.floor(one * (2**36 / one.sum()) + 0.5) for one in decode]
    rates = []
    for s, counts in enumerate(decode):
        others = sum(share for o, share in enumerate(shares) if o != s)
        hits = sum(counts[layer, e] for layer in range(len(counts)) for e in top(others[layer], experts))
        rates.append(hits / counts.sum())
    return float(np.mean(rates))


def drift(trace: RoutingTrace, window: int, rows: int) -> tuple[float, float, int]:
    """Cosine and hit rate of one window of the output, and the sequences that have it."""
    cosines, hits, picks, sequences = [], 0.0, 0.0, 0
    for before, after in split_spans(trace):
        part = after[window * rows : (window + 1) * rows]
        if not len(before) or len(part) < rows:
            continue
        sequences += 1
        prefill, decode = counts_of(trace, before), counts_of(trace, part)
        for layer in range(trace.num_layers):
            if prefill[layer].any() and decode[layer].any():
                cosines.append(cosine(prefill[layer], decode[layer]))
            hits += sum(decode[layer, e] for e in top(prefill[layer], trace.num_experts // 2))
            picks += decode[layer].sum()
    return quotient(sum(cosines), len(cosines)), quotient(hits, picks), sequences


def keeps_soonest(requests: list[int], capacity: int) -> int:
    """Hits of a cache that looks ahead and keeps what is needed soonest, the requested expert included."""
    held: set[int] = set()
    hits = 0
    for place, expert in enumerate(requests):
        hits += expert in held
        rest = requests[place + 1 :]
        held = set(sorted(held | {expert}, key=lambda one: rest.index(one) if one in rest else len(rest))[:capacity])
    return hits


def keeps_latest(requests: list[int], capacity: int) -> int:
    """Hits of a least-recently-used cache."""
    held: list[int] = []
    hits = 0
    for expert in requests:
        hits += expert in held
        held = [*(one for one in held if one != expert), expert][-capacity:]
    return hits


def cache_rate(trace: RoutingTrace, capacity: int, restart: int, layers: list[int], rule: Any) -> float:
    """Hit rate of decode picks in a cache that is empty at first and after every ``restart`` rows of a sequence."""
    hits = asked = 0
    for start, decode in zip(trace.sequence_offsets, spans(trace, "decode"), strict=False):
        for layer in layers:
            for _, rows in itertools.groupby(decode, key=lambda row, start=start: (row - start) // restart):
                requests = [e for row in rows for e in chosen(trace, row, layer)]
                hits += rule(requests, capacity)
                asked += len(requests)
    return quotient(hits, asked)
