"""``perfmodel model``: the card and its document, against plain arithmetic, and every kind of bad input."""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from commands import check_refusal, run

import perfmodel
from perfmodel.cli.model_data import Caching, card, layer_rows
from perfmodel.cli.model_reports import card_text, layer_ranges, layers_text
from perfmodel.families import Attention, Cache, FeedForward, Tensor, families
from perfmodel.model import MoEModel
from perfmodel.storage import CLASSES, FORMATS

MIXTRAL: dict[str, Any] = {
    "model_type": "mixtral",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 1000,
    "torch_dtype": "float16",
}
DEEPSEEK: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "hidden_size": 64,
    "intermediate_size": 160,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 5,
    "first_k_dense_replace": 2,
    "num_attention_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 16,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "vocab_size": 500,
    "torch_dtype": "bfloat16",
}
GPT_OSS: dict[str, Any] = {
    "model_type": "gpt_oss",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "sliding_window": 128,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "vocab_size": 700,
    "torch_dtype": "bfloat16",
    "quantization_config": {"quant_method": "mxfp4"},
}
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 300,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
KINDS = {"grouped": MIXTRAL, "latent": DEEPSEEK, "windows": GPT_OSS, "dense": LLAMA}
KEYS = ["perfmodel", "kind", "name", "family", "shape", "params", "storage", "expert_bytes", "kv", "memory",
        "assumptions"]  # fmt: skip


def saved(tmp_path: Path, config: dict[str, Any], name: str = "small") -> Path:
    path = tmp_path / f"{name}.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    return path


def document(tmp_path: Path, config: dict[str, Any], *options: object) -> Any:
    return run("model", "show", saved(tmp_path, config), "--json", *options).document


def finite(value: Any) -> bool:
    """Whether a document holds nothing that JSON has no word for."""
    if isinstance(value, dict):
        return all(finite(one) for one in value.values())
    if isinstance(value, list):
        return all(finite(one) for one in value)
    return not isinstance(value, float) or math.isfinite(value)


def table_row(text: str, start: str) -> list[str]:
    """The cells of the first line that starts so."""
    line = next(line for line in text.splitlines() if line.startswith(start))
    return re.split(r"\s{2,}", line.strip())


# Cards


def test_parameters_of_a_mixtral(tmp_path: Path) -> None:
    attention, expert, router, norms = 64 * 64 * 2 + 64 * 16 * 2, 3 * 64 * 96, 64 * 8, 2 * 64
    total = 4 * (attention + 8 * expert + router + norms) + 2 * 1000 * 64 + 64
    data = document(tmp_path, MIXTRAL)
    assert data["params"]["total_params"] == total
    assert data["params"]["by_class"]["expert"] == data["params"]["routed_expert_params"] == 4 * 8 * expert
    active = total - 4 * 6 * expert
    assert [data["params"][key] for key in data["params"] if key.startswith("active")] == [
        active, active - 64_000, active - 128_000,
    ]  # fmt: skip
    assert data["storage"]["weight_bytes"] == 2 * total
    (experts,) = data["expert_bytes"]
    assert [row["precision"] for row in experts["by_bits"]] == ["stored", "16", "8", "4", "3", "2", "1"]
    assert [row["bytes"] for row in experts["by_bits"]] == [expert * bits / 8 for bits in (16, 16, 8, 4, 3, 2, 1)]
    assert [row["bytes_of_all"] for row in experts["by_bits"]] == [32 * row["bytes"] for row in experts["by_bits"]]
    text = run("model", "show", saved(tmp_path, MIXTRAL)).out
    assert text.startswith("small (mixtral)\n4 layers: 4 MoE (0-3); hidden size 64; vocabulary 1,000, head apart")
    assert table_row(text, "sum ")[1] == f"{total:,}"
    assert table_row(text, "all embeddings counted")[1:] == [
        f"{active:,}", f"{100 * active / total:.1f} %", "Mixtral, OLMoE, Qwen",
    ]  # fmt: skip
    assert table_row(text, "full ") == ["full", "0-3", "8", "2", "32", "-", f"{attention:,}"]
    assert table_row(text, "moe ")[:6] == ["moe", "0-3", "8", "2", "96", f"{expert:,}"]
    assert "\nAssumptions\n- default taken: head_dim = 8 (hidden_size / num_attention_heads)\n" in text


