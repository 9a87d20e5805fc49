"""A plan compressed to its distinct states, so that pricing costs a loop over states instead of over picks."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from perfmodel.kernels import layer
from perfmodel.kernels import work as kinds
from perfmodel.kernels.batches import number_steps
from perfmodel.kernels.picks import number_rows
from perfmodel.policies.base import Executor, Plan, When, WorkClass

#: Largest table of keys that is indexed directly; above it, keys are sorted.
_LARGEST_TABLE = 1 << 22
#: Keys that fit a signed 64-bit integer.
_LARGEST_KEY = 1 << 63


class States(NamedTuple):
    """Distinct states of a plan; the arrays are those of ``kernels/work.py`` and ``kernels/layer.py``.

    work : float64 [A, WORK_SIZE].
    row_offsets, row_work, row_count : the rows in compressed form.
    row_host : float64 [R, 2], host round trips of every row, and tokens whose activations cross the link.
    state_row, state_before : int64 [S].
    state_id : int32 [T, L], the state of every decode step (or sequence, in a prefill) and layer.
    state_count : float64 [S], how often each state occurs.
    """

    work: NDArray[np.float64]
    row_offsets: NDArray[np.int64]
    row_work: NDArray[np.int64]
    row_count: NDArray[np.float64]
    row_host: NDArray[np.float64]
    state_row: NDArray[np.int64]
    state_before: NDArray[np.int64]
    state_id: NDArray[np.int32]
    state_count: NDArray[np.float64]

    def work_count(self, state_count: NDArray[np.float64]) -> NDArray[np.float64]:
        """How often each kind of work occurs over the whole trace [A], from how often each state does [S]."""
        rows = np.bincount(self.state_row, weights=state_count, minlength=len(self.row_offsets) - 1)
        per_entry = np.repeat(rows, np.diff(self.row_offsets)) * self.row_count
        return np.bincount(self.row_work, weights=per_entry, minlength=len(self.work)).astype(np.float64)


def _work_rows(classes: Sequence[WorkClass]) -> NDArray[np.float64]:
    """Work of one token of every class [classes, WORK_SIZE]."""
    rows = [(float(c.executor), 1.0, c.bits, float(c.quantised), float(c.when)) for c in classes]
    return np.array(rows).reshape(-1, kinds.WORK_SIZE)


def _row_host(
    plan: Plan,
    work: NDArray[np.float64],
    entry_row: NDArray[np.int64],
    entry_work: NDArray[np.int64],
    tokens: NDArray[np.float64],
) -> NDArray[np.float64]:
    """Host round trips of every row, and tokens whose activations cross [R, 2].

    entry_row, entry_work : row and work of every entry. tokens : float64 [R], tokens of the layer.

    Activations go once to the side of the experts that is not where the trunk is, whatever the number of experts there,
    and once to attention where that is elsewhere.
    """
    executor = work[entry_work, kinds.EXECUTOR]
    on_cpu, on_gpu = executor == Executor.CPU, (executor == Executor.GPU) | (executor == Executor.FETCH)
    host = np.zeros((len(tokens), 2))
    there = entry_row[on_cpu if plan.trunk_on == "gpu" else on_gpu]
    host[there, layer.CROSSING] = tokens[there]
    if plan.attention_on != plan.trunk_on:
        host[:, layer.CROSSING] += tokens
    if plan.round_trips == "layer":
        host[:, layer.TRIPS] = 1.0
    elif plan.round_trips == "cpu":
        host[entry_row[on_cpu], layer.TRIPS] = 1.0
    return host


def _distinct_picks(picks: NDArray[np.uint8]) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.int64]]:
    """The distinct rows of picks.

    Returns
    -------
    counts [R, classes], how many picks of each class every row has; the row of every token and layer [T, L]; how
    often each row occurs [R].
    """
    width = picks.shape[2]
    # Classes that only the prefill has come last; without them the keys stay small.
    num_classes = int(picks.max(initial=0)) + 1
    num_keys = (width + 1) ** num_classes
    if num_keys > _LARGEST_KEY:
        ordered = np.sort(picks.reshape(-1, width), axis=1)
        distinct, inverse, often = np.unique(ordered, axis=0, return_inverse=True, return_counts=True)
        counts = np.zeros((len(distinct), num_classes), dtype=np.int64)
        np.add.at(counts, (np.arange(len(distinct))[:, None], distinct), 1)
        return counts, inverse.reshape(picks.shape[:2]).astype(np.int32), often
    digit = (width + 1) ** np.arange(num_classes, dtype=np.int64)
    if num_keys > _LARGEST_TABLE:
        keys, inverse, often = np.unique(digit[picks].sum(axis=2), return_inverse=True, return_counts=True)
        row = inverse.reshape(picks.shape[:2]).astype(np.int32)
    else:
        row, keys, often = number_rows(np.ascontiguousarray(picks), digit, num_keys)
    return keys[:, None] // digit % (width + 1), row, often


def _with_layer_before(
    row: NDArray[np.int32], num_rows: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int32]]:
    """States as pairs of a row and the row of the layer before; the first layer has none before it."""
    pair = row.astype(np.int64) * (num_rows + 1)
    pair[:, 1:] += row[:, :-1] + 1
    num_pairs = num_rows * (num_rows + 1)
    if num_pairs > _LARGEST_TABLE:
        pairs, state_id = np.unique(pair, return_inverse=True)
    else:
        present = np.zeros(num_pairs, dtype=np.bool_)
        present[pair.ravel()] = True
        pairs, state_id = np.flatnonzero(present), (np.cumsum(present) - 1)[pair]
    return pairs // (num_rows + 1), pairs % (num_rows + 1) - 1, state_id.reshape(row.shape).astype(np.int32)


class _Rows(NamedTuple):
    """The distinct rows of a plan: the first fields as in `States`, the row of every step and layer, and its uses."""

    work: NDArray[np.float64]
    offsets: NDArray[np.int64]
    entry_work: NDArray[np.int64]
    entry_count: NDArray[np.float64]
    row: NDArray[np.int32]
    often: NDArray[np.int64]


def _rows_of_tokens(plan: Plan) -> _Rows:
    """Rows of decode steps of one token: how many of its picks and copies fall in each class."""
    picks = plan.picks if plan.copies is None else np.concatenate((plan.picks, plan.copies), axis=2)
    counts, row, often = _distinct_picks(picks)
    entry_row, entry_work = np.nonzero(counts)
    offsets = np.searchsorted(entry_row, np.arange(len(counts) + 1)).astype(np.int64)
    count = counts[entry_row, entry_work].astype(np.float64)
    return _Rows(_work_rows(plan.classes), offsets, entry_work.astype(np.int64), count, row, often)


def _rows_of_batches(plan: Plan, ids: NDArray[np.uint16], batch: int) -> _Rows:
    """Rows of decode steps of several tokens: every expert once, with all tokens of the step that picked it."""
    forms: dict[tuple[float, bool], int] = {}
    form = [
        -1 if work.executor == Executor.SKIP else forms.setdefault((work.bits, work.quantised), len(forms))
        for work in plan.classes
    ]
    copies = np.empty((*plan.picks.shape[:2], 0), np.uint8) if plan.copies is None else plan.copies
    row, offsets, found, count = number_steps(
        np.ascontiguousarray(plan.picks),
        np.ascontiguousarray(ids),
        np.ascontiguousarray(copies),
        np.array(form, np.int64),
        int(ids.max(initial=0)) + 1,
        batch,
    )
    base = batch * plan.picks.shape[2] + 1
    distinct, entry_work = np.unique(found, return_inverse=True)
    work = _work_rows(plan.classes)[distinct // base]
    work[:, kinds.TOKENS] = base - 1 - distinct % base
    often = np.bincount(row.ravel(), minlength=len(offsets) - 1)
    return _Rows(work, offsets, entry_work.reshape(-1).astype(np.int64), count, row, often)


def decode_states(plan: Plan, ids: NDArray[np.uint16] | None = None, batch: int = 1) -> States:
    """States of the decode steps: which classes the experts and other copies of a layer fall in, with their tokens.

    An expert that several tokens of a step pick runs once, with all of them, in the class of the first of these picks:
    a copy that brings it serves the later ones too. Picks in another stored form (see `WorkClass`) are another
    expert. What is skipped is left out.

    Parameters
    ----------
    ids : uint16 [T, L, k], expert of every pick; needed with batches.
    batch : tokens of a step, which follow one another in the plan.
    """
    rows = _rows_of_tokens(plan) if batch == 1 or ids is None else _rows_of_batches(plan, ids, batch)
    row, often, num_rows = rows.row, rows.often, len(rows.offsets) - 1
    if any(c.when != When.NOW for c in plan.classes):
        state_row, state_before, state_id = _with_layer_before(row, num_rows)
        often = np.bincount(state_id.ravel())
    else:
        state_row = np.arange(num_rows, dtype=np.int64)
        state_before, state_id = np.full(num_rows, -1, dtype=np.int64), row
    entry_row = np.repeat(np.arange(num_rows), np.diff(rows.offsets))
    return States(
        rows.work,
        rows.offsets,
        rows.entry_work,
        rows.entry_count,
        _row_host(plan, rows.work, entry_row, rows.entry_work, np.full(num_rows, float(batch))),
        state_row,
        state_before,
        np.ascontiguousarray(state_id),
        often.astype(np.float64),
    )


def prefill_states(plan: Plan, passes: NDArray[np.int64] | None = None) -> States | None:
    r"""States of the prefill, one for each sequence and layer: every selected expert with its token count.

    passes : int64 [S], in how many passes of equal length each prefill runs; then a state is that of the mean pass.
    The trace counts the tokens c of an expert, and not where they stand. Taken to fall anywhere, they fall in

    .. math:: v = n\,(1 - (1 - 1/n)^c)

    of n passes, c / v of them in each; the whole numbers around that stand in for it, so that no token is lost.
    """
    if plan.prefill_tokens is None or plan.prefill_class is None:
        return None
    sequences, layers, _ = plan.prefill_tokens.shape
    num_rows = sequences * layers
    selected = plan.prefill_tokens > 0
    tokens = plan.prefill_tokens[selected]
    classes = plan.prefill_class[selected].astype(np.int64)
    entry_row = np.repeat(np.arange(num_rows), np.count_nonzero(selected.reshape(num_rows, -1), axis=1))
    count = np.ones(len(tokens))
    prompts = plan.prompt_tokens.astype(np.float64)
    if passes is not None:
        entry_row, classes, tokens, count = _mean_pass(entry_row, classes, tokens, passes[entry_row // layers])
        prompts /= passes
    per_row = np.bincount(entry_row, minlength=num_rows)
    # Copies queue in this order: what takes longest to compute first within a class.
    order = np.lexsort((-count, -tokens, classes, entry_row))
    entry_row, tokens, classes, count = entry_row[order], tokens[order], classes[order], count[order]
    # One key for each pair of class and token count, in the order of the pairs.
    above = int(tokens.max(initial=0)) + 1
    distinct, number = np.unique(classes * above + tokens, return_inverse=True)
    work = _work_rows(plan.classes)[distinct // above]
    work[:, kinds.TOKENS] = distinct % above
    number = number.reshape(-1).astype(np.int64)
    return States(
        work,
        np.concatenate(([0], np.cumsum(per_row))).astype(np.int64),
        number,
        count,
        _row_host(plan, work, entry_row, number, np.repeat(prompts, layers)),
        np.arange(num_rows, dtype=np.int64),
        np.full(num_rows, -1, dtype=np.int64),
        np.arange(num_rows, dtype=np.int32).reshape(sequences, layers),
        np.ones(num_rows),
    )


def _mean_pass(
    entry_row: NDArray[np.int64], classes: NDArray[np.int64], tokens: NDArray[np.int64], passes: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
    """Row, class, tokens and count of the entries of the mean pass, from those of the whole prefill."""
    visits = passes * -np.expm1(tokens * np.log1p(-1.0 / np.maximum(passes, 2)))
    visits = np.where(passes == 1, 1.0, visits)
    fewer = np.floor(tokens / visits).astype(np.int64)
    share = tokens / visits - fewer
    both = [(fewer, visits * (1.0 - share)), (fewer + 1, visits * share)]
    found = [(entry_row, classes, number, count / passes) for number, count in both]
    kept = [[one[count > 0.0] for one in (row, of_class, number, count)] for row, of_class, number, count in found]
    rows, kinds_of, numbers, counts = (np.concatenate(parts) for parts in zip(*kept, strict=True))
    return rows, kinds_of, numbers, counts
