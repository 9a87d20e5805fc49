"""ProMoE: a learned predictor copies ahead in pieces, so that a wrong copy is aborted early.

Source: ProMoE (arXiv 2410.22134): a small network per layer foretells the experts of the next one with an accuracy of
84.7 %; an expert is copied in pieces, and the copies of wrong experts make way for those on demand; the cache is an LRU
per layer.

- The predictor is not published as weights, so each pick is foretold rightly with the chance ``accuracy``.
- A wrong copy occupies the link for one of ``pieces`` pieces: it is found out when the router has run, and only the
  piece under way is finished. Their size is not given; one piece a matrix, 3 for a gated expert, is assumed. With
  ``pieces=1`` the whole expert crosses. A wrong copy never enters the cache.
- How far ahead the predictor looks does not matter here: a copy has the layer before to hide behind.
- A prefill copies every selected expert once.
"""

from dataclasses import dataclass
from typing import ClassVar

from perfmodel.policies.ahead import CopiedAhead
from perfmodel.policies.base import option


@dataclass(frozen=True)
class ProMoE(CopiedAhead):
    """Learned prediction and copies that can be stopped."""

    name: ClassVar[str] = "promoe"
    summary: ClassVar[str] = "LRU cache per layer; a learned predictor copies ahead in pieces, wrong copies are aborted"
    source: ClassVar[str] = "arXiv 2410.22134"
    wrong_copies: ClassVar[str] = "are aborted after a piece"

    accuracy: float = option(0.847, "chance that a foretold expert is right", low=0, high=1)
    pieces: int = option(3, "pieces in which an expert is copied; a wrong copy ends after the first", low=1, high=1000)

    def _wrong_bits(self, bits: float) -> float:
        # A part of an expert costs the link what a whole one with fewer bits would.
        return bits / self.pieces
