"""Networks that mix attention with state spaces, linear attention or attention to picked blocks.

The totals and layers of the small networks were counted with the classes of Transformers 5.24 on its meta device (with
the score corrections of routers, which are buffers there); those of the real configs likewise.
"""

from pathlib import Path
from typing import Any

import pytest
from layer_counts import layer_params, refused

from perfmodel.model import MoEModel

SIZES = {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 100}
NEMOTRON = {
    **SIZES, "model_type": "nemotron_h", "head_dim": 16, "intermediate_size": 40, "hybrid_override_pattern": "ME*-ME",
    "mamba_num_heads": 6, "mamba_head_dim": 8, "n_groups": 2, "ssm_state_size": 12, "conv_kernel": 4,
    "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
    "n_shared_experts": 1, "moe_shared_expert_intermediate_size": 36,
}  # fmt: skip
JAMBA = {
    **SIZES, "model_type": "jamba", "num_hidden_layers": 8, "intermediate_size": 48,
    "attn_layer_period": 4, "attn_layer_offset": 2, "expert_layer_period": 2, "expert_layer_offset": 1,
    "num_experts": 4, "num_experts_per_tok": 2,
    "mamba_d_state": 5, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_dt_rank": "auto",
}  # fmt: skip
LIGHTNING = {
    **SIZES, "model_type": "minimax_m1", "head_dim": 16, "num_hidden_layers": 4, "intermediate_size": 24,
    "num_local_experts": 8, "num_experts_per_tok": 2, "attn_type_list": [0, 0, 0, 1],
}  # fmt: skip
SPARSE = {
    "use_sparse_attention": True, "sparse_attention_freq": [0, 0, 1, 1], "sparse_disable_index_value": [0, 0, 1, 1],
    "sparse_index_dim": 12, "sparse_num_index_heads": 2, "sparse_block_size": 16, "sparse_topk_blocks": 4,
}  # fmt: skip
M3 = {
    **SIZES, "model_type": "minimax_m3", "head_dim": 16, "num_hidden_layers": 4, "intermediate_size": 24,
    "dense_intermediate_size": 80, "shared_intermediate_size": 28, "num_local_experts": 8, "num_experts_per_tok": 2,
    "moe_layer_freq": [0, 1, 1, 1], "sparse_attention_config": SPARSE,
}  # fmt: skip
GRANITE = {
    **SIZES, "model_type": "granitemoehybrid", "num_hidden_layers": 3, "intermediate_size": 24,
    "num_local_experts": 8, "num_experts_per_tok": 2, "shared_intermediate_size": 20,
    "layer_types": ["mamba", "attention", "mamba"], "mamba_n_heads": 16, "mamba_d_head": 8, "mamba_n_groups": 2,
    "mamba_d_state": 12, "mamba_d_conv": 4, "mamba_expand": 2,
}  # fmt: skip
LFM2 = {
    **SIZES, "model_type": "lfm2_moe", "num_hidden_layers": 4, "intermediate_size": 80, "moe_intermediate_size": 24,
    "num_experts": 8, "num_experts_per_tok": 2, "num_dense_layers": 1, "conv_L_cache": 3,
    "layer_types": ["conv", "full_attention", "conv", "conv"],
}  # fmt: skip


def without(config: dict[str, Any], *words: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if not any(word in key for word in words)}


