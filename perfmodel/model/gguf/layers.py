"""The tensors of a GGUF file, sorted by layer and part."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from perfmodel.errors import ModelConfigError
from perfmodel.families import Tensor
from perfmodel.gguf_header import shown
from perfmodel.model.gguf.files import GgufTensor
from perfmodel.model.gguf.names import OUTSIDE, PARTS, SUFFIXES, Part
from perfmodel.storage import CLASSES, Format

_LAYER = re.compile(r"blk\.(0|[1-9]\d{0,4})\.(.+)")
_ONE_EXPERT = re.compile(r"(ffn_(?:gate|up|down))\.(0|[1-9]\d{0,4})")
_CLASS_OF: dict[Part, str] = {
    "mixer": "attention",
    "mixer_norm": "norm",
    "feed_forward_norm": "norm",
    "dense": "dense",
    "shared": "shared",
    "router": "router",
    "expert": "expert",
}
#: Axes of a tensor of all experts, the first of which counts them. Files leave out a last axis of 1.
_EXPERT_AXES = {"": 3, ".bias": 2, ".scale": 1, ".input_scale": 1}


@dataclass
class Layer:
    """The tensors of one layer by part and name, and those of one routed expert by name.

    experts : name to the parameters of one expert and the number of experts.
    """

    parts: dict[Part, dict[str, Tensor]] = field(default_factory=dict)
    experts: dict[str, tuple[Tensor, int]] = field(default_factory=dict)

    def part(self, part: Part) -> dict[str, Tensor]:
        return self.parts.setdefault(part, {})

    def norm_params(self, part: Part) -> int:
        return sum(tensor.params for tensor in self.part(part).values())


@dataclass
class Sorted:
    """The tensors of a model.

    layers : its layers. outside : what belongs to no layer, by class and name. formats : for each class the formats
    with their parameters. left_out : bytes of layers behind the last one, and whether they predict further tokens.
    """

    layers: list[Layer]
    outside: dict[str, dict[str, Tensor]]
    formats: dict[str, list[tuple[Format, int]]]
    left_out: int = 0


def sort_tensors(tensors: Iterable[GgufTensor], num_layers: int, extra_layers: int, where: str) -> Sorted:
    """The tensors by layer and part. The last ``extra_layers`` of all layers are for multi-token prediction.

    Raises
    ------
    ModelConfigError : a name is not known, a layer is missing or too many, or experts are incomplete.
    """
    found = Sorted([Layer() for _ in range(num_layers)], {}, {name: [] for name in CLASSES})
    single: dict[tuple[int, str], dict[int, GgufTensor]] = {}
    predicting = extra_layers == 0
    for tensor in tensors:
        what = f"{where}: tensor {shown(tensor.name)}"
        match = _LAYER.fullmatch(tensor.name)
        name, suffix = _split(match[2] if match else tensor.name)
        if match is None:
            if name not in OUTSIDE:
                raise ModelConfigError(f"{what} is not known; allowed: the names that llama.cpp gives to decoders")
            kind: str = OUTSIDE[name]
            found.outside.setdefault(kind, {})[name + suffix] = _plain(name + suffix, tensor)
            found.formats[kind].append((tensor.stored, tensor.params))
            continue
        index = int(match[1])
        if index >= num_layers:
            if index >= num_layers + extra_layers:
                raise ModelConfigError(f"{what} is of layer {index}; allowed: 0 to {num_layers + extra_layers - 1}")
            predicting = predicting or name.startswith("nextn.")
            found.left_out += tensor.size
            continue
        expert = _ONE_EXPERT.fullmatch(name)
        if expert is not None:
            single.setdefault((index, f"{expert[1]}_exps{suffix}"), {})[int(expert[2])] = tensor
            found.formats["expert"].append((tensor.stored, tensor.params))
            continue
        part = PARTS.get(name)
        if part is None:
            raise ModelConfigError(f"{what} is not known; allowed: the names that llama.cpp gives to decoders")
        found.formats[_CLASS_OF[part]].append((tensor.stored, tensor.params))
        if part == "expert":
            found.layers[index].experts[name + suffix] = _stacked(name, suffix, tensor, what)
        else:
            found.layers[index].part(part)[name + suffix] = _plain(name + suffix, tensor)
    if found.left_out and not predicting:
        raise ModelConfigError(
            f"{where}: layers from {num_layers} on have no tensors named nextn; allowed: layers for multi-token "
            f"prediction, for nextn_predict_layers says {extra_layers}"
        )
    for (index, name), experts in single.items():
        found.layers[index].experts[name] = _one_by_one(name, experts, f"{where}: layer {index}")
    for index, layer in enumerate(found.layers):
        if not layer.parts and not layer.experts:
            raise ModelConfigError(f"{where}: no tensor of layer {index}; allowed: all of {num_layers} layers")
    return found


def _split(name: str) -> tuple[str, str]:
    """A name without ``.weight``, and its ending where that is another one."""
    if name.endswith(".weight"):
        return name.removesuffix(".weight"), ""
    for suffix in SUFFIXES[1:]:
        if name.endswith(suffix):
            return name.removesuffix(suffix), suffix
    return name, ""


def _plain(name: str, tensor: GgufTensor) -> Tensor:
    # A convolution has one filter for each channel and is no map from inputs to outputs.
    if "conv" in name and len(tensor.shape) == 2:
        return Tensor(name, (tensor.shape[0], 1, tensor.shape[1]))
    return Tensor(name, tensor.shape)


def _stacked(name: str, suffix: str, tensor: GgufTensor, what: str) -> tuple[Tensor, int]:
    """One expert's share of a tensor of all experts, and how many experts it has."""
    axes = _EXPERT_AXES[suffix]
    shape = tensor.shape if len(tensor.shape) >= axes else (1, *tensor.shape)
    if len(shape) != axes:
        raise ModelConfigError(f"{what} has {len(tensor.shape)} axes; allowed: {axes}, the last for the experts")
    return Tensor(name + suffix, shape[1:] or (1,)), shape[0]


def _one_by_one(name: str, experts: dict[int, GgufTensor], where: str) -> tuple[Tensor, int]:
    """The same from files that hold each expert by itself."""
    shapes = {tensor.shape for tensor in experts.values()}
    if sorted(experts) != list(range(len(experts))) or len(shapes) != 1:
        raise ModelConfigError(
            f"{where}: experts {_first(experts)} of {name} have shapes {shown(sorted(shapes))}; "
            "allowed: experts from 0 up without a gap, all alike"
        )
    return Tensor(name, shapes.pop()), len(experts)


def _first(experts: dict[int, GgufTensor]) -> str:
    numbers = sorted(experts)
    return f"{', '.join(map(str, numbers[:8]))}{', ...' * (len(numbers) > 8)}"
