"""Formats of weights by name, with the exact bits of a weight.

A format stores weights in blocks that share a scale; the bits of a weight are those of a whole block over its weights.
The one number that some formats add for a whole tensor (NVFP4 and FP8 have a float32 scale) is left out everywhere: it
is 32 bits in millions of weights.
"""

import difflib
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from types import MappingProxyType

from perfmodel.errors import ModelConfigError
from perfmodel.families import one_line

#: A format with less of a class than this share is not named in the name of the mix.
_NAMED_SHARE = 0.01


@dataclass(frozen=True, slots=True)
class Format:
    """How a weight is stored.

    name : ``bfloat16``, ``fp8``, ``mxfp4``, ``nvfp4``, ``q4_k`` ..., or several joined by ``+`` for a class that mixes.
    bits : bits of a weight with its share of scales and offsets [bit]; the mean of the class where it mixes.
    parts : for a mix its formats, each with its share of the parameters; else empty.

    Raises
    ------
    ModelConfigError : ``bits`` is not above 0 and at most 64, or ``name`` is no text.
    """

    name: str
    bits: float
    parts: tuple[tuple["Format", float], ...] = ()

    def __post_init__(self) -> None:
        name, bits = object.__getattribute__(self, "name"), object.__getattribute__(self, "bits")
        if not isinstance(name, str) or not name:
            raise ModelConfigError(f"format: name is {one_line(name)}; allowed: a text")
        if isinstance(bits, bool) or not isinstance(bits, int | float) or not 0 < bits <= 64:
            raise ModelConfigError(
                f"format {one_line(name)}: bits is {one_line(bits)}; allowed: above 0 and at most 64"
            )


def mixed(parts: Iterable[tuple[Format, float]]) -> Format:
    """The mean of formats weighted by their parameters; named by those that hold at least 1 %, the largest first."""
    weights: dict[str, float] = {}
    bits: dict[str, float] = {}
    for part, weight in parts:
        if weight > 0:
            weights[part.name] = weights.get(part.name, 0.0) + weight
            bits[part.name] = bits.get(part.name, 0.0) + weight * part.bits
    total = math.fsum(weights.values())
    order = sorted(weights, key=lambda name: (-weights[name], name))
    if len(order) == 1:
        return Format(order[0], bits[order[0]] / total)
    name = "+".join(name for name in order if weights[name] >= _NAMED_SHARE * total)
    shares = tuple((Format(name, bits[name] / weights[name]), weights[name] / total) for name in order)
    return Format(name, math.fsum(bits.values()) / total, shares)


#: Formats of GGUF files: weights of a block, and its bytes. Scales d and offsets m are float16 unless said otherwise.
GGUF_BLOCKS = MappingProxyType(
    {
        "q1_0": (128, 18),  # d, 128 signs
        "q4_0": (32, 18),  # d, 32 x 4 bits
        "q4_1": (32, 20),  # d, m, 32 x 4 bits
        "q5_0": (32, 22),  # d, 32 high bits, 32 x 4 bits
        "q5_1": (32, 24),  # d, m, 32 high bits, 32 x 4 bits
        "q8_0": (32, 34),  # d, 32 x 8 bits
        "q8_1": (32, 40),  # d and sum as float32, 32 x 8 bits
        "q2_k": (256, 84),  # d, m, 16 x (4-bit scale and offset), 256 x 2 bits
        "q3_k": (256, 110),  # d, 16 x 6-bit scale, 256 high bits, 256 x 2 bits
        "q4_k": (256, 144),  # d, m, 8 x (6-bit scale and offset), 256 x 4 bits
        "q5_k": (256, 176),  # d, m, 8 x (6-bit scale and offset), 256 high bits, 256 x 4 bits
        "q6_k": (256, 210),  # d, 16 x 8-bit scale, 256 x 2 high bits, 256 x 4 bits
        "q8_k": (256, 292),  # d as float32, 256 x 8 bits, 16 x 16-bit sum
        "iq1_s": (256, 50),  # d, 32 x 8-bit grid index, 8 x (4 x 3 index bits, 3-bit scale, sign of the shift)
        "iq1_m": (
            256,
            56,
        ),  # 32 x 8-bit grid index, 16 x (2 x (3 index bits, sign of the shift)), 8 bytes of scales with d
        "iq2_xxs": (256, 66),  # d, 8 x (4 x 8-bit grid index, 4 x 7 sign bits, 4-bit scale)
        "iq2_xs": (256, 74),  # d, 32 x (9-bit grid index, 7 sign bits), 16 x 4-bit scale
        "iq2_s": (256, 82),  # d, 32 x 8-bit grid index, 256 signs, 32 x 2 index bits, 16 x 4-bit scale
        "iq3_xxs": (256, 98),  # d, 64 x 8-bit grid index, 8 x (4 x 7 sign bits, 4-bit scale)
        "iq3_s": (256, 110),  # d, 64 x 8-bit grid index, 64 index bits, 256 signs, 8 x 4-bit scale
        "iq4_nl": (32, 18),  # d, 32 x 4 bits into a table of 16 values
        "iq4_xs": (256, 136),  # d, 8 x 6-bit scale, 256 x 4 bits into a table of 16 values
        "tq1_0": (256, 54),  # 240 trits, five a byte, 16 trits, four a byte, d
        "tq2_0": (256, 66),  # 256 x 2 bits, d
        "mxfp4": (32, 17),  # 8-bit exponent, 32 x E2M1
        "nvfp4": (64, 36),  # 4 x FP8 scale, one for 16 weights, 64 x E2M1
    }
)

