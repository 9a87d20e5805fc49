"""Shapes of networks: published counts, family rules, and every kind of bad config."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.errors import ModelConfigError
from perfmodel.families import one_line, params_of
from perfmodel.model import MoEModel, bundled_models

# Sizes of published models, small enough to write down here; every size key of a family is present.
MIXTRAL: dict[str, Any] = {
    "model_type": "mixtral",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 32000,
}
QWEN: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "decoder_sparse_step": 1,
    "vocab_size": 151936,
}
DEEPSEEK: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "first_k_dense_replace": 3,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "vocab_size": 129280,
    "num_nextn_predict_layers": 1,
}
GPT_OSS: dict[str, Any] = {
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "attention_bias": True,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "sliding_window": 128,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "experts_per_token": 4,
    "vocab_size": 201088,
    "quantization_config": {"quant_method": "mxfp4"},
}
OLMOE: dict[str, Any] = {
    "model_type": "olmoe",
    "hidden_size": 2048,
    "intermediate_size": 1024,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "vocab_size": 50304,
}
V2_LITE: dict[str, Any] = DEEPSEEK | {
    "model_type": "deepseek_v2",
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 27,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "num_attention_heads": 16,
    "q_lora_rank": None,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "vocab_size": 102400,
}
CONFIGS = [MIXTRAL, QWEN, DEEPSEEK, GPT_OSS, OLMOE, V2_LITE]


def family_of(config: dict[str, Any]) -> str:
    return str(config["model_type"])


def refused(source: Any) -> str:
    """The message of the refusal, checked for the form that every refusal has."""
    with pytest.raises(ModelConfigError) as caught:
        MoEModel.from_config(source)
    message = str(caught.value)
    assert message.isprintable()
    assert "allowed: " in message
    assert len(message) < 1000
    return message


# --- published counts


# Totals and active counts printed by the publishers [1e9], in the way each of them counts.
@pytest.mark.parametrize(
    ("config", "total", "active", "how"),
    [
        (MIXTRAL, 46.70, 12.9, "active_params"),
        (QWEN, 30.53, 3.3, "active_params"),
        (DEEPSEEK, 671.0, 37.0, "active_params_without_input_embedding"),
        (GPT_OSS, 20.91, 3.61, "active_params_without_input_embedding"),
        (GPT_OSS | {"num_hidden_layers": 36, "num_local_experts": 128}, 116.83, 5.13, None),
        (OLMOE, 6.92, 1.28, "active_params"),
        (V2_LITE, 15.7, 2.4, "active_params_without_input_embedding"),
    ],
    ids=lambda value: family_of(value) if isinstance(value, dict) else None,
)
def test_published_parameter_counts(config: dict[str, Any], total: float, active: float, how: str | None) -> None:
    if how is None:
        config = config | {"layer_types": ["sliding_attention", "full_attention"] * 18}
        how = "active_params_without_input_embedding"
    model = MoEModel.from_config(config)
    np.testing.assert_allclose(model.total_params / 1e9, total, rtol=1e-3, atol=0)
    np.testing.assert_allclose(getattr(model, how) / 1e9, active, rtol=0.022, atol=0)


@pytest.mark.parametrize(("name", "total", "layers"), [("mixtral-8x7b", 46.7, 32), ("mixtral-8x22b", 140.6, 56)])
def test_bundled_models(name: str, total: float, layers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert name in bundled_models()
    model = MoEModel.from_config(name)
    assert (model.name, model.family, model.num_layers) == (name, "mixtral", layers)
    assert model.moe_layers == tuple(range(layers))
    np.testing.assert_allclose(model.total_params / 1e9, total, rtol=1e-3, atol=0)


def test_bundled_shapes_equal_the_published_configs(shared: Path) -> None:
    for name, published in (("mixtral-8x7b", "Mixtral-8x7B"), ("mixtral-8x22b", "Mixtral-8x22B")):
        model = MoEModel.from_config(shared / "configs" / f"mistralai__{published}-v0.1", name=name)
        assert model == MoEModel.from_config(name)


# --- structure


def test_mixtral_in_detail() -> None:
    model = MoEModel.from_config(MIXTRAL)
    d, ff = 4096, 14336
    assert (model.hidden_size, model.num_experts, model.top_k, model.expert_size) == (d, 8, 2, ff)
    assert model.expert_matrices == ((d, ff), (d, ff), (ff, d))
    assert model.expert_params == sum(k * n for k, n in model.expert_matrices) == 176_160_768
    (attention,), (moe,) = model.attention, model.feed_forward
    assert params_of(moe.router) == 8 * d
    assert (moe.shared, moe.dense, model.num_dense_layers) == ((), (), 0)
    assert attention.layers == moe.layers == tuple(range(32))
    assert attention.params == 2 * d * d + 2 * d * 1024
    (cache,) = attention.caches
    assert (cache.window, cache.elements, cache.flops_per_entry) == (None, 2 * 8 * 128, 4 * 32 * 128)
    assert cache.expanded_elements is None
    assert model.head_params == model.embedding_params == 32000 * d
    assert model.params_by_class()["norm"] == 65 * d
    assert model.kv_bytes(1) == 131_072
    assert model.expert_bytes(16) == model.expert_bytes() == 352_321_536
    np.testing.assert_allclose(model.expert_bytes(2.25), 176_160_768 * 2.25 / 8, rtol=1e-15, atol=0)


def test_gpt_oss_in_detail() -> None:
    model = MoEModel.from_config(GPT_OSS)
    assert model.expert_params == 3 * 2880 * 2880 + 2 * 2880 + 2880
    assert params_of(model.feed_forward[0].router) == 32 * 2880 + 32
    sliding, full = model.attention
    assert windows(model) == [128, None]
    assert (sliding.layers[:2], full.layers[:2]) == ((0, 2), (1, 3))
    query, key = 64 * 64, 8 * 64
    assert sliding.params == full.params == 2 * 2880 * (query + key) + query + 2 * key + 2880 + 64


def test_norms_of_queries_and_keys() -> None:
    qwen, olmoe = (MoEModel.from_config(config).attention[0].params for config in (QWEN, OLMOE))
    assert qwen == 2 * 2048 * (4096 + 512) + 128 + 128  # one norm of a head for all heads
    assert olmoe == 4 * 2048 * 2048 + 2048 + 2048  # norms over whole projections
    biased = MoEModel.from_config(QWEN | {"attention_bias": True}).attention[0].params
    assert biased - qwen == 4096 + 2 * 512 + 2048


def test_deepseek_in_detail() -> None:
    model = MoEModel.from_config(DEEPSEEK)
    assert model.moe_layers == tuple(range(3, 61))
    dense, moe = model.feed_forward
    assert params_of(moe.shared) == 3 * 7168 * 2048
    assert params_of(dense.dense) == 3 * 7168 * 18432
    (attention,) = model.attention
    (cache,) = attention.caches
    assert (cache.elements, cache.flops_per_entry) == (576, 2 * 128 * (576 + 512))
    assert cache.expanded_elements == 128 * 320
    down, up = 7168 * 1536 + 7168 * 576, 1536 * 128 * 192 + 512 * 128 * 256
    assert attention.params == down + up + 128 * 128 * 7168 + 1536 + 512
    plain = MoEModel.from_config(DEEPSEEK | {"q_lora_rank": None}).attention[0]
    assert plain.params - attention.params == 7168 * 128 * 192 - 1536 * (7168 + 128 * 192 + 1)


@pytest.mark.parametrize("shared_experts", [None, 0])
def test_deepseek_without_shared_experts(shared_experts: int | None) -> None:
    assert MoEModel.from_config(DEEPSEEK | {"n_shared_experts": shared_experts}).params_by_class()["shared"] == 0


def test_shared_experts_have_the_routed_width() -> None:
    model = MoEModel.from_config(V2_LITE)
    assert params_of(model.feed_forward[1].shared) == 2 * model.expert_params


def test_dense_layers_of_qwen() -> None:
    small = QWEN | {"num_hidden_layers": 6, "decoder_sparse_step": 2}
    model = MoEModel.from_config(small)
    assert model.moe_layers == (1, 3, 5)
    assert (model.num_dense_layers, params_of(model.feed_forward[0].dense)) == (3, 3 * 2048 * 6144)
    assert MoEModel.from_config(small | {"mlp_only_layers": [3]}).moe_layers == (1, 5)
    assert MoEModel.from_config(QWEN).params_by_class()["dense"] == 0


def test_every_second_layer_of_deepseek() -> None:
    model = MoEModel.from_config(V2_LITE | {"moe_layer_freq": 2, "first_k_dense_replace": 3})
    assert model.moe_layers == tuple(range(4, 27, 2))


@pytest.mark.parametrize("config", CONFIGS, ids=family_of)
def test_one_schema_for_all_families(config: dict[str, Any]) -> None:
    experts = {"num_local_experts", "num_experts", "n_routed_experts"}
    ours = experts & config.keys()
    model = MoEModel.from_config(config)
    for other in experts - ours:
        renamed = {other if key in ours else key: value for key, value in config.items()}
        assert MoEModel.from_config(renamed) == model
    for other in experts - ours:
        assert "another spelling" in refused(config | {other: model.num_experts + 1})


@pytest.mark.parametrize("config", CONFIGS, ids=family_of)
def test_newer_key_spellings_change_nothing(config: dict[str, Any]) -> None:
    older = config | {"torch_dtype": "bfloat16", "rope_theta": 1e4, "rope_scaling": None}
    newer = config | {"dtype": "bfloat16", "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}}
    assert MoEModel.from_config(newer) == MoEModel.from_config(older)
    if "head_dim" not in config:
        assert MoEModel.from_config(newer | {"head_dim": None}) == MoEModel.from_config(config)


def test_tied_embeddings_are_stored_once_but_read_twice() -> None:
    untied, tied = (MoEModel.from_config(MIXTRAL | {"tie_word_embeddings": tie}) for tie in (False, True))
    assert untied.total_params - tied.total_params == untied.embedding_params
    assert tied.head_params == untied.head_params
    assert tied.active_params_without_embeddings == untied.active_params_without_embeddings


def windows(model: MoEModel) -> list[int | None]:
    return [cache.window for kind in model.attention for cache in kind.caches]


def test_windows() -> None:
    assert windows(MoEModel.from_config(MIXTRAL | {"sliding_window": 4096})) == [4096]
    # Qwen keeps the keys of a window in configs that do not use it.
    idle = QWEN | {"sliding_window": 4096, "max_window_layers": 28, "use_sliding_window": False}
    assert windows(MoEModel.from_config(idle)) == [None]
    kinds = ["full_attention"] * 28 + ["sliding_attention"] * 20
    used = MoEModel.from_config(idle | {"use_sliding_window": True, "layer_types": kinds})
    assert windows(used) == [None, 4096]
    assert [kind.layers for kind in used.attention] == [tuple(range(28)), tuple(range(28, 48))]
    all_full = MoEModel.from_config(GPT_OSS | {"layer_types": ["full_attention"] * 24, "sliding_window": None})
    assert windows(all_full) == [None]


@pytest.mark.parametrize("config", CONFIGS, ids=family_of)
def test_parts_add_up(config: dict[str, Any]) -> None:
    model = MoEModel.from_config(config)
    all_experts = model.num_moe_layers * model.num_experts * model.expert_params
    assert model.total_params == model.non_expert_params + all_experts
    idle = model.num_moe_layers * (model.num_experts - model.top_k) * model.expert_params
    assert model.active_params == model.total_params - idle
    assert sorted(layer for kind in model.attention for layer in kind.layers) == list(range(model.num_layers))
    assert model.describe()["total_params"] == model.total_params
    assert json.loads(json.dumps(model.describe())) == model.describe()


# --- cache and storage


@pytest.mark.parametrize(
    ("config", "per_token"), [(DEEPSEEK, 70_272), (QWEN, 98_304), (GPT_OSS, 49_152), (V2_LITE, 27 * 576 * 2)]
)
def test_cache_of_one_token(config: dict[str, Any], per_token: int) -> None:
    assert MoEModel.from_config(config).kv_bytes(1) == per_token


@pytest.mark.parametrize(
    ("hidden", "heads", "head_dim", "error_percent"),
    [(2880, 64, 64, -29.6875), (5120, 32, 128, 25.0), (3584, 16, 256, -12.5)],
)
def test_cache_uses_the_explicit_head_size(hidden: int, heads: int, head_dim: int, error_percent: float) -> None:
    config = QWEN | {"hidden_size": hidden, "num_attention_heads": heads, "num_key_value_heads": 8}
    right = MoEModel.from_config(config | {"head_dim": head_dim}).kv_bytes(1000)
    wrong = MoEModel.from_config({key: value for key, value in config.items() if key != "head_dim"}).kv_bytes(1000)
    np.testing.assert_allclose(100 * (wrong / right - 1), error_percent, rtol=1e-12, atol=0)


def test_compressed_and_expanded_latent_cache() -> None:
    model = MoEModel.from_config(DEEPSEEK)
    assert model.kv_bytes(1, mla_cache="expanded") == 4_997_120
    np.testing.assert_allclose(model.kv_bytes(65_536, mla_cache="expanded") / 2**30, 305, rtol=1e-3, atol=0)
    np.testing.assert_allclose(model.kv_bytes(65_536) / 2**30, 4.3, rtol=5e-3, atol=0)
    plain = MoEModel.from_config(MIXTRAL)
    assert plain.kv_bytes(1, mla_cache="expanded") == plain.kv_bytes(1)


def test_sliding_window_cache_allocated_and_read() -> None:
    small = MoEModel.from_config(GPT_OSS)
    np.testing.assert_allclose(32 * small.kv_bytes(8192, layout="full") / 2**30, 12.0, rtol=1e-12, atol=0)
    np.testing.assert_allclose(32 * small.kv_bytes(8192) / 2**30, 6.09, rtol=1e-3, atol=0)
    types = ["sliding_attention", "full_attention"] * 18
    large = MoEModel.from_config(GPT_OSS | {"num_hidden_layers": 36, "num_local_experts": 128, "layer_types": types})
    assert large.kv_bytes(1, layout="full") == 73_728
    np.testing.assert_allclose(5.38 * 2**30 / large.kv_bytes(1, layout="full"), 78_384, rtol=1e-3, atol=0)


@given(
    config=st.sampled_from(CONFIGS),
    tokens=st.floats(0, 1e9),
    more=st.floats(0, 1e9),
    bits=st.sampled_from([4.0, 8.0, 16.0]),
)
def test_cache_grows_with_the_context(config: dict[str, Any], tokens: float, more: float, bits: float) -> None:
    model = MoEModel.from_config(config)
    assert model.kv_bytes(tokens, bits) <= model.kv_bytes(tokens + more, bits)
    assert model.kv_bytes(tokens, bits) <= model.kv_bytes(tokens, bits, layout="full")
    assert model.kv_bytes(tokens, bits) * 2 == model.kv_bytes(tokens, 2 * bits)


JUNK_NUMBERS = [-1, float("nan"), float("inf"), True, "1", None, [1], 10**400, 1j, np.array([1.0, 2.0])]


@pytest.mark.parametrize("junk", JUNK_NUMBERS, ids=one_line)
def test_bad_arguments(junk: Any) -> None:
    model = MoEModel.from_config(MIXTRAL)
    calls: list[Callable[[], object]] = [
        lambda: model.kv_bytes(junk),
        lambda: model.kv_bytes(1, junk),
        lambda: model.kv_bytes(1, 0),
        lambda: model.kv_bytes(1, mla_cache=junk),
        lambda: model.expert_bytes(0),
        lambda: model.expert_bytes("x" if junk is None else junk),
        lambda: model.kv_bytes(1, layout=junk),
        lambda: model.kv_read_bytes(junk),
        lambda: model.kv_read_bytes(1, junk),
    ]
    for call in calls:
        with pytest.raises(ModelConfigError, match=r" is .*; allowed: "):
            call()


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_size": 0},
        {"num_layers": 31},
        {"num_layers": True},
        {"encoder_layers": -1},
        {"attention": ()},
        {"feed_forward": ()},
        {"name": ""},
    ],
    ids=str,
)
def test_replaced_values_are_checked(change: dict[str, Any]) -> None:
    with pytest.raises(ModelConfigError, match=r" is .*; allowed: "):
        dataclasses.replace(MoEModel.from_config(MIXTRAL), **change)


HUNYUAN: dict[str, Any] = {
    "model_type": "hunyuan_v1_moe",
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 8,
    "moe_topk": [2, 2, 2, 2],
    "num_shared_expert": [1, 1, 1, 1],
    "vocab_size": 100,
}


@pytest.mark.parametrize(
    ("config", "change", "key"),
    [
        (HUNYUAN, {"moe_top_k": [3, 3, 3, 3]}, "moe_topk"),
        (HUNYUAN, {"num_experts_per_token": 3}, "moe_topk"),
        (HUNYUAN, {"n_shared_experts": [2, 1, 1, 1]}, "num_shared_expert"),
        (DEEPSEEK, {"moe_layer_freq": [1] * 61}, "moe_layer_freq"),
        (DEEPSEEK, {"n_group": 8}, "topk_group"),
        (MIXTRAL, {"mlp_layer_types": ["dense"] * 32}, "mlp_layer_types"),
        (QWEN, {"mlp_layer_types": ["sparse"] * 47}, "mlp_layer_types"),
        (QWEN, {"layer_types": ["linear_attention"] * 48}, "layer_types"),
        (QWEN, {"layer_types": ["full_attention"] * 47}, "layer_types"),
        (OLMOE, {"layer_types": ["sliding_attention"] * 16}, "layer_types"),
        (MIXTRAL, {"per_layer_config": {"05": {"num_experts": 4}}}, "per_layer_config"),
        (MIXTRAL, {"num_dense_layers": 2}, "num_dense_layers"),
        (MIXTRAL, {"use_moe": False}, "use_moe"),
    ],
    ids=str,
)
def test_keys_that_contradict_each_other_are_refused(config: dict[str, Any], change: dict[str, Any], key: str) -> None:
    assert key in refused(config | change)


def test_keys_that_say_the_same_twice_are_read() -> None:
    plain = MoEModel.from_config(HUNYUAN)
    assert MoEModel.from_config(HUNYUAN | {"num_experts_per_tok": 2}) == plain
    again = {"mlp_layer_types": ["sparse"] * 48, "layer_types": ["full_attention"] * 48}
    assert MoEModel.from_config(QWEN | again) == MoEModel.from_config(QWEN)
    dense = {"mlp_layer_types": ["dense"] * 3 + ["sparse"] * 58, "moe_layer_freq": [0] * 3 + [1] * 58}
    assert MoEModel.from_config(DEEPSEEK | dense) == MoEModel.from_config(DEEPSEEK)


@pytest.mark.parametrize(
    ("config", "key", "written"),
    [
        (MIXTRAL, "num_key_value_heads", "num_key_value_head"),
        (GPT_OSS, "head_dim", "headdim"),
        (QWEN, "head_dim", "head_dims"),
        (GPT_OSS, "quantization_config", "quantisation_config"),
        (GPT_OSS, "quantization_config", "quant_config"),
    ],
)
def test_misspelled_keys_whose_default_would_be_taken_are_refused(
    config: dict[str, Any], key: str, written: str
) -> None:
    message = refused({written if one == key else one: value for one, value in config.items()})
    assert repr(written) in message
    assert f"{key}, which is missing" in message


class Broken:
    def __repr__(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize(
    "junk", [np.array([1, 2]), {1, 2}, Broken(), np.int64(3), b"8"], ids=lambda one: type(one).__name__
)
def test_values_that_json_does_not_have_are_refused(junk: Any) -> None:
    for config in (MIXTRAL, DEEPSEEK, GPT_OSS):
        for key in ("hidden_size", "num_attention_heads", "torch_dtype", "tie_word_embeddings", "quantization_config"):
            assert key in refused(config | {key: junk})
    nested: dict[str, Any] = {}
    for _ in range(900):
        nested = {"a": nested}
    with pytest.raises(ModelConfigError, match="nested too deeply"):
        MoEModel.from_config(MIXTRAL | {"extra": nested})


def test_nulls_that_mean_none_are_said() -> None:
    assert "default taken: q_lora_rank = none (null in the config)" in MoEModel.from_config(V2_LITE).assumptions


def test_a_name_is_no_evidence_of_quantisation(tmp_path: Path) -> None:
    for name, said in (
        ("Mixtral-AWQ", True),
        ("mixtral-NVFP4", True),
        ("mixtral-int4-w4a16", True),
        ("mixtral", False),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(MIXTRAL))
        model = MoEModel.from_config(tmp_path / name)
        assert any("the name speaks of" in one for one in model.assumptions) is said
        assert model.expert_bits == 16
    quantised = MIXTRAL | {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128}}
    (tmp_path / "Mixtral-AWQ" / "config.json").write_text(json.dumps(quantised))
    assert not any("speaks of" in one for one in MoEModel.from_config(tmp_path / "Mixtral-AWQ").assumptions)


# --- names and files


def test_names(tmp_path: Path) -> None:
    folder = tmp_path / "models--mistralai--Mixtral" / "snapshots" / "abc"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(MIXTRAL))
    (folder / "mine.json").write_text("\ufeff" + json.dumps(MIXTRAL), encoding="utf-8")
    assert MoEModel.from_config(folder).name == "mistralai/Mixtral"
    assert MoEModel.from_config(str(folder / "config.json")).name == "mistralai/Mixtral"
    assert MoEModel.from_config(folder / "mine.json").name == "mine"
    assert MoEModel.from_config(folder, name="other").name == "other"
    assert MoEModel.from_config(MIXTRAL).name == "mixtral"


def test_what_is_not_a_config_file(tmp_path: Path) -> None:
    assert "holds no config.json" in refused(tmp_path)
    assert "did you mean 'mixtral-8x7b'" in refused("mixtral-8x7")
    assert "no such file" in refused(tmp_path / "missing.json")
    for source in (
        "",
        " ",
        "a\0b",
        "a\nb",
        "x" * 5000,
        None,
        8,
        True,
        b"mixtral-8x7b",
        ["mixtral-8x7b"],
        object,
    ):
        refused(source)
    (tmp_path / "config.json").mkdir()
    assert "not a regular file" in refused(tmp_path)
    assert "not a regular file" in refused("/dev/null")


@pytest.mark.parametrize(
    ("content", "hint"),
    [
        (b"", "JSON"),
        (b"{", "JSON"),
        (b'{"model_type": "mixtral",}', "JSON"),
        (b"[]", "found []"),
        (b"null", "found None"),
        (b'"mixtral"', "found 'mixtral'"),
        (b"NaN", "found nan"),
        (b"{}", "'model_type' is missing"),
        (b'{"model_type": 3}', "'model_type' is 3"),
        (b'{"model_type": "mixtral", "model_type": "olmoe"}', "twice"),
        (b"\xff\xfe\x00", "UTF-8"),
        (b"PK\x03\x04junk", "JSON"),
        (b"GGUF", "a whole GGUF file"),
        (b"GGUF\x03\x00\x00\x00", "a whole GGUF file"),
        (b"[" * 100_000, "nested"),
        (b'{"model_type": ' + b"9" * 5000 + b"}", "JSON"),
        (b" " * (16 * 2**20 + 1), "16 MiB"),
    ],
    ids=lambda value: repr(value[:20]),
)
def test_malformed_files(content: bytes, hint: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    message = refused(path)
    assert message.startswith(str(path))
    assert hint in message


@given(content=st.binary(max_size=200))
def test_random_bytes_are_refused(content: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "random.json"
    path.write_bytes(content)
    assert str(path) in refused(path)


# --- bad keys

OPTIONAL = {
    "head_dim",
    "attention_bias",
    "sliding_window",
    "moe_layer_freq",
    "quantization_config",
    "experts_per_token",
    "num_nextn_predict_layers",
    "num_key_value_heads",
}
UNREAD = {"num_nextn_predict_layers", "num_key_value_heads:deepseek", "intermediate_size:qwen3_moe"}
JUNK = [0, -1, float("nan"), float("inf"), 2.0, True, "8", [8], {}, 10**30, 10**5000, [[[[]]]], np.arange(3)]


def read_keys(config: dict[str, Any]) -> list[str]:
    """The keys of a config on which its shape depends."""
    family = family_of(config)
    return [
        key
        for key in config
        if not any(key == unread.split(":")[0] and unread.partition(":")[2] in family for unread in UNREAD)
    ]


@pytest.mark.parametrize("config", CONFIGS, ids=family_of)
def test_missing_keys(config: dict[str, Any]) -> None:
    for key in read_keys(config):
        without = {other: value for other, value in config.items() if other != key}
        if key in OPTIONAL or (key == "num_experts_per_tok" and "experts_per_token" in config):
            continue
        message = refused(without)
        assert f"{key!r} is missing" in message or (key in ("num_experts", "n_routed_experts") and key in message)


@pytest.mark.parametrize("junk", JUNK, ids=one_line)
@pytest.mark.parametrize("config", CONFIGS, ids=family_of)
def test_wrong_values(config: dict[str, Any], junk: Any) -> None:
    for key in read_keys(config):
        if type(junk) is int and junk == 0 and key in ("first_k_dense_replace", "n_shared_experts"):
            continue
        if junk is True and key == "attention_bias":
            continue
        message = refused(config | {key: junk})
        assert f"key {key!r} is " in message or f"{key}: key " in message, (key, message)


@pytest.mark.parametrize(
    ("config", "change", "words"),
    [
        (
            MIXTRAL,
            {"num_experts_per_tok": 9},
            ["num_experts_per_tok", "is 9", "at most the number of experts, 8"],
        ),
        (MIXTRAL, {"num_local_experts": 0}, ["num_local_experts", "is 0", "from 1 to"]),
        (MIXTRAL, {"num_key_value_heads": 5}, ["num_key_value_heads", "is 5", "divisor", "32"]),
        (MIXTRAL, {"hidden_size": 4097}, ["head_dim", "is missing", "4097"]),
        (MIXTRAL, {"tie_word_embeddings": "no"}, ["tie_word_embeddings", "'no'", "true or false"]),
        (MIXTRAL, {"sliding_window": -1}, ["sliding_window", "-1"]),
        (MIXTRAL, {"torch_dtype": "int4"}, ["torch_dtype", "int4", "bfloat16"]),
        (MIXTRAL, {"dtype": 16}, ["dtype", "is 16", "bfloat16"]),
        (MIXTRAL, {"quantization_config": "awq"}, ["quantization_config", "awq"]),
        (MIXTRAL, {"quantization_config": {}}, ["quant_method", "missing", "fp8"]),
        (MIXTRAL, {"quantization_config": {"quant_method": "aqlm"}}, ["quant_method", "aqlm", "mxfp4"]),
        (
            MIXTRAL,
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 0]}},
            ["weight_block_size", "[128, 0]", "integers"],
        ),
        (QWEN, {"mlp_only_layers": list(range(48))}, ["no layer has experts", "mlp_only_layers", "48"]),
        (QWEN, {"decoder_sparse_step": 49}, ["no layer has experts", "decoder_sparse_step 49"]),
        (QWEN, {"mlp_only_layers": [48]}, ["mlp_only_layers", "[48]", "0 to 47"]),
        (QWEN, {"mlp_only_layers": [True]}, ["mlp_only_layers", "True"]),
        (QWEN, {"mlp_only_layers": 3}, ["mlp_only_layers", "is 3", "a list"]),
        (QWEN, {"mlp_only_layers": [0], "intermediate_size": None}, ["intermediate_size", "None"]),
        (QWEN, {"use_sliding_window": True, "sliding_window": 9}, ["layer_types", "missing"]),
        (DEEPSEEK, {"first_k_dense_replace": 61}, ["no layer has experts", "first_k_dense_replace 61"]),
        (DEEPSEEK, {"n_routed_experts": None}, ["n_routed_experts", "None"]),
        (GPT_OSS, {"layer_types": ["full_attention"]}, ["layer_types", "24 entries"]),
        (GPT_OSS, {"layer_types": ["full"] * 24}, ["layer_types", "full_attention, sliding_attention"]),
        (GPT_OSS, {"layer_types": None}, ["layer_types", "None", "no default"]),
        (GPT_OSS, {"sliding_window": None}, ["sliding_window", "None"]),
        (GPT_OSS, {"experts_per_token": 2}, ["experts_per_token", "is 2", "allowed: 4"]),
        (MIXTRAL, {"model_type": "llama"}, ["speaks of experts", "'llama'"]),
        (
            MIXTRAL,
            {"model_type": "mixtrall"},
            ["model_type", "'mixtrall'", "close by name", "mixtral", "perfmodel model families"],
        ),
        (MIXTRAL, {"model_type": "a\nb" * 99}, ["model_type", "..."]),
    ],
    ids=lambda value: None if isinstance(value, list) else str(value)[:50],
)
def test_refusals_say_key_found_and_allowed(
    config: dict[str, Any], change: dict[str, Any], words: list[str], tmp_path: Path
) -> None:
    message = refused(config | change)
    assert [word for word in words if word not in message] == []
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config | change))
    assert str(path) in refused(path)


def test_dense_networks_are_counted_and_not_placed() -> None:
    keys = {key: value for key, value in MIXTRAL.items() if "expert" not in key}
    assert "'num_local_experts' is missing" in refused(keys)
    dense = MoEModel.from_config(keys | {"model_type": "llama"})
    assert dense.total_params == dense.active_params == 46_702_792_704 - 32 * (7 * 176_160_768 + 8 * 4096)
    assert (dense.num_moe_layers, dense.num_dense_layers, dense.params_by_class()["expert"]) == (0, 32, 0)
    assert dense.describe()["experts_per_layer"] == 0
    for ask in (dense.with_experts, lambda: dense.num_experts, lambda: dense.expert_bytes(4)):
        with pytest.raises(ModelConfigError, match="no layer has experts"):
            ask()


ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)


@given(data=st.data(), config=st.sampled_from(CONFIGS))
def test_mutated_configs_are_read_or_refused(data: st.DataObject, config: dict[str, Any]) -> None:
    keys = sorted({*config, "tie_word_embeddings", "dtype", "mlp_only_layers", "moe_layer_freq", "use_sliding_window"})
    changes = data.draw(st.dictionaries(st.sampled_from(keys), ANY_JSON, min_size=1, max_size=3))
    changed = config | changes
    try:
        model = MoEModel.from_config(changed)
    except ModelConfigError:
        refused(changed)
    else:
        assert 0 < model.active_params <= model.total_params
        assert 1 <= model.top_k <= model.num_experts
        assert 0 < model.kv_bytes(4096) < np.inf
        assert len(model.moe_layers) >= 1


@given(values=st.dictionaries(st.text(max_size=12), ANY_JSON, max_size=6))
def test_random_objects_are_refused(values: dict[str, Any]) -> None:
    refused(values)
    refused({"model_type": "mixtral"} | values)


@st.composite
def mixtral_like(draw: st.DrawFn) -> dict[str, Any]:
    kv_heads = draw(st.integers(1, 16))
    heads = kv_heads * draw(st.integers(1, 8))
    experts = draw(st.integers(1, 256))
    return {
        "model_type": "mixtral",
        "hidden_size": heads * draw(st.integers(1, 256)),
        "intermediate_size": draw(st.integers(1, 30_000)),
        "num_hidden_layers": draw(st.integers(1, 100)),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "num_local_experts": experts,
        "num_experts_per_tok": draw(st.integers(1, experts)),
        "vocab_size": draw(st.integers(1, 300_000)),
        "tie_word_embeddings": draw(st.booleans()),
    }


@given(config=mixtral_like())
def test_count_equals_the_sum_over_tensors(config: dict[str, Any]) -> None:
    """Every tensor of such a network written out one by one."""
    d, ff, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    head_dim = d // heads
    key = config["num_key_value_heads"] * head_dim
    layer = [
        d * heads * head_dim,
        d * key,
        d * key,
        heads * head_dim * d,
        d,
        d,
        d * config["num_local_experts"],
    ]
    layer += [d * ff, d * ff, ff * d] * config["num_local_experts"]
    tensors = layer * config["num_hidden_layers"] + [config["vocab_size"] * d, d]
    if not config["tie_word_embeddings"]:
        tensors.append(config["vocab_size"] * d)
    assert MoEModel.from_config(config).total_params == sum(tensors)