@pytest.mark.parametrize("config", KINDS.values(), ids=KINDS)
def test_every_card(tmp_path: Path, config: dict[str, Any]) -> None:
    data = document(tmp_path, config, "--system", "h100-cxl2-ndp", "--layers", "--context", "1000", "--batch", "3")
    assert list(data) == [*KEYS, "layers"]
    assert finite(data)
    assert sum(data["params"]["by_class"].values()) == data["params"]["total_params"]
    assert sum(row["params"] for row in data["layers"]) == (
        data["params"]["total_params"] - sum(data["params"]["by_class"][key] for key in ("embedding", "head")) - 64
    )
    model = MoEModel.from_config(config)
    for layout, one in data["kv"]["layouts"].items():
        assert one["bytes"] == pytest.approx(3 * model.kv_bytes(1000, layout=layout), rel=1e-12)
    assert data["kv"]["read"]["bytes_per_sequence"] == model.kv_read_bytes(1000)
    text = run("model", "show", saved(tmp_path, config), "--system", "h100-cxl2-ndp", "--layers").out
    assert f"\nsum  {data['params']['total_params']:,}".replace(" ", "") in text.replace(" ", "")
    for sentence in data["assumptions"]:
        assert f"- {sentence}\n" in text
    assert "\nFits.\n" in text
    assert "Parameters by layer" in text
    plain = run("model", "show", saved(tmp_path, config))
    assert plain.code == 0
    assert plain.err == ""
    assert "Memory on" not in plain.out
    assert "Parameters by layer" not in plain.out


def test_latent_cache(tmp_path: Path) -> None:
    data = document(tmp_path, DEEPSEEK)
    compressed, expanded = 5 * (24 + 8) * 2, 5 * 4 * (16 + 8 + 16) * 2
    assert data["kv"]["layouts"]["capped"]["bytes_per_token"] == compressed
    assert data["kv"]["other_mla_cache"]["bytes_per_token"] == expanded
    assert data["shape"]["moe_layers"] == [2, 3, 4]
    dense, moe = data["shape"]["feed_forward"]
    assert (dense["dense_size"], moe["shared_size"], moe["experts"]["size"]) == (160, 64, 32)
    assert moe["shared_params"] == 2 * 3 * 64 * 32
    other = document(tmp_path, DEEPSEEK, "--mla-cache", "expanded", "--kv-bits", "8")
    assert other["kv"]["layouts"]["capped"]["bytes_per_token"] == expanded / 2
    assert other["kv"]["other_mla_cache"]["bytes_per_token"] == compressed / 2
    text = run("model", "show", saved(tmp_path, DEEPSEEK)).out
    assert table_row(text, "latent ") == ["latent", "0-4", "4", "1", "32 latent", "-", table_row(text, "latent ")[-1]]
    assert f"expanded to keys and values: {expanded:,} B a token in all" in text


def test_windows_allocated_and_read(tmp_path: Path) -> None:
    token = 2 * 2 * 16 * 2  # keys and values of one layer [byte]
    kv = document(tmp_path, GPT_OSS, "--context", "1000", "--batch", "2", "--kv-layout", "full")["kv"]
    expected = {"capped": 3 * (1000 + 128), "full": 6 * 1000, "llama.cpp": 3 * (1000 + 640)}
    assert {name: one["bytes_per_sequence"] for name, one in kv["layouts"].items()} == {
        name: token * entries for name, entries in expected.items()
    }
    assert {name: one["bytes_per_token"] for name, one in kv["layouts"].items()} == {
        "capped": 3 * token, "full": 6 * token, "llama.cpp": 3 * token,
    }  # fmt: skip
    assert kv["read"]["bytes"] == 2 * token * 3 * (1000 + 128)
    # Before the windows are full, every layer grows.
    short = document(tmp_path, GPT_OSS, "--context", "100")["kv"]["layouts"]
    assert {one["bytes_per_token"] for one in short.values()} == {6 * token}
    text = run("model", "show", saved(tmp_path, GPT_OSS), "--kv-layout", "full").out
    assert "0-4 by 2" in text
    assert "32, window 128" not in text
    assert "64, window 128" in text
    assert "full (above)" in text


