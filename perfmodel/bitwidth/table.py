"""Loss tables: how much worse every expert gets at every bit width."""

import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from perfmodel.bitwidth.checks import finite, menu, not_negative
from perfmodel.errors import PolicyError, TraceError
from perfmodel.paths import data_folder
from perfmodel.routing.npz import npz_keys, one_line, read_npz, shown

#: Bit widths of a table that does not say its own, and the menu of the selector.
BITS = (1, 2, 3, 4)
Source = Literal["measured", "assumed", "unstated"]
_SOURCES: tuple[Source, ...] = ("measured", "assumed", "unstated")


@dataclass(frozen=True, eq=False)
class LossTable:
    """Output error of every expert at every bit width.

    losses : float64 [layers, experts, widths], read-only, finite and not negative; the mean squared error of an
        expert's output against full precision
    name : what a report calls it
    source : ``measured``, ``assumed`` when it comes from a rule of thumb, or ``unstated`` when nobody said where it is
        from
    notes : sentences for the report on how the table was adapted
    bits : the widths of the last axis, rising [bit]
    output_variance : float64 [layers, experts], mean square of the unquantised output; None where
        it was not recorded
    n_tokens : int64 [layers, experts], rows that the losses were measured on; None where it was not recorded
    info : what the file says of how the table was made; ``model``, ``num_layers``, ``hidden_size`` and
        ``expert_size`` in it are of the model that was measured
    """

    losses: NDArray[np.float64]
    name: str
    source: Source = "unstated"
    notes: tuple[str, ...] = ()
    bits: tuple[int, ...] = BITS
    output_variance: NDArray[np.float64] | None = None
    n_tokens: NDArray[np.int64] | None = None
    info: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        name, info = _any(self.name), _any(self.info)
        if not isinstance(name, str) or not name:
            raise TraceError(f"loss table: name is {shown(name)}; it must be a text")
        if not isinstance(info, Mapping):
            raise TraceError(f"{name}: info is {shown(info)}; it must be a table of what is known by name")
        if self.source not in _SOURCES:
            raise TraceError(f"{name}: source is {shown(self.source)}; it must be {' or '.join(map(repr, _SOURCES))}")
        object.__setattr__(self, "bits", menu(self.bits, f"{self.name}: bits", TraceError))
        losses = np.array(_checked_table(self.losses, self.name, len(self.bits)))
        self._freeze("losses", losses)
        for name, kind in (("output_variance", np.float64), ("n_tokens", np.int64)):
            given = getattr(self, name)
            if given is not None:
                self._freeze(name, _checked_extra(given, name, self.name, losses.shape[:2]).astype(kind))
        object.__setattr__(self, "info", MappingProxyType(dict(self.info)))

    def _freeze(self, name: str, array: NDArray[Any]) -> None:
        array.flags.writeable = False
        object.__setattr__(self, name, array)

    def __reduce__(self) -> tuple[Any, ...]:
        # A mapping proxy does not pickle.
        given = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return _rebuilt, ({**given, "info": dict(self.info)},)

    @property
    def num_layers(self) -> int:
        """Number of layers [1]."""
        return int(self.losses.shape[0])

    @property
    def num_experts(self) -> int:
        """Number of experts of each layer [1]."""
        return int(self.losses.shape[1])

    @property
    def origin(self) -> str:
        """Where the losses are from, in words."""
        return "origin not stated" if self.source == "unstated" else self.source

    @property
    def measured_model(self) -> str | None:
        """Name of the model that was measured; None where nobody said."""
        name = self.info.get("model")
        return one_line(name) if isinstance(name, str) and name else None

    def at(self, bits: float) -> NDArray[np.float64]:
        """Losses of every expert at a width [L, E]; see `at_width`."""
        return at_width(self.losses, self.bits, bits)

    def content_hash(self) -> str:
        """SHA-256 of the numbers; the name, the notes and how the table was made do not count."""
        digest = hashlib.sha256(f"{self.losses.shape} {self.bits}".encode() + self.losses.astype("<f8").tobytes())
        if self.output_variance is not None:
            digest.update(b"variance" + self.output_variance.astype("<f8").tobytes())
        return digest.hexdigest()

    @classmethod
    def load(cls, path_or_name: str | os.PathLike[str]) -> "LossTable":
        """Read a table from an ``.npz`` file, given by path or by the name of a bundled one.

        The file holds ``losses [L, E, widths]``, and may hold ``bits [widths]`` (1, 2, 3, 4 where it does not),
        ``output_variance [L, E]``, ``n_tokens [L, E]`` and ``metadata``, one JSON text. Anything that ends in
        ``.npz`` or holds a path separator is a path. Pickled data is never read. A file without ``metadata`` does not
        say where its losses are from.

        Raises TraceError when there is no such file, or it does not hold a valid table.
        """
        path = table_file(path_or_name)
        arrays = read_npz(path, ["losses", "bits", "output_variance", "n_tokens", "metadata"])
        if "losses" not in arrays:
            keys = npz_keys(path)
            kind = next((f"; it holds {what}" for what, own in _OTHER_FILES.items() if own <= set(keys)), "")
            raise TraceError(f"{path}: no array 'losses'; found {', '.join(keys[:10]) or 'nothing'}{kind}")
        bits = menu(arrays["bits"], f"{path}: bits", TraceError) if "bits" in arrays else None
        losses = _checked_table(arrays["losses"], str(path), len(bits or BITS), unnamed=bits is None)
        extra: dict[str, Any] = {
            name: _checked_extra(arrays[name], name, str(path), losses.shape[:2])
            for name in ("output_variance", "n_tokens")
            if name in arrays
        }
        info = _read_info(arrays["metadata"], path) if "metadata" in arrays else {}
        source: Source = "measured" if info else "unstated"
        return cls(losses, path.stem, source, bits=bits or BITS, info=info, **extra)

    @classmethod
    def assumed(cls, num_layers: int, num_experts: int) -> "LossTable":
        """The rule of thumb ``4 ** -bits``, equal for all experts: each bit halves the rounding step.

        Raises TraceError when a size is not a whole number of at least 1.
        """
        _check_sizes(num_layers, num_experts)
        row = np.power(4.0, -np.array(BITS, dtype=np.float64))
        losses = np.broadcast_to(row, (num_layers, num_experts, len(BITS)))
        return cls(losses, name="assumed", source="assumed", notes=("losses assumed to fall 4x per bit",))

    def only(self, bits: Iterable[int]) -> "LossTable":
        """The table with these widths alone, rising.

        Raises PolicyError when the table lacks one of them.
        """
        wanted = tuple(sorted(set(bits)))
        missing = [width for width in wanted if width not in self.bits]
        if missing or not wanted:
            lacks = f"loss table {self.name} has no losses at {_listed(missing)} bits" if missing else "no widths given"
            raise PolicyError(f"{lacks}; it has {_listed(self.bits)}")
        if wanted == self.bits:
            return self
        return replace(self, losses=self.losses[..., [self.bits.index(width) for width in wanted]], bits=wanted)

    def for_model(self, num_layers: int, num_experts: int, *, assume: bool = False) -> "LossTable":
        """The table for a model of that many MoE layers and experts; layers are cut or cycled, with a note.

        Losses that rise with bits are kept, and a note says for how many experts they do.

        With another number of experts there is no honest mapping: that is an error, or the table of
        `LossTable.assumed` with a note when ``assume`` is true.

        Raises TraceError when the number of experts differs or a size is not a whole number of at least 1.
        """
        _check_sizes(num_layers, num_experts)
        if num_experts != self.num_experts:
            found = f"{self.name} has {self.num_experts} experts per layer, the model {num_experts}"
            if not assume:
                raise TraceError(f"loss table {found}; give a table of this model, or leave --loss out (losses=None)")
            table = LossTable.assumed(num_layers, num_experts)
            return replace(table, notes=(*table.notes, f"loss table {found}, so it is not used"))
        if num_layers == self.num_layers:
            return self._with_order_note()
        how = "cut" if num_layers < self.num_layers else "cycled"
        note = f"loss table {self.name} of {self.num_layers} layers is {how} to {num_layers} layers"
        index = np.arange(num_layers) % self.num_layers
        rows: dict[str, Any] = {
            name: None if array is None else array[index]
            for name, array in (("output_variance", self.output_variance), ("n_tokens", self.n_tokens))
        }
        return replace(self, losses=self.losses[index], notes=(*self.notes, note), **rows)._with_order_note()

    def _with_order_note(self) -> "LossTable":
        """The table, with a note where more bits make some expert worse: its last axis may be in another order."""
        rising = int((np.diff(self.losses, axis=2) > 0).any(axis=2).sum())
        count = self.num_layers * self.num_experts
        note = (
            f"loss table {self.name}: the loss of {rising} of {count} experts rises with bits somewhere;"
            " check the order of the last axis"
        )
        if not rising or note in self.notes:
            return self
        return replace(self, notes=(*self.notes, note))


