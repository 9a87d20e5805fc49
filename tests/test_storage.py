"""Formats by name, the stored precision of classes, and sizes that follow from both."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from storages import EXPERTS, HIDDEN, LAYERS, VOCAB, WIDTH, network, stored

from perfmodel.errors import ModelConfigError
from perfmodel.families import ConfigKeys, Shape, language_model, read_shape
from perfmodel.storage import (
    CLASSES,
    FORMATS,
    GGUF_BLOCKS,
    Format,
    Storage,
    class_bytes,
    class_params,
    compute_format,
    format_named,
    kv_cache_bits,
    read_storage,
)

GPT_OSS_20B = {
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "vocab_size": 201088,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "quantization_config": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
    },
}
GPT_OSS_120B = {
    **GPT_OSS_20B,
    "num_hidden_layers": 36,
    "num_local_experts": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 18,
}
LLAMA_70B = {
    "model_type": "llama",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def read(values: dict[str, Any], beside: dict[str, Any] | None = None) -> tuple[Shape, Storage]:
    config = ConfigKeys(values, "config")
    shape = read_shape(config).shape
    neighbour = None if beside is None else ConfigKeys({"quantization": beside}, "hf_quant_config.json")
    return shape, read_storage(language_model(config)[1], shape, neighbour)


def total(shape: Shape, storage: Storage) -> float:
    return sum(class_bytes(shape, storage).values())


# --- formats


def test_bits_of_gguf_formats_are_those_of_the_gguf_package() -> None:
    constants = pytest.importorskip("gguf.constants")
    sizes = {kind.name.lower(): size for kind, size in constants.GGML_QUANT_SIZES.items()}
    assert {name: sizes[name] for name in GGUF_BLOCKS if name in sizes} == dict(GGUF_BLOCKS)
    whole = {"f32", "f16", "bf16", "f64", "i8", "i16", "i32", "i64"}
    assert set(sizes) - set(GGUF_BLOCKS) == whole, "formats of the package that the table lacks"
    for name in ("f32", "f16", "bf16", "f64"):
        weights, size = sizes[name]
        assert format_named(name).bits == 8 * size / weights


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("Q4_K", 4.5),
        ("q6_k", 6.5625),
        ("IQ1_S", 1.5625),
        ("mxfp4", 4.25),
        ("NVFP4", 4.5),
        ("bf16", 16),
        ("fp8", 8),
        ("fp8_block128", 8.001953125),
        ("int4_g128", 4.125),
        ("int4_g128_zero", 4.15625),
        ("nf4", 4.5),
        ("nf4_double", 4.126953125),
        (" q8_0 ", 8.5),
    ],
)
def test_formats_are_found_in_any_case(name: str, bits: float) -> None:
    assert format_named(name).bits == bits


@pytest.mark.parametrize("name", ["q4_k_m", "Q2_K_XL", "UD-Q4_K_XL", "q3_k_s", "iq3_m", "iq2_m", "iq3_xs", "mxfp4_moe"])
def test_mixes_of_gguf_files_are_no_format(name: str) -> None:
    with pytest.raises(ModelConfigError, match=r"several formats.*expert=q4_k.*GGUF file itself"):
        format_named(name)


def test_an_unknown_format_is_refused_with_close_ones() -> None:
    with pytest.raises(ModelConfigError, match=r"'q4_kk': there is none of that name \(close: q4_k"):
        format_named("q4_kk")
    for hostile in (None, 4, "", "q4\nk", "x" * 10_000, ["q4_k"]):
        with pytest.raises(ModelConfigError) as caught:
            format_named(hostile)  # type: ignore[arg-type]
        assert "\n" not in str(caught.value)


def test_table_has_plain_names_and_possible_bits() -> None:
    for name, one in FORMATS.items():
        assert one.name == name == name.lower()
        assert 1 <= one.bits <= 64
        assert "+" not in name


# --- storage


def test_override_changes_the_classes_named_and_no_other() -> None:
    changed = Storage().override(("expert=q4_k", "attention = Q8_0"))
    assert (changed.expert.bits, changed.attention.bits) == (4.5, 8.5)
    assert {name for name, one in changed.by_class().items() if one.name == "bfloat16"} == set(CLASSES) - {
        "expert",
        "attention",
    }
    assert Storage().override("all=q8_0") == Storage.uniform("q8_0") == Storage.uniform(FORMATS["q8_0"])
    assert Storage().override(["all=q8_0", "norm=f32"]).norm.bits == 32


@pytest.mark.parametrize(
    "choice", ["experts=q4_k", "q4_k", "", "=q4_k", "expert:q4_k", None, 4, "expert=q4_k_m", "expert="]
)
def test_an_unknown_override_is_refused(choice: Any) -> None:
    with pytest.raises(ModelConfigError, match="allowed"):
        Storage().override([choice])


def test_storage_takes_formats_only() -> None:
    assert Storage.uniform(4.5).expert == Format("4.5-bit", 4.5)
    for wrong in ("q4_k", 4.5, None):
        with pytest.raises(ModelConfigError, match="expert"):
            dataclasses.replace(Storage(), expert=wrong)
    for wrong in (0, -1, float("nan"), True, None, 65):
        with pytest.raises(ModelConfigError):
            Storage.uniform(wrong)  # type: ignore[arg-type]


def test_upcast_changes_what_the_engine_cannot_compute_on() -> None:
    storage = Storage().override(("expert=mxfp4", "attention=fp8_block128", "norm=f32"))
    assert storage.upcast(("mxfp4", "fp8")) == storage
    without = storage.upcast(("fp8",))
    assert without.expert.bits == 16
    assert without.attention == storage.attention
    assert without.norm.bits == 32
    assert storage.upcast((), "float16").attention.name == "float16"


def test_upcast_of_a_mix_changes_its_packed_part() -> None:
    kept = [f"model.layers.{layer}" for layer in range(6)]
    storage = stored({"quant_method": "fp8", "weight_block_size": None, "modules_to_not_convert": kept})
    assert storage.expert.name == "fp8+bfloat16"  # 6 of 11 layers converted
    assert storage.expert.bits == pytest.approx((6 * 8 + 5 * 16) / 11, rel=1e-12)
    assert storage.upcast(()).expert == Format("bfloat16", 16.0)


def test_params_by_class_are_those_of_the_tensors() -> None:
    gated, moe = 3 * HIDDEN * WIDTH, LAYERS - 1
    assert class_params(network()) == {
        "embedding": VOCAB * HIDDEN,
        "head": VOCAB * HIDDEN,
        "attention": LAYERS * (2 * HIDDEN**2 + HIDDEN + 64 + 4 * HIDDEN),
        "dense": gated,
        "shared": moe * gated,
        "router": moe * EXPERTS * (HIDDEN + 1),
        "expert": moe * EXPERTS * gated,
        "norm": (2 * LAYERS + 1) * HIDDEN,
    }
    tied = network(tied_embeddings=True)
    assert class_params(tied)["head"] == 0
    assert class_bytes(tied, Storage.uniform(4))["embedding"] == VOCAB * HIDDEN / 2


# --- what the config calls its precision


@pytest.mark.parametrize(
    ("key", "value", "name"),
    [
        ("dtype", "bfloat16", "bfloat16"),
        ("torch_dtype", "torch.float16", "float16"),
        ("dtype", "float32", "float32"),
        ("torch_dtype", "half", "float16"),
    ],
)
def test_dtype_is_read_in_both_spellings(key: str, value: str, name: str) -> None:
    config = ConfigKeys({key: value}, "config")
    storage = read_storage(config, network())
    assert {one.name for one in storage.by_class().values()} == {name}
    assert storage.notes == ()
    assert compute_format(config) == name


def test_a_missing_dtype_is_a_default_that_is_noted() -> None:
    storage = read_storage(ConfigKeys({}, "config"), network())
    assert storage == Storage()
    assert "dtype = bfloat16" in storage.notes[0]


@pytest.mark.parametrize("value", [{"": "bfloat16"}, "auto", "float8_e4m3fn", 16, True, ["bfloat16"], ""])
def test_an_unknown_dtype_is_refused(value: Any) -> None:
    with pytest.raises(ModelConfigError, match=r"config: key 'torch_dtype' is .*allowed: one of bfloat16"):
        read_storage(ConfigKeys({"torch_dtype": value}, "config"), network())


def test_two_dtypes_must_agree() -> None:
    assert read_storage(ConfigKeys({"dtype": "bfloat16", "torch_dtype": "torch.bfloat16"}, "c"), network()) == Storage()
    with pytest.raises(ModelConfigError, match="bfloat16, as key 'dtype' says"):
        read_storage(ConfigKeys({"dtype": "bfloat16", "torch_dtype": "float16"}, "c"), network())


# --- published sizes


def test_gpt_oss_has_the_size_of_its_files() -> None:
    shape, storage = read(GPT_OSS_120B)
    assert total(shape, storage) == pytest.approx(65_248_815_744, rel=0.001)  # files on the Hub [byte]
    assert compute_format(ConfigKeys(GPT_OSS_120B, "config")) == "bfloat16"
    matrices = sum(params for name, params in class_params(shape).items() if name == "expert")
    assert matrices * 4.25 / 8 == pytest.approx(60.9e9, rel=0.005)
    assert total(*read(GPT_OSS_20B)) == pytest.approx(13.76e9, rel=0.001)


def test_gpt_oss_as_a_gguf_file_of_mxfp4_and_q8_0() -> None:
    for config, size in ((GPT_OSS_120B, 63.4e9), (GPT_OSS_20B, 12.1e9)):
        shape, storage = read(config)
        file = storage.override(("all=q8_0", "expert=mxfp4"))
        assert total(shape, file) == pytest.approx(size, rel=0.01)


def test_an_engine_without_mxfp4_keeps_16_bits() -> None:
    for config, size in ((GPT_OSS_120B, 230e9), (GPT_OSS_20B, 40e9)):
        shape, storage = read(config)
        assert total(shape, storage.upcast(supports=())) == pytest.approx(size, rel=0.05)
        assert total(shape, storage.upcast(supports=("mxfp4",))) == total(shape, storage)


def test_dense_70b_in_nvfp4_reads_40_gb_a_token() -> None:
    shape, storage = read(LLAMA_70B, {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]})
    sizes = class_bytes(shape, storage)
    assert sizes["attention"] + sizes["dense"] + sizes["norm"] == pytest.approx(38.50e9, rel=0.001)
    assert sizes["head"] == pytest.approx(2.10e9, rel=0.002)
    assert sum(sizes.values()) - sizes["embedding"] == pytest.approx(40.61e9, rel=0.001)


_AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "modules_to_not_convert": ["gate"]}


def published(shared: Path, name: str, **changes: Any) -> dict[str, Any]:
    config = json.loads((shared / "configs" / name / "config.json").read_text(encoding="utf-8"))
    return {**config, **changes}


def test_80b_in_4_bits_is_resident_whole(shared: Path) -> None:
    shape, storage = read(published(shared, "Qwen__Qwen3-Next-80B-A3B-Instruct", quantization_config=_AWQ))
    assert 37e9 < total(shape, storage) < 45e9  # 3 B active parameters are no measure of memory


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("deepseek-ai__DeepSeek-V3", 673e9),  # 688.6 GB of files less the layer for multi-token prediction
        ("Qwen__Qwen3-30B-A3B-FP8", 31.2e9),
        ("moonshotai__Kimi-K2-Instruct", 1.03e12),
        ("moonshotai__Kimi-K2.5", 595e9),
    ],
)
def test_quantised_releases_have_the_size_of_their_files(shared: Path, name: str, size: float) -> None:
    assert total(*read(published(shared, name))) == pytest.approx(size, rel=0.01)


def test_nvfp4_beside_a_plain_config(shared: Path) -> None:
    beside = {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16}
    everywhere = ["lm_head", "model.layers.61*", *(f"model.layers.{layer}.self_attn*" for layer in range(61))]
    shape, storage = read(published(shared, "nvidia__DeepSeek-V3.1-NVFP4"), {**beside, "exclude_modules": everywhere})
    assert total(shape, storage) == pytest.approx(394e9, rel=0.01)
    assert storage.attention.name == "bfloat16"
    assert storage.expert.name == storage.dense.name == "nvfp4"
    shape, storage = read(
        published(shared, "nvidia__Qwen3-235B-A22B-NVFP4"),
        {**beside, "exclude_modules": ["lm_head", *(f"model.layers.{layer}.mlp.gate" for layer in range(94))]},
    )
    assert total(shape, storage) == pytest.approx(133.5e9, rel=0.01)


def test_every_published_config_has_a_storage(shared: Path) -> None:
    bits = set()
    for file in sorted((shared / "configs").glob("*/config.json")):
        config = ConfigKeys(json.loads(file.read_text(encoding="utf-8")), file.parent.name)
        try:
            shape = read_shape(config).shape
        except ModelConfigError:
            continue
        inner = language_model(config)[1]
        storage = read_storage(inner, shape)
        quantised = "quantization_config" in inner.values
        formats = storage.by_class()
        assert any(one.bits < 16 for one in formats.values()) == quantised, file.parent.name
        assert formats["norm"].bits in (16, 32)
        assert formats["router"].bits in (16, 32)
        assert all(2 <= one.bits <= 32 for one in formats.values())
        compute_format(inner)
        bits.add(kv_cache_bits(inner))
    assert bits >= {None, 8.0}
