"""Quantisation configs of compressed-tensors (LLM Compressor): groups of modules, each with its own numbers."""

import re

from perfmodel.families import ConfigKeys
from perfmodel.storage.given import check_known, flag, inner, names, tables, text, whole
from perfmodel.storage.modelopt import nvfp4
from perfmodel.storage.patterns import Patterns
from perfmodel.storage.schemes import LAYERS, Plan, Scheme

_FORMATS = (
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mxfp8-quantized",
    "mixed-precision",
)
_DTYPE_BITS = {
    **dict.fromkeys(("float32", "int32"), 32),
    **dict.fromkeys(("float16", "bfloat16"), 16),
    **dict.fromkeys(("uint8", "int8", "float8_e4m3fn", "float8_e8m0fnu"), 8),
}
_SIZES = range(1, 65_537)
_WEIGHT_KEYS = (
    "num_bits",
    "type",
    "strategy",
    "group_size",
    "block_structure",
    "symmetric",
    "dynamic",
    "actorder",
    "scale_dtype",
    "zp_dtype",
)


def compressed_tensors(table: ConfigKeys) -> Plan:
    """Groups with the modules they are for (``targets``) and how weights and activations are stored.

    The target ``Linear`` is every linear map that no name in another group takes, the head included, unless ``ignore``
    lists it. ``Embedding`` is the embedding table.
    """
    known = ("config_groups", "format", "ignore", "quantization_status", "global_compression_ratio", "sparsity_config")
    check_known(table, "compressed-tensors", (*known, "version", "transform_config"))
    if table.values.get("transform_config"):
        raise table.error("transform_config", "none, for its matrices are not counted")
    sparsity = inner(table, "sparsity_config")
    if sparsity is not None and sparsity.values:
        text(sparsity, "format", ("dense",))
    stored = text(table, "format", _FORMATS)
    schemes: dict[str, Scheme] = {}
    targets: list[tuple[Patterns, Scheme | None]] = []
    groups = tables(table, "config_groups", 100)
    if not groups:
        raise table.error("config_groups", "an object of groups, each with targets and weights")
    for group in groups.values():
        check_known(group, "compressed-tensors: config_groups", ("targets", "weights", "format", "output_activations"))
        weights = inner(group, "weights")
        if weights is None:
            continue
        scheme = _scheme(weights, text(group, "format", _FORMATS, stored), _activations(group))
        wanted = names(group, "targets")
        if not wanted:
            raise group.error("targets", "a list of names of modules, of regular expressions (re:...), or Linear")
        modules: list[str] = []
        for target in wanted:
            if target == "Linear":
                schemes |= dict.fromkeys((*LAYERS, "head"), scheme)
            elif target == "Embedding":
                schemes["embedding"] = scheme
            elif re.fullmatch(r"[A-Z]\w*", target):
                raise group.error("targets", "names of modules, regular expressions (re:...), Linear or Embedding")
            else:
                modules.append(target)
        if modules:
            targets.append((Patterns(modules, f"{group.where}: targets"), scheme))
    return Plan(
        schemes=schemes, targets=tuple(targets), kept=Patterns(names(table, "ignore"), f"{table.where}: ignore")
    )


def _activations(group: ConfigKeys) -> str:
    """The number format of the products: that of the activations, empty where these are not quantised."""
    given = inner(group, "input_activations")
    if given is None:
        return ""
    bits = whole(given, "num_bits", (4, 8))
    kind = text(given, "type", ("int", "float"))
    if bits == 8:
        narrow = given.values.get("group_size") == 32
        return "int8" if kind == "int" else "mxfp8" if narrow else "fp8"
    if kind == "int":
        return "int4"
    return "mxfp4" if given.values.get("group_size") == 32 else "nvfp4"


def _scheme(weights: ConfigKeys, stored: str, compute: str) -> Scheme:
    check_known(weights, "compressed-tensors: weights", _WEIGHT_KEYS)
    bits = whole(weights, "num_bits", (2, 3, 4, 5, 6, 7, 8))
    kind = text(weights, "type", ("int", "float"), "int")
    if kind == "float" and bits not in (4, 8):
        raise weights.error("num_bits", "4 or 8 for type float")
    if flag(weights, "dynamic", False):
        raise weights.error("dynamic", "false, for weights are stored")
    if stored == "nvfp4-pack-quantized":
        _is(weights, "num_bits", bits, 4)
        return nvfp4(whole(weights, "group_size", _SIZES, 16), compute)
    if stored in ("mxfp4-pack-quantized", "mxfp8-quantized"):
        _is(weights, "num_bits", bits, 4 if "4" in stored else 8)
        size = whole(weights, "group_size", _SIZES, 32)
        return Scheme(name=stored[:5], bits=bits, block=(1, size), block_bits=8, compute=compute)
    if kind == "float" and bits == 4:
        raise weights.error(
            "type", "int with this format; float of 4 bits is nvfp4-pack-quantized or mxfp4-pack-quantized"
        )
    if stored == "mixed-precision":
        raise weights.error("num_bits", "a format in each group, where the format of all is mixed-precision")
    packed = stored == "pack-quantized"
    symmetric = flag(weights, "symmetric", True)
    block, label = _block(weights)
    # Packed weights are whole numbers of 32 bits; other integers and FP8 have a byte each.
    width = 32 / (32 // bits) if packed else 8
    zero = 0 if symmetric else bits if packed else 8
    name = (f"int{bits}" if packed else "int8" if kind == "int" else "fp8") + label + ("" if symmetric else "_zero")
    by_group = weights.values.get("actorder") in ("group", "dynamic", True)
    return Scheme(
        name=name,
        bits=width,
        block=block,
        block_bits=_bits_of(weights, "scale_dtype") + zero,
        column_bits=32 * by_group,
        compute=compute,
    )


def _is(weights: ConfigKeys, key: str, found: int, wanted: int) -> None:
    if found != wanted:
        raise weights.error(key, f"{wanted} with this format")


def _bits_of(weights: ConfigKeys, key: str) -> int:
    """Bits of the type of scales; they are stored in the 16 bits of the model unless the config says otherwise."""
    found = weights.values.get(key)
    if found is None:
        return 16
    bits = _DTYPE_BITS.get(found.removeprefix("torch.")) if isinstance(found, str) else None
    if bits is None:
        raise weights.error(key, f"one of {', '.join(_DTYPE_BITS)}")
    return bits


def _block(weights: ConfigKeys) -> tuple[tuple[int | None, int | None] | None, str]:
    """What shares a scale, and how the name of the format says so."""
    size = weights.values.get("group_size")
    default = "group" if isinstance(size, int) and size > 0 else "channel" if size == -1 else "tensor"
    strategy = text(weights, "strategy", ("tensor", "channel", "group", "block"), default)
    if strategy == "tensor":
        return None, ""
    if strategy == "channel":
        return (1, None), ""
    if strategy == "group":
        wide = whole(weights, "group_size", _SIZES)
        return (1, wide), f"_g{wide}"
    given = weights.values.get("block_structure")
    if isinstance(given, str) and re.fullmatch(r"[0-9]{1,5}x[0-9]{1,5}", given):
        given = [int(side) for side in given.split("x")]
    if not isinstance(given, list | tuple) or len(given) != 2 or not all(type(side) is int for side in given):
        raise weights.error("block_structure", "two sizes, as [128, 128] or 128x128")
    high, wide = given
    if high not in _SIZES or wide not in _SIZES:
        raise weights.error("block_structure", f"two sizes from 1 to {_SIZES[-1]}")
    return (high, wide), "_block128" if high == wide == 128 else f"_block{high}x{wide}"
