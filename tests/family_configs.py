"""Configs of published models, cut down to what shapes them, with counts from outside this project.

The totals are the sums over the parameters that the classes of Transformers 5.24 make for these configs (on the meta
device, tied heads counted once, towers of images left out); Gemma 2, Gemma 3 and Phi-3 are also what their model cards
say to the last digit. The active counts are the publishers', in billions, and hold the embeddings as they count them.
"""

from typing import Any

_SPARSE = {"decoder_sparse_step": 1}
_DELTA = {
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}


def sizes(hidden: int, layers: int, heads: int, kv_heads: int, vocab: int, **more: Any) -> dict[str, Any]:
    """The keys that every decoder has."""
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        **more,
    }


QWEN2 = sizes(
    3584, 28, 28, 4, 152064, model_type="qwen2", intermediate_size=18944,
    use_sliding_window=False, sliding_window=131072, max_window_layers=28, tie_word_embeddings=False,
)  # fmt: skip
QWEN2_MOE = sizes(
    3584, 28, 28, 4, 151936, model_type="qwen2_moe", moe_intermediate_size=2560, intermediate_size=18944,
    shared_expert_intermediate_size=20480, num_experts=64, num_experts_per_tok=8, **_SPARSE,
)  # fmt: skip
QWEN3_NEXT = sizes(
    2048, 48, 16, 2, 151936, model_type="qwen3_next", head_dim=256, moe_intermediate_size=512, num_experts=512,
    num_experts_per_tok=10, shared_expert_intermediate_size=512, full_attention_interval=4, mlp_only_layers=[],
    **_SPARSE, **_DELTA,
)  # fmt: skip
QWEN3_5 = {
    "model_type": "qwen3_5",
    "tie_word_embeddings": False,
    "vision_config": {"depth": 27},
    "text_config": sizes(
        5120, 64, 24, 4, 248320, head_dim=256, intermediate_size=17408, attn_output_gate=True, mtp_num_hidden_layers=1,
        layer_types=(["linear_attention"] * 3 + ["full_attention"]) * 16, **_DELTA | {"linear_num_value_heads": 48},
    ),
}  # fmt: skip
QWEN3_5_MOE = {
    "model_type": "qwen3_5_moe",
    "tie_word_embeddings": False,
    "text_config": sizes(
        3072, 48, 32, 2, 248320, head_dim=256, moe_intermediate_size=1024, num_experts=256, num_experts_per_tok=8,
        shared_expert_intermediate_size=1024, full_attention_interval=4, **_DELTA | {"linear_num_value_heads": 64},
    ),
}  # fmt: skip
QWEN3_VL = {
    "model_type": "qwen3_vl",
    "tie_word_embeddings": True,
    "text_config": sizes(2048, 28, 16, 8, 151936, head_dim=128, intermediate_size=6144),
}
QWEN3_VL_MOE = {
    "model_type": "qwen3_vl_moe",
    "tie_word_embeddings": False,
    "text_config": sizes(
        2048, 48, 32, 4, 151936, head_dim=128, moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8,
        mlp_only_layers=[], **_SPARSE,
    ),
}  # fmt: skip
LLAMA3 = sizes(4096, 32, 32, 8, 128256, model_type="llama", intermediate_size=14336)
MISTRAL = sizes(4096, 32, 32, 8, 32000, model_type="mistral", intermediate_size=14336, sliding_window=4096)
PHI3 = sizes(3072, 32, 32, 32, 32064, model_type="phi3", intermediate_size=8192, sliding_window=2047)
GEMMA2 = sizes(3584, 42, 16, 8, 256000, model_type="gemma2", head_dim=256, intermediate_size=14336, sliding_window=4096)
GEMMA3 = sizes(
    1152, 26, 4, 1, 262144, model_type="gemma3_text", head_dim=256, intermediate_size=6912, sliding_window=512,
    sliding_window_pattern=6,
)  # fmt: skip
PHIMOE = sizes(
    4096, 32, 32, 8, 32064, model_type="phimoe", intermediate_size=6400, num_local_experts=16, num_experts_per_tok=2,
    attention_bias=True, lm_head_bias=True, sliding_window=131072,
)  # fmt: skip
SCOUT = {
    "model_type": "llama4",
    "text_config": sizes(
        5120, 48, 40, 8, 202048, head_dim=128, intermediate_size=8192, intermediate_size_mlp=16384,
        num_local_experts=16, num_experts_per_tok=1, interleave_moe_layer_step=1, attention_chunk_size=8192,
        no_rope_layers=[],
    ),
}  # fmt: skip
MAVERICK = {
    "model_type": "llama4",
    "text_config": SCOUT["text_config"] | {"num_local_experts": 128, "interleave_moe_layer_step": 2},  # type: ignore[operator]
}
GEMMA4 = {
    "model_type": "gemma4",
    "tie_word_embeddings": True,
    "text_config": sizes(
        2816, 30, 16, 8, 262144, head_dim=256, global_head_dim=512, num_global_key_value_heads=2,
        attention_k_eq_v=True, intermediate_size=2112, moe_intermediate_size=704, num_experts=128, top_k_experts=8,
        enable_moe_block=True, sliding_window=1024, hidden_size_per_layer_input=0, num_kv_shared_layers=0,
        layer_types=(["sliding_attention"] * 5 + ["full_attention"]) * 5,
    ),
}  # fmt: skip
LFM2_8B = sizes(
    2048, 24, 32, 8, 65536, model_type="lfm2_moe", intermediate_size=7168, moe_intermediate_size=1792, num_experts=32,
    num_experts_per_tok=4, num_dense_layers=2, conv_L_cache=3, full_attn_idxs=[2, 6, 10, 14, 18, 21],
)  # fmt: skip
LFM2_24B = LFM2_8B | {
    "num_hidden_layers": 40, "intermediate_size": 11776, "moe_intermediate_size": 1536, "num_experts": 64,
    "full_attn_idxs": list(range(2, 40, 4)),
}  # fmt: skip
TRINITY_NANO = sizes(
    1024, 56, 8, 2, 200192, model_type="afmoe", head_dim=128, intermediate_size=3072, moe_intermediate_size=256,
    num_experts=128, num_experts_per_tok=8, num_shared_experts=1, num_dense_layers=2, sliding_window=2048,
    global_attn_every_n_layers=4, n_group=1, topk_group=1, num_expert_groups=1, num_limited_groups=1,
)  # fmt: skip
TRINITY_MINI = TRINITY_NANO | sizes(2048, 32, 32, 4, 200192, intermediate_size=6144, moe_intermediate_size=1024)
TRINITY_LARGE = TRINITY_NANO | sizes(
    3072, 60, 48, 8, 200192, intermediate_size=12288, moe_intermediate_size=3072, num_experts=256,
    num_experts_per_tok=4, num_dense_layers=6, sliding_window=4096,
)  # fmt: skip
SWITCH = {
    "model_type": "switch_transformers", "d_model": 768, "d_kv": 64, "d_ff": 3072, "num_layers": 12,
    "num_decoder_layers": 12, "num_sparse_encoder_layers": 6, "num_sparse_decoder_layers": 6, "num_heads": 12,
    "num_experts": 8, "relative_attention_num_buckets": 32, "vocab_size": 32128, "encoder_sparse_step": 2,
    "decoder_sparse_step": 2, "router_bias": False, "router_dtype": "float32",
}  # fmt: skip
NLLB = {
    "model_type": "nllb-moe", "d_model": 2048, "encoder_layers": 24, "decoder_layers": 24,
    "encoder_attention_heads": 16, "decoder_attention_heads": 16, "encoder_ffn_dim": 8192, "decoder_ffn_dim": 8192,
    "encoder_sparse_step": 4, "decoder_sparse_step": 4, "num_experts": 128, "vocab_size": 256206,
    "num_hidden_layers": 24, "second_expert_policy": "all",
}  # fmt: skip