def hybrid(**changes: Any) -> MoEModel:
    """Three layers with constant state, one with a cache, a sparse cache, and a compressed one beside."""
    wide = Tensor("mixer.in_proj", (32, 16))
    linear = Attention(
        name="linear",
        layers=(0, 1, 2),
        tensors=(wide,),
        norm_params=16,
        recurrent_elements=100,
        convolution_elements=12,
    )
    sparse = Cache(name="latent", elements=10, flops_per_entry=2 * 2 * 28, read_entries=8, expanded_elements=50)
    index = Cache(name="index keys", elements=6, flops_per_entry=2 * 4 * 6)
    packed = Cache(name="compressed", elements=5, flops_per_entry=7, tokens_per_entry=4)
    full = Attention(name="sparse", layers=(3,), tensors=(wide,), norm_params=16, caches=(sparse, index, packed))
    dense = FeedForward(name="dense", layers=(0, 1, 2, 3), norm_params=16, dense=(Tensor("up", (40, 16)),))
    values: dict[str, Any] = {
        "name": "hybrid",
        "family": "made-up",
        "hidden_size": 16,
        "num_layers": 4,
        "attention": (linear, full),
        "feed_forward": (dense,),
        "vocab_size": 50,
        "embedding": (Tensor("embed", (50, 16)),),
        "head": (Tensor("head", (50, 16)),),
        "final_norm_params": 16,
        "tied_embeddings": True,
        "assumptions": ("a tower left out",),
    }
    return MoEModel(**(values | changes))


def test_states_and_sparse_attention() -> None:
    model = hybrid()
    data = card(model, Caching(1001, 2, 16.0, "capped", "compressed"), ("as asked",), None, None)
    parts = data["kv"]["layouts"]["capped"]["parts"]
    assert {name: part["bytes_per_sequence"] for name, part in parts.items()} == {
        "latent": 1001 * 10 * 2,
        "index keys": 1001 * 6 * 2,
        "compressed": 250 * 5 * 2,
        "recurrent state": 3 * 100 * 4,
        "convolution state": 3 * 12 * 2,
    }
    assert {name: part["bytes_per_token"] for name, part in parts.items()} == {
        "latent": 20, "index keys": 12, "compressed": 2.5, "recurrent state": 0, "convolution state": 0,
    }  # fmt: skip
    assert data["kv"]["read"]["parts"] == {
        "latent": 8 * 10 * 2, "index keys": 1001 * 6 * 2, "compressed": 250 * 5 * 2, "recurrent state": 1200,
        "convolution state": 72,
    }  # fmt: skip
    assert data["expert_bytes"] == []
    assert data["assumptions"] == ["a tower left out", "as asked"]
    text = card_text(data)
    assert table_row(text, "index keys")[1:] == ["12", "0.012", "0.000", "0.012", "0.000"]
    assert table_row(text, "recurrent state")[1] == "-"
    assert table_row(text, "linear ")[:6] == ["linear", "0-2", "-", "-", "-", "424"]
    assert "10 latent, reads 8 + 6 index keys + 5 compressed for 4 tokens" in text
    assert "head tied to the embedding" in text
    assert "bytes of experts" not in text


def test_encoder_and_decoder() -> None:
    both, cross = (Cache(name=name, elements=8, flops_per_entry=32, heads=2) for name in ("keys and values", "cross"))
    wide = (Tensor("q", (16, 16)),)
    model = hybrid(
        encoder_layers=2,
        attention=(
            Attention(name="encoder", layers=(0, 1), tensors=wide, norm_params=16),
            Attention(name="decoder", layers=(2, 3), tensors=wide, norm_params=16, caches=(both, cross)),
        ),
    )
    text = card_text(card(model, Caching(100, 1, 16.0, "capped", "compressed"), (), None, None))
    assert "4 layers: 4 dense (0-3), the first 2 of them an encoder" in text
    assert table_row(text, "decoder ")[:5] == ["decoder", "2-3", "4", "2", "8 + 8 cross"]
    assert "\ncross" in text
    assert layers_text(layer_rows(model)).splitlines()[3].split()[:3] == ["0-1", "encoder", "dense"]


def test_nothing_is_cached() -> None:
    model = hybrid(attention=(Attention(name="none", layers=(0, 1, 2, 3), tensors=(), norm_params=16),))
    text = card_text(card(model, Caching(100, 1, 16.0, "capped", "compressed"), (), None, None))
    assert "KV cache of 1 x 100 tokens, numbers of 16 bits: none" in text


def test_ranges_of_layers() -> None:
    shown = {
        (): "none",
        (3,): "3",
        (0, 1, 2): "0-2",
        (0, 1, 4): "0-1, 4",
        (3, 7, 11): "3-11 by 4",
        (3, 7): "3, 7",
        (0, 2, 3, 4): "0, 2-4",
        (0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14, 16, 17, 18): "0-2, 4-6, 8-10, ..., 16-18",
    }
    assert {layers: layer_ranges(layers) for layers in shown} == shown


