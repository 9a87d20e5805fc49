"""Quantisation configs of the kinds that Transformers packs itself: FP8, MXFP4, NVFP4, GPTQ, AWQ, bitsandbytes, HQQ.

Each function reads one kind and returns which matrices are stored how; keys and defaults are those of the config
classes of Transformers.
"""

import dataclasses
from collections.abc import Mapping

from perfmodel.families import ConfigKeys
from perfmodel.storage.given import check_known, flag, inner, names, tables, text, whole
from perfmodel.storage.modelopt import nvfp4, quantized_layers
from perfmodel.storage.patterns import Patterns
from perfmodel.storage.schemes import LAYERS, Plan, Scheme

MXFP4 = Scheme(name="mxfp4", bits=4, block=(1, 32), block_bits=8)
_GROUP_SIZES = (-1, 8, 16, 32, 64, 128, 256, 512, 1024)  # -1 for one group a row
_FP8_KEYS = (
    "activation_scheme",
    "fmt",
    "weight_block_size",
    "scale_fmt",
    "modules_to_not_convert",
    "ignored_layers",
)
_GPTQ_KEYS = (
    "dynamic",
    "lm_head",
    "modules_in_block_to_quantize",
    "format",
    "checkpoint_format",
    "pack_dtype",
    "static_groups",
    "act_group_aware",
    "is_marlin_format",
    "block_name_to_quantize",
    "module_name_preceding_first_block",
    "cache_block_outputs",
)
_BITS = (2, 3, 4, 5, 6, 7, 8)


def _kept(table: ConfigKeys, *keys: str) -> Patterns:
    return Patterns(names(table, *keys), f"{table.where}: {' or '.join(keys)}")


def _for_layers(scheme: Scheme) -> Mapping[str, Scheme]:
    return dict.fromkeys(LAYERS, scheme)


def fp8(table: ConfigKeys, config: ConfigKeys) -> Plan:
    """FP8 in blocks with a float32 scale, or with one scale for a matrix where ``weight_block_size`` is null.

    The head stays as it is. ``expert_dtype`` ``fp4``, here or in the config, stores the routed experts as MXFP4.
    ModelOpt writes its mix of FP8 blocks and NVFP4 experts of DeepSeek-V4 under this kind too, with the modules that it
    converted in ``quantized_layers``.
    """
    known = [*_FP8_KEYS, "modules_to_convert", "expert_dtype", "activation_scale_ub"]
    mix = table.values.get("quant_algo") is not None or table.values.get("quantized_layers") is not None
    if mix:
        text(table, "quant_algo", ("mixed_precision",))
        known += ["quant_algo", "moe_quant_algo", "quantized_layers", "config_groups", "group_size", "ignore"]
    check_known(table, "fp8", known)
    text(table, "activation_scheme", ("dynamic", "static"), "dynamic")
    text(table, "scale_fmt", ("float", "ue8m0"), "float")
    notes: tuple[str, ...] = ()
    if "weight_block_size" not in table.values:
        high, wide = 128, 128
        notes = ("weight_block_size = [128, 128] (of FP8 without this key)",)
    elif table.values["weight_block_size"] is None:
        high = wide = 0
    else:
        sizes = table.values["weight_block_size"]
        if not isinstance(sizes, list | tuple) or len(sizes) != 2 or not all(_is_size(one) for one in sizes):
            raise table.error("weight_block_size", "two integers from 1 to 65536, or null")
        high, wide = sizes
    name = "fp8" if not high else "fp8_block128" if high == wide == 128 else f"fp8_block{high}x{wide}"
    scheme = Scheme(name=name, bits=8, block=(high, wide) if high else None, block_bits=32, compute="fp8")
    schemes = dict(_for_layers(scheme))
    experts = table if table.values.get("expert_dtype") is not None else config
    if text(experts, "expert_dtype", ("fp8", "fp4"), "fp8") == "fp4":
        schemes["expert"] = dataclasses.replace(MXFP4, compute="fp8")
    converted = names(table, "modules_to_convert")
    targets = ((Patterns(converted, f"{table.where}: modules_to_convert"), scheme),) if converted else ()
    return Plan(
        schemes=schemes,
        targets=(*(quantized_layers(table) if mix else ()), *targets),
        kept=_kept(table, "modules_to_not_convert", "ignored_layers"),
        notes=notes,
    )


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= 65_536


def fbgemm_fp8(table: ConfigKeys) -> Plan:
    """FP8 with a float32 scale for each row."""
    check_known(table, "fbgemm_fp8", ("activation_scale_ub", "modules_to_not_convert"))
    scheme = Scheme(name="fp8", bits=8, block=(1, None), block_bits=32, compute="fp8")
    return Plan(schemes=_for_layers(scheme), kept=_kept(table, "modules_to_not_convert"))


