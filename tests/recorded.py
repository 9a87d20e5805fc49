"""Small random language models with a trivial tokenizer, for tests of what needs PyTorch and Transformers."""

from pathlib import Path
from typing import Any

LAYERS, EXPERTS, TOP_K, HIDDEN, INNER = 3, 4, 2, 16, 24

_SHARED = {
    "vocab_size": 300,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_experts_per_tok": TOP_K,
    "max_position_embeddings": 1024,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_DEEPSEEK = {
    "intermediate_size": INNER,
    "moe_intermediate_size": INNER,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "n_group": 1,
    "topk_group": 1,
}
#: Options of the config of every family, by its ``model_type``.
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"intermediate_size": INNER, "num_local_experts": EXPERTS},
    "qwen3_moe": {
        "intermediate_size": 40,
        "moe_intermediate_size": INNER,
        "num_experts": EXPERTS,
        "head_dim": 8,
        "mlp_only_layers": [0],
        "norm_topk_prob": True,
    },
    "olmoe": {"intermediate_size": INNER, "num_experts": EXPERTS},
    "qwen2_moe": {
        "intermediate_size": INNER,
        "moe_intermediate_size": INNER,
        "shared_expert_intermediate_size": INNER,
        "num_experts": EXPERTS,
    },
    "phimoe": {"intermediate_size": INNER, "num_local_experts": EXPERTS},
    "granitemoe": {"intermediate_size": INNER, "num_local_experts": EXPERTS},
    "minimax": {"intermediate_size": INNER, "num_local_experts": EXPERTS},
    "hunyuan_v1_moe": {"intermediate_size": INNER, "num_experts": EXPERTS, "moe_topk": TOP_K, "head_dim": 8},
    "deepseek_v2": {**_DEEPSEEK, "n_routed_experts": EXPERTS, "q_lora_rank": None, "topk_method": "greedy"},
    "deepseek_v3": {**_DEEPSEEK, "n_routed_experts": 2 * EXPERTS, "q_lora_rank": 8, "n_group": 2},
    # Experts in every other layer, attention in the others.
    "jamba": {
        "intermediate_size": INNER,
        "num_experts": EXPERTS,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "attn_layer_period": 2,
        "attn_layer_offset": 0,
        "mamba_d_state": 4,
        "mamba_d_conv": 2,
        "use_mamba_kernels": False,
    },
    # Experts that are given their rows alone, sorted before.
    "llama4_text": {"intermediate_size": INNER, "num_local_experts": EXPERTS, "head_dim": 8},
    # Experts with biases, gate and up interleaved; and no experts at all.
    "gpt_oss": {"intermediate_size": INNER, "num_local_experts": EXPERTS, "head_dim": 8},
    "llama": {"intermediate_size": INNER},
}


def make_model(family: str = "mixtral", seed: int = 0) -> Any:
    """A random model with weights in float32."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    options = {key: value for key, value in _SHARED.items() if family != "llama" or key != "num_experts_per_tok"}
    torch.manual_seed(seed)
    config = AutoConfig.for_model(family, **options, **FAMILIES[family])
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def save_model(model: Any, folder: Path) -> Path:
    """A checkpoint folder, with one token a byte."""
    from tokenizers import Tokenizer, decoders
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel

    model.save_pretrained(folder)
    tokenizer = Tokenizer(BPE({letter: i for i, letter in enumerate(sorted(ByteLevel.alphabet()))}, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def write_texts(folder: Path) -> list[Path]:
    """Three files of 150, 41 and 90 tokens."""
    folder.mkdir(exist_ok=True)
    files = []
    for name, size in (("first", 150), ("second", 41), ("third", 90)):
        letters = [chr(97 + (i * i + i // 7 + len(name)) % 26) for i in range(size)]
        files.append(folder / f"{name}.txt")
        files[-1].write_text("".join(letters), encoding="utf-8")
    return files
