"""Every kind of quantisation config: which matrices it converts, and their exact bits."""

import dataclasses
from typing import Any

import pytest
from storages import EXPERTS, HIDDEN, LAYERS, WIDTH, keys, matrix, network, stored

from perfmodel.errors import ModelConfigError
from perfmodel.families import ConfigKeys, Tensor
from perfmodel.storage import CLASSES, class_params, compute_format, kv_cache_bits

NVFP4_GROUP = {
    "targets": ["Linear"],
    "weights": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True},
    "input_activations": {
        "num_bits": 4,
        "type": "float",
        "strategy": "tensor_group",
        "group_size": 16,
        "dynamic": "local",
    },
}
INT4_WEIGHTS = {
    "num_bits": 4,
    "type": "int",
    "strategy": "group",
    "group_size": 32,
    "symmetric": True,
    "dynamic": False,
}


def compressed(weights: dict[str, Any], stored_as: str = "pack-quantized", **other: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": other.pop("input_activations", None)}
    return {
        "quant_method": "compressed-tensors",
        "format": stored_as,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        **other,
    }


#: Kind -> config, bits of an expert's weight, format of an expert, compute format, and whether the head is converted.
KINDS: dict[str, tuple[dict[str, Any], float, str, str, bool]] = {
    "fp8": ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 8 + 32 / 128**2, "fp8_block128", "fp8", False),
    "fp8 default": ({"quant_method": "fp8"}, 8 + 32 / 128**2, "fp8_block128", "fp8", False),
    "fp8 a tensor": ({"quant_method": "fp8", "weight_block_size": None}, 8, "fp8", "fp8", False),
    "fp8 static": (
        {
            "quant_method": "fp8",
            "activation_scheme": "static",
            "weight_block_size": None,
            "ignored_layers": ["lm_head"],
        },
        8,
        "fp8",
        "fp8",
        False,
    ),
    "fp8, fp4 experts": ({"quant_method": "fp8", "expert_dtype": "fp4"}, 4.25, "mxfp4", "fp8", False),
    "fbgemm": (
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0},
        8 + 32 * 1024 / 294912,
        "fp8",
        "fp8",
        False,
    ),
    "mxfp8": ({"quant_method": "mxfp8", "weight_block_size": [1, 32]}, 8.25, "mxfp8", "mxfp8", False),
    "mxfp4": ({"quant_method": "mxfp4"}, 4.25, "mxfp4", "bfloat16", False),
    "nvfp4": ({"quant_method": "nvfp4"}, 4.5, "nvfp4", "nvfp4", False),
    # GPTQ stores the group of each input too: 32 bits a column.
    "gptq": (
        {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False, "damp_percent": 0.1},
        4 + 20 / 128 + 32 * (2 * HIDDEN + WIDTH) / (3 * HIDDEN * WIDTH),
        "int4_g128_zero",
        "bfloat16",
        False,
    ),
    "gptq with head": (
        {"quant_method": "gptq", "bits": 8, "group_size": 32, "lm_head": True},
        8 + 24 / 32 + 32 * (2 * HIDDEN + WIDTH) / (3 * HIDDEN * WIDTH),
        "int8_g32_zero",
        "bfloat16",
        True,
    ),
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"},
        4 + 20 / 64,
        "int4_g64_zero",
        "bfloat16",
        False,
    ),
    "awq, old keys": (
        {"quant_method": "awq", "w_bit": 4, "q_group_size": 128, "zero_point": True},
        4.15625,
        "int4_g128_zero",
        "bfloat16",
        False,
    ),
    "auto-round": (
        {
            "quant_method": "auto-round",
            "bits": 4,
            "group_size": 128,
            "packing_format": "auto_round:auto_gptq",
            "iters": 200,
        },
        4.15625,
        "int4_g128_zero",
        "bfloat16",
        False,
    ),
    "bitsandbytes nf4": (
        {
            "quant_method": "bitsandbytes",
            "load_in_4bit": True,
            "load_in_8bit": False,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": True,
            "bnb_4bit_compute_dtype": "bfloat16",
            "llm_int8_threshold": 6.0,
        },
        4 + 8 / 64 + 32 / 64 / 256,
        "nf4_double",
        "bfloat16",
        False,
    ),
    "bitsandbytes fp4": ({"load_in_4bit": True}, 4.5, "fp4", "float32", False),
    "bitsandbytes int8": (
        {"quant_method": "bitsandbytes", "load_in_8bit": True},
        8 + 32 * 1024 / 294912,
        "int8",
        "int8",
        False,
    ),
    "hqq": (
        {
            "quant_method": "hqq",
            "quant_config": {"weight_quant_params": {"nbits": 4, "group_size": 64, "axis": 1}},
            "skip_modules": ["lm_head"],
        },
        4.5,
        "hqq4_g64",
        "bfloat16",
        False,
    ),
    "compressed int4": (compressed(INT4_WEIGHTS), 4.5, "int4_g32", "bfloat16", False),
    "compressed int4 with zero points": (
        compressed({**INT4_WEIGHTS, "symmetric": False}),
        4 + (16 + 4) / 32,
        "int4_g32_zero",
        "bfloat16",
        False,
    ),
    "compressed int3": (compressed({**INT4_WEIGHTS, "num_bits": 3}), 3.2 + 16 / 32, "int3_g32", "bfloat16", False),
    "compressed int4 with groups by activation": (
        compressed({**INT4_WEIGHTS, "actorder": "group"}),
        4.5 + 32 * (2 * HIDDEN + WIDTH) / (3 * HIDDEN * WIDTH),
        "int4_g32",
        "bfloat16",
        False,
    ),
    "compressed int8": (
        compressed(
            {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True},
            "int-quantized",
            input_activations={"num_bits": 8, "type": "int", "dynamic": True},
        ),
        8 + 16 * 1024 / 294912,
        "int8",
        "int8",
        False,
    ),
    "compressed fp8": (
        compressed(
            {"num_bits": 8, "type": "float", "strategy": "tensor"},
            "float-quantized",
            input_activations={"num_bits": 8, "type": "float", "dynamic": True},
        ),
        8,
        "fp8",
        "fp8",
        False,
    ),
    "compressed fp8 blocks": (
        compressed(
            {
                "num_bits": 8,
                "type": "float",
                "strategy": "block",
                "block_structure": "128x128",
                "scale_dtype": "torch.float32",
            },
            "float-quantized",
        ),
        8 + 32 / 128**2,
        "fp8_block128",
        "bfloat16",
        False,
    ),
    "compressed nvfp4": (
        {
            "quant_method": "compressed-tensors",
            "format": "nvfp4-pack-quantized",
            "config_groups": {"group_0": NVFP4_GROUP},
            "ignore": [],
        },
        4.5,
        "nvfp4",
        "nvfp4",
        True,
    ),
    "compressed mxfp4": (
        compressed(
            {"num_bits": 4, "type": "float", "group_size": 32, "scale_dtype": "torch.uint8"}, "mxfp4-pack-quantized"
        ),
        4.25,
        "mxfp4",
        "bfloat16",
        False,
    ),
    "modelopt fp8": ({"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}, 8, "fp8", "fp8", False),
    "modelopt without its name": ({"quant_algo": "FP8", "ignore": ["lm_head"]}, 8, "fp8", "fp8", False),
    "modelopt fp8 blocks": (
        {"quant_algo": "FP8_PB_WO", "ignore": ["lm_head"]},
        8 + 32 / 128**2,
        "fp8_block128",
        "bfloat16",
        False,
    ),
    "modelopt nvfp4": ({"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}, 4.5, "nvfp4", "nvfp4", False),
    "modelopt nvfp4 with head": ({"quant_algo": "NVFP4", "group_size": 16}, 4.5, "nvfp4", "nvfp4", True),
    "modelopt nvfp4 weights": ({"quant_algo": "W4A16_NVFP4", "ignore": ["lm_head"]}, 4.5, "nvfp4", "bfloat16", False),
    "modelopt w4a8 nvfp4": ({"quant_algo": "W4A8_NVFP4_FP8", "ignore": ["lm_head"]}, 4.25, "nvfp4", "fp8", False),
    "modelopt w4a8 awq": ({"quant_algo": "W4A8_AWQ", "ignore": ["lm_head"]}, 4.125, "int4_g128", "fp8", False),
    "modelopt mxfp8": ({"quant_algo": "MXFP8", "ignore": ["lm_head"]}, 8.25, "mxfp8", "mxfp8", False),
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_converts_the_matrices_of_the_layers(kind: str) -> None:
    quantization, bits, name, compute, head = KINDS[kind]
    storage = stored(quantization)
    assert storage.expert.name == name
    assert storage.expert.bits == pytest.approx(bits, rel=1e-12)
    assert compute_format(keys(quantization)) == compute
    assert (storage.head.bits < 16) == head
    for kept in ("embedding", "router", "norm"):
        assert getattr(storage, kept).name == "bfloat16"
    others = ("attention", "dense", "shared")
    assert all((getattr(storage, other).bits < 16) == (kind != "mxfp4") for other in others)


def test_vectors_and_convolutions_of_a_converted_class_stay() -> None:
    storage = stored({"quant_method": "fp8", "weight_block_size": None})
    matrices, rest = 2 * HIDDEN**2, HIDDEN + 64 + 4 * HIDDEN
    assert storage.attention.bits == pytest.approx((8 * matrices + 16 * rest) / (matrices + rest), rel=1e-12)


def test_ragged_blocks_count_whole() -> None:
    shape = network(head=(matrix("lm_head", 8, 8),))
    storage = stored({"quant_method": "fp8", "weight_block_size": [100, 150]}, shape)
    blocks = 2 * (4 * 2) + 3 * 3  # ceil(384/100) x ceil(256/150) twice, and ceil(256/100) x ceil(384/150)
    assert storage.expert.bits == pytest.approx(8 + 32 * blocks / (3 * HIDDEN * WIDTH), rel=1e-12)
    assert storage.expert.name == "fp8_block100x150"


def test_expert_dtype_of_the_config_itself() -> None:
    storage = stored({"quant_method": "fp8", "scale_fmt": "ue8m0"}, expert_dtype="fp4")
    assert (storage.expert.bits, storage.shared.bits) == (4.25, 8 + 32 / 128**2)
    for quantization in (None, {"quant_method": "mxfp4"}):
        with pytest.raises(ModelConfigError, match="expert_dtype"):
            stored(quantization, expert_dtype="fp4")
    with pytest.raises(ModelConfigError, match="'expert_dtype' is 'fp3'"):
        stored({"quant_method": "fp8"}, expert_dtype="fp3")


def test_embeddings_are_converted_when_named() -> None:
    assert (
        stored({"quant_method": "fp8", "modules_to_convert": ["model.embed_tokens"]}).embedding.name == "fp8_block128"
    )
    both = {"group_0": NVFP4_GROUP, "group_1": {"targets": ["Embedding"], "weights": {"num_bits": 8, "type": "float"}}}
    config = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "config_groups": both}
    with pytest.raises(ModelConfigError, match="num_bits"):
        stored(config)
    both["group_1"]["format"] = "float-quantized"
    storage = stored(config)
    assert (storage.embedding.name, storage.expert.name) == ("fp8", "nvfp4")


def test_a_tied_head_is_the_embedding_table() -> None:
    storage = stored({"quant_algo": "NVFP4"}, network(tied_embeddings=True))
    assert storage.head == storage.embedding
    assert storage.head.name == "bfloat16"


def test_what_only_a_neighbouring_file_says() -> None:
    beside = {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head", "model.layers.0.*"]}
    storage = stored(None, beside=beside)
    assert (storage.expert.name, storage.dense.name, storage.head.name) == ("nvfp4", "bfloat16", "bfloat16")
    neighbour = ConfigKeys({"quantization": beside}, "hf_quant_config.json")
    assert compute_format(keys(), neighbour) == "nvfp4"
    with pytest.raises(ModelConfigError, match=r"hf_quant_config.json: quantization: key 'quant_algo' is 'NVFP4'"):
        stored({"quant_algo": "FP8"}, beside=beside)
    with pytest.raises(ModelConfigError, match="quantization"):
        compute_format(keys(), ConfigKeys({}, "hf_quant_config.json"))


def test_a_neighbour_that_only_names_the_cache_leaves_weights() -> None:
    beside = {"quant_algo": None, "kv_cache_quant_algo": "FP8"}
    assert stored(None, beside=beside).expert.name == "bfloat16"
    assert kv_cache_bits(keys(), ConfigKeys({"quantization": beside}, "n")) == 8


def test_mixed_precision_of_listed_modules() -> None:
    listed: dict[str, Any] = {
        f"model.language_model.layers.{layer}.mlp.experts.{expert}.{name}": {"quant_algo": "NVFP4", "group_size": 16}
        for layer in range(1, LAYERS)
        for expert in range(EXPERTS)
        for name in ("gate_proj", "up_proj", "down_proj")
    }
    listed |= {
        f"model.language_model.layers.{layer}.self_attn.o_proj": {"quant_algo": "FP8"} for layer in range(LAYERS)
    }
    config = {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": listed,
        "ignore": ["mtp*"],
    }
    storage = stored(config)
    assert (storage.expert.name, storage.expert.bits) == ("nvfp4", 4.5)
    assert storage.attention.name == "bfloat16+fp8"
    assert storage.shared.name == storage.dense.name == storage.head.name == "bfloat16"
    assert compute_format(keys(config)) == "fp8+nvfp4"
    del listed["model.language_model.layers.1.mlp.experts.7.gate_proj"]
    one = HIDDEN * WIDTH / class_params(network())["expert"]
    assert stored(config).expert.bits == pytest.approx(4.5 * (1 - one) + 16 * one, rel=1e-12)


def test_fp8_blocks_with_nvfp4_experts() -> None:
    config = {
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "quant_algo": "MIXED_PRECISION",
        "moe_quant_algo": "NVFP4",
        "quantized_layers": {f"layers.{layer}.mlp.experts": {"quant_algo": "NVFP4"} for layer in range(1, 6)},
        "ignore": ["*.attn.*", "head"],
    }
    storage = stored(config, expert_dtype="fp4")
    assert storage.expert.bits == pytest.approx((5 * 4.5 + 6 * 4.25) / 11, rel=1e-12)
    assert storage.attention.name == "fp8_block128+bfloat16"  # vectors and the convolution
    assert compute_format(keys(config, expert_dtype="fp4")) == "fp8+nvfp4"


def test_gptq_gives_modules_other_numbers() -> None:
    config = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True}
    rules = {"-:.*self_attn": {}, r"+:.*\.shared_experts\.": {"bits": 8, "group_size": 32}}
    storage = stored({**config, "dynamic": rules})
    assert (storage.attention.name, storage.shared.name, storage.expert.name) == (
        "bfloat16",
        "int8_g32_zero",
        "int4_g128_zero",
    )
    inside = stored({**config, "modules_in_block_to_quantize": [["self_attn.q_proj"], ["mlp.experts"]]})
    assert inside.attention.name in ("int4_g128_zero+bfloat16", "bfloat16+int4_g128_zero")
    assert (inside.shared.name, inside.expert.name) == ("bfloat16", "int4_g128_zero")


def test_auto_round_keeps_single_modules() -> None:
    config = {"quant_method": "auto-round", "bits": 4, "group_size": 128, "packing_format": "auto_round:auto_awq"}
    extra = {f"model.layers.{layer}.mlp.shared_experts": {"bits": 16} for layer in range(1, LAYERS)}
    storage = stored({**config, "extra_config": extra})
    assert (storage.shared.name, storage.expert.name) == ("bfloat16", "int4_g128_zero")


def test_matrices_that_are_no_linear_maps_stay() -> None:
    shape = network(head=(matrix("lm_head", 8, 8),))
    names = ("A_log", "relative_attention_bias", "indexer.weights_proj", "compressor.kv_proj")
    attention = dataclasses.replace(shape.attention[0], tensors=tuple(Tensor(name, (64, 64)) for name in names))
    storage = stored({"quant_method": "fp8"}, dataclasses.replace(shape, attention=(attention,)))
    assert storage.attention.name == "bfloat16"


@pytest.mark.parametrize(
    ("quantization", "said"),
    [
        ({"quant_method": "aqlm"}, r"'quant_method' is 'aqlm'; allowed: one of fp8"),
        ({"quant_method": None}, "quant_method"),
        ({}, "quant_method"),
        ({"quant_method": 4}, "quant_method"),
        ([], "quantization_config"),
        ("fp8", "quantization_config"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size"),
        ({"quant_method": "fp8", "weight_block_size": [128, 0]}, "weight_block_size"),
        ({"quant_method": "fp8", "activation_scheme": "fast"}, "activation_scheme"),
        ({"quant_method": "fp8", "group_size": 64}, "group_size.*may change sizes"),
        ({"quant_method": "fp8", "quant_algo": "NVFP4"}, "quant_algo"),
        ({"quant_method": "fp8", "modules_to_not_convert": "lm_head"}, "modules_to_not_convert"),
        ({"quant_method": "fp8", "modules_to_not_convert": [4]}, "modules_to_not_convert"),
        ({"quant_method": "gptq", "bits": 9, "group_size": 128}, "'bits' is 9"),
        ({"quant_method": "gptq", "bits": 4}, "'group_size' is missing"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "'group_size' is 0"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "format": "marlin"}, "format"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "dynamic": {"-:(a+)+": {}}}, "quickly"),
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "low_rank": 8}, "low_rank"),
        ({"quant_method": "bitsandbytes"}, "load_in_4bit"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": True}, "load_in_4bit"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf5"}, "nf5"),
        ({"quant_method": "hqq", "quant_config": {}}, "quant_config"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP5"}, "'quant_algo' is 'NVFP5'"),
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, "quantized_layers"),
        ({"quant_algo": "NVFP4", "group_size": 20}, "group_size"),
        ({"quant_algo": "NVFP4", "config_groups": {"g": {"weights": {"num_bits": 8}}}}, "num_bits"),
        ({"quant_algo": "NVFP4", "quantized_layers": {"lm_head": {"quant_algo": "FP8"}}}, "MIXED_PRECISION"),
        ({"quant_algo": "MIXED_PRECISION", "quantized_layers": {"lm_head": "FP8"}}, "'lm_head' is 'FP8'"),
        ({"quant_algo": "MIXED_PRECISION", "quantized_layers": {"lm_head": {"quant_algo": []}}}, "'lm_head' is"),
        ({"quant_algo": "MIXED_PRECISION", "quantized_layers": {4: {"quant_algo": "FP8"}}}, "4 is"),
        (
            {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"model.layer.0": {"quant_algo": "FP8"}}},
            "nowhere in this network",
        ),
        (compressed(INT4_WEIGHTS, "marlin-24"), "'format' is 'marlin-24'"),
        (compressed(INT4_WEIGHTS, sparsity_config={"format": "sparse-24-bitmask"}), "sparse-24"),
        (compressed({**INT4_WEIGHTS, "num_bits": 9}), "num_bits"),
        (compressed({**INT4_WEIGHTS, "strategy": "spiral"}), "strategy"),
        (compressed({**INT4_WEIGHTS, "type": "float"}), "type"),
        (compressed({**INT4_WEIGHTS, "outlier_rank": 8}), "outlier_rank"),
        (compressed({**INT4_WEIGHTS, "strategy": "block", "block_structure": "1e9"}), "block_structure"),
        ({**compressed(INT4_WEIGHTS), "config_groups": {}}, "config_groups"),
        (
            {**compressed(INT4_WEIGHTS), "config_groups": {"a": {"targets": ["Conv1d"], "weights": INT4_WEIGHTS}}},
            "targets",
        ),
    ],
)
def test_what_is_not_understood_is_refused_by_name(quantization: Any, said: str) -> None:
    with pytest.raises(ModelConfigError, match=said) as caught:
        stored(quantization)
    assert "\n" not in str(caught.value)


