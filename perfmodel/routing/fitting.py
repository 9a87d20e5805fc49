"""Fit the generator of routing to a recording, and see how well that holds for sequences it has not seen.

Hit rates and reuse are matched, since they decide latency; the cosine between phases hardly pins anything down.
"""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from perfmodel.errors import TraceError
from perfmodel.progress import Report
from perfmodel.routing.checks import as_count
from perfmodel.routing.defects.rows import counted
from perfmodel.routing.fitting_trials import Trials, generate_like
from perfmodel.routing.moments import (
    LAGS,
    NEAR,
    Floats,
    Moments,
    capacities,
    heaviest_picks,
    inclusion,
    lru_rates,
    moments,
    nearest_token,
    token_rates,
)
from perfmodel.routing.statistics.ratios import divide, mean_known
from perfmodel.routing.synthetic import Skew
from perfmodel.routing.trace import RoutingTrace

TOLERANCE = 0.03
"""Largest difference [1] from held-out sequences at which a fit is called good: three points."""

_FEWEST = 6  # sequences to fit: four, and two to compare with
_FEWEST_OF_LABEL = 3  # training sequences that give a label a profile of its own
_RESAMPLES = 200
_LRU = "hit rate, LRU cache, K = "


class Check(NamedTuple):
    """One statistic of held-out sequences, and of generated ones of the same lengths.

    name : what it is
    recorded, generated : shares [1], means over layers; the one of sequences alike, reuse of picks alike. Layers
        that a recorded sequence picks nothing in are left out of its hit rates, and of those of its generated one.
    error : standard error of ``recorded``, by bootstrap over the n held-out sequences, times sqrt(n / (n - 1))
    """

    name: str
    recorded: float
    generated: float
    error: float

    @property
    def difference(self) -> float:
        """How far the generated one is off [1]."""
        return self.generated - self.recorded

    @property
    def within(self) -> bool:
        """Whether that is at most :data:`TOLERANCE`."""
        return abs(self.difference) <= TOLERANCE


class Fit(NamedTuple):
    """Parameters for :func:`perfmodel.routing.synthetic.generate`, and how well they hold.

    skew : the parameters
    checks : statistics of the held-out sequences beside generated ones
    training, held_out : numbers of the sequences that were fitted, and of those that were not looked at
    notes : sentences on what the recording could not tell
    """

    skew: Skew
    checks: tuple[Check, ...]
    training: tuple[int, ...]
    held_out: tuple[int, ...]
    notes: tuple[str, ...]

    @property
    def good(self) -> bool:
        """Whether every check is within the tolerance."""
        return all(check.within for check in self.checks)

    @property
    def misses(self) -> float | None:
        """Relative difference [1] of the miss ratio of the largest LRU cache checked, which latency depends on.

        None where nothing is cached, or the recorded sequences never miss.
        """
        largest = [check for check in self.checks if check.name.startswith(_LRU)][-1:]
        if not largest or largest[0].recorded >= 1:
            return None
        return -largest[0].difference / (1 - largest[0].recorded)


