"""What people found wrong in other tools' readings of configs, with the right numbers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_model import DEEPSEEK, GPT_OSS, MIXTRAL, QWEN

from perfmodel.errors import ModelConfigError
from perfmodel.families import params_of
from perfmodel.kernels import front
from perfmodel.memory import distinct_bound, distinct_experts
from perfmodel.model import MoEModel
from perfmodel.operators import attention_rows
from perfmodel.placement import gpu_footprint
from perfmodel.routing.synthetic import generate
from perfmodel.run import plan_run
from perfmodel.storage import Storage

LARGE_GPT_OSS = GPT_OSS | {
    "num_hidden_layers": 36,
    "num_local_experts": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 18,
}
QWEN2_MOE: dict[str, Any] = {
    "model_type": "qwen2_moe",
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "decoder_sparse_step": 1,
    "vocab_size": 151936,
}
LLAMA4_TEXT: dict[str, Any] = {
    "model_type": "llama4_text",
    "hidden_size": 5120,
    "intermediate_size": 8192,
    "intermediate_size_mlp": 16384,
    "num_hidden_layers": 48,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "attention_chunk_size": 8192,
    "num_experts_per_tok": 1,
    "vocab_size": 202048,
}
MAVERICK = LLAMA4_TEXT | {"num_local_experts": 128, "interleave_moe_layer_step": 2, "use_qk_norm": False}
SCOUT = LLAMA4_TEXT | {"num_local_experts": 16, "interleave_moe_layer_step": 1, "use_qk_norm": True}


def read(config: dict[str, Any], **changes: Any) -> MoEModel:
    return MoEModel.from_config(config | changes)


def close(found: float, wanted: float, percent: float) -> None:
    np.testing.assert_allclose(found, wanted, rtol=percent / 100, atol=0)


@pytest.mark.parametrize(
    ("config", "experts", "top_k", "width"),
    [
        (MIXTRAL, 8, 2, 14336),
        (QWEN2_MOE, 60, 4, 1408),
        (QWEN, 128, 8, 768),
        (DEEPSEEK, 256, 8, 2048),
        (GPT_OSS, 32, 4, 2880),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else None,
)
def test_count_and_width_have_other_names_in_every_family(
    config: dict[str, Any], experts: int, top_k: int, width: int
) -> None:
    model = read(config)
    assert (model.num_experts, model.top_k, model.expert_size) == (experts, top_k, width)


@pytest.mark.parametrize("config", [QWEN, QWEN2_MOE], ids=["qwen3_moe", "qwen2_moe"])
def test_every_second_layer_has_experts(config: dict[str, Any]) -> None:
    small = config | {"num_hidden_layers": 6, "decoder_sparse_step": 2}
    assert read(small).moe_layers == (1, 3, 5)
    assert read(small, mlp_only_layers=[3]).moe_layers == (1, 5)


@pytest.mark.parametrize(
    ("config", "billions"),
    [(MIXTRAL, 46.70), (QWEN, 30.53), (GPT_OSS, 20.91), (LARGE_GPT_OSS, 116.83), (DEEPSEEK, 671.0)],
    ids=["mixtral", "qwen3_moe", "gpt-oss-20b", "gpt-oss-120b", "deepseek_v3"],
)
def test_untied_heads_and_all_experts_are_counted(config: dict[str, Any], billions: float) -> None:
    model = read(config)
    close(model.total_params / 1e9, billions, 0.5)
    tied = read(config, tie_word_embeddings=True)
    assert model.total_params - tied.total_params == config["vocab_size"] * config["hidden_size"]


def test_dense_and_moe_layers_alternate_where_the_config_says_so() -> None:
    maverick, scout = read(MAVERICK), read(SCOUT)
    assert maverick.moe_layers == tuple(range(1, 48, 2))
    assert (scout.num_moe_layers, scout.num_dense_layers) == (48, 0)
    close(maverick.total_params / 1e9, 400, 1)
    close(scout.total_params / 1e9, 109, 1.5)  # which holds a vision tower
    for model in (maverick, scout):
        close(model.active_params / 1e9, 17, 3)
        (moe,) = (kind for kind in model.feed_forward if kind.experts is not None)
        assert params_of(moe.shared) == moe.experts.params == 3 * 5120 * 8192  # type: ignore[union-attr]
    (dense,) = (kind for kind in maverick.feed_forward if kind.experts is None)
    assert params_of(dense.dense) == 3 * 5120 * 16384
    assert read(MAVERICK, moe_layers=[0, 5]).moe_layers == (0, 5)


def test_shared_experts_have_their_own_width(shared: Path) -> None:
    qwen, deepseek = read(QWEN2_MOE), read(DEEPSEEK, n_shared_experts=2)
    assert params_of(qwen.feed_forward[0].shared) == 3 * 2048 * 5632 + 2048  # and the gate of the shared expert
    assert params_of(deepseek.feed_forward[1].shared) == 3 * 7168 * 2 * 2048
    gemma = MoEModel.from_config(shared / "configs" / "google__gemma-4-26B-A4B")
    close(gemma.active_params / 1e9, 3.82, 1)


def test_storage_and_compute_formats_are_two_things() -> None:
    small, large = read(GPT_OSS), read(LARGE_GPT_OSS)
    assert large.compute == "bfloat16"
    close(large.storage.expert.bits, 4.25, 0.5)  # biases stay wider
    close(large.weight_bytes, 65_248_815_744, 1)
    rest = large.storage.override(("expert=mxfp4",)).by_class()
    eight = Storage(**(dict.fromkeys(rest, Storage.uniform(8.5).head) | {"expert": rest["expert"]}))
    close(sum(params * eight.by_class()[name].bits / 8 for name, params in large.params_by_class().items()), 63.25e9, 1)
    for model, gigabytes in ((small, 41.8), (large, 233.7)):
        unpacked = model.storage.upcast(supports=()).by_class()
        size = sum(params * unpacked[name].bits / 8 for name, params in model.params_by_class().items())
        close(size / 1e9, gigabytes, 1)


def test_latent_caches_and_explicit_heads() -> None:
    assert read(DEEPSEEK).kv_bytes(1) == 70_272 != 2 * 61 * 512 * 2
    assert read(QWEN).kv_bytes(1) == 98_304
    without = read({key: value for key, value in QWEN.items() if key != "head_dim"})
    assert without.kv_bytes(1) == 49_152
    assert "default taken: head_dim = 64 (hidden_size / num_attention_heads)" in without.assumptions


def test_a_latent_is_no_pair_of_heads() -> None:
    latent = read(DEEPSEEK).kv_bytes(1)
    as_heads = 2 * 61 * 128 * 56 * 2
    assert as_heads == 1_748_992
    close(as_heads / latent, 24.9, 0.1)
    sparse = DEEPSEEK | {
        "model_type": "deepseek_v32",
        "index_n_heads": 64,
        "index_head_dim": 128,
        "index_topk": 2048,
    }
    parts = read(sparse).kv_parts(1)
    assert parts == {"latent": 70_272, "index keys": 61 * 128 * 2}
    at_64k = read(sparse).kv_read_parts(65_536)
    assert at_64k == {"latent": 61 * 576 * 2 * 2048, "index keys": 61 * 128 * 2 * 65_536}


def test_expanded_and_compressed_latents() -> None:
    model = read(DEEPSEEK)
    assert model.kv_bytes(1, mla_cache="expanded") == 4_997_120
    close(model.kv_bytes(65_536, mla_cache="expanded") / 2**30, 305, 0.1)
    close(model.kv_bytes(65_536) / 2**30, 4.3, 0.5)


def test_windows_allocated_and_read() -> None:
    large, small = read(LARGE_GPT_OSS), read(GPT_OSS)
    assert large.kv_bytes(1, layout="full") == 73_728
    assert large.kv_read_bytes(100_000) - large.kv_read_bytes(99_999) == 36_864
    close(5.38 * 2**30 / large.kv_bytes(1, layout="full"), 78_384, 0.1)
    close(32 * small.kv_bytes(8192, layout="full") / 2**30, 12.00, 0.01)
    close(32 * small.kv_bytes(8192) / 2**30, 6.09, 0.1)
    close(32 * small.kv_read_bytes(8192) / 2**30, 6.09, 0.1)


def test_cache_of_gemma_in_gigabytes(shared: Path) -> None:
    gemma = MoEModel.from_config(shared / "configs" / "google__gemma-4-26B-A4B")
    for tokens, right in ((4096, 0.40), (8192, 0.48), (32_768, 0.99), (131_072, 3.00)):
        close(gemma.kv_bytes(tokens, layout="llama.cpp") / 1e9, right, 3)


def test_distinct_experts_of_a_batch() -> None:
    assert distinct_bound(8, 2, 3) == 6
    close(float(distinct_experts(8, 2, 3)), 4.625, 1e-9)
    skewed = generate(1, 0, 3000, 1, 8, 2, layer_profile=[40, 20, 3, 3, 2, 1, 1, 1], seed=1)
    groups = skewed.topk_ids[:, 0].reshape(-1, 6)
    mean = np.mean([len(set(row.tolist())) for row in groups])
    assert 3 < mean < 4 < 4.625
    # Real text on 128 experts, 512 tokens: 72 to 95 of them, where uniform routing would visit all.
    assert distinct_experts(128, 4, 512) > 127.9
    profile = (1.0 / np.arange(1, 129) ** 1.9).tolist()
    steep = generate(1, 0, 512, 1, 128, 4, layer_profile=profile, seed=1)
    assert 72 <= len(np.unique(steep.topk_ids)) <= 95


def test_distinct_experts_of_a_rank() -> None:
    share = 16 / 128
    close(float(distinct_experts(128, 8, 8)) * share, 6.45, 0.1)
    close(float(distinct_experts(16, 8, 8)), 15.94, 0.1)  # with k over the experts of the rank: wrong


@pytest.mark.parametrize(
    ("experts", "groups", "top_k", "kept", "key"),
    [
        (8, 8, 2, 1, "n_group"),
        (256, 7, 8, 4, "n_group"),
        (256, 8, 8, 9, "topk_group"),
        (64, 8, 9, 1, "num_experts_per_tok"),
    ],
)
def test_groups_that_no_router_has_are_refused(experts: int, groups: int, top_k: int, kept: int, key: str) -> None:
    grouped = {"n_routed_experts": experts, "n_group": groups, "num_experts_per_tok": top_k, "topk_group": kept}
    with pytest.raises(ModelConfigError, match=f"key '{key}'"):
        read(DEEPSEEK, **grouped)


def test_one_group_is_plain_top_k() -> None:
    assert read(DEEPSEEK, n_group=1, topk_group=1).feed_forward == read(DEEPSEEK).feed_forward
    assert read(DEEPSEEK, n_group=8, topk_group=4).top_k == 8


def test_the_precision_of_the_cache_is_priced_and_placed() -> None:
    wide = read(MIXTRAL)
    narrow = read(
        MIXTRAL, quantization_config={"quant_method": "fp8", "kv_cache_scheme": {"num_bits": 8, "type": "float"}}
    )
    assert (wide.cached_bits, narrow.cached_bits) == (16, 8)
    assert gpu_footprint(wide, 0, 4096).kv_cache == 2 * gpu_footprint(narrow, 0, 4096).kv_cache
    rows = [attention_rows(model)[0, front.CONTEXT_BYTES] for model in (wide, narrow)]
    assert rows == [2 * 8 * 128 * 2, 2 * 8 * 128]


def test_what_cannot_be_priced_is_said_before_the_trace_is_looked_at(shared: Path) -> None:
    for name, words in (
        ("google__switch-base-8", "has an encoder of 12 layers"),
        ("facebook__nllb-moe-54b", "has an encoder of 24 layers"),
        ("meta-llama__Meta-Llama-3-8B", "no layer has experts"),
    ):
        model = MoEModel.from_config(shared / "configs" / name)
        with pytest.raises(ModelConfigError, match=words):
            plan_run(model, "h100-cxl2-ndp", "tiny-mixtral-32l-mini", "monde")


def test_common_keys_of_quantised_releases_are_no_obstacle() -> None:
    for table in (
        {"quant_method": "gptq", "bits": 4, "group_size": 128, "cache_block_outputs": True},
        {"quant_method": "gptq_marlin", "bits": 4, "group_size": 128},
        {"quant_method": "awq", "bits": 4, "group_size": 128, "modules_to_fuse": {"attention": ["q_proj"]}},
        {"quant_method": "awq_marlin", "bits": 4, "group_size": 128},
    ):
        assert 4 < read(MIXTRAL, quantization_config=table).expert_bits < 5


@given(heads=st.integers(1, 64), head_dim=st.integers(1, 256), layers=st.integers(1, 80), tokens=st.integers(0, 10**6))
def test_grouped_queries_of_as_many_heads_are_plain_attention(
    heads: int, head_dim: int, layers: int, tokens: int
) -> None:
    sizes = {"num_attention_heads": heads, "head_dim": head_dim, "num_hidden_layers": layers}
    grouped, unsaid = (
        read(MIXTRAL, **sizes, num_key_value_heads=heads),
        read(MIXTRAL, **sizes, num_key_value_heads=None),
    )
    (attention,) = grouped.attention
    assert attention.params == 4 * 4096 * heads * head_dim
    assert grouped.kv_bytes(tokens) == grouped.kv_read_bytes(tokens) == tokens * layers * 2 * heads * head_dim * 2
    assert grouped.attention == unsaid.attention


@given(
    heads=st.integers(1, 128), nope=st.integers(1, 256), rope=st.integers(1, 128), value=st.integers(1, 256),
    share=st.floats(0, 1), tokens=st.integers(0, 10**6), bits=st.sampled_from([4, 8, 16]),
)  # fmt: skip
def test_a_latent_never_exceeds_its_expanded_form(
    heads: int, nope: int, rope: int, value: int, share: float, tokens: int, bits: float
) -> None:
    rank = max(1, int(share * heads * (nope + value)))  # more would be no compression
    sizes = {"num_attention_heads": heads, "qk_nope_head_dim": nope, "qk_rope_head_dim": rope, "v_head_dim": value}
    model = read(DEEPSEEK, **sizes, kv_lora_rank=rank)
    assert model.kv_bytes(tokens, bits) <= model.kv_bytes(tokens, bits, mla_cache="expanded")
    assert model.kv_bytes(tokens, bits) == 61 * (rank + rope) * tokens * bits / 8
