"""From the keys ``dtype`` and ``quantization_config`` of a config to the stored precision of each class of tensors.

What stays at the precision of the checkpoint, whatever the kind: biases and other vectors, norms, convolutions, routers
and the embedding table unless a config names them, and the head unless a config converts it. Scales of whole matrices,
and activation scales, are left out.

The compute format is that of the activations: ``fp8``, ``nvfp4``, ``int8`` ... where a config quantises these, and that
of the checkpoint or of its compute dtype where weights are unpacked for every product (GPTQ, AWQ, MXFP4, NF4 ...).
Formats that a config mixes are joined by ``+``.
"""

from types import MappingProxyType

from perfmodel.errors import ModelConfigError
from perfmodel.families import ConfigKeys, Shape, one_line
from perfmodel.storage import packed
from perfmodel.storage.classes import CLASSES, Storage, of_classes
from perfmodel.storage.compressed import compressed_tensors
from perfmodel.storage.formats import BFLOAT16, FORMATS, Format
from perfmodel.storage.given import inner
from perfmodel.storage.modelopt import modelopt
from perfmodel.storage.schemes import Plan, formats_by_class

#: The precisions of checkpoints that are not quantised.
_DTYPES = MappingProxyType(
    {
        "bfloat16": "bfloat16",
        "bf16": "bfloat16",
        "float16": "float16",
        "fp16": "float16",
        "half": "float16",
        "float32": "float32",
        "fp32": "float32",
        "float": "float32",
        "float64": "float64",
    }
)
_METHODS = MappingProxyType(
    {
        "fbgemm_fp8": packed.fbgemm_fp8,
        "mxfp8": packed.mxfp8,
        "mxfp4": packed.mxfp4,
        "nvfp4": packed.nvfp4_linear,
        "gptq": packed.gptq,
        "gptq_marlin": packed.gptq,
        "awq": packed.awq,
        "awq_marlin": packed.awq,
        "auto-round": packed.auto_round,
        "intel/auto-round": packed.auto_round,
        "hqq": packed.hqq,
        "compressed-tensors": compressed_tensors,
        "modelopt": modelopt,
    }
)


def base_format(config: ConfigKeys) -> tuple[Format, tuple[str, ...]]:
    """The precision of what is not quantised, with a note where the config names none: bfloat16."""
    found = {key: config.values[key] for key in ("dtype", "torch_dtype") if config.values.get(key) is not None}
    read: dict[str, str] = {}
    for key, value in found.items():
        name = value.removeprefix("torch.").lower() if isinstance(value, str) else ""
        if name not in _DTYPES:
            raise config.error(key, f"one of {', '.join(_DTYPES)}, with or without torch. before it")
        read[key] = _DTYPES[name]
    if len(set(read.values())) > 1:
        raise config.error("torch_dtype", f"{read['dtype']}, as key 'dtype' says")
    if not read:
        return BFLOAT16, ("default taken: dtype = bfloat16 (the config names none)",)
    return FORMATS[next(iter(read.values()))], ()


def _table(config: ConfigKeys, beside: ConfigKeys | None) -> ConfigKeys | None:
    """The quantisation config; None for a checkpoint that is not quantised."""
    table = inner(config, "quantization_config") or inner(config, "compression_config")
    outside = None if beside is None else inner(beside, "quantization")
    if beside is not None and outside is None:
        raise beside.error("quantization", "an object, as ModelOpt writes it")
    if outside is not None and not outside.values.get("quant_algo"):
        outside = None  # only the cache is quantised
    if table is None or outside is None:
        return table if outside is None else ConfigKeys({**outside.values, "quant_method": "modelopt"}, outside.where)
    if table.values.get("quant_algo") not in (None, outside.values["quant_algo"]):
        raise outside.error("quant_algo", f"{one_line(table.values['quant_algo'])}, as {table.where} says")
    return table


