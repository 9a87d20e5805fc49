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
    from tokenizers import Tokenizer
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel

    model.save_pretrained(folder)
    tokenizer = Tokenizer(BPE({letter: i for i, letter in enumerate(sorted(ByteLevel.alphabet()))}, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
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
