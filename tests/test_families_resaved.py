"""Configs that Transformers loaded and wrote again, in its own keys: they read as the published ones do."""

from typing import Any

import pytest
from layer_counts import refused

from perfmodel.errors import ModelConfigError
from perfmodel.families.keys import ConfigKeys
from perfmodel.families.network import Shape
from perfmodel.families.registry import read_shape

Config = dict[str, Any]

SIZES = {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 100, "head_dim": 16}
FULL, SLIDING, PICKED, HEAVY = (
    "full_attention", "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
)  # fmt: skip
V4 = {
    **SIZES, "model_type": "deepseek_v4", "num_key_value_heads": 1, "num_hidden_layers": 4, "moe_intermediate_size": 24,
    "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "q_lora_rank": 20, "o_lora_rank": 12,
    "o_groups": 2, "index_n_heads": 2, "index_head_dim": 6, "index_topk": 32, "sliding_window": 16, "hc_mult": 2,
    "num_hash_layers": 1, "compress_ratios": [0, 4, 128, 4, 0],
}  # fmt: skip
V4_AGAIN = {
    "num_hash_layers": ..., "compress_ratios": ..., "compress_rates": {PICKED: 4, HEAVY: 128},
    "layer_types": [SLIDING, PICKED, HEAVY, PICKED], "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"],
}  # fmt: skip
GEMMA = {
    **SIZES, "model_type": "gemma4_text", "num_hidden_layers": 4, "intermediate_size": 40, "sliding_window": 16,
    "layer_types": [SLIDING, FULL, SLIDING, FULL], "global_head_dim": 32, "num_global_key_value_heads": 1,
    "attention_k_eq_v": True, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0,
}  # fmt: skip
WIDE = {"head_dim": 32, "num_key_value_heads": 1}
GEMMA_AGAIN = {
    "global_head_dim": ..., "num_global_key_value_heads": ..., "per_layer_config": {"01": WIDE, "03": WIDE},
}  # fmt: skip
INDEX = {
    "use_sparse_attention": True, "sparse_attention_freq": [0, 0, 1, 1], "sparse_disable_index_value": [0, 0, 1, 1],
    "sparse_index_dim": 12, "sparse_num_index_heads": 2, "sparse_block_size": 16, "sparse_topk_blocks": 4,
}  # fmt: skip
M3 = {
    **SIZES, "model_type": "minimax_m3", "num_hidden_layers": 4, "intermediate_size": 24,
    "dense_intermediate_size": 80, "shared_intermediate_size": 28, "num_local_experts": 8, "num_experts_per_tok": 2,
    "moe_layer_freq": [0, 1, 1, 1], "sparse_attention_config": INDEX,
}  # fmt: skip
M3_AGAIN = {
    "moe_layer_freq": ..., "sparse_attention_config": ..., "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    "layer_types": [FULL, FULL, "minimax_m3_sparse", "minimax_m3_sparse"], "index_n_heads": 2, "index_head_dim": 12,
    "index_topk_blocks": 4, "index_block_size": 16, "index_local_blocks": 1,
}  # fmt: skip
MIMO = {
    **SIZES, "model_type": "mimo_v2_flash", "num_hidden_layers": 3, "v_head_dim": 10, "intermediate_size": 80,
    "moe_intermediate_size": 24, "n_routed_experts": 8, "n_shared_experts": None, "num_experts_per_tok": 2,
    "moe_layer_freq": [0, 1, 1], "hybrid_layer_pattern": [0, 1, 0], "sliding_window": 32, "sliding_window_size": 32,
    "attention_chunk_size": 32, "swa_num_attention_heads": 8, "swa_num_key_value_heads": 4, "swa_head_dim": 16,
    "swa_v_head_dim": 10, "add_swa_attention_sink_bias": True, "add_full_attention_sink_bias": False,
}  # fmt: skip
MIMO_AGAIN = {
    "sliding_window": 33, "layer_types": [FULL, SLIDING, FULL], "mlp_layer_types": ["dense", "sparse", "sparse"],
}  # fmt: skip
NEMOTRON = {
    **SIZES, "model_type": "nemotron_h", "intermediate_size": 40, "hybrid_override_pattern": "M-*-",
    "mamba_num_heads": 6, "mamba_head_dim": 8, "n_groups": 2, "ssm_state_size": 12, "conv_kernel": 4,
}  # fmt: skip
NEMOTRON_AGAIN = {
    "hybrid_override_pattern": ..., "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"],
    "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 7688,
    "moe_shared_expert_intermediate_size": 7688, "moe_shared_expert_overlap": True, "moe_latent_size": None,
    "n_group": 1, "topk_group": 1,
}  # fmt: skip
STEP = {
    **SIZES, "model_type": "step3p7", "num_hidden_layers": 2, "num_experts": 8, "num_experts_per_tok": 2,
    "intermediate_size": 80, "moe_intermediate_size": 24, "share_expert_dim": 28, "first_k_dense_replace": 1,
    "layer_types": [FULL, SLIDING], "sliding_window": 32,
}  # fmt: skip
QWEN = {
    **SIZES, "model_type": "qwen3_moe", "num_hidden_layers": 2, "num_experts": 8, "num_experts_per_tok": 2,
    "intermediate_size": 80, "moe_intermediate_size": 24, "decoder_sparse_step": 2,
}  # fmt: skip
QWEN_AGAIN = {"layer_types": [FULL, FULL], "mlp_layer_types": ["dense", "sparse"]}

