"""Models in GGUF files, against configs of the same sizes, and hostile files."""

import dataclasses
import math
import struct
import sys
from pathlib import Path
from typing import Any

import gguf
import gguf_models as small
import pytest
from gguf_files import LIST, TEXT, header, tensor, text, value
from gguf_models import HIDDEN, VOCAB, Tensors, Type, Values
from hypothesis import assume, given
from hypothesis import strategies as st

from perfmodel.errors import ModelConfigError
from perfmodel.gguf_header import read_header
from perfmodel.model import MoEModel
from perfmodel.model.gguf import ARCHITECTURES, gguf_tensors
from perfmodel.storage import FORMATS, GGUF_BLOCKS, Format

MIXTRAL = {
    "model_type": "mixtral",
    "hidden_size": HIDDEN,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": VOCAB,
}
QWEN3MOE = {
    "model_type": "qwen3_moe",
    "hidden_size": HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "decoder_sparse_step": 1,
    "tie_word_embeddings": True,
    "vocab_size": VOCAB,
}
DEEPSEEK = {
    "model_type": "deepseek_v3",
    "hidden_size": HIDDEN,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 64,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "vocab_size": VOCAB,
}
GPT_OSS = {
    "model_type": "gpt_oss",
    "hidden_size": HIDDEN,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "vocab_size": VOCAB,
}
QWEN3NEXT = {
    "model_type": "qwen3_next",
    "hidden_size": HIDDEN,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "full_attention_interval": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "decoder_sparse_step": 1,
    "vocab_size": VOCAB,
}
PAIRS = {
    "mixtral": (small.mixtral, MIXTRAL),
    "old mixtral": (small.old_mixtral, MIXTRAL),
    "qwen3moe": (small.qwen3moe, QWEN3MOE),
    "deepseek": (small.deepseek2, DEEPSEEK),
    "deepseek, projections in one": (lambda: small.deepseek2(split=False), DEEPSEEK),
    "deepseek, full queries": (lambda: small.deepseek2(query_rank=None), DEEPSEEK | {"q_lora_rank": None}),
    "gpt-oss": (small.gpt_oss, GPT_OSS),
    "qwen3next": (small.qwen3next, QWEN3NEXT),
}


def refused(path: Path | object) -> str:
    with pytest.raises(ModelConfigError) as caught:
        MoEModel.from_gguf(path)  # type: ignore[arg-type]
    message = str(caught.value)
    assert "\n" not in message
    return message


def written(folder: Path, arch: str, values: Values, tensors: Tensors) -> Path:
    return small.write(folder / "tiny.gguf", arch, values, tensors)


@pytest.mark.parametrize("name", PAIRS)
def test_a_file_counts_as_the_config_of_the_same_sizes(name: str, tmp_path: Path) -> None:
    make, config = PAIRS[name]
    arch, values, tensors = make()
    found, expected = MoEModel.from_gguf(written(tmp_path, arch, values, tensors)), MoEModel.from_config(config)
    assert found.family == arch
    assert found.params_by_class() == expected.params_by_class()
    assert found.total_params == sum(math.prod(shape) for shape, _ in tensors.values())
    for key in (
        "active_params",
        "active_params_without_input_embedding",
        "active_params_without_embeddings",
        "num_moe_layers",
        "moe_layers",
        "num_dense_layers",
        "num_experts",
        "top_k",
        "expert_size",
        "expert_params",
        "expert_matrices",
        "hidden_size",
        "num_layers",
        "vocab_size",
        "tied_embeddings",
    ):
        assert getattr(found, key) == getattr(expected, key), key
    for context in (1, 100, 5000):
        for cache in ("compressed", "expanded"):
            for layout in ("capped", "full"):
                assert found.kv_parts(context, layout=layout, mla_cache=cache) == expected.kv_parts(  # type: ignore[arg-type]
                    context,
                    layout=layout,
                    mla_cache=cache,  # type: ignore[arg-type]
                )
        assert found.kv_read_parts(context) == expected.kv_read_parts(context)
    for mine, theirs in zip(found.attention, expected.attention, strict=True):
        assert (mine.name, mine.layers, mine.caches) == (theirs.name, theirs.layers, theirs.caches)
    rows, others = found.params_by_layer(), expected.params_by_layer()
    assert rows == others


