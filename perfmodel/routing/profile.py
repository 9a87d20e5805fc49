"""Frequency profiles: how often each expert was used, where nothing is known of single tokens."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from perfmodel.errors import TraceError
from perfmodel.paths import replace_when_done
from perfmodel.routing.checks import MAX_EXPERTS, as_count, as_texts, checked_layers, checked_metadata, stored_metadata
from perfmodel.routing.npz import declared, npz_keys, one_line, read_npz, shown
from perfmodel.routing.profile_formats import ProfileFormats

if TYPE_CHECKING:
    from perfmodel.routing.trace import RoutedModel, RoutingTrace

FORMAT = "perfmodel-frequency-profile/1"
PROFILE_KEYS = frozenset({"counts", "layer_index", "scale", "metadata"})
MAX_BYTES = 64 * 2**20
"""Largest size [byte] of the counts of one profile, and of all arrays of its file."""

Scale = Literal["counts", "shares", "ranks"]


@dataclass(frozen=True, eq=False, repr=False)
class FrequencyProfile(ProfileFormats):
    """How often each of E experts was used in each of L layers. It is no trace: nothing can be replayed from it.

    It places experts (``static:profile=FILE``) and sets the skew of the layers of synthetic traces. Arrays are
    read-only.

    Parameters
    ----------
    counts : float [L, E], uses, or any numbers proportional to them in each layer; finite, >= 0, and above 0
        for at least one expert of every layer
    layer_index : integer [L], the model layer of each row, >= 0 and strictly increasing
    metadata : ``model`` (name), ``source`` (always "from-counts"), and as text where known ``how`` and
        ``date``; further keys are free, values as in JSON
    top_k : picks of a token [1], 1 to E, or None where it is not known
    scale : "counts"; "shares" where only proportions within a layer are known; "ranks" where larger means more
        often and nothing else is known

    Raises
    ------
    TraceError : for everything that breaks a rule above
    """

    counts: NDArray[np.float64]
    layer_index: NDArray[np.int64]
    metadata: dict[str, Any]
    top_k: int | None = None
    scale: Scale = "counts"

    def __post_init__(self) -> None:
        counts = _checked_counts(self.counts)
        layer_index = checked_layers(self.layer_index, len(counts))
        empty = np.flatnonzero(~counts.any(axis=1))
        if len(empty):
            raise TraceError(f"counts: no expert of layer {layer_index[empty[0]]} was used, expected at least one")
        if repr(self.scale) not in map(repr, get_args(Scale)):
            raise TraceError(f"scale is {shown(self.scale)}, allowed are {', '.join(get_args(Scale))}")
        top_k = None if self.top_k is None else as_count("top_k", self.top_k, 1, counts.shape[1])
        for array in (counts, layer_index):
            array.flags.writeable = False
        for name, value in (
            ("counts", counts),
            ("layer_index", layer_index),
            ("metadata", _checked_metadata(self.metadata)),
            ("top_k", top_k),
        ):
            object.__setattr__(self, name, value)

    def __reduce__(self) -> tuple[type["FrequencyProfile"], tuple[Any, ...]]:
        # Through the constructor, because a pickled array forgets that it was read-only.
        return type(self), tuple(getattr(self, field.name) for field in fields(self))

    def __repr__(self) -> str:
        picks = "" if self.top_k is None else f"top-{self.top_k} of "
        return (
            f"FrequencyProfile({self.metadata['model']}, {self.scale}: "
            f"{self.num_layers} layers, {picks}{self.num_experts} experts)"
        )

    @property
    def num_layers(self) -> int:
        """MoE layers, L."""
        return int(self.counts.shape[0])

    @property
    def num_experts(self) -> int:
        """Routed experts a layer, E."""
        return int(self.counts.shape[1])

    def shares(self) -> NDArray[np.float64]:
        r"""Share of each expert in the uses of its layer [L, E], which sum to one in a layer.

        .. math:: p_{l,e} = n_{l,e} / \sum_j n_{l,j}

        Raises :class:`TraceError` where only ranks are known.
        """
        if self.scale == "ranks":
            raise TraceError(
                f"the profile of {self.metadata['model']} only says which experts were used more often than others, "
                f"not how often: it has no shares"
            )
        # Divided twice, so that neither a sum of huge counts nor one of tiny counts leaves the range of floats.
        scaled = self.counts / self.counts.max(axis=1, keepdims=True)
        return np.asarray(scaled / scaled.sum(axis=1, keepdims=True))

    def order(self) -> NDArray[np.int64]:
        """Experts of each layer [L, E] from the most to the least used; of equals the lower id first."""
        return np.argsort(-self.counts, axis=1, kind="stable").astype(np.int64)

    def with_metadata(self, **entries: Any) -> "FrequencyProfile":
        """The same counts with further or other metadata entries."""
        return replace(self, metadata={**self.metadata, **entries})

    def check_model(self, model: "RoutedModel") -> None:
        """Raise :class:`TraceError` unless the model has this profile's experts a layer and, if known, picks."""
        if self.num_experts != model.num_experts or self.top_k not in (None, model.top_k):
            picks = "" if self.top_k is None else f"top-{self.top_k} of "
            raise TraceError(
                f"the profile of {self.metadata['model']} is of {picks}{self.num_experts} experts a layer, "
                f"{model.name} has top-{model.top_k} of {model.num_experts}: it says nothing about this model"
            )

    # ---- files ----

    @classmethod
    def load(cls, path: str | Path) -> "FrequencyProfile":
        """Load the ``.npz`` file that :meth:`save` wrote. Nothing is unpickled.

        Raises :class:`TraceError` for anything missing, damaged, too large or inconsistent.
        """
        keys = set(npz_keys(path))
        missing = sorted(PROFILE_KEYS - keys)
        if missing:
            what = "is a routing trace" if "topk_ids" in keys else "is a loss table" if "losses" in keys else ""
            what = what or f"no frequency profile; holds {', '.join(sorted(keys))}"
            raise TraceError(f"{one_line(path)}: {one_line(what)}; a frequency profile also needs {', '.join(missing)}")
        known = (*PROFILE_KEYS, "top_k")
        size = sum(int(np.prod(shape, dtype=object)) * kind.itemsize for shape, kind in declared(path, known).values())
        if size > MAX_BYTES:
            raise TraceError(f"{one_line(path)}: holds {size} bytes, at most {MAX_BYTES} for a frequency profile")
        arrays = read_npz(path, known)
        try:
            top_k = arrays.get("top_k")
            if top_k is not None and top_k.shape != ():
                raise TraceError(f"top_k has shape {top_k.shape}, expected a single number")
            return cls(
                counts=arrays["counts"],
                layer_index=arrays["layer_index"],
                metadata=stored_metadata(arrays["metadata"]),
                top_k=None if top_k is None else top_k[()],  # type: ignore[arg-type]  # the constructor refuses all but integers
                scale=as_texts("scale", arrays["scale"], 0),
            )
        except TraceError as error:
            raise TraceError(f"{one_line(path)}: {error}") from error

    def save(self, path: str | Path) -> None:
        """Write an ``.npz`` file, first under a temporary name; ``path`` ends in ``.npz``."""
        if not str(path).endswith(".npz"):
            raise TraceError(f"expected a file name that ends in .npz, found {shown(path)}")
        arrays: dict[str, Any] = {
            "counts": self.counts,
            "layer_index": self.layer_index,
            "scale": np.array(self.scale),
            "metadata": np.array(json.dumps({"format": FORMAT, **self.metadata})),
        }
        if self.top_k is not None:
            arrays["top_k"] = np.int64(self.top_k)
        try:
            with replace_when_done(path) as temporary, temporary.open("wb") as stream:
                np.savez_compressed(stream, **arrays)
        except (OSError, ValueError) as error:
            raise TraceError(f"{one_line(path)}: cannot be written ({one_line(error)})") from error

    def content_hash(self) -> str:
        """SHA-256 over everything that :meth:`save` writes: equal for equal profiles, whatever their files."""
        state = hashlib.sha256()
        for name in ("counts", "layer_index"):
            array = getattr(self, name)
            little = array.astype(array.dtype.newbyteorder("<"), copy=False)
            state.update(f"{name} {little.dtype.str} {little.shape}:".encode())
            state.update(little.tobytes())
        state.update(json.dumps([self.top_k, self.scale, self.metadata], sort_keys=True).encode())
        return state.hexdigest()


