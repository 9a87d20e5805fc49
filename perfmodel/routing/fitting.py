"""Fit the generator of routing to a recording, and see how well that holds for sequences it has not seen.

Hit rates and reuse are matched, since they decide latency; the cosine between phases hardly pins anything down.
"""

from typing import NamedTuple

import numpy as np

from perfmodel.errors import TraceError
from perfmodel.progress import Report
from perfmodel.routing.checks import as_count
from perfmodel.routing.fitting_trials import Trials, generate_like
from perfmodel.routing.moments import LAGS, Floats, capacities, inclusion, moments
from perfmodel.routing.synthetic import Skew
from perfmodel.routing.trace import RoutingTrace

TOLERANCE = 0.03
"""Largest difference [1] from held-out sequences at which a fit is called good: three points."""

_FEWEST = 6  # sequences to fit: four, and two to compare with
_FEWEST_OF_LABEL = 3  # training sequences that give a label a profile of its own
_RESAMPLES = 200


class Check(NamedTuple):
    """One statistic of held-out sequences, and of generated ones of the same lengths.

    name : what it is
    recorded, generated : shares [1], means over layers; the one of sequences alike, reuse of picks alike
    error : standard error of ``recorded``, by bootstrap over the held-out sequences
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


def fit(trace: RoutingTrace, *, seed: int = 0, report: Report | None = None) -> Fit:
    """Fit the generator to a recording.

    Of every three sequences with the same label, in the order of their lengths, the middle one is held out. From
    the others come the layers' profiles (by label, where every label has at least three of them) and, for every
    layer, the concentrations, the stickiness and a power of the profile that give generated sequences of the same
    lengths the recorded hit rates (of the sequence's own prefill, of the static profile and of the oracle, at a
    quarter, half and three quarters of the experts) and the recorded reuse of neighbouring tokens; then one number
    each for memory (reuse at lags 2, 4 and 8), for the correlation with the next layer and for the sharpness of
    gate weights.

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
            f"the trace of {name} has {len(usable)} sequences with decode steps, expected at least {_FEWEST}: "
            "4 to fit and 2 to compare with"
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
            if not np.isnan(a).any():
                error = float(a.mean(1)[drawn].mean(1).std())
                checks.append(Check(f"hit rate, {meaning}, K = {size}", float(a.mean()), float(b.mean()), error))
    found = [_lru(trace, capacities(recorded.num_experts)) for trace in (recorded, generated)]
    for size, a, b in zip(capacities(recorded.num_experts), *found, strict=True):
        checks.append(
            Check(f"hit rate, LRU cache, K = {size}", float(a.mean()), float(b.mean()), float(a[drawn].mean(1).std()))
        )
    for at, lag in enumerate(LAGS):
        if one.pairs[at].any():
            shared, pairs = one.shared[at].mean(-1), one.pairs[at]
            error = float(np.std(shared[drawn].sum(1) / np.maximum(pairs[drawn].sum(1), 1)))
            checks.append(Check(f"reuse at lag {lag}", float(one.reuse[at].mean()), float(two.reuse[at].mean()), error))
    return tuple(checks)


def _lru(trace: RoutingTrace, sizes: tuple[int, ...]) -> list[Floats]:
    """Share of each sequence's decode picks [S] that hit a cache of so many experts a layer, empty at its start."""
    from perfmodel.kernels.cache import lru_hits  # compiled code is loaded only where it is used

    rows = trace.phase("decode")
    ids = np.ascontiguousarray(trace.topk_ids[rows], dtype=np.uint16)
    assigned = np.ascontiguousarray(trace.topk_ids[rows] != trace.unassigned)
    ends = np.append(0, np.cumsum(trace.sequence_lengths - trace.prompt_len))
    picks = np.add.reduceat(assigned.sum((1, 2)), ends[:-1])
    return [
        np.add.reduceat(lru_hits(ids, assigned, ends, trace.num_experts, size).sum((1, 2)), ends[:-1])
        / np.maximum(picks, 1)
        for size in sizes
    ]
