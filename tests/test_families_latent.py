"""Families with latent, compressed or delta attention, and those built of the same experts: counts, caches, refusals.

The parameters of the small networks were counted by building them with the classes of Transformers 5.24, which keep the
corrections of router scores as buffers, one number for each expert of each layer; they are added here.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from perfmodel.errors import ModelConfigError
from perfmodel.families import Attention, ConfigKeys, Shape, read_shape
from perfmodel.model import MoEModel

MOE = {
    "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 24, "num_hidden_layers": 5,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100, "first_k_dense_replace": 1,
    "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 2, "n_group": 2, "topk_group": 1,
    "tie_word_embeddings": False, "attention_bias": True,
}  # fmt: skip
LATENT = {
    **MOE, "q_lora_rank": 20, "kv_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 10,
    "num_key_value_heads": 4,
}  # fmt: skip
INDEXED = {**LATENT, "index_n_heads": 3, "index_head_dim": 6, "index_topk": 16}
DELTA = {
    "full_attn_layers": [2, 5], "kda_layers": [1, 3, 4], "head_dim": 6, "num_heads": 7, "short_conv_kernel_size": 3,
}  # fmt: skip
KIMI = {
    **{key: value for key, value in LATENT.items() if key not in ("attention_bias", "n_shared_experts")},
    "num_shared_experts": 1, "linear_attn_config": DELTA, "model_type": "kimi_linear",
}  # fmt: skip
COMPRESSED = {
    "hidden_size": 64, "moe_intermediate_size": 24, "num_hidden_layers": 5, "num_attention_heads": 4,
    "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 100, "n_routed_experts": 8, "num_experts_per_tok": 2,
    "n_shared_experts": 1, "q_lora_rank": 20, "o_lora_rank": 6, "o_groups": 2, "index_n_heads": 3,
    "index_head_dim": 10, "index_topk": 5, "sliding_window": 8, "num_hash_layers": 2, "hc_mult": 3,
    "compress_ratios": [0, 4, 128, 128, 4, 0], "num_nextn_predict_layers": 1, "tie_word_embeddings": False,
    "model_type": "deepseek_v4",
}  # fmt: skip


def shape(config: dict[str, Any]) -> Shape:
    return read_shape(ConfigKeys(config, "config")).shape


def total(config: dict[str, Any]) -> int:
    return MoEModel.from_config(config).total_params


def kind(config: dict[str, Any], layer: int) -> Attention:
    return next(one for one in shape(config).attention if layer in one.layers)


def without(config: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in keys}


@pytest.mark.parametrize(
    ("config", "built", "corrected_layers"),
    [
        ({**LATENT, "model_type": "deepseek_v2"}, 252404, 0),
        ({**LATENT, "model_type": "deepseek_v3"}, 252404, 4),
        ({**LATENT, "model_type": "deepseek_v3", "q_lora_rank": None, "tie_word_embeddings": True}, 249964, 4),
        ({**LATENT, "model_type": "kimi_k2"}, 252404, 4),
        ({**INDEXED, "model_type": "deepseek_v32"}, 257144, 4),
        ({**LATENT, "model_type": "glm4_moe_lite", "q_lora_rank": None}, 256364, 4),
        ({**MOE, "model_type": "glm4_moe", "head_dim": 20, "use_qk_norm": True}, 296104, 4),
        ({**MOE, "model_type": "glm4_moe", "use_qk_norm": False, "tie_word_embeddings": True}, 273984, 4),
        ({**MOE, "model_type": "glm4v_moe_text", "head_dim": 20}, 295904, 4),
        ({**MOE, "model_type": "dots1", "head_dim": 20}, 296424, 4),
        (KIMI, 252027, 4),
        (COMPRESSED, 330676, 3),
        ({**COMPRESSED, "model_type": "deepseek_ref"}, 330676, 3),
    ],
)
def test_small_networks_have_the_parameters_of_their_classes(
    config: dict[str, Any], built: int, corrected_layers: int
) -> None:
    assert total(config) == built + 8 * corrected_layers


GLM_TYPES = {**INDEXED, "model_type": "glm_moe_dsa", "indexer_types": ["full", "shared", "full", "shared", "shared"]}


def test_layers_that_share_an_indexer_have_none() -> None:
    assert total(GLM_TYPES) == 254300 + 8 * 4
    assert [(one.name, one.layers) for one in shape(GLM_TYPES).attention] == [
        ("sparse latent", (0, 2)),
        ("sparse latent", (1, 3, 4)),
    ]
    own, shared = (
        {cache.name: (cache.elements, cache.read_entries) for cache in one.caches} for one in shape(GLM_TYPES).attention
    )
    assert own == {"latent": (16, 16), "index keys": (6, None)}
    assert shared == {"latent": (16, 16)}
    everywhere = without(GLM_TYPES, "indexer_types")
    assert total(everywhere) == 257144 + 8 * 4  # as in DeepSeek-V3.2


#: Parameters of the classes of Transformers 5.24 at published sizes, and experts times layers with corrected scores.
PUBLISHED = {
    "deepseek-ai__deepseek-moe-16b-base": (16375728128, 0),
    "deepseek-ai__deepseek-vl2-tiny": (2934734080, 0),
    "deepseek-ai__DeepSeek-V2": (235741434880, 0),
    "deepseek-ai__DeepSeek-V2-Lite": (15706484224, 0),
    "deepseek-ai__DeepSeek-V3": (671026404352, 256 * 58),
    "deepseek-ai__DeepSeek-V3.2": (671877929216, 256 * 58),
    "deepseek-ai__DeepSeek-V4-Flash": (284332230231, 256 * 40),
    "deepseek-ai__DeepSeek-V4-Pro": (1572997179491, 384 * 58),
    "sgl-project__DeepSeek-V4-Flash-FP8": (284332230231, 256 * 40),
    "moonshotai__Moonlight-16B-A3B": (15960108544, 64 * 26),
    "moonshotai__Kimi-K2-Instruct": (1026408209408, 384 * 60),
    "nvidia__Kimi-K2.5-NVFP4": (1026408209408, 384 * 60),
    "inclusionAI__Ling-lite-1.5": (16801974272, 0),
    "zai-org__GLM-4.5": (352797814784, 160 * 89),
    "zai-org__GLM-4.5-Air": (106852245504, 128 * 45),
    "zai-org__GLM-5": (743911199232, 256 * 75),
    "nvidia__GLM-5.2-NVFP4": (743377000704, 256 * 75),
}


def test_published_networks_have_the_parameters_of_their_classes(shared: Path) -> None:
    found = {name: total(json.loads((shared / "configs" / name / "config.json").read_text())) for name in PUBLISHED}
    assert found == {name: built + corrections for name, (built, corrections) in PUBLISHED.items()}


def test_kimi_k3_has_the_published_parameters_and_bytes(shared: Path) -> None:
    model = MoEModel.from_config(shared / "configs" / "moonshotai__Kimi-K3")
    assert model.total_params == pytest.approx(2.8e12, rel=0.01)
    assert model.active_params_without_input_embedding == pytest.approx(104e9, rel=0.005)
    assert model.weight_bytes == pytest.approx(1.56e12, rel=0.01)  # the files, which hold the vision tower too
    assert model.experts.matrices == ((3584, 3072), (3584, 3072), (3072, 3584))


def test_kimi_k3_adds_its_parts_to_kimi_linear() -> None:
    more = {
        **KIMI,
        "linear_attn_config": {**DELTA, "use_full_rank_gate": True},
        "mla_use_output_gate": True,
        "routed_expert_hidden_size": 32,
        "latent_moe_use_norm": True,
        "attn_res_block_size": 2,
    }
    added = {
        "gates of full rank instead of two factors": 3 * (42 * 64 - 6 * 64 - 42 * 6),
        "gates of latent attention": 2 * 4 * 10 * 64,
        "norm and query before both halves of each layer, and at the end": (5 * 2 + 1) * 2 * 64,
        "to the narrow vector and back, with a norm": 4 * (2 * 32 * 64 + 32),
        "narrow experts": -4 * 8 * 3 * 32 * 24,
    }
    assert total(more) - total(KIMI) == sum(added.values())
    assert total({**more, "latent_moe_use_norm": False}) == total(more) - 4 * 32
    assert MoEModel.from_config({**more, "model_type": "kimi_linear"}).experts.size == 24
    assert shape({"model_type": "kimi_k3", "text_config": more}) == shape(more)


def test_delta_attention_keeps_a_constant_state() -> None:
    delta, full = kind(KIMI, 0), kind(KIMI, 1)
    assert (delta.name, delta.layers, full.name, full.layers) == ("linear", (0, 2, 3), "latent", (1, 4))
    assert delta.caches == ()
    assert delta.recurrent_elements == 7 * 6 * 6
    assert delta.convolution_elements == 3 * 42 * (3 - 1)
    assert [cache.elements for cache in full.caches] == [12 + 4]


def test_compressed_attention_keeps_a_window_and_groups() -> None:
    caches = {
        layer: [(one.name, one.elements, one.window, one.tokens_per_entry, one.read_entries) for one in found.caches]
        for layer, found in ((layer, kind(COMPRESSED, layer)) for layer in range(3))
    }
    window = ("keys and values", 32, 8, 1, None)
    assert caches[0] == [window]
    assert caches[1] == [window, ("compressed", 32, None, 4, 5), ("index keys", 10, None, 4, None)]
    assert caches[2] == [window, ("compressed", 32, None, 128, None)]
    model = MoEModel.from_config(COMPRESSED)
    # 1000 tokens: five windows of 8, groups of 4 in two layers and of 128 in two, index keys of 4 in two.
    assert model.kv_bytes(1000, bits=8) == 5 * 8 * 32 + 2 * 250 * 32 + 2 * 7 * 32 + 2 * 250 * 10
    assert model.kv_read_bytes(1000, bits=8) == 5 * 8 * 32 + 2 * 5 * 32 + 2 * 7 * 32 + 2 * 250 * 10


def test_experts_looked_up_by_token_have_no_correction() -> None:
    kinds = shape(COMPRESSED).feed_forward
    assert [(one.layers, sum(tensor.params for tensor in one.router)) for one in kinds] == [
        ((0, 1), 8 * 64),
        ((2, 3, 4), 8 * 64 + 8),
    ]
    assert len(shape({**COMPRESSED, "num_hash_layers": 0}).feed_forward) == 1
    assert MoEModel.from_config(COMPRESSED).top_k == 2


def test_a_deepseek_v2_without_latent_attention_says_so() -> None:
    plain = {**MOE, "model_type": "deepseek_v2", "use_mla": False, "q_lora_rank": None, "attention_bias": False}
    plain |= {"kv_lora_rank": None, "qk_nope_head_dim": 0, "qk_rope_head_dim": 0, "v_head_dim": 0}
    assert shape(plain).attention == shape({**MOE, "model_type": "deepseek", "attention_bias": False}).attention
    assert [tensor.shape for tensor in kind(plain, 0).tensors] == [(64, 64), (32, 64), (32, 64), (64, 64)]
    with pytest.raises(ModelConfigError, match="kv_lora_rank"):
        shape({**plain, "use_mla": True})


def test_correction_of_scores_follows_the_method_where_the_family_has_several() -> None:
    config = {**LATENT, "model_type": "deepseek_v2"}
    assert total({**config, "topk_method": "noaux_tc"}) == total(config) + 4 * 8
    assert total({**config, "topk_method": "greedy"}) == total(config)
    left_out = read_shape(ConfigKeys(config, "config")).defaults
    assert "topk_method = greedy" in left_out


def test_a_list_of_kinds_must_say_what_the_count_of_dense_layers_says() -> None:
    config = {**LATENT, "model_type": "deepseek_v3"}
    assert shape({**config, "mlp_layer_types": ["dense"] + ["sparse"] * 4}) == shape(config)
    with pytest.raises(ModelConfigError, match="mlp_layer_types"):
        shape({**config, "mlp_layer_types": ["dense"] * 2 + ["sparse"] * 3})


def test_layers_for_multi_token_prediction_are_said_to_be_left_out() -> None:
    config = {**LATENT, "model_type": "deepseek_v3"}
    more = shape({**config, "num_nextn_predict_layers": 2})
    assert more.left_out == ("2 layers for multi-token prediction left out (num_nextn_predict_layers)",)
    assert shape(config).left_out == ()


def test_ling_has_queries_keys_and_values_in_one_matrix() -> None:
    config = {**without(MOE, "attention_bias", "n_group", "topk_group"), "model_type": "bailing_moe"}
    assert [(one.name, one.shape) for one in kind(config, 0).tensors] == [
        ("attention.query_key_value", (128, 64)),
        ("attention.dense", (64, 64)),
    ]
    assert total({**config, "use_qkv_bias": True}) == total(config) + 5 * 128


def test_dots_windows_start_where_the_config_says() -> None:
    config = {**MOE, "model_type": "dots1", "sliding_window": 7, "max_window_layers": 3}
    assert [(one.layers, one.caches[0].window) for one in shape(config).attention] == [((0, 1, 2), None), ((3, 4), 7)]


V3 = {**LATENT, "model_type": "deepseek_v3"}


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({**V3, "topk_method": "greedy"}, "topk_method"),
        ({**V3, "mlp_bias": True}, "mlp_bias"),
        ({**V3, "first_k_dense_replace": 5}, "first_k_dense_replace"),
        ({**V3, "kv_lora_rank": None}, "kv_lora_rank"),
        (without(V3, "q_lora_rank"), "q_lora_rank"),
        (without({**INDEXED, "model_type": "deepseek_v32"}, "index_topk"), "index_topk"),
        ({**INDEXED, "model_type": "deepseek_v32", "q_lora_rank": None}, "q_lora_rank"),
        ({**GLM_TYPES, "indexer_types": ["shared", *["full"] * 4]}, "indexer_types"),
        ({**without(GLM_TYPES, "indexer_types"), "index_topk_freq": 4}, "index_topk_freq"),
        ({**COMPRESSED, "num_key_value_heads": 2}, "num_key_value_heads"),
        ({**COMPRESSED, "compress_ratios": [0, 4, 128]}, "compress_ratios"),
        ({**COMPRESSED, "compress_ratios": [0, 4, 128, 16, 4]}, "compress_ratios"),
        ({**COMPRESSED, "o_groups": 3}, "o_groups"),
        ({**COMPRESSED, "num_hash_layers": 6}, "num_hash_layers"),
        ({**COMPRESSED, "attention_bias": True}, "attention_bias"),
        ({**COMPRESSED, "first_k_dense_replace": 1}, "first_k_dense_replace"),
        ({**KIMI, "linear_attn_config": {**DELTA, "kda_layers": [1, 3]}}, "kda_layers"),
        ({**KIMI, "linear_attn_config": {**DELTA, "kda_layers": [0, 3, 4]}}, "kda_layers"),
        ({**KIMI, "linear_attn_config": {**DELTA, "full_attn_layers": [1, 2, 5]}}, "kda_layers"),
        ({**KIMI, "linear_attn_config": without(DELTA, "full_attn_layers")}, "full_attn_layers"),
        ({**KIMI, "linear_attn_config": without(DELTA, "head_dim")}, "head_dim"),
        ({**KIMI, "routed_expert_hidden_size": 32}, "latent_moe_use_norm"),
        ({**KIMI, "latent_moe_use_norm": True}, "latent_moe_use_norm"),
        ({**KIMI, "tie_word_embeddings": True}, "tie_word_embeddings"),
        ({**MOE, "model_type": "glm4v_moe_text", "use_qk_norm": True}, "use_qk_norm"),
        ({**without(MOE, "attention_bias"), "model_type": "bailing_moe", "use_bias": True}, "use_bias"),
    ],
)
def test_what_cannot_be_counted_is_refused_by_its_key(config: dict[str, Any], key: str) -> None:
    with pytest.raises(ModelConfigError, match=rf"\b{key}\b"):
        shape(config)


@pytest.mark.parametrize(
    ("key", "config", "off"),
    [
        ("use_full_rank_gate", {**KIMI, "linear_attn_config": {**DELTA, "use_full_rank_gate": True}}, KIMI),
        ("mla_use_output_gate", {**KIMI, "mla_use_output_gate": True}, KIMI),
        ("attn_res_block_size", {**KIMI, "attn_res_block_size": 2}, KIMI),
    ],
)
def test_defaults_of_kimi_are_noted(key: str, config: dict[str, Any], off: dict[str, Any]) -> None:
    assert total(config) > total(off)
    assert not any(key in text for text in read_shape(ConfigKeys(config, "config")).defaults)
    assert any(key in text for text in read_shape(ConfigKeys(off, "config")).defaults)
