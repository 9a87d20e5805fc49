"""Parameters of the generator of routing for four models, from statistics that others published or that were measured.

None is a recording. Where several statistics decide a parameter together, it was searched for with the generator
until they came out to within five points, and is called fitted. Where there is a recording,
:mod:`perfmodel.routing.fitting` does better.
"""

import math
from types import MappingProxyType
from typing import Literal, NamedTuple

from perfmodel.routing.synthetic import MIXTRAL_SKEW, Skew


class Number(NamedTuple):
    """One number of a preset: what it is, its value, where it is from.

    kind : "published"; "published, recalled", which is from memory and was not checked; "measured" on a public
        recording; "fitted" so that such numbers come out; or "assumed"
    """

    name: str
    value: str
    kind: Literal["published", "published, recalled", "measured", "fitted", "assumed"]
    source: str


class Preset(NamedTuple):
    """Shape and parameters of one model's routing.

    layer_index : the model layers that have experts
    """

    model: str
    layer_index: tuple[int, ...]
    num_experts: int
    top_k: int
    skew: Skew
    numbers: tuple[Number, ...]

    @property
    def num_layers(self) -> int:
        """Layers with experts, L."""
        return len(self.layer_index)


_ESFT = "33 legal prompts with reference answers, of the ESFT repository's expert records"
_GPT_OSS = "24 greedy generations, of the GPT-OSS-MoE-ExpertFingerprinting repository"
_QWEN = "github.com/gajsanders/moe-trace, findings 005 and 006"
_UNION = "github.com/everett6/moe-prefetch, r6_prefill_union"

_MIXTRAL = Preset(
    model="mixtral-8x7b",
    layer_index=tuple(range(32)),
    num_experts=8,
    top_k=2,
    skew=MIXTRAL_SKEW,
    numbers=(
        Number("shape", "32 layers, top-2 of 8", "published", "the model's config.json"),
        Number("share of the top 4 of 8", "0.629", "measured", "expert counts of the Instruct model"),
        Number("alpha", "9.1", "fitted", "variance of those counts; single layers give 3.4 to 24.8"),
        Number(
            "neighbours share one of two experts",
            "0.62 to 0.67, middle layers",
            "published, recalled",
            "arXiv 2401.04088, table 5, as remembered",
        ),
        Number("sequence-concentration", "60", "assumed", "counts cannot tell it"),
        Number("stickiness", "0.25", "fitted", "the lower of the shares above, given the concentration"),
        Number("next-layer", "0", "assumed", "no comparable figure is known"),
    ),
)

_DEEPSEEK = Preset(
    model="deepseek-v2-lite",
    layer_index=tuple(range(1, 27)),
    num_experts=64,
    top_k=6,
    skew=Skew(
        alpha=7.6,
        sequence_concentration=math.inf,
        decode_concentration=math.inf,
        phase_concentration=370.0,
        stickiness=1.7,
        memory_tokens=4.0,
        next_layer=0.84,
        gate_sharpness=0.5,
        parameter_source="DeepSeek-V2-Lite: fitted to statistics of one task of public recordings (legal texts)",
    ),
    numbers=(
        Number("shape", "26 layers after a dense one, top-6 of 64", "published", "the model's config.json"),
        Number("share of the top 32 of 64", "0.708", "measured", _ESFT),
        Number("reuse at lags 1, 2, 4, 8", "0.290, 0.216, 0.188, 0.171", "measured", _ESFT),
        Number("distinct experts in 8 and 32 tokens", "27.2, 50.3", "measured", _ESFT),
        Number(
            "hit rate, K = 32: own prefill, other's, static, oracle", "0.653, 0.648, 0.774, 0.819", "measured", _ESFT
        ),
        Number("next layer from a table of ids, recall at 6", "0.538", "measured", _ESFT),
        Number("largest of six normalised gate weights", "0.324", "measured", _ESFT),
        Number(
            "alpha, phase-concentration, stickiness, memory-tokens", "7.6, 370, 1.7, 4", "fitted", "numbers above"
        ),
        Number(
            "sequence- and decode-concentration", "inf", "fitted",
            "stickiness alone gives the recorded variation; without it 1,100 to 1,700 would",
        ),
        Number("next-layer", "0.84", "fitted", "the recall above"),
        Number("gate-sharpness", "0.5", "fitted", "the gate weight above"),
    ),
)  # fmt: skip