@pytest.mark.parametrize("name", PAIRS)
def test_bytes_are_those_of_the_tensors(name: str, tmp_path: Path) -> None:
    arch, values, tensors = PAIRS[name][0]()
    path = written(tmp_path, arch, values, tensors)
    expected = small.tensor_bytes(tensors.values())
    assert MoEModel.from_gguf(path).weight_bytes == expected
    assert sum(one.size for one in gguf_tensors(path)) == expected
    assert {one.name: one.shape for one in gguf_tensors(path)} == {name: shape for name, (shape, _) in tensors.items()}
    reader = gguf.GGUFReader(path)
    assert {one.name: (int(one.n_bytes), one.tensor_type.name) for one in reader.tensors} == {
        one.name: (one.size, {"float32": "F32"}.get(one.stored.name, one.stored.name.upper()))
        for one in gguf_tensors(path)
    }


def test_mixed_formats_have_the_exact_mean(tmp_path: Path) -> None:
    tensors = small.ends()
    for layer in range(3):
        down = Type.Q6_K if layer == 0 else Type.Q4_K
        tensors |= small.grouped(layer, 4, 2, 16) | small.norm(layer)
        tensors |= small.experts(layer, 4, 256, Type.Q5_0, down)
    values = small.base(3, 4, 2, expert_count=4, expert_used_count=2)
    model = MoEModel.from_gguf(written(tmp_path, "llama", values, tensors))
    weights = 4 * 256 * HIDDEN
    expected = (6 * 5.5 + 2 * 4.5 + 6.5625) * weights / (9 * weights)
    assert model.storage.expert.name == "q5_0+q4_k+q6_k"
    assert model.storage.expert.bits == pytest.approx(expected, rel=1e-15)
    assert model.storage.attention.name == "q8_0"
    assert model.storage.embedding.name == "q4_0"
    assert model.storage.norm.name == model.storage.router.name == "float32"
    expert = small.tensor_bytes(one for name, one in tensors.items() if "_exps" in name)
    assert model.bytes_by_class()["expert"] == expert
    assert model.weight_bytes == small.tensor_bytes(tensors.values())


