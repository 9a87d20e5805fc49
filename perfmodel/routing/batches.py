"""Decode steps of several tokens, made of a trace that was recorded one token after another.

Sequences are taken in their order, B at a time, and decoded in lockstep: step t of a group holds token t of each. A
group is as long as its shortest sequence. The last group, and a batch larger than the trace, begin with the first
sequence again; a sequence that a group holds R times starts its r-th time at the r/R-th part of its decode steps,
because copies in lockstep would pick the same experts. Or B consecutive tokens of one sequence form a step, and what
remains at its end is left out.

Either way the tokens of a step follow one another in the rows of the new trace, so that a policy plans them as it
plans any sequence: the sequences of a group share its placement, and a cache sees their requests in this order.
"""

import dataclasses
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfmodel.errors import TraceError
from perfmodel.routing.replay import Batch, Groups, Replay, check_size


def in_batches(replay: Replay, batch: Batch) -> Replay:
    """The replay with steps of ``batch.tokens`` tokens.

    Raises
    ------
    TraceError : a sequence without decode steps, or with fewer than a step of consecutive tokens takes; a batch that
        holds a sequence more often than it has decode steps; or a result that would be too large.
    """
    if batch.tokens == 1:
        return replay
    steps = np.diff(replay.decode_offsets)
    least = 1 if batch.of == "sequences" else batch.tokens
    if steps.min() < least:
        raise TraceError(
            f"batch: sequence {int(steps.argmin())} of the trace has {steps.min()} decode steps, allowed {least} or"
            f" more for steps of {batch.tokens} {batch.of}"
        )
    return _of_sequences(replay, batch) if batch.of == "sequences" else _of_tokens(replay, batch)


def _of_sequences(replay: Replay, batch: Batch) -> Replay:
    trace, size = replay.trace, batch.tokens
    count = trace.num_sequences
    prompts, outputs = trace.prompt_len, np.diff(replay.decode_offsets)
    most = int((outputs * count + np.arange(count)).min())
    if size > most:
        raise TraceError(
            f"batch: found {size}, allowed up to {most}: with more, some of the {count} sequences of the trace"
            " would stand in a step more often than they have decode steps"
        )
    groups = np.arange(-(-count // size) * size).reshape(-1, size) % count
    starts = trace.sequence_offsets[:-1]
    # A prefill is priced where every sequence has one.
    lengths = prompts if trace.has_prefill else np.zeros_like(prompts)
    steps = outputs[groups].min(axis=1)
    check_size(trace, int(lengths[groups].sum() + (steps * size).sum()), trace.num_layers)
    # How often the sequence at a place of a group stands before it in the group, and how often in all.
    place = np.arange(size)
    turn, turns = place // count, (size - 1 - place % count) // count + 1
    rows = []
    for group, taken in zip(groups, steps.tolist(), strict=True):
        prefill = [starts[s] + np.arange(lengths[s]) for s in group]
        step = np.arange(taken)[:, None] + turn * outputs[group] // turns
        decode = (starts + prompts)[group] + step % outputs[group]
        rows.append(np.concatenate((*prefill, decode.ravel())))
    members = replay.context_start[groups]
    grouped = trace.take_rows(rows, lengths[groups].sum(axis=1), None)
    note = f"every decode step runs a token of each of {size} sequences of the trace, which has {count}"
    if groups.size > count:
        note += ", some more than once"
    left = 1.0 - float((steps * size).sum() / outputs[groups].sum())
    if left > 0:
        note += f"; {100 * left:.1f} % of their tokens are left out, as the shortest of a group ends it"
    return Replay(grouped, members.mean(axis=1), (*replay.notes, note), batch, members, Groups(replay, groups))


def _of_tokens(replay: Replay, batch: Batch) -> Replay:
    trace, outputs = replay.trace, np.diff(replay.decode_offsets)
    kept = outputs // batch.tokens * batch.tokens
    notes = [*replay.notes, f"every decode step runs {batch.tokens} consecutive tokens of a sequence"]
    if (kept < outputs).any():
        notes.append(f"{int((outputs - kept).sum())} tokens at the ends of sequences fill no step and are left out")
        rows = [
            start + np.arange(prompt + output)
            for start, prompt, output in zip(trace.sequence_offsets[:-1], trace.prompt_len, kept, strict=True)
        ]
        trace = trace.take_rows(rows, trace.prompt_len, trace.labels)
    return dataclasses.replace(replay, trace=trace, notes=tuple(notes), batch=batch)


def tokens_of_steps(replay: Replay) -> NDArray[np.int32]:
    """How many tokens of every decode step pick each expert [steps, L, E]."""
    trace, size = replay.trace, replay.batch.tokens
    ids = replay.decode_ids.reshape(-1, size, trace.num_layers, trace.top_k)
    steps, cells = len(ids), trace.num_experts + 1
    place = np.arange(steps)[:, None, None, None] * trace.num_layers + np.arange(trace.num_layers)[:, None]
    counts = np.bincount((place * cells + ids).ravel(), minlength=steps * trace.num_layers * cells)
    return counts.reshape(steps, trace.num_layers, cells)[..., :-1].astype(np.int32)


def of_picks(values: NDArray[Any], replay: Replay, unassigned: Any) -> NDArray[Any]:
    """Of values of every step's experts [steps, L, E] that of the expert of every pick [T, L, k]."""
    fill = np.full((*values.shape[:2], 1), unassigned, values.dtype)
    every = np.concatenate((values, fill), axis=2)
    return np.take_along_axis(np.repeat(every, replay.batch.tokens, axis=0), replay.decode_ids.astype(np.int64), axis=2)