PAIRS: dict[str, tuple[Config, Config]] = {
    "deepseek v4": (V4, V4_AGAIN),
    "gemma 4": (GEMMA, GEMMA_AGAIN),
    "gemma 4, values of their own": (
        {**GEMMA, "attention_k_eq_v": False},
        {**GEMMA_AGAIN, "per_layer_config": {"1": {"head_dim": 32}, "3": {"head_dim": 32}}},
    ),
    "minimax m3": (M3, M3_AGAIN),
    "mimo v2": (MIMO, MIMO_AGAIN),
    "nemotron h": (NEMOTRON, NEMOTRON_AGAIN),
    "qwen 3, kinds of layers that say the same": (QWEN, QWEN_AGAIN),
}
#: The keys that Transformers leaves out, which may also stand beside those that it writes in their place.
BOTH = {name: PAIRS[name] for name in ("deepseek v4", "gemma 4", "minimax m3", "nemotron h")}


def changed(config: Config, changes: Config) -> Config:
    """The config with changes; a change to ``...`` takes the key out."""
    return {key: value for key, value in {**config, **changes}.items() if value is not ...}


def shape(config: Config) -> Shape:
    return read_shape(ConfigKeys(config, "config")).shape


@pytest.mark.parametrize("name", PAIRS)
def test_written_again(name: str) -> None:
    published, changes = PAIRS[name]
    again = changed(published, changes)
    assert again != published
    assert shape(again) == shape(published)


@pytest.mark.parametrize("name", BOTH)
def test_both_forms(name: str) -> None:
    published, changes = BOTH[name]
    added = {key: value for key, value in changes.items() if value is not ...}
    assert shape({**published, **added}) == shape(published)


@pytest.mark.parametrize("name", PAIRS)
def test_every_key_of_a_file_written_again(name: str) -> None:
    """Without any one key the file is refused, or says the same."""
    again = changed(*PAIRS[name])
    for key in PAIRS[name][1].keys() & again.keys():
        less = {other: value for other, value in again.items() if other != key}
        try:
            found = shape(less)
        except ModelConfigError:
            continue
        assert found == shape(again), key


