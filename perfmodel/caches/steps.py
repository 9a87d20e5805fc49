"""Requests of decode steps of several tokens, which ask for every expert once.

All tokens of a step are in a layer together before any is in the next one. So the requests of a step and layer are
the experts that its tokens pick, in the order in which they are picked first; each wants the highest precision that
any of its tokens wants. What a step picks, or has been foretold, is protected as a whole. Every pick then has the
outcome of its expert's request.
"""

from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from perfmodel.kernels.batches import ask_once
from perfmodel.kernels.tally import NO_EXPERT

Kind = TypeVar("Kind", bound=np.generic)


class Requests(NamedTuple):
    """Picks of tokens as requests of steps.

    ids : uint16 [T / B, L, n]. wanted : uint8, the same or empty. place : int32 [T / B, L, n], the request of every
    pick, -1 without one. The picks of a step stand one token after another, so that n = B k.
    """

    ids: NDArray[np.uint16]
    wanted: NDArray[np.uint8]
    place: NDArray[np.int32]

    def each_token(self, found: NDArray[np.uint8], batch: int) -> NDArray[np.uint8]:
        """Outcome of every pick [T, L, k], from those of the requests."""
        own = np.take_along_axis(found, np.maximum(self.place, 0), axis=-1)
        return by_token(np.where(self.place >= 0, own, found), batch)


def requests(ids: NDArray[np.uint16], wanted: NDArray[np.uint8], num_experts: int, batch: int) -> Requests:
    """Requests of steps of ``batch`` tokens, from the picks of each token [T, L, k]."""
    place, asked, wants = ask_once(by_step(ids, batch), by_step(wanted, batch), num_experts)
    return Requests(asked, wants, place)


def foretold(
    ids: NDArray[np.uint16], wanted: NDArray[np.uint8], num_experts: int, batch: int
) -> tuple[NDArray[np.uint16], NDArray[np.uint8]]:
    """The same for predictions, moved together to as few places as hold them."""
    found = requests(ids, wanted, num_experts, batch)
    there = found.ids != NO_EXPERT
    order = np.argsort(~there, axis=-1, kind="stable")[..., : int(there.sum(axis=-1).max(initial=0))]
    moved = [np.take_along_axis(one, order, axis=-1) if one.size else one for one in (found.ids, found.wanted)]
    return np.ascontiguousarray(moved[0]), np.ascontiguousarray(moved[1])


def sum_scores(scores: NDArray[np.float64], place: NDArray[np.int32], batch: int) -> NDArray[np.float64]:
    """Gate weight of every request [T / B, L, n]: the sum over the tokens that pick the expert."""
    every = by_step(scores, batch)
    total = np.zeros_like(every)
    step, layer, pick = np.nonzero(place >= 0)
    np.add.at(total, (step, layer, place[step, layer, pick]), every[step, layer, pick])
    return total


def by_step(array: NDArray[Kind], batch: int) -> NDArray[Kind]:
    """Numbers of tokens [T, L, k] as numbers of steps [T / B, L, B k]; an empty array as it is."""
    tokens, layers, width = array.shape
    if array.size == 0 and tokens == 0:
        return array
    parts = array.reshape(tokens // batch, batch, layers, width).transpose(0, 2, 1, 3)
    return np.ascontiguousarray(parts.reshape(tokens // batch, layers, batch * width))


def by_token(array: NDArray[Kind], batch: int) -> NDArray[Kind]:
    """The inverse of `by_step`."""
    steps, layers, width = array.shape
    parts = array.reshape(steps, layers, batch, width // batch).transpose(0, 2, 1, 3)
    return np.ascontiguousarray(parts.reshape(steps * batch, layers, width // batch))