def fit(trace: RoutingTrace, *, seed: int = 0, report: Report | None = None) -> Fit:
    """Fit the generator to a recording.

    In the order of their labels, and of their lengths within a label, the second of every three sequences is held
    out; the count runs on from label to label, so that of a small label more or less than a third may be. From the
    others come the layers' profiles (by label, where every label has at least three of them) and, for every
    layer, the concentrations, the stickiness and a power of the profile that give generated sequences of the same
    lengths the recorded hit rates (of the sequence's own prefill, of the static profile, of the oracle and of an LRU
    cache, at a quarter, half and three quarters of the experts) and the recorded reuse of neighbouring tokens; then
    one number each for memory (reuse at lags 2, 4 and 8), for the correlation with the next layer and for how often
    tokens come again (picks in common with the most similar of 32 tokens before); then, for every layer, how much
    noise orders the picks (hit rates of a cache of the heaviest ones, at the same sizes); at last one number for the
    sharpness of gate weights.

    All of this is about decode steps: how tokens of the prefill follow one another is neither fitted nor checked.

    Parameters
    ----------
    trace : at least 6 sequences with decode steps; others are left out
    seed : >= 0, of the trials. The held-out sequences are compared with a trace of the next seed.
    report : called with the trials done and all of them

    Raises
    ------
    TraceError : for a trace that is no recording, or has too few sequences
    """
    seed = as_count("seed", seed, 0, None)
    name = trace.metadata["model"]
    if trace.metadata["source"] != "recorded":
        raise TraceError(f"the trace of {name} is {trace.metadata['source']}, expected a recording to fit to")
    notes: list[str] = []
    usable = _usable(trace, notes)
    if len(usable) < _FEWEST:
        raise TraceError(
            f"the trace of {name} has {counted(len(usable), 'sequence')} with decode steps, expected at least "
            f"{_FEWEST}: 4 to fit and 2 to compare with"
        )
    training, held_out = _split(trace, usable)
    known, unseen = trace.sequences(training), trace.sequences(held_out)
    trials = Trials(known, by_label=_by_label(known, trace), seed=seed, report=report)
    skew = trials.run(
        f"fitted to {len(training)} of {trace.num_sequences} sequences of {name} (trace {trace.content_hash()[:16]}), "
        f"by hit rates and reuse"
    )
    if trace.topk_weights is None:
        notes.append("the recording has no gate weights: generated ones are the softmax of the scores")
    generated = generate_like(unseen, skew, seed + 1)
    checks = _compare(unseen, generated, inclusion(known, "decode").mean(0), np.random.default_rng(seed))
    return Fit(skew, checks, tuple(training), tuple(held_out), (*notes, *trials.notes))


def _usable(trace: RoutingTrace, notes: list[str]) -> list[int]:
    """Sequences with decode steps, and with prefill where enough of them have that."""
    decode = trace.sequence_lengths > trace.prompt_len
    both = decode & (trace.prompt_len > 0)
    if both.sum() >= _FEWEST:
        chosen, lack = both, "one of the phases"
    else:
        chosen, lack = decode, "decode steps"
        notes.append("the recording has no prefill: in generated sequences prefill follows decode's profile exactly")
        if (trace.prompt_len[decode] > 0).any():
            notes.append(f"the prefill of {int(both.sum())} sequences is too little to fit, and is left out")
    if not chosen.all():
        notes.append(f"{int((~chosen).sum())} of {len(chosen)} sequences lack {lack} and are left out")
    return [int(s) for s in np.flatnonzero(chosen)]


def _split(trace: RoutingTrace, usable: list[int]) -> tuple[list[int], list[int]]:
    """Sequences to fit, and those to hold out."""
    labels = trace.labels or ("",) * trace.num_sequences
    order = sorted(usable, key=lambda s: (labels[s], int(trace.sequence_lengths[s]), s))
    held_out = sorted(order[1::3])
    return sorted(set(usable) - set(held_out)), held_out


def _by_label(known: RoutingTrace, trace: RoutingTrace) -> bool:
    """Whether there are several labels, each with enough sequences to give it a profile."""
    if known.labels is None:
        return False
    names = set(known.labels)
    enough = min(known.labels.count(name) for name in names) >= _FEWEST_OF_LABEL
    return enough and len(names) > 1 and "" not in names and names == set(trace.labels or ())