def mxfp8(table: ConfigKeys) -> Plan:
    """FP8 with an 8-bit exponent for 32 weights."""
    check_known(
        table,
        "mxfp8",
        ("activation_scheme", "fmt", "weight_block_size", "scale_fmt", "modules_to_not_convert", "ignored_layers"),
    )
    if table.values.get("weight_block_size", [1, 32]) not in ([1, 32], (1, 32)):
        raise table.error("weight_block_size", "[1, 32]")
    scheme = Scheme(name="mxfp8", bits=8, block=(1, 32), block_bits=8, compute="mxfp8")
    return Plan(schemes=_for_layers(scheme), kept=_kept(table, "modules_to_not_convert", "ignored_layers"))


def mxfp4(table: ConfigKeys) -> Plan:
    """MXFP4, for routed experts only; their biases stay as they are."""
    check_known(table, "mxfp4", ("modules_to_not_convert",))
    return Plan(schemes={"expert": MXFP4}, kept=_kept(table, "modules_to_not_convert"))


def nvfp4_linear(table: ConfigKeys) -> Plan:
    """NVFP4 of weights and activations."""
    check_known(table, "nvfp4", ("modules_to_not_convert",))
    return Plan(schemes=_for_layers(nvfp4(16, "nvfp4")), kept=_kept(table, "modules_to_not_convert"))


def _grouped(bits: int, size: int, *, zero: bool, index: bool = False) -> Scheme:
    """Integers with a float16 scale, and a zero point of as many bits as a weight, for ``size`` inputs; -1 for all."""
    name = f"int{bits}" + (f"_g{size}" if size > 0 else "") + ("_zero" if zero else "")
    width = size if size > 0 else None
    return Scheme(name=name, bits=bits, block=(1, width), block_bits=16 + bits * zero, column_bits=32 * index)


def gptq(table: ConfigKeys) -> Plan:
    """GPTQ: a scale and a zero point for each group, and the group of each input as 32 bits.

    ``dynamic`` gives modules, by regular expressions, other numbers (``+:``) or leaves them as they are (``-:``); the
    first that matches holds. ``lm_head`` true packs the head too.
    """
    numbers = ("bits", "group_size", "sym", "desc_act")
    check_known(table, "gptq", (*numbers, *_GPTQ_KEYS))
    for key in ("format", "checkpoint_format"):
        text(table, key, ("gptq", "gptq_v2"), "gptq")

    def scheme(one: ConfigKeys) -> Scheme:
        merged = ConfigKeys({**table.values, **one.values}, one.where)
        return _grouped(whole(merged, "bits", _BITS), whole(merged, "group_size", _GROUP_SIZES), zero=True, index=True)

    targets: list[tuple[Patterns, Scheme | None]] = []
    for name, one in tables(table, "dynamic", 100).items():
        check_known(one, "gptq: dynamic", numbers)
        expression = name.removeprefix("+:").removeprefix("-:")
        patterns = Patterns([f"re:{expression}"], f"{table.where}: dynamic")
        targets.append((patterns, None if name.startswith("-:") else scheme(one)))
    default = scheme(table)
    schemes = dict(_for_layers(default))
    if flag(table, "lm_head", False):
        schemes["head"] = default
    listed = table.values.get("modules_in_block_to_quantize")
    if listed is not None:
        if not isinstance(listed, list | tuple):
            raise table.error("modules_in_block_to_quantize", "a list of lists of names of modules")
        flat = [name for part in listed for name in (part if isinstance(part, list | tuple) else [part])]
        inside = names(ConfigKeys({"modules_in_block_to_quantize": flat}, table.where), "modules_in_block_to_quantize")
        targets.append((Patterns(inside, f"{table.where}: modules_in_block_to_quantize"), default))
        schemes = {name: one for name, one in schemes.items() if name == "head"}
    return Plan(schemes=schemes, targets=tuple(targets), kept=Patterns((), table.where))


def awq(table: ConfigKeys) -> Plan:
    """AWQ: 4 bits with a scale and a zero point for each group; zero points are stored whether used or not."""
    check_known(
        table,
        "awq",
        (
            "bits",
            "w_bit",
            "group_size",
            "q_group_size",
            "zero_point",
            "version",
            "format",
            "modules_to_not_convert",
            "modules_to_fuse",
            "backend",
        ),
    )
    bits = whole(table, "w_bit" if table.values.get("bits") is None else "bits", (4, 8))
    size = whole(table, "q_group_size" if table.values.get("group_size") is None else "group_size", _GROUP_SIZES)
    scheme = _grouped(bits, size, zero=True)
    return Plan(schemes=_for_layers(scheme), kept=_kept(table, "modules_to_not_convert"))


