"""Which tokens of a server's forward passes belong to the same request, told by their positions.

A pass that extends has a run of consecutive positions for each request; a pass that decodes has one token for each
request that is still running, in the order in which the requests began.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from perfmodel.errors import TraceError


class Pass(NamedTuple):
    """One forward pass over T tokens.

    where : start of messages about it
    ids : picks [layers, T, k]
    positions, tokens : place in its request, and vocabulary id, of every token [T]
    extends : tokens of every request that is extended; none in a pass that only decodes
    mixed : whether requests that decode come after those that are extended
    """

    where: str
    ids: NDArray[np.int32]
    positions: NDArray[np.int64]
    tokens: NDArray[np.int64]
    extends: list[int]
    mixed: bool


@dataclass
class _Request:
    """Rows of one request so far; ``next`` is the position that comes next."""

    next: int
    prompt: int = 0
    rows: list[int] = field(default_factory=list)


class Requests:
    """Takes in passes in their order.

    where : name of the file, for messages
    cached : positions before the first row of requests whose beginning the server took from its cache
    """

    def __init__(self, where: str) -> None:
        self.where = where
        self.cached = 0
        self.every: list[_Request] = []
        self.running: list[_Request] = []
        # The last request of the last pass that extended: a long prompt may go on in the next such pass.
        self.unfinished: _Request | None = None
        self.count = 0

    def add(self, one: Pass) -> None:
        """One more pass."""
        decoding = self._decoding(one) if one.mixed else 0 if one.extends else len(one.positions)
        parts = one.extends[: len(one.extends) - decoding]
        start = 0
        begun = [self._extend(one, start + done, size) for done, size in zip(_starts(parts), parts, strict=True)]
        start = sum(parts)
        if decoding or not begun:
            self._decode(one, start)
        for request in begun:
            if request not in self.running:
                self.running.append(request)
        if begun:
            self.unfinished = begun[-1]
        self.count += len(one.positions)

    def rows(self) -> tuple[NDArray[np.int64], list[int], list[int]]:
        """Rows of all passes in the order of the requests; and of each request its rows, and those of its prompt."""
        order = np.array([row for request in self.every for row in request.rows], np.int64)
        return order, [len(one.rows) for one in self.every], [one.prompt for one in self.every]

    def _extend(self, one: Pass, at: int, size: int) -> _Request:
        positions = one.positions[at : at + size]
        first = int(positions[0])
        if first < 0 or (np.diff(positions) != 1).any():
            raise TraceError(f"{one.where}: positions of an extended request do not follow one another from {first}")
        going_on = self.unfinished
        if at == 0 and going_on is not None and going_on.next == first and len(going_on.rows) == going_on.prompt:
            request = going_on
        else:
            request = _Request(next=first)
            self.cached += first
            self.every.append(request)
        self.unfinished = None
        request.rows.extend(range(self.count + at, self.count + at + size))
        request.prompt += size
        request.next = first + size
        return request

    def _decoding(self, one: Pass) -> int:
        """How many requests at the end of a mixed pass decode: the most that running requests can account for.

        The first one extends in any case, or the pass would not be mixed.
        """
        most = 0
        while most < min(len(one.extends) - 1, len(self.running)) and one.extends[-1 - most] == 1:
            most += 1
        for count in range(most, 0, -1):
            if _match([r.next for r in self.running], one.positions[-count:].tolist()) is not None:
                return count
        return 0

    def _decode(self, one: Pass, start: int) -> None:
        positions = one.positions[start:].tolist()
        waiting = [request.next for request in self.running]
        found = _match(waiting, positions)
        if found is None:
            raise TraceError(
                f"{one.where}: decodes at positions that follow no running request; a recording must hold requests "
                "from their start"
            )
        last = _match(waiting[::-1], positions[::-1])
        if last is not None and [len(waiting) - 1 - i for i in last[::-1]] != found:
            raise TraceError(
                f"{one.where}: a request ended while another was at the same position, so that their tokens cannot be "
                "told apart; record with one request at a time"
            )
        kept = [self.running[i] for i in found]
        for row, request in enumerate(kept):
            request.rows.append(self.count + start + row)
            request.next += 1
        self.running = kept


def _starts(sizes: list[int]) -> list[int]:
    return np.append(0, np.cumsum(sizes)[:-1]).astype(int).tolist() if sizes else []


def _match(waiting: list[int], positions: list[int]) -> list[int] | None:
    """Indices of ``waiting``, each as early as can be, that hold ``positions`` in their order; None where none do."""
    found, at = [], 0
    for position in positions:
        while at < len(waiting) and waiting[at] != position:
            at += 1
        if at == len(waiting):
            return None
        found.append(at)
        at += 1
    return found
