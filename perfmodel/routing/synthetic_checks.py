"""What the generator of routing is given: numbers, one a layer or one for all, and profiles, checked."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from perfmodel.errors import TraceError
from perfmodel.routing.checks import as_count, as_int64
from perfmodel.routing.npz import MAX_BYTES, one_line, shown

Floats = NDArray[np.float64]
#: Frequencies [L, E] or [E], for all sequences or by their label.
Profile = ArrayLike | Mapping[str, ArrayLike]

TOO_LARGE = f"the trace would be too large for memory ({MAX_BYTES / 2**30:.0f} GiB)"
BLOCK = 256
"""Tokens drawn at once, which bounds the memory."""
_SEQUENCE_BYTES = 1024  # of the random streams of a sequence
MOST_SEQUENCES = MAX_BYTES // _SEQUENCE_BYTES
_MOST_TOKENS = MAX_BYTES  # of a sequence: one pick takes more than one byte


def number(name: str, value: object) -> float:
    """A number, not yet known to be in any range."""
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | float | np.integer | np.floating):
        raise TraceError(f"{name} is {shown(value)}, expected a number")
    try:
        return float(value)
    except OverflowError as error:
        raise TraceError(f"{name} is too large for a number") from error


def positive(name: str, value: object) -> float:
    """A number > 0, or infinity."""
    found = number(name, value)
    if not found > 0:
        raise TraceError(f"{name} is {found}, expected a number > 0 (inf for no variation)")
    return found


def between(name: str, value: object, low: float, high: float) -> float:
    """A number in a closed range."""
    found = number(name, value)
    if not low <= found <= high:
        raise TraceError(f"{name} is {shown(value)}, expected {low:g} to {high:g}")
    return found


def each_layer(name: str, value: object, layers: int, low: float, high: float) -> Floats:
    """One number a layer [L], from one number or one a layer. ``low`` itself is allowed unless ``high`` is inf."""

    def checked(label: str, one: object) -> float:
        return positive(label, one) if math.isinf(high) else between(label, one, low, high)

    if not isinstance(value, list | tuple | np.ndarray):
        return np.full(layers, checked(name, value))
    shape = value.shape if isinstance(value, np.ndarray) else (len(value),)
    if shape != (layers,):
        raise TraceError(f"{name} has shape {shape}, expected one number, or one for each of {layers} layers")
    return np.array([checked(f"{name}[{layer}]", one) for layer, one in enumerate(value)])


def lengths(name: str, value: object, sequences: int) -> NDArray[np.int64]:
    """Tokens of every sequence [S], from one number or one a sequence."""
    if not isinstance(value, list | tuple | np.ndarray):
        count = as_count(name, value, 0, None)
        if count > _MOST_TOKENS:
            raise TraceError(TOO_LARGE)
        return np.full(sequences, count)
    found = as_int64(name, value, sequences)
    if found.min() < 0:
        raise TraceError(f"{name} holds {found.min()}, expected integers >= 0")
    if found.max() > _MOST_TOKENS:
        raise TraceError(TOO_LARGE)
    return found


def check_size(
    tokens: NDArray[np.int64], layers: int, experts: int, top_k: int, *, next_layer: bool = True, repeats: bool = True
) -> None:
    """Refuse sequences without a token, and a trace too large for memory; ``tokens`` [S] are those of each sequence.

    next_layer, repeats : whether these options are used, which need more numbers at once
    """
    if (tokens == 0).any():
        raise TraceError("prompt and output are both 0, expected at least one token")
    # Blocks of numbers: noise goes only when the next is drawn, and links draw as many once more. Repeated tokens are
    # looked for in two blocks, while the two before are still there.
    blocks = 2 + next_layer + 3 * repeats
    noise = blocks * min(BLOCK, int(tokens.max())) * experts * 8
    size = layers * (sum(tokens.tolist()) * top_k * 12 + noise) + len(tokens) * _SEQUENCE_BYTES
    if size > MAX_BYTES:
        raise TraceError(TOO_LARGE)


def log_profiles(name: str, value: Profile, layers: int, experts: int, top_k: int) -> dict[str, Floats]:
    """Logarithms [L, E] of the shares of every label; the label is "" where one profile is for all sequences."""
    if not isinstance(value, Mapping):
        return {"": _log_profile(name, value, layers, experts, top_k)}
    if not value:
        raise TraceError(f"{name} has no labels, expected at least one")
    if not all(label and type(label) is str for label in value):
        raise TraceError(f"{name} has the labels {one_line(list(value))}, expected texts that are not empty")
    return {label: _log_profile(f"{name}[{shown(label)}]", one, layers, experts, top_k) for label, one in value.items()}


def labels_of(
    labels: Sequence[str] | None, known: list[str], sequences: int
) -> tuple[list[str], tuple[str, ...] | None]:
    """The key of every sequence's profile, and the labels of the trace."""
    alone = known == [""]
    if labels is None:
        keys = [known[s % len(known)] for s in range(sequences)]
        return keys, None if alone else tuple(keys)
    if not isinstance(labels, list | tuple) or len(labels) != sequences:
        raise TraceError(f"labels is {shown(labels)}, expected a list of one text for each of {sequences} sequences")
    if alone:
        return [""] * sequences, tuple(labels)
    for label in labels:
        if label not in known:
            raise TraceError(f"label {shown(label)} has no profile; layer_profile has {one_line(', '.join(known))}")
    return list(labels), tuple(labels)


def _log_profile(name: str, value: ArrayLike, layers: int, experts: int, top_k: int) -> Floats:
    """Logarithms [L, E] of the shares that frequencies [L, E] or [E] stand for; -inf for an unused expert."""
    try:
        table = np.asarray(value, dtype=np.float64)
    except (ValueError, TypeError) as error:
        raise TraceError(f"{name} is no table of numbers ({one_line(error)})") from error
    if table.shape not in ((layers, experts), (experts,)):
        raise TraceError(f"{name} has shape {table.shape}, expected {(layers, experts)} or {(experts,)}")
    if not (np.isfinite(table).all() and (table >= 0).all()):
        raise TraceError(f"{name} must hold finite frequencies >= 0")
    if ((table > 0).sum(axis=-1) < top_k).any():
        raise TraceError(f"{name} must give at least {top_k} experts (top_k) of each layer a chance")
    table = np.broadcast_to(table / table.max(axis=-1, keepdims=True), (layers, experts))
    with np.errstate(divide="ignore"):
        log_p: Floats = np.log(table / table.sum(axis=-1, keepdims=True))
    return log_p


def checked_groups(groups: object, kept: object, experts: int, top_k: int) -> tuple[int, int]:
    """Groups of experts and how many of them a token picks from; TraceError where they leave no top k."""
    count = as_count("expert_groups", groups, 1, experts)
    if experts % count:
        raise TraceError(f"expert_groups is {count}, allowed a divisor of num_experts, {experts}")
    if count > 1 and experts // count < 2:
        raise TraceError(f"expert_groups is {count}, allowed at most {experts // 2}: a group is judged by its two best")
    limit = as_count("kept_groups", kept, 1, count)
    if limit * (experts // count) < top_k:
        raise TraceError(
            f"kept_groups is {limit}, allowed at least {-(-top_k // (experts // count))}: "
            f"{limit} of {count} groups have {limit * (experts // count)} experts, fewer than top_k, {top_k}"
        )
    return count, limit
