"""Which tokens of a server's forward passes belong to the same request, told by their positions.

A pass that extends has a run of consecutive positions for each request; a pass that decodes has one token for each
request that is still running, in the order in which the server keeps them: requests that an extending pass begins go
behind those that run; of a mixed pass, which holds both, they go before them, as they do in the pass itself
(github.com/sgl-project/sglang, ``ScheduleBatch.mix_with_running`` and ``merge_batch``).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
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
    after_gap : whether passes right before it have no record
    """

    where: str
    ids: NDArray[np.int32]
    positions: NDArray[np.int64]
    tokens: NDArray[np.int64]
    extends: list[int]
    mixed: bool
    after_gap: bool = False

    @property
    def alone(self) -> bool:
        """Whether it holds tokens of one request."""
        return len(self.extends) == 1 or (not self.extends and len(self.positions) == 1)


class Rows(NamedTuple):
    """The rows of all passes in the order of the requests.

    order : which row of the passes each is [T]
    lengths, prompts : of each request its rows, and those of its prompt
    cached : of each request the positions before its first row, which the server took from its cache
    """

    order: NDArray[np.int64]
    lengths: list[int]
    prompts: list[int]
    cached: list[int]


def rows_of(passes: Sequence[Pass], where: str) -> Rows:
    """Whose each row is, by positions; TraceError where they do not tell."""
    requests = _Requests(_advice(passes))
    for one in passes:
        requests.add(one)
    every = requests.every
    if not every:
        raise TraceError(f"{where}: holds no tokens")
    order = np.array([row for request in every for row in request.rows], np.int64)
    return Rows(order, [len(one.rows) for one in every], [one.prompt for one in every], [one.cached for one in every])


def rows_one_by_one(passes: Sequence[Pass], lengths: NDArray[np.int64], where: str) -> Rows:
    """Rows of requests that were made one at a time, of the given lengths; TraceError where passes say otherwise."""
    together = next((one for one in passes if not one.alone), None)
    if together is not None:
        raise TraceError(f"{together.where}: holds several requests; --sequence-len is for requests made one at a time")
    positions = np.concatenate([one.positions for one in passes])
    extended = np.concatenate([np.full(len(one.positions), bool(one.extends)) for one in passes])
    starts = np.append(0, np.cumsum([len(one.positions) for one in passes]))
    bounds = np.append(0, np.cumsum(lengths))
    prompts = []
    for s, (start, stop) in enumerate(pairwise(bounds.tolist())):
        rows = extended[start:stop]
        if start not in starts or not rows[0] or (rows[1:] & ~rows[:-1]).any():
            raise TraceError(f"{where}: --sequence-len: sequence {s} is not one request with all its rows")
        if (np.diff(positions[start:stop]) != 1).any() or positions[start] < 0:
            raise TraceError(f"{where}: --sequence-len: positions of sequence {s} do not follow one another")
        prompts.append(int(rows.sum()))
    return Rows(np.arange(len(positions)), lengths.tolist(), prompts, positions[bounds[:-1]].tolist())


def _advice(passes: Sequence[Pass]) -> str:
    """What to do where requests cannot be told apart."""
    if not all(one.alone for one in passes):
        return "record one request at a time"
    lengths: list[int] = []
    after = -1
    for one in passes:
        # A run of positions that goes on where the last ended may be the next piece of a long prompt.
        if not lengths or (one.extends and one.positions[0] != after):
            lengths.append(0)
        lengths[-1] += len(one.positions)
        after = int(one.positions[-1]) + 1 if one.extends else -1
    listed = ",".join(map(str, lengths[:20])) + (",..." if lengths[20:] else "")
    return f"if requests were made one at a time, --sequence-len says so (by the passes {listed})"


@dataclass
class _Request:
    """Rows of one request so far; ``next`` is the position that comes next."""

    next: int
    cached: int
    prompt: int = 0
    rows: list[int] = field(default_factory=list)


class _Requests:
    """Takes in passes in their order; ``advice`` ends the message where requests cannot be told apart."""

    def __init__(self, advice: str) -> None:
        self.advice = advice
        self.every: list[_Request] = []
        self.running: list[_Request] = []
        # The last request of the last pass that extended: a long prompt may go on in the next such pass.
        self.unfinished: _Request | None = None
        self.count = 0

    def add(self, one: Pass) -> None:
        """One more pass."""
        going_on = self._going_on(one)
        waiting = [request for request in self.running if request is not going_on]
        decoding = _decoding(one, waiting) if one.mixed else 0 if one.extends else len(one.positions)
        parts = one.extends[: len(one.extends) - decoding]
        begun = []
        at = 0
        for size in parts:
            begun.append(self._extend(one, at, size, going_on if at == 0 else None))
            at += size
        if decoding:
            self.running = [*begun, *self._decode(one, at, waiting)]
        else:
            self.running = [*waiting, *begun]
        if begun:
            self.unfinished = begun[-1]
        self.count += len(one.positions)

    def _going_on(self, one: Pass) -> _Request | None:
        """The request whose prompt goes on in this pass."""
        last = self.unfinished
        goes_on = last is not None and len(last.rows) == last.prompt and last.next == one.positions[0]
        return last if one.extends and goes_on else None

    def _extend(self, one: Pass, at: int, size: int, going_on: _Request | None) -> _Request:
        positions = one.positions[at : at + size]
        first = int(positions[0])
        if first < 0 or (np.diff(positions) != 1).any():
            raise TraceError(f"{one.where}: positions of an extended request do not follow one another from {first}")
        request = going_on
        if request is None:
            if first > 0 and one.after_gap:
                raise TraceError(
                    f"{one.where}: begins a request at position {first} after passes without a record, which may hold "
                    "the start of its prompt"
                )
            request = _Request(next=first, cached=first)
            self.every.append(request)
        request.rows.extend(range(self.count + at, self.count + at + size))
        request.prompt += size
        request.next = first + size
        return request

    def _decode(self, one: Pass, start: int, requests: list[_Request]) -> list[_Request]:
        """The requests that run on, with their rows."""
        positions = one.positions[start:].tolist()
        waiting = [request.next for request in requests]
        found = _match(waiting, positions)
        if found is None:
            raise TraceError(
                f"{one.where}: decodes at positions that follow no running request; a recording must hold requests "
                "from their start, in the server's order"
            )
        last = _match(waiting[::-1], positions[::-1])
        if last is not None and [len(waiting) - 1 - i for i in last[::-1]] != found:
            raise TraceError(
                f"{one.where}: a request ended while another was at the same position, so that positions do not tell "
                f"their tokens apart; {self.advice}"
            )
        kept = [requests[i] for i in found]
        for row, request in enumerate(kept):
            request.rows.append(self.count + start + row)
            request.next += 1
        return kept


def _decoding(one: Pass, waiting: list[_Request]) -> int:
    """How many requests at the end of a mixed pass decode: the most that waiting requests can account for.

    The first one extends in any case, or the pass would not be mixed.
    """
    most = 0
    while most < min(len(one.extends) - 1, len(waiting)) and one.extends[-1 - most] == 1:
        most += 1
    for count in range(most, 0, -1):
        if _match([request.next for request in waiting], one.positions[-count:].tolist()) is not None:
            return count
    return 0


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
