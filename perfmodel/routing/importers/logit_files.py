"""Router logits as they lie in a file: by forward call, by MoE layer, with the mask of padding beside them.

Transformers returns ``router_logits`` as one array [batch * seq, E] for each MoE layer, the sequences of the batch
one after another. A file holds them under these names, where ``.`` may also be ``_`` or ``/``:

``router_logits`` [L, N, E] or [L, batch, seq, E], all layers of one call
``router_logits.LAYER`` [N, E] or [batch, seq, E], one layer of one call; LAYER counts MoE layers from 0
``router_logits.CALL.LAYER``, several calls of one batch: call 0 is the prompt, each further one a decode step

``layer_0``, ``layer_1``, ... or ``arr_0``, ``arr_1``, ..., one of each MoE layer and nothing else, count as the second.
An encoder-decoder model has ``encoder_`` or ``decoder_`` before the name. A ``.pt`` file may hold the tuples
themselves, a JSON file lists of lists. Beside them may lie ``attention_mask`` [batch, seq] (0 is padding),
``prompt_len`` [batch], and ``e_score_correction_bias`` [L, E], what the routers of some families add to their scores.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from perfmodel.errors import TraceError
from perfmodel.routing.checks import as_integers
from perfmodel.routing.importers.logit_names import NAME, arrays_of, as_arrays, named
from perfmodel.routing.importers.probe import Probe
from perfmodel.routing.npz import one_line

_BIAS = "e_score_correction_bias"

Side = Literal["", "encoder_", "decoder_"]


@dataclass(frozen=True)
class LogitFile:
    """The logits of one batch of sequences.

    where : name of the file, the start of every message
    side : "encoder_" or "decoder_" of an encoder-decoder model, otherwise empty
    rows : rows of each forward call, padding included
    batch : sequences of the batch; None where arrays are flat and nothing tells
    layers, experts : MoE layers L and their experts E
    layer : logits of one layer, all calls one after another, float32 [sum of rows, E]
    mask : which tokens are none of padding, bool [batch, columns], or None
    prompt_len : prefill rows of each sequence, int64 [batch], or None
    bias : what routers add to their scores, float32 [L, E], or None
    """

    where: str
    side: Side
    rows: tuple[int, ...]
    batch: int | None
    layers: int
    experts: int
    layer: Callable[[int], NDArray[np.float32]]
    mask: NDArray[np.bool_] | None
    prompt_len: NDArray[np.int64] | None
    bias: NDArray[np.float32] | None


def read_logits(path: Path) -> LogitFile:
    """The logits in an ``.npz``, safetensors, ``.pt`` or JSON file; TraceError where shapes or names do not fit."""
    shapes, array = arrays_of(Probe.of(path))
    return _logits(one_line(path), shapes, array)


def logits_in_memory(source: Any, where: str) -> LogitFile:
    """The logits of a model's output: a table of the names above, or the tuple alone, of arrays or tensors."""
    content = source if isinstance(source, Mapping) else {"router_logits": source}
    flat = named(where, as_arrays(content, where))
    return _logits(where, {name: one.shape for name, one in flat.items()}, flat.__getitem__)


def _logits(where: str, shapes: Mapping[str, tuple[int, ...]], array: Callable[[str], NDArray[Any]]) -> LogitFile:
    sides: dict[Side, dict[tuple[str | None, str | None], str]] = {}
    for name in shapes:
        found = NAME.fullmatch(name)
        if found:
            sides.setdefault(cast(Side, found[1]), {})[found[2], found[3]] = name
    if len(sides) != 1:
        what = "both encoder and decoder" if sides else f"{one_line(', '.join(shapes)) or 'no arrays'}"
        raise TraceError(f"{where}: holds {what}; expected router_logits of one stack of layers, see `trace formats`")
    (side, names), *_ = sides.items()
    if (None, None) in names:
        if len(names) > 1:
            raise TraceError(f"{where}: holds router_logits both as one array and as one a layer; expected one of them")
        return _stacked(where, side, shapes, array, names[None, None])
    return _by_layer(where, side, shapes, array, names)


def _stacked(where: str, side: Side, shapes: Any, array: Any, name: str) -> LogitFile:
    shape = shapes[name]
    if len(shape) not in (3, 4) or 0 in shape:
        raise TraceError(f"{where}: {name} has shape {shape}, expected [layers, rows, experts]")
    whole = _floats(where, name, array(name))
    rows = int(np.prod(shape[1:-1]))
    layers, experts = shape[0], shape[-1]
    batch = shape[1] if len(shape) == 4 else None
    flat = whole.reshape(layers, rows, experts)
    return _with_rest(where, side, (rows,), batch, layers, experts, flat.__getitem__, shapes, array)


