"""How many experts of a layer get how many tokens of a batch: in closed form, or as in a recording."""

import math
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from perfmodel.kernels.occupancy import window_occupancy
from perfmodel.kernels.tally import NO_EXPERT
from perfmodel.memory import distinct_experts
from perfmodel.routing import RoutingTrace


class Shares(NamedTuple):
    """The experts of a layer by the tokens they get.

    least : tokens of the first entry [1]. experts : float64 [M], mean number of experts with ``least``, ``least + 1``,
    ... tokens [1]. used : mean number of experts with any token [1].
    """

    least: int
    experts: NDArray[np.float64]
    used: float

    def sum(self, times: NDArray[np.float64]) -> NDArray[np.float64]:
        """Sum over all experts of what an expert with 0, 1, 2, ... tokens takes; ``times`` is [..., tokens + 1]."""
        here = times[..., self.least : self.least + len(self.experts)]
        found: NDArray[np.float64] = np.asarray((here * self.experts).sum(axis=-1))
        return found


class Occupancy(Protocol):
    """Shares of every batch up to a largest one."""

    @property
    def most_tokens(self) -> int:
        """The largest batch [token]."""
        ...

    def shares(self, tokens: int) -> Shares:
        """Shares of a batch of 1 to ``most_tokens`` tokens."""
        ...


class Uniform:
    """Every expert as likely as any other, and tokens independent of each other.

    An expert then gets m of B tokens with the binomial chance of m successes in B trials of k / E. Numbers of tokens
    whose chance is below 1e-30 are left out.
    """

    def __init__(self, num_experts: int, top_k: int, most_tokens: int) -> None:
        self.num_experts, self.top_k, self.most_tokens = num_experts, top_k, most_tokens
        self._log_factorial = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1.0, most_tokens + 1)))])

    def shares(self, tokens: int) -> Shares:
        """Mean shares of a batch."""
        used = distinct_experts(self.num_experts, self.top_k, tokens)
        if self.top_k == self.num_experts:
            return Shares(tokens, np.array([float(self.num_experts)]), used)
        chance = self.top_k / self.num_experts
        mean = tokens * chance
        width = 12.0 * math.sqrt(mean * (1.0 - chance)) + 50.0
        least, most = max(0, math.floor(mean - width)), min(tokens, math.ceil(mean + width))
        m = np.arange(least, most + 1)
        log = self._log_factorial[tokens] - self._log_factorial[m] - self._log_factorial[tokens - m]
        log += m * math.log(chance) + (tokens - m) * math.log1p(-chance)
        return Shares(least, self.num_experts * np.exp(log), used)


class Recorded:
    """Windows of consecutive tokens of a recording, prefill and decode alike; the mean over windows and layers."""

    def __init__(self, trace: RoutingTrace, most_tokens: int) -> None:
        self.num_experts = trace.num_experts
        self.most_tokens = min(most_tokens, int(trace.sequence_lengths.max()))
        ids = trace.topk_ids.astype(np.uint16)
        ids[trace.topk_ids == trace.unassigned] = NO_EXPERT
        self._ids, self._offsets = ids, trace.sequence_offsets

    def shares(self, tokens: int) -> Shares:
        """Mean shares of the windows of so many rows."""
        totals = np.zeros(tokens + 1, np.int64)
        window_occupancy(self._ids, self._offsets, self.num_experts, tokens, totals)
        experts = totals * (self.num_experts / totals.sum())
        return Shares(0, experts, float(experts[1:].sum()))