# Precision


def test_overrides_and_unpacking(tmp_path: Path) -> None:
    data = document(tmp_path, MIXTRAL, "--dtype", "all=q8_0", "--dtype", "expert=q4_k")
    stored = data["storage"]["by_class"]
    assert {name: one["bits"] for name, one in stored.items()} == dict.fromkeys(CLASSES, 8.5) | {"expert": 4.5}
    assert data["expert_bytes"][0]["by_bits"][0]["bytes"] == 3 * 64 * 96 * 4.5 / 8
    assert "weights are stored as asked for: all=q8_0, expert=q4_k" in data["assumptions"]
    packed, same, none = (
        document(tmp_path, GPT_OSS, "--kernel-supports", names) for names in ("nvfp4,fp8", "mxfp4", "none")
    )
    assert packed["storage"]["by_class"]["expert"] != same["storage"]["by_class"]["expert"]
    assert packed["storage"]["weight_bytes"] == 2 * packed["params"]["total_params"] == none["storage"]["weight_bytes"]
    assert any(one.startswith("the engine computes on nvfp4, fp8;") for one in packed["assumptions"])
    assert any(one.startswith("the engine computes on no packed format;") for one in none["assumptions"])
    assert not any("engine" in one for one in same["assumptions"])


def test_precision_of_the_cache(tmp_path: Path) -> None:
    plain = document(tmp_path, LLAMA)
    assert plain["kv"]["bits"] == 16
    assert "the cache holds numbers of 16 bits" in plain["assumptions"]
    asked = document(tmp_path, LLAMA, "--kv-bits", "4.5")
    assert asked["kv"]["layouts"]["full"]["bytes_per_token"] == 2 * 2 * 64 * 4.5 / 8
    assert not any("the cache holds" in one for one in asked["assumptions"])


# Memory


def test_what_fits(tmp_path: Path) -> None:
    options = ("--system", "rtx4090-pcie4", "--context", "100000", "--batch", "2", "--gpu-experts", "3")
    data = document(tmp_path, MIXTRAL, *options)["memory"]
    gpu, behind = data["devices"]
    expert = 3 * 64 * 96 * 2
    assert gpu["bytes_by_use"]["experts"] == 4 * 3 * expert
    assert gpu["bytes_by_use"]["kv"] == 2 * 100_000 * 4 * 2 * 2 * 8 * 2
    assert gpu["headroom_bytes"] == pytest.approx(24e9 - gpu["use_bytes"])
    assert data["fits"] is True
    assert set(data["largest"]) == {"batch", "context_tokens", "gpu_experts"}
    assert data["largest"]["gpu_experts"] == {"per_layer": 8, "total": 32, "layers": 4}
    # The largest batch fits, and one more does not.
    largest = data["largest"]["batch"]
    path = saved(tmp_path, MIXTRAL)
    fits = run("model", "fit", path, *options[:4], "--gpu-experts", "3", "--batch", largest)
    assert fits.code == 0, fits.err
    assert "\nFits" in fits.out
    assert behind["name"] in fits.out
    words = ("do not fit rtx-4090", f"{largest + 1} sequences of 100000 tokens", "kv ", "capacity 24.00 GB")
    check_refusal(run("model", "fit", path, *options[:4], "--gpu-experts", "3", "--batch", largest + 1), *words)
    # The card says so too, without an error.
    show = run("model", "show", path, *options[:4], "--batch", largest + 1)
    assert show.code == 0
    assert "\nDoes not fit: " in show.out
    assert " GB short on gpu rtx-4090." in show.out


def test_fit_as_a_document(tmp_path: Path) -> None:
    path = saved(tmp_path, DEEPSEEK)
    options = ("--system", "h100-cxl2-ndp", "--expert-parallel", "4", "--tensor-parallel", "2")
    fit = run("model", "fit", path, *options, "--json").document
    show = run("model", "show", path, *options, "--json").document
    assert {key: show[key] for key in fit} == fit
    assert list(fit) == [key for key in KEYS if key not in ("shape", "params", "storage", "expert_bytes", "kv")]
    assert fit["memory"]["devices"][0]["bytes_by_use"]["experts"] == 3 * 4 * 3 * 64 * 32 * 2
    assert "one GPU of expert 4 x tensor 2 parallel" in run("model", "fit", path, *options).out


