"""How the next token is drawn from a model's logits."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from perfmodel.errors import ModelConfigError
from perfmodel.record.options import at_least, number


@dataclass(frozen=True)
class Sampling:
    """What is drawn, checked when made.

    temperature : the logits are divided by it; 0 takes the likeliest token, the first of equal ones
    top_p : the likeliest tokens that together have at least this probability are kept, at least one; 1 keeps all
    top_k : how many of the likeliest tokens are kept, before ``top_p``; None keeps all
    seed : every sequence has a stream of random numbers of its own, by this seed and its place in the recording, so
        what one draws does not depend on how long others were

    Raises :class:`PerfModelError` for a value that is not allowed.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        number(self.temperature, "temperature", 0, 100, "a number from 0 (always the likeliest token) to 100")
        number(self.top_p, "top_p", 1e-6, 1, "a number from 1e-6 to 1 (all tokens)")
        if self.top_k is not None:
            at_least(self.top_k, 1, "top_k")
        at_least(self.seed, 0, "seed")

    def plain(self) -> dict[str, float | int | None]:
        """The options as plain numbers, whatever kinds they were given as."""
        top_k = None if self.top_k is None else int(self.top_k)
        return {
            "temperature": float(self.temperature), "top_p": float(self.top_p), "top_k": top_k, "seed": int(self.seed)
        }  # fmt: skip

    def stream(self, sequence: int) -> np.random.Generator:
        """The random numbers of one sequence."""
        return np.random.default_rng([self.seed, sequence])

    def draw(self, logits: ArrayLike, stream: np.random.Generator) -> int:
        """The token drawn from logits [vocabulary]; minus infinity is a token that is never drawn.

        One number of the stream is used, whatever is drawn. Raises :class:`ModelConfigError` for logits that are
        not numbers, or that are infinite for a token.
        """
        values = np.asarray(logits, np.float64)
        largest = values.max()
        if not np.isfinite(largest):  # NaN is the maximum of everything
            raise ModelConfigError("its logits are not finite; try another dtype")
        if self.temperature == 0:
            return int(values.argmax())
        # A low temperature may overflow to minus infinity, which is what it means.
        with np.errstate(over="ignore", under="ignore"):
            odds = np.exp((values - largest) / self.temperature)
        self._keep(odds, values)
        # Inverse of the cumulative distribution in the order of ids; tokens of probability zero take no room in it.
        ends = np.cumsum(odds)
        place = int(np.searchsorted(ends, stream.random() * ends[-1], side="right"))
        return min(place, int(np.searchsorted(ends, ends[-1])))

    def _keep(self, odds: NDArray[np.float64], values: NDArray[np.float64]) -> None:
        """Set the odds of what is not kept to zero; of equal logits the first ones are kept."""
        if self.top_p == 1 and (self.top_k is None or self.top_k >= len(odds)):
            return
        order = np.argsort(-values, kind="stable")
        sums = np.cumsum(odds[order[: self.top_k]])
        count = len(sums) if self.top_p == 1 else int(np.searchsorted(sums, self.top_p * sums[-1])) + 1
        odds[order[count:]] = 0
