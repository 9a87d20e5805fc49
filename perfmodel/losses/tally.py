"""What assignments of bit widths lose, added up over sequences."""

from dataclasses import dataclass, field

import numpy as np

from perfmodel.bitwidth import Scope
from perfmodel.losses.comparison import Assignment
from perfmodel.losses.rules import RANDOM_ORDERS, Floats


@dataclass
class Tally:
    """Sums over the sequences seen so far, of one rule in one setting; and every sequence's own, draw by draw."""

    ratio: float = 0.0
    ratios: int = 0
    loss: float = 0.0
    sequences: int = 0
    decode: float = 0.0
    uniform: float = 0.0
    picks: float = 0.0
    ratio_of: list[Floats] = field(default_factory=list)
    decode_of: list[Floats] = field(default_factory=list)

    def add(self, loss: Floats, best: Floats, scope: Scope) -> None:
        """loss, best : [S, L], an objective under this rule and at its optimum."""
        self.loss += float(loss.sum())
        self.sequences += len(loss)
        if scope == "model":
            loss, best = loss.sum(axis=1), best.sum(axis=1)
        known = best > 0
        ratios = np.divide(loss, best, out=np.zeros_like(loss), where=known)
        self.ratio += float(ratios.sum())
        self.ratios += int(known.sum())
        if scope == "layer":
            count = known.sum(axis=1)
            self.ratio_of.append(np.divide(ratios.sum(axis=1), count, out=np.full(len(loss), np.nan), where=count > 0))

    def add_decode(self, loss: Floats, uniform: Floats, picks: Floats) -> None:
        """loss, uniform : [S, L], summed over decode picks; picks : [S], those on the GPU as well."""
        self.decode += float(loss.sum())
        self.uniform += float(uniform.sum())
        self.picks += float(picks.sum())
        self.decode_of.append(loss.sum(axis=1))

    def result(self) -> Assignment:
        """Means over all that was added."""
        return Assignment(
            loss=self.loss / self.sequences,
            ratio=self.ratio / self.ratios if self.ratios else None,
            decode_loss=self.decode / self.picks if self.picks else None,
            decode_vs_uniform=self.decode / self.uniform if self.uniform > 0 else None,
        )


def noise(random: list[Floats], prefix: list[Floats], unit: float = 1.0) -> float | None:
    """Standard error of a random order's figure less that of the order by importance [1].

    From one sequence to another, and from one random order of a sequence to another, as the order by importance is one
    order too; the latter alone for one sequence.

    random, prefix : figures by sequence as they were added, part by part and draw by draw; divided by ``unit``.
    """
    drawn, ordered = (
        np.stack([np.concatenate(figures[draw::draws]) for draw in range(draws)])
        for figures, draws in ((random, RANDOM_ORDERS), (prefix, 1))
    )
    gap = drawn.mean(axis=0) - ordered[0]
    known = ~np.isnan(gap)
    if not known.any() or unit <= 0:
        return None
    by_sequence = gap[known].std(ddof=1) / np.sqrt(known.sum()) if known.sum() > 1 else 0.0
    by_draw = np.sqrt(drawn[:, known].var(axis=0, ddof=1).mean() / known.sum())
    return float(np.hypot(by_sequence, by_draw) / unit)
