"""The routing trace: which experts every token picked in every layer."""

import difflib
import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from perfmodel.errors import TraceError
from perfmodel.paths import data_folder, replace_when_done
from perfmodel.routing.checks import (
    FORMAT,
    MAX_EXPERTS,
    as_count,
    as_int64,
    as_integers,
    as_texts,
    checked_ids,
    checked_labels,
    checked_layers,
    checked_metadata,
    checked_sequences,
    checked_weights,
    stored_metadata,
)
from perfmodel.routing.from_formats import TraceFormats
from perfmodel.routing.npz import one_line, shown

if TYPE_CHECKING:
    from perfmodel.routing.replay import Replay

CANONICAL_KEYS = frozenset({"topk_ids", "sequence_offsets", "prompt_len", "layer_index", "num_experts", "metadata"})
OPTIONAL_KEYS = frozenset({"topk_weights", "labels", "domain"})

Phase = Literal["prefill", "decode"]


class RoutedModel(Protocol):
    """What a trace needs to know of a model to decide whether it fits."""

    @property
    def name(self) -> str: ...
    @property
    def num_experts(self) -> int: ...
    @property
    def top_k(self) -> int: ...


UNNAMED = "an unknown model"
"""Model of a trace whose file does not name one."""


@dataclass(frozen=True, eq=False, repr=False, slots=True, weakref_slot=True)
class RoutingTrace(TraceFormats):
    """Expert picks of S sequences, T tokens in all, in L MoE layers with k picks each; checked when made.

    A sequence's first ``prompt_len`` rows are its prefill, the others its decode steps. Arrays are read-only.

    Parameters
    ----------
    topk_ids : integer [T, L, k], expert of every pick, kept as uint8 (up to 255 experts) or uint16. The
        maximum of an unsigned dtype, or -1 in a signed one, marks a pick that was not assigned. No expert
        occurs twice in a token.
    topk_weights : float [T, L, k] or None, gate weight of every pick, finite and >= 0, kept as float32. They
        need not sum to one, and are set to zero where a pick is unassigned.
    sequence_offsets : integer [S + 1], first row of each sequence, from 0 to T, strictly increasing
    prompt_len : integer [S], prefill rows of each sequence, 0 to the length of the sequence
    layer_index : integer [L], the model layer of each row of the layer axis, >= 0 and strictly increasing
    num_experts : routed experts a layer, top_k to 65535
    metadata : ``model`` (name), ``source`` ("recorded", "synthetic" or "from-counts"), and as text where
        known ``how`` and ``date``; further keys are free, values as in JSON
    labels : one text for each sequence, such as its domain, or None

    Raises
    ------
    TraceError : for everything that breaks a rule above
    """

    topk_ids: NDArray[np.unsignedinteger[Any]]
    topk_weights: NDArray[np.float32] | None
    sequence_offsets: NDArray[np.int64]
    prompt_len: NDArray[np.int64]
    layer_index: NDArray[np.int64]
    num_experts: int
    metadata: dict[str, Any]
    labels: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        ids = as_integers("topk_ids", self.topk_ids, 3)
        if 0 in ids.shape:
            raise TraceError(f"topk_ids has shape {ids.shape}, expected at least one token, layer and pick")
        tokens, layers, top_k = ids.shape
        num_experts = as_count("num_experts", self.num_experts, top_k, MAX_EXPERTS)
        layer_index = checked_layers(self.layer_index, layers)
        kept = checked_ids(ids, num_experts, layer_index)
        offsets, prompts = checked_sequences(self.sequence_offsets, self.prompt_len, tokens)
        weights = None if self.topk_weights is None else checked_weights(self.topk_weights, kept)
        for array in (kept, weights, offsets, prompts, layer_index):
            if array is not None:
                array.flags.writeable = False
        for name, value in (
            ("topk_ids", kept),
            ("topk_weights", weights),
            ("sequence_offsets", offsets),
            ("prompt_len", prompts),
            ("layer_index", layer_index),
            ("num_experts", num_experts),
            ("metadata", checked_metadata(self.metadata)),
            ("labels", checked_labels(self.labels, len(prompts))),
        ):
            object.__setattr__(self, name, value)

    def __reduce__(self) -> tuple[type["RoutingTrace"], tuple[Any, ...]]:
        # Through the constructor, because a pickled array forgets that it was read-only.
        return type(self), tuple(getattr(self, field.name) for field in fields(self))

    def __repr__(self) -> str:
        model, source = self.metadata["model"], self.metadata["source"]
        sequences = "sequence" if self.num_sequences == 1 else "sequences"
        return (
            f"RoutingTrace({model}, {source}: {self.num_sequences} {sequences}, {self.num_tokens} tokens, "
            f"{self.num_layers} layers, top-{self.top_k} of {self.num_experts} experts)"
        )

    # ---- shape ----

    @property
    def num_tokens(self) -> int:
        """Rows of all sequences together, T."""
        return int(self.topk_ids.shape[0])

    @property
    def num_layers(self) -> int:
        """MoE layers recorded, L."""
        return int(self.topk_ids.shape[1])

    @property
    def top_k(self) -> int:
        """Picks of one token in one layer, k."""
        return int(self.topk_ids.shape[2])

    @property
    def num_sequences(self) -> int:
        """Sequences, S."""
        return len(self.prompt_len)

    @property
    def unassigned(self) -> int:
        """The value in ``topk_ids`` that stands for no expert: the maximum of its dtype."""
        return int(np.iinfo(self.topk_ids.dtype).max)

    @property
    def num_experts_inferred(self) -> bool:
        """Whether ``num_experts`` is only the largest id found plus one, because the file did not say."""
        return bool(self.metadata.get("num_experts_inferred", False))

    @property
    def sequence_lengths(self) -> NDArray[np.int64]:
        """Rows of each sequence [S]."""
        return np.diff(self.sequence_offsets)

    @property
    def has_prefill(self) -> bool:
        """Whether every sequence has at least one prefill row."""
        return bool((self.prompt_len > 0).all())

    @property
    def has_decode(self) -> bool:
        """Whether every sequence has at least one decode row."""
        return bool((self.prompt_len < self.sequence_lengths).all())

    def prefill_slice(self, sequence: int) -> slice:
        """Rows of the prefill of one sequence."""
        start, middle, _ = self._bounds(sequence)
        return slice(start, middle)

    def decode_slice(self, sequence: int) -> slice:
        """Rows of the decode steps of one sequence."""
        _, middle, stop = self._bounds(sequence)
        return slice(middle, stop)

    def _bounds(self, sequence: int) -> tuple[int, int, int]:
        index = as_count("sequence", sequence, 0, self.num_sequences - 1)
        start, stop = self.sequence_offsets[index : index + 2]
        return int(start), int(start + self.prompt_len[index]), int(stop)

    def phase(self, name: Phase) -> NDArray[np.bool_]:
        """Mask [T] of the rows that belong to "prefill" or to "decode"."""
        if name not in ("prefill", "decode"):
            raise TraceError(f"unknown phase {shown(name)}, allowed are 'prefill' and 'decode'")
        lengths = self.sequence_lengths
        row = np.arange(self.num_tokens) - np.repeat(self.sequence_offsets[:-1], lengths)
        in_prefill = row < np.repeat(self.prompt_len, lengths)
        return in_prefill if name == "prefill" else ~in_prefill

    # ---- other views of the same routing ----

    def sequences(self, indices: Iterable[int]) -> "RoutingTrace":
        """The chosen sequences, in the order given, as a trace of their own."""
        try:
            chosen = [as_count("sequence", index, 0, self.num_sequences - 1) for index in indices]
        except TypeError as error:
            raise TraceError(f"expected a list of sequences, found {shown(indices)}") from error
        if not chosen:
            raise TraceError("no sequences chosen, expected at least one")
        rows = [np.arange(self.sequence_offsets[s], self.sequence_offsets[s + 1]) for s in chosen]
        labels = self.labels and tuple(self.labels[s] for s in chosen)
        return self.take_rows(rows, self.prompt_len[chosen], labels)

    def take_rows(
        self, rows: Sequence[NDArray[np.int64]], prompt_len: ArrayLike, labels: tuple[str, ...] | None
    ) -> "RoutingTrace":
        """A trace made of one array of row numbers for each new sequence."""
        every = np.concatenate(rows)
        return self._with(
            topk_ids=self.topk_ids[every],
            topk_weights=None if self.topk_weights is None else self.topk_weights[every],
            sequence_offsets=np.cumsum([0, *map(len, rows)]),
            prompt_len=prompt_len,
            labels=labels,
        )

    def map_layers(self, rows: ArrayLike, layer_index: ArrayLike | None = None) -> "RoutingTrace":
        """A trace whose layer i repeats row ``rows[i]`` of this one's layer axis.

        ``layer_index`` numbers the new layers; by default 0, 1, 2, ...
        """
        source = as_int64("rows", rows, None)
        if len(source) == 0 or source.min() < 0 or source.max() >= self.num_layers:
            raise TraceError(f"layer rows must lie in 0..{self.num_layers - 1}, found {one_line(source)}")
        return self._with(
            topk_ids=self.topk_ids[:, source],
            topk_weights=None if self.topk_weights is None else self.topk_weights[:, source],
            layer_index=np.arange(len(source)) if layer_index is None else layer_index,
        )

    def with_num_experts(self, num_experts: int) -> "RoutingTrace":
        """The same picks among ``num_experts`` experts; fewer than the largest id used is an error."""
        metadata = {key: value for key, value in self.metadata.items() if key != "num_experts_inferred"}
        ids = self.topk_ids.astype(np.int32)
        ids[self.topk_ids == self.unassigned] = -1
        return self._with(topk_ids=ids, num_experts=num_experts, metadata=metadata)

    def with_metadata(self, **entries: Any) -> "RoutingTrace":
        """The same routing with further or other metadata entries."""
        return self._with(metadata={**self.metadata, **entries})

    def _with(self, **changes: Any) -> "RoutingTrace":
        return replace(self, **changes)

    # ---- use with a model ----

    def check_model(self, model: RoutedModel) -> None:
        """Raise :class:`TraceError` unless the model has this trace's experts a layer and picks a token."""
        recorded = self.metadata["model"]
        if self.top_k != model.top_k:
            raise TraceError(
                f"the trace of {recorded} has {self.top_k} picks a token, {model.name} has {model.top_k}: "
                f"its routing cannot be replayed on this model"
            )
        if self.num_experts != model.num_experts:
            how = "at least " if self.num_experts_inferred else ""
            raise TraceError(
                f"the trace of {recorded} has {how}{self.num_experts} experts a layer, {model.name} has "
                f"{model.num_experts}: its routing cannot be replayed on this model"
            )

    def replay(
        self,
        prompt: int | None = None,
        output: int | None = None,
        model_moe_layers: int | Sequence[int] | None = None,
        layers: Literal["cycle"] | None = None,
        model_name: str | None = None,
    ) -> "Replay":
        """Fit the trace to a workload and to a model's layers.

        Each sequence's prefill and decode steps are truncated, or cycled from their start, to ``prompt`` and
        ``output`` tokens while the context keeps growing; N output tokens are N decode steps. Without a
        number, each sequence keeps its own. A sequence without prefill rows has none afterwards either; the
        prompt then counts as context only.

        Parameters
        ----------
        prompt, output : tokens, >= 1, or None
        model_moe_layers : how many MoE layers the model has, or their indices; None keeps the recorded ones
        layers : "cycle" lets the model's layers replay the recorded ones in turn when their numbers differ
        model_name : name of the model, to note when the recording is of another one

        Raises
        ------
        TraceError : if the numbers of layers differ and ``layers`` is None, if ``output`` is given and a
            sequence has no decode steps, or if the result would be too large
        """
        from perfmodel.routing.replay import replay_trace  # imported here, because it makes traces

        return replay_trace(self, prompt, output, model_moe_layers, layers, model_name)

    # ---- files ----

    @classmethod
    def load(cls, path: str | Path) -> "RoutingTrace":
        """Load an ``.npz`` file in any layout that :mod:`perfmodel.routing.importers` knows, or a bundled
        trace by its name, such as ``tiny-mixtral-32l-mini``.

        A text that ends in ``.npz`` or has a path separator is a file. Nothing is unpickled.
        Raises :class:`TraceError` for anything missing, damaged, too large or inconsistent.
        """
        from perfmodel.routing.importers import load_any  # imported here, because importers make traces

        return load_any(trace_path(path))

    def save(self, path: str | Path) -> None:
        """Write the canonical ``.npz`` layout, first under a temporary name; ``path`` ends in ``.npz``."""
        if not str(path).endswith(".npz"):
            raise TraceError(f"expected a file name that ends in .npz, found {shown(path)}")
        arrays: dict[str, Any] = {
            "topk_ids": self.topk_ids,
            "sequence_offsets": self.sequence_offsets,
            "prompt_len": self.prompt_len,
            "layer_index": self.layer_index,
            "num_experts": np.int64(self.num_experts),
            "metadata": np.array(json.dumps({"format": FORMAT, **self.metadata})),
        }
        if self.topk_weights is not None:
            arrays["topk_weights"] = _smallest_floats(self.topk_weights)
        if self.labels is not None:
            arrays["labels"] = np.array(self.labels)
        try:
            with replace_when_done(path) as temporary, temporary.open("wb") as stream:
                np.savez_compressed(stream, **arrays)
        except (OSError, ValueError) as error:
            raise TraceError(f"{one_line(path)}: cannot be written ({one_line(error)})") from error

    def content_hash(self) -> str:
        """SHA-256 over everything that :meth:`save` writes: equal for equal traces, whatever their files."""
        state = hashlib.sha256()
        for name in ("topk_ids", "topk_weights", "sequence_offsets", "prompt_len", "layer_index"):
            array = getattr(self, name)
            if array is not None:
                little = array.astype(array.dtype.newbyteorder("<"), copy=False)
                state.update(f"{name} {little.dtype.str} {little.shape}:".encode())
                state.update(little.tobytes())
        rest = [self.num_experts, self.metadata, self.labels]
        state.update(json.dumps(rest, sort_keys=True).encode())
        return state.hexdigest()


