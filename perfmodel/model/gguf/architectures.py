"""The architectures whose GGUF files are read, and what the engine knows of them that the files do not say."""

from dataclasses import dataclass

#: Values of ``general.architecture`` whose tensors have the names that llama.cpp gives to decoders.
ARCHITECTURES = (
    "afmoe",
    "apertus",
    "arcee",
    "arctic",
    "bailingmoe",
    "bailingmoe2",
    "chatglm",
    "cohere2",
    "command-r",
    "dbrx",
    "deepseek",
    "deepseek2",
    "deepseek32",
    "dots1",
    "ernie4_5",
    "ernie4_5-moe",
    "exaone",
    "exaone-moe",
    "exaone4",
    "falcon-h1",
    "gemma",
    "gemma2",
    "gemma3",
    "gemma4",
    "glm-dsa",
    "glm4",
    "glm4moe",
    "gpt-oss",
    "granite",
    "granitehybrid",
    "granitemoe",
    "grok",
    "hunyuan-dense",
    "hunyuan-moe",
    "internlm2",
    "jamba",
    "kimi-linear",
    "lfm2",
    "lfm2moe",
    "llama",
    "llama4",
    "mimo2",
    "minimax-m2",
    "mistral3",
    "mistral4",
    "nemotron",
    "nemotron_h",
    "nemotron_h_moe",
    "olmo",
    "olmo2",
    "olmoe",
    "phi2",
    "phi3",
    "phimoe",
    "qwen2",
    "qwen2moe",
    "qwen2vl",
    "qwen3",
    "qwen35",
    "qwen35moe",
    "qwen3moe",
    "qwen3next",
    "qwen3vl",
    "qwen3vlmoe",
    "seed_oss",
    "smallthinker",
    "smollm3",
    "stablelm",
    "starcoder2",
    "step35",
)


@dataclass(frozen=True, slots=True)
class Windows:
    """Which layers have a sliding window where the file does not say.

    period : of so many layers one sees the whole context, and the others have a window. full_first : whether it is the
    first of them; otherwise it is the last. window : the window where the file gives none [token].
    """

    period: int
    full_first: bool = False
    window: int | None = None


#: The patterns that llama.cpp has built in (its ``set_swa_pattern``).
WINDOWS = {
    "afmoe": Windows(4),
    "cohere2": Windows(4),
    "exaone-moe": Windows(4),
    "exaone4": Windows(4),
    "gemma2": Windows(2, window=4096),
    "gemma3": Windows(6),
    "gpt-oss": Windows(2),
    "llama4": Windows(4, window=8192),
    "olmo2": Windows(4),
    "smallthinker": Windows(4, full_first=True),
}

#: Architectures whose files give a window that the engine does not use.
WITHOUT_WINDOWS = frozenset({"phi3"})
