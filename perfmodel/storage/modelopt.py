"""Quantisation configs of NVIDIA ModelOpt, in ``config.json`` or in a ``hf_quant_config.json`` beside it."""

from collections.abc import Mapping

from perfmodel.errors import ModelConfigError
from perfmodel.families import ConfigKeys, one_line
from perfmodel.storage.given import check_known, flag, inner, names, tables, whole
from perfmodel.storage.patterns import Patterns
from perfmodel.storage.schemes import LAYERS, Plan, Scheme

_GROUP_SIZES = (16, 32, 64, 128, 256)


def nvfp4(group: int, compute: str) -> Scheme:
    """E2M1 weights with an FP8 scale for each group; the float32 scale of the matrix is left out."""
    return Scheme(name="nvfp4", bits=4, block=(1, group), block_bits=8, compute=compute)


def _fp8(compute: str, block: tuple[int | None, int | None] | None = None) -> Scheme:
    name = "fp8_block128" if block == (128, 128) else "fp8"
    return Scheme(name=name, bits=8, block=block, block_bits=32, compute=compute)


def _int4(group: int, compute: str, *, scaled_inputs: bool) -> Scheme:
    """4-bit integers with a float16 scale for each group, and one for each input where AWQ scales these."""
    return Scheme(
        name=f"int4_g{group}",
        bits=4,
        block=(1, group),
        block_bits=16,
        column_bits=16 * scaled_inputs,
        compute=compute,
    )


def _scheme(table: ConfigKeys) -> Scheme:
    """What the ``quant_algo`` of a table means; its group size is read where the algorithm has one."""

    def group(default: int) -> int:
        return whole(table, "group_size", _GROUP_SIZES, default)

    found = table.values.get("quant_algo")
    algo = found.upper() if isinstance(found, str) else ""
    scaled = flag(table, "pre_quant_scale", False)
    if algo in ("NVFP4", "NVFP4_AWQ"):
        return nvfp4(group(16), "nvfp4")
    known = {
        "FP8": lambda: _fp8("fp8"),
        "FP8_PER_CHANNEL_PER_TOKEN": lambda: _fp8("fp8", (1, None)),
        "FP8_PB_REAL": lambda: _fp8("fp8", (128, 128)),
        "FP8_PB_WO": lambda: _fp8("", (128, 128)),
        "W4A16_NVFP4": lambda: nvfp4(group(16), ""),
        "W4A8_NVFP4_FP8": lambda: nvfp4(group(32), "fp8"),
        "MXFP8": lambda: Scheme(name="mxfp8", bits=8, block=(1, 32), block_bits=8, compute="mxfp8"),
        "MXFP4": lambda: Scheme(name="mxfp4", bits=4, block=(1, 32), block_bits=8, compute="mxfp4"),
        "W4A8_MXFP4_FP8": lambda: Scheme(name="mxfp4", bits=4, block=(1, 32), block_bits=8, compute="fp8"),
        "W4A16_AWQ": lambda: _int4(group(128), "", scaled_inputs=scaled),
        "INT4_AWQ": lambda: _int4(group(128), "", scaled_inputs=scaled),
        "W4A8_AWQ": lambda: _int4(group(128), "fp8", scaled_inputs=scaled),
        "INT8_SQ": lambda: Scheme(name="int8", bits=8, block=(1, None), block_bits=32, compute="int8"),
    }
    if algo not in known:
        raise table.error(
            "quant_algo", f"one of NVFP4, NVFP4_AWQ, {', '.join(known)}, or MIXED_PRECISION with quantized_layers"
        )
    return known[algo]()


def quantized_layers(table: ConfigKeys) -> tuple[tuple[Patterns, Scheme], ...]:
    """The schemes of the modules listed in ``quantized_layers``, one entry for each scheme."""
    allowed = "an object that gives the quant_algo of each module"
    listed = table.values.get("quantized_layers")
    if not isinstance(listed, Mapping) or not listed:
        raise table.error("quantized_layers", allowed)
    where = f"{table.where}: quantized_layers"
    listing: dict[tuple[object, ...], list[str]] = {}  # a list has thousands of entries and few that differ
    for name, given in listed.items():
        entries = tuple(given.values()) if isinstance(given, Mapping) else (given,)
        plain = all(isinstance(entry, str | int | None) for entry in entries)
        if not (isinstance(name, str) and isinstance(given, Mapping) and plain):
            raise ModelConfigError(f"{where}: {one_line(name)} is {one_line(given)}; allowed: {allowed}")
        listing.setdefault((*given, *entries), []).append(name)
    schemes: dict[Scheme, list[str]] = {}
    for modules in listing.values():
        one = ConfigKeys(listed[modules[0]], f"{where}: {one_line(modules[0])}")
        check_known(
            one, "modelopt: quantized_layers", ("quant_algo", "group_size", "has_zero_point", "pre_quant_scale")
        )
        schemes.setdefault(_scheme(one), []).extend(modules)
    return tuple((Patterns(modules, where), scheme) for scheme, modules in schemes.items())


def modelopt(table: ConfigKeys) -> Plan:
    """One ``quant_algo`` for every linear map that is not excluded, or ``MIXED_PRECISION`` with the modules listed.

    ModelOpt excludes the head and the routers by itself and lists the head; a head that is not listed is converted.
    """
    known = ("quant_algo", "ignore", "exclude_modules", "group_size", "quantized_layers", "config_groups")
    check_known(table, "modelopt", (*known, "has_zero_point", "pre_quant_scale", "moe_quant_algo"))
    kept = Patterns(names(table, "ignore", "exclude_modules"), f"{table.where}: ignore or exclude_modules")
    algo = table.values.get("quant_algo")
    if isinstance(algo, str) and algo.upper() == "MIXED_PRECISION":
        return Plan(schemes={}, targets=quantized_layers(table), kept=kept)
    if table.values.get("quantized_layers"):
        raise table.error("quant_algo", "MIXED_PRECISION, for quantized_layers lists modules")
    scheme = _scheme(table)
    for group in tables(table, "config_groups").values():
        weights = inner(group, "weights")
        if weights is not None and weights.values.get("num_bits", scheme.bits) != scheme.bits:
            raise weights.error("num_bits", f"{scheme.bits:g}, as quant_algo {one_line(algo)} says")
    return Plan(schemes=dict.fromkeys((*LAYERS, "head"), scheme), kept=kept)