def _rebuilt(given: dict[str, Any]) -> LossTable:
    return LossTable(**given)


def at_width(losses: NDArray[np.float64], bits: tuple[int, ...], width: float) -> NDArray[np.float64]:
    """Losses [...] at one width: those of the table, or linear between the two widths next to it; NaN beyond them.

    losses : [..., widths]. bits : the widths of its last axis, rising [bit].
    """
    above = next((i for i, known in enumerate(bits) if known >= width), None)
    if above is not None and bits[above] == width:
        return losses[..., above]
    if above is None or above == 0:
        return np.full(losses.shape[:-1], np.nan)
    share = (width - bits[above - 1]) / (bits[above] - bits[above - 1])
    return np.asarray((1 - share) * losses[..., above - 1] + share * losses[..., above])


#: Arrays by which other files of this project are known.
_OTHER_FILES = {
    "calibration rows (perfmodel losses build makes a table of them)": {"hidden", "expert_ids"},
    "a routing trace (--trace takes it)": {"topk_ids"},
}


def _any(value: object) -> object:
    """What a caller really gave, whatever was declared."""
    return value


def _listed(widths: Iterable[int]) -> str:
    return ", ".join(map(str, widths))


def _checked_table(values: Any, where: str, num_widths: int, *, unnamed: bool = False) -> NDArray[np.float64]:
    losses = finite(values, f"{where}: losses", TraceError)
    if losses.ndim != 3 or losses.shape[2] != num_widths or 0 in losses.shape:
        allowed = f"[layers, experts, {num_widths}]"
        if 0 in losses.shape:
            allowed += ", not empty"
        elif unnamed and losses.ndim == 3:
            allowed += ", or the file must hold bits, one width a column"
        raise TraceError(f"{where}: losses has shape {list(losses.shape)}; it must be {allowed}")
    not_negative(losses, f"{where}: losses", TraceError)
    return losses


