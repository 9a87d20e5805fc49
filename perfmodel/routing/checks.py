"""The rules that the parts of a routing trace obey: each check returns a clean copy or raises."""

import json
import math
import operator
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from perfmodel.errors import TraceError
from perfmodel.routing.npz import one_line, shown

SOURCES = ("recorded", "synthetic", "from-counts")
FORMAT = "perfmodel-routing-trace/1"
MAX_METADATA = 2**21  # letters of its JSON text, each of which costs tens of bytes once it is read
_PART = 2**20  # picks that are checked together
MAX_EXPERTS = 65535  # the largest uint16 means "unassigned"


def as_integers(name: str, value: ArrayLike, ndim: int) -> NDArray[np.integer[Any]]:
    """``value`` as an array of integers with ``ndim`` axes, or a :class:`TraceError` that names it."""
    try:
        array = np.asarray(value)
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise TraceError(f"{name} is no array ({one_line(error)})") from error
    if array.dtype.kind not in "iu":
        raise TraceError(f"{name} has dtype {array.dtype}, expected integers")
    if array.ndim != ndim:
        raise TraceError(f"{name} has shape {array.shape}, expected {ndim} axes")
    return array


def as_count(name: str, value: object, lowest: int, highest: int | None) -> int:
    """``value`` as an int in lowest..highest; a bool or a float is no count."""
    allowed = f"expected an integer >= {lowest}" if highest is None else f"expected an integer in {lowest}..{highest}"
    if isinstance(value, bool | np.bool_):
        raise TraceError(f"{name} is {value}, {allowed}")
    try:
        count = operator.index(value)  # type: ignore[arg-type]  # anything else is refused below
    except TypeError as error:
        raise TraceError(f"{name} is {shown(value)}, {allowed}") from error
    if count < lowest or (highest is not None and count > highest):
        raise TraceError(f"{name} is {_number(count)}, {allowed}")
    return count


def _number(count: int) -> str:
    # Python refuses to print an integer of more than 4,300 digits.
    return str(count) if abs(count) < 10**30 else "a number of more than 30 digits"


def as_int64(name: str, value: ArrayLike, length: int | None) -> NDArray[np.int64]:
    """``value`` as a copied int64 array with one axis of the given length."""
    array = as_integers(name, value, 1)
    if length is not None and len(array) != length:
        raise TraceError(f"{name} has {len(array)} entries, expected {length}")
    if array.dtype.kind == "u" and array.max(initial=0) > np.iinfo(np.int64).max:
        raise TraceError(f"{name} holds {array.max()}, which is too large")
    return np.array(array, dtype=np.int64)


def as_texts(name: str, array: NDArray[Any], ndim: int) -> Any:
    """The texts of a stored array: one text where ``ndim`` is 0, else lists of them."""
    if array.ndim != ndim or array.dtype.kind != "U":
        expected = "a list of texts" if ndim else "one JSON text" if name == "metadata" else "one text"
        raise TraceError(f"{name} has dtype {array.dtype} and shape {array.shape}, expected {expected}")
    native = array.astype(array.dtype.newbyteorder("=")).reshape(-1)
    if native.view(np.uint32).max(initial=0) > sys.maxunicode:
        raise TraceError(f"{name} holds bytes that are no text")
    return native.reshape(array.shape).tolist()


def stored_metadata(array: NDArray[Any]) -> Any:
    """What the metadata of a file says, which is one JSON text."""
    if array.dtype.kind == "U" and array.dtype.itemsize > 4 * (MAX_METADATA + 100):
        raise TraceError(f"metadata has {array.dtype.itemsize // 4:,} letters, at most {MAX_METADATA:,}")
    try:
        return json.loads(
            as_texts("metadata", array, 0), parse_constant=_refuse_constant, object_pairs_hook=_each_key_once
        )
    except TraceError:
        raise
    except (ValueError, RecursionError) as error:
        raise TraceError(f"metadata is no JSON text ({one_line(error)})") from error


def _each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        names = [name for name, _ in pairs]
        raise TraceError(f"metadata holds the key {shown(max(names, key=names.count))} twice")
    return table


def _refuse_constant(name: str) -> None:
    raise TraceError(f"metadata holds {name}, which is not JSON")


def checked_layers(value: ArrayLike, length: int) -> NDArray[np.int64]:
    """The model layer of each row of a layer axis: as many as there are rows, from 0 on, increasing."""
    layers = as_int64("layer_index", value, length)
    if layers[0] < 0 or (layers[1:] <= layers[:-1]).any():
        raise TraceError(f"layer_index must be >= 0 and increase, found {one_line(layers)}")
    return layers


def checked_ids(
    ids: NDArray[np.integer[Any]], num_experts: int, layer_index: NDArray[np.int64], first_token: int = 0
) -> NDArray[np.unsignedinteger[Any]]:
    """Picks as uint8 or uint16, each an expert or the dtype's maximum for none, no expert twice in a token.

    ``first_token`` is the number of the first row, where the rows are a part of a trace.
    """
    kept: NDArray[np.unsignedinteger[Any]] = np.empty(ids.shape, np.uint8 if num_experts <= 255 else np.uint16)
    for rows in _parts(ids.shape):
        _check_ids(ids[rows], kept[rows], num_experts, layer_index, first_token + rows.start)
    return kept