def test_a_policy_says_what_stays(tmp_path: Path) -> None:
    path = saved(tmp_path, MIXTRAL)
    found = run("model", "show", path, "--system", "h100-cxl2-ndp", "--policy", "monde:resident=2", "--json").document
    assert found["memory"]["policy"].startswith("monde")
    assert found["memory"]["gpu_experts"] == 2
    text = run("model", "show", path, "--system", "h100-cxl2-ndp", "--policy", "monde:resident=2").out
    assert f"Memory on h100-cxl2-ndp, policy {found['memory']['policy']}\n" in text


# Lists


def test_families_are_listed() -> None:
    data = run("model", "families", "--json").document
    text = run("model", "families").out
    assert [one["model_type"] for one in data["families"]] == sorted(families())
    assert data["spellings"]["num_experts"][0] == "num_local_experts"
    for one in data["families"]:
        assert re.search(rf"^{re.escape(one['model_type'])}$", text, flags=re.MULTILINE)
        assert one["inside"] or one["required"]
    plain = " ".join(text.split())
    assert "optional: num_key_value_heads = num_attention_heads, head_dim = hidden_size / num_attention_heads," in plain


def test_formats_are_listed() -> None:
    data = run("model", "formats", "--json").document
    assert {one["format"]: one["bits"] for one in data["formats"]} == {name: one.bits for name, one in FORMATS.items()}
    assert table_row(run("model", "formats").out, "q4_k ") == ["q4_k", "4.5", "256", "144"]
    assert table_row(run("model", "formats").out, "bfloat16 ") == ["bfloat16", "16", "-", "-"]


# GGUF files


def test_gguf_files_are_known_by_name_or_first_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def from_gguf(path: Path, name: str | None = None) -> MoEModel:
        asked.append(path)
        return hybrid(name="from a GGUF file")

    monkeypatch.setattr(MoEModel, "from_gguf", from_gguf, raising=False)
    for name, content in (("model.GGUF", b""), ("blob", b"GGUF\3\0\0\0")):
        path = tmp_path / name
        path.write_bytes(content)
        answer = run("model", "show", path)
        assert answer.code == 0, answer.err
        assert answer.out.startswith("from a GGUF file (made-up)\n")
        assert asked.pop() == (path)
    assert run("model", "show", saved(tmp_path, MIXTRAL, "small.gguf")).code == 0  # small.gguf.json is a config
    assert asked == []


# Bad input


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--batch", "0"), ("--batch", "'0'", "allowed: an integer from 1")),
        (("--batch", "two"), ("--batch", "'two'")),
        (("--context", "-1"), ("--context", "'-1'", "allowed: an integer from 0")),
        (("--context", "9" * 30), ("--context", "allowed: an integer from 0 to 1000000000")),
        (("--kv-bits", "0"), ("--kv-bits is 0", "allowed: a number above 0")),
        (("--kv-bits", "nan"), ("--kv-bits is nan", "allowed")),
        (("--kv-layout", "paged"), ("--kv-layout", "'paged'", "llama.cpp")),
        (("--mla-cache", "half"), ("--mla-cache", "'half'", "compressed")),
        (("--dtype", "experts=q4_k"), ("'experts=q4_k'", "allowed: CLASS=FORMAT", "router, expert")),
        (("--dtype", "expert=q4_k_m"), ("'q4_k_m'", "several formats")),
        (("--dtype", "expert=q9"), ("'q9'", "allowed")),
        (("--kernel-supports", "fp9"), ("--kernel-supports", "'fp9'", "allowed: none, or", "mxfp4")),
        (("--kernel-supports", ""), ("--kernel-supports", "''", "allowed: none, or")),
        (("--policy", "monde"), ("--policy: found without --system",)),
        (("--gpu-experts", "2"), ("--gpu-experts: found without --system",)),
        (("--tensor-parallel", "2"), ("--tensor-parallel: found without --system",)),
        (("--system", "no-such"), ("no-such",)),
        (("--system", "h100-cxl2-ndp", "--policy", "no-such"), ("'no-such'", "allowed")),
        (("--system", "h100-cxl2-ndp", "--gpu-experts", "9"), ("gpu_experts is 9", "0 to 8")),
        (("--system", "h100-cxl2-ndp", "--expert-parallel", "0"), ("expert is 0", "allowed")),
        (("--system", "h100-cxl2-ndp", "--pipeline-parallel", "5"), ("pipeline is 5", "allowed: at most", "4")),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, tuple) else None,
)
def test_bad_options(tmp_path: Path, options: tuple[str, ...], words: tuple[str, ...]) -> None:
    check_refusal(run("model", "show", saved(tmp_path, MIXTRAL), *options), *words)