#: Formats of safetensors files: bits of a weight with its share of what its block adds.
_OTHER_BITS = {
    "float64": 64.0,
    "float32": 32.0,
    "float16": 16.0,
    "bfloat16": 16.0,
    "fp8": 8.0,  # E4M3; one scale for a tensor, or one for each row, which is below 0.02 bits
    "fp8_block128": 8 + 32 / 128**2,  # float32 scale for 128 x 128 weights
    "mxfp8": 8 + 8 / 32,  # E4M3, 8-bit exponent for 32 weights
    "int8": 8.0,  # one scale for each row, which is below 0.02 bits
    "int8_g128": 8 + 16 / 128,  # float16 scale for 128 weights
    "int4_g32": 4 + 16 / 32,  # float16 scale for 32 weights, no zero points (compressed-tensors)
    "int4_g64": 4 + 16 / 64,
    "int4_g128": 4 + 16 / 128,
    "int4_g32_zero": 4 + (16 + 4) / 32,  # with a 4-bit zero point for each scale (GPTQ, AWQ)
    "int4_g64_zero": 4 + (16 + 4) / 64,
    "int4_g128_zero": 4 + (16 + 4) / 128,
    "nf4": 4 + 32 / 64,  # float32 maximum of 64 weights (bitsandbytes)
    "nf4_double": 4 + 8 / 64 + 32 / (64 * 256),  # that maximum in 8 bits, float32 scale for 256 of them
    "fp4": 4 + 32 / 64,  # as nf4, with other values
    "fp4_double": 4 + 8 / 64 + 32 / (64 * 256),
    "hqq4_g64": 4 + (16 + 16) / 64,  # float16 scale and zero point for 64 weights
}

#: Every format by name.
FORMATS = MappingProxyType(
    {
        name: Format(name, bits)
        for name, bits in {
            **_OTHER_BITS,
            **{name: 8 * size / weights for name, (weights, size) in GGUF_BLOCKS.items()},
        }.items()
    }
)
_ALIASES = MappingProxyType(
    {
        "f64": "float64",
        "f32": "float32",
        "fp32": "float32",
        "f16": "float16",
        "fp16": "float16",
        "half": "float16",
        "bf16": "bfloat16",
    }
)
#: File types of GGUF whose tensors have several formats.
_FILE_MIX = re.compile(r"(ud-)?(q[2-8]_k_(s|m|l|xl)|iq[1-4]_[mx]|iq3_xs|iq[1-4]_k_?\w*|mxfp4_moe)")

BFLOAT16 = FORMATS["bfloat16"]


def format_named(name: str) -> Format:
    """The format of that name, in any case.

    Raises
    ------
    ModelConfigError : there is none, or the name is that of a GGUF file type that mixes formats.
    """
    allowed = ", ".join((*FORMATS, *_ALIASES))
    if not isinstance(name, str):
        raise ModelConfigError(f"format: found {one_line(name)}; allowed: one of {allowed}")
    key = name.strip().lower()
    if _FILE_MIX.fullmatch(key) and key not in FORMATS:
        raise ModelConfigError(
            f"format {one_line(name)}: is a GGUF file type whose tensors have several formats; allowed: a format for "
            "each class, as in expert=q4_k and attention=q6_k, or the GGUF file itself, which lists its tensors"
        )
    found = FORMATS.get(_ALIASES.get(key, key))
    if found is None:
        close = difflib.get_close_matches(key[:40], (*FORMATS, *_ALIASES), n=3)
        hint = f" (close: {', '.join(close)})" if close else ""
        raise ModelConfigError(f"format {one_line(name)}: there is none of that name{hint}; allowed: one of {allowed}")
    return found