def _compare(
    recorded: RoutingTrace, generated: RoutingTrace, static: Floats, rng: np.random.Generator
) -> tuple[Check, ...]:
    """Statistics of two traces with the same lengths side by side; ``static`` is the training sequences' profile."""
    one, two = moments(recorded, static), moments(generated, static)
    sequences = recorded.num_sequences
    drawn = rng.integers(sequences, size=(_RESAMPLES, sequences))
    checks = []
    meanings = {
        "own": "own prefill",
        "other": "another sequence's prefill",
        "static": "static profile",
        "oracle": "oracle",
    }
    for field, meaning in meanings.items():
        for size, a, b in zip(capacities(recorded.num_experts), getattr(one, field), getattr(two, field), strict=True):
            if not np.isnan(a).all():
                checks.append(_hits(f"hit rate, {meaning}, K = {size}", a, b, drawn))
    checks += _caches(_LRU, recorded, generated, drawn)
    if recorded.num_layers > 1:
        checks += _tokens(recorded, generated, drawn)
    checks += [_reuse("", at, one, two, drawn) for at in range(len(LAGS)) if one.pairs[at].any()]
    first = [heaviest_picks(trace) for trace in (recorded, generated)]
    if recorded.top_k > 1 and first[0] is not None and first[1] is not None:
        # A policy may treat the heaviest pick of a token in a way of its own, and keep what that used.
        checks += _caches("hit rate, LRU cache of heaviest picks, K = ", first[0], first[1], drawn)
        one, two = (moments(trace, static) for trace in (first[0], first[1]))
        if one.pairs[0].any():
            checks.append(_reuse(" of the heaviest pick", 0, one, two, drawn))
    # A mean of n drawn from n varies too little.
    return tuple(check._replace(error=check.error * math.sqrt(sequences / (sequences - 1))) for check in checks)


def _hits(name: str, recorded: Floats, generated: Floats, drawn: NDArray[np.int64]) -> Check:
    """Hit rates [S, L] side by side, where the recorded sequence picks anything."""
    generated = np.where(np.isnan(recorded), np.nan, generated)
    one, two = mean_known(recorded, 1), mean_known(generated, 1)
    error = float(np.nanstd(mean_known(one[drawn], 1)))
    return Check(name, float(mean_known(one)), float(mean_known(two)), error)


def _caches(what: str, recorded: RoutingTrace, generated: RoutingTrace, drawn: NDArray[np.int64]) -> list[Check]:
    rates = (lru_rates(trace) for trace in (recorded, generated))
    return [
        _hits(f"{what}{size}", a, b, drawn)
        for size, a, b in zip(capacities(recorded.num_experts), *rates, strict=True)
        if not np.isnan(a).all()
    ]


def _tokens(recorded: RoutingTrace, generated: RoutingTrace, drawn: NDArray[np.int64]) -> list[Check]:
    """How much tokens have in common with one before, and how unlike they are: it makes the slow ones slow."""
    steps = recorded.sequence_lengths - recorded.prompt_len
    starts = np.append(0, np.cumsum(steps))[:-1]

    def moments_of(values: Floats) -> tuple[Floats, Floats]:
        """Means and standard deviations over the tokens of every resample of the sequences."""
        sums = np.array([steps, np.add.reduceat(values, starts), np.add.reduceat(values**2, starts)], np.float64)
        count, first, second = sums[:, drawn].sum(-1)
        return first / count, np.sqrt(np.maximum(second / count - (first / count) ** 2, 0))

    sizes = capacities(recorded.num_experts)
    near, rates = ([of(trace) for trace in (recorded, generated)] for of in (nearest_token, token_rates))
    return [
        Check(
            f"shared with the most similar of {NEAR} tokens before", float(near[0].mean()), float(near[1].mean()),
            float(moments_of(near[0])[0].std()),
        ),
        Check(
            f"spread of tokens' hit rates, LRU cache, K = {sizes[len(sizes) // 2]}", float(rates[0].std()),
            float(rates[1].std()), float(moments_of(rates[0])[1].std()),
        ),
    ]  # fmt: skip


def _reuse(what: str, at: int, one: Moments, two: Moments, drawn: NDArray[np.int64]) -> Check:
    times = np.array([np.bincount(draw, minlength=drawn.shape[1]) for draw in drawn], np.float64)
    error = float(np.nanstd(mean_known(divide(times @ one.shared[at], times @ one.pairs[at]), 1)))
    known = one.pairs[at].sum(0) > 0  # layers
    a, b = (mean_known(of.reuse[at][known]) for of in (one, two))
    return Check(f"reuse{what} at lag {LAGS[at]}", float(a), float(b), error)
