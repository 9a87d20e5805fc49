"""What is known before a sequence begins: how all the others of the trace use the experts.

In a batch the others are the sequences that are not decoded in the same group, each counted once and for itself,
whatever the groups are. Where a group holds all sequences of the trace, nothing but its own prompts is known.
"""

import numpy as np
from numpy.typing import NDArray

from perfmodel.routing import statistics
from perfmodel.routing.replay import Replay


def sum_of_outside(values: NDArray[np.float64], replay: Replay) -> NDArray[np.float64]:
    """For every sequence or group of the trace the sum over the sequences outside it, [N, ...] to [S, ...].

    values : of the sequences of ``replay.single``.
    """
    if replay.groups is None:
        return statistics.sum_of_others(values)
    return np.stack([values[outside].sum(axis=0) for outside in replay.outside])


def others_text(replay: Replay) -> str:
    """The decode steps that `sum_of_outside` counts, in words."""
    if replay.groups is None:
        return "the decode steps of the other sequences"
    outside = replay.outside[0]
    return f"the decode steps of the {outside.sum()} of {len(outside)} sequences that are outside each group"


def no_others_text(replay: Replay) -> str:
    """Why there is no other sequence, in words."""
    if replay.groups is None:
        return "the trace has one sequence"
    count = replay.single.trace.num_sequences
    held = f"all {count} sequences" if count > 1 else "the only sequence"
    return f"a batch of {replay.batch.tokens} holds {held} of the trace"


def own_prompt_note(replay: Replay) -> str:
    """That experts are placed by the sequence's or group's own prompt, and why."""
    whose = "its own prompt" if replay.groups is None else "the prompts of the batch itself"
    return f"{no_others_text(replay)}, so experts are placed by {whose}"
