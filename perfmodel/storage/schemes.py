"""How a quantisation stores one matrix, and which matrices of a network it stores so."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from perfmodel.errors import ModelConfigError
from perfmodel.families import Shape, Tensor
from perfmodel.storage.classes import CLASSES
from perfmodel.storage.formats import Format, mixed
from perfmodel.storage.patterns import MOST_SECONDS, Patterns
from perfmodel.storage.totals import Stored, stored_tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """A way to store a matrix of ``rows`` outputs and ``columns`` inputs.

    name : name of the format. bits : of one weight without what blocks add [bit].
    block : rows and columns that share a scale, None in place of a number for all of them; None where the whole matrix
        has one scale, which is left out. block_bits : scale and zero point of one block [bit].
    column_bits : what every column adds, such as its group in GPTQ [bit].
    compute : number format of the products; empty where weights are unpacked to the precision of the activations.
    """

    name: str
    bits: float
    block: tuple[int | None, int | None] | None = None
    block_bits: float = 0.0
    column_bits: int = 0
    compute: str = ""

    def stored_bits(self, rows: int, columns: int) -> float:
        """Size of a matrix [bit]; blocks at the edges count whole."""
        size = self.bits * rows * columns + self.column_bits * columns
        if self.block is not None:
            high, wide = self.block[0] or rows, self.block[1] or columns
            size += self.block_bits * math.ceil(rows / high) * math.ceil(columns / wide)
        return size


#: Classes of tensors that hold the linear maps of the layers. Routers stay as they are unless they are named.
LAYERS = ("attention", "dense", "shared", "expert")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Which matrices a config stores in another way than the rest of the checkpoint.

    schemes : for the linear maps of a class of tensors that nothing else names; classes that are not in it stay.
    targets : schemes of modules by name, None for the checkpoint's own precision; the first that names one holds.
    kept : modules that stay as they are, whatever else names them. notes : sentences on defaults taken.
    """

    schemes: Mapping[str, Scheme]
    targets: tuple[tuple[Patterns, Scheme | None], ...] = ()
    kept: Patterns
    notes: tuple[str, ...] = ()

    @property
    def compute(self) -> tuple[str, ...]:
        """The number formats of the products, each once, an empty text for that of the activations."""
        named = [scheme for _, scheme in self.targets if scheme is not None]
        return tuple(dict.fromkeys(one.compute for one in (*self.schemes.values(), *named)))


_MOST_QUESTIONS = 100_000  # about layers, tensors and lists of names; real configs ask a few thousand

#: Matrices that are no linear maps, or that every published checkpoint keeps: they are tiny and decide much.
_NEVER = frozenset(
    {
        "A_log",  # decay of a state space, one row for each channel
        "relative_attention_bias",  # a table of T5
        "shared_expert_gate",  # one row
        "weights_proj",  # weights of index heads in sparse attention
        "norm",
    }
)
#: Parts that DeepSeek-V4 keeps in higher precision: hyper-connections and the compressors of its caches.
_NEVER_INSIDE = frozenset({"compressor", "hc_attn", "hc_ffn", "attn_hc", "ffn_hc", "hc_head"})


def is_linear(stored: Stored) -> bool:
    """Whether a tensor is the weight of a linear map that quantisation may pack."""
    parts = stored.tensor.name.split(".")
    return stored.tensor.is_matrix and parts[-1] not in _NEVER and _NEVER_INSIDE.isdisjoint(parts)


def formats_by_class(shape: Shape, plan: Plan, base: Format) -> tuple[dict[str, Format], int]:
    """The format of each class, a mean over its parameters, and how many parameters the plan converts.

    A class without parameters has the format ``base``; a tied head that of the embedding table.
    """
    parts: dict[str, list[tuple[Format, float]]] = {name: [] for name in CLASSES}
    converted = 0.0
    apart = _Layers(shape, plan)
    for stored in stored_tensors(shape):
        if not is_linear(stored):
            parts[stored.kind].append((base, stored.params))
            continue
        for layer, layers in apart.alike(stored.layers):
            for scheme, share in _shares(shape, plan, stored, layer):
                params = share * layers * stored.copies * stored.tensor.params
                parts[stored.kind].append((base if scheme is None else _format(scheme, stored.tensor), params))
                converted += params if scheme is not None else 0
    formats = {name: mixed(found) if any(weight for _, weight in found) else base for name, found in parts.items()}
    if not any(weight for _, weight in parts["head"]):
        formats["head"] = formats["embedding"]
    return formats, round(converted)


def _format(scheme: Scheme, tensor: Tensor) -> Format:
    rows, columns = tensor.shape
    return Format(scheme.name, scheme.stored_bits(rows, columns) / tensor.params)


class _Layers:
    """Layers that no name of a plan tells apart, so that one of them stands for all."""

    def __init__(self, shape: Shape, plan: Plan) -> None:
        self.lists = (plan.kept, *(names for names, _ in plan.targets))
        self._each = shape.encoder_layers > 0
        self._known: dict[tuple[int, ...], list[tuple[int | None, int]]] = {}
        self._asked = 0

    def alike(self, layers: tuple[int, ...]) -> list[tuple[int | None, int]]:
        """One layer of each group, with the number of layers in it."""
        if layers not in self._known:
            groups: dict[object, list[int | None]] = {}
            for layer in layers or (None,):
                key = layer if self._each else tuple(names.same_for(layer) for names in self.lists)
                groups.setdefault(key, []).append(layer)
            self._known[layers] = [(group[0], len(group)) for group in groups.values()]
        found = self._known[layers]
        self._asked += len(found) * len(self.lists)
        if self._asked > _MOST_QUESTIONS or sum(names.seconds for names in self.lists) > MOST_SECONDS:
            raise ModelConfigError(
                f"{self.lists[-1].where}: names differ in too many layers to be matched in reasonable time; "
                "allowed: fewer lists of names"
            )
        return found


def _shares(shape: Shape, plan: Plan, stored: Stored, layer: int | None) -> list[tuple[Scheme | None, float]]:
    """How a tensor of one layer is stored, with shares of its copies that sum to 1."""
    stack = ""
    if shape.encoder_layers and layer is not None:
        stack = "encoder" if layer < shape.encoder_layers else "decoder"
        layer -= shape.encoder_layers if stack == "decoder" else 0
    name = stored.tensor.name
    kept = plan.kept.share(name, layer, stored.copies, stack)
    found: list[tuple[Scheme | None, float]] = [(None, kept)]
    left = 1.0 - kept
    for names, scheme in plan.targets:
        if left <= 0:
            break
        share = min(left, names.share(name, layer, stored.copies, stack))
        found.append((scheme, share))
        left -= share
    found.append((plan.schemes.get(stored.kind), left))
    return [(scheme, share) for scheme, share in found if share > 0]
