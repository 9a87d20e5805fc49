"""The search behind :mod:`perfmodel.routing.fitting`: generate, compare, change the parameters, again."""

import math
from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from perfmodel.progress import Report
from perfmodel.routing.moments import (
    Moments,
    frequencies_of,
    heaviest_picks,
    inclusion,
    lru_rates,
    moments,
    nearest_token,
    next_layer_recall,
)
from perfmodel.routing.statistics.ratios import mean_known
from perfmodel.routing.synthetic import PerLayer, Skew, generate
from perfmodel.routing.trace import RoutingTrace

Floats = NDArray[np.float64]

# What is fitted in every layer: logarithms of the two concentrations, stickiness, and the power that profiles are
# raised to, since stickiness makes popular experts more so.
_SEQUENCE, _DECODE, _STICKINESS, _POWER = range(4)
_START = np.array([math.log(30), math.log(60), 0.2, 1.0])
_LOW = np.array([math.log(0.3), math.log(0.3), -2.0, 0.1])
_HIGH = np.array([math.log(3e4), math.log(3e4), 8.0, 2.0])
_STEPS = np.array([0.25, 0.25, 0.1, 0.1])  # to find slopes with
_LONGEST = np.array([1.2, 1.2, 0.6, 0.3])  # that one round may change them

_MEMORIES = ((2.0, 5), (1.0, 3), (4.0, 3), (0.5, 2), (8.0, 2))  # tokens tried, and rounds for each
_CACHES = 2.0  # weight of the hit rates of caches, on which latency depends most
_HALVINGS = 6
_AGAIN = (3, 2)  # rounds with the numbers that all layers share, which are found before each
_OFTENEST = 0.98  # tokens that repeat others
_TRIALS = (
    sum(rounds * (1 + len(_START)) + 1 for rounds in (*dict(_MEMORIES).values(), *_AGAIN))
    + (2 * len(_AGAIN) + 1) * _HALVINGS
    + 2
)  # at most
_MOST_SCORES = 2**26  # tokens x layers x experts of one trial
_MOST_GATES = 2**17  # tokens x layers that the mean of gate weights is taken over
_FAR = 0.03  # what the table of the next layer may lack without a note
_FEWEST = 8  # sequences of a trial, however long


def generate_like(trace: RoutingTrace, skew: Skew, seed: int) -> RoutingTrace:
    """Generated routing with the shape, the lengths and (where the fit used them) the labels of another trace."""
    prompts = trace.prompt_len
    return generate(
        trace.num_sequences, prompts, trace.sequence_lengths - prompts,
        trace.num_layers, trace.num_experts, trace.top_k,
        labels=trace.labels if isinstance(skew.layer_profile, Mapping) else None, seed=seed,
        **skew._asdict(),
    )  # fmt: skip


