"""Fit a recorded trace to a workload (prompt and output lengths) and to the layers of a model."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from perfmodel.errors import TraceError
from perfmodel.routing.checks import as_count, as_int64
from perfmodel.routing.npz import MAX_BYTES, shown
from perfmodel.routing.trace import UNNAMED, RoutingTrace

BatchOf = Literal["sequences", "tokens"]


class Batch(NamedTuple):
    """What one decode step is.

    tokens : how many it runs [1]. of : the next token of as many sequences, or consecutive tokens of one sequence.
    """

    tokens: int = 1
    of: BatchOf = "sequences"

    @property
    def sequences(self) -> int:
        """Sequences that are decoded at the same time [1]."""
        return self.tokens if self.of == "sequences" else 1


class Groups(NamedTuple):
    """The sequences that are decoded together.

    single : the same workload with every sequence for itself. sequences : int64 [S, B], those of them that each group
        holds; a group may hold some more than once.
    """

    single: "Replay"
    sequences: NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Replay:
    """A trace fitted to a workload and a model.

    What every plan on it needs is derived when it is first asked for and then shared, so that planning many policies
    costs it once. These arrays are read-only.

    Parameters
    ----------
    trace : the rows to replay, with the model's layers
    context_start : int64 [S], tokens of context before the first decode step of each sequence; of sequences in a batch
        their mean, float64
    notes : sentences that say what was truncated, cycled, mapped or is not a recording of this model
    batch : what one decode step is; the trace holds its tokens one after another, see ``routing/batches.py``
    members : int64 [S, B], context before the first decode step of every sequence in a batch, None without batches of
        sequences
    groups : which sequences are in each batch, None without batches of sequences
    """

    trace: RoutingTrace
    context_start: NDArray[Any]
    notes: tuple[str, ...]
    batch: Batch = Batch()
    members: NDArray[np.int64] | None = None
    groups: Groups | None = None

    def __reduce__(self) -> tuple[type["Replay"], tuple[Any, ...]]:
        # Without what was derived, which is larger than the trace and quickly made again.
        return type(self), (self.trace, self.context_start, self.notes, self.batch, self.members, self.groups)

    @property
    def single(self) -> "Replay":
        """The same workload with every sequence for itself: what is known of other sequences comes from it."""
        return self if self.groups is None else self.groups.single

    @functools.cached_property
    def outside(self) -> NDArray[np.bool_]:
        """Which sequences of `single` are not in each sequence, or group of them, of the trace [S, N]."""
        held = np.arange(self.trace.num_sequences)[:, None] if self.groups is None else self.groups.sequences
        found = np.ones((len(held), self.single.trace.num_sequences), np.bool_)
        np.put_along_axis(found, held, False, axis=1)
        return _frozen(found)

    @functools.cached_property
    def decode_offsets(self) -> NDArray[np.int64]:
        """Where each sequence's decode steps start, and where the last ones end [S + 1]."""
        lengths = self.trace.sequence_lengths - self.trace.prompt_len
        return _frozen(np.concatenate(([0], np.cumsum(lengths))).astype(np.int64))

    @functools.cached_property
    def decode_ids(self) -> NDArray[np.uint16]:
        """Expert of every decode pick [T, L, k], sequences one after another; E where a pick is unassigned."""
        ids = self.trace.topk_ids[self.trace.phase("decode")]
        return _frozen(np.minimum(ids, self.trace.num_experts).astype(np.uint16))

    @functools.cached_property
    def assigned(self) -> NDArray[np.bool_]:
        """Which decode picks name an expert [T, L, k]."""
        return _frozen(self.decode_ids < self.trace.num_experts)

    @functools.cached_property
    def all_assigned(self) -> bool:
        """Whether every decode pick names an expert."""
        return bool(self.assigned.all())

    @functools.cached_property
    def weight_rank(self) -> NDArray[np.uint16]:
        """How many decode picks of the same token and layer weigh more, see ``kernels/picks.py`` [T, L, k]."""
        from perfmodel.kernels.picks import weight_rank  # imported here, because Numba loads slowly

        return _frozen(weight_rank(self.decode_weights, self.assigned))

    @functools.cached_property
    def weight_before(self) -> NDArray[np.float64]:
        """Normalised weight of the decode picks that weigh more, see ``kernels/picks.py`` [T, L, k]."""
        from perfmodel.kernels.picks import weight_before  # imported here, because Numba loads slowly

        return _frozen(weight_before(self.decode_weights, self.assigned))

    @functools.cached_property
    def decode_weights(self) -> NDArray[np.float64]:
        """Routing weight of every decode pick [T, L, k]; without recorded weights, earlier picks weigh more."""
        trace = self.trace
        if trace.topk_weights is not None:
            return _frozen(trace.topk_weights[trace.phase("decode")].astype(np.float64))
        falling = np.arange(trace.top_k, 0, -1, dtype=np.float64)
        return _frozen(np.tile(falling, (len(self.decode_ids), trace.num_layers, 1)))

    @functools.cached_property
    def max_context(self) -> int:
        """Longest context that any sequence reaches [tokens]."""
        tokens = np.diff(self.decode_offsets)
        if self.members is not None:
            return int((self.members.max(axis=1) + tokens // self.batch.tokens).max())
        return int((self.context_start + tokens).max())


def checked_batch(batch: object, batch_of: object) -> Batch:
    """What a decode step is, from what was asked for; TraceError for anything but a count >= 1 and a known word."""
    if not isinstance(batch_of, str) or batch_of not in get_args(BatchOf):
        raise TraceError(f"batch_of: found {shown(batch_of)}, allowed 'sequences' or 'tokens'")
    kind: BatchOf = "tokens" if batch_of == "tokens" else "sequences"
    return Batch(as_count("batch", batch, 1, None), kind)


def _frozen(array: NDArray[Any]) -> NDArray[Any]:
    array.flags.writeable = False
    return array


def replay_trace(
    trace: RoutingTrace,
    prompt: int | None,
    output: int | None,
    model_moe_layers: int | Sequence[int] | None,
    layers: str | None,
    model_name: str | None,
) -> Replay:
    """See :meth:`RoutingTrace.replay`."""
    mapped, notes = _on_layers(trace, model_moe_layers, layers)
    recorded_model, source = trace.metadata["model"], trace.metadata["source"]
    if source != "recorded":
        notes.append(f"the routing is {source}, not a recording")
    if model_name is not None and model_name != recorded_model:
        if recorded_model == UNNAMED:
            notes.append(f"the trace does not say which model it is of; it is taken as routing of {model_name}")
        else:
            notes.append(f"the routing is of {recorded_model}, not of {model_name}")

    own_prompt = new_prompt = context = trace.prompt_len
    own_output = new_output = trace.sequence_lengths - trace.prompt_len
    unprompted = own_prompt == 0
    if prompt is not None:
        prompt = as_count("prompt", prompt, 1, None)
        check_size(mapped, prompt, mapped.num_layers)
        new_prompt = np.where(unprompted, 0, prompt)
        context = np.full_like(own_prompt, prompt)
        notes += _length_note("prompts", own_prompt[~unprompted], prompt)
    if output is not None:
        output = as_count("output", output, 1, None)
        check_size(mapped, output, mapped.num_layers)
        lacking = np.flatnonzero(own_output == 0)
        if len(lacking):
            raise TraceError(
                f"{output} output tokens cannot be replayed: {len(lacking)} of {trace.num_sequences} "
                f"sequences of the trace of {recorded_model} have no decode steps (first: {lacking[0]})"
            )
        new_output = np.full_like(own_output, output)
        notes += _length_note("outputs", own_output, output)
    if unprompted.any():
        length = "the context before decoding is unknown and taken as 0 tokens"
        if prompt is not None:
            length = f"{prompt} tokens count as context, and no prefill is replayed"
        notes.append(f"{unprompted.sum()} of {trace.num_sequences} sequences have no recorded prompt: {length}")

    if prompt is not None or output is not None:
        check_size(mapped, int(new_prompt.sum() + new_output.sum()), mapped.num_layers)
        starts = trace.sequence_offsets[:-1]
        rows = [
            np.concatenate(
                (
                    start + np.arange(to_prompt) % max(from_prompt, 1),
                    start + from_prompt + np.arange(to_output) % max(from_output, 1),
                )
            )
            for start, from_prompt, to_prompt, from_output, to_output in zip(
                starts, own_prompt, new_prompt, own_output, new_output, strict=True
            )
        ]
        mapped = mapped.take_rows(rows, new_prompt, mapped.labels)
    if notes:
        mapped = mapped.with_metadata(replay=notes)
    context = context.copy()
    context.flags.writeable = False
    return Replay(mapped, context, tuple(notes))


def check_size(trace: RoutingTrace, tokens: int, layers: int) -> None:
    most = MAX_BYTES // (layers * trace.top_k * (trace.topk_ids.itemsize + 4))
    if tokens > most:
        raise TraceError(
            f"the replay is too long for memory: at most {most} tokens of {layers} layers, all sequences together"
        )


def _on_layers(
    trace: RoutingTrace, target: int | Sequence[int] | None, layers: object
) -> tuple[RoutingTrace, list[str]]:
    if layers is not None and not (isinstance(layers, str) and layers == "cycle"):
        raise TraceError(f"unknown layer mapping {shown(layers)}, allowed is 'cycle'")
    if target is None:
        return trace, []
    if isinstance(target, bool | np.bool_ | int | np.integer):
        count = as_count("model_moe_layers", target, 1, 65535)
        index = trace.layer_index if count == trace.num_layers else np.arange(count)
    else:
        index = as_int64("model_moe_layers", target, None)
    count = len(index)
    if np.array_equal(index, trace.layer_index):
        return trace, []
    if count != trace.num_layers and layers is None:
        raise TraceError(
            f"the trace of {trace.metadata['model']} has {trace.num_layers} MoE layers, the model has "
            f"{count}; to replay the recorded ones in turn on them, pass layers='cycle' (--layers cycle)"
        )
    check_size(trace, trace.num_tokens, count)
    mapped = trace.map_layers(np.arange(count) % trace.num_layers, index)
    how = " cycled" if count > trace.num_layers else ""
    recorded = _span(trace.layer_index[:count])
    return mapped, [f"model layers {_span(index)} replay recorded layers {recorded}{how}"]


def _length_note(what: str, own: NDArray[np.int64], tokens: int) -> list[str]:
    cycled, truncated = int((own < tokens).sum()), int((own > tokens).sum())
    if not cycled and not truncated:
        return []
    return [f"{what} set to {tokens} tokens: {cycled} of {len(own)} sequences cycled, {truncated} truncated"]


def _span(index: NDArray[np.int64]) -> str:
    first, last = int(index[0]), int(index[-1])
    if first == last:
        return str(first)
    every = last - first == len(index) - 1
    return f"{first}-{last}" if every else f"{first}..{last} ({len(index)} of them)"