def _by_layer(where: str, side: Side, shapes: Any, array: Any, names: Any) -> LogitFile:
    if len({second is None for _, second in names}) > 1:
        raise TraceError(f"{where}: holds router_logits both by layer and by call and layer; expected one of them")
    numbered = {(int(a), int(b)) if b is not None else (0, int(a)): name for (a, b), name in names.items()}
    calls, layers = (max(key[axis] for key in numbered) + 1 for axis in (0, 1))
    if len(numbered) != len(names) or len(numbered) != calls * layers:
        raise TraceError(
            f"{where}: holds {len(names)} arrays of router_logits, numbered up to call {calls - 1} and layer "
            f"{layers - 1}; expected every layer of every call once, counted from 0"
        )
    first = shapes[numbered[0, 0]]
    experts = first[-1] if first else 0
    counts = []
    for call in range(calls):
        expected = shapes[numbered[call, 0]]
        for layer in range(layers):
            name = numbered[call, layer]
            shape = shapes[name]
            if len(shape) not in (2, 3) or 0 in shape or shape != expected or shape[-1] != experts:
                raise TraceError(
                    f"{where}: {name} has shape {shape}, expected [rows, {experts}] or [batch, seq, {experts}] as in "
                    f"the other layers"
                )
        counts.append(int(np.prod(expected[:-1])))
    batch = first[0] if len(first) == 3 else None
    if calls > 1:
        batch = batch or counts[1]
        if set(counts[1:]) != {batch} or counts[0] % batch:
            raise TraceError(
                f"{where}: calls have {one_line(counts)} rows; expected a multiple of the batch in call 0, the prompt, "
                f"and one row a sequence in each further call"
            )

    def layer_of(layer: int) -> NDArray[np.float32]:
        parts = [_floats(where, name, array(name)) for name in (numbered[call, layer] for call in range(calls))]
        return np.concatenate([part.reshape(-1, experts) for part in parts])

    return _with_rest(where, side, tuple(counts), batch, layers, experts, layer_of, shapes, array)


def _floats(where: str, name: str, array: NDArray[Any]) -> NDArray[np.float32]:
    if array.dtype.kind != "f":
        raise TraceError(f"{where}: {name} has dtype {array.dtype}, expected floating point numbers")
    with np.errstate(over="ignore"):
        values = np.asarray(array, dtype=np.float32)
    if not np.isfinite(values).all():
        at = tuple(int(i) for i in np.argwhere(~np.isfinite(values))[0])
        raise TraceError(f"{where}: {name} is {array[at]} at {at}, expected finite float32 numbers")
    return values


def _with_rest(
    where: str,
    side: Side,
    rows: tuple[int, ...],
    batch: int | None,
    layers: int,
    experts: int,
    layer: Callable[[int], NDArray[np.float32]],
    shapes: Mapping[str, tuple[int, ...]],
    array: Callable[[str], NDArray[Any]],
) -> LogitFile:
    """The file with what lies beside the logits."""
    mask = prompt_len = None
    if "attention_mask" in shapes:
        mask = _mask(where, array("attention_mask"), rows, batch)
        batch = len(mask)
    if "prompt_len" in shapes:
        try:
            prompt_len = as_integers("prompt_len", array("prompt_len"), 1).astype(np.int64)
        except TraceError as error:
            raise TraceError(f"{where}: {error}") from None
    return LogitFile(
        where, side, rows, batch, layers, experts, layer, mask, prompt_len, _bias(where, layers, experts, shapes, array)
    )


def _mask(where: str, mask: NDArray[Any], rows: tuple[int, ...], batch: int | None) -> NDArray[np.bool_]:
    """The mask of the prompt, and of the decode steps too where it covers them."""
    if mask.ndim != 2 or 0 in mask.shape or mask.dtype.kind not in "iub" or not np.isin(mask, (0, 1)).all():
        raise TraceError(f"{where}: attention_mask has shape {mask.shape}, expected [batch, seq] of zeros and ones")
    sequences, columns = mask.shape
    if batch not in (None, sequences) or rows[0] % sequences:
        raise TraceError(f"{where}: attention_mask is of {sequences} sequences, the logits of {batch or rows[0]}")
    if columns not in (rows[0] // sequences, rows[0] // sequences + len(rows) - 1):
        raise TraceError(
            f"{where}: attention_mask has shape {mask.shape}, but a call has {rows[0]} rows of {sequences} sequences"
        )
    return mask.astype(np.bool_)


def _bias(where: str, layers: int, experts: int, shapes: Any, array: Any) -> NDArray[np.float32] | None:
    if _BIAS in shapes:
        bias = _floats(where, _BIAS, array(_BIAS))
    elif f"{_BIAS}.0" in shapes:
        names = [f"{_BIAS}.{layer}" for layer in range(layers)]
        if any(shapes.get(name) != (experts,) for name in names):
            raise TraceError(f"{where}: {_BIAS}.LAYER is missing or no [{experts}] in one of {layers} layers")
        bias = np.stack([_floats(where, name, array(name)) for name in names])
    else:
        return None
    if bias.shape != (layers, experts):
        raise TraceError(f"{where}: {_BIAS} has shape {bias.shape}, expected {(layers, experts)}")
    return bias
