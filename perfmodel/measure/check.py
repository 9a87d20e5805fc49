"""The one validation that anyone can repeat: a layer of experts, really computed, beside what the model says of it.

It is another program than the experiments that constants are fitted to: it routes tokens, gathers those of every
expert, and runs gate, up, SiLU and down in 32 bits by NumPy. The experts take turns through memory, as in decoding.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from perfmodel.errors import PerfModelError
from perfmodel.hardware import System
from perfmodel.measure.cpu import Limit
from perfmodel.measure.timing import Case, Timing, time_cases
from perfmodel.progress import Report

#: Tokens that all pick the same experts, so that each expert has as many; and tokens that pick at random.
ALIKE, RANDOM = (1, 2, 4, 8, 16, 32, 64), (8, 64)
_BITS = 32.0
#: Weights of the experts that a token picks, at most, and what of them a second of time allows [1].
_MOST_PARAMS, _PER_SECOND = 2**25, 2**22


class Layer(NamedTuple):
    """A layer of experts. ``factor`` : by which the intermediate size was divided to fit the memory."""

    model: str
    hidden: int
    intermediate: int
    experts: int
    top_k: int
    factor: int = 1

    @property
    def params(self) -> int:
        """Weights of an expert [1]."""
        return 3 * self.hidden * self.intermediate


LAYERS = (Layer("Mixtral-8x7B", 4096, 14336, 8, 2), Layer("DeepSeek-V2-Lite", 2048, 1408, 64, 6))


class CheckRow(NamedTuple):
    """A layer with some tokens: how long it took, and what the model says.

    routing : "alike" or "random". tokens : in the layer. threads : at work. measured, predicted_s : [s].
    """

    layer: Layer
    routing: str
    tokens: int
    threads: int
    measured: Timing
    predicted_s: float

    @property
    def error(self) -> float:
        """predicted / measured - 1 [1]."""
        return self.predicted_s / self.measured.seconds - 1.0


def median_error(rows: Sequence[CheckRow]) -> float | None:
    """Median of the absolute errors over the rows that no other program disturbed [1]; None without any."""
    errors = [abs(row.error) for row in rows if row.measured.calm]
    return float(np.median(errors)) if errors else None


def fitting_layer(layer: Layer, pool_size: int, seconds: float) -> Layer:
    """The layer with a smaller intermediate size and fewer experts, so that it fits a pool and the time.

    A long piece of work is more likely to be disturbed.
    """
    most = pool_size // 4
    picked = min(most // 2, _MOST_PARAMS, _PER_SECOND * seconds)
    factor = 1
    while layer.top_k * layer.params // factor > picked and layer.intermediate // factor >= 128:
        factor *= 2
    smaller = layer._replace(intermediate=layer.intermediate // factor, factor=factor)
    return smaller._replace(experts=max(layer.top_k, min(layer.experts, most // smaller.params)))


def forward(
    states: NDArray[np.float32],
    picks: NDArray[np.int64],
    gates: NDArray[np.float32],
    experts: Sequence[tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]]],
) -> NDArray[np.float32]:
    """Output of a layer of experts [tokens, hidden].

    Equation: ``y_t = sum_j gates[t, j] down (silu(gate x_t) * (up x_t))`` with the matrices of expert ``picks[t, j]``

    states : [tokens, hidden]. picks, gates : [tokens, k]. experts : gate and up [intermediate, hidden], down [hidden,
    intermediate].
    """
    out = np.zeros_like(states)
    for expert in np.unique(picks):
        tokens, slots = np.nonzero(picks == expert)
        gate, up, down = experts[expert]
        chosen = states[tokens]
        hidden = chosen @ gate.T
        hidden /= 1.0 + np.exp(-hidden)
        hidden *= chosen @ up.T
        out[tokens] += gates[tokens, slots, None] * (hidden @ down.T)
    return out


def check_forward(
    system: System,
    pool: NDArray[np.uint8],
    threads: Sequence[int],
    seconds: float,
    limit: Limit,
    clock: Callable[[], float],
    report: Report | None = None,
    own_clock: Callable[[], float] | None = None,
) -> list[CheckRow]:
    """Run layers of experts and predict each from the system's CPU alone.

    Raises PerfModelError for a system without one.
    """
    if system.cpu is None:
        raise PerfModelError(f"system {system.name!r} has no cpu, so it says nothing of experts on one")
    plans, cases = [], []
    layers = [fitting_layer(layer, pool.size, seconds) for layer in LAYERS]
    for count, layer in itertools.product(threads, layers):
        experts = _experts(pool, layer)
        for routing, sizes in (("alike", ALIKE), ("random", RANDOM)):
            for tokens in sizes:
                picks = _picks(layer, routing, tokens)
                plans.append((layer, routing, tokens, count, picks))
                cases.append(_case(f"{layer.model} {routing} {tokens} {count}", layer, picks, experts, count, limit))
    timings = time_cases(cases, seconds, clock, report, own_clock=own_clock)
    return [
        CheckRow(layer, routing, tokens, count, timing, _predicted(system, layer, picks, count))
        for (layer, routing, tokens, count, picks), timing in zip(plans, timings, strict=True)
    ]


def _experts(
    pool: NDArray[np.uint8], layer: Layer
) -> list[tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]]]:
    weights = pool.view(np.float32)
    size = layer.hidden * layer.intermediate
    found = []
    for start in range(0, 3 * size * layer.experts, 3 * size):
        gate, up, down = (weights[start + i * size : start + (i + 1) * size] for i in range(3))
        rows = (layer.intermediate, layer.hidden)
        found.append((gate.reshape(rows), up.reshape(rows), down.reshape(layer.hidden, layer.intermediate)))
    return found


def _picks(layer: Layer, routing: str, tokens: int) -> NDArray[np.int64]:
    """Experts of every token [tokens, k]."""
    if routing == "alike":
        return np.tile(np.arange(layer.top_k), (tokens, 1))
    draws = np.random.default_rng(tokens).random((tokens, layer.experts))
    return np.argsort(draws, axis=1)[:, : layer.top_k]


def _case(
    name: str,
    layer: Layer,
    picks: NDArray[np.int64],
    experts: Sequence[tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]]],
    threads: int,
    limit: Limit,
) -> Case:
    states = np.full((len(picks), layer.hidden), 1e-3, dtype=np.float32)
    gates = np.full(picks.shape, 1.0 / layer.top_k, dtype=np.float32)
    # The next layer picks the next experts, so that none is still in a cache.
    steps = itertools.cycle(range(0, layer.experts, layer.top_k))

    def work(repeats: int) -> None:
        for _ in range(repeats):
            forward(states, (picks + next(steps)) % layer.experts, gates, experts)

    def limits() -> AbstractContextManager[object]:
        return limit(threads)

    return Case(name, work, limits, threads=threads)


def _predicted(system: System, layer: Layer, picks: NDArray[np.int64], threads: int) -> float:
    """Time of the layer by the closed form of the CPU, its experts one after another [s]."""
    from perfmodel.kernels import point as place
    from perfmodel.kernels.cpu import cpu_expert_time
    from perfmodel.point import hardware_point

    point = hardware_point(system.with_values({"cpu.threads": threads}))
    tokens = np.bincount(picks.ravel(), minlength=layer.experts)
    times = cpu_expert_time(
        tokens,
        layer.params,
        layer.params * _BITS / 8,
        layer.hidden,
        *(point[i] for i in (place.CPU_FLOPS, place.CPU_VECTOR_FLOPS, place.CPU_TILE)),
        point[place.CPU_BANDWIDTH],
        point[place.CPU_OVERHEAD],
        point[place.CPU_PACK],
    )
    return float(np.sum(times))
