"""Parts of networks by family: which layers have what, what they cache, and widths that keys spell in odd ways."""

from typing import Any

import pytest
from family_configs import (
    GEMMA2,
    GEMMA3,
    GEMMA4,
    LLAMA3,
    MAVERICK,
    MISTRAL,
    NLLB,
    PHIMOE,
    PRUNED,
    QWEN2,
    QWEN2_MOE,
    QWEN3_5,
    QWEN3_5_MOE,
    QWEN3_NEXT,
    QWEN3_VL,
    SCOUT,
    SWITCH,
    block,
)

from perfmodel.errors import ModelConfigError
from perfmodel.families import Attention, FeedForward, params_of
from perfmodel.model import MoEModel


def mixers(config: dict[str, Any]) -> list[Attention]:
    return list(MoEModel.from_config(config).attention)


def networks(config: dict[str, Any]) -> list[FeedForward]:
    return list(MoEModel.from_config(config).feed_forward)


def shapes(kind: Attention) -> dict[str, tuple[int, ...]]:
    return {tensor.name: tensor.shape for tensor in kind.tensors}


def inside(config: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return config | {"text_config": config["text_config"] | changes}


def windows(config: dict[str, Any]) -> dict[int | None, tuple[int, ...]]:
    return {kind.caches[0].window: kind.layers for kind in mixers(config)}


# --- Qwen -------------------------------------------------------------------------------------------------------------


def test_qwen2_experts() -> None:
    small = QWEN2_MOE | {"num_hidden_layers": 6, "decoder_sparse_step": 2}
    assert MoEModel.from_config(small).moe_layers == (1, 3, 5)
    assert MoEModel.from_config(small | {"mlp_only_layers": [3]}).moe_layers == (1, 5)
    (moe,) = networks(QWEN2_MOE)
    # The shared expert has a width of its own, and a gate of one number for each input.
    assert params_of(moe.shared) == 3 * 3584 * 20480 + 3584
    assert moe.experts is not None
    assert moe.experts.matrices == ((3584, 2560), (3584, 2560), (2560, 3584))
    assert any("mlp_only_layers" in said for said in MoEModel.from_config(QWEN2_MOE).assumptions)


def test_qwen2_biases_and_windows() -> None:
    with_bias, without = MoEModel.from_config(QWEN2_MOE), MoEModel.from_config(QWEN2_MOE | {"qkv_bias": False})
    assert with_bias.total_params - without.total_params == 28 * (3584 + 2 * 4 * 128)
    assert "self_attn.o_proj.bias" not in shapes(mixers(QWEN2)[0])
    sliding = QWEN2 | {"use_sliding_window": True, "max_window_layers": 20}
    assert windows(sliding) == {None: tuple(range(20)), 131072: tuple(range(20, 28))}
    kinds = ["sliding_attention", "full_attention"] * 14
    chosen = QWEN2_MOE | {"use_sliding_window": True, "sliding_window": 99, "layer_types": kinds}
    assert windows(chosen) == {99: tuple(range(0, 28, 2)), None: tuple(range(1, 28, 2))}


def test_delta_net_keeps_a_constant_state() -> None:
    linear, full = mixers(QWEN3_NEXT)
    assert full.layers == tuple(range(3, 48, 4))
    assert linear.layers == tuple(layer for layer in range(48) if layer % 4 != 3)
    assert not linear.caches
    assert linear.recurrent_elements == 32 * 128 * 128
    assert linear.convolution_elements == (2 * 16 * 128 + 32 * 128) * 3
    assert full.caches[0].elements == 2 * 2 * 256
    assert shapes(linear)["linear_attn.in_proj_qkvz"] == (8192 + 4096, 2048)
    assert shapes(full)["self_attn.q_proj"] == (2 * 16 * 256, 2048)
    # Whole context in 12 of 48 layers: keys and values of 2 heads of 256, 2 byte each.
    model = MoEModel.from_config(QWEN3_NEXT | {"dtype": "bfloat16"})
    assert model.kv_bytes(2000) - model.kv_bytes(1000) == 1000 * 12 * 2 * 2 * 256 * 2


def test_delta_net_with_separate_projections_has_the_same_size() -> None:
    linear, _ = mixers(QWEN3_5)
    assert shapes(linear)["linear_attn.in_proj_qkv"] == (2 * 16 * 128 + 48 * 128, 5120)
    assert shapes(linear)["linear_attn.in_proj_z"] == (48 * 128, 5120)
    fused = QWEN3_NEXT | {"attn_output_gate": False}
    separate = {"model_type": "qwen3_5_moe_text"} | {
        key: value for key, value in fused.items() if key not in ("model_type", "decoder_sparse_step")
    }
    assert MoEModel.from_config(fused).total_params == MoEModel.from_config(separate).total_params
    gates = MoEModel.from_config(QWEN3_NEXT).total_params - MoEModel.from_config(fused).total_params
    assert gates == 12 * 16 * 256 * 2048


def test_qwen_layer_types_and_interval_agree() -> None:
    kinds = (["linear_attention"] * 3 + ["full_attention"]) * 12
    assert mixers(QWEN3_NEXT | {"layer_types": kinds}) == mixers(QWEN3_NEXT)
    assert mixers(QWEN3_NEXT | {"layer_types": kinds, "full_attention_interval": None}) == mixers(QWEN3_NEXT)
    only_linear = ["linear_attention"] * 48
    (alone,) = mixers(QWEN3_NEXT | {"layer_types": only_linear, "full_attention_interval": None})
    assert alone.name == "linear"


def test_what_qwen_leaves_out_is_said() -> None:
    said = " ".join(MoEModel.from_config(QWEN3_5).assumptions)
    assert "mtp_num_hidden_layers" in said
    assert "vision_config" in said
    assert "vision" not in " ".join(MoEModel.from_config(QWEN3_5_MOE).assumptions)


def test_the_tie_flag_outside_counts() -> None:
    tied, untied = MoEModel.from_config(QWEN3_VL), MoEModel.from_config(QWEN3_VL | {"tie_word_embeddings": False})
    assert untied.total_params - tied.total_params == 151936 * 2048
    # The class of the whole model ties; that of its text part may write another default.
    assert MoEModel.from_config(inside(QWEN3_VL, tie_word_embeddings=False)).total_params == tied.total_params


# --- Llama and its kin ------------------------------------------------------------------------------------------------


def test_llama4_layers() -> None:
    assert MoEModel.from_config(SCOUT).moe_layers == tuple(range(48))
    dense, moe = networks(MAVERICK)
    assert moe.layers == tuple(range(1, 48, 2))
    assert params_of(dense.dense) == 3 * 5120 * 16384
    assert params_of(moe.shared) == 3 * 5120 * 8192
    listed = MoEModel.from_config(inside(MAVERICK, moe_layers=[7, 3]))
    assert listed.moe_layers == (3, 7)


def test_llama4_chunks() -> None:
    full = tuple(range(3, 48, 4))
    chunked = tuple(layer for layer in range(48) if layer % 4 != 3)
    assert windows(SCOUT) == {8192: chunked, None: full}
    assert windows(inside(SCOUT, no_rope_layers=[1, 0] * 24)) == {
        8192: tuple(range(0, 48, 2)),
        None: tuple(range(1, 48, 2)),
    }
    kinds = ["full_attention"] * 40 + ["chunked_attention"] * 8
    assert windows(inside(SCOUT, layer_types=kinds)) == {None: tuple(range(40)), 8192: tuple(range(40, 48))}
    assert windows(inside(SCOUT, attention_chunk_size=None)) == {None: tuple(range(48))}


def test_a_window_that_is_null_is_none_and_one_that_is_absent_is_missed() -> None:
    assert windows(MISTRAL) == {4096: tuple(range(32))}
    assert windows(MISTRAL | {"sliding_window": None}) == {None: tuple(range(32))}
    with pytest.raises(ModelConfigError, match="sliding_window"):
        MoEModel.from_config({key: value for key, value in MISTRAL.items() if key != "sliding_window"})
    without = {key: value for key, value in PHIMOE.items() if key != "sliding_window"}
    assert windows(without) == {None: tuple(range(32))}
    assert any("sliding_window" in said for said in MoEModel.from_config(without).assumptions)


def test_llama_biases() -> None:
    biased = MoEModel.from_config(LLAMA3 | {"attention_bias": True, "mlp_bias": True})
    per_layer = 4096 + 2 * 1024 + 4096 + 2 * 14336 + 4096
    assert biased.total_params - MoEModel.from_config(LLAMA3).total_params == 32 * per_layer


def test_pruned_layers() -> None:
    kinds = mixers(PRUNED)
    assert [(kind.name, kind.layers) for kind in kinds] == [("full", (0, 3, 4)), ("full", (1,)), ("none", (2,))]
    assert [kind.norm_params for kind in kinds] == [8192, 8192, 0]
    assert kinds[0].caches[0].elements == 2 * 8 * 128
    assert kinds[1].caches[0].elements == 2 * 4 * 128
    assert not kinds[2].caches
    widths = {kind.layers: kind.dense[0].shape[0] if kind.dense else 0 for kind in networks(PRUNED)}
    # Two thirds of 5.25, 2.625 and 0.5 times 8192, rounded up to multiples of 256.
    assert widths == {(0, 4): 28672, (1,): 14336, (2,): 2816, (3,): 0}
    attention = 2 * 8192 * 8192 + 8192
    groups = 3 * 2 * 8192 * 1024 + 2 * 8192 * 512
    dense = 3 * 8192 * (2 * 28672 + 14336 + 2816) + 4 * 8192
    assert MoEModel.from_config(PRUNED).total_params == 4 * attention + groups + dense + 2 * 128256 * 8192 + 8192


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (block(8, 5.25, replace_with_linear=True), ["block_configs[1].attention", "replace_with_linear"]),
        (block(8, 5.25, num_sink_tokens=4), ["block_configs[1].attention", "num_sink_tokens", "4"]),
        (block(8, 5.25, n_heads_in_group=7), ["n_heads_in_group", "divisor"]),
        (block(8, 0.0), ["block_configs[1].ffn", "ffn_mult", "0.0"]),
        (block(8, float("nan")), ["ffn_mult", "nan"]),
        (block(8, 1e9), ["ffn_mult", "wide"]),
        ({"attention": {"no_op": True}}, ["n_heads_in_group", "missing"]),
        ({"ffn": {"no_op": True}}, ["block_configs", "attention", "entry 1"]),
        ("dense", ["block_configs", "entry 1"]),
    ],
)
def test_pruned_layers_that_are_refused(changed: Any, words: list[str]) -> None:
    blocks = list(PRUNED["block_configs"])
    blocks[1] = changed
    with pytest.raises(ModelConfigError) as caught:
        MoEModel.from_config(PRUNED | {"block_configs": blocks})
    assert all(word in str(caught.value) for word in words), caught.value