_GPT = Preset(
    model="gpt-oss-20b",
    layer_index=tuple(range(24)),
    num_experts=32,
    top_k=4,
    skew=Skew(
        alpha=1.3,
        sequence_concentration=90.0,
        decode_concentration=150.0,
        stickiness=1.4,
        memory_tokens=3.5,
        next_layer=0.95,
        gate_sharpness=0.31,
        parameter_source="gpt-oss-20b: fitted to public recordings of decode; prefill and next_layer are assumed",
    ),
    numbers=(
        Number("shape", "24 layers, top-4 of 32", "published", "the model's config.json"),
        Number("share of the top 16 of 32, pooled and of one sequence", "0.827, 0.910", "measured", _GPT_OSS),
        Number("reuse at lags 1, 2, 4, 8", "0.457, 0.407, 0.381, 0.355", "measured", _GPT_OSS),
        Number("distinct experts in 2, 8, 32, 128 tokens", "6.2, 12.7, 19.5, 24.6", "measured", _GPT_OSS),
        Number(
            "hit rate at K = 16 in the second half: first half, oracle", "0.885, 0.921", "measured", _GPT_OSS
        ),
        Number("largest of four gate weights", "0.35", "measured", _GPT_OSS),
        Number(
            "alpha, sequence-concentration, stickiness, memory-tokens", "1.3, 90, 1.4, 3.5", "fitted", "numbers above"
        ),
        Number(
            "decode-concentration", "150", "fitted",
            "the hit rates above: the first half stands in for a prefill, which was not recorded",
        ),
        Number(
            "next-layer", "0.95", "assumed",
            "the recorded recall at 4 of 0.59 is out of reach: sequences vary in every layer on their own here",
        ),
        Number("gate-sharpness", "0.31", "fitted", "the gate weight above"),
    ),
)  # fmt: skip

_QWEN3 = Preset(
    model="qwen3-30b-a3b",
    layer_index=tuple(range(48)),
    num_experts=128,
    top_k=8,
    skew=Skew(
        alpha=0.62,
        sequence_concentration=430.0,
        stickiness=1.7,
        memory_tokens=3.4,
        next_layer=0.9,
        gate_sharpness=0.4,
        parameter_source=(
            "Qwen3-30B-A3B: fitted to published statistics of decode; prefill is assumed alike, next_layer and "
            "gate_sharpness assumed"
        ),
    ),
    numbers=(
        Number("shape", "48 layers, top-8 of 128", "published", "the model's config.json"),
        Number("reuse of neighbouring tokens in decode", "0.427", "published", f"{_QWEN} (single layers 0.08 to 0.60)"),
        Number("share of the top 16 of 128", "0.54 to 0.62", "published", _QWEN),
        Number("distinct experts in 8, 32, 128 decode tokens", "29.0, 52.8, 75.2", "published", _UNION),
        Number("distinct experts in batches of 2, 4, 8, 16", "15.0, 26.6, 42.6, 59.2", "published", _UNION),
        Number(
            "alpha, sequence-concentration, stickiness, memory-tokens", "0.62, 430, 1.7, 3.4", "fitted", "numbers above"
        ),
        Number("decode-concentration", "430", "assumed", "as that of sequences: prefill was not published"),
        Number("next-layer, gate-sharpness", "0.9, 0.4", "assumed", "between those of other models"),
    ),
)  # fmt: skip

PRESETS = MappingProxyType(
    {"mixtral-8x7b": _MIXTRAL, "deepseek-v2-lite": _DEEPSEEK, "gpt-oss-20b": _GPT, "qwen3-30b-a3b": _QWEN3}
)
"""Presets by the name that ``perfmodel trace synth --profile`` takes."""