class Trials:
    """Every trial generates the known sequences anew, from the same seed, so that only parameters differ."""

    def __init__(self, known: RoutingTrace, *, by_label: bool, seed: int, report: Report | None) -> None:
        self.known, self.seed, self.report = known, seed, report
        self.has_prefill = known.has_prefill
        self.static = inclusion(known, "decode").mean(0)
        self.goal = moments(known, self.static)
        self.like = _affordable(known)
        self.shares = _shares(known, by_label)
        self.notes: list[str] = []
        self.done = 0

    def run(self, source: str) -> Skew:
        """The best parameters found."""
        place, common = self._search(Skew(math.inf, math.inf, 0.0, source))
        for rounds in _AGAIN:
            common = common._replace(next_layer=self._next_layer(self._skew(place, common)))
            common = common._replace(repeats=self._repeats(self._skew(place, common)))
            place = self._descend(place, common, rounds)[1]
        skew = self._skew(place, common)
        self._say_next_layer(skew)
        skew = skew._replace(order_noise=self._order_noise(skew))
        return skew._replace(gate_sharpness=self._sharpness(skew))

    def _search(self, common: Skew) -> tuple[Floats, Skew]:
        """What is fitted layer by layer [4, L], and the memory: the best of a few, starting from where one ended."""
        place = np.repeat(_START[:, None], self.known.num_layers, axis=1)
        if not self.has_prefill:
            place[_DECODE] = math.inf
        found: dict[float, tuple[float, Floats]] = {}
        for memory, rounds in _MEMORIES:
            best = min(found, key=lambda one: found[one][0], default=memory)
            # The shortest and the longest are tried only next to the best so far.
            if len(found) < 3 or best in (memory / 2, memory * 2):
                start = found[best][1] if found else place
                found[memory] = self._descend(start, common._replace(memory_tokens=memory), rounds)
        best = min(found, key=lambda one: found[one][0])
        return found[best][1], common._replace(memory_tokens=best)

    def _descend(self, place: Floats, common: Skew, rounds: int) -> tuple[float, Floats]:
        """What is left to match, and where, after some rounds of damped least squares in every layer.

        ``common`` holds the parameters that all layers share.
        """
        best, least = place, np.full(self.known.num_layers, np.inf)
        wanted = self._matched(self.goal)
        for number in range(rounds + 1):
            base = self._try(place, common)
            off = np.nan_to_num(wanted - self._matched(base))
            cost = (off**2).sum(0) + (np.nan_to_num(self.goal.reuse - base.reuse)[1:] ** 2).sum(0)
            best, least = np.where(cost < least, place, best), np.minimum(cost, least)
            if number == rounds:
                break
            slopes = np.zeros((len(_START), *off.shape))
            for which in range(len(_START)):
                if which != _DECODE or self.has_prefill:
                    moved = place.copy()
                    moved[which] += _STEPS[which]
                    change = self._matched(self._try(moved, common)) - self._matched(base)
                    slopes[which] = np.nan_to_num(change) / _STEPS[which]
            place = np.clip(place + _step(slopes, off), _LOW[:, None], _HIGH[:, None])
            if not self.has_prefill:
                place[_DECODE] = math.inf
        return float(least.mean()), best

    def _matched(self, found: Moments) -> Floats:
        """What is matched in every layer [m, L], by its weight."""
        rates = (found.own, found.static, found.oracle, _CACHES * found.lru)
        return np.concatenate([*(mean_known(rate, 1) for rate in rates), found.reuse[:1]])

    def _next_layer(self, skew: Skew) -> float:
        """How much layers share, so that a table of picks foretells as many of the next layer as in the recording."""
        if self.known.num_layers == 1 or self.known.num_sequences == 1:
            return 0.0
        wanted = self._foretold(self.known)
        return self._halve(1.0, lambda share: self._foretold(self._made(skew._replace(next_layer=share))) < wanted)

    def _say_next_layer(self, skew: Skew) -> None:
        if self.known.num_layers == 1 or self.known.num_sequences == 1:
            return
        wanted, found = self._foretold(self.known), self._foretold(self._made(skew))
        if found < wanted - _FAR:
            self.notes.append(
                f"the picks of a layer foretell {wanted:.2f} of those of the next one in the recording, {found:.2f} in "
                "generated sequences, which vary in every layer on their own: more is out of reach"
            )

    def _foretold(self, trace: RoutingTrace) -> float:
        return float(next_layer_recall(trace).mean())

    def _repeats(self, skew: Skew) -> float:
        """How often tokens come again, so that they have as much as recorded in common with the most similar before."""
        if self.known.num_layers == 1:
            return 0.0
        wanted = float(nearest_token(self.known).mean())
        return self._halve(
            _OFTENEST, lambda share: float(nearest_token(self._made(skew._replace(repeats=share))).mean()) < wanted
        )

    def _halve(self, high: float, too_little: Callable[[float], bool]) -> float:
        """A parameter from 0 to ``high`` of which there is neither too little nor too much."""
        low = 0.0
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            low, high = (middle, high) if too_little(middle) else (low, middle)
        return 0.0 if low == 0 else (low + high) / 2

    def _order_noise(self, skew: Skew) -> PerLayer:
        """How much noise orders a token's picks [L], so that a cache of the heaviest ones hits as often as recorded."""
        first = heaviest_picks(self.known)
        if first is None or self.known.top_k == 1:
            return 1.0
        wanted = mean_known(lru_rates(first).mean(0))  # all sizes lack the same
        low, high = np.zeros(self.known.num_layers), np.ones(self.known.num_layers)
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            made = heaviest_picks(self._made(skew._replace(order_noise=middle)))
            assert made is not None  # generated picks have weights
            more = lru_rates(made).mean((0, 1)) > wanted  # less noise makes for more hits
            low, high = np.where(more, middle, low), np.where(more, high, middle)
        return np.where(np.isnan(wanted), 1.0, high)

    def _sharpness(self, skew: Skew) -> float:
        """The power that gives the largest gate weight of a token its recorded mean."""
        plain = self._made(skew).topk_weights
        if self.known.topk_weights is None or plain is None or self.known.top_k == 1:
            return 1.0
        wanted = _largest(self.known.topk_weights, 1.0)
        low, high = math.log(0.05), math.log(20.0)
        for _ in range(20):
            middle = (low + high) / 2
            low, high = (middle, high) if _largest(plain, math.exp(middle)) < wanted else (low, middle)
        return math.exp((low + high) / 2)

    def _skew(self, place: Floats, common: Skew) -> Skew:
        power = place[_POWER][:, None]
        prefill, decode = ({name: share**power for name, share in phase.items()} for phase in self.shares)
        alone = len(prefill) == 1 and "" in prefill
        return common._replace(
            sequence_concentration=np.exp(place[_SEQUENCE]),
            decode_concentration=np.exp(place[_DECODE]),
            stickiness=place[_STICKINESS],
            layer_profile=prefill[""] if alone else prefill,
            decode_profile=decode[""] if alone else decode,
        )

    def _try(self, place: Floats, common: Skew) -> Moments:
        return moments(self._made(self._skew(place, common)), self.static)

    def _made(self, skew: Skew) -> RoutingTrace:
        self._count()
        return generate_like(self.like, skew, self.seed)

    def _count(self) -> None:
        self.done += 1
        if self.report is not None:
            self.report(min(self.done, _TRIALS), _TRIALS)


