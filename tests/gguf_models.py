"""Small models in GGUF files, with the tensors and values that llama.cpp's converters write."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.quants import quant_shape_to_byte_shape

Type = gguf.GGMLQuantizationType
#: Name to shape (outputs first) and type; without ``.weight`` only where the file has none.
Tensors = dict[str, tuple[tuple[int, ...], Type]]
Values = dict[str, Any]

DENSE, EXPERT = Type.Q8_0, Type.Q4_0
HIDDEN, VOCAB = 64, 96


def write(path: Path, arch: str, values: Values, tensors: Mapping[str, tuple[tuple[int, ...], Type]]) -> Path:
    """A file of zeros. Keys of the network come without the architecture's prefix, others with a dot in front."""
    writer = gguf.GGUFWriter(path, arch)
    for key, value in values.items():
        name = key[1:] if key.startswith(".") else f"{arch}.{key}"
        if isinstance(value, list):
            writer.add_array(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        elif isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        else:
            writer.add_uint32(name, value)
    for name, (shape, kind) in tensors.items():
        if kind == Type.F32:
            writer.add_tensor(name, np.zeros(shape, np.float32))
        elif kind == Type.F16:
            writer.add_tensor(name, np.zeros(shape, np.float16))
        else:
            writer.add_tensor(name, np.zeros(quant_shape_to_byte_shape(shape, kind), np.uint8), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tensor_bytes(tensors: Iterable[tuple[tuple[int, ...], Type]]) -> int:
    """Bytes of tensors, from the block sizes of the gguf package."""
    total = 0
    for shape, kind in tensors:
        block, size = gguf.GGML_QUANT_SIZES[kind]
        count = 1
        for side in shape:
            count *= side
        assert count % block == 0
        total += count // block * size
    return total


def ends(tied: bool = False, vocab: int = VOCAB) -> Tensors:
    found: Tensors = {"token_embd.weight": ((vocab, HIDDEN), Type.Q4_0), "output_norm.weight": ((HIDDEN,), Type.F32)}
    return found if tied else found | {"output.weight": ((vocab, HIDDEN), Type.Q8_0)}


def grouped(layer: int, heads: int, kv_heads: int, head: int, *, norms: bool = False, bias: bool = False) -> Tensors:
    at = f"blk.{layer}"
    sizes = {"attn_q": heads * head, "attn_k": kv_heads * head, "attn_v": kv_heads * head}
    found: Tensors = {f"{at}.attn_norm.weight": ((HIDDEN,), Type.F32)}
    for name, size in sizes.items():
        found[f"{at}.{name}.weight"] = ((size, HIDDEN), DENSE)
        if bias:
            found[f"{at}.{name}.bias"] = ((size,), Type.F32)
    found[f"{at}.attn_output.weight"] = ((HIDDEN, heads * head), DENSE)
    if bias:
        found[f"{at}.attn_output.bias"] = ((HIDDEN,), Type.F32)
    if norms:
        found |= {f"{at}.attn_{name}_norm.weight": ((head,), Type.F32) for name in "qk"}
    return found


def latent(layer: int, heads: int, sizes: Mapping[str, int], *, query_rank: int | None, split: bool) -> Tensors:
    at = f"blk.{layer}"
    rank, rope, nope, value = (sizes[name] for name in ("rank", "rope", "nope", "value"))
    query = heads * (nope + rope)
    found: Tensors = {
        f"{at}.attn_norm.weight": ((HIDDEN,), Type.F32),
        f"{at}.attn_kv_a_mqa.weight": ((rank + rope, HIDDEN), DENSE),
        f"{at}.attn_kv_a_norm.weight": ((rank,), Type.F32),
        f"{at}.attn_output.weight": ((HIDDEN, heads * value), DENSE),
    }
    if query_rank is None:
        found[f"{at}.attn_q.weight"] = ((query, HIDDEN), DENSE)
    else:
        found[f"{at}.attn_q_a.weight"] = ((query_rank, HIDDEN), DENSE)
        found[f"{at}.attn_q_a_norm.weight"] = ((query_rank,), Type.F32)
        found[f"{at}.attn_q_b.weight"] = ((query, query_rank), DENSE)
    if split:
        found[f"{at}.attn_k_b.weight"] = ((heads, rank, nope), DENSE)
        found[f"{at}.attn_v_b.weight"] = ((heads, value, rank), DENSE)
    else:
        found[f"{at}.attn_kv_b.weight"] = ((heads * (nope + value), rank), DENSE)
    return found


def dense(layer: int, width: int, ending: str = "", kind: Type = DENSE) -> Tensors:
    at = f"blk.{layer}"
    return {
        f"{at}.ffn_gate{ending}.weight": ((width, HIDDEN), kind),
        f"{at}.ffn_up{ending}.weight": ((width, HIDDEN), kind),
        f"{at}.ffn_down{ending}.weight": ((HIDDEN, width), kind),
    }


def norm(layer: int, name: str = "ffn_norm") -> Tensors:
    return {f"blk.{layer}.{name}.weight": ((HIDDEN,), Type.F32)}


def experts(layer: int, count: int, width: int, kind: Type = EXPERT, down: Type | None = None) -> Tensors:
    at = f"blk.{layer}"
    return {
        f"{at}.ffn_gate_inp.weight": ((count, HIDDEN), Type.F32),
        f"{at}.ffn_gate_exps.weight": ((count, width, HIDDEN), kind),
        f"{at}.ffn_down_exps.weight": ((count, HIDDEN, width), down or kind),
        f"{at}.ffn_up_exps.weight": ((count, width, HIDDEN), kind),
    }


def base(layers: int, heads: int, kv_heads: int, **more: Any) -> Values:
    found: Values = {
        "block_count": layers,
        "context_length": 4096,
        "embedding_length": HIDDEN,
        "feed_forward_length": 128,
        "attention.head_count": heads,
        "attention.head_count_kv": kv_heads,
    }
    return found | {key.replace("__", "."): value for key, value in more.items()}


def mixtral() -> tuple[str, Values, Tensors]:
    tensors = ends()
    for layer in range(3):
        tensors |= grouped(layer, 4, 2, 16) | norm(layer) | experts(layer, 8, 128)
    return "llama", base(3, 4, 2, expert_count=8, expert_used_count=2), tensors


def old_mixtral() -> tuple[str, Values, Tensors]:
    """The same network with a tensor for each expert, as files of early 2024 have it."""
    arch, values, tensors = mixtral()
    found: Tensors = {}
    for name, (shape, kind) in tensors.items():
        if "_exps" in name:
            for expert in range(shape[0]):
                found[name.replace("_exps", f".{expert}")] = (shape[1:], kind)
        else:
            found[name] = (shape, kind)
    return arch, values, found


def qwen3moe() -> tuple[str, Values, Tensors]:
    tensors = ends(tied=True)
    for layer in range(2):
        tensors |= grouped(layer, 4, 2, 32, norms=True) | norm(layer) | experts(layer, 6, 32)
    more = {
        "attention.key_length": 32,
        "attention.value_length": 32,
        "expert_count": 6,
        "expert_used_count": 3,
        "expert_feed_forward_length": 32,
    }
    return "qwen3moe", base(2, 4, 2) | more, tensors


LATENT = {"rank": 64, "rope": 32, "nope": 32, "value": 32}


def deepseek2(*, split: bool = True, query_rank: int | None = 32) -> tuple[str, Values, Tensors]:
    tensors = ends()
    for layer in range(3):
        tensors |= latent(layer, 4, LATENT, query_rank=query_rank, split=split) | norm(layer)
        if layer == 0:
            tensors |= dense(layer, 128)
        else:
            tensors |= experts(layer, 8, 32) | dense(layer, 64, "_shexp")
            tensors[f"blk.{layer}.exp_probs_b.bias"] = ((8,), Type.F32)
    lengths = (64 + 32, 64, 64, 32) if split else (64, 32, 0, 0)
    more = {
        "leading_dense_block_count": 1,
        "attention.kv_lora_rank": 64,
        "attention.key_length": lengths[0],
        "attention.value_length": lengths[1],
        "rope.dimension_count": 32,
        "expert_count": 8,
        "expert_used_count": 2,
        "expert_shared_count": 2,
        "expert_feed_forward_length": 32,
        "expert_group_count": 4,
        "expert_group_used_count": 2,
    }
    if split:
        more |= {"attention.key_length_mla": lengths[2], "attention.value_length_mla": lengths[3]}
    return "deepseek2", base(3, 4, 1 if split else 4) | more, tensors


def gpt_oss() -> tuple[str, Values, Tensors]:
    tensors = ends()
    for layer in range(4):
        at = f"blk.{layer}"
        tensors |= grouped(layer, 4, 2, 32, bias=True) | norm(layer, "post_attention_norm")
        tensors |= experts(layer, 4, 64, Type.MXFP4)
        tensors |= {
            f"{at}.attn_sinks.weight": ((4,), Type.F32),
            f"{at}.ffn_gate_inp.bias": ((4,), Type.F32),
            f"{at}.ffn_gate_exps.bias": ((4, 64), Type.F32),
            f"{at}.ffn_up_exps.bias": ((4, 64), Type.F32),
            f"{at}.ffn_down_exps.bias": ((4, HIDDEN), Type.F32),
        }
    more = {
        "attention.key_length": 32,
        "attention.value_length": 32,
        "attention.sliding_window": 128,
        "expert_count": 4,
        "expert_used_count": 2,
        "expert_feed_forward_length": 64,
    }
    return "gpt-oss", base(4, 4, 2) | more, tensors


def qwen3next() -> tuple[str, Values, Tensors]:
    """Three layers of linear attention with 2 key and 4 value heads of 16, then one of gated attention."""
    tensors = ends()
    for layer in range(4):
        at = f"blk.{layer}"
        tensors |= norm(layer, "post_attention_norm") | experts(layer, 8, 32) | dense(layer, 32, "_shexp")
        tensors[f"{at}.ffn_gate_inp_shexp.weight"] = ((HIDDEN,), Type.F32)
        if layer == 3:
            tensors |= grouped(layer, 4, 2, 32, norms=True)
            tensors[f"{at}.attn_q.weight"] = ((2 * 4 * 32, HIDDEN), DENSE)
        else:
            tensors |= {
                f"{at}.attn_norm.weight": ((HIDDEN,), Type.F32),
                f"{at}.attn_qkv.weight": ((2 * 32 + 64, HIDDEN), DENSE),
                f"{at}.attn_gate.weight": ((64, HIDDEN), DENSE),
                f"{at}.ssm_conv1d.weight": ((2 * 32 + 64, 4), Type.F32),
                f"{at}.ssm_dt.bias": ((4,), Type.F32),
                f"{at}.ssm_a": ((4,), Type.F32),
                f"{at}.ssm_ba.weight": ((8, HIDDEN), DENSE),
                f"{at}.ssm_norm.weight": ((16,), Type.F32),
                f"{at}.ssm_out.weight": ((HIDDEN, 64), DENSE),
            }
    more = {
        "attention.key_length": 32,
        "attention.value_length": 32,
        "expert_count": 8,
        "expert_used_count": 2,
        "ssm.conv_kernel": 4,
        "ssm.state_size": 16,
        "ssm.inner_size": 64,
        "ssm.time_step_rank": 4,
        "ssm.group_count": 2,
    }
    return "qwen3next", base(4, 4, 2) | more, tensors