def test_bad_configs(tmp_path: Path) -> None:
    broken = tmp_path / "broken.json"
    broken.write_text("{", encoding="utf-8")
    empty = tmp_path / "empty.gguf"
    empty.write_bytes(b"GGUF")
    for action in ("show", "fit"):
        system = ("--system", "h100-cxl2-ndp")
        check_refusal(run("model", action, tmp_path / "none.json", *system), "none.json: no such file or model")
        check_refusal(run("model", action, "mixtral-8x7", *system), "did you mean 'mixtral-8x7b'?")
        check_refusal(run("model", action, tmp_path, *system), "the folder holds no config.json")
        check_refusal(run("model", action, broken, *system), "broken.json: not valid JSON")
        check_refusal(run("model", action, "a\0b", *system))
        unknown = saved(tmp_path, MIXTRAL | {"model_type": "mixtrall"})
        check_refusal(run("model", action, unknown, *system), "'model_type' is 'mixtrall'", "close by name")
        lacking = saved(tmp_path, {key: value for key, value in MIXTRAL.items() if key != "hidden_size"})
        check_refusal(run("model", action, lacking, *system), "key 'hidden_size' is missing")
        check_refusal(run("model", action, empty, *system), "empty.gguf")
    check_refusal(run("model", "fit", saved(tmp_path, MIXTRAL)), "required: --system")
    check_refusal(run("model"), "ACTION")


# Published configs, and what the command loads


def test_every_published_config_has_a_card_or_is_refused(shared: Path) -> None:
    cards = 0
    for path in sorted((shared / "configs").glob("*/config.json")):
        answer = run("model", "show", path)
        if answer.code:
            check_refusal(answer, str(path))
            continue
        cards += 1
        assert answer.out.startswith(f"{path.parent.name} (")
        assert not re.search(r"\bnan\b|\binf\b|None|\s-\d", answer.out), path
        data = run("model", "show", path, "--json", "--layers").document
        assert list(data) == [*KEYS, "layers"]
        assert finite(data), path
        assert f"{data['params']['total_params']:,}" in answer.out
        assert len(data["layers"]) == data["shape"]["num_layers"]
    assert cards > 0


def test_nothing_heavy_is_loaded(tmp_path: Path) -> None:
    folder = Path(perfmodel.__file__).resolve().parent.parent
    path = saved(tmp_path, GPT_OSS)
    code = (
        "import sys\n"
        "from perfmodel.cli import main\n"
        f"assert main(['model', 'show', {str(path)!r}, '--layers', '--dtype', 'head=q6_k']) == 0\n"
        f"assert main(['model', 'show', {str(path)!r}, '--json']) == 0\n"
        "assert main(['model', 'families']) == main(['model', 'formats']) == 0\n"
        "heavy = {'numpy', 'pydantic', 'numba', 'scipy', 'torch', 'transformers', 'pandas', 'matplotlib', 'xarray',"
        " 'zarr', 'rich', 'gguf', 'socket'}\n"
        "print('loaded:', sorted(heavy & set(sys.modules)))\n"
        f"assert main(['model', 'fit', {str(path)!r}, '--system', 'h100-cxl2-ndp']) == 0\n"
        "print('loaded:', sorted((heavy - {'numpy', 'pydantic', 'socket'}) & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(folder), "PYTHONIOENCODING": "utf-8"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert [line for line in done.stdout.splitlines() if line.startswith("loaded:")] == ["loaded: []", "loaded: []"]


def test_other_formats_are_given_one_by_one_or_in_a_list(tmp_path: Path) -> None:
    config = saved(tmp_path, MIXTRAL)
    apart = run("model", "show", config, "--dtype", "expert=q4_k", "--dtype", "attention=q8_0", "--json")
    listed = run("model", "show", config, "--dtype", "expert=q4_k,attention=q8_0", "--json")
    assert apart.code == listed.code == 0
    assert apart.out == listed.out
    check_refusal(run("model", "show", config, "--dtype", "shared=q4_k"), "'shared=q4_k'", "stores no shared")


def test_unpacked_weights_are_computed_in_16_bits(tmp_path: Path) -> None:
    packed = MIXTRAL | {"quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"}}
    config = saved(tmp_path, packed, "packed")
    assert "computed in fp8" in run("model", "show", config).out
    for option in (("--kernel-supports", "none"), ("--dtype", "all=q4_k")):
        assert "computed in bfloat16" in run("model", "show", config, *option).out