def block(kv_group: int | None, factor: float | None, **more: Any) -> dict[str, Any]:
    """One layer of a pruned Llama: query heads for each key-value head, and width; None for no such half."""
    attention = {"no_op": kv_group is None, "n_heads_in_group": kv_group, "window_length": None, "sparsify": None}
    network = {"no_op": factor is None, "ffn_mult": factor, "replace_with_linear": False}
    return {"attention": attention | more, "ffn": network}


PRUNED = {
    "model_type": "nemotron-nas", "hidden_size": 8192, "num_hidden_layers": 5, "num_attention_heads": 64,
    "num_key_value_heads": None, "intermediate_size": None, "vocab_size": 128256,
    "block_configs": [block(8, 5.25), block(16, 2.625), block(None, 0.5), block(8, None), block(8, 5.25)],
}  # fmt: skip

#: Config, total, and the publisher's active count in 1e9 with the embeddings that it holds, or None for a dense one.
PUBLISHED: dict[str, tuple[dict[str, Any], int, float | None]] = {
    "Qwen2.5-7B": (QWEN2, 7_615_616_512, None),
    "Qwen2-57B-A14B": (QWEN2_MOE, 57_408_658_944, 14.2),
    "Qwen3-Next-80B-A3B": (QWEN3_NEXT, 79_674_391_296, None),
    "Qwen3.5-27B": (QWEN3_5, 26_895_998_464, None),
    "Qwen3.5-122B-A10B": (QWEN3_5_MOE, 122_111_526_912, 10.0),
    "Qwen3-VL-2B": (QWEN3_VL, 1_720_574_976, None),
    "Qwen3-VL-30B-A3B": (QWEN3_VL_MOE, 30_532_122_624, 3.3),
    "Llama-3-8B": (LLAMA3, 8_030_261_248, None),
    "Mistral-7B": (MISTRAL, 7_241_732_096, None),
    "Phi-3-mini": (PHI3, 3_821_079_552, None),
    "gemma-2-9b": (GEMMA2, 9_241_705_984, None),
    "gemma-3-1b": (GEMMA3, 999_885_952, None),
    "Phi-3.5-MoE": (PHIMOE, 41_873_153_344, 6.6),
    "Llama-4-Scout": (SCOUT, 107_769_861_120, 17.0),
    "Llama-4-Maverick": (MAVERICK, 400_711_848_960, 17.0),
    "gemma-4-26B-A4B": (GEMMA4, 25_233_141_760 + 30, 3.8),  # and one scale a layer, stored as a buffer
    # With the corrections of the scores, which are buffers there.
    "LFM2-8B-A1B": (LFM2_8B, 8_339_929_856 + 22 * 32, None),
    "LFM2.5-8B-A1B": (LFM2_8B | {"vocab_size": 128000}, 8_467_856_128 + 22 * 32, None),
    "LFM2-24B-A2B": (LFM2_24B, 23_843_659_008 + 38 * 64, 2.3),
    "Trinity-Nano": (TRINITY_NANO, 6_120_003_328, None),
    "Trinity-Mini": (TRINITY_MINI, 26_123_974_400, 3.0),
    "Trinity-Large": (TRINITY_LARGE, 398_635_286_016, 13.0),
    "switch-base-8": (SWITCH, 619_339_008, None),
    "nllb-moe-54b": (NLLB, 54_500_569_088, None),
}