def test_pruned_layers_may_slide() -> None:
    blocks = [block(8, 5.25, window_length=512), *PRUNED["block_configs"][1:]]
    kinds = mixers(PRUNED | {"block_configs": blocks})
    assert [kind.caches[0].window for kind in kinds if kind.caches] == [512, None, None]


# --- Gemma ------------------------------------------------------------------------------------------------------------


def test_gemma_windows() -> None:
    assert windows(GEMMA2) == {4096: tuple(range(0, 42, 2)), None: tuple(range(1, 42, 2))}
    assert windows(GEMMA3)[None] == (5, 11, 17, 23)
    assert windows(GEMMA2 | {"layer_types": ["full_attention"] * 42}) == {None: tuple(range(42))}
    assert "layer_types" in " ".join(MoEModel.from_config(GEMMA2).assumptions)


def test_gemma4_global_layers_use_keys_as_values() -> None:
    sliding, full = mixers(GEMMA4)
    assert full.layers == (5, 11, 17, 23, 29)
    assert "self_attn.v_proj" in shapes(sliding)
    assert "self_attn.v_proj" not in shapes(full)
    assert (sliding.caches[0].elements, sliding.caches[0].window) == (2 * 8 * 256, 1024)
    assert (full.caches[0].elements, full.caches[0].window) == (2 * 2 * 512, None)
    apart = mixers(inside(GEMMA4, attention_k_eq_v=False))[1]
    assert shapes(apart)["self_attn.v_proj"] == (8 * 512, 2816)