def trace_path(path: str | Path) -> str | Path:
    """The file of a trace: ``path`` itself, or that of the bundled trace it names; see :meth:`RoutingTrace.load`."""
    if not isinstance(path, str) or path.endswith(".npz") or {"/", os.sep} & set(path):
        return path
    names = bundled_traces()
    if path not in names:
        if os.path.isfile(path):  # noqa: PTH113  # unlike Path.is_file it takes every text
            return path  # which is told to be of the wrong kind where it is read
        near = difflib.get_close_matches(path, names, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise TraceError(
            f"no bundled trace is called {shown(path)}{hint} "
            f"(bundled: {', '.join(names) or 'none'}; a file's name ends in .npz)"
        )
    return data_folder("traces") / f"{path}.npz"


def bundled_traces() -> tuple[str, ...]:
    """Names of the traces that come with the package."""
    files = sorted(data_folder("traces").glob("*.npz"))
    return tuple(file.stem for file in files if not file.stem.endswith("-losses"))


def trace_from_arrays(arrays: Mapping[str, NDArray[Any]]) -> RoutingTrace:
    """A trace from the arrays of a canonical file; its metadata is one JSON text."""
    labels = arrays.get("labels", arrays.get("domain"))
    sequences = arrays["prompt_len"].size
    if labels is not None and labels.size > sequences:  # before a text is made of each
        raise TraceError(f"labels has {labels.size} entries, expected one for each of {sequences} sequences")
    names = None if labels is None else tuple(as_texts("labels", labels, 1))
    num_experts = arrays["num_experts"]
    if num_experts.shape != ():
        raise TraceError(f"num_experts has shape {num_experts.shape}, expected a single number")
    return RoutingTrace(
        topk_ids=arrays["topk_ids"],
        topk_weights=arrays.get("topk_weights"),
        sequence_offsets=arrays["sequence_offsets"],
        prompt_len=arrays["prompt_len"],
        layer_index=arrays["layer_index"],
        num_experts=num_experts[()],  # type: ignore[arg-type]  # the constructor refuses all but integers
        metadata=stored_metadata(arrays["metadata"]),
        labels=names,
    )


def _smallest_floats(weights: NDArray[np.float32]) -> NDArray[np.floating[Any]]:
    """float16 when that loses nothing: recordings often come from 16-bit routers."""
    with np.errstate(over="ignore", under="ignore"):
        half = weights.astype(np.float16)
    return half if np.array_equal(half.astype(np.float32), weights) else weights