def _step(slopes: Floats, off: Floats) -> Floats:
    """Damped step [4, L] that least squares suggest, from slopes [4, m, L] and residuals [m, L]."""
    square = np.einsum("aml,bml->lab", slopes, slopes)
    damping = 0.02 * np.trace(square, axis1=1, axis2=2)[:, None, None] / len(slopes) + 1e-5
    right = np.einsum("aml,ml->la", slopes, off)[..., None]
    step = np.linalg.solve(square + damping * np.eye(len(slopes)), right)[..., 0].T
    return np.clip(step, -_LONGEST[:, None], _LONGEST[:, None])


def _largest(weights: NDArray[np.float32], power: float) -> float:
    """Mean over tokens and layers of the largest gate weight, as a share of the token's."""
    rows = weights.reshape(-1, weights.shape[-1])
    rows = rows[:: max(len(rows) // _MOST_GATES, 1)]
    sharp = (rows / np.maximum(rows.max(-1, keepdims=True), 1e-30)) ** power
    return float((1 / np.maximum(sharp.sum(-1), 1)).mean())


def _affordable(known: RoutingTrace) -> RoutingTrace:
    """Sequences of a trial: all, or every n-th in the order of their lengths."""
    order = np.argsort(known.sequence_lengths, kind="stable")
    scores = known.num_tokens * known.num_layers * known.num_experts
    wanted = max(int(len(order) * min(1.0, _MOST_SCORES / scores)), min(_FEWEST, len(order)))
    if wanted == len(order):
        return known
    return known.sequences(np.sort(order[np.linspace(0, len(order) - 1, wanted).astype(int)]))


def _shares(known: RoutingTrace, by_label: bool) -> tuple[dict[str, Floats], dict[str, Floats]]:
    """Frequencies [L, E] in prefill and in decode by label, sequences alike; the label is "" where there are none.

    Labels have a profile each, but the change from prefill to decode is that of all sequences together: single
    labels have too few to tell it from noise.
    """
    decode = inclusion(known, "decode")
    prefill = inclusion(known, "prefill") if known.has_prefill else decode
    labels = np.array(known.labels if by_label and known.labels else [""] * known.num_sequences)
    both = (prefill + decode) / 2
    of_all, *of_phase = (frequencies_of(of.mean(0), known.top_k) for of in (both, prefill, decode))
    profiles = {
        str(name): frequencies_of(both[labels == name].mean(0), known.top_k) for name in dict.fromkeys(labels.tolist())
    }
    first, second = ({name: profile * phase / of_all for name, profile in profiles.items()} for phase in of_phase)
    return first, second
