"""Defects that show as repeats over time: sequences that take turns, and generations that loop."""

from functools import partial

import numpy as np
from numpy.typing import NDArray

from perfmodel.routing.defects import Seen
from perfmodel.routing.defects.rows import Ids, counted, shared, some
from perfmodel.routing.trace import RoutingTrace

Floats = NDArray[np.float64]

#: Most sequences that may take turns, fewest rows of each, and multiples of the lag that must show.
MOST, ROWS, MULTIPLES = 64, 8, 4
#: How much more of its picks a token shares at the lag and at its multiples than at the lags beside them.
PEAK, AGAIN = 0.03, 0.005
#: Share of the sequences that must show it, so that the rhythm of some text is not taken for turns.
AGREE = 0.75
#: Shared picks of a loop, its fewest repeated rows and picks in them, and its longest period [rows].
LOOP, REPEATED, PICKS, LONGEST = 0.8, 32, 512, 512
#: Rows and layers that are compared, and rows over which the picks of a loop are averaged.
_SAMPLE, _LAYERS, _WINDOW = 4096, 8, 16


def interleaved(trace: RoutingTrace) -> Seen | None:
    """Rows of B sequences take turns, as where [token, batch] was flattened; B is found from the reuse at lag B.

    A token shares more picks with the tokens before it in its text than with other texts. So with B sequences taking
    turns the reuse at the lags B, 2B, 3B and 4B stands above the reuse at the lags beside them, by at least 0.03 at
    lag B, 0.005 at the others, and more where few tokens leave the numbers uncertain. At lag 1 it does not: there the
    reuse is at most two thirds of what it is at lag B, counted from the lags beside that. Three quarters of the
    recorded sequences must agree on lag B, because a text may have a rhythm of its own; a single strictly periodic
    text can still be mistaken.

    Rows of a loop at the end of a sequence are not looked at. B is 2 to 64, and needs sequences of at least 8 B rows.
    Mended by taking the sequences apart, where B divides the rows and the prompt of each.
    """
    stops = ends_before_loops(trace)
    longest = min(MOST, int((stops - trace.sequence_offsets[:-1]).max()) // ROWS)
    if longest < 2:
        return None
    total, picks = _reuse_by_lag(trace, stops, MULTIPLES * longest + 1)
    reuse, each = _ratio(total.sum(0), picks.sum(0)), _ratio(total, picks)
    doubt = np.sqrt(2 * reuse * (1 - reuse) / np.maximum(picks.sum(0), 1))
    for batch in range(2, longest + 1):
        turns = batch * np.arange(1, MULTIPLES + 1)
        peaks = reuse[turns] - np.maximum(reuse[turns - 1], reuse[turns + 1])
        limits = np.maximum(AGAIN, doubt[turns])
        limits[0] = max(PEAK, 3 * doubt[batch])
        beside = (reuse[batch - 1] + reuse[batch + 1]) / 2
        if (peaks < limits).any() or reuse[1] - beside > 2 / 3 * (reuse[batch] - beside):
            continue
        long = picks[:, batch + 1] > 0
        if (each[long, batch] > each[long][:, [batch - 1, batch + 1]].max(1)).mean() < AGREE:
            continue
        found = (
            f"tokens share {reuse[batch]:.2f} of their picks with the row {batch} before, {beside:.2f} with the rows "
            f"beside that one, and so on at its multiples: rows of {batch} sequences take turns"
        )
        if (trace.sequence_lengths % batch).any() or (trace.prompt_len % batch).any():
            return Seen(f"{found}; {batch} does not divide the rows and prompts of every sequence")
        return Seen(found, f"take each sequence apart into {batch}", partial(_apart, trace, batch))
    return None


def _reuse_by_lag(trace: RoutingTrace, stops: NDArray[np.int64], most: int) -> tuple[Floats, Floats]:
    """Picks that tokens share with the token ``lag`` rows before, and all picks of those tokens [sequences, most + 1].

    Of the longest sequences up to their ``stops``, and of some layers, as many as make up a sample.
    """
    layers = _some_layers(trace.num_layers)
    total, picks = [], []
    left = _SAMPLE
    for s in np.argsort(trace.sequence_offsets[:-1] - stops, kind="stable"):
        start, stop = int(trace.sequence_offsets[s]), int(stops[s])
        part = trace.topk_ids[start : min(stop, start + left + most), layers]
        assigned = (part != trace.unassigned).sum((1, 2))
        total.append(np.zeros(most + 1))
        picks.append(np.zeros(most + 1))
        for lag in range(1, min(most, len(part) - 1) + 1):
            alike = shared(part[lag:], part[:-lag], trace.unassigned)
            total[-1][lag] = (alike * assigned[lag:]).sum()
            picks[-1][lag] = assigned[lag:].sum()
        left -= len(part)
        if left <= 0:
            break
    return np.array(total), np.array(picks)


def _ratio(part: Floats, whole: Floats) -> Floats:
    return part / np.maximum(whole, 1)


def _some_layers(layers: int) -> NDArray[np.int64]:
    """A few layers, evenly spread over all."""
    return np.unique(np.linspace(0, layers - 1, min(_LAYERS, layers)).astype(np.int64))


def _apart(trace: RoutingTrace, batch: int) -> RoutingTrace:
    rows, prompts, labels = [], [], []
    for s in range(trace.num_sequences):
        every = np.arange(trace.sequence_offsets[s], trace.sequence_offsets[s + 1])
        rows += [every[turn::batch] for turn in range(batch)]
        prompts += [int(trace.prompt_len[s]) // batch] * batch
        labels += [trace.labels[s] if trace.labels else ""] * batch
    return trace.take_rows(rows, prompts, tuple(labels) if trace.labels else None)


def looping(trace: RoutingTrace) -> Seen | None:
    """The decode steps of a sequence repeat themselves with one period to their end.

    With period p every stretch of 16 rows shares at least 0.8 of its picks with the rows p before (or what lies
    halfway between chance and all, if that is more), for at least 32 rows, 512 picks and two further periods; p is at
    most 512. Not all of the picks agree, since a token's routing depends on all before it. Mended by cutting the
    sequence after the first pass of the loop.
    """
    stops = _loops(trace)
    if not stops:
        return None
    repeated = sum(int(trace.sequence_offsets[s + 1]) - stop for s, (stop, _) in stops.items())
    repeats = "repeats itself" if len(stops) == 1 else "repeat themselves"
    periods = sorted({period for _, period in stops.values()})
    return Seen(
        f"{counted(len(stops), 'sequence')} (number {some(list(stops))}) {repeats} to the end with a period "
        f"of {some(periods)} rows, {counted(repeated, 'row')} in all",
        f"cut {'it' if len(stops) == 1 else 'them'} after the first pass, {counted(repeated, 'row')} less",
        lambda: _cut(trace, {s: stop for s, (stop, _) in stops.items()}),
    )


def ends_before_loops(trace: RoutingTrace) -> NDArray[np.int64]:
    """Row [S] at which each sequence ends, or at which it begins to repeat itself."""
    ends = trace.sequence_offsets[1:].copy()
    for s, (stop, _) in _loops(trace).items():
        ends[s] = stop
    return ends


def _loops(trace: RoutingTrace) -> dict[int, tuple[int, int]]:
    """First repeated row and period of every sequence that repeats itself to its end."""
    stops = {}
    for s in range(trace.num_sequences):
        rows = trace.decode_slice(s)
        found = _loop(trace.topk_ids[rows], trace.unassigned)
        if found is not None:
            stops[s] = rows.start + found[0], found[1]
    return stops


def _loop(ids: Ids, unassigned: int) -> tuple[int, int] | None:
    """First repeated row of a loop that lasts to the last row, and its period; None without one."""
    fewest = max(REPEATED, -(-PICKS // (ids.shape[1] * ids.shape[2])))
    longest = min(LONGEST, len(ids) // 3, len(ids) - fewest)
    if longest < 1:
        return None
    # A first look at the last rows, in a few layers, leaves few periods to look at closely.
    last, few = len(ids), ids[:, _some_layers(ids.shape[1])]
    needed = max(LOOP, (1 + _chance(few, unassigned)) / 2)
    best: tuple[int, int] | None = None
    for period in range(1, longest + 1):
        tail = slice(last - REPEATED, last)
        if shared(few[tail], few[tail.start - period : last - period], unassigned).mean() < needed - 0.1:
            continue
        alike = shared(ids[period:], ids[:-period], unassigned)
        means = np.convolve(alike, np.full(_WINDOW, 1 / _WINDOW), "valid")
        low = np.flatnonzero(means < needed)
        first = int(low[-1]) + 1 if len(low) else 0
        # Some rows of the first stretch may lie before the loop: it begins where the rows after it agree best.
        gains = np.cumsum((alike - needed)[: first - 1 if first else None : -1])[::-1]
        first += int(np.argmax(gains[:_WINDOW]))
        repeated = len(alike) - first
        if repeated >= max(fewest, 2 * period) and (best is None or first + period < best[0]):
            best = first + period, period
    return best


def _chance(ids: Ids, unassigned: int) -> float:
    """Share of the picks that tokens have in common by chance: the mean over pairs half a sequence apart."""
    shift = len(ids) // 2
    return float(shared(ids[:shift], ids[shift : 2 * shift], unassigned).mean())


def _cut(trace: RoutingTrace, stops: dict[int, int]) -> RoutingTrace:
    rows = [
        np.arange(trace.sequence_offsets[s], stops.get(s, int(trace.sequence_offsets[s + 1])))
        for s in range(trace.num_sequences)
    ]
    return trace.take_rows(rows, trace.prompt_len, trace.labels)