def _parts(shape: tuple[int, ...]) -> Iterator[slice]:
    """Rows that are looked at together: few enough to need little memory, and to refuse the first wrong one soon."""
    step = max(1, _PART // max(1, math.prod(shape[1:])))
    return (slice(start, start + step) for start in range(0, shape[0], step))


def _check_ids(
    ids: NDArray[np.integer[Any]],
    kept: NDArray[np.unsignedinteger[Any]],
    num_experts: int,
    layer_index: NDArray[np.int64],
    first_token: int,
) -> None:
    mark = np.iinfo(ids.dtype).max if ids.dtype.kind == "u" else -1
    unassigned = ids == mark
    if ids.dtype == np.uint8 and num_experts > 255 and unassigned.any():
        raise TraceError(f"topk_ids is uint8, where 255 means unassigned; {num_experts} experts need uint16")
    outside = ids >= num_experts
    if ids.dtype.kind == "i":
        outside |= ids < 0
    outside &= ~unassigned
    if outside.any():
        token, layer, slot = np.argwhere(outside)[0]
        raise TraceError(
            f"topk_ids: token {first_token + token}, layer {layer_index[layer]}, pick {slot} is "
            f"expert {ids[token, layer, slot]}, allowed are 0..{num_experts - 1} and {mark} for unassigned"
        )
    ordered = np.sort(ids, axis=-1)
    twice = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] != mark)
    if twice.any():
        token, layer, slot = np.argwhere(twice)[0]
        expert = ordered[token, layer, slot]
        raise TraceError(
            f"topk_ids: token {first_token + token}, layer {layer_index[layer]} picks expert {expert} twice"
        )
    kept[:] = ids
    if ids.dtype != kept.dtype:
        kept[unassigned] = np.iinfo(kept.dtype).max


def checked_weights(
    value: ArrayLike, ids: NDArray[np.unsignedinteger[Any]], first_token: int = 0
) -> NDArray[np.float32]:
    """Gate weights as float32, finite and not negative, zero where a pick is unassigned."""
    try:
        array = np.asarray(value)
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise TraceError(f"topk_weights is no array ({one_line(error)})") from error
    if array.dtype.kind != "f":
        raise TraceError(f"topk_weights has dtype {array.dtype}, expected floating point numbers")
    if array.shape != ids.shape:
        raise TraceError(f"topk_weights has shape {array.shape}, topk_ids has {ids.shape}")
    weights = np.empty(array.shape, np.float32)
    for rows in _parts(array.shape):
        part, kept = weights[rows], ids[rows]
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            part[:] = array[rows]
        # A NaN fails both comparisons; the signs of infinities show in one of them.
        if not (part.min() >= 0 and part.max() < np.inf):
            token, layer, slot = np.argwhere(~((part >= 0) & (part < np.inf)))[0]
            raise TraceError(
                f"topk_weights: token {first_token + rows.start + token}, layer row {layer}, pick {slot} is "
                f"{array[rows][token, layer, slot]}, expected a finite number >= 0"
            )
        part[kept == np.iinfo(kept.dtype).max] = 0
    return weights


def checked_sequences(
    offsets: ArrayLike, prompt_len: ArrayLike, tokens: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Offsets that cut all tokens into sequences of at least one, and prompts no longer than those."""
    bounds = as_int64("sequence_offsets", offsets, None)
    if len(bounds) < 2 or bounds[0] != 0 or bounds[-1] != tokens:
        raise TraceError(f"sequence_offsets must run from 0 to the {tokens} tokens, found {one_line(bounds)}")
    # Compared and not subtracted: a difference of hostile numbers could wrap around.
    if (bounds[1:] <= bounds[:-1]).any():
        raise TraceError(f"sequence_offsets must increase, found {one_line(bounds)}")
    prompts = as_int64("prompt_len", prompt_len, len(bounds) - 1)
    wrong = np.flatnonzero((prompts < 0) | (prompts > np.diff(bounds)))
    if len(wrong):
        s = int(wrong[0])
        most = bounds[s + 1] - bounds[s]
        raise TraceError(f"prompt_len of sequence {s} is {prompts[s]}, allowed are 0..{most}, its tokens")
    return bounds, prompts


def checked_metadata(value: object) -> dict[str, Any]:
    """A copy of the metadata, which is a JSON table with a model and a source."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise TraceError(f"metadata is {shown(value)}, expected a table with text keys")
    try:
        # Through JSON, so that the trace has its own copy and can always be saved.
        text = json.dumps(dict(value), allow_nan=False)
        if len(text) > MAX_METADATA:
            raise TraceError(f"metadata has {len(text):,} letters as JSON, at most {MAX_METADATA:,}")
        metadata: dict[str, Any] = json.loads(text)
    except TraceError:
        raise
    except (ValueError, TypeError, RecursionError) as error:
        raise TraceError(f"metadata must be plain JSON values ({one_line(error)})") from error
    found = metadata.pop("format", FORMAT)
    if found != FORMAT:
        raise TraceError(f"metadata.format is {shown(found)}, this version reads {FORMAT!r}")
    for key in ("model", "source"):
        if key not in metadata:
            raise TraceError(f"metadata lacks {key!r}")
    for key in ("model", "source", "how", "date"):
        text = metadata.get(key, "-")
        if not isinstance(text, str) or not text:
            raise TraceError(f"metadata.{key} is {shown(text)}, expected text")
    if not metadata["model"].isprintable() or len(metadata["model"]) > 200:
        raise TraceError(f"metadata.model is {shown(metadata['model'])}, expected a name of at most 200 letters")
    if metadata["source"] not in SOURCES:
        raise TraceError(f"metadata.source is {shown(metadata['source'])}, allowed are {', '.join(SOURCES)}")
    return metadata


def checked_labels(value: object, count: int) -> tuple[str, ...] | None:
    """One line of text for each sequence, or None."""
    if value is None:
        return None
    labels = tuple(value) if isinstance(value, list | tuple) else (None,)
    if not all(isinstance(label, str) and label.isprintable() for label in labels):
        raise TraceError(f"labels is {shown(value)}, expected a list of lines of text")
    if len(labels) != count:
        raise TraceError(f"labels has {len(labels)} entries, expected one for each of {count} sequences")
    return labels