def load_use(source: str | Path) -> "FrequencyProfile | RoutingTrace":
    """How often experts were used: the frequency profile in a file, or the trace in a file or of a bundled name.

    Raises :class:`TraceError` as the ``load`` of either does.
    """
    from perfmodel.routing.trace import RoutingTrace, trace_path  # imported here, for traces are far larger

    path = trace_path(source)
    return FrequencyProfile.load(path) if set(npz_keys(path)) >= PROFILE_KEYS else RoutingTrace.load(source)


def _checked_counts(value: ArrayLike) -> NDArray[np.float64]:
    """A copy of the counts as float64 [L, E], finite and not negative."""
    try:
        array = np.asarray(value)
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise TraceError(f"counts is no array ({one_line(error)})") from error
    if array.dtype.kind not in "iuf":
        raise TraceError(f"counts has dtype {array.dtype}, expected numbers")
    if array.ndim != 2 or 0 in array.shape or array.shape[1] > MAX_EXPERTS or array.size > MAX_BYTES // 8:
        raise TraceError(
            f"counts has shape {array.shape}, expected at least one layer, 1 to {MAX_EXPERTS} experts, and at most "
            f"{MAX_BYTES // 8} numbers"
        )
    with np.errstate(over="ignore", invalid="ignore"):
        # Zero is added so that no zero is a negative one, which would give equal profiles two hashes.
        counts = np.array(array, dtype=np.float64, order="C") + 0.0
    wrong = ~((counts >= 0) & (counts < np.inf))  # a NaN fails both
    if wrong.any():
        layer, expert = np.argwhere(wrong)[0]
        raise TraceError(
            f"counts: layer row {layer}, expert {expert} is {array[layer, expert]}, expected a finite number >= 0"
        )
    return counts


def _checked_metadata(value: object) -> dict[str, Any]:
    """A copy of the metadata, which is a JSON table with a model and the source of profiles."""
    entries = dict(value) if isinstance(value, Mapping) else value
    if isinstance(entries, dict):
        found = entries.pop("format", FORMAT)
        if found != FORMAT:
            raise TraceError(f"metadata.format is {shown(found)}, this version reads {FORMAT!r}")
    metadata = checked_metadata(entries)
    if metadata["source"] != "from-counts":
        raise TraceError(f"metadata.source is {shown(metadata['source'])}, a frequency profile is 'from-counts'")
    return metadata
