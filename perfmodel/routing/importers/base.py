"""What every reader of a foreign recording shares: what a user may say about it, and what comes out."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from perfmodel.errors import TraceError
from perfmodel.routing.checks import as_integers
from perfmodel.routing.defects import Finding
from perfmodel.routing.defects.rows import counted
from perfmodel.routing.importers.probe import Probe
from perfmodel.routing.npz import one_line
from perfmodel.routing.profile import FrequencyProfile
from perfmodel.routing.trace import UNNAMED, RoutingTrace


@dataclass(frozen=True)
class ImportOptions:
    """What a recording may leave open; None where the user did not say.

    model : name of the recorded model
    num_experts : routed experts a layer
    top_k : picks of a token in a layer
    prompt_len : prefill rows, one number for every sequence or one a sequence
    sequence_len : rows of every sequence, where a file does not say where one ends; one number, or one a sequence
    layers : model layer of every row of the layer axis
    family : family of the model, whose rule turns router logits into picks and weights
    config : the model's config.json, or its folder
    expert_map : file with the logical expert of every physical slot [layers, slots]
    mend : names of defects to mend, see :data:`perfmodel.routing.defects.DEFECTS`
    """

    model: str | None = None
    num_experts: int | None = None
    top_k: int | None = None
    prompt_len: tuple[int, ...] | None = None
    sequence_len: tuple[int, ...] | None = None
    layers: tuple[int, ...] | None = None
    family: str | None = None
    config: Path | None = None
    expert_map: Path | None = None
    mend: frozenset[str] = field(default_factory=frozenset)

    def given(self) -> frozenset[str]:
        """Names of the options that were said."""
        return frozenset(one.name for one in fields(self) if getattr(self, one.name) not in (None, frozenset()))


@dataclass(frozen=True)
class Imported:
    """What a reader made of the files.

    result : a trace, or a frequency profile where the files hold counts alone
    findings : what the reader itself noticed, and what of it was mended
    unassigned : picks that the trace lacks and one of the findings tells of
    """

    result: RoutingTrace | FrequencyProfile
    findings: tuple[Finding, ...] = ()
    unassigned: int = 0


@dataclass(frozen=True)
class Format:
    """One layout of recordings, and how to read it.

    name : as in ``perfmodel trace import NAME``
    summary : one line: who writes it, and what it holds
    gives : whether it holds the picks of every token, or counts alone
    takes : options that it understands, besides ``model`` and ``mend``
    files : what a file holds, by which names, and how files are named: what somebody who writes one has to know
    recognise : why a file looks like it, in a few words, or None where it does not
    read : the files, in the order given, as one recording; raises TraceError
    nearly : what keeps a file from being recognised that has the right kind of numbers, or None
    """

    name: str
    summary: str
    gives: Literal["trace", "profile"]
    takes: frozenset[str]
    files: str
    recognise: Callable[[Probe], str | None]
    read: Callable[[Sequence[Path], ImportOptions], Imported]
    nearly: Callable[[Probe], str | None] = lambda _: None


def as_signed(name: str, value: ArrayLike, ndim: int) -> NDArray[np.signedinteger[Any]]:
    """``value`` as integers with ``ndim`` axes, of a type that has -1 beside all that the given type can hold.

    Foreign recordings have no mark for "no expert" but -1: the largest id of a small unsigned type is an expert like
    any other, where a trace would take it as none. Raises :class:`TraceError` that starts with ``name``.
    """
    array = as_integers(name, value, ndim)
    if array.dtype.kind == "u" and array.max(initial=0) > np.iinfo(np.int64).max:
        raise TraceError(f"{name} holds {array.max()}, which is too large")
    wider = f"i{min(8, 2 * array.dtype.itemsize)}"
    return array if array.dtype.kind == "i" else array.astype(wider)  # type: ignore[return-value]


def option_name(name: str) -> str:
    """An import option as it is written on the command line."""
    return "--" + name.replace("_", "-")


def described(format_name: str, files: Sequence[Path], options: ImportOptions, **known: Any) -> dict[str, Any]:
    """Metadata of a trace or profile made from these files.

    ``known`` adds entries that the files state, and replaces the defaults below; entries that are None are left out.
    ``model`` is what the user said, or what the files say (``known``), or "an unknown model".
    """
    names = ", ".join(one_line(file.name) for file in files[:3]) + (f" and {len(files) - 3} more" if files[3:] else "")
    stated = {key: value for key, value in known.items() if value is not None}
    return {
        "source": "recorded",
        "how": f"imported from {names} ({format_name})",
        "import_format": format_name,
        "id_space": "logical",
        **stated,
        "model": options.model or stated.get("model") or UNNAMED,
    }


def per_sequence(option: str, said: tuple[int, ...], count: int, where: str) -> NDArray[np.int64]:
    """One number for each of ``count`` sequences, from one for all or one for each."""
    if len(said) not in (1, count):
        raise TraceError(
            f"{where}: {option} has {len(said)} numbers; allowed: one, or one for each of {counted(count, 'sequence')}"
        )
    return np.broadcast_to(np.array(said, np.int64), count).copy()


def prompt_lengths(options: ImportOptions, lengths: Sequence[int] | NDArray[np.int64], where: str) -> NDArray[np.int64]:
    """Prefill rows of sequences of the given lengths, as the user said; TraceError where nobody did."""
    if options.prompt_len is None:
        raise TraceError(f"{where}: does not say which rows are prefill; --prompt-len says it (0 if none is)")
    prompts = per_sequence("--prompt-len", options.prompt_len, len(lengths), where)
    over = np.flatnonzero(prompts > np.asarray(lengths))
    if len(over):
        s = int(over[0])
        raise TraceError(f"{where}: --prompt-len is {prompts[s]} for sequence {s}, which has {lengths[s]} rows")
    return prompts


def one_pass(options: ImportOptions, lengths: Sequence[int] | NDArray[np.int64], where: str) -> NDArray[np.int64]:
    """Prefill rows of a layout that holds one forward pass over every text: all, unless the user says where a
    prompt ends."""
    if options.prompt_len is None:
        return np.asarray(lengths, np.int64)
    return prompt_lengths(options, lengths, where)


def sequence_lengths(options: ImportOptions, rows: int, where: str) -> NDArray[np.int64]:
    """Lengths of the sequences that ``rows`` rows make up, as the user said; all rows are one where nobody did."""
    if options.sequence_len is None:
        return np.array([rows], np.int64)
    said = options.sequence_len
    if len(said) == 1 and said[0] > 0 and rows % said[0] == 0:
        return np.full(rows // said[0], said[0], np.int64)
    if sum(said) != rows or min(said) < 1:
        raise TraceError(f"{where}: --sequence-len adds up to {sum(said)} rows, the file has {rows}")
    return np.array(said, np.int64)


def layer_numbers(options: ImportOptions, count: int, where: str) -> NDArray[np.int64] | None:
    """Model layers of ``count`` rows of the layer axis, where the user said; they increase."""
    if options.layers is None:
        return None
    layers = np.array(options.layers, np.int64)
    if len(layers) != count or (np.diff(layers) <= 0).any():
        raise TraceError(f"{where}: --layers names {len(layers)} layers; allowed: {count}, each larger than the last")
    return layers


def number_of_experts(
    options: ImportOptions, ids: NDArray[Any], stated: int | None = None
) -> tuple[int, dict[str, Any]]:
    """Experts a layer, and what to note of it: what the user said, else the file, else the largest id plus one."""
    if options.num_experts is not None or stated is not None:
        return options.num_experts or stated or 0, {}
    return max(int(ids.max(initial=-1)) + 1, ids.shape[-1]), {"num_experts_inferred": True}