def test_gemma4_experts_run_beside_a_dense_network() -> None:
    (moe,) = networks(GEMMA4)
    assert params_of(moe.dense) == 3 * 2816 * 2112 + 1
    assert params_of(moe.router) == 128 * 2816 + 2816 + 128
    assert moe.norm_params == 5 * 2816
    assert moe.experts is not None
    assert moe.experts.params == 3 * 2816 * 704
    (dense,) = networks(
        inside(GEMMA4, enable_moe_block=False, num_experts=None, top_k_experts=None, moe_intermediate_size=None)
    )
    assert dense.experts is None
    assert dense.norm_params == 2 * 2816


# --- encoder-decoders -------------------------------------------------------------------------------------------------


def test_switch_layers() -> None:
    model = MoEModel.from_config(SWITCH)
    assert (model.num_layers, model.encoder_layers) == (24, 12)
    assert model.moe_layers == tuple(range(1, 24, 2))
    assert {kind.experts.top_k for kind in model.feed_forward if kind.experts} == {1}
    tables = [kind.layers for kind in model.attention if any("relative" in one.name for one in kind.tensors)]
    assert tables == [(0,), (12,)]
    caches = {kind.layers[0]: [cache.name for cache in kind.caches] for kind in model.attention}
    assert caches == {0: [], 1: [], 12: ["keys and values", "cross"], 13: ["keys and values", "cross"]}
    every = MoEModel.from_config(
        SWITCH | {"num_sparse_encoder_layers": 12, "encoder_sparse_step": 1, "router_bias": True}
    )
    assert every.moe_layers == (*range(12), *range(13, 24, 2))
    more = 6 * (7 * 2 * 768 * 3072 + 8 * 768) + 18 * 8  # experts for six dense layers, a router each, and all biases
    assert every.total_params - model.total_params == more


def test_nllb_layers() -> None:
    model = MoEModel.from_config(NLLB)
    assert model.moe_layers == tuple(range(3, 48, 4))
    assert {kind.experts.top_k for kind in model.feed_forward if kind.experts} == {2}
    none = MoEModel.from_config(NLLB | {"decoder_sparse_step": 0})
    assert none.moe_layers == tuple(range(3, 24, 4))
    encoder, decoder = model.attention
    assert decoder.params == 2 * encoder.params == 8 * (2048 * 2048 + 2048)
    wider = MoEModel.from_config(NLLB | {"decoder_ffn_dim": 4096})
    assert {kind.experts.size for kind in wider.feed_forward if kind.experts} == {8192, 4096}