def test_keys_without_size_may_stand_beside() -> None:
    plain = stored({"quant_method": "fp8"})
    assert stored({"quant_method": "fp8", "comment": "made by hand", "version": 3, "calibration": {"bits": 4}}) == plain
    assert stored({"quant_method": "FP8", "fmt": "e4m3", "producer": {"name": "x"}, "ignore": []}) == plain


@pytest.mark.parametrize(
    ("values", "bits"),
    [
        ({"kv_cache_quant_algo": None}, None),
        ({"kv_cache_quant_algo": "FP8"}, 8),
        ({"kv_cache_quant_algo": "NVFP4"}, 4.5),
        ({"kv_cache_scheme": None}, None),
        ({"kv_cache_scheme": "FP8"}, 8),
        ({"kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False}}, 8),
        ({"kv_cache_scheme": {"num_bits": 4, "type": "float", "group_size": 16}}, 4.5),
        ({}, None),
    ],
)
def test_precision_of_the_cache(values: dict[str, Any], bits: float | None) -> None:
    assert kv_cache_bits(keys({"quant_algo": "FP8", **values})) == bits


@pytest.mark.parametrize(
    "value", ["FP9", 8, True, [], {"num_bits": 5}, {"num_bits": 4}, {"num_bits": 4, "group_size": 32}]
)
def test_an_unknown_precision_of_the_cache_is_refused(value: Any) -> None:
    with pytest.raises(ModelConfigError, match="allowed"):
        kv_cache_bits(keys({"quant_algo": "FP8", "kv_cache_scheme": value}))


def test_every_class_is_in_the_small_network() -> None:
    assert all(class_params(network())[name] > 0 for name in CLASSES)