@given(
    kinds=st.lists(st.sampled_from([Type.Q4_0, Type.Q5_1, Type.Q8_0, Type.F16, Type.MXFP4]), min_size=5, max_size=5),
    vocab=st.integers(1, 700),
    heads=st.integers(1, 7),
)
def test_any_mix_adds_up_to_the_byte(
    kinds: list[Type], vocab: int, heads: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    tensors = small.ends(vocab=vocab)
    for layer, kind in enumerate(kinds[:3]):
        tensors |= small.grouped(layer, heads, 1, 32) | small.norm(layer) | small.experts(layer, 3, 32, kind, kinds[4])
    tensors["blk.1.attn_v.weight"] = ((32, HIDDEN), kinds[3])
    path = tmp_path_factory.mktemp("mix")
    values = small.base(3, heads, 1, expert_used_count=1, attention__key_length=32)
    model = MoEModel.from_gguf(written(path, "llama", values, tensors))
    assert model.weight_bytes == small.tensor_bytes(tensors.values())


@given(size=st.integers(10**10, 3 * 10**11))
def test_large_files_add_up_to_the_byte(size: int) -> None:
    model = MoEModel.from_config("mixtral-8x7b")
    bits = 8 * size / model.routed_expert_params
    assume(bits <= 64)
    storage = dataclasses.replace(model.storage, expert=Format("q4_k+q6_k", bits))
    assert dataclasses.replace(model, storage=storage).bytes_by_class()["expert"] == size


def test_types_are_those_of_the_format_table() -> None:
    for kind, (block, size) in gguf.GGML_QUANT_SIZES.items():
        name = kind.name.lower()
        if name in GGUF_BLOCKS:
            assert GGUF_BLOCKS[name] == (block, size)
    assert {name for name in GGUF_BLOCKS if not hasattr(Type, name.upper())} <= {"q1_0", "nvfp4", "mxfp4"}


def test_a_tied_head_has_the_format_of_the_table(tmp_path: Path) -> None:
    model = MoEModel.from_gguf(written(tmp_path, *small.qwen3moe()))
    assert model.tied_embeddings
    assert model.storage.head == model.storage.embedding == FORMATS["q4_0"]
    assert model.params_by_class()["head"] == 0


def test_the_number_of_experts_is_that_of_the_tensors(tmp_path: Path) -> None:
    arch, values, tensors = small.qwen3moe()
    model = MoEModel.from_gguf(written(tmp_path, arch, values | {"expert_count": 8}, tensors))
    assert model.num_experts == 6
    assert any("6 experts" in note and "expert_count is 8" in note for note in model.assumptions)
    # Layers that lost different numbers of experts can be counted.
    merged = tensors | small.experts(1, 4, 32)
    model = MoEModel.from_gguf(written(tmp_path, arch, values, merged))
    assert [(kind.layers, kind.experts.count) for kind in model.feed_forward if kind.experts] == [((0,), 6), ((1,), 4)]
    assert model.weight_bytes == small.tensor_bytes(merged.values())
    with pytest.raises(ModelConfigError, match="layers differ in their experts"):
        _ = model.experts


def test_gate_and_up_in_one_tensor(tmp_path: Path) -> None:
    arch, values, tensors = small.mixtral()
    apart = MoEModel.from_gguf(written(tmp_path, arch, values, tensors))
    for layer in range(3):
        shape, kind = tensors.pop(f"blk.{layer}.ffn_gate_exps.weight")
        del tensors[f"blk.{layer}.ffn_up_exps.weight"]
        tensors[f"blk.{layer}.ffn_gate_up_exps.weight"] = ((shape[0], 2 * shape[1], shape[2]), kind)
    fused = MoEModel.from_gguf(written(tmp_path, arch, values, tensors))
    assert fused.expert_matrices == ((HIDDEN, 256), (128, HIDDEN))
    assert apart.expert_matrices == ((HIDDEN, 128), (HIDDEN, 128), (128, HIDDEN))
    assert fused.params_by_class() == apart.params_by_class()
    assert fused.weight_bytes == apart.weight_bytes


def test_queries_keys_and_values_in_one_tensor(tmp_path: Path) -> None:
    arch, values, tensors = small.mixtral()
    apart = MoEModel.from_gguf(written(tmp_path, arch, values, tensors))
    for layer in range(3):
        for name in "qkv":
            del tensors[f"blk.{layer}.attn_{name}.weight"]
        tensors[f"blk.{layer}.attn_qkv.weight"] = ((64 + 32 + 32, HIDDEN), Type.Q8_0)
    fused = MoEModel.from_gguf(written(tmp_path, arch, values, tensors))
    assert fused.kv_parts(1000) == apart.kv_parts(1000)
    assert fused.params_by_class() == apart.params_by_class()
    assert "outputs of attn_qkv" in refused(written(tmp_path, arch, values | {"attention.head_count_kv": 4}, tensors))


def test_layers_for_multi_token_prediction_are_left_out_by_the_byte(tmp_path: Path) -> None:
    arch, values, tensors = "glm4moe", small.base(3, 4, 2, expert_used_count=2, nextn_predict_layers=1), small.ends()
    values["attention.head_count_kv"] = [2, 2, 2]
    network, more = small.ends(), {}
    for layer in range(2):
        network |= small.grouped(layer, 4, 2, 16) | small.norm(layer, "post_attention_norm")
        network |= small.experts(layer, 8, 32) if layer else small.dense(layer, 128)
    more |= small.grouped(2, 4, 2, 16) | small.experts(2, 8, 32)
    more["blk.2.nextn.eh_proj.weight"] = ((HIDDEN, 2 * HIDDEN), Type.Q8_0)
    tensors |= network | more
    model = MoEModel.from_gguf(written(tmp_path, arch, values, tensors))
    left_out = small.tensor_bytes(more.values())
    assert model.num_layers == 2
    assert model.weight_bytes == small.tensor_bytes(network.values())
    assert any(f"prediction left out, {left_out} bytes" in note for note in model.assumptions)
    del tensors["blk.2.nextn.eh_proj.weight"]
    assert "no tensors named nextn" in refused(written(tmp_path, arch, values, tensors))


def windows(model: MoEModel) -> list[int | None]:
    found: dict[int, int | None] = {}
    for kind in model.attention:
        found |= dict.fromkeys(kind.layers, kind.caches[0].window)
    return [found[layer] for layer in range(model.num_layers)]


@pytest.mark.parametrize(
    ("arch", "more", "expected"),
    [
        ("gemma3", {"attention.sliding_window": 512}, [512] * 5 + [None] + [512]),
        ("gemma2", {}, [4096, None, 4096, None, 4096, None, 4096]),
        ("gpt-oss", {"attention.sliding_window": 128}, [128, None, 128, None, 128, None, 128]),
        ("smallthinker", {"attention.sliding_window": 64}, [None, 64, 64, 64, None, 64, 64]),
        ("llama4", {}, [8192, 8192, 8192, None, 8192, 8192, 8192]),
        ("llama4", {"attention.sliding_window": 0}, [None] * 7),
        ("cohere2", {"attention.sliding_window": 64, "attention.sliding_window_pattern": 2}, [64, None] * 3 + [64]),
        (
            "mimo2",
            {"attention.sliding_window": 64, "attention.sliding_window_pattern": [0, 1, 1, 0, 1, 1, 0]},
            [None, 64, 64, None, 64, 64, None],
        ),
        (
            "qwen3moe",
            {"attention.sliding_window": 64, "attention.sliding_window_pattern": [True] * 6 + [False]},
            [64] * 6 + [None],
        ),
        ("phi3", {"attention.sliding_window": 2047}, [None] * 7),
        ("phimoe", {"attention.sliding_window": 4096}, [None] * 7),
        ("olmo2", {}, [None] * 7),
    ],
)
def test_windows(arch: str, more: Values, expected: list[int | None], tmp_path: Path) -> None:
    tensors = small.ends()
    for layer in range(7):
        tensors |= small.grouped(layer, 4, 2, 16) | small.norm(layer) | small.dense(layer, 128)
    model = MoEModel.from_gguf(written(tmp_path, arch, small.base(7, 4, 2) | more, tensors))
    assert windows(model) == expected
    assert model.num_moe_layers == 0
    if "attention.sliding_window_pattern" not in more and arch not in ("olmo2",) and 0 not in more.values():
        assert model.assumptions, "what the file does not say must be said"


def test_a_window_of_unknown_layers_is_refused(tmp_path: Path) -> None:
    arch, values, tensors = small.qwen3moe()
    message = refused(written(tmp_path, arch, values | {"attention.sliding_window": 128}, tensors))
    assert "key 'qwen3moe.attention.sliding_window' is 128; allowed: none" in message
    pattern = {"attention.sliding_window": 128, "attention.sliding_window_pattern": [True]}
    assert "a list of 2 truths" in refused(written(tmp_path, arch, values | pattern, tensors))


def test_state_space_layers(tmp_path: Path) -> None:
    """A Jamba of four layers, the second with attention, every other one with experts."""
    tensors = small.ends()
    for layer in range(4):
        at = f"blk.{layer}"
        tensors |= small.norm(layer) | (small.experts(layer, 4, 128) if layer % 2 else small.dense(layer, 128))
        if layer == 1:
            tensors |= small.grouped(layer, 4, 2, 16)
        else:
            tensors |= {
                f"{at}.attn_norm.weight": ((HIDDEN,), Type.F32),
                f"{at}.ssm_in.weight": ((256, HIDDEN), Type.Q8_0),
                f"{at}.ssm_conv1d.weight": ((128, 4), Type.F32),
                f"{at}.ssm_conv1d.bias": ((128,), Type.F32),
                f"{at}.ssm_x.weight": ((4 + 32, 128), Type.Q8_0),
                f"{at}.ssm_dt.weight": ((128, 4), Type.F32),
                f"{at}.ssm_dt.bias": ((128,), Type.F32),
                f"{at}.ssm_a": ((128, 16), Type.F32),
                f"{at}.ssm_d": ((128,), Type.F32),
                f"{at}.ssm_dt_norm.weight": ((4,), Type.F32),
                f"{at}.ssm_b_norm.weight": ((16,), Type.F32),
                f"{at}.ssm_c_norm.weight": ((16,), Type.F32),
                f"{at}.ssm_out.weight": ((HIDDEN, 128), Type.Q8_0),
            }
    values = small.base(4, 4, 2, expert_count=4, expert_used_count=2) | {
        "attention.head_count_kv": [0, 2, 0, 0],
        "ssm.conv_kernel": 4,
        "ssm.inner_size": 128,
        "ssm.state_size": 16,
        "ssm.time_step_rank": 4,
    }
    model = MoEModel.from_gguf(written(tmp_path, "jamba", values, tensors))
    assert [(kind.name, kind.layers) for kind in model.attention] == [("mamba", (0, 2, 3)), ("full", (1,))]
    assert model.moe_layers == (1, 3)
    assert model.kv_parts(100, bits=16) == {
        "keys and values": 100 * 2 * 32 * 2,
        "recurrent state": 3 * 128 * 16 * 4,
        "convolution state": 3 * 128 * 3 * 2,
    }
    assert model.weight_bytes == small.tensor_bytes(tensors.values())
    assert "ssm.inner_size' is 64; allowed: 128" in refused(
        written(tmp_path, "jamba", values | {"ssm.inner_size": 64}, tensors)
    )


def test_sparse_attention(tmp_path: Path) -> None:
    arch, values, tensors = small.deepseek2()
    for layer in range(3):
        tensors |= {
            f"blk.{layer}.indexer.k_norm.weight": ((32,), Type.F32),
            f"blk.{layer}.indexer.k_norm.bias": ((32,), Type.F32),
            f"blk.{layer}.indexer.proj.weight": ((2, HIDDEN), Type.Q8_0),
            f"blk.{layer}.indexer.attn_k.weight": ((32, HIDDEN), Type.Q8_0),
            f"blk.{layer}.indexer.attn_q_b.weight": ((64, 32), Type.Q8_0),
        }
    model = MoEModel.from_gguf(written(tmp_path, "glm-dsa", values | {"attention.indexer.top_k": 100}, tensors))
    assert arch == "deepseek2"
    assert model.kv_parts(1000) == {"latent": 3 * 1000 * 96 * 2, "index keys": 3 * 1000 * 32 * 2}
    assert model.kv_read_parts(1000) == {"latent": 3 * 100 * 96 * 2, "index keys": 3 * 1000 * 32 * 2}


def split(folder: Path, parts: int = 3) -> list[Path]:
    """A Mixtral in several files, as llama-gguf-split leaves them: the values in the first, which has no tensor."""
    arch, values, tensors = small.mixtral()
    names = list(tensors)
    paths = []
    for number in range(parts):
        mine = {name: tensors[name] for name in names[number - 1 :: parts - 1]} if number else {}
        path = folder / f"some-{number + 1:05d}-of-{parts:05d}.gguf"
        writer_values = dict(values) if not number else {}
        writer_values |= {".split.no": number, ".split.count": parts, ".split.tensors.count": len(tensors)}
        paths.append(small.write(path, arch, writer_values, mine))
    return paths


def test_split_files(tmp_path: Path) -> None:
    paths = split(tmp_path)
    whole = MoEModel.from_gguf(written(tmp_path, *small.mixtral()))
    for path in paths:
        model = MoEModel.from_gguf(path)
        assert model.name == "some"
        assert model.weight_bytes == whole.weight_bytes
        assert model.params_by_class() == whole.params_by_class()
    paths[1].rename(tmp_path / "elsewhere")
    for path in (paths[0], paths[2]):
        assert "some-00002-of-00003.gguf: no such file; allowed: all 3 parts" in refused(path)
    paths[2].rename(paths[1])
    (tmp_path / "elsewhere").rename(paths[2])
    assert "some-00002-of-00003.gguf: split.no is 2; allowed: 1" in refused(paths[0])


def test_parts_that_contradict_each_other(tmp_path: Path) -> None:
    paths = split(tmp_path)
    alone = tmp_path / "alone.gguf"
    alone.write_bytes(paths[0].read_bytes())
    assert "split.count is 3; allowed: 1" in refused(alone)
    paths[2].write_bytes(paths[1].read_bytes())
    assert "split.no is 1; allowed: 2" in refused(paths[0])
    arch, values, tensors = small.mixtral()
    bare = small.write(tmp_path / "bare-00001-of-00001.gguf", arch, values, tensors)
    assert MoEModel.from_gguf(bare).name == "bare"
    bare.rename(tmp_path / "bare-00001-of-00002.gguf")
    assert "bare-00002-of-00002.gguf: no such file" in refused(tmp_path / "bare-00001-of-00002.gguf")
    (tmp_path / "odd-00003-of-00002.gguf").write_bytes(b"GGUF")
    assert "is part 3 of 2" in refused(tmp_path / "odd-00003-of-00002.gguf")
    short = {".split.no": 0, ".split.count": 2, ".split.tensors.count": len(tensors) + 1}
    small.write(tmp_path / "few-00001-of-00002.gguf", arch, values | short, tensors)
    small.write(tmp_path / "few-00002-of-00002.gguf", arch, short | {".split.no": 1}, {})
    assert f"split.tensors.count is {len(tensors) + 1}; allowed: {len(tensors)}" in refused(
        tmp_path / "few-00002-of-00002.gguf"
    )
    twice = {"output_norm.weight": tensors["output_norm.weight"]}
    small.write(tmp_path / "few-00002-of-00002.gguf", arch, short | {".split.no": 1}, twice)
    assert "'output_norm.weight' is in an earlier part too" in refused(tmp_path / "few-00001-of-00002.gguf")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"embedding_length": 32}, "as qwen3moe.embedding_length says"),
        ({"block_count": 3}, "no tensor of layer 2; allowed: all of 3 layers"),
        ({"block_count": 1}, "is of layer 1; allowed: 0 to 0"),
        ({"block_count": 0}, "key 'qwen3moe.block_count' is 0"),
        ({"block_count": 20_000}, "key 'qwen3moe.block_count' is 20000; allowed: 1 to 10000"),
        ({"block_count": 2.0}, "key 'qwen3moe.block_count' is 2.0"),
        ({"block_count": float("nan")}, "key 'qwen3moe.block_count' is nan"),
        ({"block_count": [2, 2]}, "key 'qwen3moe.block_count' is (2, 2)"),
        ({"block_count": "two"}, "key 'qwen3moe.block_count' is 'two'"),
        ({"block_count": True}, "key 'qwen3moe.block_count' is True"),
        ({"block_count": None}, "key 'qwen3moe.block_count' is missing"),
        ({"attention.head_count": None}, "key 'qwen3moe.attention.head_count' is missing"),
        ({"attention.head_count": 8}, "layer 0 has 128 outputs of attn_q; allowed: 256"),
        ({"attention.head_count": [4, 4, 4]}, "or a list of 2 of them"),
        ({"attention.head_count_kv": 3}, "layer 0 has 64 outputs of attn_k and head_count_kv 3"),
        ({"attention.head_count_kv": 0}, "head_count_kv 0"),
        ({"attention.key_length": 64}, "key 'qwen3moe.attention.key_length' is 64; allowed: 32"),
        ({"expert_used_count": None}, "key 'qwen3moe.expert_used_count' is missing; allowed: 1 to 6"),
        ({"expert_used_count": 7}, "key 'qwen3moe.expert_used_count' is 7; allowed: 1 to 6"),
        ({"expert_group_count": 4}, "expert_group_count' is 4; allowed: a divisor of 6"),
        ({"expert_group_count": 3, "expert_group_used_count": 1}, "expert_used_count' is 3; allowed: 1 to 2"),
        ({"nextn_predict_layers": 2}, "key 'qwen3moe.block_count' is 2; allowed: 3 to 10000"),
        ({".general.architecture": "qwen3mo"}, "'qwen3moe'"),
        ({".general.alignment": 12}, "general.alignment is 12"),
    ],
)  # fmt: skip
def test_values_that_cannot_be(change: Values, message: str, tmp_path: Path) -> None:
    arch, values, tensors = small.qwen3moe()
    values = {key: one for key, one in (values | change).items() if one is not None}
    other = values.pop(".general.architecture", None)
    path = written(tmp_path, arch, values, tensors)
    if other:
        path.write_bytes(path.read_bytes().replace(text(arch), text(other + "\0")[:-1] + b"x", 1))
    assert message in refused(path)