def auto_round(table: ConfigKeys) -> Plan:
    """AutoRound: packed as GPTQ or AWQ; ``extra_config`` gives single modules other bits, 16 for none."""
    numbers = ("bits", "group_size", "sym", "data_type")
    known = (
        *numbers,
        "packing_format",
        "block_name_to_quantize",
        "extra_config",
        "quant_block_list",
        "to_quant_block_names",
    )
    check_known(table, "auto-round", (*known, "batch_size", "seqlen", "autoround_version", "low_gpu_mem_usage"))
    text(table, "data_type", ("int",), "int")
    text(table, "packing_format", ("auto_round:auto_gptq", "auto_round:gptq", "auto_round:auto_awq", "auto_round:awq"))
    listed: dict[Scheme | None, list[str]] = {}
    for name, one in tables(table, "extra_config").items():
        check_known(one, "auto-round: extra_config", numbers)
        merged = ConfigKeys({**table.values, **one.values}, one.where)
        bits = whole(merged, "bits", (*_BITS, 16))
        scheme = None if bits == 16 else _grouped(bits, whole(merged, "group_size", _GROUP_SIZES), zero=True)
        listed.setdefault(scheme, []).append(name)
    targets = tuple((Patterns(modules, f"{table.where}: extra_config"), scheme) for scheme, modules in listed.items())
    scheme = _grouped(whole(table, "bits", _BITS), whole(table, "group_size", _GROUP_SIZES), zero=True)
    return Plan(schemes=_for_layers(scheme), targets=targets, kept=Patterns((), table.where))


def bitsandbytes(table: ConfigKeys, compute_names: Mapping[str, str]) -> Plan:
    """8-bit integers with a scale for each row, or 4-bit NF4 or FP4 with a float32 maximum of 64 weights.

    Double quantisation stores that maximum in 8 bits, with a float32 scale for 256 of them. The head stays as it is.
    """
    four = ("bnb_4bit_quant_type", "bnb_4bit_use_double_quant", "bnb_4bit_compute_dtype", "bnb_4bit_quant_storage")
    eight = (
        "llm_int8_skip_modules",
        "llm_int8_has_fp16_weight",
        "llm_int8_threshold",
        "llm_int8_enable_fp32_cpu_offload",
    )
    check_known(
        table, "bitsandbytes", (*four, *eight, "load_in_4bit", "load_in_8bit", "_load_in_4bit", "_load_in_8bit")
    )
    kept = _kept(table, "llm_int8_skip_modules")
    in_four, in_eight = flag(table, "load_in_4bit", False), flag(table, "load_in_8bit", False)
    if in_four == in_eight:
        raise table.error("load_in_4bit", "true, or load_in_8bit true, and not both")
    if in_eight:
        if flag(table, "llm_int8_has_fp16_weight", False):
            raise table.error("llm_int8_has_fp16_weight", "false, for then weights are stored in 16 bits")
        return Plan(
            schemes=_for_layers(Scheme(name="int8", bits=8, block=(1, None), block_bits=32, compute="int8")), kept=kept
        )
    kind = text(table, "bnb_4bit_quant_type", ("nf4", "fp4"), "fp4")
    double = flag(table, "bnb_4bit_use_double_quant", False)
    compute = text(table, "bnb_4bit_compute_dtype", tuple(compute_names), "float32")
    scheme = Scheme(
        name=kind + "_double" * double,
        bits=4,
        block=(1, 64),
        block_bits=8 + 32 / 256 if double else 32,
        compute=compute_names[compute],
    )
    return Plan(schemes=_for_layers(scheme), kept=kept)


def hqq(table: ConfigKeys) -> Plan:
    """HQQ: integers with a float16 scale and zero point for each group; 3-bit weights are packed ten in 32 bits."""
    check_known(table, "hqq", ("quant_config", "skip_modules"))
    outer = inner(table, "quant_config")
    params = None if outer is None else inner(outer, "weight_quant_params")
    if outer is None or params is None:
        raise table.error("quant_config", "an object with weight_quant_params that holds for every module")
    check_known(outer, "hqq: quant_config", ("weight_quant_params",))
    check_known(params, "hqq: weight_quant_params", ("nbits", "group_size", "axis", "round_zero", "view_as_float"))
    bits = whole(params, "nbits", (1, 2, 3, 4, 8))
    size = whole(params, "group_size", range(1, 65_537))
    scheme = Scheme(name=f"hqq{bits}_g{size}", bits=3.2 if bits == 3 else bits, block=(1, size), block_bits=32)
    return Plan(schemes=_for_layers(scheme), kept=_kept(table, "skip_modules"))