def _checked_extra(values: Any, name: str, where: str, shape: tuple[int, ...]) -> NDArray[np.float64]:
    array = finite(values, f"{where}: {name}", TraceError)
    if array.shape != shape:
        raise TraceError(f"{where}: {name} has shape {list(array.shape)}; it must be {list(shape)}, as losses have")
    not_negative(array, f"{where}: {name}", TraceError)
    if name == "n_tokens" and (array != np.floor(array)).any():
        odd = float(array[array != np.floor(array)][0])
        raise TraceError(f"{where}: {name} holds {odd:.12g}; they must be whole numbers")
    return array


def _check_sizes(num_layers: Any, num_experts: Any) -> None:
    for name, value in (("num_layers", num_layers), ("num_experts", num_experts)):
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or not 1 <= value <= 1_000_000:
            raise TraceError(f"{name} is {shown(value)}; it must be a whole number from 1 to 1000000")


def _read_info(stored: NDArray[Any], path: Path) -> dict[str, Any]:
    try:
        # NaN and infinite numbers are no JSON: what cannot be written again is not kept.
        info = json.loads(str(stored.item()), parse_constant=lambda _: None, parse_float=_finite_or_none)
    except (ValueError, RecursionError) as reason:
        raise TraceError(f"{path}: metadata is not one JSON text ({shown(str(reason))})") from None
    if not isinstance(info, dict):
        raise TraceError(f"{path}: metadata holds {type(info).__name__}, expected a JSON object")
    return info


def _finite_or_none(text: str) -> float | None:
    number = float(text)
    return number if math.isfinite(number) else None


def table_file(path_or_name: Any) -> Path:
    """Path of a loss table given by path or by the name of a bundled one; TraceError for other kinds and names."""
    if not isinstance(path_or_name, str | os.PathLike):
        raise TraceError(f"a loss table is given by a path or a name, not by {shown(path_or_name)}")
    text = os.fspath(path_or_name)
    if not isinstance(text, str):
        raise TraceError(f"a loss table is given by a path or a name, not by {shown(path_or_name)}")
    if text.endswith(".npz") or "/" in text or os.sep in text or isinstance(path_or_name, os.PathLike):
        return Path(text)
    folder = data_folder("traces")
    bundled = {path.stem: path for path in sorted(folder.glob("*losses*.npz"))}
    if text not in bundled:
        if text and len(text) < 200 and "\0" not in text and Path(text).is_dir():
            raise TraceError(f"{shown(text)}: is a directory, expected an .npz file")
        raise TraceError(
            f"no bundled loss table {shown(text)}; there is {', '.join(bundled) or 'none'}; a file ends in .npz"
        )
    return bundled[text]