COUNTS: dict[str, tuple[dict[str, Any], int, list[int]]] = {
    "nemotron": (NEMOTRON, 124_692, [13282, 29768, 20544, 5184, 13282, 29768]),
    "nemotron, latent experts, biases of the state spaces": (
        {
            **without(NEMOTRON, "pattern"), "layers_block_type": ["mamba", "moe", "attention", "moe", "mlp"],
            "moe_latent_size": 20, "use_bias": True, "use_conv_bias": False,
        },
        82_856,
        [13400, 15432, 20544, 15432, 5184],
    ),
    "nemotron, dense, with biases": (
        {**without(NEMOTRON, "expert", "moe"), "hybrid_override_pattern": "M-*-", "mlp_bias": True},
        57_266,
        [13282, 5288, 20544, 5288],
    ),
    "jamba": (JAMBA, 390_292, [37774, 65678, 19584, 65678] * 2),
    "jamba, other biases and rank": (
        {**JAMBA, "mamba_proj_bias": True, "mamba_conv_bias": False, "mamba_dt_rank": 7},
        396_070,
        [38737, 66641, 19584, 66641] * 2,
    ),
    "jamba, one expert": ({**JAMBA, "num_experts": 1}, 278_676, [37774, 37774, 19584, 37774] * 2),
    "minimax m1": (LIGHTNING, 306_624, [78592, 78592, 78592, 57984]),
    "minimax, kinds by name": (
        {
            **without(LIGHTNING, "attn_type_list"), "model_type": "minimax",
            "layer_types": ["linear_attention", "full_attention"] * 2,
        },
        286_016,
        [78592, 57984] * 2,
    ),
    "minimax m3": (M3, 243_720, [36000, 63400, 65728, 65728]),
    "granite": (GRANITE, 206_592, [71072, 51584, 71072]),
    "granite, dense": (
        {**GRANITE, "num_local_experts": 0, "num_experts_per_tok": 0, "mamba_proj_bias": True},
        95_232,
        [34080, 14208, 34080],
    ),
    "lfm2": (LFM2, 194_472, [32064, 47768, 54088, 54088]),
    "lfm2, untied, with biases, layers by index": (
        {
            **without(LFM2, "layer_types"), "full_attn_idxs": [1], "conv_L_cache": 4, "conv_bias": True,
            "use_expert_bias": False, "tie_embedding": False,
        },
        202_000,
        [32448, 47760, 54464, 54464],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", COUNTS)
def test_every_layer_has_the_parameters_of_its_class_in_transformers(name: str) -> None:
    config, total, layers = COUNTS[name]
    model = MoEModel.from_config(config)
    assert model.total_params == total
    assert layer_params(model) == layers


#: Parameters of the language model; Nemotron with the bias of the scores.
REAL = {
    "nvidia__NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": 31_577_937_344 + 23 * 128,
    "nvidia__NVIDIA-Nemotron-3.5-Lightning-30B-A3B-NVFP4": 31_577_937_344 + 23 * 128,
    "nvidia__NVIDIA-Nemotron-3-Super-120B-A12B-FP8": 120_668_687_360 + 40 * 512,
    "nvidia__NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16": 549_308_968_960 + 48 * 512,
    "nvidia__Nemotron-H-56B-Base-8K": 56_324_350_464,
    "ai21labs__AI21-Jamba-1.5-Large": 398_555_145_696,
    "ai21labs__AI21-Jamba-1.5-Mini": 51_570_323_328,
    "MiniMaxAI__MiniMax-M1-80k": 456_089_655_296,
    "MiniMaxAI__MiniMax-M3": 426_174_565_632 + 57 * 128,
    "nvidia__MiniMax-M3-NVFP4": 426_174_565_632 + 57 * 128,
}


@pytest.mark.parametrize("name", REAL)
def test_real_configs_count_as_in_transformers(name: str, shared: Path) -> None:
    assert MoEModel.from_config(shared / "configs" / name).total_params == REAL[name]


def test_nemotron_layers_have_one_part_each() -> None:
    model = MoEModel.from_config(NEMOTRON)
    mixers = {kind.name: kind.layers for kind in model.attention}
    networks = {kind.name: kind.layers for kind in model.feed_forward}
    assert mixers == {"mamba": (0, 4), "full": (2,), "none": (1, 3, 5)}
    assert networks == {"dense": (3,), "moe": (1, 5), "none": (0, 2, 4)}
    assert model.num_layers == 6


def test_nemotron_names_its_layers_in_two_ways_that_must_agree() -> None:
    names = ["mamba", "moe", "attention", "mlp", "mamba", "moe"]
    letters, listed = NEMOTRON, {**without(NEMOTRON, "pattern"), "layers_block_type": names}
    assert MoEModel.from_config(letters).attention == MoEModel.from_config(listed).attention
    assert MoEModel.from_config({**letters, "layers_block_type": names}).num_layers == 6
    assert "hybrid_override_pattern" in refused(letters, layers_block_type=names[::-1])
    assert "num_hidden_layers" in refused(letters, num_hidden_layers=7)
    assert MoEModel.from_config({**letters, "num_hidden_layers": 6}).num_layers == 6


def test_lfm2_names_its_layers_in_two_ways_that_must_agree() -> None:
    model = MoEModel.from_config(LFM2)
    assert {kind.name: kind.layers for kind in model.attention} == {"convolution": (0, 2, 3), "full": (1,)}
    assert model.moe_layers == (1, 2, 3)
    assert MoEModel.from_config({**without(LFM2, "layer_types"), "full_attn_idxs": [1]}).attention == model.attention
    assert MoEModel.from_config({**LFM2, "full_attn_idxs": [1]}).attention == model.attention
    assert "full_attn_idxs" in refused(LFM2, full_attn_idxs=[1, 2])
    assert "tie_embedding" in refused(LFM2, tie_embedding=False, tie_word_embeddings=True)


def test_latent_experts_work_on_the_latent() -> None:
    model = MoEModel.from_config({**NEMOTRON, "moe_latent_size": 20})
    assert model.expert_matrices == ((20, 24), (24, 20))
    (moe,) = (kind for kind in model.feed_forward if kind.experts is not None)
    assert [one.shape for one in moe.dense] == [(20, 64), (64, 20)]
    assert any("moe_latent_size = none" in one for one in MoEModel.from_config(NEMOTRON).assumptions)


def test_constant_states_do_not_grow() -> None:
    # Elements of the states, by their definition: heads * head_dim * state; channels * (kernel - 1).
    nemotron = MoEModel.from_config(NEMOTRON).kv_parts(1000)
    assert nemotron["recurrent state"] == 2 * (6 * 8 * 12) * 4
    assert nemotron["convolution state"] == 2 * (6 * 8 + 2 * 2 * 12) * 3 * 2
    assert nemotron["keys and values"] == 1000 * 2 * 2 * 16 * 2
    jamba = MoEModel.from_config(JAMBA).kv_parts(1000)
    assert jamba["recurrent state"] == 6 * (128 * 5) * 4
    assert jamba["convolution state"] == 6 * 128 * 3 * 2
    assert jamba["keys and values"] == 2 * 1000 * 2 * 2 * 8 * 2
    lfm2 = MoEModel.from_config(LFM2).kv_parts(1000)
    assert lfm2 == {"convolution state": 3 * 64 * 2 * 2, "keys and values": 1000 * 2 * 2 * 8 * 2}
    lightning = MoEModel.from_config(LIGHTNING).kv_parts(1000)
    assert lightning == {"recurrent state": 3 * 8 * 16 * 16 * 4, "keys and values": 1000 * 2 * 2 * 16 * 2}


def test_block_sparse_attention_keeps_all_and_reads_what_it_picks() -> None:
    model = MoEModel.from_config(M3)
    entry, index = 2 * 2 * 16 * 2, 12 * 2
    assert model.kv_parts(1000) == {"keys and values": 4 * 1000 * entry, "index keys": 2 * 1000 * index}
    picked = 4 * 16
    assert model.kv_read_parts(1000) == {
        "keys and values": (2 * 1000 + 2 * picked) * entry,
        "index keys": 2 * 1000 * index,
    }
    plain = MoEModel.from_config({**M3, "sparse_attention_config": {**SPARSE, "use_sparse_attention": False}})
    assert model.total_params - plain.total_params == 2 * ((2 + 1) * 12 * 64 + 2 * 12)
    assert plain.kv_read_bytes(1000) == plain.kv_bytes(1000) == 4 * 1000 * entry


def test_the_text_part_of_a_model_that_sees_counts_alike() -> None:
    text = without(M3, "model_type")
    whole = {"model_type": "minimax_m3_vl", "text_config": text, "vision_config": {"hidden_size": 32}}
    model = MoEModel.from_config(whole)
    assert model.total_params == MoEModel.from_config(M3).total_params
    assert any("vision_config" in one for one in model.assumptions)


@pytest.mark.parametrize(
    ("config", "key", "value"),
    [
        (NEMOTRON, "hybrid_override_pattern", "MXE"),
        (NEMOTRON, "hybrid_override_pattern", ""),
        (NEMOTRON, "hybrid_override_pattern", "EE"),
        (NEMOTRON, "hybrid_override_pattern", "M" * 10_001),
        (NEMOTRON, "hybrid_override_pattern", ...),
        (NEMOTRON, "layers_block_type", ["mamba", "maze"]),
        (NEMOTRON, "moe_shared_expert_intermediate_size", ...),
        (NEMOTRON, "n_shared_experts", 2),
        (NEMOTRON, "n_shared_experts", ...),
        (NEMOTRON, "mlp_bias", True),
        (NEMOTRON, "mamba_proj_bias", True),
        (NEMOTRON, "sliding_window", 4096),
        (NEMOTRON, "intermediate_size", ...),
        (JAMBA, "attn_layer_offset", 4),
        (JAMBA, "expert_layer_offset", 9),
        (JAMBA, "mamba_dt_rank", "most"),
        (JAMBA, "mamba_inner_layernorms", False),
        (JAMBA, "num_experts_per_tok", 5),
        (JAMBA, "sliding_window", 4096),
        (LIGHTNING, "attn_type_list", [0, 0, 1]),
        (LIGHTNING, "attn_type_list", [0, 0, 0, 2]),
        (LIGHTNING, "shared_intermediate_size", 32),
        (M3, "moe_layer_freq", [0, 1, 1]),
        (M3, "moe_layer_freq", [0, 0, 0, 0]),
        (M3, "first_k_dense_replace", 2),
        (M3, "moe_intermediate_size", 32),
        (M3, "n_shared_experts", 2),
        (M3, "attention_output_gate", True),
        (M3, "qk_norm_type", "per_layer"),
        (M3, "dense_intermediate_size", ...),
        (M3, "sparse_attention_config", ...),
        (M3, "sparse_attention_config", {**SPARSE, "sparse_disable_index_value": [0, 0, 0, 1]}),
        (M3, "sparse_attention_config", {**SPARSE, "sparse_attention_freq": [1]}),
        (GRANITE, "layer_types", ["mamba", "attention", "linear"]),
        (GRANITE, "mamba_expand", 3),
        (GRANITE, "shared_intermediate_size", ...),
        (LFM2, "layer_types", ...),
        (LFM2, "layer_types", ["conv", "full_attention", "conv"]),
        (LFM2, "layer_types", ["conv", "sliding_attention", "conv", "conv"]),
        (without(LFM2, "layer_types"), "full_attn_idxs", [4]),
        (without(LFM2, "layer_types"), "full_attn_idxs", [True]),
        (LFM2, "conv_L_cache", ...),
        (LFM2, "conv_dim", 32),
        (LFM2, "num_dense_layers", ...),
        (LFM2, "num_dense_layers", 4),
        (LFM2, "num_experts_per_tok", 9),
        (LFM2, "num_shared_experts", 1),
        (LFM2, "moe_layer_freq", 2),
    ],
)
def test_what_cannot_be_counted_is_refused_by_its_key(config: dict[str, Any], key: str, value: Any) -> None:
    assert key in refused(config, **{key: value})