@pytest.mark.parametrize(
    ("name", "new", "message"),
    [
        ("blk.0.attn_k.weight", None, "layer 0 has no matrix attn_k"),
        ("blk.0.attn_output.weight", None, "layer 0 has no matrix attn_output"),
        ("blk.0.ffn_down_exps.weight", None, "has experts of ffn_gate_exps, ffn_up_exps"),
        ("blk.0.ffn_gate_inp.weight", None, "has no ffn_gate_inp; allowed: a router to 6 experts"),
        ("blk.0.ffn_gate_inp.weight", ((5, HIDDEN), Type.F32), "an ffn_gate_inp of shape (5, 64)"),
        ("blk.0.ffn_up_exps.weight", ((5, 32, HIDDEN), Type.Q4_0), "has 5 experts in ffn_up_exps; allowed: 6"),
        ("blk.0.ffn_up_exps.weight", ((6, 16, HIDDEN), Type.Q4_0), "has ffn_up_exps of 16 x 64; allowed: 32 x 64"),
        ("blk.0.ffn_up_exps.bias", ((6, 4, 4, 4), Type.F32), "has 4 axes; allowed: 2"),
        ("blk.0.attn_magic.weight", ((4, 64), Type.F32), "tensor 'blk.0.attn_magic.weight' is not known"),
        ("blk.00.attn_norm.weight", ((64,), Type.F32), "tensor 'blk.00.attn_norm.weight' is not known"),
        ("magic.weight", ((4, 64), Type.F32), "tensor 'magic.weight' is not known"),
        ("mm.0.weight", ((4, 64), Type.F32), "tensor 'mm.0.weight' is not known"),
        ("blk.0.ffn_up.3.weight", ((64, 64), Type.F32), "experts 3 of ffn_up_exps"),
        ("token_embd.weight", None, "tensor token_embd.weight is missing"),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit(
    name: str, new: tuple[tuple[int, ...], Type] | None, message: str, tmp_path: Path
) -> None:
    arch, values, tensors = small.qwen3moe()
    tensors.pop(name, None)
    if new is not None:
        tensors[name] = new
    assert message in refused(written(tmp_path, arch, values, tensors))


def test_unknown_architectures_are_named(tmp_path: Path) -> None:
    _, values, tensors = small.qwen3moe()
    for arch in ("bert", "rwkv7", "clip", "nomic-bert-moe", "a\nb"):
        message = refused(written(tmp_path, arch, values, tensors))
        assert f"key 'general.architecture' is {arch!r}" in message
    assert len(set(ARCHITECTURES)) == len(ARCHITECTURES)
    newer = {"deepseek32", "gemma4", "mistral4"}  # than the oldest release of the gguf package that is supported
    assert set(ARCHITECTURES) - newer <= set(gguf.MODEL_ARCH_NAMES.values())


def one_value(entry: bytes) -> bytes:
    return header(values=1) + entry


def one_tensor(entry: bytes, data: bytes = b"") -> bytes:
    start = header(tensors=1) + entry
    return start + bytes(-len(start) % 32) + data


HOSTILE = {
    "nothing": (b"", "has 0 bytes"),
    "three letters": (b"GGU", "letters GGUF needs 4 bytes"),
    "no GGUF file": (b"PK\3\4" + bytes(60), "is no GGUF file"),
    "the old format": (b"ggjt" + bytes(60), "is no GGUF file"),
    "big-endian": (header(3, order=">"), "big-endian"),
    "version 9": (header(9), "version 9"),
    "many tensors": (header(tensors=2**60), "number of tensors is 1152921504606846976"),
    "many values": (header(values=2**60), "number of values is 1152921504606846976"),
    "a long name": (header(values=1) + struct.pack("<Q", 2**60) + b"abc", "name of a value has"),
    "a long text": (one_value(text("a") + struct.pack("<IQ", TEXT, 2**60)), "needs 1152921504606846976 bytes"),
    "a long list": (one_value(text("a") + struct.pack("<IIQ", LIST, 4, 2**60)), "value 'a' needs"),
    "many texts": (one_value(text("a") + struct.pack("<IIQ", LIST, TEXT, 2**60)), "value 'a' needs"),
    "texts beyond the end": (
        one_value(text("a") + struct.pack("<IIQ", LIST, TEXT, 2) + text("b") + struct.pack("<Q", 2**60)),
        "value 'a' needs",
    ),
    "lists of lists": (one_value(text("a") + struct.pack("<IIQ", LIST, LIST, 1) * 90), "a list of type 9"),
    "type 99 of a value": (one_value(text("a") + struct.pack("<I", 99)), "is of type 99"),
    "a value twice": (header(values=2) + 2 * value("a", 4, 1), "occurs twice"),
    "a name that is no text": (one_value(text(b"\xff\xfe") + bytes(8)), "is not UTF-8"),
    "a tensor twice": (header(tensors=2) + 2 * tensor("t", [4], 0) + bytes(99), "occurs twice"),
    "an axis of 0": (one_tensor(tensor("t", [4, 0], 0)), "has shape (4, 0); allowed: axes from 1 up"),
    "no axes": (one_tensor(text("t") + struct.pack("<IIQ", 0, 0, 0)), "has 0 axes"),
    "huge axes": (one_tensor(tensor("t", [2**40, 2**40], 0)), "larger than any file"),
    "a place beyond the end": (one_tensor(tensor("t", [8], 2**40), bytes(32)), "it is cut"),
    "a cut tensor": (one_tensor(tensor("t", [8], 0), bytes(31)), "it is cut"),
    "type 99 of a tensor": (one_tensor(tensor("t", [8], 0, 99), bytes(32)), "is of type 99; allowed: the types"),
    "half a block": (one_tensor(tensor("t", [33], 0, 2), bytes(64)), "has rows of 33; allowed: a multiple of 32"),
    "overlap": (
        header(tensors=2) + tensor("t", [16], 0) + tensor("u", [16], 32) + bytes(200),
        "tensors 't' and 'u' overlap",
    ),
    "no architecture": (header(), "key 'general.architecture' is missing"),
    "an architecture that is a number": (one_value(value("general.architecture", 4, 7)), "is 7; allowed: one of"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_refused(name: str, tmp_path: Path) -> None:
    data, message = HOSTILE[name]
    (tmp_path / "some.gguf").write_bytes(data)
    found = refused(tmp_path / "some.gguf")
    assert message in found
    assert "some.gguf: " in found


@given(place=st.integers(0, 5000), new=st.binary(min_size=1, max_size=8), cut=st.integers(0, 6000) | st.none())
def test_damage_anywhere_is_refused_or_harmless(
    place: int, new: bytes, cut: int | None, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("damage")
    path = written(folder, *small.gpt_oss())
    data = bytearray(path.read_bytes())
    data[place : place + len(new)] = new
    path.write_bytes(data if cut is None else data[:cut])
    message = None
    try:
        model = MoEModel.from_gguf(path)
    except ModelConfigError as error:
        message = str(error)
    if message is not None:
        assert "\n" not in message
        assert message.startswith(str(path))
        return
    sizes: list[Any] = [model.weight_bytes, model.total_params, model.kv_bytes(1000), *model.params_by_class().values()]
    assert all(math.isfinite(size) and size >= 0 for size in sizes)


def test_what_is_no_file(tmp_path: Path) -> None:
    assert "no such file" in refused(tmp_path / "none.gguf")
    assert "is a folder" in refused(tmp_path)
    assert "found 7; allowed: a .gguf file" in refused(7)
    assert "not a path" in refused("a\0b")


def test_vocabularies_are_passed_over(tmp_path: Path) -> None:
    arch, values, tensors = small.mixtral()
    words: Values = {
        ".tokenizer.ggml.tokens": [f"token {i}" for i in range(30_000)],
        ".tokenizer.ggml.scores": [0.5] * 30_000,
        ".tokenizer.ggml.merges": ["ab cd" * 500] * 3000,
        ".tokenizer.chat_template": "x" * (2**20 + 1),
        ".general.name": "some name",
    }
    path = written(tmp_path, arch, words | values, tensors)
    assert MoEModel.from_gguf(path).weight_bytes == small.tensor_bytes(tensors.values())
    found = read_header(path, "some.gguf", path.stat().st_size, ModelConfigError, vocabularies=True)
    assert found.values["general.name"] == "some name"
    assert [found.values[key[1:]] for key in words if key.startswith(".tokenizer")] == [None] * 4


def test_the_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path, *small.mixtral())
    monkeypatch.setitem(sys.modules, "gguf.constants", None)
    assert "pip install 'perfmodel[gguf]'" in refused(path)


def test_names(tmp_path: Path) -> None:
    path = written(tmp_path, *small.mixtral())
    assert MoEModel.from_gguf(path).name == "tiny"
    assert MoEModel.from_gguf(str(path), name="other").name == "other"