def _plan(config: ConfigKeys, beside: ConfigKeys | None) -> tuple[Plan, ConfigKeys] | None:
    """What the config says of stored matrices, and the table that says it; None without quantisation."""
    table = _table(config, beside)
    if table is None:
        if config.values.get("expert_dtype") is not None:
            raise config.error("expert_dtype", "none without a quantization_config")
        return None
    method = table.values.get("quant_method")
    if method is None and table.values.get("quant_algo") is not None:
        method = "modelopt"
    if method is None and ("load_in_4bit" in table.values or "load_in_8bit" in table.values):
        method = "bitsandbytes"
    name = method.lower() if isinstance(method, str) else ""
    if name == "fp8":
        return packed.fp8(table, config), table
    if config.values.get("expert_dtype") is not None:
        raise config.error("expert_dtype", "none unless quant_method is fp8")
    if name == "bitsandbytes":
        return packed.bitsandbytes(table, _DTYPES), table
    if name not in _METHODS:
        raise table.error("quant_method", f"one of fp8, bitsandbytes, {', '.join(_METHODS)}")
    return _METHODS[name](table), table


def read_storage(config: ConfigKeys, shape: Shape, beside: ConfigKeys | None = None) -> Storage:
    """In how many bits a checkpoint stores each class of tensors.

    Parameters
    ----------
    config : the keys of the language model. shape : its sizes, as a family reader finds them.
    beside : the ``hf_quant_config.json`` of the folder, which ModelOpt writes, if there is one.

    Returns
    -------
    The mean over the parameters of each class, scales included. Its ``notes`` list the defaults taken.

    Raises
    ------
    ModelConfigError : a key has a value that is not understood, the kind of quantisation is not known, or a key that
        may change sizes is not; or the config lists what it converts, and none of it is in the network.
    """
    base, notes = base_format(config)
    found = _plan(config, beside)
    if found is None:
        return of_classes(dict.fromkeys(CLASSES, base), notes)
    plan, table = found
    formats, converted = formats_by_class(shape, plan, base)
    if not converted:
        raise ModelConfigError(
            f"{table.where}: what it converts is nowhere in this network; allowed: names of modules of this network, "
            "or no quantisation"
        )
    return of_classes(formats, (*notes, *(f"default taken: {note}" for note in plan.notes)))


def compute_format(config: ConfigKeys, beside: ConfigKeys | None = None) -> str:
    """The number format that products are computed in, as the config has it; the module says by which rule.

    Raises
    ------
    ModelConfigError : as for `read_storage`.
    """
    base, _ = base_format(config)
    found = _plan(config, beside)
    if found is None:
        return base.name
    return "+".join(sorted({name or base.name for name in found[0].compute}))


def kv_cache_bits(config: ConfigKeys, beside: ConfigKeys | None = None) -> float | None:
    """Bits of a cached number, scales included, where the config names a precision for the cache [bit]; else None.

    Read from ``kv_cache_quant_algo`` (``FP8``, ``INT8``, ``NVFP4``) or ``kv_cache_scheme`` (an object).

    Raises
    ------
    ModelConfigError : a value is not understood.
    """
    inside = inner(config, "quantization_config") or inner(config, "compression_config")
    outside = None if beside is None else inner(beside, "quantization")
    named = {"FP8": 8.0, "INT8": 8.0, "NVFP4": FORMATS["nvfp4"].bits}
    for table in (inside, outside):
        for key in ("kv_cache_quant_algo", "kv_cache_scheme"):
            value = None if table is None else table.values.get(key)
            if table is None or value is None:
                continue
            if isinstance(value, str) and value.upper() in named:
                return named[value.upper()]
            allowed = f"null, one of {', '.join(named)}, or an object with num_bits 4 or 8"
            scheme = inner(table, key) if not isinstance(value, str) else None
            if scheme is None or scheme.values.get("num_bits") not in (4, 8):
                raise table.error(key, allowed)
            bits, size = scheme.values["num_bits"], scheme.values.get("group_size")
            if bits == 8:
                return 8.0
            if size != 16:
                raise scheme.error("group_size", "16, for a cache of 4 bits with an FP8 scale for so many numbers")
            return named["NVFP4"]
    return None