@pytest.mark.parametrize(
    ("published", "changes", "key"),
    [
        (V4, {"num_hash_layers": ...}, "num_hash_layers"),
        (V4, {"compress_ratios": ...}, "compress_ratios"),
        (V4, {**V4_AGAIN, "num_hash_layers": 2}, "num_hash_layers"),
        (V4, {**V4_AGAIN, "compress_ratios": [4, 4, 128, 4]}, "layer_types"),
        (V4, {**V4_AGAIN, "compress_rates": ...}, "compress_rates"),
        (V4, {**V4_AGAIN, "compress_rates": {PICKED: 8, HEAVY: 128}}, PICKED),
        (V4, {**V4_AGAIN, "layer_types": [SLIDING, PICKED, HEAVY]}, "layer_types"),
        (V4, {**V4_AGAIN, "mlp_layer_types": ["moe", "hash_moe", "moe", "moe"]}, "mlp_layer_types"),
        (V4, {**V4_AGAIN, "mlp_layer_types": ["dense", "moe", "moe", "moe"]}, "mlp_layer_types"),
        (GEMMA, {"global_head_dim": ...}, "global_head_dim"),
        (GEMMA, {"num_global_key_value_heads": ...}, "num_global_key_value_heads"),
        (GEMMA, {"per_layer_config": {"1": WIDE}}, "per_layer_config"),
        (GEMMA, {"per_layer_config": {"1": WIDE, "3": WIDE}, "global_head_dim": 16}, "per_layer_config"),
        (GEMMA, {**GEMMA_AGAIN, "num_global_key_value_heads": 2}, "num_global_key_value_heads"),
        (GEMMA, {**GEMMA_AGAIN, "per_layer_config": {"1": WIDE, "3": WIDE, "2": WIDE}}, "2"),
        (GEMMA, {**GEMMA_AGAIN, "per_layer_config": {"1": WIDE, "3": WIDE, "03": WIDE}}, "03"),
        (GEMMA, {**GEMMA_AGAIN, "per_layer_config": {"1": WIDE, "last": WIDE}}, "last"),
        (GEMMA, {**GEMMA_AGAIN, "per_layer_config": {"1": WIDE, "3": [32]}}, "3"),
        (GEMMA, {**GEMMA_AGAIN, "per_layer_config": {"1": {**WIDE, "hidden_size": 8}}}, "hidden_size"),
        (
            GEMMA,
            {**GEMMA_AGAIN, "per_layer_config": {key: {"num_key_value_heads": 3} for key in "13"}},
            "per_layer_config",
        ),
        (M3, {"moe_layer_freq": ...}, "moe_layer_freq"),
        (M3, {"sparse_attention_config": ...}, "sparse_attention_config"),
        (M3, {**M3_AGAIN, "sparse_attention_config": {**INDEX, "sparse_index_dim": 8}}, "sparse_attention_config"),
        (M3, {**M3_AGAIN, "moe_layer_freq": [0, 0, 1, 1]}, "mlp_layer_types"),
        (M3, {**M3_AGAIN, "mlp_layer_types": ["dense"] * 4}, "mlp_layer_types"),
        (M3, {**M3_AGAIN, "layer_types": [SLIDING] * 4}, "layer_types"),
        (M3, {**M3_AGAIN, "index_block_size": ...}, "index_block_size"),
        (MIMO, {**MIMO_AGAIN, "sliding_window": 34}, "sliding_window_size"),
        (MIMO, {**MIMO_AGAIN, "sliding_window": 31}, "sliding_window_size"),
        (MIMO, {**MIMO_AGAIN, "layer_types": [FULL, FULL, SLIDING]}, "layer_types"),
        (MIMO, {**MIMO_AGAIN, "mlp_layer_types": ["dense", "dense", "sparse"]}, "mlp_layer_types"),
        (QWEN, {"mlp_layer_types": ["sparse", "sparse"]}, "mlp_layer_types"),
        (QWEN, {"layer_types": [FULL, SLIDING]}, "layer_types"),
        (QWEN, {"layer_types": [FULL]}, "layer_types"),
        (STEP, {"text_config": {"hidden_size": 64, "model_type": "step3p5"}}, "text_config"),
    ],
)
def test_refused(published: Config, changes: Config, key: str) -> None:
    shape(published)
    message = refused(published, **changes)
    assert any(said in message for said in (f"key '{key}'", f"key {key}", f"found {key}"))


def test_experts_of_nemotron_count_where_a_layer_has_them() -> None:
    with_experts = changed(NEMOTRON, {**NEMOTRON_AGAIN, "layers_block_type": ["mamba", "moe"]})
    assert shape(with_experts).moe_layers == (1,)
    assert "moe_intermediate_size" in refused(with_experts, moe_intermediate_size=...)
