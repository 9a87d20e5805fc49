"""Families with one kind of token mixer, or layers that differ in heads, windows and experts.

The totals and layers of the small networks were counted with the classes of Transformers 5.24 on its meta device (with
the score corrections of routers, which are buffers there); Arctic and Grok-1, which it lacks, by hand.
"""

from pathlib import Path
from typing import Any

import pytest
from layer_counts import layer_params, refused

from perfmodel.model import MoEModel

SIZES = {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 100}
EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 24}
OWN_WIDTH = {"num_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 80, "moe_intermediate_size": 24}
SLIDING, FULL = "sliding_attention", "full_attention"
M2 = {**SIZES, **EXPERTS, "model_type": "minimax_m2", "num_hidden_layers": 4, "head_dim": 16}
DBRX = {
    "model_type": "dbrx", "d_model": 64, "n_heads": 8, "n_layers": 3, "vocab_size": 100,
    "attn_config": {"kv_n_heads": 2},
    "ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 8, "moe_top_k": 2, "moe_loss_weight": 0.05},
}  # fmt: skip
ERNIE = {
    **SIZES, "model_type": "ernie4_5_moe", "num_hidden_layers": 5, "intermediate_size": 80, "moe_intermediate_size": 24,
    "moe_num_experts": 8, "moe_k": 2, "moe_num_shared_experts": 2, "moe_layer_start_index": 1,
    "moe_layer_end_index": 3, "moe_layer_interval": 2,
}  # fmt: skip
GRANITE = {**SIZES, **EXPERTS, "model_type": "granitemoe", "num_hidden_layers": 3}
HUNYUAN = {
    **SIZES, "model_type": "hunyuan_v1_moe", "num_hidden_layers": 3, "attention_head_dim": 16, "intermediate_size": 24,
    "attention_bias": True, "num_experts": 8, "moe_topk": [2, 3, 2], "num_shared_expert": 1,
}  # fmt: skip
CLA = {
    **HUNYUAN, "model_type": "hunyuan", "attention_bias": False, "use_cla": True, "cla_share_factor": 2,
    "use_mixed_mlp_moe": True, "use_qk_norm": True,
}  # fmt: skip
EXAONE = {
    **SIZES, **OWN_WIDTH, "model_type": "exaone_moe", "num_hidden_layers": 4, "head_dim": 16, "num_shared_experts": 1,
    "first_k_dense_replace": 1, "layer_types": [SLIDING, SLIDING, SLIDING, FULL], "sliding_window": 32,
}  # fmt: skip
MIMO = {**SIZES, "model_type": "mimo", "num_hidden_layers": 2, "head_dim": 16, "intermediate_size": 80}
MIMO_V2 = {
    **SIZES, "model_type": "mimo_v2_flash", "num_hidden_layers": 6, "head_dim": 16, "v_head_dim": 10,
    "intermediate_size": 80, "moe_intermediate_size": 24, "n_routed_experts": 8, "n_shared_experts": None,
    "num_experts_per_tok": 2, "moe_layer_freq": [0, 1, 1, 1, 1, 1], "hybrid_layer_pattern": [0, 1, 1, 1, 1, 0],
    "sliding_window": 32, "swa_num_attention_heads": 8, "swa_num_key_value_heads": 4, "swa_head_dim": 16,
    "swa_v_head_dim": 10, "add_swa_attention_sink_bias": True, "add_full_attention_sink_bias": False,
}  # fmt: skip
STEP = {
    **SIZES, **OWN_WIDTH, "model_type": "step3p7", "num_hidden_layers": 4, "head_dim": 16, "share_expert_dim": 28,
    "first_k_dense_replace": 1, "layer_types": [FULL, SLIDING, SLIDING, SLIDING], "sliding_window": 32,
}  # fmt: skip
AFMOE = {
    **SIZES, **OWN_WIDTH, "model_type": "afmoe", "num_hidden_layers": 4, "head_dim": 16, "num_shared_experts": 1,
    "num_dense_layers": 1, "sliding_window": 32, "global_attn_every_n_layers": 4,
}  # fmt: skip
ARCTIC = {
    **SIZES, **EXPERTS, "model_type": "arctic", "num_hidden_layers": 4, "moe_layer_frequency": 2, "use_residual": True,
    "parallel_attn_mlp_res": True,
}  # fmt: skip
GROK = {**SIZES, "model_type": "grok-1", "num_hidden_layers": 2, "intermediate_size": 24} | {
    "num_experts": 8, "num_experts_per_tok": 2
}  # fmt: skip

_ATTENTION, _EXPERT = (2 * 64 + 2 * 16) * 64, 3 * 64 * 24  # 8 query and 2 key-value heads of 8
COUNTS: dict[str, tuple[dict[str, Any], int, list[int]]] = {
    "minimax m2": (M2, 245_472, [58152] * 4),
    "dbrx": (DBRX, 156_096, [47744] * 3),
    "ernie": (ERNIE, 197_584, [25728, 56968, 25728, 56968, 25728]),
    "ernie, untied": ({**ERNIE, "tie_word_embeddings": False}, 203_984, [25728, 56968, 25728, 56968, 25728]),
    "granite": (GRANITE, 156_096, [47744] * 3),
    "granite, biases, tied": ({**GRANITE, "attention_bias": True, "tie_word_embeddings": True}, 150_176, [47904] * 3),
    "granite, shared": (
        {**GRANITE, "model_type": "granitemoeshared", "shared_intermediate_size": 20}, 167_616, [51584] * 3
    ),
    "hunyuan": (HUNYUAN, 201_504, [62880] * 3),
    "hunyuan, keys and values of the layer before": (CLA, 196_640, [62624, 58528, 62624]),
    "exaone": (EXAONE, 236_760, [36000, 62632, 62632, 62632]),
    "mimo": (MIMO, 85_184, [36160] * 2),
    "mimo v2": (MIMO_V2, 329_096, [32128, 57488, 57488, 57488, 57488, 54152]),
    "step": (STEP, 241_112, [36512, 63912, 63912, 63912]),
    "afmoe": (AFMOE, 270_040, [44320, 70952, 70952, 70952]),
    "arctic": (
        ARCTIC,
        2 * 6400 + 64 + 4 * (_ATTENTION + 128) + 2 * _EXPERT + 2 * (8 * _EXPERT + 8 * 64 + 3 * 64 * 64 + 64),
        [_ATTENTION + 128 + _EXPERT, _ATTENTION + 128 + 8 * _EXPERT + 8 * 64 + 3 * 64 * 64 + 64] * 2,
    ),
    "grok": (
        GROK,
        6400 + 64 + 2 * (_ATTENTION + 4 * 64 + 8 * 64 + 8 * _EXPERT),
        [_ATTENTION + 4 * 64 + 8 * 64 + 8 * _EXPERT] * 2,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", COUNTS)
def test_every_layer_has_the_parameters_of_its_class_in_transformers(name: str) -> None:
    config, total, layers = COUNTS[name]
    model = MoEModel.from_config(config)
    assert layer_params(model) == layers
    assert model.total_params == total


#: Parameters as Transformers 5.24 counts them, and the bias of the scores of each router.
REAL = {
    "MiniMaxAI__MiniMax-M2.5": 228_689_748_992 + 62 * 256,
    "nvidia__MiniMax-M2.5-NVFP4": 228_689_748_992 + 62 * 256,
    "databricks__dbrx-base": 131_596_523_520,
    "ibm-granite__granite-3.1-1b-a400m-instruct": 1_334_628_352,
    "ibm-granite__granite-3.1-3b-a800m-instruct": 3_298_793_472,
    "baidu__ERNIE-4.5-21B-A3B-PT": 21_825_437_888,
    "tencent__Hunyuan-A13B-Instruct": 80_393_183_232,
    "tencent__Tencent-Hunyuan-Large": 388_698_128_640,
    "LGAI-EXAONE__K-EXAONE-236B-A23B": 236_571_150_336 + 47 * 128,
    "XiaomiMiMo__MiMo-7B-Base": 7_622_619_136,
    "XiaomiMiMo__MiMo-V2-Flash": 308_778_768_832 + 47 * 256,
    "stepfun-ai__Step-3.7-Flash": 195_844_496_640 + 42 * 288,
    "stepfun-ai__Step-3.7-Flash-FP8": 195_844_496_640 + 42 * 288,
    # Not in Transformers: Mixtral's parts, a dense network with its norm in each layer, and two more norms.
    "Snowflake__snowflake-arctic-base": 478_584_608_768,
    "xai-org__grok-1": 315_684_034_560 + 2 * 64 * 6144,
}


@pytest.mark.parametrize("name", REAL)
def test_real_configs_count_as_in_transformers(name: str, shared: Path) -> None:
    assert MoEModel.from_config(shared / "configs" / name).total_params == REAL[name]


def test_layers_of_different_experts_are_kinds_of_their_own() -> None:
    config = {**HUNYUAN, "moe_intermediate_size": [24, 24, 16], "num_shared_expert": [1, 2, 1]}
    kinds = MoEModel.from_config(config).feed_forward
    found = [(kind.layers, kind.experts.size, kind.experts.top_k) for kind in kinds if kind.experts is not None]
    assert found == [((0,), 24, 2), ((1,), 24, 3), ((2,), 16, 2)]
    assert [kind.shared[0].shape[0] for kind in kinds] == [24, 48, 16]
    (first, second) = MoEModel.from_config(HUNYUAN).feed_forward
    assert (first.layers, second.layers) == ((0, 2), (1,))
    plain = MoEModel.from_config({**HUNYUAN, "use_mixed_mlp_moe": False, "moe_layer_num_skipped": 1})
    assert [kind.name for kind in plain.feed_forward] == ["dense", "moe", "moe"]
    assert not any(kind.shared for kind in plain.feed_forward)


def test_layers_without_keys_and_values_of_their_own_keep_none() -> None:
    own, shared_layers = MoEModel.from_config(CLA), {**CLA, "cla_share_factor": 3}
    entry = 2 * 2 * 16 * 2
    assert own.kv_bytes(100) == 2 * 100 * entry
    assert MoEModel.from_config(shared_layers).kv_bytes(100) == 100 * entry
    assert any("use_cla" in one for one in own.assumptions)


def test_windows_and_heads_that_differ_by_layer() -> None:
    # Keys of 16 and values of 10 numbers: 2 heads in two layers, 4 heads in the four layers with a window.
    mimo = MoEModel.from_config(MIMO_V2)
    assert mimo.kv_bytes(100) == (2 * 100 * 2 + 4 * 32 * 4) * (16 + 10) * 2
    assert {kind.name: kind.layers for kind in mimo.attention} == {"full": (0, 5), "sliding": (1, 2, 3, 4)}
    exaone = MoEModel.from_config(EXAONE)
    assert exaone.kv_bytes(100) == (100 + 3 * 32) * 2 * 2 * 16 * 2
    afmoe = MoEModel.from_config(AFMOE)
    assert afmoe.kv_bytes(100) == (100 + 3 * 32) * 2 * 2 * 16 * 2
    listed = {key: value for key, value in AFMOE.items() if key != "global_attn_every_n_layers"}
    assert MoEModel.from_config({**listed, "layer_types": [SLIDING] * 3 + [FULL]}).attention == afmoe.attention
    other = {"attention_type": SLIDING, "num_attention_heads": 12, "num_attention_groups": 4, "head_dim": 16}
    step = MoEModel.from_config({**STEP, "attention_other_setting": other})
    assert step.kv_bytes(100) == (100 * 2 + 3 * 32 * 4) * 2 * 16 * 2
    grown = (2 * 4 * 16 + 2 * 2 * 16 + 4) * 64  # four query heads, two key-value heads and four gates more
    assert step.total_params - MoEModel.from_config(STEP).total_params == 3 * grown


def test_what_runs_beside_the_experts_is_read_by_every_token() -> None:
    model = MoEModel.from_config(ARCTIC)
    assert model.params_by_class()["dense"] == 2 * (_EXPERT + 3 * 64 * 64)
    assert model.total_params - model.active_params == 2 * 6 * _EXPERT
    lone = MoEModel.from_config({**ARCTIC, "use_residual": False, "parallel_attn_mlp_res": False})
    assert model.total_params - lone.total_params == 2 * (3 * 64 * 64 + 64)


def test_layers_for_multi_token_prediction_are_left_out_and_said() -> None:
    for config, key in (
        (M2, "num_mtp_modules"),
        (STEP, "num_nextn_predict_layers"),
        (MIMO, "num_nextn_predict_layers"),
    ):
        more = MoEModel.from_config({**config, key: 3})
        assert more.total_params == MoEModel.from_config(config).total_params
        assert any(f"3 layers for multi-token prediction left out ({key})" in one for one in more.assumptions)


@pytest.mark.parametrize(
    ("config", "key", "value"),
    [
        (M2, "qk_norm_type", "per_head"),
        (M2, "use_qk_norm", False),
        (M2, "use_routing_bias", False),
        (M2, "shared_intermediate_size", 24),
        (M2, "attn_type_list", [1, 0, 1, 1]),
        (DBRX, "ffn_config", {"ffn_hidden_size": 24, "moe_num_experts": 8}),
        (DBRX, "attn_config", ...),
        (DBRX, "n_heads", 7),
        (ERNIE, "moe_layer_end_index", 5),
        (ERNIE, "moe_layer_start_index", 4),
        (ERNIE, "moe_layer_interval", 0),
        (ERNIE, "moe_num_shared_experts", ...),
        (ERNIE, "moe_use_aux_free", False),
        (ERNIE, "use_bias", True),
        (GRANITE, "num_experts_per_tok", 9),
        (GRANITE, "shared_expert_size", 9),
        (HUNYUAN, "moe_topk", [2, 3]),
        (HUNYUAN, "moe_topk", [2, 9, 2]),
        (HUNYUAN, "num_shared_expert", ...),
        (HUNYUAN, "n_group", 4),
        (HUNYUAN, "use_mla", True),
        (CLA, "cla_share_factor", ...),
        (CLA, "use_cla", ...),
        (CLA, "use_qk_norm", ...),
        (EXAONE, "is_moe_layer", [False, True, True, False]),
        (EXAONE, "first_k_dense_replace", ...),
        (EXAONE, "sliding_window", ...),
        (EXAONE, "num_shared_experts", ...),
        (MIMO, "attention_bias", False),
        (MIMO_V2, "hybrid_layer_pattern", [0, 1]),
        (MIMO_V2, "swa_num_key_value_heads", 3),
        (MIMO_V2, "attention_chunk_size", 64),
        (MIMO_V2, "add_swa_attention_sink_bias", ...),
        (STEP, "share_expert_dim", ...),
        (STEP, "use_moe_router_bias", False),
        (STEP, "layer_types", ...),
        (STEP, "moe_layers_enum", "1,2"),
        (STEP, "attention_other_setting", {"num_attention_heads": 12, "head_dim": 16}),
        (AFMOE, "global_attn_every_n_layers", ...),
        (AFMOE, "layer_types", [SLIDING, SLIDING, FULL, FULL]),
        (AFMOE, "layer_types", [SLIDING, SLIDING, FULL]),
        (AFMOE, "sliding_window", ...),
        (AFMOE, "num_dense_layers", ...),
        (AFMOE, "num_dense_layers", 4),
        (AFMOE, "num_shared_experts", ...),
        (AFMOE, "num_expert_groups", 2),
        (AFMOE, "n_group", 16),
        (AFMOE, "attention_bias", True),
        (AFMOE, "moe_layer_freq", 2),
        (ARCTIC, "parallel_attn_mlp_res", False),
        (ARCTIC, "moe_layer_frequency", 5),
        (GROK, "intermediate_size", ...),
    ],
)
def test_what_cannot_be_counted_is_refused_by_its_key(config: dict[str, Any], key: str, value: Any) -> None:
    assert key in refused(config, **{key: value})
