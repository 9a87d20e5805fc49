"""The families that are known: a declaration of keys and a reader each, by ``model_type``."""

import dataclasses
import difflib
import functools
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from perfmodel.families.keys import ConfigKeys, Declared, one_line
from perfmodel.families.network import Shape


@dataclass(frozen=True)
class Family:
    """One ``model_type``.

    declared : its required and optional keys. read : from the keys to the shape.
    """

    declared: Declared
    read: Callable[[ConfigKeys], Shape]


@dataclass(frozen=True)
class Wrapper:
    """A ``model_type`` whose language model is described in an object inside.

    inside : the key of that object. family : the ``model_type`` of its reader where the object names none.
    """

    inside: str
    family: str | None = None


#: The modules with a mapping ``FAMILIES``, one a publisher or architecture.
_MODULES = (
    "ai21",
    "arcee",
    "baidu",
    "databricks",
    "decilm",
    "deepseek",
    "deepseek_v4",
    "encoder_decoder",
    "gemma",
    "ibm",
    "inclusion",
    "lg",
    "liquid",
    "llama",
    "llama4",
    "microsoft",
    "minimax",
    "mixtral",
    "moonshot",
    "nvidia",
    "olmo",
    "openai",
    "qwen",
    "qwen_next",
    "rednote",
    "snowflake",
    "sparse",
    "stepfun",
    "tencent",
    "xai",
    "xiaomi",
    "zhipu",
)


@functools.cache
def families() -> Mapping[str, Family | Wrapper]:
    """Every supported ``model_type``."""
    found: dict[str, Family | Wrapper] = {}
    for name in _MODULES:
        module = importlib.import_module(f"perfmodel.families.{name}")
        assert not found.keys() & module.FAMILIES.keys(), name
        found |= module.FAMILIES
    return MappingProxyType(found)


@dataclass(frozen=True)
class Reading:
    """A config as it was understood.

    family : the ``model_type`` whose reader was used. shape : what it says. defaults : the defaults taken, a text each.
    """

    family: str
    shape: Shape
    defaults: tuple[str, ...]


#: What may stand beside the object of the language model, and holds for it where it says nothing itself.
_SHARED_KEYS = ("tie_word_embeddings", "dtype", "torch_dtype", "quantization_config")


def language_model(config: ConfigKeys) -> tuple[str, ConfigKeys]:
    """The ``model_type`` of the reader and the keys of the language model, which may stand in an object inside.

    Raises
    ------
    ModelConfigError : the family is unknown, or the two levels disagree.
    """
    known = families()
    name = config.values.get("model_type")
    if not isinstance(name, str) or name not in known:
        close = difflib.get_close_matches(name[:80], known, n=3) if isinstance(name, str) else []
        hint = f"; close by name, and nothing is guessed: {', '.join(close)}" if close else ""
        raise config.error(
            "model_type", f"one of the {len(known)} that 'perfmodel model families' lists, such as mixtral{hint}"
        )
    entry = known[name]
    if isinstance(entry, Family):
        return name, config
    inner = config.table(entry.inside, "an object, the config of the language model")
    values = dict(inner.values)
    for key in _SHARED_KEYS:
        outer = config.values.get(key)
        if outer is None:
            continue
        if values.get(key) is None:
            values[key] = outer
        elif key == "tie_word_embeddings":
            values[key] = outer  # the class of the whole model ties, whatever that of its text part would do
        elif values[key] != outer and key != "quantization_config":
            raise inner.error(key, f"{one_line(outer)}, as the same key outside says")
    if values.get("model_type") is None and entry.family is not None:
        values["model_type"] = entry.family
    inside = values.get("model_type")
    if not isinstance(inside, str) or not isinstance(known.get(inside), Family):
        raise inner.error("model_type", "one of those that 'perfmodel model families' lists")
    return inside, ConfigKeys(values, inner.where)


def read_shape(config: ConfigKeys) -> Reading:
    """The shape that a config describes, by the reader of its ``model_type``.

    Raises
    ------
    ModelConfigError : the family is unknown, a key is missing or impossible, or one speaks of experts and is not
        understood.
    """
    name, inner = language_model(config)
    family = families()[name]
    assert isinstance(family, Family)
    keys = ConfigKeys(inner.values, inner.where, family.declared)
    keys.check_declared()
    shape = family.read(keys)
    _check_layer_types(keys, shape)
    keys.check_spelling()
    keys.check_understood(name, bool(shape.moe_layers))
    beside = tuple(f"{key.removesuffix('_config')} left out ({key})" for key in config.values if _is_tower(config, key))
    return Reading(name, dataclasses.replace(shape, left_out=(*shape.left_out, *beside)), tuple(keys.defaults.values()))


#: What a list of kinds of layers may call the kinds that readers find by other keys.
_CALLED = MappingProxyType({"sliding": ("sliding", "chunk"), "linear": ("linear",), "mamba": ("mamba",)})


def _check_layer_types(keys: ConfigKeys, shape: Shape) -> None:
    """Refuse lists of kinds of layers that the reader did not need and that say something else than it found."""
    layers = shape.num_layers
    if keys.has("mlp_layer_types"):
        kinds = keys.kinds("mlp_layer_types", layers, "dense", "sparse", "moe", "hash_moe")
        if tuple(layer for layer, kind in enumerate(kinds) if kind != "dense") != shape.moe_layers:
            raise keys.error("mlp_layer_types", "the layers that have experts by the other keys")
    if "layer_types" in keys.read or keys.values.get("layer_types") is None:
        return
    allowed = f"a list of {layers} texts that agree with the other keys"
    texts = keys.sequence("layer_types", allowed)
    if len(texts) != layers:
        raise keys.error("layer_types", allowed)
    for kind in shape.attention:
        words = next((said for name, said in _CALLED.items() if kind.name.startswith(name)), None)
        others = [word for said in _CALLED.values() for word in said]
        for layer in kind.layers:
            text = texts[layer]
            if not isinstance(text, str):
                raise keys.error("layer_types", allowed)
            if kind.name == "none":
                continue
            found = any(word in text for word in words or others)
            if found != (words is not None):
                raise keys.error("layer_types", f"{allowed}: layer {layer} has {kind.name} attention by these")


def _is_tower(config: ConfigKeys, key: str) -> bool:
    """Whether a key describes an encoder of something other than text, whose parameters are not counted."""
    towers = ("vision_config", "audio_config", "projector_config", "speech_config", "vision_model_config")
    return key in towers and isinstance(config.values[key], Mapping)
